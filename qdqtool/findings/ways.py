"""How an engine is built: what allows INT8 and FP16, and how to get a log, for each way that people build.

The table is ``qdqtool/findings/ways.toml``. Findings, ``explain``, ``predict --for`` and the README read it; nothing
else names the flags of another tool.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from qdqtool.errors import QdqtoolError
from qdqtool.reasons.text import Message
from qdqtool.trt.targets import Target, target_named, version_numbers
from qdqtool.types import Cause, Finding, FindingRule, Json, Refusal
from qdqtool.util.records import record
from qdqtool.util.tables import LazyEntries, make_entry, read_sections


@record
class Way:
    """One way to build.

    Attributes:
        name: As ``--for`` takes it.
        title: In a sentence.
        weak: What allows INT8 and FP16 up to TensorRT 10.
        strong: What holds from TensorRT 11 on, where the ONNX types decide.
        log: How to get a verbose log, for ``qdqtool verify``.
        care: What else to know with a Q/DQ model.
        source: Where that is from.
        also: Other names that ``--for`` takes.
        typed: What makes a network of TensorRT 10 strongly typed; empty where ``strong`` holds.
    """

    name: str
    title: str
    weak: str
    strong: str
    log: str
    care: str
    source: str
    also: tuple[str, ...] = ()
    typed: str = ""

    def flags(self, target: str) -> str:
        """What to give the builder for a target."""
        chosen = target_named(target)
        if not chosen.strongly_typed:
            return self.weak
        return (
            self.strong
            if not chosen.trtexec.precision_flags or chosen.is_rtx or not self.typed
            else self.typed
        )

    def as_json(self, target: str) -> Json:
        return {
            "way": self.name,
            "flags": self.flags(target),
            "log": self.log,
            "care": self.care,
            "source": self.source,
        }


WAYS: Mapping[str, Way] = LazyEntries(
    read_sections(Path(__file__).with_name("ways.toml")),
    lambda name, given: make_entry(Way, {**given, "name": name}, name),
)


def way_named(name: str) -> Way:
    """The way of that name.

    Raises:
        QdqtoolError: There is none.
    """
    text = name.strip().lower()
    also = {other: way.name for way in WAYS.values() for other in way.also}
    found = WAYS.get(also.get(text, text))
    if found is None:
        import difflib

        near = difflib.get_close_matches(text, WAYS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise QdqtoolError(
            f"unknown way to build '{name[:40]}'; {hint}choose one of {', '.join(WAYS)}",
            code="unknown-choice",
            parameter="way",
        )
    return found


_JETPACK = ("10.3", "10.7")  # of JetPack 6, which puts trtexec where no shell looks for it


def trtexec_command(target: Target, model: str, *, half: bool = True) -> str:
    """How trtexec of a target's version builds a model, with a log for ``qdqtool verify``.

    From 11 on there are no precision flags, and none are allowed in a strongly typed network; weakly typed ones of 8 to
    10 need ``--int8``, and ``--fp16`` for what is not quantized (release notes of 10.12: both are deprecated, as all of
    weak typing is; 10.15 runs Q/DQ in INT8 without ``--int8``); ``half`` False leaves it out. The
    listing is asked for from 8.2 on.
    """
    words = ["trtexec", f"--onnx={shlex.quote(model)}"]
    if not target.strongly_typed:
        words += ["--int8", "--fp16"] if half else ["--int8"]
    elif target.trtexec.precision_flags:
        words.append("--stronglyTyped")
    words.append("--verbose")
    if target.trtexec.lists_layers:
        words.append("--profilingVerbosity=detailed")
    return " ".join([*words, "> build.log 2>&1"])


def trtexec_remark(target: Target) -> str:
    """What to know of :func:`trtexec_command` for a target; empty where there is nothing."""
    version = version_numbers(target.requested_version) or target.version
    if target.requested_version.startswith(_JETPACK):
        return "on a Jetson: /usr/src/tensorrt/bin/trtexec"
    if (
        not target.strongly_typed
        and version[0] == 10
        and (version[1] >= 12 or not target.requested_version)
    ):
        since = "" if target.requested_version else "10.12 and later: "
        return f"{since}deprecated flags; insert --strongly-typed needs none"
    return ""


def fp16_words(way: str | None) -> tuple[str, str]:
    """What FLAG-FP16 says: the consequence and the fix, in the words of a way, or of the usual ones."""
    if way is not None:
        chosen = WAYS[way]
        return (
            f"what is not quantized runs in FP32 unless {chosen.title} allows FP16 as well.",
            f"{chosen.weak}.",
        )
    return (
        "what is not quantized runs in FP32 unless the builder gets --fp16 as well.",
        f"{WAYS['trtexec'].weak} ... (--for gives them for {', '.join(w for w in WAYS if w != 'trtexec')}).",
    )


class FloatFlag(Refusal):
    """A network whose unquantized part needs the builder's permission to run in FP16."""

    rules = (FindingRule("FLAG-FP16"),)

    def message(self, finding: Finding, cause: Cause) -> Message:
        return fp16_words(finding.way)

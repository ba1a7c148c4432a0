"""Build methods: how each method allows INT8 and FP16, and how it prints a verbose log.

The table ``qdqtool/findings/build_methods.toml`` has the settings of each method. Findings,
``explain``, ``predict --for`` and the README use this table.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from qdqtool.errors import QdqtoolError
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason
from qdqtool.reasons.text import Message
from qdqtool.trt.targets import Target, target_named, version_numbers
from qdqtool.util.json_text import Json
from qdqtool.util.tables import LazyEntries, make_entry, read_sections


class BuildMethod(NamedTuple):
    """Program or interface that builds engines, such as trtexec, with its settings.

    Attributes:
        name: Name for ``--for``.
        title: Name for use in sentences.
        weak: Settings that allow INT8 and FP16 up to TensorRT 10.
        strong: Advice for TensorRT 11 and later, which compute in the types of the ONNX model.
        log: Setting for a verbose log, for ``qdqtool verify``.
        care: Further advice for Q/DQ models.
        source: Source of the entry.
        also: Other names for ``--for``.
        typed: Setting for a strongly typed network of TensorRT 10. If it is empty, `strong`
            applies.
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
        """Return the settings of the build method for a target."""
        version = target_named(target)
        if not version.strongly_typed:
            return self.weak
        if version.trtexec.precision_flags and not version.is_rtx and self.typed:
            return self.typed
        return self.strong

    def as_json(self, target: str) -> Json:
        """Return the fields of the JSON output, with the flags for a target."""
        return {
            "way": self.name,
            "flags": self.flags(target),
            "log": self.log,
            "care": self.care,
            "source": self.source,
        }


BUILD_METHODS: Mapping[str, BuildMethod] = LazyEntries(
    read_sections(Path(__file__).with_name("build_methods.toml")),
    lambda name, fields: make_entry(BuildMethod, {**fields, "name": name}, name),
)


def find_build_method(name: str) -> BuildMethod:
    """Return the build method of a name.

    Raises:
        QdqtoolError: The name is unknown.
    """
    text = name.strip().lower()
    aliases = {alias: method.name for method in BUILD_METHODS.values() for alias in method.also}
    method = BUILD_METHODS.get(aliases.get(text, text))
    if method is not None:
        return method
    import difflib

    similar = difflib.get_close_matches(text, BUILD_METHODS, n=1)
    hint = f"did you mean {similar[0]}? " if similar else ""
    raise QdqtoolError(
        f"`way`: unknown build method '{name[:40]}'; {hint}choose one of "
        f"{', '.join(BUILD_METHODS)}",
        code="unknown-choice",
        parameter="way",
    )


def trtexec_command(
    target: Target,
    model: str,
    *,
    half: bool = True,
    bfloat16: bool = False,
    open_inputs: Mapping[str, Sequence[int]] | None = None,
    input_types: Sequence[Precision] = (),
) -> str:
    """Return the trtexec command that builds a model and writes a log for ``qdqtool verify``.

    Strongly typed networks need no precision flags, and TensorRT 11 has none. Weakly typed networks
    of TensorRT 8 to 10 need ``--int8``, and ``--fp16`` for the layers without Q/DQ. Both flags are
    deprecated since 10.12 (release notes). TensorRT 10.15 runs Q/DQ in INT8 without ``--int8``.
    Since 8.2, trtexec can write the layers of the engine to the log. Without ``--shapes``, it
    builds for a size of 1 in each dynamic dimension. Without ``--inputIOFormats``, it changes INT8
    inputs to FP32 (``sampleEngines.cpp``), whose conversion then remains at run time.

    Args:
        target: The TensorRT version.
        model: Path of the model.
        half: Whether the layers without Q/DQ may run in FP16.
        bfloat16: Whether the model has bfloat16 tensors. A weakly typed network allows them only
            with ``--bf16`` (trtexec 9.0 and later).
        open_inputs: Shapes for which the engine is built, by name of the input; -1 is replaced by
            1.
        input_types: Data types of the network's inputs.
    """
    words = ["trtexec", f"--onnx={shlex.quote(model)}"]
    if not target.strongly_typed:
        words.append("--int8")
        words += ["--bf16"] if bfloat16 else ["--fp16"] if half else []
    elif target.trtexec.precision_flags:
        words.append("--stronglyTyped")
    if open_inputs:
        words.append(shlex.quote(f"--shapes={','.join(map(_format_shape, open_inputs.items()))}"))
    if Precision.INT8 in input_types:
        words.append(f"--inputIOFormats={','.join(f'{t.lower()}:chw' for t in input_types)}")
    words.append("--verbose")
    if target.trtexec.lists_layers:
        words.append("--profilingVerbosity=detailed")
    return " ".join([*words, "> build.log 2>&1"])


def _format_shape(entry: tuple[str, Sequence[int]]) -> str:
    """Return a shape such as ``images:1x3x640x640``; -1 is replaced by 1.

    trtexec requires quotes around a name with separators.
    """
    name, shape = entry
    label = f"'{name}'" if set(name) & set(":,") else name
    return f"{label}:{'x'.join(str(1 if d == -1 else d) for d in shape)}"


def trtexec_advice(target: Target, on_jetson: bool | None = None) -> list[str]:
    """Return advice on the trtexec command of a target.

    Args:
        target: The TensorRT version.
        on_jetson: Whether the named GPU is a Jetson, whose trtexec is not on PATH and whose clock
            is not fixed. None: no GPU is named, so the version decides.
    """
    advice = []
    if target.is_jetpack if on_jetson is None else on_jetson:
        advice.append(
            "on a Jetson: /usr/src/tensorrt/bin/trtexec, after sudo jetson_clocks (otherwise the "
            "clock falls while the GPU is idle)"
        )
    version = version_numbers(target.requested_version)
    if version and not target.strongly_typed and version[0] == 10 and version[1] >= 12:
        advice.append(
            "trtexec warns that --int8 and --fp16 are deprecated. To avoid both flags: "
            "qdqtool insert --strongly-typed, then trtexec --stronglyTyped"
        )
    return advice


_BFLOAT16_FLAGS = {  # by build method; they replace the flags for FP16
    "trtexec": "trtexec --onnx=model.onnx --int8 --bf16",
    "python": "config.set_flag(trt.BuilderFlag.INT8); config.set_flag(trt.BuilderFlag.BF16)",
    "onnxruntime": 'provider options {"trt_int8_enable": True, "trt_bf16_enable": True}',
}


def describe_float_flag(way: str | None, bfloat16: bool = False) -> tuple[str, str]:
    """Return the message and the fix of FLAG-FP16 for a build method.

    Args:
        way: The build method. None: trtexec, with a reference to the other methods.
        bfloat16: Whether the model has bfloat16 tensors.
    """
    if bfloat16:
        flags = _BFLOAT16_FLAGS.get(way or "trtexec", _BFLOAT16_FLAGS["trtexec"])
        return (
            (
                "the model has bfloat16, which needs the builder flag BF16 (TensorRT 9.0 and "
                "later, GPUs of compute capability 8.0 and later)."
            ),
            f"{flags}, or a strongly typed network without flags.",
        )
    if way is not None:
        method = BUILD_METHODS[way]
        return (
            f"Layers that are not quantized run in FP32 unless {method.title} allows FP16 as well.",
            f"{method.weak}.",
        )
    return (
        "Layers that are not quantized run in FP32 unless the builder gets --fp16 as well.",
        "Give trtexec the flags --int8 and --fp16; 'qdqtool predict --for' gives the flags "
        f"of {', '.join(w for w in BUILD_METHODS if w != 'trtexec')}.",
    )


class FloatFlag(Reason):
    """A network whose layers without Q/DQ run in FP16 or BF16 only if a flag allows it."""

    rules = (FindingRule("FLAG-FP16"),)

    bfloat16: bool = False

    def message(self, finding: Finding, cause: Cause) -> Message:
        """Return the message and the fix."""
        return describe_float_flag(finding.way, self.bfloat16)

"""The table of finding codes, from ``qdqtool/findings/codes.toml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqtool.trt.targets import STRONGLY_TYPED, TARGETS, target_before
from qdqtool.types import Evidence, Severity
from qdqtool.util.records import record, replace_fields
from qdqtool.util.tables import LazyEntries, make_entry, read_sections

ALL_TARGETS = tuple(TARGETS)
# What holds on the first TensorRT whose networks are all strongly typed does where they are by choice.
_TYPED = next(t.name for t in TARGETS.values() if t.strongly_typed and not t.is_rtx)


@record
class CodeScope:
    """Where a code holds.

    Attributes:
        targets: Targets (``trt8.5`` ...).
        evidence: How well that is proven there.
        source: Which build or document shows it, in a few words.
        severity: Where it differs from the code's own severity.
    """

    targets: tuple[str, ...]
    evidence: Evidence
    source: str
    severity: Severity | None = None

    def by_target(self) -> list[CodeScope]:
        """The same for what the simulated passes show: on a target it is proven as well as its passes are."""
        found = {t: self.evidence.weaker(TARGETS[t].evidence) for t in self.targets}
        return [
            CodeScope(tuple(t for t in found if found[t] == e), e, self.source, self.severity)
            for e in dict.fromkeys(found.values())
        ]


@record
class Code:
    """A finding code and its long form.

    Attributes:
        code: The code, for instance ``SKIP-FLOAT``.
        title: One line.
        severity: Unless ``holds`` says otherwise for a target.
        cause: What in the model brings it about.
        tensorrt: What TensorRT does with it.
        log: How to see it in a build log; TensorRT's own words where they are known.
        fix: What to change.
        holds: Where it holds, and how well that is proven.
        passes: Whether it comes from the simulated passes, so that the target's evidence limits its own.
        error: TensorRT's own error text, by target prefixes (``trt8``, ``trt10 rtx`` ...), most specific first;
            ``log`` names these in braces where the text stands there.
    """

    code: str
    title: str
    severity: Severity
    cause: str
    tensorrt: str
    log: str
    fix: str
    holds: tuple[CodeScope, ...]
    passes: bool = False
    error: tuple[tuple[str, str], ...] = ()

    def on(self, target: str) -> CodeScope | None:
        """What is known for a target; None where the code does not apply.

        On a target that no code names (a new one) holds what does on the nearest earlier one, proven no better than
        the target's own rules are.
        """
        base = target.removesuffix(STRONGLY_TYPED)
        known = _known_as(base)
        names = {known} if base == target else {known, _TYPED}
        held = next((h for h in self.holds if not names.isdisjoint(h.targets)), None)
        if held is None or known == base:
            return held
        return replace_fields(held, evidence=held.evidence.weaker(TARGETS[base].evidence))

    def severity_on(self, target: str) -> Severity:
        held = self.on(target)
        return held.severity if held is not None and held.severity is not None else self.severity

    def error_text(self, target: str) -> str:
        """TensorRT's own error text on a target; empty where it is not known."""
        return next(
            (
                text
                for prefixes, text in self.error
                if target.startswith(tuple(prefixes.split(" ")))
            ),
            "",
        )


def read_code(name: str, given: dict[str, Any]) -> Code:
    """One entry.

    Raises:
        ValueError: A field is missing, unknown or of another type.
    """
    holds = [make_entry(CodeScope, h, f"{name}.holds") for h in given.get("holds", ())]
    if given.get("passes"):
        holds = [part for h in holds for part in h.by_target()]
    error = tuple(given.get("error", {}).items())
    for targets, text in error:
        given = {**given, "log": given["log"].replace(f"{{{targets}}}", text)}
    return make_entry(Code, {**given, "code": name, "holds": tuple(holds), "error": error}, name)


CODES: Mapping[str, Code] = LazyEntries(
    read_sections(Path(__file__).with_name("codes.toml")), read_code
)


@functools.cache
def _known_as(target: str) -> str:
    """The target whose codes hold on a target: itself where a code names it, else the nearest earlier of its kind."""
    before = target_before(target)
    if before is None or any(
        target in held.targets for code in CODES.values() for held in code.holds
    ):
        return target
    return _known_as(before.name)


def get(code: str) -> Code:
    """The entry of a code.

    Raises:
        KeyError: There is no such code.
    """
    return CODES[code]


def find(text: str) -> Code | None:
    """The entry of a code however it is typed (``skip_float``, ``Skip-Float``); None when there is none."""
    return CODES.get(text.strip().upper().replace("_", "-").replace(" ", "-"))


def hint(text: str) -> str:
    """Where to look for a code that is none: those spelled like it, or the list of all."""
    near = similar(text)
    return f"did you mean {', '.join(near)}?" if near else "see 'qdqtool explain --list'"


_WORDS = 2  # of a code that is not spelled with hyphens


def similar(text: str, count: int = 3) -> list[str]:
    """The codes spelled most like ``text``, the nearest first; none for a sentence."""
    if len(text.split()) > _WORDS:
        return []
    wanted = text.strip().upper().replace("_", "-")
    import difflib

    close = difflib.get_close_matches(wanted, CODES, n=count, cutoff=0.5)
    part = [
        c for c in CODES if wanted and (wanted in c or set(wanted.split("-")) & set(c.split("-")))
    ]
    return list(dict.fromkeys([*close, *part]))[:count]

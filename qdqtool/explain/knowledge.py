"""What is known about one finding code, and on which targets it holds."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.trt.targets import STRONGLY_TYPED
from qdqtool.types import Evidence, Severity

ALL_TARGETS = ("trt8.0", "trt8.4", "trt8.5", "trt8.6", "trt10", "trt11", "rtx1.7")
TRT8 = ("trt8.0", "trt8.4", "trt8.5", "trt8.6")
CLASSIC = (*TRT8, "trt10", "trt11")
WEAK_ONLY = ("FLAG-FP16",)
RTX = ("rtx1.7",)


@dataclass(frozen=True, slots=True)
class Holds:
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


@dataclass(frozen=True, slots=True)
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
        automatic: Whether qdqtool can do it by itself.
        error: TensorRT's own error text, by target prefix (``trt8``, ``trt10`` ...), most specific first.
    """

    code: str
    title: str
    severity: Severity
    cause: str
    tensorrt: str
    log: str
    fix: str
    holds: tuple[Holds, ...]
    automatic: bool = False
    error: tuple[tuple[str, str], ...] = ()

    def on(self, target: str) -> Holds | None:
        """What is known for a target; None where the code does not apply."""
        base = target.removesuffix(STRONGLY_TYPED)
        strong = base != target  # where the file's types decide, what holds on 11 does
        names = (target,) if not strong else () if self.code in WEAK_ONLY else (base, "trt11")
        return next((h for h in self.holds if any(n in h.targets for n in names)), None)

    def severity_on(self, target: str) -> Severity:
        held = self.on(target)
        return held.severity if held is not None and held.severity is not None else self.severity

    def error_text(self, target: str) -> str:
        """TensorRT's own error text on a target; empty where it is not known."""
        return next((text for prefix, text in self.error if target.startswith(prefix)), "")


def seen(targets: tuple[str, ...], source: str, severity: Severity | None = None) -> Holds:
    return Holds(targets, Evidence.SEEN, source, severity)


def documented(targets: tuple[str, ...], source: str, severity: Severity | None = None) -> Holds:
    return Holds(targets, Evidence.DOCUMENTED, source, severity)


def assumed(targets: tuple[str, ...], source: str, severity: Severity | None = None) -> Holds:
    return Holds(targets, Evidence.ASSUMED, source, severity)

"""Fixes by their predictions alone, without running the model."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.fixing.judge import OutputJudge
from qdqtool.fixing.session import FixSession
from qdqtool.fixing.site import FixCriteria
from qdqtool.fixing.speed import SpeedCheck
from qdqtool.ir.graph import Model
from qdqtool.reasons.finding import Finding
from qdqtool.trt.targets import Target


class _LenientJudge(OutputJudge):
    """Accepts all outputs, and runs no model."""

    def accept_if_close(
        self, current: Model, candidate: Model, criteria: FixCriteria, fewer_errors: bool
    ) -> None:
        return None


def rehearse(model: Model, target: Target, speed: SpeedCheck | None = None) -> FixSession:
    """Try all fixes that ``fix`` tries by default, without a comparison of outputs.

    Args:
        model: The model.
        target: TensorRT version.
        speed: Comparison of times, by which slower changes are refused. None: times do not decide.
    """
    judge = _LenientJudge(model, None, 1.0, [])
    session = FixSession(model, target, None, 1.0, judge=judge, speed=speed)
    for _ in session.try_steps():
        pass
    return session


def find_remaining(model: Model, target: Target, promised: Sequence[Finding]) -> list[Finding]:
    """Return the findings that remain after all fixes that ``fix`` tries by default.

    Only the predictions decide which fixes are kept.

    Args:
        model: The model.
        target: TensorRT version.
        promised: Findings in the prediction of the model.
    """
    session = rehearse(model, target)
    left = {(f.code, f.node) for f in session.prediction.findings if f.gains}
    return [f for f in promised if (f.code, f.node) in left]

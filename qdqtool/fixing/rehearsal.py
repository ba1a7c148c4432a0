"""Fixes by their predictions alone, without running the model."""

from __future__ import annotations

from collections.abc import Collection

from qdqtool.fixing.judge import OutputJudge
from qdqtool.fixing.session import FixSession
from qdqtool.fixing.site import FixCriteria
from qdqtool.fixing.speed import SpeedCheck
from qdqtool.ir.graph import Model
from qdqtool.trt.targets import Target


class _LenientJudge(OutputJudge):
    """Accepts all outputs, and runs no model."""

    def accept_if_close(
        self, current: Model, candidate: Model, criteria: FixCriteria, fewer_errors: bool
    ) -> None:
        return None


def rehearse(
    model: Model,
    target: Target,
    speed: SpeedCheck | None = None,
    requested: Collection[str] = (),
) -> FixSession:
    """Try fixes as ``fix`` does, without a comparison of outputs.

    Args:
        model: The model.
        target: TensorRT version.
        speed: Comparison of times, by which slower changes are refused. None: times do not decide.
        requested: Codes of the findings to fix. Empty: all that ``fix`` tries by default.
    """
    judge = _LenientJudge(model, None, 1.0, [])
    session = FixSession(model, target, None, 1.0, requested, judge=judge, speed=speed)
    for _ in session.try_steps():
        pass
    return session

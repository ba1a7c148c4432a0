"""Estimated time on a GPU as a condition for changes."""

from __future__ import annotations

from collections.abc import Collection

from qdqtool.errors import QdqtoolError
from qdqtool.findings import codes
from qdqtool.ir.graph import Model
from qdqtool.reasons.finding import FindingCode
from qdqtool.timing.alternatives import estimate_variant
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.results import TimeEstimate
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note
from qdqtool.util.text import format_ms

TOLERANCE_MS = 5e-5
"""Milliseconds by which a model may be slower without being reported as slower."""
SLOWER = "slower"
"""Code of the note on a change that makes a model slower."""


class SpeedCheck:
    """Comparison of the estimated times of models on one GPU.

    Args:
        time: Estimate of one of the models.
        target: TensorRT version of the estimate.
    """

    def __init__(self, time: TimeEstimate, target: Target) -> None:
        self.time = time
        self._target = target
        self._known: list[tuple[Model, float | None]] = []  # the models compared last

    @classmethod
    def for_gpu(cls, model: Model, target: Target, options: TimingOptions) -> SpeedCheck | None:
        """Return a comparison with the estimate of a model.

        None for a GPU without INT8, or for which no engine of the model can be built.
        """
        checks: list[SpeedCheck] = []

        def add_check(_: Model, __: Prediction, time: TimeEstimate, resolved: Target) -> None:
            if time.gpu.has_int8:
                checks.append(cls(time, resolved))

        _, time = predict_on_gpu(model, target, options, with_insert=False, extend=add_check)
        return checks[0] if checks and time is not None and time.is_supported else None

    def measure_ms(self, model: Model) -> float | None:
        """Return the estimated milliseconds of a model; None if it cannot be simulated."""
        for known, ms in self._known:
            if known is model:
                return ms
        try:
            return estimate_variant(self.time, model, self._target)
        except QdqtoolError:
            return None

    def measure_saving(
        self, model: Model, candidate: Model, fixed: Collection[FindingCode]
    ) -> float | None:
        """Return the milliseconds that changes save.

        None if a change is not to save time, or if a model cannot be simulated.

        Args:
            model: Model without the changes.
            candidate: Model with the changes.
            fixed: Codes of the findings that the changes remove.
        """
        if not all(codes.get(code).saves_time for code in fixed):
            return None
        before, after = self.measure_ms(model), self.measure_ms(candidate)
        self._known = [(model, before), (candidate, after)]
        return None if before is None or after is None else before - after

    def find_slowdown(
        self, model: Model, candidate: Model, fixed: Collection[FindingCode]
    ) -> Note | None:
        """Return a note if changes are to save time, but make the model slower.

        The arguments are those of :meth:`measure_saving`.
        """
        saved_ms = self.measure_saving(model, candidate, fixed)
        if saved_ms is None or saved_ms >= -TOLERANCE_MS:
            return None
        text = (
            f"the estimated time on {self.time.gpu.name} would rise by {format_ms(-saved_ms)} "
            "(`only` applies the change nevertheless)"
        )
        return Note(text, code=SLOWER, ms=-saved_ms)

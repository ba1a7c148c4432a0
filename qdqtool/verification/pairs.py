"""A prediction for TensorRT-RTX compared with one of its builds."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.rtx.predict import status_of
from qdqtool.types import ConvOutcome, Precision, Prediction
from qdqtool.verification.build_model import BuiltModel
from qdqtool.verification.convolutions import BuiltNode


@dataclass(frozen=True)
class Pair:
    """One convolution, predicted and built; ``built`` is None where the plan has no layer for it."""

    predicted: ConvOutcome
    built: BuiltNode | None

    @property
    def same_precision(self) -> bool | None:
        """Whether both multiply in the same type; None where the plan does not say."""
        return None if self.built is None else self.predicted.precision.agrees(self.built.precision)

    @property
    def agrees(self) -> bool | None:
        """Whether both multiply in the same type and write the same; None where the plan does not say."""
        if self.built is None:
            return None
        return (self.predicted.precision.agrees(self.built.precision)
                and (self.predicted.output.agrees(self.built.output) or self.built.output == Precision.UNKNOWN))


def compare(prediction: Prediction, result: BuiltModel) -> list[Pair]:
    """Every predicted convolution with what was built of it, in graph order.

    A convolution that the compiler removed (dead code), folded, or merged with an equal one has no layer of its own.
    """
    rows = {n.index: n for n in result.nodes if n.precision != Precision.UNKNOWN}
    return [Pair(c, rows.get(c.index)) for c in prediction.convolutions]


def status_agrees(prediction: Prediction, result: BuiltModel) -> bool | None:
    """Whether the model was predicted to build, be refused or crash as it did; None when the time was over."""
    return None if result.status == "timeout" else status_of(prediction) == result.status


def verify_rtx(prediction: Prediction, result: BuiltModel) -> list[Pair]:
    """The pairs that part, and those that cannot be judged, left out are those that agree."""
    return [p for p in compare(prediction, result) if p.agrees is not True]

"""A prediction for TensorRT-RTX held against the rows of a build, convolution by convolution."""

from __future__ import annotations

import pytest

from qdqtool.graph import Model
from qdqtool.prediction import predict
from qdqtool.types import Precision
from qdqtool.verification.build_model import BuiltModel
from qdqtool.verification.pairs import compare, status_agrees, verify_rtx
from qdqtool.verification.products import BuiltNode
from tests.builders.models import two_convolutions

MODEL = Model(two_convolutions())
PREDICTED = predict(MODEL, "rtx1.7")
FIRST, SECOND = PREDICTED.convolutions
INT8, FP32, UNKNOWN = Precision.INT8, Precision.FP32, Precision.UNKNOWN


def built(precision: Precision, output: Precision, status: str = "built") -> BuiltModel:
    """The second convolution built as predicted, the first as given."""
    rows = [BuiltNode(FIRST.index, "first", "Conv", precision, output=output),
            BuiltNode(SECOND.index, "second", "Conv", SECOND.precision, output=SECOND.output)]  # fmt: skip
    return BuiltModel("tensorrt-rtx", status, nodes=rows)


@pytest.mark.parametrize(
    ("precision", "output", "same", "agrees"),
    [
        (INT8, FIRST.output, True, True), (INT8, UNKNOWN, True, True), (FP32, FIRST.output, False, False),
        (INT8, FP32 if FIRST.output == INT8 else INT8, True, False), (FP32, UNKNOWN, False, False),
        (UNKNOWN, FIRST.output, None, None),
    ],
)  # fmt: skip
def test_a_pair(precision: Precision, output: Precision, same: bool | None, agrees: bool | None) -> None:
    """Both multiply in one type and write one; a row without a type is a convolution without a layer."""
    assert FIRST.precision == INT8
    result = built(precision, output)
    first, second = compare(PREDICTED, result)
    assert (first.same_precision, first.agrees) == (same, agrees)
    assert (second.same_precision, second.agrees) == (True, True)
    assert [p.predicted.name for p in verify_rtx(PREDICTED, result)] == ([] if agrees else ["first"])


def test_the_outcome_of_the_build() -> None:
    assert status_agrees(PREDICTED, built(INT8, INT8)) is True
    assert status_agrees(PREDICTED, built(INT8, INT8, "refused")) is False
    assert status_agrees(PREDICTED, built(INT8, INT8, "timeout")) is None
    refused = predict(Model(two_convolutions(bad_zero_point=True)), "rtx1.7")
    assert status_agrees(refused, built(INT8, INT8, "refused")) is True

"""Which layers of a listing multiply, and which no prediction speaks of."""

from __future__ import annotations

import pytest

from qdqtool.buildlog.types import BuiltLayer
from qdqtool.verification.mapping import is_aside, product_rank


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("correlation", 0), ("deconv", 1), ("gemm", 2), ("CaskConvolution", 5), ("CudnnGemm", 5), ("MatMul", 5),
     ("MatrixMultiply", 5), ("PointWise", None), ("kgen", None)],
)  # fmt: skip
def test_how_telling_a_layer_is_of_a_product(kind: str, rank: int | None) -> None:
    assert product_rank(BuiltLayer(name="n", type=kind)) == rank
    told = product_rank(BuiltLayer(name="__myl_MulCorrAdd_myl0_1", type=kind))
    assert told == (6 if kind == "kgen" else rank), "generated code tells its steps in its name"


@pytest.mark.parametrize(
    ("kind", "name", "aside"),
    [("Constant", "c", True), ("Myelin", "{ForeignNode[a...b]}", True), ("Myelin", "a", False),
     ("Convolution", "c", False)],
)  # fmt: skip
def test_what_no_prediction_speaks_of(kind: str, name: str, aside: bool) -> None:
    assert is_aside(BuiltLayer(name=name, type=kind)) is aside

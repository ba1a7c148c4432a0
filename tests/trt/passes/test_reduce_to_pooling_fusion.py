"""ReduceToPoolingFusion: resnet18-qat-rtx2000-trt8510, line 2487."""

from __future__ import annotations

import pytest

from qdqtool.trt.network import POOLING, REDUCE
from qdqtool.trt.passes.reduce_to_pooling_fusion import ReduceToPoolingFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize(("op", "pooling"), [("GlobalAveragePool", "AVERAGE"), ("GlobalMaxPool", "MAX")])
def test_global_pooling(op: str, pooling: str) -> None:
    g = Graph()
    found = step(g.model(g.op(op, g.input(1, 3, 4, 4), "GlobalAveragePool_300")), ReduceToPoolingFusion)
    assert found.rows == [
        ("Running", "GlobalAveragePool_300"),
        ("Swap the layer type", "GlobalAveragePool_300", "REDUCE to POOLING"),
    ]
    layer = found.layer("GlobalAveragePool_300")
    assert layer.kind == POOLING
    assert layer.attrs["pooling"] == pooling


def test_reduce_mean_is_left() -> None:
    g = Graph()
    found = step(g.model(g.op("ReduceMean", g.input(1, 3, 4, 4), "m", axes=[2, 3])), ReduceToPoolingFusion)
    assert found.rows == []
    assert found.layer("m").kind == REDUCE

"""ConstantFoldDanglingQDQ: its heading is in both logs, a case is not; what it leaves behind is checked."""

import pytest

from qdqtool.model.operators import LayerKind
from qdqtool.trt.passes.constant_fold_dangling_qdq import ConstantFoldDanglingQDQ
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize("weights", ["qdq", "int8", "tensor"])
def test_weights_of_a_float_convolution(g: Graph, weights: str) -> None:
    """Its input has no pair, so it runs in float and its weights are dequantized at build time."""
    found = step(
        g.model(g.conv(g.input(1, 8, 8, 8), "c", scale=None, weights=weights)),
        ConstantFoldDanglingQDQ,
    )
    kinds = {layer.kind for layer in found.network.layers.values()}
    assert not kinds & {LayerKind.QUANTIZE, LayerKind.DEQUANTIZE}
    producer = found.layer("c").inputs[1].producer
    assert producer is not None and producer.kind == LayerKind.CONSTANT


def test_constants_and_activations(g: Graph) -> None:
    x = g.input(1, 8, 8, 8)
    stored = g.const("w", g.random.integers(-9, 9, (8, 8, 3, 3)).astype("int8"))
    outputs = [
        g.op("Conv", [x, g.dq(stored, f"dq{i}", [0.1] * 8, axis=0)], f"c{i}") for i in range(2)
    ]
    found = step(g.model(*outputs), ConstantFoldDanglingQDQ)
    assert not found.network.of_kind(LayerKind.DEQUANTIZE)
    assert {
        layer.inputs[1].producer.kind
        for layer in map(found.layer, ("c0", "c1"))
        if layer.inputs[1].producer
    } == {LayerKind.CONSTANT}
    g = Graph()
    x = g.op("Softmax", g.input(1, 8), "s")
    found = step(g.model(g.op("Softmax", g.pair(x, "p"), "t")), ConstantFoldDanglingQDQ)
    assert [
        layer.name for layer in found.network.of_kind(LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)
    ] == ["p.Q", "p.DQ"]

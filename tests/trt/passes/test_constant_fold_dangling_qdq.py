import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.constant_fold_dangling_qdq import ConstantFoldDanglingQDQ
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize("weights", ["qdq", "int8", "tensor"])
def test_weights_of_float_convolution_are_dequantized(g: Graph, weights: str) -> None:
    result = run_pass(
        g.model(g.conv(g.input(1, 8, 8, 8), "c", scale=None, weights=weights)),
        ConstantFoldDanglingQDQ,
    )
    kinds = {layer.kind for layer in result.network.layers.values()}
    assert not kinds & {LayerKind.QUANTIZE, LayerKind.DEQUANTIZE}
    assert result.layer("c").inputs[1].producer.kind == LayerKind.CONSTANT


def test_stored_weights_with_two_dqs_are_dequantized_twice(g: Graph) -> None:
    x = g.input(1, 8, 8, 8)
    stored = g.const("w", g.random.integers(-9, 9, (8, 8, 3, 3)).astype("int8"))
    outputs = [
        g.op("Conv", [x, g.dq(stored, f"dq{i}", [0.1] * 8, axis=0)], f"c{i}") for i in range(2)
    ]
    result = run_pass(g.model(*outputs), ConstantFoldDanglingQDQ)
    assert not result.network.layers_of_kind(LayerKind.DEQUANTIZE)
    assert {
        layer.inputs[1].producer.kind
        for layer in map(result.layer, ("c0", "c1"))
        if layer.inputs[1].producer
    } == {LayerKind.CONSTANT}


def test_pair_on_computed_tensor_stays(g: Graph) -> None:
    x = g.op("Softmax", g.input(1, 8), "s")
    result = run_pass(g.model(g.op("Softmax", g.pair(x, "p"), "t")), ConstantFoldDanglingQDQ)
    assert [
        layer.name
        for layer in result.network.layers_of_kind(LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)
    ] == ["p.Q", "p.DQ"]

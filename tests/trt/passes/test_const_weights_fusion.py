import numpy as np
import pytest

from qdqtool.trt.passes.const_weights_fusion import ConstWeightsFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize(
    ("weights", "constant"),
    [
        ("qdq", "c.weight + c.w.Q"),
        ("int8", "c.weight"),
    ],  # TensorRT issue 3385: no Q in the name of int8 initializers
)
def test_weights_are_fused_into_convolution(g: Graph, weights: str, constant: str) -> None:
    result = run_pass(
        g.model(g.conv(g.input(1, 8, 8, 8), "c", weights=weights)), ConstWeightsFusion
    )
    assert result.lines == [("Running", constant), ("Fusing", constant, "c")]
    assert result.has_layer(f"{constant} + c")


def test_shared_weights_are_reported(g: Graph) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    weights = g.weights("w", (8, 8, 3, 3), "qdq")
    first, second = (
        g.op("Conv", [g.pair(x, f"in{i}", s), weights], f"c{i}") for i, s in enumerate((0.1, 0.2))
    )
    result = run_pass(g.model(first, second), ConstWeightsFusion)
    assert result.lines == []
    assert sorted(result.reasons) == [("c0", "weights-shared"), ("c1", "weights-shared")]
    assert result.records[0].convolutions == ("c0", "c1")


def test_weights_of_float_convolution_are_not_fused(g: Graph) -> None:
    # Its input has no DQ, so its weights are dequantized at build time.
    result = run_pass(g.model(g.conv(g.input(1, 8, 8, 8), "c", scale=None)), ConstWeightsFusion)
    assert (result.lines, result.reasons) == ([], [])


def test_quantized_constant_of_int8_add_stays(g: Graph) -> None:
    x = g.pair(g.op("Sigmoid", g.input(1, 8, 4, 4), "s"), "p")
    constant = g.pair(g.const("k", np.linspace(-1, 1, 8 * 16).reshape(1, 8, 4, 4)), "kp")
    result = run_pass(
        g.model(g.op("Neg", g.pair(g.op("Add", [x, constant], "add"), "after"), "n")),
        ConstWeightsFusion,
    )
    assert result.layer("add").int8 and not result.lines and not result.records

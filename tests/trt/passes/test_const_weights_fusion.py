"""ConstWeightsFusion: both complete 8.5 logs; shared weights: NVIDIA/TensorRT issues 2131 and 1864."""

import numpy as np
import pytest

from qdqtool.trt.passes.const_weights_fusion import ConstWeightsFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize(
    ("weights", "constant"),
    [
        ("qdq", "c.weight + c.w.Q"),
        ("int8", "c.weight"),
    ],  # TensorRT issue 3385: no Q in the name of int8 initializers
)
def test_weights_of_one_convolution(g: Graph, weights: str, constant: str) -> None:
    found = step(g.model(g.conv(g.input(1, 8, 8, 8), "c", weights=weights)), ConstWeightsFusion)
    assert found.rows == [("Running", constant), ("Fusing", constant, "c")]
    assert found.has(f"{constant} + c")


def test_weights_that_are_left(g: Graph) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    weights = g.weights("w", (8, 8, 3, 3), "qdq")
    first, second = (
        g.op("Conv", [g.pair(x, f"in{i}", s), weights], f"c{i}") for i, s in enumerate((0.1, 0.2))
    )
    found = step(g.model(first, second), ConstWeightsFusion)
    assert found.rows == []
    assert sorted(found.reasons) == [("c0", "weights-shared"), ("c1", "weights-shared")]
    assert found.refusals[0].convolutions == ("c0", "c1")
    g = Graph()
    # Its input has no DQ, so its weights are dequantized when the engine is built
    found = step(g.model(g.conv(g.input(1, 8, 8, 8), "c", scale=None)), ConstWeightsFusion)
    assert (found.rows, found.reasons) == ([], [])
    g = Graph()
    # An INT8 Add reads a quantized constant: it stays a constant of its own
    x = g.pair(g.op("Sigmoid", g.input(1, 8, 4, 4), "s"), "p")
    constant = g.pair(g.const("k", np.linspace(-1, 1, 8 * 16).reshape(1, 8, 4, 4)), "kp")
    out = g.op("Neg", g.pair(g.op("Add", [x, constant], "add"), "after"), "n")
    found = step(g.model(out), ConstWeightsFusion)
    assert found.layer("add").int8
    assert found.rows == [] and found.refusals == []

"""ConstWeightsQuantizeFusion: one for each quantized weight (yolo 43, resnet18 21); name suffix of TensorRT 8.0."""

import pytest

from qdqtool.trt.passes.const_weights_quantize_fusion import ConstWeightsQuantizeFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("trt8.5", "c.weight + c.w.Q"),
        ("trt8.4", "c.weight + c.w.Q"),
        ("trt8.0", "c.weight + c.w.Q_quantize_scale_node"),  # centernet-resnet34-qat-trt80
    ],
)
def test_float_weights_with_a_pair(g: Graph, target: str, name: str) -> None:
    found = step(
        g.model(g.conv(g.input(1, 3, 8, 8), "c")), ConstWeightsQuantizeFusion, target=target
    )
    assert found.rows == [("Running", "c.weight"), ("Fusing", "c.weight", "c.w.Q")]
    assert found.has(name)


@pytest.mark.parametrize("weights", ["int8", "float"])
def test_weights_without_q(g: Graph, weights: str) -> None:
    """NVIDIA/TensorRT issue 3385: int8 initializers with a DQ only have no Q in the name."""
    found = step(
        g.model(g.conv(g.input(1, 3, 8, 8), "c", weights=weights)), ConstWeightsQuantizeFusion
    )
    assert found.rows == []


def test_constant_of_two_qs(g: Graph) -> None:
    x = g.input(1, 8, 8, 8)
    weights = g.const("w", g.random.normal(0, 1, (8, 8, 3, 3)))
    for i in range(2):
        x = g.op("Conv", [g.pair(x, f"in{i}"), g.pair(weights, f"w{i}")], f"c{i}", pads=[1] * 4)
    found = step(g.model(x), ConstWeightsQuantizeFusion)
    assert sorted(found.rows) == [
        ("Fusing", "w", "w0.Q"),
        ("Fusing", "w", "w1.Q"),
        ("Running", "w"),
        ("Running", "w"),
    ]
    assert found.has("w + w0.Q") and found.has("w + w1.Q")
    g = Graph()
    assert (
        step(
            g.model(g.pair(g.relu(g.input(1, 3, 4, 4), "r"), "p")), ConstWeightsQuantizeFusion
        ).rows
        == []
    )

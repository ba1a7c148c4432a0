import pytest

from qdqtool.trt.passes.const_weights_quantize_fusion import ConstWeightsQuantizeFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("trt8.5", "c.weight + c.w.Q"),
        ("trt8.4", "c.weight + c.w.Q"),
        ("trt8.0", "c.weight + c.w.Q_quantize_scale_node"),  # centernet-resnet34-qat-trt80
    ],
)
def test_float_weights_are_fused_with_their_q(g: Graph, target: str, name: str) -> None:
    result = run_pass(
        g.model(g.conv(g.input(1, 3, 8, 8), "c")), ConstWeightsQuantizeFusion, target=target
    )
    assert result.lines == [("Running", "c.weight"), ("Fusing", "c.weight", "c.w.Q")]
    assert result.has_layer(name)


def test_constant_with_two_qs_is_fused_with_each(g: Graph) -> None:
    x, weights = g.input(1, 8, 8, 8), g.const("w", g.random.normal(0, 1, (8, 8, 3, 3)))
    for i in range(2):
        x = g.op("Conv", [g.pair(x, f"in{i}"), g.pair(weights, f"w{i}")], f"c{i}", pads=[1] * 4)
    result = run_pass(g.model(x), ConstWeightsQuantizeFusion)
    assert sorted(result.lines) == [
        ("Fusing", "w", "w0.Q"),
        ("Fusing", "w", "w1.Q"),
        ("Running", "w"),
        ("Running", "w"),
    ]
    assert result.has_layer("w + w0.Q") and result.has_layer("w + w1.Q")


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.conv(g.input(1, 3, 8, 8), "c", weights="int8")],
            id="int8 weights with a DQ (NVIDIA/TensorRT issue 3385)",
        ),
        pytest.param(
            lambda g: [g.conv(g.input(1, 3, 8, 8), "c", weights="float")], id="float weights"
        ),
        pytest.param(
            lambda g: [g.pair(g.relu(g.input(1, 3, 4, 4), "r"), "p")], id="computed tensor"
        ),
    ],
)
def test_tensor_is_not_fused_with_a_q(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), ConstWeightsQuantizeFusion).lines == []

import pytest

from qdqtool.trt.passes.conv_relu_fusion import ConvReluFusion, DeconvReluFusion
from qdqtool.trt.pipeline import Pass
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


def conv(g: Graph) -> str:
    return g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float")


def deconv(g: Graph) -> str:
    options = {"op": "ConvTranspose", "weights": "float", "scale": None}
    return g.conv(g.input(1, 8, 8, 8), "c", k=2, stride=2, **options)  # type: ignore[arg-type]


FUSED: list[Line] = [("Running", "c"), ("Fusing", "c", "r")]


@pytest.mark.parametrize(
    ("pass_type", "build", "lines"),
    [
        pytest.param(ConvReluFusion, lambda g: [g.relu(conv(g), "r")], FUSED, id="float"),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(g.conv(g.input(1, 3, 8, 8), "c"), "r")],
            FUSED,
            id="quantized",
        ),
        # centerpoint-a100-trt823-fp16, line 1669.
        pytest.param(
            DeconvReluFusion, lambda g: [g.relu(deconv(g), "r")], FUSED, id="deconvolution"
        ),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(deconv(g), "r")],
            [],
            id="deconvolution, of its own pass",
        ),
        pytest.param(
            ConvReluFusion, lambda g: [g.relu(g.bn(conv(g), "bn"), "r")], [], id="batchnorm between"
        ),
        pytest.param(ConvReluFusion, lambda g: [g.op("LeakyRelu", conv(g), "r")], [], id="leaky"),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(conv(g), "r"), g.op("Neg", "c:0", "n")],
            [],
            id="second consumer",
        ),
        pytest.param(
            ConvReluFusion, lambda g: [g.relu(conv(g), "r"), "c:0"], [], id="network output"
        ),
    ],
)
def test_relu_is_fused_into_convolution(
    g: Graph, pass_type: type[Pass], build: Build, lines: list[Line]
) -> None:
    result = run_pass(g.model(*build(g)), pass_type)
    assert result.lines == lines
    assert result.has_layer("c + r") is bool(lines)

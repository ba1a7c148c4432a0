import pytest

from qdqtool.trt.passes.conv_relu_fusion import ConvReluFusion, DeconvReluFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize(
    ("scale", "weights"), [(None, "float"), (0.1, "qdq")], ids=["float", "quantized"]
)
def test_relu_is_fused_into_convolution(g: Graph, scale: float | None, weights: str) -> None:
    out = g.relu(g.conv(g.input(1, 3, 8, 8), "Conv_617", scale=scale, weights=weights), "Relu_618")
    result = run_pass(g.model(out), ConvReluFusion)
    assert result.lines == [("Running", "Conv_617"), ("Fusing", "Conv_617", "Relu_618")]
    assert result.has_layer("Conv_617 + Relu_618")


def test_relu_after_deconvolution_is_fused_by_deconv_pass(g: Graph) -> None:
    # centerpoint-a100-trt823-fp16, line 1669.
    out = g.relu(
        g.conv(
            g.input(1, 8, 8, 8), "d", k=2, stride=2, op="ConvTranspose", weights="float", scale=None
        ),
        "r",
    )
    assert run_pass(g.model(out), DeconvReluFusion).lines == [
        ("Running", "d"),
        ("Fusing", "d", "r"),
    ]
    assert run_pass(g.model(out), ConvReluFusion).lines == []


@pytest.mark.parametrize(
    "case", ["batchnorm-between", "leaky", "second-consumer", "network-output"]
)
def test_relu_is_not_fused(g: Graph, case: str) -> None:
    conv = g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float")
    if case == "batchnorm-between":
        outputs = [g.relu(g.bn(conv, "bn"), "r")]
    elif case == "leaky":
        outputs = [g.op("LeakyRelu", conv, "l")]
    else:
        outputs = [g.relu(conv, "r"), conv if case == "network-output" else g.op("Neg", conv, "n")]
    assert run_pass(g.model(*outputs), ConvReluFusion).lines == []

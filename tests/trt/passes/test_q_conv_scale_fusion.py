from typing import Any

import pytest

from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from qdqtool.trt.passes.q_conv_scale_fusion import QConvScaleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("trt8.5", "Conv_9"),
        ("trt8.4", "Conv_9"),
        ("trt8.0", "Conv_9 + Relu_11"),
    ],  # 8.0: centernet, ``+ Relu_11``
)
def test_batchnorm_with_relu_is_fused(g: Graph, target: str, name: str) -> None:
    out = g.relu(g.bn(g.conv(g.input(1, 3, 8, 8), "Conv_9"), "BatchNormalization_10"), "Relu_11")
    result = run_pass(g.model(out), QConvScaleFusion, target=target)
    assert result.lines == [("Running", "Conv_9"), ("Removing", "BatchNormalization_10 + Relu_11")]
    assert result.layer(name).nodes == ["Conv_9", "BatchNormalization_10", "Relu_11"]


def normalized(g: Graph, **options: Any) -> str:
    return g.bn(g.conv(g.input(1, 3, 8, 8), "c", **options), "bn")


@pytest.mark.parametrize(
    ("build", "lines"),
    [
        pytest.param(
            lambda g: [g.op("LeakyRelu", normalized(g), "l")],
            [("Running", "c"), ("Removing", "bn")],
            id="without a Relu",
        ),
        pytest.param(lambda g: [normalized(g), "c:0"], [], id="second consumer"),
        pytest.param(lambda g: [normalized(g, scale=None)], [], id="no input pair"),
        pytest.param(lambda g: [normalized(g, weights="float")], [], id="no pair of weights"),
        pytest.param(lambda g: [normalized(g, scale=None, weights="float")], [], id="float"),
    ],
)
def test_batchnorm_is_fused_into_quantized_convolution(
    g: Graph, build: Build, lines: list[Line]
) -> None:
    assert run_pass(g.model(*build(g)), QConvScaleFusion).lines == lines


def test_batchnorm_with_computed_bias_is_reported(g: Graph) -> None:
    # yolo-resnet18-orin-trt8502: three downsample branches share a bias through an Identity.
    conv = g.conv(g.input(1, 3, 8, 8), "c", 4)
    bias = g.op("Identity", g.const("shared", [0.0] * 4), "Identity_0")
    inputs = [conv, g.const("w", [1.0] * 4), bias, g.const("m", [0.0] * 4), g.const("v", [1.0] * 4)]
    result = run_pass(g.model(g.op("BatchNormalization", inputs, "bn")), QConvScaleFusion)
    assert (result.lines, result.reasons) == ([], [("c", "batchnorm-not-constant")])
    assert result.records[0].batchnorm == "bn"


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_batchnorm_after_deconvolution_is_reported(g: Graph, target: str) -> None:
    # NVIDIA/TensorRT issue 3412: "no support for Q/DQ + convTranspose + BN fusion yet" (2023).
    conv = g.conv(g.input(1, 8, 8, 8), "d", k=2, stride=2, op="ConvTranspose")
    result = run_pass(g.model(g.bn(conv, "bn")), QConvScaleFusion, target=target)
    assert (result.lines, result.reasons) == ([], [("d", "convtranspose-batchnorm")])


@pytest.mark.parametrize("relu", [True, False])
def test_fused_relu_excludes_second_activation(g: Graph, relu: bool) -> None:
    out = g.bn(g.conv(g.input(1, 3, 8, 8), "c"), "bn")
    out = g.op("LeakyRelu", g.relu(out, "r") if relu else out, "leaky")
    assert run_pass(g.model(out), QConvScaleFusion).layer("c").fusion.has_activation is relu
    assert run_pass(g.model(out), GenericConvActFusion).has_layer("c + PWN(leaky)") is not relu

from collections.abc import Callable

import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.generic_conv_act_fusion import GenericConvActFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass, weakest_evidence


@pytest.mark.parametrize(
    ("build", "fused", "evidence"),
    [
        pytest.param(
            lambda g: [g.op("LeakyRelu", g.bn(g.conv(g.input(1, 3, 8, 8), "Conv"), "bn"), "l")],
            "PWN(l)",
            Evidence.SEEN,
            id="LeakyRelu after BatchNormalization",
        ),
        # mobilenetv2-titanrtx-qat-residual, 17 times.
        pytest.param(
            lambda g: [g.op("Clip", g.conv(g.input(1, 8, 8, 8), "Conv", groups=8), "Clip_13")],
            "PWN(Clip_13)",
            Evidence.SEEN,
            id="Clip after a depthwise convolution",
        ),
        # A YOLOv8n on 10.14.1.
        pytest.param(
            lambda g: [g.silu(g.conv(g.input(1, 8, 8, 8), "Conv"), "act")],
            "PWN(act.s, act.m)",
            Evidence.SEEN,
            id="SiLU",
        ),
        # TensorRT issue 3205 (NVIDIA's own depthwise kernel).
        pytest.param(
            lambda g: [g.silu(g.conv(g.input(1, 8, 8, 8), "Conv", groups=8), "act")],
            "PWN(act.s, act.m)",
            Evidence.ASSUMED,
            id="SiLU after a depthwise convolution",
        ),
    ],
)
def test_activation_is_fused(g: Graph, build: Build, fused: str, evidence: Evidence) -> None:
    result = run_pass(g.model(*build(g)), GenericConvActFusion)
    assert result.lines == [("Running", "Conv"), ("Fusing", "Conv", fused)]
    assert weakest_evidence(result.layer(f"Conv + {fused}")) == evidence


def test_silu_joined_with_residual_add_is_reported(g: Graph) -> None:
    # NVIDIA/TensorRT issue 2204: PWN(PWN(sigmoid, mul), add) has a second input.
    # The first Add is the last node of such a kernel, and writes the residual of the second Add.
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    x = g.add(g.silu(g.conv(x, "Conv"), "act"), x, "Add")
    x = g.add(g.silu(g.conv(x, "Conv2"), "act2"), x, "Add2")
    result, kind = run_pass(g.model(x), GenericConvActFusion), "activation-before-add"
    assert (result.lines, result.reasons) == ([], [("Conv", kind), ("Conv2", kind)])
    assert [(r.add, r.activation, r.residual.node, r.residual.op) for r in result.records] == [
        ("Add", "act.m", "before", "Softmax"),
        ("Add2", "act2.m", "Add", "Add"),
    ]


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        pytest.param(lambda g, x: g.silu(x, "act"), "SiLU", id="silu"),
        pytest.param(lambda g, x: g.op("Swish", x, "act"), "SiLU", id="Swish"),
        pytest.param(lambda g, x: g.op("LeakyRelu", x, "act"), "LeakyRelu", id="leaky"),
        pytest.param(lambda g, x: g.op("HardSwish", x, "act"), "HardSwish", id="hard"),
        pytest.param(lambda g, x: g.op("Exp", g.op("Abs", x, "abs"), "act"), "Exp", id="two"),
        pytest.param(lambda g, x: g.op("Exp", g.silu(x, "inner"), "act"), "Exp", id="more"),
        pytest.param(lambda g, x: g.op("Sigmoid", x, "act"), "Sigmoid", id="gate alone"),
        pytest.param(
            lambda g, x: g.op("Exp", g.op("Sigmoid", x, "s"), "act"), "Exp", id="gate and another"
        ),
        pytest.param(
            lambda g, x: g.op("Mul", [g.op("Sigmoid", x, "s"), g.const("two", [2.0])], "act"),
            "Mul",
            id="gate and a number",
        ),
        pytest.param(
            lambda g, x: g.op("Mul", [x, g.op("Exp", g.op("Abs", x, "abs"), "e")], "act"),
            "Mul",
            id="gate of another",
        ),
    ],
)
def test_activation_name(activation: Callable[[Graph, str], str], name: str) -> None:
    # Only x * gate(x) is SiLU. Other chains have the name of their last operator.
    g = Graph(opset=14)
    x = activation(g, g.conv(g.input(1, 8, 8, 8), "c"))
    result = run_pass(g.model(g.op("Softmax", x, "end")), GenericConvActFusion)
    activations = [
        layer.fusion.activation for layer in result.network.layers_of_kind(LayerKind.CONVOLUTION)
    ]
    assert [a.op for a in activations if a is not None] == [name]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.op("LeakyRelu", g.conv(g.input(1, 3, 8, 8), "c"), "l"), "c:0"],
            id="second consumer",
        ),
        pytest.param(
            lambda g: [g.op("LeakyRelu", g.relu(g.conv(g.input(1, 3, 8, 8), "c"), "r"), "l")],
            id="second activation",
        ),
    ],
)
def test_activation_is_not_fused(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), GenericConvActFusion).lines == []

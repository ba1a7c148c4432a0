import numpy as np
import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.passes.quantize_conv_with_residual_add import QuantizeConvWithResidualAdd
from tests.trt.builder import Graph
from tests.trt.passes.step import end_of, run_pass


def block(
    skip_scale: float | None = 0.07,
    straight: float | None = None,
    next_pair: bool = True,
    conv_first: bool = False,
    activation: str = "",
    weights: str = "qdq",
    fp8: bool = False,
) -> Graph:
    """Build a ResNet block; ``straight`` is the scale of a pair between convolution and Add."""
    g = Graph(opset=19 if fp8 else 13, fp8=fp8)
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    other = x if skip_scale is None else g.pair(x, "skip", skip_scale)
    conv = g.bn(g.conv(x, "Conv_34", weights=weights), "bn")
    if activation:
        conv = g.op(activation, conv, "act")
    if straight is not None:
        conv = g.pair(conv, "straight", straight)
    out = g.relu(
        g.add(conv, other, "Add_42") if conv_first else g.add(other, conv, "Add_42"), "Relu_43"
    )
    g.op("Neg", g.pair(out, "Next", 0.05) if next_pair else out, "end")
    return g


@pytest.mark.parametrize("conv_first", [False, True])
@pytest.mark.parametrize(
    "skip_scale", [0.07, 0.05, 0.1], ids=["own-scale", "output-scale", "input-scale"]
)
def test_quantized_residual_is_fused(skip_scale: float, conv_first: bool) -> None:
    # The residual's Q and the Q after the Add quantize different tensors, so their scales may differ.
    result = run_pass(
        block(skip_scale, conv_first=conv_first).model("end:0"), QuantizeConvWithResidualAdd
    )
    assert result.lines == [
        ("Running", "Conv_34"),
        ("Swapping", "Add_42 + Relu_43", "Next.Q"),
        ("QuantizeDoubleInputNodes: fusing", "Next.Q", "Conv_34"),
        ("QuantizeDoubleInputNodes: fusing", "(Conv_34.in.DQ and Conv_34.w.DQ)", "Conv_34"),
        ("Removing", "Next.Q"),
        ("Removing", "Conv_34.in.DQ"),
        ("Removing", "Conv_34.w.DQ"),
        ("ConstWeightsFusion: Fusing", "Conv_34.weight + Conv_34.w.Q", "Conv_34"),
        (
            "ConvEltwiseSumFusion: Fusing",
            "Conv_34.weight + Conv_34.w.Q + Conv_34",
            "Add_42 + Relu_43",
        ),
        ("Removing", "skip.DQ"),
    ]
    layer = result.layer("Conv_34.weight + Conv_34.w.Q + Conv_34 + Add_42 + Relu_43")
    assert layer.int8 and layer.int8_out
    assert (layer.residual.name, layer.out.name) == ("skip.Q:0", "Next.Q:0")


def test_shared_weights_are_not_fused() -> None:
    g = block()
    data = g.pair("before:0", "other", 0.3)
    other = g.op("Conv", [data, "Conv_34.w.DQ:0"], "Conv_35", kernel_shape=[3, 3])
    result = run_pass(g.model("end:0", other), QuantizeConvWithResidualAdd)
    assert result.layer("Conv_34 + Add_42 + Relu_43").int8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"skip_scale": None},
            "residual-float",
        ),  # yolo-resnet18-orin-trt8502 and resnet18-a100-qat have no such line
        (
            {"next_pair": False},
            "add-output-not-quantized",
        ),  # last block of resnet18-a100-qat-residual
        (
            {"straight": 0.06},
            "residual-both-quantized",
        ),  # yolov8-orin-trt8412-excerpts: the Add is a layer of its own
        ({"weights": "float"}, None),
    ],
)
def test_unfused_residual_is_reported(arguments: dict[str, object], reason: str | None) -> None:
    result = run_pass(block(**arguments).model("end:0"), QuantizeConvWithResidualAdd)  # type: ignore[arg-type]
    assert (result.lines, result.reasons) == ([], [("Conv_34", reason)] if reason else [])
    if reason == "residual-float":
        assert (result.records[0].add, result.records[0].residual.tensor) == (
            "Add_42",
            "before:0",
        )
    elif reason == "add-output-not-quantized":
        assert [(r.node, r.op) for r in result.records[0].consumers] == [("end", "Neg")]


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_activation_before_add_is_reported(target: str) -> None:
    result = run_pass(
        block(activation="LeakyRelu").model("end:0"), QuantizeConvWithResidualAdd, target=target
    )
    assert not result.lines and ("Conv_34", "activation-before-add") in result.reasons


@pytest.mark.parametrize(
    ("activation", "output", "evidence"),
    [("Relu", Precision.FLOAT, Evidence.ASSUMED), ("", Precision.INT8, Evidence.SEEN)],
)
def test_relu_before_add_keeps_output_float_by_assumption(
    g: Graph, activation: str, output: Precision, evidence: Evidence
) -> None:
    # No log shows a quantized convolution with its own Relu before a residual Add.
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0"), "r0")
    y = g.conv(x, "c1")
    y = g.relu(y, "r1") if activation else y
    g.conv(g.add(y, g.pair(x, "skip"), "add"), "c2")
    outcome = predict(g.model("c2:0"), "trt8.5").convolution("c1")
    assert (outcome.output, outcome.evidence) == (output, evidence)


def test_add_of_constant_is_not_a_residual(g: Graph) -> None:
    conv = g.conv(g.input(1, 8, 8, 8), "c")
    out = g.op("Neg", g.pair(g.op("Add", [conv, g.const("k", [[[[1.0]]]])], "add"), "p"), "n")
    assert run_pass(g.model(out), QuantizeConvWithResidualAdd).reasons == []


@pytest.mark.parametrize("op", ["Mul", "Sub", "Max", "MatMul"])
def test_only_add_has_a_residual(g: Graph, op: str) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    joined = g.op(op, [g.conv(x, "c"), g.pair(x, "skip", 0.07)], "joined")
    result = run_pass(
        g.model(g.op("Neg", g.pair(joined, "Next", 0.05), "end")), QuantizeConvWithResidualAdd
    )
    assert not result.lines and not [r for r in result.reasons if r[0] == "c"]


def test_residual_of_fp8_is_fused() -> None:
    layer = run_pass(block(fp8=True).model("end:0"), QuantizeConvWithResidualAdd, "trt10").layer(
        "Conv_34.weight + Conv_34.w.Q + Conv_34 + Add_42 + Relu_43"
    )
    assert layer.int8_out and layer.quantized_type == Precision.FP8


def test_residual_of_another_type_is_not_fused() -> None:
    g = block(fp8=True)
    g.initializers = [t for t in g.initializers if not t.name.startswith("skip.")]
    for name in ("skip.Q", "skip.DQ"):
        g.parameters(name, 0.07, 0, np.int8)
    assert not run_pass(g.model("end:0"), QuantizeConvWithResidualAdd, "trt10").lines


GRAPHS = {"QuantizeConvWithResidualAdd/fp8": (end_of(block(fp8=True)), "trt10")}

from typing import Any, TypeVar

import numpy as np
import onnx
import pytest

from qdqtool.evidence import Evidence
from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Model
from qdqtool.prediction import collect_findings, predict
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.outputs import ReduceNotPooling, UnfusableOutputScale
from qdqtool.reasons.residuals import ResidualFloat
from qdqtool.reasons.scales import ConcatScales
from qdqtool.reasons.tensors import ConsumerKind
from qdqtool.reasons.text import advise_common_scale
from tests.findings.graphs import GRAPHS, concat, outcome, split, transposed_3d
from tests.growth_factor import LINEAR, growth_factor
from tests.trt.builder import Graph

R = TypeVar("R")


def cause(finding: Finding) -> Any:
    return finding.causes[0].reason


def reasons(finding: Finding) -> list[Any]:
    return [reason for c in finding.causes for reason in (c.reason, *c.also)]


def cause_of(kind: type[R], finding: Finding) -> R:
    return next(reason for reason in reasons(finding) if isinstance(reason, kind))


def names(finding: Finding) -> set[str]:
    return {name for reason in reasons(finding) for name in reason.names()}


def quantized_reader(g: Graph, x: str, name: str = "next", scale: float = 0.05) -> str:
    return g.conv(x, name, 16, scale=scale)


def residual(
    skip: str = "float",
    conv_side: bool = False,
    behind: bool = True,
    activation: bool = False,
    relu: bool = True,
    channels: int = 16,
) -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.conv(g.input(1, channels, 16, 16), "c0", 16), "r0")
    data = g.pair(x, "skip" if skip == "shared" else "c1.in", 0.07)
    y = g.relu(g.conv(data, "c1", 16, scale=None), "r1")
    y = g.conv(y, "c2", 16, scale=0.06)
    y = g.silu(y, "s2") if activation else y
    other = {"float": x, "own": None, "shared": data}[skip]
    other = g.pair(x, "res", 0.07) if other is None else other
    y = g.pair(y, "side", 0.08) if conv_side else y
    y = g.add(y, other, "sum")
    y = g.relu(y, "r2") if relu else y
    return g.model(quantized_reader(g, y) if behind else y)


def test_float_residual_is_reported_with_its_conversions() -> None:
    prediction, findings = outcome(residual("float"))
    finding = findings["SKIP-FLOAT"]
    reason = cause_of(ResidualFloat, finding)
    assert finding.node == "sum" and "c2" in finding.convolutions
    assert (reason.node, reason.add, reason.elements.shape) == ("c2", "sum", "16x16x16")
    assert [(q.node, round(q.scale, 6)) for q in reason.quantizers] == [("c1.in.Q", 0.07)]
    assert prediction.convolution("c2").findings[0] == finding.id
    conversions = {f.node: f for f in prediction.findings if f.code == "CONVERSION"}
    assert conversions.keys() == {"c1.in.Q", "next.in.Q"}
    assert all(("SKIP-FLOAT", "sum") in f.causes[0].see for f in conversions.values())


def test_residual_after_activation_has_no_quantized_side() -> None:
    assert (
        "ADD-BOTH" not in outcome(residual("own", conv_side=True, activation=True, relu=False))[1]
    )


def test_add_without_q_after_it_is_reported() -> None:
    prediction, findings = outcome(residual("own", behind=False))
    finding = findings["ADD-OUT-FLOAT"]
    assert "res.DQ" in names(finding)
    assert {r.kind for r in cause(finding).consumers} == {ConsumerKind.OUTPUT}
    see = [f.causes[0].see for f in prediction.findings if f.node == "res.DQ"]
    assert any(("ADD-OUT-FLOAT", finding.node) in others for others in see)


@pytest.mark.parametrize("skip", ["own", "shared"])
def test_quantized_residual_has_no_finding(skip: str) -> None:
    prediction, findings = outcome(residual(skip))
    assert findings.keys().isdisjoint({"SKIP-FLOAT", "ADD-BOTH", "ADD-OUT-FLOAT"})
    assert prediction.convolution("c2").int8_in_int8_out


def test_float_network_output_is_a_note(g: Graph) -> None:
    finding = outcome(g.model(g.conv(g.input(1, 16, 16, 16), "c0", 16)))[1]["OUT-FLOAT"]
    assert finding.severity == Severity.INFO
    assert [r.kind for r in cause(finding).consumers] == [ConsumerKind.OUTPUT]


@pytest.mark.parametrize("gate", [False, True])
def test_pair_inside_silu_is_reported(g: Graph, gate: bool) -> None:
    y = g.conv(g.input(1, 16, 16, 16), "c0", 16)
    inside = y if gate else g.pair(y, "in1", 0.1)
    s = g.op("Sigmoid", inside, "sig")
    m = g.op("Mul", [inside, g.pair(s, "gate", 0.008) if gate else s], "mul")
    finding = outcome(g.model(quantized_reader(g, m)))[1]["SILU-INNER-Q"]
    assert (finding.node, finding.convolutions) == ("gate.Q" if gate else "in1.Q", ["c0"])
    assert finding.values == 16 * 16 * 16


@pytest.mark.parametrize(("weights", "code"), [("float", "NOT-QUANTIZED"), ("qdq", "IN-FLOAT")])
def test_convolution_of_a_float_input_is_reported(g: Graph, weights: str, code: str) -> None:
    prediction, findings = outcome(
        g.model(g.conv(g.input(1, 16, 16, 16), "c", 16, scale=None, weights=weights))
    )
    reason = cause(findings[code])
    assert reason.weights_quantized == (weights == "qdq")
    assert weights == "float" or reason.dq == ""
    assert findings[code].id in prediction.convolution("c").findings


@pytest.mark.parametrize("own", [False, True])
def test_dq_shared_by_matrix_products_is_reported(g: Graph, own: bool) -> None:
    first = g.pair(g.op("Flatten", g.conv(g.input(1, 16, 1, 1), "c", 4), "f"), "p", 0.05)
    products = {"one": first, "two": g.dq(g.nodes[-1].input[0], "own.DQ", 0.05) if own else first}
    for name, data in products.items():
        weight = g.pair(g.const(f"{name}.w", np.ones((4, 3), np.float32)), f"{name}.w", 0.01)
        products[name] = g.op("Gemm", [data, weight], name)
    prediction, _ = outcome(g.model(*products.values()))
    blocked = {f.node: f for f in prediction.findings if f.code == "IN-BLOCKED"}
    precisions = {prediction.convolution(name).precision for name in products}
    assert precisions == {"INT8" if own else "FLOAT"}
    assert blocked.keys() == (set() if own else products.keys())
    assert all("p.DQ" in names(f) for f in blocked.values())


@pytest.mark.parametrize(
    "model",
    [
        residual("float"),
        residual("own", behind=False),
        concat((0.02, 0.03, 0.04), 0.04),
        split(0.1, 0.2),
    ],
    ids=["residual-float", "residual-own", "concat", "split"],
)
def test_float_convolutions_have_findings(model: onnx.ModelProto) -> None:
    for conv in predict(model, "trt8.5").convolutions:
        assert conv.int8_in_int8_out or conv.findings


def test_findings_are_numbered_and_ordered_by_severity() -> None:
    findings = predict(residual("float"), "trt8.5").findings
    assert [f.id for f in findings] == list(range(len(findings)))
    ranks = [(Severity.ERROR, Severity.WARNING, Severity.INFO).index(f.severity) for f in findings]
    assert ranks == sorted(ranks)


def test_tensorrt_rtx_has_no_findings_of_trt8() -> None:
    codes = {"SKIP-FLOAT", "CONVERSION", "OUT-FLOAT", "INPUT-CONVERSION"}
    assert codes.isdisjoint(outcome(residual("float"), "rtx1.7")[1])


def test_advise_keeps_findings_of_the_rtx_simulation(g: Graph) -> None:
    model = Model(
        g.model(g.conv(g.relu(g.conv(g.input(1, 3, 8, 8), "c0", 8), "r"), "c1", 8, scale=None))
    )
    prediction = predict(model, "rtx1.7")
    simulated = {(f.code, f.node) for f in prediction.findings if f.code.startswith("IN-")}
    prediction.findings = collect_findings(model, prediction)
    findings = {(f.code, f.node) for f in prediction.findings}
    assert simulated and simulated <= findings and "FLOAT-FP32" in {code for code, _ in findings}
    assert [f.id for f in prediction.findings] == list(range(len(prediction.findings)))
    assert prediction.convolution("c1").findings


def test_float_residual_whose_sum_stays_float_names_its_consumers(g: Graph) -> None:
    """Q/DQ on the residual of this block would only add a DQ."""
    x = g.conv(g.input(1, 16, 16, 16), "c0", 16)
    y = g.add(g.conv(g.relu(g.bn(x, "b0"), "r0"), "c1", 16), x, "sum")
    g.conv(g.relu(g.bn(y, "b1"), "r1"), "c2", 16)
    finding = outcome(g.model("c2:0"))[1]["SKIP-FLOAT"]
    (reader,) = cause_of(ResidualFloat, finding).consumers
    assert (finding.node, reader.node, reader.kind) == ("sum", "b1", ConsumerKind.OP)
    readers = cause_of(ResidualFloat, outcome(residual())[1]["SKIP-FLOAT"]).consumers
    assert {r.kind for r in readers} == {ConsumerKind.Q}


@pytest.mark.parametrize("keepdims", [0, 1])
def test_reduce_mean_is_a_pooling_only_with_keepdims(g: Graph, keepdims: int) -> None:
    x = g.pair(g.conv(g.input(1, 16, 8, 8), "c0", 16), "gap")
    x = g.op("ReduceMean", x, "mean", axes=[2, 3], keepdims=keepdims)
    x = g.op("Flatten", x, "flat") if keepdims else x
    prediction, findings = outcome(g.model(g.gemm(x, "fc", 16)))
    assert prediction.conversions == (1 if keepdims else 3)
    causes = [type(cause(findings[code])) for code in findings if code == "POOL-FLOAT"]
    assert causes == ([] if keepdims else [ReduceNotPooling])


@pytest.mark.parametrize("quantized", [True, False])
def test_reduce_mean_advice_names_only_an_existing_pair(g: Graph, quantized: bool) -> None:
    x = g.conv(g.input(1, 16, 8, 8), "c0", 16)
    x = g.op("ReduceMean", g.pair(x, "gap") if quantized else x, "mean", axes=[2, 3], keepdims=0)
    finding = outcome(g.model(g.gemm(x, "fc", 16)))[1]["POOL-FLOAT"]
    assert "GlobalAveragePool" in finding.fix
    assert ("remove the Q/DQ pair" in finding.fix) == quantized


@pytest.mark.parametrize("name", ["", "same"])
def test_nodes_without_names_of_their_own_have_no_conversions(g: Graph, name: str) -> None:
    g.conv(g.conv(g.input(1, 16, 8, 8), "c0", 16), "c1", 16)
    for node in g.nodes:
        node.name = name
    _, findings = outcome(g.model("c1:0"))
    assert "CONVERSION" not in findings and cause(findings["INPUT-CONVERSION"]).tensor == "x"


@pytest.mark.parametrize("quantized", [False, True])
def test_layer_norm_needs_a_pair_for_int8_before_it(quantized: bool) -> None:
    """NVIDIA's quantizer puts the pair between convolution and LayerNorm, after a Transpose."""
    g = Graph(opset=17)
    x = g.op("Transpose", g.conv(g.input(1, 32, 8, 8), "c0", 32), "t", perm=[0, 2, 3, 1])
    x = g.pair(x, "norm") if quantized else x
    x = g.op("LayerNormalization", [x, g.const("gamma", np.ones(32))], "ln")
    prediction, findings = outcome(g.model(x))
    assert prediction.convolution("c0").int8_in_int8_out is quantized
    assert ("OUT-FLOAT" in findings) is not quantized
    if not quantized:
        assert [r.node for r in cause(findings["OUT-FLOAT"]).consumers] == ["ln"]


def test_finding_of_many_convolutions_takes_linear_time() -> None:
    def report_outputs(count: int) -> FindingReport:
        report = FindingReport("trt8.5")
        for i in range(count):
            report.add(UnfusableOutputScale("Pass", "one", "q", False), convolutions=[f"conv{i}"])
        assert all(report.find_node("OUT-FLOAT", f"conv{i}") == "one" for i in range(count))
        assert report.find_node("W-NO-DQ", "conv0") is None
        return report

    assert growth_factor(report_outputs, LINEAR) <= LINEAR
    (finding,) = report_outputs(100).findings
    assert finding.convolutions == [f"conv{i}" for i in range(100)]


@pytest.mark.parametrize(
    ("scales", "cost"),
    [
        ((0.02, 0.05), " (the smallest range loses 1.3 bits)"),  # log2(2.5)
        ((0.05, 0.2, 0.1), " (the smallest range loses 2.0 bits)"),
        ((0.049, 0.05), " (the smallest range loses less than 0.1 bit)"),  # 0.03 bits
        ((0.05, 0.05), ""),
    ],
)
def test_advice_on_a_common_scale_states_its_cost(scales: tuple[float, ...], cost: str) -> None:
    assert advise_common_scale(scales) == f"Use one scale for all, {max(scales)}{cost}."


def test_consumers_with_different_scales_are_reported(g: Graph) -> None:
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    ends = g.conv(x, "a", 16, scale=0.02), g.conv(x, "b", 16, scale=0.05)
    prediction, findings = outcome(g.model(*ends))
    scales = {r.node: r.scale for r in cause(findings["SIBLING-SCALE"]).consumers}
    assert scales == pytest.approx({"a.in.Q": 0.02, "b.in.Q": 0.05})
    assert prediction.conversions == 3  # of the input and of each consumer


def attention(consumer: str, between: str | None) -> onnx.ModelProto:
    g = Graph()
    x = g.op("Softmax", g.input(1, 4, 16, 16), "soft", axis=-1)
    if between == "Reshape":
        x = g.reshape(x, "between", 4, 1, 16, 16)
    elif between is not None:
        x = g.op(between, x, "between")
    data = g.pair(x, "p")
    if consumer == "Conv":
        return g.model(g.conv(data, "c", 16, scale=None))
    other = g.const("w", np.ones((16, 4), np.float32))
    other = g.input(1, 4, 16, 32, name="v") if consumer == "MatMul" else other
    return g.model(g.op("MatMul", [data, g.pair(other, "other")], "m"))


@pytest.mark.parametrize(
    ("consumer", "between", "assumed"),
    [
        ("MatMul", None, True),
        ("MatMul", "Reshape", True),
        ("MatMul", "Neg", False),
        ("MatMul of a constant", None, False),
        ("Conv", None, False),
    ],
)
def test_q_after_softmax_of_an_attention_is_assumed(
    consumer: str, between: str | None, assumed: bool
) -> None:
    """NVIDIA's guide shows a kernel with the whole attention; no recorded build has it."""
    prediction, _ = outcome(attention(consumer, between))
    finding = next(f for f in prediction.findings if (f.code, f.node) == ("CONVERSION", "p.Q"))
    assert cause(finding).attention is assumed
    assert finding.evidence == (Evidence.ASSUMED if assumed else Evidence.SEEN)
    assert (prediction.convolutions[-1].evidence == Evidence.ASSUMED) is assumed


@pytest.mark.parametrize(
    ("axes", "activated", "quantized", "int8"),
    [
        (3, False, False, False),
        (3, True, False, False),
        (3, False, True, False),
        (3, True, True, True),
        (2, False, False, True),
        (2, True, True, True),
    ],
)
def test_3d_conv_transpose_is_int8_only_between_pairs_with_activation(
    axes: int, activated: bool, quantized: bool, int8: bool
) -> None:
    """NVIDIA documents this pattern; no build shows it."""
    prediction, findings = outcome(transposed_3d(activated, quantized, axes), "trt8.6")
    conv = prediction.convolution("up")
    assert conv.is_int8 is int8 and conv.int8_in_int8_out is (int8 and quantized)
    assert ("CT3D-FLOAT" in findings) is (axes == 3)
    if axes == 3:
        assert "QuantizeDoubleInputNodes/deconvolution-3d" in conv.cases
        assert conv.evidence == (Evidence.DOCUMENTED if int8 else Evidence.ASSUMED)


@pytest.mark.parametrize("target", ["trt10", "10.13", "trt11"])
def test_3d_conv_transpose_is_float_on_10(target: str) -> None:
    """A user's engines of 10.13 also show the pattern with an activation."""
    prediction, findings = outcome(transposed_3d(True, True, 3), target)
    assert not prediction.convolution("up").is_int8 and "CT3D-FLOAT" in findings
    assert outcome(transposed_3d(True, True, 2), target)[0].convolution("up").is_int8


@pytest.mark.parametrize(
    ("target", "int8", "severity"),
    [
        ("trt8.6", True, None),
        ("trt10", False, Severity.WARNING),
        ("trt11", False, Severity.ERROR),
    ],
)
def test_scales_of_two_float_types_are_reported(
    target: str, int8: bool, severity: Severity | None
) -> None:
    """A DQ writes the type of its scale. Before TensorRT 10, the float16 scale is reported."""
    prediction, findings = outcome(GRAPHS["float-types"](), target)
    conv = prediction.convolution("c")
    assert conv.is_int8 is int8
    if severity is None:
        assert "SCALE-FP16" in findings and "FLOAT-MIXED" not in findings
        return
    finding = findings["FLOAT-MIXED"]
    assert finding.severity == severity and finding.convolutions == ["c"]
    assert cause(finding).floats == ("FP32", "FP16") and conv.evidence == Evidence.ASSUMED


@pytest.mark.parametrize(
    ("weights", "int8"), [("float16", True), ("float32", False), ("cast", True)]
)
def test_cast_after_dq_decides_the_float_type(weights: str, int8: bool) -> None:
    """The data is float16 after a Cast: weights have to be float16, by their scale or by a Cast."""
    g = Graph(opset=19)
    x = g.op("Cast", g.pair(g.input(1, 16, 8, 8), "in"), "cast", to=10)
    kind = np.float16 if weights == "float16" else np.float32
    scale, zero = g.const("scale", 0.1, kind), g.const("zero", np.int8(0))
    w = g.op("QuantizeLinear", [g.const("w", np.ones((16, 16, 1, 1)), kind), scale, zero], "wq.Q")
    w = g.op("DequantizeLinear", [w, scale, zero], "wq.DQ")
    w = g.op("Cast", w, "weights", to=10) if weights == "cast" else w
    prediction, findings = outcome(g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1])), "trt11")
    assert prediction.convolution("c").is_int8 is int8 and ("FLOAT-MIXED" in findings) is not int8


@pytest.mark.parametrize("weights", [np.float16, np.float32])
@pytest.mark.parametrize("data", [np.float16, np.float32])
def test_float_inputs_of_two_types_are_reported(data: type, weights: type) -> None:
    g = Graph(opset=19, half=data == np.float16)
    x, w = g.input(1, 16, 8, 8), g.const("w", np.ones((16, 16, 1, 1)), weights)
    _, findings = outcome(g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1])), "trt11")
    assert ("FLOAT-MIXED" in findings) is (data != weights)


@pytest.mark.parametrize(("outer", "reported"), [(0.05, False), (0.02, True)])
def test_pooling_with_two_scales_is_reported(g: Graph, outer: float, reported: bool) -> None:
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    a = g.conv(x, "direct", 16, scale=outer)
    _, findings = outcome(g.model(a, g.conv(g.pool(x, "pool"), "pooled", 16, scale=0.05)))
    assert ("POOL-SCALE" in findings) is reported
    if reported:
        readers = {r.node: r.scale for r in cause(findings["POOL-SCALE"]).consumers}
        assert readers == pytest.approx({"direct.in.Q": 0.02, "pooled.in.Q": 0.05})


def test_concat_with_different_scales_is_reported() -> None:
    finding = outcome(concat((0.0213, 0.0213, 0.048), 0.048))[1]["CONCAT-SCALE"]
    reason = cause_of(ConcatScales, finding)
    assert finding.node == "join" and set(finding.convolutions) & {"c0", "c1", "c2"} == {"c0", "c1"}
    assert reason.parts == pytest.approx((0.0213, 0.0213, 0.048))
    assert reason.output_scale == pytest.approx(0.048)
    prediction, findings = outcome(concat((0.048, 0.048, 0.048), 0.048))
    assert "CONCAT-SCALE" not in findings and prediction.conversions == 1


@pytest.mark.parametrize(("outer", "nodes"), [(0.05, ["cut"]), (0.02, [])])
def test_split_with_different_scales_is_reported(outer: float, nodes: list[str]) -> None:
    assert [
        f.node for f in predict(split(0.02, outer), "trt8.5").findings if f.code == "SPLIT-SCALE"
    ] == nodes


@pytest.mark.parametrize(("mode", "reported"), [("constant", True), ("reflect", False)])
def test_pad_before_convolution_is_reported_if_constant(
    g: Graph, mode: str, reported: bool
) -> None:
    """No convolution absorbs a pad that mirrors the image."""
    pads = g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    y = g.op("Pad", [g.relu(g.input(1, 16, 8, 8), "r"), pads], "pad", mode=mode)
    assert ("PAD-SPLIT" in outcome(g.model(g.conv(y, "c", 16)))[1]) == reported


def test_concat_of_pairs_names_the_scale_after_it(g: Graph) -> None:
    a = g.pair(g.pool(g.conv(g.input(1, 16, 8, 8), "c0", 16), "p", k=3, stride=1), "a", 0.05)
    model = g.model(
        g.conv(g.concat([a, g.pair(g.conv("x", "c1", 16), "b", 0.1)], "cat"), "c2", 16, scale=0.2)
    )
    reason = cause_of(ConcatScales, outcome(model)[1]["CONCAT-SCALE"])
    scales = [*reason.parts, reason.output_scale]
    assert (min(scales), reason.output_scale) == pytest.approx((0.05, 0.2))


def test_concat_names_the_quantizers_of_its_pairs(g: Graph) -> None:
    low = g.pair(g.input(1, 16, 8, 8), "low", 0.045)
    joined = g.concat([g.resize(low, "up"), g.input(1, 16, 16, 16, name="y")], "join")
    _, findings = outcome(g.model(g.pair(joined, "joined", 0.06), low))
    assert {"join", "low.Q", "joined.Q"} <= names(findings["CONCAT-SCALE"])

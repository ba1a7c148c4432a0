from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.comparison.text import summarize_comparison
from qdqtool.findings.lint.api import run
from qdqtool.findings.report import FindingReport
from qdqtool.formats.verdicts import describe_rejection
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import record_tuned_head
from qdqtool.ir.modelfile import load
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.tensors import PathStep
from qdqtool.reasons.weights import WeightsNotConstant
from qdqtool.trt.outcome import simulate_without_alternatives
from qdqtool.trt.targets import target_named
from tests.findings.graphs import GRAPHS, ones, weighted
from tests.insertion.test_placement import make_weights_sparse
from tests.trt.builder import Graph


def check(model: Model, target: str) -> list[Finding]:
    report, chosen = FindingReport(target), target_named(target)
    predicted = () if chosen.is_rtx else simulate_without_alternatives(model, chosen).convolutions
    run(View(model), report, predicted)
    return report.findings


def codes_of(proto: onnx.ModelProto, target: str = "trt8.5") -> set[str]:
    return {f.code for f in check(Model(proto), target)}


def finding(proto: onnx.ModelProto, code: str, target: str = "trt8.5") -> Finding:
    return next(f for f in check(Model(proto), target) if f.code == code)


def cause(finding: Finding) -> Any:
    (cause,) = finding.causes
    return cause.reason


def predicted_codes(proto: onnx.ModelProto, target: str) -> dict[str, int]:
    return predict(proto, target).findings_by_code()


def simple(**changes: Any) -> onnx.ModelProto:
    g = Graph()
    y = g.pair(
        g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r"), "c1.in", **{"scale": 0.05, **changes}
    )
    return g.model(
        g.op("Conv", [y, g.weights("c1", (16, 16, 1, 1), "qdq")], "c1", kernel_shape=[1, 1])
    )


@pytest.mark.parametrize(("target", "code"), [("trt8.5", "FLAG-FP16"), ("trt11", "FLOAT-FP32")])
def test_clean_model_has_only_a_hint_about_float(target: str, code: str) -> None:
    assert codes_of(simple(), target) == {code}


@pytest.mark.parametrize(
    ("is_output_quantized", "message"),
    [
        (False, "1 of 1 convolution could read or write FP16 instead (c)."),
        (True, "None of 1 convolution reads or writes it."),
    ],
)
def test_float_fp32_counts_layers_with_float_in_the_engine(
    g: Graph, is_output_quantized: bool, message: str
) -> None:
    y = g.conv(g.input(1, 16, 8, 8), "c", 16)
    proto = g.model(g.pair(y, "p") if is_output_quantized else y)
    assert message in finding(proto, "FLOAT-FP32", "trt11").message


@pytest.mark.parametrize(
    ("scale", "target", "count"),
    [([0.05], "rtx1.7", 1), ([0.05], "trt8.5", 0), (0.05, "rtx1.7", 0)],
)
def test_scale_of_shape_1_is_reported_on_rtx(scale: Any, target: str, count: int) -> None:
    assert predicted_codes(simple(scale=scale, zero=0), target).get("SCALE-SHAPE1", 0) == count


def test_fp16_scale_is_reported_if_weakly_typed() -> None:
    g = Graph(opset=19, half=True)
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16))
    assert "SCALE-FP16" in codes_of(proto, "trt8.6")
    assert codes_of(proto, "trt11").isdisjoint({"SCALE-FP16", "FLOAT-FP32"})


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"zero": 3}, "ZP-NONZERO", Severity.ERROR),
        ({"zero": 128, "integer": np.uint8}, "ZP-NONZERO", Severity.ERROR),
        ({"zero": 0, "integer": np.uint8}, "ZP-UINT8", Severity.ERROR),
        ({"zero": None}, "ZP-UINT8", Severity.ERROR),
        ({"zero": None}, "DQ-3-INPUTS", Severity.ERROR),
        ({"scale": 0.0}, "SCALE-NONPOS", Severity.ERROR),
        ({"scale": -0.1}, "SCALE-NONPOS", Severity.ERROR),
        ({"scale": float("nan")}, "SCALE-NONPOS", Severity.ERROR),
        ({"scale": np.full(16, 0.1), "axis": 1}, "ACT-PER-CHANNEL", Severity.WARNING),
    ],
)
def test_fault_of_a_quantizer_is_reported(
    changes: dict[str, Any], code: str, severity: Severity
) -> None:
    fault = finding(simple(**changes), code)
    assert fault.severity == severity and "c1.in" in fault.node and code not in codes_of(simple())


def test_missing_zero_point_is_reported_before_trt10() -> None:
    assert "DQ-3-INPUTS" not in codes_of(simple(zero=None), "trt10")
    missing = cause(finding(simple(zero=None), "DQ-3-INPUTS"))
    assert (missing.node, missing.op) == ("c1.in.Q", "QuantizeLinear")


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "nodes"),
    [
        ("Cast", 1, {"to": onnx.TensorProto.INT32}, ["dq"]),
        ("QuantizeLinear", 2, {"output_dtype": onnx.TensorProto.INT16}, ["source"]),
        ("Plugin", 1, {"domain": "plugins"}, []),
    ],
    ids=["int32", "int16", "unknown"],
)
def test_unsupported_type_without_zero_point_is_reported(
    g: Graph, op: str, inputs: int, attributes: dict[str, Any], nodes: list[str]
) -> None:
    scale = g.const("scale", np.float32(0.1))
    quantized = g.op(op, [g.input(1, 16, 8, 8), scale][:inputs], "source", **attributes)
    x = g.op("DequantizeLinear", [quantized, scale], "dq")
    findings = check(Model(g.model(g.conv(x, "c", 16, scale=None))), "trt10")
    assert [f.node for f in findings if f.code == "QTYPE"] == nodes


@pytest.mark.parametrize(
    ("domain", "used", "nodes"),
    [("", True, ["reader"]), ("plugins", True, []), ("", False, [])],
    ids=["cast", "plugin", "unused"],
)
def test_operator_that_reads_integers_is_reported(
    domain: str, used: bool, nodes: list[str]
) -> None:
    g = Graph(opset=13)
    y = g.op("Cast", [g.const("table", np.ones((16,), np.int8))], "reader", domain=domain, to=1)
    x = g.input(1, 16)
    findings = check(Model(g.model(g.add(x, y if used else x, "sum"))), "trt10")
    assert [f.node for f in findings if f.code == "WEIGHT-INDIRECT"] == nodes


def too_few_scales() -> onnx.ModelProto:
    g = Graph()
    w = g.pair(ones(g, 16, 8, 1, 1), "w.q", np.full(8, 0.1), axis=0)
    return without_shapes(g, weighted(g, w, group=2))


def without_shapes(graph: Graph, *outputs: str) -> onnx.ModelProto:
    infos = [onnx.helper.make_empty_tensor_value_info(o) for o in outputs]
    proto = onnx.helper.make_graph(graph.nodes, "g", graph.inputs, infos, graph.initializers)
    return onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", graph.opset)])


def too_few_zero_points() -> onnx.ModelProto:
    g = Graph()
    scale, zero = g.const("s", np.full(16, 0.1, np.float32)), g.const("z", np.int8(0))
    q = g.op("QuantizeLinear", [ones(g), scale, zero], "wq", axis=0)
    return without_shapes(g, weighted(g, g.op("DequantizeLinear", [q, scale, zero], "wdq", axis=0)))


def test_wrong_number_of_scales_or_zero_points_is_reported() -> None:
    scales = cause(finding(too_few_scales(), "SCALE-COUNT"))
    assert (scales.count, scales.axis, scales.shape) == (8, 0, (16, 8, 1, 1))
    zero_points = cause(finding(too_few_zero_points(), "ZP-VOLUME"))
    assert (zero_points.scales, zero_points.zero_points) == (16, 1)


@pytest.mark.parametrize(
    ("opset", "axis", "reported"), [(12, None, True), (12, 0, True), (13, 0, False)]
)
def test_per_channel_needs_opset_13(opset: int, axis: int | None, reported: bool) -> None:
    """Below opset 13, the parser assumes axis 0."""
    g = Graph(opset=opset)
    codes = codes_of(
        without_shapes(g, weighted(g, g.pair(ones(g), "w.q", np.full(16, 0.1), axis=axis)))
    )
    assert ("OPSET-AXIS" in codes) is reported and "W-AXIS" not in codes


# Weights and biases -----------------------------------------------------------------------------------------------


def weights_model(form: str = "qdq", op: str = "Conv", axis: int = 0) -> onnx.ModelProto:
    g = Graph()
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), ones(g, 16, 16, 3, 3)
    w = g.pair(w, "wq", np.full(16, 0.1), axis=axis) if form == "qdq" else w
    return g.model(g.op(op, [x, w], "c", kernel_shape=[3, 3]))


def test_weights_without_dq_are_reported_by_the_simulation() -> None:
    (fault,) = (f for f in predict(weights_model("float")).findings if f.code == "W-NO-DQ")
    assert fault.convolutions == ["c"] and fault.values == 16 * 8 * 8
    assert "W-NO-DQ" not in predicted_codes(weights_model(), "trt10")


def test_stored_int8_weights_are_reported_before_trt10(g: Graph) -> None:
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, weights="int8"))
    severities = {t: finding(proto, "WEIGHT-PREQUANT", t).severity for t in ("trt8.4", "trt8.5")}
    assert severities == {"trt8.4": Severity.ERROR, "trt8.5": Severity.WARNING}
    assert "WEIGHT-PREQUANT" not in codes_of(proto, "trt10")


@pytest.mark.parametrize("target", ["trt10", "rtx1.7"])
@pytest.mark.parametrize("arguments", [("int8",), ("float", "Identity")], ids=["stored", "moved"])
def test_weights_that_are_read_directly_have_no_finding(
    arguments: tuple[str, ...], target: str
) -> None:
    assert "WEIGHT-INDIRECT" not in predicted_codes(stored(*arguments), target)


def test_weights_that_are_not_constant_are_reported() -> None:
    proto = GRAPHS["weights-not-constant"]()
    assert cause(finding(proto, "W-NONCONST")) == WeightsNotConstant(MODEL_CHECK, "c", "w")
    assert "W-NONCONST" not in codes_of(proto, "rtx1.7")


def test_sparse_weights_are_reported() -> None:
    name = next(t.name for t in simple().graph.initializer if list(t.dims) == [16, 16, 1, 1])
    fault = finding(make_weights_sparse(simple(), name), "W-NONCONST")
    assert cause(fault) == WeightsNotConstant(MODEL_CHECK, "c1", name, sparse=True)


@pytest.mark.parametrize(
    ("op", "axis", "codes"),
    [
        ("Conv", 1, {"W-AXIS"}),
        ("Conv", 0, set()),
        ("ConvTranspose", 0, {"CT-AXIS"}),
        ("ConvTranspose", 1, {"CT-AXIS"}),
    ],
)
def test_axis_of_weights_is_reported(op: str, axis: int, codes: set[str]) -> None:
    assert codes_of(weights_model(op=op, axis=axis)) & {"W-AXIS", "CT-AXIS"} == codes


@pytest.mark.parametrize("attributes", [{}, {"axis": 1}], ids=["default", "written"])
def test_axis_finding_knows_whether_the_axis_is_written(
    g: Graph, attributes: dict[str, int]
) -> None:
    model = g.model(weighted(g, g.pair(ones(g), "wq", np.full(16, 0.1), **attributes)))
    assert cause(finding(model, "W-AXIS")).written is bool(attributes)


def shared_model(copies: bool = False) -> onnx.ModelProto:
    g = Graph()
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), g.weights("w", (16, 16, 1, 1), "qdq")
    other = g.weights("v", (16, 16, 1, 1), "qdq") if copies else w
    a = g.op("Conv", [x, w], "a", kernel_shape=[1, 1])
    return g.model(g.add(a, g.op("Conv", [x, other], "b", kernel_shape=[1, 1]), "sum"))


def test_shared_weights_are_reported() -> None:
    fault = finding(shared_model(), "W-SHARED")
    assert fault.convolutions == ["a", "b"] and cause(fault).weight == "w.weight"
    assert "W-SHARED" not in codes_of(shared_model(copies=True)) | codes_of(
        shared_model(), "rtx1.7"
    )


def test_weights_shared_by_two_pairs_are_reported(g: Graph) -> None:
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), ones(g)
    ends = [g.op("Conv", [x, g.pair(w, f"w{n}", 0.1)], n, kernel_shape=[1, 1]) for n in "ab"]
    assert finding(g.model(*ends), "W-SHARED").node == "w"


@pytest.mark.parametrize("op", ["Identity", "Transpose"])
def test_operator_before_the_pair_of_weights_is_reported(g: Graph, op: str) -> None:
    reason = cause(
        finding(g.model(weighted(g, g.pair(g.op(op, ones(g), "between"), "wq"))), "W-NONCONST")
    )
    steps = (PathStep("between", op),)
    assert (reason.steps, reason.quantizer, reason.stored) == (steps, "wq.Q", False)


def stored(form: str, moved: str = "", **attributes: Any) -> onnx.ModelProto:
    g = Graph()
    w = ones(g, dtype=np.int8 if form == "int8" else np.float32)
    w = g.op(moved, [w], "between", **attributes) if moved else w
    return g.model(weighted(g, g.dq(w, "wdq", 0.1) if form == "int8" else g.pair(w, "wq")))


@pytest.mark.parametrize(
    ("op", "attributes"), [("Identity", {}), ("Transpose", {"perm": [1, 0, 2, 3]})]
)
def test_operator_after_stored_integers_is_reported(op: str, attributes: dict[str, Any]) -> None:
    proto = stored("int8", op, **attributes)
    fault = finding(proto, "WEIGHT-INDIRECT", "trt10")
    assert fault.severity == Severity.ERROR and fault.convolutions == ["c"]
    assert cause(fault).steps == (PathStep("between", op),) and cause(fault).stored
    errors = [f for f in predict(proto, "rtx1.7").findings if f.severity == Severity.ERROR]
    assert [(f.code, f.node) for f in errors] == [("WEIGHT-INDIRECT", "between")]


def quantized_bias() -> onnx.ModelProto:
    g = Graph()
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), g.weights("w", (16, 16, 1, 1), "qdq")
    stored = g.const("b", np.ones(16, np.int32))
    bias = g.dq(stored, "bdq", np.full(16, 1e-3), axis=0, integer=np.int32)
    return g.model(g.op("Conv", [x, w, bias], "c", kernel_shape=[1, 1]))


@pytest.mark.parametrize(
    ("target", "probably"), [("trt8.5", ""), ("rtx1.7", ""), ("trt10", "probably ")]
)
def test_quantized_bias_is_reported(target: str, probably: str) -> None:
    # No build of TensorRT 10 and no document shows the rejection.
    prediction = predict(quantized_bias(), target)
    (fault,) = (f for f in prediction.findings if f.code == "BIAS-DQ")
    assert (fault.node, fault.convolutions, cause(fault).precision) == ("bdq", ["c"], "INT32")
    assert f"TensorRT {probably}says" in fault.message
    assert describe_rejection(prediction).startswith(f"TensorRT will {probably}reject this model")
    assert f"TensorRT will {probably}reject A (" in summarize_comparison(
        qdqtool.compare(quantized_bias(), quantized_bias(), target=target)
    )


# Heads and shapes -------------------------------------------------------------------------------------------------


def head(quantized: bool = True, join: bool = False) -> onnx.ModelProto:
    g = Graph()
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    options: Any = {"scale": 0.1 if quantized else None, "weights": "qdq" if quantized else "float"}
    ends = [g.conv(stem, name, 16, k=1, **options) for name in ("box", "score")]
    return g.model(*([g.pair(g.concat(ends, "all"), "behind")] if join else ends))


def test_quantized_convolutions_of_a_head_are_reported() -> None:
    """Those that `tune` quantized are notes without a fix."""
    proto = head()
    record_tuned_head(proto, ["box", "unknown"])
    findings = [f for f in check(Model(proto), "trt8.5") if f.code == "HEAD-QUANT"]
    tuned = " is quantized: by the model's metadata, tune chose this by the measured accuracy."
    assert [(f.node, f.severity, f.automatic, bool(f.fix)) for f in findings] == [
        ("box", Severity.INFO, False, False),
        ("score", Severity.WARNING, True, True),
    ] and [f.message.endswith(tuned) for f in findings] == [True, False]
    assert [a.node for a in qdqtool.fix(proto, only=["HEAD-QUANT"]).applied] == ["score"]
    part = qdqtool.extract(proto, finding="HEAD-QUANT:2", private=True)
    assert [f.severity for f in part.shown.findings] == [Severity.INFO]
    # A detector has several last convolutions.
    assert "HEAD-QUANT" not in codes_of(head(quantized=False)) | codes_of(simple())


def test_boxes_are_told_from_scores_by_their_dfl(g: Graph) -> None:
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    score, box = (g.conv(stem, name, 16, k=1) for name in ("score", "box"))
    bins = g.const("dflw", np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1))
    dfl = g.op("Conv", [g.op("Softmax", box, "softmax", axis=1), bins], "dfl")
    findings = check(Model(g.model(score, dfl)), "trt8.5")
    heads = {f.node: f.code for f in findings if f.code.startswith("HEAD")}
    assert heads == {"box": "HEAD-QUANT", "score": "HEAD-SCORE"}


@pytest.mark.parametrize(
    ("channels", "groups", "codes"),
    [
        (24, 1, {"CH-ALIGN"}),
        (8, 1, {"CH-SMALL"}),
        (32, 4, {"GROUP-SLOW"}),
        (32, 1, set()),
        (32, 32, set()),
    ],
)
def test_slow_numbers_of_channels_are_reported(
    g: Graph, channels: int, groups: int, codes: set[str]
) -> None:
    proto = g.model(g.conv(g.relu(g.input(1, 32, 8, 8), "r"), "c", channels, groups=groups))
    assert codes_of(proto) & {"CH-ALIGN", "CH-SMALL", "GROUP-SLOW"} == codes


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "cast"])
@pytest.mark.parametrize(("inner", "codes"), [(False, set()), (True, {"CH-SMALL"})])
def test_three_channels_of_the_input_have_no_finding(
    cast: bool, inner: bool, codes: set[str]
) -> None:
    """A Cast of the FP32 input of an FP16 model makes no difference."""
    g = Graph(half=cast)
    x = g.input(1, 3, 8, 8)
    x = g.relu(x, "r") if inner else x
    x = g.op("Cast", [x], "cast", to=onnx.TensorProto.FLOAT16) if cast else x
    assert codes_of(g.model(g.conv(x, "stem", 32))) & {"CH-ALIGN", "CH-SMALL"} == codes


@pytest.mark.parametrize(("computed", "codes"), [(False, set()), (True, {"CH-SMALL"})])
def test_three_channels_of_converted_pixels_have_no_finding(
    g: Graph, computed: bool, codes: set[str]
) -> None:
    x = g.op("Cast", [g.input(1, 3, 8, 8)], "cast", to=onnx.TensorProto.FLOAT)
    x = g.op("Mul", [x, g.const("factor", np.float32(1 / 255))], "factor")
    shift = g.op("Neg", x, "neg") if computed else g.const("mean", np.float32(0.5))
    x = g.op("Sub", [x, shift], "shift")
    g.channels[x] = 3
    assert codes_of(g.model(g.conv(x, "stem", 32))) & {"CH-ALIGN", "CH-SMALL"} == codes


@pytest.mark.parametrize("normalized", [False, True])
def test_silu_after_depthwise_convolution_is_reported(g: Graph, normalized: bool) -> None:
    """A BatchNormalization between the convolution and the SiLU is fused into the convolution."""
    x = g.conv(g.relu(g.input(1, 32, 8, 8), "r"), "dw", 32, groups=32)
    silu = g.silu(g.bn(x, "bn") if normalized else x, "s")
    fault = finding(g.model(silu), "DW-SILU")
    assert fault.node == "dw" and (normalized or cause(fault).last)
    proto = g.model(g.conv(silu, "next", 32))
    assert "prediction fuses the SiLU (assumed)" in finding(proto, "DW-SILU").message
    assert any({"dw", "s.m"} <= set(layer.nodes) for layer in predict(proto).layers)


def test_add_after_depthwise_convolution_is_reported_before_trt10(g: Graph) -> None:
    x = g.relu(g.input(1, 32, 8, 8), "r")
    proto = g.model(g.add(g.conv(x, "dw", 32, groups=32), x, "sum"))
    assert "DW-ADD" in codes_of(proto, "trt8.6") and "DW-ADD" not in codes_of(proto, "trt10")


def test_checks_need_no_external_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    options: Any = {"location": "w.bin", "size_threshold": 0}
    onnx.save(simple(), path, save_as_external_data=True, **options)
    (tmp_path / "w.bin").unlink()
    assert {f.code for f in check(load(path), "trt8.5")} == {"FLAG-FP16"}

"""Each static check on a graph that has the fault and on one that has not."""

import numpy as np
import onnx
import pytest

from qdqtool.explain.lint.api import run
from qdqtool.explain.report import Report
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.view import View
from qdqtool.prediction import predict
from qdqtool.trt.faults import CHECK
from qdqtool.trt.outcome import settled
from qdqtool.trt.refusals import Step, WeightsNotConstant
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision, Severity
from tests.explain.graphs import GRAPHS, ones, weighted
from tests.insertion.test_placement import with_sparse_weights
from tests.trt.builder import Graph


def check(model, target):
    """The findings of every check, without those of the simulation (which says what each convolution takes in)."""
    report, chosen = Report(target), target_named(target)
    run(View(model), report, () if chosen.is_rtx else settled(model, chosen).convolutions)
    return report.findings


def codes_of(proto, target="trt8.5"):
    return {f.code for f in check(Model(proto), target)}


def finding(proto, code, target="trt8.5"):
    found = [f for f in check(Model(proto), target) if f.code == code]
    assert found, f"no {code}"
    return found[0]


def cause(found):
    """The record of a finding that has one alone."""
    (only,) = found.causes
    return only.refusal


def simple(**changes):
    """Two quantized convolutions of 16 channels; ``changes`` go to the pair in front of the second."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r")
    y = g.pair(x, "c1.in", **{"scale": 0.05, **changes})
    return g.model(
        g.op("Conv", [y, g.weights("c1", (16, 16, 1, 1), "qdq")], "c1", kernel_shape=[1, 1])
    )


def test_scales_and_clean_models(g):
    y = g.conv(g.input(1, 16, 8, 8), "ct", 16, k=2, stride=2, op="ConvTranspose")
    proto = g.model(g.bn(y, "bn"))
    for target in ("trt8.5", "trt11"):
        assert "CT-BN" in {f.code for f in predict(proto, target).findings}
    assert "CT-FLOAT" in predict(proto, "rtx1.7").findings_by_code()
    assert codes_of(simple()) == {"FLAG-FP16"}
    assert codes_of(simple(), "trt11") == {"FLOAT-FP32"}
    proto = simple(scale=[0.05], zero=0)
    assert predict(proto, "rtx1.7").findings_by_code()["SCALE-SHAPE1"] == 1
    assert "SCALE-SHAPE1" not in predict(proto, "trt8.5").findings_by_code()
    assert "SCALE-SHAPE1" not in predict(simple(), "rtx1.7").findings_by_code()
    g = Graph(opset=19, half=True)
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16))
    assert "SCALE-FP16" in codes_of(proto, "trt8.6")
    assert not {"SCALE-FP16", "FLOAT-FP32"} & codes_of(proto, "trt11")
    assert "SCALE-DYNAMIC" in codes_of(GRAPHS["scale-computed"]())


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
def test_quantizers(changes, code, severity):
    found = finding(simple(**changes), code)
    assert found.severity == severity
    assert "c1.in" in found.node
    assert code not in codes_of(simple())


def test_quantizers_and_readers_that_are_told_once():
    model = Model(simple(zero=3))
    assert [f.node for f in check(model, "trt8.5") if f.code == "ZP-NONZERO"] == ["c1.in.Q"]
    assert "DQ-3-INPUTS" not in codes_of(simple(zero=None), "trt10")
    missing = cause(finding(simple(zero=None), "DQ-3-INPUTS"))
    assert (missing.node, missing.op) == ("c1.in.Q", "QuantizeLinear")
    for target in ("trt8.5", "trt10"):
        assert cause(finding(simple(zero=3), "ZP-NONZERO", target)).zero_points == (3, 3)

    def model(op, domain=""):
        g = Graph(opset=13)
        table = g.op(op, [g.const("table", np.ones((16,), np.int8))], "reader", domain=domain, to=1)
        return g.model(g.add(g.input(1, 16), table, "sum"))

    assert finding(model("Cast"), "WEIGHT-INDIRECT", "trt10").node == "reader"
    assert "WEIGHT-INDIRECT" not in codes_of(model("Cast", "plugins"), "trt10")
    unused = model("Cast")
    unused.graph.node[-1].input[1] = unused.graph.node[-1].input[0]
    assert "WEIGHT-INDIRECT" not in codes_of(unused, "trt10")


def too_few_scales():
    g = Graph()
    w = g.pair(ones(g, 16, 8, 1, 1), "w.q", np.full(8, 0.1), axis=0)
    return _raw(g, weighted(g, w, group=2))


def test_counts_of_scales_and_integers(g):
    found = finding(too_few_scales(), "SCALE-COUNT")
    assert (cause(found).count, cause(found).axis, cause(found).shape) == (8, 0, (16, 8, 1, 1))
    g = Graph(opset=13)
    w = g.pair(ones(g), "w.q", np.full((16, 1, 1, 1), 0.1), axis=0)
    assert "SCALE-RANK" in codes_of(_raw(g, weighted(g, w)), "trt10")
    found = cause(finding(too_few_zero_points(), "ZP-VOLUME"))
    assert (found.scales, found.zero_points) == (16, 1)
    g = Graph(opset=21)
    out = g.pair(g.input(1, 16, 8, 8), "a", integer=np.int16)
    assert cause(finding(_raw(g, out), "QTYPE")).kind == "int16"
    g = Graph()
    out = g.op("DequantizeLinear", g.ops("DynamicQuantizeLinear", [g.input(1, 8)], "d", 3), "dq")
    assert "QOPERATOR" in codes_of(_raw(g, out))


def _raw(graph, *outputs):
    """The model without shape inference, which would refuse what is to be found."""
    infos = [onnx.helper.make_empty_tensor_value_info(o) for o in outputs]
    made = onnx.helper.make_graph(graph.nodes, "g", graph.inputs, infos, graph.initializers)
    return onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", graph.opset)])


def too_few_zero_points():
    g = Graph()
    scale, zero = g.const("s", np.full(16, 0.1, np.float32)), g.const("z", np.int8(0))
    q = g.op("QuantizeLinear", [ones(g), scale, zero], "wq", axis=0)
    return _raw(g, weighted(g, g.op("DequantizeLinear", [q, scale, zero], "wdq", axis=0)))


@pytest.mark.parametrize(
    ("opset", "axis", "expected"), [(12, None, True), (12, 0, True), (13, 0, False)]
)
def test_per_channel_needs_opset_13(opset, axis, expected):
    g = Graph(opset=opset)
    found = codes_of(_raw(g, weighted(g, g.pair(ones(g), "w.q", np.full(16, 0.1), axis=axis))))
    assert ("OPSET-AXIS" in found) is expected
    assert "W-AXIS" not in found  # below 13 the parser takes axis 0


# Weights and biases -----------------------------------------------------------------------------------------------


def weights_model(form="qdq", op="Conv", axis=0):
    g = Graph()
    x, w = g.pair(g.input(1, 16, 8, 8), "in"), ones(g, 16, 16, 3, 3)
    w = g.pair(w, "wq", np.full(16, 0.1), axis=axis) if form == "qdq" else w
    return g.model(g.op(op, [x, w], "c", kernel_shape=[3, 3]))


def test_weights_that_are_stored_or_are_outputs(g):
    """Which the simulation tells, not a check."""
    (found,) = (f for f in predict(weights_model("float")).findings if f.code == "W-NO-DQ")
    assert found.convolutions == ["c"] and found.values == 16 * 8 * 8
    assert "W-NO-DQ" not in predict(weights_model()).findings_by_code()
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, weights="int8"))
    assert finding(proto, "WEIGHT-PREQUANT", "trt8.4").severity == Severity.ERROR
    assert finding(proto, "WEIGHT-PREQUANT", "trt8.5").severity == Severity.WARNING
    assert "WEIGHT-PREQUANT" not in codes_of(proto, "trt10")
    for target in ("trt10", "rtx1.7"):
        for proto in (stored("int8"), stored("float", "Identity")):
            assert not [f for f in predict(proto, target).findings if f.code == "WEIGHT-INDIRECT"]
    g = Graph()
    w = g.pair(ones(g), "wq")
    assert finding(g.model(weighted(g, w), w), "W-Q-OUTPUT").node == "wq.DQ"
    proto = GRAPHS["weights-not-constant"]()
    assert cause(finding(proto, "W-NONCONST")) == WeightsNotConstant(CHECK, "c", "w")
    assert "W-NONCONST" not in codes_of(proto, "rtx1.7")
    name = next(t.name for t in simple().graph.initializer if list(t.dims) == [16, 16, 1, 1])
    found = finding(with_sparse_weights(simple(), name), "W-NONCONST")
    assert cause(found) == WeightsNotConstant(CHECK, "c1", name, sparse=True)


@pytest.mark.parametrize(
    ("op", "axis", "code"),
    [
        ("Conv", 1, "W-AXIS"),
        ("Conv", 0, None),
        ("ConvTranspose", 0, "CT-AXIS"),
        ("ConvTranspose", 1, "CT-AXIS"),
    ],
)
def test_axis(g, op, axis, code):
    assert ({"W-AXIS", "CT-AXIS"} & codes_of(weights_model(op=op, axis=axis))) == ({code} - {None})
    out = weighted(g, g.pair(ones(g), "wq", np.full(16, 0.1)))
    assert cause(finding(g.model(out), "W-AXIS")).written is False
    assert cause(finding(weights_model(axis=1), "W-AXIS")).written is True


def shared_model(copies=False):
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "in")
    w = g.weights("w", (16, 16, 1, 1), "qdq")
    other = g.weights("v", (16, 16, 1, 1), "qdq") if copies else w
    a = g.op("Conv", [x, w], "a", kernel_shape=[1, 1])
    b = g.op("Conv", [x, other], "b", kernel_shape=[1, 1])
    return g.model(g.add(a, b, "sum"))


def test_shared_weights(g):
    found = finding(shared_model(), "W-SHARED")
    assert found.convolutions == ["a", "b"] and cause(found).weight == "w.weight"
    assert "W-SHARED" not in codes_of(shared_model(copies=True))
    assert "W-SHARED" not in codes_of(shared_model(), "rtx1.7")
    x = g.pair(g.input(1, 16, 8, 8), "in")
    w = ones(g)
    a = g.op("Conv", [x, g.pair(w, "wa", 0.1)], "a", kernel_shape=[1, 1])
    b = g.op("Conv", [x, g.pair(w, "wb", 0.1)], "b", kernel_shape=[1, 1])
    assert finding(g.model(a, b), "W-SHARED").node == "w"


@pytest.mark.parametrize("op", ["Identity", "Transpose"])
def test_weights_behind_an_operator(g, op):
    out = weighted(g, g.pair(g.op(op, ones(g), "between"), "wq"))
    found = cause(finding(g.model(out), "W-NONCONST"))
    assert (found.steps, found.quantizer, found.stored) == ((Step("between", op),), "wq.Q", False)


def stored(form, moved="", **attributes):
    """A convolution with stored integers or a pair, read through an operator."""
    g = Graph()
    w = ones(g, dtype=np.int8 if form == "int8" else np.float32)
    w = g.op(moved, [w], "between", **attributes) if moved else w
    return g.model(weighted(g, g.dq(w, "wdq", 0.1) if form == "int8" else g.pair(w, "wq")))


@pytest.mark.parametrize(
    ("op", "attributes"), [("Identity", {}), ("Transpose", {"perm": [1, 0, 2, 3]})]
)
def test_stored_integers_behind_an_operator(op, attributes):
    found = finding(stored("int8", op, **attributes), "WEIGHT-INDIRECT", "trt10")
    assert found.severity == Severity.ERROR and found.convolutions == ["c"]
    assert cause(found).steps == (Step("between", op),) and cause(found).stored
    refused = [
        f
        for f in predict(stored("int8", op, **attributes), "rtx1.7").findings
        if f.severity == Severity.ERROR
    ]
    assert [(f.code, f.node) for f in refused] == [("WEIGHT-INDIRECT", "between")]


def quantized_bias():
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "in")
    bias = g.dq(
        g.const("b", np.ones(16, np.int32)), "bdq", np.full(16, 1e-3), axis=0, integer=np.int32
    )
    return g.model(
        g.op("Conv", [x, g.weights("w", (16, 16, 1, 1), "qdq"), bias], "c", kernel_shape=[1, 1])
    )


@pytest.mark.parametrize("target", ["trt8.5", "rtx1.7"])
def test_quantized_bias(target):
    (found,) = (f for f in predict(quantized_bias(), target).findings if f.code == "BIAS-DQ")
    assert (found.node, found.convolutions, cause(found).precision) == (
        "bdq",
        ["c"],
        Precision.INT32,
    )


# Heads and shapes -------------------------------------------------------------------------------------------------


def head(quantized=True, join=False):
    g = Graph()
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    ends = [
        g.conv(
            stem,
            name,
            16,
            k=1,
            scale=0.1 if quantized else None,
            weights="qdq" if quantized else "float",
        )
        for name in ("box", "score")
    ]
    if not join:
        return g.model(*ends)
    return g.model(g.pair(g.concat(ends, "all"), "behind"))


def test_heads_and_their_convolutions(g):
    found = [f.node for f in check(Model(head()), "trt8.5") if f.code == "HEAD-QUANT"]
    assert found == ["box", "score"]
    assert "HEAD-QUANT" not in codes_of(head(quantized=False))
    assert "HEAD-QUANT" not in codes_of(simple())  # one last convolution is no detector
    assert finding(head(join=True), "HEAD-CONCAT").node == "behind.Q"
    assert "HEAD-CONCAT" not in codes_of(head())
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    score = g.conv(stem, "score", 16, k=1)
    box = g.conv(stem, "box", 16, k=1)
    bins = g.op("Softmax", box, "softmax", axis=1)
    dfl = g.op(
        "Conv", [bins, g.const("dflw", np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1))], "dfl"
    )
    found = {
        f.node: f.code
        for f in check(Model(g.model(score, dfl)), "trt8.5")
        if f.code.startswith("HEAD")
    }
    assert found == {"box": "HEAD-QUANT", "score": "HEAD-SCORE"}


@pytest.mark.parametrize(
    ("channels", "groups", "code"),
    [
        (24, 1, "CH-ALIGN"),
        (8, 1, "CH-SMALL"),
        (32, 4, "GROUP-SLOW"),
        (32, 1, None),
        (32, 32, None),
    ],
)
def test_channels(g, channels, groups, code):
    proto = g.model(g.conv(g.relu(g.input(1, 32, 8, 8), "r"), "c", channels, groups=groups))
    assert {"CH-ALIGN", "CH-SMALL", "GROUP-SLOW"} & codes_of(proto) == {code} - {None}


@pytest.mark.parametrize("cast", [False, True])
def test_three_channel_images_are_no_defect(cast: bool) -> None:
    """Also where a model in FP16 casts its FP32 input; what casts another tensor is no stem."""
    for inner in (False, True):
        g = Graph(half=cast)
        x = g.input(1, 3, 8, 8)
        x = g.relu(x, "r") if inner else x
        x = g.op("Cast", [x], "cast", to=onnx.TensorProto.FLOAT16) if cast else x
        told = {"CH-ALIGN", "CH-SMALL"} & codes_of(g.model(g.conv(x, "stem", 32)))
        assert told == ({"CH-SMALL"} if inner else set())


def test_depthwise_with_silu_and_with_add(g):
    x = g.relu(g.input(1, 32, 8, 8), "r")
    proto = g.model(g.silu(g.conv(x, "dw", 32, groups=32), "s"))
    assert cause(finding(proto, "DW-SILU")).last
    normed = Graph()
    x = normed.conv(normed.relu(normed.input(1, 32, 8, 8), "r"), "dw", 32, groups=32)
    assert finding(normed.model(normed.silu(normed.bn(x, "bn"), "s")), "DW-SILU").node == "dw", (
        "its layer took that in"
    )
    g = Graph()
    x = g.relu(g.input(1, 32, 8, 8), "r")
    proto = g.model(g.add(g.conv(x, "dw", 32, groups=32), x, "sum"))
    assert "DW-ADD" in codes_of(proto, "trt8.6") and "DW-ADD" not in codes_of(proto, "trt10")


def test_external_data_may_be_missing(tmp_path):
    proto = simple()
    onnx.save(
        proto,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="w.bin",
        size_threshold=0,
        convert_attribute=False,
    )
    (tmp_path / "w.bin").unlink()
    assert {f.code for f in check(load(tmp_path / "m.onnx"), "trt8.5")} == {"FLAG-FP16"}

"""The reason that is told for each convolution that is not INT8 to INT8, and for each conversion that stays."""

import time

import numpy as np
import pytest

from qdqtool.explain.messages import unified
from qdqtool.explain.report import Report
from qdqtool.model.graph import Model
from qdqtool.prediction import advise, predict
from qdqtool.trt.refusals import (
    ConcatScales,
    OutputScale,
    ReaderKind,
    ReduceNotPooling,
    ResidualFloat,
)
from qdqtool.types import Severity
from tests.explain.graphs import GRAPHS, concat, outcome, split, transposed_3d
from tests.trt.builder import Graph


def cause(found):
    """The refusal that decided."""
    return found.causes[0].refusal


def cause_of(kind, found):
    """The first refusal of a kind, among those that decided and those that explain them."""
    return next(r for c in found.causes for r in (c.refusal, *c.also) if isinstance(r, kind))


def names(found):
    """What its refusals name."""
    return {name for c in found.causes for r in (c.refusal, *c.also) for name in r.names()}


def quantized_reader(g, x, name="next", scale=0.05):
    """A quantized convolution, so that the tensor in front of it has a Q."""
    return g.conv(x, name, 16, scale=scale)


def residual(skip="float", conv_side=False, behind=True, activation=False, relu=True):
    """conv0 -> relu -> conv1 -> conv2, added to what conv1 reads; then a quantized convolution."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
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


def test_residuals():
    prediction, codes = outcome(residual("float"))
    found = codes["SKIP-FLOAT"]
    assert found.node == "sum" and "c2" in found.convolutions
    refused = cause_of(ResidualFloat, found)
    assert (refused.node, refused.add, refused.elements.shape) == ("c2", "sum", "16x16x16")
    assert [(q.node, round(q.scale, 6)) for q in refused.quantizers] == [("c1.in.Q", 0.07)]
    assert prediction.convolution("c2").findings[0] == found.id
    stays = [f for f in prediction.findings if f.code == "CONVERSION"]
    assert {f.node for f in stays} == {"c1.in.Q", "next.in.Q"}
    assert all(("SKIP-FLOAT", "sum") in f.causes[0].see for f in stays)
    _, codes = outcome(residual("own", conv_side=True))
    found = codes["ADD-BOTH"]
    assert found.node == "sum" and found.severity == Severity.INFO
    assert cause(found).scales == pytest.approx((0.08, 0.07)) and cause(found).quantizer == "side.Q"
    _, codes = outcome(residual("own", conv_side=True, activation=True, relu=False))
    assert "ADD-BOTH" not in codes
    prediction, codes = outcome(residual("own", behind=False))
    found = codes["ADD-OUT-FLOAT"]
    assert "res.DQ" in names(found) and {r.kind for r in cause(found).readers} == {
        ReaderKind.OUTPUT
    }
    assert any(
        f.node == "res.DQ" and ("ADD-OUT-FLOAT", found.node) in f.causes[0].see
        for f in prediction.findings
    )
    _, codes = outcome(residual("own", activation=True, relu=False))
    assert codes["ADD-ACT"].node == "sum" and cause(codes["ADD-ACT"]).activation == "s2.m"


@pytest.mark.parametrize("skip", ["own", "shared"])
def test_quantized_residual(skip):
    prediction, codes = outcome(residual(skip))
    assert not {"SKIP-FLOAT", "ADD-BOTH", "ADD-OUT-FLOAT"} & set(codes)
    assert prediction.convolution("c2").int8_in_int8_out


def test_pools_and_outputs(g):
    x = g.pool(g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0"), "pool")
    y = g.conv(x, "c1", 16, scale=0.03)
    _, codes = outcome(g.model(quantized_reader(g, g.add(y, x, "sum"))))
    found = codes["POOL-MIXED"]
    assert (
        found.node == "pool" and "c0" in found.convolutions and {"sum", "c1.in.Q"} <= names(found)
    )
    g = Graph()
    y = g.op("Softmax", g.silu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "s"), "soft", axis=1)
    prediction, codes = outcome(g.model(quantized_reader(g, y)))
    assert codes["SILU-NO-Q-AFTER"].node == "s.m" and "soft" in names(codes["SILU-NO-Q-AFTER"])
    assert not prediction.convolution("c0").int8_in_int8_out
    g = Graph()
    _, codes = outcome(g.model(g.conv(g.input(1, 16, 16, 16), "c0", 16)))
    assert codes["OUT-FLOAT"].severity == Severity.INFO
    assert [r.kind for r in cause(codes["OUT-FLOAT"]).readers] == [ReaderKind.OUTPUT]
    g = Graph()
    y = g.relu(g.pair(g.conv(g.input(1, 16, 16, 16), "c0", 16), "inner"), "r")
    _, codes = outcome(g.model(quantized_reader(g, y)))
    assert codes["ACT-INNER-Q"].node == "inner.Q"


@pytest.mark.parametrize("gate", [False, True])
def test_pair_inside_silu(g, gate):
    y = g.conv(g.input(1, 16, 16, 16), "c0", 16)
    inside = y if gate else g.pair(y, "in1", 0.1)
    s = g.op("Sigmoid", inside, "sig")
    m = g.op("Mul", [inside, g.pair(s, "gate", 0.008) if gate else s], "mul")
    _, codes = outcome(g.model(quantized_reader(g, m)))
    assert codes["SILU-INNER-Q"].node == ("gate.Q" if gate else "in1.Q")
    assert codes["SILU-INNER-Q"].convolutions == ["c0"]


@pytest.mark.parametrize(
    ("build", "code", "values"),
    [
        (
            lambda g, x: g.conv(x, "c", 16, scale=None, weights="float"),
            "NOT-QUANTIZED",
            {"weights_quantized": False},
        ),
        (
            lambda g, x: g.conv(x, "c", 16, scale=None),
            "IN-FLOAT",
            {"weights_quantized": True, "dq": ""},
        ),
    ],
)
def test_float_convolutions(g, build, code, values):
    prediction, codes = outcome(g.model(build(g, g.input(1, 16, 16, 16))))
    assert {name: getattr(cause(codes[code]), name) for name in values} == values
    assert codes[code].id in prediction.convolution("c").findings


@pytest.mark.parametrize("own", [False, True])
def test_a_shared_dq_in_front_of_matrix_products(g, own):
    x = g.op("Flatten", g.conv(g.input(1, 16, 1, 1), "c", 4), "f")
    first = g.pair(x, "p", 0.05)
    second = g.dq(g.nodes[-1].input[0], "own.DQ", 0.05) if own else first
    outputs = []
    for name, data in (("one", first), ("two", second)):
        weight = g.pair(g.const(f"{name}.w", np.ones((4, 3), np.float32)), f"{name}.w", 0.01)
        outputs.append(g.op("Gemm", [data, weight], name))
    prediction, codes = outcome(g.model(*outputs))
    precisions = {prediction.convolution(n).precision for n in ("one", "two")}
    if own:
        assert precisions == {"INT8"} and "IN-BLOCKED" not in codes
        return
    assert precisions == {"FLOAT"}
    told = [f for f in prediction.findings if f.code == "IN-BLOCKED"]
    assert {f.node for f in told} == {"one", "two"}
    assert all("p.DQ" in names(f) for f in told)


def test_conversions_ids_and_reasons(g):
    prediction, codes = outcome(g.model(g.conv(g.input(1, 3, 16, 16), "c", 16)))
    found = codes["INPUT-CONVERSION"]
    assert found.values == 3 * 16 * 16 and cause(found).tensor == "x"
    assert prediction.conversions == 1
    for proto in (
        residual("float"),
        residual("own", behind=False),
        concat((0.02, 0.03, 0.04), 0.04),
        split(0.1, 0.2),
    ):
        prediction = predict(proto, "trt8.5")
        for conv in prediction.convolutions:
            assert conv.int8_in_int8_out or conv.findings
    prediction = predict(residual("float"), "trt8.5")
    assert [f.id for f in prediction.findings] == list(range(len(prediction.findings)))
    order = [Severity.ERROR, Severity.WARNING, Severity.INFO]
    ranks = [order.index(f.severity) for f in prediction.findings]
    assert ranks == sorted(ranks)
    _, codes = outcome(residual("float"), "rtx1.7")
    assert not {"SKIP-FLOAT", "CONVERSION", "OUT-FLOAT", "INPUT-CONVERSION"} & set(codes)


def test_findings_of_the_rtx_simulation_are_kept(g):
    x = g.relu(g.conv(g.input(1, 3, 8, 8), "c0", 8), "r")
    model = Model(g.model(g.conv(x, "c1", 8, scale=None)))
    prediction = predict(model, "rtx1.7")
    own = {(f.code, f.node) for f in prediction.findings if f.code in ("IN-BLOCKED", "IN-FLOAT")}
    prediction.findings = advise(model, prediction)
    found = {(f.code, f.node) for f in prediction.findings}
    assert own and own <= found and "FLOAT-FP32" in {code for code, _ in found}
    assert [f.id for f in prediction.findings] == list(range(len(prediction.findings)))
    assert prediction.convolution("c1").findings


def test_float_residual_whose_sum_stays_float(g):
    """A pair on the skip of a block whose sum is float would only add a DQ: law 6 of the placement laws."""
    x = g.conv(g.input(1, 16, 16, 16), "c0", 16)
    y = g.add(g.conv(g.relu(g.bn(x, "b0"), "r0"), "c1", 16), x, "sum")
    g.conv(g.relu(g.bn(y, "b1"), "r1"), "c2", 16)
    _, codes = outcome(g.model("c2:0"))
    assert codes["SKIP-FLOAT"].node == "sum"
    readers = cause_of(ResidualFloat, codes["SKIP-FLOAT"]).readers
    assert [(r.node, r.kind) for r in readers] == [("b1", ReaderKind.OP)]
    _, codes = outcome(residual())
    assert {r.kind for r in cause_of(ResidualFloat, codes["SKIP-FLOAT"]).readers} == {ReaderKind.Q}


@pytest.mark.parametrize("keepdims", [0, 1])
def test_quantized_reduce_mean(g, keepdims):
    """Only with keepdims=1 is it a pooling, which two pairs make INT8; else the finding says what to do."""
    x = g.op(
        "ReduceMean",
        g.pair(g.conv(g.input(1, 16, 8, 8), "c0", 16), "gap"),
        "mean",
        axes=[2, 3],
        keepdims=keepdims,
    )
    x = g.op("Flatten", x, "flat") if keepdims else x
    prediction, codes = outcome(g.model(g.gemm(x, "fc", 16)))
    assert prediction.conversions == (1 if keepdims else 3)
    assert ("POOL-FLOAT" in codes) is (keepdims == 0)
    if not keepdims:
        assert isinstance(cause(codes["POOL-FLOAT"]), ReduceNotPooling)


@pytest.mark.parametrize("name", ["", "same"])
def test_conversions_of_nodes_without_a_name_of_their_own(g, name):
    g.conv(g.conv(g.input(1, 16, 8, 8), "c0", 16), "c1", 16)
    for node in g.nodes:
        node.name = name
    _, codes = outcome(g.model("c1:0"))
    assert "CONVERSION" not in codes
    assert cause(codes["INPUT-CONVERSION"]).tensor == "x"


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_batch_norm_behind_conv_transpose_is_told_where_it_costs(g, target):
    y = g.bn(g.conv(g.input(1, 16, 8, 8), "up", 16, 2, 2, op="ConvTranspose"), "bn")
    prediction, codes = outcome(g.model(g.conv(y, "c1", 16)), target)
    assert prediction.convolutions[0].output.is_float
    assert codes["CT-BN"].node == "up"


def test_normalization_behind_a_convolution():
    """NVIDIA's quantizer puts Q/DQ between the two, through the Transpose; without it the convolution writes float."""

    def network(quantized):
        g = Graph(opset=17)
        x = g.op("Transpose", g.conv(g.input(1, 32, 8, 8), "c0", 32), "t", perm=[0, 2, 3, 1])
        x = g.pair(x, "norm") if quantized else x
        g.const("gamma", np.ones(32))
        return g.model(g.op("LayerNormalization", [x, "gamma"], "ln"))

    prediction, codes = outcome(network(False))
    assert not prediction.convolution("c0").int8_in_int8_out
    assert [r.node for r in cause(codes["OUT-FLOAT"]).readers] == ["ln"]
    prediction, codes = outcome(network(True))
    assert prediction.convolution("c0").int8_in_int8_out and "OUT-FLOAT" not in codes


def test_a_finding_about_very_many_convolutions_takes_no_longer_than_they_are_many():
    report = Report("trt8.5")
    names = [f"conv{i}" for i in range(40_000)]
    begun = time.process_time()
    for name in names:
        report.add(OutputScale("Pass", "one", "q", False), convolutions=[name])
    assert all(report.place("OUT-FLOAT", name) == "one" for name in names)
    assert report.place("W-NO-DQ", names[0]) is None
    assert time.process_time() - begun < 10  # looking each up among the others takes minutes
    (finding,) = report.findings
    assert finding.convolutions == names


def test_what_is_told_once(g):
    scales = [
        g.const("s", np.linspace(0.1, 0.2, 16, dtype=np.float32)),
        g.const("z", np.zeros(16, np.int8)),
    ]
    q = g.op(
        "QuantizeLinear",
        [g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r0"), *scales],
        "q",
        axis=1,
    )
    x = g.op("DequantizeLinear", [q, *scales], "dq", axis=1)
    prediction = predict(g.model(g.conv(x, "c1", 16, scale=None)))
    assert [f.node for f in prediction.findings if f.code == "ACT-PER-CHANNEL"] == ["q"]
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    prediction, codes = outcome(
        g.model(g.conv(x, "a", 16, scale=0.02), g.conv(x, "b", 16, scale=0.05))
    )
    found = codes["SIBLING-SCALE"]
    assert {r.node: r.scale for r in cause(found).readers} == pytest.approx(
        {"a.in.Q": 0.02, "b.in.Q": 0.05}
    )
    assert (
        unified([0.02, 0.05])
        == f"Give them one scale, 0.05 (the smallest range loses {np.log2(2.5):.1f} bits)."
    )
    assert prediction.conversions == 3  # the input's, and one for each


def attention(of="MatMul", between=None):
    """Softmax of one tensor, quantized and read by ``of``; ``between`` them one more operator."""
    g = Graph()
    chances = g.op("Softmax", g.input(1, 4, 16, 16), "soft", axis=-1)
    if between == "Reshape":
        chances = g.reshape(chances, "between", 4, 1, 16, 16)
    elif between is not None:
        chances = g.op(between, chances, "between")
    data = g.pair(chances, "p")
    if of == "MatMul":
        return g.model(g.op("MatMul", [data, g.pair(g.input(1, 4, 16, 32, name="v"), "v")], "m"))
    if of == "constant":
        return g.model(
            g.op("MatMul", [data, g.pair(g.const("w", np.ones((16, 4), np.float32)), "w")], "m")
        )
    return g.model(g.conv(data, "c", 16, scale=None))


@pytest.mark.parametrize(
    ("of", "between", "assumed"),
    [
        ("MatMul", None, True),
        ("MatMul", "Reshape", True),
        ("MatMul", "Neg", False),
        ("constant", None, False),
        ("Conv", None, False),
    ],
)
def test_what_becomes_of_the_q_behind_an_attentions_softmax_is_assumed(of, between, assumed):
    """The guide has such Qs inside one kernel with the whole attention; no listing at hand shows either."""
    prediction, _ = outcome(attention(of, between))
    found = next(f for f in prediction.findings if f.code == "CONVERSION" and f.node == "p.Q")
    assert cause(found).attention is assumed
    assert str(found.evidence) == ("assumed" if assumed else "seen")
    product = prediction.convolutions[-1]
    assert (str(product.evidence) == "assumed") is assumed


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
def test_a_3d_convtranspose_is_int8_in_the_one_pattern_that_nvidia_names(
    axes, activated, quantized, int8
):
    prediction, codes = outcome(transposed_3d(activated, quantized, axes), "trt8.6")
    found = prediction.convolution("up")
    assert found.is_int8 is int8 and found.int8_in_int8_out is (int8 and quantized)
    assert ("CT3D-FLOAT" in codes) is (axes == 3), "told wherever it stands: no build shows either"
    if axes == 3:
        assert "QuantizeDoubleInputNodes/deconvolution-3d" in found.cases
        assert str(found.evidence) == ("documented" if int8 else "assumed"), (
            "its data comes through a DQ that stays"
        )


@pytest.mark.parametrize(
    ("target", "int8", "severity"),
    [
        ("trt8.6", True, None),
        ("trt10", False, Severity.WARNING),
        ("trt11", False, Severity.ERROR),
    ],
)
def test_data_and_weights_of_two_float_types(target, int8, severity):
    """A DQ writes the type of its scale; before 10 a float16 scale is told as such and no type is the model's."""
    prediction, codes = outcome(GRAPHS["float-types"](), target)
    assert prediction.convolution("c").is_int8 is int8
    found = codes.get("FLOAT-MIXED")
    assert (found.severity if found else None) == severity
    if found:
        assert cause(found).floats == ("FP32", "FP16") and found.convolutions == ["c"]
        assert str(prediction.convolution("c").evidence) == "assumed"
    else:
        assert "SCALE-FP16" in codes


@pytest.mark.parametrize(
    ("weights", "int8"), [("float16", True), ("float32", False), ("cast", True)]
)
def test_a_cast_behind_a_dq_decides_over_the_type(weights, int8):
    """The data's scale is float32, a Cast makes it float16: weights have to be float16, by their scale or by a Cast."""
    g = Graph(opset=19)
    x = g.op("Cast", g.pair(g.input(1, 16, 8, 8), "in"), "cast", to=10)
    kind = np.float16 if weights == "float16" else np.float32
    scale, zero = g.const("scale", 0.1, kind), g.const("zero", np.int8(0))
    w = g.op("QuantizeLinear", [g.const("w", np.ones((16, 16, 1, 1)), kind), scale, zero], "wq.Q")
    w = g.op("DequantizeLinear", [w, scale, zero], "wq.DQ")
    w = g.op("Cast", w, "weights", to=10) if weights == "cast" else w
    prediction, codes = outcome(g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1])), "trt11")
    assert prediction.convolution("c").is_int8 is int8 and ("FLOAT-MIXED" in codes) is not int8


@pytest.mark.parametrize(
    ("data", "weights", "told"),
    [
        (np.float16, np.float32, True),
        (np.float32, np.float16, True),
        (np.float16, np.float16, False),
        (np.float32, np.float32, False),
    ],
)
def test_plain_inputs_of_two_float_types(data, weights, told):
    """The same where nothing is quantized: the builder refuses both."""
    g = Graph(opset=19, half=data == np.float16)
    x = g.input(1, 16, 8, 8)
    w = g.const("w", np.ones((16, 16, 1, 1)), weights)
    _, codes = outcome(g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1])), "trt11")
    assert ("FLOAT-MIXED" in codes) is told


@pytest.mark.parametrize(("outer", "expected"), [(0.05, False), (0.02, True)])
def test_pool_scales(g, outer, expected):
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    a = g.conv(x, "direct", 16, scale=outer)
    b = g.conv(g.pool(x, "pool"), "pooled", 16, scale=0.05)
    _, codes = outcome(g.model(a, b))
    assert ("POOL-SCALE" in codes) is expected
    if expected:
        readers = {r.node: r.scale for r in cause(codes["POOL-SCALE"]).readers}
        assert readers == pytest.approx({"direct.in.Q": 0.02, "pooled.in.Q": 0.05})


def test_scales_of_concats_and_splits(g):
    _, codes = outcome(concat((0.0213, 0.0213, 0.048), 0.048))
    found = codes["CONCAT-SCALE"]
    assert found.node == "join"
    refused = cause_of(ConcatScales, found)
    assert refused.parts == pytest.approx(
        (0.0213, 0.0213, 0.048)
    ) and refused.behind == pytest.approx(0.048)
    assert set(found.convolutions) >= {"c0", "c1"} and "c2" not in found.convolutions
    prediction, codes = outcome(concat((0.048, 0.048, 0.048), 0.048))
    assert "CONCAT-SCALE" not in codes and prediction.conversions == 1
    _, codes = outcome(split(0.02, 0.05))
    assert codes["SPLIT-SCALE"].node == "cut"
    assert "SPLIT-SCALE" not in outcome(split(0.05, 0.05))[1]
    for mode in ("constant", "reflect"):  # no convolution takes what mirrors the image
        g = Graph()
        pads = g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
        y = g.op("Pad", [g.relu(g.input(1, 16, 8, 8), "r"), pads], "pad", mode=mode)
        assert ("PAD-SPLIT" in outcome(g.model(g.conv(y, "c", 16)))[1]) == (mode == "constant")
    g = Graph()
    a = g.pair(g.pool(g.conv(g.input(1, 16, 8, 8), "c0", 16), "p", k=3, stride=1), "a", 0.05)
    b = g.pair(g.conv("x", "c1", 16), "b", 0.1)
    _, codes = outcome(g.model(g.conv(g.concat([a, b], "cat"), "c2", 16, scale=0.2)))
    found = cause_of(ConcatScales, codes["CONCAT-SCALE"])
    assert min(found.parts) == pytest.approx(0.05) and found.behind == pytest.approx(0.2)
    assert "loses 2.0 bits" in unified([*found.parts, found.behind])  # log2(0.2 / 0.05)
    g = Graph()
    # What the Q behind the Concat meets is the pair's own scale, whichever quantizers read the tensor between them
    low = g.pair(g.input(1, 16, 8, 8), "low", 0.045)
    joined = g.concat([g.resize(low, "up"), g.input(1, 16, 16, 16, name="y")], "join")
    _, codes = outcome(g.model(g.pair(joined, "joined", 0.06), low))
    assert {"join", "low.Q", "joined.Q"} <= names(codes["CONCAT-SCALE"])

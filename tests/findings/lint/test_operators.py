import functools
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.formats.predict_text import render
from qdqtool.ir.graph import Model
from qdqtool.patterns.layernorm import find_decomposed_layer_norms, layer_norm_inputs
from qdqtool.reasons.attention import DecomposedNorm
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.float_types import ConstantsBeyondFp16
from tests.findings.graphs import GRAPHS, ones
from tests.insertion.nets import Net, check, images, run, store_as_half
from tests.insertion.transformers import Tokens, samples, vit
from tests.notes import note_codes
from tests.slow import slow_after
from tests.trt.builder import Graph


def findings_of(model: onnx.ModelProto, code: str, target: str = "trt8.5") -> list[Finding]:
    return [f for f in qdqtool.predict(model, target).findings if f.code == code]


def nodes_of(model: onnx.ModelProto, code: str, target: str = "trt8.5") -> list[str]:
    return [f.node for f in findings_of(model, code, target)]


def conv3d(quantized: bool = True) -> onnx.ModelProto:
    g = Graph()
    x, w = g.input(1, 4, 8, 8, 8), ones(g, 4, 4, 1, 1, 1)
    x, w = (g.pair(x, "in"), g.pair(w, "wq")) if quantized else (x, w)
    return g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1, 1]))


@pytest.mark.parametrize(
    ("quantized", "target", "convolutions"),
    [(True, "trt8.0", [["c"]]), (True, "trt8.5", []), (False, "trt8.0", [])],
)
def test_3d_convolution_is_reported_where_builds_fail(
    quantized: bool, target: str, convolutions: list[list[str]]
) -> None:
    assert [
        f.convolutions for f in findings_of(conv3d(quantized), "CONV3D-INT8", target)
    ] == convolutions


@pytest.mark.parametrize(
    ("op", "axes", "codes"),
    [
        ("ConvTranspose", 3, {"CT3D-FLOAT"}),  # in float, so that the scales do not matter
        ("ConvTranspose", 2, {"CT-AXIS"}),
        ("Conv", 3, {"W-AXIS"}),
    ],
)
def test_3d_conv_transpose_is_reported(g: Graph, op: str, axes: int, codes: set[str]) -> None:
    w = g.pair(ones(g, 4, 4, *[2] * axes), "wq", np.full(4, 0.01), axis=1)
    x = g.pair(g.input(1, 4, *[8] * axes), "in")
    findings = qdqtool.predict(
        g.model(g.op(op, [x, w], "c", kernel_shape=[2] * axes)), "trt10"
    ).findings
    assert {f.code for f in findings} & {"CT3D-FLOAT", "CT-AXIS", "W-AXIS"} == codes


@pytest.mark.parametrize(
    ("paired", "codes", "both"),
    [
        ("xy", ["EINSUM-FLOAT", "MATMUL-COMPUTED"], True),
        ("y", ["EINSUM-FLOAT"], False),
        ("", [], False),
    ],
)
def test_product_of_activations_is_reported(
    g: Graph, paired: str, codes: list[str], both: bool
) -> None:
    tensors = {n: g.op("Neg", g.input(1, 16, 16, name=n), f"neg_{n}") for n in "xy"}
    operands = [g.pair(t, n) if n in paired else t for n, t in tensors.items()]
    model = g.model(
        g.op("MatMul", operands, "m"), g.op("Einsum", operands, "e", equation="bij,bjk->bik")
    )
    found = {
        f.code: f.message
        for f in qdqtool.predict(model).findings
        if f.code in ("MATMUL-COMPUTED", "EINSUM-FLOAT")
    }
    assert sorted(found) == codes and ("Both operands" in found.get("EINSUM-FLOAT", "")) is both


@pytest.mark.parametrize(("size", "nodes"), [(32, ["c"]), (14, ["c"]), (7, [])])
def test_patch_embedding_is_reported(g: Graph, size: int, nodes: list[str]) -> None:
    x, w = g.pair(g.input(1, 3, 64, 64), "in"), g.weights("w", (16, 3, size, size), "qdq")
    model = g.model(g.op("Conv", [x, w], "c", kernel_shape=[size, size], strides=[size, size]))
    assert nodes_of(model, "KERNEL-LARGE") == nodes


@pytest.mark.parametrize(("op", "nodes"), [("Softmax", ["n"]), ("Relu", [])])
def test_softmax_after_a_pair_is_reported(g: Graph, op: str, nodes: list[str]) -> None:
    model = g.model(g.op(op, g.pair(g.conv(g.input(1, 16, 8, 8), "c", 16), "p"), "n"))
    assert nodes_of(model, "NORM-FLOAT") == nodes


def test_plugin_is_reported_and_layers_have_the_types_of_outcomes(g: Graph) -> None:
    q = g.q(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r"), "q")
    y = g.dq(g.op("Special", q, "plug", domain="trt"), "dq")
    prediction = qdqtool.predict(g.model(g.conv(y, "c1", 16, scale=None)), "trt8.5")
    assert [f.node for f in prediction.findings if f.code == "PLUGIN-OUTSIDE"] == ["plug"]
    for conv in prediction.convolutions:
        layer = next(layer for layer in prediction.layers if conv.name in layer.nodes)
        assert [t.precision for t in layer.inputs][:1] == conv.inputs[:1]
        assert [t.precision for t in layer.outputs] == [conv.output]


def test_small_bias_that_a_convolution_absorbs_is_not_reported(net: Net) -> None:
    net.output(net.op("Add", "sum", net.conv("c", "x"), net.const("b", np.full((16, 1, 1), 1e-9))))
    model = qdqtool.insert(net.model(), images(1), predict=False).model
    assert not findings_of(model, "CONST-FP16", "trt10")


@pytest.mark.parametrize(
    ("op", "domain", "target", "codes"),
    [
        ("QLinearAdd", "", "trt8.5", ["QOPERATOR"]),
        ("QLinearAdd", "com.microsoft.nchwc", "rtx1.7", ["QOPERATOR"]),
        ("QLinearAdd", "com.ms.internal.nhwc", "trt8.5", ["QOPERATOR"]),
        ("QLinearAdd", "com.microsoft", "rtx1.7", ["QOPERATOR"]),
        ("DynamicQuantizeMatMul", "com.microsoft", "trt8.5", ["QOPERATOR"]),
        ("RoundToInteger", "com.microsoft", "rtx1.7", ["QOPERATOR"]),
        ("QGemm", "com.microsoft", "trt8.5", ["QOPERATOR"]),
        ("QGemm", "", "rtx1.7", ["QOPERATOR"]),
        ("TRT_FP4QuantizeLinear", "trt", "trt10", ["FP8-OUTSIDE"]),
        ("QLinearAdd", "acme", "trt8.5", ["PLUGIN-OUTSIDE"]),
        ("QGemm", "acme", "rtx1.7", []),
    ],
)
def test_integer_operator_is_reported_unless_it_is_a_plugin(
    g: Graph, op: str, domain: str, target: str, codes: list[str]
) -> None:
    y = g.op(op, g.pair(g.input(1, 16, 8, 8), "in"), "plug", domain=domain)
    findings = qdqtool.predict(g.model(g.conv(y, "c", 16)), target).findings
    assert [f.code for f in findings if f.causes[0].reason.node == "plug"] == codes


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_int4_is_reported_first_and_not_explained_with_int8(target: str) -> None:
    prediction = qdqtool.predict(GRAPHS["outside-rules"](), target)
    assert "INT4 Q/DQ is not predicted" in str(render(prediction))
    codes = {f.code for f in prediction.findings if "c" in f.convolutions}
    assert "FP8-OUTSIDE" in codes and codes <= {"FP8-OUTSIDE", "INPUT-CONVERSION", "CONVERSION"}


# Decomposed LayerNorms and constants that FP16 cannot hold.


def quantized(model: onnx.ModelProto, **choices: object) -> onnx.ModelProto:
    data = samples(model, 1)
    return qdqtool.insert(model, data, method="max", losses=0, predict=False, **choices).model  # type: ignore[arg-type]


@functools.cache
def quantized_vit(**choices: Any) -> onnx.ModelProto:
    return quantized(vit(**choices))


def norms(model: onnx.ModelProto, target: str) -> list[DecomposedNorm]:
    causes = [c.reason for f in findings_of(model, "NORM-PIECES", target) for c in f.causes]
    return [reason for reason in causes if isinstance(reason, DecomposedNorm)]


# Forms of decomposed LayerNorms; a LayerNormalization computes the first ones exactly.
EXACT = (
    "Pow",
    "Mul",
    "Sub twice",
    "Reciprocal",
    "one over",
    "power of -0.5",
    "Cast in front",
    "Casts around the Add",
    "Casts of constants",
    "another mean",
    "axes as an input",
    "Cast behind Div",
    "no gain or bias",
)
FORMS = (
    *EXACT,
    "root mean square",
    "squares less the mean's",
    "factors of both",
    "other axes",
    "root of the sum",
    "unbiased",
)


def normalized(form: str, eps: float) -> onnx.ModelProto:
    """Return a Linear, a decomposed LayerNorm and a Linear; the axes are an input in opset 18."""
    net, opset = Tokens(3, 8), (18 if form == "axes as an input" else 17)
    types = {"to": int(onnx.TensorProto.FLOAT)}

    def cast(name: str, x: str, casting_form: str) -> str:
        return net.op("Cast", name, x, **types) if form == casting_form else x

    def mean(name: str, x: str) -> str:
        axes = [2] if form == "other axes" else [-1]
        if opset == 17:
            return net.op("ReduceMean", name, x, axes=axes)
        return net.op("ReduceMean", name, x, net.const(f"{name}.axes", axes, np.int64))

    x = net.linear("first", "x", 8, 16)
    data = cast("wide", x, "Cast in front")
    middle = mean("mean", data)
    centered = base = net.op("Sub", "sub", data, middle)
    if form in ("root mean square", "squares less the mean's"):
        base = data
    if form in ("Sub twice", "another mean"):
        base = net.op(
            "Sub", "again", data, mean("another", data) if form == "another mean" else middle
        )
    two = cast("two.cast", net.const("two", 2.0), "Casts of constants")
    square = (
        net.op("Mul", "square", base, base) if form == "Mul" else net.op("Pow", "square", base, two)
    )
    variance = (
        net.op("ReduceSum", "var", square, net.const("sum.axes", [-1], np.int64))
        if form == "root of the sum"
        else mean("var", square)
    )
    if form == "unbiased":
        more = net.op("Mul", "more", variance, net.const("n", 16.0))
        variance = net.op("Div", "less", more, net.const("n-1", 15.0))
    if form == "squares less the mean's":
        variance = net.op(
            "Relu",
            "positive",
            net.op("Sub", "less", variance, net.op("Mul", "of mean", middle, middle)),
        )
    epsilon = cast("eps.cast", net.const("epsilon", eps), "Casts of constants")
    around = "Casts around the Add"
    added = cast("after", net.op("Add", "eps", cast("before", variance, around), epsilon), around)
    gain = net.const("gamma", net.rng.uniform(0.5, 1.5, 16))
    bias = net.const("beta", net.rng.normal(0, 0.1, 16))
    if form == "power of -0.5":
        out = net.op(
            "Mul", "div", centered, net.op("Pow", "inverse", added, net.const("minus half", -0.5))
        )
    else:
        root = net.op("Sqrt", "root", added)
        if form == "factors of both":  # as Keras writes it
            factor = net.op("Mul", "factor", net.op("Reciprocal", "inverse", root), gain)
            rest = net.op("Sub", "rest", bias, net.op("Mul", "of mean", middle, factor))
            out = net.op("Add", "shift", net.op("Mul", "div", data, factor), rest)
        elif form == "Reciprocal":
            out = net.op("Mul", "div", net.op("Reciprocal", "inverse", root), centered)
        elif form == "one over":
            out = net.op(
                "Mul", "div", centered, net.op("Div", "inverse", net.const("one", 1.0), root)
            )
        else:
            out = net.op("Div", "div", data if form == "root mean square" else centered, root)
    out = cast("narrow", out, "Cast behind Div")
    if form not in ("no gain or bias", "factors of both"):
        out = net.op("Add", "shift", net.op("Mul", "scale", out, gain), bias)
    net.output(net.linear("second", out, 16, 8))
    return net.model(opset)


@pytest.mark.parametrize("form", FORMS)
def test_decomposed_norm_of_each_form_is_found(form: str) -> None:
    model = Model(normalized(form, 1e-5))
    (pieces,) = find_decomposed_layer_norms(model)
    assert (pieces.input, pieces.square.name) == ("first.add.out", "square")
    assert pieces.epsilon == (
        None if form in ("squares less the mean's", "unbiased") else pytest.approx(1e-5)
    )
    assert {"square", "var", "eps", "div"} <= {n.name for n in pieces.fp32_nodes}
    assert (layer_norm_inputs(model, pieces) is not None) is (form in EXACT)
    assert "div" in {n.name for n in pieces.nodes}


@pytest.mark.parametrize(
    ("target", "exact"),
    [
        ("trt8.0", False),
        ("trt8.5", False),
        ("trt8.6", True),
        ("trt10", True),
    ],
)
@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_decomposed_norm_is_reported_if_the_builder_may_use_fp16(
    target: str, exact: bool, square: str
) -> None:
    """The parser accepts LayerNormalization from TensorRT 8.6 on."""
    pieces = norms(quantized_vit(blocks=1, pieces=True, square=square), target)
    assert {r.node for r in pieces} == {f"{n}.square" for n in ("b0.ln1", "b0.ln2", "ln")}
    assert {r.exact for r in pieces} == {exact} and norms(quantized_vit(blocks=1), target) == []


@pytest.mark.parametrize("target", ["trt11", "rtx1.7"])
def test_decomposed_norm_in_fp32_is_not_reported_if_strongly_typed(target: str) -> None:
    floats = vit(blocks=1, pieces=True)
    assert norms(quantized(floats, target=target, high_precision="fp32"), target) == []
    assert (
        len(norms(quantized(store_as_half(floats), target=target, high_precision="fp32"), target))
        == 3
    )


@pytest.mark.parametrize(
    ("form", "eps", "target"),
    slow_after(
        len(FORMS),
        [
            (form, (1e-12, 1e-5, 1e-6)[(i + k) % 3], ("trt11", "rtx1.7")[(i // 3 + k) % 2])
            for k in range(2)
            for i, form in list(enumerate(FORMS))[:: 1 + 2 * k]
        ],
    ),
)  # each form with one target, a third of them with the other; epsilons in turn
def test_insert_writes_no_squares_in_fp16(target: str, eps: float, form: str) -> None:
    """`insert` writes a LayerNormalization if the result is equal, else keeps FP32."""
    floats = normalized(form, eps)
    result = qdqtool.insert(floats, samples(floats, 1), target=target, method="max", losses=0)
    index = Model(result.model)
    squares = [n for n in index.nodes if n.op in ("Pow", "Mul") and n.name.endswith("square")]
    exact = form in EXACT
    assert [n.op for n in index.nodes].count("LayerNormalization") == exact
    assert bool(squares) is not exact
    assert all(index.elem_type(n.output) == onnx.TensorProto.FLOAT for n in squares)
    assert {"norms-written", "norms-stay-fp32"} & set(note_codes(result.notes))
    assert "NORM-PIECES" not in {f.code for f in result.findings}
    assert "NORM-PIECES" not in result.prediction.findings_by_code()
    if target == "rtx1.7":
        assert [region.norms for region in result.prediction.regions] == [1]
    feeds = samples(floats, 1)[0]
    expected, actual = run(floats, feeds)[0], run(result.model, feeds)[0]
    assert np.sqrt(np.mean((actual - expected) ** 2)) < 0.1 * expected.std()


@pytest.mark.parametrize("form", ["Pow", "root mean square"])
def test_insert_into_fp16_file_writes_layer_norm_or_reports_it(form: str) -> None:
    """No note says that FP16 nodes of the file remain FP32."""
    floats = store_as_half(normalized(form, 1e-3))
    result = qdqtool.insert(floats, samples(floats), target="trt11", losses=0, predict=False)
    assert ("norms-written" in note_codes(result.notes)) is (form == "Pow")
    assert "norms-stay-fp32" not in note_codes(result.notes)
    assert any(f.code == "NORM-PIECES" for f in result.findings) is (form != "Pow")
    check(result.model)


@pytest.mark.parametrize(
    ("form", "target"),
    slow_after(
        len(FORMS),
        [
            (form, ("trt8.5", "trt10", "trt11")[(i + k) % 3])
            for k in range(2)
            for i, form in list(enumerate(FORMS))[:: 1 + k]
        ],
    ),
)
def test_insert_reports_squares_that_may_become_fp16(target: str, form: str) -> None:
    """The finding names the fixing command if a LayerNormalization is exact."""
    floats = normalized(form, 1e-5)
    result = qdqtool.insert(
        store_as_half(floats) if target == "trt11" else floats,
        samples(floats, 1),
        target=target,
        high_precision="fp32" if target == "trt11" else None,
        method="max",
        losses=0,
        predict=False,
    )
    (finding,) = {f.code: f for f in result.findings if f.code == "NORM-PIECES"}.values()
    warnings = [w for w in result.warnings if w.code == "of-finding"]
    assert [w.values["finding"].code for w in warnings].count("NORM-PIECES") == 1
    assert finding.automatic is (form in EXACT and target != "trt8.5")
    if target != "trt8.5":
        fixed = qdqtool.fix(result.model, target, ["NORM-PIECES"])
        outcomes = [fixed.applied, fixed.refused]
        done, other = outcomes if form in EXACT else outcomes[::-1]
        assert [c.code for c in done] == ["NORM-PIECES"] and not other
        assert (norms(fixed.proto, target) == []) is (form in EXACT)


# Other sums of squares, by how they are written.
SQUARES = {
    "ReduceL2": ("ReduceL2",),
    "ReduceSumSquare": ("ReduceSumSquare",),
    "LpNormalization": ("LpNormalization",),
    "Pow": ("Pow", "ReduceSum", "Sqrt"),
    "Mul": ("Mul", "ReduceMean"),
    "first power": (),
}


def linear(g: Graph, rows: int = 4) -> str:
    weights = np.eye(16) if rows == 16 else np.ones((16, 16))
    return g.op(
        "MatMul", [g.pair(g.input(1, rows, 16), "in"), g.pair(g.const("w", weights), "wq")], "fc"
    )


def sum_of_squares(g: Graph, x: str, how: str) -> str:
    if how in ("ReduceL2", "ReduceSumSquare"):
        return g.op(how, x, "square", axes=[-1])
    if how in ("LpNormalization", "first power"):
        return g.op("LpNormalization", x, "square", p=1 if how == "first power" else 2, axis=-1)
    if how == "Mul":
        return g.op("ReduceMean", g.op("Mul", [x, x], "square"), "mean", axes=[-1])
    square = g.op("Pow", [x, g.const("two", np.float32(2))], "square")
    return g.op(
        "Sqrt", g.op("ReduceSum", [square, g.const("axes", np.asarray([-1]))], "sum"), "root"
    )


def summed(how: str, scale: float = 0.0, gain: float = 0.0) -> onnx.ModelProto:
    g = Graph(17)
    x = linear(g)
    if scale:
        x = g.dq(g.q(x, "q", scale), "dq", scale)
    if gain:
        x = g.op("LayerNormalization", [x, g.const("gain", np.full(16, gain, np.float32))], "norm")
    return g.model(sum_of_squares(g, x, how))


@pytest.mark.parametrize("how", SQUARES)
@pytest.mark.parametrize(
    ("scale", "gain", "bounded"),
    [
        (0.0, 0.0, False),
        (0.1, 0.0, True),
        (1.0, 0.0, False),
        (1e-4, 0.0, False),
        (0.0, 1.0, True),
        (0.0, 100.0, False),
    ],
)
def test_sum_of_squares_is_reported_unless_fp16_holds_it(
    how: str, scale: float, gain: float, bounded: bool
) -> None:
    """FP16 must hold the sum of 16 squares of 128 steps, and the square of one step.

    The sum must be below 65504, and the square above the smallest FP16 number.
    """
    model = summed(how, scale, gain)
    findings = findings_of(model, "NORM-PIECES", "trt10")
    sums = [(r.node, r.alone) for r in norms(model, "trt10")]
    proven = bounded and how != "LpNormalization"  # whose axis is not that of a reduction
    assert sums == ([("square", SQUARES[how][0])] if SQUARES[how] and not proven else [])
    assert not any(f.automatic for f in findings)
    assert not norms(model, "trt11") and not qdqtool.fix(model, "trt10", ["NORM-PIECES"]).applied


@pytest.mark.parametrize(
    ("op", "attributes", "bounded"),
    [
        ("Softmax", {}, True),
        ("Tanh", {}, True),
        ("Sin", {}, True),
        ("Clip", (-4.0, 4.0), True),
        ("Clip", (-300.0, 4.0), False),
        ("Clip", (-1e-5, 1e-5), False),
        ("Clip", (None, 4.0), False),
        ("Exp", {}, False),
        ("Relu", {}, False),
    ],
)
@pytest.mark.parametrize("between", [None, "Transpose", "Abs", "Add"])
def test_sum_of_squares_is_not_reported_after_an_operator_with_bounds(
    op: str,
    attributes: dict[str, object] | tuple[float | None, float],
    bounded: bool,
    between: str | None,
) -> None:
    """The largest FP16 number is 65504.

    The sum of 16 squares of 4 is far below this number, the sum of 16 squares of 300 is above it.
    """
    g = Graph(17)
    x = linear(g, 16)
    if isinstance(attributes, tuple):
        limits = [
            g.const(n, np.float32(v)) if v is not None else ""
            for n, v in zip(("low", "high"), attributes, strict=True)
        ]
        x = g.op(op, [x, *limits], "bounded")
    else:
        x = g.op(op, x, "bounded", **attributes)
    if between is not None:
        x = g.op(
            between,
            [x, x] if between == "Add" else x,
            "between",
            **({"perm": [0, 2, 1]} if between == "Transpose" else {}),
        )
    sums = norms(g.model(g.op("ReduceL2", x, "square", axes=[-1])), "trt10")
    assert [r.node for r in sums] == ([] if bounded and between != "Add" else ["square"])


@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_sum_of_squares_after_a_normalization_depends_on_its_bias(bias: float) -> None:
    g = Graph(17)
    inputs = [linear(g), g.const("gain", np.ones(16)), g.const("bias", np.full(16, bias))]
    x = g.op("LayerNormalization", inputs, "norm", axis=-1)
    assert len(norms(g.model(sum_of_squares(g, x, "ReduceSumSquare")), "trt10")) == (bias > 0.0)


@pytest.mark.parametrize(
    ("form", "reported"),
    [
        ("bnd,bnd->bn", True),
        ("...d,...d->...", True),
        ("bid,bjd->bij", False),
        ("two tensors", False),
        ("row by column", True),
        ("all with all", False),
    ],
)
def test_product_of_a_vector_with_itself_is_a_sum_of_squares(form: str, reported: bool) -> None:
    """The root of the sum is FP32 as well, also after operators that only move values."""
    g = Graph(17)
    x = g.op("MatMul", [g.input(1, 4, 16), g.const("w", 20 * np.eye(16, dtype=np.float32))], "fc")
    if form in ("row by column", "all with all"):
        axes = [g.const(f"axis{i}", np.asarray([i])) for i in (2, 3)]
        left = g.op("Unsqueeze", [x, axes[0]], "row") if reported else x
        right = (
            g.op("Unsqueeze", [x, axes[1]], "column")
            if reported
            else g.op("Transpose", x, "t", perm=[0, 2, 1])
        )
        y = g.op("MatMul", [left, right], "square")
        y = g.op("Squeeze", [y, axes[1]], "flat") if reported else y
    else:
        other = g.op("Relu", x, "other") if form == "two tensors" else x
        equation = "bnd,bnd->bn" if form == "two tensors" else form
        y = g.op("Einsum", [x, other], "square", equation=equation)
    floats = g.model(g.op("Relu", g.op("Sqrt", y, "root"), "last"))
    quantized = qdqtool.insert(floats, THIRTIES, losses=0, predict=False).model
    sums = [(f.node, f.automatic) for f in findings_of(quantized, "NORM-PIECES", "trt10")]
    assert sums == ([("square", False)] if reported else [])
    if reported:
        result = qdqtool.insert(floats, THIRTIES, target="trt11", losses=0, predict=False)
        (expected,), (actual,) = (run(m, THIRTIES[0]) for m in (floats, result.model))
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, expected, rtol=0.02)


THIRTIES = [{"x": np.full((1, 4, 16), 30.0, np.float32)}]


def linear_and_squares(how: str) -> onnx.ModelProto:
    g = Graph(17)
    x = g.op("MatMul", [g.input(1, 4, 16), ones(g, 16, 16)], "fc")
    return g.model(g.op("Relu", sum_of_squares(g, x, how), "last"))


@pytest.mark.parametrize("how", ["ReduceL2", "Pow"])
def test_insert_keeps_other_sums_of_squares_fp32(how: str) -> None:
    floats = linear_and_squares(how)
    result = qdqtool.insert(floats, THIRTIES, target="trt11", losses=0, predict=False)
    notes = [n for n in result.notes if n.code == "squares-stay-fp32"]
    assert "square" in [n.values["first"] for n in notes]
    (expected,), (actual,) = (run(m, THIRTIES[0]) for m in (floats, result.model))
    np.testing.assert_allclose(actual, expected, rtol=0.02)
    assert norms(result.model, "trt11") == []


@pytest.mark.parametrize("how", ["ReduceL2", "Pow"])
def test_sum_of_squares_of_fp16_file_is_reported(how: str) -> None:
    data = [{"x": np.full((1, 4, 16), 30.0, np.float16)}]
    options: Any = {"target": "trt11", "losses": 0, "predict": False, "high_precision": "fp32"}
    quantized = qdqtool.insert(store_as_half(linear_and_squares(how)), data, **options).model
    assert [r.node for r in norms(quantized, "trt11")] == ["square"]


@pytest.mark.parametrize("opset", [13, 16, 17])
def test_fix_writes_layer_normalization(opset: int) -> None:
    model = quantized_vit(blocks=1, pieces=True, opset=opset)
    fixed = qdqtool.fix(model, "trt8.6", ["NORM-PIECES"])
    assert [c.code for c in fixed.applied] == ["NORM-PIECES"] and not fixed.refused
    check(fixed.proto)
    assert fixed.proto.opset_import[0].version == 17
    ops = Counter(n.op_type for n in fixed.proto.graph.node)
    # One ReduceMean is the pooling.
    assert (ops["LayerNormalization"], ops["Sqrt"], ops["ReduceMean"]) == (3, 0, 1)
    assert norms(fixed.proto, "trt8.6") == []
    assert str(render(qdqtool.predict(model, "trt8.6"))).count("fix --only NORM-PIECES") == 1
    feeds = samples(model, 1)[0]
    np.testing.assert_allclose(run(fixed.proto, feeds)[0], run(model, feeds)[0], rtol=0, atol=0.05)


def test_fix_writes_no_layer_normalization_before_trt8_6() -> None:
    model = quantized_vit(blocks=1, pieces=True)
    fixed = qdqtool.fix(model, "trt8.5", ["NORM-PIECES"])
    assert not fixed.applied and fixed.proto.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    "form", ["as it is", "no bias", "nothing behind", "two axes", "one number as scale"]
)
def test_layer_norm_of_the_pieces_computes_the_same(form: str) -> None:
    rng, net = np.random.default_rng(1), Tokens(4, 6)
    axes, sizes = ([-2, -1], (6, 8)) if form == "two axes" else ([-1], (8,))
    gamma = rng.uniform(0.5, 1.5, () if form == "one number as scale" else sizes).astype(np.float32)
    beta = rng.normal(0, 1, sizes).astype(np.float32)
    x = net.op("Reshape", "flat", "x", net.const("shape", [1, 3, 6, 8], np.int64))
    centered = net.op("Sub", "sub", x, net.op("ReduceMean", "mean", x, axes=axes))
    variance = net.op("ReduceMean", "var", net.op("Mul", "square", centered, centered), axes=axes)
    root = net.op("Sqrt", "sqrt", net.op("Add", "eps", variance, net.const("epsilon", 1e-3)))
    out = net.op("Div", "div", centered, root)
    if form != "nothing behind":
        out = net.op("Mul", "scale", out, net.const("gamma", gamma))
        out = out if form == "no bias" else net.op("Add", "shift", out, net.const("beta", beta))
    net.output(out)
    model = net.index()
    (pieces,) = find_decomposed_layer_norms(model)
    norm = layer_norm_inputs(model, pieces)
    assert norm is not None and norm[0] == "flat.out" and pieces.epsilon is not None
    g = Graph(17)
    inputs = [g.const(name, v) for name, v in zip("sb", norm[1:], strict=True) if v is not None]
    attributes: Any = {"axis": -len(axes), "epsilon": pieces.epsilon}
    x = g.op("LayerNormalization", [g.input(1, 3, 6, 8), *inputs], "norm", **attributes)
    value = rng.normal(0, 2, (1, 3, 6, 8)).astype(np.float32)
    mean, variance = (f(value, axis=tuple(axes), keepdims=True) for f in (np.mean, np.var))
    expected = (value - mean) / np.sqrt(variance + 1e-3)
    if form != "nothing behind":
        expected = expected * gamma + (0 if form == "no bias" else beta)
    np.testing.assert_allclose(run(g.model(x), {"x": value})[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        "read elsewhere",
        "scale by row",
        "another axis",
        "no constant epsilon",
        "another difference",
        "turned difference",
        "times the root",
        "more axes",
        "mean of another axis",
        "mean of another tensor",
        "factor instead of epsilon",
        "third power",
    ],
)
def test_pieces_that_no_layer_norm_computes(change: str) -> None:
    net = Tokens(4, 6)
    x = net.op("Reshape", "flat", "x", net.const("shape", [1, 18, 8], np.int64))
    axes = [1] if change == "another axis" else [-1]
    source = net.op("Relu", "relu", x) if change == "mean of another tensor" else x
    mean_axes = [1] if change == "mean of another axis" else axes
    mean = net.op("ReduceMean", "mean", source, axes=mean_axes)
    centered = net.op("Sub", "sub", x, mean)
    power = net.const("two", 3.0 if change == "third power" else 2.0)
    variance = net.op("ReduceMean", "var", net.op("Pow", "square", centered, power), axes=axes)
    epsilon = (
        net.op("ReduceMax", "largest", x, keepdims=0)
        if change == "no constant epsilon"
        else net.const("e", 1e-3)
    )
    if change == "another difference":
        centered = net.op("Sub", "other", x, net.op("ReduceMax", "most", x, axes=[-1]))
    elif change == "turned difference":
        centered = net.op("Sub", "turned", mean, x)
    add = "Mul" if change == "factor instead of epsilon" else "Add"
    root = net.op("Sqrt", "sqrt", net.op(add, "eps", variance, epsilon))
    out = net.op("Mul" if change == "times the root" else "Div", "div", centered, root)
    shape = {"scale by row": (18, 1), "more axes": (1, 1, 1, 8)}.get(change, (8,))
    out = net.op(
        "Mul", "scale", out, net.const("gamma", np.arange(1.0, np.prod(shape) + 1).reshape(shape))
    )
    net.output(*([out, net.op("Relu", "other", centered)] if change == "read elsewhere" else [out]))
    model = net.index()
    norms = [layer_norm_inputs(model, pieces) for pieces in find_decomposed_layer_norms(model)]
    assert norms == ([] if change == "third power" else [None])


@pytest.mark.parametrize(
    ("op", "value", "counts"),
    [
        ("Add", -1e9, (1, 0)),
        ("Where", -3.4e38, (1, 0)),
        ("Add", 1e-12, (0, 1)),
        ("Max", 1e-12, (0, 1)),
        ("Add", 1e-5, (0, 0)),
        ("Max", -3.4e38, None),
        ("Add", 65504.0, None),
        ("Add", -np.inf, None),
        ("Mul", 0.0, None),
    ],
)
def test_constant_that_fp16_cannot_hold_is_reported(
    net: Net, op: str, value: float, counts: tuple[int, int] | None
) -> None:
    """Bounds and infinities keep their meaning in FP16; denormal numbers are a note."""
    inputs = [net.conv("c", "x"), net.const("k", value)]
    if op == "Where":
        inputs = [net.op("Less", "mask", inputs[0], net.const("zero", 0.0)), *inputs[::-1]]
    net.output(net.op("Relu", "end", net.op(op, "arithmetic", *inputs)))
    model = qdqtool.insert(net.model(), images(1), predict=False).model
    for target in ("trt8.5", "trt10"):
        findings = findings_of(model, "CONST-FP16", target)
        reasons = [c.reason for f in findings for c in f.causes]
        pairs = [(r.large, r.small) for r in reasons if isinstance(r, ConstantsBeyondFp16)]
        assert pairs == ([] if counts is None else [counts])
        severity = Severity.WARNING if any(counts or ()) else Severity.INFO
        assert {f.severity for f in findings} <= {severity}
    assert not findings_of(model, "CONST-FP16", "trt11")


def runtime_model(op: str) -> onnx.ModelProto:
    g = Graph(opset=20)
    return g.model(g.op(op, g.relu(g.input(1, 16, 8, 8), "r"), "n", domain="com.microsoft"))


@pytest.mark.parametrize(
    ("op", "counts"),
    [
        ("FusedConv", (1, 1, 1)),
        ("SkipLayerNormalization", (1, 1, 1)),
        ("MatMulNBits", (1, 1, 0)),  # TensorRT-RTX 1.7.1 imports packed weights
        ("Gelu", (0, 0, 0)),
        ("QLinearAdd", (0, 0, 0)),
    ],
)
@pytest.mark.parametrize(("number", "target"), [(0, "trt8.6"), (1, "trt11"), (2, "rtx1.7")])
def test_operators_of_onnxruntime_are_errors(
    op: str, counts: tuple[int, ...], number: int, target: str
) -> None:
    """Operators that ONNX also defines are accepted; integer formats have another finding."""
    findings = qdqtool.predict(runtime_model(op), target).findings
    assert [f.severity for f in findings if f.code == "ORT-OPERATOR"] == ["error"] * counts[number]
    assert "PLUGIN-OUTSIDE" not in [f.code for f in findings]


def recurrent(*, quantized: bool, op: str = "LSTM") -> onnx.ModelProto:
    g = Graph(opset=17)
    x = g.pair(g.input(10, 1, 16), "in") if quantized else g.input(10, 1, 16)
    gates = {"LSTM": 64, "GRU": 48, "RNN": 16}[op]
    weights = [g.const(name, np.ones((1, gates, 16), np.float32)) for name in ("w", "r")]
    return g.model(g.op(op, [x, *weights], "n", hidden_size=16))


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_quantized_recurrent_layers_run_in_float(op: str) -> None:
    (finding,) = findings_of(recurrent(quantized=True, op=op), "OP-FLOAT", "trt10")
    assert (finding.severity, finding.node) == ("warning", "n")
    assert not findings_of(recurrent(quantized=False, op=op), "OP-FLOAT", "trt10")


def pair_of(scale: float, is_uint8: bool = False) -> onnx.ModelProto:
    g = Graph(opset=17)
    zero = g.const("z", np.int8(0))
    parts = [g.const("s", np.float32(0.05)), zero], [g.const("t", np.float32(scale)), zero]
    x = g.input(1, 16, 8, 8)
    if is_uint8:
        g.inputs[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
        x = g.op("Cast", x, "cast", to=onnx.TensorProto.FLOAT)
    x = g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, *parts[0]], "q"), *parts[1]], "dq")
    g.channels[x] = 16
    return g.model(g.conv(x, "c", 16, scale=None))


@pytest.mark.parametrize(
    ("scale", "is_uint8", "is_reported"),
    [
        (0.5, False, True),
        (0.05, False, False),
        (0.05001, False, False),
        (0.05 / 255, False, True),
        (0.05 / 255, True, False),  # the preprocessing divides pixels by 255
        (0.1 / 255, True, True),
    ],
)
@pytest.mark.parametrize("target", ["trt8.6", "trt10", "rtx1.7"])
def test_scales_of_a_pair_that_differ_are_reported(
    scale: float, is_uint8: bool, is_reported: bool, target: str
) -> None:
    findings = findings_of(pair_of(scale, is_uint8), "PAIR-SCALE", target)
    assert [(f.node, f.convolutions) for f in findings] == [("dq", ["c"])] * is_reported

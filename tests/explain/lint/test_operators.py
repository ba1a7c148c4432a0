"""Operators of which the rules say nothing, or little: each on a graph that has one and on one that has not."""

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.fixing.api import fix
from qdqtool.model.graph import Model
from qdqtool.model.layernorm import as_one, layer_norms
from qdqtool.prediction import predict
from qdqtool.render.predict_text import render
from qdqtool.trt.faults import ConstantsInHalf, NormInPieces
from tests.explain.graphs import GRAPHS, ones
from tests.insertion.nets import Net, check, images, in_half, run
from tests.insertion.transformers import Tokens, samples, vit
from tests.slow import slow_after
from tests.trt.builder import Graph


def told(model, code, target="trt8.5"):
    return [f for f in predict(model, target).findings if f.code == code]


def conv3d(quantized=True):
    g = Graph()
    x, w = g.input(1, 4, 8, 8, 8), ones(g, 4, 4, 1, 1, 1)
    x, w = (g.pair(x, "in"), g.pair(w, "wq")) if quantized else (x, w)
    return g.model(g.op("Conv", [x, w], "c", kernel_shape=[1, 1, 1]))


def test_3d_convolutions_where_builds_failed():
    found = told(conv3d(), "CONV3D-INT8", "trt8.0")
    assert [(f.node, f.convolutions) for f in found] == [("c", ["c"])]
    assert not told(conv3d(), "CONV3D-INT8", "trt8.5") and not told(
        conv3d(False), "CONV3D-INT8", "trt8.0"
    )


@pytest.mark.parametrize(
    ("op", "axes", "expected"),
    [
        ("ConvTranspose", 3, ["c"]),
        ("ConvTranspose", 2, []),
        ("Conv", 3, []),
    ],
)
def test_quantized_3d_transposed_convolutions(g, op, axes, expected):
    x = g.pair(g.input(1, 4, *[8] * axes), "in")
    model = g.model(
        g.op(op, [x, g.pair(ones(g, 4, 4, *[2] * axes), "wq")], "c", kernel_shape=[2] * axes)
    )
    assert [f.node for f in told(model, "CT3D-FLOAT", "trt10")] == expected


@pytest.mark.parametrize(("size", "expected"), [(32, ["c"]), (14, ["c"]), (7, [])])
def test_a_patch_embedding_is_named(g, size, expected):
    x = g.pair(g.input(1, 3, 64, 64), "in")
    w = g.weights("w", (16, 3, size, size), "qdq")
    model = g.model(g.op("Conv", [x, w], "c", kernel_shape=[size, size], strides=[size, size]))
    assert [f.node for f in told(model, "KERNEL-LARGE")] == expected


@pytest.mark.parametrize(("op", "expected"), [("Softmax", ["n"]), ("Relu", [])])
def test_normalizations_behind_a_pair(g, op, expected):
    model = g.model(g.op(op, g.pair(g.conv(g.input(1, 16, 8, 8), "c", 16), "p"), "n"))
    assert [f.node for f in told(model, "NORM-FLOAT")] == expected


def test_plugins_rtx_and_biases(g, net: Net):
    q = g.q(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r"), "q")
    y = g.dq(g.op("Special", q, "plug", domain="trt"), "dq")
    prediction = predict(g.model(g.conv(y, "c1", 16, scale=None)), "trt8.5")
    assert [f.node for f in prediction.findings if f.code == "PLUGIN-OUTSIDE"] == ["plug"]
    for conv in prediction.convolutions:
        layer = next(layer for layer in prediction.layers if conv.name in layer.nodes)
        assert [t.precision for t in layer.inputs][:1] == conv.inputs[:1]
        assert [t.precision for t in layer.outputs] == [conv.output]
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r")
    assert told(g.model(g.conv(x, "c1", 24)), "FLOAT-FP32", "rtx1.7")
    net.output(net.op("Add", "sum", net.conv("c", "x"), net.const("b", np.full((16, 1, 1), 1e-9))))
    model = qdqtool.insert(net.model(), images(1), predict=False).model
    assert "CONST-FP16" not in predict(model, "trt10").findings_by_code()


@pytest.mark.parametrize(("target", "plugin"), [("trt8.5", ["PLUGIN-OUTSIDE"]), ("rtx1.7", [])])
def test_a_plugin_that_is_called_as_an_integer_operator_is_none(
    target: str, plugin: list[str]
) -> None:
    ours = ("", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
    for domain, codes in (*((o, ["QOPERATOR"]) for o in ours), ("acme", plugin)):
        for op in ("QLinearAdd", "DynamicQuantizeMatMul", "RoundToInteger", "QGemm"):
            g = Graph()
            y = g.op(op, g.pair(g.input(1, 16, 8, 8), "in"), "plug", domain=domain)
            found = predict(g.model(g.conv(y, "c", 16)), target).findings
            assert [f.code for f in found if f.node == "plug"] == codes, (domain, op)


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_fp8_is_named_first_and_not_explained_with_int8(target):
    prediction = predict(GRAPHS["outside-rules"](), target)
    first = render(prediction).splitlines()[0]
    assert first.startswith("FP8 Q/DQ is outside the rules")
    about = [f.code for f in prediction.findings if "c" in f.convolutions]
    assert set(about) <= {"FP8-OUTSIDE", "INPUT-CONVERSION"} and "FP8-OUTSIDE" in about


# What FP16 would spoil: layer normalizations in pieces, and constants out of its range.


def quantized(model: onnx.ModelProto, **choices: object) -> onnx.ModelProto:
    data = samples(model, 1)
    return qdqtool.insert(model, data, method="max", losses=0, predict=False, **choices).model  # type: ignore[arg-type]


@functools.cache
def quantized_vit(**choices: Any) -> onnx.ModelProto:
    return quantized(vit(**choices))


def norms(model: onnx.ModelProto, target: str) -> list[NormInPieces]:
    found = [
        c.refusal
        for f in predict(model, target).findings
        if f.code == "NORM-PIECES"
        for c in f.causes
    ]
    return [r for r in found if isinstance(r, NormInPieces)]


# How a normalization is written in pieces, and which of them a LayerNormalization computes.
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
    """A Linear, a normalization in pieces (opset 18, or 17 with axes as attributes) and a Linear; x [1, 3, 8, 8]."""
    net = Tokens(3, 8)
    opset = 18 if form == "axes as an input" else 17
    types = {"to": int(TensorProto.FLOAT)}

    def cast(name: str, x: str, wanted: str) -> str:
        return net.op("Cast", name, x, **types) if form == wanted else x

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
    if form == "root of the sum":
        variance = net.op("ReduceSum", "var", square, net.const("sum.axes", [-1], np.int64))
    else:
        variance = mean("var", square)
    if form == "unbiased":
        variance = net.op(
            "Div",
            "less",
            net.op("Mul", "more", variance, net.const("n", 16.0)),
            net.const("n-1", 15.0),
        )
    if form == "squares less the mean's":
        variance = net.op(
            "Relu",
            "positive",
            net.op("Sub", "less", variance, net.op("Mul", "of mean", middle, middle)),
        )
    epsilon = cast("eps.cast", net.const("epsilon", eps), "Casts of constants")
    added = net.op("Add", "eps", cast("before", variance, "Casts around the Add"), epsilon)
    added = cast("after", added, "Casts around the Add")
    gain, bias = (
        net.const("gamma", net.rng.uniform(0.5, 1.5, 16)),
        net.const("beta", net.rng.normal(0, 0.1, 16)),
    )
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
def test_every_form_of_a_norm_in_pieces_is_known(form: str) -> None:
    model = Model(normalized(form, 1e-5))
    (pieces,) = layer_norms(model)
    assert (pieces.tensor, pieces.square.name) == ("first.add.out", "square")
    assert pieces.epsilon == (
        None if form in ("squares less the mean's", "unbiased") else pytest.approx(1e-5)
    )
    assert {"square", "var", "eps", "div"} <= {n.name for n in pieces.wide}
    assert (as_one(model, pieces) is not None) is (form in EXACT)
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
def test_norms_in_pieces_are_named_where_the_builder_may_use_fp16(
    target: str, exact: bool, square: str
) -> None:
    """The parser takes LayerNormalization from 8.6 on."""
    found = norms(quantized_vit(blocks=1, pieces=True, square=square), target)
    assert {r.node for r in found} == {f"{n}.square" for n in ("b0.ln1", "b0.ln2", "ln")}
    assert {r.exact for r in found} == {exact}
    assert norms(quantized_vit(blocks=1), target) == []


@pytest.mark.parametrize("target", ["trt11", "rtx1.7"])
def test_where_the_file_decides_fp32_squares_are_no_matter(target: str) -> None:
    floats = vit(blocks=1, pieces=True)
    assert norms(quantized(floats, target=target, high_precision="fp32"), target) == []
    assert len(norms(quantized(in_half(floats), target=target, high_precision="fp32"), target)) == 3


EPSILONS = (1e-12, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("form", "eps", "target"),
    slow_after(
        len(FORMS),
        [
            (form, EPSILONS[(i + k) % 3], ("trt11", "rtx1.7")[(i // 3 + k) % 2])
            for k in range(2)
            for i, form in list(enumerate(FORMS))[:: 1 + 2 * k]
        ],
    ),
)  # each form with a target, and a third of them with the other; each epsilon in turn
def test_insert_leaves_no_squares_in_fp16(target: str, eps: float, form: str) -> None:
    """Whatever the epsilon is: a LayerNormalization where it computes the same, else FP32; Myelin's are counted."""
    floats = normalized(form, eps)
    result = qdqtool.insert(floats, samples(floats, 1), target=target, method="max", losses=0)
    index = Model(result.model)
    ops = [n.op for n in index.nodes]
    squares = [n for n in index.nodes if n.op in ("Pow", "Mul") and n.name.endswith("square")]
    exact = form in EXACT
    assert ops.count("LayerNormalization") == exact and bool(squares) is not exact
    assert all(index.elem_type(n.output) == TensorProto.FLOAT for n in squares)
    assert {Remark.NORMS_WRITTEN, Remark.NORMS_STAY_FP32} & set(remarks(result.notes))
    assert not any(f.code == "NORM-PIECES" for f in result.findings)
    assert (
        result.prediction is not None and "NORM-PIECES" not in result.prediction.findings_by_code()
    )
    if target == "rtx1.7":
        (region,) = result.prediction.regions
        assert region.norms == 1
    feeds = samples(floats, 1)[0]
    given, found = run(floats, feeds)[0], run(result.model, feeds)[0]
    assert np.sqrt(np.mean((found - given) ** 2)) < 0.1 * given.std()


@pytest.mark.parametrize("form", ["Pow", "root mean square"])
def test_a_file_in_fp16_gets_what_is_possible(form: str) -> None:
    """A LayerNormalization, or the warning: nothing is said to be FP32 that is not."""
    floats = in_half(normalized(form, 1e-3))
    result = qdqtool.insert(floats, samples(floats), target="trt11", losses=0, predict=False)
    assert (Remark.NORMS_WRITTEN in remarks(result.notes)) is (form == "Pow")
    assert Remark.NORMS_STAY_FP32 not in remarks(result.notes)
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
def test_insert_warns_of_squares_in_fp16(target: str, form: str) -> None:
    """Where the builder may choose FP16, or the file has it; with the command, where a LayerNormalization is exact."""
    floats = normalized(form, 1e-5)
    result = qdqtool.insert(
        in_half(floats) if target == "trt11" else floats,
        samples(floats, 1),
        target=target,
        high_precision="fp32" if target == "trt11" else None,
        method="max",
        losses=0,
        predict=False,
    )
    (finding,) = {f.code: f for f in result.findings if f.code == "NORM-PIECES"}.values()
    assert [
        w.values["code"] for w in result.warnings if w.remark is Remark.OF_FINDING_TO_FIX
    ].count("NORM-PIECES") == 1
    assert finding.automatic is (form in EXACT and target != "trt8.5")
    if target != "trt8.5":
        fixed = fix(result.model, target, ["NORM-PIECES"])
        assert [c.code for c in (fixed.applied if form in EXACT else fixed.refused)] == [
            "NORM-PIECES"
        ]
        assert not (fixed.refused if form in EXACT else fixed.applied)
        assert (norms(fixed.proto, target) == []) is (form in EXACT)


# Other sums of squares: how they are written, and whether what is in front proves that FP16 holds them.
SQUARES = {
    "ReduceL2": ("ReduceL2",),
    "ReduceSumSquare": ("ReduceSumSquare",),
    "LpNormalization": ("LpNormalization",),
    "Pow": ("Pow", "ReduceSum", "Sqrt"),
    "Mul": ("Mul", "ReduceMean"),
    "first power": (),
}


def linear(g: Graph, rows: int = 4) -> str:
    """A quantized Linear of 16 features."""
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
    """A Linear, a pair with a scale or a normalization with a gain where they are given, and a sum of squares."""
    g = Graph(17)
    x = linear(g)
    if scale:
        x = g.dq(g.q(x, "q", scale), "dq", scale)
    if gain:
        x = g.op("LayerNormalization", [x, g.const("gain", np.full(16, gain, np.float32))], "norm")
    return g.model(sum_of_squares(g, x, how))


@pytest.mark.parametrize("how", SQUARES)
@pytest.mark.parametrize(
    ("scale", "gain", "held"),
    [
        (0.0, 0.0, False),
        (0.1, 0.0, True),
        (1.0, 0.0, False),
        (1e-4, 0.0, False),
        (0.0, 1.0, True),
        (0.0, 100.0, False),
    ],
)
def test_other_sums_of_squares_are_named_unless_fp16_is_known_to_hold_them(
    how: str, scale: float, gain: float, held: bool
) -> None:
    """16 squares of up to 128 steps each have to stay below 65504, and that of one step above FP16's smallest."""
    model = summed(how, scale, gain)
    findings = told(model, "NORM-PIECES", "trt10")
    found = [c.refusal for f in findings for c in f.causes if isinstance(c.refusal, NormInPieces)]
    proven = held and how != "LpNormalization"  # whose axis is not that of a reduction
    assert [(r.node, r.alone) for r in found] == (
        [("square", SQUARES[how][0])] if SQUARES[how] and not proven else []
    )
    assert not any(f.automatic for f in findings)
    assert not norms(model, "trt11") and not fix(model, "trt10", ["NORM-PIECES"]).applied


@pytest.mark.parametrize(
    ("op", "attributes", "held"),
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
def test_squares_that_an_operator_in_front_bounds(
    op: str,
    attributes: dict[str, object] | tuple[float | None, float],
    held: bool,
    between: str | None,
) -> None:
    """FP16 ends at 65504: 16 squares of 4 are far below it, those of 300 not. A sum may be beyond the bound."""
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
    found = norms(g.model(g.op("ReduceL2", x, "square", axes=[-1])), "trt10")
    assert [r.node for r in found] == ([] if held and between != "Add" else ["square"])


@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_a_bias_counts_for_what_a_normalization_makes(bias: float) -> None:
    g = Graph(17)
    given = [linear(g), g.const("gain", np.ones(16)), g.const("bias", np.full(16, bias))]
    x = g.op("LayerNormalization", given, "norm", axis=-1)
    assert len(norms(g.model(sum_of_squares(g, x, "ReduceSumSquare")), "trt10")) == (bias > 0.0)


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("bnd,bnd->bn", True),
        ("...d,...d->...", True),
        ("bid,bjd->bij", False),
        ("two tensors", False),
        ("row by column", True),
        ("all with all", False),
    ],
)
def test_products_of_vectors_with_themselves_are_sums_of_squares(form: str, named: bool) -> None:
    """And what takes their root is FP32 with them, past what only moves the sums."""
    g = Graph(17)
    x = g.op("MatMul", [g.input(1, 4, 16), g.const("w", 20 * np.eye(16, dtype=np.float32))], "fc")
    if form in ("row by column", "all with all"):
        axes = [g.const(f"axis{i}", np.asarray([i])) for i in (2, 3)]
        left = g.op("Unsqueeze", [x, axes[0]], "row") if named else x
        right = (
            g.op("Unsqueeze", [x, axes[1]], "column")
            if named
            else g.op("Transpose", x, "t", perm=[0, 2, 1])
        )
        y = g.op("MatMul", [left, right], "square")
        y = g.op("Squeeze", [y, axes[1]], "flat") if named else y
    else:
        other = g.op("Relu", x, "other") if form == "two tensors" else x
        y = g.op(
            "Einsum",
            [x, other],
            "square",
            equation="bnd,bnd->bn" if form == "two tensors" else form,
        )
    floats = g.model(g.op("Relu", g.op("Sqrt", y, "root"), "last"))
    data = [{"x": np.full((1, 4, 16), 30.0, np.float32)}]
    quantized = qdqtool.insert(floats, data, losses=0, predict=False).model
    found = [f for f in predict(quantized, "trt10").findings if f.code == "NORM-PIECES"]
    assert [(f.node, f.automatic) for f in found] == ([("square", False)] if named else [])
    if named:
        result = qdqtool.insert(floats, data, target="trt11", losses=0, predict=False)
        (given,), (got,) = run(floats, data[0]), run(result.model, data[0])
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, given, rtol=0.02)


@pytest.mark.parametrize("how", ["ReduceL2", "Pow"])
def test_insert_keeps_other_sums_of_squares_fp32(how: str) -> None:
    g = Graph(17)
    x = g.op("MatMul", [g.input(1, 4, 16), ones(g, 16, 16)], "fc")
    floats = g.model(g.op("Relu", sum_of_squares(g, x, how), "last"))
    data = [{"x": np.full((1, 4, 16), 30.0, np.float32)}]
    result = qdqtool.insert(floats, data, target="trt11", losses=0, predict=False)
    assert "square" in [
        n.values["first"] for n in result.notes if n.remark is Remark.SQUARES_STAY_FP32
    ]
    (given,), (found,) = run(floats, data[0]), run(result.model, data[0])
    np.testing.assert_allclose(found, given, rtol=0.02)
    assert norms(result.model, "trt11") == []
    inside = in_half(floats)
    assert [r.node for r in norms(quantized_file(inside, data), "trt11")] == ["square"]


def quantized_file(model: onnx.ModelProto, data: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    halves = [{n: v.astype(np.float16) for n, v in d.items()} for d in data]
    return qdqtool.insert(
        model, halves, target="trt11", losses=0, predict=False, high_precision="fp32"
    ).model


@pytest.mark.parametrize("opset", [13, 16, 17])
def test_fix_writes_layer_normalization(opset: int) -> None:
    model = quantized_vit(blocks=1, pieces=True, opset=opset)
    fixed = fix(model, "trt8.6", ["NORM-PIECES"])
    assert [c.code for c in fixed.applied] == ["NORM-PIECES"] and not fixed.refused
    check(fixed.proto)
    assert fixed.proto.opset_import[0].version == 17
    ops = [n.op_type for n in fixed.proto.graph.node]
    assert (
        ops.count("LayerNormalization") == 3 and "Sqrt" not in ops and ops.count("ReduceMean") == 1
    )  # the pooling
    assert norms(fixed.proto, "trt8.6") == []
    assert render(predict(model, "trt8.6")).count("fix --only NORM-PIECES") == 1
    feeds = samples(model, 1)[0]
    np.testing.assert_allclose(run(fixed.proto, feeds)[0], run(model, feeds)[0], rtol=0, atol=0.05)
    old = fix(model, "trt8.5", ["NORM-PIECES"])
    assert not old.applied and old.proto.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize(
    "form", ["as it is", "no bias", "nothing behind", "two axes", "one number as scale"]
)
def test_what_a_layer_normalization_computes_exactly(form: str) -> None:
    """Compared with numpy by hand."""
    rng = np.random.default_rng(1)
    axes = [-2, -1] if form == "two axes" else [-1]
    sizes = (6, 8) if form == "two axes" else (8,)
    gamma = rng.uniform(0.5, 1.5, () if form == "one number as scale" else sizes).astype(np.float32)
    beta = rng.normal(0, 1, sizes).astype(np.float32)
    net = Tokens(4, 6)
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
    (pieces,) = layer_norms(model)
    found = as_one(model, pieces)
    assert found is not None and pieces.epsilon is not None
    assert found[0] == "flat.out"
    found = found[1:]
    made = helper.make_model(
        helper.make_graph(
            [
                helper.make_node(
                    "LayerNormalization",
                    ["x", "s", *(["b"] if found[1] is not None else [])],
                    ["y"],
                    axis=-len(axes),
                    epsilon=pieces.epsilon,
                )
            ],
            "one",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 6, 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [
                numpy_helper.from_array(v, n)
                for n, v in (("s", found[0]), ("b", found[1]))
                if v is not None
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    value = rng.normal(0, 2, (1, 3, 6, 8)).astype(np.float32)
    along = tuple(axes)
    mean = value.mean(along, keepdims=True)
    expected = (value - mean) / np.sqrt(value.var(along, keepdims=True) + 1e-3)
    if form != "nothing behind":
        expected = expected * gamma + (0 if form == "no bias" else beta)
    np.testing.assert_allclose(run(made, {"x": value})[0], expected, atol=1e-5)


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
    ],
)
def test_what_no_layer_normalization_computes(change: str) -> None:
    net = Tokens(4, 6)
    x = net.op("Reshape", "flat", "x", net.const("shape", [1, 18, 8], np.int64))
    axes = [1] if change == "another axis" else [-1]
    mean = net.op("ReduceMean", "mean", x, axes=axes)
    centered = net.op("Sub", "sub", x, mean)
    variance = net.op(
        "ReduceMean", "var", net.op("Pow", "square", centered, net.const("two", 2.0)), axes=axes
    )
    epsilon = (
        net.op("ReduceMax", "largest", x, keepdims=0)
        if change == "no constant epsilon"
        else net.const("e", 1e-3)
    )
    if change == "another difference":
        centered = net.op("Sub", "other", x, net.op("ReduceMax", "most", x, axes=[-1]))
    elif change == "turned difference":
        centered = net.op("Sub", "turned", mean, x)
    root = net.op("Sqrt", "sqrt", net.op("Add", "eps", variance, epsilon))
    out = net.op("Mul" if change == "times the root" else "Div", "div", centered, root)
    shape = {"scale by row": (18, 1), "more axes": (1, 1, 1, 8)}.get(change, (8,))
    out = net.op(
        "Mul", "scale", out, net.const("gamma", np.arange(1.0, np.prod(shape) + 1).reshape(shape))
    )
    net.output(*([out, net.op("Relu", "other", centered)] if change == "read elsewhere" else [out]))
    model = net.index()
    (pieces,) = layer_norms(model)
    assert as_one(model, pieces) is None


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
def test_constants_that_fp16_cannot_hold(
    net: Net, op: str, value: float, counts: tuple[int, int] | None
) -> None:
    """Bounds and infinities are what they are in FP16 too; denormal ones alone are worth a note."""
    x = net.conv("c", "x")
    constant = net.const("k", value)
    inputs = [x, constant]
    if op == "Where":
        inputs = [net.op("Less", "mask", x, net.const("zero", 0.0)), constant, x]
    net.output(net.op("Relu", "end", net.op(op, "arithmetic", *inputs)))
    model = qdqtool.insert(net.model(), images(1), predict=False).model
    for target in ("trt8.5", "trt10"):
        found = [
            (f.severity, c.refusal)
            for f in predict(model, target).findings
            if f.code == "CONST-FP16"
            for c in f.causes
        ]
        told = [(r.large, r.small) for _, r in found if isinstance(r, ConstantsInHalf)]
        assert told == ([] if counts is None else [counts])
        assert all(
            severity == ("warning" if any(counts or ()) else "info") for severity, _ in found
        )
    assert "CONST-FP16" not in predict(model, "trt11").findings_by_code()

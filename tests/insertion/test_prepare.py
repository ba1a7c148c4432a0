import numpy as np
import onnx
import pytest

from qdqtool.errors import ModelError
from qdqtool.insertion.prepare import prepare_float_model
from qdqtool.ir.graph import Model
from tests.errors import has
from tests.insertion.nets import (
    Net,
    assert_same_outputs,
    check,
    copy_model,
    images,
    nodes_of,
    run,
    value_of,
)
from tests.notes import note


def prepare_copy(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    copy = copy_model(model)
    notes = prepare_float_model(Model(copy), opset=13)
    check(copy)
    return copy, notes


def prepare_and_compare(
    model: onnx.ModelProto, tolerance: float = 1e-4
) -> tuple[onnx.ModelProto, list[str]]:
    copy, notes = prepare_copy(model)
    for feeds in images(2):
        assert_same_outputs(model, copy, feeds, rtol=tolerance, atol=tolerance)
    return copy, notes


@pytest.mark.parametrize("bias", [True, False])
def test_prepare_folds_batch_normalization(net: Net, bias: bool) -> None:
    before = net.output(net.op("Relu", "r", net.norm("n", net.conv("c", "x", bias=bias)))).model()
    after, notes = prepare_and_compare(before)
    assert notes == [note("norms-folded", count=1)]
    assert not nodes_of(after, "BatchNormalization") and len(after.graph.initializer) == 2
    assert {v.name for v in after.graph.value_info} <= {"n.out"}


@pytest.mark.parametrize(
    ("equation", "left", "right", "weights", "products"),
    [
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5), None, 1),
        ("bij,bjk->bki", (2, 3, 4), (2, 4, 5), None, 1),
        ("bhid,bhjd->bhij", (2, 3, 4, 6), (2, 3, 5, 6), None, 1),
        ("bihd,bjhd->bhij", (2, 4, 3, 6), (2, 5, 3, 6), None, 1),
        ("bij,bjk->bik", (1, 3, 4), (2, 4, 5), None, 1),
        ("ij,jk", (3, 4), (4, 5), None, 1),
        ("nchw,oc->nohw", (2, 4, 3, 5), (6, 4), 1, 1),
        ("oc,nchw->nohw", (6, 4), (2, 4, 3, 5), 0, 1),
        ("bij,jk->bik", (2, 3, 4), (4, 5), 1, 1),
        ("kj,bij->bik", (5, 4), (2, 3, 4), 0, 1),
        ("abc,cde->abde", (2, 3, 4), (4, 5, 6), 1, 1),
        ("abde,dec->abc", (2, 3, 4, 5), (4, 5, 6), 1, 1),
        ("cde,abc->adbe", (4, 5, 6), (2, 3, 4), 0, 1),
        ("bhwc,hkc->bhwk", (2, 3, 5, 4), (3, 6, 4), None, 1),
        ("bqc,bchw->bqhw", (2, 7, 4), (2, 4, 3, 5), None, 1),
        ("ijk,jil->kl", (3, 4, 5), (4, 3, 6), None, 1),
        ("bij,bjk", (2, 3, 4), (2, 4, 5), None, 1),
        ("bijc,bcxy->bijxy", (2, 3, 4, 5), (2, 5, 3, 2), None, 1),
        ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5), None, 1),
        ("...ij,...jk", (2, 7, 3, 4), (7, 4, 5), None, 1),
        ("i...j,jk->...ki", (3, 2, 6, 4), (4, 5), 1, 1),
        ("...ij,...jk->...ik", (3, 4), (4, 5), 1, 1),
        # No single product: a vector, a diagonal, no sum, a size that is repeated.
        ("bij,bkj->bk", (2, 3, 4), (2, 5, 4), None, 0),
        ("bii,bij->bj", (2, 3, 3), (2, 3, 4), None, 0),
        ("ij,jk->ijk", (3, 4), (4, 5), None, 0),
        ("bi,i->b", (3, 4), (4,), None, 0),
        ("bihs,bjhs->bhij", (2, 3, 4, 1), (2, 5, 4, 6), None, 0),
        ("ijk,jkl->il", (2, 3, 4), (1, 4, 5), None, 0),
    ],
)
def test_einsum_product_becomes_matmul(
    net: Net,
    equation: str,
    left: tuple[int, ...],
    right: tuple[int, ...],
    weights: int | None,
    products: int,
) -> None:
    """The values equal numpy's for any order of axes; weights become the second operand."""
    rng = np.random.default_rng(0)
    values = [rng.normal(0, 1, shape).astype(np.float32) for shape in (left, right)]
    names = ["x", "y"]
    if weights is not None:
        names[weights] = net.const("w", values[weights])
    net.inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, v.shape)
        for n, v in zip(names, values, strict=True)
        if n in ("x", "y")
    ]
    model = Model(net.output(net.op("Einsum", "e", *names, equation=equation)).open_model())
    prepare_float_model(model)
    matmuls = nodes_of(model.proto, "MatMul")
    assert (len(matmuls), len(nodes_of(model.proto, "Einsum"))) == (products, 1 - products)
    if weights is not None:
        (product,) = matmuls
        assert model.constant(product.input[1]).ndim == 2
    feeds = {n: v for n, v in zip(names, values, strict=True) if n in ("x", "y")}
    (result,) = run(model.proto, feeds)
    np.testing.assert_allclose(result, np.einsum(equation, *values), rtol=1e-5, atol=1e-5)


def test_random_einsums_keep_values() -> None:
    """A size is a number, a unique name or a shared name.

    Some sizes are 1, which Einsum broadcasts.
    """
    rng, counts_by_form = np.random.default_rng(0), {"MatMul": 0, "Einsum": 0}
    for _ in range(120):
        # Number of batch axes, summed axes, and axes of the left and the right operand alone.
        counts, letters = rng.integers((0, 1, 1, 1), (3, 3, 3, 3)), iter("abcdefgh")
        batch, summed, rows, columns = (
            ["".join(next(letters) for _ in range(n))][0] for n in counts
        )
        left, right, result = (
            "".join(rng.permutation([*t]))
            for t in (batch + summed + rows, batch + summed + columns, batch + rows + columns)
        )
        sizes, net = {c: int(rng.integers(1, 5)) for c in left + right}, Net()
        net.inputs, feeds, shared = [], {}, rng.random() < 0.5
        for name, axes in (("x", left), ("y", right)):
            shape = [1 if not shared and rng.random() < 0.1 else sizes[c] for c in axes]
            value = rng.normal(0, 1, shape).astype(np.float32)
            if name == "y" and rng.random() < 0.3:
                net.const("y", value)
                continue
            stated = [
                n if rng.random() < 0.8 else c if shared else name + c
                for c, n in zip(axes, shape, strict=True)
            ]
            net.inputs.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, stated)
            )
            feeds[name] = value
        product = net.op("Einsum", "e", "x", "y", equation=f"{left},{right}->{result}")
        model = net.output(product).model()
        expected = run(model, feeds)[0]
        prepare_float_model(Model(model))
        counts_by_form["Einsum" if nodes_of(model, "Einsum") else "MatMul"] += 1
        np.testing.assert_allclose(run(model, feeds)[0], expected, rtol=1e-4, atol=1e-5)
    assert min(counts_by_form.values()) > 24


@pytest.mark.parametrize(
    ("left", "right", "written"),
    [
        (["b", "n", "s"], ["b", "s", "d"], False),
        (["b", "n", "s"], ["b", 8, "d"], False),
        (["b", "n", 1], ["b", 8, "d"], False),
        (["b", "n", 8], ["b", 8, "d"], True),
    ],
)
def test_einsum_needs_equal_summed_sizes(
    net: Net, left: list[int | str], right: list[int | str], written: bool
) -> None:
    net.inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape)
        for n, shape in (("x", left), ("y", right))
    ]
    _, notes = prepare_copy(
        net.output(net.op("Einsum", "e", "x", "y", equation="bns,bsd->bnd")).model()
    )
    assert notes == [note("products-written", count=1)] * written


@pytest.mark.parametrize(
    ("equation", "written"),
    [
        ("NCHw,NCHv->NHCwv", True),
        ("nChw,cChv->ncChwv", True),
        ("nchw,nchv->nhcwv", False),
        ("Nchw,Nchw", False),
    ],
)
def test_einsum_equation_gets_lower_case(net: Net, equation: str, written: bool) -> None:
    """TensorRT's parser refuses capitals with "Invalid character(s) in Einsum equation"."""
    x = net.conv("c", "x")
    before = net.output(net.op("Einsum", "e", x, x, equation=equation)).model()
    after, notes = prepare_and_compare(before)
    result = onnx.helper.get_attribute_value(nodes_of(after, "Einsum")[0].attribute[0]).decode()
    assert result == equation if not written else result.islower()
    assert len(notes) == bool(written)


def test_shared_weights_are_copied(net: Net) -> None:
    square = net.const("w", net.rng.standard_normal((16, 16, 1, 1)))
    first, *others = (net.op("Conv", f"c{i}", "x", square) for i in range(3))
    net.output(net.norm("n", first), *others)
    after, notes = prepare_and_compare(
        net.output(net.conv("d", "x", kernel=1), net.op("Relu", "r", "d.weight")).model()
    )
    assert notes[0] == note("weights-copied", count=3)
    weights = {n.name: n.input[1] for n in nodes_of(after, "Conv")}
    assert len(set(weights.values())) == 4 and weights["d"] != "d.weight"


@pytest.mark.parametrize(("length", "folded"), [(1, True), (1000, True), (1001, False)])
def test_weights_after_up_to_1000_nodes_are_computed(net: Net, length: int, folded: bool) -> None:
    tensor = net.const("w", np.ones((16, 16, 1, 1)))
    for i in range(length):
        tensor = net.op("Identity", f"i{i}", tensor)
    after, notes = prepare_and_compare(net.output(net.op("Conv", "c", "x", tensor)).model())
    assert [n.op_type for n in after.graph.node] == ([] if folded else ["Identity"] * length) + [
        "Conv"
    ]
    assert notes == ([note("weights-computed", count=1)] if folded else [])


def computed_weights(
    op: str, *inputs: tuple[str, object, object], **attributes: object
) -> onnx.ModelProto:
    net = Net()
    weights = net.op(op, "k", *(net.const(*i) for i in inputs), **attributes)
    return net.output(net.op("Conv", "c", "x", weights)).open_model()


RAMP = np.arange(512.0).reshape(32, 16)


@pytest.mark.parametrize(
    ("proto", "expected"),
    [
        (
            computed_weights("Reshape", ("w", RAMP, np.float32), ("s", [0, 16, 1, -1], np.int64)),
            RAMP.reshape(32, 16, 1, 1),
        ),
        (
            computed_weights(
                "Reshape", ("w", RAMP, np.float32), ("s", [32, 16, 1, 1], np.int64), allowzero=1
            ),
            RAMP.reshape(32, 16, 1, 1),
        ),
        (
            computed_weights("Transpose", ("w", RAMP.reshape(1, 2, 16, 16), np.float32)),
            RAMP.reshape(1, 2, 16, 16).T,
        ),
        (
            computed_weights("Cast", ("w", RAMP.reshape(32, 16, 1, 1), np.float16), to=1),
            RAMP.reshape(32, 16, 1, 1),
        ),
        (
            computed_weights("Cast", ("w", RAMP.reshape(32, 16, 1, 1), np.int64), to=11),
            RAMP.reshape(32, 16, 1, 1),
        ),
        (computed_weights("Cast", ("w", RAMP.reshape(32, 16, 1, 1), np.float32), to=6), None),
        (computed_weights("Cast", ("w", RAMP.reshape(32, 16, 1, 1), np.float32)), None),  # no type
        (
            computed_weights("ConstantOfShape", ("s", [2, 16, 1, 3], np.int64)),
            np.zeros((2, 16, 1, 3)),
        ),
        (
            computed_weights(
                "ConstantOfShape",
                ("s", [2, 16, 1, 3], np.int64),
                value=onnx.helper.make_tensor("v", 1, [1], [0.5]),
            ),
            np.full((2, 16, 1, 3), 0.5),
        ),
        (
            computed_weights("ConstantOfShape", ("s", [0, 16, 1, 3], np.int64)),
            np.zeros((0, 16, 1, 3)),
        ),
        (computed_weights("ConstantOfShape", ("s", [-1, -16, 1, 3], np.int64)), None),
        (
            computed_weights("ConstantOfShape", ("s", [2**28 + 1, 1, 1, 1], np.int64)),
            None,
        ),  # over 1 GB
        (
            computed_weights("Neg", ("w", RAMP.reshape(32, 16, 1, 1), np.float32)),
            -RAMP.reshape(32, 16, 1, 1),
        ),
        (
            computed_weights("RandomUniformLike", ("w", RAMP.reshape(32, 16, 1, 1), np.float32)),
            None,
        ),
        (
            computed_weights(
                "Identity", ("w", RAMP.reshape(32, 16, 1, 1), np.float32), domain="example"
            ),
            None,
        ),
        # Damaged nodes.
        (
            computed_weights("Reshape", ("w", RAMP, np.float32), ("s", [16, 16, 3, 3], np.int64)),
            None,
        ),
        (
            computed_weights("Reshape", ("w", RAMP, np.float32), ("s", [32, 16, 0, 1], np.int64)),
            None,
        ),
        (
            computed_weights(
                "Transpose", ("w", RAMP.reshape(1, 2, 16, 16), np.float32), perm=[2, 3, 0, 0]
            ),
            None,
        ),
        (
            computed_weights(
                "Transpose", ("w", RAMP.reshape(1, 2, 16, 16), np.float32), perm=["a", "b"]
            ),
            None,
        ),
        (computed_weights("ConstantOfShape", ("s", [np.inf], np.float32)), None),
        (
            computed_weights(
                "ConstantOfShape",
                ("s", [2, 16, 1, 3], np.int64),
                value=onnx.helper.make_tensor("v", 1, [2], [0.5, 1.0]),
            ),
            None,
        ),
        (computed_weights("ConstantOfShape", ("s", [16, 16, 1, 1], np.int64), value=3), None),
    ],
)
def test_weights_of_one_constant_node(proto: onnx.ModelProto, expected: np.ndarray | None) -> None:
    notes = prepare_float_model(Model(proto))
    weight = proto.graph.node[-1].input[1]
    if expected is None:
        assert notes == [] and weight == "k.out"
    else:
        assert notes == [note("weights-computed", count=1)]
        np.testing.assert_array_equal(value_of(proto, weight), expected)


def test_standardized_weights_become_constants(net: Net) -> None:
    """torch exports NFNets with a BatchNormalization in training mode, which TensorRT rejects."""
    weight = net.rng.standard_normal((8, 16, 3, 3))
    gain, bias, zeros, ones = (
        net.const(n, np.full(8, v)) for n, v in zip("gbmo", (0.5, 0, 0, 1), strict=True)
    )
    net.nodes.append(
        onnx.helper.make_node(
            "BatchNormalization",
            [
                net.const("w", weight.reshape(1, 8, 144)),
                gain,
                bias,
                *(net.op("Identity", n, n) for n in (zeros, ones)),
            ],
            ["std", "mean", "var"],
            "norm",
            training_mode=1,
            epsilon=1e-6,
        )
    )
    net.output(
        net.op(
            "Conv", "c", "x", net.op("Reshape", "r", "std", net.const("s", [8, 16, 3, 3], np.int64))
        )
    )
    after, notes = prepare_copy(net.model())
    assert notes == [note("weights-computed", count=1)]
    assert [n.op_type for n in after.graph.node] == ["Conv"]
    mean, variance = weight.mean((1, 2, 3), keepdims=True), weight.var((1, 2, 3), keepdims=True)
    expected = 0.5 * (weight - mean) / np.sqrt(variance + 1e-6)
    np.testing.assert_allclose(
        value_of(after, after.graph.node[0].input[1]), expected, rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize(("count", "folded"), [(2, True), (3, False)])
def test_computed_weights_have_a_size_limit(
    count: int, folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtool.ir.constants.MAX_ELEMENTS", 32)  # the real limit is a gigabyte
    proto = computed_weights("ConstantOfShape", ("s", [count, 16, 1, 1], np.int64))
    assert bool(prepare_float_model(Model(proto))) is folded


def test_computed_parameters_become_constants(net: Net) -> None:
    """These are weights, biases and parameters of a normalization.

    The nodes of other constant inputs remain.
    """

    def identity(name: str, shape: tuple[int, ...]) -> str:
        return str(
            net.op("Identity", f"{name}/i", net.const(name, net.rng.uniform(0.5, 1.5, shape)))
        )

    conv = net.op("Conv", "c", "x", identity("w", (16, 16, 1, 1)), identity("b", (16,)))
    parameters = [identity(p, (16,)) for p in "gdmv"]
    normed = net.op("BatchNormalization", "n", net.op("Relu", "r", conv), *parameters)
    added = net.op("Add", "a", normed, identity("k", (16, 1, 1)))
    constant = net.op("Conv", "c2", identity("data", (1, 16, 8, 8)), "w/i.out")
    after, notes = prepare_and_compare(net.output(constant, added, net.conv("plain", "x")).model())
    assert notes == [note("weights-computed", count=7)]
    assert {n.name for n in after.graph.node} == {
        "c",
        "r",
        "n",
        "k/i",
        "a",
        "data/i",
        "c2",
        "plain",
    }


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_raising_opset_keeps_names_and_metadata(net: Net, opset: int) -> None:
    relu = net.op("Relu", "named/relu", net.conv("named/conv", "x"))
    before = net.output(
        net.op("Squeeze", "sq", net.op("GlobalAveragePool", "gap", relu), axes=[2, 3])
    ).model(opset, ir=6)
    before.metadata_props.add(key="stride", value="32")
    before.doc_string, before.graph.node[0].doc_string = "kept", "first"
    before.opset_import.add(domain="Paddle", version=1)
    after, notes = prepare_and_compare(before)
    assert notes == [note("opset-raised", before=opset, after=13)]
    assert {(o.domain, o.version) for o in after.opset_import} == {("", 13), ("Paddle", 1)}
    assert (after.doc_string, after.graph.node[0].doc_string) == ("kept", "first")
    assert [n.name for n in after.graph.node if n.name][:2] == ["named/conv", "named/relu"]
    assert (after.metadata_props[0].value, after.ir_version) == ("32", 7)


@pytest.mark.parametrize(
    ("opset", "least", "ir", "expected"),
    [
        (13, 13, 7, []),
        (14, 13, 8, []),
        (12, 13, 7, [note("opset-raised", before=12, after=13)]),
        (18, 19, 9, ["opset raised from 18 to 19"]),
        (19, 19, 9, []),
    ],
)
@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_lower_opset_is_raised(
    net: Net, domain: str, opset: int, least: int, ir: int, expected: list[str]
) -> None:
    model = net.output(net.conv("c", "x")).model(opset, ir=ir if opset >= least else 6)
    model.opset_import[0].domain = domain
    assert prepare_float_model(Model(model), opset=least) == expected
    assert [(o.domain, o.version) for o in model.opset_import] == [(domain, max(opset, least))]
    assert model.ir_version == ir


def test_model_without_opset_is_refused(net: Net) -> None:
    model = net.output(net.conv("c", "x")).model(12)
    del model.opset_import[:]
    with pytest.raises(ModelError, check=has("opset-too-old", path="model"), match=r"0 .* 13"):
        prepare_float_model(Model(model))


def test_raising_opset_keeps_node_names(net: Net) -> None:
    halves = net.op("Split", "halves", net.conv("c", "x"), outputs=2, axis=1, split=[8, 8])
    up = net.op("Upsample", "up", halves[1], net.const("s", [1, 1, 2, 2]))
    after, _ = prepare_and_compare(net.output(up, net.op("Relu", "r", halves[0])).model(9, ir=6))
    named = {n.output[0]: (n.op_type, n.name) for n in after.graph.node if n.op_type != "Constant"}
    assert named == {
        "c.out": ("Conv", "c"),
        "halves.out": ("Split", "halves"),
        "up.out": ("Resize", "up"),
        "r.out": ("Relu", "r"),
    }


def test_duplicate_node_names_are_replaced() -> None:
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["a"], "twice"),
        onnx.helper.make_node("Relu", ["x"], ["b"], "a"),
        onnx.helper.make_node("Relu", ["x"], ["c"], "a_1"),
        onnx.helper.make_node("Relu", ["x"], ["e"]),
        onnx.helper.make_node("Strange", ["x"], ["", "d"], "twice", domain="example"),
        onnx.helper.make_node("Relu", ["x"], ["f"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", Net().inputs, [])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    assert prepare_float_model(Model(model)) == [note("nodes-named", count=2)]
    assert [n.name for n in model.graph.node] == ["a_2", "a", "a_1", "", "d", ""]


@pytest.mark.parametrize(
    ("domain", "inputs", "op"),
    [
        ("", 2, "Add"),
        ("ai.onnx", 2, "Add"),
        ("", 1, "Sum"),
        ("", 3, "Sum"),
        ("example", 2, "Sum"),
    ],
)
def test_sum_of_two_becomes_add(net: Net, domain: str, inputs: int, op: str) -> None:
    nodes = [onnx.helper.make_node("Sum", ["x"] * inputs, ["y"], "s", domain=domain)]
    nodes.append(onnx.helper.make_node("Max", ["x", "x"], ["z"], "m"))
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", net.inputs, []))
    notes = prepare_float_model(Model(model))
    assert [n.op_type for n in model.graph.node] == [op, "Max"] and len(notes) == (op == "Add")

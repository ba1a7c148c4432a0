import numpy as np
import onnx
import pytest
from onnx import helper

from qdqtool.base.records import contents
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.explain import left_float as left
from qdqtool.insertion.placement import Placement, Rules, can_be_quantized, class_outputs, place
from qdqtool.insertion.structure import longest_path, weight_scale_axis
from qdqtool.model.graph import Model
from qdqtool.trt.faults import DeconvolutionFloat
from qdqtool.trt.refusals import WeightsNotConstant
from tests.calibration.nets import refused
from tests.insertion.nets import Net, detector, with_constant_nodes


def inputs(placement: Placement) -> set[tuple[str, str, str]]:
    """What was placed, as (tensor, reader, role)."""
    return {(t, r.node.name, r.role) for t, readers in placement.readers.items() for r in readers}


def reasons(placement: Placement) -> dict[str, tuple[object, ...]]:
    """Why each node is left float: the kind of record and its values."""
    return {s.node: (type(s.refusal), *contents(s.refusal)[2:]) for s in placement.skipped}


def placed(net: Net, rules: Rules | None = None) -> Placement:
    return place(net.index(), rules or Rules(head="none"))


def test_convolutions_and_chains_of_residuals(net: Net) -> None:
    net.output(net.silu("s", net.norm("n", net.conv("c", "x"))))
    result = placed(net)
    assert inputs(result) == {("x", "c", "input")}
    assert [(w.tensor, w.axis) for w in result.weights] == [("c.weight", 0)]
    assert not result.skipped
    net = Net()
    # The first Add's result is read by the second Add alone, which is quantized for the convolution behind it
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    first = net.op("Add", "add1", net.conv("c1", stem), stem)
    second = net.op("Add", "add2", net.conv("c2", stem), first)
    net.output(net.conv("c3", second))
    result = placed(net)
    skips = {(t, n) for t, n, role in inputs(result) if role == "residual"}
    assert skips == {("stem.out", "add1"), ("add1.out", "add2")}
    net = Net()
    gap = net.op("GlobalAveragePool", "gap", "x")
    net.output(net.conv("c3", net.op("Add", "add", net.conv("c", "x"), gap)))
    assert not any(node == "add" for _, node, _ in inputs(placed(net)))


def test_weights_that_are_stored_sparse_are_called_so(net: Net) -> None:
    net.output(net.conv("c", "x"))
    model = with_sparse_weights(net.open_model(), "c.weight")
    (skipped,) = place(Model(model), Rules(head="none")).skipped
    assert skipped.refusal == WeightsNotConstant(skipped.refusal.pass_name, "c", "c.weight", True)


def with_sparse_weights(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with an initializer as a sparse one, with all its values."""
    graph = model.graph
    (full,) = (t for t in graph.initializer if t.name == name)
    array = onnx.numpy_helper.to_array(full)
    places = onnx.numpy_helper.from_array(np.arange(array.size, dtype=np.int64))
    values = onnx.numpy_helper.from_array(array.reshape(-1), name)
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, array.shape))
    graph.initializer.remove(full)
    return model


def residual_net(activation: str = "", after: str = "conv", relu: bool = True) -> Net:
    """Conv, then (activation and) an Add with its own input, then what ``after`` says."""
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    inner = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    if activation == "silu":
        inner = net.silu("s", inner)
    out = net.op("Add", "add", inner, stem)
    if relu:
        out = net.op("Relu", "ra", out)
    net.output(net.conv("c3", out) if after == "conv" else net.op("Sigmoid", "end", out))
    return net


def test_skips_behind_bare_convolutions() -> None:
    result = placed(residual_net())
    assert ("stem.out", "add", "residual") in inputs(result)
    assert [(r.node.name, r.position) for r in result.readers["stem.out"]] == [
        ("c1", 0),
        ("add", 1),
    ]
    assert ("c2.out", "add", "residual") not in inputs(result)
    result = placed(residual_net(), Rules(residual_after_activation="both"))
    assert {t for t, node, _ in inputs(result) if node == "add"} == {"stem.out"}
    result = placed(residual_net(), Rules(residual_after_activation="none"))
    assert not any(node == "add" for _, node, _ in inputs(result))
    assert reasons(result)["add"] == (left.ResidualLeft, False)
    assert reasons(placed(residual_net(), Rules(residual="none")))["add"] == (
        left.ResidualLeft,
        True,
    )
    result = placed(residual_net(after="end"))
    assert not any(node == "add" for _, node, _ in inputs(result))
    assert reasons(result)["add"] == (left.ResultFloat, False)


@pytest.mark.parametrize(
    ("residual", "target_choice", "expected"),
    [
        ("auto", "both", {"stem.out", "s/Mul.out"}),
        ("auto", "skip", {"stem.out"}),
        ("auto", "none", set()),
        ("skip", "both", {"stem.out"}),
        ("both", "skip", {"stem.out", "s/Mul.out"}),
        ("none", "both", set()),
    ],
)
def test_behind_an_activation_the_choice_decides(
    residual: str, target_choice: str, expected: set[str]
) -> None:
    rules = Rules(residual=residual, residual_after_activation=target_choice)
    result = placed(residual_net("silu"), rules)
    assert {t for t, node, _ in inputs(result) if node == "add"} == expected
    assert ("add" in reasons(result)) is (not expected)


def test_sides_of_a_residual(net: Net) -> None:
    for swapped in (False, True):
        net = Net()
        stem = net.op("Relu", "stem", net.conv("c0", "x"))
        block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
        down = net.conv("down", stem, kernel=1)
        pair = (down, block) if swapped else (block, down)
        net.output(net.conv("c3", net.op("Relu", "ra", net.op("Add", "add", *pair))))
        result = placed(net)
        assert {t for t, node, _ in inputs(result) if node == "add"} == {"down.out"}
    net = Net()
    net.output(net.conv("c", net.op("Add", "add", net.conv("a", "x"), net.conv("b", "x"))))
    assert {t for t, node, _ in inputs(placed(net)) if node == "add"} == {"a.out"}
    alone = placed(
        net, Rules(head="none", exclude=["^b$"])
    )  # a convolution that stays float is no side
    assert {t for t, node, _ in inputs(alone) if node == "add"} == {"b.out"}
    for other in ("constant", "itself"):
        net = Net()
        inner = net.conv("c", "x")
        right = inner if other == "itself" else net.const("k", np.ones((1, 16, 8, 8)))
        net.output(net.conv("d", net.op("Relu", "r", net.op("Add", "add", inner, right))))
        result = placed(net)
        assert (
            inputs(result) == {("x", "c", "input"), ("r.out", "d", "input")} and not result.skipped
        )


def classifier(float_reader: bool) -> Net:
    net = Net()
    relu = net.op("Relu", "r", net.conv("c", "x"))
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", relu))
    outputs = [
        net.op("Gemm", "fc", flat, net.const("w", net.rng.standard_normal((10, 16))), transB=1)
    ]
    if float_reader:
        outputs.append(net.op("Sigmoid", "other", relu))
    net.output(*outputs)
    return net


def test_poolings_and_their_neighbours(net: Net) -> None:
    assert ("r.out", "gap", "input") in inputs(placed(classifier(False)))
    result = placed(classifier(True))
    assert not any(node == "gap" for _, node, _ in inputs(result))
    assert reasons(result)["gap"] == (left.InputFloat,)
    first = net.op(
        "AveragePool", "p1", net.op("Relu", "r", net.conv("a", "x")), kernel_shape=[1, 1]
    )
    second = net.op("AveragePool", "p2", first, kernel_shape=[1, 1])
    net.output(net.conv("b", first), net.conv("c", second))
    result = placed(net)
    assert {node for _, node, _ in inputs(result)} == {
        "a",
        "p1",
        "b",
        "p2",
        "c",
    } and not result.skipped
    assert [r.node.name for r in result.readers["p1.out"]] == ["p2", "b"]


@pytest.mark.parametrize(
    ("cin", "cout", "kernel", "group", "first", "quantized"),
    [
        (16, 16, 3, 1, False, True),
        (8, 8, 3, 1, False, False),  # neither side has 16 channels
        (8, 8, 3, 1, True, True),  # but the first layer may
        (3, 16, 3, 1, True, True),  # the stem of YOLOv8n
        (16, 4, 1, 1, False, True),  # 16 in, a multiple of 8
        (20, 10, 3, 1, False, False),  # neither side a multiple of 8
        (16, 16, 3, 16, False, True),  # depthwise
        (16, 16, 1, 16, False, False),  # depthwise 1x1
        (12, 12, 3, 12, False, False),  # 12 is not a multiple of 8
        (16, 16, [3, 1], 1, False, True),  # 16 of both are not small, whatever the kernel
        (15, 16, 3, 1, False, True),
        (15, 16, [3, 1], 1, False, False),  # 15 are, and want a square kernel
        (16, 15, [3, 1], 1, False, False),
        (15, 15, 3, 1, True, False),
        (8, 15, 3, 1, True, True),
        (15, 8, 3, 1, False, False),
        (15, 8, 3, 1, True, True),
        (8, 8, [3, 3], 1, True, True),
        (8, 8, [1, 3], 1, True, False),
        (16, 16, [3, 3], 2, False, True),  # eight in a group
        (16, 16, [2, 3], 2, False, False),
        (16, 16, [3, 2], 2, False, False),
        (24, 12, 3, 2, False, False),
    ],
)
def test_small_convolutions_by_modelopts_rule(
    cin: int, cout: int, kernel: int | list[int], group: int, first: bool, quantized: bool
) -> None:
    net = Net(channels=cin)
    tensor = "x" if first else net.op("Relu", "r", "x")
    sides = [kernel] * 2 if isinstance(kernel, int) else kernel
    weight = net.const("w", net.rng.standard_normal((cout, cin // group, *sides)))
    attributes = {} if group == 1 else {"group": group}
    net.output(net.op("Conv", "c", tensor, weight, **attributes))
    result = placed(net)
    assert quantized or reasons(result) == {
        "c": (left.SmallConvolution, cin // group, cout, tuple(sides))
    }
    assert (("c" not in reasons(result)) and bool(result.readers)) is quantized
    for rules in (Rules(include=["^c$"]), Rules(quantized=["c"])):
        assert [w.node.name for w in placed(net, rules).weights] == ["c"]


def test_the_rule_for_small_convolutions_is_one_for_convolutions() -> None:
    """Neither for products nor for transposed ones; for those along one axis too."""
    net = Net(channels=8)
    flat = net.op("Flatten", "flat", net.op("Relu", "r", "x"))
    rows = net.op("Reshape", "rows", "r.out", net.const("shape", [1, 8, 64], np.int64))
    net.output(
        net.op("Gemm", "g", flat, net.const("gw", np.ones((512, 3)))),
        net.op("ConvTranspose", "t", "r.out", net.const("tw", np.ones((8, 3, 2, 2)))),
        net.op("Conv", "row", rows, net.const("rw", np.ones((8, 8, 3)))),
    )
    result = placed(net)
    assert [w.node.name for w in result.weights] == ["g", "t"]
    assert reasons(result) == {"row": (left.SmallConvolution, 8, 8, (3,))}


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (Rules(exclude=["nothing"]), "_matches `exclude` 'nothing': 'c0'"),
        (Rules(include=["nothing"]), "_matches `include` 'nothing': 'c0'"),
        (Rules(include=["add"]), "_matches `include` 'add': 'c0'"),
        (Rules(exclude=["("]), "compile_pattern `exclude` '('"),
        (Rules(exclude_ops=["Gemm"]), "_Choice.__init__ Gemm"),
        (Rules(exclude_ops=["Relu"]), "_Choice.__init__ Relu: Add, Conv"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(rules: Rules, told: str) -> None:
    refused(QdqtoolError, told, placed, residual_net(), rules)


def test_what_holds_nothing_to_quantize_is_an_error(net: Net) -> None:
    w = net.const("w", np.full((16, 16, 1, 1), np.nan))
    net.output(net.conv("c", "x", weight=w, kernel=1))
    for path, name in (("", "model"), ("a.onnx", "a.onnx")):
        model = Model(net.model(), path)
        refused(
            ModelError,
            f"_place_weighted {name}: 'w' 'c' NaN `exclude`",
            place,
            model,
            Rules(head="none"),
        )
    net = Net()
    net.output(net.op("Relu", "r", "x"))
    for path, name in (("", "model"), ("a.onnx", "a.onnx")):
        with pytest.raises(left.NothingToQuantize) as error:
            place(Model(net.model(), path), Rules())
        assert (error.value.path, error.value.refusal) == (name, None)
    refused(QdqtoolError, "_matches `include` 'r'", placed, net, Rules(include=["r"]))
    refused(
        QdqtoolError,
        "_Choice.__init__ `exclude_op` Relu: none",
        placed,
        net,
        Rules(exclude_ops=["Relu"]),
    )


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "possible"),
    [
        ("Conv", ("w",), {}, True),
        ("Add", ("x",), {}, True),
        ("Sum", ("x",), {}, True),
        ("Sum", ("x", "x"), {}, False),
        ("Mul", ("x",), {}, False),
        ("GlobalAveragePool", (), {}, True),
        ("AveragePool", (), {"kernel_shape": [2, 2]}, True),
        ("MaxPool", (), {"kernel_shape": [2, 2]}, False),
        ("GlobalMaxPool", (), {}, False),
        ("ReduceMean", (), {"axes": [2, 3]}, True),
        ("ReduceMean", (), {"axes": [1]}, False),
        ("ReduceMean", (), {"axes": [2, 3], "keepdims": 0}, False),
        ("ReduceMax", (), {"axes": [2, 3]}, False),
    ],
)
def test_what_placement_decides_about(
    net: Net, op: str, inputs: tuple[str, ...], attributes: dict[str, object], possible: bool
) -> None:
    net.const("w", np.ones((16, 16, 1, 1)))
    net.output(net.op(op, "n", "x", *inputs, **attributes))
    model = net.index()
    assert can_be_quantized(model, model.node("n")) is possible


def test_transposed_and_excluded_convolutions(net: Net) -> None:
    result = placed(residual_net(), Rules(exclude=["^c1$", "add"]))
    assert not any(node in ("c1", "add") for _, node, _ in inputs(result))
    assert reasons(result) == {
        "c1": (left.Excluded, "exclude", "^c1$"),
        "add": (left.Excluded, "exclude", "add"),
    }
    by_op = placed(residual_net(), Rules(exclude_ops=["add"]))
    assert reasons(by_op) == {"add": (left.Excluded, "exclude_op", "Add")}
    by_name = placed(residual_net(), Rules(floats=["c1", "add", "no such"], include=["c1"]))
    assert reasons(by_name) == {"c1": (left.FloatForAccuracy,), "add": (left.FloatForAccuracy,)}
    first = placed(residual_net(), Rules(exclude=["c", "c1"]))
    assert (
        set(reasons(first).values()) == {(left.Excluded, "exclude", "c")}
        and len(first.skipped) == 4
    )
    assert not first.readers
    w = net.const("w", np.ones((16, 16, 2, 2)))
    net.output(net.op("ConvTranspose", "t", net.op("Relu", "r", net.conv("c", "x")), w))
    assert {w.node.name for w in placed(net).weights} == {"c", "t"}
    rtx = placed(net, Rules(transposed=False))
    assert {w.node.name for w in rtx.weights} == {"c"}
    assert reasons(rtx) == {"t": (DeconvolutionFloat,)}
    assert [w.axis for w in placed(net).weights] == [0, None]
    assert [w.axis for w in placed(net, Rules(transposed_per_channel=True)).weights] == [0, 1]


def test_what_stays_float_with_its_reason(net: Net) -> None:
    computed = net.conv("k", "x", kernel=1)
    kernel = net.op("Reshape", "kr", computed, net.const("ks", [16, 16, 2, 2], np.int64))
    w = net.const("w64", np.ones((16, 16, 1, 1)), np.float64)
    wide = net.op("Cast", "cast", "x", to=11)
    right = net.op("MatMul", "m3", "x", net.const("w3", np.ones((1, 8, 8))))
    net.output(net.op("Conv", "c", "x", kernel), right)
    net.output(net.op("Conv", "d", wide, w), dtype=11)
    assert reasons(placed(net, Rules(include=["k"]))) == {
        "c": (WeightsNotConstant, "kr.out", False),
        "d": (left.WeightsType, "double"),
        "m3": (left.WeightsRank, 3),
    }
    net = Net()
    # A user who includes it all the same gets no other answer
    constant = net.const("k", np.ones((1, 16, 8, 8)))
    net.output(net.op("Conv", "constant", constant, net.const("w1", np.ones((16, 16, 1, 1)))))
    net.output(
        net.op(
            "Conv",
            "computed",
            net.op("Relu", "r", constant),
            net.const("w0", np.ones((16, 16, 1, 1))),
        )
    )
    net.output(
        net.op(
            "Gemm", "ta", net.op("Flatten", "f", "x"), net.const("w2", np.ones((1, 16))), transA=1
        )
    )
    net.output(net.op("Gemm", "right", "f.out", net.const("w3", np.ones((1024, 16))), transA=0))
    net.output(
        net.op("Conv", "other", "x", net.const("w4", np.ones((16, 16, 1, 1))), domain="example")
    )
    net.output(net.op("Conv", "empty", "x", net.const("w5", np.ones((0, 16, 1, 1)))))
    net.output(net.op("Conv", "missing", "x", net.const("w6", np.ones((16, 16, 1, 1)))))
    proto = net.open_model()
    proto.graph.initializer[-1].data_location = onnx.TensorProto.EXTERNAL
    proto.graph.initializer[-1].ClearField("raw_data")
    proto.graph.initializer[-1].external_data.add(key="location", value="gone.bin")
    result = place(Model(proto), Rules(head="none", include=["."]))
    assert [w.node.name for w in result.weights] == ["right"]
    assert reasons(result) == {
        "constant": (left.UnfitInput, left.Unfit.CONSTANT),
        "computed": (left.UnfitInput, left.Unfit.CONSTANT),
        "ta": (left.UnfitInput, left.Unfit.TRANSPOSED),
        "other": (left.OtherDomain, "example"),
        "empty": (left.UnfitInput, left.Unfit.EMPTY),
        "missing": (left.UnfitInput, left.Unfit.UNREADABLE),
    }


@pytest.mark.parametrize(
    ("equation", "shapes", "why"),
    [
        ("...c,c->...", ([1, 5, 16], [16]), left.Unwritten.VECTOR),
        ("...c,...dc->...d", (None, [1, 6, 16]), left.Unwritten.RANK),
        ("bnc,bcd->bnd", (["b", "n", "c"], ["b", "d", "e"]), left.Unwritten.SUMMED),
        ("bnc,chd->bnhd", (["b", "n", 16], [16, "h", "d"]), left.Unwritten.SIZES),
    ],
)
def test_products_that_stay_in_an_einsum_are_told(
    net: Net,
    equation: str,
    shapes: tuple[list[int | str] | None, list[int | str]],
    why: left.Unwritten,
) -> None:
    """Those of constants alone are not, as they are computed while building."""
    net.inputs += [
        helper.make_tensor_value_info(n, 1, shape) for n, shape in zip("ab", shapes, strict=True)
    ]
    weight = net.const("w", np.ones((16, 16)))
    net.output(net.op("Einsum", "f", weight, weight, equation="ij,ij"))
    net.output(net.op("Einsum", "e", "a", "b", equation=equation))
    with pytest.raises(left.NothingToQuantize) as error:
        place(Model(net.open_model()), Rules())
    assert (error.value.refusal, error.value.count) == (
        left.ProductInEinsum(left.PLACEMENT, "", why),
        1,
    )
    net.output(net.conv("c", "x"))
    assert reasons(place(Model(net.open_model()), Rules())) == {"e": (left.ProductInEinsum, why)}


def test_bodies_of_if_are_left_float_and_told(net: Net) -> None:
    def branch(name: str) -> object:
        node = helper.make_node("Conv", ["x", "inner.weight"], [f"{name}.out"], name=f"{name}/conv")
        out = helper.make_tensor_value_info(f"{name}.out", 1, None)
        graph = helper.make_graph([node], name, [], [out])
        if name == "then":
            return graph
        inside = helper.make_node(
            "If", ["condition"], ["else.if"], then_branch=branch("then"), else_branch=graph
        )
        return helper.make_graph(
            [inside], "outer", [], [helper.make_tensor_value_info("else.if", 1, None)]
        )

    net.const("inner.weight", np.ones((16, 16, 1, 1)))
    condition = net.const("condition", True, np.bool_)
    chosen = net.op("If", "if", condition, then_branch=branch("then"), else_branch=branch("else"))
    net.output(net.conv("c", net.op("Relu", "r", chosen)))
    result = placed(net)
    assert [w.node.name for w in result.weights] == ["c"]
    assert reasons(result) == {"if": (left.InBody, 3)}


# Placement round the convolutions: which sums are residuals, and which poolings have quantized neighbours.


@pytest.mark.parametrize(
    ("mine", "other", "residual"),
    [
        ([1, 16, 8, 8], [1, 16, 8, 8], True),
        (["n", 16, 8, 8], [1, 16, 8, 8], True),  # one may well be n
        (["n", 16, 8, 8], ["n", 16, 8, "w"], True),
        ([1, 16, 8, 8], [1, 16, 8, 1], False),
        (["n", 16, 8, 8], ["n", 1, 8, 8], False),
        ([1, 16, 8, 8], [16, 8, 8], False),
    ],
)
def test_a_sum_of_two_shapes_is_a_residual_where_no_dimension_is_known_to_differ(
    mine: list[object], other: list[object], residual: bool
) -> None:
    for swapped in (False, True):
        net = Net()
        net.inputs = [
            helper.make_tensor_value_info("x", 1, mine),
            helper.make_tensor_value_info("y", 1, other),
        ]
        pair = [net.conv("c", "x"), "y"]
        net.output(net.conv("d", net.op("Add", "add", *(pair[::-1] if swapped else pair))))
        assert (("y", "add", "residual") in inputs(placed(net))) is residual


@pytest.mark.parametrize(
    ("between", "quantized"),
    [
        ("MaxPool", True),
        ("Concat", True),
        ("Transpose", True),
        ("Softmax", False),
        ("Tanh", True),
        ("Mul", False),
    ],
)
def test_a_residual_is_quantized_for_whoever_reads_its_values_quantized(
    between: str, quantized: bool
) -> None:
    net = Net()
    out = net.op("Add", "add", net.conv("a", "x"), "x")
    if between == "Concat":
        out = net.op("Concat", "between", "x", out, axis=1)
    elif between == "Mul":
        out = net.op("Mul", "between", "x", out)
    else:
        attributes = {"MaxPool": {"kernel_shape": [1, 1]}, "Transpose": {"perm": [0, 1, 3, 2]}}
        out = net.op(between, "between", out, **attributes.get(between, {}))
    net.output(net.conv("c", out, 32 if between == "Concat" else 16))
    assert (("x", "add", "residual") in inputs(placed(net))) is quantized


def test_a_pooling_wants_quantized_neighbours_on_both_sides_and_no_float_reader() -> None:
    def net(front: str = "Relu", back: str = "c", output: bool = False) -> Net:
        made = Net()
        tensor = made.conv("a", "x")
        tensor = (
            made.op("Add", "sum", tensor, made.op("Relu", "other", "x"))
            if front == "Add"
            else tensor
        )
        tensor = made.op("Relu", "r", tensor)
        tensor = (
            made.op("AveragePool", "before", tensor, kernel_shape=[1, 1])
            if front == "AveragePool"
            else tensor
        )
        tensor = made.op("Softmax", "soft", tensor) if front == "Softmax" else tensor
        pooled = made.op("AveragePool", "pool", tensor, kernel_shape=[1, 1])
        made.output(made.conv("c", pooled) if back == "c" else made.op("Softmax", "end", pooled))
        if output:
            made.output(tensor)
        return made

    def told(made: Net, **rules: object) -> object:
        result = placed(made, Rules(head="none", **rules))  # type: ignore[arg-type]
        return (
            "quantized"
            if any(node == "pool" for _, node, _ in inputs(result))
            else reasons(result).get("pool")
        )

    apart = (left.NoNeighbour,)
    assert told(net()) == told(net("Add")) == told(net("Softmax")) == "quantized"
    assert told(net(), exclude=["^a$"]) == apart  # the convolution in front is float
    assert told(net("AveragePool")) == apart  # nor does one look past a pooling that is float
    assert told(net(), exclude=["pool"]) == (left.Excluded, "exclude", "pool")
    assert told(net(back="end")) is None
    assert told(net(output=True)) == (left.InputFloat,)


def test_longest_paths(net: Net) -> None:
    low = net.op("RandomNormal", "made", shape=[1, 16, 8, 8])
    clipped = net.op("Clip", "clip", net.op("Relu", "r", "x"), "", net.const("six", 6.0))
    net.output(net.op("Add", "add", low, clipped))
    assert longest_path(net.index(), low, clipped) == (1, 2)


@pytest.mark.parametrize("constant_nodes", [False, True])
def test_longest_path_tells_the_block_from_its_downsample(net: Net, constant_nodes: bool) -> None:
    """Nodes that only hold constants are no part of a way."""
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    shortcut = net.conv("down", stem, kernel=1)
    net.output(net.op("Add", "add", shortcut, block))
    model = with_constant_nodes(net.model()) if constant_nodes else net.model()
    assert longest_path(Model(model), block, shortcut) == (3, 1)


def test_weight_axes(net: Net) -> None:
    net.conv("c", "x")
    w = net.const("w", np.zeros((16, 8, 2, 2)))
    net.op("ConvTranspose", "t", "x", w)
    g = net.const("g", np.zeros((16, 8, 2, 2)))
    net.op("ConvTranspose", "tg", "x", g, group=2)
    f = net.const("f", np.zeros((16, 16)))
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", "x"))
    net.op("Gemm", "g0", flat, f)
    net.op("Gemm", "g1", flat, f, transB=1)
    net.output(net.op("MatMul", "m", flat, f))
    model = net.index()
    names = ("c", "t", "tg", "g0", "g1", "m")
    ranks = {"g0": 2, "g1": 2, "m": 2}
    axes = {n: weight_scale_axis(model.node(n), ranks.get(n, 4), True) for n in names}
    assert axes == {"c": 0, "t": 1, "tg": None, "g0": 1, "g1": 0, "m": 1}
    safe = {n: weight_scale_axis(model.node(n), ranks.get(n, 4), False) for n in names}
    assert safe == {**axes, "t": None}


# Class scores ---------------------------------------------------------------------------------------------------------


def test_class_scores() -> None:
    model = Model(detector(classes=3))
    found = class_outputs(model)
    assert len(found) == 3
    assert [model.shape(t) for t in found] == [(1, 3, 8, 8), (1, 3, 4, 4), (1, 3, 2, 2)]
    made = Net()
    body = made.op("Relu", "relu", made.conv("body", "x"))
    made.output(
        made.op("Sigmoid", "sigmoid", made.conv("heat", body, cout=3)),
        made.conv("size", body, cout=2),
    )
    assert class_outputs(made.index()) == ("heat.out",)
    # A point in [n, classes, h, w] is a place in the picture; in a row of numbers or a sound it is none
    made = Net()
    assert scored(made, made.conv("c", "x")) == ("c.out",)
    made = Net()
    row = made.op("Reshape", "row", "x", made.const("shape", [1, 16, 64], np.int64))
    assert scored(made, made.op("Conv", "c", row, made.const("w", np.ones((3, 16, 1))))) == ()
    made = Net()
    assert scored(made, made.op("MatMul", "m", "x", made.const("w", np.ones((8, 3))))) == ()
    made = Net()
    made.output(
        made.op(
            "Sigmoid", "sigmoid", made.conv("c", made.op("Strange", "any", "x", domain="example"))
        )
    )
    assert class_outputs(Model(made.open_model())) == ()


def scored(net: Net, tensor: str) -> tuple[str, ...]:
    """The class outputs of a network whose scores are the Sigmoid of a tensor."""
    net.output(net.op("Sigmoid", "sigmoid", tensor))
    return class_outputs(net.index())


@pytest.mark.parametrize("moved", ["Reshape", "Transpose", "Concat", ""])
@pytest.mark.parametrize(
    ("end", "found"), [("Mul", ()), ("Sqrt", ()), ("", ("c.out",)), ("TopK", ("c.out",))]
)
def test_scores_go_out_or_are_sorted_but_not_calculated_with(
    moved: str, end: str, found: tuple[str, ...]
) -> None:
    made = Net()
    scores = made.op("Sigmoid", "sigmoid", made.conv("c", "x"))
    if moved == "Reshape":
        scores = made.op("Reshape", "moved", scores, made.const("shape", [1, 16, 64], np.int64))
    elif moved == "Transpose":
        scores = made.op("Transpose", "moved", scores, perm=[0, 2, 3, 1])
    elif moved == "Concat":
        scores = made.op("Concat", "moved", scores, "x", axis=1)
    if end == "Mul":
        scores = made.op("Mul", "end", made.const("two", 2.0), scores)
    elif end == "Sqrt":
        scores = made.op("Sqrt", "end", scores)
    elif end == "TopK":  # what is done with the best of them is no matter
        best = made.op("TopK", "top", scores, made.const("k", [1], np.int64), outputs=2, axis=1)
        scores = made.op("Mul", "end", best[0], made.const("two", 2.0))
    made.output(scores)
    assert class_outputs(made.index()) == found

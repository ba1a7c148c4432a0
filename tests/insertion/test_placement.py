from collections.abc import Callable

import numpy as np
import onnx
import pytest

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.placement import (
    Placement,
    PlacementRules,
    can_be_quantized,
    compute_placement,
    find_class_outputs,
)
from qdqtool.insertion.structure import branch_lengths
from qdqtool.ir.graph import Model
from qdqtool.reasons import placement as placement_reasons
from qdqtool.reasons.convolutions import FloatDeconvolution
from qdqtool.reasons.weights import WeightsNotConstant
from qdqtool.util.records import field_values
from tests.errors import has
from tests.insertion.nets import Net, detector, initializer, with_constant_nodes


def inputs(placement: Placement) -> set[tuple[str, str, str]]:
    return {(t, r.node.name, r.role) for t, readers in placement.inputs.items() for r in readers}


def reasons(placement: Placement) -> dict[str, tuple[object, ...]]:
    return {s.node: (type(s.record), *field_values(s.record)[2:]) for s in placement.skipped}


def place_net(net: Net, rules: PlacementRules | None = None) -> Placement:
    return compute_placement(net.index(), rules or PlacementRules(head="none"))


def quantized_inputs(placement: Placement, node: str) -> set[str]:
    return {t for t, name, _ in inputs(placement) if name == node}


def test_residual_that_only_a_residual_reads_is_quantized(net: Net) -> None:
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    first = net.op("Add", "add1", net.conv("c1", stem), stem)
    net.output(net.conv("c3", net.op("Add", "add2", net.conv("c2", stem), first)))
    skips = {(t, n) for t, n, role in inputs(place_net(net)) if role == "residual"}
    assert skips == {("stem.out", "add1"), ("add1.out", "add2")}


def test_sparse_weights_are_left_float(net: Net) -> None:
    model = make_weights_sparse(net.output(net.conv("c", "x")).open_model(), "c.weight")
    (skipped,) = compute_placement(Model(model), PlacementRules(head="none")).skipped
    assert skipped.record == WeightsNotConstant(skipped.record.pass_name, "c", "c.weight", True)


def make_weights_sparse(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    graph = model.graph
    (full,) = (t for t in graph.initializer if t.name == name)
    array = onnx.numpy_helper.to_array(full)
    places = onnx.numpy_helper.from_array(np.arange(array.size, dtype=np.int64))
    values = onnx.numpy_helper.from_array(array.reshape(-1), name)
    graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, array.shape))
    graph.initializer.remove(full)
    return model


def residual_net(activation: str = "", after: str = "conv", relu: bool = True) -> Net:
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    inner = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    if activation == "silu":
        inner = net.silu("s", inner)
    out = net.op("Add", "add", inner, stem)
    out = net.op("Relu", "ra", out) if relu else out
    return net.output(net.conv("c3", out) if after == "conv" else net.op("Sigmoid", "end", out))


def test_residual_of_bare_convolution_quantizes_skip() -> None:
    result = place_net(residual_net())
    assert {read for read in inputs(result) if "add" in read} == {("stem.out", "add", "residual")}
    assert [(r.node.name, r.position) for r in result.inputs["stem.out"]] == [
        ("c1", 0),
        ("add", 1),
    ]
    result = place_net(residual_net(), PlacementRules(residual_after_activation="both"))
    assert quantized_inputs(result, "add") == {"stem.out"}


@pytest.mark.parametrize(
    ("after", "rules", "reason"),
    [
        (
            "conv",
            PlacementRules(residual_after_activation="none"),
            (placement_reasons.FloatNode, placement_reasons.SkipCause.RESIDUAL_WITHOUT_GAIN),
        ),
        (
            "conv",
            PlacementRules(residual="none"),
            (placement_reasons.FloatNode, placement_reasons.SkipCause.RESIDUAL_NOT_REQUESTED),
        ),
        (
            "end",
            PlacementRules(head="none"),
            (placement_reasons.FloatNode, placement_reasons.SkipCause.RESULT_NOT_QUANTIZED),
        ),
    ],
    ids=["target", "user", "float consumer"],
)
def test_residual_is_left_float_with_reason(
    after: str, rules: PlacementRules, reason: tuple[object, ...]
) -> None:
    result = place_net(residual_net(after=after), rules)
    assert not quantized_inputs(result, "add") and reasons(result)["add"] == reason


@pytest.mark.parametrize(
    ("residual", "after_activation", "expected"),
    [
        ("auto", "both", {"stem.out", "s/Mul.out"}),
        ("auto", "skip", {"stem.out"}),
        ("auto", "none", set()),
        ("skip", "both", {"stem.out"}),
        ("both", "skip", {"stem.out", "s/Mul.out"}),
        ("none", "both", set()),
    ],
)
def test_residual_after_activation(
    residual: str, after_activation: str, expected: set[str]
) -> None:
    rules = PlacementRules(residual=residual, residual_after_activation=after_activation)
    result = place_net(residual_net("silu"), rules)
    assert quantized_inputs(result, "add") == expected
    assert ("add" in reasons(result)) is (not expected)


def two_convolutions(net: Net, swapped: bool) -> None:
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    down = net.conv("down", stem, kernel=1)
    pair = (down, block) if swapped else (block, down)
    net.output(net.conv("c3", net.op("Relu", "ra", net.op("Add", "add", *pair))))


def equal_convolutions(net: Net) -> None:
    net.output(net.conv("c", net.op("Add", "add", net.conv("a", "x"), net.conv("b", "x"))))


def add_of(net: Net, other: str) -> None:
    net.output(net.conv("d", net.op("Relu", "r", net.op("Add", "add", net.conv("c", "x"), other))))


@pytest.mark.parametrize(
    ("build", "exclude", "expected"),
    [
        pytest.param(lambda net: two_convolutions(net, False), [], {"down.out"}, id="shorter side"),
        pytest.param(
            lambda net: two_convolutions(net, True), [], {"down.out"}, id="shorter side first"
        ),
        pytest.param(equal_convolutions, [], {"a.out"}, id="equal sides"),
        # A convolution that stays float does not fuse the Add, so its side is quantized.
        pytest.param(equal_convolutions, ["^b$"], {"b.out"}, id="float side"),
        pytest.param(
            lambda net: add_of(net, net.op("GlobalAveragePool", "gap", "x")),
            [],
            set(),
            id="broadcast",
        ),
        pytest.param(
            lambda net: add_of(net, net.const("k", np.ones((1, 16, 8, 8)))),
            [],
            set(),
            id="constant",
        ),
        pytest.param(lambda net: add_of(net, "c.out"), [], set(), id="itself"),
    ],
)
def test_residual_input_of_add(
    net: Net, build: Callable[[Net], None], exclude: list[str], expected: set[str]
) -> None:
    build(net)
    result = place_net(net, PlacementRules(head="none", exclude=exclude))
    assert quantized_inputs(result, "add") == expected and "add" not in reasons(result)


def classifier(float_consumer: bool) -> Net:
    net = Net()
    relu = net.op("Relu", "r", net.conv("c", "x"))
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "pool", relu))
    outputs = [
        net.op("Gemm", "fc", flat, net.const("w", net.rng.standard_normal((10, 16))), transB=1)
    ]
    if float_consumer:
        outputs.append(net.op("Sigmoid", "other", relu))
    return net.output(*outputs)


def test_poolings_in_a_row_are_quantized(net: Net) -> None:
    first = net.op(
        "AveragePool", "p1", net.op("Relu", "r", net.conv("a", "x")), kernel_shape=[1, 1]
    )
    second = net.op("AveragePool", "p2", first, kernel_shape=[1, 1])
    result = place_net(net.output(net.conv("b", first), net.conv("c", second)))
    assert {node for _, node, _ in inputs(result)} == {"a", "p1", "b", "p2", "c"}
    assert not result.skipped and [r.node.name for r in result.inputs["p1.out"]] == ["p2", "b"]


@pytest.mark.parametrize(
    ("cin", "cout", "kernel", "group", "first", "quantized"),
    [
        (16, 16, 3, 1, False, True),
        (8, 8, 3, 1, False, False),  # neither side has 16 channels
        (8, 8, 3, 1, True, True),  # except in the first layer
        (3, 16, 3, 1, True, True),  # the stem of YOLOv8n
        (16, 4, 1, 1, False, True),  # 16 in, a multiple of 8
        (20, 10, 3, 1, False, False),  # neither side a multiple of 8
        (16, 16, 3, 16, False, True),  # depthwise
        (16, 16, 1, 16, False, False),  # depthwise 1x1
        (12, 12, 3, 12, False, False),  # 12 is not a multiple of 8
        (16, 16, [3, 1], 1, False, True),  # 16 channels are not small, with any kernel
        (15, 16, 3, 1, False, True),
        (15, 16, [3, 1], 1, False, False),  # 15 channels are small, and need a square kernel
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
def test_small_convolution_is_left_float(
    cin: int, cout: int, kernel: int | list[int], group: int, first: bool, quantized: bool
) -> None:
    net = Net(channels=cin)
    tensor = "x" if first else net.op("Relu", "r", "x")
    sides = [kernel] * 2 if isinstance(kernel, int) else kernel
    weight = net.const("w", net.rng.standard_normal((cout, cin // group, *sides)))
    attributes = {} if group == 1 else {"group": group}
    result = place_net(net.output(net.op("Conv", "c", tensor, weight, **attributes)))
    assert quantized or reasons(result) == {
        "c": (placement_reasons.SmallConvolution, cin // group, cout, tuple(sides))
    }
    assert (("c" not in reasons(result)) and bool(result.inputs)) is quantized
    for rules in (PlacementRules(include=["^c$"]), PlacementRules(quantized=["c"])):
        assert [w.node.name for w in place_net(net, rules).weights] == ["c"]


def test_small_products_and_deconvolutions_are_quantized() -> None:
    net = Net(channels=8)
    flat = net.op("Flatten", "flat", net.op("Relu", "r", "x"))
    rows = net.op("Reshape", "rows", "r.out", net.const("shape", [1, 8, 64], np.int64))
    net.output(
        net.op("Gemm", "g", flat, net.const("gw", np.ones((512, 3)))),
        net.op("ConvTranspose", "t", "r.out", net.const("tw", np.ones((8, 3, 2, 2)))),
        net.op("Conv", "row", rows, net.const("rw", np.ones((8, 8, 3)))),
    )
    result = place_net(net)
    assert [w.node.name for w in result.weights] == ["g", "t"]
    assert reasons(result) == {"row": (placement_reasons.SmallConvolution, 8, 8, (3,))}


def relu_net() -> Net:
    net = Net()
    return net.output(net.op("Relu", "r", "x"))


@pytest.mark.parametrize(
    ("net", "rules", "code", "parameter", "value"),
    [
        (
            residual_net(),
            PlacementRules(exclude=["nothing"]),
            "no-match",
            "exclude",
            r"'nothing'.*'c0'",
        ),
        (
            residual_net(),
            PlacementRules(include=["nothing"]),
            "no-match",
            "include",
            r"'nothing'.*'c0'",
        ),
        (residual_net(), PlacementRules(include=["add"]), "no-match", "include", r"'add'.*'c0'"),
        (residual_net(), PlacementRules(exclude_ops=["Gemm"]), "no-match", "exclude_op", "Gemm"),
        (
            residual_net(),
            PlacementRules(exclude_ops=["Relu"]),
            "never-quantized",
            "exclude_op",
            r"Relu.*Add, Conv",
        ),
        (
            residual_net(),
            PlacementRules(exclude=["("]),
            "invalid-pattern",
            "",
            r"`exclude` '\('.*not a regular expression",
        ),
        (relu_net(), PlacementRules(include=["r"]), "no-match", "include", "'r'"),
        (
            relu_net(),
            PlacementRules(exclude_ops=["Relu"]),
            "never-quantized",
            "exclude_op",
            r"Relu.*Leave the option out$",
        ),
    ],
)
def test_option_that_fits_no_node_is_refused(
    net: Net, rules: PlacementRules, code: str, parameter: str, value: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter), match=value):
        place_net(net, rules)


FILES = pytest.mark.parametrize(("path", "label"), [("", "model"), ("a.onnx", "a.onnx")])


@FILES
def test_weights_that_are_not_finite_are_refused(net: Net, path: str, label: str) -> None:
    model = net.output(
        net.conv("c", "x", weight=net.const("w", np.full((16, 16, 1, 1), np.nan)), kernel=1)
    ).model()
    with pytest.raises(
        ModelError, check=has("not-finite", path=label, node="c"), match=r"'w'.*`exclude`"
    ):
        compute_placement(Model(model, path), PlacementRules(head="none"))


@FILES
def test_network_without_weighted_node_is_refused(path: str, label: str) -> None:
    with pytest.raises(placement_reasons.NothingToQuantize) as caught:
        compute_placement(Model(relu_net().model(), path), PlacementRules())
    assert (caught.value.path, caught.value.record) == (label, None)


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
def test_can_be_quantized(
    net: Net, op: str, inputs: tuple[str, ...], attributes: dict[str, object], possible: bool
) -> None:
    net.const("w", np.ones((16, 16, 1, 1)))
    model = net.output(net.op(op, "n", "x", *inputs, **attributes)).index()
    assert can_be_quantized(model, model.node("n")) is possible


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            PlacementRules(exclude=["^c1$", "add"]),
            {
                "c1": (placement_reasons.ExcludedNode, "exclude", "^c1$"),
                "add": (placement_reasons.ExcludedNode, "exclude", "add"),
            },
        ),
        (
            PlacementRules(exclude_ops=["add"]),
            {"add": (placement_reasons.ExcludedNode, "exclude_op", "Add")},
        ),
        (
            PlacementRules(floats=["c1", "add", "no such"], include=["c1"]),
            {
                "c1": (placement_reasons.FloatNode, placement_reasons.SkipCause.ACCURACY),
                "add": (placement_reasons.FloatNode, placement_reasons.SkipCause.ACCURACY),
            },
        ),
        (
            PlacementRules(exclude=["c", "c1"]),
            dict.fromkeys(
                ("c0", "c1", "c2", "c3"), (placement_reasons.ExcludedNode, "exclude", "c")
            ),
        ),
    ],
    ids=["exclude", "exclude_op", "floats", "first pattern that matches"],
)
def test_excluded_nodes_are_left_float(
    rules: PlacementRules, expected: dict[str, tuple[object, ...]]
) -> None:
    result = place_net(residual_net(), rules)
    assert reasons(result) == expected
    assert not any(node in expected for _, node, _ in inputs(result))


def transposed_net(group: int = 1) -> Net:
    net = Net()
    weights = net.const("w", np.ones((16, 16, 2, 2)))
    relu = net.op("Relu", "r", net.conv("c", "x"))
    return net.output(net.op("ConvTranspose", "t", relu, weights, group=group))


def test_transposed_convolution_is_left_float_for_rtx() -> None:
    rtx = place_net(transposed_net(), PlacementRules(transposed=False))
    assert {w.node.name for w in rtx.weights} == {"c"}
    assert reasons(rtx) == {"t": (FloatDeconvolution,)}


@pytest.mark.parametrize(
    ("group", "per_channel", "axis"), [(1, False, None), (1, True, 1), (2, True, None)]
)
def test_axis_of_transposed_convolution(group: int, per_channel: bool, axis: int | None) -> None:
    result = place_net(transposed_net(group), PlacementRules(transposed_per_channel=per_channel))
    assert {w.node.name: w.axis for w in result.weights} == {"c": 0, "t": axis}


def test_unsuitable_weights_are_left_float_with_reason(net: Net) -> None:
    kernel = net.op(
        "Reshape", "kr", net.conv("k", "x", kernel=1), net.const("ks", [16, 16, 2, 2], np.int64)
    )
    double = net.const("w64", np.ones((16, 16, 1, 1)), np.float64)
    right = net.op("MatMul", "m3", "x", net.const("w3", np.ones((1, 8, 8))))
    net.output(net.op("Conv", "c", "x", kernel), right)
    net.output(net.op("Conv", "d", net.op("Cast", "cast", "x", to=11), double), dtype=11)
    assert reasons(place_net(net, PlacementRules(include=["k"]))) == {
        "c": (WeightsNotConstant, "kr.out", False),
        "d": (placement_reasons.NonFloatWeights, "double"),
        "m3": (placement_reasons.UnsupportedWeightsRank, 3),
    }


def test_unsuitable_inputs_are_left_float_even_if_included(net: Net) -> None:
    constant, flat = net.const("k", np.ones((1, 16, 8, 8))), net.op("Flatten", "f", "x")
    square = [net.const(f"w{i}", np.ones((16, 16, 1, 1))) for i in range(4)]
    net.output(
        net.op("Conv", "constant", constant, square[0]),
        net.op("Conv", "computed", net.op("Relu", "r", constant), square[1]),
        net.op("Gemm", "ta", flat, net.const("row", np.ones((1, 16))), transA=1),
        net.op("Gemm", "right", flat, net.const("rows", np.ones((1024, 16))), transA=0),
        net.op("Conv", "other", "x", square[2], domain="example"),
        net.op("Conv", "empty", "x", net.const("nothing", np.ones((0, 16, 1, 1)))),
        net.op("Conv", "missing", "x", square[3]),
    )
    proto = net.open_model()
    weights = initializer(proto, square[3])
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.ClearField("raw_data")
    weights.external_data.add(key="location", value="gone.bin")
    result = compute_placement(Model(proto), PlacementRules(head="none", include=["."]))
    assert [w.node.name for w in result.weights] == ["right"]
    assert reasons(result) == {
        "constant": (placement_reasons.FloatNode, placement_reasons.SkipCause.CONSTANT_INPUT),
        "computed": (placement_reasons.FloatNode, placement_reasons.SkipCause.CONSTANT_INPUT),
        "ta": (placement_reasons.FloatNode, placement_reasons.SkipCause.TRANSPOSED_INPUT),
        "other": (placement_reasons.CustomDomain, "example"),
        "empty": (placement_reasons.FloatNode, placement_reasons.SkipCause.EMPTY_WEIGHTS),
        "missing": (placement_reasons.FloatNode, placement_reasons.SkipCause.UNREADABLE_WEIGHTS),
    }


@pytest.mark.parametrize(
    ("equation", "shapes", "why"),
    [
        ("...c,c->...", ([1, 5, 16], [16]), placement_reasons.EinsumObstacle.VECTOR),
        ("...c,...dc->...d", (None, [1, 6, 16]), placement_reasons.EinsumObstacle.RANK),
        (
            "bnc,bcd->bnd",
            (["b", "n", "c"], ["b", "d", "e"]),
            placement_reasons.EinsumObstacle.SUMMED,
        ),
        ("bnc,chd->bnhd", (["b", "n", 16], [16, "h", "d"]), placement_reasons.EinsumObstacle.SIZES),
    ],
)
def test_einsum_products_are_left_float_with_reason(
    net: Net,
    equation: str,
    shapes: tuple[list[int | str] | None, list[int | str]],
    why: placement_reasons.EinsumObstacle,
) -> None:
    """A product of constants has no reason, because it is computed while building."""
    net.inputs += [
        onnx.helper.make_tensor_value_info(n, 1, shape)
        for n, shape in zip("ab", shapes, strict=True)
    ]
    weight = net.const("w", np.ones((16, 16)))
    net.output(net.op("Einsum", "f", weight, weight, equation="ij,ij"))
    net.output(net.op("Einsum", "e", "a", "b", equation=equation))
    with pytest.raises(placement_reasons.NothingToQuantize) as caught:
        compute_placement(Model(net.open_model()), PlacementRules())
    product = placement_reasons.EinsumProduct(placement_reasons.PLACEMENT, "", why)
    assert (caught.value.record, caught.value.count) == (product, 1)
    net.output(net.conv("c", "x"))
    assert reasons(compute_placement(Model(net.open_model()), PlacementRules())) == {
        "e": (placement_reasons.EinsumProduct, why)
    }


def test_subgraphs_are_left_float_with_reason(net: Net) -> None:
    """The branch ``else`` has an If with the branch ``then`` and itself: three convolutions."""

    def graph(name: str, node: onnx.NodeProto) -> onnx.GraphProto:
        output = onnx.helper.make_tensor_value_info(node.output[0], 1, None)
        return onnx.helper.make_graph([node], name, [], [output])

    def branch(name: str) -> onnx.GraphProto:
        conv = onnx.helper.make_node("Conv", ["x", "w"], [f"{name}.out"], f"{name}/conv")
        if name == "then":
            return graph(name, conv)
        branches = {"then_branch": branch("then"), "else_branch": graph("inner", conv)}
        return graph(name, onnx.helper.make_node("If", ["if.condition"], ["else.if"], **branches))

    net.const("w", np.ones((16, 16, 1, 1)))
    result = place_net(net.output(net.conv("c", net.op("Relu", "r", net.choice("if", branch)))))
    assert [w.node.name for w in result.weights] == ["c"]
    assert reasons(result) == {"if": (placement_reasons.SubgraphLayers, 3)}


# Residual sums and poolings -----------------------------------------------------------------------


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("mine", "other", "residual"),
    [
        ([1, 16, 8, 8], [1, 16, 8, 8], True),
        (["n", 16, 8, 8], [1, 16, 8, 8], True),  # n may be 1
        (["n", 16, 8, 8], ["n", 16, 8, "w"], True),
        ([1, 16, 8, 8], [1, 16, 8, 1], False),
        (["n", 16, 8, 8], ["n", 1, 8, 8], False),
        ([1, 16, 8, 8], [16, 8, 8], False),
    ],
)
def test_sum_is_residual_unless_a_dimension_differs(
    net: Net, mine: list[object], other: list[object], residual: bool, swapped: bool
) -> None:
    net.inputs = [
        onnx.helper.make_tensor_value_info("x", 1, mine),
        onnx.helper.make_tensor_value_info("y", 1, other),
    ]
    pair = [net.conv("c", "x"), "y"]
    net.output(net.conv("d", net.op("Add", "add", *(pair[::-1] if swapped else pair))))
    assert (("y", "add", "residual") in inputs(place_net(net))) is residual


@pytest.mark.parametrize(
    ("op", "others", "attributes", "quantized"),
    [
        ("MaxPool", (), {"kernel_shape": [1, 1]}, True),
        ("Concat", ("x",), {"axis": 1}, True),
        ("Transpose", (), {"perm": [0, 1, 3, 2]}, True),
        ("Tanh", (), {}, True),
        ("Softmax", (), {}, False),
        ("Mul", ("x",), {}, False),
    ],
)
def test_residual_is_quantized_for_quantized_consumer(
    net: Net, op: str, others: tuple[str, ...], attributes: dict[str, object], quantized: bool
) -> None:
    between = net.op(
        op, "between", *others, net.op("Add", "add", net.conv("a", "x"), "x"), **attributes
    )
    net.output(net.conv("c", between, 32 if op == "Concat" else 16))
    assert (("x", "add", "residual") in inputs(place_net(net))) is quantized


def pooling_net(before: str = "Relu", after: str = "Conv", output: bool = False) -> Net:
    net = Net()
    tensor = net.conv("a", "x")
    if before == "Add":
        tensor = net.op("Add", "sum", tensor, net.op("Relu", "other", "x"))
    tensor = net.op("Relu", "r", tensor)
    if before in ("AveragePool", "Softmax"):
        attributes = {"kernel_shape": [1, 1]} if before == "AveragePool" else {}
        tensor = net.op(before, "before", tensor, **attributes)
    pooled = net.op("AveragePool", "pool", tensor, kernel_shape=[1, 1])
    net.output(net.conv("c", pooled) if after == "Conv" else net.op("Softmax", "end", pooled))
    return net.output(tensor) if output else net


@pytest.mark.parametrize(
    "net",
    [*(pooling_net(before) for before in ("Relu", "Add", "Softmax")), classifier(False)],
    ids=["Relu", "Add", "Softmax", "classifier"],
)
def test_pooling_between_quantized_nodes_is_quantized(net: Net) -> None:
    assert quantized_inputs(place_net(net), "pool")


@pytest.mark.parametrize(
    ("net", "exclude", "reason"),
    [
        pytest.param(
            pooling_net(),
            ["^a$"],
            (placement_reasons.FloatNode, placement_reasons.SkipCause.NO_QUANTIZED_PRODUCER),
            id="float before",
        ),
        pytest.param(
            pooling_net("AveragePool"),
            [],
            (placement_reasons.FloatNode, placement_reasons.SkipCause.NO_QUANTIZED_PRODUCER),
            id="pooling before",
        ),
        pytest.param(
            pooling_net(),
            ["pool"],
            (placement_reasons.ExcludedNode, "exclude", "pool"),
            id="excluded",
        ),
        pytest.param(pooling_net(after="Softmax"), [], None, id="float after"),
        pytest.param(
            pooling_net(output=True),
            [],
            (placement_reasons.FloatNode, placement_reasons.SkipCause.INPUT_READ_AS_FLOAT),
            id="float consumer",
        ),
        pytest.param(
            classifier(True),
            [],
            (placement_reasons.FloatNode, placement_reasons.SkipCause.INPUT_READ_AS_FLOAT),
            id="float consumer in a classifier",
        ),
    ],
)
def test_pooling_next_to_float_is_left_float(
    net: Net, exclude: list[str], reason: tuple[object, ...] | None
) -> None:
    result = place_net(net, PlacementRules(head="none", exclude=exclude))
    assert not quantized_inputs(result, "pool") and reasons(result).get("pool") == reason


def test_longest_path_of_random_and_clipped_input(net: Net) -> None:
    low = net.op("RandomNormal", "made", shape=[1, 16, 8, 8])
    clipped = net.op("Clip", "clip", net.op("Relu", "r", "x"), "", net.const("six", 6.0))
    assert branch_lengths(net.output(net.op("Add", "add", low, clipped)).index(), low, clipped) == (
        1,
        2,
    )


@pytest.mark.parametrize("constant_nodes", [False, True])
def test_longest_path_ignores_constant_nodes(net: Net, constant_nodes: bool) -> None:
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    shortcut = net.conv("down", stem, kernel=1)
    net.output(net.op("Add", "add", shortcut, block))
    model = with_constant_nodes(net.model()) if constant_nodes else net.model()
    assert branch_lengths(Model(model), block, shortcut) == (3, 1)


# Class scores -------------------------------------------------------------------------------------


def test_class_outputs_of_yolov8() -> None:
    model = Model(detector(classes=3))
    shapes = [model.shape(t) for t in find_class_outputs(model)]
    assert shapes == [(1, 3, 8, 8), (1, 3, 4, 4), (1, 3, 2, 2)]


def test_class_outputs_of_heat_map(net: Net) -> None:
    body = net.op("Relu", "relu", net.conv("body", "x"))
    heat = net.op("Sigmoid", "sigmoid", net.conv("heat", body, cout=3))
    assert find_class_outputs(net.output(heat, net.conv("size", body, cout=2)).index()) == (
        "heat.out",
    )


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (lambda net: net.conv("c", "x"), ("c.out",)),
        (
            lambda net: net.op(
                "Conv",
                "c",
                net.op("Reshape", "row", "x", net.const("shape", [1, 16, 64], np.int64)),
                net.const("w", np.ones((3, 16, 1))),
            ),
            (),
        ),
        (lambda net: net.op("MatMul", "m", "x", net.const("w", np.ones((8, 3)))), ()),
        (lambda net: net.conv("c", net.op("Strange", "any", "x", domain="example")), ()),
    ],
    ids=["map", "row", "matrix product", "unknown shape"],
)
def test_class_outputs_are_maps(
    net: Net, scores: Callable[[Net], str], expected: tuple[str, ...]
) -> None:
    model = net.output(net.op("Sigmoid", "sigmoid", scores(net))).open_model()
    assert find_class_outputs(Model(model)) == expected


MOVES = {
    "": lambda net, x: x,
    "Reshape": lambda net, x: net.op(
        "Reshape", "moved", x, net.const("shape", [1, 16, 64], np.int64)
    ),
    "Transpose": lambda net, x: net.op("Transpose", "moved", x, perm=[0, 2, 3, 1]),
    "Concat": lambda net, x: net.op("Concat", "moved", x, "x", axis=1),
}


def best_scores(net: Net, x: str) -> str:
    values, _ = net.op("TopK", "top", x, net.const("k", [1], np.int64), outputs=2, axis=1)
    return str(net.op("Mul", "end", values, net.const("two", 2.0)))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda net, x: net.op("Mul", "end", net.const("two", 2.0), x), ()),
        (lambda net, x: net.op("Sqrt", "end", x), ()),
        (lambda net, x: x, ("c.out",)),
        (best_scores, ("c.out",)),
    ],
    ids=["Mul", "Sqrt", "output", "TopK"],
)
def test_class_outputs_after_operators(
    net: Net, move: str, end: Callable[[Net, str], str], expected: tuple[str, ...]
) -> None:
    """Scores may be moved or sorted, but not computed with.

    Nodes after a selection do not count.
    """
    scores = net.op("Sigmoid", "sigmoid", net.conv("c", "x"))
    assert find_class_outputs(net.output(end(net, MOVES[move](net, scores))).index()) == expected

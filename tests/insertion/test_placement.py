from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.placement import Placement, Rules, can_be_quantized, place
from qdqtool.model.graph import Model
from tests.insertion.nets import Net


def inputs(placement: Placement) -> set[tuple[str, str, str]]:
    """What was placed, as (tensor, reader, role)."""
    return {(t, r.node.name, r.role) for t, readers in placement.readers.items() for r in readers}


def reasons(placement: Placement) -> dict[str, str]:
    return {s.node: s.reason for s in placement.skipped}


def placed(net: Net, rules: Rules | None = None) -> Placement:
    return place(net.index(), rules or Rules(head="none"))


def test_data_and_weights_of_a_convolution_and_nothing_else() -> None:
    net = Net()
    net.output(net.silu("s", net.norm("n", net.conv("c", "x"))))
    result = placed(net)
    assert inputs(result) == {("x", "c", "input")}
    assert [(w.tensor, w.axis) for w in result.weights] == [("c.weight", 0)]
    assert not result.skipped


def test_one_tensor_with_two_readers() -> None:
    net = Net()
    relu = net.op("Relu", "r", net.conv("a", "x"))
    net.output(net.conv("b", relu), net.conv("c", relu))
    result = placed(net)
    assert [(r.node.name, r.position) for r in result.readers["r.out"]] == [("b", 0), ("c", 0)]


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


def test_behind_a_bare_convolution_the_skip_alone() -> None:
    result = placed(residual_net())
    assert ("stem.out", "add", "residual") in inputs(result)
    assert [(r.node.name, r.position) for r in result.readers["stem.out"]] == [("c1", 0), ("add", 1)]
    assert ("c2.out", "add", "residual") not in inputs(result)


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
def test_behind_an_activation_the_choice_decides(residual: str, target_choice: str, expected: set[str]) -> None:
    rules = Rules(residual=residual, residual_after_activation=target_choice)
    result = placed(residual_net("silu"), rules)
    assert {t for t, node, _ in inputs(result) if node == "add"} == expected
    assert ("add" in reasons(result)) is (not expected)


def test_a_bare_convolution_ignores_the_targets_choice_for_activations() -> None:
    result = placed(residual_net(), Rules(residual_after_activation="both"))
    assert {t for t, node, _ in inputs(result) if node == "add"} == {"stem.out"}


def test_a_target_that_gains_nothing_quantizes_no_residual_at_all() -> None:
    result = placed(residual_net(), Rules(residual_after_activation="none"))
    assert not any(node == "add" for _, node, _ in inputs(result))
    assert "gains nothing" in reasons(result)["add"]


def test_a_residual_whose_result_is_not_quantized_next_stays_float() -> None:
    result = placed(residual_net(after="end"))
    assert not any(node == "add" for _, node, _ in inputs(result))
    assert reasons(result)["add"] == "its result is not quantized next"


def test_the_shorter_way_is_the_skip_where_both_sides_are_convolutions() -> None:
    for swapped in (False, True):
        net = Net()
        stem = net.op("Relu", "stem", net.conv("c0", "x"))
        block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
        down = net.conv("down", stem, kernel=1)
        pair = (down, block) if swapped else (block, down)
        net.output(net.conv("c3", net.op("Relu", "ra", net.op("Add", "add", *pair))))
        result = placed(net)
        assert {t for t, node, _ in inputs(result) if node == "add"} == {"down.out"}


def test_a_chain_of_residuals_is_followed_to_the_end() -> None:
    """The first Add's result is read by the second Add alone, which is quantized for the convolution behind it."""
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    first = net.op("Add", "add1", net.conv("c1", stem), stem)
    second = net.op("Add", "add2", net.conv("c2", stem), first)
    net.output(net.conv("c3", second))
    result = placed(net)
    skips = {(t, n) for t, n, role in inputs(result) if role == "residual"}
    assert skips == {("stem.out", "add1"), ("add1.out", "add2")}


def test_a_broadcast_add_is_no_residual() -> None:
    net = Net()
    gap = net.op("GlobalAveragePool", "gap", "x")
    net.output(net.conv("c3", net.op("Add", "add", net.conv("c", "x"), gap)))
    assert not any(node == "add" for _, node, _ in inputs(placed(net)))


def classifier(float_reader: bool) -> Net:
    net = Net()
    relu = net.op("Relu", "r", net.conv("c", "x"))
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", relu))
    outputs = [net.op("Gemm", "fc", flat, net.const("w", net.rng.standard_normal((10, 16))), transB=1)]
    if float_reader:
        outputs.append(net.op("Sigmoid", "other", relu))
    net.output(*outputs)
    return net


def test_global_average_pool_between_quantized_neighbours() -> None:
    assert ("r.out", "gap", "input") in inputs(placed(classifier(False)))
    result = placed(classifier(True))
    assert not any(node == "gap" for _, node, _ in inputs(result))
    assert "float node" in reasons(result)["gap"]


def test_gemm_axis_follows_transpose() -> None:
    assert [(w.node.name, w.axis) for w in placed(classifier(False)).weights][-1] == ("fc", 0)


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
    told = f"small convolution ({cin // group} to {cout} channels, kernel {sides[0]}x{sides[1]}): no fast INT8 kernel"
    assert quantized or reasons(result) == {"c": f"{told} expected (`include` quantizes it)"}
    assert (("c" not in reasons(result)) and bool(result.readers)) is quantized
    for rules in (Rules(include=["^c$"]), Rules(quantized=["c"])):
        assert [w.node.name for w in placed(net, rules).weights] == ["c"]


def test_the_rule_for_small_convolutions_is_one_for_convolutions() -> None:
    """Neither for products nor for transposed ones; for those along one axis too."""
    net = Net(channels=8)
    flat = net.op("Flatten", "flat", net.op("Relu", "r", "x"))
    rows = net.op("Reshape", "rows", "r.out", net.const("shape", [1, 8, 64], np.int64))
    net.output(net.op("Gemm", "g", flat, net.const("gw", np.ones((512, 3)))),
               net.op("ConvTranspose", "t", "r.out", net.const("tw", np.ones((8, 3, 2, 2)))),
               net.op("Conv", "row", rows, net.const("rw", np.ones((8, 8, 3)))))  # fmt: skip
    result = placed(net)
    assert [w.node.name for w in result.weights] == ["g", "t"]
    assert list(reasons(result)) == ["row"] and "8 to 8 channels, kernel 3)" in reasons(result)["row"]


NO_NODE = ": matches no node that could be quantized"


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        (Rules(exclude=["nothing"]), f"`exclude` 'nothing'{NO_NODE}; names look like 'c0'"),
        (Rules(include=["nothing"]), f"`include` 'nothing'{NO_NODE}; names look like 'c0'"),
        (Rules(include=["add"]), f"`include` 'add'{NO_NODE}; names look like 'c0'"),
        (Rules(exclude=["("]), "not a regular expression"),
        (Rules(exclude_ops=["Gemm"]), "no such operator"),
        (Rules(exclude_ops=["Relu"]), "never quantized anyway; what could be is Add, Conv"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(rules: Rules, word: str) -> None:
    with pytest.raises(QdqtoolError) as caught:
        placed(residual_net(), rules)
    assert word in str(caught.value)


def test_where_nothing_could_be_quantized_no_example_is_given() -> None:
    net = Net()
    net.output(net.op("Relu", "r", "x"))
    for rules, told in (
        (Rules(include=["r"]), f"`include` 'r'{NO_NODE}"),
        (Rules(exclude_ops=["Relu"]), "`exclude_op` Relu: never quantized anyway; what could be is none"),
    ):
        with pytest.raises(QdqtoolError) as caught:
            placed(net, rules)
        assert str(caught.value) == told


@pytest.mark.parametrize(("op", "inputs", "attributes", "possible"), [
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
])  # fmt: skip
def test_what_placement_decides_about(
    op: str, inputs: tuple[str, ...], attributes: dict[str, object], possible: bool
) -> None:
    net = Net()
    net.const("w", np.ones((16, 16, 1, 1)))
    net.output(net.op(op, "n", "x", *inputs, **attributes))
    model = net.index()
    assert can_be_quantized(model, model.node("n")) is possible


def test_exclusions_are_obeyed_and_told() -> None:
    result = placed(residual_net(), Rules(exclude=["^c1$", "add"]))
    assert not any(node in ("c1", "add") for _, node, _ in inputs(result))
    assert reasons(result) == {"c1": "excluded by `exclude` ^c1$", "add": "excluded by `exclude` add"}
    by_op = placed(residual_net(), Rules(exclude_ops=["add"]))
    assert reasons(by_op) == {"add": "excluded by `exclude_op` Add"}
    by_name = placed(residual_net(), Rules(floats={"c1": "so be it", "add": "too", "no such": "?"}, include=["c1"]))
    assert reasons(by_name) == {"c1": "so be it", "add": "too"}
    first = placed(residual_net(), Rules(exclude=["c", "c1"]))
    assert first.skipped[0].reason == "excluded by `exclude` c" and len(first.skipped) == 4 and not first.readers


def test_computed_constant_and_double_inputs_are_left_with_the_reason() -> None:
    net = Net()
    computed = net.conv("k", "x", kernel=1)
    kernel = net.op("Reshape", "kr", computed, net.const("ks", [16, 16, 2, 2], np.int64))
    w = net.const("w64", np.ones((16, 16, 1, 1)), np.float64)
    wide = net.op("Cast", "cast", "x", to=11)
    right = net.op("MatMul", "m3", "x", net.const("w3", np.ones((1, 8, 8))))
    net.output(net.op("Conv", "c", "x", kernel), right)
    net.output(net.op("Conv", "d", wide, w), dtype=11)
    assert reasons(placed(net, Rules(include=["k"]))) == {
        "c": "its weights are computed, not constant",
        "d": "its weights are double, not float",
        "m3": "its weights have 3 dimensions; TensorRT takes constant INT8 weights of two",
    }


def test_what_no_tensorrt_can_run_in_int8_is_left_with_the_reason() -> None:
    """A user who includes it all the same gets no other answer."""
    net = Net()
    constant = net.const("k", np.ones((1, 16, 8, 8)))
    net.output(net.op("Conv", "constant", constant, net.const("w1", np.ones((16, 16, 1, 1)))))
    net.output(net.op("Gemm", "ta", net.op("Flatten", "f", "x"), net.const("w2", np.ones((1, 16))), transA=1))
    net.output(net.op("Gemm", "right", "f.out", net.const("w3", np.ones((1024, 16))), transA=0))
    net.output(net.op("Conv", "other", "x", net.const("w4", np.ones((16, 16, 1, 1))), domain="example"))
    net.output(net.op("Conv", "empty", "x", net.const("w5", np.ones((0, 16, 1, 1)))))
    net.output(net.op("Conv", "missing", "x", net.const("w6", np.ones((16, 16, 1, 1)))))
    proto = net.open_model()
    proto.graph.initializer[-1].data_location = onnx.TensorProto.EXTERNAL
    proto.graph.initializer[-1].ClearField("raw_data")
    proto.graph.initializer[-1].external_data.add(key="location", value="gone.bin")
    result = place(Model(proto), Rules(head="none", include=["."]))
    assert [w.node.name for w in result.weights] == ["right"]
    assert reasons(result) == {
        "constant": "its first input is a constant",
        "ta": "its data input is transposed (transA)",
        "other": "operator of the domain 'example'",
        "empty": "its weights are empty",
        "missing": "its weights cannot be read",
    }


def test_bodies_of_if_are_left_float_and_told() -> None:
    def branch(name: str) -> object:
        node = helper.make_node("Conv", ["x", "inner.weight"], [f"{name}.out"], name=f"{name}/conv")
        out = helper.make_tensor_value_info(f"{name}.out", 1, None)
        graph = helper.make_graph([node], name, [], [out])
        if name == "then":
            return graph
        inside = helper.make_node("If", ["condition"], ["else.if"], then_branch=branch("then"), else_branch=graph)
        return helper.make_graph([inside], "outer", [], [helper.make_tensor_value_info("else.if", 1, None)])

    net = Net()
    net.const("inner.weight", np.ones((16, 16, 1, 1)))
    condition = net.const("condition", True, np.bool_)
    chosen = net.op("If", "if", condition, then_branch=branch("then"), else_branch=branch("else"))
    net.output(net.conv("c", net.op("Relu", "r", chosen)))
    result = placed(net)
    assert [w.node.name for w in result.weights] == ["c"]
    assert reasons(result) == {"if": "the 3 convolutions or products inside its body are left float"}


def test_weights_with_nan_name_the_node() -> None:
    net = Net()
    w = net.const("w", np.full((16, 16, 1, 1), np.nan))
    net.output(net.conv("c", "x", weight=w, kernel=1))
    for path, name in (("", "model"), ("a.onnx", "a.onnx")):
        with pytest.raises(ModelError) as caught:
            place(Model(net.model(), path), Rules(head="none"))
        assert str(caught.value) == (
            f"{name}: the weights 'w' of node 'c' hold NaN or infinity; export the model again, or leave the node "
            "float with `exclude`"
        )


def test_a_model_without_convolutions_is_an_error() -> None:
    net = Net()
    net.output(net.op("Relu", "r", "x"))
    for path, name in (("", "model"), ("a.onnx", "a.onnx")):
        with pytest.raises(ModelError) as caught:
            place(Model(net.model(), path), Rules())
        told = "no Conv, ConvTranspose, Gemm or MatMul in the main graph; nothing to quantize"
        assert str(caught.value) == f"{name}: {told}"


def test_convtranspose_is_left_float_where_the_target_never_runs_it_in_int8() -> None:
    net = Net()
    w = net.const("w", np.ones((16, 16, 2, 2)))
    net.output(net.op("ConvTranspose", "t", net.op("Relu", "r", net.conv("c", "x")), w))
    assert {w.node.name for w in placed(net).weights} == {"c", "t"}
    rtx = placed(net, Rules(transposed=False))
    assert {w.node.name for w in rtx.weights} == {"c"}
    assert reasons(rtx) == {"t": "TensorRT-RTX 1.7 never runs ConvTranspose in INT8"}
    assert [w.axis for w in placed(net).weights] == [0, None]
    assert [w.axis for w in placed(net, Rules(transposed_per_channel=True)).weights] == [0, 1]

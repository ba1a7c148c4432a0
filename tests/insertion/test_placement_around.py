"""Placement round the convolutions: which sums are residuals, and which poolings have quantized neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from qdqtool.insertion.placement import Rules
from tests.insertion.nets import Net
from tests.insertion.test_placement import inputs, placed, reasons


def test_a_bias_or_a_tensor_added_to_itself_is_no_residual() -> None:
    for other in ("constant", "itself"):
        net = Net()
        inner = net.conv("c", "x")
        right = inner if other == "itself" else net.const("k", np.ones((1, 16, 8, 8)))
        net.output(net.conv("d", net.op("Relu", "r", net.op("Add", "add", inner, right))))
        result = placed(net)
        assert inputs(result) == {("x", "c", "input"), ("r.out", "d", "input")} and not result.skipped


@pytest.mark.parametrize(("mine", "other", "residual"), [
    ([1, 16, 8, 8], [1, 16, 8, 8], True),
    (["n", 16, 8, 8], [1, 16, 8, 8], True),  # one may well be n
    (["n", 16, 8, 8], ["n", 16, 8, "w"], True),
    ([1, 16, 8, 8], [1, 16, 8, 1], False),
    (["n", 16, 8, 8], ["n", 1, 8, 8], False),
    ([1, 16, 8, 8], [16, 8, 8], False),
])  # fmt: skip
def test_a_sum_of_two_shapes_is_a_residual_where_no_dimension_is_known_to_differ(
    mine: list[object], other: list[object], residual: bool
) -> None:
    for swapped in (False, True):
        net = Net()
        net.inputs = [helper.make_tensor_value_info("x", 1, mine), helper.make_tensor_value_info("y", 1, other)]
        pair = [net.conv("c", "x"), "y"]
        net.output(net.conv("d", net.op("Add", "add", *(pair[::-1] if swapped else pair))))
        assert (("y", "add", "residual") in inputs(placed(net))) is residual


def test_of_two_sides_of_the_same_length_the_first_is_the_skip() -> None:
    net = Net()
    net.output(net.conv("c", net.op("Add", "add", net.conv("a", "x"), net.conv("b", "x"))))
    assert {t for t, node, _ in inputs(placed(net)) if node == "add"} == {"a.out"}
    alone = placed(net, Rules(head="none", exclude=["^b$"]))  # a convolution that stays float is no side
    assert {t for t, node, _ in inputs(alone) if node == "add"} == {"b.out"}


@pytest.mark.parametrize(("between", "quantized"), [
    ("MaxPool", True), ("Concat", True), ("Transpose", True), ("Softmax", False), ("Tanh", True), ("Mul", False),
])  # fmt: skip
def test_a_residual_is_quantized_for_whoever_reads_its_values_quantized(between: str, quantized: bool) -> None:
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
        tensor = made.op("Add", "sum", tensor, made.op("Relu", "other", "x")) if front == "Add" else tensor
        tensor = made.op("Relu", "r", tensor)
        tensor = made.op("AveragePool", "before", tensor, kernel_shape=[1, 1]) if front == "AveragePool" else tensor
        tensor = made.op("Softmax", "soft", tensor) if front == "Softmax" else tensor
        pooled = made.op("AveragePool", "pool", tensor, kernel_shape=[1, 1])
        made.output(made.conv("c", pooled) if back == "c" else made.op("Softmax", "end", pooled))
        if output:
            made.output(tensor)
        return made

    def told(made: Net, **rules: object) -> object:
        result = placed(made, Rules(head="none", **rules))  # type: ignore[arg-type]
        return "quantized" if any(node == "pool" for _, node, _ in inputs(result)) else reasons(result).get("pool")

    apart = "no quantized neighbour in front of it"
    assert told(net()) == told(net("Add")) == told(net("Softmax")) == "quantized"
    assert told(net(), exclude=["^a$"]) == apart  # the convolution in front is float
    assert told(net("AveragePool")) == apart  # nor does one look past a pooling that is float
    assert told(net(), exclude=["pool"]) == "excluded by `exclude` pool"
    assert told(net(back="end")) is None
    assert told(net(output=True)) == (
        "its input is read by a float node as well, so that its producer writes float anyway"
    )


def test_one_pooling_makes_the_next_worth_while() -> None:
    net = Net()
    first = net.op("AveragePool", "p1", net.op("Relu", "r", net.conv("a", "x")), kernel_shape=[1, 1])
    second = net.op("AveragePool", "p2", first, kernel_shape=[1, 1])
    net.output(net.conv("b", first), net.conv("c", second))
    result = placed(net)
    assert {node for _, node, _ in inputs(result)} == {"a", "p1", "b", "p2", "c"} and not result.skipped
    assert [r.node.name for r in result.readers["p1.out"]] == ["p2", "b"]

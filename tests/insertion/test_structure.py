from __future__ import annotations

import numpy as np
import pytest

from qdqtool.graph import Model
from qdqtool.insertion.structure import (
    activation_input,
    activation_outputs,
    commuting_inputs,
    convolution_behind,
    counts_up,
    longest_path,
    weight_axis,
)
from tests.insertion.nets import Net


def test_silu_is_one_activation_with_the_convolution_as_its_input() -> None:
    net = Net()
    out = net.silu("s", net.conv("c", "x"))
    net.output(out)
    model = net.index()
    assert activation_input(model, model.node("s/Mul")) == "c.out"
    assert list(activation_outputs(model, "c.out")) == ["s/Mul.out"]


def test_mul_by_another_tensors_sigmoid_is_no_activation() -> None:
    net = Net()
    gate = net.op("Sigmoid", "g", net.conv("a", "x"))
    net.output(net.op("Mul", "m", net.conv("b", "x"), gate))
    model = net.index()
    assert activation_input(model, model.node("m")) is None


@pytest.mark.parametrize(
    ("op", "attributes", "expected"),
    [
        ("MaxPool", {"kernel_shape": [2, 2]}, True),
        ("Transpose", {"perm": [0, 2, 3, 1]}, True),
        ("Relu", {}, False),
        ("GlobalAveragePool", {}, False),
    ],
)
def test_only_operators_that_move_values_commute(op: str, attributes: dict[str, object], expected: bool) -> None:
    net = Net()
    net.output(net.op(op, "n", "x", **attributes))
    model = net.index()
    assert bool(commuting_inputs(model.node("n"))) is expected


@pytest.mark.parametrize(("mode", "expected"), [("nearest", ("x",)), ("linear", ())])
def test_resize_commutes_only_when_it_copies(mode: str, expected: tuple[str, ...]) -> None:
    net = Net()
    scales = net.const("scales", [1, 1, 2, 2])
    net.output(net.op("Resize", "r", "x", "", scales, mode=mode))
    assert commuting_inputs(net.index().node("r")) == expected


def residual(activation: str) -> Model:
    net = Net()
    inner = net.conv("c", "x")
    if activation == "silu":
        inner = net.silu("s", inner)
    elif activation == "relu":
        inner = net.op("Relu", "r", inner)
    elif activation == "bn":
        inner = net.norm("b", inner)
    net.output(net.op("Add", "add", inner, "x"))
    return net.index()


@pytest.mark.parametrize(
    ("activation", "expected"), [("", False), ("bn", False), ("relu", True), ("silu", True)]
)
def test_the_convolution_behind_an_add(activation: str, expected: bool) -> None:
    model = residual(activation)
    add = model.node("add")
    found = convolution_behind(model, add.inputs[0], add)
    assert found is not None
    assert found.node.name == "c"
    assert found.activation is expected
    assert convolution_behind(model, "x", add) is None


def test_a_convolution_that_something_else_reads_too_is_not_behind_the_add() -> None:
    net = Net()
    inner = net.conv("c", "x")
    net.output(net.op("Add", "add", inner, "x"), net.op("Relu", "other", inner))
    model = net.index()
    assert convolution_behind(model, "c.out", model.node("add")) is None


def test_longest_path_tells_the_block_from_its_downsample() -> None:
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    shortcut = net.conv("down", stem, kernel=1)
    net.output(net.op("Add", "add", shortcut, block))
    assert longest_path(net.index(), block, shortcut) == (3, 1)


def test_weight_axes() -> None:
    net = Net()
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
    axes = {n: weight_axis(model, model.node(n)) for n in ("c", "t", "tg", "g0", "g1", "m")}
    assert axes == {"c": 0, "t": 1, "tg": None, "g0": 1, "g1": 0, "m": 1}


@pytest.mark.parametrize(
    ("values", "expected"),
    [(range(16), True), (range(1, 17), False), (range(3), False), ([0, 1, 2, 4], False), (range(4), True)],
)
def test_counts_up(values: object, expected: bool) -> None:
    net = Net()
    net.const("k", list(values))  # type: ignore[call-overload]
    net.output(net.op("Relu", "r", "x"))
    assert counts_up(net.index(), "k") is expected

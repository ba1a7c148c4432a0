from __future__ import annotations

import numpy as np
import pytest

from qdqtool.insertion.structure import convolution_behind, longest_path, weight_scale_axis
from qdqtool.model.graph import Model
from tests.insertion.nets import Net, with_constant_nodes
from tests.model.test_pointwise import gelu, hard_swish


def residual(activation: str) -> Model:
    net = Net()
    inner = net.conv("c", "x")
    if activation == "silu":
        inner = net.silu("s", inner)
    elif activation == "relu":
        inner = net.op("Relu", "r", inner)
    elif activation == "bn":
        inner = net.norm("b", inner)
    elif activation == "bias":
        inner = net.op("Add", "bias", inner, net.const("k", np.ones((16, 1, 1))))
    elif activation == "gelu":
        inner = gelu(net, inner)
    elif activation == "hard_swish":
        inner = hard_swish(net, inner)
    net.output(net.op("Add", "add", inner, "x"))
    return net.index()


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("", False), ("bn", False), ("bias", False), ("relu", True), ("silu", True), ("gelu", True), ("hard_swish", True)],
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


@pytest.mark.parametrize("inner", ["s/Sigmoid.out", "s/Mul.out", "c.out"])
def test_a_convolution_whose_result_leaves_the_network_on_the_way_is_not_behind_the_add(inner: str) -> None:
    net = Net()
    net.output(net.op("Add", "add", net.silu("s", net.conv("c", "x")), "x"), inner)
    model = net.index()
    assert convolution_behind(model, "s/Mul.out", model.node("add")) is None


def test_an_activation_that_something_else_reads_inside_is_not_behind_the_add() -> None:
    net = Net()
    net.output(net.op("Add", "add", net.silu("s", net.conv("c", "x")), "x"), net.op("Cos", "cos", "s/Sigmoid.out"))
    model = net.index()
    assert convolution_behind(model, "s/Mul.out", model.node("add")) is None


@pytest.mark.parametrize("constant_nodes", [False, True])
def test_longest_path_tells_the_block_from_its_downsample(constant_nodes: bool) -> None:
    """Nodes that only hold constants are no part of a way."""
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    block = net.conv("c2", net.op("Relu", "r1", net.conv("c1", stem)))
    shortcut = net.conv("down", stem, kernel=1)
    net.output(net.op("Add", "add", shortcut, block))
    model = with_constant_nodes(net.model()) if constant_nodes else net.model()
    assert longest_path(Model(model), block, shortcut) == (3, 1)


def test_longest_path_without_a_common_ancestor_and_past_missing_inputs() -> None:
    net = Net()
    low = net.op("RandomNormal", "made", shape=[1, 16, 8, 8])
    clipped = net.op("Clip", "clip", net.op("Relu", "r", "x"), "", net.const("six", 6.0))
    net.output(net.op("Add", "add", low, clipped))
    assert longest_path(net.index(), low, clipped) == (1, 2)


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
    names = ("c", "t", "tg", "g0", "g1", "m")
    ranks = {"g0": 2, "g1": 2, "m": 2}
    axes = {n: weight_scale_axis(model.node(n), ranks.get(n, 4), True) for n in names}
    assert axes == {"c": 0, "t": 1, "tg": None, "g0": 1, "g1": 0, "m": 1}
    safe = {n: weight_scale_axis(model.node(n), ranks.get(n, 4), False) for n in names}
    assert safe == {**axes, "t": None}

from __future__ import annotations

import numpy as np
import pytest

from qdqtool.graph import Model
from qdqtool.insertion.structure import convolution_behind, longest_path, weight_scale_axis
from tests.insertion.nets import Net
from tests.onnxgraph.test_pointwise import gelu, hard_swish


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
    names = ("c", "t", "tg", "g0", "g1", "m")
    ranks = {"g0": 2, "g1": 2, "m": 2}
    axes = {n: weight_scale_axis(model.node(n), ranks.get(n, 4), True) for n in names}
    assert axes == {"c": 0, "t": 1, "tg": None, "g0": 1, "g1": 0, "m": 1}
    safe = {n: weight_scale_axis(model.node(n), ranks.get(n, 4), False) for n in names}
    assert safe == {**axes, "t": None}

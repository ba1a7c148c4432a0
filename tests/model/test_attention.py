"""Attention and layer normalizations, found by structure."""

from __future__ import annotations

import numpy as np
import pytest

from qdqtool.model.graph import Model
from qdqtool.model.heads import attentions, holds_shares, is_computed_product
from qdqtool.model.layernorm import layer_norms
from tests.insertion.transformers import Tokens, vit


def test_attentions_of_a_vision_transformer() -> None:
    model = Model(vit())
    found = attentions(model)
    assert [(a.scores.name, a.softmax.name, a.values.name, a.shares) for a in found] == [
        (f"b{i}.attn.qk", f"b{i}.attn.soft", f"b{i}.attn.av", f"b{i}.attn.soft.out") for i in (0, 1)]
    assert sum(is_computed_product(model, n) for n in model.nodes) == 4
    assert [t for t in (f"{n.name}.out" for n in model.nodes) if holds_shares(model, t)] == [
        "b0.attn.soft.out", "b1.attn.soft.out"]


def test_past_masks_transposes_and_pairs() -> None:
    """As YOLO11 writes it: the Softmax's result is transposed, and the second operand."""
    net = Tokens(4, 4)
    q, k, v = (net.op("Reshape", n, "x", net.const(f"{n}.shape", [1, 4, 16], np.int64)) for n in "qkv")
    scores = net.op("MatMul", "qk", net.op("Transpose", "qt", q, perm=[0, 2, 1]), k)
    masked = net.op("Add", "masked", net.op("Mul", "by", scores, net.const("s", 0.5)), net.const("m", np.zeros(16)))
    soft = net.op("Softmax", "soft", masked, axis=-1)
    never = net.const("never", np.zeros((1, 16, 16), bool), bool)
    soft = net.op("Where", "where", never, net.const("zero", 0.0), soft)
    pair = net.op("QuantizeLinear", "Q", soft, net.const("scale", 1 / 127), net.const("zp", 0, np.int8))
    pair = net.op("DequantizeLinear", "DQ", pair, "scale", "zp")
    turned = net.op("Transpose", "turned", pair, perm=[0, 2, 1])
    net.output(net.op("MatMul", "av", v, turned))
    model = net.index()
    (found,) = attentions(model)
    assert (found.scores.name, found.values.name, found.shares) == ("qk", "av", "turned.out")
    assert holds_shares(model, "turned.out") and not holds_shares(model, "v.out")


@pytest.mark.parametrize("kind", ["constant values", "no product above", "multiplied, not a product"])
def test_what_is_no_attention(kind: str) -> None:
    net = Tokens(4, 4)
    flat = net.op("Reshape", "flat", "x", net.const("shape", [1, 4, 16], np.int64))
    above = net.op("Relu", "relu", flat) if kind == "no product above" else net.op(
        "MatMul", "qk", flat, net.op("Transpose", "t", flat, perm=[0, 2, 1]))
    soft = net.op("Softmax", "soft", above, axis=-1)
    if kind == "constant values":
        wide = 16 if kind == "no product above" else 4
        net.output(net.op("MatMul", "av", soft, net.const("w", np.ones((wide, 3)))))
    elif kind == "no product above":
        net.output(net.op("MatMul", "av", soft, net.op("Transpose", "v", flat, perm=[0, 2, 1])))
    else:
        net.output(net.op("Mul", "av", soft, above))
    assert attentions(net.index()) == []


@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_layer_norms_in_pieces(square: str) -> None:
    model = Model(vit(pieces=True, square=square))
    found = layer_norms(model)
    assert [p.nodes[0].name for p in found] == ["b0.ln1.mean", "b0.ln2.mean", "b1.ln1.mean", "b1.ln2.mean", "ln.mean"]
    first = found[0]
    assert (first.tensor, first.output, first.square.name, first.axes) == (
        "embed.tokens.out", "b0.ln1.shift.out", "b0.ln1.square", (-1,))
    assert first.epsilon == pytest.approx(1e-6) and (first.scale, first.bias) == ("b0.ln1.gamma", "b0.ln1.beta")
    assert layer_norms(Model(vit())) == []


@pytest.mark.parametrize("change", ["cube", "another mean", "other axes", "no epsilon"])
def test_what_is_no_layer_norm(change: str) -> None:
    proto = vit(pieces=True)
    copy = type(proto)()
    copy.CopyFrom(proto)
    nodes = {n.name: n for n in copy.graph.node}
    expected = 4
    if change == "cube":
        next(t for t in copy.graph.initializer if t.name == "b0.ln1.two").raw_data = np.float32(3).tobytes()
    elif change == "another mean":
        nodes["b0.ln1.mean"].input[0] = "b0.attn.q.out" if "b0.attn.q.out" in nodes else "embed.shape"
    elif change == "other axes":
        nodes["b0.ln1.mean"].attribute[0].ints[:] = [1]
        expected = 5  # one, whose axes are not known to be the same
    else:
        nodes["b0.ln1.eps"].op_type = "Mul"
    found = layer_norms(Model(copy))
    assert len(found) == expected
    assert change != "other axes" or found[0].axes is None


def test_damaged_graphs_have_nothing_in_them() -> None:
    """Axes of another type or rank, and weights without the axis of their outputs."""
    from qdqtool.insertion.placement import Rules, place
    from qdqtool.model.heads import find_coordinates
    from tests.insertion.nets import Net

    for axes in (np.float32(-1), np.int64(-1), np.zeros((2, 2), np.int64)):
        net = Net()
        net.output(net.conv("c", net.op("ReduceMean", "m", "x", net.const("axes", axes, axes.dtype))))
        place(Model(net.open_model(18)), Rules())
    net = Net(2, 4)
    grid = net.op("ConvTranspose", "up", "x", net.const("w", np.ones(3)))
    net.output(net.op("GridSample", "s", "x", grid))
    model = Model(net.open_model())
    assert find_coordinates(model, ()).makers == {model.node("up").index}

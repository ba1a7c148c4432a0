"""The edges of the rules of insertion: unknown shapes, constants that others still read, and other rare neighbours."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.graph import Model
from qdqtool.insertion.api import insert
from qdqtool.insertion.halfprecision import to_half
from qdqtool.insertion.placement import Rules, place
from qdqtool.insertion.prepare import prepare
from qdqtool.insertion.presets import find_head
from tests.insertion.nets import Net, check, images, run, with_constant_nodes


def test_constant_nodes_that_are_still_read_stay() -> None:
    """Only float constants whose FP16 copies took their place go: shapes and the scales of a Resize are read on."""
    net = Net()
    up = net.op("Resize", "up", net.conv("c", "x"), "", net.const("scales", [1, 1, 2, 2]), mode="nearest")
    flat = net.op("Reshape", "flat", up, net.const("shape", [1, 16, -1], np.int64))
    back = net.op("Reshape", "back", flat, net.const("shape_back", [1, 16, 16, 16], np.int64))
    net.output(net.conv("d", back))
    before = with_constant_nodes(net.model(19, ir=9))
    after = onnx.ModelProto()
    after.CopyFrom(before)
    to_half(Model(after))
    check(after)
    left = {n.output[0] for n in after.graph.node if n.op_type == "Constant"}
    assert {"scales", "shape", "shape_back"} <= left
    assert not any(t.startswith("c.weight") for t in left)
    np.testing.assert_allclose(run(after, images(1)[0])[0], run(before, images(1)[0])[0], atol=2e-2)


def test_a_residual_of_unknown_shape_is_a_residual() -> None:
    """Shape inference stops at operators of other domains; what is not known to be a broadcast is taken as none."""
    net = Net()
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    skip = net.op("Strange", "strange", stem, domain="example")
    out = net.op("Add", "add", net.conv("c1", stem), skip)
    net.output(net.op("Conv", "c2", out, "c0.weight", kernel_shape=[3, 3]))
    model = Model(net.open_model())
    assert model.shape("strange.out") is None and model.shape("c1.out") is not None
    placed = place(model, Rules(head="none"))
    assert [r.role for r in placed.readers["strange.out"]] == ["residual"]


def prepared(model: onnx.ModelProto, path: str = "", opset: int = 13) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    prepare(Model(copy, path), opset=opset)
    check(copy)
    return copy


def test_an_output_that_nothing_reads_is_not_dead() -> None:
    """Nodes in front of weights go with them; one of the same kind that makes an output of the network stays."""
    net = Net()
    weight = net.op("Identity", "i", net.const("w", net.rng.standard_normal((16, 16, 3, 3))))
    out = net.op("Conv", "c", "x", weight, kernel_shape=[3, 3])
    net.output(net.op("Identity", "end", out), net.op("Transpose", "turned", out, perm=[0, 2, 3, 1]))
    before = net.model()
    after = prepared(before)
    assert [n.name for n in after.graph.node] == ["c", "end", "turned"]
    for one, two in zip(run(before, images(1)[0]), run(after, images(1)[0]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5)


def test_a_constant_that_another_convolution_reads_survives_folding() -> None:
    net = Net()
    bias = net.const("bias", net.rng.standard_normal(16))
    first = net.op("Conv", "a", "x", net.const("wa", net.rng.standard_normal((16, 16, 1, 1))), bias)
    second = net.op("Conv", "b", "x", net.const("wb", net.rng.standard_normal((16, 16, 1, 1))), bias)
    net.output(net.norm("n", first), second)
    before = net.model()
    after = prepared(before)
    left = {t.name for t in after.graph.initializer}
    assert {"bias", "wb"} <= left and not {"wa", "n.gamma", "n.var"} & left
    for one, two in zip(run(before, images(1)[0]), run(after, images(1)[0]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-4)


def test_epsilon_has_onnxs_default() -> None:
    """1e-5, which matters where the variance is as small."""
    net = Net()
    parameters = {"gamma": np.ones(16), "beta": np.zeros(16), "mean": np.zeros(16), "var": np.full(16, 1e-5)}
    names = [net.const(k, v) for k, v in parameters.items()]
    net.output(net.op("BatchNormalization", "n", net.conv("c", "x"), *names))
    before = net.model()
    after = prepared(before)
    assert [n.op_type for n in after.graph.node] == ["Conv"]
    np.testing.assert_allclose(run(after, images(1)[0])[0], run(before, images(1)[0])[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("path", "told"), [("net.onnx", r"^net\.onnx: "), ("", "^model: ")])
def test_errors_name_the_file(path: str, told: str) -> None:
    net = Net()
    net.output(net.conv("c", "x"))
    old = net.model(11)
    old.graph.node.append(onnx.helper.make_node("Upsample", ["x"], ["up"], "u", scales=[1.0, 1.0, 2.0, 2.0]))
    with pytest.raises(ModelError, match=f"{told}opset 11 cannot be raised to 13"):
        prepare(Model(old, path), opset=13)
    recursive = net.model()
    call = onnx.helper.make_node("Again", ["a"], ["b"], domain="own")
    domains = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("own", 1)]
    recursive.functions.append(onnx.helper.make_function("own", "Again", ["a"], ["b"], [call], domains))
    recursive.graph.node.append(onnx.helper.make_node("Again", ["x"], ["z"], "again", domain="own"))
    recursive.opset_import.append(domains[1])
    with pytest.raises(ModelError, match=f"{told}functions cannot be inlined"):
        prepare(Model(recursive, path), opset=13)


@pytest.mark.parametrize(("between", "found"), [("Transpose", True), ("Reshape", True), ("MaxPool", False)])
def test_the_dfl_behind_operators_that_only_move_values(between: str, found: bool) -> None:
    """The mean over the bins may stand behind a Transpose or Reshape of the Softmax; one of maxima is none."""
    net = Net()
    soft = net.op("Softmax", "soft", net.conv("box", "x", cout=8), axis=1)
    if between == "Transpose":
        moved = net.op("Transpose", "moved", soft, perm=[0, 1, 3, 2])
    elif between == "Reshape":
        moved = net.op("Reshape", "moved", soft, net.const("shape", [1, 8, 64, 1], np.int64))
    else:
        moved = net.op("MaxPool", "moved", soft, kernel_shape=[2, 2])
    net.output(net.op("Conv", "mean", moved, net.const("bins", np.arange(8).reshape(1, 8, 1, 1))))
    head = find_head(net.index())
    assert [net.nodes[i].name for i in head.dfl] == (["mean"] if found else [])


@pytest.mark.parametrize(("perm", "boxes"), [
    ([0, 1, 3, 2], {"box"}), ([0, 2, 3, 1], {"box", "cls"}), (None, {"box", "cls"}),
])
def test_channels_are_followed_while_they_stay_axis_1(perm: list[int] | None, boxes: set[str]) -> None:
    """Behind a Transpose that moves the channels, a Slice of axis 1 cuts rows: they come from both convolutions."""
    net = Net(side=16)
    joined = net.op("Concat", "join", net.conv("box", "x", cout=8), net.conv("cls", "x", cout=8), axis=1)
    turned = net.op("Transpose", "turned", joined, **({} if perm is None else {"perm": perm}))
    values = {"starts": [0], "ends": [8], "axes": [1]}
    cut = net.op("Slice", "cut", turned, *(net.const(k, v, np.int64) for k, v in values.items()))
    soft = net.op("Softmax", "soft", cut, axis=1)
    net.output(net.op("Conv", "mean", soft, net.const("bins", np.arange(8).reshape(1, 8, 1, 1))))
    assert {net.nodes[i].name for i in find_head(net.index()).boxes} == boxes


def test_a_part_of_unknown_size_hides_which_convolutions_make_the_boxes() -> None:
    """Then all of the Concat's inputs may: none is left out of what stays float."""
    net = Net()
    strange = net.op("Strange", "strange", net.conv("a", "x"), domain="example")
    joined = net.op("Concat", "join", strange, net.conv("b", "x", cout=8), axis=1)
    values = {"starts": [0], "ends": [8], "axes": [1]}
    cut = net.op("Slice", "cut", joined, *(net.const(k, v, np.int64) for k, v in values.items()))
    soft = net.op("Softmax", "soft", cut, axis=1)
    net.output(net.op("Conv", "mean", soft, net.const("bins", np.arange(8).reshape(1, 8, 1, 1))))
    head = find_head(Model(net.open_model()))
    assert "b" in {net.nodes[i].name for i in head.boxes}


def test_the_hundredth_percentile_is_the_maximum() -> None:
    net = Net()
    net.output(net.conv("d", net.op("Relu", "r", net.conv("c", "x"))))
    model = net.model()
    whole, largest = (
        {q.tensor: q.scale for q in insert(model, images(), predict=False, **how).quantized}
        for how in ({"method": "percentile", "percentile": 100.0}, {"method": "max"})
    )
    assert whole == largest
    with pytest.raises(QdqtoolError, match="percentile"):
        insert(model, images(), predict=False, method="percentile", percentile=100.5)

"""Scales and zero points: what is told of them, when two are alike, and that a large one is held once."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.explain.messages import scale_words
from qdqtool.model.graph import Model
from qdqtool.model.qdq import Numbers, PerChannel, QuantParams, read_params
from qdqtool.model.subgraphs import _nodes, inner_graphs
from qdqtool.prediction import predict

COUNT = 50_000


def pairs(count: int, scale: np.ndarray, zeros: bool = True) -> onnx.ModelProto:
    """Pairs in a row that all read one scale and, where wanted, one zero point."""
    constants = [numpy_helper.from_array(scale.astype(np.float32), "s")]
    constants += [numpy_helper.from_array(np.zeros(scale.size, np.int8), "z")] if zeros else []
    nodes, tensor = [], "x"
    for k in range(count):
        for op, source, result in (("QuantizeLinear", tensor, f"q{k}"), ("DequantizeLinear", f"q{k}", f"d{k}")):
            nodes.append(helper.make_node(op, [source, "s"] + ["z"] * zeros, [result], f"{op[0]}{k}", axis=1))
        nodes.append(helper.make_node("Relu", [f"d{k}"], [f"r{k}"], f"R{k}"))
        tensor = f"r{k}"
    values = [helper.make_tensor_value_info(t, TensorProto.FLOAT, [1, scale.size, 1, 1]) for t in ("x", tensor)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def params(*scales: float, zeros: tuple[int, ...] = (0,), axis: int | None = 1) -> QuantParams:
    model = Model(pairs(1, np.array(scales)))
    found = read_params(model, model.node("Q0"))
    numbers = Numbers(np.array(zeros, np.int64))
    return QuantParams(found.scales, found.scale_shape, 1, numbers, True, found.precision, axis, True)


@pytest.mark.parametrize("zeros", [True, False])
def test_nodes_that_share_a_tensor_share_its_values(zeros: bool) -> None:
    model = Model(pairs(3, np.array([0.5, 0.25]), zeros))
    found = [read_params(model, model.node(n)) for n in ("Q0", "D0", "Q2")]
    assert len({id(p.scales) for p in found}) == 1 and found[0].key == found[2].key
    assert all(p.scale is not None and p.scale.tolist() == [0.5, 0.25] for p in found)
    assert all(p.zero_point is not None and p.zero_point.tolist() == [0, 0] for p in found)
    assert found[0].scales is not None and found[0].scales.summary is found[0].scales.summary


def test_what_is_told() -> None:
    assert Numbers(np.array([0.5])).summary == 0.5
    told = Numbers(np.array([0.5, 0.125, 2.0])).summary
    assert isinstance(told, PerChannel) and (told.count, told.least, told.greatest) == (3, 0.125, 2.0)
    assert told == Numbers(np.array([0.5, 0.125, 2.0])).summary and scale_words(told) == "0.125 to 2"
    assert told != Numbers(np.array([0.125, 0.5, 2.0])).summary
    assert Numbers(np.full(2, 0.5)).summary != Numbers(np.full(3, 0.5)).summary
    assert scale_words(Numbers(np.array([])).summary) == "unknown"


def test_two_that_quantize_alike_have_one_key() -> None:
    base = params(0.5, 0.25)
    for other, same in [
        (params(0.5, 0.25), True), (params(0.5, 0.25, zeros=(0, 0, 0)), True), (params(0.25, 0.5), False),
        (params(0.5, 0.25, axis=0), False), (params(0.5, 0.25, zeros=(0, 1)), False),
        (params(0.5, 0.25, zeros=(0, 1, 2)), False), (params(0.5), False),
    ]:  # fmt: skip
        assert (base.key == other.key) is same
        assert base.same_as(other) is same
    assert params(0.5).key != params(0.5, 0.5).key
    assert params(0.5, axis=0).key == params(0.5, axis=1).key, "one scale has no axis"
    assert params(math.nan).key is None


def test_a_large_scale_is_held_once_however_many_pairs_read_it() -> None:
    """Each further pair takes what its nodes, layers and findings take, which is far below the scale's own size."""
    scale = np.linspace(0.01, 0.02, COUNT)
    predict(pairs(1, scale))  # imports
    peaks = []
    for count in (4, 36):
        model = pairs(count, scale)
        tracemalloc.start()
        predict(model)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 32 < COUNT, f"{peaks}: more than a byte a channel for each pair"


def test_every_depth_once_in_order() -> None:
    deep = helper.make_graph([], "deep", [], [])
    loop = helper.make_node("Loop", [], [], body=deep)
    then, otherwise = helper.make_graph([loop], "then", [], []), helper.make_graph([], "else", [], [])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise)
    several = helper.make_node("Own", [], [], domain="own", graphs=[deep, otherwise])
    nodes = [helper.make_node("Relu", ["x"], ["c"]), branch, several]
    names = [g.name for g in inner_graphs(nodes)]
    assert sorted(names[:3]) == ["deep", "else", "then"] and names.index("then") + 1 == names.index("deep")
    assert names[3:] == ["deep", "else"]
    # Calls of functions are counted over the same nodes, none of them twice.
    counted = [n.op_type for n in _nodes([helper.make_node("Own", [], [], domain="own", graphs=[then])])]
    assert counted == ["Own", "Loop"]

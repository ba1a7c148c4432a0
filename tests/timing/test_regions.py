"""Regions of Myelin: what lies between one attention or normalization and the next, and which nodes are kernels."""

from __future__ import annotations

import numpy as np

from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.timing import work
from qdqtool.timing.layouts import region_nodes, work_in_region
from qdqtool.timing.predicted import workload_of
from qdqtool.types import Precision
from tests.trt.builder import Graph

WIDE = 64


def block(quantized: bool = True) -> Model:
    """LayerNormalization, a linear layer, attention on its result, another linear layer, a skip, LayerNormalization."""
    g = Graph(opset=17)
    x = g.input(1, 16, WIDE)
    ones, zeros = g.const("ones", np.ones(WIDE, np.float32)), g.const("zeros", np.zeros(WIDE, np.float32))

    def linear(t: str, name: str) -> str:
        w = g.const(f"{name}.w", np.full((WIDE, WIDE), 0.1, np.float32))
        if quantized:
            t, w = g.pair(t, f"{name}.in"), g.pair(w, f"{name}.wq")
        return g.op("MatMul", [t, w], name)

    normed = g.op("LayerNormalization", [x, ones, zeros], "ln1")
    q = linear(normed, "q")
    scores = g.op("Softmax", [g.op("MatMul", [q, g.op("Transpose", [q], "t", perm=[0, 2, 1])], "scores")], "softmax")
    mixed = linear(g.op("MatMul", [scores, q], "mixed"), "proj")
    return Model(g.model(g.op("LayerNormalization", [g.add(mixed, x, "skip"), ones, zeros], "ln2")))


def test_the_region_reaches_from_the_first_to_the_last():
    assert {"ln1", "q", "scores", "softmax", "mixed", "proj", "skip", "ln2"} <= region_nodes(block())


def test_a_network_without_attention_has_none():
    g = Graph()
    assert not region_nodes(Model(g.model(g.relu(g.conv(g.input(1, 8, 8, 8), "c"), "r"))))


def test_what_is_a_kernel():
    model = block()

    def one(name: str):
        return work_in_region(model, model.node(name), model.shape, Precision.FP16)

    assert one("ln1").kind == work.POOL and one("ln1").read == 2 * 16 * WIDE
    scores, mixed = one("scores"), one("mixed")
    assert scores.macs == mixed.macs == 16 * 16 * WIDE
    assert scores.written == 0 and mixed.read == 2 * 16 * WIDE  # the scores stay inside
    assert scores.steps + mixed.steps == 1  # one kernel
    assert {one(n).kind for n in ("softmax", "t")} == {work.NOTHING}
    assert one("skip").steps == 0 and one("skip").moved > 0  # read by its neighbour, at no launch


def test_a_q_inside_costs_no_kernel():
    """With Q/DQ on both linear layers the block has as many kernels as without."""
    kernels = []
    for quantized in (True, False):
        model = block(quantized)
        found = workload_of(model, predict(model, "trt10", advice=False))
        kernels.append(sum(w.steps for w in found.all if w.kind not in (work.NOTHING, work.CONVERSION)))
        inside = [w for layer, w in zip(predict(model, "trt10", advice=False).layers, found.layers, strict=True)
                  if layer.type == "Conversion"]  # fmt: skip
        assert all(w.kind == work.NOTHING for w in inside)
    assert kernels[0] == kernels[1]

"""ConstQDQInitializersFusion: one Running for each Q and DQ, parameters go with their last reader."""

import numpy as np
import pytest

from qdqtool.trt.passes.const_qdq_initializers_fusion import ConstQDQInitializersFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize("constant_nodes", [False, True], ids=["initializers", "constant-nodes"])
def test_own_constants(constant_nodes: bool) -> None:
    """resnet18-qat-rtx2000-trt8510, line 2184: each Q and DQ removes the constants that only it reads."""
    g = Graph(constant_nodes=constant_nodes)
    out = g.relu(g.pair(g.input(1, 3, 4, 4), "p"), "r")
    assert step(g.model(out), ConstQDQInitializersFusion).rows == [
        ("Running", "p.Q"),
        ("Removing", "p.Q.scale"),
        ("Removing", "p.Q.zero"),
        ("Running", "p.DQ"),
        ("Removing", "p.DQ.scale"),
        ("Removing", "p.DQ.zero"),
    ]


def test_constants_that_are_shared_or_computed(g: Graph) -> None:
    """yolo-resnet18-orin-trt8502: nothing is removed behind a Q, both constants behind its DQ."""
    x = g.input(1, 3, 4, 4)
    parameters = [g.const("scale", np.float32(0.1)), g.const("zero", np.int8(0))]
    quantized = g.op("QuantizeLinear", [x, *parameters], "Q")
    out = g.op("DequantizeLinear", [quantized, *parameters], "DQ")
    assert step(g.model(out), ConstQDQInitializersFusion).rows == [
        ("Running", "Q"),
        ("Running", "DQ"),
        ("Removing", "scale"),
        ("Removing", "zero"),
    ]
    g = Graph()
    x = g.input(1, 3, 4, 4)
    scale = g.op("Abs", g.input(name="s"), "abs")
    quantized = g.op("QuantizeLinear", [x, scale, g.const("z", np.int8(0))], "Q")
    out = g.dq(quantized, "DQ")
    found = step(g.model(out), ConstQDQInitializersFusion)
    assert found.reasons == [("Q", "scale-computed")]
    assert ("Removing", "z") in found.rows
    assert [t.source for t in found.layer("Q").inputs] == ["x", "abs:0"]


@pytest.mark.parametrize("scale", [0.1, [0.1]], ids=["[]", "[1]"])
def test_missing_zero_point(g: Graph, scale: object) -> None:
    x = g.input(1, 3, 4, 4)
    quantized = g.op("QuantizeLinear", [x, g.const("s", np.asarray(scale, np.float32))], "Q")
    out = g.op("DequantizeLinear", [quantized, g.const("t", np.asarray(scale, np.float32))], "DQ")
    found = step(g.model(out), ConstQDQInitializersFusion)
    assert found.rows == [("Running", "Q"), ("Removing", "s"), ("Running", "DQ"), ("Removing", "t")]
    assert len(found.layer("Q").inputs) == 1

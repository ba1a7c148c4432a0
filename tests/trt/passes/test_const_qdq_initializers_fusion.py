import numpy as np
import pytest

from qdqtool.trt.passes.const_qdq_initializers_fusion import ConstQDQInitializersFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize("constant_nodes", [False, True], ids=["initializers", "constant-nodes"])
def test_quantizers_remove_constants_that_only_they_read(constant_nodes: bool) -> None:
    # resnet18-qat-rtx2000-trt8510, line 2184.
    g = Graph(constant_nodes=constant_nodes)
    assert run_pass(
        g.model(g.relu(g.pair(g.input(1, 3, 4, 4), "p"), "r")), ConstQDQInitializersFusion
    ).lines == [
        ("Running", "p.Q"),
        ("Removing", "p.Q.scale"),
        ("Removing", "p.Q.zero"),
        ("Running", "p.DQ"),
        ("Removing", "p.DQ.scale"),
        ("Removing", "p.DQ.zero"),
    ]


def test_shared_constants_go_with_last_consumer(g: Graph) -> None:
    # yolo-resnet18-orin-trt8502: no constant is removed after the Q, both are removed after its DQ.
    parameters = [g.const("scale", np.float32(0.1)), g.const("zero", np.int8(0))]
    quantized = g.op("QuantizeLinear", [g.input(1, 3, 4, 4), *parameters], "Q")
    out = g.op("DequantizeLinear", [quantized, *parameters], "DQ")
    assert run_pass(g.model(out), ConstQDQInitializersFusion).lines == [
        ("Running", "Q"),
        ("Running", "DQ"),
        ("Removing", "scale"),
        ("Removing", "zero"),
    ]


def test_computed_scale_stays_an_input(g: Graph) -> None:
    x, scale = g.input(1, 3, 4, 4), g.op("Abs", g.input(name="s"), "abs")
    out = g.dq(g.op("QuantizeLinear", [x, scale, g.const("z", np.int8(0))], "Q"), "DQ")
    result = run_pass(g.model(out), ConstQDQInitializersFusion)
    assert result.reasons == [("Q", "scale-computed")] and ("Removing", "z") in result.lines
    assert [t.source for t in result.layer("Q").inputs] == ["x", "abs:0"]


@pytest.mark.parametrize("scale", [0.1, [0.1]], ids=["[]", "[1]"])
def test_missing_zero_point_is_accepted(g: Graph, scale: object) -> None:
    x = g.input(1, 3, 4, 4)
    quantized = g.op("QuantizeLinear", [x, g.const("s", np.asarray(scale, np.float32))], "Q")
    out = g.op("DequantizeLinear", [quantized, g.const("t", np.asarray(scale, np.float32))], "DQ")
    result = run_pass(g.model(out), ConstQDQInitializersFusion)
    assert result.lines == [
        ("Running", "Q"),
        ("Removing", "s"),
        ("Running", "DQ"),
        ("Removing", "t"),
    ]
    assert len(result.layer("Q").inputs) == 1

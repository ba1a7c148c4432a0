import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.reasons.conversions import RemainingConversion
from qdqtool.trt.passes.qdq_to_copy import QDQToCopy
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_remaining_q_becomes_copy(g: Graph) -> None:
    result = run_pass(g.model(g.conv(g.input(1, 3, 8, 8), "c")), QDQToCopy)
    assert result.lines == [
        ("Running", "c.in.Q"),
        ("Swap the layer type", "c.in.Q", "QUANTIZE to kQDQ"),
    ]
    assert (result.layer("c.in.Q").kind, result.reasons) == (LayerKind.COPY, [("c.in.Q", "stays")])
    assert (result.records[0].tensor, result.records[0].scale) == ("x", pytest.approx(0.1))


def test_fused_q_does_not_become_copy(g: Graph) -> None:
    out = g.conv(g.conv(g.input(1, 3, 8, 8), "a"), "b")
    assert [r[1] for r in run_pass(g.model(out), QDQToCopy).lines] == ["a.in.Q", "a.in.Q"]


def test_remaining_dq_becomes_copy(g: Graph) -> None:
    # resnet18-a100-qat-residual, last block: DequantizeLinear_291.
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "a"), "r")
    out = g.add(g.pair(x, "skip", 0.1), g.conv(x, "b", scale=0.1), "Add")
    result = run_pass(g.model(g.op("Softmax", out, "s")), QDQToCopy)
    assert ("Swap the layer type", "skip.DQ", "DEQUANTIZE to kQDQ") in result.lines
    assert False in [r.quantize for r in result.records if isinstance(r, RemainingConversion)]

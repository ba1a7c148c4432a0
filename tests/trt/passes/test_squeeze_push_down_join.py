"""SqueezePushDownJoin: resnet18-qat-rtx2000-trt8510, lines 2571 to 2573."""

from __future__ import annotations

from qdqtool.trt.passes.squeeze_push_down_join import SqueezePushDownJoin
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_bias_of_a_gemm() -> None:
    g = Graph()
    found = step(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), SqueezePushDownJoin)
    assert found.rows[0] == ("Running", "reshape_after_Gemm_311")
    kind, subject, rest = found.rows[1]
    assert (kind, subject) == ("SqueezePushDown kSQUEEZE_JOIN", "Gemm_311")
    assert rest.startswith("reshape_after_Gemm_311 --> (Unnamed Layer* ") and rest.endswith("[ElementWise]")
    assert not found.has("reshape_after_Gemm_311")
    assert any(layer.name.startswith("copied_squeeze_after_") for layer in found.network.layers.values())


def test_gemm_without_bias_is_left() -> None:
    g = Graph()
    found = step(g.model(g.gemm(g.input(1, 8), "fc", 8, bias=False)), SqueezePushDownJoin)
    assert found.rows == []
    assert found.has("reshape_after_fc")


def test_two_readers() -> None:
    """The bias is then added by a second layer, which the shuffle must not pass."""
    g = Graph()
    out = g.gemm(g.input(1, 8), "fc", 8, bias=False)
    found = step(g.model(g.op("Add", [out, g.const("b", [[1.0] * 4])], "add"), g.relu(out, "r")), SqueezePushDownJoin)
    assert found.rows == []

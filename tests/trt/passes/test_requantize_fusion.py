from qdqtool.evidence import Evidence
from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.requantize_fusion import RequantizeFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass, weakest_evidence


def test_requantization_after_convolution_is_fused(g: Graph) -> None:
    # The convolution's own pair is followed by a Concat's clone with another scale.
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    joined = g.concat([g.pair(g.conv(x, "c"), "own", 0.2), g.op("Tanh", x, "t")], "cat")
    result = run_pass(g.model(g.op("Elu", g.pair(joined, "p", 0.3), "e")), RequantizeFusion)
    layer = result.layer("c.weight + c.w.Q + c + own.DQ + p.Q_clone_0")
    assert layer.int8_out
    assert weakest_evidence(layer) == Evidence.DOCUMENTED
    assert not result.has_layer("p.Q_clone_0")


def test_dq_and_q_of_other_scale_become_one_layer(g: Graph) -> None:
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", 0.2)
    result = run_pass(g.model(g.conv(x, "c")), RequantizeFusion)
    layer = result.layer("a.DQ + c.in.Q")
    assert layer.kind == LayerKind.QUANTIZE
    assert layer.data.producer is result.layer("a.Q")
    assert not result.network.layers_of_kind(LayerKind.DEQUANTIZE)


def test_dq_with_other_consumer_stays(g: Graph) -> None:
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", 0.2)
    result = run_pass(g.model(g.conv(x, "c"), g.op("Softmax", x, "t")), RequantizeFusion)
    assert result.has_layer("a.DQ + c.in.Q")
    assert [layer.name for layer in result.network.layers_of_kind(LayerKind.DEQUANTIZE)] == ["a.DQ"]


def test_equal_scales_need_no_requantization(g: Graph) -> None:
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", 0.1)
    result = run_pass(g.model(g.conv(x, "c")), RequantizeFusion)
    assert [layer.name for layer in result.network.layers_of_kind(LayerKind.QUANTIZE)] == ["a.Q"]

"""RequantizeFusion: NVIDIA/TensorRT issue 2527, engine name ``... + DequantizeLinear_62 + Quantize..._clone_0``."""

from qdqtool.model.operators import LayerKind
from qdqtool.trt.passes.requantize_fusion import RequantizeFusion
from qdqtool.types import Evidence
from tests.trt.builder import Graph
from tests.trt.passes.step import evidence_of, step


def test_what_takes_a_conversion(g: Graph) -> None:
    """A convolution with a pair of its own behind it, then a Concat's clone of another scale."""
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    left = g.pair(g.conv(x, "c"), "own", 0.2)
    joined = g.concat([left, g.op("Tanh", x, "t")], "cat")
    found = step(g.model(g.op("Elu", g.pair(joined, "p", 0.3), "e")), RequantizeFusion)
    layer = found.layer("c.weight + c.w.Q + c + own.DQ + p.Q_clone_0")
    assert layer.int8_out
    assert evidence_of(layer) == Evidence.DOCUMENTED
    assert not found.has("p.Q_clone_0")
    g = Graph()
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", 0.2)
    found = step(g.model(g.conv(x, "c")), RequantizeFusion)
    layer = found.layer("a.DQ + c.in.Q")
    assert layer.kind == LayerKind.QUANTIZE
    assert layer.data.producer is found.layer("a.Q")
    assert not found.network.of_kind(LayerKind.DEQUANTIZE)
    g = Graph()
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", 0.2)
    found = step(g.model(g.conv(x, "c"), g.op("Softmax", x, "t")), RequantizeFusion)
    assert found.has("a.DQ + c.in.Q")
    assert [layer.name for layer in found.network.of_kind(LayerKind.DEQUANTIZE)] == ["a.DQ"]
    g = Graph()
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", 0.1)
    found = step(g.model(g.conv(x, "c")), RequantizeFusion)
    assert [layer.name for layer in found.network.of_kind(LayerKind.QUANTIZE)] == ["a.Q"]

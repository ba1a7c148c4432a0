"""ScaleScaleFusion: yolo-resnet18-orin-trt8502, line 5765 (what is left of a decomposed BatchNormalization)."""

from qdqtool.trt.passes.scale_scale_fusion import ScaleScaleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def scales(g: Graph, x: str, count: int) -> str:
    for i in range(count):
        x = g.op("Mul", [x, g.const(f"k{i}", g.random.normal(0, 1, (1, 8, 1, 1)))], f"m{i}")
    return x


def test_two_and_three_and_what_prevents_it(g: Graph) -> None:
    found = step(g.model(scales(g, g.input(1, 8, 4, 4), 2)), ScaleScaleFusion)
    assert found.rows == [("Running", "k0 + m0"), ("Fusing", "k0 + m0", "k1 + m1")]
    assert found.has("k0 + m0 + k1 + m1")
    g = Graph()
    assert len(step(g.model(scales(g, g.input(1, 8, 4, 4), 3)), ScaleScaleFusion).rows) == 4
    g = Graph()
    first = scales(g, g.input(1, 8, 4, 4), 1)
    second = g.op("Mul", [first, g.const("k", g.random.normal(0, 1, (1, 8, 1, 1)))], "m")
    assert step(g.model(second, first), ScaleScaleFusion).rows == []
    g = Graph()
    first = g.relu(g.bn(g.input(1, 8, 4, 4), "bn"), "r")
    assert step(g.model(g.bn(first, "bn2")), ScaleScaleFusion).rows == []

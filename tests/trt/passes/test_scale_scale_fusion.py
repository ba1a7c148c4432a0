import pytest

from qdqtool.trt.passes.scale_scale_fusion import ScaleScaleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Graphs, run_pass


def scales(g: Graph, x: str, count: int) -> str:
    for i in range(count):
        x = g.op("Mul", [x, g.const(f"k{i}", g.random.normal(0, 1, (1, 8, 1, 1)))], f"m{i}")
    return x


def test_two_scales_are_fused(g: Graph) -> None:
    result = run_pass(g.model(scales(g, g.input(1, 8, 4, 4), 2)), ScaleScaleFusion)
    assert result.lines == [("Running", "k0 + m0"), ("Fusing", "k0 + m0", "k1 + m1")]
    assert result.has_layer("k0 + m0 + k1 + m1")


def test_three_scales_are_fused(g: Graph) -> None:
    assert len(run_pass(g.model(scales(g, g.input(1, 8, 4, 4), 3)), ScaleScaleFusion).lines) == 4


UNCHANGED: Graphs = {
    "second consumer": lambda g: [scales(g, g.input(1, 8, 4, 4), 2), "m0:0"],
    "Relu": lambda g: [g.bn(g.relu(g.bn(g.input(1, 8, 4, 4), "bn"), "r"), "bn2")],
}


@pytest.mark.parametrize("form", UNCHANGED)
def test_scales_are_not_fused(g: Graph, form: str) -> None:
    assert run_pass(g.model(*UNCHANGED[form](g)), ScaleScaleFusion).lines == []

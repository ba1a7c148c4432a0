import pytest

from qdqtool.trt.passes.scale_scale_fusion import ScaleScaleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


def scales(g: Graph, count: int) -> str:
    x = g.input(1, 8, 4, 4)
    for i in range(count):
        x = g.op("Mul", [x, g.const(f"k{i}", g.random.normal(0, 1, (1, 8, 1, 1)))], f"m{i}")
    return x


TWO: list[Line] = [("Running", "k0 + m0"), ("Fusing", "k0 + m0", "k1 + m1")]
THIRD: list[Line] = [("Running", "k0 + m0 + k1 + m1"), ("Fusing", "k0 + m0 + k1 + m1", "k2 + m2")]


@pytest.mark.parametrize(
    ("build", "lines", "layer"),
    [
        pytest.param(lambda g: [scales(g, 2)], TWO, "k0 + m0 + k1 + m1", id="two"),
        pytest.param(
            lambda g: [scales(g, 3)], TWO + THIRD, "k0 + m0 + k1 + m1 + k2 + m2", id="three"
        ),
        pytest.param(lambda g: [scales(g, 2), "m0:0"], [], "k0 + m0", id="second consumer"),
        pytest.param(
            lambda g: [g.bn(g.relu(g.bn(g.input(1, 8, 4, 4), "bn"), "r"), "bn2")],
            [],
            "bn2",
            id="Relu",
        ),
    ],
)
def test_scales_in_a_row_are_fused(g: Graph, build: Build, lines: list[Line], layer: str) -> None:
    result = run_pass(g.model(*build(g)), ScaleScaleFusion)
    assert result.lines == lines
    assert result.has_layer(layer)

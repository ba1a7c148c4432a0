import pytest

from qdqtool.trt.passes.elt_relu_fusion import EltReluFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


def add(g: Graph) -> str:
    return g.add(g.input(1, 4), g.input(1, 4, name="y"), "a")


@pytest.mark.parametrize(
    ("build", "lines", "layer"),
    [
        pytest.param(
            lambda g: [g.relu(add(g), "r")],
            [("Running", "a"), ("Fusing", "a", "r")],
            "a + r",
            id="Relu",
        ),
        pytest.param(lambda g: [g.op("LeakyRelu", add(g), "l")], [], "a", id="other activation"),
        pytest.param(lambda g: [g.relu(add(g), "r"), "a:0"], [], "a", id="network output"),
        pytest.param(
            lambda g: [g.relu(add(g), "r"), g.op("Neg", "a:0", "n")], [], "a", id="second consumer"
        ),
    ],
)
def test_relu_is_fused_into_add(g: Graph, build: Build, lines: list[Line], layer: str) -> None:
    result = run_pass(g.model(*build(g)), EltReluFusion)
    assert result.lines == lines
    assert result.has_layer(layer)

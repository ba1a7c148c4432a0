import pytest

from qdqtool.trt.passes.elt_relu_fusion import EltReluFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Graphs, run_pass


def test_relu_is_fused_into_add(g: Graph) -> None:
    out = g.relu(g.add(g.input(1, 4), g.input(1, 4, name="y"), "Add_42"), "Relu_43")
    result = run_pass(g.model(out), EltReluFusion)
    assert result.lines == [("Running", "Add_42"), ("Fusing", "Add_42", "Relu_43")]
    assert result.has_layer("Add_42 + Relu_43")


UNCHANGED: Graphs = {
    "other activation": lambda g: [
        g.op("LeakyRelu", g.add(g.input(1, 4), g.input(1, 4, name="y"), "a"), "l")
    ],
    "network output": lambda g: [
        g.relu(g.add(g.input(1, 4), g.input(1, 4, name="y"), "a"), "r"),
        "a:0",
    ],
    "second consumer": lambda g: [
        g.relu(g.add(g.input(1, 4), g.input(1, 4, name="y"), "a"), "r"),
        g.op("Neg", "a:0", "n"),
    ],
}


@pytest.mark.parametrize("form", UNCHANGED)
def test_relu_is_not_fused(g: Graph, form: str) -> None:
    assert run_pass(g.model(*UNCHANGED[form](g)), EltReluFusion).lines == []

"""EltReluFusion: first pass of the quantization phase in both complete 8.5 logs."""

from qdqtool.trt.passes.elt_relu_fusion import EltReluFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_add_and_relu(g: Graph) -> None:
    out = g.relu(g.add(g.input(1, 4), g.input(1, 4, name="y"), "Add_42"), "Relu_43")
    found = step(g.model(out), EltReluFusion)
    assert found.rows == [("Running", "Add_42"), ("Fusing", "Add_42", "Relu_43")]
    assert found.has("Add_42 + Relu_43")
    g = Graph()
    total = g.add(g.input(1, 4), g.input(1, 4, name="y"), "a")
    out = g.relu(total, "r")
    assert step(g.model(g.op("LeakyRelu", total, "l")), EltReluFusion).rows == []
    assert step(g.model(out, total), EltReluFusion).rows == []
    assert step(g.model(out, g.op("Neg", total, "n")), EltReluFusion).rows == []

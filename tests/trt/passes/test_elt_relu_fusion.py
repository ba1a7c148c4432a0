from qdqtool.trt.passes.elt_relu_fusion import EltReluFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_relu_is_fused_into_add(g: Graph) -> None:
    out = g.relu(g.add(g.input(1, 4), g.input(1, 4, name="y"), "Add_42"), "Relu_43")
    result = run_pass(g.model(out), EltReluFusion)
    assert result.lines == [("Running", "Add_42"), ("Fusing", "Add_42", "Relu_43")]
    assert result.has_layer("Add_42 + Relu_43")


def test_other_activation_or_second_consumer_is_not_fused(g: Graph) -> None:
    total = g.add(g.input(1, 4), g.input(1, 4, name="y"), "a")
    out = g.relu(total, "r")
    assert run_pass(g.model(g.op("LeakyRelu", total, "l")), EltReluFusion).lines == []
    assert run_pass(g.model(out, total), EltReluFusion).lines == []
    assert run_pass(g.model(out, g.op("Neg", total, "n")), EltReluFusion).lines == []

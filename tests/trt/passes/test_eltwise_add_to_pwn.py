from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.eltwise_add_to_pwn import EltwiseAddToPwn
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_add_with_relu_becomes_pointwise(g: Graph) -> None:
    left, right = (g.op("Softmax", g.input(1, 8, name=n), f"s{n}") for n in "ab")
    out = g.relu(g.add(left, right, "Add"), "Relu")
    result = run_pass(g.model(out), EltwiseAddToPwn)
    assert result.lines == [
        ("Running", "Add + Relu"),
        ("Swap the layer type", "Add + Relu", "ELEMENTWISE to POINTWISE"),
    ]
    assert result.layer("Add + Relu").kind == LayerKind.POINTWISE


def test_residual_add_is_left_to_convolution(g: Graph) -> None:
    x = g.input(1, 8, 8, 8)
    assert run_pass(g.model(g.add(g.conv(x, "c"), x, "Add")), EltwiseAddToPwn).lines == []


def test_product_stays_elementwise(g: Graph) -> None:
    x = [g.op("Softmax", g.input(1, 8, name=n), f"s{n}") for n in "ab"]
    result = run_pass(g.model(g.op("Mul", x, "Mul")), EltwiseAddToPwn)
    assert result.lines == []
    assert result.layer("Mul").kind == LayerKind.ELEMENTWISE

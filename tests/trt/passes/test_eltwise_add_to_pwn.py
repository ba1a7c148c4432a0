import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.eltwise_add_to_pwn import EltwiseAddToPwn
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def test_add_with_relu_becomes_pointwise(g: Graph) -> None:
    left, right = (g.op("Softmax", g.input(1, 8, name=n), f"s{n}") for n in "ab")
    result = run_pass(g.model(g.relu(g.add(left, right, "Add"), "Relu")), EltwiseAddToPwn)
    assert result.lines == [
        ("Running", "Add + Relu"),
        ("Swap the layer type", "Add + Relu", "ELEMENTWISE to POINTWISE"),
    ]
    assert result.layer("Add + Relu").kind == LayerKind.POINTWISE


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.add(g.conv(g.input(1, 8, 8, 8), "c"), "x", "Add")],
            id="residual Add, fused by the convolution",
        ),
        pytest.param(
            lambda g: [
                g.op("Mul", [g.op("Softmax", g.input(1, 8), "s"), g.op("Tanh", "x", "t")], "Mul")
            ],
            id="product",
        ),
    ],
)
def test_layer_stays_elementwise(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), EltwiseAddToPwn).lines == []

import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.activation_to_pointwise_conversion import ActivationToPointwiseConversion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize("op", ["LeakyRelu", "Clip", "Sigmoid", "Tanh", "Elu"])
def test_activation_becomes_pointwise(g: Graph, op: str) -> None:
    result = run_pass(
        g.model(g.op(op, g.conv(g.input(1, 3, 8, 8), "c"), "act")), ActivationToPointwiseConversion
    )
    assert result.lines == [
        ("Running", "act"),
        ("Swap the layer type", "act", "ACTIVATION to POINTWISE"),
    ]
    assert result.layer("PWN(act)").kind == LayerKind.POINTWISE


def test_relu_stays_activation(g: Graph) -> None:
    pooled = g.pool(g.input(1, 3, 8, 8), "p")
    result = run_pass(g.model(g.relu(pooled, "Relu")), ActivationToPointwiseConversion)
    assert result.lines == []
    assert result.layer("Relu").kind == LayerKind.ACTIVATION

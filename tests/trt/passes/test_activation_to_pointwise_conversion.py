"""ActivationToPointwiseConversion: yolo-resnet18-orin-trt8502, line 5325; mobilenetv2 engine name PWN(Clip_13)."""

import pytest

from qdqtool.model.operators import LayerKind
from qdqtool.trt.passes.activation_to_pointwise_conversion import ActivationToPointwiseConversion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize("op", ["LeakyRelu", "Clip", "Sigmoid", "Tanh", "Elu"])
def test_activations(g: Graph, op: str) -> None:
    found = step(
        g.model(g.op(op, g.conv(g.input(1, 3, 8, 8), "c"), "act")), ActivationToPointwiseConversion
    )
    assert found.rows == [
        ("Running", "act"),
        ("Swap the layer type", "act", "ACTIVATION to POINTWISE"),
    ]
    assert found.layer("PWN(act)").kind == LayerKind.POINTWISE


def test_relu_stays(g: Graph) -> None:
    pooled = g.pool(g.input(1, 3, 8, 8), "p")
    found = step(g.model(g.relu(pooled, "Relu")), ActivationToPointwiseConversion)
    assert found.rows == []
    assert found.layer("Relu").kind == LayerKind.ACTIVATION

"""ScaleActivationFusion: BatchNormalization with Relu only (yolo 9 of 40, resnet18 9 of 20)."""

import pytest

from qdqtool.trt.passes.scale_activation_fusion import ScaleActivationFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_batch_normalization_and_relu(g: Graph) -> None:
    out = g.relu(g.bn(g.input(1, 3, 4, 4), "BatchNormalization_10"), "Relu_11")
    found = step(g.model(out), ScaleActivationFusion)
    assert found.rows == [
        ("Running", "BatchNormalization_10"),
        ("Fusing", "BatchNormalization_10", "Relu_11"),
    ]
    assert found.has("BatchNormalization_10 + Relu_11")
    g = Graph()
    x = g.input(1, 3, 4, 4)
    normal = g.bn(x, "bn")
    out = g.relu(g.add(normal, x, "add"), "relu")
    assert step(g.model(out), ScaleActivationFusion).rows == []
    assert step(g.model(g.relu(normal, "r2"), out), ScaleActivationFusion).rows == []


@pytest.mark.parametrize("behind", ["LeakyRelu", "Sigmoid", "Neg"])
def test_other_readers(g: Graph, behind: str) -> None:
    assert (
        step(
            g.model(g.op(behind, g.bn(g.input(1, 3, 4, 4), "bn"), "r")), ScaleActivationFusion
        ).rows
        == []
    )

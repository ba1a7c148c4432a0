import pytest

from qdqtool.trt.passes.scale_activation_fusion import ScaleActivationFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_relu_after_batchnorm_is_fused(g: Graph) -> None:
    out = g.relu(g.bn(g.input(1, 3, 4, 4), "BatchNormalization_10"), "Relu_11")
    result = run_pass(g.model(out), ScaleActivationFusion)
    assert result.lines == [
        ("Running", "BatchNormalization_10"),
        ("Fusing", "BatchNormalization_10", "Relu_11"),
    ]
    assert result.has_layer("BatchNormalization_10 + Relu_11")


def test_relu_after_add_is_not_fused(g: Graph) -> None:
    x = g.input(1, 3, 4, 4)
    normal = g.bn(x, "bn")
    out = g.relu(g.add(normal, x, "add"), "relu")
    assert run_pass(g.model(out), ScaleActivationFusion).lines == []
    assert run_pass(g.model(g.relu(normal, "r2"), out), ScaleActivationFusion).lines == []


@pytest.mark.parametrize("op", ["LeakyRelu", "Sigmoid", "Neg"])
def test_other_activation_is_not_fused(g: Graph, op: str) -> None:
    assert (
        run_pass(
            g.model(g.op(op, g.bn(g.input(1, 3, 4, 4), "bn"), "r")), ScaleActivationFusion
        ).lines
        == []
    )

import pytest

from qdqtool.trt.passes.scale_activation_fusion import ScaleActivationFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


def batchnorm(g: Graph) -> str:
    return g.bn(g.input(1, 3, 4, 4), "bn")


@pytest.mark.parametrize(
    ("build", "lines"),
    [
        pytest.param(
            lambda g: [g.relu(batchnorm(g), "r")],
            [("Running", "bn"), ("Fusing", "bn", "r")],
            id="Relu",
        ),
        pytest.param(
            lambda g: [g.relu(g.add(batchnorm(g), "x", "add"), "r")], [], id="Relu after an Add"
        ),
        pytest.param(
            lambda g: [g.relu(batchnorm(g), "r2"), g.relu(g.add("bn:0", "x", "add"), "r")],
            [],
            id="second consumer",
        ),
        *(
            pytest.param(lambda g, op=op: [g.op(op, batchnorm(g), "r")], [], id=op)
            for op in ("LeakyRelu", "Sigmoid", "Neg")
        ),
    ],
)
def test_relu_after_batchnorm_is_fused(g: Graph, build: Build, lines: list[Line]) -> None:
    result = run_pass(g.model(*build(g)), ScaleActivationFusion)
    assert result.lines == lines
    assert result.has_layer("bn + r") is bool(lines)

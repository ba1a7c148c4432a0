import numpy as np
import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.passes.const_elt_fusion import ConstEltFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize("op", ["Add", "Mul"])
@pytest.mark.parametrize("constant_first", [False, True])
def test_add_and_mul_with_constant_become_scale(g: Graph, op: str, constant_first: bool) -> None:
    inputs = [g.input(1, 3, 4, 4), g.const("k", g.random.normal(0, 1, (1, 3, 1, 1)))]
    result = run_pass(
        g.model(g.op(op, inputs[::-1] if constant_first else inputs, "e")), ConstEltFusion
    )
    assert result.lines == [("Running", "k"), ("Fusing", "k", "e")]
    assert result.layer("k + e").kind == LayerKind.SCALE


@pytest.mark.parametrize("op", ["Sub", "Div", "Pow", "Max"])
def test_other_operations_stay_elementwise(g: Graph, op: str) -> None:
    # Subtraction and division of a decomposed BatchNormalization stay.
    out = g.op(op, [g.input(1, 3, 4, 4), g.const("k", g.random.uniform(1, 2, (1, 3, 1, 1)))], "e")
    result = run_pass(g.model(out), ConstEltFusion)
    assert (result.lines, result.layer("e").kind) == ([], LayerKind.ELEMENTWISE)


def test_shared_constant_is_not_fused(g: Graph) -> None:
    x, k = g.input(1, 3), g.const("k", [[1.0, 2.0, 3.0]])
    out = g.add(g.add(x, k, "a"), g.add(g.input(1, 3, name="y"), k, "b"), "c")
    assert run_pass(g.model(out), ConstEltFusion).lines == []


def test_reshaped_constant_is_fused(g: Graph) -> None:
    # Both logs: <constant> + (Unnamed Layer* n) [Shuffle] + <elementwise>.
    out = g.op("Add", [g.input(1, 3, 4, 4), g.const("bias", g.random.normal(0, 1, (3, 1, 1)))], "e")
    result = run_pass(g.model(out), ConstEltFusion)
    name = result.lines[0][1]
    assert name.startswith("bias + (Unnamed Layer* ") and name.endswith(") [Shuffle]")
    assert result.lines[1] == ("Fusing", name, "e")


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_bias_as_add_with_relu_is_fused_into_convolution(g: Graph, op: str) -> None:
    # TensorFlow exports biases as nodes.
    x = g.conv(g.input(1, 3, 8, 8), "c0", 8)
    x = g.relu(g.op(op, [x, g.const("k", np.arange(1.0, 9).reshape(1, 8, 1, 1))], "b"), "r")
    prediction = predict(g.model(g.conv(x, "c1", 8)))
    assert prediction.convolutions[0].output == Precision.INT8
    assert prediction.convolutions[0].fused == ["b", "r"]
    assert prediction.conversion_nodes == ["c0.in.Q"]

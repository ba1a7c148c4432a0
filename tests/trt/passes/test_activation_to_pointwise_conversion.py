import pytest

from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.activation_to_pointwise_conversion import ActivationToPointwiseConversion
from tests.trt.builder import Graph
from tests.trt.passes.step import Line, run_pass

CHANGED: list[Line] = [
    ("Running", "act"),
    ("Swap the layer type", "act", "ACTIVATION to POINTWISE"),
]


@pytest.mark.parametrize(
    ("op", "lines", "name", "kind"),
    [
        *(
            (op, CHANGED, "PWN(act)", LayerKind.POINTWISE)
            for op in ("LeakyRelu", "Clip", "Sigmoid", "Tanh", "Elu")
        ),
        ("Relu", [], "act", LayerKind.ACTIVATION),
    ],
)
def test_activations_but_relu_become_pointwise(
    g: Graph, op: str, lines: list[Line], name: str, kind: LayerKind
) -> None:
    result = run_pass(
        g.model(g.op(op, g.pool(g.input(1, 3, 8, 8), "p"), "act")), ActivationToPointwiseConversion
    )
    assert (result.lines, result.layer(name).kind) == (lines, kind)

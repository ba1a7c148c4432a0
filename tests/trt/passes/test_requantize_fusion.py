import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.operators import LayerKind
from qdqtool.trt.passes.requantize_fusion import RequantizeFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass, weakest_evidence


def test_requantization_after_convolution_is_fused(g: Graph) -> None:
    # The convolution's own pair is followed by a Concat's clone with another scale.
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    joined = g.concat([g.pair(g.conv(x, "c"), "own", 0.2), g.op("Tanh", x, "t")], "cat")
    result = run_pass(g.model(g.op("Elu", g.pair(joined, "p", 0.3), "e")), RequantizeFusion)
    layer = result.layer("c.weight + c.w.Q + c + own.DQ + p.Q_clone_0")
    assert layer.int8_out and weakest_evidence(layer) == Evidence.DOCUMENTED
    assert not result.has_layer("p.Q_clone_0")


FIRST = ("a.Q", "before:0")
SECOND = ("a.DQ + c.in.Q", "a.Q:0")


@pytest.mark.parametrize(
    ("scale", "others", "qs", "dqs"),
    [
        pytest.param(0.2, [], [FIRST, SECOND], [], id="another scale"),
        pytest.param(0.2, ["a.DQ:0"], [FIRST, SECOND], ["a.DQ"], id="second consumer of the DQ"),
        pytest.param(0.1, [], [FIRST], [], id="equal scale"),
    ],
)
def test_dq_and_q_of_other_scale_become_one_layer(
    g: Graph, scale: float, others: list[str], qs: list[tuple[str, str]], dqs: list[str]
) -> None:
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a", scale)
    outputs = [g.op("Softmax", tensor, "t") for tensor in others]
    network = run_pass(g.model(g.conv(x, "c"), *outputs), RequantizeFusion).network
    assert [
        (layer.name, layer.data.source) for layer in network.layers_of_kind(LayerKind.QUANTIZE)
    ] == qs
    assert [layer.name for layer in network.layers_of_kind(LayerKind.DEQUANTIZE)] == dqs

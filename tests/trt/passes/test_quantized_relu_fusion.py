from collections.abc import Callable

import pytest

from qdqtool.prediction import predict
from qdqtool.trt.passes.quantized_relu_fusion import QuantizedReluFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import PassResult, run_pass


def quantized_relu(g: Graph, op: str = "Conv") -> str:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    y = g.conv(x, "c", 8, op=op, **({} if op == "Conv" else {"k": 2, "stride": 2}))
    y = g.relu(g.pair(y, "inner", 0.1), "r")
    return g.op("Softmax", g.pair(y, "outer", 0.2), "end")


def quantized_sum(g: Graph) -> str:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    y = g.add(g.pair(g.conv(x, "c", 8), "left", 0.1), g.pair(x, "right", 0.2), "sum")
    return g.op("Softmax", g.pair(g.relu(g.pair(y, "inner", 0.3), "r"), "outer", 0.4), "end")


GRAPHS = {
    "QuantizedReluFusion/convolution": (quantized_relu, "trt10"),
    "QuantizedReluFusion/sum": (quantized_sum, "trt10"),
    "QuantizedReluFusion/deconvolution": (lambda g: quantized_relu(g, "ConvTranspose"), "trt10"),
}


def run(g: Graph, end: str, target: str = "trt10") -> PassResult:
    return run_pass(g.model(end), QuantizedReluFusion, target)


def test_relu_between_pairs_is_fused_on_10(g: Graph) -> None:
    layer = run(g, quantized_relu(g)).layer("c.weight + c.w.Q + c + PWN(r)")
    assert layer.int8 and layer.int8_out and layer.fusion.has_activation
    assert {"r", "outer.Q"} <= {*layer.nodes}


@pytest.mark.parametrize(
    ("build", "target", "layer"),
    [
        # No build of 8.x with such a Relu is published.
        pytest.param(quantized_relu, "trt8.6", "r", id="8.x"),
        pytest.param(quantized_sum, "trt10", "sum + r", id="after a quantized sum"),
        pytest.param(
            lambda g: g.relu(
                g.pair(
                    g.conv(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "c", 8), "inner", 0.1
                ),
                "r",
            ),
            "trt10",
            "r",
            id="Relu that writes float",
        ),
    ],
)
def test_relu_is_fused_or_remains(
    g: Graph, build: Callable[[Graph], str], target: str, layer: str
) -> None:
    assert run(g, build(g), target).has_layer(layer)


def test_relu_after_other_consumer_of_dq_remains(g: Graph) -> None:
    inner = g.pair(g.conv(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "c", 8), "inner", 0.1)
    outer = g.op("Softmax", g.pair(g.relu(inner, "r"), "outer", 0.2), "end")
    assert run_pass(
        g.model(outer, g.op("Neg", inner, "n")), QuantizedReluFusion, "trt10"
    ).has_layer("r")


@pytest.mark.parametrize(("target", "is_reported"), [("trt8.6", True), ("trt10", False)])
def test_pair_before_relu_is_reported_where_the_relu_remains(
    g: Graph, target: str, is_reported: bool
) -> None:
    findings = predict(g.model(quantized_relu(g)), target).findings
    assert any(f.code == "ACT-INNER-Q" for f in findings) == is_reported

import numpy as np
import pytest

from qdqtool.trt.passes.myelin import MyelinOptimization
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.mark.parametrize("trigger", [True, False])
def test_tail_after_last_convolution_is_a_region(g: Graph, trigger: bool) -> None:
    # The region exists only if an operator such as Gather triggers it. yolov8-orin-trt8412-excerpts
    # has no such operator, and other passes fuse its head.
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "sigmoid")
    x = g.reshape(x, "reshape", 1, 128)
    if trigger:
        g.op("Gather", [x, g.const("index", np.array([0, 1], np.int64))], "end", axis=1)
    else:
        g.op("Tanh", x, "end")
    result = run_pass(g.model("end:0"), MyelinOptimization)
    inside = {layer.name for layer in result.network.layers.values() if layer.in_myelin}
    assert (result.lines, inside) == ([], {"sigmoid", "reshape", "end"} if trigger else set())


def test_gather_before_convolution_is_not_in_region(g: Graph) -> None:
    x = g.op("Gather", [g.input(1, 8, 4, 4), g.const("index", np.arange(8))], "gather", axis=1)
    g.channels[x] = 8
    result = run_pass(g.model(g.conv(x, "c")), MyelinOptimization)
    assert not any(layer.in_myelin for layer in result.network.layers.values())


def test_constant_tail_leaves_neighboring_layers_outside(g: Graph) -> None:
    # yolov8-orin-trt8412-excerpts: a ForeignNode without inputs, next to a tail whose layers are
    # still fused.
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "sigmoid")
    anchors = g.op(
        "Gather",
        [g.const("table", np.ones((1, 8, 4, 4), np.float32)), g.const("i", np.array([0]))],
        "pick",
    )
    result = run_pass(g.model(g.add(x, anchors, "shift")), MyelinOptimization)
    inside = {layer.name for layer in result.network.layers.values() if layer.in_myelin}
    assert inside & {"pick", "sigmoid", "shift"} == {"pick"} and not result.network.was_relisted


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(("op", "outside"), [("Relu", True), ("Sigmoid", True), ("LRN", False)])
@pytest.mark.parametrize("bias", [True, False])
def test_quantized_product_keeps_bias_and_activation_outside_region(
    g: Graph, op: str, outside: bool, bias: bool, quantized: bool
) -> None:
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "before")
    form, scale = ("qdq", 0.1) if quantized else ("float", None)
    weights = g.weights("product", (4, 4), form, axis=1)
    x = g.op("MatMul", [x if scale is None else g.pair(x, "in", scale), weights], "product")
    x = g.op("Add", [x, g.const("b", np.linspace(1, 2, 4))], "bias") if bias else x
    x = g.op(op, x, "act", **({"size": 3} if op == "LRN" else {}))
    x = g.op("Gather", [x, g.const("index", np.array([0, 1], np.int64))], "end", axis=1)
    result = run_pass(g.model(x), MyelinOptimization)
    names = {layer.name for layer in result.network.layers.values() if not layer.in_myelin}
    assert ("product" in names, "bias" in names, "act" in names, "end" in names) == (
        quantized,
        quantized and bias,
        quantized and outside,
        False,
    )


@pytest.mark.parametrize("shape", [False, True])
@pytest.mark.parametrize("constant", [True, False])
def test_only_constant_bias_belongs_to_quantized_product(
    g: Graph, constant: bool, shape: bool
) -> None:
    # The constant has other consumers, and may be reshaped.
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "before")
    weights = g.weights("product", (4, 4), "qdq", axis=1)
    constants = g.const("b", np.linspace(1, 2, 4))
    other = constants if constant else g.op("ReduceMean", x, "mean", axes=[0, 1, 2], keepdims=0)
    end = g.op("Tanh", g.reshape(other, "column", 4, 1), "second")
    other = g.reshape(other, "reshaped", 1, 1, 1, 4) if shape else other
    x = g.op("Add", [g.op("MatMul", [g.pair(x, "in", 0.1), weights], "product"), other], "bias")
    x = g.op("Gather", [x, g.const("index", np.array([0, 1], np.int64))], "end", axis=1)
    result = run_pass(g.model(x, end), MyelinOptimization)
    outside = {layer.name for layer in result.network.layers.values() if not layer.in_myelin}
    assert outside & {"product", "bias", "reshaped"} == {
        "product",
        *(["bias"] if constant else []),
        *(["reshaped"] if constant and shape else []),
    }

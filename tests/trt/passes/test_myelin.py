"""MyelinOptimization: the post-processing tail of yolo-resnet18-orin-trt8502 (730 layers to 388)."""

import numpy as np
import pytest

from qdqtool.trt.passes.myelin import MyelinOptimization
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def tail(trigger: bool) -> Graph:
    g = Graph()
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "sigmoid")
    x = g.reshape(x, "reshape", 1, 128)
    if trigger:
        g.op("Gather", [x, g.const("index", np.array([0, 1], np.int64))], "end", axis=1)
    else:
        g.op("Tanh", x, "end")
    return g


@pytest.mark.parametrize("trigger", [True, False])
def test_everything_behind_the_last_convolution(trigger: bool) -> None:
    """Where it has such an operator: yolov8-orin-trt8412-excerpts has none, and its head is fused by other passes."""
    found = step(tail(trigger).model("end:0"), MyelinOptimization)
    assert found.rows == []
    inside = {layer.name for layer in found.network.layers.values() if layer.in_myelin}
    assert inside == ({"sigmoid", "reshape", "end"} if trigger else set())


def test_what_stays_outside_the_tail(g: Graph) -> None:
    x = g.op("Gather", [g.input(1, 8, 4, 4), g.const("index", np.arange(8))], "gather", axis=1)
    g.channels[x] = 8
    found = step(g.model(g.conv(x, "c")), MyelinOptimization)
    assert not any(layer.in_myelin for layer in found.network.layers.values())
    g = Graph()
    # yolov8-orin-trt8412-excerpts: a ForeignNode without inputs, and a tail beside it whose layers are still fused
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "sigmoid")
    anchors = g.op(
        "Gather",
        [g.const("table", np.ones((1, 8, 4, 4), np.float32)), g.const("i", np.array([0]))],
        "pick",
    )
    found = step(g.model(g.add(x, anchors, "shift")), MyelinOptimization)
    inside = {layer.name for layer in found.network.layers.values() if layer.in_myelin}
    assert "pick" in inside
    assert {"sigmoid", "shift"} & inside == set()
    assert not found.network.relisted


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(("behind", "kept"), [("Relu", True), ("Sigmoid", True), ("LRN", False)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_product_keeps_its_bias_and_its_activation(
    g: Graph, behind: str, kept: bool, bias: bool, quantized: bool
) -> None:
    """What it may take in stays with it, and nothing else; a product of floats goes with the tail."""
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "before")
    form, scale = ("qdq", 0.1) if quantized else ("float", None)
    weights = g.weights("product", (4, 4), form, axis=1)
    x = g.op("MatMul", [x if scale is None else g.pair(x, "in", scale), weights], "product")
    x = g.op("Add", [x, g.const("b", np.linspace(1, 2, 4))], "bias") if bias else x
    x = g.op(behind, x, "behind", **({"size": 3} if behind == "LRN" else {}))
    x = g.op("Gather", [x, g.const("index", np.array([0, 1], np.int64))], "end", axis=1)
    found = step(g.model(x), MyelinOptimization)
    outside = {layer.name for layer in found.network.layers.values() if not layer.in_myelin}
    assert ("product" in outside, "bias" in outside, "behind" in outside, "end" in outside) == (
        quantized,
        quantized and bias,
        quantized and kept,
        False,
    )


@pytest.mark.parametrize("shape", [False, True])
@pytest.mark.parametrize("constant", [True, False])
def test_only_a_sum_with_a_constant_belongs_to_a_quantized_product(
    g: Graph, constant: bool, shape: bool
) -> None:
    """The constant, which others read, may stand behind a reshape (kept too); no tensor is one, reshaped or not."""
    x = g.op("Sigmoid", g.conv(g.input(1, 8, 4, 4), "c"), "before")
    weights = g.weights("product", (4, 4), "qdq", axis=1)
    constants = g.const("b", np.linspace(1, 2, 4))
    other = constants if constant else g.op("ReduceMean", x, "mean", axes=[0, 1, 2], keepdims=0)
    end = g.op("Tanh", g.reshape(other, "column", 4, 1), "second")
    other = g.reshape(other, "reshaped", 1, 1, 1, 4) if shape else other
    x = g.op("Add", [g.op("MatMul", [g.pair(x, "in", 0.1), weights], "product"), other], "bias")
    x = g.op("Gather", [x, g.const("index", np.array([0, 1], np.int64))], "end", axis=1)
    found = step(g.model(x, end), MyelinOptimization)
    outside = {layer.name for layer in found.network.layers.values() if not layer.in_myelin}
    assert "product" in outside
    assert {name for name in ("bias", "reshaped") if name in outside} == (
        {"bias", "reshaped"} if constant and shape else {"bias"} if constant else set()
    )

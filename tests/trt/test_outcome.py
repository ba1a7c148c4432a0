"""What the engine's layers are called, and the types that they are listed with."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from qdqtool.prediction import predict
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("op", "attributes", "kind"),
    [("LRN", {"size": 3}, "LRN"), ("GlobalMaxPool", {}, "Pooling"), ("MaxPool", {"kernel_shape": [2, 2]}, "Pooling"),
     ("Softmax", {}, "Softmax")],
)  # fmt: skip
def test_a_layer_of_no_known_type_has_its_operators_name(op: str, attributes: dict[str, object], kind: str) -> None:
    g = Graph()
    layers = predict(g.model(g.op(op, g.input(1, 8, 4, 4), "n", **attributes))).layers
    assert [layer.type for layer in layers if layer.nodes == ["n"]] == [kind]


def _small(name: str) -> onnx.ModelProto:
    """The four graphs of small-graphs-orinnano-trt103, built on TensorRT 10.3."""
    g = Graph()
    x = g.input(1, 32, 32, 32) if name != "symmetric_matmul" else g.input(32, 64)
    if name == "per_channel_conv":
        y = g.conv(x, "c", 32)
    elif name == "symmetric_matmul":
        y = g.op("MatMul", [g.pair(x, "a", 0.03), g.pair(g.const("w", np.ones((64, 64), np.float32)), "w", 0.01)], "m")
    elif name == "residual_branches":
        branches = [g.conv(x, c, 32, scale=None, weights="float") for c in ("c1", "c2")]
        y = g.op("Add", [g.pair(b, f"b{i}", 0.02) for i, b in enumerate(branches)], "add")
    else:
        y = g.relu(g.bn(g.conv(x, "c", 32, scale=None, weights="float"), "bn"), "r")
    return g.model(y)


@pytest.mark.parametrize(("name", "int8", "computing", "conversions"), [
    ("per_channel_conv", 1, [("Convolution", ["INT8"], "FLOAT")], ["c.in.Q"]),
    ("symmetric_matmul", 1, [("Convolution", ["INT8"], "FLOAT")], []),  # its Q is a kernel of Myelin's
    ("residual_branches", 0, [("Convolution", ["FLOAT"], "FLOAT"), ("PointWise", ["INT8", "INT8"], "FLOAT")],
     ["b0.Q", "b1.Q"]),
    ("conv_bn_relu", 0, [("Convolution", ["FLOAT"], "FLOAT")], []),
])  # fmt: skip
def test_four_small_graphs_as_10_3_built_them(
    name: str, int8: int, computing: list[tuple[str, list[str], str]], conversions: list[str]
) -> None:
    """Two of them are told layer by layer there: an INT8 convolution behind a Q, and an Add that reads two INT8."""
    found = predict(_small(name), "10.3")
    told = [(x.type, [str(t.precision) for t in x.inputs], str(x.outputs[0].precision)) for x in found.layers
            if x.type in ("Convolution", "PointWise")]
    assert (found.summary()["int8"], told, found.conversion_nodes) == (int8, computing, conversions)

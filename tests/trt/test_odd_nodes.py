"""Operators nobody knows, scales that make no sense, attributes of the wrong type: an answer or one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from qdqtool.errors import QdqtoolError
from qdqtool.prediction import predict
from tests.trt.builder import Graph
from tests.trt.test_spellings import FLOAT, INT8, conv_names, outcomes


@pytest.mark.parametrize("op", ["Custom", "GridSample", "Einsum"])
def test_unknown_operators(op: str) -> None:
    g = Graph()
    conv = g.conv(g.input(1, 3, 8, 8), "c")
    g.nodes.append(helper.make_node(op, [conv], ["u:0"], "u", domain="my.plugins" if op == "Custom" else ""))
    g.channels["u:0"] = 8
    prediction = predict(g.model(g.op("Softmax", g.conv("u:0", "d"), "s")), "trt8.5", advice=False)
    assert outcomes(prediction) == {"c": ([INT8], FLOAT), "d": ([INT8], FLOAT)}
    assert prediction.conversions == 2


@pytest.mark.parametrize(
    "scale",
    [np.float32(0), np.float32(-1), np.float32("nan"), np.float32("inf"), np.zeros(0, np.float32)],
    ids=["0", "-1", "nan", "inf", "empty"],
)
def test_senseless_scales(scale: Any) -> None:
    """The advice complains; the simulation must only not fail."""
    g = Graph()
    x = g.input(1, 3, 8, 8)
    quantized = g.op("QuantizeLinear", [x, g.const("s", scale), g.const("z", np.int8(0))], "Q")
    data = g.op("DequantizeLinear", [quantized, "s", "z"], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]


@pytest.mark.parametrize(
    ("op", "attribute", "value"),
    [("Conv", "group", "two"), ("Conv", "group", [1, 2]), ("Conv", "strides", 1), ("MaxPool", "kernel_shape", 3.0),
     ("Concat", "axis", "one")],
)
def test_attribute_of_the_wrong_type(op: str, attribute: str, value: Any) -> None:
    """One line that names the node."""
    g = Graph()
    x = g.conv(g.input(1, 3, 8, 8), "c", scale=None)
    g.nodes.append(helper.make_node(op, [x, x], ["n:0"], "n", **{attribute: value}))
    model = helper.make_model(
        helper.make_graph(g.nodes, "g", g.inputs, [helper.make_empty_tensor_value_info("n:0")], g.initializers),
        opset_imports=[helper.make_opsetid("", 13)],
    )
    with pytest.raises(QdqtoolError, match=rf"^[^\n]*node 'n' \({op}\) is damaged[^\n]*$"):
        predict(model, advice=False)


def test_scale_without_a_value() -> None:
    """A Constant node with a string, a scale that is not there at all."""
    g = Graph()
    x = g.input(1, 3, 8, 8)
    g.nodes.append(helper.make_node("Constant", [], ["s"], value_string="0.1"))
    quantized = g.op("QuantizeLinear", [x, "s"], "Q")
    data = g.op("DequantizeLinear", [quantized, "nowhere"], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]

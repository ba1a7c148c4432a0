"""Bounds that hold for every input, and quantizers that round all of them to one value."""

import numpy as np
import onnxruntime
import pytest

from qdqtool.ir.bounds import find_bounds, find_concat_parts, find_constant_value
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import read_params
from tests.trt.builder import Graph


def read_bounds(g: Graph, tensor: str) -> tuple[float, float] | None:
    bounds = find_bounds(Model(g.model(tensor))).get(tensor)
    return None if bounds is None else (bounds.low, bounds.high)


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [
        ("Sigmoid", 0, 1),
        ("HardSigmoid", 0, 1),
        ("Softmax", 0, 1),
        ("Tanh", -1, 1),
        ("Sign", -1, 1),
        ("Relu", 0, np.inf),
        ("Abs", 0, np.inf),
    ],
)
def test_bounds_of_activations(g: Graph, op: str, low: float, high: float) -> None:
    assert read_bounds(g, g.op(op, g.input(1, 4, 8, 8), "n")) == (low, high)


@pytest.mark.parametrize("op", ["LeakyRelu", "Conv", "Floor"])
def test_bounds_unknown(g: Graph, op: str) -> None:
    inputs = [g.op("Sigmoid", g.input(1, 4, 8, 8), "s")]
    inputs += [g.const("w", np.ones((4, 4, 1, 1), np.float32))] * (op == "Conv")
    assert read_bounds(g, g.op(op, inputs, "n")) is None


def test_bounds_pass_what_moves_values(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 4, 8, 8), "s")
    x = g.op("Transpose", x, "t", perm=[0, 2, 3, 1])
    x = g.op("Reshape", [x, g.const("shape", np.array([1, 64, 4], np.int64))], "r")
    x = g.slice(x, "cut", 0, 8)
    assert read_bounds(
        g, g.pool(g.op("Unsqueeze", [x, g.const("a", np.array([0]))], "u"), "m")
    ) == (
        0,
        1,
    )


def test_bounds_of_cubic_resize_unknown(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 4, 8, 8), "s")
    scales = [g.const("roi", np.zeros(0, np.float32)), g.const("f", np.float32([1, 1, 2, 2]))]
    linear = g.op("Resize", [x, *scales], "linear", mode="linear")
    cubic = g.op("Resize", [x, *scales], "cubic", mode="cubic")
    assert read_bounds(g, linear) == (0, 1)
    assert read_bounds(g, cubic) is None


def test_bounds_of_arithmetic(g: Graph) -> None:
    """YOLOv5 computes (2 * Sigmoid - 0.5) * stride."""
    x = g.op("Sigmoid", g.input(1, 4, 8, 8), "s")
    x = g.op("Mul", [x, g.const("two", np.float32(2))], "double")
    x = g.op("Sub", [x, g.const("half", np.float32(0.5))], "shift")
    assert read_bounds(g, g.op("Mul", [x, g.const("stride", np.float32(32))], "m")) == (-16, 48)


def test_bounds_of_concat_need_all_parts(g: Graph) -> None:
    data = g.input(1, 4, 8, 8)
    scores = g.op("Sigmoid", data, "s")
    assert read_bounds(g, g.concat([scores, g.op("Tanh", data, "t")], "both")) == (-1, 1)
    assert read_bounds(g, g.concat([scores, g.op("Exp", g.op("Neg", data, "n"), "e")], "two")) == (
        0,
        np.inf,
    )
    assert read_bounds(g, g.concat([scores, data], "one")) is None


def test_bounds_of_a_pair(g: Graph) -> None:
    """A DQ produces the range of 8 bits, or the rounded ends of a bounded tensor."""
    data = g.input(1, 4, 8, 8)
    assert read_bounds(g, g.pair(data, "p", 0.5)) == (-64, 63.5)
    assert read_bounds(g, g.pair(g.op("Sigmoid", data, "s"), "q", 0.75)) == (0, 0.75)


@pytest.mark.parametrize(
    ("scale", "zero", "integer", "value"),
    [
        (2.0, 0, np.int8, 0.0),
        (np.nextafter(np.float32(2), np.float32(0)), 0, np.int8, None),
        (1.9, 0, np.int8, None),
        (5.2, 0, np.int8, 0.0),
        (5.2, 17, np.uint8, 0.0),
        (0.01, 127, np.int8, 0.0),
        (0.01, 255, np.uint8, 0.0),
        (0.01, 254, np.uint8, None),
        (0.01, 0, np.int8, None),
    ],
)
def test_constant_value_is_what_onnxruntime_computes(
    scale: float, zero: int, integer: type, value: float | None, g: Graph
) -> None:
    """Scores become 0 for scales from 2 on, because 0.5 rounds to even. A zero point at the end saturates."""
    x = g.input(1, 1, 1, 101)
    out = g.pair(
        g.op("Clip", [x, g.const("l", np.float32(0)), g.const("h", np.float32(1))], "c"),
        "p",
        scale,
        zero=zero,
        integer=integer,
    )
    proto = g.model(out)
    model = Model(proto)
    q = next(n for n in model.nodes if n.op == "QuantizeLinear")
    constant = find_constant_value(read_params(model, q), find_bounds(model)[q.input(0)])
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = np.linspace(0, 1, 101, dtype=np.float32).reshape(1, 1, 1, 101)
    computed = np.unique(session.run(None, {"x": values})[0])
    assert constant == value
    assert (computed.size == 1) == (value is not None)
    if value is not None:
        assert computed[0] == value


def test_joined_parts(g: Graph) -> None:
    data = g.input(1, 4, 8, 8)
    scores, boxes = g.op("Sigmoid", data, "s"), g.relu(data, "r")
    inner = g.concat([g.pair(boxes, "p"), boxes], "inner")
    joined = g.op("Transpose", g.pair(g.concat([scores, inner], "all"), "q"), "t")
    model = Model(g.model(joined))
    assert find_concat_parts(model, joined) == [scores, boxes]
    assert find_concat_parts(model, scores) == [scores]


def test_bounds_are_kept_until_the_model_is_edited(g: Graph) -> None:
    model = Model(g.model(g.op("Sigmoid", g.input(1, 4, 8, 8), "s")))
    assert find_bounds(model) is find_bounds(model)
    editor = Editor(model)
    editor.rewrite(model.node("s"), "Relu", ["x"], {})
    editor.finish()
    assert find_bounds(model)["s:0"].high == np.inf

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest

from qdqtool.ir.bounds import find_bounds, find_concat_parts, find_constant_value
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import read_params
from tests.trt.builder import Graph


def sigmoid(g: Graph) -> str:
    return g.op("Sigmoid", g.input(1, 4, 8, 8), "s")


def moved(g: Graph) -> str:
    x = g.op("Transpose", sigmoid(g), "t", perm=[0, 2, 3, 1])
    x = g.op("Reshape", [x, g.const("shape", np.array([1, 64, 4], np.int64))], "r")
    x = g.op("Unsqueeze", [g.slice(x, "cut", 0, 8), g.const("a", np.array([0]))], "u")
    return g.pool(x, "m")


def resized(g: Graph, mode: str) -> str:
    scales = [g.const("roi", np.zeros(0, np.float32)), g.const("f", np.float32([1, 1, 2, 2]))]
    return g.op("Resize", [sigmoid(g), *scales], mode, mode=mode)


WEIGHTS = np.ones((4, 4, 1, 1), np.float32)


@pytest.mark.parametrize(
    ("build", "bounds"),
    [
        *(
            pytest.param(lambda g, op=op: g.op(op, g.input(1, 4, 8, 8), "n"), bounds, id=op)
            for op, bounds in (
                ("Sigmoid", (0, 1)),
                ("HardSigmoid", (0, 1)),
                ("Softmax", (0, 1)),
                ("Tanh", (-1, 1)),
                ("Relu", (0, np.inf)),
                ("Abs", (0, np.inf)),
            )
        ),
        pytest.param(lambda g: g.op("LeakyRelu", sigmoid(g), "n"), None, id="LeakyRelu"),
        pytest.param(lambda g: g.op("Floor", sigmoid(g), "n"), None, id="Floor"),
        pytest.param(
            lambda g: g.op("Conv", [sigmoid(g), g.const("w", WEIGHTS)], "n"), None, id="Conv"
        ),
        pytest.param(moved, (0, 1), id="operators that move values"),
        pytest.param(lambda g: resized(g, "linear"), (0, 1), id="linear Resize"),
        pytest.param(lambda g: resized(g, "cubic"), None, id="cubic Resize"),
        # (2 * Sigmoid - 0.5) * stride, as in YOLOv5.
        pytest.param(
            lambda g: g.op(
                "Mul",
                [
                    g.op(
                        "Sub",
                        [
                            g.op("Mul", [sigmoid(g), g.const("two", np.float32(2))], "double"),
                            g.const("half", np.float32(0.5)),
                        ],
                        "shift",
                    ),
                    g.const("stride", np.float32(32)),
                ],
                "m",
            ),
            (-16, 48),
            id="arithmetic",
        ),
        pytest.param(
            lambda g: g.concat([sigmoid(g), g.op("Tanh", "x", "t")], "c"), (-1, 1), id="Concat"
        ),
        pytest.param(
            lambda g: g.concat([sigmoid(g), g.op("Exp", g.op("Neg", "x", "n"), "e")], "c"),
            (0, np.inf),
            id="Concat without an upper bound",
        ),
        pytest.param(
            lambda g: g.concat([sigmoid(g), "x"], "c"), None, id="Concat of an unknown part"
        ),
        # A DQ produces the range of 8 bits, or the rounded ends of a bounded tensor.
        pytest.param(lambda g: g.pair(g.input(1, 4, 8, 8), "p", 0.5), (-64, 63.5), id="pair"),
        pytest.param(lambda g: g.pair(sigmoid(g), "q", 0.75), (0, 0.75), id="pair after bounds"),
    ],
)
def test_bounds_of_tensor(
    g: Graph, build: Callable[[Graph], str], bounds: tuple[float, float] | None
) -> None:
    tensor = build(g)
    found = find_bounds(Model(g.model(tensor))).get(tensor)
    assert (None if found is None else (found.low, found.high)) == bounds


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
    """Scores become 0 for scales from 2 on, because 0.5 rounds to even.

    A zero point at the end saturates.
    """
    x = g.input(1, 1, 1, 101)
    proto = g.model(
        g.pair(
            g.op("Clip", [x, g.const("l", np.float32(0)), g.const("h", np.float32(1))], "c"),
            "p",
            scale,
            zero=zero,
            integer=integer,
        )
    )
    model = Model(proto)
    q = next(n for n in model.nodes if n.op == "QuantizeLinear")
    constant = find_constant_value(read_params(model, q), find_bounds(model)[q.input(0)])
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = np.linspace(0, 1, 101, dtype=np.float32).reshape(1, 1, 1, 101)
    computed = np.unique(session.run(None, {"x": values})[0])
    assert constant == value == (computed[0] if computed.size == 1 else None)


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

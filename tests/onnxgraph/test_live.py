"""Bytes that live at the same time, counted by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.onnxgraph.live import peak_bytes

KB = 1024


def model(nodes: list[tuple[str, list[str], str]], shape: tuple[object, ...] = (1, 4, 8, 8)) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones((1, 4, 8, 8), np.float32), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


CHAIN = [("Relu", ["x"], "a"), ("Relu", ["a"], "b"), ("Relu", ["b"], "c"), ("Relu", ["c"], "y")]


@pytest.mark.parametrize(
    ("nodes", "tensors"),
    [
        ([("Relu", ["x"], "y")], 2),
        (CHAIN, 3),  # the input, what is read and what is made
        ([*CHAIN[:3], ("Add", ["c", "a"], "y")], 4),  # and a, which is read again
        ([("Add", ["x", "w"], "y")], 2),  # no weights
        ([("Relu", ["x"], "unread"), ("Relu", ["x"], "y")], 2),
        ([("Relu", ["x"], "y"), ("Relu", ["y"], "a"), ("Relu", ["a"], "b")], 4),  # an output stays
    ],
)
def test_tensors_that_live_at_the_same_time(nodes: list[tuple[str, list[str], str]], tensors: int) -> None:
    assert peak_bytes(model(nodes), {}) == tensors * KB
    assert peak_bytes(model(nodes), {"x": (1, 4, 16, 8)}) == (tensors if nodes[0][0] == "Add" else 2 * tensors) * KB


@pytest.mark.parametrize("shape", [("n", 4, "h", "w"), (0, 4, -1, -1), (1, 4, 2, 2), (1, 4, 8, 8)])
def test_the_shapes_that_are_fed_count_and_not_what_the_file_says(shape: tuple[object, ...]) -> None:
    made = model(CHAIN, shape)
    made.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 1]))
    assert peak_bytes(made, {"x": (2, 4, 16, 16)}) == 3 * 8 * KB


def test_types_and_open_dimensions() -> None:
    assert peak_bytes(model(CHAIN, ("n", 4, 8, "w")), {}) == 3 * 4 * 4 * 8
    assert peak_bytes(model(CHAIN, (-1, 4, 8, 0)), {}) == 3 * 4 * 4 * 8, "so some exporters write open ones"
    assert peak_bytes(model([("Cast", ["x"], "a"), ("Cast", ["a"], "y")]), {}) == KB, "of no known type: no size"
    halves = model([("Relu", ["x"], "y")])
    for value in (*halves.graph.input, *halves.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert peak_bytes(halves, {}) == KB
    sequence = model([("Relu", ["x"], "y"), ("SequenceConstruct", ["y"], "s")])
    sequence.graph.output.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    assert peak_bytes(sequence, {}) == 2 * KB


def test_a_body_keeps_what_it_reads() -> None:
    """`a` is read by the bodies of If alone, behind `c`."""
    bodies = {
        f"{which}_branch": helper.make_graph(
            [helper.make_node("Identity", ["a"], ["out"])], which, [],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 4, 8, 8])],
        )
        for which in ("then", "else")
    }  # fmt: skip
    made = model(CHAIN[:3])
    made.graph.input.append(helper.make_tensor_value_info("t", TensorProto.BOOL, []))
    made.graph.node.append(helper.make_node("If", ["t"], ["y"], **bodies))
    assert peak_bytes(made, {}) == 4 * KB + 1  # x, a, b and c, then x, a, c and y

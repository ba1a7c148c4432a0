from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.runtime.run_cost import estimate_run_cost
from qdqtool.util import limits

KB = 1024  # bytes of one tensor 1x4x8x8


def network(nodes: list[tuple[str, list[str], str]], shape: Any = (1, 4, 8, 8)) -> onnx.ModelProto:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, inputs, [output]) for op, inputs, output in nodes],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(np.ones((1, 4, 8, 8), np.float32), "w")],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])


CHAIN = [("Relu", ["x"], "a"), ("Relu", ["a"], "b"), ("Relu", ["b"], "c"), ("Relu", ["c"], "y")]


@pytest.mark.parametrize(
    ("nodes", "tensors"),
    [
        pytest.param([("Relu", ["x"], "y")], 2, id="one-node"),
        pytest.param(CHAIN, 3, id="chain: the input, one input and one output of a node"),
        pytest.param([*CHAIN[:3], ("Add", ["c", "a"], "y")], 4, id="skip connection"),
        pytest.param([("Add", ["x", "w"], "y")], 2, id="weights do not count"),
        pytest.param([("Relu", ["x"], "unused"), ("Relu", ["x"], "y")], 2, id="unused output"),
        pytest.param(
            [("Relu", ["x"], "y"), ("Relu", ["y"], "a"), ("Relu", ["a"], "b")], 4, id="early output"
        ),
    ],
)
def test_peak_bytes_counts_live_tensors(
    nodes: list[tuple[str, list[str], str]], tensors: int
) -> None:
    assert estimate_run_cost(network(nodes), {}).peak_bytes == tensors * KB


@pytest.mark.parametrize("shape", [("n", 4, "h", "w"), (0, 4, -1, -1), (1, 4, 2, 2), (1, 4, 8, 8)])
def test_peak_bytes_uses_fed_shapes(shape: Any) -> None:
    model = network(CHAIN, shape)
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [1, 1])
    )
    assert estimate_run_cost(model, {"x": (2, 4, 16, 16)}).peak_bytes == 3 * 8 * KB


@pytest.mark.parametrize("shape", [("n", 4, 8, "w"), (-1, 4, 8, 0)], ids=["named", "-1 and 0"])
def test_peak_bytes_counts_open_dimensions_as_one(shape: Any) -> None:
    assert estimate_run_cost(network(CHAIN, shape), {}).peak_bytes == 3 * 4 * 4 * 8


def test_peak_bytes_uses_the_element_type() -> None:
    model = network([("Relu", ["x"], "y")])
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert estimate_run_cost(model, {}).peak_bytes == KB


def test_peak_bytes_does_not_count_sequences() -> None:
    model = network([("Relu", ["x"], "y"), ("SequenceConstruct", ["y"], "s")])
    model.graph.output.append(
        onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, None)
    )
    assert estimate_run_cost(model, {}).peak_bytes == 2 * KB


def test_peak_bytes_counts_tensors_that_branches_read() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 4, 8, 8] x, bool[1] t) => (float[1, 4, 8, 8] y) {
            a = Relu (x)
            b = Relu (a)
            c = Relu (b)
            y = If (t) <
                then_branch = then () => (float[1, 4, 8, 8] p) { p = Identity (a) },
                else_branch = else () => (float[1, 4, 8, 8] q) { q = Identity (a) }
            >
        }""")
    # x, a, b and c are alive first, then x, a, c and y, and the condition of one byte.
    assert estimate_run_cost(model, {}).peak_bytes == 4 * KB + 1


@pytest.mark.parametrize(
    ("text", "operations"),
    [
        ("y = Conv <pads = [1, 1, 1, 1]> (x, w)", 16 * 8 * 8 * (4 * 3 * 3)),
        ("y = ConvTranspose (x, w)", 4 * 8 * 8 * (16 * 3 * 3)),
        ("y = MatMul (x, x)", 4 * 8 * 8 * 8),
        ("y = Relu (x)", 4 * 8 * 8),
        ("y = Concat <axis = 1> (x, x)", 2 * 4 * 8 * 8),
    ],
    ids=["Conv", "ConvTranspose", "MatMul", "Relu", "Concat"],
)
def test_operations_of_one_node(text: str, operations: int) -> None:
    weights = "4, 16, 3, 3" if "Transpose" in text else "16, 4, 3, 3"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[1, 4, 8, 8] x, float[{weights}] w)'
        f" => (float[a, b, c, d] y) {{ {text} }}"
    )
    assert estimate_run_cost(model, {}).operations == operations


def test_operations_count_the_nodes_of_a_loop_once() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y)
        <int64 n = {1000}> {
            y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
                d = Identity (c)
                w = Neg (v)
            }>
        }""")
    assert 0 <= estimate_run_cost(model, {}).operations - 2 * limits.INNER_NODE < 100

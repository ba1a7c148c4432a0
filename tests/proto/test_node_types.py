from typing import Any

import onnx
import pytest

from qdqtool.ir.graph import Model
from qdqtool.proto.node_types import NodeTypeCache, infer_node
from tests.proto.unsafe_models import FLOAT, IMAGE, INT64, LONG, sizes, value


def test_infer_node_uses_types_and_values() -> None:
    node = onnx.helper.make_node("Reshape", ["x", "s"], ["y"])
    types = {"x": value("x", IMAGE).type, "s": value("s", [2], INT64).type}
    values = {"s": onnx.numpy_helper.from_array(sizes(4, 32), "s")}
    assert [
        d.dim_value for d in infer_node(node, types, 18, values)["y"].tensor_type.shape.dim
    ] == [4, 32]
    assert infer_node(onnx.helper.make_node("Own", ["x"], ["y"], domain="own"), types, 18, {}) == {}
    assert infer_node(node, {"x": types["x"], "s": value("s", [LONG], INT64).type}, 18, {}) == {}


IMAGE_DIMS, KERNEL, FLAT = [2, 6, 9, 10], [4, 6, 3, 3], [6]
POOLING: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
#: Input dimensions, number of outputs and attributes for each operator that the cache covers.
CACHED: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    **{op: ([IMAGE_DIMS, [6, 1, 1]], 1, {}) for op in ("Add", "Div", "Mul", "Sub")},
    **{
        op: ([IMAGE_DIMS], 1, {})
        for op in (
            "Clip GlobalAveragePool HardSigmoid HardSwish LeakyRelu Relu Sigmoid Softmax Tanh"
        ).split()
    },
    "AveragePool": ([IMAGE_DIMS], 1, POOLING),
    "MaxPool": ([IMAGE_DIMS], 1, POOLING),
    "BatchNormalization": ([IMAGE_DIMS, FLAT, FLAT, FLAT, FLAT], 1, {}),
    "Concat": ([IMAGE_DIMS, IMAGE_DIMS], 1, {"axis": -1}),
    "Conv": ([IMAGE_DIMS, KERNEL], 1, {"strides": [2, 1], "dilations": [1, 2]}),
    "ConvTranspose": ([IMAGE_DIMS, [6, 2, 3, 3]], 1, {"strides": [2, 2], "group": 2}),
    "Flatten": ([IMAGE_DIMS], 1, {"axis": 2}),
    "Gemm": ([[5, 6], [7, 6]], 1, {"transB": 1}),
    "MatMul": ([IMAGE_DIMS, [10, 3]], 1, {}),
    "Split": ([IMAGE_DIMS], 2, {"axis": 1}),
    "Transpose": ([IMAGE_DIMS], 1, {"perm": [0, 2, 3, 1]}),
}


def one_node(
    op: str, dims: list[list[int]], outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    inputs = [value(f"x{i}", d) for i, d in enumerate(dims)]
    names = [f"y{i}" for i in range(outputs)]
    node = onnx.helper.make_node(op, [v.name for v in inputs], names, **attributes)
    graph = onnx.helper.make_graph([node], "g", inputs, [value(name, None) for name in names])
    opset = onnx.helper.make_opsetid("", 17 if op == "Split" else 18)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9)


@pytest.mark.parametrize("op", CACHED)
def test_node_type_cache_agrees_with_inference_of_the_model(op: str) -> None:
    dims, outputs, attributes = CACHED[op]
    proto = one_node(op, dims, outputs, **attributes)
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    expected = [(FLOAT, tuple(d.dim_value for d in v.type.tensor_type.shape.dim)) for v in inferred]
    assert (
        NodeTypeCache(proto).infer_outputs(
            proto.graph.node[0], op, [(FLOAT, tuple(d)) for d in dims]
        )
        == expected
    )


@pytest.mark.parametrize(
    "tensor_type",
    [(0, (2, 3)), (1, None), (1, (None, 3)), (1, (1,) * 65)],
    ids=["no-type", "no-shape", "open-dimension", "rank-65"],
)
def test_node_type_cache_needs_complete_types(tensor_type: Any) -> None:
    proto = one_node("Concat", [[2, 3]], axis=1)
    assert NodeTypeCache(proto).infer_outputs(proto.graph.node[0], "Concat", [tensor_type]) is None


def test_node_type_cache_skips_damaged_nodes_and_functions() -> None:
    damaged = one_node("Concat", [[2, 3]], axis=5)
    assert (
        NodeTypeCache(damaged).infer_outputs(damaged.graph.node[0], "Concat", [(1, (2, 3))]) is None
    )
    proto = one_node("Relu", [[2, 3]])
    proto.functions.add(name="Relu", domain="")
    assert NodeTypeCache(proto).infer_outputs(proto.graph.node[0], "Relu", [(1, (2, 3))]) is None


def test_model_type_is_inferred_again_if_the_file_contradicts_it() -> None:
    proto = one_node("Relu", [[2, 3]])
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert Model(proto).tensor_type("y0") == (onnx.TensorProto.FLOAT16, None)

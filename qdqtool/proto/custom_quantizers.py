"""Replace ``TRT_FP8QuantizeLinear`` and ``TRT_FP8DequantizeLinear`` by ONNX's Q and DQ.

ModelOpt before 0.43 exported FP8 with these custom operators, which have no zero point; since 0.43,
ModelOpt exports ONNX's operators. TensorRT imports both forms in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
from onnx import TensorProto

from qdqtool.proto.subgraphs import STANDARD

DOMAIN = "trt"
_PREFIX = "TRT_FP8"
_Q = "QuantizeLinear"
_NAMES = (_PREFIX + _Q, _PREFIX + "DequantizeLinear")
_FIRST_OPSET = 19  # first opset with FP8 in QuantizeLinear
_OPSET_OF_CHANGE = 18
# Prefixes of operators whose inputs or attributes changed with opset 18.
_CHANGED_BY_18 = ("Reduce", "Split")


def has_custom_quantizers(model: onnx.ModelProto) -> bool:
    """Return whether a model has TensorRT's custom FP8 quantizers in its main graph."""
    is_declared = any(opset.domain == DOMAIN for opset in model.opset_import)
    return is_declared and any(node.op_type in _NAMES for node in model.graph.node)


def _constant_shapes(graph: onnx.GraphProto) -> dict[str, Sequence[int]]:
    shapes: dict[str, Sequence[int]] = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            shapes[node.output[0]] = node.attribute[0].t.dims
    return shapes


def replace_custom_quantizers(model: onnx.ModelProto) -> None:
    """Replace the custom FP8 operators of a model by Q and DQ with FP8 zero points, in place.

    The recorded types of Q outputs become FP8, because ModelOpt records them as UINT8.

    An opset below 19 becomes 19, so that shapes can be inferred. An opset below 18 remains if the
    model has operators whose inputs or attributes changed with opset 18.
    """
    shapes = _constant_shapes(model.graph)
    zero_points: dict[tuple[int, ...], str] = {}
    quantized: set[str] = set()
    for node in model.graph.node:
        if node.op_type in _NAMES and node.domain == DOMAIN and len(node.input) == 2:
            shape = tuple(shapes.get(node.input[1], ()))
            if shape not in zero_points:
                zero_points[shape] = _add_zero_point(model.graph, shape, len(zero_points))
            node.op_type, node.domain = node.op_type.removeprefix(_PREFIX), ""
            node.input.append(zero_points[shape])
            if node.op_type == _Q:
                quantized.update(node.output)
    for value in (*model.graph.value_info, *model.graph.output):
        if value.name in quantized:
            value.type.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN
    _raise_opset(model)


def _add_zero_point(graph: onnx.GraphProto, shape: tuple[int, ...], number: int) -> str:
    names = {tensor.name for tensor in graph.initializer}
    name = f"fp8_zero_point_{number}"
    while name in names:
        name += "_"
    kind = TensorProto.FLOAT8E4M3FN
    zeros = TensorProto(name=name, data_type=kind, dims=shape, raw_data=bytes(math.prod(shape)))
    graph.initializer.append(zeros)
    return name


def _raise_opset(model: onnx.ModelProto) -> None:
    changed = any(node.op_type.startswith(_CHANGED_BY_18) for node in model.graph.node)
    for entry in model.opset_import:
        number = entry.version
        if entry.domain in STANDARD and not (changed and number < _OPSET_OF_CHANGE):
            entry.version = max(number, _FIRST_OPSET)

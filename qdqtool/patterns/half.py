"""Find the nodes of a Q/DQ model that can compute in FP16, to convert or report them.

Some nodes remain in FP32. Nodes after the last convolutions do little work, and pixel coordinates
above 512 need more precision than FP16 has. Some operators have no FP16 form in ONNX. Other nodes
compute values that FP16 cannot represent: the largest FP16 number is 65,504, and the squares of a
decomposed LayerNorm exceed this number for inputs from 256 on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import TensorProto

from qdqtool.ir import qdq
from qdqtool.ir.float8 import E4M3_MAX
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED, commuting_inputs
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.patterns.heads import find_dfl, tensors_upstream_of_weighted
from qdqtool.patterns.layernorm import find_decomposed_layer_norms, find_sums_of_squares
from qdqtool.proto.subgraphs import DOMAINS, STANDARD

HALF_OPSET = 19  # first opset whose QuantizeLinear accepts float16
# Last opset in which the result of a DequantizeLinear always has the scale's type. Later opsets
# have the attribute output_dtype. If the attribute is missing or FP32, this opset's rule applies.
_SCALE_TYPE_OPSET = 22
HALF_MAX = float(np.finfo(np.float16).max)
# Maximum range of a tensor in FP16. With a wider range, values of new images may exceed the largest
# FP16 number.
WIDE = HALF_MAX / 2
_MAX_SCALE = WIDE / 128  # scale of an INT8 tensor with the range WIDE
_MAX_FP8_SCALE = WIDE / E4M3_MAX
_FLOAT, _HALF = "tensor(float)", "tensor(float16)"
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_datatype"})
# FP16 must hold nonzero values of constants with at most this many elements (such as an epsilon)
# without rounding them to zero.
_MAX_PARAMETER_ELEMENTS = 16


@functools.cache
def float32_inputs(op: str, opset: int, outputs: int) -> frozenset[int] | None:
    """Return the inputs that remain float32 if an operator computes in float16.

    An input remains float32 if ONNX's schema of the operator allows only float32 for this input, as
    for the scales of a Resize.

    Args:
        op: Operator type.
        opset: Version of the operator set.
        outputs: Number of outputs that are used.

    Returns:
        Positions of the inputs. None if the operator cannot compute in float16: it is unknown; the
        type of a used output is float32 for any inputs, is stated in an attribute, or comes from a
        body (If, Loop, Scan); or all float inputs have to be float32.
    """
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None
    if _has_body_or_type(schema):
        return None
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    inputs = [parameter.type_str for parameter in schema.inputs]
    if any(_is_always_float(o.type_str, inputs, allowed) for o in schema.outputs[:outputs]):
        return None
    floats = [i for i, kind in enumerate(inputs) if _FLOAT in allowed.get(kind, {kind})]
    remaining = frozenset(i for i in floats if _HALF not in allowed.get(inputs[i], ()))
    return None if remaining and len(remaining) == len(floats) else remaining


def _has_body_or_type(schema: onnx.defs.OpSchema) -> bool:
    kinds = {attribute.type for attribute in schema.attributes.values()}
    return onnx.defs.OpSchema.AttrType.GRAPH in kinds or not _TYPE_ATTRIBUTES.isdisjoint(
        schema.attributes
    )


def _is_always_float(kind: str, inputs: list[str], allowed: dict[str, set[str]]) -> bool:
    """Return whether an output can be float32 although the inputs are float16."""
    return _FLOAT in allowed.get(kind, {kind}) and (
        kind not in inputs or _HALF not in allowed.get(kind, ())
    )


def keeps_float32(model: Model, node: Node, position: int) -> bool:
    """Return whether an input of an FP16 node remains float32.

    The schema may require float32. A constant without elements also remains float32.
    """
    is_empty = 0 in (model.constant_shape(node.input(position)) or ())
    return is_empty or position in (_node_float32_inputs(model, node) or ())


def _node_float32_inputs(model: Model, node: Node) -> frozenset[int] | None:
    opset = max(model.opset, HALF_OPSET)
    if qdq.is_dq(node) and node.integer("output_dtype", 0) in (0, TensorProto.FLOAT):
        opset = min(opset, _SCALE_TYPE_OPSET)
    return float32_inputs(node.op, opset, len(node.outputs))


def find_fp16_nodes(model: Model, wide: Collection[str] = ()) -> set[int]:
    """Return the nodes of a Q/DQ model that can compute in FP16 or already do, by index.

    Args:
        model: The model.
        wide: Tensors with measured values near the largest FP16 number. Tensors whose Q has such
            a range need not be listed.
    """
    tail = find_tail(model)
    out_of_range = {*wide, *find_out_of_range(model)}
    excluded = tail | _find_squares(model)
    half: set[int] = set()
    for node in model.nodes:
        is_in_range = out_of_range.isdisjoint((*node.inputs, *node.outputs))
        if node.index not in excluded and is_in_range and _can_be_half(model, node):
            half.add(node.index)
    half -= _find_tied_to_float32(model, half | tail)
    qs = [node for node in model.nodes if node.index in half and qdq.is_q(node)]
    return half - {q.index for q in qs if _must_match_dq(model, q, half)}


def _find_squares(model: Model) -> set[int]:
    norms = find_decomposed_layer_norms(model)
    indices: set[int] = set()
    for nodes in (*(norm.fp32_nodes for norm in norms), *find_sums_of_squares(model, norms)):
        indices.update(node.index for node in nodes)
    return indices


def find_out_of_range(model: Model) -> Iterator[str]:
    """Yield activations whose quantized range is near or above the largest FP16 number."""
    for node in model.nodes:
        if qdq.is_qdq(node) and not model.is_constant(node.input(0)):
            scale = model.scalar(node.input(1))
            is_fp8 = qdq.read_params(model, node).precision == Precision.FP8
            if scale is not None and scale > (_MAX_FP8_SCALE if is_fp8 else _MAX_SCALE):
                yield node.input(0) if qdq.is_q(node) else node.output


def _must_match_dq(model: Model, q: Node, half: set[int]) -> bool:
    """Return whether a Q must remain FP32 because one of its DQs remains FP32.

    Q and DQ share their scale. A Q of an activation can nevertheless be FP16 if an FP16 number is
    within a thousandth of the scale, because the scale can then be stored in both types.
    """
    if all(node.index in half for node in model.consumers(q.output) if qdq.is_dq(node)):
        return False
    if qdq.is_dq(model.producer(q.input(0))):
        return False  # all consumers of a DQ have one type, see `_find_tied_to_float32`
    if model.is_constant(q.input(0)):
        return True
    scale = model.scalar(q.input(1))
    if scale is None:
        return True
    with np.errstate(over="ignore"):
        return bool(abs(float(np.float16(scale)) - scale) > 1e-3 * scale)


def _find_tied_to_float32(model: Model, half: set[int]) -> set[int]:
    """Return indices of nodes that share quantizers with nodes that remain FP32.

    A Cast between a DQ and its consumer would prevent their fusion. Therefore all consumers of a
    DQ, and the DQs of all inputs of a node, have one type.

    Args:
        model: The model.
        half: Indices of the nodes that could be FP16 if they shared no quantizers.
    """
    tied: set[int] = set()
    queue = [
        node
        for node in model.nodes
        if node.index not in half and (qdq.is_dq(node) or _reads_only_dqs(model, node))
    ]
    while queue:
        for neighbor in _quantizer_neighbors(model, queue.pop()):
            if neighbor.index not in tied:
                tied.add(neighbor.index)
                queue.append(neighbor)
    return tied


def _quantizer_neighbors(model: Model, node: Node) -> list[Node]:
    producers = [model.producer(tensor) for tensor in node.inputs]
    neighbors = [dq for dq in producers if dq is not None and qdq.is_dq(dq)]
    if qdq.is_dq(node):
        neighbors += model.consumers(node.output)
    return neighbors


def _reads_only_dqs(model: Model, node: Node) -> bool:
    tensors = [tensor for tensor in node.inputs if tensor and not model.is_constant(tensor)]
    return (
        bool(tensors)
        and node.domain in DOMAINS
        and all(qdq.is_dq(model.producer(tensor)) for tensor in tensors)
    )


def _can_be_half(model: Model, node: Node) -> bool:
    if node.domain not in STANDARD or _node_float32_inputs(model, node) is None:
        return False
    if not _has_float_types(model, node):
        return False
    for position, tensor in enumerate(node.inputs):
        if model.elem_type(tensor) != TensorProto.FLOAT or keeps_float32(model, node, position):
            continue
        is_scale = position == 1 and node.op in (qdq.Q, qdq.DQ)
        if not _fits_half(model, tensor, is_scale):
            return False
    return True


def _has_float_types(model: Model, node: Node) -> bool:
    types = {model.elem_type(tensor) for tensor in (*node.inputs, *node.outputs) if tensor}
    return 0 not in types and not types.isdisjoint(QUANTIZABLE)


def _fits_half(model: Model, tensor: str, is_scale: bool) -> bool:
    """Return whether FP16 can hold the values of a constant; True for computed tensors."""
    value = model.constant(tensor)
    if value is None or not value.size:
        return True
    if float(np.abs(value).max()) > HALF_MAX:
        return False
    if is_scale or value.size > _MAX_PARAMETER_ELEMENTS:
        return True
    return not np.any((value != 0) & (value.astype(np.float16) == 0))


def find_tail(model: Model) -> set[int]:
    """Return indices of the nodes after the last convolutions, which remain FP32.

    The convolution of a DFL is such a node. Nodes directly after the last convolutions that a Q
    could pass are left out.
    """
    dfl = find_dfl(model)
    upstream = tensors_upstream_of_weighted(model, dfl)
    tail: set[int] = set()
    for node in model.ordered:
        is_weighted = node.op in WEIGHTED and node.index not in dfl
        if is_weighted or not upstream.isdisjoint(node.outputs):
            continue
        if not commuting_inputs(model, node) or _has_producer_in(model, node, tail):
            tail.add(node.index)
    return tail


def _has_producer_in(model: Model, node: Node, nodes: set[int]) -> bool:
    producers = [model.producer(tensor) for tensor in node.inputs]
    return any(producer is not None and producer.index in nodes for producer in producers)

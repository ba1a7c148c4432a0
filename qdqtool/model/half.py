"""Which nodes of a Q/DQ model can compute in FP16: the one answer for what converts a model and what advises it.

Left in FP32 is what is behind the last convolutions (little work, and pixel coordinates above 512 need more than
FP16), what ONNX gives no FP16 form, and what holds or meets values that FP16 cannot: its largest is 65,504, and the
squares of a normalization in pieces pass that from 256 on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import TensorProto

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.model.heads import find_dfl, tensors_upstream_of_weighted
from qdqtool.model.layernorm import find_decomposed_layer_norms, find_sums_of_squares
from qdqtool.model.operators import WEIGHTED, commuting_inputs
from qdqtool.model.qdq import QUANTIZABLE
from qdqtool.model.subgraphs import DOMAINS, STANDARD

HALF_OPSET = 19  # the first whose QuantizeLinear takes float16
HALF_MAX = float(np.finfo(np.float16).max)
WIDE = (
    HALF_MAX / 2
)  # a range that nears it: other images than those of the calibration reach farther
_COARSEST = WIDE / 128  # scale of an INT8 tensor with that range
_FLOAT, _HALF = "tensor(float)", "tensor(float16)"
_STATED = frozenset({"to", "dtype", "output_datatype"})  # attributes that state a type
_SMALL = 16  # elements; in constants up to this size a value that FP16 rounds to zero matters (an epsilon, say)


@functools.cache
def float32_inputs(op: str, opset: int, outputs: int) -> frozenset[int] | None:
    """How an operator takes float16, by ONNX's own schema: the inputs that stay float32, or None where it cannot.

    It cannot where the type of an output, of those used, is float32 whatever the inputs are, is stated in an attribute,
    or comes out of a body (If, Loop, Scan); an input stays where its type is float32 alone (the scales of a Resize).
    """
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return None
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    kinds = {a.type for a in schema.attributes.values()}
    if onnx.defs.OpSchema.AttrType.GRAPH in kinds or not _STATED.isdisjoint(schema.attributes):
        return None
    inputs = [i.type_str for i in schema.inputs]
    for output in schema.outputs[:outputs]:
        kind = output.type_str
        if _FLOAT in allowed.get(kind, {kind}) and not (
            kind in inputs and _HALF in allowed.get(kind, ())
        ):
            return None
    floats = [i for i, kind in enumerate(inputs) if _FLOAT in allowed.get(kind, {kind})]
    stay = frozenset(i for i in floats if _HALF not in allowed.get(inputs[i], ()))
    return None if stay and len(stay) == len(floats) else stay


def keeps_float32(model: Model, node: Node, position: int) -> bool:
    """Whether an input of an FP16 node stays float32: its type says so, or it is a constant with no values in it."""
    empty = 0 in (model.constant_shape(node.input(position)) or ())
    return empty or position in (_form(model, node) or ())


def find_fp16_nodes(model: Model, wide: Collection[str] = ()) -> set[int]:
    """Nodes of a model with Q/DQ, by index, that can compute in FP16, or do already.

    Values of ``wide`` tensors were seen to near the largest of FP16; those of which a Q says it are found here.
    """
    tail = _tail(model)
    apart = {*wide, *find_out_of_range(model)}
    norms = find_decomposed_layer_norms(model)
    squares = [*(p.fp32_nodes for p in norms), *find_sums_of_squares(model, norms)]
    kept = tail | {n.index for nodes in squares for n in nodes}
    half = {
        n.index
        for n in model.nodes
        if n.index not in kept
        and apart.isdisjoint((*n.inputs, *n.outputs))
        and _can_be_half(model, n)
    }
    half -= _held_back(model, half | tail)
    return half - {
        n.index for n in model.nodes if n.index in half and qdq.is_q(n) and _follows(model, n, half)
    }


def find_out_of_range(model: Model) -> Iterator[str]:
    """Activations that are quantized with a range near the largest value of FP16."""
    for node in model.nodes:
        if qdq.is_qdq(node) and not model.is_constant(node.input(0)):
            scale = model.constant(node.input(1))
            if scale is not None and scale.size == 1 and float(scale.reshape(-1)[0]) > _COARSEST:
                yield node.input(0) if qdq.is_q(node) else node.output


def _follows(model: Model, q: Node, half: set[int]) -> bool:
    """Whether a Q must not be FP16 because its DQ is not: of weights, or with a scale that FP16 holds otherwise.

    A pair has one scale. That of an activation may be written in both types, so that what makes it stays FP16.
    """
    if all(r.index in half for r in model.consumers(q.output) if qdq.is_dq(r)):
        return False
    maker = model.producer(q.input(0))
    if maker is not None and qdq.is_dq(maker):
        return False
    scale = model.constant(q.input(1))
    return (
        scale is None
        or model.is_constant(q.input(0))
        or scale.size != 1
        or not _holds(float(scale.reshape(-1)[0]))
    )


def _holds(scale: float) -> bool:
    """Whether FP16 has a number within a thousandth of a scale."""
    with np.errstate(over="ignore"):
        return bool(abs(float(np.float16(scale)) - scale) <= 1e-3 * scale)


def _held_back(model: Model, free: set[int]) -> set[int]:
    """Nodes that must not be FP16 because what they are quantized with is none of those ``free`` to be.

    A Cast between a DQ and what it quantizes would part them: all readers of a DQ, and the DQs of all inputs of a
    node, have one type.
    """
    found: set[int] = set()
    queue = [
        n for n in model.nodes if n.index not in free and (qdq.is_dq(n) or _dequantized(model, n))
    ]
    while queue:
        node = queue.pop()
        near = [p for t in node.inputs if (p := model.producer(t)) is not None and qdq.is_dq(p)]
        if qdq.is_dq(node):
            near += model.consumers(node.output)
        for other in near:
            if other.index not in found:
                found.add(other.index)
                queue.append(other)
    return found


def _dequantized(model: Model, node: Node) -> bool:
    """Whether all that a standard operator reads at run time comes from DQs."""
    makers = [model.producer(t) for t in node.inputs if t and not model.is_constant(t)]
    return (
        bool(makers)
        and node.domain in DOMAINS
        and all(p is not None and qdq.is_dq(p) for p in makers)
    )


def _can_be_half(model: Model, node: Node) -> bool:
    if node.domain not in STANDARD or _form(model, node) is None:
        return False
    types = [model.elem_type(t) for t in (*node.inputs, *node.outputs) if t]
    if not set(QUANTIZABLE).intersection(types) or 0 in types:
        return False
    for position, tensor in enumerate(node.inputs):
        if model.elem_type(tensor) != TensorProto.FLOAT or keeps_float32(model, node, position):
            continue
        value = model.constant(tensor)
        if value is None or not value.size:
            continue
        if float(np.abs(value).max()) > HALF_MAX:
            return False
        scale = node.op in (qdq.Q, qdq.DQ) and position == 1
        if (
            value.size <= _SMALL
            and not scale
            and np.any((value != 0) & (value.astype(np.float16) == 0))
        ):
            return False
    return True


def _form(model: Model, node: Node) -> frozenset[int] | None:
    return float32_inputs(node.op, max(model.opset, HALF_OPSET), len(node.outputs))


def _tail(model: Model) -> set[int]:
    """Nodes behind the last convolutions, from the first that computes something."""
    dfl = find_dfl(model)
    feeding = tensors_upstream_of_weighted(model, dfl)
    tail: set[int] = set()
    for node in model.ordered:
        if not feeding.isdisjoint(node.outputs) or (node.op in WEIGHTED and node.index not in dfl):
            continue
        makers = [p.index for t in node.inputs if (p := model.producer(t)) is not None]
        if not commuting_inputs(model, node) or any(i in tail for i in makers):
            tail.add(node.index)
    return tail

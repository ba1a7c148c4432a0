"""Bounds of tensors that hold for every input, known from the operators alone.

A Sigmoid writes values from 0 to 1 and a DequantizeLinear writes what its integers can express. Operators that only
move values keep the bounds. Nothing here runs the network or reads data.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import operator_of, rearranges
from qdqtool.ir.qdq import QuantParams
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.types import Precision
from qdqtool.util.records import record

MAX_CONSTANT = 1 << 20  # values of a constant operand that are read for its bounds
_MAX_HOPS = 200  # tensors between a quantizer and the parts of its Concat
_MAX_STEPS = 16  # operators between a quantizer and its Concat
_CODES = {Precision.INT8: (-128, 127), Precision.UINT8: (0, 255)}


@record
class Bounds:
    """Least and greatest value of a tensor, and the node whose operator bounds it.

    Attributes:
        low: No value is less.
        high: No value is greater.
        node: Name of the node that bounds the values.
        op: Its operator.
    """

    low: float
    high: float
    node: str
    op: str


_UNIT, _SIGNED, _POSITIVE = (0.0, 1.0), (-1.0, 1.0), (0.0, math.inf)
_RANGES: dict[str, tuple[float, float]] = {
    "Sigmoid": _UNIT,
    "HardSigmoid": _UNIT,
    "Softmax": _UNIT,
    "Tanh": _SIGNED,
    "Softsign": _SIGNED,
    "Erf": _SIGNED,
    "Sin": _SIGNED,
    "Cos": _SIGNED,
    "Sign": _SIGNED,
    "Relu": _POSITIVE,
    "Abs": _POSITIVE,
    "Sqrt": _POSITIVE,
    "Exp": _POSITIVE,
    "Softplus": _POSITIVE,
    "LogSoftmax": (-math.inf, 0.0),
}
"""Operators whose results are bounded whatever they read."""

_KEEPING = frozenset(
    ("Slice", "Split", "Tile", "MaxPool", "GlobalMaxPool", "GlobalAveragePool", "Gather")
    + ("GatherElements", "GatherND", "Expand", "ReduceMean", "ReduceMax", "ReduceMin", "TopK")
)
"""Operators whose first output has no value beyond those of the first input."""


def find_bounds(model: Model) -> dict[str, Bounds]:
    """Return the bounds of all tensors that have some, kept with the model until it is edited."""
    known: dict[str, Bounds] | None = model.cache.get("bounds")
    if known is None:
        known = model.cache["bounds"] = {}
        for node in model.ordered:
            found = _bounds_of(model, node, known) if node.domain in DOMAINS else None
            if found is not None:
                outputs = node.outputs if node.op == "Split" else node.outputs[:1]
                known.update(dict.fromkeys((t for t in outputs if t), found))
    return known


def _bounds_of(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    own = _RANGES.get(node.op)
    if own is not None:
        before = known.get(node.input(0))
        if node.op == "Relu" and before is not None:
            return Bounds(max(before.low, 0.0), max(before.high, 0.0), before.node, before.op)
        return Bounds(*own, node.name, node.op)
    if node.op == "DequantizeLinear":
        return _dequantized(model, node, known)
    special = _SPECIAL.get(node.op)
    if special is not None:
        return special(model, node, known)
    if node.op in _KEEPING or rearranges(node):
        return known.get(node.input(0)) if _keeps_floats(model, node) else None
    return None


def _keeps_floats(model: Model, node: Node) -> bool:
    """Whether a Cast does not round to integers."""
    return node.op != "Cast" or qdq.precision_of(model.elem_type(node.output)).is_float


def _dequantized(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    """Bounds of what a DQ writes: those of the quantized tensor, rounded, or all that its type holds."""
    params = qdq.read_params(model, node)
    if not is_scalar(params):
        return None
    q = model.producer(node.input(0))
    before = known.get(q.input(0)) if q is not None and qdq.is_q(q) else None
    if q is not None and before is not None and qdq.read_params(model, q).same_as(params):
        rounded = quantized_range(params, before)
        if rounded is not None and rounded[0] < rounded[1]:
            step = float(params.scale[0]) if params.scale is not None else 0.0
            cut = rounded[0] > before.low + step or rounded[1] < before.high - step
            maker = (node.name, node.op) if cut else (before.node, before.op)
            return Bounds(*rounded, *maker)
        return before  # a quantizer downstream is judged by what it would read without this one
    held = quantized_range(params, Bounds(-math.inf, math.inf, node.name, node.op))
    return None if held is None else Bounds(*held, node.name, node.op)


def find_constant_value(params: QuantParams, bounds: Bounds | None) -> float | None:
    """Return the one value that a quantizer makes of every value within bounds; None if it tells some apart."""
    if bounds is None or bounds.low >= bounds.high:
        return None
    ends = quantized_range(params, bounds)
    return ends[0] if ends is not None and ends[0] == ends[1] else None


def is_scalar(params: QuantParams) -> bool:
    """Whether a quantizer has one known positive scale and one known zero point."""
    scales, zeros = params.scales, params.zero_points
    return (
        scales is not None
        and zeros is not None
        and scales.values.size == zeros.values.size == 1
        and scales.is_positive
        and params.precision in _CODES
    )


def quantized_range(params: QuantParams, bounds: Bounds) -> tuple[float, float] | None:
    """Return the least and greatest value that a Q and DQ make of a bounded tensor.

    ONNX divides by the scale in float32, rounds half to even, adds the zero point and saturates. All of it is
    monotone, so that the ends of the range decide. None if scale or zero point are not known.
    """
    if not is_scalar(params) or params.scale is None or params.zero_point is None:
        return None
    scale, zero = np.float32(params.scale[0]), float(params.zero_point[0])
    least, greatest = _CODES[params.precision]
    ends = []
    for value in (bounds.low, bounds.high):
        with np.errstate(over="ignore"):
            code = np.rint(np.float32(value) / scale)
        ends.append((min(max(float(code) + zero, least), greatest) - zero) * float(scale))
    return ends[0], ends[1]


# Operators with rules of their own ---------------------------------------------------------------------------------


def _operand(model: Model, tensor: str, known: dict[str, Bounds]) -> Bounds | None:
    """Bounds of a computed tensor, or those of a constant that is not too large."""
    if tensor in known or not model.is_constant(tensor):
        return known.get(tensor)
    shape = model.constant_shape(tensor)
    if shape is None or not 0 < math.prod(shape) <= MAX_CONSTANT:
        return None
    value = model.constant(tensor)
    if value is None or value.dtype.kind not in "fiu" or not np.all(np.isfinite(value)):
        return None
    return Bounds(float(value.min()), float(value.max()), "", "Constant")


def _joined(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    """Bounds that hold all inputs (a Where's condition apart)."""
    tensors = node.inputs[1:] if node.op == "Where" else node.inputs
    parts = [_operand(model, t, known) for t in tensors if t]
    found = [p for p in parts if p is not None]
    if not found or len(found) < len(parts):
        return None
    greatest = max(found, key=lambda p: p.high)
    return Bounds(min(p.low for p in found), greatest.high, greatest.node, greatest.op)


def _calculated(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    """Bounds of a sum, difference or product, by interval arithmetic, rounded as float32 does."""
    if len(node.inputs) != 2:
        return None
    one, other = (_operand(model, t, known) for t in node.inputs)
    if one is None or other is None:
        return None
    ends = [
        _OPERATIONS[node.op](a, b) for a in (one.low, one.high) for b in (other.low, other.high)
    ]
    if any(math.isnan(e) for e in ends):
        return None
    with np.errstate(over="ignore"):
        low, high = float(np.float32(min(ends))), float(np.float32(max(ends)))
    return Bounds(low, high, node.name, node.op)


_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: 0.0 if a == 0 or b == 0 else a * b,
}


def _clipped(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    limits = [-math.inf, math.inf]
    for position, name in ((1, "min"), (2, "max")):
        value = model.constant(node.input(position)) if node.input(position) else None
        given = node.attributes.get(name)
        if value is not None and value.size == 1:
            limits[position - 1] = float(value.reshape(-1)[0])
        elif not node.input(position) and isinstance(given, float):
            limits[position - 1] = given
    before = known.get(node.input(0))
    low, high = limits
    if before is not None:
        low, high = (min(max(v, low), high) for v in (before.low, before.high))
    if math.isnan(low) or math.isnan(high) or (low, high) == (-math.inf, math.inf):
        return None
    return Bounds(low, high, node.name, node.op)


def _with_zeros(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    """An average pooling, which may count zeros around the tensor."""
    before = known.get(node.input(0))
    return before and Bounds(min(before.low, 0.0), max(before.high, 0.0), before.node, before.op)


def _padded(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    before = known.get(node.input(0))
    if before is None or str(node.attributes.get("mode", "constant")) != "constant":
        return before
    given = node.attributes.get("value", 0.0)
    fill = float(given) if isinstance(given, float) else 0.0
    if node.input(2):
        value = model.constant(node.input(2))
        if value is None or value.size != 1:
            return None
        fill = float(value.reshape(-1)[0])
    if math.isnan(fill):
        return None
    return Bounds(min(before.low, fill), max(before.high, fill), before.node, before.op)


def _resized(model: Model, node: Node, known: dict[str, Bounds]) -> Bounds | None:
    """Nearest and linear resizing stay within the bounds, cubic does not."""
    mode = str(node.attributes.get("mode", "nearest"))
    crops = node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return known.get(node.input(0)) if mode in ("nearest", "linear") and not crops else None


_SPECIAL: dict[str, Callable[[Model, Node, dict[str, Bounds]], Bounds | None]] = {
    "Concat": _joined,
    "Where": _joined,
    "Max": _joined,
    "Min": _joined,
    "Add": _calculated,
    "Sub": _calculated,
    "Mul": _calculated,
    "Clip": _clipped,
    "AveragePool": _with_zeros,
    "Pad": _padded,
    "Resize": _resized,
    "Upsample": _resized,
}

# Parts ---------------------------------------------------------------------------------------------------------------


def joined_parts(model: Model, tensor: str) -> list[str]:
    """Return the tensors that Concats join into a tensor, past what only moves all values and past Q/DQ pairs.

    The tensor alone if no Concat makes it.
    """
    if not _passes_concat(model, tensor):
        return [tensor]
    parts: list[str] = []
    stack, seen = [tensor], {tensor}
    while stack and len(seen) <= _MAX_HOPS:
        current = stack.pop()
        node = model.producer(current)
        if node is not None and operator_of(node).joins:
            inputs = [t for t in node.inputs if t]
        elif node is not None and (rearranges(node) or qdq.is_qdq(node)) and node.inputs:
            inputs = [node.input(0)]
        else:
            inputs = []
        if not inputs:
            parts.append(current)
        for name in reversed(inputs):
            if name not in seen:
                seen.add(name)
                stack.append(name)
    return parts


def _passes_concat(model: Model, tensor: str) -> bool:
    for _ in range(_MAX_STEPS):
        node = model.producer(tensor)
        if node is None or operator_of(node).joins:
            return node is not None
        if not (rearranges(node) or qdq.is_qdq(node)) or not node.inputs:
            return False
        tensor = node.input(0)
    return False

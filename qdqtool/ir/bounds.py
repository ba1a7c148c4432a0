"""Bounds of tensors that follow from operators alone, and hold for every network input.

A Sigmoid produces values from 0 to 1, and a DequantizeLinear only multiples of the scale.
Operators that only move values keep the bounds. The module neither runs the network nor reads
calibration data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import REARRANGING, operator_of, rearranges
from qdqtool.ir.precision import INTEGER_RANGES
from qdqtool.ir.qdq import QuantParams
from qdqtool.proto.subgraphs import DOMAINS

MAX_CONSTANT = 1 << 20  # maximum number of values of a constant operand whose bounds are read
_MAX_TENSORS = 200  # maximum number of tensors between a quantizer and the inputs of its Concat
# Maximum number of tensors that are visited before the first Concat. The limit is low, because the
# search runs for each Q.
_MAX_STEPS_TO_CONCAT = 16


class Bounds(NamedTuple):
    """Lower and upper bound of a tensor's values, and the node that bounds them.

    Attributes:
        low: No value is less.
        high: No value is greater.
        node: Name of the node that bounds the values; empty for a constant.
        op: Operator of this node; ``Constant`` for a constant.
    """

    low: float
    high: float
    node: str
    op: str


_Rule = Callable[[Model, Node, dict[str, Bounds]], Bounds | None]
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
"""Least and greatest result of operators whose results are bounded for all inputs."""

WITHIN_ONE = frozenset(op for op, (low, high) in _RANGES.items() if low >= -1 and high <= 1)
"""Operators whose results have magnitudes of at most 1."""

_BOUND_KEEPING = frozenset(
    ("Slice", "Split", "Tile", "MaxPool", "GlobalMaxPool", "GlobalAveragePool", "Gather")
    + ("GatherElements", "GatherND", "Expand", "ReduceMean", "ReduceMax", "ReduceMin", "TopK")
)
"""Operators whose first output (each output of a Split) stays within the first input's bounds."""


def find_bounds(model: Model) -> dict[str, Bounds]:
    """Return the bounds of all bounded tensors, cached until the model is edited."""
    bounds: dict[str, Bounds] | None = model.cache.get("bounds")
    if bounds is None:
        bounds = model.cache["bounds"] = {}
        for node in model.ordered:
            if node.op not in _BOUNDED or node.domain not in DOMAINS:
                continue
            node_bounds = _bound_node(model, node, bounds)
            if node_bounds is not None:
                for tensor in node.outputs if node.op == "Split" else node.outputs[:1]:
                    if tensor:
                        bounds[tensor] = node_bounds
    return bounds


def _bound_node(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    own_range = _RANGES.get(node.op)
    if own_range is not None:
        source = bounds.get(node.input(0))
        if node.op == "Relu" and source is not None:
            return Bounds(max(source.low, 0.0), max(source.high, 0.0), source.node, source.op)
        return Bounds(*own_range, node.name, node.op)
    rule = _RULES.get(node.op)
    if rule is not None:
        return rule(model, node, bounds)
    if node.op in _BOUND_KEEPING or rearranges(node):
        rounds = node.op == "Cast" and not qdq.precision_of(model.elem_type(node.output)).is_float
        return None if rounds else bounds.get(node.input(0))
    return None


def _find_bounds_before_pair(
    model: Model, dq: Node, params: qdq.QuantParams, bounds: dict[str, Bounds]
) -> Bounds | None:
    """Return the bounds of the tensor before a Q/DQ pair.

    None if no Q precedes the DQ, if Q and DQ have different parameters, or if the bounds are
    unknown.
    """
    q = model.producer(dq.input(0))
    if q is None or not qdq.is_q(q):
        return None
    source = bounds.get(q.input(0))
    if source is None or not qdq.read_params(model, q).same_as(params):
        return None
    return source


def _bound_dequantizer(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    """Return the bounds of the output of a DQ.

    They are the rounded bounds of the tensor before the Q, or if these are unknown, the range of
    the integer type. Bounds that would be rounded to one value are not rounded. None if the
    parameters of the DQ are unknown.
    """
    params = qdq.read_params(model, node)
    source = _find_bounds_before_pair(model, node, params, bounds)
    if source is None:
        full_range = _find_full_range(params)
        return None if full_range is None else Bounds(*full_range, node.name, node.op)
    scalars = params.scalars
    rounded = _quantize_range(params, source.low, source.high)
    if scalars is None or rounded is None:
        return None
    low, high = rounded
    if low >= high:
        return source  # later quantizers are checked against the bounds of this quantizer's input
    step = scalars[0]
    if low > source.low + step or high < source.high - step:
        return Bounds(low, high, node.name, node.op)
    return Bounds(low, high, source.node, source.op)


def find_constant_value(params: QuantParams, bounds: Bounds | None) -> float | None:
    """Return the value to which a quantizer rounds all values within bounds.

    None if the quantizer rounds to several values, if the bounds contain a single value, or if
    bounds or parameters are unknown.
    """
    if bounds is None or bounds.low >= bounds.high:
        return None
    ends = _quantize_range(params, bounds.low, bounds.high)
    return ends[0] if ends is not None and ends[0] == ends[1] else None


def _find_full_range(params: QuantParams) -> tuple[float, float] | None:
    """Return the least and greatest value that a DQ can produce.

    None if ``params.scalars`` is None.
    """
    scalars = params.scalars
    if scalars is None:
        return None
    step, zero_point = float(np.float32(scalars[0])), scalars[1]
    least, greatest = INTEGER_RANGES[params.precision]
    return (least - zero_point) * step, (greatest - zero_point) * step


def _quantize_range(params: QuantParams, low: float, high: float) -> tuple[float, float] | None:
    """Return the least and greatest value that a Q and DQ produce from a bounded tensor.

    ONNX divides by the scale in float32, rounds half to even, adds the zero point and saturates.
    Each step is monotone, so only the ends of the range are computed. None if
    ``params.scalars`` is None.
    """
    scalars = params.scalars
    if scalars is None:
        return None
    scale, zero_point = scalars
    least, greatest = INTEGER_RANGES[params.precision]
    step = np.float32(scale)
    with np.errstate(over="ignore"):
        steps = [float(np.rint(np.float32(end) / step)) for end in (low, high)]
    first, last = (min(max(count + zero_point, least), greatest) - zero_point for count in steps)
    return first * float(step), last * float(step)


# Rules of single operators ---------------------------------------------------------------------


def _bound_operand(model: Model, tensor: str, bounds: dict[str, Bounds]) -> Bounds | None:
    if tensor in bounds or not model.is_constant(tensor):
        return bounds.get(tensor)
    shape = model.constant_shape(tensor)
    if shape is None or not 0 < math.prod(shape) <= MAX_CONSTANT:
        return None
    value = model.constant(tensor)
    if value is None or value.dtype.kind not in "fiu" or not np.all(np.isfinite(value)):
        return None
    return Bounds(float(value.min()), float(value.max()), "", "Constant")


def _bound_union(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    """Return bounds that hold for all inputs except a Where's condition."""
    tensors = node.inputs[1:] if node.op == "Where" else node.inputs
    operands = [_bound_operand(model, tensor, bounds) for tensor in tensors if tensor]
    parts = [operand for operand in operands if operand is not None]
    if not parts or len(parts) < len(operands):
        return None
    greatest = max(parts, key=lambda part: part.high)
    return Bounds(min(part.low for part in parts), greatest.high, greatest.node, greatest.op)


def _bound_arithmetic(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    if len(node.inputs) != 2:
        return None
    left, right = (_bound_operand(model, tensor, bounds) for tensor in node.inputs)
    if left is None or right is None:
        return None
    operation = _OPERATIONS[node.op]
    ends = [operation(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    if any(map(math.isnan, ends)):
        return None
    with np.errstate(over="ignore"):
        low, high = float(np.float32(min(ends))), float(np.float32(max(ends)))
    return Bounds(low, high, node.name, node.op)


_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: 0.0 if a == 0 or b == 0 else a * b,
}


def _read_number(model: Model, node: Node, position: int, attribute: str) -> float | None:
    if node.input(position):
        return model.scalar(node.input(position))
    number = node.attributes.get(attribute)
    return number if isinstance(number, float) else None


def _bound_clip(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    minimum = _read_number(model, node, 1, "min")
    maximum = _read_number(model, node, 2, "max")
    low = -math.inf if minimum is None else minimum
    high = math.inf if maximum is None else maximum
    source = bounds.get(node.input(0))
    if source is not None:
        low, high = (min(max(v, low), high) for v in (source.low, source.high))
    if math.isnan(low) or math.isnan(high) or (low, high) == (-math.inf, math.inf):
        return None
    return Bounds(low, high, node.name, node.op)


def _bound_average_pool(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    """Return the bounds of an average pooling, which may include zeros of the padding."""
    return _include_value(bounds.get(node.input(0)), 0.0)


def _bound_pad(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    source = bounds.get(node.input(0))
    if source is None or str(node.attributes.get("mode", "constant")) != "constant":
        return source
    fill = _read_number(model, node, 2, "value")
    if fill is None and not node.input(2):
        fill = 0.0
    return None if fill is None or math.isnan(fill) else _include_value(source, fill)


def _include_value(bounds: Bounds | None, value: float) -> Bounds | None:
    if bounds is None:
        return None
    return Bounds(min(bounds.low, value), max(bounds.high, value), bounds.node, bounds.op)


def _bound_resize(model: Model, node: Node, bounds: dict[str, Bounds]) -> Bounds | None:
    """Return the bounds of the input; None if interpolation may exceed them (cubic, crop)."""
    mode = str(node.attributes.get("mode", "nearest"))
    crops = node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return bounds.get(node.input(0)) if mode in ("nearest", "linear") and not crops else None


_RULES: dict[str, _Rule] = {
    "DequantizeLinear": _bound_dequantizer,
    "Concat": _bound_union,
    "Where": _bound_union,
    "Max": _bound_union,
    "Min": _bound_union,
    "Add": _bound_arithmetic,
    "Sub": _bound_arithmetic,
    "Mul": _bound_arithmetic,
    "Clip": _bound_clip,
    "AveragePool": _bound_average_pool,
    "Pad": _bound_pad,
    "Resize": _bound_resize,
    "Upsample": _bound_resize,
}

_BOUNDED = frozenset((*_RANGES, *_RULES, *_BOUND_KEEPING, *REARRANGING))
"""Operators whose outputs may have bounds."""

# Parts of a Concat -----------------------------------------------------------------------------


def find_concat_parts(model: Model, tensor: str) -> list[str]:
    """Return the tensors that Concats join into a tensor; without a Concat, the tensor alone.

    Q/DQ pairs and operators that only move values may lie between these tensors and the Concats.
    The search ends after about 200 tensors.
    """
    parts: list[str] = []
    has_concat = False
    stack, seen = [tensor], {tensor}
    while stack and len(seen) <= _MAX_TENSORS:
        current = stack.pop()
        producer = model.producer(current)
        has_concat = has_concat or operator_of(producer).joins
        if not has_concat and len(seen) >= _MAX_STEPS_TO_CONCAT:
            return [tensor]
        sources = _value_sources(producer)
        if not sources:
            parts.append(current)
        for source in reversed(sources):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return parts if has_concat else [tensor]


def _value_sources(node: Node | None) -> list[str]:
    if node is None:
        return []
    if operator_of(node).joins:
        return [tensor for tensor in node.inputs if tensor]
    if rearranges(node) or qdq.is_qdq(node):
        return [*node.inputs[:1]]
    return []

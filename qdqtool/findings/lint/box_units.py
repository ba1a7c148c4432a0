"""Units of the boxes that a detector decodes: pixels, or cells whose size is a stride."""

from collections.abc import Iterable

import numpy as np

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import operator_of, rearranges
from qdqtool.patterns.view import View

MIN_STRIDE = 4.0  # minimum stride in pixels of a detector; a YOLOv8 with P2 output has 4
_SELECTIONS = ("Slice", "Split", "Gather", "Relu", "Clip")
_SUMS = ("Add", "Sub")  # an offset in the same unit
_SCORES = ("Sigmoid", "HardSigmoid", "Softmax")


def find_box_units(view: View) -> dict[str, float]:
    """Return the pixels per unit of the tensors around the multiplication by strides.

    After the multiplication, a unit is one pixel. Before it, a unit is a cell, and the value is the
    smallest stride (half of it for a sum of two corners that is divided by 2 for the center). If a
    Concat joins boxes and other tensors, its result has the unit of boxes.
    """
    model, units = view.model, dict[str, float]()
    for node in model.nodes:
        if node.op != "Mul" or node.index in view.feeds_weighted:
            continue
        for boxes, factor in (node.inputs, node.inputs[::-1]):
            stride = _read_smallest(model, factor)
            after = _find_results(model, node.output) if stride >= MIN_STRIDE else set()
            if after and not _contains_logits(model, after):
                units |= _find_units_before(model, boxes, stride)
                units |= dict.fromkeys(after, 1.0)
    return units


def _read_smallest(model: Model, tensor: str) -> float:
    """Return the smallest value of a constant, also one with Q/DQ; 0 for other tensors."""
    tensor = qdq.find_float_tensor(model, tensor)
    dq = model.producer(tensor)
    scale, zero = 1.0, 0
    if dq is not None and qdq.is_dq(dq):
        tensor = dq.input(0)
        scale, zero = qdq.read_params(model, dq).scalars or (0.0, 0)
    values = model.constant(tensor) if model.is_constant(tensor) else None
    if values is None or not values.size:
        return 0.0
    return (float(np.min(values)) - zero) * scale


def _find_results(model: Model, start: str) -> set[str]:
    seen, pending = {start}, [start]
    while pending:
        for tensor in _list_results(model, pending.pop()):
            if tensor and tensor not in seen:
                seen.add(tensor)
                pending.append(tensor)
    return seen


def _find_units_before(model: Model, boxes: str, stride: float) -> dict[str, float]:
    """Return the largest number of pixels per unit of each tensor from which boxes are computed."""
    units = {boxes: stride}
    for node in reversed(model.ordered):
        unit = max((units.get(t, 0.0) for t in node.outputs), default=0.0)
        factor = _read_source_factor(model, node) if unit else 0.0
        if factor:
            several = operator_of(node).joins or node.op in _SUMS
            for tensor in node.inputs if several else node.inputs[:1]:
                units[tensor] = max(units.get(tensor, 0.0), unit * factor)
    return units


def _read_source_factor(model: Model, node: Node) -> float:
    """Return the factor from the first input of a node to its result; 0 for other operators."""
    if node.op in _SUMS or _keeps_unit(node):
        return 1.0
    divisor = _read_smallest(model, node.input(1)) if node.op == "Div" else 0.0
    return 1.0 / divisor if divisor > 0 else 0.0


def _keeps_unit(node: Node) -> bool:
    keeps = rearranges(node) or qdq.is_qdq(node) or operator_of(node).joins
    return keeps or node.op in _SELECTIONS


def _list_results(model: Model, tensor: str) -> Iterable[str]:
    consumers = model.consumers(tensor)
    return [t for n in consumers if _keeps_unit(n) or n.op in _SUMS for t in n.outputs]


def _contains_logits(model: Model, tensors: Iterable[str]) -> bool:
    return any(n.op in _SCORES for t in tensors for n in model.consumers(t))

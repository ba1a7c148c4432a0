"""What differs between the two sides of a node."""

from __future__ import annotations

import math

import numpy as np

from qdqtool.comparing.result import Change, Lost, NodeChange, NodeSide, Scales
from qdqtool.types import Precision

_SAME = 1e-5  # scales nearer than this, relatively, are equal: exporters write float32 through text


def compare_sides(a: NodeSide, b: NodeSide, scales: bool = True) -> NodeChange:
    """Everything that differs, words apart.

    Args:
        a: The first side.
        b: The second.
        scales: Whether both sides know of Q/DQ in a file, so that scales and pairs can be compared.
    """
    found = NodeChange(a, b)
    changes: list[Change] = []
    unknown = (None, Precision.UNKNOWN)
    if a.precision not in unknown and b.precision not in unknown:
        if a.is_int8 and not b.is_int8:
            changes.append(Change.LOST_INT8)
            found.lost = _lost(a, b)
        elif b.is_int8 and not a.is_int8:
            changes.append(Change.GAINED_INT8)
        elif a.is_int8:
            changes += _output(a, b)
    if _residual(a) is not None and _residual(b) is not None and not _agree(_residual(a), _residual(b)):
        changes.append(Change.RESIDUAL)
    if scales:
        changes += _pairs(a, b) if not {Change.LOST_INT8, Change.GAINED_INT8} & set(changes) else []
        both = bool(a.data and b.data)
        compared = [(a.scale, b.scale) if both else (None, None),
                    *((s, b.other_scales[i]) for i, s in a.other_scales.items() if i in b.other_scales)]
        different = [pair for pair in compared if differ(*pair)]
        if different:
            found.scales = max(different, key=lambda pair: _far(factor(*pair)))
            found.factor = factor(*found.scales)
            changes.append(Change.SCALE)
        if a.weights and b.weights and differ(a.weights_scale, b.weights_scale):
            found.weights_factor = factor(a.weights_scale, b.weights_scale)
            changes.append(Change.WEIGHTS_SCALE)
    if a.layer and b.layer and sorted(a.fused) != sorted(b.fused):
        changes.append(Change.FUSION)
    found.changes = tuple(changes)
    return found


def _output(a: NodeSide, b: NodeSide) -> list[Change]:
    if a.output is None or b.output is None or Precision.UNKNOWN in (a.output, b.output):
        return []
    first, second = a.output == Precision.INT8, b.output == Precision.INT8
    if first == second:
        return []
    return [Change.LOST_INT8_OUTPUT if first else Change.GAINED_INT8_OUTPUT]


def _residual(side: NodeSide) -> Precision | None:
    return side.inputs[1] if len(side.inputs) > 1 and side.precision is not None else None


def _agree(a: Precision | None, b: Precision | None) -> bool:
    return a is None or b is None or a.agrees(b)


def _pairs(a: NodeSide, b: NodeSide) -> list[Change]:
    asked = [(a.data, b.data), (a.weights, b.weights)]
    changes = [Change.LOST_QDQ] if any(x and y is False for x, y in asked) else []
    return changes + ([Change.GAINED_QDQ] if any(y and x is False for x, y in asked) else [])


def _lost(a: NodeSide, b: NodeSide) -> Lost:
    data, weights = bool(a.data) and b.data is False, bool(a.weights) and b.weights is False
    if data and (weights or b.weights is None):
        return Lost.PAIRS
    if weights:
        return Lost.WEIGHTS
    return Lost.DATA if data else Lost.UNKNOWN


def differ(a: Scales | None, b: Scales | None) -> bool:
    """Whether two quantizers give different values, or of one alone the scale is known."""
    if a is None or b is None:
        return a is not b
    if (a.count, a.axis, a.type, a.zero) != (b.count, b.axis, b.type, b.zero):
        return True
    apart = factor(a, b)
    return not np.array_equal(a.values, b.values, equal_nan=True) if apart is None else abs(apart - 1.0) > _SAME


def factor(a: Scales | None, b: Scales | None) -> float | None:
    """Second over first scale, of the channel that differs most; None where either is not known, or no scale at all."""
    if a is None or b is None or not (a.valid and b.valid):
        return None
    if a.count != b.count:  # per channel and per tensor: the largest is what compares
        return b.ends[1] / a.ends[1]
    ratios = b.values / a.values
    return float(ratios[np.argmax(np.abs(np.log(ratios)))])


def _far(factor: float | None) -> float:
    """How much a factor is, in either direction; what has none is the worst."""
    return math.inf if factor is None else max(factor, 1.0 / factor)

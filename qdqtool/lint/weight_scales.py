"""Whether the scales of the weights fit the weights: the largest of each channel against 127 times its scale.

A scale that is too small clips weights, one that is too large wastes integer steps. One layer may be so on purpose,
training moves weights after their scales were taken, and some calibrations clip the few largest weights of every
channel, so that it takes a share of all channels, and in each of them a share of its weights, to be a finding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.explain.report import Report
from qdqtool.graph import Node
from qdqtool.onnxgraph.view import View
from qdqtool.operators import output_axis
from qdqtool.records import record
from qdqtool.trt.faults import CHECK, WeightScales, WeightScalesCause
from qdqtool.types import Precision

_STEPS = 127.0
_CHANNELS = 32  # looked at in each layer, evenly spread
_VALUES = 16_000_000  # weights read in a network: of a larger one not every layer is looked at
_LARGEST = 8_000_000  # of one layer
_CLIPPED = 1.5  # largest weight over the largest that the scale holds, from which on a channel counts as clipped
_TAIL = 0.02  # ... if that is true of this share of its weights; clipping on purpose leaves out a hundredth at most
_WASTED = 0.25  # the same from which down two bits are lost
_SHARE = 0.1  # of the channels (or layers, where there is one scale for each)
_SAME = 0.01  # spread of a factor that is one and the same everywhere
_ROUNDING = 0.006  # exporters divide by 127, 127.5 (which is .004 more) or what they take the largest code for
_FEW = 3  # layers below which a share says nothing


_Measured = tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]


@record
class _Fit:
    """How the scales of one layer fit.

    Attributes:
        node: The layer.
        ratios: Largest weight over the largest that its scale holds, for each channel looked at (or the whole tensor).
        clipped: Which of these are clipped.
        crossed: The same with the scales of the other axis, where that has as many channels; empty otherwise.
        flat: Whether each channel is given a scale, and all of them are equal.
        stored: Whether the weights are stored as integers, which cannot be clipped any more.
    """

    node: Node
    ratios: npt.NDArray[np.float64]
    clipped: npt.NDArray[np.bool_]
    crossed: npt.NDArray[np.float64]
    stored: bool
    flat: bool = False


def run(view: View, report: Report) -> None:
    """Adds one finding for the network, with the likely cause."""
    fits = _fits(view)
    if len(fits) < _FEW:
        return
    found = _crossed(fits) or _factor(fits) or _flat(fits) or _spread(fits)
    if found is not None:
        report.add("W-SCALE", found, convolutions=[f.node.name for f in fits if f.node.name in found.layers])


def _crossed(fits: list[_Fit]) -> WeightScales | None:
    """Scales that fit along the other axis, and not along their own."""
    bad = [f for f in fits if f.crossed.size and _off(f.ratios) > _SAME >= _off(f.crossed)]
    return _finding(WeightScalesCause.AXIS, bad, fits) if bad else None


def _median(values: npt.NDArray[np.float64]) -> float:
    """As numpy's, which loads its masked arrays for it."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _off(ratios: npt.NDArray[np.float64]) -> float:
    """The largest distance from a perfect fit, rounding conventions apart; a factor."""
    return max(0.0, float(np.abs(np.log(ratios)).max()) - _ROUNDING) if ratios.size else 0.0


def _factor(fits: list[_Fit]) -> WeightScales | None:
    """One factor for all channels of nearly all layers."""
    middle = np.array([_median(f.ratios) for f in fits])
    factor = _median(middle)
    alike = [f for f, m in zip(fits, middle, strict=True)
             if abs(m / factor - 1) < _SAME / 10 and float(np.abs(f.ratios / factor - 1).max()) < _SAME / 10]
    if abs(math.log(factor)) <= _ROUNDING or len(alike) < 0.8 * len(fits):
        return None
    return _finding(WeightScalesCause.FACTOR, alike, fits, factor)


def _spread(fits: list[_Fit]) -> WeightScales | None:
    """Channels far off in either direction."""
    clipped, wasted = _shares(fits)
    if clipped <= _SHARE and wasted <= _SHARE:
        return None
    bad = [f for f in fits if np.any(f.clipped) or np.any(f.ratios < _WASTED)]
    per_channel = any(f.ratios.size > 1 for f in bad)
    if clipped > _SHARE:
        return _finding(WeightScalesCause.OTHER_WEIGHTS if per_channel else WeightScalesCause.TENSOR, bad, fits)
    return _finding(WeightScalesCause.TOO_LARGE, bad, fits)


def _flat(fits: list[_Fit]) -> WeightScales | None:
    """One scale in every channel of weights whose channels differ, and smaller than the largest of them needs."""
    bad = [f for f in fits if f.flat and float(f.ratios.max()) > max(1 + _SAME, _CLIPPED * float(f.ratios.min()))]
    return _finding(WeightScalesCause.TENSOR, bad, fits) if len(bad) > max(_FEW, len(fits) / 2) else None


def _shares(fits: list[_Fit]) -> tuple[float, float]:
    """Share of all channels that is clipped, and that wastes two bits or more."""
    ratios = np.concatenate([f.ratios for f in fits])
    return float(np.mean(np.concatenate([f.clipped for f in fits]))), float(np.mean(ratios < _WASTED))


def _finding(cause: WeightScalesCause, bad: list[_Fit], fits: list[_Fit], factor: float = 1.0) -> WeightScales:
    worst = max(bad, key=lambda f: float(np.abs(np.log(f.ratios)).max()))
    largest, smallest = float(worst.ratios.max()), float(worst.ratios.min())
    return WeightScales(
        CHECK, worst.node.name, cause, tuple(f.node.name for f in bad), len(fits), *_shares(fits),
        largest if largest > 1 / smallest else smallest, factor,
    )


def _fits(view: View) -> list[_Fit]:
    weighted = [(n, s) for n in view.weighted if view.weights(n).dq is not None and (s := view.weight_shape(n))]
    total = sum(math.prod(s) for _, s in weighted)
    step = max(1, math.ceil(total / _VALUES))
    found = []
    for node, shape in weighted[::step]:
        fit = _fit(view, node, shape) if math.prod(shape) <= _LARGEST else None
        if fit is not None and fit.ratios.size:
            found.append(fit)
    return found


def _fit(view: View, node: Node, shape: tuple[int, ...]) -> _Fit | None:
    weights = view.weights(node)
    first = weights.first
    if first is None or not weights.constant or weights.before or weights.after:
        return None
    params = view.params(first)
    scale = params.scale
    if params.precision != Precision.INT8 or scale is None or not scale.size:
        return None
    if not np.all((scale > 0) & np.isfinite(scale)):
        return None
    proto = view.model.constant_proto(weights.source)
    if proto is None or proto.external_data:
        return None  # a prediction does not read the weight files
    values = view.model.constant(weights.source)
    if values is None or not values.size:
        return None
    stored = weights.q is None
    axis = view.axis(first)
    if axis is None and scale.size > 1:
        return None  # a file that contradicts itself
    if axis is None or scale.size == 1:
        return _Fit(node, *_ratios(values.reshape(1, -1), scale, stored), np.empty(0), stored)
    axis %= len(shape)
    if axis >= len(shape) or shape[axis] != scale.size:
        return None
    crossed = np.empty(0)
    other = 1 - axis if axis in (0, 1) and output_axis(node, len(shape)) is not None else None
    if other is not None and other < len(shape) and shape[other] == scale.size and not stored:
        crossed = _along(values, other, scale, stored)[0]
    return _Fit(node, *_along(values, axis, scale, stored), crossed, stored, flat=bool(np.ptp(scale) == 0.0))


def _along(values: npt.NDArray[Any], axis: int, scale: npt.NDArray[np.float64], stored: bool) -> _Measured:
    count = scale.size
    chosen = list(dict.fromkeys(np.linspace(0, count - 1, min(_CHANNELS, count)).astype(int).tolist()))
    channels = np.moveaxis(values, axis, 0)[chosen].reshape(len(chosen), -1)
    return _ratios(channels, scale[chosen], stored)


def _ratios(channels: npt.NDArray[Any], scale: npt.NDArray[np.float64], stored: bool) -> _Measured:
    """Largest weight over the largest that the scale holds, and whether the channel is clipped.

    Channels without a weight that is not 0 are left out.
    """
    # In the weights' own type, whose least integer has no magnitude there; as numbers of 64 bits only what is left.
    largest = np.maximum(channels.max(axis=1).astype(np.float64), -channels.min(axis=1).astype(np.float64))
    alive = (largest > 0) & np.isfinite(largest)
    held = np.full(int(alive.sum()), _STEPS) if stored else _STEPS * scale[alive]
    ratios: npt.NDArray[np.float64] = largest[alive] / held
    values, limits = channels[alive], held[:, np.newaxis]
    beyond = np.mean((values > limits) | (values < -limits), axis=1) if alive.any() else np.empty(0)
    return ratios, (ratios > _CLIPPED) & (beyond > _TAIL)

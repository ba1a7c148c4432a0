"""Whether the scales of the weights fit the weights: the largest of each channel against 127 times its scale.

A scale that is too small clips weights, one that is too large wastes integer steps. Training moves weights after their
scales were taken, and some calibrations clip the few largest weights of every channel, so that it takes a share of all
channels, and in each of them a share of its weights, to be a finding. Where nearly all scales are exact, as quantizers
write them, single channels that are not are one as well; and a layer that is far off where the layers are alike.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import output_axis
from qdqtool.patterns.view import View
from qdqtool.reasons.faults import CHECK, WeightScales, WeightScalesCause
from qdqtool.types import Precision
from qdqtool.util.records import record

_STEPS = 127.0
_VALUES = 64_000_000  # weights read in a network: of a larger one not every layer is looked at
_LARGEST = 8_000_000  # of one layer
_CLIPPED = 1.5  # largest weight over the largest that the scale holds, from which on a channel counts as clipped
_TAIL = 0.02  # ... if that is true of this share of its weights; clipping on purpose leaves out a hundredth at most
_WASTED = 0.25  # the same from which down two bits are lost
_SHARE = 0.1  # of the channels (or layers, where there is one scale for each)
_SAME = 0.01  # spread of a factor that is one and the same everywhere
_ROUNDING = 0.006  # exporters divide by 127, 127.5 (which is .004 more) or what they take the largest code for
_FEW = 3  # layers below which a share says nothing
_EXACT = (
    0.8  # share of exact channels, as a mean over layers, from which on an exception is an error
)
_EXCEPTION = 1.25  # ... and how far off it is; no tool measured leaves more than 1.001
_LITTLE = 0.02  # weights smaller than this beside their layer's: quantizers have least scales for dead channels
_LAYERS = 8  # layers from which on their medians show what is usual
_LAYER_OFF = 1.5  # a layer's median against that of all ...
_LAYER_SPREAD = 8.0  # ... and against how far three quarters of them are off


@record
class _Measured:
    """How scales fit weights, which layers may share.

    Attributes:
        ratios: Largest weight over the largest that its scale holds, for each channel (or the whole tensor).
        clipped: Which of these are clipped.
        little: Which of these have next to no weights beside those of the layer's other channels.
    """

    ratios: npt.NDArray[np.float64]
    clipped: npt.NDArray[np.bool_]
    little: npt.NDArray[np.bool_]

    @functools.cached_property
    def logs(self) -> npt.NDArray[np.float64]:
        return np.log(self.ratios)

    @functools.cached_property
    def farthest(self) -> float:
        """The largest distance from a perfect fit, as a logarithm."""
        return float(np.abs(self.logs).max())

    @functools.cached_property
    def median(self) -> float:
        """As numpy's, which loads its masked arrays for it."""
        return _median(self.ratios)

    @functools.cached_property
    def off(self) -> float:
        """The largest distance from a perfect fit, rounding conventions apart; a factor."""
        return _off(self.ratios)


@record
class _Fit:
    """How the scales of one layer fit.

    Attributes:
        node: The layer.
        measured: Of its weights.
        crossed: The same ratios with the scales of the other axis, where that has as many channels; empty otherwise.
        flat: Whether each channel is given a scale, and all of them are equal.
        stored: Whether the weights are stored as integers, which cannot be clipped any more.
    """

    node: Node
    measured: _Measured
    crossed: npt.NDArray[np.float64]
    stored: bool
    flat: bool = False

    @property
    def ratios(self) -> npt.NDArray[np.float64]:
        return self.measured.ratios


def run(view: View, report: FindingReport) -> None:
    """Adds one finding for the network, with the likely cause."""
    fits = _fits(view)
    found = (
        (_crossed(fits) or _factor(fits) or _flat(fits) or _spread(fits))
        if len(fits) >= _FEW
        else None
    )
    found = found or _exceptions(fits) or _layers_off(fits)
    if found is not None:
        layers = set(found.layers)
        report.add(found, convolutions=[f.node.name for f in fits if f.node.name in layers])


def _where(fits: list[_Fit], fits_so: Callable[[_Measured], bool]) -> list[_Fit]:
    """The layers of whose weights something is true, which is worked out once for those that share them."""
    different = {id(f.measured): f.measured for f in fits}
    found = {key: fits_so(one) for key, one in different.items()}
    return [f for f in fits if found[id(f.measured)]]


def _crossed(fits: list[_Fit]) -> WeightScales | None:
    """Scales that fit along the other axis, and not along their own."""
    bad = [f for f in fits if f.crossed.size and f.measured.off > _SAME >= _off(f.crossed)]
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
    factor = _median(np.array([f.measured.median for f in fits]))
    if abs(math.log(factor)) <= _ROUNDING:
        return None
    alike = _where(
        fits,
        lambda one: (
            abs(one.median / factor - 1) < _SAME / 10
            and float(np.mean(np.abs(one.ratios / factor - 1) < _SAME / 10)) > 0.95
        ),
    )
    if len(alike) < 0.8 * len(fits):
        return None
    return _finding(WeightScalesCause.FACTOR, alike, fits, factor)


def _spread(fits: list[_Fit]) -> WeightScales | None:
    """Channels far off in either direction."""
    clipped, wasted = _shares(fits)
    if clipped <= _SHARE and wasted <= _SHARE:
        return None
    bad = _where(fits, lambda one: bool(np.any(one.clipped) or np.any(one.ratios < _WASTED)))
    per_channel = any(f.ratios.size > 1 for f in bad)
    if clipped > _SHARE:
        return _finding(
            WeightScalesCause.OTHER_WEIGHTS if per_channel else WeightScalesCause.TENSOR, bad, fits
        )
    return _finding(WeightScalesCause.TOO_LARGE, bad, fits)


def _flat(fits: list[_Fit]) -> WeightScales | None:
    """One scale in every channel of weights whose channels differ, and smaller than the largest of them needs."""
    bad = [
        f
        for f in fits
        if f.flat and float(f.ratios.max()) > max(1 + _SAME, _CLIPPED * float(f.ratios.min()))
    ]
    return (
        _finding(WeightScalesCause.TENSOR, bad, fits)
        if len(bad) > max(_FEW, len(fits) / 2)
        else None
    )


def _exceptions(fits: list[_Fit]) -> WeightScales | None:
    """A few channels, or one layer, where all others are exact."""
    if not fits:
        return None
    usual = _median(np.concatenate([f.measured.logs for f in fits]))
    times = Counter(map(id, (f.measured for f in fits)))
    different = {id(f.measured): f.measured for f in fits}
    away = {key: np.abs(one.logs - usual) for key, one in different.items()}
    if sum(times[key] * float(np.mean(x <= _ROUNDING)) for key, x in away.items()) < _EXACT * len(
        fits
    ):
        return None
    found = {
        key: int(np.sum((x > math.log(_EXCEPTION)) & ~different[key].little))
        for key, x in away.items()
    }
    off = [found[id(f.measured)] for f in fits]
    bad = [f for f, count in zip(fits, off, strict=True) if count]
    return _finding(WeightScalesCause.EXCEPTION, bad, fits, channels=sum(off)) if bad else None


def _layers_off(fits: list[_Fit]) -> WeightScales | None:
    """Layers far off as a whole, where the others are about as far off as each other."""
    if len(fits) < _LAYERS:
        return None
    middle = np.array([math.log(f.measured.median) for f in fits])
    away = np.abs(middle - _median(middle))
    limit = max(math.log(_LAYER_OFF), _LAYER_SPREAD * float(np.sort(away)[3 * len(away) // 4]))
    bad = [f for f, far in zip(fits, away.tolist(), strict=True) if far > limit]
    return (
        _finding(WeightScalesCause.EXCEPTION, bad, fits, channels=sum(f.ratios.size for f in bad))
        if bad
        else None
    )


def _shares(fits: list[_Fit]) -> tuple[float, float]:
    """Share of all channels that is clipped, and that wastes two bits or more."""
    ratios = np.concatenate([f.ratios for f in fits])
    return float(np.mean(np.concatenate([f.measured.clipped for f in fits]))), float(
        np.mean(ratios < _WASTED)
    )


def _finding(
    cause: WeightScalesCause,
    bad: list[_Fit],
    fits: list[_Fit],
    factor: float = 1.0,
    channels: int = 0,
) -> WeightScales:
    worst = max(bad, key=lambda f: f.measured.farthest)
    largest, smallest = float(worst.ratios.max()), float(worst.ratios.min())
    return WeightScales(
        CHECK,
        worst.node.name,
        cause,
        tuple(f.node.name for f in bad),
        len(fits),
        *_shares(fits),
        largest if largest > 1 / smallest else smallest,
        factor,
        channels,
    )


def _fits(view: View) -> list[_Fit]:
    weighted = [
        (n, s)
        for n in view.weighted
        if view.weights(n).dq is not None and (s := view.weight_shape(n))
    ]
    step = max(1, math.ceil(sum(math.prod(s) for _, s in weighted) / _VALUES))
    found = []
    known: dict[tuple[str, int, int], _Measured] = {}
    for node, shape in weighted[::step]:
        fit = _fit(view, node, shape, known) if math.prod(shape) <= _LARGEST else None
        if fit is not None and fit.ratios.size:
            found.append(fit)
    return found


def _fit(
    view: View, node: Node, shape: tuple[int, ...], known: dict[tuple[str, int, int], _Measured]
) -> _Fit | None:
    """How the scales of a layer fit; ``known`` holds what was measured of weights, scales and axes."""
    weights = view.weights(node)
    first = weights.first_quantizer
    if first is None or not weights.constant or weights.before or weights.after:
        return None
    params = view.params(first)
    scales, scale = params.scales, params.scale
    if (
        params.precision != Precision.INT8
        or scales is None
        or scale is None
        or not scale.size
        or not scales.is_positive
    ):
        return None
    proto = view.model.constant_proto(weights.source)
    if proto is None or proto.external_data:
        return None  # a prediction does not read the weight files
    values = view.model.constant(weights.source)
    if values is None or not values.size:
        return None
    stored = weights.q is None

    def measured(axis: int | None) -> _Measured:
        key = (weights.source, id(scales), -1 if axis is None else axis)
        if key not in known:
            known[key] = _measured(
                *((values.reshape(1, -1), 0) if axis is None else (values, axis)), scale, stored
            )
        return known[key]

    axis = view.axis(first)
    if axis is None and scale.size > 1:
        return None  # a file that contradicts itself
    if axis is None or scale.size == 1:
        return _Fit(node, measured(None), np.empty(0), stored)
    axis %= len(shape)
    if shape[axis] != scale.size:
        return None
    own, other = measured(axis), 1 - axis
    fits = axis in (0, 1) and output_axis(node, len(shape)) is not None and other < len(shape)
    across = fits and shape[other] == scale.size and not stored and own.off > _SAME
    return _Fit(
        node, own, measured(other).ratios if across else np.empty(0), stored, flat=scales.is_uniform
    )


def _measured(
    values: npt.NDArray[Any], axis: int, scale: npt.NDArray[np.float64], stored: bool
) -> _Measured:
    """Channels without a weight that is not 0 are left out."""
    # In the weights' own type, whose least integer has no magnitude there; as numbers of 64 bits only what is left.
    values = values.reshape(len(values), -1) if axis == 0 else values
    others = tuple(i for i in range(values.ndim) if i != axis)
    if (
        values.dtype == np.float16
    ):  # slow to compare; without their sign they are in the order of their bits
        bits = np.bitwise_and(values.view(np.uint16), 0x7FFF).max(axis=others)
        largest = bits.view(np.float16).astype(np.float64)
    else:
        largest = np.maximum(
            values.max(axis=others).astype(np.float64), -values.min(axis=others).astype(np.float64)
        )
    alive = (largest > 0) & np.isfinite(largest)
    scale = np.broadcast_to(scale, largest.shape)[alive]
    largest = largest[alive] * (scale if stored else 1.0)
    held = _STEPS * scale
    ratios: npt.NDArray[np.float64] = largest / held
    clipped = ratios > _CLIPPED
    for i in np.flatnonzero(clipped):
        channel = values.take(np.flatnonzero(alive)[i], axis)
        clipped[i] = np.mean((channel > held[i]) | (channel < -held[i])) > _TAIL
    return _Measured(
        ratios, clipped, largest < _LITTLE * (_median(largest) if largest.size else 0.0)
    )

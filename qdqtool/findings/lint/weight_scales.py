"""Comparison of the largest weight of each channel with 127 times its scale.

A scale that is too small clips weights. A scale that is too large wastes integer steps. Small
deviations are normal, because training changes weights after their scales were set, and some
calibrations clip the few largest weights of each channel. A fault is therefore reported only if
many channels do not match their scales, and if many weights of these channels are clipped. If
nearly all scales are exact, a single channel that does not match is reported too, and so is a
single layer that differs much from all others.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qdqtool.findings.lint.weight_granularity import (
    MAX_LAYER_VALUES,
    MAX_VALUES,
    read_int8_weights,
)
from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import output_axis
from qdqtool.patterns.view import View
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.weights import WeightScales, WeightScalesCause
from qdqtool.trt.fault_checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    create_weight_scale_fault,
    find_extreme_scales,
)

_INT8_MAX = 127.0
# Maximum ratio of the largest weight to the largest representable weight. A channel with a larger
# ratio counts as clipped if more than the fraction _MAX_CLIPPED_SHARE of its weights exceed the
# range. Intended clipping affects at most a hundredth of the weights.
_MAX_RATIO = 1.5
_MAX_CLIPPED_SHARE = 0.02
_MIN_RATIO = 0.25  # a channel with a smaller ratio loses two bits
_MAX_BAD_SHARE = 0.1  # maximum fraction of channels that are clipped, or that lose two bits
_MAX_SATURATED_WEIGHTS = 0.5  # maximum fraction of the weights of a channel that exceed its range
_MAX_SATURATED_SHARE = 0.5  # maximum fraction of channels whose weights are mostly clipped
_FACTOR_TOLERANCE = 0.01  # maximum relative difference of factors that count as equal
# Logarithm of the maximum ratio of scales that count as equal. Exporters divide the range by 127 or
# by 127.5. The logarithm of the ratio of the two is 0.004.
_ROUNDING_TOLERANCE = 0.006
_MAX_LEARNED_RATIO = 1.5  # maximum ratio between a learned scale and the initial scale of LSQ
_MIN_LEARNED_SHARE = 0.9  # minimum fraction of channels with a learned scale
_MIN_LAYERS = 3  # with fewer layers, a fraction of the layers means little
_MIN_CHANNELS = 8  # fewer channels may have an equal factor by chance
# Minimum fraction of the channels of a layer, averaged over the layers, that have the usual ratio
# of largest weight to scale. With less, single channels are not reported.
_MIN_EXACT_SHARE = 0.8
# A single channel is reported if its ratio differs from the usual (median) ratio by more than this
# factor. Quantization tools cause differences of at most 1.001.
_MAX_EXACT_RATIO = 1.25
# Maximum range of a dead channel, divided by the median range of the layer's channels. Quantization
# tools set their minimum scale for a dead channel.
_MAX_DEAD_RANGE = 0.02
_MIN_LAYERS_FOR_MEDIAN = 8  # with fewer layers, the median of all layers means little
_MAX_LAYER_RATIO = 1.5  # maximum ratio of the median of a layer to that of all layers
# Maximum distance of a layer's median from the median of all layers, divided by the third quartile
# of these distances.
_MAX_LAYER_SPREAD = 8.0


@dataclass(frozen=True, eq=False, repr=False)
class _ChannelRatios:
    """Ratios of weights to their scales. Layers with shared weights have the same object.

    Attributes:
        ratios: Largest weight divided by the largest weight that the scale can represent, for each
            channel or for the whole tensor.
        clipped: For each channel, whether too many of its weights are clipped.
        dead: For each channel, whether its weights are nearly 0 compared with other channels.
        saturated: For each channel, whether most of its weights are clipped.
        extremes: Extreme scales, and the largest weight of their channels, of shape [2, channels].
            The attributes above do not include channels with an extreme scale.
        count: Number of all channels, including channels of zeros and those with an extreme scale.
    """

    ratios: npt.NDArray[np.float64]
    clipped: npt.NDArray[np.bool_]
    dead: npt.NDArray[np.bool_]
    saturated: npt.NDArray[np.bool_]
    extremes: npt.NDArray[np.float64]
    count: int

    @functools.cached_property
    def logs(self) -> npt.NDArray[np.float64]:
        return np.log(self.ratios)


class _LayerFit(NamedTuple):
    """Comparison of the weight scales of one layer with its weights.

    Attributes:
        node: The layer.
        quantizer: First quantizer of the weights.
        is_float: Whether the weights are stored as floats.
        channels: Ratios of the weights to their scales.
        other_axis_ratios: Ratios as if the scales belonged to the other axis of the weights. Empty
            if the other axis has another size.
        is_uniform: Whether each channel has a scale and all scales are equal.
    """

    node: Node
    quantizer: Node
    is_float: bool
    channels: _ChannelRatios
    other_axis_ratios: npt.NDArray[np.float64]
    is_uniform: bool = False

    @property
    def ratios(self) -> npt.NDArray[np.float64]:
        return self.channels.ratios


def run(view: View, report: FindingReport) -> None:
    """Add a finding for each layer with extreme scales, and at most one for other faults."""
    fits = _measure_layers(view)
    _report_extremes(fits, report)
    fits = [fit for fit in fits if fit.ratios.size]
    misfit = _find_misfit(view, fits)
    if misfit is not None:
        layers = set(misfit.layers)
        bad = [f for f in fits if f.node.name in layers]
        report.add(
            misfit,
            convolutions=[f.node.name for f in bad],
            automatic=misfit.cause != WeightScalesCause.AXIS and all(f.is_float for f in bad),
        )


def _report_extremes(fits: list[_LayerFit], report: FindingReport) -> None:
    for fit in fits:
        if fit.channels.extremes.size:
            scales, largest = fit.channels.extremes
            fault = create_weight_scale_fault(
                MODEL_CHECK, fit.quantizer.name, scales, largest, fit.channels.count
            )
            report.add(fault, convolutions=[fit.node.name])


def _find_misfit(view: View, fits: list[_LayerFit]) -> WeightScales | None:
    checks = _GENERAL_CHECKS if len(fits) >= _MIN_LAYERS else (_check_equal_factor,)
    misfit = _find_first_misfit(fits, checks)
    if misfit is not None and misfit.cause == WeightScalesCause.TOO_LARGE:
        misfit = None if _are_learned_scales(view, fits) else misfit
    return misfit or _find_first_misfit(
        fits, (_check_exceptional_channels, _check_exceptional_layers, _check_saturated)
    )


def _find_first_misfit(
    fits: list[_LayerFit], checks: Sequence[Callable[[list[_LayerFit]], WeightScales | None]]
) -> WeightScales | None:
    return next(filter(None, (check(fits) for check in checks)), None)


def _select_layers(
    fits: list[_LayerFit], condition: Callable[[_ChannelRatios], bool]
) -> list[_LayerFit]:
    """Return the layers whose weights meet a condition. Shared weights are evaluated once."""
    unique = {id(f.channels): f.channels for f in fits}
    selected = {key for key, channels in unique.items() if condition(channels)}
    return [f for f in fits if id(f.channels) in selected]


def _check_swapped_axis(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if scales match the weights only along the other channel axis."""
    bad = [
        f
        for f in fits
        if f.other_axis_ratios.size
        and _largest_deviation(f.channels.ratios)
        > _FACTOR_TOLERANCE
        >= _largest_deviation(f.other_axis_ratios)
    ]
    return _build_fault(WeightScalesCause.AXIS, bad, fits) if bad else None


def _median(values: npt.NDArray[np.float64]) -> float:
    """Return the median. The first call of numpy's median is slow: it imports masked arrays."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _largest_deviation(ratios: npt.NDArray[np.float64]) -> float:
    return (
        max(0.0, float(np.abs(np.log(ratios)).max()) - _ROUNDING_TOLERANCE) if ratios.size else 0.0
    )


def _check_common_factor(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if the scales of nearly all layers are wrong by one factor."""
    factor = _median(np.array([_median(f.channels.ratios) for f in fits]))
    if abs(math.log(factor)) <= _ROUNDING_TOLERANCE:
        return None
    same_factor = _select_layers(
        fits,
        lambda channels: (
            abs(_median(channels.ratios) / factor - 1) < _FACTOR_TOLERANCE / 10
            and float(np.mean(np.abs(channels.ratios / factor - 1) < _FACTOR_TOLERANCE / 10)) > 0.95
        ),
    )
    if len(same_factor) < 0.8 * len(fits):
        return None
    return _build_fault(WeightScalesCause.FACTOR, same_factor, fits, factor)


def _check_equal_factor(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if all scales of a layer are wrong by the same large factor."""
    for fit in fits:
        fault = _check_common_factor([fit]) if fit.ratios.size >= _MIN_CHANNELS else None
        if fault is not None and not _MIN_RATIO <= fault.factor <= _MAX_RATIO:
            alike = [
                f for f in fits if abs(_median(f.ratios) / fault.factor - 1) < _FACTOR_TOLERANCE
            ]
            return _build_fault(WeightScalesCause.FACTOR, alike, fits, fault.factor)
    return None


def _check_channel_ranges(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if many channels are clipped or lose two bits."""
    clipped, wasted = _measure_bad_shares(fits)
    if clipped <= _MAX_BAD_SHARE and wasted <= _MAX_BAD_SHARE:
        return None
    bad = _select_layers(
        fits,
        lambda channels: bool(np.any(channels.clipped) or np.any(channels.ratios < _MIN_RATIO)),
    )
    saturated = _check_saturated(fits)
    if saturated is not None and all(_is_saturated(f) for f in bad):
        return saturated
    per_channel = any(f.ratios.size > 1 for f in bad)
    if clipped > _MAX_BAD_SHARE:
        return _build_fault(
            WeightScalesCause.OTHER_WEIGHTS if per_channel else WeightScalesCause.TENSOR, bad, fits
        )
    return _build_fault(WeightScalesCause.TOO_LARGE, bad, fits)


def _are_learned_scales(view: View, fits: list[_LayerFit]) -> bool:
    """Return whether training learned the scales.

    LSQ starts with the scale 2 mean|w| / sqrt(127), and 8-bit training hardly changes it. This
    scale is several times larger than the largest weight requires.
    """
    distances = []
    for fit in fits:
        values = read_int8_weights(view, fit.node)
        scale, axis = view.params(fit.quantizer).scale, view.axis(fit.quantizer)
        if values is None or scale is None:
            return False
        magnitudes = np.abs(values.astype(np.float32))
        kept = None if axis is None or scale.size == 1 else axis % magnitudes.ndim
        others = tuple(i for i in range(magnitudes.ndim) if i != kept)
        scale = scale.reshape(-1)
        initial = 2 * magnitudes.mean(axis=others).reshape(-1) / math.sqrt(_INT8_MAX)
        initial = initial * (1.0 if fit.is_float else scale)
        alive = initial > 0
        ratios = np.broadcast_to(scale, alive.shape)[alive] / initial[alive]
        distances.append(np.abs(np.log(ratios)))
    near = np.concatenate(distances) < math.log(_MAX_LEARNED_RATIO)
    return bool(np.mean(near) > _MIN_LEARNED_SHARE)


def _check_uniform_scales(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if most layers have equal scales that are too small for some channels."""
    bad = [
        f
        for f in fits
        if f.is_uniform
        and float(f.ratios.max()) > max(1 + _FACTOR_TOLERANCE, _MAX_RATIO * float(f.ratios.min()))
    ]
    return (
        _build_fault(WeightScalesCause.TENSOR, bad, fits)
        if len(bad) > max(_MIN_LAYERS, len(fits) / 2)
        else None
    )


_GENERAL_CHECKS = (
    _check_swapped_axis,
    _check_common_factor,
    _check_uniform_scales,
    _check_channel_ranges,
)


def _check_exceptional_channels(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if single channels have a wrong scale and nearly all others are exact."""
    if not fits:
        return None
    usual = _median(np.concatenate([f.channels.logs for f in fits]))
    times = Counter(map(id, (f.channels for f in fits)))
    unique = {id(f.channels): f.channels for f in fits}
    exact_layers = 0.0
    counts: dict[int, int] = {}
    for key, channels in unique.items():
        distances = np.abs(channels.logs - usual)
        exact_layers += times[key] * float(np.mean(distances <= _ROUNDING_TOLERANCE))
        counts[key] = int(np.sum((distances > math.log(_MAX_EXACT_RATIO)) & ~channels.dead))
    if exact_layers < _MIN_EXACT_SHARE * len(fits):
        return None
    bad = [f for f in fits if counts[id(f.channels)]]
    if not bad:
        return None
    count = sum(counts[id(f.channels)] for f in bad)
    return _build_fault(WeightScalesCause.EXCEPTION, bad, fits, channels=count)


def _check_exceptional_layers(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if the median ratio of a layer is far from that of the other layers."""
    if len(fits) < _MIN_LAYERS_FOR_MEDIAN:
        return None
    medians = np.array([math.log(_median(f.channels.ratios)) for f in fits])
    distances = np.abs(medians - _median(medians))
    limit = max(
        math.log(_MAX_LAYER_RATIO),
        _MAX_LAYER_SPREAD * float(np.sort(distances)[3 * len(distances) // 4]),
    )
    bad = [f for f, distance in zip(fits, distances.tolist(), strict=True) if distance > limit]
    return (
        _build_fault(
            WeightScalesCause.EXCEPTION, bad, fits, channels=sum(f.ratios.size for f in bad)
        )
        if bad
        else None
    )


def _check_saturated(fits: list[_LayerFit]) -> WeightScales | None:
    """Return a fault if most weights are clipped in most channels of a layer."""
    bad = [f for f in fits if _is_saturated(f)]
    return _build_fault(WeightScalesCause.SATURATED, bad, fits) if bad else None


def _is_saturated(fit: _LayerFit) -> bool:
    alive = ~fit.channels.dead
    return float(np.mean(fit.channels.saturated & alive)) > _MAX_SATURATED_SHARE


def _measure_bad_shares(fits: list[_LayerFit]) -> tuple[float, float]:
    ratios = np.concatenate([f.ratios for f in fits])
    return float(np.mean(np.concatenate([f.channels.clipped for f in fits]))), float(
        np.mean(ratios < _MIN_RATIO)
    )


def _build_fault(
    cause: WeightScalesCause,
    bad: list[_LayerFit],
    fits: list[_LayerFit],
    factor: float = 1.0,
    channels: int = 0,
) -> WeightScales:
    worst = max(bad, key=lambda f: float(np.abs(f.channels.logs).max()))
    largest, smallest = float(worst.ratios.max()), float(worst.ratios.min())
    return WeightScales(
        MODEL_CHECK,
        worst.node.name,
        cause,
        tuple(f.node.name for f in bad),
        len(fits),
        *_measure_bad_shares(fits),
        largest if largest > 1 / smallest else smallest,
        factor,
        channels,
    )


def _measure_layers(view: View) -> list[_LayerFit]:
    weighted = [
        (n, s)
        for n in view.nodes_with_weights
        if view.weights(n).dq is not None and (s := view.weight_shape(n))
    ]
    step = max(1, math.ceil(sum(math.prod(s) for _, s in weighted) / MAX_VALUES))
    fits = []
    measurements: dict[tuple[str, int, int], _ChannelRatios] = {}
    for node, shape in weighted[::step]:
        fit = (
            _measure_layer(view, node, shape, measurements)
            if math.prod(shape) <= MAX_LAYER_VALUES
            else None
        )
        if fit is not None and (fit.ratios.size or fit.channels.extremes.size):
            fits.append(fit)
    return fits


def _measure_layer(
    view: View,
    node: Node,
    shape: tuple[int, ...],
    measurements: dict[tuple[str, int, int], _ChannelRatios],
) -> _LayerFit | None:
    """Compare a layer's scales with its weights; None if they cannot be compared.

    `measurements` is a cache of ratios by weights, scales and axis, for layers that share weights.
    """
    weights = view.weights(node)
    first, values = weights.first_quantizer, read_int8_weights(view, node)
    if first is None or values is None:
        return None
    scales, scale = view.params(first).scales, view.params(first).scale
    if scales is None or scale is None or not scale.size:
        return None

    def measure_along(axis: int | None) -> _ChannelRatios:
        key = (weights.source, id(scales), -1 if axis is None else axis)
        if key not in measurements:
            measurements[key] = _measure_channels(
                *((values.reshape(1, -1), 0) if axis is None else (values, axis)),
                scale,
                weights.q is None,
            )
        return measurements[key]

    axis = view.axis(first)
    if axis is None and scale.size > 1:
        return None  # several scales without an axis are invalid
    if axis is None or scale.size == 1:
        return _LayerFit(node, first, weights.q is not None, measure_along(None), np.empty(0))
    axis %= len(shape)
    if shape[axis] != scale.size:
        return None
    measurement = measure_along(axis)
    other_axis_ratios = np.empty(0)
    is_float = weights.q is not None
    if (
        is_float
        and _largest_deviation(measurement.ratios) > _FACTOR_TOLERANCE
        and _fits_other_axis(node, shape, axis)
    ):
        other_axis_ratios = measure_along(1 - axis).ratios
    return _LayerFit(
        node, first, is_float, measurement, other_axis_ratios, is_uniform=scales.is_uniform
    )


def _fits_other_axis(node: Node, shape: tuple[int, ...], axis: int) -> bool:
    """Return whether the scales may belong to the other channel axis: its size is the same."""
    if axis > 1 or len(shape) < 2 or output_axis(node, len(shape)) is None:
        return False
    return shape[0] == shape[1]


def _measure_channels(
    values: npt.NDArray[Any], axis: int, scale: npt.NDArray[np.float64], stored: bool
) -> _ChannelRatios:
    """Compare the weights of each channel with its scale.

    Channels whose largest weight is 0 or not finite are left out. `stored` means that the weights
    are stored as integers.
    """
    # The reduction is in the type of the weights. Only its results are converted to float64.
    values = values.reshape(len(values), -1) if axis == 0 else values
    other_axes = tuple(i for i in range(values.ndim) if i != axis)
    if values.dtype == np.float16:  # comparing the bits is faster, and has the same result
        bits = np.bitwise_and(values.view(np.uint16), 0x7FFF).max(axis=other_axes)
        largest = bits.view(np.float16).astype(np.float64)
    else:
        largest = np.maximum(
            values.max(axis=other_axes).astype(np.float64),
            -values.min(axis=other_axes).astype(np.float64),
        )
    alive = (largest > 0) & np.isfinite(largest)
    scale = np.broadcast_to(scale, largest.shape)[alive]
    largest = largest[alive] * (scale if stored else 1.0)
    largest_representable = _INT8_MAX * scale
    extreme = find_extreme_scales(scale, largest)
    # Scales that are too small or too large for any tensor are reported by the check of quantizers.
    is_reported = (scale <= SMALLEST_SCALE) | (scale > LARGEST_SCALE)
    extremes = np.stack([scale, largest])[:, extreme & ~is_reported]
    ratios: npt.NDArray[np.float64] = largest / largest_representable
    clipped, saturated = ratios > _MAX_RATIO, np.zeros(ratios.shape, np.bool_)
    for i in np.flatnonzero(clipped & ~extreme):
        channel = values.take(np.flatnonzero(alive)[i], axis)
        share = np.mean(
            (channel > largest_representable[i]) | (channel < -largest_representable[i])
        )
        clipped[i], saturated[i] = share > _MAX_CLIPPED_SHARE, share > _MAX_SATURATED_WEIGHTS
    dead = largest < _MAX_DEAD_RANGE * (_median(largest) if largest.size else 0.0)
    kept = ~extreme
    return _ChannelRatios(
        ratios[kept], clipped[kept], dead[kept], saturated[kept], extremes, alive.size
    )

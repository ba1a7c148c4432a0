"""Checks of activation scales, most of them against calibration data.

The checks against calibration data measure for each Q the clipped values, the integer steps in use,
and outliers within the range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqtool.findings.report import FindingReport
from qdqtool.ir.bounds import find_bounds
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import SMOOTHED, read_smoothed_tensors
from qdqtool.ir.operators import LayerKind, operator_of
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import QuantParams, is_qdq
from qdqtool.ir.sizes import last_axis_sources
from qdqtool.patterns.heads import is_attention_probability
from qdqtool.patterns.layernorm import last_axis_gains, skip_identities
from qdqtool.patterns.view import View
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.scales import ActivationFit, ActivationScales, OutlierScales, UniformScales

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.statistics import TensorStatistics

_INT8_MAX = 127.0
# Entropy calibration intentionally clips up to a twelfth of the values. The clipped values have up
# to half of the power (sum of squares).
_MAX_CLIPPED_SHARE = 0.1  # maximum fraction of the values that exceed the range
_MAX_LOST_POWER = 0.6  # maximum fraction of the power that is lost by clipping
_MIN_USED_STEPS = 0.25  # minimum fraction of the integer steps in use; with less, two bits are lost
# Maximum factor between the largest value and the range, in both directions, for the median
# quantizer. The median range of entropy calibration is about half the largest value.
_MAX_MEDIAN_FACTOR = 3.0
_MIN_VALUES = 1000  # with fewer values (such as from global pooling), the range is unknown
# Maximum fraction of quantizers with the same scale. A Concat may be the cause of a smaller
# fraction, but a larger fraction is probably a mistake.
_MAX_EQUAL_SCALES = 1 / 3
_MAX_LISTED = 5
_MAX_FACTOR_SPREAD = 1.4  # the ranges for other images may differ by this factor
_MIN_AGREEING_SHARE = 0.8  # minimum fraction of quantizers whose ranges are wrong by one factor
_MIN_QUANTIZERS = 3
_MIN_UNIFORM = 4  # minimum number of quantizers of activations, and also of weights
_MAX_OUTLIER_RATIO = (
    100.0  # largest value / typical value; measured ratios are in docs/scales-results.md
)
# Distance from the mean to each end of a channel's range, in standard deviations, for a few
# thousand values.
_CHANNEL_DEVIATIONS = 4.0
_MIN_CHANNEL_VALUES = 100  # with fewer values, the range of a channel is unknown
# Maximum ratio if it is computed from the gains of normalizations. Trained networks have at most
# 17.
_MAX_GAIN_RATIO = 25.0
# A sixth of a normal distribution is more than 0.967 standard deviations below its median.
_LOWER_QUANTILE = 1 / 6
_LOWER_DEVIATIONS = 0.967
_CLIPPING_PERCENTILE = 99.9  # proposed if the scale covers larger values
_TYPICAL_QUANTILE = 2 / 3  # the typical magnitude is this quantile of the magnitudes above 0


def find_int8_quantizers(view: View) -> list[Node]:
    """Return the activation Qs of INT8 with one known, positive scale for the whole tensor."""
    return [q for q in view.activation_qs if _has_one_int8_scale(view.params(q))]


def _has_one_int8_scale(params: QuantParams) -> bool:
    scales = params.scales
    is_int8 = params.precision == Precision.INT8
    return is_int8 and scales is not None and scales.values.size == 1 and scales.is_positive


def check_uniform_scales(view: View, report: FindingReport) -> None:
    """Add a finding if all activations and weights have the same, uncalibrated scale."""
    quantizers = find_int8_quantizers(view)
    scales = {_quantizer_scale(view, quantizer) for quantizer in quantizers}
    if len(quantizers) < _MIN_UNIFORM or len(scales) > 1:
        return
    first_quantizers = (view.weights(node).first_quantizer for node in view.nodes_with_weights)
    weight_scales = [view.params(node).scale for node in first_quantizers if node is not None]
    for values in weight_scales:
        if values is not None:
            scales.update(values.reshape(-1).tolist())
    if len(weight_scales) >= _MIN_UNIFORM and len(scales) == 1:
        counts = len(quantizers), len(weight_scales)
        report.add(UniformScales(MODEL_CHECK, "", scales.pop(), *counts))


def _quantizer_scale(view: View, quantizer: Node) -> float:
    scale = view.params(quantizer).summary
    assert isinstance(scale, float)  # find_int8_quantizers returns only Qs with one known scale
    return scale


def run(view: View, report: FindingReport, statistics: Statistics) -> int:
    """Report scales that do not match the data, and scales that cover outliers.

    Each fault is reported in one finding for the whole network. Outliers at Qs without statistics
    are reported separately, by :func:`check_outliers_by_gains`.

    Args:
        view: The Q/DQ model.
        report: Report to which the findings are added.
        statistics: Statistics of the inputs of the Qs.

    Returns:
        Number of Qs whose scales were checked. Qs with too few values are not checked.
    """
    fits, candidates = [], []
    for q in find_int8_quantizers(view):
        tensor_statistics = statistics.get(q.input(0))
        scalars = view.params(q).scalars
        if (
            tensor_statistics is not None
            and tensor_statistics.count >= _MIN_VALUES
            and tensor_statistics.absmax > 0
            and scalars is not None
        ):
            fits.append(_measure_fit(q.name, tensor_statistics, *scalars))
            candidates.append((q.name, q.input(0), *scalars, [tensor_statistics]))
    check_outliers(report, view.model, candidates, statistics.images)
    check_outliers_by_gains(view, report, {name for name, *_ in candidates})
    misfits = _find_misfits(fits)
    if misfits:
        misfits.sort(
            key=lambda f: max(
                f.clipped / _MAX_CLIPPED_SHARE, f.lost / _MAX_LOST_POWER, _MIN_USED_STEPS / f.used
            ),
            reverse=True,
        )
        report.add(
            ActivationScales(
                MODEL_CHECK,
                misfits[0].quantizer,
                tuple(misfits[:_MAX_LISTED]),
                len(misfits),
                len(fits),
                statistics.images,
                find_common_factor(fits),
            )
        )
    return len(fits)


def check_outliers_by_gains(
    view: View, report: FindingReport, checked: Collection[str] = ()
) -> None:
    """Report scales that cover outliers after normalizations, without calibration data.

    The gains (scale factors) of a normalization show the outliers. Before the gains, the mean
    square over the channels is 1, so a typical value of a channel is at most its gain. The range of
    the scale is compared with the largest gain to expect. This is the maximum for this number of
    channels if all gains have the lognormal distribution of the gains below the median. Smoothed
    tensors are skipped, because the weights compensate their gains.

    Args:
        view: The Q/DQ model.
        report: Report to which the finding of :func:`check_outliers` is added.
        checked: Names of Qs that were already checked against data.
    """
    gains, smoothed = last_axis_gains(view.model), read_smoothed_tensors(view.model)
    spreads = []
    for q in find_int8_quantizers(view) if gains else ():
        scalars, tensor = view.params(q).scalars, q.input(0)
        if q.name in checked or tensor in smoothed:
            continue
        gain = view.model.constant(
            skip_identities(
                view.model, gains.get(_find_normalization_output(view.model, tensor, gains), "")
            )
        )
        sizes = np.abs(np.zeros(0) if gain is None else gain.astype(np.float64))
        if scalars is not None and sizes.any() and np.isfinite(sizes).all():
            lower, median = np.quantile(sizes[sizes > 0.0], [_LOWER_QUANTILE, 0.5])
            above = (
                math.log(median / lower) / _LOWER_DEVIATIONS * math.sqrt(2.0 * math.log(sizes.size))
            )
            largest = max(_held_range(*scalars))
            ratio = largest / float(median) * math.exp(-above)
            spreads.append(_OutlierRatio(q.name, scalars[0], ratio))
    _report_outliers(report, view.model, spreads, 0)


def _find_normalization_output(model: Model, tensor: str, gains: Mapping[str, str]) -> str:
    """Return the output of the normalization from which a tensor comes.

    The normalization is over the last axis. Only Q, DQ, Casts and operators that move values may be
    between its output and the tensor. Empty if the tensor has another origin.
    """
    while tensor not in gains:
        node, above = model.producer(tensor), last_axis_sources(model, tensor)
        if node is not None and (is_qdq(node) or node.op == "Cast"):
            above = [node.input(0)]
        if len(above) != 1:
            return ""
        tensor = above[0]
    return tensor


def check_outliers(
    report: FindingReport,
    model: Model,
    candidates: Sequence[tuple[str, str, float, int, Sequence[TensorStatistics]]],
    samples: int,
) -> None:
    """Report scales that cover outliers, as one finding for the network.

    A range that holds probabilities is never reported: its outliers are the detected objects, or
    the positions to which the network attends.

    Args:
        report: Report to which the finding is added.
        model: The Q/DQ model.
        candidates: Name, input tensor, scale and zero point of each Q, and statistics of the input.
            If the input is the output of a Concat, these may be the statistics of the Concat's
            inputs. The smallest of their outlier ratios is used.
        samples: Number of samples from which the statistics were computed.
    """
    gains, smoothed = last_axis_gains(model), read_smoothed_tensors(model)
    spreads = []
    for name, tensor, scale, zero_point, parts in candidates:
        held = _held_range(scale, zero_point)
        known_parts = [s for s in parts if s.count >= _MIN_VALUES and s.absmax > 0.0]
        if not known_parts:
            continue
        ratio = 1.0  # never reported
        if not _is_probability(model, tensor):
            by_channel = tensor not in smoothed and bool(
                _find_normalization_output(model, tensor, gains)
            )
            ratio = min(_measure_outlier_ratio(s, held, by_channel) for s in known_parts)
        spreads.append(_OutlierRatio(name, scale, ratio, max(held), known_parts))
    _report_outliers(report, model, spreads, samples)


def _is_probability(model: Model, tensor: str) -> bool:
    bounds = find_bounds(model).get(tensor)
    is_bounded = bounds is not None and 0.0 <= bounds.low <= bounds.high <= 1.0
    return is_bounded or is_attention_probability(model, tensor, quantized=True)


@dataclass(frozen=True)
class _OutlierRatio:
    """Outlier ratio of a Q.

    Attributes:
        quantizer: Name of the Q.
        scale: Scale of the Q.
        ratio: Largest value within the range of the scale, divided by the typical value.
        largest: Largest magnitude that the Q represents.
        parts: Statistics of its input; empty if the ratio was computed from gains.
    """

    quantizer: str
    scale: float
    ratio: float
    largest: float = 0.0
    parts: Sequence[TensorStatistics] = ()

    def find_smaller_percentile(self) -> float | None:
        """Return a percentile whose range is smaller than that of the scale, if it is known."""
        from calibration.methods import amax_of

        ranges = [amax_of(part, "percentile", _CLIPPING_PERCENTILE) for part in self.parts]
        return _CLIPPING_PERCENTILE if ranges and max(ranges) < self.largest else None


def _report_outliers(
    report: FindingReport, model: Model, spreads: Sequence[_OutlierRatio], samples: int
) -> None:
    """Report Qs whose outlier ratio is too large.

    `samples` is 0 if the ratios were computed from gains.
    """
    misfits = sorted(
        (s for s in spreads if s.ratio > (_MAX_OUTLIER_RATIO if samples else _MAX_GAIN_RATIO)),
        key=lambda s: -s.ratio,
    )
    if misfits:
        first = model.node(misfits[0].quantizer)
        linear = any(_feeds_matrix_product(model, s.quantizer) for s in misfits)
        report.add(
            OutlierScales(
                MODEL_CHECK,
                first.name,
                tuple((s.quantizer, s.scale, s.ratio) for s in misfits[:_MAX_LISTED]),
                len(misfits),
                len(spreads),
                samples,
                linear and SMOOTHED not in model.metadata,
                first.input(0),
                tuple(consumer.name for consumer in _list_consumers(model, first)),
                misfits[0].find_smaller_percentile(),
            )
        )


def _feeds_matrix_product(model: Model, quantizer: str) -> bool:
    consumers = _list_consumers(model, model.node(quantizer))
    return any(operator_of(node).kind == LayerKind.MATRIX_MULTIPLY for node in consumers)


def _list_consumers(model: Model, quantizer: Node) -> list[Node]:
    """Return the nodes that consume the output of a Q's DQs."""
    dqs = model.consumers(quantizer.output)
    return list(dict.fromkeys(n for dq in dqs for n in model.consumers(dq.output)))


def _measure_outlier_ratio(
    tensor_statistics: TensorStatistics, held_range: tuple[float, float], by_channel: bool
) -> float:
    """Return the largest magnitude within a Q's range, divided by the typical magnitude.

    Two thirds of the magnitudes above 0 are below the typical magnitude, so up to a third may be
    outliers. If `by_channel` is set, the typical magnitude is at most an eighth of the median of
    the channels' ranges. This is needed after a LayerNormalization, where outliers of one sign move
    the other channels away from 0, but these channels have a small range. Set `by_channel` only for
    normalizations without smoothing.

    Args:
        tensor_statistics: Statistics of the tensor.
        held_range: Result of :func:`_held_range` for the Q.
        by_channel: Whether the channels are considered.
    """
    below_zero, above_zero = held_range
    held = max(
        min(-tensor_statistics.minimum, below_zero), min(tensor_statistics.maximum, above_zero)
    )
    histogram = tensor_statistics.histogram
    centers = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    below = np.cumsum(np.where(histogram.edges[:-1] > 0.0, histogram.counts, 0.0))
    if not below[-1]:
        return 1.0
    typical = float(centers[np.searchsorted(below, _TYPICAL_QUANTILE * below[-1])])
    if by_channel and tensor_statistics.channels is not None:
        ranges = tensor_statistics.channels[1] - tensor_statistics.channels[0]
        if ranges.any() and tensor_statistics.count >= _MIN_CHANNEL_VALUES * ranges.size:
            typical = min(typical, float(np.median(ranges[ranges > 0.0])) / 2 / _CHANNEL_DEVIATIONS)
    return held / typical


def _held_range(scale: float, zero_point: int) -> tuple[float, float]:
    """Return the largest magnitudes below and above 0 that a Q represents."""
    below, above = _count_steps(zero_point)
    return below * scale, above * scale


def _count_steps(zero_point: int) -> tuple[float, float]:
    """Return the numbers of integer steps below and above 0, without the step -128."""
    return max(_INT8_MAX + zero_point, 0.0), _INT8_MAX - zero_point


def _find_misfits(fits: list[ActivationFit]) -> list[ActivationFit]:
    """Return the quantizers whose scale does not match the data.

    If several quantizers have the same scale, such as those of a Concat's inputs, it is sufficient
    that one of them uses enough integer steps.
    """
    shares_by_scale: dict[float, list[float]] = defaultdict(list)
    for fit in fits:
        shares_by_scale[fit.scale].append(fit.used)
    used = {
        scale: max(shares) if len(shares) <= max(2, _MAX_EQUAL_SCALES * len(fits)) else 0.0
        for scale, shares in shares_by_scale.items()
    }
    lowest, highest = _limit_used_steps(fits)
    return [
        f
        for f in fits
        if f.clipped > _MAX_CLIPPED_SHARE
        or f.lost > _MAX_LOST_POWER
        or max(f.used, used[f.scale]) < _MIN_USED_STEPS
        or not lowest <= f.used <= highest
    ]


def _limit_used_steps(fits: list[ActivationFit]) -> tuple[float, float]:
    """Return the lowest and highest fraction of used steps that is normal in this model."""
    median = float(np.median([f.used for f in fits])) if fits else 1.0
    if median > _MAX_MEDIAN_FACTOR:
        return 0.0, _MAX_MEDIAN_FACTOR
    if median < 1 / _MAX_MEDIAN_FACTOR:
        return 1 / _MAX_MEDIAN_FACTOR, math.inf
    return 0.0, math.inf


def find_common_factor(fits: list[ActivationFit]) -> float:
    """Return the common factor by which nearly all scales are too small; 0 if there is none.

    A factor below 1 means that the scales are too large.
    """
    median = float(np.median([f.used for f in fits]))
    agreeing = sum(1 / _MAX_FACTOR_SPREAD <= f.used / median <= _MAX_FACTOR_SPREAD for f in fits)
    is_wrong = not 1 / _MAX_FACTOR_SPREAD <= median <= _MAX_FACTOR_SPREAD
    return (
        median
        if is_wrong and len(fits) >= _MIN_QUANTIZERS and agreeing >= _MIN_AGREEING_SHARE * len(fits)
        else 0.0
    )


def _measure_fit(
    name: str, tensor_statistics: TensorStatistics, scale: float, zero_point: int
) -> ActivationFit:
    """Measure the fractions of clipped values, lost power and used steps.

    Each value is replaced by the center of its histogram bin. The bins are narrower than a step.
    """
    histogram = tensor_statistics.histogram
    steps = _count_steps_of_bins(tensor_statistics, zero_point)
    held = (steps + 0.5) * scale
    centers = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    clipped = float(np.sum(histogram.counts[centers > held])) / tensor_statistics.count
    beyond = np.clip(centers - held, 0, None)
    lost = float(np.sum(histogram.counts * beyond**2) / np.sum(histogram.counts * centers**2))
    used = tensor_statistics.absmax / (max(float(steps[-1]), 1.0) * scale)
    return ActivationFit(name, scale, clipped, lost, used)


def _count_steps_of_bins(
    tensor_statistics: TensorStatistics, zero_point: int
) -> npt.NDArray[np.float64]:
    """Return for each bin of the histogram how many integer steps its values can have.

    The zero point moves steps from one sign to the other. The histogram counts magnitudes. If both
    signs have values in a bin's range, the bin gets the larger number of steps. A range that starts
    at 0 may replace a Relu, so its steps are compared with all magnitudes.
    """
    below, above = _count_steps(zero_point)
    below = below or above
    magnitudes = tensor_statistics.histogram.edges[:-1]
    return np.where(
        magnitudes > -tensor_statistics.minimum,
        above,
        np.where(magnitudes > tensor_statistics.maximum, below, max(above, below)),
    )

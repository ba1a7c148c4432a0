"""Methods that choose a tensor's INT8 range from its statistics.

A range is `amax`, the largest magnitude that INT8 represents. All methods are symmetric (zero point
0), with the scale `amax / 127`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from calibration.statistics import MIN_TOP, Floats, Histogram, TensorStatistics, rounding_errors
from qdqtool.errors import shorten_text

METHODS = ("max", "percentile", "mse", "entropy", "focus")
INT8_LEVELS = 127
_FP8_MAX, _FP8_MANTISSA_BITS, _FP8_MIN_EXPONENT = 448.0, 3, -6
FOCUS_WEIGHT = 0.9  # weight of the error of values in focus; the error of all values has 0.1
# Share of a tensor that is in focus, and the power of the error that `focus_power` returns for that
# share.
_DENSE, _SPARSE = (0.18, 2.0), (0.06, 3.0)
# `choose_focus_range` lowers the power to 2 while the INT8 step grows from the first to the second
# limit. The unit is the largest magnitude of the negative values.
_STEP_LIMITS = (0.5, 1.0)
BIASED_WEIGHT = 20.0  # weight of the biased error in `reduce_bias`
_FACTORS = np.exp2(np.arange(2, -25, -1) / 12.0)  # ranges that `reduce_bias` tries, divided by amax
_UNCHANGED = 2  # index of the factor 1

SEARCH_BITS = 7  # 128 bins per octave during a search: the width is at most 0.8 % of the value
_SEARCH_OCTAVES = 12  # ranges down to 1/4096 of the maximum are tried
_COARSE_STEPS = 8  # coarse ranges per octave
_FINE_STEPS = 8  # fine ranges between two coarse ranges
_ENTROPY_BINS = 2048
_ENTROPY_LEVELS = 128
_CACHED_RANGES = 16  # ranges computed at once: their arrays fit the processor's cache

WeightedHistograms = list[tuple[Histogram, float]]


class Range(NamedTuple):
    """A range and the power of the error that the range minimizes.

    Attributes:
        amax: Largest magnitude, in units of the tensor, above zero.
        power: Power of the error, from 2 to 3; None for ``max``, ``percentile`` and ``entropy``.
    """

    amax: float
    power: float | None


def amax_of(stats: TensorStatistics, method: str, percentile: float = 99.99) -> float:
    """Return the range that a method chooses; see :func:`choose_range`."""
    return choose_range(stats, method, percentile).amax


def choose_range(stats: TensorStatistics, method: str, percentile: float = 99.99) -> Range:
    """Choose the range of a tensor by a method.

    Args:
        stats: Statistics of one tensor, or merged over tensors that share a scale.
        method: One of METHODS. ``max``: the largest magnitude. ``percentile``: the magnitude that
            ``percentile`` percent of the magnitudes do not exceed (the largest if that is zero).
            ``mse``: the range with the least expected squared error. ``entropy``: the range with
            the least KL divergence between the histogram and its 128-level version, searched over
            2048 bins as TensorRT's entropy calibrator does. ``focus``: the range with the least
            :func:`focused_error` to the power that :func:`choose_focus_range` chooses, then
            adjusted by :func:`reduce_bias`. If no positions in focus are known, ``focus`` is
            ``mse`` with the adjustment.
        percentile: Above 0, at most 100.

    Returns:
        amax > 0, in units of the tensor, and the power. A tensor that is always zero has the range
        1.0, because every range represents it exactly.

    Raises:
        ValueError: Unknown method, or a percentile outside its range.
    """
    if method not in METHODS:
        raise ValueError(
            shorten_text(f"method '{method}' is unknown; use one of {', '.join(METHODS)}")
        )
    if not 0.0 < percentile <= 100.0:
        raise ValueError(f"percentile is {percentile:g}; it must be above 0 and at most 100")
    absmax = stats.absmax
    if absmax < math.ldexp(1.0, MIN_TOP):  # all values are 0, or too small for a float32 scale
        return Range(1.0, None)
    power: float | None = None
    if method == "percentile":
        amax = _percentile_range(stats, percentile)
    elif method == "mse":
        power = 2.0
        amax = _search_range([(stats.coarse(SEARCH_BITS), 1.0)], absmax, power)
    elif method == "focus":
        amax, power = _search_focus_range(stats)
    elif method == "entropy":
        amax = entropy_range(stats.linear(_ENTROPY_BINS).counts, absmax)
    else:
        amax = absmax
    return Range(min(amax, absmax), power)


def _percentile_range(stats: TensorStatistics, percentile: float) -> float:
    """Return a percentile of the magnitudes, or the maximum if the percentile is zero.

    Inside a bin, the percentile is interpolated linearly. A sparse activation has mostly zeros: a
    range of zero would clip all its other values, so the maximum is used.
    """
    histogram = stats.histogram
    cumulative = np.cumsum(histogram.counts)
    rank = percentile / 100.0 * stats.count
    if rank <= cumulative[0]:
        return stats.absmax
    return float(np.interp(rank, cumulative, histogram.edges[1:]))


@overload
def squared_error(stats: TensorStatistics, amax: float, levels: int = INT8_LEVELS) -> float: ...
@overload
def squared_error(
    stats: TensorStatistics, amax: npt.NDArray[np.float64], levels: int = INT8_LEVELS
) -> Floats: ...
def squared_error(
    stats: TensorStatistics, amax: float | npt.NDArray[np.float64], levels: int = INT8_LEVELS
) -> float | Floats:
    """Return the expected squared error of one element due to rounding and clipping.

    Args:
        stats: Statistics of the tensor.
        amax: Range or ranges [n], above zero, in units of the tensor.
        levels: Number of positive integer levels; the scale is ``amax / levels``.

    Returns:
        Error in squared units of the tensor, a float or float64 [n]; 0 for a tensor without finite
        values.

    Raises:
        ValueError: A range is not above zero.
    """
    ranges = _as_ranges(amax)
    if stats.count:
        errors = _sum_power_errors(stats.histogram, ranges, levels) / stats.count
    else:
        errors = np.zeros(len(ranges))
    return errors if isinstance(amax, np.ndarray) and amax.ndim else float(errors[0])


def fp8_error(stats: TensorStatistics, amax: float) -> float:
    """Return the expected squared error of one element in FP8 with the scale ``amax / 448``.

    All values of a histogram bin count as the middle of the bin. FP8 is E4M3: the step between two
    numbers grows with the exponent, and is constant below 2**-6 times the scale.

    Args:
        stats: Statistics of the tensor.
        amax: Range above zero, in units of the tensor.
    """
    if not stats.count:
        return 0.0
    histogram = stats.coarse(SEARCH_BITS)
    middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2.0
    scale = amax / _FP8_MAX
    exponents = np.maximum(np.frexp(middles / scale)[1] - 1, _FP8_MIN_EXPONENT)
    steps = np.ldexp(scale, exponents - _FP8_MANTISSA_BITS)
    errors = np.where(middles < steps / 2.0, middles**2, steps**2 / 12.0)
    clipped = np.maximum(middles - amax, 0.0) ** 2
    return float(np.maximum(errors, clipped) @ histogram.counts / stats.count)


def _as_ranges(amax: float | npt.NDArray[np.float64]) -> Floats:
    ranges: Floats = np.atleast_1d(np.asarray(amax, np.float64))
    if not (ranges > 0).all():
        raise ValueError("amax must be above zero")
    return ranges


def focus_power(parts: Sequence[TensorStatistics]) -> float:
    """Return the power of the error that the method `focus` minimizes, from 2 to 3.

    If objects fill much of the image (text on a page), the calibration data contains many of their
    values, and the squared error (power 2) is the right measure. If objects are rare (people in
    photographs), the calibration data contains few of their values, and other values will occur in
    deployment. A higher power then clips fewer rare values. The power is 2 if no positions in focus
    are known.

    Args:
        parts: Statistics of the tensors that share a range.
    """
    shares = []
    for part in parts:
        if part.focus is None or not part.focus.count or not part.count:
            return 2.0
        shares.append(part.focus.count / part.count)
    if not shares:
        return 2.0
    position = (sum(shares) / len(shares) - _SPARSE[0]) / (_DENSE[0] - _SPARSE[0])
    return _SPARSE[1] + min(max(position, 0.0), 1.0) * (_DENSE[1] - _SPARSE[1])


def choose_focus_range(
    parts: Sequence[TensorStatistics],
    search: Callable[[float], float],
    error: Callable[[Floats, float], Floats],
) -> Range:
    """Choose the range of the method `focus`.

    The power is :func:`focus_power`, lowered towards 2 if the INT8 step is large compared to the
    negative values. The minimum of SiLU is -0.28, and many of its values lie between the minimum
    and zero. A step of 0.14 still distinguishes these values. With a step of 0.28, only two levels
    remain. The errors are then equal over flat areas, later layers do not average them out, and a
    smaller step helps more than a larger range. This happens in the first tensors of a network,
    which have large values for edges and colors of any object.

    At the end, :func:`reduce_bias` adjusts the range to flat areas.

    Args:
        parts: Statistics of the tensors that share the range.
        search: Function that takes a power, and returns the range with the smallest sum of errors
            raised to this power.
        error: Function that takes ranges [n] and a power, and returns these sums [n].
    """
    power = focus_power(parts)
    amax = search(power)
    depth = max(-part.minimum for part in parts)  # minus infinity if no value was counted
    if depth > 0.0 and power > 2.0:
        start, end = _STEP_LIMITS
        position = (amax / INT8_LEVELS / depth - start) / (end - start)
        if position > 0.0:
            power += min(position, 1.0) * (2.0 - power)
            amax = search(power)
    return Range(reduce_bias(parts, amax, lambda ranges: error(ranges, power)), power)


def reduce_bias(
    parts: Sequence[TensorStatistics], amax: float, error: Callable[[Floats], Floats]
) -> float:
    """Return a range near `amax` with less biased error over flat areas.

    A biased error is equal all over an image (see :mod:`calibration.statistics`). Later layers
    average out noise, but not a biased error.

    In drawings on white paper, nine tenths of the squared error of the first layers was biased. A
    range of 0.7 times `amax` made the squared error in focus four times as large, but more than
    halved the error of the class outputs. In photographs, only a tenth of the error is biased. The
    range then does not change, because the share of the biased error is squared.

    Args:
        parts: Statistics of the tensors that share the range. Tensors without `spots` are ignored.
        amax: Range with the least error.
        error: Function that returns the errors of ranges [n].

    Returns:
        `amax` if no tensor has spots or the error at `amax` is 0. Otherwise the range with the
        least sum of two terms: the error, divided by the error at `amax`; and
        :data:`BIASED_WEIGHT` times the squared share of the biased error (biased error divided by
        the squared error at `amax`, mean of all parts).
    """
    ranges = np.minimum(amax * _FACTORS, max(part.absmax for part in parts))
    unchanged = ranges[_UNCHANGED : _UNCHANGED + 1]
    spots_and_errors = []
    shares_at_amax = []
    for part in parts:
        if part.spots:
            biased, total = rounding_errors(part.spots, unchanged, INT8_LEVELS)
            if total[0] > 0.0:
                spots_and_errors.append((part.spots, total))
                shares_at_amax.append(biased[0] / total[0])
    if not spots_and_errors:
        return amax
    costs = error(ranges)
    if not costs[_UNCHANGED] > 0.0:
        return amax
    costs /= costs[_UNCHANGED]
    cost_at_amax = 1.0 + BIASED_WEIGHT * float(np.mean(shares_at_amax)) ** 2
    possible = costs <= cost_at_amax  # the others cost more, even if their biased error is 0
    ranges, costs = ranges[possible], costs[possible]
    shares = [
        rounding_errors(spots, ranges, INT8_LEVELS)[0] / total for spots, total in spots_and_errors
    ]
    return float(ranges[int(np.argmin(costs + BIASED_WEIGHT * np.mean(shares, axis=0) ** 2))])


def focused_error(
    stats: TensorStatistics,
    amax: npt.NDArray[np.float64],
    power: float = 2.0,
    bits: int | None = None,
) -> Floats:
    """Return the mean of the errors raised to a power, with more weight on values in focus.

    Args:
        stats: Statistics of the tensor.
        amax: Ranges [n], above zero, in units of the tensor.
        power: Power of the error, at least 1.
        bits: Limits the histogram to ``2**bits`` bins per octave, which is faster.
            :data:`SEARCH_BITS` is enough for a search. None uses all bins.

    Returns:
        float64 [n]: the mean over the values in focus with weight :data:`FOCUS_WEIGHT`, plus the
        mean over all values with the remaining weight. If no positions in focus are known, the mean
        over all values.

    Raises:
        ValueError: A range is not above zero, or the power is below 1.
    """
    if power < 1:
        raise ValueError(f"power is {power:g}; it must be at least 1")
    return _sum_errors(_weigh_histograms(stats, bits), _as_ranges(amax), power)


def _weigh_histograms(stats: TensorStatistics, bits: int | None) -> WeightedHistograms:
    """Return histograms of all values and of the values in focus, with their weights.

    The weighted sum of both error sums is the expected error of one element. Empty without values.
    """

    def histogram(part: TensorStatistics) -> Histogram:
        return part.histogram if bits is None else part.coarse(bits)

    if not stats.count:
        return []
    focus = stats.focus
    if focus is None or not focus.count:
        return [(histogram(stats), 1.0 / stats.count)]
    everywhere = histogram(stats)
    in_focus = everywhere if focus.counter is stats.counter else histogram(focus)
    return [
        (everywhere, (1.0 - FOCUS_WEIGHT) / stats.count),
        (in_focus, FOCUS_WEIGHT / focus.count),
    ]


def clipped_fraction(stats: TensorStatistics, amax: float) -> float:
    """Return the share of values whose magnitude exceeds a range, from 0 to 1.

    The share is exact except for the histogram bin that contains `amax`.
    """
    if not stats.count or amax >= stats.absmax:
        return 0.0
    histogram = stats.histogram
    cumulative = np.concatenate([[0], np.cumsum(histogram.counts)])
    return 1.0 - float(np.interp(amax, histogram.edges, cumulative)) / stats.count


def _sum_power_errors(
    histogram: Histogram, ranges: Floats, levels: int, power: float = 2.0
) -> Floats:
    """Return the sum of the errors, each raised to a power, for each range.

    The values of a bin are assumed to be evenly spread. With scale s and power p, the integral of
    the error from 0 to t is ``k 2 (s/2)^q / q + sign(r) |r|^q / q`` where ``q = p + 1``,
    ``k = min(round(t / s), levels)`` and ``r = t - k s``. Each level below t adds
    ``2 (s/2)^q / q``, and the rest beyond the last level is the clipping error. The mean of a bin
    is the difference of the integrals at its edges, divided by its width. The lowest bin is left
    out: its values are zeros or too small to matter.
    """
    filled = np.flatnonzero(histogram.counts[1:])
    if not len(filled):
        return np.zeros(len(ranges))
    first = int(filled[0]) + 1
    edges = histogram.edges[first:]
    per_width = histogram.counts[first:] / np.diff(edges)
    result = np.empty(len(ranges))
    for start in range(0, len(ranges), _CACHED_RANGES):
        scales = ranges[start : start + _CACHED_RANGES, None] / levels
        level = edges / scales
        np.rint(level, out=level)
        np.minimum(level, levels, out=level)
        rest = level * scales
        np.subtract(edges, rest, out=rest)
        if power == 2.0:
            integral = rest * rest
            integral *= rest
            integral *= 1.0 / 3.0
        else:
            integral = np.abs(rest)
            np.power(integral, power + 1.0, out=integral)
            np.copysign(integral, rest, out=integral)
            integral *= 1.0 / (power + 1.0)
        level *= (scales / 2.0) ** (power + 1.0) * (2.0 / (power + 1.0))
        integral += level
        result[start : start + _CACHED_RANGES] = np.diff(integral, axis=1) @ per_width
    return result


def _search_focus_range(stats: TensorStatistics) -> Range:
    histograms = _weigh_histograms(stats, SEARCH_BITS)
    return choose_focus_range(
        [stats],
        lambda power: _search_range(histograms, stats.absmax, power),
        lambda ranges, power: _sum_errors(histograms, ranges, power),
    )


def _search_range(histograms: WeightedHistograms, absmax: float, power: float) -> float:
    """Return the range with the least error; search in coarse steps, then in fine steps."""
    steps = np.arange(_SEARCH_OCTAVES * _COARSE_STEPS + 1) / _COARSE_STEPS
    best = _search_coarse_range(histograms, absmax * np.exp2(-steps), power)
    around = np.arange(-_FINE_STEPS, _FINE_STEPS + 1) / (_FINE_STEPS * _COARSE_STEPS)
    ranges = np.minimum(best * np.exp2(-around), absmax)
    # If several ranges have the least error, argmin returns the first, which is the largest range.
    return float(ranges[int(np.argmin(_sum_errors(histograms, ranges, power)))])


def _search_coarse_range(histograms: WeightedHistograms, ranges: Floats, power: float) -> float:
    """Return the range with the least error, or the largest such range if there are several.

    `ranges` is in descending order. Smaller ranges clip more values. The search ends when the
    clipping error alone exceeds the least error so far.
    """
    best, least = float(ranges[0]), math.inf
    for start in range(0, len(ranges), _COARSE_STEPS):
        octave = ranges[start : start + _COARSE_STEPS]
        errors = _sum_errors(histograms, octave, power)
        index = int(np.argmin(errors))
        if errors[index] < least:
            best, least = float(octave[index]), float(errors[index])
        rounding_margin = 1.0 + 1e-6
        if clipping_error(histograms, float(octave[-1]), power) > least * rounding_margin:
            break
    return best


def clipping_error(histograms: WeightedHistograms, amax: float, power: float) -> float:
    """Return a lower bound of the sum of clipping errors, each raised to a power.

    Each value is replaced by the lower edge of its bin.
    """
    errors = []
    for histogram, weight in histograms:
        excess = np.maximum(histogram.edges[:-1] - amax, 0.0)
        errors.append(excess**power @ histogram.counts * weight)
    return float(sum(errors))


def _sum_errors(histograms: WeightedHistograms, ranges: Floats, power: float) -> Floats:
    total = np.zeros(len(ranges))
    errors, previous = total, None
    for histogram, weight in histograms:
        if histogram is not previous:  # both are one histogram if all values are in focus
            errors = _sum_power_errors(histogram, ranges, INT8_LEVELS, power)
            previous = histogram
        total = total + weight * errors
    return total


def entropy_range(bins: Floats, absmax: float) -> float:
    """Return the range with the least KL divergence, like TensorRT's entropy calibrator.

    Every number of bins from 128 to all is tried. For i bins, the distribution P has the counts of
    these bins, with all counts beyond them added to the last bin. The distribution Q joins the bins
    into 128 levels and spreads the sum of each level evenly over the level's nonempty bins. Both
    are normalized. Q is constant within a level, so the divergence needs only sums over levels.
    Cumulative sums give the divergence for all i at once.

    Args:
        bins: Counts in equal bins from 0 to the largest magnitude.
        absmax: Largest magnitude, in units of the tensor.
    """
    counts = bins.copy()
    # As in pytorch-quantization: zeros have no rounding error, but their count would dominate P.
    counts[0] = counts[1]
    total = len(counts)
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    entropies = np.cumsum(_xlogx(counts))
    sizes = np.arange(_ENTROPY_LEVELS, total + 1)  # numbers of bins in the range
    beyond = sums[-1] - sums[sizes]
    last = counts[sizes - 1]
    bounds = np.arange(_ENTROPY_LEVELS + 1) * sizes[:, None] // _ENTROPY_LEVELS  # [i, level edge]
    level_sums = np.diff(sums[bounds], axis=1)
    level_filled = np.diff(filled[bounds], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(level_sums > 0, np.log(level_sums / level_filled), 0.0)
        cross = (level_sums * logs).sum(axis=1) + beyond * logs[:, -1]
        p_entropy = entropies[sizes - 1] - _xlogx(last) + _xlogx(last + beyond)
        p_total = sums[-1]
        divergence = (p_entropy - cross) / p_total - np.log(p_total) + np.log(sums[sizes])
    # If the last bin is empty and counts lie beyond the range, P is above zero in that bin and Q is
    # zero. The divergence is then infinite.
    divergence[(beyond > 0) & (last <= 0)] = np.inf
    divergence[~np.isfinite(divergence)] = np.inf
    if not np.isfinite(divergence).any():
        return absmax
    best = int(sizes[np.flatnonzero(divergence <= divergence.min() + 1e-15)[-1]])
    return absmax * best / total


def _xlogx(values: Floats) -> Floats:
    result: Floats = values * np.log(np.where(values > 0, values, 1.0))
    return result

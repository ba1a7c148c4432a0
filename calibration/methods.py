"""Choice of a range from statistics: the largest magnitude that INT8 represents.

All methods are symmetric (zero point 0): they choose `amax`, and the scale is `amax / 127`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from calibration.statistics import MIN_TOP, Floats, Histogram, TensorStatistics, rounding_errors
from qdqtool.errors import brief

METHODS = ("max", "percentile", "mse", "entropy", "focus")
INT8_LEVELS = 127
_FP8_MAX, _FP8_MANTISSA_BITS, _FP8_MIN_EXPONENT = 448.0, 3, -6
FOCUS_WEIGHT = 0.9  # weight of the error in focus; the error of all values has weight 0.1
# Two points (share of a tensor that is in focus, power of the error); see `focus_power`.
_DENSE, _SPARSE = (0.18, 2.0), (0.06, 3.0)
# Between these integer steps, in units of the largest negative magnitude, the power falls to 2; see
# `choose_focus_range`.
_SHALLOW = (0.5, 1.0)
BIASED_WEIGHT = 20.0  # weight of the squared share of the biased error; see `reduce_bias`
_NEAR = np.exp2(np.arange(2, -25, -1) / 12.0)  # ranges that `reduce_bias` tries, relative to amax
_SAME = 2  # index of the value 1 in `_NEAR`, which keeps the range

SEARCH_BITS = 7  # 128 bins per octave during a search, each at most 0.8 % of its value wide
_SEARCH_OCTAVES = 12  # ranges down to 1/4096 of the maximum are tried
_COARSE_STEPS = 8  # coarse ranges per octave
_FINE_STEPS = 8  # fine ranges between two coarse ranges
_ENTROPY_BINS = 2048
_ENTROPY_LEVELS = 128
_CACHED_RANGES = 16  # ranges computed at once: their arrays fit the processor's cache

WeightedHistograms = list[tuple[Histogram, float]]


class Range(NamedTuple):
    """A range, and the power of the error that it minimizes.

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
            ``percentile`` per cent of the magnitudes do not exceed (the largest if that is zero).
            ``mse``: the range with the least expected squared error. ``entropy``: the range with
            the least KL divergence between the histogram and its 128-level version, searched over
            2048 bins as TensorRT's entropy calibrator does. ``focus``: the range with the least
            :func:`focused_error` to the power that :func:`choose_focus_range` chooses, moved to a
            range that rounds flat areas well. If no positions in focus are known, ``focus`` is
            ``mse`` with that last step.
        percentile: Above 0, at most 100.

    Returns:
        amax > 0, in units of the tensor, and the power. A tensor that is always zero gets 1.0: any
        range is exact.

    Raises:
        ValueError: Unknown method, or a percentile outside its range.
    """
    if method not in METHODS:
        raise ValueError(brief(f"method '{method}' is unknown; use one of {', '.join(METHODS)}"))
    if not 0.0 < percentile <= 100.0:
        raise ValueError(f"percentile is {percentile:g}; it must be above 0 and at most 100")
    absmax = stats.absmax
    if absmax < math.ldexp(1.0, MIN_TOP):  # zeros, or values below any float32 scale
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

    It is linear inside a bin. A tensor with few values other than zero (sparse activations) would
    otherwise lose all of them.
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
    """Return the expected squared error of one element, rounding and clipping together.

    Args:
        stats: Statistics of the tensor.
        amax: Range or ranges [n], above zero, in units of the tensor.
        levels: Positive integer levels; the scale is ``amax / levels``.

    Returns:
        In squared units of the tensor, a float or float64 [n]; 0 for a tensor without finite
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

    All values of a bin count as its middle. The step between FP8 numbers grows with the exponent of
    the value; below 2**-6 scales it is constant.

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
    """Return the power of the error that the method `focus` sums, from 2 to 3.

    If objects fill much of the map (text on a page), calibration data shows their values well, and
    the squared error (power 2) is the right measure. If objects are rare (people in photographs),
    calibration data has few of them, and objects in deployment differ more. A higher power then
    clips fewer of the rare values. The power is 2 if no positions in focus are known.

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

    The power is :func:`focus_power`, lowered towards 2 if the integer step is large compared to the
    negative values. SiLU and similar functions have a small minimum (-0.28), and many of their
    values lie between this and zero. A step of half this size still distinguishes them; with a step
    of the full size only two levels remain. Errors are then equal over flat areas, later layers do
    not average them out, and a shorter step helps more than a longer range. This happens in the
    first tensors of a network, which have large values for edges and colors of any object.

    Finally, the range may change a little for flat areas: see :func:`reduce_bias`.

    Args:
        parts: Statistics of the tensors that share the range.
        search: Returns the range with the least error to a power.
        error: Returns the errors of ranges [n] to a power.
    """
    power = focus_power(parts)
    amax = search(power)
    depth = max(-part.minimum for part in parts)  # minus infinity if nothing was counted
    if depth > 0.0 and power > 2.0:
        position = (amax / INT8_LEVELS / depth - _SHALLOW[0]) / (_SHALLOW[1] - _SHALLOW[0])
        if position > 0.0:
            power += min(position, 1.0) * (2.0 - power)
            amax = search(power)
    return Range(reduce_bias(parts, amax, lambda ranges: error(ranges, power)), power)


def reduce_bias(
    parts: Sequence[TensorStatistics], amax: float, error: Callable[[Floats], Floats]
) -> float:
    """Return a range near `amax` with less biased error over flat areas.

    Later layers average out noise, but not a biased error: one that is equal all over an image (see
    :mod:`calibration.statistics`). In drawings on white paper, nine tenths of the squared error of
    the first layers were biased. There, 0.7 times the range more than halved the error of the class
    outputs, although the squared error in focus was four times as large. In photographs, a tenth of
    the error is biased, which does not change the range because this share counts squared.

    Args:
        parts: Statistics of the tensors that share the range. Those without `spots` do not count.
        amax: Range with the least error.
        error: Returns the errors of ranges [n].

    Returns:
        The range with the least sum of two terms: the error relative to that at `amax`, and
        :data:`BIASED_WEIGHT` times the square of the biased error, relative to the squared error at
        `amax` (the mean of all parts).
    """
    ranges = np.minimum(amax * _NEAR, max(part.absmax for part in parts))
    same = ranges[_SAME : _SAME + 1]
    spots_and_errors = []
    shares_at_amax = []
    for part in parts:
        if part.spots:
            biased, total = rounding_errors(part.spots, same, INT8_LEVELS)
            if total[0] > 0.0:
                spots_and_errors.append((part.spots, total))
                shares_at_amax.append(biased[0] / total[0])
    if not spots_and_errors:
        return amax
    costs = error(ranges)
    if not costs[_SAME] > 0.0:
        return amax
    costs /= costs[_SAME]
    cost_at_amax = 1.0 + BIASED_WEIGHT * float(np.mean(shares_at_amax)) ** 2
    possible = costs <= cost_at_amax  # for the others the first term alone is larger
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
    """Return the expected error of one element to a power; values in focus weigh more.

    Args:
        stats: Statistics of the tensor.
        amax: Ranges [n], above zero, in units of the tensor.
        power: From 1.
        bits: At most ``2**bits`` bins to an octave, which is quicker. :data:`SEARCH_BITS` is enough
            for a search.

    Returns:
        float64 [n]: :data:`FOCUS_WEIGHT` of the mean over the values in focus, and the rest of the
        mean over all values. The latter alone if no positions in focus are known.

    Raises:
        ValueError: A range is not above zero, or the power is below 1.
    """
    if power < 1:
        raise ValueError(f"power is {power:g}; it must be at least 1")
    return _sum_errors(_weigh_histograms(stats, bits), _as_ranges(amax), power)


def _weigh_histograms(stats: TensorStatistics, bits: int | None) -> WeightedHistograms:
    """Return histograms, each with the factor by which its sum enters the weighted mean."""

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

    The result is exact except for values in the bin of `amax`.
    """
    if not stats.count or amax >= stats.absmax:
        return 0.0
    histogram = stats.histogram
    cumulative = np.concatenate([[0], np.cumsum(histogram.counts)])
    return 1.0 - float(np.interp(amax, histogram.edges, cumulative)) / stats.count


def _sum_power_errors(
    histogram: Histogram, ranges: Floats, levels: int, power: float = 2.0
) -> Floats:
    """Return the summed error to a power for each range.

    The values of a bin count as evenly spread. With scale s and power p, the integral of the error
    from 0 to t is ``k 2 (s/2)^q / q + sign(r) |r|^q / q`` where ``q = p + 1``,
    ``k = min(round(t / s), levels)`` and ``r = t - k s``. Each level below t costs
    ``2 (s/2)^q / q``, and the rest beyond the last level is the clipping error. A bin's mean is a
    difference of two such integrals. The lowest bin is left out: its values are zeros, or too small
    to matter.
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
    """Return the range of least error, in coarse steps from the maximum, then in fine steps."""
    steps = np.arange(_SEARCH_OCTAVES * _COARSE_STEPS + 1) / _COARSE_STEPS
    best = _search_coarse_range(histograms, absmax * np.exp2(-steps), power)
    around = np.arange(-_FINE_STEPS, _FINE_STEPS + 1) / (_FINE_STEPS * _COARSE_STEPS)
    ranges = np.minimum(best * np.exp2(-around), absmax)
    # argmin returns the first of equals, which is the largest range.
    return float(ranges[int(np.argmin(_sum_errors(histograms, ranges, power)))])


def _search_coarse_range(histograms: WeightedHistograms, ranges: Floats, power: float) -> float:
    """Return the first range of least error among descending ranges.

    Shorter ranges clip more. The search ends when the clipping error alone exceeds the smallest
    error so far.
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
    """Return a lower bound of the clipping error: all values of a bin count as its lower edge."""
    errors = []
    for histogram, weight in histograms:
        excess = np.maximum(histogram.edges[:-1] - amax, 0.0)
        errors.append(excess**power @ histogram.counts * weight)
    return float(sum(errors))


def _sum_errors(histograms: WeightedHistograms, ranges: Floats, power: float) -> Floats:
    total = np.zeros(len(ranges))
    errors, previous = total, None
    for histogram, weight in histograms:
        if histogram is not previous:  # it is the same if everything is in focus
            errors = _sum_power_errors(histogram, ranges, INT8_LEVELS, power)
            previous = histogram
        total = total + weight * errors
    return total


def entropy_range(bins: Floats, absmax: float) -> float:
    """Return the range of least KL divergence, like TensorRT's entropy calibrator.

    The search goes over every number of bins from 128 to all. For i bins, P is their counts with
    everything beyond added to the last; Q is the counts joined into 128 levels, each level's sum
    spread evenly over those of its bins that are not empty. Both are normalized. As Q is constant
    within a level, the divergence needs only sums over levels, which running sums give for all i at
    once.

    Args:
        bins: Counts in equal bins from 0 to the largest magnitude.
        absmax: Largest magnitude, in units of the tensor.
    """
    counts = bins.copy()
    # As in pytorch-quantization: zeros have no error, but their number would dominate.
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
    # If counts beyond the range meet an empty last bin, Q is zero there: infinite divergence.
    divergence[(beyond > 0) & (last <= 0)] = np.inf
    divergence[~np.isfinite(divergence)] = np.inf
    if not np.isfinite(divergence).any():
        return absmax
    best = int(sizes[np.flatnonzero(divergence <= divergence.min() + 1e-15)[-1]])
    return absmax * best / total


def _xlogx(values: Floats) -> Floats:
    result: Floats = values * np.log(np.where(values > 0, values, 1.0))
    return result

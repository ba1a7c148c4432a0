"""From statistics to a range: the largest magnitude that int8 should represent.

All methods are symmetric (zero point 0): they choose ``amax``, and the scale is ``amax / 127``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from calibration.statistics import MIN_TOP, Floats, Histogram, TensorStatistics, rounding
from qdqtool.errors import brief

METHODS = ("max", "percentile", "mse", "entropy", "focus")
INT8_LEVELS = 127
FOCUS_WEIGHT = 0.9  # of the error where the network looks, against that of all values
# Shares of a tensor that lie where the network looks, and the powers of the error there; see focus_power.
_DENSE, _SPARSE = (0.18, 2.0), (0.06, 3.0)
# Steps, as parts of the depth of the negative side, between which the power falls to 2; see settle.
_SHALLOW = (0.5, 1.0)
# Of the square of the biased error's share, against the error looked for as part of its least; see unbiased.
BIASED_WEIGHT = 20.0
_NEAR = np.exp2(
    np.arange(2, -25, -1) / 12.0
)  # ranges that are tried for it, as parts of the one found
_SAME = 2  # the place of 1 among them

SEARCH_BITS = 7  # bins to an octave while searching: 128, each at most 0.8 % of its value wide
_SEARCH_OCTAVES = 12  # ranges down to 1/4096 of the maximum are tried
_COARSE_STEPS = 8  # per octave
_FINE_STEPS = 8  # between two coarse steps
_ENTROPY_BINS = 2048
_ENTROPY_LEVELS = 128


class Range(NamedTuple):
    """A range, and the power of the error that it has least of; None for methods without one.

    Attributes:
        amax: In units of the tensor, above zero.
        power: From 2 to 3.
    """

    amax: float
    power: float | None


def amax_of(stats: TensorStatistics, method: str, percentile: float = 99.99) -> float:
    """The range that a method chooses; see :func:`range_of`."""
    return range_of(stats, method, percentile).amax


def range_of(stats: TensorStatistics, method: str, percentile: float = 99.99) -> Range:
    """The range that a method chooses, and how.

    Args:
        stats: Of one tensor, or merged over tensors that share a scale.
        method: One of METHODS. ``max``: the largest magnitude. ``percentile``: the magnitude that ``percentile`` per
            cent of the magnitudes do not exceed (the largest where that is zero). ``mse``: the range with the least
            expected squared error. ``entropy``: the range with the least KL divergence between the histogram and its
            128-level version, searched over 2048 bins as TensorRT's entropy calibrator does. ``focus``: the range with
            the least :func:`focused_error` to the power that :func:`settle` chooses, moved to where flat areas are
            rounded well; but for that the same as ``mse`` where it is not known where the network looks.
        percentile: From above 0 to 100.

    Returns:
        amax > 0, in units of the tensor, and the power. A tensor that is always zero gets 1.0: any range is exact.

    Raises:
        ValueError: Unknown method, or a percentile outside its range.
    """
    if method not in METHODS:
        raise ValueError(brief(f"method '{method}' is unknown; use one of {', '.join(METHODS)}"))
    if not 0.0 < percentile <= 100.0:
        raise ValueError(f"percentile is {percentile:g}; it must be above 0 and at most 100")
    absmax = stats.absmax
    if absmax < math.ldexp(
        1.0, MIN_TOP
    ):  # nothing but zeros, or values that no float32 scale could resolve
        return Range(1.0, None)
    power: float | None = None
    if method == "percentile":
        amax = _percentile(stats, percentile)
    elif method in ("mse", "focus"):
        amax, power = _least_error(stats, focused=method == "focus")
    elif method == "entropy":
        amax = least_divergence(stats.linear(_ENTROPY_BINS).counts, absmax)
    else:
        amax = absmax
    return Range(min(amax, absmax), power)


def _percentile(stats: TensorStatistics, percentile: float) -> float:
    """Linear between the edges of the bin in which the wanted value lies; the maximum where that value is zero.

    A tensor that is zero but for a few values (sparse activations) would otherwise lose all of them.
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
    """Expected squared error of one element, rounding and clipping together.

    Args:
        stats: The tensor.
        amax: Range or ranges [n], above zero, in units of the tensor.
        levels: Positive integer levels; the scale is ``amax / levels``.

    Returns:
        In squared units of the tensor, a float or float64 [n]; 0 for a tensor without finite values.

    Raises:
        ValueError: A range is not above zero.
    """
    ranges = _ranges(amax)
    if stats.count:
        errors = _errors(stats.histogram, ranges, levels) / stats.count
    else:
        errors = np.zeros(len(ranges))
    return errors if isinstance(amax, np.ndarray) and amax.ndim else float(errors[0])


def _ranges(amax: float | npt.NDArray[np.float64]) -> Floats:
    """Ranges [n].

    Raises:
        ValueError: One is not above zero.
    """
    ranges: Floats = np.atleast_1d(np.asarray(amax, np.float64))
    if not (ranges > 0).all():
        raise ValueError("amax must be above zero")
    return ranges


def focus_power(parts: Sequence[TensorStatistics]) -> float:
    """The power of the error that the method ``focus`` sums, for tensors that share a range: from 2 to 3.

    Where objects fill much of the map, as text does on a page, their values are well known and the squared error is the
    right measure. Where they are rare, as people in photographs, the calibration data holds few of them; those to come
    differ more from what was seen, and a higher power keeps what the rare values reach. 2 where it is not known where
    the network looks.
    """
    shares = [
        p.focus.count / p.count for p in parts if p.focus is not None and p.focus.count and p.count
    ]
    if len(shares) < len(parts) or not shares:
        return 2.0
    at = (sum(shares) / len(shares) - _SPARSE[0]) / (_DENSE[0] - _SPARSE[0])
    return _SPARSE[1] + min(max(at, 0.0), 1.0) * (_DENSE[1] - _SPARSE[1])


def settle(
    parts: Sequence[TensorStatistics],
    search: Callable[[float], float],
    error: Callable[[Floats, float], Floats],
) -> Range:
    """The range of the method ``focus``, by a search of the range with the least error to a power.

    The power is :func:`focus_power`, lowered to 2 where the step of the range found comes to the depth of the negative
    side. SiLU and its like end at a small negative value (-0.28), and many of their values lie between there and zero.
    A step of half that depth still distinguishes them; one of the whole depth makes them one of two levels. The errors
    are then the same over flat areas, the layers behind do not average them out, and a shorter step brings more than a
    longer range. Such tensors are the first of a network, with large values: edges and colours, whatever the objects.

    Last, the range may move a little for the sake of flat areas: see :func:`unbiased`.
    """
    power = focus_power(parts)
    amax = search(power)
    depth = max(-p.minimum for p in parts)  # minus infinity where nothing was counted
    if depth > 0.0 and power > 2.0:
        at = (amax / INT8_LEVELS / depth - _SHALLOW[0]) / (_SHALLOW[1] - _SHALLOW[0])
        if at > 0.0:
            power += min(at, 1.0) * (2.0 - power)
            amax = search(power)
    return Range(unbiased(parts, amax, lambda ranges: error(ranges, power)), power)


def unbiased(
    parts: Sequence[TensorStatistics], amax: float, error: Callable[[Floats], Floats]
) -> float:
    """A range near the one with the least error, with little biased error where an image is flat.

    Noise is averaged out by the layers behind, an error that is the same all over an image is not, and in drawings on
    white paper it was nine tenths of the squared error of the first layers: see :mod:`calibration.statistics`. A range
    of 0.7 times the length, with four times the squared error where the network looks, more than halved the error of
    the class outputs there. In photographs it is a tenth and decides nothing: its share counts squared. Tensors without
    ``spots`` have no say.

    Returns:
        The range with the least sum of the error, as a part of that at ``amax``, and :data:`BIASED_WEIGHT` times the
        square of the biased error, as a part of the squared error at ``amax`` (the mean of the parts).
    """
    ranges = np.minimum(amax * _NEAR, max(p.absmax for p in parts))
    known = [
        (p.spots, *rounding(p.spots, ranges[_SAME : _SAME + 1], INT8_LEVELS))
        for p in parts
        if p.spots
    ]
    known = [(spots, biased, whole) for spots, biased, whole in known if whole[0] > 0.0]
    if not known:
        return amax
    costs = error(ranges)
    if not costs[_SAME] > 0.0:
        return amax
    costs /= costs[_SAME]
    here = (
        1.0
        + BIASED_WEIGHT * float(np.mean([biased[0] / whole[0] for _, biased, whole in known])) ** 2
    )
    ranges, costs = (
        ranges[costs <= here],
        costs[costs <= here],
    )  # where the error alone is more, the sum is
    shares = [rounding(spots, ranges, INT8_LEVELS)[0] / whole[0] for spots, _, whole in known]
    return float(ranges[int(np.argmin(costs + BIASED_WEIGHT * np.mean(shares, axis=0) ** 2))])


def focused_error(
    stats: TensorStatistics,
    amax: npt.NDArray[np.float64],
    power: float = 2.0,
    bits: int | None = None,
) -> Floats:
    """Expected magnitude of an element's error, to a power, the values where the network looks weighing more.

    Args:
        stats: The tensor.
        amax: Ranges [n], above zero, in units of the tensor.
        power: From 1.
        bits: At most ``2**bits`` bins to an octave, which is quicker: :data:`SEARCH_BITS` is enough for a search.

    Returns:
        float64 [n]: :data:`FOCUS_WEIGHT` of the mean where the network looks, the rest of the mean over all values;
        where it is not known where the network looks, the latter alone.

    Raises:
        ValueError: A range is not above zero, or the power below 1.
    """
    if power < 1:
        raise ValueError(f"power is {power:g}; it must be at least 1")
    return _total(_weighted(stats, bits), _ranges(amax), power)


def _weighted(stats: TensorStatistics, bits: int | None) -> list[tuple[Histogram, float]]:
    """Histograms and the factors that turn sums over them into the weighted mean; ``bits`` makes them coarser."""

    def histogram(part: TensorStatistics) -> Histogram:
        return part.histogram if bits is None else part.coarse(bits)

    if not stats.count:
        return []
    focus = stats.focus
    if focus is None or not focus.count:
        return [(histogram(stats), 1.0 / stats.count)]
    everywhere = histogram(stats)
    looked_at = everywhere if focus.counter is stats.counter else histogram(focus)
    return [
        (everywhere, (1.0 - FOCUS_WEIGHT) / stats.count),
        (looked_at, FOCUS_WEIGHT / focus.count),
    ]


def clipped_fraction(stats: TensorStatistics, amax: float) -> float:
    """The share of values whose magnitude is beyond a range, from 0 to 1; exact to within one bin."""
    if not stats.count or amax >= stats.absmax:
        return 0.0
    histogram = stats.histogram
    cumulative = np.concatenate([[0], np.cumsum(histogram.counts)])
    return 1.0 - float(np.interp(amax, histogram.edges, cumulative)) / stats.count


def _errors(histogram: Histogram, ranges: Floats, levels: int, power: float = 2.0) -> Floats:
    """Summed error, to a power, for each range, with the values of a bin spread evenly over it.

    With scale s and power p, the integral of the error from 0 to t is ``k 2 (s/2)^q / q + sign(r) |r|^q / q`` where
    ``q = p + 1``, ``k = min(round(t / s), levels)`` and ``r = t - k s``: each level passed has cost ``2 (s/2)^q / q``,
    and beyond the last level the rest is the clipping error. A bin's mean is a difference of two such integrals.
    The lowest bin is left out: its values are zeros, or too small to matter.
    """
    filled = np.flatnonzero(histogram.counts[1:])
    if not len(filled):
        return np.zeros(len(ranges))
    first = int(filled[0]) + 1
    edges = histogram.edges[first:]
    per_width = histogram.counts[first:] / np.diff(edges)
    result = np.empty(len(ranges))
    for start in range(0, len(ranges), 16):  # 16 ranges at a time stay in the cache
        scales = ranges[start : start + 16, None] / levels
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
        result[start : start + 16] = np.diff(integral, axis=1) @ per_width
    return result


def _least_error(stats: TensorStatistics, focused: bool) -> Range:
    """The range of least mean squared error; ``focused`` takes :func:`focused_error` instead."""
    if focused:
        weighted = _weighted(stats, SEARCH_BITS)
        return settle(
            [stats],
            lambda power: _search(weighted, stats.absmax, power),
            lambda ranges, power: _total(weighted, ranges, power),
        )
    return Range(_search([(stats.coarse(SEARCH_BITS), 1.0)], stats.absmax, 2.0), 2.0)


def _search(parts: list[tuple[Histogram, float]], absmax: float, power: float) -> float:
    """The range of least error: coarse steps down from the largest magnitude, then fine ones around the best."""
    steps = np.arange(_SEARCH_OCTAVES * _COARSE_STEPS + 1) / _COARSE_STEPS
    best = _best_falling(parts, absmax * np.exp2(-steps), power)
    around = np.arange(-_FINE_STEPS, _FINE_STEPS + 1) / (_FINE_STEPS * _COARSE_STEPS)
    ranges = np.minimum(best * np.exp2(-around), absmax)
    return float(
        ranges[int(np.argmin(_total(parts, ranges, power)))]
    )  # of equals the first, which is the largest


def _best_falling(parts: list[tuple[Histogram, float]], ranges: Floats, power: float) -> float:
    """The range of least error among ranges that fall, an octave at a time; of equals the first.

    What a range clips, every shorter one clips more: they need not be tried once that alone costs more than the best.
    """
    best, least = float(ranges[0]), math.inf
    for start in range(0, len(ranges), _COARSE_STEPS):
        octave = ranges[start : start + _COARSE_STEPS]
        errors = _total(parts, octave, power)
        at = int(np.argmin(errors))
        if errors[at] < least:
            best, least = float(octave[at]), float(errors[at])
        if clipping_error(parts, float(octave[-1]), power) > least * (
            1.0 + 1e-6
        ):  # beyond what rounding could turn
            break
    return best


def clipping_error(parts: list[tuple[Histogram, float]], amax: float, power: float) -> float:
    """Return a lower bound of the error of clipping at a range: all values of a bin lie at its lower edge."""
    beyond = [
        (np.maximum(h.edges[:-1] - amax, 0.0) ** power) @ h.counts * weight for h, weight in parts
    ]
    return float(sum(beyond))


def _total(parts: list[tuple[Histogram, float]], ranges: Floats, power: float) -> Floats:
    """The error summed over weighted histograms."""
    total, errors, of = np.zeros(len(ranges)), np.empty(0), None
    for histogram, weight in parts:
        if histogram is not of:  # it is the same where the network looks at everything
            errors, of = _errors(histogram, ranges, INT8_LEVELS, power), histogram
        total += weight * errors
    return total


def least_divergence(bins: Floats, absmax: float) -> float:
    """Return the range of least KL divergence, as TensorRT's entropy calibrator searches for it.

    The search goes over every number of kept bins from 128 to all.

    Args:
        bins: Counts in equal bins from 0 to the largest magnitude.
        absmax: The largest magnitude, in units of the tensor.

    For i kept bins, P is their counts with everything beyond added to the last; Q is the counts joined into 128
    levels, each level's sum spread evenly over those of its bins that are not empty. Both are normalised. As Q is
    constant within a level, the divergence needs only sums over levels, which running sums give for all i at once.
    """
    counts = bins.copy()
    counts[0] = counts[
        1
    ]  # as pytorch-quantization does: the many zeros cost nothing and would decide everything
    total = len(counts)
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    entropies = np.cumsum(_xlogx(counts))
    kept = np.arange(_ENTROPY_LEVELS, total + 1)
    beyond = sums[-1] - sums[kept]
    last = counts[kept - 1]
    bounds = np.arange(_ENTROPY_LEVELS + 1) * kept[:, None] // _ENTROPY_LEVELS  # [i, level edge]
    level_sums = np.diff(sums[bounds], axis=1)
    level_filled = np.diff(filled[bounds], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(level_sums > 0, np.log(level_sums / level_filled), 0.0)
        cross = (level_sums * logs).sum(axis=1) + beyond * logs[:, -1]
        p_entropy = entropies[kept - 1] - _xlogx(last) + _xlogx(last + beyond)
        p_total = sums[-1]
        divergence = (p_entropy - cross) / p_total - np.log(p_total) + np.log(sums[kept])
    # Counts beyond the range that meet an empty last bin: Q has nothing there and the divergence is infinite.
    divergence[(beyond > 0) & (last <= 0)] = np.inf
    divergence[~np.isfinite(divergence)] = np.inf
    if not np.isfinite(divergence).any():
        return absmax
    smallest = divergence.min()
    best = int(kept[np.flatnonzero(divergence <= smallest + 1e-15)[-1]])
    return absmax * best / total


def _xlogx(values: Floats) -> Floats:
    result: Floats = values * np.log(np.where(values > 0, values, 1.0))
    return result

"""Statistics of a tensor: extremes, a histogram, and values at a few positions.

The histogram counts magnitudes. It needs no range in advance. The bin of a float32 value consists
of the exponent and the leading mantissa bits, so computing a bin number costs one integer
subtraction and one shift. Each octave (power of two) has ``bins // 2`` bins of equal width. The
histogram covers ``OCTAVES`` octaves below the largest magnitude. One lowest bin counts all smaller
values, including zeros. Consequences:

* No bin is wider than ``2 / bins`` of the largest magnitude, and bins get narrower towards zero.
* When a larger value arrives, the window of octaves moves up, and the counts of the bins that leave
  the window are added to the lowest bin.
* The counts depend only on the set of values. Adding and merging are therefore exact, associative
  and commutative.

For large activations and many images, only evenly spread values are counted
(:func:`sampling_step`), each with the number of values that it represents as weight.

*Spots* are the values of all channels at a few positions of a few images. They show biased errors,
which a histogram of all channels together does not show. Rounding errors usually act as noise: they
are zero on average and independent between positions, so later layers average them out. In a flat
area (paper, sky, a wall), a channel has nearly the same value at every position, and every position
has the same rounding error. The mean error of the channel then reaches the outputs. Nagel et al.
(2019) call this a biased error. The scale decides in which direction a value is rounded, and a
slightly smaller range may have a small error in most channels.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from qdqtool.errors import DataError
from qdqtool.util.text import brief_repr

Counts = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

OCTAVES = 20  # values below 2**-20 of the maximum are far below half a step of any INT8 scale
MIN_TOP = OCTAVES - 126  # the window starts at 2**-126, the smallest normal float32
# Number of values that are counted in one step. Smaller steps would fit a core's caches better, but
# at every step a thread waits for Python's global lock: with half as many values, two threads take
# 20 % more processor time; with a quarter, 33 % more.
_CHUNK = 1 << 17
_ABS_MASK = np.array(0x7FFFFFFF, np.uint32)  # numpy would convert a plain number at every step
DEFAULT_BINS = 2048
_MAX_BITS = 15  # mantissa bits of 65536 bins
_MAX_LINEAR_BINS = 1_000_000


class Histogram(NamedTuple):
    """Counts of magnitudes.

    Attributes:
        counts: int64 [bins]; float64 in the result of :meth:`TensorStatistics.linear`.
        edges: float64 [bins + 1], ascending, in units of the tensor; the first edge is 0 or above.
    """

    counts: npt.NDArray[Any]
    edges: Floats


def mantissa_bits(bins: int) -> int:
    """Return how many mantissa bits a bin number contains at a given resolution.

    Args:
        bins: Resolution, a power of two from 4 to 65536: no bin is wider than ``2 / bins`` of the
            largest magnitude.

    Raises:
        DataError: `bins` is not a power of two from 4 to 65536.
    """
    if bins < 4 or bins > 65536 or bins & (bins - 1):
        raise DataError(
            f"`bins` is {brief_repr(bins)}; it must be a power of two from 4 to 65536",
            code="out-of-range",
            parameter="bins",
        )
    return bins.bit_length() - 2


def histogram_bytes(tensors: int, bins: int) -> int:
    """Return how many bytes the histograms of a number of tensors need."""
    return tensors * MagnitudeCounter(mantissa_bits(bins)).counts.nbytes


def top_exponent(magnitude: float) -> int:
    """Return the smallest exponent e with ``magnitude < 2**e``, at least MIN_TOP."""
    return max(math.frexp(magnitude)[1], MIN_TOP) if magnitude else MIN_TOP  # frexp(0) is (0, 0)


class MagnitudeCounter:
    """Histogram of magnitudes: bins in a window of octaves, and one bin for smaller values.

    The window is ``[2**(top - OCTAVES), 2**top)``.

    Attributes:
        bits: Number of leading mantissa bits in a bin number.
        top: Exponent of the window's upper end.
        counts: int64 [1 + OCTAVES * 2**bits]; the first bin counts all values below the window.
    """

    __slots__ = ("bits", "counts", "top")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.top = MIN_TOP
        self.counts: Counts = np.zeros(1 + (OCTAVES << bits), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the used bins, in the smallest integer type: a few kB instead of 160 kB."""
        filled = np.flatnonzero(self.counts[1:])
        first, last = (int(filled[0]) + 1, int(filled[-1]) + 2) if len(filled) else (1, 1)
        window = self.counts[first:last]
        small = window.astype(np.min_scalar_type(int(window.max(initial=0))))
        return _restore_counter, (self.bits, self.top, int(self.counts[0]), first, small)

    def raise_top(self, top: int) -> None:
        """Move the window up so that it ends at ``2**top``; a lower `top` changes nothing."""
        if top <= self.top:
            return
        shift = min(top - self.top, OCTAVES) << self.bits
        # The array is changed in place: new arrays for thousands of tensors would fragment memory.
        counts = self.counts
        lowest = counts[: 1 + shift].sum()
        counts[1 : len(counts) - shift] = counts[1 + shift :]
        counts[len(counts) - shift :] = 0
        counts[0] = lowest
        self.top = top

    def add(
        self,
        values: npt.NDArray[np.float32],
        scratch: ScratchBuffers | None = None,
        second: MagnitudeCounter | None = None,
        every: int = 1,
        extremes: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Count finite values whose magnitudes are all below ``2**top``.

        Args:
            values: float32 [n], contiguous.
            scratch: Buffers to work in, see :func:`allocate_scratch`.
            second: Another counter of the same `bits` that counts the values too. If both counters
                have the same `top`, the bins are computed only once. If `second` is this counter
                itself, the values are counted once.
            every: Only every n-th value is counted, with weight n.
            extremes: Smallest and largest value. If `every` is above 1, they replace two of the
                counted values.
        """
        if second is self:
            second = None
        if second is not None and second.top != self.top:
            second.add(values, scratch, None, every, extremes)
            second = None
        buffers = allocate_scratch() if scratch is None else scratch
        counts = self.counts
        if second is not None:
            counts = buffers.counts[: len(counts)]
            counts.fill(0)
        if 1 < every < len(values):
            sampled = (len(values) - 2) // every * every
            rest = values[sampled:].copy()
            rest[:2] = extremes
            self._add_to_bins(values[:sampled:every], every, counts, buffers)
            self._add_to_bins(rest, 1, counts, buffers)
        else:
            self._add_to_bins(values, 1, counts, buffers)
        if second is not None:
            self.counts += counts
            second.counts += counts

    def _add_to_bins(
        self,
        values: npt.NDArray[np.float32],
        weight: int,
        counts: Counts,
        buffers: ScratchBuffers,
    ) -> None:
        shift, lowest = _bin_mapping(self.bits, self.top)
        patterns = values.view(np.uint32)
        for start in range(0, len(patterns), _CHUNK):
            chunk = patterns[start : start + _CHUNK]
            work, bins = buffers.patterns[: len(chunk)], buffers.bins[: len(chunk)]
            np.bitwise_and(chunk, _ABS_MASK, out=work)
            work.clip(lowest, _ABS_MASK, out=work)  # maximum() with a number is three times as slow
            np.subtract(work, lowest, out=work)
            np.right_shift(work, shift, out=work)
            bins[:] = work
            np.add.at(counts, bins, weight)  # bincount would read `bins` twice, and allocate

    def merge(self, other: MagnitudeCounter) -> MagnitudeCounter:
        """Return a counter with the counts of both counters. Their order does not matter."""
        result = MagnitudeCounter(self.bits)
        result.raise_top(max(self.top, other.top))
        for part in (self, other):
            result.add_counts(part.top, int(part.counts[0]), 1, part.counts[1:])
        return result

    def add_counts(self, top: int, lowest: int, first: int, counts: npt.NDArray[Any]) -> None:
        """Add the counts of another counter of the same `bits`.

        Args:
            top: Exponent of the upper end of the other counter's window.
            lowest: Count of the other counter's lowest bin.
            first: Number of the bin of `counts[0]` in the other counter, at least 1.
            counts: Consecutive counts of the other counter, without the lowest bin.
        """
        self.raise_top(top)
        shift = min(self.top - top, OCTAVES) << self.bits
        below = min(max(0, shift + 1 - first), len(counts))  # number of bins below this window
        start = max(first - shift, 1)
        self.counts[0] += lowest + int(counts[:below].sum(dtype=np.int64))
        self.counts[start : start + len(counts) - below] += counts[below:].astype(
            np.int64, copy=False
        )

    def histogram(self, absmax: float, bits: int | None = None) -> Histogram:
        """Return the bins from zero to the last nonempty bin.

        Args:
            absmax: Largest magnitude, which becomes the upper edge of the last bin.
            bits: Joins bins until a bin number has at most this number of mantissa bits.
        """
        bits = self.bits if bits is None else min(bits, self.bits)
        counts = self.counts
        if bits < self.bits:
            coarse = counts[1:].reshape(-1, 1 << (self.bits - bits)).sum(axis=1)
            counts = np.concatenate([counts[:1], coarse])
        filled = np.flatnonzero(counts)
        last = int(filled[-1]) + 1 if len(filled) else 1
        edges = np.empty(last + 1)
        edges[0] = 0.0
        edges[1:] = _unit_edges(bits)[:last] * math.ldexp(1.0, self.top - OCTAVES)
        if last > 1:
            edges[-1] = min(edges[-1], max(absmax, edges[-2] * (1 + 2**-20)))
        return Histogram(counts[:last], edges)


def _restore_counter(
    bits: int, top: int, lowest: int, first: int, counts: npt.NDArray[Any]
) -> MagnitudeCounter:
    result = MagnitudeCounter(bits)
    result.add_counts(top, lowest, first, counts)
    return result


class ScratchBuffers(NamedTuple):
    """Work buffers for :meth:`MagnitudeCounter.add`."""

    patterns: npt.NDArray[np.uint32]
    bins: npt.NDArray[np.intp]
    counts: Counts


def allocate_scratch() -> ScratchBuffers:
    """Allocate work buffers for :meth:`MagnitudeCounter.add`; one set per thread."""
    # The array is large enough for every counter. Unused pages take no memory.
    counts = np.empty(1 + (OCTAVES << _MAX_BITS), np.int64)
    return ScratchBuffers(np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.intp), counts)


@functools.lru_cache(maxsize=1024)
def _bin_mapping(bits: int, top: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the shift and the offset that map a float32 bit pattern to a bin number.

    The bin number is ``(max(pattern, offset) - offset) >> shift``. The offset is one bin below the
    window, so all smaller values are in bin 0.
    """
    shift = 23 - bits
    lowest = ((top - OCTAVES + 127) << 23) - (1 << shift)
    return np.array(shift, np.uint32), np.array(lowest, np.uint32)


@functools.lru_cache(maxsize=8)
def _unit_edges(bits: int) -> Floats:
    """Return the edges of all bins of a window that starts at 1, ascending, read-only."""
    index = np.arange((OCTAVES << bits) + 1)
    edges: Floats = np.ldexp(1.0 + (index & ((1 << bits) - 1)) / (1 << bits), index >> bits)
    edges.setflags(write=False)
    return edges


# Sampling of values -------------------------------------------------------------------------------

# Approximate number of values of an activation that are counted in each sample, and in all samples.
_SAMPLE_VALUES = 1 << 16
_ALL_VALUES = 1 << 22


def sampling_step(shape: Sequence[int], samples: int | None) -> int:
    """Return a step n: every n-th value of an activation is enough to choose its range.

    docs/calibration-methods.md compares the resulting ranges with those from all values.

    Args:
        shape: Shape of the activation in one sample.
        samples: Number of samples; None if unknown, which gives 1.
    """
    size = math.prod(shape)
    if samples is None or size < 2 * _SAMPLE_VALUES or size * samples < 2 * _ALL_VALUES:
        return 1
    largest = min(size // _SAMPLE_VALUES, size * samples // _ALL_VALUES)
    # A step that shares a factor with the width or height would skip whole columns or rows.
    for step in itertools.chain(range(largest, largest // 2, -1), itertools.count(largest)):
        if math.gcd(step, size) == 1:
            return step
    raise AssertionError


# Spots: every channel at a few positions ----------------------------------------------------------

Spots = npt.NDArray[np.float32]

IMAGES = 16  # number of samples whose spots (values at a few positions) are recorded
POSITIONS = 48  # number of recorded positions of a map; smaller maps have no spots
CHANNELS = 48  # maximum number of recorded channels of a map
_STACKED_VALUES = 1 << 16  # maximum number of values whose errors are computed in one step
_GOLDEN = 0.6180339887498949  # multiples of the golden ratio modulo 1 are evenly spread


def spot_sample_numbers(samples: int | None) -> frozenset[int]:
    """Return the numbers of the 16 samples whose spots are recorded, evenly spread.

    Spots are the values of an activation at a few positions (see :func:`find_spots`). If the number
    of samples is unknown, the spots of the first 16 samples are recorded.
    """
    if samples is None or samples <= IMAGES:
        return frozenset(range(IMAGES))
    return frozenset((i * samples) // IMAGES for i in range(IMAGES))


def find_spots(array: npt.NDArray[Any], number: int) -> Spots | None:
    """Return the values of an activation [n, c, h, w] at a few positions of the first image.

    Args:
        array: Activation of one sample.
        number: Number of the sample. Equal numbers and shapes give equal positions and channels.

    Returns:
        float32 [positions, channels]. None if the activation is empty, does not have four
        dimensions, has fewer than 48 positions, or has a value that is not finite at the chosen
        positions.
    """
    if array.ndim != 4 or not array.shape[0] or not array.shape[1]:
        return None
    channels, size = array.shape[1], array.shape[2] * array.shape[3]
    if size < POSITIONS:
        return None
    positions = ((np.arange(POSITIONS) + number) * _GOLDEN % 1.0 * size).astype(np.intp)
    spot_channels = np.arange(min(channels, CHANNELS)) * channels // min(channels, CHANNELS)
    maps = array[0].reshape(channels, size)
    values: Spots = maps[spot_channels[:, None], positions].T.astype(np.float32)
    return values if np.isfinite(values).all() else None


def rounding_errors(spots: Sequence[Spots], ranges: Floats, levels: int) -> tuple[Floats, Floats]:
    """Return the errors of rounding and clipping to symmetric integers at the spots.

    Args:
        spots: Spots of each image, [positions, channels].
        ranges: Ranges [n], above zero, in units of the tensor.
        levels: Number of positive integer levels.

    Returns:
        The biased error and the total squared error for each range, float64 [n], in squared units
        of the tensor, summed over the channels and averaged over the images. The biased error is
        the square of a channel's mean error over an image, corrected for the noise of the few
        positions (an unbiased estimate), and at least zero.
    """
    biased: list[Floats] = []
    total: list[Floats] = []
    scales = (ranges / levels).astype(np.float32)[:, None, None]
    steps_squared = (ranges / levels) ** 2
    for values in _stack_spots(spots, len(ranges)):
        count = values.shape[2]
        exact = values / scales  # in steps; shape [image, range, position, channel]
        error = np.rint(exact)
        np.maximum(error, -levels, out=error)
        np.minimum(error, levels, out=error)
        error -= exact
        mean = error.sum(axis=2) / count
        square = np.square(error, out=error).sum(axis=(2, 3)) * (steps_squared / count)
        spread = np.square(mean).sum(axis=2) * steps_squared
        total.append(square)
        biased.append(np.maximum(count * spread - square, 0.0) / (count - 1))
    # Rounding would make the sums depend on the order of the images, so the terms are sorted first.
    sums = [np.sort(np.concatenate(errors), axis=0).sum(axis=0) for errors in (biased, total)]
    return sums[0] / len(spots), sums[1] / len(spots)


def _stack_spots(spots: Sequence[Spots], copies: int) -> Iterator[Spots]:
    """Stack consecutive spots of the same shape to [images, 1, positions, channels].

    Args:
        spots: Spots of each image.
        copies: Number of copies of a stack that must fit into the processor's cache together.
    """
    for (positions, channels), group in itertools.groupby(spots, key=np.shape):
        images = list(group)
        count = max(1, _STACKED_VALUES // max(1, copies * positions * channels))
        for start in range(0, len(images), count):
            stack = np.stack([image.T for image in images[start : start + count]])
            yield stack.transpose(0, 2, 1)[:, None]


# Statistics of one tensor -------------------------------------------------------------------------


class TensorStatistics:
    """Statistics of one tensor; adding and merging are exact, associative and commutative.

    Attributes:
        bins: Resolution: no bin is wider than ``2 / bins`` of the largest magnitude.
        count: Number of finite values.
        nonfinite: Number of NaN and infinities, which all other statistics ignore.
        minimum: Smallest finite value; ``inf`` without a finite value.
        maximum: Largest finite value; ``-inf`` without a finite value.
        focus: Statistics of the values in focus, see :mod:`calibration.focus`; None if unknown.
        spots: Values of the channels at a few positions, [positions, channels] for each of a few
            images, in any order; see :mod:`calibration.statistics`.
        channels: float32 [2, c], the smallest and the largest value of each channel of the last
            axis; None if channel ranges were not collected.
    """

    __slots__ = (
        "bins",
        "channels",
        "count",
        "counter",
        "focus",
        "maximum",
        "minimum",
        "nonfinite",
        "spots",
    )

    def __init__(self, bins: int = DEFAULT_BINS) -> None:
        self.bins = operator.index(bins)
        self.count = 0
        self.nonfinite = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self.counter = MagnitudeCounter(mantissa_bits(self.bins))
        self.focus: TensorStatistics | None = None
        self.spots: list[Spots] = []
        self.channels: npt.NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        span = f"from {self.minimum:g} to {self.maximum:g}"
        return f"<{self.count} values {span}, {self.nonfinite} not finite>"

    @property
    def absmax(self) -> float:
        """Largest magnitude; 0 without a finite value."""
        return max(-self.minimum, self.maximum, 0.0) if self.count else 0.0

    @property
    def nonnegative(self) -> bool:
        """Whether there are finite values and none is below zero, as after a ReLU."""
        return self.count > 0 and self.minimum >= 0.0

    @property
    def constant(self) -> bool:
        """Whether there are finite values and all are equal."""
        return self.count > 0 and self.minimum == self.maximum

    @property
    def histogram(self) -> Histogram:
        """Counts and edges of the magnitudes; the first bin starts at 0."""
        return self.counter.histogram(self.absmax)

    def coarse(self, bits: int) -> Histogram:
        """Return the histogram with at most ``2**bits`` bins per octave.

        Raises:
            DataError: `bits` is below 0.
        """
        if bits < 0:
            raise DataError(
                f"`bits` is {bits}; it must be at least 0", code="out-of-range", parameter="bits"
            )
        return self.counter.histogram(self.absmax, bits)

    def linear(self, bins: int = DEFAULT_BINS) -> Histogram:
        """Return the histogram in bins of equal width from 0 to the largest magnitude.

        The values of a bin that has to be split are assumed to be evenly spread, so the counts are
        float64. The values that share a logarithmic bin with the largest magnitude never
        exceed it, so the part of that bin above the largest magnitude is added to the last bin.

        Raises:
            DataError: `bins` is not from 1 to a million.
        """
        if not 1 <= bins <= _MAX_LINEAR_BINS:
            raise DataError(
                f"`bins` is {bins}; it must be from 1 to {_MAX_LINEAR_BINS:,}",
                code="out-of-range",
                parameter="bins",
            )
        counts, log_edges = self.histogram
        cumulative = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
        edges = np.linspace(0.0, self.absmax, bins + 1)
        ends = np.append(edges[:-1], max(self.absmax, log_edges[-1]))
        return Histogram(np.diff(np.interp(ends, log_edges, cumulative)), edges)

    def add(
        self,
        array: npt.NDArray[Any],
        scratch: ScratchBuffers | None = None,
        looked_at: bool = False,
        every: int = 1,
    ) -> None:
        """Add the values of an array of any shape and numeric type.

        Args:
            array: Values, converted to float32.
            scratch: Work buffers of this thread, see
                :func:`calibration.statistics.allocate_scratch`.
            looked_at: Whether all values are in focus. They are then added to `focus` too, in half
                the time of a call of :meth:`add_focus`.
            every: The histogram counts every n-th value with weight n, and the smallest and the
                largest value. All other statistics use all values.
        """
        parts = [self]
        if looked_at:
            parts.append(self._share_focus_counter())
        else:
            self._separate_focus_counter()
        values = np.asarray(array)  # removes the mask of a masked array
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            with np.errstate(over="ignore"):  # values too large for float32 count as infinities
                values = np.ascontiguousarray(array, dtype=np.float32)
        values = values.reshape(-1)
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = values[np.isfinite(values)]
            for part in parts:
                part.nonfinite += values.size - finite.size
            if not finite.size:
                return
            values = finite
            low, high = float(values.min()), float(values.max())
        for part in parts:
            part.count += values.size
            part.minimum = min(part.minimum, low)
            part.maximum = max(part.maximum, high)
            part.counter.raise_top(top_exponent(max(-low, high)))
        self.counter.add(values, scratch, parts[-1].counter, every, (low, high))

    def add_focus(
        self, parts: Iterable[npt.NDArray[Any]], scratch: ScratchBuffers | None = None
    ) -> None:
        """Add values in focus to `focus`. The caller adds all values with :meth:`add` as well."""
        parts = list(parts)  # if the iterable raises, no values have been added
        if self.focus is None:
            self.focus = TensorStatistics(self.bins)
        self._separate_focus_counter()
        for part in parts:
            self.focus.add(part, scratch)

    def _share_focus_counter(self) -> TensorStatistics:
        """Return `focus`, and create it if missing.

        As long as all values are in focus, `focus` shares the counter of all values.
        """
        if self.focus is None:
            self.focus = TensorStatistics(self.bins)
            if not self.count:
                self.focus.counter = self.counter
        return self.focus

    def _separate_focus_counter(self) -> None:
        if self.focus is not None and self.focus.counter is self.counter:
            self.focus.counter = self.counter.merge(MagnitudeCounter(self.counter.bits))

    def add_spots(self, array: npt.NDArray[Any], number: int) -> None:
        """Record the values of an activation at a few positions (see :func:`find_spots`).

        Activations for which :func:`find_spots` returns None are skipped. The caller adds all
        values with :meth:`add` as well.

        Args:
            array: Activation of one sample.
            number: Number of the sample, which determines the positions.
        """
        spots = find_spots(array, number)
        if spots is not None:
            self.spots.append(spots)

    def add_channels(self, array: npt.NDArray[Any]) -> None:
        """Widen the channel ranges to include an array's values; the last axis has the channels.

        An array with a value that is not finite is ignored. The caller adds the values with
        :meth:`add` as well.
        """
        if array.ndim and array.size:
            rows = array.reshape(-1, array.shape[-1])
            ranges = np.stack([rows.min(axis=0), rows.max(axis=0)]).astype(np.float32)
            if np.isfinite(ranges).all():
                self.channels = _merge_channels(self.channels, ranges)

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Return the statistics over the values of both objects together.

        Raises:
            DataError: The statistics have different numbers of bins or channels.
        """
        if self.bins != other.bins:
            raise DataError(
                f"statistics with {self.bins} and {other.bins} bins cannot be merged; "
                "collect them again",
                code="different-bins",
            )
        result = TensorStatistics.__new__(TensorStatistics)
        result.bins = self.bins
        result.count = self.count + other.count
        result.nonfinite = self.nonfinite + other.nonfinite
        result.minimum = min(self.minimum, other.minimum)
        result.maximum = max(self.maximum, other.maximum)
        result.counter = self.counter.merge(other.counter)
        if self.focus is not None and other.focus is not None:
            result.focus = self.focus.merge(other.focus)
            if self.focus.counter is self.counter and other.focus.counter is other.counter:
                result.focus.counter = result.counter
        else:
            focus = self.focus or other.focus
            result.focus = None if focus is None else focus.copy()
        result.spots = self.spots + other.spots
        result.channels = _merge_channels(self.channels, other.channels)
        return result

    def copy(self) -> TensorStatistics:
        """Return an independent copy."""
        return self.merge(TensorStatistics(self.bins))

    @staticmethod
    def of(array: npt.NDArray[Any], bins: int = DEFAULT_BINS) -> TensorStatistics:
        """Return the statistics of one array."""
        result = TensorStatistics(bins)
        result.add(array)
        return result


def _merge_channels(
    first: npt.NDArray[np.float32] | None, second: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.float32] | None:
    """Return the ranges [2, c] that cover both ranges of each channel; None without any range.

    Raises:
        DataError: The numbers of channels differ.
    """
    if first is None or second is None:
        return second if first is None else first
    if first.shape != second.shape:
        raise DataError(
            f"statistics of {first.shape[1]} and {second.shape[1]} channels cannot be merged; "
            "collect them again",
            code="different-channels",
        )
    return np.stack([np.minimum(first[0], second[0]), np.maximum(first[1], second[1])])


def merge_all(parts: Iterable[TensorStatistics]) -> TensorStatistics:
    """Merge the statistics of several tensors, such as tensors that share one scale.

    Raises:
        DataError: `parts` is empty, or the parts differ in bins or channels.
    """
    result = None
    for part in parts:
        result = part if result is None else result.merge(part)
    if result is None:
        raise DataError("no statistics to merge", code="empty")
    return result

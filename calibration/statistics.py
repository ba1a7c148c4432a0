"""Statistics of a tensor: extremes, a histogram, and values at a few positions.

The histogram counts magnitudes. It never loses a count and needs no range in advance. Its bins are
those of the floating-point format: the exponent and the leading mantissa bits of a float32 are its
bin, so that a bin number costs one integer subtraction and one shift. Each octave (power of two)
has ``bins // 2`` bins of equal width. The histogram covers ``OCTAVES`` octaves below the largest
magnitude, and one lowest bin counts everything smaller, zeros included. Consequences:

* no bin is wider than ``2 / bins`` of the largest magnitude, and bins get finer towards zero;
* when a larger value arrives, the window moves up and its lowest bins are added to the lowest bin;
* the counts are a function of the set of values alone, so that adding and merging are exact,
  associative and commutative.

If maps are large and images are many, only evenly spread values are counted
(:func:`sampling_step`), each with the weight of the values that it stands for.

Every channel at a few positions of a few images (*spots*) shows what counts of single values
cannot. Rounding errors pass for noise: zero on average, independent from one position to the next,
so that later layers average them out. Over a flat area (paper, sky, a wall) this does not hold.
There an activation has nearly the same value in a channel everywhere and is rounded the same way
everywhere. The mean error of a channel over the image reaches the outputs undiminished: a biased
error, as Nagel et al. (2019) call it. The scale decides which way a value is rounded, and a
slightly smaller range may round most channels well. A histogram of all channels together does not
show this; the values of every channel at a few positions do.
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

OCTAVES = (
    20  # values below 2**-20 of the maximum are far below half a step of any useful INT8 scale
)
MIN_TOP = OCTAVES - 126  # the window starts at 2**-126, the smallest normal float32
# Values that are counted in one step. Smaller steps would fit a core's caches better, but at every
# step a thread waits for Python's global lock: with half as many values, two threads take a fifth
# more processor time, with a quarter a third more.
_CHUNK = 1 << 17
_ABS_MASK = np.array(0x7FFFFFFF, np.uint32)  # an array: numpy would convert a number at every step
DEFAULT_BINS = 2048
_MAX_BITS = 15  # mantissa bits of 65536 bins
_MAX_LINEAR_BINS = 1_000_000


class Histogram(NamedTuple):
    """Counts of magnitudes.

    Attributes:
        counts: int64 [bins]; fractional (float64) if bins were split.
        edges: float64 [bins + 1], ascending, in units of the tensor; the first edge is 0 or above.
    """

    counts: npt.NDArray[Any]
    edges: Floats


def mantissa_bits(bins: int) -> int:
    """Return the mantissa bits of a resolution: `bins` equal bins from 0 to the maximum.

    Args:
        bins: A power of two from 4 to 65536.

    Raises:
        DataError: `bins` is not such a number.
    """
    if bins < 4 or bins > 65536 or bins & (bins - 1):
        raise DataError(
            f"bins is {brief_repr(bins)}; it must be a power of two from 4 to 65536",
            code="out-of-range",
            parameter="bins",
        )
    return bins.bit_length() - 2


def histogram_bytes(tensors: int, bins: int) -> int:
    """Return the memory of the histograms of some tensors in bytes."""
    return tensors * MagnitudeCounter(mantissa_bits(bins)).counts.nbytes


def top_exponent(magnitude: float) -> int:
    """Return the smallest exponent e with ``magnitude < 2**e``, at least MIN_TOP."""
    return max(math.frexp(magnitude)[1], MIN_TOP) if magnitude else MIN_TOP  # frexp(0) is (0, 0)


class MagnitudeCounter:
    """Counts of magnitudes: bins in a window of octaves, and one bin for smaller values.

    The window is ``[2**(top - OCTAVES), 2**top)``.

    Attributes:
        bits: Leading mantissa bits in a bin number.
        top: Exponent of the window's upper end.
        counts: int64 [1 + OCTAVES * 2**bits]; the first is the lowest bin, from 0 to the window.
    """

    __slots__ = ("bits", "counts", "top")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.top = MIN_TOP
        self.counts: Counts = np.zeros(1 + (OCTAVES << bits), np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the used bins, in the smallest integer type: a few kB instead of 160."""
        filled = np.flatnonzero(self.counts[1:])
        first, last = (int(filled[0]) + 1, int(filled[-1]) + 2) if len(filled) else (1, 1)
        window = self.counts[first:last]
        small = window.astype(np.min_scalar_type(int(window.max(initial=0))))
        return _restore_counter, (self.bits, self.top, int(self.counts[0]), first, small)

    def raise_top(self, top: int) -> None:
        """Move the window up to end at ``2**top``; a lower `top` changes nothing."""
        if top <= self.top:
            return
        shift = min(top - self.top, OCTAVES) << self.bits
        # In place: new arrays for thousands of tensors would fragment the memory.
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
        also: MagnitudeCounter | None = None,
        every: int = 1,
        extremes: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Count finite values whose magnitudes are all below ``2**top``.

        Args:
            values: float32 [n], contiguous.
            scratch: Buffers to work in, see :func:`allocate_scratch`.
            also: Another counter of the same `bits` that gets the values at no additional work, or
                this counter itself.
            every: Distance of the values that are counted; each counts with this weight.
            extremes: Smallest and largest value. If `every` is above 1, they replace two of the
                counted values.
        """
        if also is self:
            also = None
        if also is not None and also.top != self.top:
            also.add(values, scratch, None, every, extremes)
            also = None
        buffers = allocate_scratch() if scratch is None else scratch
        counts = self.counts
        if also is not None:
            counts = buffers.counts[: len(counts)]
            counts.fill(0)
        if 1 < every < len(values):
            sampled = (len(values) - 2) // every * every
            rest = values[sampled:].copy()
            rest[:2] = extremes
            self._count(values[:sampled:every], every, counts, buffers)
            self._count(rest, 1, counts, buffers)
        else:
            self._count(values, 1, counts, buffers)
        if also is not None:
            self.counts += counts
            also.counts += counts

    def _count(
        self,
        values: npt.NDArray[np.float32],
        weight: int,
        counts: Counts,
        buffers: ScratchBuffers,
    ) -> None:
        """Add a weight to the bins of values; existing buffers make it faster."""
        shift, lowest = _window(self.bits, self.top)
        patterns = values.view(np.uint32)
        for start in range(0, len(patterns), _CHUNK):
            chunk = patterns[start : start + _CHUNK]
            work, bins = buffers.patterns[: len(chunk)], buffers.bins[: len(chunk)]
            np.bitwise_and(chunk, _ABS_MASK, out=work)
            work.clip(lowest, _ABS_MASK, out=work)  # maximum() with a number is three times as slow
            np.subtract(work, lowest, out=work)
            np.right_shift(work, shift, out=work)
            bins[:] = work
            np.add.at(counts, bins, weight)  # bincount looks at all first and allocates an array

    def merge(self, other: MagnitudeCounter) -> MagnitudeCounter:
        """Return the counts of both; the result does not depend on the order."""
        result = MagnitudeCounter(self.bits)
        result.raise_top(max(self.top, other.top))
        for part in (self, other):
            result.absorb(part.top, int(part.counts[0]), 1, part.counts[1:])
        return result

    def absorb(self, top: int, lowest: int, first: int, counts: npt.NDArray[Any]) -> None:
        """Add the counts of another counter of the same `bits`.

        Args:
            top: Its `top`.
            lowest: Count of its lowest bin.
            first: Number of its first bin in `counts`, from 1.
            counts: Its other counts.
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
        """Return the bins from zero to the last one that is not empty.

        Args:
            absmax: Largest magnitude, which ends the last bin.
            bits: Mantissa bits of coarser bins.
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
    result.absorb(top, lowest, first, counts)
    return result


class ScratchBuffers(NamedTuple):
    """Work buffers for :meth:`MagnitudeCounter.add`."""

    patterns: npt.NDArray[np.uint32]
    bins: npt.NDArray[np.intp]
    counts: Counts


def allocate_scratch() -> ScratchBuffers:
    """Allocate work buffers for :meth:`MagnitudeCounter.add`; one set per thread."""
    # Large enough for any counter; pages that a counter does not use take no memory.
    counts = np.empty(1 + (OCTAVES << _MAX_BITS), np.int64)
    return ScratchBuffers(np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.intp), counts)


@functools.lru_cache(maxsize=1024)
def _window(bits: int, top: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the shift from a bit pattern to a bin, and the lowest bit pattern.

    The lowest bit pattern is one bin below the first value of the window. Smaller values are raised
    to it.
    """
    shift = 23 - bits
    lowest = ((top - OCTAVES + 127) << 23) - (1 << shift)
    return np.array(shift, np.uint32), np.array(lowest, np.uint32)


@functools.lru_cache(maxsize=8)
def _unit_edges(bits: int) -> Floats:
    """Return the lower edges of the bins of a window from 1, and its upper end."""
    index = np.arange((OCTAVES << bits) + 1)
    edges: Floats = np.ldexp(1.0 + (index & ((1 << bits) - 1)) / (1 << bits), index >> bits)
    edges.setflags(write=False)
    return edges


# Sampling of values -------------------------------------------------------------------------------

_SAMPLE_VALUES = 1 << 16  # approximate number of values that are counted in one sample
_ALL_VALUES = 1 << 22  # approximate number of values that are counted in all samples


def sampling_step(shape: Sequence[int], samples: int | None) -> int:
    """Return the distance of the values of an activation that go into its histogram.

    docs/calibration-methods.md compares the ranges with those from all values.

    Args:
        shape: Shape of the activation in one sample.
        samples: Number of samples; None if unknown, and every value counts.
    """
    size = math.prod(shape)
    if samples is None or size < 2 * _SAMPLE_VALUES or size * samples < 2 * _ALL_VALUES:
        return 1
    largest = min(size // _SAMPLE_VALUES, size * samples // _ALL_VALUES)
    # A step with a factor of the width or height would hit the same columns or rows each time.
    for step in itertools.chain(range(largest, largest // 2, -1), itertools.count(largest)):
        if math.gcd(step, size) == 1:
            return step
    raise AssertionError


# Spots: every channel at a few positions ----------------------------------------------------------

Spots = npt.NDArray[np.float32]

IMAGES = 16  # number of images with spots
POSITIONS = 48  # maximum number of positions in a map
CHANNELS = 48  # maximum number of channels of a map
_STACKED_VALUES = 1 << 16  # values of a few images whose errors are computed in one step
_GOLDEN = 0.6180339887498949  # any number of steps of this part of a whole fills it evenly


def spot_sample_numbers(samples: int | None) -> frozenset[int]:
    """Return the numbers of the samples with spots: evenly spread, or the first if unknown."""
    if samples is None or samples <= IMAGES:
        return frozenset(range(IMAGES))
    return frozenset((i * samples) // IMAGES for i in range(IMAGES))


def find_spots(array: npt.NDArray[Any], number: int) -> Spots | None:
    """Return the values of an activation [n, c, h, w] at a few positions of the first image.

    Args:
        array: Activation of one sample.
        number: Number of the sample. Equal numbers and shapes give equal positions and channels.

    Returns:
        [positions, channels]. None if the activation is not a map, too small, or not finite there.
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
        ranges: [n], above zero, in units of the tensor.
        levels: Positive integer levels.

    Returns:
        Two float64 [n], in squared units of the tensor, summed over the channels, mean over the
        images: the biased error and the total squared error. The biased error is the square of a
        channel's mean error over an image. It is corrected for noise of the few positions (the
        estimate is unbiased) and not below zero.
    """
    biased: list[Floats] = []
    total: list[Floats] = []
    scales = (ranges / levels).astype(np.float32)[:, None, None]
    steps_squared = (ranges / levels) ** 2
    for values in _stack_spots(spots, len(ranges)):
        count = values.shape[2]
        exact = values / scales  # in steps [image, range, position, channel]
        error = np.rint(exact)
        np.maximum(error, -levels, out=error)
        np.minimum(error, levels, out=error)
        error -= exact
        mean = error.sum(axis=2) / count
        square = np.square(error, out=error).sum(axis=(2, 3)) * (steps_squared / count)
        spread = np.square(mean).sum(axis=2) * steps_squared
        total.append(square)
        biased.append(np.maximum(count * spread - square, 0.0) / (count - 1))
    # Sorted, so that the sums do not depend on the order of the images.
    sums = [np.sort(np.concatenate(errors), axis=0).sum(axis=0) for errors in (biased, total)]
    return sums[0] / len(spots), sums[1] / len(spots)


def _stack_spots(spots: Sequence[Spots], copies: int) -> Iterator[Spots]:
    """Yield spots of several images of one shape, [images, 1, positions, channels].

    Args:
        spots: Spots of each image.
        copies: Copies of a stack that have to fit into the processor's cache.
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
        nonfinite: Number of NaN and infinities; they are in no other number here.
        minimum: Smallest finite value, ``inf`` if there is none.
        maximum: Largest finite value, ``-inf`` if there is none.
        focus: Statistics of the values in focus, see :mod:`calibration.focus`; None if unknown.
        spots: Every channel at a few positions of a few images, in any order; see
            :mod:`calibration.statistics`.
        channels: float32 [2, c], the smallest and the largest value of each channel of the last
            axis; None if that axis has no channels, or was not collected.
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
        """Whether no value was below zero, as after a ReLU."""
        return self.count > 0 and self.minimum >= 0.0

    @property
    def constant(self) -> bool:
        """Whether all finite values were the same."""
        return self.count > 0 and self.minimum == self.maximum

    @property
    def histogram(self) -> Histogram:
        """Counts and edges of the magnitudes; the first bin starts at 0."""
        return self.counter.histogram(self.absmax)

    def coarse(self, bits: int) -> Histogram:
        """Return the histogram with at most ``2**bits`` bins to an octave.

        Raises:
            DataError: `bits` is below 0.
        """
        if bits < 0:
            raise DataError(f"`bits={bits}`: is below 0", code="out-of-range", parameter="bits")
        return self.counter.histogram(self.absmax, bits)

    def linear(self, bins: int = DEFAULT_BINS) -> Histogram:
        """Return counts (float64) in equal bins from 0 to the largest magnitude.

        Bins that are split count as evenly filled. The bin of the largest magnitude may end a
        little above it (1.0, white, begins a bin): the last bin has all its values.

        Raises:
            DataError: `bins` is not from 1 to a million.
        """
        if not 1 <= bins <= _MAX_LINEAR_BINS:
            raise DataError(
                f"`bins` is from 1 to {_MAX_LINEAR_BINS:,}: give fewer",
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
        """Add every element of an array of any shape; other types are converted to float32.

        Args:
            array: Values.
            scratch: Work buffers of this thread, see
                :func:`calibration.statistics.allocate_scratch`.
            looked_at: Whether all values are in focus, so that `focus` gets them too: half the work
                of a further call of :meth:`add_focus`.
            every: Distance of the values that go into the histogram, each with this weight, in
                addition to the smallest and the largest. All other numbers are those of all values.
        """
        parts = [self]
        if looked_at:
            parts.append(self._share_focus_counter())
        else:
            self._separate_focus_counter()
        values = np.asarray(array)  # a masked one as well
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            with np.errstate(over="ignore"):  # a float64 beyond float32 is counted as an infinity
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
        """Add values in focus to `focus`; :meth:`add` has to get them as well."""
        parts = list(parts)  # an iterable that raises adds nothing
        if self.focus is None:
            self.focus = TensorStatistics(self.bins)
        self._separate_focus_counter()
        for part in parts:
            self.focus.add(part, scratch)

    def _share_focus_counter(self) -> TensorStatistics:
        """Return `focus`; it shares the counter of all values while all values are in focus."""
        if self.focus is None:
            self.focus = TensorStatistics(self.bins)
            if not self.count:
                self.focus.counter = self.counter
        return self.focus

    def _separate_focus_counter(self) -> None:
        if self.focus is not None and self.focus.counter is self.counter:
            self.focus.counter = self.counter.merge(MagnitudeCounter(self.counter.bits))

    def add_spots(self, array: npt.NDArray[Any], number: int) -> None:
        """Keep values at a few positions of an activation [n, c, h, w], which `add` also gets.

        Args:
            array: Activation of one sample.
            number: Number of the sample.
        """
        spots = find_spots(array, number)
        if spots is not None:
            self.spots.append(spots)

    def add_channels(self, array: npt.NDArray[Any]) -> None:
        """Add the range of each channel of the last axis, unless a value is not finite.

        :meth:`add` has to get the array as well.
        """
        if array.ndim and array.size:
            rows = array.reshape(-1, array.shape[-1])
            ranges = np.stack([rows.min(axis=0), rows.max(axis=0)]).astype(np.float32)
            if np.isfinite(ranges).all():
                self.channels = _merge_channels(self.channels, ranges)

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Return the statistics of the values of both.

        Raises:
            DataError: The two have different numbers of bins.
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
        """Return a copy that does not change when values are added to this one."""
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
    """Merge the ranges of channels, [2, c] or None.

    Raises:
        DataError: The two have different numbers of channels.
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
    """Return the statistics of the values of all parts, for tensors that share one scale.

    Raises:
        DataError: `parts` is empty, or the parts differ in bins.
    """
    result = None
    for part in parts:
        result = part if result is None else result.merge(part)
    if result is None:
        raise DataError("no statistics to merge", code="empty")
    return result

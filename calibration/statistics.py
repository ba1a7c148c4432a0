"""What is remembered of a tensor's values: exact minimum and maximum, a histogram, and values at a few positions.

The histogram is one of magnitudes that never loses a count and never has to be given its range. Its bins are those of
the floating-point format itself: the exponent and the leading mantissa bits of a float32 are its bin, so that a bin
number costs one integer subtraction and one shift. Each octave (power of two) has ``bins // 2`` bins of equal width;
the histogram covers ``OCTAVES`` octaves below the largest magnitude seen, and everything smaller (zeros included) is
counted in one lowest bin. Consequences:

* no bin is wider than ``2 / bins`` of the largest magnitude, and bins get finer towards zero;
* when a larger value arrives, the window moves up and its lowest bins are added to the lowest bin;
* the counts are a function of the set of values alone, so that adding and merging are exact, associative and
  commutative.

Of large maps of many images evenly spread values are counted (:func:`step`), each for as many as it stands for.

Every channel at a few positions of a few images (*spots*) shows what counts of single values cannot. Rounding errors
are taken for noise: zero on average, independent from one position to the next, so that the layers behind average them
out. Over a flat area (paper, sky, a wall) they are nothing of the kind. There an activation has nearly the same value
in a channel everywhere, is rounded the same way everywhere, and the mean error of a channel over the image reaches the
outputs undiminished: a biased error, as Nagel et al. (2019) call it. Which way a value is rounded depends on the scale,
and a slightly smaller range may round most channels well. A histogram of all channels together does not show it; the
values of every channel at a few positions do.
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
from qdqtool.util.said import said
from qdqtool.util.text import brief_repr

Counts = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

OCTAVES = 20  # below 2**-20 of the largest magnitude a value is far under half a step of any useful int8 scale
MIN_TOP = OCTAVES - 126  # the window starts at 2**-126, the smallest normal float32
# Elements per step. The buffers of smaller ones would fit a core's caches better, but at every step threads wait for
# the interpreter: two threads take a fifth more processor time with half of it, a third more with a quarter.
_CHUNK = 1 << 17
_ABS_MASK = np.array(
    0x7FFFFFFF, np.uint32
)  # as an array: numpy makes one of each number, at every step
DEFAULT_BINS = 2048
_MOST_BITS = 15  # of 65536 bins
_MOST_BINS = 1_000_000  # of equal width


class Histogram(NamedTuple):
    """Counts of |x|.

    Attributes:
        counts: int64 [bins]; fractional (float64) where bins were split.
        edges: float64 [bins + 1], ascending, in units of the tensor; the first edge is 0 or above.
    """

    counts: npt.NDArray[Any]
    edges: Floats


def mantissa_bits(bins: int) -> int:
    """Mantissa bits that make ``bins`` (a power of two from 4 to 65536) over the range from 0 to the maximum.

    Raises:
        DataError: ``bins`` is not such a number.
    """
    if bins < 4 or bins > 65536 or bins & (bins - 1):
        raise DataError(
            f"bins is {brief_repr(bins)}; it must be a power of two from 4 to 65536",
            code="out-of-range",
            parameter="bins",
        )
    return bins.bit_length() - 2


def counted_bytes(tensors: int, bins: int) -> int:
    """What the counts of the values of so many tensors take."""
    return tensors * MagnitudeCounter(mantissa_bits(bins)).counts.nbytes


def top_of(magnitude: float) -> int:
    """The exponent e with ``magnitude < 2**e``, as small as possible but at least MIN_TOP."""
    return max(math.frexp(magnitude)[1], MIN_TOP) if magnitude else MIN_TOP  # frexp(0) says 0


class MagnitudeCounter:
    """The counts, and the window they cover: ``[2**(top - OCTAVES), 2**top)`` above the lowest bin.

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
        """Pickled without empty ends, each count in as few bytes as the largest takes: 160 kB become a few."""
        filled = np.flatnonzero(self.counts[1:])
        first, last = (int(filled[0]) + 1, int(filled[-1]) + 2) if len(filled) else (1, 1)
        window = self.counts[first:last]
        small = window.astype(np.min_scalar_type(int(window.max(initial=0))))
        return _unpickled, (self.bits, self.top, int(self.counts[0]), first, small)

    def raise_top(self, top: int) -> None:
        """Moves the window up to end at ``2**top``; a lower ``top`` changes nothing."""
        if top <= self.top:
            return
        shift = min(top - self.top, OCTAVES) << self.bits
        counts = (
            self.counts
        )  # in place: another array for each of thousands of tensors leaves holes of its size
        lowest = counts[: 1 + shift].sum()
        counts[1 : len(counts) - shift] = counts[1 + shift :]
        counts[len(counts) - shift :] = 0
        counts[0] = lowest
        self.top = top

    def add(
        self,
        values: npt.NDArray[np.float32],
        scratch: Scratch | None = None,
        also: MagnitudeCounter | None = None,
        every: int = 1,
        extremes: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Counts finite values, [n], contiguous, whose magnitudes are all below ``2**top``.

        Args:
            values: float32.
            scratch: Buffers to work in, see :func:`scratch_buffer`.
            also: A counter of the same ``bits`` that is to get them as well, with the work done once; maybe this one.
            every: Every which of them is looked at, and counts for so many.
            extremes: The smallest and the largest of them, which are counted then in the place of two others.
        """
        if also is self:
            also = None
        if also is not None and also.top != self.top:
            also.add(values, scratch, None, every, extremes)
            also = None
        shift, lowest = _window(self.bits, self.top)
        buffers = scratch_buffer() if scratch is None else scratch
        counts = self.counts
        if also is not None:
            counts = buffers.counts[: len(counts)]
            counts.fill(0)
        parts = [(values, 1)]
        if 1 < every < len(values):
            sampled = (len(values) - 2) // every * every
            rest = values[sampled:].copy()
            rest[:2] = extremes
            parts = [(values[:sampled:every], every), (rest, 1)]
        for part, weight in parts:
            patterns = part.view(np.uint32)
            for start in range(0, len(patterns), _CHUNK):
                chunk = patterns[start : start + _CHUNK]
                work, bins = buffers.patterns[: len(chunk)], buffers.bins[: len(chunk)]
                np.bitwise_and(chunk, _ABS_MASK, out=work)
                work.clip(
                    lowest, _ABS_MASK, out=work
                )  # maximum() with one number is three times as slow
                np.subtract(work, lowest, out=work)
                np.right_shift(work, shift, out=work)
                bins[:] = work
                np.add.at(
                    counts, bins, weight
                )  # bincount looks at all of them first, and makes an array each time
        if also is not None:
            self.counts += counts
            also.counts += counts

    def merged(self, other: MagnitudeCounter) -> MagnitudeCounter:
        """The counts of both; the result does not depend on the order."""
        result = MagnitudeCounter(self.bits)
        result.raise_top(max(self.top, other.top))
        for part in (self, other):
            result.absorb(part.top, int(part.counts[0]), 1, part.counts[1:])
        return result

    def absorb(self, top: int, lowest: int, first: int, counts: npt.NDArray[Any]) -> None:
        """Adds the counts of another counter of the same ``bits``: its lowest bin, and others from bin ``first`` on."""
        self.raise_top(top)
        shift = min(self.top - top, OCTAVES) << self.bits
        below = min(max(0, shift + 1 - first), len(counts))  # so many of them are below this window
        at = max(first - shift, 1)
        self.counts[0] += lowest + int(counts[:below].sum(dtype=np.int64))
        self.counts[at : at + len(counts) - below] += counts[below:].astype(np.int64, copy=False)

    def histogram(self, absmax: float, bits: int | None = None) -> Histogram:
        """The bins from zero to the last that is not empty, which ``absmax`` ends; maybe coarser ones, of ``bits``."""
        bits = self.bits if bits is None else min(bits, self.bits)
        counts = self.counts
        if bits < self.bits:
            counts = np.concatenate(
                [counts[:1], counts[1:].reshape(-1, 1 << (self.bits - bits)).sum(axis=1)]
            )
        filled = np.flatnonzero(counts)
        last = int(filled[-1]) + 1 if len(filled) else 1
        edges = np.empty(last + 1)
        edges[0] = 0.0
        edges[1:] = _unit_edges(bits)[:last] * math.ldexp(1.0, self.top - OCTAVES)
        if last > 1:
            edges[-1] = min(edges[-1], max(absmax, edges[-2] * (1 + 2**-20)))
        return Histogram(counts[:last], edges)


def _unpickled(
    bits: int, top: int, lowest: int, first: int, counts: npt.NDArray[Any]
) -> MagnitudeCounter:
    result = MagnitudeCounter(bits)
    result.absorb(top, lowest, first, counts)
    return result


class Scratch(NamedTuple):
    """Work buffers for :meth:`MagnitudeCounter.add`."""

    patterns: npt.NDArray[np.uint32]
    bins: npt.NDArray[np.intp]
    counts: Counts


def scratch_buffer() -> Scratch:
    """Work buffers for :meth:`MagnitudeCounter.add`; one set per thread."""
    counts = np.empty(
        1 + (OCTAVES << _MOST_BITS), np.int64
    )  # only as much takes memory as a counter has bins
    return Scratch(np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.intp), counts)


@functools.lru_cache(maxsize=1024)
def _window(bits: int, top: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The shift that leaves a bin of a float32's bit pattern, and the pattern one bin below the window's first value:
    everything smaller is raised to it."""
    shift = 23 - bits
    lowest = ((top - OCTAVES + 127) << 23) - (1 << shift)
    return np.array(shift, np.uint32), np.array(lowest, np.uint32)


@functools.lru_cache(maxsize=8)
def _unit_edges(bits: int) -> Floats:
    """Lower edges of the bins above the lowest, and the upper end, for a window that starts at 1."""
    index = np.arange((OCTAVES << bits) + 1)
    edges: Floats = np.ldexp(1.0 + (index & ((1 << bits) - 1)) / (1 << bits), index >> bits)
    edges.setflags(write=False)
    return edges


# Which values are counted --------------------------------------------------------------------------------------------

_OF_SAMPLE = 1 << 16  # values of a sample that are counted about, where it has as many
_OF_ALL = (
    1 << 22
)  # values of all samples that are counted about: with fewer than twice as many, each counts


def step(shape: Sequence[int], samples: int | None) -> int:
    """Every which value of an activation goes into its histogram, see :meth:`TensorStatistics.add`.

    docs/accuracy.md says what that changes against counting all of them.

    Args:
        shape: Of the activation, of one sample.
        samples: How many there are; None where that is not known, and every value counts.
    """
    size = math.prod(shape)
    if samples is None or size < 2 * _OF_SAMPLE or size * samples < 2 * _OF_ALL:
        return 1
    most = min(size // _OF_SAMPLE, size * samples // _OF_ALL)
    # With a factor in common it would be the same columns of each row, or rows of each map.
    found = next((k for k in range(most, most // 2, -1) if math.gcd(k, size) == 1), None)
    return found or next(k for k in itertools.count(most) if math.gcd(k, size) == 1)


# Every channel at a few positions ------------------------------------------------------------------------------------

Spots = npt.NDArray[np.float32]

IMAGES = 16  # images that are looked at
POSITIONS = 48  # in each map
CHANNELS = 48  # of each map
_AT_ONCE = 1 << 16  # values of a few images whose errors are worked out in one step
_GOLDEN = 0.6180339887498949  # steps of this part of a whole fill it evenly, however many there are


def spotted_samples(samples: int | None) -> frozenset[int]:
    """Numbers of the samples that are looked at: evenly spread; the first where it is not known how many there are."""
    if samples is None or samples <= IMAGES:
        return frozenset(range(IMAGES))
    return frozenset((i * samples) // IMAGES for i in range(IMAGES))


def taken(array: npt.NDArray[Any], number: int) -> Spots | None:
    """Values of an activation [n, c, h, w] of a sample's first image: [positions, channels].

    The same positions and channels for the same number and shape. None where the activation is no map, is too small
    for one, or is not finite there.
    """
    if array.ndim != 4 or not array.shape[0] or not array.shape[1]:
        return None
    channels, size = array.shape[1], array.shape[2] * array.shape[3]
    if size < POSITIONS:
        return None
    at = ((np.arange(POSITIONS) + number) * _GOLDEN % 1.0 * size).astype(np.intp)
    which = np.arange(min(channels, CHANNELS)) * channels // min(channels, CHANNELS)
    values: Spots = array[0].reshape(channels, size)[which[:, None], at].T.astype(np.float32)
    return values if np.isfinite(values).all() else None


def rounding(spots: Sequence[Spots], ranges: Floats, levels: int) -> tuple[Floats, Floats]:
    """Errors of rounding and clipping to symmetric integers, at the positions kept.

    Args:
        spots: Of each image, [positions, channels].
        ranges: [n], above zero, in units of the tensor.
        levels: Positive integer levels.

    Returns:
        Two float64 [n], in squared units of the tensor, summed over the channels, mean over the images: the biased
        error, which is the square of a channel's mean error over an image (without what so few positions make of mere
        noise: the estimate is unbiased, and not below zero), and the whole squared error.
    """
    biased: list[Floats] = []
    whole: list[Floats] = []
    scales = (ranges / levels).astype(np.float32)[:, None, None]
    steps_squared = (ranges / levels) ** 2
    for values in _stacked(spots, len(ranges)):
        count = values.shape[2]
        exact = values / scales  # in steps [image, range, position, channel]
        error = np.rint(exact)
        np.maximum(error, -levels, out=error)
        np.minimum(error, levels, out=error)
        error -= exact
        mean = error.sum(axis=2) / count
        square = np.square(error, out=error).sum(axis=(2, 3)) * (steps_squared / count)
        spread = np.square(mean).sum(axis=2) * steps_squared
        whole.append(square)
        biased.append(np.maximum(count * spread - square, 0.0) / (count - 1))
    # In an order of their own, so that the sums do not depend on which image was counted first.
    sums = [np.sort(np.concatenate(parts), axis=0).sum(axis=0) for parts in (biased, whole)]
    return sums[0] / len(spots), sums[1] / len(spots)


def _stacked(spots: Sequence[Spots], copies: int) -> Iterator[Spots]:
    """[images, 1, positions, channels], of as many images of one shape as so many copies of stay in the cache."""
    for (positions, channels), alike in itertools.groupby(spots, key=np.shape):
        images = list(alike)
        few = max(1, _AT_ONCE // max(1, copies * positions * channels))
        for start in range(0, len(images), few):
            yield np.stack([s.T for s in images[start : start + few]]).transpose(0, 2, 1)[:, None]


# A tensor ------------------------------------------------------------------------------------------------------------


class TensorStatistics:
    """Statistics of one tensor; adding and merging are exact, associative and commutative.

    Attributes:
        bins: Resolution: no bin is wider than ``2 / bins`` of the largest magnitude.
        count: Finite values seen.
        nonfinite: NaN and infinities seen; they are in no other number here.
        minimum: Smallest finite value, ``inf`` while there is none.
        maximum: Largest finite value, ``-inf`` while there is none.
        focus: Statistics of those of the values that lie where the network looks, see :mod:`calibration.focus`; None
            where that is not known.
        spots: Every channel at a few positions of a few images, see :mod:`calibration.statistics`; in any order.
        channels: float32 [2, c], the smallest and the largest value at each place of the last axis; None where that
            holds no channels, or nobody asked.
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
        return f"<{self.count} values from {self.minimum:g} to {self.maximum:g}, {self.nonfinite} not finite>"

    @property
    def absmax(self) -> float:
        """The largest magnitude; 0 while there is no finite value."""
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
        """Counts and edges of |x|, the bins as they were collected; the first bin starts at 0."""
        return self.counter.histogram(self.absmax)

    def coarse(self, bits: int) -> Histogram:
        """As :attr:`histogram`, with at most ``2**bits`` bins to an octave.

        Raises:
            DataError: ``bits`` is below 0.
        """
        if bits < 0:
            raise DataError(
                said("{`bits`:{bits}}: is below 0", bits=bits),
                code="out-of-range",
                parameter="bits",
            )
        return self.counter.histogram(self.absmax, bits)

    def linear(self, bins: int = DEFAULT_BINS) -> Histogram:
        """Counts (float64) in equal bins from 0 to the largest magnitude; bins that are split count as evenly filled.

        A largest magnitude that begins a bin (1.0, white) ends a little above it: what lies there is in the last.

        Raises:
            DataError: ``bins`` is not from 1 to a million.
        """
        if not 1 <= bins <= _MOST_BINS:
            raise DataError(
                said("{`bins`} is from 1 to {most:,}: give fewer", most=_MOST_BINS),
                code="out-of-range",
                parameter="bins",
            )
        counts, found = self.histogram
        cumulative = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
        edges = np.linspace(0.0, self.absmax, bins + 1)
        ends = np.append(edges[:-1], max(self.absmax, found[-1]))
        return Histogram(np.diff(np.interp(ends, found, cumulative)), edges)

    def add(
        self,
        array: npt.NDArray[Any],
        scratch: Scratch | None = None,
        looked_at: bool = False,
        every: int = 1,
    ) -> None:
        """Takes in every element of an array of any shape; other types are converted to float32.

        Args:
            array: The values.
            scratch: Work buffers of this thread, see :func:`calibration.statistics.scratch_buffer`.
            looked_at: Whether the network looks at all of them, so that ``focus`` gets them too; the same as
                :meth:`add_focus` with all of them, at half the work.
            every: Only every so-manieth goes into the histogram, for so many of them; beside them the smallest and the
                largest. All other numbers are those of all elements.
        """
        parts = [self]
        if looked_at:
            if self.focus is None:
                self.focus = TensorStatistics(self.bins)
                if not self.count:
                    self.focus.counter = (
                        self.counter
                    )  # of both, as long as all values are looked at
            parts.append(self.focus)
        else:
            self._part_counters()
        values = np.asarray(array)  # a masked one as well
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            with np.errstate(
                over="ignore"
            ):  # a float64 beyond float32 becomes an infinity and is counted as one
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
            part.counter.raise_top(top_of(max(-low, high)))
        self.counter.add(
            values, scratch, parts[1].counter if looked_at else None, every, (low, high)
        )

    def add_focus(self, parts: Iterable[npt.NDArray[Any]], scratch: Scratch | None = None) -> None:
        """Takes in values that lie where the network looks; :meth:`add` has to get them as well."""
        parts = list(parts)  # none is taken in where a later one cannot be had
        if self.focus is None:
            self.focus = TensorStatistics(self.bins)
        self._part_counters()
        for part in parts:
            self.focus.add(part, scratch)

    def _part_counters(self) -> None:
        """Gives ``focus`` a counter of its own, where it shares one with all values."""
        if self.focus is not None and self.focus.counter is self.counter:
            self.focus.counter = self.counter.merged(MagnitudeCounter(self.counter.bits))

    def add_spots(self, array: npt.NDArray[Any], number: int) -> None:
        """Remembers a few positions of an activation [n, c, h, w]; :meth:`add` has to get it as well."""
        found = taken(array, number)
        if found is not None:
            self.spots.append(found)

    def add_channels(self, array: npt.NDArray[Any]) -> None:
        """Takes in the range of each place of the last axis, unless a value is not finite; :meth:`add` gets it too."""
        if array.ndim and array.size:
            rows = array.reshape(-1, array.shape[-1])
            found = np.stack([rows.min(axis=0), rows.max(axis=0)]).astype(np.float32)
            if np.isfinite(found).all():
                self.channels = _joined(self.channels, found)

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Statistics of the values of both.

        Raises:
            DataError: They were collected with different numbers of bins.
        """
        if self.bins != other.bins:
            raise DataError(
                f"statistics with {self.bins} and {other.bins} bins cannot be merged; collect them again",
                code="different-bins",
            )
        result = TensorStatistics.__new__(TensorStatistics)
        result.bins = self.bins
        result.count = self.count + other.count
        result.nonfinite = self.nonfinite + other.nonfinite
        result.minimum = min(self.minimum, other.minimum)
        result.maximum = max(self.maximum, other.maximum)
        result.counter = self.counter.merged(other.counter)
        one = self.focus or other.focus
        result.focus = None if one is None else one.copy()
        if self.focus is not None and other.focus is not None:
            result.focus = self.focus.merge(other.focus)
            if self.focus.counter is self.counter and other.focus.counter is other.counter:
                result.focus.counter = result.counter
        result.spots = self.spots + other.spots
        result.channels = _joined(self.channels, other.channels)
        return result

    def copy(self) -> TensorStatistics:
        """The same statistics, to be kept while these go on counting."""
        return self.merge(TensorStatistics(self.bins))

    @staticmethod
    def of(array: npt.NDArray[Any], bins: int = DEFAULT_BINS) -> TensorStatistics:
        """Statistics of one array."""
        result = TensorStatistics(bins)
        result.add(array)
        return result


def _joined(
    one: npt.NDArray[np.float32] | None, other: npt.NDArray[np.float32] | None
) -> npt.NDArray[np.float32] | None:
    """The ranges of channels of both.

    Raises:
        DataError: They have different numbers of channels.
    """
    if one is None or other is None:
        return other if one is None else one
    if one.shape != other.shape:
        raise DataError(
            f"statistics of {one.shape[1]} and {other.shape[1]} channels cannot be merged; collect them "
            "again",
            code="different-channels",
        )
    return np.stack([np.minimum(one[0], other[0]), np.maximum(one[1], other[1])])


def merge_all(parts: Iterable[TensorStatistics]) -> TensorStatistics:
    """Statistics of the values of all parts, for tensors that share one scale.

    Raises:
        DataError: There is no part, or they differ in bins.
    """
    result = None
    for part in parts:
        result = part if result is None else result.merge(part)
    if result is None:
        raise DataError("no statistics to merge", code="empty")
    return result

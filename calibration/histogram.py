"""A histogram of magnitudes that never loses a count and never has to be told its range.

The bins are those of the floating-point format itself: the exponent and the leading mantissa bits of a float32 are its
bin, so that a bin number costs one integer subtraction and one shift. Each octave (power of two) has ``bins // 2``
bins of equal width; the histogram covers ``OCTAVES`` octaves below the largest magnitude seen, and everything smaller
(zeros included) is counted in one lowest bin. Consequences:

* no bin is wider than ``2 / bins`` of the largest magnitude, and bins get finer towards zero;
* when a larger value arrives, the window moves up and its lowest bins are added to the lowest bin;
* the counts are a function of the set of values alone, so that adding and merging are exact, associative and
  commutative.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

OCTAVES = 20  # below 2**-20 of the largest magnitude a value is far under half a step of any useful int8 scale
MIN_TOP = OCTAVES - 126  # the window starts at 2**-126, the smallest normal float32
_CHUNK = 1 << 17  # elements per step; the buffers of one step fit a core's second-level cache
_ABS_MASK = np.uint32(0x7FFFFFFF)


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
        ValueError: ``bins`` is not such a number.
    """
    if bins < 4 or bins > 65536 or bins & (bins - 1):
        raise ValueError(f"bins is {bins}; it must be a power of two from 4 to 65536")
    return bins.bit_length() - 2


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
        moved = np.zeros_like(self.counts)
        moved[0] = self.counts[: 1 + shift].sum()
        moved[1 : len(moved) - shift] = self.counts[1 + shift :]
        self.counts = moved
        self.top = top

    def add(
        self, values: npt.NDArray[np.float32], scratch: Scratch | None = None, also: MagnitudeCounter | None = None
    ) -> None:
        """Counts finite values, [n], contiguous, whose magnitudes are all below ``2**top``.

        Args:
            values: float32.
            scratch: Buffers to work in, see :func:`scratch_buffer`.
            also: A counter of the same ``bits`` that is to get them as well, with the work done once.
        """
        if also is not None and also.top != self.top:
            also.add(values, scratch)
            also = None
        shift = np.uint32(23 - self.bits)
        # One bin below the window's first value, in float32 bit patterns: everything smaller is raised to it.
        lowest = np.uint32(((self.top - OCTAVES + 127) << 23) - (1 << int(shift)))
        buffers = scratch_buffer() if scratch is None else scratch
        patterns = values.view(np.uint32)
        for start in range(0, len(patterns), _CHUNK):
            chunk = patterns[start : start + _CHUNK]
            work, bins = buffers.patterns[: len(chunk)], buffers.bins[: len(chunk)]
            np.bitwise_and(chunk, _ABS_MASK, out=work)
            np.maximum(work, lowest, out=work)
            np.subtract(work, lowest, out=work)
            np.right_shift(work, shift, out=work)
            bins[:] = work  # bincount would make such a copy each time
            counted = np.bincount(bins)
            self.counts[: len(counted)] += counted
            if also is not None:
                also.counts[: len(counted)] += counted

    def merged(self, other: MagnitudeCounter) -> MagnitudeCounter:
        """The counts of both; the result does not depend on the order."""
        result = MagnitudeCounter(self.bits)
        result.raise_top(max(self.top, other.top))
        for part in (self, other):
            result.absorb(part.top, int(part.counts[0]), 1, part.counts[1:])
        return result

    def absorb(self, top: int, lowest: int, first: int, counts: npt.NDArray[Any]) -> None:
        """Adds the counts of another counter of the same ``bits``.

        Args:
            top: Its window's upper end.
            lowest: Count of its lowest bin.
            first: Number of the bin, 1 or above, that ``counts`` begin with.
            counts: Its counts from there on, integers [n].
        """
        self.raise_top(top)
        shift = min(self.top - top, OCTAVES) << self.bits
        below = min(max(0, shift + 1 - first), len(counts))  # so many of them are below this window
        at = max(first - shift, 1)
        self.counts[0] += lowest + int(counts[:below].sum(dtype=np.int64))
        self.counts[at : at + len(counts) - below] += counts[below:].astype(np.int64, copy=False)

    def histogram(self, absmax: float, bits: int | None = None) -> Histogram:
        """The bins from zero to the last that is not empty.

        Args:
            absmax: The largest magnitude, which ends the last bin.
            bits: Coarser bins, of that many mantissa bits.
        """
        bits = self.bits if bits is None else min(bits, self.bits)
        counts = self.counts
        if bits < self.bits:
            counts = np.concatenate([counts[:1], counts[1:].reshape(-1, 1 << (self.bits - bits)).sum(axis=1)])
        filled = np.flatnonzero(counts)
        last = int(filled[-1]) + 1 if len(filled) else 1
        edges = np.empty(last + 1)
        edges[0] = 0.0
        edges[1:] = _unit_edges(bits)[:last] * math.ldexp(1.0, self.top - OCTAVES)
        if last > 1:
            edges[-1] = min(edges[-1], max(absmax, edges[-2] * (1 + 2**-20)))
        return Histogram(counts[:last], edges)


def _unpickled(bits: int, top: int, lowest: int, first: int, counts: npt.NDArray[Any]) -> MagnitudeCounter:
    result = MagnitudeCounter(bits)
    result.absorb(top, lowest, first, counts)
    return result


class Scratch(NamedTuple):
    """Work buffers for :meth:`MagnitudeCounter.add`."""

    patterns: npt.NDArray[np.uint32]
    bins: npt.NDArray[np.intp]


def scratch_buffer() -> Scratch:
    """Work buffers for :meth:`MagnitudeCounter.add`; one pair per thread."""
    return Scratch(np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.intp))


@functools.lru_cache(maxsize=8)
def _unit_edges(bits: int) -> Floats:
    """Lower edges of the bins above the lowest, and the upper end, for a window that starts at 1."""
    index = np.arange((OCTAVES << bits) + 1)
    edges: Floats = np.ldexp(1.0 + (index & ((1 << bits) - 1)) / (1 << bits), index >> bits)
    edges.setflags(write=False)
    return edges


def linear(histogram: Histogram, bins: int, top: float) -> Floats:
    """Counts (float64) in ``bins`` equal bins from 0 to ``top``; a bin that is split is taken as evenly filled.

    What lies beyond ``top`` is in the last: a largest magnitude that begins a bin (1.0, white) ends a little above it.
    """
    cumulative = np.concatenate([[0.0], np.cumsum(histogram.counts, dtype=np.float64)])
    ends = np.linspace(0.0, top, bins + 1)
    ends[-1] = max(top, histogram.edges[-1])
    at = np.interp(ends, histogram.edges, cumulative)
    return np.diff(at)

"""What is remembered of a tensor's values: exact minimum and maximum, counts, and a mergeable histogram."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.histogram import Histogram, MagnitudeCounter, Scratch, linear, mantissa_bits, top_of
from calibration.spots import Spots, taken
from qdqtool.errors import DataError

DEFAULT_BINS = 2048


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
        spots: Every channel at a few positions of a few images, see :mod:`calibration.spots`; in any order.
    """

    __slots__ = ("bins", "count", "counter", "focus", "maximum", "minimum", "nonfinite", "spots")

    def __init__(self, bins: int = DEFAULT_BINS) -> None:
        self.bins = bins
        self.count = 0
        self.nonfinite = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self.counter = MagnitudeCounter(mantissa_bits(bins))
        self.focus: TensorStatistics | None = None
        self.spots: list[Spots] = []

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
        """As :attr:`histogram`, with at most ``2**bits`` bins to an octave."""
        return self.counter.histogram(self.absmax, bits)

    def linear(self, bins: int = DEFAULT_BINS) -> Histogram:
        """Counts (float64) in equal bins from 0 to the largest magnitude."""
        edges = np.linspace(0.0, self.absmax, bins + 1)
        return Histogram(linear(self.histogram, bins, self.absmax), edges)

    def add(self, array: npt.NDArray[Any], scratch: Scratch | None = None, looked_at: bool = False) -> None:
        """Takes in every element of an array of any shape; other types are converted to float32.

        Args:
            array: The values.
            scratch: Work buffers of this thread, see :func:`calibration.histogram.scratch_buffer`.
            looked_at: Whether the network looks at all of them, so that ``focus`` gets them too; the same as
                :meth:`add_focus` with all of them, at half the work.
        """
        parts = [self]
        if looked_at:
            self.focus = self.focus or TensorStatistics(self.bins)
            parts.append(self.focus)
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes an infinity and is counted as one
            values = np.ascontiguousarray(array, dtype=np.float32).reshape(-1)
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
        self.counter.add(values, scratch, *(part.counter for part in parts[1:]))

    def add_focus(self, parts: Iterable[npt.NDArray[Any]], scratch: Scratch | None = None) -> None:
        """Takes in values that lie where the network looks; :meth:`add` has to get them as well."""
        if self.focus is None:
            self.focus = TensorStatistics(self.bins)
        for part in parts:
            self.focus.add(part, scratch)

    def add_spots(self, array: npt.NDArray[Any], number: int) -> None:
        """Remembers a few positions of an activation [n, c, h, w]; :meth:`add` has to get it as well."""
        found = taken(array, number)
        if found is not None:
            self.spots.append(found)

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Statistics of the values of both.

        Raises:
            DataError: They were collected with different numbers of bins.
        """
        if self.bins != other.bins:
            raise DataError(f"statistics with {self.bins} and {other.bins} bins cannot be merged; collect them again")
        result = TensorStatistics.__new__(TensorStatistics)
        result.bins = self.bins
        result.count = self.count + other.count
        result.nonfinite = self.nonfinite + other.nonfinite
        result.minimum = min(self.minimum, other.minimum)
        result.maximum = max(self.maximum, other.maximum)
        result.counter = self.counter.merged(other.counter)
        result.focus = self.focus or other.focus
        if self.focus is not None and other.focus is not None:
            result.focus = self.focus.merge(other.focus)
        result.spots = self.spots + other.spots
        return result

    def copy(self) -> TensorStatistics:
        """The same statistics, to be kept while these go on counting."""
        result = self.merge(TensorStatistics(self.bins))
        result.focus = None if self.focus is None else self.focus.copy()
        return result

    @staticmethod
    def of(array: npt.NDArray[Any], bins: int = DEFAULT_BINS) -> TensorStatistics:
        """Statistics of one array."""
        result = TensorStatistics(bins)
        result.add(array)
        return result


def merge_all(parts: Iterable[TensorStatistics]) -> TensorStatistics:
    """Statistics of the values of all parts, for tensors that share one scale.

    Raises:
        DataError: There is no part, or they differ in bins.
    """
    iterator = iter(parts)
    result = next(iterator, None)
    if result is None:
        raise DataError("no statistics to merge")
    for part in iterator:
        result = result.merge(part)
    return result

"""The window of the histogram, written out in numbers: where it begins and ends, and what lies on its edges."""

from __future__ import annotations

import numpy as np
import pytest

from calibration import histogram
from calibration.histogram import MIN_TOP, MagnitudeCounter, linear, mantissa_bits, scratch_buffer, top_of
from calibration.statistics import TensorStatistics


def counts(values: list[float], bins: int = 64) -> list[tuple[float, int]]:
    """Lower edges of the bins that are not empty, and their counts."""
    found, edges = TensorStatistics.of(np.array(values, np.float32), bins).histogram
    return [(float(e), int(c)) for e, c in zip(edges, found, strict=False) if c]


def test_twenty_octaves_below_the_largest_magnitude_and_no_more() -> None:
    edge, before = 2.0**-20, np.nextafter(np.float32(2.0**-20), np.float32(0))
    assert counts([0.75, edge]) == [(edge, 1), (0.75, 1)]
    assert counts([0.75, before]) == [(0.0, 1), (0.75, 1)]
    assert counts([1.0, edge]) == [(0.0, 1), (1.0, 1)], "1 begins the next octave"


def test_the_window_ends_with_the_normal_numbers() -> None:
    smallest = float(np.finfo(np.float32).tiny)
    assert MIN_TOP == -106 and smallest == 2.0**-126
    assert counts([smallest, smallest / 2, 0.0]) == [(0.0, 2), (smallest, 1)]
    assert [top_of(x) for x in (0.0, 2.0**-107, 2.0**-106, 2.0**-105)] == [-106, -106, -105, -104]


def test_32_bins_to_an_octave_of_64() -> None:
    assert mantissa_bits(64) == 5
    step = 0.5 / 32
    values = [0.5, 0.5 + step * 0.99, 0.5 + step, 1.0 - step / 2]
    assert counts(values) == [(0.5, 2), (0.5 + step, 1), (1.0 - step, 1)]
    assert len(MagnitudeCounter(5).counts) == 1 + 20 * 32


@pytest.mark.parametrize(("bins", "bits"), [(4, 1), (8, 2), (2048, 10), (65536, 15)])
def test_bins_that_can_be(bins: int, bits: int) -> None:
    assert mantissa_bits(bins) == bits


@pytest.mark.parametrize("bins", [-4, 1, 2, 5, 2047, 131072])
def test_bins_that_cannot_be(bins: int) -> None:
    with pytest.raises(ValueError, match=rf"^bins is {bins}; it must be a power of two from 4 to 65536$"):
        mantissa_bits(bins)


def test_the_last_bin_ends_with_the_largest_magnitude() -> None:
    for value, end in ((1.0, 1 + 2**-20), (1.001, float(np.float32(1.001))), (2.0**-126, 2.0**-126 * (1 + 2**-20))):
        found = TensorStatistics.of(np.array([value], np.float32), 64).histogram
        assert found.edges[-1] == end and found.counts[-1] == 1
    for nothing in (TensorStatistics(64), TensorStatistics.of(np.zeros(3), 64)):
        assert nothing.histogram.edges.tolist() == [0.0, 2.0**-126]
        assert nothing.histogram.counts.tolist() == [nothing.count]


def test_bins_are_not_copied_where_they_stay_as_they_are() -> None:
    """A raise to the same window, and an equal resolution, cost nothing."""
    counter = MagnitudeCounter(5)
    counter.raise_top(3)
    counter.add(np.array([1.0, 5.0], np.float32))
    before = counter.counts
    counter.raise_top(3)
    counter.raise_top(-3)
    assert counter.counts is before and counter.top == 3
    for bits in (None, 5, 9):
        assert np.shares_memory(counter.histogram(5.0, bits).counts, before)
    assert not np.shares_memory(counter.histogram(5.0, 4).counts, before)


@pytest.mark.parametrize("octaves", [1, 19, 20, 21, 40])
def test_what_falls_out_of_the_window_goes_to_the_lowest_bin(octaves: int) -> None:
    values = np.array([0.5, 0.9, 2.0**-20], np.float32)
    moved = TensorStatistics.of(values, 64)
    moved.counter.raise_top(octaves)
    wanted = MagnitudeCounter(5)
    wanted.raise_top(octaves)
    wanted.add(values)
    assert moved.counter.counts.tolist() == wanted.counts.tolist()
    other = MagnitudeCounter(5)
    other.raise_top(octaves)
    for first in (1, 5, 300):  # the counts from some bin on, those before being empty
        part = TensorStatistics.of(values, 64).counter
        part.counts[1:first] = 0
        found = MagnitudeCounter(5)
        found.raise_top(octaves)
        found.absorb(part.top, int(part.counts[0]), first, part.counts[first:])
        assert found.counts.tolist() == other.merged(part).counts.tolist()


def test_a_step_fits_the_second_level_cache_of_a_core() -> None:
    assert 1 << 20 <= sum(b.nbytes for b in scratch_buffer()) <= 2 << 20
    sizes = (histogram._CHUNK - 1, histogram._CHUNK, histogram._CHUNK + 1)
    for size in sizes:
        assert counts([0.75] * size) == [(0.75, size)]


def test_equal_bins_split_evenly() -> None:
    """Six values from 0.375 to 0.5 and one from 0.75 to 0.9: an edge in the midst of a bin halves it."""
    stats = TensorStatistics.of(np.array([0.4375] * 6 + [0.9], np.float32), 4)
    assert stats.histogram.edges[-4:] == pytest.approx([0.375, 0.5, 0.75, 0.9])
    assert linear(stats.histogram, 3, 0.9) == pytest.approx([0.0, 6.0, 1.0])
    assert linear(stats.histogram, 2, 0.875) == pytest.approx([3.0, 4.0]), "and what lies beyond in the last"


def test_white_is_counted() -> None:
    """A largest magnitude that begins a bin is nearly the end of it, and none the less in the last of equal bins."""
    for top in (1.0, 1.0 + 1 / 32, 4.0):
        stats = TensorStatistics.of(np.array([0.3 * top, top, top], np.float32), 64)
        assert linear(stats.histogram, 10, stats.absmax)[-1] == 2 and stats.linear(10).counts.sum() == pytest.approx(3)

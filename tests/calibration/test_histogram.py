"""The histogram against numpy on the raw values, and its algebra on arbitrary ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.histogram import MIN_TOP, OCTAVES, MagnitudeCounter, linear, mantissa_bits, top_of
from calibration.statistics import TensorStatistics

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(0, 60), elements=FLOATS)


def of(array: npt.NDArray[np.float32], bins: int = 64) -> TensorStatistics:
    return TensorStatistics.of(array, bins)


def same(a: TensorStatistics, b: TensorStatistics) -> bool:
    return (
        (a.count, a.nonfinite, a.minimum, a.maximum, a.counter.top)
        == (b.count, b.nonfinite, b.minimum, b.maximum, b.counter.top)
    ) and np.array_equal(a.counter.counts, b.counter.counts)


@given(ARRAYS)
def test_no_count_is_lost_and_every_value_lies_in_its_bin(values: npt.NDArray[np.float32]) -> None:
    counts, edges = of(values).histogram
    assert counts.sum() == len(values)
    assert (np.diff(edges) > 0).all()
    # np.histogram closes the last bin on the right, as the largest magnitude ends ours.
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), np.append(edges[:-1], np.inf))
    assert np.array_equal(counts, expected)


@given(ARRAYS, ARRAYS, ARRAYS)
def test_merging_is_associative_commutative_and_the_same_as_adding(
    a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], c: npt.NDArray[np.float32]
) -> None:
    left = of(a).merge(of(b)).merge(of(c))
    right = of(a).merge(of(b).merge(of(c)))
    assert same(left, right)
    assert same(left, of(c).merge(of(a)).merge(of(b)))
    assert same(left, of(np.concatenate([a, b, c])))
    one_by_one = TensorStatistics(64)
    for part in (b, c, a):
        one_by_one.add(part)
    assert same(left, one_by_one)


@given(ARRAYS)
@settings(max_examples=50)
def test_order_does_not_matter(values: npt.NDArray[np.float32]) -> None:
    grown = TensorStatistics(64)
    for value in np.sort(np.abs(values)):  # the window moves as often as it can
        grown.add(np.array([value], np.float32))
    assert np.array_equal(grown.counter.counts, of(values).counter.counts)


@pytest.mark.parametrize("bins", [4, 64, 2048, 65536])
def test_bins_are_as_narrow_as_promised(bins: int) -> None:
    values = np.linspace(-1.7, 1.7, 100_001).astype(np.float32)
    _, edges = of(values, bins).histogram
    assert np.diff(edges)[1:].max() <= 2.0 / bins * 1.7 * (1 + 1e-12)


def test_large_arrays_are_counted_in_steps() -> None:
    values = np.random.default_rng(0).normal(0, 1, 300_001).astype(np.float32)
    counts, edges = TensorStatistics.of(values).histogram
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), np.append(edges[:-1], np.inf))
    assert np.array_equal(counts, expected)


def test_zeros_denormals_and_the_largest_float() -> None:
    values = np.array([0.0, -0.0, 1e-45, -1e-40, np.finfo(np.float32).max], np.float32)
    stats = of(values)
    assert stats.histogram.counts.sum() == 5
    assert stats.histogram.counts[0] == 4
    assert stats.histogram.counts[-1] == 1
    assert stats.absmax == float(np.finfo(np.float32).max)


def test_a_jump_beyond_the_window_moves_everything_to_the_lowest_bin() -> None:
    stats = of(np.array([1.0, -2.0, 3.0], np.float32))
    stats.add(np.array([2.0 ** (OCTAVES + 3)], np.float32))
    assert stats.histogram.counts[0] == 3
    assert stats.histogram.counts.sum() == 4


def test_top_is_the_smallest_power_above() -> None:
    assert [top_of(x) for x in (1.0, 0.99, 0.5, 3.0, 4.0)] == [1, 0, 0, 2, 3]
    assert top_of(0.0) == MIN_TOP


@pytest.mark.parametrize("bins", [0, 3, 100, 1 << 17])
def test_odd_numbers_of_bins_are_refused(bins: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        mantissa_bits(bins)


def test_coarser_bins_hold_the_same_counts() -> None:
    values = np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32)
    stats = TensorStatistics.of(values)
    counts, edges = stats.coarse(4)
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), np.append(edges[:-1], np.inf))
    assert np.array_equal(counts, expected)


def test_equal_bins_keep_the_total_and_the_running_sums() -> None:
    values = np.random.default_rng(2).normal(0, 1, 50_000).astype(np.float32)
    stats = TensorStatistics.of(values)
    counts = linear(stats.histogram, 512, stats.absmax)
    exact, _ = np.histogram(np.abs(values), 512, (0.0, stats.absmax))
    assert counts.sum() == pytest.approx(50_000)
    # A bin that straddles an edge is split evenly: running sums are off by no more than one bin's counts.
    slack = int(stats.histogram.counts.max())
    assert np.abs(np.cumsum(counts) - np.cumsum(exact)).max() <= slack


def test_merging_leaves_both_as_they_were() -> None:
    a, b = MagnitudeCounter(5), MagnitudeCounter(5)
    a.raise_top(1)
    a.add(np.array([0.5, 1.5], np.float32))
    before = a.counts.copy()
    a.merged(b)
    assert np.array_equal(a.counts, before)
    assert b.counts.sum() == 0

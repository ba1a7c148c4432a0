from __future__ import annotations

import math

import numpy as np
import pytest

from calibration.cache import Statistics
from calibration.statistics import DEFAULT_BINS, TensorStatistics, merge_all
from qdqtool.errors import DataError


def test_minimum_maximum_and_count_are_exact() -> None:
    values = np.random.default_rng(0).normal(0.3, 2, (2, 3, 50, 50)).astype(np.float32)
    stats = TensorStatistics(2048)
    for row in values:
        stats.add(row)
    assert stats.count == values.size
    assert stats.minimum == float(values.min())
    assert stats.maximum == float(values.max())
    assert stats.absmax == float(np.abs(values).max())
    assert not stats.nonnegative and not stats.constant


def test_nonfinite_values_are_counted_and_left_out() -> None:
    stats = TensorStatistics(64)
    stats.add(np.array([1.0, np.nan, -np.inf, np.inf, -3.0], np.float32))
    stats.add(np.array([np.nan, np.nan], np.float32))
    assert (stats.count, stats.nonfinite) == (2, 5)
    assert (stats.minimum, stats.maximum, stats.absmax) == (-3.0, 1.0, 3.0)
    assert stats.histogram.counts.sum() == 2


def test_nothing_finite_leaves_an_empty_record() -> None:
    stats = TensorStatistics.of(np.full(7, np.nan, np.float32), 64)
    assert (stats.count, stats.nonfinite, stats.absmax) == (0, 7, 0.0)


def test_empty_arrays_change_nothing() -> None:
    stats = TensorStatistics.of(np.zeros((0, 3), np.float32), 64)
    assert (stats.count, stats.minimum, stats.maximum) == (0, math.inf, -math.inf)


def test_other_types_and_layouts_are_taken() -> None:
    values = np.arange(24, dtype=np.float16).reshape(4, 6)
    stats = TensorStatistics.of(values.T, 64)
    assert (stats.minimum, stats.maximum, stats.count) == (0.0, 23.0, 24)
    assert TensorStatistics.of(np.array([1e300, 2.0]), 64).nonfinite == 1  # beyond float32
    assert TensorStatistics.of(np.arange(5, dtype=np.uint8), 64).maximum == 4.0


def test_nonnegative_and_constant() -> None:
    assert TensorStatistics.of(np.array([0.0, 2.0], np.float32), 64).nonnegative
    assert TensorStatistics.of(np.full(5, -2.5, np.float32), 64).constant


def test_different_bins_do_not_merge() -> None:
    with pytest.raises(DataError, match="64 and 128 bins"):
        TensorStatistics(64).merge(TensorStatistics(128))


def test_merge_all_needs_one() -> None:
    with pytest.raises(DataError, match="no statistics"):
        merge_all([])


def test_statistics_merge_as_if_collected_together() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, s, 100).astype(np.float32) for s in (1, 50))
    left = Statistics({"x": TensorStatistics.of(a), "only": TensorStatistics.of(a)}, images=1, fingerprint="aa")
    right = Statistics({"x": TensorStatistics.of(b)}, images=2, fingerprint="bb", skipped=[("p.png", "cut off")])
    merged = left.merge(right)
    assert merged.images == 3
    assert merged.fingerprint == "aa+bb" == right.merge(left).fingerprint
    assert merged.skipped == [("p.png", "cut off")]
    both = TensorStatistics.of(np.concatenate([a, b]))
    assert np.array_equal(merged["x"].counter.counts, both.counter.counts)
    assert merged["only"].count == 100
    assert sorted(merged) == ["only", "x"] and len(merged) == 2


def of(*values: float) -> TensorStatistics:
    return TensorStatistics.of(np.array(values, np.float32), 64)


@pytest.mark.parametrize(
    ("values", "absmax", "nonnegative", "constant"),
    [
        ((), 0.0, False, False), ((0.0,), 0.0, True, True), ((0.0, 2.0), 2.0, True, False), ((2.0,), 2.0, True, True),
        ((-1.0, 2.0), 2.0, False, False), ((-3.0, 2.0), 3.0, False, False), ((-3.0, -3.0), 3.0, False, True),
        ((-0.5, -0.25), 0.5, False, False), ((0.25, 0.5), 0.5, True, False), ((math.nan,), 0.0, False, False),
    ],
)  # fmt: skip
def test_properties(values: tuple[float, ...], absmax: float, nonnegative: bool, constant: bool) -> None:
    stats = of(*values)
    assert (stats.absmax, stats.nonnegative, stats.constant) == (absmax, nonnegative, constant)


def test_an_empty_one() -> None:
    stats = TensorStatistics()
    assert (stats.bins, stats.count, stats.nonfinite, stats.minimum, stats.maximum) == (2048, 0, 0, math.inf, -math.inf)
    assert stats.focus is None and stats.spots == [] and DEFAULT_BINS == 2048
    assert repr(of(1.0, -2.0, math.inf)) == "<2 values from -2 to 1, 1 not finite>"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_no_other(odd: float) -> None:
    stats = of(odd, 0.5, -0.25, odd)
    assert (stats.count, stats.nonfinite, stats.minimum, stats.maximum) == (2, 2, -0.25, 0.5)
    assert np.array_equal(stats.counter.counts, of(0.5, -0.25).counter.counts)


def test_equal_bins() -> None:
    counts, edges = of(0.5, 1.0, 4.0).linear(4)
    assert edges.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and counts.sum() == pytest.approx(3)
    assert len(of(1.0).linear().counts) == 2048


@pytest.mark.parametrize("before", [[], [64.0], [1e-3]])
@pytest.mark.parametrize("values", [[], [0.0], [0.5, -3.0, 7.0], [1.0, math.nan], [math.inf], [1e-30, 1e30]])
def test_values_that_are_all_looked_at_are_the_same_as_given_twice(before: list[float], values: list[float]) -> None:
    once, twice = of(*before), of(*before)
    for part in (once, twice):
        part.add_focus([np.full(3, 2.0, np.float32)] if before else [])
    for given in ([0.25], values):
        array = np.array(given, np.float32)
        once.add(array, looked_at=True)
        twice.add(array)
        twice.add_focus([array])
    for one, other in ((once, twice), (once.focus, twice.focus)):
        assert one is not None and other is not None
        assert repr(one) == repr(other) and one.counter.top == other.counter.top
        assert one.counter.counts.tolist() == other.counter.counts.tolist()
    assert of(1.0).focus is None
    fresh = of(1.0)
    fresh.add(np.array([2.0], np.float32), looked_at=True)
    assert fresh.focus is not None and fresh.focus.count == 1


def test_merging_and_copying_keep_their_own() -> None:
    one, other = of(1.0), of(-2.0, math.nan)
    one.add_focus([np.ones(2, np.float32)])
    one.spots, other.spots = [np.ones((2, 1), np.float32)], [np.zeros((3, 1), np.float32)]
    for both in (one.merge(other), other.merge(one)):
        assert (both.count, both.nonfinite, both.minimum, both.maximum) == (2, 1, -2.0, 1.0)
        assert both.focus is not None and both.focus.count == 2 and len(both.spots) == 2
    other.add_focus([])
    both = other.merge(one)
    assert both.focus is not None and both.focus.count == 2
    copy = one.copy()
    one.add(np.array([9.0], np.float32))
    one.add_focus([np.full(1, 9.0, np.float32)])
    one.add_spots(np.zeros((1, 1, 7, 7), np.float32), 0)
    assert (copy.count, copy.maximum, len(copy.spots)) == (1, 1.0, 1)
    assert copy.focus is not None and (copy.focus.count, copy.focus.maximum) == (2, 1.0)
    assert of(1.0).copy().focus is None
    assert of(1.0).merge(of(2.0)).focus is None
    with pytest.raises(DataError, match=r"^statistics with 64 and 2048 bins cannot be merged; collect them again$"):
        of(1.0).merge(TensorStatistics())
    assert merge_all([of(1.0), of(2.0), of(3.0)]).count == 3 and merge_all(iter([one])) is one


def test_statistics_of_several_tensors() -> None:
    left = Statistics({"a": of(1.0)}, images=1, fingerprint="b+a", warnings=["x", "y"], notes=["n"])
    right = Statistics({"a": of(2.0), "b": of(3.0)}, images=2, fingerprint="a", warnings=["y", "z"], notes=["n", "m"])
    both = left.merge(right)
    assert (both.images, both.fingerprint, both.warnings, both.notes) == (3, "a+b", ["x", "y", "z"], ["n", "m"])
    assert both["a"].count == 2 and both["b"] is right["b"] and left["a"].count == 1
    assert left.merge(Statistics({})).fingerprint == "a+b" and Statistics({}).merge(Statistics({})).fingerprint == ""
    assert repr(both) == "<Statistics of 2 tensors over 3 images>" and len(both) == 2

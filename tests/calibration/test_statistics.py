from __future__ import annotations

import math

import numpy as np
import pytest

from calibration.cache import Statistics
from calibration.statistics import TensorStatistics, merge_all
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

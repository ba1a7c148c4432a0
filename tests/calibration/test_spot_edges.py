"""Spots: the least map, the last channel, and any number of ranges."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.spots import chosen, rounding, taken
from calibration.statistics import TensorStatistics

PART = 0.6180339887498949


@pytest.mark.parametrize("samples", [0, 1, 15, 16, 17, 33, 100])
def test_sixteen_samples(samples: int) -> None:
    wanted = {k * samples // 16 for k in range(16)} if samples > 16 else set(range(16))
    assert chosen(samples) == wanted and len(wanted) == 16
    assert chosen(None) == set(range(16))


@pytest.mark.parametrize(("height", "width", "enough"), [(6, 8, True), (1, 48, True), (47, 1, False), (7, 6, False)])
def test_the_least_map_has_48_positions(height: int, width: int, enough: bool) -> None:
    array = np.zeros((1, 1, height, width), np.float32)
    assert (taken(array, 0) is not None) == enough
    assert taken(array[0], 0) is None and taken(array[None], 0) is None


@pytest.mark.parametrize("channels", [1, 47, 48, 49, 100])
@pytest.mark.parametrize("number", [0, 1, 777])
def test_positions_and_channels(channels: int, number: int) -> None:
    array = np.arange(2 * channels * 60, dtype=np.float32).reshape(2, channels, 6, 10)
    at = [int((k + number) * PART % 1.0 * 60) for k in range(48)]
    which = [k * channels // min(channels, 48) for k in range(min(channels, 48))]
    found = taken(array, number)
    assert found is not None and found.dtype == np.float32
    assert found.tolist() == [[c * 60.0 + p for c in which] for p in at], "of the first image"


def test_a_value_that_is_not_finite_elsewhere_does_not_matter() -> None:
    array = np.zeros((1, 1, 100, 100), np.float32)
    array[0, 0, 99, 99] = np.nan
    assert taken(array, 0) is not None
    array[0, 0, 0, 0] = np.nan  # the first position of sample 0
    assert taken(array, 0) is None
    kept = TensorStatistics()
    kept.add_spots(array, 0)
    assert kept.spots == []


@pytest.mark.parametrize("count", [1, 7, 8, 9, 17])
def test_any_number_of_ranges(count: int) -> None:
    rng = np.random.default_rng(count)
    spots = [rng.normal(1, 1, (12, 3)).astype(np.float32), rng.normal(0, 2, (5, 2)).astype(np.float32)]
    ranges = np.linspace(0.5, 4.0, count)
    biased, whole = rounding(spots, ranges, 7)
    assert biased.shape == whole.shape == (count,)
    for k, amax in enumerate(ranges):
        step = amax / 7
        errors = [np.clip(np.rint(v / step), -7, 7) * step - v for v in spots]
        mean = np.mean([(e**2).sum(axis=1).mean() for e in errors])
        assert whole[k] == pytest.approx(mean, rel=1e-4)
        by_hand = [(e.mean(axis=0) ** 2 - e.var(axis=0, ddof=1) / len(e)).sum() for e in errors]
        assert biased[k] == pytest.approx(np.maximum(by_hand, 0.0).mean(), rel=1e-3, abs=1e-5)
    alone = [rounding(spots, ranges[k : k + 1], 7) for k in range(count)]
    assert [float(b[0]) for b, _ in alone] == biased.tolist() and [float(w[0]) for _, w in alone] == whole.tolist()
    turned = rounding(spots[::-1], ranges, 7)
    assert turned[0].tolist() == biased.tolist() and turned[1].tolist() == whole.tolist(), "in any order, to the bit"


def test_the_bias_is_never_below_zero() -> None:
    """Errors whose mean is less than chance makes of it."""
    half = np.array([[0.4], [-0.4]] * 24, np.float32)
    biased, whole = rounding([half], np.array([7.0]), 7)
    assert biased.tolist() == [0.0] and whole[0] == pytest.approx(0.16, rel=1e-5)

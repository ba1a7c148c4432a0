"""Every method against a direct computation on the raw values."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration.methods import (
    METHODS,
    SEARCH_BITS,
    _best_falling,
    _clipped,
    _total,
    amax_of,
    clipped_fraction,
    squared_error,
)
from calibration.statistics import TensorStatistics, merge_all
from tests.calibration.divergence import divergence

Floats32 = npt.NDArray[np.float32]


def samples() -> dict[str, Floats32]:
    rng = np.random.default_rng(7)
    normal = rng.normal(0, 1, 60_000)
    arrays = {
        "normal": normal,
        "silu": 2 * normal / (1 + np.exp(-2 * normal)),
        "relu": np.maximum(normal, 0),
        "laplace": rng.laplace(0, 0.01, 60_000),
        "heavy tail": rng.standard_t(3, 60_000) * 100,
        "outlier": np.append(normal, 400.0),
        "pixels": rng.integers(0, 256, 60_000) / 255,
    }
    return {k: v.astype(np.float32) for k, v in arrays.items()}


SAMPLES = samples()
each_sample = pytest.mark.parametrize("name", SAMPLES)


def quantization_error(values: Floats32, amax: float, levels: int = 127) -> float:
    scale = amax / levels
    exact = values.astype(np.float64)
    return float(np.mean((exact - np.clip(np.rint(exact / scale), -levels, levels) * scale) ** 2))


@each_sample
def test_max_is_exact(name: str) -> None:
    values = SAMPLES[name]
    assert amax_of(TensorStatistics.of(values), "max") == float(np.abs(values).max())


@each_sample
@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.99, 100.0])
def test_percentile_is_within_a_bin(name: str, percentile: float) -> None:
    magnitudes = np.abs(SAMPLES[name].astype(np.float64))
    amax = amax_of(TensorStatistics.of(SAMPLES[name]), "percentile", percentile)
    if np.percentile(magnitudes, percentile) == 0:  # half of the ReLU's values
        assert amax == magnitudes.max()
        return
    # The value of that rank and its neighbours; numpy interpolates between two of them.
    ranked = np.sort(magnitudes)
    position = percentile / 100 * (len(ranked) - 1)
    low, high = ranked[max(math.floor(position) - 1, 0)], ranked[min(math.ceil(position) + 1, len(ranked) - 1)]
    assert low * (1 - 1 / 512) - 1e-6 * ranked[-1] <= amax <= high * (1 + 1 / 512)


@each_sample
@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.31, 0.1, 0.02])
def test_squared_error_is_that_of_quantizing(name: str, fraction: float) -> None:
    values = SAMPLES[name]
    amax = float(np.abs(values).max()) * fraction
    estimate = squared_error(TensorStatistics.of(values), amax)
    assert estimate == pytest.approx(quantization_error(values, amax), rel=0.02)


def test_squared_error_takes_many_ranges_and_other_levels() -> None:
    values = SAMPLES["silu"]
    stats = TensorStatistics.of(values)
    ranges = np.geomspace(0.1, 10, 40)
    many = squared_error(stats, ranges, levels=7)
    assert many.shape == (40,)
    for amax, error in zip(ranges, many, strict=True):
        assert squared_error(stats, float(amax), levels=7) == pytest.approx(error, rel=1e-12)
        assert error == pytest.approx(quantization_error(values, float(amax), 7), rel=0.02)


@each_sample
def test_mse_finds_the_least_error(name: str) -> None:
    values = SAMPLES[name]
    chosen = quantization_error(values, amax_of(TensorStatistics.of(values), "mse"))
    tried = np.abs(values).max() * np.exp2(-np.arange(0, 12, 1 / 32))
    assert chosen <= min(quantization_error(values, float(a)) for a in tried) * 1.01


@each_sample
@pytest.mark.parametrize("power", [2.0, 2.6, 3.0])
def test_a_search_that_ends_early_finds_what_trying_every_range_finds(name: str, power: float) -> None:
    stats = TensorStatistics.of(SAMPLES[name])
    parts = [(stats.coarse(SEARCH_BITS), 1.0)]
    ranges = stats.absmax * np.exp2(-np.arange(97) / 8)
    tried = np.array([_total(parts, np.array([r]), power)[0] for r in ranges])
    assert _best_falling(parts, ranges, power) == ranges[int(np.argmin(tried))]
    for amax in ranges:
        beyond = np.maximum(np.abs(SAMPLES[name].astype(np.float64)) - amax, 0.0) ** power
        assert _clipped(parts, float(amax), power) <= beyond.sum() * (1 + 1e-9)


def divergences(values: Floats32) -> npt.NDArray[np.float64]:
    """KL(P || Q) for 128 to 2048 kept bins."""
    counts, _ = np.histogram(np.abs(values.astype(np.float64)), 2048, (0, np.abs(values).max()))
    counts = counts.astype(np.float64)
    counts[0] = counts[1]
    return np.array([divergence(counts, kept) for kept in range(128, 2049)])


@pytest.mark.parametrize("name", ["normal", "silu", "relu", "laplace", "heavy tail"])
def test_entropy_is_as_good_as_the_search_on_the_raw_values(name: str) -> None:
    values = SAMPLES[name]
    absmax = float(np.abs(values).max())
    direct = divergences(values)
    kept = round(amax_of(TensorStatistics.of(values), "entropy") / absmax * 2048)
    # Splitting a bin over two equal ones moves single counts of the tail, and with them which bins are empty.
    near = direct[max(kept - 128 - 3, 0) : kept - 128 + 4]
    assert near.min() <= direct.min() * 1.15


def test_entropy_is_the_same_where_no_bin_is_split() -> None:
    # Powers of two: 2048 equal bins and the collected ones share their edges, so that both searches see the same.
    values = (np.random.default_rng(5).laplace(0, 0.1, 200_000)).astype(np.float32)
    values = np.append(values[np.abs(values) < 2.0], np.float32(2.0 - 2.0**-22))
    centred = (np.floor(np.abs(values) * 1024) + 0.5) / 1024
    values = np.append(centred[centred < 2.0], 2.0 - 2.0**-22).astype(np.float32)
    direct = divergences(values)
    kept = round(amax_of(TensorStatistics.of(values), "entropy") / float(values.max()) * 2048)
    assert direct[kept - 128] == pytest.approx(direct.min(), rel=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_an_all_zero_tensor_gets_a_positive_range(method: str) -> None:
    assert amax_of(TensorStatistics.of(np.zeros(100, np.float32)), method) > 0
    assert amax_of(TensorStatistics(2048), method) > 0
    assert amax_of(TensorStatistics.of(np.full(10, 1e-40, np.float32)), method) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [3.0, -0.2, 1e-20, 1e30, 1.0])
def test_a_constant_tensor_is_represented(method: str, value: float) -> None:
    values = np.full(100, value, np.float32)
    amax = amax_of(TensorStatistics.of(values), method)
    assert math.sqrt(quantization_error(values, amax)) <= abs(value) / 100


@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from(METHODS),
)
@settings(max_examples=150, deadline=None)
def test_any_tensor_gets_a_usable_range(values: Floats32, method: str) -> None:
    stats = TensorStatistics.of(values)
    amax = amax_of(stats, method)
    assert 0 < amax < math.inf
    assert amax <= max(stats.absmax, 1.0)
    assert squared_error(stats, amax) >= 0


def test_one_outlier_does_not_decide_mse_percentile() -> None:
    normal = TensorStatistics.of(SAMPLES["normal"])
    outlier = TensorStatistics.of(SAMPLES["outlier"])
    assert amax_of(outlier, "percentile") == pytest.approx(amax_of(normal, "percentile"), rel=0.1)


def test_a_group_is_its_merged_values() -> None:
    parts = [SAMPLES["relu"], SAMPLES["silu"] * np.float32(3)]
    merged = merge_all(TensorStatistics.of(p) for p in parts)
    together = TensorStatistics.of(np.concatenate(parts))
    for method in METHODS:
        assert amax_of(merged, method) == amax_of(together, method)


@each_sample
def test_clipped_fraction(name: str) -> None:
    values = SAMPLES[name]
    stats = TensorStatistics.of(values)
    for amax in (0.3 * stats.absmax, 0.9 * stats.absmax, stats.absmax, 2 * stats.absmax):
        direct = float(np.mean(np.abs(values) > amax))
        assert clipped_fraction(stats, amax) == pytest.approx(direct, abs=0.005)
    assert clipped_fraction(TensorStatistics(64), 1.0) == 0.0


def test_bad_arguments_are_refused() -> None:
    stats = TensorStatistics.of(SAMPLES["relu"])
    with pytest.raises(ValueError, match="unknown; use one of max"):
        amax_of(stats, "minmax")
    with pytest.raises(ValueError, match="above 0"):
        amax_of(stats, "percentile", 0.0)
    with pytest.raises(ValueError, match="above zero"):
        squared_error(stats, 0.0)
    assert squared_error(TensorStatistics(64), 1.0) == 0.0

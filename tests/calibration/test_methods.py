"""Every method against a direct computation on the raw values."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from calibration import methods
from calibration.methods import (
    METHODS,
    SEARCH_BITS,
    Range,
    _best_falling,
    _clipped,
    _least_divergence,
    _total,
    amax_of,
    clipped_fraction,
    focus_power,
    focused_error,
    range_of,
    settle,
    squared_error,
    unbiased,
)
from calibration.statistics import MIN_TOP, Histogram, TensorStatistics, merge_all, rounding
from tests.raising import raises

Floats32 = npt.NDArray[np.float32]


def samples() -> dict[str, Floats32]:
    rng = np.random.default_rng(7)
    normal = rng.normal(0, 1, 30_000)
    arrays = {
        "normal": normal,
        "silu": 2 * normal / (1 + np.exp(-2 * normal)),
        "relu": np.maximum(normal, 0),
        "laplace": rng.laplace(0, 0.01, 30_000),
        "heavy tail": rng.standard_t(3, 30_000) * 100,
        "outlier": np.append(normal, 400.0),
        "pixels": rng.integers(0, 256, 30_000) / 255,
    }
    return {k: v.astype(np.float32) for k, v in arrays.items()}


SAMPLES = samples()
each_sample = pytest.mark.parametrize("name", SAMPLES)


def quantization_error(values: Floats32, amax: float, levels: int = 127) -> float:
    scale = amax / levels
    exact = values.astype(np.float64)
    return float(np.mean((exact - np.clip(np.rint(exact / scale), -levels, levels) * scale) ** 2))


@each_sample
def test_max_is_exact_and_mse_finds_the_least_error(name: str) -> None:
    values = SAMPLES[name]
    assert amax_of(TensorStatistics.of(values), "max") == float(np.abs(values).max())
    values = SAMPLES[name]
    chosen = quantization_error(values, amax_of(TensorStatistics.of(values), "mse"))
    tried = np.abs(values).max() * np.exp2(-np.arange(0, 12, 1 / 32))
    assert chosen <= min(quantization_error(values, float(a)) for a in tried) * 1.01
    values = SAMPLES[name]
    stats = TensorStatistics.of(values)
    for amax in (0.3 * stats.absmax, 0.9 * stats.absmax, stats.absmax, 2 * stats.absmax):
        direct = float(np.mean(np.abs(values) > amax))
        assert clipped_fraction(stats, amax) == pytest.approx(direct, abs=0.005)
    assert clipped_fraction(TensorStatistics(64), 1.0) == 0.0


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
    low, high = (
        ranked[max(math.floor(position) - 1, 0)],
        ranked[min(math.ceil(position) + 1, len(ranked) - 1)],
    )
    assert low * (1 - 1 / 512) - 1e-6 * ranked[-1] <= amax <= high * (1 + 1 / 512)


@each_sample
@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.31, 0.1, 0.02])
def test_squared_error_is_that_of_quantizing(name: str, fraction: float) -> None:
    values = SAMPLES[name]
    amax = float(np.abs(values).max()) * fraction
    estimate = squared_error(TensorStatistics.of(values), amax)
    assert estimate == pytest.approx(quantization_error(values, amax), rel=0.02)


@each_sample
@pytest.mark.parametrize("power", [2.0, 2.6, 3.0])
def test_a_search_that_ends_early_finds_what_trying_every_range_finds(
    name: str, power: float
) -> None:
    stats = TensorStatistics.of(SAMPLES[name])
    parts = [(stats.coarse(SEARCH_BITS), 1.0)]
    ranges = stats.absmax * np.exp2(-np.arange(97) / 8)
    tried = np.array([_total(parts, np.array([r]), power)[0] for r in ranges])
    assert _best_falling(parts, ranges, power) == ranges[int(np.argmin(tried))]
    for amax in ranges[::4]:
        beyond = np.maximum(np.abs(SAMPLES[name].astype(np.float64)) - amax, 0.0) ** power
        assert _clipped(parts, float(amax), power) <= beyond.sum() * (1 + 1e-9)


def divergence(counts: np.ndarray, kept: int) -> float:
    """KL(P || Q) for one number of kept bins."""
    p = counts[:kept].copy()
    p[-1] += counts[kept:].sum()
    begins = np.arange(128) * kept // 128
    filled = counts[:kept] > 0
    shares = np.add.reduceat(counts[:kept], begins) / np.maximum(
        np.add.reduceat(filled.astype(np.int64), begins), 1
    )
    q = np.repeat(shares, np.diff(begins, append=kept)) * filled
    p, q = p / p.sum(), q / q.sum()
    used = p > 0
    return np.inf if (q[used] == 0).any() else float((p[used] * np.log(p[used] / q[used])).sum())


def divergences(values: Floats32) -> npt.NDArray[np.float64]:
    """KL(P || Q) for 128 to 2048 kept bins."""
    counts, _ = np.histogram(np.abs(values.astype(np.float64)), 2048, (0, np.abs(values).max()))
    counts = counts.astype(np.float64)
    counts[0] = counts[1]
    return np.array([divergence(counts, kept) for kept in range(128, 2049)])


def test_entropy() -> None:
    # Powers of two: 2048 equal bins and the collected ones share their edges, so that both searches see the same.
    values = (np.random.default_rng(5).laplace(0, 0.1, 200_000)).astype(np.float32)
    values = np.append(values[np.abs(values) < 2.0], np.float32(2.0 - 2.0**-22))
    centred = (np.floor(np.abs(values) * 1024) + 0.5) / 1024
    values = np.append(centred[centred < 2.0], 2.0 - 2.0**-22).astype(np.float32)
    direct = divergences(values)
    kept = round(amax_of(TensorStatistics.of(values), "entropy") / float(values.max()) * 2048)
    assert direct[kept - 128] == pytest.approx(direct.min(), rel=0.02)
    counts = np.zeros(300)
    counts[1] = 5.0  # whatever is kept, it is told exactly
    assert _least_divergence(counts, 3.0) == 3.0
    assert _least_divergence(np.zeros(300), 3.0) == 3.0
    stats = TensorStatistics.of(np.random.default_rng(0).standard_t(3, 30_000))
    edges = np.append(np.linspace(0, stats.absmax, 2049)[:-1], np.inf)
    counts = np.interp(
        edges, stats.histogram.edges, np.append(0, np.cumsum(stats.histogram.counts))
    )
    assert (
        amax_of(stats, "entropy") == _least_divergence(np.diff(counts), stats.absmax) < stats.absmax
    )


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
    hnp.arrays(
        np.float32,
        st.integers(1, 40),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    st.sampled_from(METHODS),
)
def test_any_tensor_gets_a_usable_range(values: Floats32, method: str) -> None:
    stats = TensorStatistics.of(values)
    amax = amax_of(stats, method)
    assert 0 < amax < math.inf
    assert amax <= max(stats.absmax, 1.0)
    assert squared_error(stats, amax) >= 0


def test_groups_and_shares() -> None:
    parts = [SAMPLES["relu"], SAMPLES["silu"] * np.float32(3)]
    merged = merge_all(TensorStatistics.of(p) for p in parts)
    together = TensorStatistics.of(np.concatenate(parts))
    for method in METHODS:
        assert amax_of(merged, method) == amax_of(together, method)
    half = TensorStatistics.of(np.repeat(np.array([0.0, 4.0], np.float32), 10))  # 4 begins a bin
    assert clipped_fraction(half, 4.0) == clipped_fraction(half, 5.0) == 0.0
    assert clipped_fraction(half, 3.999) == clipped_fraction(half, 1e-3) == pytest.approx(0.5)
    assert clipped_fraction(half, 1e-12) == pytest.approx(1.0, abs=1e-4), (
        "zeros, as far as a bin can tell"
    )
    assert (
        clipped_fraction(TensorStatistics(), 1.0)
        == clipped_fraction(TensorStatistics(), -1.0)
        == 0.0
    )


Floats = npt.NDArray[np.float64]
EVEN = ((np.arange(1 << 16) + 0.5) / (1 << 16)).astype(np.float32)  # from 0 to 1
TWO = TensorStatistics.of(np.array([0.0, 0.75], np.float32))


@pytest.mark.parametrize("percentile", [-0.5, 0.0, 100.5, math.nan])
def test_other_percentiles_are_refused_by_every_method(percentile: float) -> None:
    with raises(ValueError, f"range_of {percentile:g}"):
        amax_of(TWO, "max", percentile)
    with raises(ValueError, "range_of min"):
        range_of(TWO, "min")


def test_zeros_and_single_values() -> None:
    """50 of 100 values are zero: the 50th of them still is, the one after no longer."""
    half = TensorStatistics.of(np.repeat(np.array([0.0, 0.5, 0.75], np.float32), (50, 25, 25)))
    assert amax_of(half, "percentile", 50.0) == 0.75
    assert amax_of(half, "percentile", 51.0) == pytest.approx(0.5, rel=0.001)
    smallest = np.float32(
        2.0**-20
    )  # of the first bin above the lowest, which reaches a thousandth higher
    low = TensorStatistics.of(np.repeat(np.array([smallest, 0.75], np.float32), (90, 10)))
    assert smallest < amax_of(low, "percentile", 45.0) < smallest * (1 + 1 / 1024)
    smallest = 2.0**-126
    stats = TensorStatistics.of(np.array([smallest], np.float32))
    assert squared_error(stats, smallest / 2) == pytest.approx(smallest**2 / 4, rel=1e-2)
    one = TensorStatistics.of(np.append(np.full(1000, 0.75), 0.001))  # once, below all others
    assert squared_error(one, 0.75) == pytest.approx(
        0.001**2 / 1001, rel=0.01
    )  # 0.17 of a step is rounded to zero


def test_what_the_power_needs() -> None:
    looked, empty, odd = TensorStatistics.of(EVEN), TensorStatistics.of(EVEN), TensorStatistics()
    looked.add_focus([EVEN[:100]])
    empty.add_focus([])
    odd.focus = looked.focus
    assert focus_power([looked]) == focus_power([looked, looked]) == 3.0
    for parts in ([], [empty], [looked, empty], [odd], [looked, odd]):
        assert focus_power(parts) == 2.0
    tried: list[float] = []

    def search(power: float) -> float:
        tried.append(power)
        return 1000.0

    stats = TensorStatistics.of(np.array([-0.5, 4.0]))
    assert settle([stats], search, lambda ranges, power: np.ones(len(ranges))) == Range(1000.0, 2.0)
    assert tried == [2.0]
    values = TensorStatistics.of(EVEN)
    assert {m: range_of(values, m).power for m in methods.METHODS} == {
        "max": None,
        "percentile": None,
        "mse": 2.0,
        "entropy": None,
        "focus": 2.0,
    }
    assert range_of(TensorStatistics.of(np.zeros(9)), "mse") == Range(1.0, None)
    assert range_of(TensorStatistics.of(np.full(9, 0.99 * 2.0**MIN_TOP)), "mse") == Range(1.0, None)
    assert range_of(TensorStatistics.of(np.full(9, 2.0**MIN_TOP)), "max") == Range(
        2.0**MIN_TOP, None
    )


@pytest.mark.parametrize("levels", [None, 100, 127])
def test_values_spread_evenly_have_the_error_of_theory(levels: int | None) -> None:
    """A twelfth of the square of a step; 127 steps unless told."""
    stats = TensorStatistics.of(EVEN)
    found = squared_error(stats, 1.0) if levels is None else squared_error(stats, 1.0, levels)
    assert found == pytest.approx(1 / 12 / (levels or 127) ** 2, rel=1e-3)
    clipped = squared_error(stats, 0.5)  # and half of the values clipped, by a quarter on average
    assert clipped == pytest.approx(0.5 / 12 / 254**2 + 0.5 * (1 / 12 / 4 + 1 / 16), rel=1e-3)


@pytest.mark.parametrize("power", [1.0, 2.0, 2.5, 3.0])
def test_a_power_of_the_error(power: float) -> None:
    """The mean of |e|^p is (s/2)^p / (p + 1) where e is spread evenly over a step s."""
    whole, part = TensorStatistics.of(EVEN), TensorStatistics.of(EVEN)
    wanted = (0.5 / 127) ** power / (power + 1)
    assert focused_error(whole, np.array([1.0]), power)[0] == pytest.approx(wanted, rel=1e-3)
    part.add_focus([EVEN[: 1 << 15]])  # below a half, where no range of 0.5 clips
    clipped = 0.5**power / (power + 1)
    found = focused_error(part, np.array([1.0, 0.5]), power)
    half = (0.25 / 127) ** power / (power + 1)
    assert found == pytest.approx(
        [wanted, 0.9 * half + 0.1 * (0.5 * half + 0.5 * clipped)], rel=2e-3
    )


def test_errors_of_what_was_not_counted() -> None:
    ranges = np.array([0.5, 1.0])
    assert focused_error(TensorStatistics(64), ranges).tolist() == [0.0, 0.0]
    nothing = TensorStatistics.of(EVEN)
    nothing.add_focus([])  # a map of which no position was looked at
    assert nothing.focus is not None
    assert (
        focused_error(nothing, ranges).tolist()
        == focused_error(TensorStatistics.of(EVEN), ranges).tolist()
    )
    assert squared_error(TensorStatistics.of(EVEN), np.array(1.0)) == squared_error(
        TensorStatistics.of(EVEN), 1.0
    )
    assert squared_error(TensorStatistics(64), 1.0) == 0.0
    with pytest.raises(ValueError, match="above zero"):
        squared_error(TensorStatistics(64), 0.0)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Floats]:
    """The ranges whose errors are summed, as they come."""
    found: list[Floats] = []
    real = methods._total

    def watched(parts: list[tuple[Histogram, float]], ranges: Floats, power: float) -> Floats:
        found.append(ranges)
        return real(parts, ranges, power)

    monkeypatch.setattr(methods, "_total", watched)
    return found


@pytest.mark.parametrize("method", ["mse", "focus"])
def test_the_grid_of_the_search(tried: list[Floats], method: str) -> None:
    """Eight ranges to an octave, as far down as can be worth it, then eight more between two of them to either side."""
    stats = TensorStatistics.of(np.random.default_rng(2).laplace(0, 1, 30_000))
    found = amax_of(stats, method)
    grid = stats.absmax * 2.0 ** (-np.arange(97) / 8)
    coarse, fine = np.concatenate(tried[:-1]), tried[-1]
    assert coarse.tolist() == grid[: len(coarse)].tolist()
    best = grid[np.argmin(focused_error(stats, grid, bits=7))]
    assert fine == pytest.approx(
        [min(best * 2.0 ** (-k / 64), stats.absmax) for k in range(-8, 9)], rel=1e-12
    )
    assert found == fine[np.argmin(focused_error(stats, fine, bits=7))]
    assert 2.0**-SEARCH_BITS <= 0.008 < 2.0 ** (1 - SEARCH_BITS), (
        "bins of at most 0.8 % of their value"
    )
    assert amax_of(TensorStatistics.of(np.full(9, 0.75)), "mse") <= 0.75


def test_the_search_goes_down_twelve_octaves(tried: list[Floats]) -> None:
    """Where nearly all values lie still lower, and one alone is large."""
    low = 2.0**-13
    histogram = Histogram(np.array([0, 10**15, 0, 1]), np.array([0.0, low, low * 1.01, 0.99, 1.0]))
    methods._search([(histogram, 1.0)], 1.0, 2.0)
    assert np.concatenate(tried[:-1]).tolist() == (2.0 ** (-np.arange(97) / 8)).tolist()


def spotted(value: float, top: float) -> TensorStatistics:
    stats = TensorStatistics.of(np.array([0.0, top]))
    stats.spots = [np.full((48, 2), value, np.float32)]
    return stats


def test_ranges_near_the_one_found() -> None:
    """From two twelfths of an octave above it to two octaves below, none above the largest magnitude."""
    seen: list[Floats] = []

    def error(ranges: Floats) -> Floats:
        seen.append(ranges)
        return 1e-3 * (1.0 + (ranges - 1.0) ** 2)  # only ratios count

    for top in (9.0, 1.0625):
        stats = spotted(1.46 / 127, top)
        found = unbiased([stats], 1.0, error)
        near = np.minimum(2.0 ** (np.array([2, 1, *range(0, -25, -1)]) / 12), top)
        assert seen[-1] == pytest.approx(near, rel=1e-12)
        biased, whole = rounding(stats.spots, near, 127)
        total = error(near) / 1e-3 + 20.0 * (biased / whole[2]) ** 2
        assert found == pytest.approx(near[np.argmin(total)], rel=1e-12) and found < 1.0
    flat = spotted(0.0, 9.0)  # rounded exactly
    assert unbiased([flat], 1.0, lambda ranges: ranges) == 1.0
    assert unbiased([TWO], 0.5, lambda ranges: ranges) == 0.5
    biased = spotted(1.46 / 127, 9.0)
    assert unbiased([biased], 1.0, np.zeros_like) == 1.0
    error = lambda ranges: 1.0 + (ranges - 1.0) ** 2  # noqa: E731
    assert unbiased([biased, flat, TWO], 1.0, error) == unbiased([biased], 1.0, error) < 1.0


def test_the_biased_error_weighs_twenty_times() -> None:
    """A range three places below is taken where it costs less than it saves, and not where it costs more."""
    stats = spotted(1.46 / 127, 9.0)
    near = 2.0 ** (np.array([2, 1, *range(0, -25, -1)]) / 12)
    biased, whole = rounding(stats.spots, near, 127)
    saved = 20.0 * (biased[2] ** 2 - biased[5] ** 2) / whole[2] ** 2
    assert saved > 0.1
    for cost, place in ((0.98 * saved, 5), (1.02 * saved, 2)):
        costs = np.full(27, 1e9)
        costs[2], costs[5] = 1.0, 1.0 + cost
        assert unbiased([stats], 1.0, lambda ranges, costs=costs: costs) == pytest.approx(
            near[place], rel=1e-12
        )


def by_hand(counts: Floats) -> int:
    direct = np.array([divergence(counts, kept) for kept in range(128, len(counts) + 1)])
    return 128 + int(direct.argmin())


@pytest.mark.parametrize("pile", [0, 1, 4000])
@pytest.mark.parametrize("bins", [129, 190])
def test_the_least_divergence_with_a_pile_at_the_end(bins: int, pile: int) -> None:
    counts = (
        np.random.default_rng(bins).poisson(300 * np.exp(-np.arange(bins) / 25)).astype(np.float64)
    )
    counts[-1] = pile
    counts[0] = counts[1]
    kept = by_hand(counts)
    found = round(_least_divergence(counts, 1.0) * bins)
    assert divergence(counts, found) == pytest.approx(divergence(counts, kept), rel=1e-9)
    counts[0] = 1e6  # zeros, which have no say
    assert round(_least_divergence(counts, 1.0) * bins) == found


@pytest.mark.parametrize("method", METHODS)
def test_seeing_everything_many_times_changes_no_range(method: str) -> None:
    """Ranges depend on shares, not on counts: few values, or each of them a thousand times."""
    values = np.random.default_rng(3).laplace(0, 1, 300).astype(np.float32)
    once, often = TensorStatistics.of(values), TensorStatistics.of(np.tile(values, 1000))
    assert amax_of(once, method) == pytest.approx(amax_of(often, method), rel=1e-6)

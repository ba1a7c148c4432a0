import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from calibration.methods import (
    METHODS,
    SEARCH_BITS,
    Range,
    amax_of,
    choose_range,
    clipped_fraction,
    clipping_error,
    entropy_range,
    focus_power,
    focused_error,
    reduce_bias,
    squared_error,
)
from calibration.statistics import MIN_TOP, TensorStatistics, rounding_errors

Floats32 = np.ndarray
Floats = np.ndarray


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
EVEN = ((np.arange(1 << 16) + 0.5) / (1 << 16)).astype(np.float32)  # from 0 to 1


def quantization_error(values: Floats32, amax: float, levels: int = 127) -> float:
    scale, exact = amax / levels, values.astype(np.float64)
    return float(np.mean((exact - np.clip(np.rint(exact / scale), -levels, levels) * scale) ** 2))


@pytest.fixture
def values(name: str) -> np.ndarray:
    return SAMPLES[name]


@each_sample
def test_max_is_the_largest_magnitude(values: np.ndarray) -> None:
    assert amax_of(TensorStatistics.of(values), "max") == float(np.abs(values).max())


@each_sample
def test_mse_has_the_least_squared_error(values: np.ndarray) -> None:
    error = quantization_error(values, amax_of(TensorStatistics.of(values), "mse"))
    ranges = np.abs(values).max() * np.exp2(-np.arange(0, 12, 1 / 32))
    assert error <= min(quantization_error(values, float(amax)) for amax in ranges) * 1.01


@each_sample
@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.99, 100.0])
def test_percentile_is_within_a_bin(name: str, percentile: float) -> None:
    magnitudes = np.sort(np.abs(SAMPLES[name].astype(np.float64)))
    amax = amax_of(TensorStatistics.of(SAMPLES[name]), "percentile", percentile)
    if np.percentile(magnitudes, percentile) == 0:  # half of the values of the ReLU
        assert amax == magnitudes[-1]
        return
    # The value of that rank and its neighbors; numpy interpolates between two of them.
    position = percentile / 100 * (len(magnitudes) - 1)
    low = magnitudes[max(math.floor(position) - 1, 0)]
    high = magnitudes[min(math.ceil(position) + 1, len(magnitudes) - 1)]
    assert low * (1 - 1 / 512) - 1e-6 * magnitudes[-1] <= amax <= high * (1 + 1 / 512)


def test_percentile_of_zeros_and_of_the_lowest_bin() -> None:
    half = TensorStatistics.of(np.repeat(np.array([0.0, 0.5, 0.75], np.float32), (50, 25, 25)))
    assert amax_of(half, "percentile", 50.0) == 0.75
    assert amax_of(half, "percentile", 51.0) == pytest.approx(0.5, rel=0.001)
    # The first bin above the lowest begins at 2**-20 and reaches a thousandth higher.
    low = TensorStatistics.of(np.repeat(np.array([2.0**-20, 0.75], np.float32), (90, 10)))
    assert 2.0**-20 < amax_of(low, "percentile", 45.0) < 2.0**-20 * (1 + 1 / 1024)


@pytest.mark.parametrize(
    ("method", "percentile", "message"),
    [
        *(("max", p, f"percentile is {p:g}") for p in (-0.5, 0.0, 100.5, math.nan)),
        ("min", 99.0, "'min' is unknown"),
    ],
)
def test_other_methods_and_percentiles_are_rejected(
    method: str, percentile: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_range(TensorStatistics.of(EVEN), method, percentile)


@each_sample
@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.31, 0.1, 0.02])
def test_squared_error_is_that_of_quantizing(fraction: float, values: np.ndarray) -> None:
    amax = float(np.abs(values).max()) * fraction
    assert squared_error(TensorStatistics.of(values), amax) == pytest.approx(
        quantization_error(values, amax), rel=0.02
    )


def with_rare_part(values: Floats32, share: float) -> TensorStatistics:
    stats = TensorStatistics.of(values)
    stats.add_focus([values[: round(share * len(values))]])
    return stats


SEARCHED = {
    "mse": ("mse", 0.0),
    "focus of a quarter": ("focus", 0.25),
    "focus of a ninth": ("focus", 0.11),
    "focus of a fiftieth": ("focus", 0.02),
}


@each_sample
@pytest.mark.parametrize(("method", "share"), SEARCHED.values(), ids=SEARCHED)
def test_search_finds_the_best_range_of_its_grid(name: str, method: str, share: float) -> None:
    """The grid has eight ranges for each of twelve octaves, then eight more on each side of the best.

    The search may skip ranges only if none of them can be the best.
    """
    sample = SAMPLES[name]
    stats = with_rare_part(sample, share) if share else TensorStatistics.of(sample)
    amax, power = choose_range(stats, method)

    def best(ranges: Floats) -> float:
        return float(ranges[np.argmin(focused_error(stats, ranges, power, bits=SEARCH_BITS))])

    coarse = best(stats.absmax * 2.0 ** (-np.arange(97) / 8))
    fine = np.minimum(coarse * 2.0 ** (-np.arange(-8, 9) / 64), stats.absmax)
    assert amax == pytest.approx(best(fine), rel=1e-12)


@each_sample
@pytest.mark.parametrize("power", [2.0, 2.6, 3.0])
def test_clipping_error_is_a_lower_bound(name: str, power: float) -> None:
    stats = TensorStatistics.of(SAMPLES[name])
    histogram = stats.coarse(SEARCH_BITS)
    for amax in stats.absmax * np.exp2(-np.arange(0, 97, 4) / 8):
        beyond = np.maximum(np.abs(SAMPLES[name].astype(np.float64)) - amax, 0.0)
        assert clipping_error([(histogram, 1.0)], float(amax), power) <= (beyond**power).sum() * (
            1 + 1e-9
        )


def test_search_goes_down_twelve_octaves() -> None:
    """Nearly all values lie below the shortest range, so that range is the best."""
    assert 2.0**-SEARCH_BITS <= 0.008 < 2.0 ** (1 - SEARCH_BITS), "bins are 0.8 % of a value wide"
    many = TensorStatistics.of(EVEN * np.float32(2.0**-13))
    for _ in range(34):
        many = many.merge(many)
    stats = many.merge(TensorStatistics.of(np.ones(1, np.float32)))
    assert amax_of(stats, "mse") == pytest.approx(2.0 ** (-12 - 8 / 64), rel=1e-12)


@pytest.mark.parametrize("levels", [None, 100, 127])
def test_squared_error_of_evenly_spread_values(levels: int | None) -> None:
    """The error is a twelfth of the squared step; 127 steps by default."""
    stats = TensorStatistics.of(EVEN)
    error = squared_error(stats, 1.0) if levels is None else squared_error(stats, 1.0, levels)
    assert error == pytest.approx(1 / 12 / (levels or 127) ** 2, rel=1e-3)


def test_squared_error_of_clipped_values() -> None:
    """A range of 0.5 rounds half of the values, and clips the other half by a quarter on average."""
    error = squared_error(TensorStatistics.of(EVEN), 0.5)
    assert error == pytest.approx(0.5 / 12 / 254**2 + 0.5 * (1 / 12 / 4 + 1 / 16), rel=1e-3)
    assert error == squared_error(TensorStatistics.of(EVEN), np.array(0.5))


def test_squared_error_of_single_values() -> None:
    smallest = TensorStatistics.of(np.array([2.0**-126], np.float32))
    assert squared_error(smallest, 2.0**-127) == pytest.approx(2.0**-254, rel=1e-2)
    # 0.001 is 0.17 of a step: one value in 1001 is rounded to zero.
    one_low = TensorStatistics.of(np.append(np.full(1000, 0.75), 0.001))
    assert squared_error(one_low, 0.75) == pytest.approx(0.001**2 / 1001, rel=0.01)


@pytest.mark.parametrize("power", [1.0, 2.0, 2.5, 3.0])
def test_focused_error_to_a_power(power: float) -> None:
    """The mean of |e|^p is (s/2)^p / (p + 1) where e is spread evenly over a step s."""
    error = (0.5 / 127) ** power / (power + 1)
    assert focused_error(TensorStatistics.of(EVEN), np.array([1.0]), power)[0] == pytest.approx(
        error, rel=1e-3
    )
    # The focus is on the values below a half, where no range of 0.5 clips.
    half, clipped = (0.25 / 127) ** power / (power + 1), 0.5**power / (power + 1)
    errors = focused_error(with_rare_part(EVEN, 0.5), np.array([1.0, 0.5]), power)
    expected = [error, 0.9 * half + 0.1 * (0.5 * half + 0.5 * clipped)]
    assert errors == pytest.approx(expected, rel=2e-3)


def test_focused_error_without_positions_is_that_of_all_values() -> None:
    ranges = np.array([0.5, 1.0])
    stats = with_rare_part(EVEN, 0.0)  # a map without positions in focus
    assert stats.focus is not None
    assert (focused_error(stats, ranges) == squared_error(TensorStatistics.of(EVEN), ranges)).all()


def test_errors_of_nothing_are_zero() -> None:
    assert focused_error(TensorStatistics(64), np.array([0.5, 1.0])).tolist() == [0.0, 0.0]
    assert squared_error(TensorStatistics(64), 1.0) == 0.0
    with pytest.raises(ValueError, match="above zero"):
        squared_error(TensorStatistics(64), 0.0)


def test_focused_error_needs_a_power_of_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        focused_error(TensorStatistics(64), np.array([1.0]), power=0.5)


@each_sample
def test_clipped_fraction_is_the_share_of_larger_values(values: np.ndarray) -> None:
    stats = TensorStatistics.of(values)
    for amax in np.array([0.3, 0.9, 1.0, 2.0]) * stats.absmax:
        direct = float(np.mean(np.abs(values) > amax))
        assert clipped_fraction(stats, float(amax)) == pytest.approx(direct, abs=0.005)


@pytest.mark.parametrize(
    ("amax", "fraction"),
    [
        (5.0, 0.0),
        (-1.0, 1.0),
        (4.0, 0.0),
        (3.999, 0.5),
        (1e-3, 0.5),
        pytest.param(1e-12, 1.0, id="within the bin of the zeros"),
    ],
)
def test_clipped_fraction_at_the_edges_of_bins(amax: float, fraction: float) -> None:
    half = TensorStatistics.of(np.repeat(np.array([0.0, 4.0], np.float32), 10))  # 4 begins a bin
    assert clipped_fraction(half, amax) == pytest.approx(fraction, abs=1e-4)
    assert clipped_fraction(TensorStatistics(), amax) == 0.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "values",
    [np.zeros(100), np.zeros(0), np.full(10, 1e-40), np.full(9, 0.99 * 2.0**MIN_TOP)],
    ids=["zeros", "nothing", "subnormal", "below the window"],
)
def test_tensor_without_magnitudes_gets_the_range_one(values: Floats, method: str) -> None:
    assert choose_range(TensorStatistics.of(values.astype(np.float32)), method) == Range(1.0, None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [3.0, -0.2, 0.75, 1e-20, 1e30, 1.0, 2.0**MIN_TOP])
def test_constant_tensor_is_represented(method: str, value: float) -> None:
    values = np.full(100, value, np.float32)
    amax = amax_of(TensorStatistics.of(values), method)
    assert math.sqrt(quantization_error(values, amax)) <= abs(value) / 100
    assert amax <= np.abs(values[0])


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
    assert 0 < amax <= max(stats.absmax, 1.0) < math.inf and squared_error(stats, amax) >= 0


@pytest.mark.parametrize("method", METHODS)
def test_range_depends_on_shares_and_not_on_counts(method: str) -> None:
    values = np.random.default_rng(3).laplace(0, 1, 300).astype(np.float32)
    once, often = TensorStatistics.of(values), TensorStatistics.of(np.tile(values, 1000))
    assert amax_of(once, method) == pytest.approx(amax_of(often, method), rel=1e-6)


@pytest.mark.parametrize(
    ("method", "power"),
    [("max", None), ("percentile", None), ("mse", 2.0), ("entropy", None), ("focus", 2.0)],
)
def test_power_of_each_method(method: str, power: float | None) -> None:
    assert choose_range(TensorStatistics.of(EVEN), method).power == power


# Entropy


def divergence(counts: Floats, kept: int) -> float:
    p = counts[:kept].copy()
    p[-1] += counts[kept:].sum()
    begins, filled = np.arange(128) * kept // 128, counts[:kept] > 0
    sizes = np.maximum(np.add.reduceat(filled.astype(np.int64), begins), 1)
    q = np.repeat(np.add.reduceat(counts[:kept], begins) / sizes, np.diff(begins, append=kept))
    q *= filled
    p, q = p / p.sum(), q / q.sum()
    used = p > 0
    return np.inf if (q[used] == 0).any() else float((p[used] * np.log(p[used] / q[used])).sum())


def divergences(counts: Floats) -> Floats:
    return np.array([divergence(counts, kept) for kept in range(128, len(counts) + 1)])


def test_entropy_has_the_least_divergence_over_2048_bins() -> None:
    # The largest magnitude is nearly 2: 2048 equal bins and the collected ones share their edges.
    values = np.abs(np.random.default_rng(5).laplace(0, 0.1, 200_000))
    centers = (np.floor(values * 1024) + 0.5) / 1024
    values = np.append(centers[centers < 2.0], 2.0 - 2.0**-22).astype(np.float32)
    counts, _ = np.histogram(values.astype(np.float64), 2048, (0, values.max()))
    counts[0] = counts[1]
    direct = divergences(counts.astype(np.float64))
    kept = round(amax_of(TensorStatistics.of(values), "entropy") / float(values.max()) * 2048)
    assert direct[kept - 128] == pytest.approx(direct.min(), rel=0.02)


def test_entropy_splits_the_collected_bins_evenly() -> None:
    stats = TensorStatistics.of(np.random.default_rng(0).standard_t(3, 30_000))
    edges = np.append(np.linspace(0, stats.absmax, 2049)[:-1], np.inf)
    cumulative = np.append(0, np.cumsum(stats.histogram.counts))
    counts = np.diff(np.interp(edges, stats.histogram.edges, cumulative))
    assert amax_of(stats, "entropy") == entropy_range(counts, stats.absmax) < stats.absmax


@pytest.mark.parametrize("filled", [0, 1])
def test_least_divergence_keeps_everything_if_every_range_is_exact(filled: int) -> None:
    counts = np.zeros(300)
    counts[1] = 5.0 * filled
    assert entropy_range(counts, 3.0) == 3.0


@pytest.mark.parametrize("pile", [0, 1, 4000])
@pytest.mark.parametrize("bins", [129, 190])
def test_least_divergence_with_a_pile_at_the_end(bins: int, pile: int) -> None:
    means = 300 * np.exp(-np.arange(bins) / 25)
    counts = np.random.default_rng(bins).poisson(means).astype(np.float64)
    counts[-1] = pile
    counts[0] = counts[1]
    kept = round(entropy_range(counts, 1.0) * bins)
    assert divergence(counts, kept) == pytest.approx(divergences(counts).min(), rel=1e-9)
    counts[0] = 1e6  # zeros do not count
    assert round(entropy_range(counts, 1.0) * bins) == kept


# Focus: the power, and ranges near the one of least error


def test_focus_power_needs_the_focus_of_every_tensor() -> None:
    rare, unfocused = with_rare_part(EVEN, 0.001), TensorStatistics()
    unfocused.focus = rare.focus
    nowhere = with_rare_part(EVEN, 0.0)
    assert focus_power([rare]) == focus_power([rare, rare]) == 3.0
    for parts in ([], [nowhere], [rare, nowhere], [unfocused], [rare, unfocused]):
        assert focus_power(parts) == 2.0


# From two twelfths of an octave above the best range to two octaves below.
NEAR = 2.0 ** (np.array([2, 1, *range(0, -25, -1)]) / 12)


def flat_area(value: float, top: float = 9.0) -> TensorStatistics:
    stats = TensorStatistics.of(np.array([0.0, top]))
    stats.spots = [np.full((48, 2), value, np.float32)]
    return stats


def parabola(ranges: Floats) -> Floats:
    return 1e-3 * (1.0 + (ranges - 1.0) ** 2)  # only ratios count


@pytest.mark.parametrize("top", [9.0, 1.0625])
def test_reduce_bias_weighs_the_biased_error_of_ranges_near(top: float) -> None:
    stats, tried = flat_area(1.46 / 127, top), list[Floats]()

    def error(ranges: Floats) -> Floats:
        tried.append(ranges)
        return parabola(ranges)

    amax, ranges = reduce_bias([stats], 1.0, error), np.minimum(NEAR, top)
    assert tried[0] == pytest.approx(ranges, rel=1e-12)
    biased, whole = rounding_errors(stats.spots, ranges, 127)
    costs = parabola(ranges) / 1e-3 + 20.0 * (biased / whole[2]) ** 2
    assert amax == pytest.approx(ranges[np.argmin(costs)], rel=1e-12) and amax < 1.0


@pytest.mark.parametrize(
    ("stats", "error"),
    [
        pytest.param(flat_area(0.0), lambda ranges: ranges, id="rounded exactly"),
        pytest.param(TensorStatistics.of(EVEN), lambda ranges: ranges, id="no positions"),
        pytest.param(flat_area(1.46 / 127), np.zeros_like, id="no error"),
    ],
)
def test_reduce_bias_keeps_the_range(stats: TensorStatistics, error: object) -> None:
    assert reduce_bias([stats], 0.5, error) == 0.5  # type: ignore[arg-type]


def test_reduce_bias_ignores_tensors_without_a_biased_error() -> None:
    biased = flat_area(1.46 / 127)
    parts = [biased, flat_area(0.0), TensorStatistics.of(EVEN)]
    assert reduce_bias(parts, 1.0, parabola) == reduce_bias([biased], 1.0, parabola) < 1.0


@pytest.mark.parametrize(("cost", "place"), [(0.98, 5), (1.02, 2)])
def test_reduce_bias_weighs_the_biased_error_twenty_times(cost: float, place: int) -> None:
    """A smaller range is chosen only if it reduces the weighted error."""
    stats = flat_area(1.46 / 127)
    biased, whole = rounding_errors(stats.spots, NEAR, 127)
    saved = 20.0 * (biased[2] ** 2 - biased[5] ** 2) / whole[2] ** 2
    assert saved > 0.1
    costs = np.full(27, 1e9)
    costs[2], costs[5] = 1.0, 1.0 + cost * saved
    assert reduce_bias([stats], 1.0, lambda ranges: costs) == pytest.approx(NEAR[place], rel=1e-12)

"""A few positions of a few images, and the errors that are the same all over an image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from calibration import TensorStatistics, amax_of, collect, load_statistics
from calibration.methods import BIASED_WEIGHT, unbiased
from calibration.statistics import IMAGES, POSITIONS, rounding, spotted_samples, taken
from tests.calibration.nets import conv_net

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("array", [
    np.zeros((1, 4), np.float32), np.zeros((1, 4, 6, 7), np.float32), np.zeros((0, 4, 20, 20), np.float32),
    np.zeros((1, 0, 20, 20), np.float32), np.full((1, 4, 20, 20), np.inf, np.float32),
])  # fmt: skip
def test_what_is_no_map_gives_none(array: npt.NDArray[np.float32]) -> None:
    assert taken(array, 3) is None


def test_noise_has_no_biased_error_and_a_flat_image_nothing_else() -> None:
    noise = [RNG.normal(0, 20, (POSITIONS, 40)).astype(np.float32) for _ in range(16)]
    flat = [np.repeat(RNG.normal(0, 20, (1, 40)), POSITIONS, axis=0).astype(np.float32) for _ in range(16)]
    biased, whole = rounding(noise, np.array([100.0]), 127)
    assert biased[0] < 0.02 * whole[0]
    biased, whole = rounding(flat, np.array([100.0]), 127)
    assert biased[0] == pytest.approx(whole[0], rel=1e-4)


def paper(ink: float, share: float, flat: bool) -> TensorStatistics:
    """Two channels over a map, 1.5 steps of 1 / 127 each in the background, and rare larger values."""
    stats = TensorStatistics()
    rng = np.random.default_rng(4)
    for number in range(4):
        array = np.full((1, 2, 64, 64), 1.5 / 127, np.float32)
        if not flat:
            array += rng.normal(0, 0.05, array.shape).astype(np.float32)
        drawn = rng.random(array.shape) < share
        array[drawn] = rng.uniform(0.3, ink, int(drawn.sum())).astype(np.float32)
        stats.add(array)
        stats.add_spots(array, number)
    return stats


def test_a_range_moves_where_a_flat_area_would_be_rounded_the_same_way_everywhere() -> None:
    flat, noisy = paper(1.0, 0.02, flat=True), paper(1.0, 0.02, flat=False)
    kept = flat.spots
    flat.spots = []
    least = amax_of(flat, "focus")
    assert least == amax_of(flat, "mse")
    # Such a background lies 0.46 of a step from the next integer at this range; at a shorter one nearer to two steps.
    flat.spots = [np.full_like(s, 1.46 * least / 127) for s in kept]
    found = amax_of(flat, "focus")
    wrong = lambda amax: abs(round(1.46 * least / amax) * amax / 127 - 1.46 * least / 127)  # noqa: E731
    assert found < least and wrong(found) < 0.75 * wrong(least)
    assert amax_of(noisy, "focus") == amax_of(noisy, "mse")


def test_the_sum_is_the_least_among_ranges_near() -> None:
    stats = paper(1.0, 0.2, flat=True)
    error = lambda at: 1.0 + 30.0 * (at / 0.9 - 1.0) ** 2  # noqa: E731
    found = unbiased([stats], 0.9, error)

    def total(amax: float) -> float:
        biased, _ = rounding(stats.spots, np.array([amax]), 127)
        _, whole = rounding(stats.spots, np.array([0.9]), 127)
        return float(error(amax) + BIASED_WEIGHT * (biased[0] / whole[0]) ** 2)

    near = 0.9 * 2.0 ** (np.arange(-24, 3) / 12)
    assert total(found) == pytest.approx(min(map(total, near[near <= stats.absmax])), rel=1e-6)
    assert unbiased([TensorStatistics.of(np.ones(9))], 0.9, error) == 0.9  # nothing is known of it
    assert unbiased([stats], 0.9, np.zeros_like) == 0.9  # nothing to lose


def test_they_are_kept_with_the_statistics(tmp_path: Path) -> None:
    samples = [{"images": RNG.random((1, 3, 16, 16), np.float32)} for _ in range(40)]
    cache = tmp_path / "cache.npz"
    found = collect(conv_net(), samples, ["images", "c1"], cache=cache, progress=False)
    assert [len(found[n].spots) for n in found] == [IMAGES, IMAGES]
    wanted = sorted(bytes(v) for k in spotted_samples(40) if (v := taken(samples[k]["images"], k)) is not None)
    assert sorted(map(bytes, found["images"].spots)) == wanted
    back = load_statistics(cache)
    assert sorted(map(bytes, back["images"].spots)) == wanted
    half = found["c1"].merge(back["c1"])
    assert amax_of(half, "focus") == pytest.approx(amax_of(found["c1"], "focus"), rel=1e-6)


PART = 0.6180339887498949


@pytest.mark.parametrize("samples", [0, 1, 15, 16, 17, 33, 100])
def test_sixteen_samples(samples: int) -> None:
    wanted = {k * samples // 16 for k in range(16)} if samples > 16 else set(range(16))
    assert spotted_samples(samples) == wanted and len(wanted) == 16
    assert spotted_samples(None) == set(range(16))


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

import math
from pathlib import Path

import numpy as np
import pytest

from calibration import Focus, TensorStatistics, amax_of, collect, load_statistics
from calibration.focus import THRESHOLD, FocusMap, dilate_mask, resize_mask
from calibration.methods import (
    FOCUS_WEIGHT,
    choose_focus_range,
    choose_range,
    focus_power,
    focused_error,
)
from qdqtool.errors import DataError
from tests.calibration.checks import counts_of
from tests.calibration.nets import conv_net, run_all
from tests.errors import has

RNG = np.random.default_rng(0)
Mask = np.ndarray
Floats = np.ndarray


def mask_of(height: int, width: int, *cells: tuple[int, int]) -> Mask:
    mask = np.zeros((height, width), bool)
    for y, x in cells:
        mask[y, x] = True
    return mask


# Masks


def touched(mask: Mask, height: int, width: int) -> Mask:
    def overlap(cells: int, others: int) -> Mask:
        i, k = np.arange(cells)[:, None], np.arange(others)
        end = np.minimum((i + 1) / cells, (k + 1) / others)
        return np.asarray(end - np.maximum(i / cells, k / others) > 1e-9)

    rows, columns = overlap(height, mask.shape[0]), overlap(mask.shape[1], width)
    return np.asarray(rows.astype(int) @ mask @ columns > 0)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (16, 24), (4, 2), (1, 1), (5, 7), (12, 3)])
def test_resized_mask_has_every_cell_that_is_touched(height: int, width: int) -> None:
    mask = RNG.random((8, 8)) > 0.85
    np.testing.assert_array_equal(resize_mask(mask, height, width), touched(mask, height, width))


@pytest.mark.parametrize("y", range(4))
@pytest.mark.parametrize("x", range(3))
def test_dilated_mask_has_the_neighbors(y: int, x: int) -> None:
    mask = mask_of(4, 3, (y, x))
    neighbors = [[abs(i - y) <= 1 and abs(j - x) <= 1 for j in range(3)] for i in range(4)]
    assert dilate_mask(mask).tolist() == neighbors and mask.sum() == 1


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3, 8, 2)])
def test_values_of_a_map_are_those_under_the_mask(shape: tuple[int, ...]) -> None:
    positions = FocusMap([mask_of(4, 4, (0, 0)), mask_of(4, 4, (3, 3), (3, 2))])
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for part, values, mask in zip(positions.values(array), array, positions.masks, strict=True):
        assert part.tolist() == values[:, touched(mask, *shape[2:])].tolist()


@pytest.mark.parametrize(
    "shape",
    [(1, 3, 4, 4), (3, 3, 4, 4), (2, 3, 4), (2, 3, 4, 4, 1), (2, 0, 4, 4), (2, 3, 0, 4)],
)
def test_other_activations_have_no_values(shape: tuple[int, ...]) -> None:
    assert (
        FocusMap([mask_of(4, 4, (0, 0)), mask_of(4, 4, (3, 3))]).values(np.zeros(shape, np.float32))
        == []
    )


FULL, MOST = np.ones((2, 2), bool), mask_of(2, 2, (0, 0), (0, 1), (1, 0))


@pytest.mark.parametrize(
    ("shape", "masks", "covers"),
    [
        ((2, 3, 4, 4), [FULL, FULL], True),
        ((2, 3, 5, 1), [FULL, FULL], True),
        ((2, 3, 4, 4), [FULL, MOST], False),
        ((2, 3, 1, 2), [FULL, MOST], True),
        ((1, 3, 4, 4), [FULL, FULL], False),
        ((2, 3, 4), [FULL, FULL], False),
        ((1, 1, 2, 2), [MOST], False),
    ],
)
def test_mask_covers_a_map_if_it_has_all_positions(
    shape: tuple[int, ...], masks: list[Mask], covers: bool
) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert FocusMap(masks).covers(array) is covers
    if covers:
        values = np.concatenate([v.ravel() for v in FocusMap(masks).values(array)])
        assert values.tolist() == array.ravel().tolist()


# Positions


def class_output(*values: float) -> Floats:
    array = np.full((1, 1, 10, 10), -9.0, np.float32)
    array[0, 0, 0, : 3 * len(values) : 3] = values
    return array


def find_mask(threshold: float, share: float, **outputs: Floats) -> Mask:
    positions = Focus(tuple(outputs), threshold, share).find(outputs)
    assert positions is not None and len(positions.masks) == 1
    return positions.masks[0]


def first_cells(count: int) -> Mask:
    return dilate_mask(mask_of(10, 10, *[(0, 3 * k) for k in range(count)]))


def test_default_threshold_is_a_score_of_a_tenth() -> None:
    default = Focus(("a",))
    assert 1 / (1 + math.exp(-default.threshold)) == pytest.approx(0.1) and default.share == 0.001


def test_positions_of_every_sample_and_map() -> None:
    fine, coarse = np.full((2, 3, 8, 8), -9.0, np.float32), np.full((2, 3, 4, 4), -9.0, np.float32)
    fine[0, 1, 6, 6] = coarse[0, 2, 0, 0] = THRESHOLD + 0.1
    fine[1, 0, 0, 7] = THRESHOLD - 1.0  # the highest of the second sample
    positions = Focus(("fine", "coarse")).find({"fine": fine, "coarse": coarse})
    first, second = np.zeros((2, 8, 8), bool)
    first[5:8, 5:8] = first[:4, :4] = second[:2, 6:] = True
    np.testing.assert_array_equal(positions.masks, [first, second])


@pytest.mark.parametrize(("threshold", "count"), [(0.5, 2), (0.5001, 1), (5.0, 1)])
def test_positions_over_the_threshold_and_the_highest_at_least(
    threshold: float, count: int
) -> None:
    assert (find_mask(threshold, 0.0, a=class_output(1.0, 0.5)) == first_cells(count)).all()


def test_positions_of_any_class() -> None:
    two = np.concatenate([class_output(1.0), class_output(-9.0, 1.0)], axis=1)
    assert (find_mask(0.5, 0.0, a=two) == first_cells(2)).all()


def test_mask_has_the_largest_height_and_width_of_all_maps() -> None:
    wide, tall = np.full((1, 1, 2, 8), -9.0, np.float32), np.full((1, 1, 8, 2), -9.0, np.float32)
    wide[0, 0, 0, 0] = 1.0
    mask = find_mask(0.5, 0.0, a=wide, b=tall)
    assert (mask == resize_mask(dilate_mask(mask_of(2, 8, (0, 0))), 8, 8)).all()


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 1), (0.0149, 1), (0.0151, 2), (0.0249, 2), (0.0251, 3)]
)
def test_positions_of_the_highest_share_of_all_maps(share: float, count: int) -> None:
    output = class_output(4.0, 3.0, 2.0)
    assert (find_mask(9.0, share, a=output) == first_cells(count)).all()
    # With a second map of as many positions, half the share means the same number of them.
    assert (find_mask(9.0, share / 2, a=output, b=class_output()) == first_cells(count)).all()


SCORES = np.zeros((1, 2, 3, 3))
WITHOUT_POSITIONS = {
    "nan": np.full((1, 2, 3, 3), np.nan),
    "inf": np.full((1, 2, 3, 3), np.inf),
    **{
        str(shape): np.zeros(shape)
        for shape in ((1, 4), (1, 2, 3, 3, 1), (1, 0, 3, 3), (0, 2, 3, 3), (1, 2, 0, 3))
    },
}


@pytest.mark.parametrize(
    "outputs",
    [
        *(pytest.param({"a": output}, id=name) for name, output in WITHOUT_POSITIONS.items()),
        *(
            pytest.param({"a": SCORES, "b": output}, id=f"scores and {name}")
            for name, output in WITHOUT_POSITIONS.items()
        ),
        pytest.param({"a": SCORES, "b": np.zeros((2, 2, 3, 3))}, id="different batches"),
        pytest.param({}, id="no output"),
    ],
)
def test_one_output_without_positions_is_enough_to_find_none(outputs: dict[str, Floats]) -> None:
    assert Focus(tuple(outputs)).find(outputs) is None


# Ranges


def focused(values: Floats, part: Floats) -> TensorStatistics:
    stats = TensorStatistics.of(values)
    stats.add_focus([part])
    return stats


def weighted_error(values: Floats, part: Floats, ranges: Floats, power: float) -> Floats:
    def error(values: Floats, amax: float) -> float:
        unit = amax / 127
        rounded = np.clip(np.rint(values / unit), -127, 127) * unit
        return float(np.mean(np.abs(rounded - values) ** power))

    return np.array(
        [(1 - FOCUS_WEIGHT) * error(values, a) + FOCUS_WEIGHT * error(part, a) for a in ranges]
    )


def test_focus_has_the_least_weighted_error() -> None:
    part = (RNG.standard_normal(3_000) * 4).astype(np.float32)
    values = np.concatenate([RNG.standard_normal(60_000).astype(np.float32), part])
    stats = focused(values, part)
    ranges = np.geomspace(1.0, stats.absmax, 200)
    errors = weighted_error(values, part, ranges, 3.0)  # 3,000 of 63,000 values are rare
    np.testing.assert_allclose(focused_error(stats, ranges, 3.0), errors, rtol=0.03, atol=1e-7)
    amax = amax_of(stats, "focus")
    assert np.interp(amax, ranges, errors) <= errors.min() * 1.05 and amax > amax_of(stats, "mse")


@pytest.mark.parametrize(
    ("rare", "power"), [(40, 3.0), (60, 3.0), (120, 2.5), (150, 2.25), (180, 2.0), (900, 2.0)]
)
def test_focus_power_falls_with_the_share_of_the_focus(rare: int, power: float) -> None:
    stats = focused(np.ones(1000, np.float32), np.ones(rare, np.float32))
    assert focus_power([stats]) == pytest.approx(power)
    assert focus_power([stats, TensorStatistics.of(np.ones(10))]) == 2.0


@pytest.mark.parametrize(("spread", "power"), [(2.0, 3.0), (30.0, 2.0)])
def test_focus_power_is_two_if_a_step_hides_the_negative_side(spread: float, power: float) -> None:
    """For SiLU of large values, one step is as large as the negative side."""
    inputs = np.random.default_rng(3).standard_normal(20_000) * spread
    values = (inputs / (1 + np.exp(-inputs))).astype(np.float32)
    stats = focused(values, values[:1_000])
    amax, used = choose_range(stats, "focus")
    assert used == power and amax == amax_of(stats, "focus")
    ranges = np.geomspace(stats.absmax / 4, stats.absmax, 200)
    errors = weighted_error(values, values[:1_000], ranges, power)
    assert np.interp(amax, ranges, errors) <= errors.min() * 1.05


@pytest.mark.parametrize(
    ("rare", "step", "first", "power"),
    [
        *((40, step, 3.0, power) for step, power in ((0.1, 3.0), (0.5, 3.0), (0.6, 2.8))),
        *((40, step, 3.0, power) for step, power in ((0.75, 2.5), (1.0, 2.0), (4.0, 2.0))),
        (40, None, 3.0, 3.0),
        (900, 4.0, 2.0, 2.0),
    ],
)
def test_focus_range_lowers_the_power_by_step_over_negative_depth(
    rare: int, step: float | None, first: float, power: float
) -> None:
    """A first power of two is not lowered, so the range is searched once."""
    depth = 0.25 if step is not None else 0.0  # a ReLU has no negative side
    values = np.append(np.full(1000, -depth, np.float32), np.float32(40.0))
    powers: list[float] = []

    def search(power: float) -> float:
        powers.append(power)
        return 127 * depth * (step or 1.0) if len(powers) == 1 else 1.5

    stats = focused(values, np.ones(rare, np.float32))
    amax, used = choose_focus_range([stats], search, lambda ranges, power: np.ones(len(ranges)))
    assert powers[0] == first and powers[-1] == used == pytest.approx(power)
    assert len(powers) == (1 if power == first else 2) and (amax == 1.5) == (power < first)


# Through a network


def test_focus_statistics_are_of_the_positions_and_kept_in_the_cache(tmp_path: Path) -> None:
    model, names, cache = conv_net(), ["images", "r2"], tmp_path / "cache.npz"
    samples = [{"images": RNG.random((1, 3, 16, 16), np.float32)} for _ in range(5)]
    looks = Focus(("c1",), threshold=0.0)
    statistics = collect(model, samples, names, focus=looks, progress=False, cache=cache)
    maps = {n: v.reshape(5, -1, 16, 16) for n, v in run_all(model, samples, ["c1", *names]).items()}
    masks = [touched(dilate_mask(scores.max(axis=0) > 0.0), 16, 16) for scores in maps["c1"]]
    again = collect(model, samples, names, focus=looks, progress=False, cache=cache)
    for name in names:
        inside = np.concatenate(
            [array[:, mask].ravel() for array, mask in zip(maps[name], masks, strict=True)]
        )
        part = statistics[name].focus
        assert part is not None and part.count == inside.size > 0
        assert part.absmax == pytest.approx(np.abs(inside).max(), rel=1e-6)
        for kept in (load_statistics(cache), again):
            assert counts_of(kept[name]) == counts_of(statistics[name])
    with pytest.raises(DataError, check=has("different-models", path=str(cache))):
        collect(model, samples, names, progress=False, cache=cache)
    other = collect(model, samples, names, progress=False, cache=cache, overwrite_cache=True)
    assert other["r2"].focus is None

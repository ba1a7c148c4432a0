import math
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from calibration import Statistics, amax_of, collect, load_statistics
from calibration.statistics import (
    IMAGES,
    POSITIONS,
    TensorStatistics,
    find_spots,
    merge_all,
    rounding_errors,
    sampling_step,
    spot_sample_numbers,
)
from qdqtool.errors import DataError
from tests.calibration.checks import counts_of
from tests.calibration.nets import conv_net
from tests.errors import has
from tests.trt.builder import Graph

RNG = np.random.default_rng(11)


def of(*values: float) -> TensorStatistics:
    return TensorStatistics.of(np.array(values, np.float32), 64)


def with_channels(number: int) -> TensorStatistics:
    stats = TensorStatistics()
    stats.add_channels(np.zeros((2, number), np.float32))
    return stats


# One tensor


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        pytest.param(np.arange(24, dtype=np.float16).reshape(4, 6).T, (24, 0, 23.0), id="float16"),
        pytest.param(np.arange(5, dtype=np.uint8), (5, 0, 4.0), id="uint8"),
        pytest.param(np.array([1e300, 2.0]), (1, 1, 2.0), id="beyond float32"),
        pytest.param(
            np.ma.masked_array(np.array([1.0, 2.0], np.float32), mask=[False, True]),
            (2, 0, 2.0),
            id="masked",
        ),
    ],
)
def test_arrays_of_other_types_are_counted(
    array: np.ndarray, expected: tuple[int, int, float]
) -> None:
    stats = TensorStatistics.of(array, 64)
    assert (stats.count, stats.nonfinite, stats.maximum) == expected


@pytest.mark.parametrize(
    ("values", "absmax", "nonnegative", "constant"),
    [
        ((), 0.0, False, False),
        ((0.0,), 0.0, True, True),
        ((0.0, 2.0), 2.0, True, False),
        ((2.0,), 2.0, True, True),
        ((-1.0, 2.0), 2.0, False, False),
        ((-3.0, 2.0), 3.0, False, False),
        ((-3.0, -3.0), 3.0, False, True),
        ((-0.5, -0.25), 0.5, False, False),
        ((0.25, 0.5), 0.5, True, False),
        ((math.nan,), 0.0, False, False),
    ],
)
def test_properties_of_values(
    values: tuple[float, ...], absmax: float, nonnegative: bool, constant: bool
) -> None:
    stats = of(*values)
    assert (stats.absmax, stats.nonnegative, stats.constant) == (absmax, nonnegative, constant)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted_apart(value: float) -> None:
    stats = of(value, 0.5, -0.25, value)
    assert repr(stats) == "<2 values from -0.25 to 0.5, 2 not finite>"
    assert np.array_equal(stats.counter.counts, of(0.5, -0.25).counter.counts)


# Focus: the values where the network looks


@pytest.mark.parametrize("before", [[], [64.0], [1e-3]])
@pytest.mark.parametrize(
    "values", [[], [0.0], [0.5, -3.0, 7.0], [1.0, math.nan], [math.inf], [1e-30, 1e30]]
)
def test_values_in_focus_equal_values_added_to_both(
    before: list[float], values: list[float]
) -> None:
    once, twice = of(*before), of(*before)
    for part in (once, twice):
        part.add_focus([np.full(3, 2.0, np.float32)] if before else [])
    for row in ([0.25], values):
        array = np.array(row, np.float32)
        once.add(array, looked_at=True)
        twice.add(array)
        twice.add_focus([array])
    assert counts_of(once) == counts_of(twice)


@pytest.mark.parametrize("partly", [[0.5], []], ids=["part", "nothing"])
@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
def test_focus_on_a_part_separates_the_counts(partly: list[float], merged: bool) -> None:
    """All values and values in focus share a counter until they differ."""
    every, some = np.array([0.25, -9.0], np.float32), np.array([0.5, 40.0], np.float32)
    stats = TensorStatistics(64)
    stats.add(every, looked_at=True)
    if merged:
        stats = stats.merge(stats)
    assert stats.focus is not None and stats.focus.counter is stats.counter
    copy = stats.copy()
    stats.add(some)
    stats.add_focus([np.array(partly, np.float32)])
    stats.add(every, looked_at=True)
    again = [0.25, -9.0] * (3 if merged else 2)
    assert counts_of(stats.focus) == counts_of(of(*again, *partly))
    stats.focus = None
    assert counts_of(stats) == counts_of(of(*again, *some))
    # Counting into a merge of the copy and empty statistics does not change the copy.
    alone = counts_of(of(*again[2:]))
    for other in (copy.merge(TensorStatistics(64)), TensorStatistics(64).merge(copy)):
        other.add(every, looked_at=True)
        assert counts_of(copy) == (*alone[:-1], alone)


# Which values are counted


@hypothesis.given(
    hypothesis.strategies.integers(1, 400),
    hypothesis.strategies.integers(1, 60),
    hypothesis.strategies.booleans(),
)
def test_sampled_values_stand_for_their_neighbors(size: int, every: int, looked_at: bool) -> None:
    values = np.random.default_rng(size).normal(0.1, 1, size).astype(np.float32)
    stats = TensorStatistics(64)
    stats.add(values, looked_at=looked_at, every=every)
    for part in (stats, *([stats.focus] if stats.focus is not None else [])):
        counts, edges = part.histogram
        assert (part.count, part.minimum, part.maximum) == (size, values.min(), values.max())
        assert counts.sum() == size
        bins = np.searchsorted(edges, np.abs([values.min(), values.max()]), "right") - 1
        assert (counts[np.minimum(bins, len(counts) - 1)] > 0).all(), "the extremes are counted"
        if every < size:
            whole = (size - 2) // every * every
            sampled, _ = np.histogram(np.abs(values[:whole:every]), edges)
            rest = counts - sampled * every
            assert rest.min() >= 0 and rest.sum() == size - whole <= every + 1


@pytest.mark.parametrize(
    ("shape", "samples", "expected"),
    [
        ((1, 16, 320, 320), 64, 23),
        ((1, 16, 320, 320), None, 1),
        ((1, 16, 320, 320), 1, 1),
        ((1, 8, 90, 90), 500, 1),
        ((1, 32, 160, 160), 16, 3),
        ((1, 32, 160, 160), 1000, 11),
        ((1, 64, 80, 81), 1000, 7),
        ((1, 8192, 128, 1), 512, 15),
        ((1, 512, 256, 16, 1), 1000, 31),
        ((1, 2048, 16, 15), 1000, 7),
        ((0, 3), 9, 1),
        ((), 9, 1),
    ],
)
def test_step_of_shapes_and_samples(
    shape: tuple[int, ...], samples: int | None, expected: int
) -> None:
    assert sampling_step(shape, samples) == expected
    if samples is not None and expected > 1:
        size = math.prod(shape)
        assert size // expected >= 1 << 15 and size * samples // expected >= 1 << 21
        places = np.unravel_index(np.arange(0, size, expected), shape)
        assert tuple(len(np.unique(place)) for place in places) == shape, (
            "values of every column and every row are counted"
        )


# Merging, copying, pickling


def test_merge_adds_up_both_sides() -> None:
    left, right = of(1.0), of(-2.0, math.nan)
    left.add_focus([np.ones(2, np.float32)])
    left.spots, right.spots = [np.ones((2, 1), np.float32)], [np.zeros((3, 1), np.float32)]
    empty_focus = right.copy()
    empty_focus.add_focus([])
    for both in (left.merge(right), right.merge(left), empty_focus.merge(left)):
        assert (both.count, both.nonfinite, both.minimum, both.maximum) == (2, 1, -2.0, 1.0)
        assert both.focus is not None and both.focus.count == 2 and len(both.spots) == 2
    assert of(1.0).merge(of(2.0)).focus is None


def test_copy_does_not_go_on_counting() -> None:
    stats = of(1.0)
    stats.add_focus([np.ones(2, np.float32)])
    copy = stats.copy()
    stats.add(np.array([9.0], np.float32))
    stats.add_focus([np.full(1, 9.0, np.float32)])
    stats.add_spots(np.zeros((1, 1, 7, 7), np.float32), 0)
    assert (copy.count, copy.maximum, copy.spots) == (1, 1.0, [])
    assert copy.focus is not None and (copy.focus.count, copy.focus.maximum) == (2, 1.0)
    assert of(1.0).copy().focus is None


@pytest.mark.parametrize(
    ("parts", "check"),
    [
        pytest.param([of(1.0), TensorStatistics()], has("different-bins", 64, 2048), id="bins"),
        pytest.param(
            [with_channels(3), with_channels(4)], has("different-channels", 3, 4), id="channels"
        ),
        pytest.param([], has("empty"), id="nothing"),
    ],
)
def test_statistics_that_cannot_be_merged(parts: list[TensorStatistics], check: Any) -> None:
    with pytest.raises(DataError, check=check):
        merge_all(parts)


@hypothesis.given(
    hypothesis.strategies.lists(
        hypothesis.strategies.lists(
            hypothesis.strategies.floats(width=32, allow_nan=True, allow_infinity=True), max_size=12
        ),
        min_size=1,
        max_size=6,
    ),
    hypothesis.strategies.randoms(use_true_random=False),
    hypothesis.strategies.booleans(),
)
def test_merging_is_exact_in_any_order(
    lists: list[list[float]], random: Any, focused: bool
) -> None:
    whole, parts = TensorStatistics(64), []
    for values in lists:
        array = np.array(values, np.float32)
        part = TensorStatistics.of(array, 64)
        whole.add(array)
        if focused and len(array) % 2:
            part.add_focus([array[:1]])
            whole.add_focus([array[:1]])
        parts.append(pickle.loads(pickle.dumps(part)))
    random.shuffle(parts)
    assert counts_of(merge_all([TensorStatistics(64), *parts])) == counts_of(whole)


@pytest.mark.parametrize(
    ("count", "width"),
    [
        (1, 1),
        (255, 1),
        (256, 2),
        (65535, 2),
        (65536, 4),
        ((1 << 32) - 1, 4),
        (1 << 32, 8),
        (1 << 40, 8),
    ],
)
def test_pickled_counts_take_the_fewest_bytes(count: int, width: int) -> None:
    part = TensorStatistics(64)
    part.counter.counts[[0, 7, 9]] = 1 << 41, count, 1
    copy = pickle.loads(pickle.dumps(part))
    assert counts_of(copy) == counts_of(part) and copy.counter.counts.dtype == np.int64
    *_, first, window = part.counter.__reduce__()[1]
    assert first == 7 and window.nbytes == 3 * width
    assert len(pickle.dumps(TensorStatistics(64))) < 400, "nothing counted"


def test_statistics_of_tensors_merge() -> None:
    left = Statistics({"a": of(1.0)}, images=1, fingerprint="b+a", warnings=["x", "y"], notes=["n"])
    right = Statistics(
        {"a": of(2.0), "b": of(3.0)},
        images=2,
        fingerprint="a",
        warnings=["y", "z"],
        notes=["n", "m"],
    )
    both = left.merge(right)
    assert (both.images, both.fingerprint) == (3, "a+b")
    assert [*both.warnings, *both.notes] == ["x", "y", "z", "n", "m"]
    assert both["a"].count == 2 and both["b"] is right["b"] and left["a"].count == 1
    assert repr(both) == "<Statistics of 2 tensors over 3 images>" and len(both) == 2
    nothing = Statistics({})
    assert left.merge(nothing).fingerprint == "a+b" and nothing.merge(nothing).fingerprint == ""


# Channels


def test_channels_of_arrays_of_any_shape_and_order() -> None:
    values = RNG.normal(0, 1, (5, 7, 3)).astype(np.float32)
    left, right, empty = TensorStatistics(), TensorStatistics(), TensorStatistics()
    left.add_channels(values[:2])
    for array in (
        values[2:].reshape(1, 3, 7, 3),
        np.full((2, 3), np.nan, np.float32),
        np.full((0, 3), 9.0, np.float32),
    ):
        right.add_channels(array)
    merged = [left.merge(right), right.merge(left), empty.merge(left).merge(right)]
    copy = left.copy()
    left.add_channels(values[2:])
    expected = [values.min(axis=(0, 1)), values.max(axis=(0, 1))]
    for both in (*merged, merged[0].copy(), left):
        np.testing.assert_array_equal(both.channels, expected)
    assert copy.channels is not None and (copy.channels[0] != expected[0]).any()


def test_channels_are_counted_for_inputs_of_linear_layers(tmp_path: Path) -> None:
    """A Reshape that keeps the last axis passes them on; a Transpose of this axis does not."""
    g = Graph(17)
    x, w = g.input(1, 4, 6, 8), g.const("w", RNG.normal(0, 1, (8, 5)), np.float32)
    relu, sigmoid = g.op("Relu", x, "relu"), g.op("Sigmoid", x, "map")
    windows = g.op("Reshape", [relu, g.const("to", np.asarray([2, 12, 8]))], "windows")
    first = g.op("MatMul", [windows, w], "fc")
    turned = g.op("Transpose", sigmoid, "turned", perm=[0, 1, 3, 2])
    second = g.op(
        "MatMul", [turned, g.const("v", RNG.normal(0, 1, (6, 5)), np.float32)], "turned_fc"
    )
    samples = [{"x": RNG.normal(0, 1, (1, 4, 6, 8)).astype(np.float32)} for _ in range(3)]
    cache, names = tmp_path / "cache.npz", ["x", relu, windows, sigmoid, turned]
    statistics = collect(g.model(first, second), samples, names, cache=cache, progress=False)
    channels = [statistics[n].channels for n in names]
    assert [None if c is None else c.shape[1] for c in channels] == [None, 8, 8, None, 6]
    values = np.maximum(np.concatenate([s["x"] for s in samples]), 0.0)
    expected = [values.min(axis=(0, 1, 2)), values.max(axis=(0, 1, 2))]
    np.testing.assert_array_equal(channels[1], expected)
    np.testing.assert_array_equal(load_statistics(cache)[relu].channels, expected)


# Spots: every channel at a few positions of a few images


@pytest.mark.parametrize("samples", [0, 1, 15, 16, 17, 33, 100])
def test_sixteen_samples_have_spots(samples: int) -> None:
    expected = {k * samples // 16 for k in range(16)} if samples > 16 else set(range(16))
    assert spot_sample_numbers(samples) == expected and len(expected) == 16
    assert spot_sample_numbers(None) == set(range(16))


@pytest.mark.parametrize("channels", [1, 47, 48, 49, 100])
@pytest.mark.parametrize("number", [0, 1, 777])
def test_spots_are_at_spread_positions_and_channels(channels: int, number: int) -> None:
    array = np.arange(2 * channels * 60, dtype=np.float32).reshape(2, channels, 6, 10)
    golden = 0.6180339887498949
    positions = [int((k + number) * golden % 1.0 * 60) for k in range(48)]
    chosen = [k * channels // min(channels, 48) for k in range(min(channels, 48))]
    spots = find_spots(array, number)
    assert spots is not None and spots.dtype == np.float32
    assert spots.tolist() == [[c * 60.0 + p for c in chosen] for p in positions], "first image"


@pytest.mark.parametrize(
    ("shape", "enough"),
    [
        ((1, 1, 6, 8), True),
        ((1, 1, 1, 48), True),
        ((1, 1, 47, 1), False),
        ((1, 1, 7, 6), False),
        ((1, 4), False),
        ((1, 6, 8), False),
        ((1, 1, 1, 6, 8), False),
        ((0, 4, 20, 20), False),
        ((1, 0, 20, 20), False),
    ],
)
def test_spots_need_a_map_of_48_positions(shape: tuple[int, ...], enough: bool) -> None:
    assert (find_spots(np.zeros(shape, np.float32), 0) is not None) == enough


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_spots_need_finite_values(value: float) -> None:
    array, stats = np.zeros((1, 1, 100, 100), np.float32), TensorStatistics()
    array[0, 0, 99, 99] = value
    assert find_spots(array, 0) is not None
    array[0, 0, 0, 0] = value  # the first position of sample 0
    assert find_spots(array, 0) is None
    stats.add_spots(array, 0)
    assert stats.spots == []


def test_spots_are_kept_with_the_statistics(tmp_path: Path) -> None:
    samples = [{"images": RNG.random((1, 3, 16, 16), np.float32)} for _ in range(40)]
    cache = tmp_path / "cache.npz"
    statistics = collect(conv_net(), samples, ["images", "c1"], cache=cache, progress=False)
    assert [len(part.spots) for part in statistics.values()] == [IMAGES, IMAGES]
    expected = sorted(
        bytes(v)
        for k in spot_sample_numbers(40)
        if (v := find_spots(samples[k]["images"], k)) is not None
    )
    loaded = load_statistics(cache)
    for spots in (statistics["images"].spots, loaded["images"].spots):
        assert sorted(map(bytes, spots)) == expected
    merged = statistics["c1"].merge(loaded["c1"])
    assert amax_of(merged, "focus") == pytest.approx(amax_of(statistics["c1"], "focus"), rel=1e-6)


Spots = list[np.ndarray]


def rounding_by_hand(spots: Spots, amax: float, levels: int) -> tuple[float, float]:
    unit = amax / levels
    errors = [np.clip(np.rint(v / unit), -levels, levels) * unit - v for v in spots]
    biased = [(e.mean(axis=0) ** 2 - e.var(axis=0, ddof=1) / len(e)).sum() for e in errors]
    whole = np.mean([(e**2).sum(axis=1).mean() for e in errors])
    return float(np.maximum(biased, 0.0).mean()), float(whole)


def normal_spots(*shapes: tuple[int, int]) -> Spots:
    rng = np.random.default_rng(len(shapes))
    return [rng.normal(k % 3, 2, shape).astype(np.float32) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 17])
@pytest.mark.parametrize(
    ("spots", "levels"),
    [
        pytest.param(normal_spots((12, 3), (5, 2)), 7, id="two images"),
        # More images of one shape than one step of the computation holds.
        pytest.param(
            normal_spots(*[(48, 48)] * 40, (48, 3), (6, 5), *[(48, 48)] * 3), 127, id="45 images"
        ),
    ],
)
def test_rounding_errors_of_images_and_ranges(spots: Spots, levels: int, count: int) -> None:
    ranges = np.linspace(0.5, 4.0, count)
    biased, whole = rounding_errors(spots, ranges, levels)
    expected = np.array([rounding_by_hand(spots, amax, levels) for amax in ranges])
    assert biased == pytest.approx(expected[:, 0], rel=1e-3, abs=1e-5)
    assert whole == pytest.approx(expected[:, 1], rel=1e-3)
    reordered = rounding_errors(spots[::-1], ranges, levels)
    alone = [rounding_errors(spots, ranges[k : k + 1], levels) for k in range(count)]
    for k, errors in enumerate((biased, whole)):
        assert reordered[k].tolist() == errors.tolist(), "equal to the bit in any order"
        assert errors == pytest.approx([float(one[k][0]) for one in alone], rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "share", "tolerance"),
    [
        pytest.param(POSITIONS, 0.0, 0.02, id="noise"),
        pytest.param(1, 1.0, 1e-4, id="flat areas"),
    ],
)
def test_biased_share_of_the_rounding_error(rows: int, share: float, tolerance: float) -> None:
    spots = [
        np.resize(RNG.normal(0, 20, (rows, 40)), (POSITIONS, 40)).astype(np.float32)
        for _ in range(16)
    ]
    biased, whole = rounding_errors(spots, np.array([100.0]), 127)
    assert biased[0] / whole[0] == pytest.approx(share, abs=tolerance)


def test_biased_error_is_not_negative() -> None:
    """The mean of these errors is below its expected noise."""
    biased, whole = rounding_errors(
        [np.array([[0.4], [-0.4]] * 24, np.float32)], np.array([7.0]), 7
    )
    assert biased.tolist() == [0.0] and whole[0] == pytest.approx(0.16, rel=1e-5)


def drawing(flat: bool) -> TensorStatistics:
    stats, rng = TensorStatistics(), np.random.default_rng(4)
    for number in range(4):
        array = np.full((1, 2, 64, 64), 1.5 / 127, np.float32)
        if not flat:
            array += rng.normal(0, 0.05, array.shape).astype(np.float32)
        drawn = rng.random(array.shape) < 0.02
        array[drawn] = rng.uniform(0.3, 1.0, int(drawn.sum())).astype(np.float32)
        stats.add(array)
        stats.add_spots(array, number)
    return stats


def test_focus_shortens_a_range_that_rounds_a_flat_area_the_same_way_everywhere() -> None:
    flat = drawing(flat=True)
    spots, flat.spots = flat.spots, []
    least = amax_of(flat, "focus")
    assert least == amax_of(flat, "mse")
    # At this range, the background is 0.46 of a step from the nearest integer. At a smaller range, it is
    # nearer to two steps.
    background = 1.46 * least / 127
    flat.spots = [np.full_like(s, background) for s in spots]
    amax = amax_of(flat, "focus")

    def bias(amax: float) -> float:
        return abs(round(background / amax * 127) * amax / 127 - background)

    assert amax < least and bias(amax) < 0.75 * bias(least)


def test_focus_keeps_the_range_of_a_noisy_background() -> None:
    noisy = drawing(flat=False)
    assert amax_of(noisy, "focus") == amax_of(noisy, "mse")

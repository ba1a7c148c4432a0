import hashlib
import math
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from calibration import amax_of, collect, load_statistics
from calibration.arrays import MemorySource, rows_of
from calibration.cache import Statistics
from calibration.dataset import InputSpec
from calibration.methods import BIASED_WEIGHT, unbiased
from calibration.statistics import (
    DEFAULT_BINS,
    IMAGES,
    POSITIONS,
    TensorStatistics,
    merge_all,
    rounding,
    spotted_samples,
    step,
    taken,
)
from qdqtool.errors import DataError
from tests.calibration.nets import conv_net, state
from tests.raising import raises
from tests.trt.builder import Graph


def test_one_tensors_statistics() -> None:
    values = np.random.default_rng(0).normal(0.3, 2, (2, 3, 50, 50)).astype(np.float32)
    stats = TensorStatistics(2048)
    for row in values:
        stats.add(row)
    assert stats.count == values.size
    assert stats.minimum == float(values.min())
    assert stats.maximum == float(values.max())
    assert stats.absmax == float(np.abs(values).max())
    assert not stats.nonnegative and not stats.constant
    values = np.arange(24, dtype=np.float16).reshape(4, 6)
    stats = TensorStatistics.of(values.T, 64)
    assert (stats.minimum, stats.maximum, stats.count) == (0.0, 23.0, 24)
    assert TensorStatistics.of(np.array([1e300, 2.0]), 64).nonfinite == 1  # beyond float32
    assert TensorStatistics.of(np.arange(5, dtype=np.uint8), 64).maximum == 4.0
    stats = TensorStatistics()
    assert (stats.bins, stats.count, stats.nonfinite, stats.minimum, stats.maximum) == (
        2048,
        0,
        0,
        math.inf,
        -math.inf,
    )
    assert stats.focus is None and stats.spots == [] and DEFAULT_BINS == 2048
    assert repr(of(1.0, -2.0, math.inf)) == "<2 values from -2 to 1, 1 not finite>"
    with pytest.raises(DataError, match="no statistics"):
        merge_all([])


def of(*values: float) -> TensorStatistics:
    return TensorStatistics.of(np.array(values, np.float32), 64)


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
def test_properties(
    values: tuple[float, ...], absmax: float, nonnegative: bool, constant: bool
) -> None:
    stats = of(*values)
    assert (stats.absmax, stats.nonnegative, stats.constant) == (absmax, nonnegative, constant)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_no_other(odd: float) -> None:
    stats = of(odd, 0.5, -0.25, odd)
    assert (stats.count, stats.nonfinite, stats.minimum, stats.maximum) == (2, 2, -0.25, 0.5)
    assert np.array_equal(stats.counter.counts, of(0.5, -0.25).counter.counts)


@pytest.mark.parametrize("before", [[], [64.0], [1e-3]])
@pytest.mark.parametrize(
    "values", [[], [0.0], [0.5, -3.0, 7.0], [1.0, math.nan], [math.inf], [1e-30, 1e30]]
)
def test_values_that_are_all_looked_at_are_the_same_as_given_twice(
    before: list[float], values: list[float]
) -> None:
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


@pytest.mark.parametrize("partly", [[0.5], []])
@pytest.mark.parametrize("merged", [False, True])
def test_what_is_looked_at_in_part_parts_the_counts(partly: list[float], merged: bool) -> None:
    """As long as everything is looked at one counter does for both; it counts nothing for the other from then on."""
    every, some = np.array([0.25, -9.0], np.float32), np.array([0.5, 40.0], np.float32)
    stats = TensorStatistics(64)
    stats.add(every, looked_at=True)
    if merged:
        other = TensorStatistics(64)
        other.add(every, looked_at=True)
        stats = stats.merge(other)
    assert stats.focus is not None and stats.focus.counter is stats.counter
    copied = stats.copy()
    stats.add(some)
    stats.add_focus([np.array(partly, np.float32)])
    stats.add(every, looked_at=True)
    again = [0.25, -9.0] * (3 if merged else 2)
    assert state(stats.focus) == state(of(*again, *partly))
    stats.focus = None
    assert state(stats) == state(of(*again, *some))
    alone = of(*again[2:])
    assert state(copied) == (*state(alone)[:-1], state(alone)), "a copy does not count on"
    for both in (copied.merge(TensorStatistics(64)), TensorStatistics(64).merge(copied)):
        both.add(every, looked_at=True)
        assert state(copied) == (*state(alone)[:-1], state(alone)), (
            "nor does what was merged with nothing"
        )


def test_masked_values_count() -> None:
    stats = TensorStatistics(64)
    stats.add(np.ma.masked_array(np.array([1.0, 2.0], np.float32), mask=[True, False]))
    assert state(stats) == state(of(1.0, 2.0))


@hypothesis.given(st.integers(1, 400), st.integers(1, 60), st.booleans())
def test_every_so_manieth_value_stands_for_so_many(size: int, every: int, looked_at: bool) -> None:
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
            whole = (size - 2) // every
            expected, _ = np.histogram(np.abs(values[: whole * every : every]), edges)
            rest = counts - expected * every
            assert rest.min() >= 0 and rest.sum() == size - whole * every <= every + 1


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
def test_which_values_are_counted(
    shape: tuple[int, ...], samples: int | None, expected: int
) -> None:
    found = step(shape, samples)
    assert found == expected
    if samples is not None and found > 1:
        size = math.prod(shape)
        assert size // found >= 1 << 15 and size * samples // found >= 1 << 21
        places = np.unravel_index(np.arange(0, size, found), shape)
        assert all(len(np.unique(at)) == n for at, n in zip(places, shape, strict=True)), (
            "all columns, of all rows"
        )


def test_ranges_of_channels_are_those_of_the_values() -> None:
    """Of any shape, in parts, merged in any order; a part that is not finite is left out."""
    values = RNG.normal(0, 1, (5, 7, 3)).astype(np.float32)
    one, other = TensorStatistics(), TensorStatistics()
    one.add_channels(values[:2])
    other.add_channels(values[2:].reshape(1, 3, 7, 3))
    other.add_channels(np.full((2, 3), np.nan, np.float32))
    other.add_channels(np.full((0, 3), 9.0, np.float32))
    wanted = [values.min(axis=(0, 1)), values.max(axis=(0, 1))]
    empty = TensorStatistics()
    for both in (
        one.merge(other),
        other.merge(one),
        one.merge(other).copy(),
        empty.merge(one).merge(other),
    ):
        np.testing.assert_array_equal(both.channels, wanted)
    copy = one.copy()
    one.add_channels(values[2:])
    np.testing.assert_array_equal(one.channels, wanted)
    assert copy.channels is not None and (copy.channels[0] != wanted[0]).any()
    wide = TensorStatistics()
    wide.add_channels(np.zeros((2, 4), np.float32))
    with raises(DataError, "_joined 3 4"):
        one.merge(wide)


def test_channels_are_counted_of_what_linears_read(tmp_path: Path) -> None:
    """Also where a Reshape moves other axes alone; not of maps, and not where a Transpose brings another axis last."""
    g = Graph(17)
    x = g.input(1, 4, 6, 8)
    w = g.const("w", RNG.normal(0, 1, (8, 5)), np.float32)
    relu, signs = g.op("Relu", x, "relu"), g.op("Sigmoid", x, "map")
    windows = g.op("Reshape", [relu, g.const("to", np.asarray([2, 12, 8]))], "windows")
    first = g.op("MatMul", [windows, w], "fc")
    turned = g.op("Transpose", signs, "turned", perm=[0, 1, 3, 2])
    second = g.op(
        "MatMul", [turned, g.const("v", RNG.normal(0, 1, (6, 5)), np.float32)], "turned_fc"
    )
    made = (relu, windows, signs, turned)
    samples = [{"x": RNG.normal(0, 1, (1, 4, 6, 8)).astype(np.float32)} for _ in range(3)]
    cache = tmp_path / "cache.npz"
    found = collect(g.model(first, second), samples, ["x", *made], cache=cache, progress=False)
    widths = [None if (c := found[n].channels) is None else c.shape[1] for n in ("x", *made)]
    assert widths == [None, 8, 8, None, 6]
    values = np.maximum(np.concatenate([s["x"] for s in samples]), 0.0)
    np.testing.assert_array_equal(
        found[relu].channels, [values.min(axis=(0, 1, 2)), values.max(axis=(0, 1, 2))]
    )
    np.testing.assert_array_equal(load_statistics(cache)[relu].channels, found[relu].channels)


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
    with raises(DataError, "TensorStatistics.merge 64 2048"):
        of(1.0).merge(TensorStatistics())
    assert merge_all([of(1.0), of(2.0), of(3.0)]).count == 3 and merge_all(iter([one])) is one


def test_statistics_of_several_tensors() -> None:
    left = Statistics({"a": of(1.0)}, images=1, fingerprint="b+a", warnings=["x", "y"], notes=["n"])
    right = Statistics(
        {"a": of(2.0), "b": of(3.0)},
        images=2,
        fingerprint="a",
        warnings=["y", "z"],
        notes=["n", "m"],
    )
    both = left.merge(right)
    assert (both.images, both.fingerprint, both.warnings, both.notes) == (
        3,
        "a+b",
        ["x", "y", "z"],
        ["n", "m"],
    )
    assert both["a"].count == 2 and both["b"] is right["b"] and left["a"].count == 1
    assert (
        left.merge(Statistics({})).fingerprint == "a+b"
        and Statistics({}).merge(Statistics({})).fingerprint == ""
    )
    assert repr(both) == "<Statistics of 2 tensors over 3 images>" and len(both) == 2


# Arrays in memory: when they are rows of samples, and by what they are recognised again.

SPEC = InputSpec("x", (1, 2))
ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)
BLOCK = 65536
Shape = tuple[int | None, ...]


@pytest.mark.parametrize(
    ("inputs", "arrays", "samples"),
    [
        ({"x": (1, 2)}, {"x": (5, 2)}, 5),
        ({"x": (None, 2)}, {"x": (5, 2)}, 5),
        ({"x": (5, 2)}, {"x": (5, 2)}, 1),  # a fixed batch is one sample
        ({"x": (1, 2)}, {"x": (5, 2), "more": (3, 1)}, 5),
        ({"x": (1, 2)}, {"x": (2,)}, 1),
        ({"x": (1, 2)}, {"x": (5, 1, 2)}, 1),
        ({"x": (1, 2)}, {"other": (5, 2)}, 1),
        ({"x": (1, 2), "y": (1, 1)}, {"x": (5, 2), "y": (5, 1)}, 5),
        ({"x": (1, 2), "y": (1, 1)}, {"x": (5, 2), "y": (4, 1)}, 1),
        ({"x": (1, 2), "y": (1, 1)}, {"x": (5, 2)}, 1),
        ({"x": (1, 2), "y": ()}, {"x": (5, 2), "y": ()}, 1),
        ({"x": (1, 2), "y": (3,)}, {"x": (5, 2), "y": (3,)}, 1),
        ({"x": ()}, {"x": ()}, 1),
    ],
)
def test_stacked_arrays_are_rows(
    inputs: dict[str, Shape], arrays: dict[str, tuple[int, ...]], samples: int
) -> None:
    given = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in arrays.items()}
    found = rows_of(given, [InputSpec(n, s) for n, s in inputs.items()])
    assert len(found) == samples
    if samples == 1:
        assert list(found[0]) == list(given)
        return
    assert all(list(row) == list(inputs) for row in found)
    for k, row in enumerate(found):
        for name, array in row.items():
            assert (array == given[name][k : k + 1]).all() and np.shares_memory(array, given[name])


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 17 * BLOCK, 40 * BLOCK + 12])
def test_an_array_is_its_name_type_shape_and_sixteen_blocks(size: int) -> None:
    values = (np.arange(size) * 7 % 251).astype(np.uint8)
    step = max(BLOCK, (size - BLOCK) // 15)
    blocks = [values[at : at + BLOCK].tobytes() for at in range(0, size, step)]
    found = MemorySource([{"x": values}], [SPEC]).digest(0)
    assert found == digest(f"xuint8({size},)".encode(), *blocks)


def test_digests_tell_arrays_apart_and_nothing_else() -> None:
    def of(**arrays: npt.NDArray[Any]) -> bytes:
        return MemorySource([arrays], [SPEC]).digest(0)

    assert of(a=ROWS, b=ROWS) == of(b=ROWS, a=ROWS)
    assert of(a=ROWS.T) == of(a=np.ascontiguousarray(ROWS.T))
    other = [
        of(a=ROWS),
        of(b=ROWS),
        of(a=ROWS[:4]),
        of(a=ROWS.reshape(2, 5)),
        of(a=ROWS.view(np.int32)),
        of(a=-ROWS),
    ]
    assert len(set(other)) == 6
    with raises(DataError, "_named 0"):
        MemorySource([ROWS], [SPEC]).digest(0)
    assert MemorySource(iter([{"a": ROWS}]), [SPEC]).digest(0) == b""


def test_lists_and_what_can_be_gone_through_once() -> None:
    listed = MemorySource([{"x": r} for r in ROWS], [SPEC])
    assert (listed.count(), listed.repeatable, listed.random_access) == (5, True, True)
    for _ in range(2):
        listed.restart()
        assert listed.load(4)["x"].tolist() == [[8, 9]]
    part = listed.portion([3, 0])
    assert [part.load(k)["x"].tolist() for k in (0, 1)] == [[[6, 7]], [[0, 1]]]
    once = MemorySource(iter([{"x": ROWS[0]}]), [SPEC])
    assert (once.count(), once.repeatable, once.random_access) == (None, False, False)
    once.restart()
    assert once.load(0)["x"].tolist() == [[0, 1]]
    with pytest.raises(IndexError):
        once.load(1)
    with raises(DataError, "MemorySource.restart"):
        once.restart()
    with raises(DataError, "MemorySource.portion"):
        once.portion([0])


def test_samples_that_are_no_dict_and_values_that_are_not_finite() -> None:
    with raises(DataError, "_named 1"):
        MemorySource([{"x": ROWS[0]}, [1.0]], [SPEC]).load(1)
    with raises(DataError, "InputSpec.fit 0 x [3]"):
        MemorySource([{"x": np.zeros(3)}], [InputSpec("x", (1, 2, 2))]).load(0)
    array = np.zeros((1, 1, 100, 100), np.float32)
    array[0, 0, 99, 99] = np.nan
    assert taken(array, 0) is not None
    array[0, 0, 0, 0] = np.nan  # the first position of sample 0
    assert taken(array, 0) is None
    kept = TensorStatistics()
    kept.add_spots(array, 0)
    assert kept.spots == []


# A few positions of a few images, and the errors that are the same all over an image.

RNG = np.random.default_rng(11)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 4), np.float32),
        np.zeros((1, 4, 6, 7), np.float32),
        np.zeros((0, 4, 20, 20), np.float32),
        np.zeros((1, 0, 20, 20), np.float32),
        np.full((1, 4, 20, 20), np.inf, np.float32),
    ],
)
def test_what_is_no_map_gives_none(array: npt.NDArray[np.float32]) -> None:
    assert taken(array, 3) is None


def test_errors_that_are_and_are_not_biased() -> None:
    noise = [RNG.normal(0, 20, (POSITIONS, 40)).astype(np.float32) for _ in range(16)]
    flat = [
        np.repeat(RNG.normal(0, 20, (1, 40)), POSITIONS, axis=0).astype(np.float32)
        for _ in range(16)
    ]
    biased, whole = rounding(noise, np.array([100.0]), 127)
    assert biased[0] < 0.02 * whole[0]
    biased, whole = rounding(flat, np.array([100.0]), 127)
    assert biased[0] == pytest.approx(whole[0], rel=1e-4)
    # Errors whose mean is less than chance makes of it
    half = np.array([[0.4], [-0.4]] * 24, np.float32)
    biased, whole = rounding([half], np.array([7.0]), 7)
    assert biased.tolist() == [0.0] and whole[0] == pytest.approx(0.16, rel=1e-5)


def test_errors_of_images_of_any_shape() -> None:
    """By hand, one image after the other: of some there are more than are worked out in one step."""
    shapes = [*[(48, 48)] * 40, (48, 3), (6, 5), *[(48, 48)] * 3]
    spots = [RNG.normal(0, 20, shape).astype(np.float32) for shape in shapes]
    ranges = np.array([90.0, 30.0])
    biased, whole = np.zeros(2), np.zeros(2)
    for values in spots:
        for i, unit in enumerate(ranges / 127):
            error = np.clip(np.rint(values / unit), -127, 127) * unit - values
            noise = np.square(error).sum(axis=0) / len(values)
            more = len(values) * np.square(error.mean(axis=0)).sum() - noise.sum()
            biased[i] += max(0.0, more) / (len(values) - 1) / len(spots)
            whole[i] += noise.sum() / len(spots)
    found = rounding(spots, ranges, 127)
    assert found[0] == pytest.approx(biased, rel=1e-3) and found[1] == pytest.approx(
        whole, rel=1e-3
    )


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
    wanted = sorted(
        bytes(v) for k in spotted_samples(40) if (v := taken(samples[k]["images"], k)) is not None
    )
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


@pytest.mark.parametrize(
    ("height", "width", "enough"), [(6, 8, True), (1, 48, True), (47, 1, False), (7, 6, False)]
)
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


@pytest.mark.parametrize("count", [1, 7, 8, 9, 17])
def test_any_number_of_ranges(count: int) -> None:
    rng = np.random.default_rng(count)
    spots = [
        rng.normal(1, 1, (12, 3)).astype(np.float32),
        rng.normal(0, 2, (5, 2)).astype(np.float32),
    ]
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
    assert [float(b[0]) for b, _ in alone] == biased.tolist() and [
        float(w[0]) for _, w in alone
    ] == whole.tolist()
    turned = rounding(spots[::-1], ranges, 7)
    assert turned[0].tolist() == biased.tolist() and turned[1].tolist() == whole.tolist(), (
        "in any order, to the bit"
    )


BINS = 64
ARRAYS = st.lists(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=12),
    min_size=1,
    max_size=6,
)


@hypothesis.given(ARRAYS, st.randoms(use_true_random=False), st.booleans())
def test_any_partition_in_any_order_is_the_whole(
    lists: list[list[float]], random: Any, focused: bool
) -> None:
    arrays = [np.array(values, np.float32) for values in lists]
    whole = {"t": TensorStatistics(BINS), "u": TensorStatistics(BINS)}
    packets = []
    for array in arrays:
        parts = {
            "t": TensorStatistics.of(array, BINS),
            "u": TensorStatistics.of(array[::2] * 0.5, BINS),
        }
        whole["t"].add(array)
        whole["u"].add(array[::2] * 0.5)
        if focused and len(array) % 2:
            parts["u"].add_focus([array[:1] * 0.5])
            whole["u"].add_focus([array[:1] * 0.5])
        packets.append(pickle.loads(pickle.dumps(parts)))
    random.shuffle(packets)
    found = {"t": TensorStatistics(BINS), "u": TensorStatistics(BINS)}
    for packet in packets:
        found = {n: part.merge(packet[n]) for n, part in found.items()}
    assert {n: state(p) for n, p in found.items()} == {n: state(p) for n, p in whole.items()}


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
    part.count = count
    part.counter.counts[[0, 7, 9]] = 1 << 41, count, 1
    found = pickle.loads(pickle.dumps(part))
    assert state(found) == state(part) and found.counter.counts.dtype == np.int64
    *_, first, window = part.counter.__reduce__()[1]
    assert first == 7 and window.nbytes == 3 * width
    assert len(pickle.dumps(TensorStatistics(64))) < 400  # nothing counted


@pytest.mark.parametrize("bins", [0, 1_000_001, 10**400])
def test_bins_that_no_histogram_has(bins: int) -> None:
    with raises(DataError, "TensorStatistics.linear bins 1,000,000"):
        TensorStatistics().linear(bins)

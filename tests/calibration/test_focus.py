import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from calibration import Focus, TensorStatistics, amax_of, collect, load_statistics, save_statistics
from calibration.dataset import FEW_IMAGES, Looks
from calibration.focus import THRESHOLD, FocusMap, dilated, resized
from calibration.methods import (
    FOCUS_WEIGHT,
    focus_power,
    focused_error,
    range_of,
    settle,
    squared_error,
)
from qdqtool.base.notes import Note, Remark
from qdqtool.errors import DataError
from tests.calibration.nets import conv_net

RNG = np.random.default_rng(0)


def touched(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """By intervals in the unit square: whether a cell overlaps a set cell of the other grid."""

    def overlap(cells: int, others: int) -> np.ndarray:
        i, k = np.arange(cells)[:, None], np.arange(others)
        return (
            np.minimum((i + 1) / cells, (k + 1) / others) - np.maximum(i / cells, k / others) > 1e-9
        )

    rows, columns = overlap(height, mask.shape[0]), overlap(mask.shape[1], width)
    return np.asarray(rows.astype(int) @ mask @ columns > 0)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (16, 24), (4, 2), (1, 1), (5, 7), (12, 3)])
def test_resizing_sets_every_cell_that_is_touched(height: int, width: int) -> None:
    mask = RNG.random((8, 8)) > 0.85
    np.testing.assert_array_equal(resized(mask, height, width), touched(mask, height, width))


def test_positions_over_the_threshold_of_every_map_and_at_least_a_share() -> None:
    fine = np.full((2, 3, 8, 8), -9.0, np.float32)
    coarse = np.full((2, 3, 4, 4), -9.0, np.float32)
    fine[0, 1, 6, 6] = THRESHOLD + 0.1
    coarse[0, 2, 0, 0] = THRESHOLD + 0.1
    fine[1, 0, 0, 7] = (
        THRESHOLD - 1.0
    )  # nothing in the second sample; its highest position is taken
    found = Focus(("fine", "coarse")).find({"fine": fine, "coarse": coarse})
    assert found is not None
    first = np.zeros((8, 8), bool)
    first[5:8, 5:8] = first[:4, :4] = True
    np.testing.assert_array_equal(found.masks[0], first)
    second = np.zeros((8, 8), bool)
    second[:2, 6:] = True
    np.testing.assert_array_equal(found.masks[1], second)
    values = RNG.random((2, 5, 8, 8)).astype(np.float32)
    for row, part in enumerate(found.values(values)):
        np.testing.assert_array_equal(part, values[row][:, found.masks[row]])


def test_the_range_is_that_of_least_weighted_error() -> None:
    everything = RNG.standard_normal(60_000).astype(np.float32)
    part = (RNG.standard_normal(3_000) * 4).astype(np.float32)
    stats = TensorStatistics.of(np.concatenate([everything, part]))
    stats.add_focus([part])
    ranges = np.geomspace(1.0, stats.absmax, 200)

    power = focus_power([stats])
    assert power == 3.0  # 3,000 of 63,000 values are rare

    def error(values: np.ndarray, amax: float) -> float:
        step = amax / 127
        off = np.abs(np.clip(np.rint(values / step), -127, 127) * step - values)
        return float(np.mean(off * off * off))

    whole = np.concatenate([everything, part])
    by_hand = np.array(
        [(1 - FOCUS_WEIGHT) * error(whole, a) + FOCUS_WEIGHT * error(part, a) for a in ranges]
    )
    np.testing.assert_allclose(focused_error(stats, ranges, power), by_hand, rtol=0.03, atol=1e-7)
    chosen = amax_of(stats, "focus")
    assert np.interp(chosen, ranges, by_hand) <= by_hand.min() * 1.05
    assert chosen > amax_of(stats, "mse")
    plain = TensorStatistics.of(everything)
    assert amax_of(plain, "focus") == amax_of(plain, "mse")
    np.testing.assert_allclose(
        focused_error(plain, ranges), squared_error(plain, ranges), rtol=1e-12
    )


@pytest.mark.parametrize(
    ("rare", "power"), [(40, 3.0), (60, 3.0), (120, 2.5), (150, 2.25), (180, 2.0), (900, 2.0)]
)
def test_power_falls_with_the_share_of_what_is_looked_at(rare: int, power: float) -> None:
    stats = TensorStatistics.of(np.ones(1000))
    stats.add_focus([np.ones(rare, np.float32)])
    assert focus_power([stats]) == pytest.approx(power)
    assert focus_power([stats, TensorStatistics.of(np.ones(10))]) == 2.0


def silu(values: np.ndarray) -> np.ndarray:
    return (values / (1 + np.exp(-values))).astype(np.float32)


@pytest.mark.parametrize(("spread", "power"), [(2.0, 3.0), (30.0, 2.0)])
def test_where_the_step_hides_the_negative_side_the_error_is_squared(
    spread: float, power: float
) -> None:
    """SiLU of small values keeps the power; of values so large that a step is all of its negative side, it does not."""
    whole = silu(np.random.default_rng(3).standard_normal(20_000) * spread)
    part = whole[:1_000]
    stats = TensorStatistics.of(whole)
    stats.add_focus([part])
    found = range_of(stats, "focus")
    assert found.power == power and found.amax == amax_of(stats, "focus")

    def error(values: np.ndarray, amax: float) -> float:
        step = amax / 127
        return float(
            np.mean(np.abs(np.clip(np.rint(values / step), -127, 127) * step - values) ** power)
        )

    ranges = np.geomspace(stats.absmax / 4, stats.absmax, 200)
    by_hand = np.array(
        [(1 - FOCUS_WEIGHT) * error(whole, a) + FOCUS_WEIGHT * error(part, a) for a in ranges]
    )
    assert np.interp(found.amax, ranges, by_hand) <= by_hand.min() * 1.05


@pytest.mark.parametrize(
    ("step", "power"),
    [(0.1, 3.0), (0.5, 3.0), (0.6, 2.8), (0.75, 2.5), (1.0, 2.0), (4.0, 2.0), (None, 3.0)],
)
def test_the_power_falls_with_the_step_over_the_depth_of_the_negative_side(
    step: float | None, power: float
) -> None:
    depth = 0.25 if step is not None else 0.0  # a ReLU has no negative side
    stats = TensorStatistics.of(np.append(np.full(1000, -depth, np.float32), 40.0))
    stats.add_focus([np.ones(40, np.float32)])
    tried: list[float] = []

    def search(power: float) -> float:
        tried.append(power)
        return 127 * depth * (step or 1.0) if len(tried) == 1 else 1.5

    found = settle([stats], search, lambda ranges, power: np.ones(len(ranges)))
    assert tried[0] == 3.0 and tried[-1] == found.power == pytest.approx(power)
    assert len(tried) == (1 if power == 3.0 else 2) and (found.amax == 1.5) == (power < 3.0)


def test_statistics_at_the_positions_through_a_network_and_a_file(tmp_path: Path) -> None:
    model = conv_net()
    samples = [{"images": RNG.random((1, 3, 16, 16), np.float32)} for _ in range(5)]
    focus = Focus(("c1",), threshold=0.0)
    file = tmp_path / "cache.npz"
    found = collect(model, samples, ["images", "r2"], focus=focus, progress=False, cache=file)
    copy = type(model)()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    for name in ("c1", "r2"):
        copy.graph.output.add().name = name
    session = onnxruntime.InferenceSession(
        copy.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    wanted = {"images": 0, "r2": 0}
    largest = {"images": 0.0, "r2": 0.0}
    for sample in samples:
        c1, r2 = session.run(["c1", "r2"], sample)
        mask = dilated(c1.max(axis=1)[0] > 0.0)
        for name, array in (("images", sample["images"]), ("r2", r2)):
            inside = array[0][:, touched(mask, *array.shape[2:])]
            wanted[name] += inside.size
            largest[name] = max(largest[name], float(np.abs(inside).max(initial=0.0)))
    for name, part in found.items():
        assert part.focus is not None and part.focus.count == wanted[name] > 0
        assert part.focus.absmax == pytest.approx(largest[name], rel=1e-6)
    save_statistics(found, tmp_path / "s.npz")
    for back in (
        load_statistics(tmp_path / "s.npz"),
        collect(model, samples, ["images", "r2"], focus=focus, progress=False, cache=file),
    ):
        for name, part in back.items():
            kept = part.focus
            assert kept is not None and kept.count == wanted[name]
            assert np.array_equal(kept.counter.counts, found[name].focus.counter.counts)  # type: ignore[union-attr]
    with pytest.raises(
        DataError, match="another model"
    ):  # or the same one without its class outputs
        collect(model, samples, ["images", "r2"], progress=False, cache=file)
    other = collect(
        model, samples, ["images", "r2"], progress=False, cache=file, overwrite_cache=True
    )
    assert other["r2"].focus is None


Mask = npt.NDArray[np.bool_]


def at(height: int, width: int, *cells: tuple[int, int]) -> Mask:
    mask = np.zeros((height, width), bool)
    for y, x in cells:
        mask[y, x] = True
    return mask


def test_warnings_by_what_was_counted() -> None:
    assert FEW_IMAGES == MANY
    told = {n: list(Looks(total=n).warnings()) for n in (0, 1, 2, 99, 100)}
    assert told == {0: [], 100: []} | {
        n: [Remark.FEW_IMAGES(images=n, enough=100)] for n in (1, 2, 99)
    }
    assert list(Looks(broken=5).warnings()) == [], "where no image is left, that is an error"
    assert list(Looks(total=MANY, broken=1).warnings()) == [
        Remark.BROKEN_IMAGES(broken=1, total=101)
    ]
    assert list(Looks(total=MANY, constant=1).warnings()) == [
        Remark.CONSTANT_IMAGES(constant=1, total=100)
    ]
    assert list(Looks(total=MANY, nonfinite=1).warnings()) == [
        Remark.NONFINITE_SAMPLES(nonfinite=1, total=100)
    ]
    focus = Focus(("a",))
    assert 1 / (1 + math.exp(-focus.threshold)) == pytest.approx(0.1) and focus.share == 0.001


@pytest.mark.parametrize("y", range(4))
@pytest.mark.parametrize("x", range(3))
def test_neighbours(y: int, x: int) -> None:
    wanted = [[abs(i - y) <= 1 and abs(j - x) <= 1 for j in range(3)] for i in range(4)]
    mask = at(4, 3, (y, x))
    assert dilated(mask).tolist() == wanted and mask.sum() == 1


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((2, 3, 4, 4), 2),
        ((2, 3, 8, 2), 2),
        ((1, 3, 4, 4), 0),
        ((3, 3, 4, 4), 0),
        ((2, 3, 4), 0),
        ((2, 3, 4, 4, 1), 0),
        ((2, 0, 4, 4), 0),
        ((2, 3, 0, 4), 0),
    ],
)
def test_activations_that_are_maps(shape: tuple[int, ...], rows: int) -> None:
    found = FocusMap([at(4, 4, (0, 0)), at(4, 4, (3, 3), (3, 2))])
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = found.values(values)
    assert len(parts) == rows
    if rows:
        for part, array, mask in zip(parts, values, found.masks, strict=True):
            assert part.tolist() == array[:, resized(mask, *shape[2:])].tolist()
        assert found._indices(4, 4) is found._indices(4, 4), "sought once"


def test_what_is_looked_at_everywhere_and_of_several_maps() -> None:
    full, most = np.ones((2, 2), bool), at(2, 2, (0, 0), (0, 1), (1, 0))
    for shape, masks, wanted in [
        ((2, 3, 4, 4), [full, full], True),
        ((2, 3, 5, 1), [full, full], True),
        ((2, 3, 4, 4), [full, most], False),
        ((2, 3, 1, 2), [full, most], True),
        ((1, 3, 4, 4), [full, full], False),
        ((2, 3, 4), [full, full], False),
        ((1, 1, 2, 2), [most], False),
    ]:
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        assert FocusMap(masks).covers(array) is wanted
        if wanted:
            assert (
                np.concatenate([v.ravel() for v in FocusMap(masks).values(array)]).tolist()
                == array.ravel().tolist()
            )
    two = np.concatenate([scores(1.0), scores(-9.0, 1.0)], axis=1)
    assert (looked_at({"a": two}, 0.5, 0.0) == dilated(at(10, 10, (0, 0), (0, 3)))).all()
    wide, tall = np.full((1, 1, 2, 8), -9.0, np.float32), np.full((1, 1, 8, 2), -9.0, np.float32)
    wide[0, 0, 0, 0] = 1.0
    mask = looked_at({"a": wide, "b": tall}, 0.5, 0.0)
    assert mask.shape == (8, 8) and (mask == resized(dilated(at(2, 8, (0, 0))), 8, 8)).all()
    corner = dilated(at(10, 10, (0, 0)))
    both = dilated(at(10, 10, (0, 0), (0, 3)))
    assert (looked_at({"a": scores(1.0, 0.5)}, 0.5, 0.0) == both).all()
    assert (looked_at({"a": scores(1.0, 0.5)}, 0.5001, 0.0) == corner).all()
    assert (looked_at({"a": scores(1.0, 0.5)}, 5.0, 0.0) == corner).all(), "the highest at least"


def scores(*values: float, size: int = 10, low: float = -9.0) -> npt.NDArray[np.float32]:
    """One class output that is low but for the corner and those three cells from it."""
    array = np.full((1, 1, size, size), low, np.float32)
    for k, value in enumerate(values):
        array[0, 0, 0, 3 * k] = value
    return array


def looked_at(outputs: dict[str, npt.NDArray[np.float32]], threshold: float, share: float) -> Mask:
    found = Focus(tuple(outputs), threshold, share).find(outputs)
    assert found is not None and len(found.masks) == 1
    return found.masks[0]


@pytest.mark.parametrize(
    ("share", "positions"), [(0.0, 1), (0.0149, 1), (0.0151, 2), (0.0249, 2), (0.0251, 3)]
)
def test_the_highest_share_of_all_maps_together(share: float, positions: int) -> None:
    mask = looked_at({"a": scores(4.0, 3.0, 2.0)}, 9.0, share)
    assert (mask == dilated(at(10, 10, *[(0, 3 * k) for k in range(positions)]))).all()
    # A second map of as many positions: half the share means the same number of them.
    mask = looked_at({"a": scores(4.0, 3.0, 2.0), "b": scores()}, 9.0, share / 2)
    assert (mask == dilated(at(10, 10, *[(0, 3 * k) for k in range(positions)]))).all()


@pytest.mark.parametrize(
    "output",
    [
        np.zeros((1, 4)),
        np.zeros((1, 2, 3, 3, 1)),
        np.zeros((1, 0, 3, 3)),
        np.zeros((0, 2, 3, 3)),
        np.zeros((1, 2, 0, 3)),
        np.full((1, 2, 3, 3), np.nan),
        np.full((1, 2, 3, 3), np.inf),
        np.zeros((2, 2, 3, 3)),
    ],
)
def test_one_output_that_tells_nothing_is_enough(output: npt.NDArray[np.float64]) -> None:
    assert Focus(("a", "b")).find({"a": np.zeros((1, 2, 3, 3)), "b": output}) is None
    assert Focus(("a",)).find({"a": output}) is None or len(output) == 2
    assert Focus(()).find({}) is None


MANY = 100


@pytest.mark.parametrize(
    ("low", "high", "note"),
    [
        (0.0, 1.0, None),
        (0.0, 8.0, None),
        (0.0, 8.01, Remark.FAR_INPUTS(low=0, high=8.01)),
        (-8.0, 0.5, None),
        (-8.01, 0.5, Remark.FAR_INPUTS(low=-8.01, high=0.5)),
        (9.0, 9.0, Remark.FAR_INPUTS(low=9, high=9)),
        (0.0, 0.0, None),
        (0.0, 1e-9, Remark.SMALL_INPUTS(high=1e-9)),
        (0.0, 0.0058, Remark.SMALL_INPUTS(high=0.0058)),
        (0.001, 0.0058, Remark.SMALL_INPUTS(high=0.0058)),
        (0.0, 1.5 / 255, None),
        (-1e-9, 0.0058, None),
        (-1.0, -0.5, None),
        (math.inf, -math.inf, None),  # nothing finite
    ],
)
def test_what_the_reach_of_the_inputs_tells(low: float, high: float, note: Note | None) -> None:
    assert list(Looks(total=MANY, low=low, high=high).warnings()) == ([note] if note else [])


def test_looks_add_up() -> None:
    one = Looks()
    assert vars(one) == {
        "total": 0,
        "low": math.inf,
        "high": -math.inf,
        "constant": 0,
        "nonfinite": 0,
        "broken": 0,
    }
    for more in (
        Looks(1, 0.25, 0.5, 1),
        Looks(1, 0.125, 0.375, 0, 1),
        Looks(1, math.inf, -math.inf, 0, 1),
    ):
        one.merge(more)
    assert one == Looks(3, 0.125, 0.5, 1, 2, 0)
    other = Looks(10, -1.0, 0.25, 4, 5, 6)
    other.merge(one)
    assert other == Looks(13, -1.0, 0.5, 5, 7, 6)
    one.merge(Looks(1, 0.5, 2.0, 0, 0, 7))
    assert one == Looks(4, 0.125, 2.0, 1, 2, 7)

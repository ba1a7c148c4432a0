"""Positions looked at: thresholds from both sides, and outputs that tell nothing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from calibration.focus import Focus, FocusMap, dilated, resized

Mask = npt.NDArray[np.bool_]


def at(height: int, width: int, *cells: tuple[int, int]) -> Mask:
    mask = np.zeros((height, width), bool)
    for y, x in cells:
        mask[y, x] = True
    return mask


def test_the_defaults_are_a_score_of_a_tenth_and_a_thousandth() -> None:
    focus = Focus(("a",))
    assert 1 / (1 + math.exp(-focus.threshold)) == pytest.approx(0.1) and focus.share == 0.001


@pytest.mark.parametrize("y", range(4))
@pytest.mark.parametrize("x", range(3))
def test_neighbours(y: int, x: int) -> None:
    wanted = [[abs(i - y) <= 1 and abs(j - x) <= 1 for j in range(3)] for i in range(4)]
    mask = at(4, 3, (y, x))
    assert dilated(mask).tolist() == wanted and mask.sum() == 1


def test_grids_of_whole_multiples_and_others() -> None:
    mask = at(2, 3, (1, 2))
    assert resized(mask, 2, 3).tolist() == mask.tolist()
    assert resized(mask, 4, 9).tolist() == np.repeat(np.repeat(mask, 2, 0), 3, 1).tolist()
    assert resized(mask, 1, 1).tolist() == [[True]]
    assert resized(mask, 3, 3).tolist() == at(3, 3, (1, 2), (2, 2)).tolist()
    assert resized(mask, 2, 2).tolist() == at(2, 2, (1, 1)).tolist()
    assert resized(mask, 2, 4).tolist() == at(2, 4, (1, 2), (1, 3)).tolist()


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2, 3, 4, 4), 2), ((2, 3, 8, 2), 2), ((1, 3, 4, 4), 0), ((3, 3, 4, 4), 0), ((2, 3, 4), 0), ((2, 3, 4, 4, 1), 0),
     ((2, 0, 4, 4), 0), ((2, 3, 0, 4), 0)],
)  # fmt: skip
def test_activations_that_are_maps(shape: tuple[int, ...], rows: int) -> None:
    found = FocusMap([at(4, 4, (0, 0)), at(4, 4, (3, 3), (3, 2))])
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = found.values(values)
    assert len(parts) == rows
    if rows:
        for part, array, mask in zip(parts, values, found.masks, strict=True):
            assert part.tolist() == array[:, resized(mask, *shape[2:])].tolist()
        assert found._indices(4, 4) is found._indices(4, 4), "sought once"


def test_a_map_that_is_looked_at_everywhere() -> None:
    full, most = np.ones((2, 2), bool), at(2, 2, (0, 0), (0, 1), (1, 0))
    for shape, masks, wanted in [
        ((2, 3, 4, 4), [full, full], True), ((2, 3, 5, 1), [full, full], True), ((2, 3, 4, 4), [full, most], False),
        ((2, 3, 1, 2), [full, most], True), ((1, 3, 4, 4), [full, full], False), ((2, 3, 4), [full, full], False),
        ((1, 1, 2, 2), [most], False),
    ]:  # fmt: skip
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        assert FocusMap(masks).covers(array) is wanted
        if wanted:
            assert np.concatenate([v.ravel() for v in FocusMap(masks).values(array)]).tolist() == array.ravel().tolist()


def test_a_row_without_positions_gives_nothing() -> None:
    parts = FocusMap([at(2, 2), at(2, 2, (0, 1))]).values(np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2))
    assert [p.tolist() for p in parts] == [[[5.0]]]


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


def test_a_score_that_reaches_the_threshold() -> None:
    corner = dilated(at(10, 10, (0, 0)))
    both = dilated(at(10, 10, (0, 0), (0, 3)))
    assert (looked_at({"a": scores(1.0, 0.5)}, 0.5, 0.0) == both).all()
    assert (looked_at({"a": scores(1.0, 0.5)}, 0.5001, 0.0) == corner).all()
    assert (looked_at({"a": scores(1.0, 0.5)}, 5.0, 0.0) == corner).all(), "the highest at least"


@pytest.mark.parametrize(("share", "positions"), [(0.0, 1), (0.0149, 1), (0.0151, 2), (0.0249, 2), (0.0251, 3)])
def test_the_highest_share_of_all_maps_together(share: float, positions: int) -> None:
    mask = looked_at({"a": scores(4.0, 3.0, 2.0)}, 9.0, share)
    assert (mask == dilated(at(10, 10, *[(0, 3 * k) for k in range(positions)]))).all()
    # A second map of as many positions: half the share means the same number of them.
    mask = looked_at({"a": scores(4.0, 3.0, 2.0), "b": scores()}, 9.0, share / 2)
    assert (mask == dilated(at(10, 10, *[(0, 3 * k) for k in range(positions)]))).all()


def test_the_highest_class_of_a_position_counts() -> None:
    two = np.concatenate([scores(1.0), scores(-9.0, 1.0)], axis=1)
    assert (looked_at({"a": two}, 0.5, 0.0) == dilated(at(10, 10, (0, 0), (0, 3)))).all()


def test_the_finest_grid_of_each_side() -> None:
    wide, tall = np.full((1, 1, 2, 8), -9.0, np.float32), np.full((1, 1, 8, 2), -9.0, np.float32)
    wide[0, 0, 0, 0] = 1.0
    mask = looked_at({"a": wide, "b": tall}, 0.5, 0.0)
    assert mask.shape == (8, 8) and (mask == resized(dilated(at(2, 8, (0, 0))), 8, 8)).all()


@pytest.mark.parametrize(
    "output",
    [np.zeros((1, 4)), np.zeros((1, 2, 3, 3, 1)), np.zeros((1, 0, 3, 3)), np.zeros((0, 2, 3, 3)),
     np.zeros((1, 2, 0, 3)), np.full((1, 2, 3, 3), np.nan), np.full((1, 2, 3, 3), np.inf), np.zeros((2, 2, 3, 3))],
)  # fmt: skip
def test_one_output_that_tells_nothing_is_enough(output: npt.NDArray[np.float64]) -> None:
    assert Focus(("a", "b")).find({"a": np.zeros((1, 2, 3, 3)), "b": output}) is None
    assert Focus(("a",)).find({"a": output}) is None or len(output) == 2
    assert Focus(()).find({}) is None

"""Three sets of samples."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.dataset import Dataset
from qdqtool.errors import DataError
from qdqtool.graph import Model
from qdqtool.tuning.images import Sets, open_sets
from tests.insertion.nets import Net


def model(batch: int = 1) -> Model:
    net = Net(1, 2, batch=batch)
    net.output(net.conv("c", "x", 1, 16))
    return Model(net.model())


def numbered(count: int, first: int = 0) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((1, 1, 2, 2), first + i, np.float32)} for i in range(count)]


def values(sets: Sets, numbers: tuple[int, ...]) -> list[int]:
    found = []
    for number in numbers:
        sample = sets.measured.load(number)
        assert sample is not None
        found += [int(row.flat[0]) for row in sample["x"]]
    return found


def calibrated(sets: Sets) -> list[int]:
    return [int(row.flat[0]) for sample in sets.calibration for row in sample["x"]]


@given(st.integers(4, 300), st.integers(1, 40), st.integers(1, 70))
def test_the_sets_share_nothing(count: int, chosen: int, judged: int) -> None:
    sets = open_sets(model(), numbered(count), chosen_on=chosen, judged_on=judged)
    parts = [calibrated(sets), values(sets, sets.chosen_on), values(sets, sets.judged_on)]
    everything = [v for part in parts for v in part]
    assert len(everything) == len(set(everything)) == count
    assert 1 <= len(parts[1]) <= min(chosen, max(1, count // 4))
    assert 1 <= len(parts[2]) <= min(judged, max(1, count // 4))


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 70))
def test_evaluation_data_is_halved(count: int, chosen: int, judged: int) -> None:
    sets = open_sets(model(), numbered(5), numbered(count, 1000), chosen_on=chosen, judged_on=judged)
    assert calibrated(sets) == [0, 1, 2, 3, 4]
    one, other = values(sets, sets.chosen_on), values(sets, sets.judged_on)
    assert not set(one) & set(other) and min([*one, *other]) >= 1000
    assert 1 <= len(one) <= max(chosen, 4) and 1 <= len(other) <= max(judged, 4)


def test_neighbours_fall_on_one_side() -> None:
    """Of 64 frames of a video all but those at the edges of blocks have both neighbours in the same set."""
    sets = open_sets(model(), numbered(5), numbered(64, 1000))
    one = set(values(sets, sets.chosen_on))
    assert len(one) == 32
    edges = [v for v in range(1000, 1063) if (v in one) != (v + 1 in one)]
    assert len(edges) == 7


def test_samples_of_a_fixed_batch() -> None:
    rows = np.arange(64, dtype=np.float32).reshape(16, 4, 1, 1, 1).repeat(2, 3).repeat(2, 4)
    sets = open_sets(model(4), [{"x": r} for r in rows])
    assert len(sets.chosen_on) == 4 and len(values(sets, sets.chosen_on)) == 16


def test_sets_of_files_go_through_pickle_and_are_told_by_content(tmp_path: Path) -> None:
    def sets(bright: int = 0) -> Sets:
        rows = np.arange(40, dtype=np.float32).reshape(10, 1, 2, 2)
        rows[-1] += bright
        np.save(tmp_path / "x.npy", rows)
        np.save(tmp_path / "c.npy", rows[:4])
        return open_sets(model(), tmp_path / "c.npy", tmp_path / "x.npy")

    one = sets()
    again: Dataset = pickle.loads(pickle.dumps(one.measured))
    assert [again.name(i) for i in range(4)] == [one.measured.name(i) for i in range(4)]
    assert again.name(0) == "x.npy[0]"
    mine, theirs = one.measured.load(3), again.load(3)
    assert mine is not None and theirs is not None and np.array_equal(mine["x"], theirs["x"])
    assert sets().fingerprint == one.fingerprint != sets(1).fingerprint


def test_the_same_data_cannot_judge(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((9, 1, 2, 2), np.float32))
    (tmp_path / "link.npy").symlink_to(tmp_path / "x.npy")
    with pytest.raises(DataError, match=r"link\.npy: is what `data` names"):
        open_sets(model(), tmp_path / "x.npy", str(tmp_path / "link.npy"))


@pytest.mark.parametrize(
    ("data", "evaluation", "message"),
    [(numbered(3), None, "3 images are too few"), (numbered(8), numbered(1), "1 image is too few"),
     (iter(numbered(9)), None, "once only"), (None, None, "no images"), (numbered(8), iter(numbered(9)), "once only")],
)  # fmt: skip
def test_too_little(data: object, evaluation: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_sets(model(), data, evaluation)

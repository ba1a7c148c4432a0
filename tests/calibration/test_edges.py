"""The edges of the rules of calibration: what is just inside, what is just outside, what is empty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.cache import load_progress
from calibration.dataset import InputSpec
from calibration.images import open_data
from calibration.methods import clipped_fraction
from calibration.statistics import Statistics, TensorStatistics
from qdqtool.errors import DataError


def write_npy(path: Path, array: np.ndarray, fortran: bool) -> None:
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": fortran, "shape": array.shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.astype("<f4").tobytes())


def test_fortran_order_means_nothing_with_one_dimension(tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.float32)
    write_npy(tmp_path / "c.npy", values, True)
    samples = list(open_data(tmp_path / "c.npy", [InputSpec("x", (1,))]))
    assert [s["x"].tolist() for s in samples] == [[v] for v in values.tolist()]
    write_npy(tmp_path / "c.npy", values[:, None], True)
    with pytest.raises(DataError, match="Fortran"):
        open_data(tmp_path / "c.npy", [InputSpec("x", (1, 1))])


def test_a_tensor_without_values_takes_no_room_from_the_next(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0, 3, 500).astype(np.float32)
    arrays = {"none": np.zeros(0), "some": values, "nothing": np.zeros(0), "more": values * 7}
    Statistics({n: TensorStatistics.of(a) for n, a in arrays.items()}).save(tmp_path / "s.npz")
    back = Statistics.load(tmp_path / "s.npz")
    for name, array in arrays.items():
        assert back[name].count == len(array)
        if len(array):
            assert (back[name].minimum, back[name].maximum) == (array.min(), array.max())
            assert np.array_equal(back[name].counter.counts, TensorStatistics.of(array).counter.counts)


@pytest.mark.parametrize(("column", "value"), [(2, 129), (2, 10**6), (2, -(10**6)), (3, -1)])
def test_a_histogram_outside_its_window_is_damage(tmp_path: Path, column: int, value: int) -> None:
    """Each bound alone: the place of the highest octave, and the first filled bin."""
    Statistics({"x": TensorStatistics.of(np.ones(9))}).save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as archive:
        arrays = dict(archive)
    arrays["numbers"][0, column] = value
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(DataError, match="damaged"):
        load_progress(tmp_path / "s.npz")


def test_the_whole_range_clips_nothing() -> None:
    """Exactly nothing, although the largest value stands in the midst of its bin."""
    values = np.array([1.0, 2.0, 3.0001], np.float32)
    stats = TensorStatistics.of(values)
    assert clipped_fraction(stats, float(values.max())) == 0.0
    assert clipped_fraction(stats, 2.5) == pytest.approx(1 / 3)
    assert clipped_fraction(TensorStatistics.of(np.zeros(0)), 1.0) == 0.0

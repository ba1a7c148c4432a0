"""The edges of the rules of calibration: what is just inside, what is just outside, what is empty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from calibration.cache import Statistics, load_progress, load_statistics, save_statistics
from calibration.dataset import InputSpec
from calibration.histogram import MIN_TOP
from calibration.images import open_data
from calibration.methods import METHODS, _least_divergence, amax_of, clipped_fraction
from calibration.runner import collect
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError
from tests.calibration.divergence import divergence
from tests.calibration.nets import conv_net


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
    save_statistics(Statistics({n: TensorStatistics.of(a) for n, a in arrays.items()}), tmp_path / "s.npz")
    back = load_statistics(tmp_path / "s.npz")
    for name, array in arrays.items():
        assert back[name].count == len(array)
        if len(array):
            assert (back[name].minimum, back[name].maximum) == (array.min(), array.max())
            assert np.array_equal(back[name].counter.counts, TensorStatistics.of(array).counter.counts)


@pytest.mark.parametrize(("column", "value"), [(2, 129), (2, 10**6), (2, -(10**6)), (3, -1)])
def test_a_histogram_outside_its_window_is_damage(tmp_path: Path, column: int, value: int) -> None:
    """Each bound alone: the place of the highest octave, and the first filled bin."""
    save_statistics(Statistics({"x": TensorStatistics.of(np.ones(9))}), tmp_path / "s.npz")
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


@pytest.mark.parametrize("method", METHODS)
def test_seeing_everything_many_times_changes_no_range(method: str) -> None:
    """Ranges depend on shares, not on counts: few values, or each of them a thousand times."""
    values = np.random.default_rng(3).laplace(0, 1, 300).astype(np.float32)
    once, often = TensorStatistics.of(values), TensorStatistics.of(np.tile(values, 1000))
    assert amax_of(once, method) == pytest.approx(amax_of(often, method), rel=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.003])
@pytest.mark.parametrize("seed", range(6))
def test_the_search_for_the_least_divergence_is_exact(seed: int, share: float) -> None:
    """On counts, and on the parts of counts that splitting bins leaves; with outliers that are worth clipping."""
    dice = np.random.default_rng(seed)
    counts = dice.poisson(3000 * np.exp(-np.arange(320) / dice.uniform(10, 30))).astype(np.float64)
    counts[dice.integers(200, 320, 5)] += dice.integers(1, 9, 5)
    counts *= share
    counts[0] = counts[1]
    direct = np.array([divergence(counts, kept) for kept in range(128, 321)])
    kept = round(_least_divergence(counts, 1.0) * 320)
    assert direct.argmin() < len(direct) - 1, "something is clipped here"
    assert direct[kept - 128] == pytest.approx(direct.min(), rel=1e-9)


def test_the_smallest_range_that_a_scale_can_resolve() -> None:
    smallest = np.float32(2.0**MIN_TOP)
    for value in (smallest, smallest * np.float32(1.5)):
        assert amax_of(TensorStatistics.of(np.array([value])), "max") == pytest.approx(float(value), rel=1e-6)
    assert amax_of(TensorStatistics.of(np.array([smallest / 2])), "max") == 1.0


def test_a_tensor_that_is_never_finite_is_told_with_its_model(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(conv_net(), path)
    pictures = np.full((2, 3, 16, 16), np.inf, np.float32)
    with pytest.raises(DataError, match=r"^.*net\.onnx: tensor '.*' is NaN or infinite for every input"):
        collect(path, {"images": pictures}, ["images"], progress=False)

"""npy and npz files at the limits of what they may hold, each refusal with its whole sentence."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from calibration.arrays import RowsSource, SampleFilesSource, StackedArray, StackedSource, array_file_source
from calibration.dataset import Dataset, InputSpec
from calibration.digests import file_digest
from calibration.images import open_data
from qdqtool import budgets
from qdqtool.arrayfiles import Archive
from qdqtool.errors import DataError

ONE = InputSpec("x", (1, 2))
TWO = [ONE, InputSpec("y", (1, 1))]
ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)


def npy(path: Path, array: npt.NDArray[Any]) -> Path:
    np.save(path / "c.npy", array)
    return path / "c.npy"


def npz(path: Path, **arrays: npt.NDArray[Any]) -> Path:
    np.savez(path / "c.npz", allow_pickle=True, **arrays)
    return path / "c.npz"


def stacked(path: Path, inputs: list[InputSpec]) -> StackedSource:
    source = array_file_source(path, inputs)
    assert isinstance(source, StackedSource)
    return source


def test_a_scalar_is_one_sample(tmp_path: Path) -> None:
    path = npy(tmp_path, np.float32(3).reshape(()))
    assert len(StackedArray(path)) == 1 and StackedArray(path).row(0) == 3
    (sample,) = open_data(path, [InputSpec("x", (1,))])
    assert sample["x"].tolist() == [3]
    (sample,) = open_data(path, [InputSpec("x", ())])
    assert sample["x"].shape == () and sample["x"] == 3


def test_rows_or_batches(tmp_path: Path) -> None:
    assert [stacked(npy(tmp_path, a), [ONE]).single_rows for a in (ROWS, ROWS[:, None])] == [True, False]
    mixed = npz(tmp_path, x=ROWS, y=np.zeros((5, 1, 1), np.float32))
    assert not stacked(mixed, TWO).single_rows
    assert stacked(npz(tmp_path, x=ROWS, y=np.zeros((5, 1), np.float32)), TWO).single_rows


def test_what_a_file_without_samples_is_told(tmp_path: Path) -> None:
    path = npy(tmp_path, ROWS[:0])
    with pytest.raises(DataError) as caught:
        array_file_source(path, [ONE])
    assert str(caught.value) == f"{path}: holds no samples"
    path = npy(tmp_path, np.zeros((3, 0), np.float32))
    with pytest.raises(DataError) as caught:
        array_file_source(path, [ONE])
    assert str(caught.value) == f"{path}: its samples have no values (shape [3, 0])"


def test_one_sample_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, packed, folder = npy(tmp_path, ROWS), npz(tmp_path, x=ROWS), tmp_path / "each"
    folder.mkdir()
    np.save(folder / "0.npy", ROWS[:1])
    monkeypatch.setattr(budgets, "SAMPLE", 8)
    assert len(list(open_data(path, [ONE]))) == len(list(open_data(packed, [ONE]))) == 5
    assert len(list(open_data(folder, [ONE]))) == 1
    monkeypatch.setattr(budgets, "SAMPLE", 7)
    for file in (path, packed):
        with pytest.raises(DataError, match=r"one sample takes 8 bytes; the limit is 7 bytes$"):
            open_data(file, [ONE])
    with pytest.raises(DataError, match=r"0\.npy: one sample takes 8 bytes; the limit is 7 bytes$"):
        list(open_data(folder, [ONE]))


@pytest.mark.parametrize(
    ("arrays", "inputs", "told"),
    [
        ({"a": ROWS, "b": ROWS}, [ONE], "has no array for the model's input 'x'; it has 'a', 'b'"),
        ({"x": ROWS}, TWO, "has no array for the model's input 'y'; it has 'x'"),
        ({"y": ROWS[:, :1]}, TWO, "has no array for the model's input 'x'; it has 'y'"),
        ({"x": ROWS, "y": ROWS[:3, :1]}, TWO, "the arrays have different numbers of samples: 'x' 5, 'y' 3"),
        ({}, [ONE], "has no array for the model's input 'x'; it has nothing"),
    ],
)
def test_arrays_that_do_not_fit_the_inputs(
    tmp_path: Path, arrays: dict[str, npt.NDArray[Any]], inputs: list[InputSpec], told: str
) -> None:
    path = tmp_path / "c.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            held = io.BytesIO()
            np.save(held, array)
            archive.writestr(f"{name}.npy", held.getvalue())
    with pytest.raises(DataError) as caught:
        array_file_source(path, inputs)
    assert str(caught.value) == f"{path}: {told}"


def test_one_npy_feeds_one_input(tmp_path: Path) -> None:
    path = npy(tmp_path, ROWS)
    with pytest.raises(DataError) as caught:
        array_file_source(path, TWO)
    assert str(caught.value) == f"{path}: one npy cannot feed a model with 2 inputs; give an npz"
    named = npz(tmp_path, x=ROWS, other=ROWS + 1)
    assert [s["x"][0, 0] for s in open_data(named, [ONE])] == ROWS[:, 0].tolist()


def test_only_what_is_not_packed_is_read_at_any_place(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "p.npz", x=ROWS)
    assert StackedArray(npy(tmp_path, ROWS)).random_access
    plain, packed = Archive(npz(tmp_path, x=ROWS)), Archive(tmp_path / "p.npz")
    assert StackedArray(plain.path, plain, "x").random_access  # type: ignore[arg-type]
    assert not StackedArray(packed.path, packed, "x").random_access  # type: ignore[arg-type]
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as mixed:
        for name, kind in (("x", zipfile.ZIP_STORED), ("y", zipfile.ZIP_DEFLATED)):
            held = io.BytesIO()
            np.save(held, ROWS[:, :1] if name == "y" else ROWS)
            mixed.writestr(f"{name}.npy", held.getvalue(), kind)
    source = stacked(tmp_path / "m.npz", TWO)
    assert not source.random_access and stacked(npz(tmp_path, x=ROWS), [ONE]).random_access
    with pytest.raises(DataError) as caught:
        source.portion([0])
    assert str(caught.value) == (f"{tmp_path / 'm.npz'}: is compressed, so that workers cannot begin in the middle; "
                                 "save it with numpy.savez, uncompressed")


def test_rows_of_a_file_by_number_and_digest(tmp_path: Path) -> None:
    """The digests are those of caches that were written before: they may not change."""
    path = npy(tmp_path, ROWS)
    source, mark = stacked(path, [ONE]), file_digest(path)
    assert source.digest(0) == mark + bytes(8) and source.digest(3) == bytes(7) + b"\x03"
    assert source.identity(3) == bytes(7) + b"\x03" + mark == source.identity(3)
    assert (source.count(), source.name(2)) == (5, "c.npy[2]")
    rows = source.portion([4, 1])
    assert isinstance(rows, RowsSource) and rows._whole is None, "nothing is opened yet"
    assert rows.path.is_absolute() and rows.count() == 2 and rows.single_rows
    assert rows.whole is rows.whole
    assert [rows.load(k)["x"].tolist() for k in (0, 1)] == [[[8, 9]], [[2, 3]]]
    assert [rows.name(0), rows.digest(1), rows.identity(0)] == ["c.npy[4]", source.digest(1), source.identity(4)]


def test_damage_is_told_with_the_sample(tmp_path: Path) -> None:
    path = npy(tmp_path, np.ones((5, 4000), np.float32))  # more than is read ahead
    source = stacked(path, [InputSpec("x", (1, 4000))])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert source.load(3)["x"].all()
    with pytest.raises(DataError) as caught:
        source.load(4)
    assert str(caught.value) == f"{path}: the file is cut off at sample 4; copy it again"
    source.arrays["x"].close()
    with pytest.raises(DataError, match=r"c\.npy: damaged at sample 2: "):
        source.load(2)


def test_a_folder_of_samples(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "a.npz", x=ROWS[:1])
    np.save(tmp_path / "in" / "b.npy", ROWS[1])
    source: Any = open_data(tmp_path, [ONE]).source
    assert isinstance(source, SampleFilesSource) and not source.single_rows
    assert [source.load(k)["x"].tolist() for k in range(source.count())] == [[[0, 1]], [[2, 3]]]
    assert source.digest(1) == b"in/b.npy" + file_digest(tmp_path / "in" / "b.npy")
    part = source.portion([1])
    assert (part.count(), part.name(0), part.load(0)["x"].tolist()) == (1, "in/b.npy", [[2, 3]])
    assert source.count() == 2
    wrong = Dataset(open_data(tmp_path, [InputSpec("x", (1, 3))]).source, [InputSpec("x", (1, 3))], 9)
    with pytest.raises(DataError) as caught:
        list(wrong)
    assert str(caught.value) == f"{tmp_path / 'in' / 'a.npz'}: array 'x' is [1, 2], the model's input 'x' takes [1, 3]"

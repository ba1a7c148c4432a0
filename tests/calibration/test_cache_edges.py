"""Caches of nothing, of just as much as may be, and TensorRT's table line by line."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from calibration.cache import (
    Progress,
    Statistics,
    load_progress,
    load_statistics,
    read_tensorrt_cache,
    save_progress,
    save_statistics,
    write_tensorrt_cache,
)
from calibration.looks import Looks
from calibration.statistics import TensorStatistics
from qdqtool import budgets, files
from qdqtool.errors import DataError, QdqtoolError


def test_statistics_of_nothing(tmp_path: Path) -> None:
    save_statistics(Statistics({}, images=3), tmp_path / "s.npz")
    back = load_statistics(tmp_path / "s.npz")
    assert list(back) == [] and back.images == 3 and back.fingerprint == ""
    with np.load(tmp_path / "s.npz") as archive:
        shapes = {k: (v.shape, v.dtype.name) for k, v in archive.items() if k != "header"}
    assert shapes == {"done": ((0, 2), "int64"), "numbers": ((0, 5), "int64"), "range": ((0, 2), "float64"),
                      "counts": ((0,), "int64"), "spots": ((0, 3), "int64"), "values": ((0,), "float32")}  # fmt: skip


@pytest.mark.parametrize(
    ("done", "total", "complete"),
    [((), None, False), ((), 0, True), ((0, 1), 3, False), ((0, 1, 2), 3, True), ((0, 1, 2), 2, True),
     ((0,), None, False)],
)  # fmt: skip
def test_how_far_it_has_come(tmp_path: Path, done: tuple[int, ...], total: int | None, complete: bool) -> None:
    looks = Looks(2, -1.5, 0.25, 1, 0, 4)
    progress = Progress("key", Statistics({"x": TensorStatistics.of(np.ones(3), 64)}), reversed(done), total, looks)
    assert progress.complete == complete
    save_progress(progress, tmp_path / "c.npz")
    back = load_progress(tmp_path / "c.npz")
    assert (back.model, list(back.done), back.total, back.looks) == ("key", list(done), total, looks)
    assert Progress("", Statistics({}), (), None).looks == Looks()


def test_only_filled_bins_are_kept(tmp_path: Path) -> None:
    parts = {"one": TensorStatistics.of(np.array([0.75]), 64), "two": TensorStatistics.of(np.array([0.5, 0.75]), 64)}
    save_statistics(Statistics(parts), tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as archive:
        at = 1 + 19 * 32
        assert archive["numbers"].tolist() == [[1, 0, 0, at + 16, at + 17], [2, 0, 0, at, at + 17]]
        assert archive["counts"].tolist() == [1, 1, *[0] * 15, 1] and archive["done"].tolist() == []
        assert json.loads(archive["header"].tobytes())["bins"] == 64


def test_looks_that_are_infinite(tmp_path: Path) -> None:
    looks = Looks(nonfinite=2, total=2)
    save_progress(Progress("", Statistics({}), (), None, looks), tmp_path / "c.npz")
    assert load_progress(tmp_path / "c.npz").looks == looks and looks.low == math.inf


def test_a_header_of_just_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.npz"
    save_statistics(Statistics({}), path)
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("header.npy").file_size
    monkeypatch.setattr(budgets, "CACHE_HEADER", size)
    load_statistics(path)
    monkeypatch.setattr(budgets, "CACHE_HEADER", size - 1)
    with pytest.raises(DataError) as caught:
        load_statistics(path)
    assert str(caught.value) == (f"{path}: its header takes {budgets.amount(size)}; the limit is "
                                 f"{budgets.amount(size - 1)}; give another name or delete it")


def test_files_that_are_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for content in (b"text", b"PK\x03\x04" + bytes(50)):
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_statistics(path)
        told = f"{path}: is not a calibration cache, or is cut off; give another name or delete it"
        assert str(caught.value) == told
    np.savez(path, images=np.zeros(3))
    with pytest.raises(DataError) as caught:
        load_statistics(path)
    assert str(caught.value) == f"{path}: is not a calibration cache; give another name or delete it"
    path.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        load_statistics(path)
    assert str(caught.value) == f"{path}: is empty; give another name or delete it"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nocolon", "line 3 is not 'tensor: 8 hexadecimal digits'"),
        ("x: 3f8000001", "line 3 is not 'tensor: 8 hexadecimal digits'"),
        ("x: 3f80000000", "line 3 is not 'tensor: 8 hexadecimal digits'"),
        ("x: 3g800000", "line 3 is not 'tensor: 8 hexadecimal digits'"),
        (": 3f800000", "line 3: scale 1 of tensor '' is not usable"),
        ("x: 7f800000", "line 3: scale inf of tensor 'x' is not usable"),
        ("x: 7fc00000", "line 3: scale nan of tensor 'x' is not usable"),
        ("x: 80000001", "line 3: scale -1.4013e-45 of tensor 'x' is not usable"),
    ],
)
def test_lines_that_no_table_has(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "t.cache"
    path.write_text(f"TRT-8601-MinMaxCalibration\ny: 3f800000\n{line}\n")
    with pytest.raises(DataError) as caught:
        read_tensorrt_cache(path)
    assert str(caught.value) == f"{path}: {told}"


def test_lines_that_a_table_may_have(tmp_path: Path) -> None:
    path = tmp_path / "t.cache"
    path.write_text("TRT-1\n\n  \nzero: 0\na:b : 3f800000\nsmall: 1\n")
    assert read_tensorrt_cache(path) == {"zero": 0.0, "a:b": 1.0, "small": struct.unpack(">f", b"\0\0\0\1")[0]}
    path.write_text("TRT-1")
    assert read_tensorrt_cache(path) == {}
    first = "is not a TensorRT calibration table (its first line should start with 'TRT-')"
    for text, told in (("", first), ("\nTRT-1\n", first), (" TRT-1\n", first)):
        path.write_text(text)
        with pytest.raises(DataError) as caught:
            read_tensorrt_cache(path)
        assert str(caught.value) == f"{path}: {told}"
    path.write_bytes(b"TRT-1\n\xff: 0\n")
    with pytest.raises(DataError, match=r"cannot be read as a TensorRT calibration table: not text$"):
        read_tensorrt_cache(path)


def test_what_is_written_to_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.cache"
    write_tensorrt_cache(path, {"a:b": 0.5, "c": 1e-30}, "TRT-10000-EntropyCalibration2")
    assert path.read_text() == "TRT-10000-EntropyCalibration2\na:b: 3f000000\nc: 0da24260\n"
    for name, scale in (("x", 0.0), ("x", -0.5), ("x", math.inf), ("x", math.nan), ("x\ny", 0.5)):
        with pytest.raises(DataError) as caught:
            write_tensorrt_cache(path, {"a": 1.0, name: scale})
        told = f"tensor '{name}': scale {scale:g} cannot be written to a TensorRT calibration table"
        assert str(caught.value) == told
    assert path.read_text().startswith("TRT-10000"), "the one before is left"


def test_a_cache_that_was_read_may_be_replaced(tmp_path: Path) -> None:
    """It is the one file of which that is true."""
    path = tmp_path / "c.npz"
    save_statistics(Statistics({}), path)
    with files.watch() as guard:
        load_progress(path)
        guard.check(path)
        files.note_read(path)
        with pytest.raises(QdqtoolError, match="one of the files read"):
            guard.check(path)

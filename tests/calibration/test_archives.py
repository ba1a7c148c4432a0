import contextlib
import io
import os
import pickle
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.archives import read_arrays
from qdqtool.errors import DataError
from qdqtool.util import limits
from tests.errors import has

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npy_with_header(header: bytes, values: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + size + header + values


def header(descr: str = "'<f4'", shape: str = "(2, 3)") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()


def write_npz(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_arrays_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    arrays = {"b": VALUES, "a": np.asfortranarray(VALUES), "c": np.float64(2.5), "d": VALUES[:0]}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        loaded = read_arrays(tmp_path / "x.npz")
        assert list(loaded) == list(arrays)
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pickle-ran",)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(npy(np.array([Payload()], object)), "python-objects", id="objects"),
        pytest.param(pickle.dumps(Payload()), "wrong-format", id="pickle"),
        pytest.param(b"", "wrong-format", id="empty"),
        pytest.param(npy(VALUES)[:9], "wrong-format", id="cut header"),
        pytest.param(npy(VALUES)[:-1], "file-damaged", id="cut values"),
        pytest.param(npy_with_header(b"{'a\n"), "wrong-format", id="header without end"),
        pytest.param(npy_with_header(b"\t" * 90 + b"\n (" * 99), "wrong-format", id="no tokens"),
        pytest.param(npy_with_header(b"(" * 9000), "wrong-format", id="nested header"),
        pytest.param(npy_with_header(header() + b" " * 20_000), "wrong-format", id="long header"),
        pytest.param(npy_with_header(header(), b"", b"\x07\x00"), "wrong-format", id="version"),
        pytest.param(npy_with_header(header("'<c8'")), "wrong-type", id="complex"),
        pytest.param(npy_with_header(header("'<U3'")), "wrong-type", id="text"),
        pytest.param(npy_with_header(header("'|V0'")), "wrong-type", id="zero-size type"),
        pytest.param(npy_with_header(header("'(2,)<f4'")), None, id="subarray"),
        pytest.param(npy_with_header(header("[('x', '<f4')]")), "wrong-type", id="fields"),
        pytest.param(npy_with_header(header(shape="(-2, 3)")), "wrong-shape", id="negative"),
        pytest.param(npy_with_header(header(shape=f"({2**62}, 9, 0)")), "file-damaged", id="huge"),
        pytest.param(npy_with_header(header(shape=f"({10**15},)")), "file-damaged", id="more"),
        pytest.param(npy_with_header(header(shape="(1,) * 9")), "wrong-format", id="expression"),
        pytest.param(npy_with_header(header(shape="(1,1" + ",1" * 40 + ")")), None, id="rank"),
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_arrays_are_errors(
    tmp_path: Path, content: bytes, code: str | None, compression: int
) -> None:
    path = write_npz(tmp_path / "x.npz", {"a.npy": content}, compression)
    with contextlib.chdir(tmp_path), pytest.raises(DataError, check=has(code, path, "'a'")):
        read_arrays(path)
    assert not (tmp_path / "pickle-ran").exists()


def test_archive_unpacks_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An npz of 3 MB may unpack to 3 GB."""
    monkeypatch.setattr(limits, "UNPACKED_RATIO", 1)
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.zeros(1 << 18), b=np.zeros(1 << 18))
    size = 2 * len(npy(np.zeros(1 << 18)))
    monkeypatch.setattr(limits, "UNPACKED", size)
    assert read_arrays(path)["b"].shape == (1 << 18,)
    monkeypatch.setattr(limits, "UNPACKED", size - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, check=has("file-too-large", path=str(path))):
        read_arrays(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss == before


def test_member_with_a_wrong_size_is_read_to_that_size(tmp_path: Path) -> None:
    """A bomb may state a small size in the archive's directory."""
    path = write_npz(tmp_path / "x.npz", {"a.npy": npy(np.zeros(1 << 20))}, zipfile.ZIP_DEFLATED)
    size = len(npy(np.zeros(1 << 20)))
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", size), struct.pack("<I", 1000)))
    with pytest.raises(DataError, check=has("wrong-format", path, "array 'a'")):
        read_arrays(path)


@pytest.mark.parametrize("place", [0.3, 0.6])
def test_damaged_compression_is_an_error(tmp_path: Path, place: float) -> None:
    path = write_npz(
        tmp_path / "x.npz",
        {"a.npy": npy(np.random.default_rng(0).random(1000))},
        zipfile.ZIP_DEFLATED,
    )
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, check=has("file-damaged")):
        read_arrays(path)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"no zip", "wrong-format", id="text"),
        pytest.param(npy(VALUES), "wrong-format", id="npy"),
    ],
)
def test_other_files_are_errors(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, check=has(code, path=str(path))):
        read_arrays(path)


def test_archive_without_arrays_is_an_error(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", {"note.txt": b"text"})
    with pytest.raises(DataError, check=has("empty", path=str(path))):
        read_arrays(path)


def test_names_of_members_print_no_control_characters(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", {"\x1b]0;title\x07\x9b.npy": b"damaged"})
    with pytest.raises(DataError) as caught:
        read_arrays(path)
    assert str(caught.value).isprintable()

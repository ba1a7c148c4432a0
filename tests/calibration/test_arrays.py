import hashlib
import io
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from calibration.arrays import (
    MemorySource,
    SampleFilesSource,
    StackedSource,
    open_data,
    split_rows,
)
from calibration.dataset import Dataset, EndOfSamples, InputSpec
from calibration.listing import file_digest
from qdqtool.errors import DataError
from tests.calibration.checks import check_limit
from tests.errors import has

SPEC = InputSpec("images", (1, 3, 4, 4))
STACK = np.random.default_rng(0).random((7, 3, 4, 4), np.float32)
SIZES = np.arange(14).reshape(7, 2)

PAIR = InputSpec("x", (1, 2))
TWO_INPUTS = [PAIR, InputSpec("y", (1, 1))]
ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)
BLOCK = 65536


def npy(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "c.npy", array)
    return folder / "c.npy"


def npz(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "c.npz", allow_pickle=True, **arrays)
    return folder / "c.npz"


def npy_with_header(
    folder: Path, shape: tuple[int, ...], size: int = 1000, fortran: bool = False
) -> Path:
    path = folder / "c.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": fortran, "shape": shape}
        )
        file.truncate(file.tell() + size)
    return path


# Stacked arrays in files


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_of_stacked_arrays(tmp_path: Path, compressed: bool) -> None:
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "c.npz", images=STACK, size=SIZES, unused=np.zeros(3))
    data = open_data(tmp_path / "c.npz", [SPEC, InputSpec("size", (1, 2), "int64")])
    assert len(data) == 7
    for _ in range(2):
        samples = list(data)
        assert (np.concatenate([s["images"] for s in samples]) == STACK).all()
        sizes = np.concatenate([s["size"] for s in samples])
        assert (sizes == SIZES).all() and sizes.dtype == np.int64


def test_npy_is_converted_and_spread(tmp_path: Path) -> None:
    samples = list(open_data(npy(tmp_path, STACK.astype(">f8")), [SPEC], max_images=3))
    assert [s["images"].dtype for s in samples] == [np.float32] * 3
    assert (np.concatenate([s["images"] for s in samples]) == STACK[[0, 3, 6]]).all()


def test_values_beyond_the_input_type_become_infinite(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (sample, *_) = open_data(npy(tmp_path, STACK.astype(np.float64) * 1e300), [SPEC])
    assert np.isinf(sample["images"]).all() and not recwarn.list


OBJECTS = np.array([{"a": 1}, None], dtype=object)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("write", "inputs", "code", "values"),
    [
        pytest.param(
            lambda f: npz(f, images=STACK[:, :, :2]),
            [SPEC],
            "wrong-shape",
            ["[7, 3, 2, 4]", "[1, 3, 4, 4]"],
            id="shape",
        ),
        pytest.param(
            lambda f: npz(f, images=STACK, size=SIZES + 0.5),
            [SPEC, InputSpec("size", (1, 2), "int64")],
            "wrong-type",
            ["'size'", "float64", "int64"],
            id="type",
        ),
        pytest.param(
            lambda f: npy(f, np.asfortranarray(STACK)), [SPEC], "fortran-order", [], id="fortran"
        ),
        pytest.param(
            lambda f: npy_with_header(f, (5, 1), fortran=True),
            [InputSpec("x", (1, 1))],
            "fortran-order",
            [],
            id="fortran of one column",
        ),
        pytest.param(lambda f: npy(f, ROWS), TWO_INPUTS, "input-count", [2], id="inputs"),
        pytest.param(
            lambda f: npz(f, x=ROWS, z=ROWS), TWO_INPUTS, "missing-input", ["'y'", "'z'"], id="name"
        ),
        pytest.param(
            lambda f: npz(f, x=ROWS, y=ROWS[:4, :1]),
            TWO_INPUTS,
            "wrong-length",
            ["'x' 5", "'y' 4"],
            id="lengths",
        ),
        pytest.param(lambda f: npy(f, ROWS[:0]), [PAIR], "empty", ["samples"], id="no samples"),
        pytest.param(
            lambda f: npy(f, np.zeros((3, 0), np.float32)), [PAIR], "empty", ["[3, 0]"], id="empty"
        ),
        # Errors of the archive reader.
        pytest.param(lambda f: npz(f, images=OBJECTS), [SPEC], None, ["objects"], id="npz object"),
        pytest.param(lambda f: npy(f, OBJECTS), [SPEC], None, ["objects"], id="npy object"),
        pytest.param(
            lambda f: write(f / "c.npy", b"\x93NUMPY\x01\x00"),
            [SPEC],
            None,
            ["not a numpy array"],
            id="npy that is cut off",
        ),
        pytest.param(
            lambda f: write(f / "c.npz", b"no zip"),
            [SPEC],
            None,
            ["not an npz"],
            id="npz that is a text",
        ),
        pytest.param(
            lambda f: write(npz(f, images=STACK), (f / "c.npz").read_bytes()[:600]),
            [SPEC],
            None,
            ["not an npz"],
            id="npz that is cut off",
        ),
        pytest.param(
            lambda f: npy_with_header(f, (-5, 3, 4, 4)), [SPEC], None, ["[-5, 3, 4, 4]"], id="-5"
        ),
        # numpy creates no array of this shape, although it is empty.
        pytest.param(
            lambda f: npy_with_header(f, (2**62, 2**62, 0, 1)), [SPEC], None, [2**62], id="2**62"
        ),
        pytest.param(
            lambda f: npy_with_header(f, (1,) * 100), [SPEC], "file-damaged", [], id="dimensions"
        ),
    ],
)
def test_files_that_do_not_fit_the_inputs_are_rejected(
    tmp_path: Path, write: Any, inputs: list[InputSpec], code: str | None, values: list[object]
) -> None:
    path = write(tmp_path)
    with pytest.raises(DataError, check=has(code, path, *values)):
        open_data(path, inputs)


def test_fortran_order_of_one_dimension_is_accepted(tmp_path: Path) -> None:
    path = npy_with_header(tmp_path, (5,), 20, fortran=True)
    assert [s["x"].tolist() for s in open_data(path, [InputSpec("x", (1,))])] == [[0.0]] * 5


def test_large_array_is_not_read_whole(tmp_path: Path) -> None:
    shape = (2000, 3, 160, 160)  # 614 MB, sparse on disk
    path = npy_with_header(tmp_path, shape, 4 * int(np.prod(shape)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (
        sum(1 for _ in open_data(path, [InputSpec("x", (1, 3, 160, 160))], max_images=300)) == 300
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


def test_one_sample_may_have_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "each"
    folder.mkdir()
    np.save(folder / "0.npy", ROWS[:1])
    for source in (npy(tmp_path, ROWS), npz(tmp_path, x=ROWS), folder):
        check = has(None, source, "8", "7")
        check_limit("SAMPLE", 8, lambda source=source: list(open_data(source, [PAIR])), check)


@pytest.mark.parametrize(
    ("save", "random_access"),
    [
        pytest.param(np.savez, True, id="plain"),
        pytest.param(np.savez_compressed, False, id="compressed"),
    ],
)
def test_compressed_arrays_are_read_in_order(
    tmp_path: Path, save: Any, random_access: bool
) -> None:
    save(tmp_path / "c.npz", x=ROWS)
    assert StackedSource(tmp_path / "c.npz", [PAIR]).random_access == random_access
    assert StackedSource(npy(tmp_path, ROWS), [PAIR]).random_access


def test_one_compressed_array_is_enough_to_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, array, kind in (
            ("x", ROWS, zipfile.ZIP_STORED),
            ("y", ROWS[:, :1], zipfile.ZIP_DEFLATED),
        ):
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", content.getvalue(), kind)
    source = StackedSource(path, TWO_INPUTS)
    assert not source.random_access
    with pytest.raises(DataError, check=has("compressed-archive", path=str(path))):
        source.select_samples([0])


def test_digests_of_rows_do_not_change(tmp_path: Path) -> None:
    """Caches of earlier versions contain these digests."""
    path = npy(tmp_path, ROWS)
    source, file = StackedSource(path, [PAIR]), file_digest(path)
    assert source.digest(0) == file + bytes(8) and source.digest(3) == bytes(7) + b"\x03"
    assert source.identity(3) == bytes(7) + b"\x03" + file
    assert (source.count(), source.name(2)) == (5, "c.npy[2]")


def test_portion_of_rows(tmp_path: Path) -> None:
    path = npy(tmp_path, ROWS)
    source = StackedSource(path, [PAIR])
    rows = source.select_samples([4, 1])
    assert "arrays" not in vars(rows), "nothing is opened yet"
    assert rows.path.is_absolute() and rows.count() == 2 and rows.single_rows
    assert [rows.load(k)["x"].tolist() for k in (0, 1)] == [[[8, 9]], [[2, 3]]]
    assert (rows.name(0), rows.digest(1), rows.identity(0)) == (
        "c.npy[4]",
        source.digest(1),
        source.identity(4),
    )
    assert rows.select_samples([1]).load(0)["x"].tolist() == [[2, 3]]
    before = source.identity(4)
    np.save(path, ROWS + 1)
    assert source.identity(4) == before, "the file is hashed once"
    assert source.select_samples([4]).identity(0) != before, "another process hashes it again"


def test_damage_is_reported_with_its_sample(tmp_path: Path) -> None:
    path = npy(tmp_path, np.ones((5, 4000), np.float32))  # larger than the block that is read ahead
    source = StackedSource(path, [InputSpec("x", (1, 4000))])
    path.write_bytes(path.read_bytes()[:-1])
    assert source.load(3)["x"].all()
    with pytest.raises(DataError, check=has("file-damaged", "sample 4", path=str(path))):
        source.load(4)
    source.arrays["x"].file.close()
    with pytest.raises(DataError, check=has("file-damaged", "sample 2", path=str(path))):
        source.load(2)


# Folders of arrays, and paths


def test_folder_of_samples(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "a.npz", x=ROWS[:1])
    np.save(tmp_path / "in" / "b.npy", ROWS[1])
    source: Any = open_data(tmp_path, [PAIR]).source
    assert isinstance(source, SampleFilesSource) and not source.single_rows
    assert [source.load(k)["x"].tolist() for k in range(source.count())] == [[[0, 1]], [[2, 3]]]
    assert source.digest(1) == b"in/b.npy" + file_digest(tmp_path / "in" / "b.npy")
    part = source.select_samples([1])
    assert (part.count(), source.count(), part.name(0)) == (1, 2, "in/b.npy")
    wide, values = [InputSpec("x", (1, 3))], (tmp_path / "in" / "a.npz", "[1, 2]", "[1, 3]")
    with pytest.raises(DataError, check=has("wrong-shape", *values, node="x")):
        list(Dataset(open_data(tmp_path, wide).source, wide, 9))


# Arrays in memory


def test_exceptions_of_an_iterator_end_the_pass() -> None:
    def fail_after_two() -> Iterator[dict[str, np.ndarray]]:
        yield from ({"images": row} for row in STACK[:2])
        raise IndexError("theirs")

    with pytest.raises(IndexError, match="theirs"):
        list(open_data(fail_after_two(), [SPEC]))


def test_lists_are_read_again_and_in_any_order() -> None:
    source = MemorySource([{"x": r} for r in ROWS], [PAIR])
    assert (source.count(), source.repeatable, source.random_access) == (5, True, True)
    for _ in range(2):
        source.restart()
        assert source.load(4)["x"].tolist() == [[8, 9]]
    part = source.select_samples([3, 0])
    assert [part.load(k)["x"].tolist() for k in (0, 1)] == [[[6, 7]], [[0, 1]]]


def test_iterators_are_read_once() -> None:
    source = MemorySource(iter([{"x": ROWS[0]}]), [PAIR])
    assert (source.count(), source.repeatable, source.random_access) == (None, False, False)
    source.restart()
    assert (source.load(0)["x"].tolist(), source.digest(0)) == ([[0, 1]], b"")
    with pytest.raises(EndOfSamples):
        source.load(1)
    with pytest.raises(DataError, check=has("read-once", parameter="data")):
        source.restart()
    with pytest.raises(DataError, check=has("not-shareable", parameter="data")):
        source.select_samples([0])


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
def test_rows_of_stacked_arrays(
    inputs: dict[str, tuple[int | None, ...]], arrays: dict[str, tuple[int, ...]], samples: int
) -> None:
    stacked = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in arrays.items()}
    rows = split_rows(stacked, [InputSpec(n, s) for n, s in inputs.items()])
    assert len(rows) == samples
    if samples == 1:
        assert list(rows[0]) == list(stacked)
        return
    for k, row in enumerate(rows):
        assert list(row) == list(inputs)
        for name, array in row.items():
            assert (array == stacked[name][k : k + 1]).all()
            assert np.shares_memory(array, stacked[name])


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 17 * BLOCK, 40 * BLOCK + 12])
def test_digest_of_an_array_is_of_its_name_type_shape_and_sixteen_blocks(size: int) -> None:
    values = (np.arange(size) * 7 % 251).astype(np.uint8)
    starts = range(0, size, max(BLOCK, (size - BLOCK) // 15))
    content = f"xuint8({size},)".encode() + b"".join(
        values[k : k + BLOCK].tobytes() for k in starts
    )
    assert (
        MemorySource([{"x": values}], [PAIR]).digest(0)
        == hashlib.blake2b(content, digest_size=16).digest()
    )


def test_digests_differ_between_arrays() -> None:
    def digest(**arrays: np.ndarray) -> bytes:
        return MemorySource([arrays], [PAIR]).digest(0)

    assert digest(a=ROWS, b=ROWS) == digest(b=ROWS, a=ROWS)
    assert digest(a=ROWS.T) == digest(a=np.ascontiguousarray(ROWS.T))
    arrays = (ROWS, ROWS[:4], ROWS.reshape(2, 5), ROWS.view(np.int32), -ROWS)
    assert len({digest(b=ROWS), *(digest(a=array) for array in arrays)}) == 6


def test_list_of_image_paths(tmp_path: Path) -> None:
    for name, value in (("a.png", 0), ("b.png", 255)):
        Image.new("RGB", (4, 4), (value,) * 3).save(tmp_path / name)
    paths = [tmp_path / "b.png", str(tmp_path / "a.png")]
    first, second = (sample["images"] for sample in open_data(paths, [SPEC]))
    assert (first == 1).all() and (second == 0).all()

import io
import resource
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from calibration.arrays import SampleFilesSource, StackedArray, StackedSource, open_data
from calibration.dataset import Dataset, InputSpec
from calibration.listing import file_digest
from qdqtool.base import budgets
from qdqtool.base.archives import Archive
from qdqtool.errors import DataError
from tests.calibration.nets import refused
from tests.raising import raises

SPEC = InputSpec("images", (1, 3, 4, 4))
TWO = [SPEC, InputSpec("size", (1, 2), "int64")]
RNG = np.random.default_rng(0)
STACK = RNG.random((7, 3, 4, 4), np.float32)
SIZES = np.arange(14).reshape(7, 2)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_npz_of_stacked_arrays(tmp_path: Path, compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)(
        tmp_path / "c.npz", images=STACK, size=SIZES, unused=np.zeros(3)
    )
    data = open_data(tmp_path / "c.npz", TWO)
    assert len(data) == 7
    for _ in range(2):
        for index, sample in enumerate(data):
            assert (sample["images"] == STACK[index : index + 1]).all()
            assert (sample["size"] == SIZES[index : index + 1]).all() and sample[
                "size"
            ].dtype == np.int64


def test_npy_files(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", STACK.astype(">f8"))
    samples = list(open_data(tmp_path / "c.npy", [SPEC], max_images=3))
    assert [s["images"].dtype for s in samples] == [np.float32] * 3
    for sample, index in zip(samples, (0, 3, 6), strict=True):
        assert (sample["images"][0] == STACK[index]).all()
    path = npy(tmp_path, ROWS)
    refused(DataError, f"StackedSource.arrays {path}: 2", StackedSource, path, TWO_INPUTS)
    named = npz(tmp_path, x=ROWS, other=ROWS + 1)
    assert [s["x"][0, 0] for s in open_data(named, [ONE])] == ROWS[:, 0].tolist()
    for shape in (
        (-5, 3, 4, 4),
        (2**62, 2**62, 0, 1),
    ):  # numpy makes no array of the second, empty as it is
        with (tmp_path / "c.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": shape}
            )
            file.write(bytes(1000))
        with pytest.raises(
            DataError, match=rf"declares the shape \[{', '.join(map(str, shape))}\]"
        ):
            open_data(tmp_path / "c.npy", [SPEC])
    with (tmp_path / "c.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (1,) * 100}
        )
        file.write(bytes(4))
    with raises(DataError, "Header.__init__ 100"):
        open_data(tmp_path / "c.npy", [SPEC])
    path = npy(tmp_path, ROWS[:0])
    refused(DataError, f"StackedSource.__init__ {path}: samples", StackedSource, path, [ONE])
    path = npy(tmp_path, np.zeros((3, 0), np.float32))
    refused(DataError, f"StackedArray.__init__ {path}: [3, 0]", StackedSource, path, [ONE])


class Failing(Sequence[dict[str, npt.NDArray[Any]]]):
    """A list whose third sample raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            raise self.error
        return {"images": STACK[index]}


def failing(error: BaseException) -> Iterator[dict[str, npt.NDArray[Any]]]:
    yield from ({"images": row} for row in STACK[:2])
    raise error


@pytest.mark.parametrize("source", [Failing, failing])
@pytest.mark.parametrize(
    "error", [IndexError("of theirs"), KeyError("k"), RuntimeError(), LookupError("a\nb")]
)
def test_what_the_users_objects_raise_names_the_sample(source: Any, error: Exception) -> None:
    """An IndexError is not taken for the end of the data."""
    with raises(DataError, f"_users 2 {type(error).__name__}") as caught:
        list(open_data(source(error), [SPEC]))
    assert isinstance(caught.value.__cause__, type(error)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [Failing, failing])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_ends_a_process_passes_through_calibration_data(
    source: Any, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        list(open_data(source(error()), [SPEC]))


class Silent(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_exception_that_cannot_be_printed_is_named_by_its_class() -> None:
    with raises(DataError, "_users 2"):
        list(open_data(failing(Silent()), [SPEC]))


def test_keys_of_samples_are_names() -> None:
    for sample, key in (
        ({1: STACK[0]}, "1"),
        ({"images": STACK[0], 3: 1}, "3"),
        ({("a",): STACK[0]}, "('a',)"),
    ):
        for data in ([sample], iter([sample])):
            refused(DataError, f"_named 0 {key},", list, open_data(data, [SPEC]))
        with raises(DataError, f"_named 0 {key},"):
            _ = open_data([sample], [SPEC]).fingerprint
        refused(DataError, f"_named {key},", open_data, sample, [SPEC])


class Reader:
    """Something that can be gone through again but has no length."""

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
        return iter([{"images": row} for row in STACK])


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    def file(name: str, **arrays: npt.NDArray[Any]) -> Path:
        np.savez(tmp_path / name, allow_pickle=True, **arrays)
        return tmp_path / name

    objects = np.array([{"a": 1}, None], dtype=object)
    np.save(tmp_path / "objects.npy", objects)
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    (tmp_path / "text.npz").write_text("no zip")
    whole = file("whole.npz", images=STACK).read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    np.save(tmp_path / "short.npy", STACK)
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:600])
    np.save(tmp_path / "fortran.npy", np.asfortranarray(STACK))
    cases = [
        (file("shape.npz", images=STACK[:, :, :2]), [SPEC], r"\[3, 2, 4\]|\[1, 3, 2, 4\]"),
        (file("objects.npz", images=objects), [SPEC], "Python objects"),
        (file("floats.npz", images=STACK, size=SIZES + 0.5), TWO, "holds float64"),
        (tmp_path / "objects.npy", [SPEC], "Python objects"),
        (tmp_path / "cut.npy", [SPEC], "not a numpy array"),
        (tmp_path / "text.npz", [SPEC], "not an npz"),
        (tmp_path / "half.npz", [SPEC], "not an npz"),
        (tmp_path / "fortran.npy", [SPEC], "Fortran"),
    ]
    for path, specs, expected in cases:
        with pytest.raises(DataError, match=expected) as caught:
            open_data(path, specs)
        assert "\n" not in str(caught.value) and path.name in str(caught.value)
    with pytest.raises(DataError, match="cut off"):
        list(open_data(tmp_path / "short.npy", [SPEC]))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_value_beyond_the_input_type_becomes_an_infinity(tmp_path: Path) -> None:
    np.save(tmp_path / "c.npy", STACK.astype(np.float64) * 1e300)
    assert np.isinf(next(iter(open_data(tmp_path / "c.npy", [SPEC])))["images"]).all()


def test_an_array_larger_than_memory_allows_is_not_read_whole(tmp_path: Path) -> None:
    shape = (2000, 3, 160, 160)  # 614 MB, sparse on disk
    path = tmp_path / "large.npy"
    header = np.lib.format.header_data_from_array_1_0(np.zeros(1, np.float32)) | {"shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * int(np.prod(shape)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    samples = sum(1 for _ in open_data(path, [InputSpec("x", (1, 3, 160, 160))], max_images=300))
    assert samples == 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


ONE = InputSpec("x", (1, 2))
TWO_INPUTS = [ONE, InputSpec("y", (1, 1))]
ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)


def npy(path: Path, array: npt.NDArray[Any]) -> Path:
    np.save(path / "c.npy", array)
    return path / "c.npy"


def npz(path: Path, **arrays: npt.NDArray[Any]) -> Path:
    np.savez(path / "c.npz", allow_pickle=True, **arrays)
    return path / "c.npz"


def test_one_sample_within_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, packed, folder = npy(tmp_path, ROWS), npz(tmp_path, x=ROWS), tmp_path / "each"
    folder.mkdir()
    np.save(folder / "0.npy", ROWS[:1])
    monkeypatch.setattr(budgets, "SAMPLE", 8)
    assert len(list(open_data(path, [ONE]))) == len(list(open_data(packed, [ONE]))) == 5
    assert len(list(open_data(folder, [ONE]))) == 1
    monkeypatch.setattr(budgets, "SAMPLE", 7)
    for file in (path, packed):
        with raises(DataError, "require 8 7"):
            open_data(file, [ONE])
    with raises(DataError, "require 0.npy 8 7"):
        list(open_data(folder, [ONE]))


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
    source = StackedSource(tmp_path / "m.npz", TWO_INPUTS)
    assert not source.random_access and StackedSource(npz(tmp_path, x=ROWS), [ONE]).random_access
    refused(
        DataError, f"StackedSource.portion {tmp_path / 'm.npz'}: numpy.savez", source.portion, [0]
    )


def test_rows_of_a_file_by_number_and_digest(tmp_path: Path) -> None:
    """The digests are those of caches that were written before: they may not change."""
    path = npy(tmp_path, ROWS)
    source, mark = StackedSource(path, [ONE]), file_digest(path)
    assert source.digest(0) == mark + bytes(8) and source.digest(3) == bytes(7) + b"\x03"
    assert source.identity(3) == bytes(7) + b"\x03" + mark == source.identity(3)
    assert (source.count(), source.name(2)) == (5, "c.npy[2]")
    rows = source.portion([4, 1])
    assert "arrays" not in vars(rows), "nothing is opened yet"
    assert rows.path.is_absolute() and rows.count() == 2 and rows.single_rows
    assert rows.arrays is rows.arrays
    assert [rows.load(k)["x"].tolist() for k in (0, 1)] == [[[8, 9]], [[2, 3]]]
    assert [rows.name(0), rows.digest(1), rows.identity(0)] == [
        "c.npy[4]",
        source.digest(1),
        source.identity(4),
    ]
    assert rows.portion([1]).load(0)["x"].tolist() == [[2, 3]], "of the portion's rows"
    before = source.identity(4)
    np.save(path, ROWS + 1)
    assert source.identity(4) == before != source.portion([4]).identity(0), (
        "another process looks for itself"
    )


def test_damage_is_told_with_the_sample(tmp_path: Path) -> None:
    path = npy(tmp_path, np.ones((5, 4000), np.float32))  # more than is read ahead
    source = StackedSource(path, [InputSpec("x", (1, 4000))])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert source.load(3)["x"].all()
    refused(DataError, f"StackedArray.row {path}: 4", source.load, 4)
    source.arrays["x"].file.close()
    with raises(DataError, "StackedArray.row c.npy 2"):
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
    wrong = Dataset(
        open_data(tmp_path, [InputSpec("x", (1, 3))]).source, [InputSpec("x", (1, 3))], 9
    )
    refused(
        DataError, f"InputSpec.fit {tmp_path / 'in' / 'a.npz'}: 'x' [1, 2], [1, 3]", list, wrong
    )


@pytest.mark.parametrize("text", ["a" * 100_000, "a\0b"], ids=["long", "nul"])
def test_a_path_that_no_file_can_have_is_told(text: str) -> None:
    with raises(DataError, "open_data|_path_source"):
        open_data(text, [InputSpec("x", (1, 3, 8, 8))])


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_fortran_order_means_nothing_with_one_dimension(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    with (tmp_path / "c.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": True, "shape": shape}
        )
        file.write(np.arange(5, dtype="<f4").tobytes())
    spec = InputSpec("x", (1, *shape[1:]))
    if len(shape) == 1:
        assert [s["x"].tolist() for s in open_data(tmp_path / "c.npy", [spec])] == [
            [k] for k in range(5)
        ]
    else:
        refused(DataError, "StackedArray.__init__ Fortran", open_data, tmp_path / "c.npy", [spec])

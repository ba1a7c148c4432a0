import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.arrays import open_data
from calibration.dataset import (
    FEW_IMAGES,
    DataQuality,
    Dataset,
    EndOfSamples,
    InputSpec,
    Sample,
    SampleSource,
    escape_path,
    fit_inputs,
    spread_indices,
)
from calibration.listing import UNREADABLE, file_digest, list_files
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.util import files
from qdqtool.util.notes import Note
from tests.calibration.checks import check_limit
from tests.calibration.nets import make_special_files, write_pictures
from tests.errors import has
from tests.notes import note

IMAGE = InputSpec("x", (1, 1, 1, 2))
BATCH = InputSpec("x", (2, 1, 1, 2))


class ListSource(SampleSource):
    def __init__(self, samples: Sequence[np.ndarray | None], **attributes: Any) -> None:
        self.samples = samples
        self.length: int | None = len(samples)
        self.loaded: list[int] = []
        self.restarts = 0
        self.__dict__.update(attributes)

    def count(self) -> int | None:
        return self.length

    def restart(self) -> None:
        self.restarts += 1

    def load(self, index: int) -> Sample:
        self.loaded.append(index)
        if index == len(self.samples):
            raise EndOfSamples
        array = self.samples[index]
        if array is None:
            raise DataError("broken")
        return {"x": array}

    def digest(self, index: int) -> bytes:
        return b"" if self.samples[index] is None else bytes([index])


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(1, 1, 1, 2)


ROWS = [row(k, k + 0.5) for k in range(7)]


# Inputs


@pytest.mark.parametrize(
    ("shape", "batch", "text"),
    [
        ((), 1, "[]"),
        ((1,), 1, "[1]"),
        ((4, 3), 4, "[4, 3]"),
        ((None, 3), 1, "[?, 3]"),
        ((0, 3), 1, "[0, 3]"),
    ],
)
def test_input_batch_and_shape_text(shape: tuple[int | None, ...], batch: int, text: str) -> None:
    spec = InputSpec("x", shape)
    assert (spec.batch, spec.shape_text(), spec.numpy_dtype) == (batch, text, np.float32)


@pytest.mark.parametrize(
    ("shape", "array", "fitted"),
    [
        ((1, 3, None), (1, 3, 5), (1, 3, 5)),
        ((1, 3, None), (3, 5), (1, 3, 5)),
        ((1, 3, None), (7, 3, 5), (7, 3, 5)),  # the batch is checked when rows are joined
        ((None, 3, None), (2, 3, 5), (2, 3, 5)),
        ((None,), (4,), (4,)),
        ((None,), (), (1,)),
        ((), (), ()),
    ],
)
def test_input_fits_arrays_of_its_shape(
    shape: tuple[int | None, ...], array: tuple[int, ...], fitted: tuple[int, ...]
) -> None:
    assert InputSpec("x", shape).fit(np.zeros(array, np.float32), "it").shape == fitted


@pytest.mark.parametrize(
    ("dtype", "input_dtype"),
    [
        ("float64", "float32"),
        ("int64", "float32"),
        ("uint8", "float16"),
        ("bool", "float32"),
        ("int64", "int32"),
        ("bool", "uint8"),
        ("uint8", "bool"),
    ],
)
def test_input_converts_numbers(dtype: str, input_dtype: str) -> None:
    fitted = InputSpec("x", (1,), input_dtype).fit(np.ones(1, dtype), "it")
    assert fitted.dtype == input_dtype and fitted.tolist() == [1]


@pytest.mark.parametrize(
    ("spec", "array", "code", "values"),
    [
        *(
            (InputSpec("x", shape), np.zeros(array), "wrong-shape", [list(array), text])
            for shape, array, text in (
                ((1, 3, None), (1, 4, 5), "[1, 3, ?]"),
                ((1, 3, 5), (1, 3, 4), "[1, 3, 5]"),
                ((1, 3, None), (1, 1, 3, 5), "[1, 3, ?]"),
                ((1, 3, None), (5,), "[1, 3, ?]"),
                ((), (1,), "[]"),
            )
        ),
        *(
            (InputSpec("x", (1,), dtype), np.ones(1, array), "wrong-type", [array, dtype])
            for array, dtype in (
                ("complex64", "float32"),
                ("<U1", "float32"),
                ("float32", "int64"),
                ("float16", "uint8"),
                ("float32", "bool"),
                ("complex64", "int32"),
            )
        ),
    ],
)
def test_input_rejects_arrays_of_other_shapes_and_types(
    spec: InputSpec, array: np.ndarray, code: str, values: list[object]
) -> None:
    with pytest.raises(DataError, check=has(code, "it", *values, node="x")):
        spec.fit(array, "it")


VALUE = np.ones(1, np.float32)
A, B = InputSpec("a", (1,)), InputSpec("b", (1,))


@pytest.mark.parametrize(
    ("names", "inputs", "missing"),
    [
        ("ac", [A, B], "b"),
        ("cd", [A], "a"),
        ("c", [A, B], "a"),
        ("", [A], "a"),
    ],
)
def test_fit_all_names_the_input_without_an_array(
    names: str, inputs: list[InputSpec], missing: str
) -> None:
    present = ", ".join(f"'{n}'" for n in names) or "none"
    with pytest.raises(DataError, check=has("missing-input", "it", present, node=missing)):
        fit_inputs(dict.fromkeys(names, VALUE), inputs, "it")


def test_fit_all_takes_the_only_array_by_any_name() -> None:
    assert list(fit_inputs({"other": VALUE}, [A], "it")) == ["a"]
    with pytest.raises(DataError, check=has("wrong-shape", "[1, 2]", "[1]", node="a")):
        fit_inputs({"a": np.ones((1, 2))}, [A], "it")


# Samples, batches, passes


def test_source_defaults() -> None:
    source = ListSource(ROWS)
    assert (source.name(3), source.settings(), source.identity(2)) == ("sample 3", "", b"\x02")
    assert source.random_access and not (source.single_rows or source.is_images)
    with pytest.raises(DataError, check=has("not-shareable", parameter="data")):
        source.select_samples([0])
    assert escape_path("a\udcffb.png") == "a\\xffb.png"


@pytest.mark.parametrize(
    ("total", "most", "indices"),
    [
        (0, 3, []),
        (3, 3, [0, 1, 2]),
        (3, 4, [0, 1, 2]),
        (4, 3, [0, 2, 3]),
        (10, 4, [0, 3, 6, 9]),
        (11, 4, [0, 3, 7, 10]),
        (9, 2, [0, 8]),
        (9, 1, [0]),
        (100, 5, [0, 25, 50, 74, 99]),
    ],
)
def test_spread_of_indices(total: int, most: int, indices: list[int]) -> None:
    result = spread_indices(total, most)
    assert list(result) == indices and len(result) == len(indices)
    assert list(result[1:3]) == indices[1:3] and list(result[::-1]) == indices[::-1]


@pytest.mark.parametrize(
    ("shape", "array"),
    [((2, 1, 1, 2), (2, 1, 1, 2)), ((None, 1, 1, 2), (5, 1, 1, 2)), ((), ())],
    ids=["fixed batch", "open batch", "scalar"],
)
def test_sample_may_have_several_rows(
    shape: tuple[int | None, ...], array: tuple[int, ...]
) -> None:
    (sample,) = Dataset(ListSource([np.zeros(array, np.float32)]), [InputSpec("x", shape)], 9)
    assert sample["x"].shape == array


BROKEN = [None, ROWS[1], None, None]


@pytest.mark.parametrize(
    ("source", "spec", "code", "values"),
    [
        pytest.param(
            ListSource([np.zeros((2, 1, 1, 2), np.float32)]),
            IMAGE,
            "wrong-shape",
            ["2 rows", "[1, 1, 1, 2]"],
            id="more rows than the batch",
        ),
        # One sample would have gigabytes, for a model of a kilobyte.
        pytest.param(
            ListSource(ROWS, single_rows=True),
            InputSpec("x", (65536, 1, 1, 2)),
            "batch-too-large",
            [65536],
            id="huge batch",
        ),
        # Only images are skipped.
        pytest.param(ListSource(BROKEN), IMAGE, None, ["broken"], id="broken array"),
    ],
)
def test_samples_that_cannot_be_used_are_errors(
    source: SampleSource, spec: InputSpec, code: str | None, values: list[object]
) -> None:
    with pytest.raises(DataError, check=has(code, *values)):
        list(Dataset(source, [spec], 100))


def test_rows_are_joined_to_batches() -> None:
    source = ListSource(ROWS, single_rows=True)
    data = Dataset(source, [InputSpec("x", (3, 1, 1, 2))], 100)
    assert data.batch == 3 and [data.group(k) for k in range(len(data))] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert [s["x"][:, 0, 0, 0].tolist() for s in data] == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert data.name(1) == "sample 3" and source.restarts == 1
    sample = data.load(1)
    assert sample is not None and sample["x"][:, 0, 0, 0].tolist() == [3, 4, 5]
    assert {number: (load() or ({}, 0))[1] for number, load in data.tasks({1})} == {0: 3, 2: 1}
    assert Dataset(source, [IMAGE, InputSpec("y", (2, 1))], 100).batch == 2
    # If samples do not have one row, each is run as a whole.
    assert Dataset(ListSource(ROWS), [BATCH], 100).batch == 1


@pytest.mark.parametrize(
    ("most", "groups"), [(1, [[0]]), (4, [[0, 1], [2, 3]]), (5, [[0, 1], [2, 3], [4]])]
)
def test_samples_of_unknown_number_are_loaded_before_they_are_yielded(
    most: int, groups: list[list[int]]
) -> None:
    source = ListSource(ROWS, length=None, single_rows=True, random_access=False)
    data = Dataset(source, [BATCH], most)
    images = []
    for k, (number, load) in enumerate(data.tasks()):
        assert number == k and source.loaded == list(itertools.chain(*groups[: k + 1]))
        images.append((load() or ({}, 0))[1])
    assert images == [len(g) for g in groups]
    with pytest.raises(TypeError, match="no length"):
        len(data)
    assert data.fingerprint == ""


def test_every_pass_begins_anew() -> None:
    source = ListSource(ROWS, length=None, random_access=False)
    data = Dataset(source, [IMAGE], 100)
    assert len(list(data)) == len(list(data)) == 7
    assert source.loaded == [*range(8)] * 2 and source.restarts == 2


def test_tasks_load_when_they_are_called() -> None:
    source = ListSource(ROWS)
    tasks = list(Dataset(source, [IMAGE], 3).tasks())
    assert source.loaded == []
    for _, load in reversed(tasks):
        load()
    assert source.loaded == [6, 3, 0]


def test_fingerprint_identifies_samples_and_batches() -> None:
    data = Dataset(ListSource(ROWS), [IMAGE], 9)
    assert len(data.fingerprint) == 32 and int(data.fingerprint, 16)
    again = Dataset(ListSource(ROWS), [IMAGE], 9)
    assert list(again.digests()) == [bytes([k]) for k in range(7)] == list(again.digests())
    assert again.fingerprint == data.fingerprint
    others = [
        Dataset(ListSource(ROWS), [BATCH], 9),
        Dataset(ListSource(ROWS), [IMAGE], 6),
        Dataset(ListSource(ROWS, single_rows=True), [InputSpec("x", (None, 1, 1, 2))], 9),
    ]
    assert len({data.fingerprint, *(d.fingerprint for d in others)}) == 4


@pytest.mark.parametrize(
    "rows", [[*ROWS, None], [None, *ROWS], []], ids=["last broken", "first broken", "empty"]
)
def test_fingerprint_is_empty_if_a_sample_has_no_digest(rows: list[Any]) -> None:
    assert Dataset(ListSource(rows), [IMAGE], 9).fingerprint == ""


# Broken images, and warnings about the other images


def test_broken_images_are_skipped() -> None:
    data = Dataset(ListSource(BROKEN, is_images=True, single_rows=True), [BATCH], 9)
    for _ in range(2):
        assert [s["x"][:, 0, 0, 0].tolist() for s in data] == [[1, 1]] and data.load(1) is None
    assert data.skipped == [(f"sample {k}", "broken") for k in (0, 2, 3)]
    assert data.warnings[0] == note("broken-images", broken=3, total=4)
    data.forget()
    assert (data.skipped, data.warnings, data.quality) == ([], [], DataQuality())
    list(data)
    assert data.quality.broken == 3


def test_quality_of_samples_adds_up() -> None:
    inf, nan = np.inf, np.nan
    samples = [
        (row(0.25, 0.5), DataQuality(1, 0.25, 0.5, 0, 0)),
        (row(-1, inf), DataQuality(2, -1, 0.5, 0, 1)),
        (row(2, 2), DataQuality(3, -1, 2, 1, 1)),
        (row(nan, nan), DataQuality(4, -1, 2, 1, 2)),
        (row(-inf, 0.75), DataQuality(5, -1, 2, 1, 3)),
        (row(nan, 4), DataQuality(6, -1, 4, 1, 4)),
    ]
    data = Dataset(ListSource([array for array, _ in samples]), [IMAGE], 9)
    for _, (_, quality) in zip(data, samples, strict=True):
        assert data.quality == quality
    data.take(DataQuality(1, -7, 7, 1, 1, 2), [("a", "b")])
    assert data.quality == DataQuality(7, -7, 7, 2, 5, 2) and data.skipped == [("a", "b")]


def test_quality_covers_all_image_inputs() -> None:
    class ThreeInputs(ListSource):
        def load(self, index: int) -> Sample:
            return {"x": row(1, 1), "y": row(-2, 5), "z": np.full((1, 2), 99, np.float32)}

    data = Dataset(
        ThreeInputs(ROWS[:1]), [IMAGE, InputSpec("y", (1, 1, 1, 2)), InputSpec("z", (1, 2))], 9
    )
    list(data)
    assert data.quality == DataQuality(1, -2, 5, 1, 0)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2), "float32"), ((1, 1, 1, 2), "uint8"), ((1, 1, 1, 1, 2), "float32")]
)
def test_quality_ignores_inputs_that_are_no_images(shape: tuple[int, ...], dtype: str) -> None:
    data = Dataset(ListSource([np.full(shape, 9, dtype)]), [InputSpec("x", shape, dtype)], 9)
    list(data)
    assert data.quality == DataQuality(total=1)


MANY = FEW_IMAGES


@pytest.mark.parametrize(
    ("quality", "notes"),
    [
        *(
            (DataQuality(total=n), [note("few-images", images=n, enough=100)] * (n in (1, 99)))
            for n in (0, 1, 99, 100)
        ),
        (DataQuality(broken=5), []),  # data without any image is an error
        (DataQuality(total=MANY, broken=1), [note("broken-images", broken=1, total=101)]),
        (DataQuality(total=MANY, constant=1), [note("constant-images", constant=1, total=100)]),
        (DataQuality(total=MANY, nonfinite=1), [note("nonfinite-samples", nonfinite=1, total=100)]),
        *(
            (DataQuality(total=MANY, low=low, high=high), notes)
            for low, high, notes in [
                (0.0, 1.0, []),
                (0.0, 8.0, []),
                (0.0, 8.01, [note("far-inputs", low=0, high=8.01)]),
                (-8.0, 0.5, []),
                (-8.01, 0.5, [note("far-inputs", low=-8.01, high=0.5)]),
                (9.0, 9.0, [note("far-inputs", low=9, high=9)]),
                (0.0, 0.0, []),
                (0.0, 1e-9, [note("small-inputs", high=1e-9)]),
                (0.0, 0.0058, [note("small-inputs", high=0.0058)]),
                (0.001, 0.0058, [note("small-inputs", high=0.0058)]),
                (0.0, 1.5 / 255, []),
                (-1e-9, 0.0058, []),
                (-1.0, -0.5, []),
                (np.inf, -np.inf, []),  # nothing finite
            ]
        ),
    ],
)
def test_few_and_odd_data_are_a_warning(quality: DataQuality, notes: list[Note]) -> None:
    assert list(quality.warnings()) == notes


# Opening data: arguments, names of files, lists

SPEC = InputSpec("images", (1, 3, 16, 16))
ROW = np.zeros((1, 3, 16, 16), np.float32)


def test_open_data_uses_512_images_by_default() -> None:
    samples = [{"images": ROW}] * 600
    assert len(open_data(samples, [SPEC])) == 512
    assert len(open_data(samples, [SPEC], max_images=1)) == 1


@pytest.mark.parametrize(
    ("data", "inputs", "options", "check"),
    [
        *(
            pytest.param(
                [{"images": ROW}],
                [SPEC],
                {"max_images": images},
                has("out-of-range", images, parameter="max_images"),
                id=f"{images} images",
            )
            for images in (0, -1)
        ),
        pytest.param([{"images": ROW}], [], {}, has("no-inputs"), id="no inputs"),
        pytest.param(VALUE, [A, B], {}, has("missing-input", "'a'", node="b"), id="second input"),
        pytest.param(
            [{"images": np.zeros(3)}],
            [SPEC],
            {},
            has("wrong-shape", "sample 0", "[3]", node="images"),
            id="shape of a sample",
        ),
        pytest.param(3.5, [SPEC], {}, has("wrong-type", "float", parameter="data"), id="type"),
        pytest.param([[1, 2]], [SPEC], {}, has("wrong-type", "list", parameter="data"), id="list"),
        pytest.param("a" * 100_000, [SPEC], {}, has("file-missing"), id="long path"),
        pytest.param("a\0b", [SPEC], {}, has("file-missing"), id="nul"),
    ],
)
def test_open_data_rejects_other_arguments(
    data: Any, inputs: list[InputSpec], options: dict[str, int], check: Any
) -> None:
    with pytest.raises(DataError, check=check):
        list(open_data(data, inputs, **options))


@pytest.mark.parametrize(
    "name", ["a.npy", "b.NPZ", "l.txt", "l.LST", "l.list", "pictures", "p.PNG"]
)
def test_open_data_chooses_the_source_by_the_name(tmp_path: Path, name: str) -> None:
    (picture,) = write_pictures(tmp_path / "pictures", 1)
    (tmp_path / "p.PNG").write_bytes(picture.read_bytes())
    np.save(tmp_path / "a.npy", ROW)
    with (tmp_path / "b.NPZ").open("wb") as file:
        np.savez(file, images=ROW)
    for suffix in ("txt", "LST", "list"):
        (tmp_path / f"l.{suffix}").write_text(str(picture))
    path = tmp_path / name
    for source in (path, str(path), f"file://{path}"):
        assert len(list(open_data(source, [SPEC]))) == 1


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("c.csv", "wrong-format", [".txt", ".npz", ".npy"]),
        ("no.png", "file-missing", []),
        ("empty", "no-images", ["bmp, jpeg, jpg, png, webp", "npz", "npy"]),
        ("blank.txt", "no-images", []),
        ("bytes.txt", "wrong-encoding", ["'utf-8'"]),
    ],
)
def test_open_data_rejects_other_files(
    tmp_path: Path, name: str, code: str, values: list[str]
) -> None:
    (tmp_path / "c.csv").write_text("")
    (tmp_path / "blank.txt").write_text("# nothing\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, check=has(code, *values, path=str(tmp_path / name))):
        open_data(tmp_path / name, [SPEC])


def test_folder_of_images_and_arrays_has_images(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1)
    np.save(tmp_path / "z.npy", ROW)
    assert [open_data(tmp_path, [SPEC]).source.name(0)] == ["picture000.png"]


def test_list_looks_only_for_the_images_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searching for a million files takes long."""
    image_list = tmp_path / "list.txt"
    image_list.write_text("".join(f"{k}.png\n" for k in range(101)))
    sought: set[str] = set()
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: sought.add(Path(path).name) or exists(path))
    data = open_data(image_list, [SPEC], max_images=5)
    names = ["0.png", "25.png", "50.png", "75.png", "100.png"]
    assert [data.name(k) for k in range(len(data))] == names
    assert sought - {"list.txt"} == set(names)


def test_paths_of_a_list_begin_at_the_list_or_the_current_folder(tmp_path: Path) -> None:
    """A missing file is reported next to the list."""
    lists, current = tmp_path / "lists", tmp_path / "current"
    for folder, names in ((lists, ("both.png", "one.png")), (current, ("both.png", "two.png"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"")
    image_list = lists / "list.txt"
    image_list.write_text("# one a line\n\n  both.png  \none.png\ntwo.png\nthree.png\n#x\n")
    with contextlib.chdir(current):
        source: Any = open_data(image_list, [SPEC]).source
    names = [lists / "both.png", lists / "one.png", Path("two.png"), lists / "three.png"]
    assert source.paths == names


def test_long_path_of_a_list_is_skipped_as_an_image(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{'x' * 40_000}\n")
    data = open_data(tmp_path / "list.txt", [SPEC])
    assert not list(data)
    assert [reason for _, reason in data.skipped] == ["cannot be read: File name too long"]


def test_lines_of_a_list_end_as_on_any_system(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes("a.png\r\nb.png\rc\u2028.png\n".encode())
    source: Any = open_data(tmp_path / "list.txt", [SPEC]).source
    assert source.paths == [tmp_path / name for name in ("a.png", "b.png", "c\u2028.png")]


def test_list_may_have_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("a.png\n")
    check = has("file-too-large", "5 bytes", path=str(path))
    check_limit("LIST_FILE", 6, lambda: open_data(path, [SPEC]), check)


# Digests of files

BLOCK = 65536


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 17 * BLOCK, 40 * BLOCK + 77]
)
def test_file_digest_is_of_the_size_and_sixteen_blocks(tmp_path: Path, size: int) -> None:
    content = (bytes(k * k % 251 for k in range(1000)) * (size // 1000 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    starts = range(0, size, max(BLOCK, (size - BLOCK) // 15))
    assert len(starts) <= 17
    hashed = str(size).encode() + b"".join(content[k : k + BLOCK] for k in starts)
    assert file_digest(tmp_path / "file") == hashlib.blake2b(hashed, digest_size=16).digest()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["pipe", "link", "loop", "socket", "/dev/zero", "."])
def test_file_digest_does_not_wait_for_special_files(tmp_path: Path, name: str) -> None:
    """A pipe without a writer and a device never end."""
    make_special_files(tmp_path)
    with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        assert file_digest(Path(name)) == UNREADABLE


# Files under folders, and their protection against overwriting


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_files_under_a_folder_are_sorted_and_links_are_followed(tmp_path: Path) -> None:
    names = ["a-b/c.png", "a.png", "a/b.PNG", "b/c/d/e.png", "dir.png/f.png", "link.png", "é.png"]
    write_files(tmp_path, *set(names) - {"link.png"}, "a/.x.png", ".h/y.png", "z.txt")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "around").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    listing = list_files(tmp_path, {".png"})
    assert listing.paths == [tmp_path / name for name in names]
    assert listing.suffixes == {".txt": 1}
    assert sorted(listing.broken_links) == ["gone.png", "loop.png"]
    data = open_data(tmp_path, [InputSpec("x", (1, 3, 8, 8))])
    notes = [(note.code, note.values) for note in (*data.warnings, *data.folder_notes)]
    assert notes == [
        ("dead-links", {"count": 2, "first": "gone.png"}),
        ("subfolders-read", {"files": 7, "folders": 5, "evaluation": ""}),
    ]


@pytest.mark.parametrize("suffix", [".png", ".npy"])
def test_files_of_a_folder_are_not_overwritten(tmp_path: Path, suffix: str) -> None:
    """Files that are not among the samples are protected as well."""
    folder = tmp_path / "in"
    write_files(folder, *(f"{k}{suffix}" for k in range(9)))
    link, copy = tmp_path / "link", tmp_path / "copy"
    link.symlink_to(folder / f"3{suffix}")
    copy.hardlink_to(folder / f"8{suffix}")
    with files.record_inputs() as guard:
        open_data(folder, [SPEC], max_images=2)
        guard.forbid_overwrite(tmp_path / "new")
        for path in (folder / f"0{suffix}", folder / f"8{suffix}", link, copy):
            with pytest.raises(QdqtoolError, check=has("output-is-input", path=str(path))):
                guard.forbid_overwrite(path)
    with files.record_inputs():
        files.reserve_output(link, "-o")
        with pytest.raises(QdqtoolError, check=has("output-is-input", "-o", f"3{suffix}")):
            open_data(folder, [SPEC])


def test_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, "a/1.png", "b/2.png", "3.png")
    closed = [tmp_path / "a"]
    scandir = os.scandir

    def scan_open_folders(path: str) -> Any:
        if Path(path) in closed:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan_open_folders)
    assert list_files(tmp_path, {".png"}).paths == [
        tmp_path / "3.png",
        tmp_path / "b" / "2.png",
    ]
    closed.append(tmp_path)
    with pytest.raises(DataError, check=has("file-unreadable", "denied", path=str(tmp_path))):
        list_files(tmp_path, {".png"})

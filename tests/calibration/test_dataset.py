"""Datasets over a source that is written out here: which samples, in which batches, and what is noticed of them."""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from calibration import listing
from calibration.arrays import open_data
from calibration.dataset import (
    Dataset,
    InputSpec,
    Looks,
    Sample,
    Source,
    fit_all,
    printable,
    spread,
)
from calibration.listing import UNREADABLE, Inodes, file_digest, files_under, read_ahead
from qdqtool.base import budgets, files
from qdqtool.base.files import INVALID_NAME
from qdqtool.base.notes import Remark
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.nets import refused, write_pictures
from tests.errors import has
from tests.raising import raises

IMAGE = InputSpec("x", (1, 1, 1, 2))


class Listed(Source):
    """Samples from a list; None is a broken one."""

    def __init__(self, samples: Sequence[npt.NDArray[Any] | None], **facts: Any) -> None:
        self.samples = samples
        self.length: int | None = facts.pop("length", len(samples))
        self.read: list[int] = []
        self.restarts = 0
        self.__dict__.update(facts)

    def count(self) -> int | None:
        return self.length

    def restart(self) -> None:
        self.restarts += 1

    def load(self, index: int) -> Sample:
        self.read.append(index)
        found = self.samples[index]
        if found is None:
            raise DataError("broken")
        return {"x": found}

    def digest(self, index: int) -> bytes:
        return b"" if self.samples[index] is None else bytes([index])


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32).reshape(1, 1, 1, 2)


ROWS = [row(k, k + 0.5) for k in range(7)]


def test_sources_and_rows() -> None:
    source = Listed(ROWS)
    assert (source.name(3), source.settings(), source.identity(2)) == ("sample 3", "", b"\x02")
    facts = (Source.repeatable, Source.random_access, Source.single_rows, Source.is_images)
    assert facts == (True, True, False, False)
    with raises(DataError, "Source.portion"):
        source.portion([0])
    assert printable("a\udcffb.png") == "a\\xffb.png"
    shapes: list[tuple[int | None, ...]] = [(), (1,), (4, 3), (None, 3), (0, 3)]
    assert [InputSpec("x", s).batch for s in shapes] == [1, 1, 4, 1, 1]
    assert [InputSpec("x", s).shape_text() for s in shapes] == [
        "[]",
        "[1]",
        "[4, 3]",
        "[?, 3]",
        "[0, 3]",
    ]
    assert InputSpec("x", ()).numpy_dtype == np.float32
    # One sample would be all of it: gigabytes for a model of a kilobyte
    with pytest.raises(DataError, match="fixed batch of 65536"):
        Dataset(Listed(ROWS, single_rows=True), [InputSpec("x", (65536, 1, 1, 2))], 100)
    (sample,) = Dataset(
        Listed([np.zeros((2, 1, 1, 2), np.float32)]), [InputSpec("x", (2, 1, 1, 2))], 9
    )
    assert len(sample["x"]) == 2
    source = Listed(ROWS)
    assert all(s["x"] is r for s, r in zip(Dataset(source, [IMAGE], 9), ROWS, strict=True))
    with raises(DataError, "Dataset._joined x 1 2"):
        list(Dataset(Listed([np.zeros((2, 1, 1, 2), np.float32)]), [IMAGE], 9))
    (scalar,) = Dataset(Listed([np.float32(2).reshape(())]), [InputSpec("x", ())], 9)
    assert scalar["x"].shape == ()
    (free,) = Dataset(
        Listed([np.zeros((5, 1, 1, 2), np.float32)]), [InputSpec("x", (None, 1, 1, 2))], 9
    )
    assert len(free["x"]) == 5


@pytest.mark.parametrize(
    ("shape", "array", "found"),
    [
        ((1, 3, None), (1, 3, 5), (1, 3, 5)),
        ((1, 3, None), (3, 5), (1, 3, 5)),
        ((1, 3, None), (7, 3, 5), (7, 3, 5)),  # the batch is looked at when rows are joined
        ((None, 3, None), (2, 3, 5), (2, 3, 5)),
        ((1, 3, None), (1, 4, 5), None),
        ((1, 3, 5), (1, 3, 4), None),
        ((1, 3, None), (1, 1, 3, 5), None),
        ((1, 3, None), (5,), None),
        ((None,), (4,), (4,)),
        ((None,), (), (1,)),
        ((), (), ()),
        ((), (1,), None),
    ],
)
def test_what_fits_an_input(
    shape: tuple[int | None, ...], array: tuple[int, ...], found: tuple[int, ...] | None
) -> None:
    spec = InputSpec("x", shape)
    if found is not None:
        assert spec.fit(np.zeros(array, np.float32), "it").shape == found
        return
    given = np.zeros(array, np.float32)
    refused(
        DataError, f"InputSpec.fit it {list(array)}, 'x' {spec.shape_text()}", spec.fit, given, "it"
    )


@pytest.mark.parametrize(
    ("have", "wanted", "fits"),
    [
        ("float64", "float32", True),
        ("int64", "float32", True),
        ("uint8", "float16", True),
        ("bool", "float32", True),
        ("int64", "int32", True),
        ("bool", "uint8", True),
        ("uint8", "bool", True),
        ("complex64", "float32", False),
        ("<U1", "float32", False),
        ("float32", "int64", False),
        ("float16", "uint8", False),
        ("float32", "bool", False),
        ("complex64", "int32", False),
    ],
)
def test_types_that_can_be_taken(have: str, wanted: str, fits: bool) -> None:
    spec = InputSpec("x", (1,), wanted)
    array = np.ones(1, np.float32).astype(have)
    if fits:
        found = spec.fit(array, "it")
        assert found.dtype == wanted and found.tolist() == [1]
    else:
        with raises(DataError, f"InputSpec.fit {array.dtype} x {wanted}"):
            spec.fit(array, "it")


def test_arrays_by_the_names_of_the_inputs() -> None:
    one, two = InputSpec("a", (1,)), InputSpec("b", (1,))
    value = np.ones(1, np.float32)
    assert list(fit_all({"other": value}, [one], "it")) == ["a"], "the only one of both"
    for arrays, inputs, told in (
        ({"a": value, "c": value}, [one, two], "'b'; 'a', 'c'"),
        ({"c": value, "d": value}, [one], "'a'; 'c', 'd'"),
        ({"c": value}, [one, two], "'a'; 'c'"),
        ({}, [one], "'a'; nothing"),
    ):
        refused(DataError, f"fit_all it {told}", fit_all, arrays, inputs, "it")
    with raises(DataError, "InputSpec.fit a 2 [1]"):
        fit_all({"a": np.ones((1, 2))}, [one], "it")


@pytest.mark.parametrize(
    ("total", "wanted", "found"),
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
def test_spread(total: int, wanted: int, found: list[int]) -> None:
    indices = spread(total, wanted)
    assert list(indices) == found and len(indices) == len(found)
    assert list(indices[1:3]) == found[1:3] and list(indices[::-1]) == found[::-1]
    if found:
        assert (indices[-1], indices[-len(found)]) == (found[-1], found[0])
    for beyond in (len(found), -len(found) - 1):
        with pytest.raises(IndexError):
            indices[beyond]


def test_batches_and_fingerprints() -> None:
    source = Listed(ROWS, single_rows=True)
    data = Dataset(source, [InputSpec("x", (3, 1, 1, 2))], 100)
    assert (data.batch, len(data), [data.group(k) for k in range(3)]) == (
        3,
        3,
        [[0, 1, 2], [3, 4, 5], [6]],
    )
    assert [s["x"][:, 0, 0, 0].tolist() for s in data] == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert data.name(1) == "sample 3" and source.restarts == 1
    sample = data.load(1)
    assert sample is not None and sample["x"][:, 0, 0, 0].tolist() == [3, 4, 5]
    images = {number: (load() or ({}, 0))[1] for number, load in data.tasks({1})}
    assert images == {0: 3, 2: 1}
    whole = Dataset(Listed(ROWS), [InputSpec("x", (3, 1, 1, 2))], 100)
    assert (whole.batch, len(whole)) == (1, 7), "each sample is all that the model takes at once"
    assert Dataset(source, [IMAGE, InputSpec("y", (2, 1))], 100).batch == 2
    data = Dataset(Listed(ROWS), [IMAGE], 9)
    assert len(data.fingerprint) == 32 and int(data.fingerprint, 16)
    again = Dataset(Listed(ROWS), [IMAGE], 9)
    assert list(again.digests()) == [bytes([k]) for k in range(7)] == list(again.digests())
    assert again.fingerprint == data.fingerprint
    others = [
        Dataset(Listed(ROWS), [InputSpec("x", (2, 1, 1, 2))], 9),
        Dataset(Listed(ROWS), [IMAGE], 6),
        Dataset(Listed(ROWS, single_rows=True), [InputSpec("x", (None, 1, 1, 2))], 9),
    ]
    assert len({data.fingerprint, *(d.fingerprint for d in others)}) == 4
    assert Dataset(Listed([*ROWS, None]), [IMAGE], 9).fingerprint == "", "one that cannot be told"
    assert Dataset(Listed([None, *ROWS]), [IMAGE], 9).fingerprint == ""
    assert Dataset(Listed([]), [IMAGE], 9).fingerprint == ""


@pytest.mark.parametrize(
    ("most", "groups"), [(1, [[0]]), (4, [[0, 1], [2, 3]]), (5, [[0, 1], [2, 3], [4]])]
)
def test_an_unknown_number_of_samples(most: int, groups: list[list[int]]) -> None:
    source = Listed(ROWS, length=None, single_rows=True, random_access=False)
    data = Dataset(source, [InputSpec("x", (2, 1, 1, 2))], most)
    found = []
    for k, (number, load) in enumerate(data.tasks()):
        assert number == k and source.read == [i for g in groups[: k + 1] for i in g], (
            "read before it is given"
        )
        found.append((load() or ({}, 0))[1])
    assert found == [len(g) for g in groups]
    with raises(TypeError, "Dataset.__len__"):
        len(data)
    assert data.fingerprint == ""


def test_every_pass_begins_anew_and_loads_when_asked() -> None:
    source = Listed(ROWS, length=None, random_access=False)
    data = Dataset(source, [IMAGE], 100)
    assert len(list(data)) == 7 and len(list(data)) == 7
    assert source.read == [*range(8)] * 2 and source.restarts == 2
    source = Listed(ROWS)
    tasks = list(Dataset(source, [IMAGE], 3).tasks())
    assert source.read == []
    for _, load in reversed(tasks):
        load()
    assert source.read == [6, 3, 0]


def test_broken_images_are_skipped_and_broken_arrays_an_error() -> None:
    rows = [None, ROWS[1], None, None]
    data = Dataset(
        Listed(rows, is_images=True, single_rows=True), [InputSpec("x", (2, 1, 1, 2))], 9
    )
    for _ in range(2):
        assert [s["x"][:, 0, 0, 0].tolist() for s in data] == [[1, 1]] and data.load(1) is None
    assert data.skipped == [(f"sample {k}", "broken") for k in (0, 2, 3)]
    assert (data.looks.broken, data.looks.total) == (3, 1)
    assert data.warnings[0] == Remark.BROKEN_IMAGES(broken=3, total=4)
    data.forget()
    assert (data.skipped, data.warnings, data.looks) == ([], [], Looks())
    list(data)
    assert data.looks.broken == 3
    with pytest.raises(DataError, match=r"^broken$"):
        list(Dataset(Listed(rows), [IMAGE], 9))


def test_what_is_noticed_of_samples() -> None:
    inf, nan = np.inf, np.nan
    rows = [row(0.25, 0.5), row(-1, inf), row(2, 2), row(nan, nan), row(-inf, 0.75), row(nan, 4)]
    data = Dataset(Listed(rows), [IMAGE], 9)
    wanted = [
        Looks(1, 0.25, 0.5, 0, 0),
        Looks(2, -1, 0.5, 0, 1),
        Looks(3, -1, 2, 1, 1),
        Looks(4, -1, 2, 1, 2),
        Looks(5, -1, 2, 1, 3),
        Looks(6, -1, 4, 1, 4),
    ]
    for sample, looks in zip(data, wanted, strict=True):
        assert data.looks == looks and len(sample) == 1
    data.take(Looks(1, -7, 7, 1, 1, 2), [("a", "b")])
    assert data.looks == Looks(7, -7, 7, 2, 5, 2) and data.skipped == [("a", "b")]

    class Two(Listed):
        def load(self, index: int) -> Sample:
            return {"x": row(1, 1), "y": row(-2, 5), "z": np.full((1, 2), 99, np.float32)}

    data = Dataset(Two(ROWS[:1]), [IMAGE, InputSpec("y", (1, 1, 1, 2)), InputSpec("z", (1, 2))], 9)
    list(data)
    assert data.looks == Looks(1, -2, 5, 1, 0)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2), "float32"), ((1, 1, 1, 2), "uint8"), ((1, 1, 1, 1, 2), "float32")]
)
def test_only_float_maps_are_looked_at(shape: tuple[int, ...], dtype: str) -> None:
    data = Dataset(Listed([np.full(shape, 9, dtype)]), [InputSpec("x", shape, dtype)], 9)
    list(data)
    assert data.looks == Looks(total=1)


SPEC = InputSpec("images", (1, 3, 16, 16))
ROW = np.zeros((1, 3, 16, 16), np.float32)


def test_512_images_unless_told() -> None:
    rows = [{"images": ROW}] * 600
    assert [len(open_data(rows, [SPEC])), len(open_data(rows, [SPEC], max_images=1))] == [512, 1]
    for count in (0, -1):
        refused(DataError, f"open_data {count}; 1", open_data, rows, [SPEC], max_images=count)
    refused(DataError, "open_data inputs", open_data, rows, [])
    refused(DataError, "open_data float", open_data, 3.5, [SPEC])


def test_of_a_long_list_only_what_is_used_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{k}.png\n" for k in range(101)))
    looked: list[str] = []
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: bool(looked.append(Path(path).name)) or exists(path)
    )
    data = open_data(listing, [SPEC], max_images=5)
    assert len(data) == 5 and len(set(looked) - {"list.txt"}) == 101
    names = [data.source.name(i) for i in data.indices or ()]
    assert names == ["0.png", "25.png", "50.png", "75.png", "100.png"]
    monkeypatch.setattr(budgets, "LISTED", 100)
    looked.clear()
    data = open_data(listing, [SPEC], max_images=5)
    assert [data.name(i) for i in range(5)] == names and set(looked) - {"list.txt"} == {*names}


def test_names_of_files_decide(tmp_path: Path) -> None:
    (picture,) = write_pictures(tmp_path / "pictures", 1, suffix=".PNG")
    np.save(tmp_path / "a.npy", ROW)
    np.savez(tmp_path / "b.NPZ", images=ROW)
    (tmp_path / "b.NPZ.npz").rename(tmp_path / "b.NPZ")
    for name in ("l.txt", "l.LST", "l.list"):
        (tmp_path / name).write_text(str(picture))
    for name in ("a.npy", "b.NPZ", "l.txt", "l.LST", "l.list", "pictures"):
        path = tmp_path / name
        assert [len(list(open_data(p, [SPEC]))) for p in (path, str(path), f"file://{path}")] == [
            1,
            1,
            1,
        ], name
    assert len(list(open_data(picture, [SPEC]))) == 1
    (tmp_path / "c.csv").write_text("")
    (tmp_path / "empty").mkdir()
    for name, named in (
        ("c.csv", ".txt .npz .npy"),
        ("no.png", "no"),
        ("empty", "bmp, jpeg, jpg, png, webp npz npy"),
    ):
        refused(
            DataError,
            f"_path_source {tmp_path / name}: {named}",
            open_data,
            tmp_path / name,
            [SPEC],
        )
    np.save(tmp_path / "pictures" / "z.npy", ROW)
    assert len(open_data(tmp_path / "pictures", [SPEC])) == 1, "pictures before arrays"


def test_paths_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the list first, else from the current folder; missing ones are told where they would be beside it."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder, names in ((beside, ("both.png", "one.png")), (here, ("both.png", "two.png"))):
        (path,) = write_pictures(folder, 1)
        for name in names:
            (folder / name).write_bytes(path.read_bytes())
    monkeypatch.chdir(here)
    listing = beside / "list.txt"
    listing.write_text("# one a line\n\n  both.png  \none.png\ntwo.png\nthree.png\n#x\n")
    source: Any = open_data(listing, [SPEC]).source
    assert source.paths == [
        beside / "both.png",
        beside / "one.png",
        Path("two.png"),
        beside / "three.png",
    ]
    listing.write_text("# nothing\n \n")
    refused(DataError, f"_listed {listing}: images", open_data, listing, [SPEC])
    listing.write_bytes(b"a.png\n\nb\0.png\n")
    refused(DataError, f"_listed {listing}: 3: {INVALID_NAME}", open_data, listing, [SPEC])
    listing.write_text(f"one.png\n{'x' * 32_768}\n")
    refused(DataError, f"_listed {listing}: 2: 32,767", open_data, listing, [SPEC])
    listing.write_text(f"{'x' * 32_767}\n")
    data = open_data(listing, [SPEC])
    assert not list(data) and [reason for _, reason in data.skipped] == [
        "cannot be read: File name too long"
    ]
    listing.write_text("a\r\v\u2028")
    monkeypatch.setattr(budgets, "LIST_LINES", 2)
    refused(DataError, f"_listed {listing}: 2", open_data, listing, [SPEC])
    listing.write_bytes(b"\xff\n")
    refused(DataError, f"_listed {listing}: 'utf-8'", open_data, listing, [SPEC])
    monkeypatch.setattr(budgets, "LIST_FILE", 8)
    listing.write_text("both.png")
    assert len(open_data(listing, [SPEC])) == 1
    listing.write_text("both.png\n")
    refused(DataError, f"require {listing}: 8 bytes", open_data, listing, [SPEC])


BLOCK = 65536


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 17 * BLOCK, 40 * BLOCK + 77]
)
def test_a_file_is_its_size_and_sixteen_blocks(tmp_path: Path, size: int) -> None:
    data = bytes(k * k % 251 for k in range(1000)) * (size // 1000 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size])
    step = max(BLOCK, (size - BLOCK) // 15)
    blocks = [data[:size][at : at + BLOCK] for at in range(0, size, step)]
    assert len(blocks) <= 17
    assert file_digest(path) == digest(str(size).encode(), *blocks)


@pytest.mark.parametrize("count", [0, 1, 31, 63, 64, 65, 200, 300])
def test_reading_ahead_keeps_the_order(count: int) -> None:
    indices = [3 * k for k in range(count)]
    assert list(read_ahead(lambda i: str(i).encode(), indices)) == [
        str(i).encode() for i in indices
    ]


def readers(count: int) -> tuple[set[int], list[int], Iterator[bytes]]:
    threads: set[int] = set()
    read: list[int] = []

    def one(index: int) -> bytes:
        threads.add(threading.get_ident())
        read.append(index)
        return b"x"

    return threads, read, read_ahead(one, range(count))


def test_few_files_are_read_when_they_are_wanted() -> None:
    """Below 64, by the thread that wants them; from there on by others, at most five turns of 32 ahead."""
    threads, read, found = readers(63)
    next(found)
    assert read == [0] and threads == {threading.get_ident()}
    threads, read, found = readers(64)
    assert len(list(found)) == 64 and sorted(read) == [*range(64)]
    assert threading.get_ident() not in threads
    threads, read, found = readers(1000)
    next(found)
    assert 32 <= len(read) <= 5 * 32
    found.close()  # type: ignore[attr-defined]
    assert len(threads) <= 4 and max(read) < 5 * 32


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    """Nor behind a link: nobody writes to the pipe, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    held = socket.socket(socket.AF_UNIX)
    with held, contextlib.chdir(tmp_path):
        held.bind("socket")
        for name in ("pipe", "link", "loop", "socket", "/dev/zero", "."):
            assert file_digest(Path(name)) == UNREADABLE


# Files under folders, and the guard over them.


def test_a_folder_is_listed_as_its_paths_sort(tmp_path: Path) -> None:
    for name in (
        "a.png",
        "a/b.PNG",
        "a-b/c.png",
        "a/.x.png",
        ".h/y.png",
        "z.txt",
        "é.png",
        "b/c/d/e.png",
        "dir.png/f.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "around").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    wanted = sorted(
        (
            p
            for p in tmp_path.rglob("*")
            if p.suffix.lower() == ".png"
            and p.is_file()
            and not any(n.startswith(".") for n in p.relative_to(tmp_path).parts)
            and "around" not in p.parts
        ),
        key=lambda p: p.as_posix(),
    )
    dead: list[str] = []
    assert list(files_under(tmp_path, {".png"}, dead=dead)) == wanted and len(wanted) == 7
    assert sorted(dead) == ["gone.png", "loop.png"]
    note = open_data(tmp_path, [InputSpec("x", (1, 3, 8, 8))]).warnings[0]
    assert note.remark is Remark.DEAD_LINKS and note.values == {"count": 2, "first": "gone.png"}


def test_no_listed_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for k in range(9):
        (tmp_path / "in" / f"{k}.png").write_bytes(b"")
    (tmp_path / "link.png").symlink_to(tmp_path / "in" / "3.png")
    with files.record_inputs() as guard:
        files_under(tmp_path / "in", {".png"})
        for name in ("in/0.png", "in/8.png", "link.png"):
            with pytest.raises(QdqtoolError, check=has("output-is-input")):
                guard.forbid_overwrite(tmp_path / name)
        guard.forbid_overwrite(tmp_path / "new.png")
    with files.record_inputs():
        files.reserve_output(tmp_path / "link.png", "-o")
        with pytest.raises(QdqtoolError, check=has("output-is-input")):
            files_under(tmp_path / "in", {".png"})


def test_inodes_are_found() -> None:
    seen = Inodes("one of them")
    for k in range(50):
        seen.add(7 + k % 2, (1 << 63) + k)
    assert [seen.find((7 + k % 2, (1 << 63) + k)) for k in range(50)] == ["one of them"] * 50
    for other in ((7, (1 << 63) + 1), (8, 1 << 63), (7, (1 << 63) + 50), ((1 << 63), 7)):
        assert seen.find(other) is None
    seen = Inodes("one of them")
    seen.add(1, 2)
    keys: list[Any] = [(1, 2), (1, "2"), (1, 2, "new"), (1, 2, 3), (2,)]
    assert [seen.find(k) for k in keys] == ["one of them", None, None, None, None]


def test_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is an error, one under it is left out."""
    for name in ("a/1.png", "b/2.png", "3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    closed: list[Path] = [tmp_path / "a"]
    real = os.scandir

    def scandir(path: Path) -> Any:
        if path in closed:
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(listing.os, "scandir", scandir)
    assert list(files_under(tmp_path, {".png"})) == [tmp_path / "3.png", tmp_path / "b" / "2.png"]
    closed.append(tmp_path)
    with raises(DataError, f"files_under {tmp_path}: denied"):
        files_under(tmp_path, {".png"})

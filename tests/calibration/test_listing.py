"""Names on disk against sorted lists in memory; sets of numbers against Python's."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import collect, listing, urls
from calibration.dataset import InputSpec
from calibration.digests import UNREADABLE
from calibration.images import open_data
from calibration.intervals import Intervals
from calibration.listing import Folder, Inodes, Names, files_under
from calibration.urls import UrlSource, _mark, _reason, is_url, local_path
from qdqtool import budgets, files
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.nets import conv_net, stored, write_pictures

TEXTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6), max_size=40)


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.booleans(), st.integers(1, 7))
def test_names_on_disk_are_those_in_memory(texts: list[str], ordered: bool, limit: int) -> None:
    before, listing.IN_MEMORY = listing.IN_MEMORY, limit
    try:
        names = Names(iter(texts), ordered=ordered)
    finally:
        listing.IN_MEMORY = before
    wanted = sorted(texts) if ordered else texts
    assert len(names) == len(wanted) and list(names) == wanted and names[1:4] == wanted[1:4]
    if wanted:
        assert names[-1] == wanted[-1]
    with pytest.raises(IndexError):
        names[len(wanted)]


@pytest.mark.parametrize("limit", [2, 1000])
def test_a_folder_is_listed_as_its_paths_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(listing, "IN_MEMORY", limit)
    for name in ("a.png", "a/b.PNG", "a-b/c.png", "a/.x.png", ".h/y.png", "z.txt", "é.png", "b/c/d/e.png",
                 "dir.png/f.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "around").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    wanted = sorted(
        (p for p in tmp_path.rglob("*") if p.suffix.lower() == ".png" and p.is_file()
         and not any(n.startswith(".") for n in p.relative_to(tmp_path).parts) and "around" not in p.parts),
        key=lambda p: p.as_posix(),
    )  # fmt: skip
    assert list(files_under(tmp_path, {".png"})) == wanted and len(wanted) == 7


@pytest.mark.parametrize("limit", [2, 1000])
def test_no_listed_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(listing, "IN_MEMORY", limit)
    (tmp_path / "in").mkdir()
    for k in range(9):
        (tmp_path / "in" / f"{k}.png").write_bytes(b"")
    (tmp_path / "link.png").symlink_to(tmp_path / "in" / "3.png")
    with files.watch() as guard:
        files_under(tmp_path / "in", {".png"})
        for name in ("in/0.png", "in/8.png", "link.png"):
            with pytest.raises(QdqtoolError, match=r"one of the files read \(it is one of the files in "):
                guard.check(tmp_path / name)
        guard.check(tmp_path / "new.png")
    with files.watch():
        files.claim(tmp_path / "link.png", "-o")
        with pytest.raises(QdqtoolError, match="is one of the files read"):
            files_under(tmp_path / "in", {".png"})


@settings(deadline=None)
@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)))
def test_intervals_are_sets(one: list[int], other: list[int]) -> None:
    a, b = Intervals(one), Intervals(other)
    assert list(a) == sorted(set(one)) and len(a) == len(set(one))
    assert all((n in a) == (n in set(one)) for n in range(-1, 32))
    for union in (a | b, a | set(other)):
        assert list(union) == sorted({*one, *other}) and len(union) == len({*one, *other})
        starts_and_ends: Any = union.ranges().tolist()
        assert all(e < s for (_, e), (s, _) in itertools.pairwise(starts_and_ends))
        assert list(Intervals.of_ranges(starts_and_ends)) == list(union)
    assert list(a.missing(25)) == [n for n in range(25) if n not in set(one)]


@pytest.mark.parametrize("ranges", [[(3, 3)], [(0, 2), (2, 4)], [(5, 6), (0, 1)], [(-2, 1)]])
def test_damaged_ranges(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="not in order"):
        Intervals.of_ranges(ranges)


def test_a_link_to_itself_is_as_dead_as_one_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "nothing.jpg").symlink_to("gone.jpg")
    assert [p.name for p in files_under(tmp_path, {".jpg"})] == ["a.jpg"]


@pytest.mark.parametrize(("count", "on_disk"), [(0, False), (19_999, False), (20_000, True), (20_001, True)])
def test_twenty_thousand_names_go_to_disk(count: int, on_disk: bool) -> None:
    names = Names(f"{k:05d}" for k in reversed(range(count)))
    assert (names._names is not None) == on_disk and len(names) == count and not (on_disk and names._few)
    if count:
        assert (names[0], names[-1], names[count - 1]) == ("00000", f"{count - 1:05d}", f"{count - 1:05d}")


@pytest.mark.parametrize("limit", [2, 1000])
def test_places_in_a_list(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(listing, "IN_MEMORY", limit)
    names = Names(["c", "", "é\udcff", "a", "b"])
    wanted = ["", "a", "b", "c", "é\udcff"]
    assert list(names) == wanted and [names[k] for k in range(-5, 0)] == wanted
    for part in (slice(None, None, -1), slice(1, -1), slice(-3, 99, 2), slice(4, 1)):
        assert names[part] == wanted[part]
    for beyond in (5, -6, 99):
        with pytest.raises(IndexError):
            names[beyond]
    folder = Folder(Path("/in"), names)
    assert (len(folder), folder[1], folder[2:4]) == (5, Path("/in/a"), [Path("/in/b"), Path("/in/c")])


@pytest.mark.parametrize("block", [1, 2, 7, 65536])
@pytest.mark.parametrize("ordered", [False, True])
def test_names_are_read_across_blocks(monkeypatch: pytest.MonkeyPatch, block: int, ordered: bool) -> None:
    monkeypatch.setattr(listing, "IN_MEMORY", 3)
    monkeypatch.setattr(listing, "_BLOCK", block)
    texts = ["longer than a block", "", "b", "é", "b", "x" * 15, "c"]
    assert list(Names(texts, ordered=ordered)) == (sorted(texts) if ordered else texts)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 50])
@pytest.mark.parametrize("block", [1, 65536])
def test_inodes_are_found_in_memory_and_on_disk(monkeypatch: pytest.MonkeyPatch, count: int, block: int) -> None:
    monkeypatch.setattr(listing, "IN_MEMORY", 4)
    monkeypatch.setattr(listing, "_BLOCK", block)
    seen = Inodes("one of them")
    for k in range(count):
        seen.add(7 + k % 2, (1 << 63) + k)
        assert seen.find((7 + k % 2, (1 << 63) + k)) == "one of them"
    assert [seen.find((7 + k % 2, (1 << 63) + k)) for k in range(count)] == ["one of them"] * count
    assert (seen._file is not None) == (count >= 4) and len(seen._few) == 2 * (count % 4)
    for other in ((7, (1 << 63) + 1), (8, 1 << 63), (7, (1 << 63) + count), ((1 << 63), 7)):
        assert seen.find(other) is None


def test_what_does_not_exist_yet_is_none_of_them() -> None:
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
    with pytest.raises(DataError, match=rf"^{tmp_path}: cannot be read: Permission denied$"):
        files_under(tmp_path, {".png"})


fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

SPEC = InputSpec("images", (1, 3, 16, 16))
ROOT = "memory://qdqtool-test"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_pictures(tmp_path / "in", 4)
    write_pictures(tmp_path / "in" / "sub", 2, suffix=".jpg")
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "in" / ".hidden.png").write_bytes(b"left out")
    (tmp_path / "in" / "notes.txt").write_text("left out")
    with stored(tmp_path / "in", ROOT) as found:
        yield found


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/images") and is_url("memory://x") and is_url("zip::s3://bucket/a.zip")
    assert not is_url("images") and not is_url("/shared/images") and not is_url("C:\\images")
    assert not is_url("file:///shared/images")


def test_the_same_samples_and_statistics_as_from_a_folder(folder: Path) -> None:
    there, here = open_data(ROOT, [SPEC]), open_data(folder, [SPEC])
    for a, b in zip(there, here, strict=True):
        assert np.array_equal(a["images"], b["images"])
    assert [r for _, r in there.skipped] == [r for _, r in here.skipped] == ["cannot identify image file 'broken.png'"]
    assert [n for n, _ in there.skipped] == ["broken.png"]
    assert there.fingerprint and there.fingerprint == open_data(ROOT, [SPEC]).fingerprint
    found = collect(conv_net(), ROOT, ["c1"], progress=False)["c1"]
    wanted = collect(conv_net(), f"file://{folder}", ["c1"], progress=False)["c1"]
    assert np.array_equal(found.counter.counts, wanted.counter.counts)


def test_another_content_is_another_fingerprint(folder: Path) -> None:
    before = open_data(ROOT, [SPEC]).fingerprint
    with fsspec.open(f"{ROOT}/picture001.png", "wb") as file:
        file.write((folder / "picture002.png").read_bytes())
    assert open_data(ROOT, [SPEC]).fingerprint != before


def test_one_picture(folder: Path) -> None:
    (sample,) = open_data(f"{ROOT}/sub/picture001.jpg", [SPEC])
    assert sample["images"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://qdqtool-nothing", r"memory://qdqtool-nothing: cannot be listed: "),
        ("nosuch://bucket/images", r"nosuch://bucket/images: cannot be opened: .*nosuch"),
    ],
)
def test_what_cannot_be_had(url: str, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        open_data(url, [SPEC])
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3://bucket/images: .*s3fs.*on every worker") as caught:
        open_data("s3://bucket/images", [SPEC])
    assert "\n" not in str(caught.value)


def test_a_file_is_read_within_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtool.budgets.PICTURE_FILE", 100)
    data: Any = open_data(ROOT, [SPEC])
    assert not list(data)
    assert "the file has 101 bytes; the limit is 100 bytes" in {r for _, r in data.skipped}


NESTED = "memory://qdqtool-edges"


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Path]:
    write_pictures(tmp_path / "in", 3)
    write_pictures(tmp_path / "in" / "a" / "b", 1, suffix=".JPG")
    write_pictures(tmp_path / "in" / ".hidden", 1)
    for name in ("png", "noname.", "text.txt", ".dot.png"):
        (tmp_path / "in" / name).write_bytes(b"no picture")
    with stored(tmp_path / "in", NESTED) as found:
        yield found


@pytest.mark.parametrize(
    ("text", "url", "path"),
    [
        ("s3://b", True, "s3://b"), ("S3://b", True, "S3://b"), ("zip::a", True, "zip::a"), ("a-b.c+d://", True, "a-b.c+d://"),
        ("file:///a b", False, "/a b"), ("FILE:///a", False, "/a"), ("local://a", False, "a"), ("/a://b", False, "/a://b"),
        ("a:/b", False, "a:/b"), ("x://b", False, "x://b"), ("9p://b", False, "9p://b"),
    ],
)  # fmt: skip
def test_parts_of_urls(text: str, url: bool, path: str) -> None:
    assert (is_url(text), local_path(text)) == (url, path)


@pytest.mark.parametrize("end", ["", "/"])
def test_what_lies_under_a_url(nested: Path, end: str) -> None:
    source: Any = open_data(NESTED + end, [SPEC]).source
    wanted = ["a/b/picture000.JPG", "picture000.png", "picture001.png", "picture002.png"]
    assert [source.name(k) for k in range(source.count())] == wanted
    part = pickle.loads(pickle.dumps(source.portion([2, 0])))
    assert isinstance(part, UrlSource) and [part.name(k) for k in range(part.count())] == [wanted[2], wanted[0]]
    assert (part.load(0)["images"] == source.load(2)["images"]).all() and part.digest(1) == source.digest(0)
    with pytest.raises(DataError) as caught:
        open_data(f"{NESTED}/.hidden/x{end}", [SPEC])
    assert str(caught.value).startswith(f"{NESTED}/.hidden/x{end}: cannot be listed: ")
    with fsspec.open(f"{NESTED}/empty/note.txt", "wb") as file:
        file.write(b"")
    with pytest.raises(DataError) as caught:
        open_data(f"{NESTED}/empty{end}", [SPEC])
    assert str(caught.value) == f"{NESTED}/empty{end}: no images (bmp, jpeg, jpg, png, webp) under this URL"


def test_one_picture_has_its_own_name(nested: Path) -> None:
    source: Any = open_data(f"{NESTED}/a/b/picture000.JPG", [SPEC]).source
    assert (source.count(), source.name(0), source.url) == (1, "picture000.JPG", f"{NESTED}/a/b")


def test_a_picture_travels_once(nested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = open_data(NESTED, [SPEC]).source
    opened: list[str] = []
    real = urls.opened
    monkeypatch.setattr(urls, "opened", lambda url: opened.append(url) or real(url))
    content = (nested / "picture001.png").read_bytes()
    held = source._content(2)
    assert held == (content, hashlib.blake2b(content, digest_size=16).digest()) and len(opened) == 1
    assert source._content(2) == held and len(opened) == 1
    source._content(1)
    assert len(opened) == 2
    source.load(1)
    assert len(opened) == 2 and source._read.held is None
    source.load(1)
    assert len(opened) == 3


def test_a_file_of_just_the_limit(nested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = open_data(NESTED, [SPEC]).source
    size = (nested / "picture001.png").stat().st_size
    monkeypatch.setattr(budgets, "PICTURE_FILE", size)
    assert len(source._content(2)[0]) == size
    source._read.held = None
    monkeypatch.setattr(budgets, "PICTURE_FILE", size - 1)
    with pytest.raises(DataError, match=rf"^the file has {size} bytes; the limit is {size - 1} bytes$"):
        source.load(2)


def test_a_file_that_is_gone(nested: Path) -> None:
    source: Any = open_data(NESTED, [SPEC]).source
    fsspec.filesystem("memory").rm("/qdqtool-edges/picture001.png")
    with pytest.raises(DataError, match=r"^No such file or directory$"):
        source.load(2)
    assert source.digest(2) == b"picture001.png" + UNREADABLE


def test_checksums_of_stores() -> None:
    assert _mark({"size": 3, "ETag": "e"}) == b"3 e" and _mark({"checksum": "c"}) == b"None c"
    assert _mark({"size": 3, "ETag": "", "md5Hash": "m", "sha256": "s"}) == b"3 m"
    assert _mark({"size": 3}) == _mark({}) == b""
    assert _reason(ValueError("a\n b")) == "a b" and _reason(ValueError()) == "ValueError"
    assert _reason(ValueError("x" * 300)) == "x" * 200


def test_a_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(DataError, match=r"^s3://b: URLs need fsspec: pip install fsspec, and s3fs, gcsfs or the like$"):
        open_data("s3://b", [SPEC])

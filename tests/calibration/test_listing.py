"""Names on disk against sorted lists in memory; sets of numbers against Python's."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import listing
from calibration.intervals import Intervals
from calibration.listing import Folder, Inodes, Names, files_under
from qdqtool import files
from qdqtool.errors import DataError, QdqtoolError

TEXTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6), max_size=40)


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

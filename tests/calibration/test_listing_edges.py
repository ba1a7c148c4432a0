"""Lists of names at the number from which they are kept on disk, and the guard's inodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from calibration import listing
from calibration.listing import Folder, Inodes, Names, files_under
from qdqtool.errors import DataError


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

"""Files under folders, and the guard over them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from calibration import listing
from calibration.listing import Inodes, files_under
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.io import files


def test_a_folder_is_listed_as_its_paths_sort(tmp_path: Path) -> None:
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


def test_no_listed_file_is_written(tmp_path: Path) -> None:
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


def test_a_link_to_itself_is_as_dead_as_one_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "nothing.jpg").symlink_to("gone.jpg")
    assert [p.name for p in files_under(tmp_path, {".jpg"})] == ["a.jpg"]


def test_inodes_are_found() -> None:
    seen = Inodes("one of them")
    for k in range(50):
        seen.add(7 + k % 2, (1 << 63) + k)
    assert [seen.find((7 + k % 2, (1 << 63) + k)) for k in range(50)] == ["one of them"] * 50
    for other in ((7, (1 << 63) + 1), (8, 1 << 63), (7, (1 << 63) + 50), ((1 << 63), 7)):
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

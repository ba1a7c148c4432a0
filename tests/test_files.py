"""Writing files whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.outputs import atomic_write, write_text


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def broken() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    write_text(path, "whole")
    reader.join(10)
    assert got == ["whole"]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_a_full_device_is_one_line_and_stays() -> None:
    with pytest.raises(QdqtoolError, match=r"^/dev/full: cannot be written: No space left on device$"):
        write_text("/dev/full", "text")
    assert Path("/dev/full").is_char_device()


def test_text_with_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "name \udcff")
    assert (tmp_path / "a.txt").read_text("utf-8") == "name \\udcff"

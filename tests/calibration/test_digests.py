"""Digests of files: a few blocks of them, a few files at a time, in order."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from calibration.digests import UNREADABLE, file_digest, read_ahead, unframed

BLOCK = 65536


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 17 * BLOCK, 40 * BLOCK + 77])
def test_a_file_is_its_size_and_sixteen_blocks(tmp_path: Path, size: int) -> None:
    data = bytes(k * k % 251 for k in range(1000)) * (size // 1000 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:size])
    step = max(BLOCK, (size - BLOCK) // 15)
    blocks = [data[:size][at : at + BLOCK] for at in range(0, size, step)]
    assert len(blocks) <= 17
    assert file_digest(path) == digest(str(size).encode(), *blocks)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert file_digest(tmp_path / "nothing") == file_digest(tmp_path) == UNREADABLE == b"unreadable"


@pytest.mark.parametrize("count", [0, 1, 31, 63, 64, 65, 200, 300])
def test_reading_ahead_keeps_the_order(count: int) -> None:
    indices = [3 * k for k in range(count)]
    assert list(read_ahead(lambda i: str(i).encode(), indices)) == [str(i).encode() for i in indices]


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


def test_four_are_waited_for_at_the_same_time() -> None:
    meet = threading.Barrier(4, timeout=20)
    first = {0, 32, 64, 96}

    def read(index: int) -> bytes:
        if index in first:
            meet.wait()
        return b"x"

    assert len(list(read_ahead(read, range(160)))) == 160
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def counted(index: int) -> bytes:
        with lock:
            running.append(index)
            most.append(len(running))
        threading.Event().wait(0.0002)
        with lock:
            running.remove(index)
        return b"x"

    list(read_ahead(counted, range(320)))
    assert max(most) <= 4


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 3], [BLOCK - 4], [BLOCK - 8, 0], [BLOCK - 9, 5, 7], [30_000] * 7,
                                   [4] * 20_000])  # fmt: skip
def test_frames(sizes: list[int]) -> None:
    parts = [bytes([k % 251]) * size for k, size in enumerate(sizes)]
    file = io.BytesIO()
    for part in parts:
        file.write(len(part).to_bytes(4, "big") + part)
    assert list(unframed(file)) == parts
    # Two readers at once, each with a place of its own.
    for one, other in zip(unframed(file), unframed(file), strict=True):
        assert one == other


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

"""What tells one file from another: hashes, read a few at a time."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

UNREADABLE = b"unreadable"  # in place of a file's digest
_DIGEST_BLOCK = 1 << 16
_DIGEST_BLOCKS = 16
_READERS = 4  # threads that read files for their digests
_AHEAD = 32  # files of one turn of theirs


def file_digest(path: Path) -> bytes:
    """Size and up to 16 evenly spread blocks of a file, hashed: quick on any size, and blind to time stamps."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        # Opened without waiting: a pipe that nobody writes to would be waited for, and a device has no end.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return UNREADABLE
            size = found.st_size
            digest.update(str(size).encode())
            step = max(_DIGEST_BLOCK, (size - _DIGEST_BLOCK) // (_DIGEST_BLOCKS - 1))
            for position in range(0, size, step):
                file.seek(position)
                digest.update(file.read(_DIGEST_BLOCK))
    except OSError:
        return UNREADABLE
    return digest.digest()


def read_ahead(read: Callable[[int], bytes], indices: Sequence[int]) -> Iterator[bytes]:
    """``read`` of each index, in order; several are waited for at the same time, as shared file systems take."""
    if len(indices) < 2 * _AHEAD:
        yield from map(read, indices)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: deque[Future[list[bytes]]] = deque()
        try:
            for start in range(0, len(indices), _AHEAD):
                waiting.append(pool.submit(lambda some: [read(i) for i in some], indices[start : start + _AHEAD]))
                if len(waiting) > _READERS:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

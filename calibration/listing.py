"""The files under a folder, what distinguishes them, and the guard that keeps them from being overwritten."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from qdqtool.base.files import FileKey, open_input, record_input_set
from qdqtool.errors import DataError, QdqtoolError


class Folder(Sequence[Path]):
    """Files under a folder, by their names under it."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path:  # type: ignore[override]
        return self.root / self.names[index]


class Inodes:
    """Devices and inodes of files, sixteen bytes each: for the guard over files.

    Attributes:
        name: What to call one of them in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pairs = array("Q")

    def add(self, device: int, inode: int) -> None:
        self._pairs.extend((device, inode))

    def find(self, key: FileKey) -> str | None:
        """The name, where the file of that key is one of them."""
        import numpy as np

        wanted = [k for k in key if isinstance(k, int)]
        if (
            len(key) != 2 or len(wanted) != 2 or not self._pairs
        ):  # the key of a file that does not exist yet
            return None
        pairs = np.array(self._pairs, np.uint64).reshape(-1, 2)
        return self.name if bool((pairs == np.array(wanted, np.uint64)).all(axis=1).any()) else None


def files_under(
    root: Path,
    suffixes: Set[str],
    passed: MutableMapping[str, int] | None = None,
    dead: list[str] | None = None,
) -> Folder:
    """The files under a folder whose names end so, in the order of their paths; they count as read.

    ``passed`` has suffixes of files to count without taking them, and gets the counts; ``dead`` gets the names of links
    to nothing, or to themselves, that end as the files do.

    Raises:
        DataError: The folder cannot be read.
        QdqtoolError: One of them is to be written.
    """
    seen = Inodes(f"one of the files in {root}")

    def take(name: str) -> bool:
        suffix = os.path.splitext(name)[1].lower()
        if passed is not None and suffix in passed:
            passed[suffix] += 1
        return suffix in suffixes

    try:
        names = sorted(scanned(root, take, seen, dead))
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}", str(root), code="file-unreadable"
        ) from error
    record_input_set(seen)
    return Folder(root, names)


def scanned(
    root: Path, take: Callable[[str], bool], seen: Inodes, dead: list[str] | None = None
) -> Iterator[str]:
    """Names of the regular files under a folder, with slashes; folders are not followed through links.

    What begins with a dot is left out; ``take`` says which other names count, ``seen`` gets their files, and ``dead``
    the names of links to nothing.

    Raises:
        OSError: The folder cannot be read; those in it that cannot are left out.
    """
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        place = root / prefix if prefix else root
        try:
            entries = os.scandir(place)
        except OSError:
            if not prefix:
                raise
            continue
        with entries:
            device: int | None = None
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                elif not take(entry.name):
                    continue
                elif not _is_file(entry):
                    if dead is not None and not os.path.exists(entry.path):
                        dead.append(name)
                else:
                    if entry.is_symlink():
                        found = entry.stat()
                        seen.add(found.st_dev, found.st_ino)
                    else:
                        if device is None:
                            device = os.stat(place).st_dev
                        seen.add(device, entry.inode())
                    yield name


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself is as dead as one to nothing
        return False


# What distinguishes two files: hashes, read a few at a time -----------------------------------------------------


UNREADABLE = b"unreadable"  # in place of a file's digest
BLOCK = 1 << 16
_BLOCKS = 16
_READERS = 4  # threads that read files for their digests
_AHEAD = 32  # files of one turn of theirs


def block_starts(size: int) -> range:
    """Where the blocks begin that stand for so many bytes in a digest: up to 16, evenly spread."""
    return range(0, size, max(BLOCK, (size - BLOCK) // (_BLOCKS - 1)))


def file_digest(path: Path) -> bytes:
    """Size and up to 16 evenly spread blocks of a file, hashed: quick on any size, and blind to time stamps."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open_input(path, record=False) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(str(size).encode())
            for position in block_starts(size):
                file.seek(position)
                digest.update(file.read(BLOCK))
    except (OSError, QdqtoolError):
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
                waiting.append(
                    pool.submit(
                        lambda some: [read(i) for i in some], indices[start : start + _AHEAD]
                    )
                )
                if len(waiting) > _READERS:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

"""The files under a folder, in order, for calibration and for the guard that keeps them from being overwritten."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import overload

from qdqtool.errors import DataError
from qdqtool.files import Key, note_files


class Folder(Sequence[Path]):
    """Files under a folder, by their names under it."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        if isinstance(index, slice):
            return [self.root / n for n in self.names[index]]
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

    def find(self, key: Key) -> str | None:
        """The name, where the file of that key is one of them."""
        import numpy as np

        wanted = [k for k in key if isinstance(k, int)]
        if len(key) != 2 or len(wanted) != 2 or not self._pairs:  # the key of a file that does not exist yet
            return None
        pairs = np.array(self._pairs, np.uint64).reshape(-1, 2)
        return self.name if bool((pairs == np.array(wanted, np.uint64)).all(axis=1).any()) else None


def files_under(root: Path, suffixes: Set[str]) -> Folder:
    """The files under a folder whose names end so, in the order of their paths; they count as read.

    Raises:
        DataError: The folder cannot be read.
        QdqtoolError: One of them is to be written.
    """
    seen = Inodes(f"one of the files in {root}")
    try:
        names = sorted(scanned(root, lambda name: os.path.splitext(name)[1].lower() in suffixes, seen))
    except OSError as error:
        raise DataError(f"{root}: cannot be read: {error.strerror or error}") from error
    note_files(seen)
    return Folder(root, names)


def scanned(root: Path, take: Callable[[str], bool], seen: Inodes) -> Iterator[str]:
    """Names of the regular files under a folder, with slashes; folders are not followed through links.

    What begins with a dot is left out.

    Args:
        root: The folder.
        take: Which file names count.
        seen: Gets the files that are yielded.

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
                elif take(entry.name) and _is_file(entry):
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

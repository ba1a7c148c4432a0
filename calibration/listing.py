"""Names of files, in order: in memory where they are few, else on disk, so that a folder of millions takes no more."""

from __future__ import annotations

import heapq
import os
import struct
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import IO, overload

from qdqtool.errors import DataError
from qdqtool.files import Key, note_files

IN_MEMORY = 20_000  # names
_OFFSET = struct.Struct("<Q")
_END = b"\0"  # no file name holds it
_BLOCK = 1 << 16


class Names(Sequence[str]):
    """Texts without NUL, in ascending order or as they come.

    Items are read one at a time: slices make lists.
    """

    def __init__(self, texts: Iterable[str], *, ordered: bool = True) -> None:
        """Takes them in.

        Args:
            texts: Names; bytes that are not UTF-8 as surrogates, as the os module has them.
            ordered: Whether they are put in order; else they stay in that of ``texts``.
        """
        self._few: list[str] = []
        self._names: IO[bytes] | None = None
        self._offsets: IO[bytes] | None = None
        self._lock = threading.Lock()
        runs: list[IO[bytes]] = []
        for text in texts:
            self._few.append(text)
            if len(self._few) >= IN_MEMORY:
                runs.append(_run(sorted(self._few) if ordered else self._few))
                self._few = []
        if ordered:
            self._few.sort()
        self._count = len(self._few)
        if runs:
            runs.append(_run(self._few))
            self._few = []
            parts = [_texts(r) for r in runs]
            self._write(heapq.merge(*parts) if ordered else (t for p in parts for t in p))
            for run in runs:
                run.close()

    def _write(self, texts: Iterable[str]) -> None:
        self._names, self._offsets = _temporary(), _temporary()
        at = self._count = 0
        for text in texts:
            data = _bytes(text) + _END
            self._offsets.write(_OFFSET.pack(at))
            self._names.write(data)
            at += len(data)
            self._count += 1
        self._offsets.write(_OFFSET.pack(at))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._names is None or self._offsets is None:
            return self._few[index]
        with self._lock:
            self._offsets.seek(index * _OFFSET.size)
            start, end = struct.unpack("<QQ", self._offsets.read(2 * _OFFSET.size))
            self._names.seek(start)
            return _text(self._names.read(end - start - 1))


class Folder(Sequence[Path]):
    """Files under a folder, by their names under it."""

    def __init__(self, root: Path, names: Names) -> None:
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
    """Devices and inodes of files, sixteen bytes each and those on disk where they are many: for the guard over files.

    Attributes:
        name: What to call one of them in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._few = array("Q")
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def add(self, device: int, inode: int) -> None:
        self._few.extend((device, inode))
        if len(self._few) >= 2 * IN_MEMORY:
            if self._file is None:
                self._file = _temporary()
            self._few.tofile(self._file)
            self._few = array("Q")

    def find(self, key: Key) -> str | None:
        """The name, where the file of that key is one of them."""
        wanted = array("Q", [k for k in key if isinstance(k, int)])
        if len(key) != 2 or len(wanted) != 2:  # the key of a file that does not exist yet
            return None
        return self.name if any(_holds(block, wanted) for block in self._blocks()) else None

    def _blocks(self) -> Iterator[array[int]]:
        yield self._few
        if self._file is None:
            return
        with self._lock:
            self._file.flush()
            self._file.seek(0)
            while data := self._file.read(16 * _BLOCK):
                yield array("Q", data)
            self._file.seek(0, os.SEEK_END)


def _holds(block: array[int], wanted: array[int]) -> bool:
    import numpy as np

    pairs = np.frombuffer(block, np.uint64).reshape(-1, 2)
    return bool((pairs == np.array(wanted, np.uint64)).all(axis=1).any()) if len(pairs) else False


def files_under(root: Path, suffixes: Set[str]) -> Folder:
    """The files under a folder whose names end so, in the order of their paths; they count as read.

    Raises:
        DataError: The folder cannot be read.
        QdqtoolError: One of them is to be written.
    """
    seen = Inodes(f"one of the files in {root}")
    try:
        names = Names(scanned(root, lambda name: os.path.splitext(name)[1].lower() in suffixes, seen))
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


def _temporary() -> IO[bytes]:
    """A file without a name: it goes when nobody holds it any more."""
    return tempfile.TemporaryFile()


def _run(texts: Iterable[str]) -> IO[bytes]:
    file = _temporary()
    for text in texts:
        file.write(_bytes(text) + _END)
    return file


def _texts(file: IO[bytes]) -> Iterator[str]:
    file.seek(0)
    rest = b""
    while block := file.read(_BLOCK):
        *whole, rest = (rest + block).split(_END)
        for part in whole:
            yield _text(part)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")



"""Many short texts as they travel: packed, since a scheduler keeps the last thousand messages for a while."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload


class Parcel(Sequence[bytes]):
    """Pieces of bytes that are compressed while they travel."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(pieces)

    def __reduce__(self) -> tuple[Callable[[bytes], Parcel], tuple[bytes]]:
        return unpacked, (zlib.compress(b"".join(len(p).to_bytes(4, "big") + p for p in self._pieces), 1),)

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._pieces[index]


def unpacked(data: bytes) -> Parcel:
    """The parcel that travelled."""
    return Parcel(_pieces(zlib.decompress(data)))


def _pieces(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


class Texts(Sequence[str]):
    """Names of files; bytes that are not UTF-8 as surrogates, as the os module has them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._parcel = Parcel(os.fsencode(t) for t in texts)

    def __len__(self) -> int:
        return len(self._parcel)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._parcel[index]
        return os.fsdecode(found) if isinstance(found, bytes) else [os.fsdecode(f) for f in found]


class Paths(Sequence[Path]):
    """Paths from the root of the file system, so that they are the same for every process."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._texts = Texts(os.path.abspath(p) for p in paths)

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Any:
        found = self._texts[index]
        return Path(found) if isinstance(found, str) else [Path(f) for f in found]

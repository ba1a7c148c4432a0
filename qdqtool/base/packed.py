"""Compressed files, unpacked block by block and never beyond a limit: gzip and xz of any number of members, zstd."""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from qdqtool.base import limits
from qdqtool.errors import QdqtoolError

BLOCK = 1 << 20
_PIECE = (
    1 << 14
)  # given to a decompressor at once, which copies what is left behind each member's end
_XZ_MEMORY = 256 << 20
GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
HEAD = 6  # bytes that show what a file is


class _Gzip:
    """zlib's decompressor with the interface of lzma's and compression.zstd's."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    def __getattr__(self, name: str) -> Any:  # eof, unused_data
        return getattr(self._inner, name)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, most)


def _zstd() -> Any:
    """Python 3.14's own decompressor, or that of its backport where it is installed; None without either."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name).ZstdDecompressor()
        except ImportError:
            continue
    return None


def kind_of(head: bytes) -> bytes:
    """Which magic number a file begins with; empty for one that is not compressed."""
    return next((magic for magic in (GZIP, XZ, ZSTD) if head.startswith(magic)), b"")


def unpack(
    head: bytes,
    read: Callable[[], bytes],
    name: str,
    limit: int,
    *,
    whole: bool,
    error: type[QdqtoolError] = QdqtoolError,
) -> Iterator[bytes]:
    """Yields what a compressed stream holds, all members after one another.

    Args:
        head: Its first bytes.
        read: Gives the next bytes, none at the end.
        name: What to call it in messages.
        limit: Bytes after unpacking.
        whole: Whether damage is an error; else it ends the data (a log that was cut off is still worth reading),
            unless it is at the very start.
        error: Class of the errors.

    Raises:
        QdqtoolError: More than ``limit`` bytes, damage, or zstd where Python cannot read it.
    """
    import lzma  # most files are not compressed

    magic, give = kind_of(head), _in_pieces(read)
    total, data, ended = 0, head, False
    while data:
        unpacker = _unpacker(magic, name, error)
        while not unpacker.eof:
            try:
                block = unpacker.decompress(data, BLOCK)
            except (zlib.error, lzma.LZMAError, ValueError, OSError) as found:
                if not whole and total:
                    return
                raise error(
                    f"cannot be read: the compressed file is damaged ({found}); copy it again",
                    name,
                    code="file-damaged",
                ) from found
            except Exception as found:  # zstd's own class
                if type(found).__name__ != "ZstdError":
                    raise
                raise error(
                    f"the compressed file is damaged ({found}); copy it again",
                    name,
                    code="file-damaged",
                ) from found
            data = b""
            if block:
                total += len(block)
                if total > limit:
                    raise error(
                        f"unpacks to more than {limits.format_bytes(limit)}, the limit",
                        name,
                        code="file-too-large",
                    )
                yield block
            if not unpacker.eof and unpacker.needs_input:
                data = b"" if ended else give()
                if not data:
                    if whole:
                        raise error(
                            "the compressed file is cut off; copy it again",
                            name,
                            code="file-damaged",
                        )
                    return
        data = unpacker.unused_data
        while not ended and len(data) < HEAD:
            more = give()
            ended = not more
            data += more
        # Zeros pad xz and tapes; anything else behind the end is no part of the file, as gzip has it.
        data = data.lstrip(b"\0")
        if kind_of(data) != magic:
            return


def _in_pieces(read: Callable[[], bytes]) -> Callable[[], bytes]:
    """Gives the same bytes, a piece at a time."""

    def pieces() -> Iterator[bytes]:
        while block := read():
            yield from (block[i : i + _PIECE] for i in range(0, len(block), _PIECE))

    return functools.partial(next, pieces(), b"")


def _unpacker(magic: bytes, name: str, error: type[QdqtoolError]) -> Any:
    if magic == GZIP:
        return _Gzip()
    import lzma

    inner = lzma.LZMADecompressor(memlimit=_XZ_MEMORY) if magic == XZ else _zstd()
    if inner is None:
        raise error(
            "is compressed with zstd, which this Python cannot read; unpack it first (zstd -d)",
            name,
            code="missing-package",
        )
    return inner

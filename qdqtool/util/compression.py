"""Unpack files compressed with gzip, xz or zstd, block by block up to a limit."""

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from qdqtool.errors import QdqtoolError
from qdqtool.util import limits

BLOCK = 1 << 20
GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
HEAD = 6  # number of bytes at the start of a file that are needed to recognize the format


def find_magic(head: bytes) -> bytes:
    """Return the magic number at the start of a compressed file; empty for other files."""
    return next((magic for magic in (GZIP, XZ, ZSTD) if head.startswith(magic)), b"")


class _PrefixedStream:
    """Stream of bytes that were already read from a file, followed by the rest of the file."""

    def __init__(self, head: bytes, read: Callable[[int], bytes]) -> None:
        self._head = head
        self._read = read

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._read(BLOCK if size < 0 else size)
        data, self._head = self._head[:size], self._head[size:]
        return data


def unpack_blocks(
    head: bytes,
    read: Callable[[int], bytes],
    name: str,
    limit: int,
    *,
    whole: bool,
    error: type[QdqtoolError] = QdqtoolError,
) -> Iterator[bytes]:
    """Yield the contents of a compressed file with one or more members.

    Args:
        head: First bytes of the file, which the caller has already read; at least `HEAD` bytes.
        read: Function that reads the rest of the file. Its argument is the maximum number of bytes
            to return. At the end of the file, it returns no bytes.
        name: Name of the file for messages.
        limit: Maximum number of bytes after unpacking.
        whole: Whether truncation, or damage after the first block, is an error. If False, the
            contents end there, so that truncated logs can be read.
        error: Class of the errors.

    Raises:
        QdqtoolError: The contents have more than `limit` bytes, the file is damaged, or this Python
            does not support zstd.
    """
    stream, damage = _open_stream(find_magic(head), _PrefixedStream(head, read), name, error)
    total = 0
    while True:
        try:
            block = stream.read1(BLOCK)
        except EOFError:
            if not whole:
                return
            raise error(
                "the compressed file is truncated; copy it again", name, code="file-damaged"
            ) from None
        except damage as cause:
            if total and not whole:
                return
            raise error(
                f"cannot be read: the compressed file is damaged ({cause}); copy it again",
                name,
                code="file-damaged",
            ) from cause
        if not block:
            return
        total += len(block)
        if total > limit:
            raise error(
                f"unpacks to more than {limits.format_bytes(limit)}, the limit",
                name,
                code="file-too-large",
            )
        yield block


def _open_stream(
    magic: bytes, source: _PrefixedStream, name: str, error: type[QdqtoolError]
) -> tuple[Any, tuple[type[Exception], ...]]:
    file = cast(IO[bytes], source)
    # Imports are delayed, because most files are not compressed.
    if magic == GZIP:
        import gzip

        return gzip.GzipFile(fileobj=file), (gzip.BadGzipFile, zlib.error)
    if magic == XZ:
        import lzma

        return lzma.LZMAFile(file, format=lzma.FORMAT_XZ), (lzma.LZMAError,)
    zstd = _import_zstd()
    if zstd is None:
        raise error(
            "is compressed with zstd, which this Python cannot read; unpack it first (zstd -d)",
            name,
            code="missing-package",
        )
    return zstd.ZstdFile(file), (zstd.ZstdError,)


def _import_zstd() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None

"""Bytes of a log or JSON, from a file, a compressed file or standard input, in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import os
import sys
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

from qdqtool.base import budgets
from qdqtool.errors import BuildLogError
from qdqtool.io import packed
from qdqtool.io.files import note_read, open_input

LogSource = str | os.PathLike[str] | IO[bytes]

BLOCK = packed.BLOCK
MAX_LINE = budgets.LOG_LINE
MAX_JSON = budgets.JSON_FILE


def name_of(source: LogSource) -> str:
    """What to call a source in messages."""
    if isinstance(source, (str, os.PathLike)):
        return "standard input" if str(source) == "-" else str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "stream"


@contextlib.contextmanager
def blocks(source: LogSource) -> Iterator[Iterator[bytes]]:
    """Gives the unpacked bytes of a source, block by block, as UTF-8 (UTF-16 with a byte-order mark is recoded).

    Args:
        source: A path, ``-`` for standard input, or a binary stream; gzip, xz and zstd are recognised by their content.

    Raises:
        BuildLogError: The source cannot be read, or is a damaged compressed file from its very start.
    """
    name = name_of(source)
    try:
        with contextlib.ExitStack() as stack:
            if not isinstance(source, (str, os.PathLike)):
                stream: BinaryIO = cast(BinaryIO, source)
            elif str(source) == "-":
                if sys.stdin is None:
                    raise BuildLogError("standard input is closed; give a file, or pipe the log in")
                stream = sys.stdin.buffer
                with contextlib.suppress(OSError, ValueError):  # a replaced stdin has no descriptor
                    note_read(stream.fileno())
            else:
                stream = cast(BinaryIO, stack.enter_context(open_input(source, error=BuildLogError)))
            yield _recoded(_unpacked(stream, name))
    except OSError as error:
        raise BuildLogError(f"{name}: cannot be read: {error.strerror or error}") from error


def _unpacked(stream: BinaryIO, name: str) -> Iterator[bytes]:
    head = _read(stream, 6)
    while 0 < len(head) < 6:
        more = _read(stream, 6 - len(head))
        if not more:
            break
        head += more
    if packed.kind_of(head):
        yield from packed.unpack(head, lambda: _read(stream, BLOCK), name, budgets.UNPACKED_LOG, whole=False,
                                 error=BuildLogError)
    else:
        if head:
            yield head
        while block := _read(stream, BLOCK):
            yield block


def _read(stream: BinaryIO, size: int) -> bytes:
    try:
        return stream.read(size) or b""
    except (ValueError, gzip.BadGzipFile, EOFError) as error:
        raise BuildLogError(f"{name_of(stream)}: cannot be read: {error}") from error


def _recoded(source: Iterator[bytes]) -> Iterator[bytes]:
    """PowerShell's ``>`` writes UTF-16 with a byte-order mark; other text is left as it is."""
    first = next(source, b"")
    encoding = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(first[:2])
    if encoding is None:
        yield first[3:] if first.startswith(codecs.BOM_UTF8) else first
        yield from source
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first[2:]).encode("utf-8", "replace")
    for block in source:
        yield decoder.decode(block).encode("utf-8", "replace")


def lines_of(source: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Groups of lines without their line ends; of a line over MAX_LINE only the beginning is kept.

    A carriage return at the end is dropped; one inside is left (progress bars overwrite themselves).
    """
    rest: list[bytes] = []
    held = 0
    for block in source:
        if b"\n" not in block:
            if held < MAX_LINE:
                rest.append(block[: MAX_LINE - held])
                held += len(rest[-1])
            continue
        found = block.split(b"\n")
        if rest:
            found[0] = b"".join(rest) + found[0][: max(0, MAX_LINE - held)]
        tail = found.pop()
        rest = [tail[:MAX_LINE]] if tail else []
        held = len(rest[0]) if rest else 0
        yield found
    if rest:
        yield [b"".join(rest)]

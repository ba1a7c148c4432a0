"""Bytes of a log or JSON, from a file, a compressed file or standard input, in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from qdqtool.errors import BuildLogError

LogSource = str | os.PathLike[str] | IO[bytes]

BLOCK = 1 << 20
MAX_LINE = 1 << 20  # bytes kept of one line; the longest real ones (metadata of one big Myelin node) are far below
MAX_JSON = 64 << 20  # bytes of one JSON file: more than a hundred thousand layers


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
        source: A path, ``-`` for standard input, or a binary stream; gzip and xz are recognised by their content.

    Raises:
        BuildLogError: The source cannot be read, or is a damaged compressed file from its very start.
    """
    name = name_of(source)
    try:
        with contextlib.ExitStack() as stack:
            if not isinstance(source, (str, os.PathLike)):
                stream: BinaryIO = cast(BinaryIO, source)
            elif str(source) == "-":
                stream = sys.stdin.buffer
            else:
                if Path(source).is_dir():
                    raise BuildLogError(f"{name}: is a folder; give a build log, a layer JSON or a profile")
                stream = stack.enter_context(open(source, "rb"))
            yield _recoded(_unpacked(stream, name))
    except FileNotFoundError:
        raise BuildLogError(f"{name}: no such file") from None
    except OSError as error:
        raise BuildLogError(f"{name}: cannot be read: {error.strerror or error}") from error


def _unpacked(stream: BinaryIO, name: str) -> Iterator[bytes]:
    head = _read(stream, 6)
    while 0 < len(head) < 6:
        more = _read(stream, 6 - len(head))
        if not more:
            break
        head += more
    if head[:2] == b"\x1f\x8b":
        yield from _decompressed(stream, head, zlib.decompressobj(wbits=31), name)
    elif head == b"\xfd7zXZ\x00":
        yield from _decompressed(stream, head, lzma.LZMADecompressor(memlimit=256 << 20), name)
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


def _decompressed(
    stream: BinaryIO, data: bytes, unpacker: zlib._Decompress | lzma.LZMADecompressor, name: str
) -> Iterator[bytes]:
    """A damaged or cut tail ends the data: a log that was cut off is still worth reading."""
    given = False
    while True:
        try:
            block = unpacker.decompress(data, BLOCK)
        except (zlib.error, lzma.LZMAError) as error:
            if not given:
                raise BuildLogError(f"{name}: the compressed file is damaged ({error}); copy it again") from error
            return
        if block:
            given = True
            yield block
        if unpacker.eof:
            return
        if isinstance(unpacker, lzma.LZMADecompressor):
            data, hungry = b"", unpacker.needs_input
        else:
            data = unpacker.unconsumed_tail
            hungry = not data
        if hungry:
            data = _read(stream, BLOCK)
            if not data:
                return


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

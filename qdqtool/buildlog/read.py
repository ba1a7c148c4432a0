"""Reader of TensorRT builds: logs, layer listings and profiles.

The kind of a file is recognized by its content. Compressed files are unpacked. Several files of one
build are merged.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import itertools
import os
import re
import select
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import IO, BinaryIO, cast

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.build_status import set_build_status
from qdqtool.buildlog.json_files import read_json
from qdqtool.buildlog.json_lines import are_json_lines, unwrap_records
from qdqtool.buildlog.log import LogPrefixStripper, LogReader
from qdqtool.buildlog.types import Build, BuiltLayer, TacticCounts
from qdqtool.errors import BuildLogError
from qdqtool.util import compression, limits
from qdqtool.util.files import open_input, record_input

__all__ = ["LogSource", "read_build"]


_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_PRODUCT = re.compile(rb"(?i)tensorrt|\[TRT\]")

LogSource = str | os.PathLike[str] | IO[bytes]


def name_source(source: LogSource) -> str:
    """Return the name of a source for messages."""
    if isinstance(source, (str, os.PathLike)):
        return "standard input" if str(source) == "-" else str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "stream"


@contextlib.contextmanager
def open_blocks(source: LogSource) -> Iterator[Iterator[bytes]]:
    """Open a source as blocks of unpacked bytes in UTF-8.

    UTF-16 with a byte-order mark is converted. gzip, xz and zstd are recognized by their content.

    Args:
        source: Path, ``-`` for standard input, or binary stream.
    """
    name = name_source(source)
    try:
        with contextlib.ExitStack() as stack:
            if not isinstance(source, (str, os.PathLike)):
                stream: BinaryIO = cast(BinaryIO, source)
            elif str(source) == "-":
                stream = _open_standard_input()
            else:
                stream = cast(
                    BinaryIO, stack.enter_context(open_input(source, error=BuildLogError))
                )
            is_piped = False
            # A stream in memory has no descriptor.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                is_piped = not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            unpacked = _iterate_unpacked(stream, name)
            yield _convert_to_utf8(_enforce_size_limit(unpacked, name) if is_piped else unpacked)
    except OSError as error:
        raise BuildLogError(
            f"cannot be read: {error.strerror or error}", name, code="file-unreadable"
        ) from error


def _open_standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise BuildLogError(
            "standard input is closed; give a file, or pipe the log into the command",
            code="input-closed",
        )
    stream = sys.stdin.buffer
    # If the calling program has replaced sys.stdin, the stream may have no descriptor.
    with contextlib.suppress(OSError, ValueError):
        record_input(stream.fileno())
    return stream


def _enforce_size_limit(blocks: Iterator[bytes], name: str) -> Iterator[bytes]:
    size = lines = 0
    for block in blocks:
        size += len(block)
        lines += block.count(b"\n")
        if size > limits.PIPED_LOG or lines > limits.PIPED_LINES:
            raise BuildLogError(
                f"the piped log exceeds the limit of {limits.format_bytes(limits.PIPED_LOG)} or "
                f"{limits.PIPED_LINES:,} lines; save the log as a file, and give the file",
                name,
                code="file-too-large",
            )
        yield block


def _iterate_unpacked(stream: BinaryIO, name: str) -> Iterator[bytes]:
    head = _read_bytes(stream, 6)
    while 0 < len(head) < 6 and (more := _read_bytes(stream, 6 - len(head))):
        head += more
    if compression.find_magic(head):
        limit = limits.LOG
        # A stream in memory has no descriptor.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            size = os.fstat(stream.fileno()).st_size
            limit = min(limit, limits.max_unpacked_size(size, limits.UNPACKED_LOG_RATIO))
        read = functools.partial(_read_bytes, stream)
        yield from compression.unpack_blocks(
            head, read, name, limit, whole=False, error=BuildLogError
        )
        return
    total = 0
    while head:
        total += len(head)
        limits.check_size(total, limits.LOG, f"{name}: the log has", BuildLogError)
        yield head
        head = _read_bytes(stream, compression.BLOCK)


def _read_bytes(stream: BinaryIO, size: int) -> bytes:
    """Return up to `size` bytes; empty at the end.

    If another process made standard input non-blocking, wait until bytes are available.
    """
    read: Callable[[int], bytes | None] = stream.read
    try:
        while (data := read(size)) is None:
            select.select([stream], [], [])
        return data
    except (ValueError, TypeError, gzip.BadGzipFile, EOFError) as error:
        raise BuildLogError(
            f"cannot be read: {error}", name_source(stream), code="file-unreadable"
        ) from error


def _convert_to_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Convert UTF-16 with a byte-order mark (as PowerShell's ``>`` writes) to UTF-8.

    Other text passes unchanged, without a UTF-8 byte-order mark.
    """
    first = next(blocks, b"")
    encoding = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(first[:2])
    if encoding is None:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in itertools.chain([first[2:]], blocks):
        yield decoder.decode(block).encode("utf-8", "replace")


def split_lines(blocks: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yield groups of lines without line ends, each line cut to limits.LOG_LINE bytes.

    Carriage returns are kept.
    """
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        rest = rest[: limits.LOG_LINE]
        yield [line[: limits.LOG_LINE] for line in lines]
    if rest:
        yield [rest]


# Fields that `merge_build` combines. All other fields are copied from the other build if they are
# empty in the first build.
_COMBINED_FIELDS = frozenset(
    ("source", "files", "messages", "notes", "lines", "layers", "listing", "second_layers", "gaps")
)


def merge_build(build: Build, other: Build) -> None:
    """Complete `build` in place with the contents of another file of the same build.

    Raises:
        BuildLogError: The files are of different builds.
    """
    _check_same_build(build, other)
    is_listing = build.source in (BuildSource.LAYER_JSON, BuildSource.LAYER_INFO)
    if (is_listing and other.source.is_log) or build.source == BuildSource.PROFILE_JSON:
        build.source = other.source
    build.files.extend(other.files)
    empty = Build()
    for name in {field.name for field in fields(Build)} - _COMBINED_FIELDS:
        if getattr(build, name) == getattr(empty, name):
            setattr(build, name, getattr(other, name))
    build.messages.extend(other.messages)
    build.notes.extend(other.notes)
    for name in ("total", "timing", "marked", "blank", "unexplained"):
        setattr(build.lines, name, getattr(build.lines, name) + getattr(other.lines, name))
    _merge_listings(build, other)
    build.gaps = list(dict.fromkeys(g for g in (*build.gaps, *other.gaps) if g.kind.is_unread))
    set_build_status(build)


def _merge_listings(build: Build, other: Build) -> None:
    """Make the more detailed listing the main listing, and keep the other as second listing.

    A layer without a line number gets the number of the layer with the same name in the other
    listing.
    """
    best, second = build, other
    if _rate_listing(other.layers) > _rate_listing(build.layers):
        best, second = other, build
    second_layers = [*second.layers, *build.second_layers, *other.second_layers]
    lines = {layer.name: layer.line for layer in second.layers if layer.line}
    build.layers, build.listing = best.layers, best.listing
    build.second_layers = second_layers
    for layer in build.layers:
        layer.line = layer.line or lines.get(layer.name, 0)


def _rate_listing(layers: list[BuiltLayer]) -> tuple[bool, bool, int]:
    has_tensors = any(layer.inputs or layer.outputs for layer in layers)
    has_details = any("ParameterType" in layer.extras or layer.onnx_names for layer in layers)
    return has_tensors, has_details, len(layers)


def _check_same_build(build: Build, other: Build) -> None:
    names = f"{' + '.join(build.files)} and {' + '.join(other.files)}"
    if build.tensorrt and other.tensorrt and build.tensorrt != other.tensorrt:
        raise BuildLogError(
            f"{names} are of different builds: TensorRT {build.tensorrt} and {other.tensorrt}. "
            "Give files of the same build",
            code="different-versions",
        )
    first, second = _layer_names(build), _layer_names(other)
    smaller, common = min(len(first), len(second)), len(first & second)
    if smaller >= 3 and 2 * common < smaller:
        raise BuildLogError(
            f"{names} are of different builds: only {common} of {smaller} layer names occur in "
            "both. Give files of the same build",
            code="different-builds",
        )


def _layer_names(build: Build) -> set[str]:
    return {layer.name for layer in build.layers} or {row.name for row in build.profile_rows}


def read_build(*sources: LogSource) -> Build:
    """Read one build from one or several files.

    Args:
        sources: Paths, ``-`` for standard input, or binary streams. Each may be a verbose log
            (trtexec, Python API, polygraphy, onnxruntime), ``--dumpLayerInfo`` text, a layer JSON
            (``--exportLayerInfo``) or a profile JSON (``--exportProfile``), plain or compressed
            with gzip, xz or zstd.

    Returns:
        The build. Its ``missing`` lists the sections that are missing or cut off.

    Raises:
        BuildLogError: A file cannot be read or has another format, or the files are of different
            builds.
    """
    if not sources:
        raise BuildLogError(
            "no build log given; give the path of a log or layer JSON", code="missing-argument"
        )
    build, *others = map(_read_source, sources)
    for other in others:
        merge_build(build, other)
    return build


def _read_source(source: LogSource) -> Build:
    name = name_source(source)
    with open_blocks(source) as blocks:
        head = b""
        for block in blocks:
            head += block
            if len(head) >= 4096:
                break
        if _is_binary(head):
            raise _not_a_log_error(head, name)
        is_wrapped = are_json_lines(head)
        if _looks_like_json(head) and not is_wrapped:
            build = read_json(_read_all(head, blocks, name), name)
        else:
            reader, stripper = LogReader(), LogPrefixStripper()
            for lines in split_lines(itertools.chain([head], blocks)):
                reader.feed(stripper.strip(unwrap_records(lines) if is_wrapped else lines))
            build = reader.finish()
            _check_is_log(build, head, name)
    build.files = [name]
    set_build_status(build)
    return build


def _is_binary(head: bytes) -> bool:
    """Return whether a file is binary by its first bytes, so that it need not be read to the end.

    A log may contain zero bytes, for example the headers of Docker's streams, or zeros before the
    text of a log file that was truncated while it was written.
    """
    start = head.lstrip(b"\0")[:16]
    return b"\0" in head and bool(_CONTROL.search(start)) and not _PRODUCT.search(head)


def _looks_like_json(head: bytes) -> bool:
    # A log's timestamp begins with a bracket too, but a digit or letter follows.
    start = head.lstrip()[:200]
    if start[:1] == b"{":
        return not start.startswith(b"{ForeignNode")
    return start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b'"', b"[", b"]")


def _read_all(head: bytes, rest: Iterator[bytes], name: str) -> bytes:
    pieces, size = [head], len(head)
    for block in rest:
        size += len(block)
        if size > limits.JSON_FILE:
            raise BuildLogError(
                f"exceeds {limits.JSON_FILE >> 20} MiB, the limit for a layer listing or a "
                "profile; give the file of a single build",
                name,
                code="file-too-large",
            )
        pieces.append(block)
    return b"".join(pieces)


def _check_is_log(build: Build, head: bytes, name: str) -> None:
    if build.lines.total == build.lines.blank:
        raise BuildLogError(
            "is empty; save the output of 'trtexec --verbose' again", name, code="empty"
        )
    contents = (
        build.trace,
        build.layers,
        build.milestones,
        build.command,
        build.performance,
        build.profile_rows,
        build.options,
        build.gpu,
        build.reformats,
        build.headings,
        build.messages,
        build.tensorrt,
        build.placement,
        build.parse.nodes,
        build.parse.initializers,
        build.lines.marked,
    )
    if not any(contents) and build.tactics == TacticCounts():
        raise _not_a_log_error(head, name)


def _not_a_log_error(head: bytes, name: str) -> BuildLogError:
    if b"\0" in head:
        reason, code = "is a binary file; give the text output of trtexec", "binary-file"
    else:
        reason = "contains no line of TensorRT; give the output of 'trtexec --verbose'"
        code = "wrong-format"
    return BuildLogError(f"{reason}, or --exportLayerInfo's JSON", name, code=code)

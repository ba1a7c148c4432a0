"""Reading TensorRT builds: logs, layer listings and profiles, recognised by content, unpacked and merged."""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import itertools
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from typing import IO, BinaryIO, cast

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.json_files import read_json
from qdqtool.buildlog.log import LogPrefixStripper, LogReader
from qdqtool.buildlog.summary import set_build_status
from qdqtool.buildlog.types import Build, BuiltLayer, ParseSection, TacticCounts
from qdqtool.errors import BuildLogError
from qdqtool.util import compression, limits
from qdqtool.util.files import open_input, record_input

__all__ = ["LogSource", "read_build"]


LogSource = str | os.PathLike[str] | IO[bytes]

BLOCK = compression.BLOCK
MAX_LINE = limits.LOG_LINE
MAX_JSON = limits.JSON_FILE


def source_name(source: LogSource) -> str:
    """What to call a source in messages."""
    if isinstance(source, (str, os.PathLike)):
        return "standard input" if str(source) == "-" else str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "stream"


@contextlib.contextmanager
def open_blocks(source: LogSource) -> Iterator[Iterator[bytes]]:
    """Gives the unpacked bytes of a source, block by block, as UTF-8 (UTF-16 with a byte-order mark is recoded).

    It is a path, ``-`` for standard input, or a binary stream; gzip, xz and zstd are recognised by their content.
    """
    name = source_name(source)
    try:
        with contextlib.ExitStack() as stack:
            if not isinstance(source, (str, os.PathLike)):
                stream: BinaryIO = cast(BinaryIO, source)
            elif str(source) == "-":
                if sys.stdin is None:
                    raise BuildLogError(
                        "standard input is closed; give a file, or pipe the log in",
                        code="input-closed",
                    )
                stream = sys.stdin.buffer
                with contextlib.suppress(OSError, ValueError):  # a replaced stdin has no descriptor
                    record_input(stream.fileno())
            else:
                stream = cast(
                    BinaryIO, stack.enter_context(open_input(source, error=BuildLogError))
                )
            piped = False
            with contextlib.suppress(OSError, ValueError, AttributeError):  # bytes in memory
                piped = not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            unpacked = _unpack(stream, name)
            yield _recode(_limit_size(unpacked, name) if piped else unpacked)
    except OSError as error:
        raise BuildLogError(
            f"cannot be read: {error.strerror or error}", name, code="file-unreadable"
        ) from error


def _limit_size(source: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The same blocks, while they are no more than a pipe may give."""
    size = lines = 0
    for block in source:
        size += len(block)
        lines += block.count(b"\n")
        if size > limits.PIPED_LOG or lines > limits.PIPED_LINES:
            raise BuildLogError(
                f"a pipe gives more than {limits.format_bytes(limits.PIPED_LOG)} or {limits.PIPED_LINES:,} lines, "
                "the limit; write the log into a file, and give that",
                name,
                code="file-too-large",
            )
        yield block


def _unpack(stream: BinaryIO, name: str) -> Iterator[bytes]:
    head = _read_bytes(stream, 6)
    while 0 < len(head) < 6 and (more := _read_bytes(stream, 6 - len(head))):
        head += more
    if compression.find_magic(head):
        limit = limits.LOG
        with contextlib.suppress(OSError, ValueError, AttributeError):  # bytes in memory
            size = os.fstat(stream.fileno()).st_size
            limit = min(limit, limits.unpacked_limit(size, limits.UNPACKED_LOG_RATIO))
        read = functools.partial(_read_bytes, stream)
        yield from compression.unpack(head, read, name, limit, whole=False, error=BuildLogError)
        return
    total = 0
    while head:
        total += len(head)
        limits.check_size(total, limits.LOG, f"{name}: the log has", BuildLogError)
        yield head
        head = _read_bytes(stream, BLOCK)


def _read_bytes(stream: BinaryIO, size: int) -> bytes:
    """The next bytes, none at the end; a stream that does not wait for them (another process may have set that of
    standard input) is waited for."""
    read: Callable[[int], bytes | None] = stream.read
    try:
        while (data := read(size)) is None:
            select.select([stream], [], [])
        return data
    except (ValueError, TypeError, gzip.BadGzipFile, EOFError) as error:
        raise BuildLogError(
            f"cannot be read: {error}", source_name(stream), code="file-unreadable"
        ) from error


def _recode(source: Iterator[bytes]) -> Iterator[bytes]:
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


def split_lines(source: Iterator[bytes]) -> Iterator[list[bytes]]:
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


def merge(build: Build, other: Build) -> None:
    """Adds to ``build`` what ``other``, read from another file of the same build, knows more."""
    _check_same(build, other)
    listed = build.source in (BuildSource.LAYER_JSON, BuildSource.LAYER_INFO)
    if (listed and other.source.is_log) or build.source == BuildSource.PROFILE_JSON:
        build.source = other.source
    build.files.extend(other.files)
    for key in (
        "tensorrt",
        "targets",
        "device",
        "command",
        "flags",
        "gpu",
        "options",
        "trace",
        "headings",
        "milestones",
        "placement",
        "bindings",
        "reformats",
        "seconds",
        "passed",
        "performance",
    ):
        if not getattr(build, key) and getattr(other, key):
            setattr(build, key, getattr(other, key))
    build.is_rtx = build.is_rtx or other.is_rtx
    if build.parse == ParseSection():
        build.parse = other.parse
    if other.profile_rows and not build.profile_rows:
        build.profile_rows, build.profile_total_ms = other.profile_rows, other.profile_total_ms
        build.iterations = other.iterations
    if not build.tactics.timed:
        build.tactics = other.tactics
    if build.memory.activation is None:
        build.memory = other.memory
    build.messages.extend(other.messages)
    build.notes.extend(other.notes)
    for key in ("total", "timing", "marked", "blank", "unexplained"):
        setattr(build.lines, key, getattr(build.lines, key) + getattr(other.lines, key))
    # The richer listing counts, with the line numbers of the other.
    rich, poor = (
        (other, build)
        if _rate_listing(other.layers) > _rate_listing(build.layers)
        else (build, other)
    )
    build.layers, second, build.listing = rich.layers, poor.layers, rich.listing
    places = {layer.name: layer.line for layer in second if layer.line}
    for layer in build.layers:
        layer.line = layer.line or places.get(layer.name, 0)
    build.second_layers = [*second, *build.second_layers, *other.second_layers]
    build.gaps = list(dict.fromkeys(g for g in (*build.gaps, *other.gaps) if g.kind.is_unread))
    set_build_status(build)


def _rate_listing(layers: list[BuiltLayer]) -> tuple[bool, bool, int]:
    typed = any(layer.inputs or layer.outputs for layer in layers)
    detailed = any("ParameterType" in layer.extras or layer.onnx_names for layer in layers)
    return typed, detailed, len(layers)


def _check_same(build: Build, other: Build) -> None:
    names = f"{' + '.join(build.files)} and {' + '.join(other.files)}"
    if build.tensorrt and other.tensorrt and build.tensorrt != other.tensorrt:
        raise BuildLogError(
            f"{names} are of different builds: TensorRT {build.tensorrt} and {other.tensorrt}",
            code="different-versions",
        )
    first = {layer.name for layer in build.layers} or {row.name for row in build.profile_rows}
    second = {layer.name for layer in other.layers} or {row.name for row in other.profile_rows}
    fewer, common = min(len(first), len(second)), len(first & second)
    if fewer >= 3 and 2 * common < fewer:
        raise BuildLogError(
            f"{names} are of different builds: {common} of {fewer} layer names in common",
            code="different-builds",
        )


def read_build(*given: LogSource) -> Build:
    """Reads one build from one or several files of it.

    Args:
        given: Paths, ``-`` for standard input, or binary streams. Each may be a verbose log (trtexec, Python API,
            polygraphy, onnxruntime), ``--dumpLayerInfo`` text, a layer JSON (``--exportLayerInfo``) or a profile JSON
            (``--exportProfile``), plain or compressed with gzip or xz.

    Returns:
        The build; ``missing`` says which sections are absent or cut off.

    Raises:
        BuildLogError: A file cannot be read, is none of these, or two files are not of one build.
    """
    if not given:
        raise BuildLogError("no build log given", code="missing-argument")
    build, *others = (_read_source(one) for one in given)
    for other in others:
        merge(build, other)
    return build


def _read_source(one: LogSource) -> Build:
    name = source_name(one)
    with open_blocks(one) as read:
        head, skipped = b"", 0
        for block in read:
            head += block
            if len(head) >= 4096 and head.strip():
                break
            if len(head) > BLOCK:  # nothing but blank so far
                skipped += head.count(b"\n")
                head = b""
        if not head.strip():
            raise BuildLogError("is empty", name, code="empty")
        if _looks_like_json(head):
            build = read_json(_read_all(head, read, name), name)
        else:
            reader, carrier = LogReader(), LogPrefixStripper()
            reader.build.lines.total = reader.build.lines.blank = skipped
            for lines in split_lines(itertools.chain([head], read)):
                reader.feed(carrier.strip(lines))
            build = reader.finish()
            _check_is_log(build, head, name)
    build.files = [name]
    set_build_status(build)
    return build


def _looks_like_json(head: bytes) -> bool:
    """A JSON begins with a bracket; so does a log's timestamp, but a digit, ``V``, ``T`` or the like follows that."""
    start = head.lstrip()[:200]
    if start[:1] == b"{":
        return not start.startswith(b"{ForeignNode")
    return start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b'"', b"[", b"]")


def _read_all(head: bytes, rest: Iterator[bytes], name: str) -> bytes:
    pieces, size = [head], len(head)
    for block in rest:
        size += len(block)
        if size > MAX_JSON:
            raise BuildLogError(
                f"a JSON of over {MAX_JSON >> 20} MiB cannot be a listing or a profile",
                name,
                code="file-too-large",
            )
        pieces.append(block)
    return b"".join(pieces)


def _check_is_log(build: Build, head: bytes, name: str) -> None:
    signs = (
        "trace",
        "layers",
        "milestones",
        "command",
        "performance",
        "profile_rows",
        "options",
        "gpu",
        "reformats",
        "headings",
        "messages",
        "tensorrt",
        "placement",
    )
    if (
        any(getattr(build, sign) for sign in signs)
        or build.parse.nodes
        or build.parse.initializers
        or build.lines.marked
        or build.tactics != TacticCounts()
    ):
        return
    wrong, code = (
        ("is a binary file; give the text that trtexec printed", "binary-file")
        if b"\0" in head
        else (
            "no line of TensorRT is in it; give a log made with 'trtexec --verbose'",
            "wrong-format",
        )
    )
    raise BuildLogError(f"{wrong}, or --exportLayerInfo's JSON", name, code=code)

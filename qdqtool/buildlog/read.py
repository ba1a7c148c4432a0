"""Reading TensorRT builds: logs, layer listings and profiles, recognised by their content."""

from __future__ import annotations

from collections.abc import Iterator

from qdqtool.buildlog import source as sources
from qdqtool.buildlog.complete import judge
from qdqtool.buildlog.layerjson import read_json
from qdqtool.buildlog.log import LogReader
from qdqtool.buildlog.merge import merge
from qdqtool.buildlog.prefix import Carrier
from qdqtool.buildlog.source import LogSource
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError

__all__ = ["LogSource", "read_build"]


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
        raise BuildLogError("no build log given")
    build: Build | None = None
    for one in given:
        read = _read(one)
        if build is None:
            build = read
        else:
            merge(build, read)
    assert build is not None
    return build


def _read(one: LogSource) -> Build:
    name = sources.name_of(one)
    with sources.blocks(one) as blocks:
        head, skipped = b"", 0
        for block in blocks:
            head += block
            if len(head) >= 4096 and head.strip():
                break
            if len(head) > sources.BLOCK:  # nothing but blank so far
                skipped += head.count(b"\n")
                head = b""
        if not head.strip():
            raise BuildLogError(f"{name}: is empty")
        if _looks_like_json(head):
            build = read_json(_whole(head, blocks, name), name)
        else:
            reader, carrier = LogReader(), Carrier()
            reader.skip_blank(skipped)
            for lines in sources.lines_of(_chained(head, blocks)):
                reader.feed(carrier.strip(lines))
            build = reader.finish()
            _check_is_log(build, head, name)
    build.files = [name]
    judge(build)
    return build


def _chained(head: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield from rest


def _looks_like_json(head: bytes) -> bool:
    """A JSON begins with a bracket; so does a log's timestamp, but a digit, ``V``, ``T`` or the like follows that."""
    start = head.lstrip()[:200]
    if start[:1] == b"{":
        return not start.startswith(b"{ForeignNode")
    return start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b'"', b"[", b"]")


def _whole(head: bytes, rest: Iterator[bytes], name: str) -> bytes:
    pieces, size = [head], len(head)
    for block in rest:
        size += len(block)
        if size > sources.MAX_JSON:
            raise BuildLogError(f"{name}: a JSON of over {sources.MAX_JSON >> 20} MiB cannot be a listing or a profile")
        pieces.append(block)
    return b"".join(pieces)


def _check_is_log(build: Build, head: bytes, name: str) -> None:
    known = (
        build.trace
        or build.layers
        or build.parse.nodes
        or build.milestones
        or build.command
        or build.performance
        or build.profile_rows
        or build.options
        or build.gpu
        or build.tactics.anything
        or build.lines.marked
        or build.reformats
        or build.headings
        or build.messages
        or build.tensorrt
        or build.placement
        or build.parse.initializers
    )
    if known:
        return
    if b"\0" in head:
        raise BuildLogError(
            f"{name}: is a binary file; give the text that trtexec printed, or --exportLayerInfo's JSON"
        )
    raise BuildLogError(
        f"{name}: no line of TensorRT is in it; give a log made with 'trtexec --verbose', or --exportLayerInfo's JSON"
    )

"""What is before a message: timestamp, level, logger name, in every spelling met.

``[10/31/2023-17:53:35] [V] [TRT] message``   trtexec
``[11/04/2022-10:11:12] [TRT] [V] message``   Python API, 8.0 and later
``[TensorRT] VERBOSE: message``, ``TensorRT VERBOSE message``   Python API, 7 and earlier
``[V] [TRT] message``, ``[V] message``   polygraphy, and logs whose stamps were cut off
``[2022-12-30 12:38:57 VERBOSE] message``   onnxruntime's TensorRT provider, behind its own stamp or alone
``VERBOSE: [TRT]: message``   DeepStream; ``DEBUG: [Torch-TensorRT ...] - message``   Torch-TensorRT
``[TRT]  message``   jetson-inference and others that print no level

In front of all of that a log may carry what a container, CI service or journal puts before each line: :class:`Carrier`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_STAMP = rb"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]"
_BY_TENSORRT = (
    rb"(?:"
    rb"(?P<stamp>" + _STAMP + rb") \[(?:TRT\] \[(?P<python>[VIWEF])\]|(?P<level>[VIWEF])\](?: \[TRT\])?)"
    rb"|\[(?P<bare>[VIWEF])\](?: \[TRT\])?"
    rb"|\[TRT\] \[(?P<trt>[VIWEF])\]"
    rb"|(?:\[TensorRT\] |TensorRT |\[TRT\] )(?P<word>VERBOSE|INFO|WARNING|ERROR|INTERNAL_ERROR):?"
    rb"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?P<ort>VERBOSE|INFO|WARNING|ERROR)\]"
    rb"|(?P<stream>VERBOSE|DEBUG|INFO|WARNING|ERROR): \[(?:TRT|Torch-TensorRT[^\]]{0,60})\](?: -|:)?"
    rb"|\[TRT\] {1,20}"
    rb") ?"
)
_PREFIX = re.compile(rb"\s*" + _BY_TENSORRT)
_SECOND = re.compile(
    _STAMP + rb" \[(?:[VIWEF]|TRT)\]|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:VERBOSE|INFO|WARNING|ERROR)\]"
)
_COLOUR = re.compile(rb"\x1b(?:\[[0-9;?]{0,32}[A-Za-z]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\))")


def clean(line: bytes) -> bytes:
    """The line without colour codes and its trailing carriage return."""
    if line.endswith(b"\r"):
        line = line[:-1]
    return _COLOUR.sub(b"", line) if b"\x1b" in line else line


def split(line: bytes) -> tuple[str, bytes, bytes]:
    """Level (``V I W E`` or an empty string), timestamp (or empty) and message of a clean line.

    Text of another program that was printed before the stamp on the same line is dropped.
    """
    match = _PREFIX.match(line)
    if match is None:
        inner = _SECOND.search(line, 0, 400)
        match = _PREFIX.match(line, inner.start()) if inner else None
        if match is None:
            return "", b"", line
    level = match["level"] or match["python"] or match["bare"] or match["trt"] or match["word"] or match["ort"]
    level = level or match["stream"] or b"V"
    letter = "E" if level in (b"F", b"INTERNAL_ERROR") else "V" if level == b"DEBUG" else chr(level[0])
    return letter, match["stamp"] or b"", line[match.end() :]


_BEGINS = re.compile(  # of what TensorRT writes: its prefix, or a line that it prints without one
    rb"(?:^|(?<=[\s|:>\]]))(?:" + _BY_TENSORRT + rb"|&&&& |Layer\(|Name: |Running: |Swapping |Removing |Eliminating |"
    rb"Parsing node: |Searching for input: |QDQ graph |\[GpuLayer\] )"
)
_PIECES = re.compile(rb"(\w+)|(\s+)|([^\w\s]+)")
_LONGEST = 200  # bytes of a carrier's prefix
_SAMPLE = 2000  # lines
_SHARE = 0.8  # of the lines, that have it


class Carrier:
    """What stands before each line of a log as a container, CI service or journal kept it: timestamp, service, pod.

    It is known by its form, words and numbers aside: what most lines of TensorRT have in front of TensorRT's own words,
    and most lines at all begin with.
    """

    def __init__(self) -> None:
        self._form: re.Pattern[bytes] | None = None
        self._decided = False

    def strip(self, lines: list[bytes]) -> list[bytes]:
        """The lines without it. It is looked for until lines of TensorRT come."""
        for at in range(0, len(lines), _SAMPLE):
            if self._decided:
                break
            self._look([clean(line) for line in lines[at : at + _SAMPLE] if line.strip()])
        form = self._form
        if form is None:
            return lines
        return [line[found.end() :] if (found := form.match(line)) else line for line in map(clean, lines)]

    def _look(self, lines: list[bytes]) -> None:
        heads = (line[: m.start()] for line in lines if (m := _BEGINS.search(line, 0, 2 * _LONGEST)))
        forms = Counter(_form_of(head) for head in heads if len(head) <= _LONGEST and not is_marked(head))
        if not forms:
            return
        self._decided = True
        form, count = forms.most_common(1)[0]
        if form and count > 1:
            found = re.compile(form)
            if sum(found.match(line) is not None for line in lines) >= _SHARE * len(lines):
                self._form = found


def _form_of(head: bytes) -> bytes:
    """A prefix as an expression: any word or number for a word or number; empty for blanks alone."""
    if not head.strip():
        return b""
    pieces: Iterable[re.Match[bytes]] = _PIECES.finditer(head)
    return b"".join(rb"\w+" if p[1] else rb"\s+" if p[2] else re.escape(p[3]) for p in pieces)


def is_marked(line: bytes) -> bool:
    """Whether the beginning of a line says that TensorRT, or a tool that logs for it, wrote it."""
    head = line[:160]
    return b"[TRT]" in head or b"TensorRT" in head or b":onnxruntime" in head


def interleaved(message: bytes) -> tuple[bytes, bytes]:
    """Cuts a message where another stamped one was printed into it; the second is empty when that did not happen."""
    found = _SECOND.search(message)
    return (message[: found.start()], message[found.start() :]) if found else (message, b"")


def seconds_of(stamp: bytes) -> int | None:
    """Seconds since some midnight of a ``[MM/DD/YYYY-HH:MM:SS]`` stamp; days count as 86 400 s within a month."""
    try:
        day, hours, minutes, seconds = int(stamp[4:6]), int(stamp[12:14]), int(stamp[15:17]), int(stamp[18:20])
    except ValueError:
        return None
    return ((day * 24 + hours) * 60 + minutes) * 60 + seconds

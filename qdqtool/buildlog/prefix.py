"""What is before a message: timestamp, level, logger name, in every spelling met.

``[10/31/2023-17:53:35] [V] [TRT] message``   trtexec
``[11/04/2022-10:11:12] [TRT] [V] message``   Python API, 8.0 and later
``[TensorRT] VERBOSE: message``, ``TensorRT VERBOSE message``   Python API, 7 and earlier
``[V] [TRT] message``, ``[V] message``   polygraphy, and logs whose stamps were cut off
``[2022-12-30 12:38:57 VERBOSE] message``   onnxruntime's TensorRT provider, behind its own stamp or alone
``VERBOSE: [TRT]: message``   DeepStream; ``DEBUG: [Torch-TensorRT ...] - message``   Torch-TensorRT
``[TRT]  message``   jetson-inference and others that print no level
"""

from __future__ import annotations

import re

_STAMP = rb"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]"
_PREFIX = re.compile(
    rb"\s*(?:"
    rb"(?P<stamp>" + _STAMP + rb") \[(?:TRT\] \[(?P<python>[VIWEF])\]|(?P<level>[VIWEF])\](?: \[TRT\])?)"
    rb"|\[(?P<bare>[VIWEF])\](?: \[TRT\])?"
    rb"|\[TRT\] \[(?P<trt>[VIWEF])\]"
    rb"|(?:\[TensorRT\] |TensorRT |\[TRT\] )(?P<word>VERBOSE|INFO|WARNING|ERROR|INTERNAL_ERROR):?"
    rb"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?P<ort>VERBOSE|INFO|WARNING|ERROR)\]"
    rb"|(?P<stream>VERBOSE|DEBUG|INFO|WARNING|ERROR): \[(?:TRT|Torch-TensorRT[^\]]{0,60})\](?: -|:)?"
    rb"|\[TRT\] {1,20}"
    rb") ?"
)
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

"""Logs with a JSON object per line: json-file logs of Docker, JSON formatters of Python."""

from __future__ import annotations

import json
from typing import Any

_TEXTS = ("log", "message", "msg", "textPayload", "text")  # keys under which loggers write texts
_LEVELS = ("levelname", "level", "severity")


def are_json_lines(head: bytes) -> bool:
    """Return whether the first line of a file is a complete JSON object with a message."""
    first, separator, _ = head.lstrip().partition(b"\n")
    return bool(separator) and _read_record(first) is not None


def unwrap_records(lines: list[bytes]) -> list[bytes]:
    """Return lines with the level and message of each JSON record in place of the record.

    Lines that are not JSON records are returned unchanged.
    """
    unwrapped: list[bytes] = []
    for line in lines:
        record = _read_record(line)
        unwrapped += [line] if record is None else record
    return unwrapped


def _read_record(line: bytes) -> list[bytes] | None:
    """Return the lines of a JSON record's message, with its level; None for any other line."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    text = _find_text(record, _TEXTS)
    if text is None:
        return None
    level = _find_text(record, _LEVELS)
    prefix = f"{level.upper()}: " if level else ""
    return [f"{prefix}{part}".encode("utf-8", "replace") for part in text.splitlines() or [""]]


def _find_text(record: Any, keys: tuple[str, ...]) -> str | None:
    if not isinstance(record, dict):
        return None
    return next((record[key] for key in keys if isinstance(record.get(key), str)), None)

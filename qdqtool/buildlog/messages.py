"""Warnings and errors of a log: one record for each wording, with the lines that belong to it."""

from __future__ import annotations

import re
from collections.abc import Callable

from qdqtool.buildlog.records import Message
from qdqtool.buildlog.types import Build

_EXCEPTION = re.compile(
    r"(?:[\w.]*(?:Error|Exception): |Traceback \(most recent call last\)|trtexec: |Aborted|Segmentation)"
)
_MAX_MESSAGES = 2000
_MAX_TEXT = 2000


class Messages:
    """Collects messages in ``build.messages``; ``keep`` says whether there is room for another record."""

    def __init__(self, build: Build, keep: Callable[[str], bool]) -> None:
        self._build = build
        self._keep = keep
        self._known: dict[tuple[str, str], Message] = {}
        self._last: Message | None = None

    def add(self, level: str, text: str, line: int) -> None:
        """Takes a warning or error."""
        key = (level, text[:500])
        found = self._known.get(key)
        if found is None:
            found = Message(level, text[:_MAX_TEXT], line, 0)
            if len(self._known) < _MAX_MESSAGES and self._keep(text[:_MAX_TEXT]):
                self._known[key] = found
                self._build.messages.append(found)
        found.count += 1
        self._last = found

    def continued(self, text: str, line: int) -> bool:
        """An unstamped line after a warning or error belongs to it; an exception is an error of its own."""
        if _EXCEPTION.match(text):
            self.add("E", text, line)
            return True
        if self._last is None:
            return False
        if len(self._last.text) < _MAX_TEXT:
            self._last.text += "\n" + text[:500]
        return True

    def end(self) -> None:
        """A stamped line of another kind: what follows belongs to no message."""
        self._last = None

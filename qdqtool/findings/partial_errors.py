"""Find the entry of an error text of which only a part is known, such as a line cut off."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace

from qdqtool.findings.codes import CODES
from qdqtool.findings.errors import KNOWN_ERRORS, KnownError, lookup

_MIN_LENGTH = 18  # minimum number of equal characters
_LITERAL = re.compile(r"(?:[\w ,:;'\"/=!<>`-]|\\[^\w])+(?![?*{+])")  # part of a regular expression
_UNKNOWN = "Whether the complete text is this error, because the given text is only a part of it."


def find_by_part(text: str) -> KnownError | None:
    """Return the entry whose text has the most characters in common with a part of an error text.

    The part may lack the beginning and the end of the error text, and may begin or end with words
    that are not in the table, such as the name of a node. None if fewer than 18 characters are
    equal. Among equal matches, the most general entry is returned.
    """
    part = _normalize(text)
    length, _, index = max(
        (_count_common(part, complete), position, index)
        for position, (complete, index) in enumerate(_known_texts())
    )
    if length < _MIN_LENGTH:
        return None
    entry = KNOWN_ERRORS[index]
    return replace(entry, unknown=f"{_UNKNOWN} {entry.unknown}".rstrip())


def _normalize(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .\"'`")


@functools.cache
def _known_texts() -> tuple[tuple[str, int], ...]:
    """Return the texts in the patterns of the table and in finding codes, with the entry's index.

    Specific entries are before general ones, as in the table.
    """
    return tuple((text, i) for text, i in _iterate_texts() if len(text) >= _MIN_LENGTH)


def _iterate_texts() -> Iterator[tuple[str, int]]:
    positions = {entry.id: i for i, entry in enumerate(KNOWN_ERRORS)}
    for code in CODES.values():
        for _, text in code.error:
            entry = lookup(text)
            if entry is not None and entry.id in positions:
                yield _normalize(text), positions[entry.id]
    for i, entry in enumerate(KNOWN_ERRORS):
        for literal in _LITERAL.findall(entry.pattern):
            yield _normalize(re.sub(r"\\(\W)", r"\1", literal)), i


def _count_common(part: str, complete: str) -> int:
    """Return how many characters of a text, from its start or to its end, are also in a part."""
    if part in complete:
        return len(part)
    lengths = range(min(len(part), len(complete)), _MIN_LENGTH - 1, -1)
    return next(
        (n for n in lengths if part.endswith(complete[:n]) or part.startswith(complete[-n:])), 0
    )

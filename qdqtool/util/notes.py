"""Notes and warnings of results.

A note is a string that can be printed. Programs and tests read the code and the values of a note
and never its text::

    Note(f"{cache}: resumed after {images} images", code="resumed", cache=cache, images=images)

Parameters of the library are written in backticks (`` `clock` ``, `` `clock=1200` ``). The command
line prints the option instead (``--clock``).
"""

from collections.abc import Mapping
from typing import Any, Self


class Note(str):
    """A note or a warning of a result.

    Attributes:
        code: Identifier of the note, such as ``"resumed"``; empty for a text read from a file.
        values: Values in the text, by name.
    """

    code: str
    values: Mapping[str, Any]

    def __new__(cls, text: str = "", *, code: str = "", **values: Any) -> Self:
        """Create a note; additional keyword arguments become `values`."""
        note = super().__new__(cls, text)
        note.code = code
        note.values = values
        return note

    @classmethod
    def from_text(cls, text: str) -> "Note":
        """Return a text as a note without code; return a note unchanged."""
        return text if isinstance(text, Note) else cls(text)

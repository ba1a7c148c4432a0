"""Notes and warnings of results.

A note is a string that can be printed. Programs and tests read its code and its values, never its
text::

    Note(f"{cache}: resumed after {images} images", code="resumed", cache=cache, images=images)

A parameter of the library is written in backticks (`` `clock` ``, `` `clock=1200` ``). The command
line prints the option of that name instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class Note(str):
    """A note or a warning of a result.

    Attributes:
        code: Identifier of the note, such as ``"resumed"``. Empty for texts of files and users.
        values: Values in the text, by name.
    """

    code: str
    values: Mapping[str, Any]

    def __new__(cls, text: str = "", *, code: str = "", **values: Any) -> Self:
        """Create a note; additional keyword arguments become its `values`."""
        note = super().__new__(cls, text)
        note.code = code
        note.values = values
        return note

    @classmethod
    def from_text(cls, text: str) -> Note:
        """Return a text as a note without code; return a note unchanged."""
        return text if isinstance(text, Note) else cls(text)

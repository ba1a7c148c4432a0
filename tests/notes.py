from collections.abc import Iterable
from typing import Any

from qdqtool.util.notes import Note


class ExpectedNote:
    """Equal to notes with this code and these values; other values are ignored."""

    def __init__(self, code: str, values: dict[str, Any]) -> None:
        self.code, self.values = code, values

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Note)
            and other.code == self.code
            and self.values.items() <= other.values.items()
        )

    def __hash__(self) -> int:
        return hash(self.code)

    def __repr__(self) -> str:
        values = "".join(f", {name}={value!r}" for name, value in self.values.items())
        return f"note({self.code!r}{values})"


def note(code: str, /, **values: Any) -> ExpectedNote:
    return ExpectedNote(code, values)


def note_codes(notes: Iterable[str]) -> list[str]:
    return [note.code if isinstance(note, Note) else "" for note in notes]

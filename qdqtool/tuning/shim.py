"""Notes and errors from plain text, until notes take it themselves."""

import re
from typing import Any

from qdqtool import errors
from qdqtool.util import notes
from qdqtool.util.said import Said


def as_said(text: str) -> Said:
    return Said().saying(_as_template(text), {})


def _as_template(text: str) -> str:
    return re.sub(r"`(\w+)`", r"{`\1`}", text.replace("{", "{{").replace("}", "}}"))


class Note(notes.Note):
    def __new__(cls, text: str = "", code: str = "", **values: Any) -> "Note":
        note = super().__new__(cls, text)
        if code:
            note.remark = notes.Remark[code.upper().replace("-", "_")]
            note.template, note.values = _as_template(text), values
        return note


class QdqtoolError(errors.QdqtoolError):
    def __init__(self, reason: str = "", path: str = "", **fields: str) -> None:
        super().__init__(as_said(reason), path, **fields)


class DataError(errors.DataError):
    def __init__(self, reason: str = "", path: str = "", **fields: str) -> None:
        super().__init__(as_said(reason), path, **fields)

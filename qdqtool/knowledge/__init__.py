"""What is known, as data: finding codes, error texts, meanings of passes, ways to build. One loader with a schema.

Each ``<name>.toml`` is a table whose fields are those of a dataclass; a text over several lines is one paragraph.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from qdqtool.knowledge.tables import Made, table

__all__ = ["Made", "entry", "paragraph", "table"]

T = TypeVar("T")
_AS_WRITTEN = ("pattern",)  # spaces count


def paragraph(text: str) -> str:
    """A text of several lines on one."""
    return " ".join(text.split())


def entry(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """A dataclass made of one entry.

    Args:
        kind: The dataclass: its fields are the schema. A text, a truth value, a list of texts (as a tuple), an
            enumeration by its value, or what is of the field's type already.
        given: The fields by name.
        where: The entry's name, for messages.

    Raises:
        ValueError: A field is missing, unknown, empty or of another type.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = given.keys() - fields.keys()
    required = (
        name for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    missing = [name for name in required if name not in given]
    if unknown or missing:
        wrong = f"unknown {', '.join(sorted(unknown))}" if unknown else f"no {', '.join(missing)}"
        raise ValueError(f"{where}: {wrong}")
    hints = _hints(kind)
    return kind(**{name: _value(hints[name], value, name, where) for name, value in given.items()})


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def _value(wanted: Any, value: Any, name: str, entry_name: str) -> Any:
    where = f"{entry_name}.{name}"
    if isinstance(value, str) and name not in _AS_WRITTEN:
        value = paragraph(value)
    options = [o for o in getattr(wanted, "__args__", ()) if o is not type(None)]
    if getattr(wanted, "__origin__", None) is not tuple and len(options) == 1:
        wanted = options[0]  # X | None
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return wanted(value)
    if getattr(wanted, "__origin__", None) is tuple and isinstance(value, list | tuple):
        if any(not isinstance(v, options[0] if isinstance(options[0], type) else object) for v in value):
            raise ValueError(f"{where}: {value!r} is not a list of {options[0].__name__}")
        return tuple(value)
    if value == "" or (isinstance(wanted, type) and type(value) is not wanted):
        raise ValueError(f"{where}: {value!r} is not a {getattr(wanted, '__name__', wanted)}")
    return value

"""Read the package's own tables: TOML with a schema, and tab-separated files."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_VERBATIM_FIELDS = ("pattern",)  # fields whose line breaks and spaces are kept
_type_hints = functools.cache(get_type_hints)


def read_sections(path: Path) -> Mapping[str, Any]:
    """Return the sections of a TOML file; each section is parsed on first access.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    text = path.read_text(encoding="utf-8")
    head, *parts = re.split(r"^(?=\[[\w-]+\]$)", text, flags=re.MULTILINE)
    sections = {part[1 : part.index("]")]: part for part in parts}
    if len(sections) < len(parts) or tomllib.loads(head):
        return tomllib.loads(text)
    return LazyEntries(sections, lambda section, part: tomllib.loads(part)[section])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a tab-separated file; the first line has the column names.

    Lines that begin with ``#`` are comments.
    """
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"), strict=True)) for line in lines[1:]]


class LazyEntries(Mapping[str, T]):
    """Mapping whose entries are created on first access, because a command needs only a few."""

    def __init__(self, sources: Mapping[str, Any], make: Callable[[str, Any], T]) -> None:
        self._sources, self._make = sources, make
        self._entries: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            self._entries[name] = self._make(name, self._sources[name])
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def join_lines(text: str) -> str:
    """Join the lines of a text: replace each run of white space by one space."""
    return " ".join(text.split())


def make_entry(kind: type[T], fields: Mapping[str, Any], entry_name: str) -> T:
    """Create a dataclass from the fields of an entry in a table.

    Args:
        kind: Dataclass, whose fields are the schema. A field may be a text, a boolean, a list of
            texts (as a tuple), an enumeration (by value), or an object of the field's type.
        fields: Values by field name.
        entry_name: Name of the entry for messages.

    Raises:
        ValueError: A field is missing, unknown, empty or has another type.
    """
    schema = dataclasses.fields(kind)  # type: ignore[arg-type]
    unknown = fields.keys() - {field.name for field in schema}
    required = [field.name for field in schema if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in fields]
    if unknown or missing:
        reason = f"unknown field {', '.join(sorted(unknown))}"
        if not unknown:
            reason = f"missing field {', '.join(missing)}"
        raise ValueError(f"{entry_name}: {reason}")
    hints = _type_hints(kind)  # type: ignore[arg-type]
    return kind(
        **{name: _convert(hints[name], value, name, entry_name) for name, value in fields.items()}
    )


def _convert(hint: Any, value: Any, name: str, entry_name: str) -> Any:
    """Convert a value of a table to the type of a record's field.

    Raises:
        ValueError: The value is empty or has another type.
    """
    if isinstance(value, str) and name not in _VERBATIM_FIELDS:
        value = join_lines(value)
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        element = kinds[0] if isinstance(kinds[0], type) else object
        if all(isinstance(v, element) for v in value):
            return tuple(value)
        raise ValueError(f"{entry_name}.{name}: {value!r} is not a list of {kinds[0].__name__}")
    kind = kinds[0] if len(kinds) == 1 else hint  # X for a field of type X | None
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return kind(value)
        if type(value) is kind and value != "":
            return value
    elif value != "":
        return value
    kind_name = getattr(kind, "__name__", kind)
    raise ValueError(f"{entry_name}.{name}: {value!r} is not a {kind_name}")

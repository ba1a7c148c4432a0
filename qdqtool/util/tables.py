"""Read the tables of this package: TOML with a schema, and tab-separated files."""

import enum
import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
_type_hints = functools.cache(get_type_hints)


def read_sections(path: Path) -> Mapping[str, Any]:
    """Return the sections of a TOML file.

    If all sections begin with ``[name]``, each section is parsed when it is first accessed.

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
    """Mapping that creates each entry on first access, because a command needs only a few."""

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


def make_entry(kind: Callable[..., T], fields: Mapping[str, Any], entry_name: str) -> T:
    """Create a dataclass or named tuple from the fields of an entry in a table.

    Lists become tuples. A text becomes a member of an enumeration if the field has this type.

    Args:
        kind: Class whose fields are the schema.
        fields: Values by field name.
        entry_name: Name of the entry for messages.

    Raises:
        ValueError: A field is missing, unknown or empty, or an enumeration has no such value.
    """
    hints = _type_hints(kind)
    values = {
        name: _convert_value(value, hints.get(name), name, entry_name)
        for name, value in fields.items()
    }
    try:
        return kind(**values)
    except TypeError as error:  # a field is missing or unknown
        raise ValueError(f"{entry_name}: {error}") from None


def _convert_value(value: Any, hint: Any, name: str, entry_name: str) -> Any:
    if value == "":
        raise ValueError(f"{entry_name}.{name}: the text is empty; write a text, or leave it out")
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and name != "pattern":  # spaces in patterns are kept
        value = join_lines(value)
    for choice in (hint, *get_args(hint)):  # the arguments of `X | None`
        if isinstance(choice, type) and issubclass(choice, enum.Enum):
            return choice(value)
    return value

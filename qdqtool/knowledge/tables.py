"""Reads the tables that are a part of the package, and evidence as data: what shows a rule, where to read it."""

from __future__ import annotations

import enum
import functools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from qdqtool.base.records import record
from qdqtool.types import Evidence

T = TypeVar("T")
_AS_WRITTEN = ("pattern",)  # spaces count
_hints = functools.cache(get_type_hints)


def table(name: str) -> Mapping[str, Any]:
    """The contents of ``<name>.toml``, its texts as written; each section is read when it is asked for.

    Raises:
        FileNotFoundError: There is no such table.
    """
    text = Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8")
    head, *parts = re.split(r"^(?=\[[\w-]+\]$)", text, flags=re.MULTILINE)
    sections = {part[1 : part.index("]")]: part for part in parts}
    if len(sections) < len(parts) or tomllib.loads(head):
        return tomllib.loads(text)
    return Made(sections, lambda section, part: tomllib.loads(part)[section])


def rows(path: Path) -> list[dict[str, str]]:
    """The lines of a file of fields divided by tabs, by the names in its first line; ``#`` begins a remark."""
    lines = [
        line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")
    ]
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"), strict=True)) for line in lines[1:]]


class Made(Mapping[str, T]):
    """Entries by name, each made when it is asked for: a command needs few."""

    def __init__(self, given: Mapping[str, Any], make: Callable[[str, Any], T]) -> None:
        self._given, self._make = given, make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            self._made[name] = self._make(name, self._given[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def paragraph(text: str) -> str:
    """A text of several lines on one."""
    return " ".join(text.split())


def entry(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """A record made of one entry.

    Args:
        kind: The record: its fields are the schema. A text, a truth value, a list of texts (as a tuple), an
            enumeration by its value, or what is of the field's type already.
        given: The fields by name.
        where: The entry's name, for messages.

    Raises:
        ValueError: A field is missing, unknown, empty or of another type.
    """
    fields, defaults = kind._fields, kind._defaults  # type: ignore[attr-defined]
    unknown = given.keys() - set(fields)
    missing = [name for name in fields if name not in defaults and name not in given]
    if unknown or missing:
        wrong = f"unknown {', '.join(sorted(unknown))}" if unknown else f"no {', '.join(missing)}"
        raise ValueError(f"{where}: {wrong}")
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], value, name, where) for name, value in given.items()})


def _value(wanted: Any, value: Any, name: str, entry_name: str) -> Any:
    where = f"{entry_name}.{name}"
    if isinstance(value, str) and name not in _AS_WRITTEN:
        value = paragraph(value)
    options = [o for o in getattr(wanted, "__args__", ()) if o is not type(None)]
    listed = getattr(wanted, "__origin__", None) is tuple
    if not listed and len(options) == 1:
        wanted = options[0]  # X | None
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return wanted(value)
    if listed and isinstance(value, list | tuple):
        if any(
            not isinstance(v, options[0] if isinstance(options[0], type) else object) for v in value
        ):
            raise ValueError(f"{where}: {value!r} is not a list of {options[0].__name__}")
        return tuple(value)
    if value == "" or (isinstance(wanted, type) and type(value) is not wanted):
        raise ValueError(f"{where}: {value!r} is not a {getattr(wanted, '__name__', wanted)}")
    return value


# Evidence ------------------------------------------------------------------------------------------------------------


@record
class Case:
    """One thing that TensorRT does.

    Attributes:
        name: Short and unique within its pass or operator, for instance ``stem-pool``.
        evidence: Seen in a build, documented by NVIDIA, or assumed.
        says: What happens, in one sentence.
        builds: Where it was seen: ``<build>:<line>`` of the build's log, or ``<build>`` for an engine listing. The
            builds are described in ``qdqtool/knowledge/builds.tsv``.
        source: What documents it, or why it is assumed and what would refute it.
        about: What a line of the log that shows it names: operators as in ONNX, kinds of lines as in ``trt.trace``.
            What all cases of a pass have in common need not be there.
    """

    name: str
    evidence: Evidence
    says: str
    builds: tuple[str, ...] = ()
    source: str = ""
    about: tuple[str, ...] = ()

    __eq__, __hash__ = (
        object.__eq__,
        object.__hash__,
    )  # distinguished by identity, many times in a simulation

    def build_names(self) -> tuple[str, ...]:
        """The builds that show it, each once, without line numbers."""
        return tuple(dict.fromkeys(b.partition(":")[0] for b in self.builds))


def seen(name: str, says: str, *builds: str, source: str = "", about: tuple[str, ...] = ()) -> Case:
    """A case that a real build shows; at least one build has to be named."""
    if not builds:
        raise ValueError(f"case '{name}' is said to be seen and names no build")
    return Case(name, Evidence.SEEN, says, builds, source, about)


def documented(name: str, says: str, source: str, about: tuple[str, ...] = ()) -> Case:
    """A case that NVIDIA documents, or that a user's report shows without its log."""
    return Case(name, Evidence.DOCUMENTED, says, (), source, about)


def assumed(name: str, says: str, source: str, about: tuple[str, ...] = ()) -> Case:
    """A case that no available build shows; ``source`` says why it is taken so and what would refute it."""
    return Case(name, Evidence.ASSUMED, says, (), source, about)

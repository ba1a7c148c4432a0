"""Reads the tables that are a part of the package, and evidence as data: what shows a rule, where to read it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from qdqtool.base.records import record
from qdqtool.types import Evidence

T = TypeVar("T")


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
    lines = [line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
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
    """

    name: str
    evidence: Evidence
    says: str
    builds: tuple[str, ...] = ()
    source: str = ""

    __eq__, __hash__ = object.__eq__, object.__hash__  # distinguished by identity, many times in a simulation

    def build_names(self) -> tuple[str, ...]:
        """The builds that show it, each once, without line numbers."""
        return tuple(dict.fromkeys(b.partition(":")[0] for b in self.builds))


def seen(name: str, says: str, *builds: str, source: str = "") -> Case:
    """A case that a real build shows; at least one build has to be named."""
    if not builds:
        raise ValueError(f"case '{name}' is said to be seen and names no build")
    return Case(name, Evidence.SEEN, says, builds, source)


def documented(name: str, says: str, source: str) -> Case:
    """A case that NVIDIA documents, or that a user's report shows without its log."""
    return Case(name, Evidence.DOCUMENTED, says, (), source)


def assumed(name: str, says: str, source: str) -> Case:
    """A case that no available build shows; ``source`` says why it is taken so and what would refute it."""
    return Case(name, Evidence.ASSUMED, says, (), source)

"""Reads the tables that are a part of the package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

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

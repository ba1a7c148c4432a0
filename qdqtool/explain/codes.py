"""The table of finding codes, from ``qdqtool/knowledge/codes.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qdqtool.explain.knowledge import Code, Holds
from qdqtool.knowledge import entry, table


def _code(name: str, given: dict[str, Any]) -> Code:
    """One entry.

    Raises:
        ValueError: A field is missing, unknown or of another type.
    """
    holds = [entry(Holds, h, f"{name}.holds") for h in given.get("holds", ())]
    if given.get("passes"):
        holds = [part for h in holds for part in h.by_target()]
    error = tuple(given.get("error", {}).items())
    return entry(Code, {**given, "code": name, "holds": tuple(holds), "error": error}, name)


class _Codes(Mapping[str, Code]):
    """All entries, each made when it is asked for: a prediction needs few."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._made: dict[str, Code] = {}

    def __getitem__(self, name: str) -> Code:
        if name not in self._made:
            self._made[name] = _code(name, self._given[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


CODES: Mapping[str, Code] = _Codes(table("codes"))


def get(code: str) -> Code:
    """The entry of a code.

    Raises:
        KeyError: There is no such code.
    """
    return CODES[code]


def find(text: str) -> Code | None:
    """The entry of a code however it is typed (``skip_float``, ``Skip-Float``); None when there is none."""
    return CODES.get(text.strip().upper().replace("_", "-").replace(" ", "-"))


def similar(text: str, count: int = 3) -> list[str]:
    """The codes spelled most like ``text``, the nearest first."""
    wanted = text.strip().upper().replace("_", "-")
    import difflib

    close = difflib.get_close_matches(wanted, CODES, n=count, cutoff=0.5)
    part = [c for c in CODES if wanted and (wanted in c or set(wanted.split("-")) & set(c.split("-")))]
    return list(dict.fromkeys([*close, *part]))[:count]

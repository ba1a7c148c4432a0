"""The table of finding codes, from ``qdqtool/knowledge/codes.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdqtool.explain.knowledge import Code, Holds
from qdqtool.knowledge import Made, entry, table


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


CODES: Mapping[str, Code] = Made(table("codes"), _code)


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

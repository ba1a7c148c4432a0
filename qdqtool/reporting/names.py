"""How names and numbers are shown on the page: without hidden characters, and of a length that a page can bear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from qdqtool.buildlog.names import parts
from qdqtool.render.predict_text import ms as _ms
from qdqtool.text import as_line, counted

LONGEST = 400  # characters of a name; of a longer one both ends, which distinguish it from others
LONGEST_TEXT = 4_000


def shown(name: str, longest: int = LONGEST) -> str:
    """A name for the page; of a long one the beginning, the end and how much is left out."""
    if len(name) > longest:
        half = longest // 2 - 20
        name = f"{name[:half]} …{len(name) - 2 * half} characters… {name[-half:]}"
    return as_line(name)


def message(text: str) -> str:
    """A message or a fix for the page."""
    return shown(text, LONGEST_TEXT)


def short(name: str, width: int) -> str:
    """The end of a name, which distinguishes nodes, in at most ``width`` characters."""
    name = shown(name)
    return name if len(name) <= width else f"…{name[-(width - 1):]}"


def plain(name: str, op: str) -> str:
    """A node's name without its operator at the end and the slash in front: ``model.2/cv1/conv``."""
    head, slash, last = name.rpartition("/")
    return (head if slash and last.startswith(op) and head else name).removeprefix("/")


class Spoken:
    """Which nodes the names of TensorRT's log lines refer to."""

    def __init__(self, names: Iterable[str]) -> None:
        known = set(names)
        # Splitting looks through all known names; only those that hold a joint can be split wrongly.
        self._joined = frozenset(n for n in known if any(j in n for j in (" + ", " || ", ", ", "PWN(")))

    def of(self, name: str) -> list[str]:
        """The ONNX names in a layer's or a tensor's name."""
        return parts(name, self._joined).bases if name else []


# Numbers, and the filters of the template ---------------------------------------------------------------------------


NONE = "–"


def ms(value: float | None) -> str:
    """``0.681``: milliseconds with three digits that count."""
    return NONE if value is None or not math.isfinite(value) else _ms(value, unit=False)


def amount(value: float | None) -> str:
    """``1.23 M``: decimal multiples."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {sign}"
    return f"{value:.3g}"


def number(value: float | None) -> str:
    """At most four digits that count."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share in percent."""
    if value is None or not math.isfinite(value):
        return NONE
    return "0 %" if value == 0 else "< 0.01 %" if value < 1e-4 else f"{100 * value:.3g} %"


def sort_key(value: float | None) -> str:
    """What a table sorts by: the number in full, nothing where it is not known."""
    return "" if value is None or not math.isfinite(value) else repr(float(value))


FILTERS: dict[str, Callable[..., Any]] = {
    "ms": ms, "amount": amount, "number": number, "percent": percent, "sort_key": sort_key, "plural": counted,
}

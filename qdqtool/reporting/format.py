"""How numbers stand on the page; the filters of the template."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qdqtool.render.log_text import count
from qdqtool.render.time_text import ms as _ms

NONE = "–"
plural = count


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
    "ms": ms, "amount": amount, "number": number, "percent": percent, "sort_key": sort_key, "plural": plural,
}

"""JSON as everybody reads and writes it here: only numbers that JSON has, and none that no float can hold."""

from __future__ import annotations

import json
import math
from typing import Any

_DIGITS = 20  # of the largest whole number of 64 bits; a longer one is a float


def json_text(data: Any, *, compact: bool = False) -> str:
    """JSON text of an answer. What JSON has no number for (NaN, infinity: damaged scales bring them) is ``null``.

    Args:
        data: Of JSON's types.
        compact: Without line breaks and spaces.
    """
    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 1}
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, **layout)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def parse_json(text: str | bytes, *, strict: bool = True, infinities: bool = False) -> Any:
    """What a JSON of unknown origin holds. A number that no float can hold is None, as are NaN and infinity, which
    JSON does not have; whole numbers beyond 64 bits are floats.

    Args:
        text: The JSON.
        strict: Whether control characters in strings are refused.
        infinities: Whether NaN and infinity are kept, as Python writes them.

    Raises:
        ValueError: It is none.
        RecursionError: It is nested too deeply.
    """
    if infinities:
        return json.loads(text, strict=strict, parse_int=_integer, parse_float=_number)
    return json.loads(text, strict=strict, parse_int=_integer, parse_float=_number, parse_constant=lambda name: None)


def _integer(text: str) -> int | float | None:
    return int(text) if len(text) <= _DIGITS else _number(text)


def _number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None

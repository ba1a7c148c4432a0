"""Format results as JSON, and parse untrusted JSON."""

import math
from collections.abc import Iterable
from typing import Any

from qdqtool.util import limits
from qdqtool.util.process import pause_gc

Json = dict[str, Any]

_MAX_DIGITS = 20  # longer integers exceed 64 bits and become floats


def json_text(data: Any, *, compact: bool = False) -> str:
    """Format values as JSON text, with ``null`` for NaN and infinity.

    Args:
        data: Values of JSON's types.
        compact: Whether to leave out line breaks and spaces.
    """
    import json  # imported here to keep `qdqtool --help` fast

    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 1}
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_replace_non_finite(data), ensure_ascii=False, allow_nan=False, **layout)


def _replace_non_finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _replace_non_finite(value) for key, value in data.items()}
    return (
        [_replace_non_finite(value) for value in data] if isinstance(data, list | tuple) else data
    )


class TooManyValues(ValueError):
    """The JSON has more than `limits.JSON_VALUES` values."""


def parse_json(text: str | bytes, *, strict: bool = True, infinities: bool = False) -> Any:
    """Parse untrusted JSON with a limit on the number of values.

    Integers with more than 20 digits become floats. Numbers beyond the range of floats become None.
    NaN and infinity become None unless `infinities` is True.

    Args:
        text: JSON text.
        strict: Whether control characters in strings are an error.
        infinities: Whether ``NaN`` and ``Infinity``, which Python writes, are kept.

    Raises:
        ValueError: The text is not JSON, or has too many values (:class:`TooManyValues`).
        RecursionError: The JSON is nested too deeply.
    """
    import json

    # A JSON text has at most one value more than separators.
    separators: Iterable[Any] = b",[{" if isinstance(text, bytes) else ",[{"
    if (
        len(text) > limits.JSON_VALUES
        and sum(text.count(separator) for separator in separators) > limits.JSON_VALUES
    ):
        raise TooManyValues(f"more than {limits.JSON_VALUES:,} values")
    constant = float if infinities else lambda _name: None
    with pause_gc():
        return json.loads(
            text,
            strict=strict,
            parse_int=_parse_integer,
            parse_float=_parse_number,
            parse_constant=constant,
        )


def _parse_integer(text: str) -> int | float | None:
    return int(text) if len(text) <= _MAX_DIGITS else _parse_number(text)


def _parse_number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None

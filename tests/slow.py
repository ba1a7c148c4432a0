from collections.abc import Sequence
from typing import Any

import pytest


def slow_after(count: int, rows: Sequence[Any]) -> list[Any]:
    rest = (
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
        for row in rows[count:]
    )
    return [*rows[:count], *rest]

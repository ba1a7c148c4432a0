"""Tables under tests/data: a row is a line, its cells are divided by tabs."""

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (DATA / name).read_text("utf-8").splitlines()]


def cases(name: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """For ``pytest.mark.parametrize(*cases(name))``: the columns' names from the first row; then cells are literals."""
    names, *values = rows(f"tables/{name}.tsv")
    return names, [tuple(ast.literal_eval(cell) for cell in row) for row in values]


def in_turn(
    names: str | Sequence[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, in one test: what it raises names the row.

    For tables of rows that take a millisecond: a test of its own takes two or three more.
    """
    many = not isinstance(names, str) or "," in names
    columns = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)
    assert rows

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            for row in rows:
                given = dict(zip(columns, row if many else (row,), strict=True))
                try:
                    test(**others, **given)
                except pytest.skip.Exception as error:
                    raise AssertionError(
                        f"those behind the row {given} would be skipped as well"
                    ) from error
                except BaseException as error:
                    error.add_note(f"in the row {given}")
                    raise

        left = [p for p in inspect.signature(test).parameters.values() if p.name not in columns]
        run.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return run

    return decorate

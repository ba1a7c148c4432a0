"""Tables under tests/data: a row is a line, its cells are divided by tabs."""

import ast
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (DATA / name).read_text("utf-8").splitlines()]


def cases(name: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """For ``pytest.mark.parametrize(*cases(name))``: the columns' names from the first row; then cells are literals."""
    names, *values = rows(f"tables/{name}.tsv")
    return names, [tuple(ast.literal_eval(cell) for cell in row) for row in values]

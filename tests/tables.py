"""Tables of texts under tests/data: a row is a line, its cells are divided by tabs."""

from pathlib import Path


def rows(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (Path(__file__).parent / "data" / name).read_text("utf-8").splitlines()]

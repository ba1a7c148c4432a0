"""Tables under tests/data: a row is a line, its cells are divided by tabs."""

from pathlib import Path

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[list[str]]:
    return [line.split("\t") for line in (DATA / name).read_text("utf-8").splitlines()]

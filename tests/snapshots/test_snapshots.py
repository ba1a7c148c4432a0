import pytest

from qdqtool.commands import COMMANDS
from tests.snapshots import HOME, difference, render
from tests.snapshots.cases import SNAPSHOTS


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_snapshot(name: str) -> None:
    diff = difference(name, render(SNAPSHOTS[name]()))
    if diff:
        pytest.fail(
            f"{diff}\n\nIf the new text is right: python -m tests.snapshots --update {name}",
            pytrace=False,
        )


def test_snapshot_of_each_command() -> None:
    assert SNAPSHOTS.keys() >= COMMANDS.keys()
    assert SNAPSHOTS.keys() == {path.stem for path in HOME.glob("*.txt")}


def test_difference_shows_both_texts() -> None:
    diff = difference("gpus", render({"$ qdqtool gpus": "no GPU"}))
    assert "+no GPU" in diff and any(
        line.startswith("-") and "RTX 3060" in line for line in diff.splitlines()
    )

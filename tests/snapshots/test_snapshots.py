import pytest

from qdqtool.commands import COMMANDS
from qdqtool.findings.rules import reason_classes
from qdqtool.reasons.scales import ScalesDiffer
from tests.snapshots import HOME, difference, render
from tests.snapshots.cases import SNAPSHOTS
from tests.wording import findings, kinds_worded


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


# Computing these findings takes seconds, and the snapshot of findings has the same.


def test_wording_covers_each_kind() -> None:
    """Different scales on one tensor are reported only by the conversion that they cause."""
    assert kinds_worded() == set(reason_classes()) - {ScalesDiffer}


def test_only_findings_that_advise_a_command_name_the_program() -> None:
    """The Python interface returns the same messages."""
    listed = [f for _, listed in findings() for f in listed]
    codes = {f.code for f in listed if "qdqtool" in f.message + f.fix}
    assert codes == {"NO-QDQ", "ACT-SCALE", "NORM-PIECES", "FLAG-FP16"}

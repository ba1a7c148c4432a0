"""Printed comparisons equal the recorded ones."""

import json
from pathlib import Path

import pytest

from tests.wording import DATA, of_comparisons


def test_printed_comparisons_equal_the_recorded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = json.loads(DATA.read_text("utf-8"))["comparisons"]
    assert of_comparisons(Path()) == expected, "to record them again: python -m tests.wording"

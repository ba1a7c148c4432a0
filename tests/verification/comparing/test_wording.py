"""What `compare` prints of two sides is what was agreed on."""

import json
from pathlib import Path

import pytest

from tests.wording import DATA, of_comparisons


def test_wording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = json.loads(DATA.read_text("utf-8"))["comparisons"]
    found = of_comparisons(Path())
    assert found == expected, "if it is meant so: python -m tests.wording"

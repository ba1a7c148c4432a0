"""The words of each kind of record are those that were agreed on."""

from __future__ import annotations

import json

import pytest

from tests.explain.wording import DATA, wording

EXPECTED = json.loads(DATA.read_text("utf-8"))


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return wording()


@pytest.mark.parametrize("kind", EXPECTED)
def test_wording(found: dict[str, list[str]], kind: str) -> None:
    assert found.get(kind) == EXPECTED[kind], "if it is meant so: python -m tests.explain.wording"

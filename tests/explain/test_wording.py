"""The words of findings are those that were agreed on; all other tests look at codes and data."""

from __future__ import annotations

import json

import pytest

from tests.wording import DATA, of_findings

EXPECTED = json.loads(DATA.read_text("utf-8"))["findings"]


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return of_findings()


@pytest.mark.parametrize("network", EXPECTED)
def test_wording(found: dict[str, list[str]], network: str) -> None:
    assert found.get(network) == EXPECTED[network], "if it is meant so: python -m tests.wording"

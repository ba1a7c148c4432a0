"""The words of each kind of record are those that were agreed on, and most kinds have some here."""

from __future__ import annotations

import importlib
import json

import pytest

from qdqtool.explain import messages
from tests.explain.wording import DATA, wording

MISSING = {
    "ActivationScales", "AxisOpset", "BiasQuantized", "CompilerFault", "ConcatScales", "DeconvolutionFloat", "GpuLacks",
    "InsideActivation", "IntegerOperator", "LargeKernel", "OutsideRules", "PoolingOneSide", "ProductOfActivations",
    "ScaleCount", "ScaleHalf", "ScaleRank", "ScaleShape1", "StoredReadElsewhere", "TypesDiffer", "WeightsOutput",
    "ZeroPointCount",
}  # fmt: skip
EXPECTED = json.loads(DATA.read_text("utf-8"))


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return wording()


@pytest.mark.parametrize("kind", EXPECTED)
def test_wording(found: dict[str, list[str]], kind: str) -> None:
    assert found.get(kind) == EXPECTED[kind], "if it is meant so: python -m tests.explain.wording"


def test_kinds_without_words_here(found: dict[str, list[str]]) -> None:
    """Only ever to become fewer; a new kind gets a network in tests/explain/wording.py."""
    for room in messages._ROOMS.values():
        importlib.import_module(room)
    assert {kind.__name__ for kind in messages._WORDINGS} - set(found) <= MISSING

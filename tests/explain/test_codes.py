"""The table of codes is complete, and says for every target where it comes from."""

import pytest

from qdqtool.explain import codes
from qdqtool.explain.errors import KNOWN
from qdqtool.explain.knowledge import ALL_TARGETS
from qdqtool.fixing.api import FIXABLE
from qdqtool.types import Severity


@pytest.mark.parametrize("entry", codes.CODES.values(), ids=lambda c: c.code)
def test_every_entry_is_whole(entry):
    for text in (entry.title, entry.cause, entry.tensorrt, entry.log, entry.fix):
        assert text and "  " not in text
    assert entry.holds
    named = [t for h in entry.holds for t in h.targets]
    assert len(named) == len(set(named)), "a target has two entries"
    assert set(named) <= set(ALL_TARGETS)
    assert all(h.source for h in entry.holds)


def test_automatic_codes_are_those_that_fix_knows():
    """ADD-ACT and PAD-SPLIT are tried, and kept only where the simulation sees a gain: nothing is promised."""
    assert {c.code for c in codes.CODES.values() if c.automatic} == set(FIXABLE) - {"ADD-ACT", "PAD-SPLIT"}


def test_known_errors_name_codes_that_exist():
    for known in KNOWN:
        for code in known.codes:
            assert code in codes.CODES, (known.id, code)


@pytest.mark.parametrize(("typed", "code"), [("skip-float", "SKIP-FLOAT"), ("SKIP_FLOAT", "SKIP-FLOAT"),
                                             (" zp nonzero ", "ZP-NONZERO")])
def test_codes_are_found_however_they_are_typed(typed, code):
    found = codes.find(typed)
    assert found is not None and found.code == code


def test_similar_codes():
    assert codes.similar("SKIP-FLAOT")[0] == "SKIP-FLOAT"
    assert "CONCAT-SCALE" in codes.similar("concat")
    assert codes.similar("%%%") == []


def test_severity_by_target():
    entry = codes.get("WEIGHT-PREQUANT")
    assert entry.severity_on("trt8.4") == Severity.ERROR
    assert entry.severity_on("trt8.5") == Severity.WARNING
    assert entry.on("trt10") is None


def test_error_text_by_target():
    entry = codes.get("ZP-NONZERO")
    assert "zeroPt must be all zeros" in entry.error_text("trt8.5")
    assert "kENABLE_UINT8" in entry.error_text("trt11")
    assert "kENABLE_UINT8" in entry.error_text("rtx1.7")

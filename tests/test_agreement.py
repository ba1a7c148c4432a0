"""The parts of a verification: published fields, and access by name as 0.1 allowed it."""

from __future__ import annotations

import pytest

from qdqtool.agreement import (
    BuildFacts,
    BuildSource,
    ConversionCounts,
    ConvolutionCounts,
    LayerCounts,
    Mismatch,
    MismatchKind,
    TraceCounts,
)
from qdqtool.verified import Verification

# Keys of 0.1, which others read; more may come.
PUBLISHED = {
    "build": {"source", "files", "tensorrt", "device", "complete", "missing"},
    "convolutions": {"total", "agree", "unknown", "unknown_names"},
    "layers": {"total", "agree"},
    "trace": {"predicted", "built", "agree"},
    "conversions": {"predicted", "built"},
}


def test_published_fields_are_there() -> None:
    result = Verification(
        BuildFacts(BuildSource.LAYER_JSON, ("a.json",), "8.5.2", None, True),
        ConvolutionCounts(3, 2, 1, ("c",)), LayerCounts(5, 4), TraceCounts(7, 6, 5, 4), ConversionCounts(1, 2),
        mismatches=[Mismatch(MismatchKind.LAYER, "l", {"name": "l"}, {}, "differs", 9)],
    )  # fmt: skip
    data = result.as_json()
    for part, keys in PUBLISHED.items():
        assert keys <= set(data[part]), part
    assert data["build"] == {"source": "layer-json", "files": ["a.json"], "tensorrt": "8.5.2", "device": None,
                             "complete": True, "missing": []}
    assert data["convolutions"] == {"total": 3, "agree": 2, "unknown": 1, "unknown_names": ["c"]}
    assert data["conversions"] == {"predicted": 1, "built": 2}
    assert data["mismatches"] == [{"kind": "layer", "name": "l", "predicted": {"name": "l"}, "built": {},
                                   "why": "differs", "line": 9}]
    assert type(data["build"]["source"]) is str


def test_a_builder_that_was_run_tells_its_status() -> None:
    data = BuildFacts(BuildSource.TENSORRT_RTX, status="refused", message="no").as_json()
    assert (data["status"], data["message"]) == ("refused", "no")


def test_fields_by_name() -> None:
    counts = ConvolutionCounts(3, 2, 1, ("c",))
    assert counts["agree"] == 2
    with pytest.raises(KeyError):
        counts["none"]

"""Evidence as data: every case names builds that are described, and lines that say what it says they do."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from qdqtool.trt import rules
from qdqtool.trt.builds import BUILDS
from qdqtool.trt.builds_page import page
from qdqtool.types import Evidence
from tests.trt.evidence import CASES

ROOT = Path(__file__).parents[2]
LOGS = Path(os.environ.get("QDQTOOL_SHARED", ROOT.parent / "shared")) / "evidence"
BY_LINE = [(name, build) for name, case in rules.cases().items() for build in case.builds if ":" in build]
# What the lines of rules say that are logged without their pass's name.
WORDS = {
    "MergeLayers": "Merging layers", "SliceRemoval": "slice", "ConcatRemoval": "concatenation|Retargeting|Generating",
    "Shuffle": "VanillaSwapWithPreceedingDQ", "Concat": "SplitQAcrossPrecedingFanIn",
    "Conv": "QuantizeDoubleInputNodes", "Gemm": "MatMulToConvTransform", "Relu": "Relu", "LeakyRelu": "LeakyRelu",
    "Reshape": "Reshape", "Flatten": "Flatten", "Slice": "Slice", "MaxPool": "MaxPool", "Resize": "Resize",
    "Upsample": "Resize",
}


def test_every_build_is_described() -> None:
    named = {n for case in rules.cases().values() for n in case.build_names()}
    assert named <= BUILDS.keys()
    assert set(CASES) == {b.name for b in BUILDS.values() if b.graph}


@pytest.mark.parametrize("name", rules.cases())
def test_case_says_what_it_rests_on(name: str) -> None:
    case = rules.cases()[name]
    assert case.says.endswith(".")
    if case.evidence == Evidence.SEEN:
        assert case.builds
    else:
        assert case.source and not case.builds
    if case.evidence == Evidence.ASSUMED:
        assert not case.source.endswith(".")


def test_names_are_unique() -> None:
    for kind in rules.passes():
        names = [c.name for c in kind.cases]
        assert len(names) == len(set(names)), kind


@pytest.mark.skipif(not LOGS.is_dir(), reason="the published logs are not at hand")
@pytest.mark.parametrize(("name", "build"), BY_LINE)
def test_the_line_says_so(name: str, build: str) -> None:
    folder, _, number = build.partition(":")
    source = next(p for p in (LOGS / folder / "log.txt", LOGS / folder / "lines.txt") if p.exists())
    line = source.read_text(errors="replace").splitlines()[int(number) - 1]
    owner = name.partition("/")[0]
    assert re.search(WORDS.get(owner, owner.replace("MyelinOptimization", "Myelin")), line), line


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "builds.md").read_text(encoding="utf-8")
    assert written == page(), "run python -m qdqtool.trt.builds_page docs/builds.md"

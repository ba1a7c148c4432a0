"""Real builds for tests: outside the repository, found through QDQTOOL_SHARED or beside the checkout."""

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def folder() -> Path:
    """The folder of recorded builds; skips the test when it is not there."""
    for root in (os.environ.get("QDQTOOL_SHARED"), _ROOT.parent / "shared"):
        if root and (Path(root) / "evidence").is_dir():
            return Path(root) / "evidence"
    pytest.skip("the recorded builds are not here (set QDQTOOL_SHARED)")


def build_file(case: str, name: str = "log.txt") -> Path:
    """One recorded file; skips the test when it is not there."""
    path = folder() / case / name
    if not path.exists():
        pytest.skip(f"{case}/{name} is not among the recorded builds")
    return path

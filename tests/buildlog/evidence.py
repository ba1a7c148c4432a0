"""Recorded builds outside of the repository, in QDQTOOL_SHARED or next to the checkout."""

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def folder() -> Path:
    for root in (os.environ.get("QDQTOOL_SHARED"), _ROOT.parent / "shared"):
        if root and (Path(root) / "evidence").is_dir():
            return Path(root) / "evidence"
    pytest.skip("the recorded builds are missing (set QDQTOOL_SHARED)")


def build_file(case: str, name: str = "log.txt") -> Path:
    path = folder() / case / name
    if not path.exists():
        pytest.skip(f"{case}/{name} is not among the recorded builds")
    return path

"""Pictures behind URLs: the same samples as from a folder, and what is said of those that cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import collect
from calibration.dataset import InputSpec
from calibration.images import open_data
from calibration.urls import is_url
from qdqtool.errors import DataError
from tests.calibration.nets import conv_net, stored, write_pictures

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")

SPEC = InputSpec("images", (1, 3, 16, 16))
ROOT = "memory://qdqtool-test"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_pictures(tmp_path / "in", 4)
    write_pictures(tmp_path / "in" / "sub", 2, suffix=".jpg")
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "in" / ".hidden.png").write_bytes(b"left out")
    (tmp_path / "in" / "notes.txt").write_text("left out")
    with stored(tmp_path / "in", ROOT) as found:
        yield found


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/images") and is_url("memory://x") and is_url("zip::s3://bucket/a.zip")
    assert not is_url("images") and not is_url("/shared/images") and not is_url("C:\\images")
    assert not is_url("file:///shared/images")


def test_the_same_samples_and_statistics_as_from_a_folder(folder: Path) -> None:
    there, here = open_data(ROOT, [SPEC]), open_data(folder, [SPEC])
    for a, b in zip(there, here, strict=True):
        assert np.array_equal(a["images"], b["images"])
    assert [r for _, r in there.skipped] == [r for _, r in here.skipped] == ["cannot identify image file 'broken.png'"]
    assert [n for n, _ in there.skipped] == ["broken.png"]
    assert there.fingerprint and there.fingerprint == open_data(ROOT, [SPEC]).fingerprint
    found = collect(conv_net(), ROOT, ["c1"], progress=False)["c1"]
    wanted = collect(conv_net(), f"file://{folder}", ["c1"], progress=False)["c1"]
    assert np.array_equal(found.counter.counts, wanted.counter.counts)


def test_another_content_is_another_fingerprint(folder: Path) -> None:
    before = open_data(ROOT, [SPEC]).fingerprint
    with fsspec.open(f"{ROOT}/picture001.png", "wb") as file:
        file.write((folder / "picture002.png").read_bytes())
    assert open_data(ROOT, [SPEC]).fingerprint != before


def test_one_picture(folder: Path) -> None:
    (sample,) = open_data(f"{ROOT}/sub/picture001.jpg", [SPEC])
    assert sample["images"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://qdqtool-nothing", r"memory://qdqtool-nothing: cannot be listed: "),
        ("nosuch://bucket/images", r"nosuch://bucket/images: cannot be opened: .*nosuch"),
    ],
)
def test_what_cannot_be_had(url: str, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        open_data(url, [SPEC])
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3://bucket/images: .*s3fs.*on every worker") as caught:
        open_data("s3://bucket/images", [SPEC])
    assert "\n" not in str(caught.value)


def test_a_file_is_read_within_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtool.budgets.PICTURE_FILE", 100)
    data: Any = open_data(ROOT, [SPEC])
    assert not list(data)
    assert "the file has 101 bytes; the limit is 100 bytes" in {r for _, r in data.skipped}

"""Pictures behind URLs: the same samples as from a folder, and what is said of those that cannot be had."""

import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import collect, urls
from calibration.arrays import open_data
from calibration.dataset import InputSpec
from calibration.listing import UNREADABLE
from calibration.urls import UrlSource, _mark, is_url, local_path
from qdqtool.base import budgets
from qdqtool.errors import DataError
from tests.calibration.nets import conv_net, refused, stored, write_pictures
from tests.raising import raises

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


def test_contents_of_urls(folder: Path) -> None:
    there, here = open_data(ROOT, [SPEC]), open_data(folder, [SPEC])
    for a, b in zip(there, here, strict=True):
        assert np.array_equal(a["images"], b["images"])
    assert (
        [r for _, r in there.skipped]
        == [r for _, r in here.skipped]
        == ["cannot identify image file 'broken.png'"]
    )
    assert [n for n, _ in there.skipped] == ["broken.png"]
    assert there.fingerprint and there.fingerprint == open_data(ROOT, [SPEC]).fingerprint
    found = collect(conv_net(), ROOT, ["c1"], progress=False)["c1"]
    wanted = collect(conv_net(), f"file://{folder}", ["c1"], progress=False)["c1"]
    assert np.array_equal(found.counter.counts, wanted.counter.counts)
    before = open_data(ROOT, [SPEC]).fingerprint
    with fsspec.open(f"{ROOT}/picture001.png", "wb") as file:
        file.write((folder / "picture002.png").read_bytes())
    assert open_data(ROOT, [SPEC]).fingerprint != before


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://qdqtool-nothing", "url_source memory://qdqtool-nothing:"),
        ("nosuch://bucket/images", "opened nosuch://bucket/images: nosuch"),
    ],
)
def test_what_cannot_be_had(url: str, told: str) -> None:
    with raises(DataError, told) as caught:
        open_data(url, [SPEC])
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with raises(DataError, "opened s3://bucket/images") as caught:
        open_data("s3://bucket/images", [SPEC])
    assert "\n" not in str(caught.value)


NESTED = "memory://qdqtool-edges"


@pytest.fixture
def nested(tmp_path: Path) -> Iterator[Path]:
    write_pictures(tmp_path / "in", 3)
    write_pictures(tmp_path / "in" / "a" / "b", 1, suffix=".JPG")
    write_pictures(tmp_path / "in" / ".hidden", 1)
    for name in ("png", "noname.", "text.txt", ".dot.png"):
        (tmp_path / "in" / name).write_bytes(b"no picture")
    with stored(tmp_path / "in", NESTED) as found:
        yield found


@pytest.mark.parametrize(
    ("text", "url", "path"),
    [
        ("s3://b", True, "s3://b"),
        ("S3://b", True, "S3://b"),
        ("zip::a", True, "zip::a"),
        ("a-b.c+d://", True, "a-b.c+d://"),
        ("file:///a b", False, "/a b"),
        ("FILE:///a", False, "/a"),
        ("local://a", False, "a"),
        ("/a://b", False, "/a://b"),
        ("a:/b", False, "a:/b"),
        ("x://b", False, "x://b"),
        ("9p://b", False, "9p://b"),
    ],
)
def test_parts_of_urls(text: str, url: bool, path: str) -> None:
    assert (is_url(text), local_path(text)) == (url, path)


@pytest.mark.parametrize("end", ["", "/"])
def test_what_lies_under_a_url(nested: Path, end: str) -> None:
    source: Any = open_data(NESTED + end, [SPEC]).source
    wanted = ["a/b/picture000.JPG", "picture000.png", "picture001.png", "picture002.png"]
    assert [source.name(k) for k in range(source.count())] == wanted
    part = pickle.loads(pickle.dumps(source.portion([2, 0])))
    assert isinstance(part, UrlSource) and [part.name(k) for k in range(part.count())] == [
        wanted[2],
        wanted[0],
    ]
    assert (part.load(0)["images"] == source.load(2)["images"]).all() and part.digest(
        1
    ) == source.digest(0)
    with pytest.raises(DataError) as caught:
        open_data(f"{NESTED}/.hidden/x{end}", [SPEC])
    assert str(caught.value).startswith(f"{NESTED}/.hidden/x{end}: cannot be listed: ")
    with fsspec.open(f"{NESTED}/empty/note.txt", "wb") as file:
        file.write(b"")
    url = f"{NESTED}/empty{end}"
    refused(DataError, f"url_source {url}: bmp, jpeg, jpg, png, webp", open_data, url, [SPEC])


def test_names_of_urls(nested: Path) -> None:
    source: Any = open_data(f"{NESTED}/a/b/picture000.JPG", [SPEC]).source
    assert (source.count(), source.name(0), source.url) == (1, "picture000.JPG", f"{NESTED}/a/b")
    assert _mark({"size": 3, "ETag": "e"}) == b"3 e" and _mark({"checksum": "c"}) == b"None c"
    assert _mark({"size": 3, "ETag": "", "md5Hash": "m", "sha256": "s"}) == b"3 m"
    assert _mark({"size": 3}) == _mark({}) == b""


def test_a_picture_travels_once(nested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = open_data(NESTED, [SPEC]).source
    opened: list[str] = []
    real = urls.opened
    monkeypatch.setattr(urls, "opened", lambda url: opened.append(url) or real(url))
    content = (nested / "picture001.png").read_bytes()
    held = source._content(2)
    assert held == (content, hashlib.blake2b(content, digest_size=16).digest()) and len(opened) == 1
    assert source._content(2) == held and len(opened) == 1
    source._content(1)
    assert len(opened) == 2
    source.load(1)
    assert len(opened) == 2 and source._read.held is None
    source.load(1)
    assert len(opened) == 3


def test_a_file_of_just_the_limit(nested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = open_data(NESTED, [SPEC]).source
    size = (nested / "picture001.png").stat().st_size
    monkeypatch.setattr(budgets, "PICTURE_FILE", size)
    assert len(source._content(2)[0]) == size
    source._read.held = None
    monkeypatch.setattr(budgets, "PICTURE_FILE", size - 1)
    with raises(DataError, f"require {size} {size - 1}"):
        source.load(2)


def test_a_file_that_is_gone(nested: Path) -> None:
    source: Any = open_data(NESTED, [SPEC]).source
    fsspec.filesystem("memory").rm("/qdqtool-edges/picture001.png")
    with pytest.raises(DataError, match=r"^no such file$"):
        source.load(2)
    assert source.digest(2) == b"picture001.png" + UNREADABLE


def test_a_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with raises(DataError, "opened s3://b"):
        open_data("s3://b", [SPEC])

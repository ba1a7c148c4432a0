import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import InputSpec, collect, open_data
from calibration.listing import UNREADABLE
from calibration.urls import UrlSource, is_url, to_local_path
from qdqtool.errors import DataError
from tests.calibration.checks import check_limit, counts_of
from tests.calibration.nets import conv_net, write_pictures
from tests.errors import has

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")

SPEC = InputSpec("images", (1, 3, 16, 16))
ROOT = "memory://qdqtool-test"


class Store(memory.MemoryFileSystem):
    opened: list[str] = []
    details: dict[str, Any] = {}

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.opened.append(path.rpartition("/")[2])
        return super()._open(path, *arguments, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {**super().info(path, **options), **self.details}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    fsspec.register_implementation("memory", Store, clobber=True)
    monkeypatch.setattr(Store, "details", {})
    write_pictures(tmp_path, 3)
    write_pictures(tmp_path / "a" / "b", 2, suffix=".JPG")
    write_pictures(tmp_path / ".hidden", 1)
    for name in ("broken.png", "png", "noname.", "text.txt", ".dot.png"):
        (tmp_path / name).write_bytes(b"no picture")
    store = Store()
    store.put(str(tmp_path), "/qdqtool-test", recursive=True)
    Store.opened.clear()
    yield tmp_path
    store.rm("/qdqtool-test", recursive=True)
    fsspec.register_implementation("memory", memory.MemoryFileSystem, clobber=True)


@pytest.fixture
def source(folder: Path) -> Any:
    return open_data(ROOT, [SPEC]).source


NAMES = ["a/b/picture000.JPG", "a/b/picture001.JPG", "broken.png"] + [
    f"picture00{k}.png" for k in range(3)
]
PICTURE = NAMES.index("picture001.png")


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
def test_urls_and_paths(text: str, url: bool, path: str) -> None:
    assert (is_url(text), to_local_path(text)) == (url, path)


def test_url_has_the_samples_of_the_folder(folder: Path) -> None:
    remote, local = open_data(ROOT, [SPEC]), open_data(folder, [SPEC])
    for theirs, ours in zip(remote, local, strict=True):
        assert np.array_equal(theirs["images"], ours["images"])
    assert remote.skipped == local.skipped == [("broken.png", "not a JPEG, PNG, BMP or WebP image")]
    parts = [
        collect(conv_net(), d, ["c1"], progress=False)["c1"] for d in (ROOT, f"file://{folder}")
    ]
    assert counts_of(parts[0]) == counts_of(parts[1])


def test_fingerprint_changes_with_a_picture(folder: Path) -> None:
    before = open_data(ROOT, [SPEC]).fingerprint
    assert before and open_data(ROOT, [SPEC]).fingerprint == before
    with fsspec.open(f"{ROOT}/picture001.png", "wb") as file:
        file.write((folder / "picture002.png").read_bytes())
    assert open_data(ROOT, [SPEC]).fingerprint != before


@pytest.mark.parametrize(
    ("end", "names"), [("", NAMES), ("/", NAMES), (f"/{NAMES[0]}", ["picture000.JPG"])]
)
def test_pictures_of_a_url(folder: Path, end: str, names: list[str]) -> None:
    source: Any = open_data(ROOT + end, [SPEC]).source
    assert [source.name(k) for k in range(source.count())] == names


def test_portion_of_a_url(source: Any) -> None:
    part = pickle.loads(pickle.dumps(source.select_samples([PICTURE, 0])))
    assert isinstance(part, UrlSource) and part.digest(1) == source.digest(0)
    assert [part.name(k) for k in range(part.count())] == ["picture001.png", NAMES[0]]
    assert (part.load(0)["images"] == source.load(PICTURE)["images"]).all()


@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize(
    ("url", "code", "text"),
    [
        (f"{ROOT}/nothing", "no-images", ""),
        (f"{ROOT}/empty", "no-images", "bmp, jpeg, jpg, png, webp"),
        ("nosuch://bucket/images", "file-unreadable", "nosuch"),
    ],
)
def test_urls_without_pictures_are_rejected(
    folder: Path, url: str, code: str, text: str, end: str
) -> None:
    with fsspec.open(f"{ROOT}/empty/note.txt", "wb") as file:
        file.write(b"")
    with pytest.raises(DataError, check=has(code, text, path=url + end)):
        open_data(url + end, [SPEC])


@pytest.mark.parametrize("package", ["s3fs", "fsspec"])
def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    url = "s3://bucket/images"
    with pytest.raises(DataError, check=has("missing-package", package, path=url)):
        open_data(url, [SPEC])


@pytest.mark.parametrize(
    ("details", "checksum"),
    [
        ({"size": 3, "ETag": "e"}, b"3 e"),
        ({"size": None, "checksum": "c"}, b"None c"),
        ({"size": 3, "ETag": "", "md5Hash": "m", "sha256": "s"}, b"3 m"),
    ],
)
def test_digest_has_the_checksum_of_the_store(
    source: Any, monkeypatch: pytest.MonkeyPatch, details: dict[str, Any], checksum: bytes
) -> None:
    monkeypatch.setattr(Store, "details", details)
    assert source.digest(PICTURE) == b"picture001.png" + checksum and Store.opened == []


def test_digest_of_picture_without_a_checksum_has_the_hash_of_its_content(
    source: Any, folder: Path
) -> None:
    hashed = hashlib.blake2b((folder / "picture001.png").read_bytes(), digest_size=16).digest()
    assert source.digest(PICTURE) == b"picture001.png" + hashed


def test_picture_may_have_the_limit(source: Any, folder: Path) -> None:
    size = (folder / "picture001.png").stat().st_size
    check_limit("IMAGE_FILE", size, lambda: source.load(PICTURE), has(None, size, size - 1))


def test_picture_that_is_gone_is_reported(source: Any) -> None:
    Store().rm("/qdqtool-test/picture001.png")
    with pytest.raises(DataError, match=r"^no such file$", check=has("file-missing")):
        source.load(PICTURE)
    assert source.digest(PICTURE) == b"picture001.png" + UNREADABLE

"""The file that keeps measurements."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from qdqtool import budgets
from qdqtool.errors import DataError
from qdqtool.tuning.measure import Row
from qdqtool.tuning.store import SWEEP, WHOLE, Store

IDENTITY = {"model": "m", "images": "i", "settings": "s"}
ROWS = {"a": {0: Row(0.1), 3: None}, "b": {1: Row(1 / 3, [{"scores": [0.25]}])}}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    store = Store(tmp_path / "t.tuning", IDENTITY)
    store.add(WHOLE, ROWS)
    store.add(SWEEP, {"c": {0: Row(5e-324)}})
    store.save()
    return tmp_path / "t.tuning"


def test_what_was_kept_comes_back_bit_by_bit(kept: Path) -> None:
    store = Store(kept, IDENTITY)
    assert store.rows[WHOLE] == ROWS
    assert store.known(SWEEP, "c")[0] == Row(5e-324)
    assert store.known(SWEEP, "a") == {}
    assert store.resumed == 4


def test_nothing_is_written_without_anything_new(kept: Path) -> None:
    before = kept.stat().st_mtime_ns
    Store(kept, IDENTITY).save()
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize(("name", "word"), [("model", "model"), ("images", "set of images"), ("settings", "setting")])
def test_of_another_tuning_is_refused(kept: Path, name: str, word: str) -> None:
    with pytest.raises(DataError, match=f"was measured with another {word}.*`state`"):
        Store(kept, {**IDENTITY, name: "other"})


def test_of_another_version_is_refused(kept: Path) -> None:
    data = json.loads(gzip.decompress(kept.read_bytes()))
    kept.write_bytes(gzip.compress(json.dumps({**data, "tool": "0.0.1"}).encode()))
    with pytest.raises(DataError, match="another version of qdqtool"):
        Store(kept, IDENTITY)


def _packed(data: bytes) -> bytes:
    """Without the time of day: every process of a test run has to collect the same names."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x1f\x8b\x08broken", _packed(b"[]"), _packed(b'{"schema": 1}'), _packed(b"[" * 100_000),
     _packed(b"\xff\xfe")],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        Store(path, IDENTITY)
    assert path.read_bytes() == content


@pytest.mark.parametrize("rows", [3, {"sweep": 1, "whole": {}}, {"sweep": {"a": {"x": [1, None]}}, "whole": {}},
                                  {"sweep": {"a": {"0": ["1", None]}}, "whole": {}}, {"sweep": {}}])  # fmt: skip
def test_damaged_rows_are_refused(kept: Path, rows: object) -> None:
    data = json.loads(gzip.decompress(kept.read_bytes()))
    kept.write_bytes(gzip.compress(json.dumps({**data, "rows": rows}).encode()))
    with pytest.raises(DataError, match="is damaged"):
        Store(kept, IDENTITY)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "TUNING_STATE", 1000)
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(DataError, match="the limit"):
        Store(path, IDENTITY)


def test_no_path_keeps_nothing(tmp_path: Path) -> None:
    store = Store(None, IDENTITY)
    store.add(WHOLE, ROWS)
    store.save()
    assert not list(tmp_path.iterdir())

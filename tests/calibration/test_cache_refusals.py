"""Every part of a calibration cache is checked before it is believed: one change at a time, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import cache
from calibration.cache import Statistics, load_progress, save_statistics
from calibration.spots import CHANNELS, POSITIONS
from calibration.statistics import TensorStatistics
from qdqtool import budgets
from qdqtool.errors import DataError

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors, one of them with what lies where detections fire, and two spots of 3 positions by 2 channels."""
    rng = np.random.default_rng(1)
    one, two = (TensorStatistics.of(rng.normal(0, 1 + k, 500)) for k in range(2))
    one.focus = TensorStatistics.of(rng.normal(0, 3, 50))
    one.spots = [rng.normal(0, 1, (3, 2)).astype(np.float32)]
    two.spots = [rng.normal(0, 1, (3, 2)).astype(np.float32)]
    path = tmp_path_factory.mktemp("cache") / "good.npz"
    save_statistics(Statistics({"a": one, "b": two}, images=2, fingerprint="f"), path)
    return path


def changed(good: Path, tmp_path: Path, change: Callable[[Arrays, dict[str, Any]], None]) -> Path:
    with np.load(good) as archive:
        arrays = {k: v.copy() for k, v in archive.items()}
    header = json.loads(arrays["header"].tobytes())
    change(arrays, header)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(tmp_path / "changed.npz", **arrays)
    return tmp_path / "changed.npz"


def test_an_unchanged_one_is_read(good: Path, tmp_path: Path) -> None:
    read = load_progress(changed(good, tmp_path, lambda a, h: None)).statistics
    assert list(read) == ["a", "b"] and read["a"].focus is not None and read["b"].focus is None
    assert [s.shape for s in read["a"].spots] == [(3, 2)]


def array(name: str, value: Callable[[Any], Any]) -> Callable[[Arrays, dict[str, Any]], None]:
    def change(arrays: Arrays, header: dict[str, Any]) -> None:
        arrays[name] = value(arrays[name])

    return change


def at(name: str, index: Any, value: Any) -> Callable[[Arrays, dict[str, Any]], None]:
    def change(arrays: Arrays, header: dict[str, Any]) -> None:
        arrays[name][index] = value

    return change


def field(name: str, value: Any) -> Callable[[Arrays, dict[str, Any]], None]:
    def change(arrays: Arrays, header: dict[str, Any]) -> None:
        header[name] = value

    return change


TOGETHER, ADD_UP, WINDOW = "its arrays do not fit together", "do not add up", "a histogram lies outside its window"
OF_NO = "positions of no tensor"
# numbers: count, non-finite, top octave, first bin, last bin + 1
CHANGES = {
    "counts of another type": (array("counts", lambda a: a.astype(np.int32)), TOGETHER),
    "numbers of another type": (array("numbers", lambda a: a.astype(np.int32)), TOGETHER),
    "done of another type": (array("done", lambda a: a.astype(np.int32)), TOGETHER),
    "range of another type": (array("range", lambda a: a.astype(np.float32)), TOGETHER),
    "counts of two dimensions": (array("counts", lambda a: a[None]), TOGETHER),
    "done of three columns": (array("done", lambda a: np.zeros((1, 3), np.int64)), TOGETHER),
    "numbers of too few rows": (array("numbers", lambda a: a[:-1]), TOGETHER),
    "numbers of too few columns": (array("numbers", lambda a: a[:, :-1]), TOGETHER),
    "range of too few rows": (array("range", lambda a: a[:-1]), TOGETHER),
    "negative counts": (array("counts", lambda a: np.where(np.arange(len(a)) == 3, -1, a)), "negative counts"),
    "a count too many": (at("numbers", (0, 0), 501), "of tensor 'a' do not add up"),
    "a count too many in the focus": (at("numbers", (2, 0), 51), "of tensor 'a' do not add up"),
    "negative non-finite": (at("numbers", (1, 1), -1), "of tensor 'b' do not add up"),
    "minimum above maximum": (at("range", (1,), (2.0, 1.0)), ADD_UP),
    "no minimum": (at("range", (0, 0), np.nan), ADD_UP),
    "infinite minimum": (at("range", (0, 0), -np.inf), ADD_UP),
    "infinite maximum": (at("range", (0, 1), np.inf), ADD_UP),
    "top too low": (at("numbers", (0, 2), cache.MIN_TOP - 1), WINDOW),
    "top too high": (at("numbers", (0, 2), 129), WINDOW),
    "first bin below 0": (at("numbers", (0, 3), -1), WINDOW),
    "last bin behind the histogram": (at("numbers", (0, slice(3, 5)), (10**7, 10**7 + 5)), WINDOW),
    "spots of another type": (array("spots", lambda a: a.astype(np.int32)), TOGETHER),
    "spots of two columns": (array("spots", lambda a: a[:, :2]), TOGETHER),
    "values of another type": (array("values", lambda a: a.astype(np.float64)), TOGETHER),
    "values of two dimensions": (array("values", lambda a: a[None]), TOGETHER),
    "a value too many": (array("values", lambda a: np.append(a, np.float32(0))), TOGETHER),
    "an infinite value": (at("values", 2, np.inf), "values that are not finite"),
    "spots of tensor -1": (at("spots", (0, 0), -1), OF_NO),
    "spots of a third tensor": (at("spots", (0, 0), 2), OF_NO),  # the focus is no tensor of its own
    "spots of one position": (at("spots", (0, 1), 1), OF_NO),
    "spots of too many positions": (at("spots", (0, 1), POSITIONS + 1), OF_NO),
    "spots of no channel": (at("spots", (0, 2), 0), OF_NO),
    "spots of too many channels": (at("spots", (0, 2), CHANNELS + 1), OF_NO),
    "another format": (field("format", cache.FORMAT + "0"), "was written by another version of qdqtool"),
    "other octaves": (field("octaves", cache.OCTAVES + 1), "was written by another version of qdqtool"),
    "tensors no list": (field("tensors", "ab"), '"ab" is no list'),
    "focused no list": (field("focused", {"a": 1}), '{"a": 1} is no list'),
    "a name that is a number": (field("tensors", [1, "b"]), "1 is no str"),
    "a focused name that is a number": (field("focused", [2]), "2 is no str"),
    "focus of an unknown tensor": (field("focused", ["c"]), "'c'"),
    "bins a truth value": (field("bins", True), "true is no int"),
    "images a float": (field("images", 2.5), "2.5 is no int"),
    "fingerprint a number": (field("fingerprint", 5), "5 is no str"),
    "a warning that is a number": (field("warnings", ["w", 5]), "5 is no str"),
    "warnings no list": (field("warnings", 5), "5 is no list"),
    "skipped of one part": (field("skipped", [["x"]]), "not enough values"),
    "skipped for no reason": (field("skipped", [["x", None]]), "null is no str"),
    "total a text": (field("total", "8"), '"8" is no int'),
    "model null": (field("model", None), "null is no str"),
    "looks no object": (field("looks", []), "[] is no dict"),
    "looks of an unknown name": (field("looks", {"unheard": 1}), "unheard"),
    "looks of a text": (field("looks", {"low": "0"}), "'low' of its header is no number"),
    "looks with a part of an image": (field("looks", {"total": 1.5}), "'total' of its header is no number"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_one_change(name: str, good: Path, tmp_path: Path) -> None:
    change, text = CHANGES[name]
    path = changed(good, tmp_path, change)
    with pytest.raises(DataError) as caught:
        load_progress(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: the calibration cache ") and message.endswith("; delete it")
    assert text in message and "\n" not in message


def test_a_part_that_is_missing(good: Path, tmp_path: Path) -> None:
    for name in ("done", "numbers", "range", "counts", "spots", "values"):
        with pytest.raises(DataError, match=f"{name}.*delete it"):
            load_progress(changed(good, tmp_path, lambda arrays, _, name=name: arrays.pop(name)))  # type: ignore[misc]
    for name in ("format", "octaves", "tensors", "focused", "bins", "images", "fingerprint", "warnings", "skipped",
                 "total", "model", "looks"):  # fmt: skip
        with pytest.raises(DataError, match=f"{name}.*delete it"):
            load_progress(changed(good, tmp_path, lambda _, header, name=name: header.pop(name)))  # type: ignore[misc]


def test_statistics_that_take_too_much_memory(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = len(TensorStatistics(load_progress(good).statistics["a"].bins).counter.counts)
    monkeypatch.setattr(budgets, "CACHE_MEMORY", 3 * 8 * counts)
    load_progress(good)
    monkeypatch.setattr(budgets, "CACHE_MEMORY", 3 * 8 * counts - 1)
    with pytest.raises(DataError, match=r"the statistics of 3 tensors take .*delete it"):
        load_progress(good)


def test_what_is_no_file_is_not_to_be_deleted(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.npz"):
        with pytest.raises(DataError) as caught:
            load_progress(path)
        assert "delete" not in str(caught.value)

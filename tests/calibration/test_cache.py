import contextlib
import json
import math
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import arrays, cache, runner
from calibration.cache import (
    Progress,
    Statistics,
    load_progress,
    load_statistics,
    read_tensorrt_cache,
    save_progress,
    save_statistics,
    write_tensorrt_cache,
)
from calibration.dataset import Looks
from calibration.runner import collect
from calibration.statistics import CHANNELS, POSITIONS, TensorStatistics
from qdqtool.base import budgets, files
from qdqtool.base.notes import Remark
from qdqtool.errors import DataError, QdqtoolError
from tests.calibration.nets import conv_net, refused, state, write_pictures
from tests.raising import raises

NAMES = ["images", "c1", "r2"]


def same(a: Statistics, b: Statistics) -> bool:
    return a.images == b.images and all(
        state(a[n]) == state(b[n])
        and np.array_equal(a[n].channels, b[n].channels)
        and sorted(map(bytes, a[n].spots)) == sorted(map(bytes, b[n].spots))
        for n in {*a, *b}
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "in", 8)
    return tmp_path / "in"


def test_statistics_come_back_as_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    some = rng.normal(0, 1e-3, 999)
    arrays = {
        "none": np.zeros(0),
        "x/y:0": some,
        "nothing": np.zeros(0),
        "zero": np.zeros(5),
        "nan": np.array([np.nan, 1.0]),
    }
    stats = Statistics(
        {n: TensorStatistics.of(a) for n, a in arrays.items()},
        images=3,
        fingerprint="ab",
        warnings=["w"],
        skipped=[("p.png", "cut")],
    )
    save_statistics(stats, tmp_path / "s.npz")
    back = load_statistics(tmp_path / "s.npz")
    assert same(stats, back) and list(back) == list(stats)
    assert (back.fingerprint, back.warnings, back.skipped) == ("ab", ["w"], [("p.png", "cut")])


class Stop(BaseException):
    """As Ctrl-C: not an Exception."""


@pytest.mark.parametrize("stop_after", [1, 7])
def test_an_interrupted_pass_is_resumed(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    file = tmp_path / "c.npz"
    (pictures / "a-broken.png").write_text("no picture")
    whole = collect(conv_net(), pictures, NAMES, progress=False)

    def interrupted(items: Any, *_: object, **__: object) -> Any:
        for number, item in enumerate(items, 1):
            yield item
            if number == stop_after:
                raise Stop

    loaded: list[str] = []
    real = arrays.open_data

    def watched(*args: Any, **named: Any) -> Any:
        data = real(*args, **named)
        load = data.source.load

        def counted(index: int) -> Any:
            loaded.append(data.source.name(index))
            return load(index)

        monkeypatch.setattr(data.source, "load", counted)
        return data

    monkeypatch.setattr(runner, "open_data", watched)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "track", interrupted)
        with pytest.raises(Stop):
            collect(conv_net(), pictures, NAMES, cache=file)
    done = load_progress(file)
    assert not done.complete and len(done.done) >= min(stop_after, 1)
    before = set(loaded)
    loaded.clear()
    resumed = collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    assert resumed.notes == [Remark.RESUMED(cache=file, images=done.statistics.images)]
    assert len(loaded) + len(done.done) == 9 and len(before | set(loaded)) == 9
    assert same(resumed, whole)
    assert resumed.warnings == whole.warnings and resumed.skipped == whole.skipped
    assert load_progress(file).complete


def test_bits_flipped_anywhere_never_crash(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.npz"
    collect(conv_net(), pictures, NAMES, cache=file, progress=False)
    whole = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(whole), 150):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(flipped)
        with contextlib.suppress(DataError):
            load_progress(file)


def test_where_a_cache_lies_and_what_it_holds(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(QdqtoolError, match="does not exist"):
        collect(conv_net(), pictures, NAMES, cache=tmp_path / "no" / "c.npz", progress=False)
    with pytest.raises(QdqtoolError, match="is a folder"):
        collect(conv_net(), pictures, NAMES, cache=tmp_path, progress=False)
    parts = {
        "one": TensorStatistics.of(np.array([0.75]), 64),
        "two": TensorStatistics.of(np.array([0.5, 0.75]), 64),
    }
    save_statistics(Statistics(parts), tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz") as archive:
        at = 1 + 19 * 32
        assert archive["numbers"].tolist() == [[1, 0, 0, at + 16, at + 17], [2, 0, 0, at, at + 17]]
        assert archive["counts"].tolist() == [1, 1, *[0] * 15, 1] and archive["done"].tolist() == []
        assert json.loads(archive["header"].tobytes())["bins"] == 64


@pytest.mark.parametrize(
    ("done", "total", "complete"),
    [
        ((), None, False),
        ((), 0, True),
        ((0, 1), 3, False),
        ((0, 1, 2), 3, True),
        ((0, 1, 2), 2, True),
        ((0,), None, False),
    ],
)
def test_how_far_it_has_come(
    tmp_path: Path, done: tuple[int, ...], total: int | None, complete: bool
) -> None:
    looks = Looks(2, -1.5, 0.25, 1, 0, 4)
    progress = Progress(
        "key", Statistics({"x": TensorStatistics.of(np.ones(3), 64)}), set(done), total, looks
    )
    assert progress.complete == complete
    save_progress(progress, tmp_path / "c.npz")
    back = load_progress(tmp_path / "c.npz")
    assert (back.model, sorted(back.done), back.total, back.looks) == (
        "key",
        list(done),
        total,
        looks,
    )
    assert Progress("", Statistics({}), set(), None).looks == Looks()


def test_a_header_of_just_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.npz"
    save_statistics(Statistics({}), path)
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("header.npy").file_size
    monkeypatch.setattr(budgets, "CACHE_HEADER", size)
    load_statistics(path)
    monkeypatch.setattr(budgets, "CACHE_HEADER", size - 1)
    sizes = f"{budgets.amount(size)}; {budgets.amount(size - 1)};"
    refused(DataError, f"load_progress {path}: {sizes}", load_statistics, path)


def test_files_that_are_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for content in (b"text", b"PK\x03\x04" + bytes(50)):
        path.write_bytes(content)
        refused(DataError, f"load_progress {path}: cut", load_statistics, path)
        assert path.read_bytes() == content
    np.savez(path, images=np.zeros(3))
    refused(DataError, f"load_progress {path}: cache;", load_statistics, path)
    path.write_bytes(b"")
    refused(DataError, f"load_progress {path}: empty;", load_statistics, path)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nocolon", "'tensor: 8"),
        ("x: 3f8000001", "'tensor: 8"),
        ("x: 3f80000000", "'tensor: 8"),
        ("x: 3g800000", "'tensor: 8"),
        (": 3f800000", "1 ''"),
        ("x: 7f800000", "inf 'x'"),
        ("x: 7fc00000", "nan 'x'"),
        ("x: 80000001", "-1.4013e-45 'x'"),
    ],
)
def test_lines_that_no_table_has(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "t.cache"
    path.write_text(f"TRT-8601-MinMaxCalibration\ny: 3f800000\n{line}\n")
    refused(DataError, f"read_tensorrt_cache {path}: 3 {named}", read_tensorrt_cache, path)


def test_lines_that_a_table_may_have(tmp_path: Path) -> None:
    path = tmp_path / "t.cache"
    path.write_text("TRT-1\n\n  \nzero: 0\na:b : 3f800000\nsmall: 1\n")
    assert read_tensorrt_cache(path) == {
        "zero": 0.0,
        "a:b": 1.0,
        "small": struct.unpack(">f", b"\0\0\0\1")[0],
    }
    path.write_text("TRT-1")
    assert read_tensorrt_cache(path) == {}
    for text in ("", "\nTRT-1\n", " TRT-1\n"):
        path.write_text(text)
        refused(DataError, f"read_tensorrt_cache {path}: 'TRT-'", read_tensorrt_cache, path)
    path.write_bytes(b"TRT-1\n\xff: 0\n")
    with raises(DataError, "read_tensorrt_cache read"):
        read_tensorrt_cache(path)


def test_tables_that_are_written_and_caches_that_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.cache"
    write_tensorrt_cache(path, {"a:b": 0.5, "c": 1e-30}, "TRT-10000-EntropyCalibration2")
    assert path.read_text() == "TRT-10000-EntropyCalibration2\na:b: 3f000000\nc: 0da24260\n"
    for name, scale in (("x", 0.0), ("x", -0.5), ("x", math.inf), ("x", math.nan), ("x\ny", 0.5)):
        scales = {"a": 1.0, name: scale}
        refused(
            DataError,
            f"write_tensorrt_cache '{name}': {scale:g}",
            write_tensorrt_cache,
            path,
            scales,
        )
    assert path.read_text().startswith("TRT-10000"), "the one before is left"
    # It is the one file of which that is true
    path = tmp_path / "c.npz"
    save_statistics(Statistics({}), path)
    with files.record_inputs() as guard:
        load_progress(path)
        guard.forbid_overwrite(path)
        files.record_input(path)
        with raises(QdqtoolError, "InputFiles.forbid_overwrite|_is_input files"):
            guard.forbid_overwrite(path)


Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors, one of them with what lies where detections fire, and two spots of 3 positions by 2 channels."""
    rng = np.random.default_rng(1)
    one, two = (TensorStatistics.of(rng.normal(0, 1 + k, 500)) for k in range(2))
    one.focus = TensorStatistics.of(rng.normal(0, 3, 50))
    one.spots = [rng.normal(0, 1, (3, 2)).astype(np.float32)]
    two.spots = [rng.normal(0, 1, (3, 2)).astype(np.float32)]
    two.channels = np.array([[-1, 0, 1], [0, 0, 2]], np.float32)
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


TOGETHER, ADD_UP, WINDOW = (
    "its arrays do not fit together",
    "do not add up",
    "a histogram lies outside its window",
)
OF_NO = "positions of no tensor"
# numbers: count, non-finite, top octave, first bin, last bin + 1
CHANGES = {
    "counts of another type": (array("counts", lambda a: a.astype(np.int32)), TOGETHER),
    "counts of two dimensions": (array("counts", lambda a: a[None]), TOGETHER),
    "done of three columns": (array("done", lambda a: np.zeros((1, 3), np.int64)), TOGETHER),
    "numbers of too few rows": (array("numbers", lambda a: a[:-1]), TOGETHER),
    "range of too few rows": (array("range", lambda a: a[:-1]), TOGETHER),
    "negative counts": (
        array("counts", lambda a: np.where(np.arange(len(a)) == 3, -1, a)),
        "negative counts",
    ),
    "a count too many": (at("numbers", (0, 0), 501), "of tensor 'a' do not add up"),
    "a count too many in the focus": (at("numbers", (2, 0), 51), "of tensor 'a' do not add up"),
    "negative non-finite": (at("numbers", (1, 1), -1), "of tensor 'b' do not add up"),
    "minimum above maximum": (at("range", (1,), (2.0, 1.0)), ADD_UP),
    "no minimum": (at("range", (0, 0), np.nan), ADD_UP),
    "infinite maximum": (at("range", (0, 1), np.inf), ADD_UP),
    "top too low": (at("numbers", (0, 2), cache.MIN_TOP - 1), WINDOW),
    "top too high": (at("numbers", (0, 2), 129), WINDOW),
    "first bin below 0": (at("numbers", (0, 3), -1), WINDOW),
    "last bin behind the histogram": (at("numbers", (0, slice(3, 5)), (10**7, 10**7 + 5)), WINDOW),
    "spots of another type": (array("spots", lambda a: a.astype(np.int32)), TOGETHER),
    "spots of two columns": (array("spots", lambda a: a[:, :2]), TOGETHER),
    "a value too many": (array("values", lambda a: np.append(a, np.float32(0))), TOGETHER),
    "an infinite value": (at("values", 2, np.inf), "values that are not finite"),
    "spots of tensor -1": (at("spots", (0, 0), -1), OF_NO),
    "spots of a third tensor": (at("spots", (0, 0), 2), OF_NO),  # the focus is no tensor of its own
    "spots of one position": (at("spots", (0, 1), 1), OF_NO),
    "spots of too many positions": (at("spots", (0, 1), POSITIONS + 1), OF_NO),
    "spots of no channel": (at("spots", (0, 2), 0), OF_NO),
    "spots of too many channels": (at("spots", (0, 2), CHANNELS + 1), OF_NO),
    "channels of another type": (array("channels", lambda a: a.astype(np.float64)), TOGETHER),
    "a channel too many": (array("channels", lambda a: np.repeat(a, 2, axis=1)), TOGETHER),
    "widths of one tensor": (array("widths", lambda a: a[:1]), TOGETHER),
    "a negative width": (array("widths", lambda a: np.array([-1, 4], np.int64)), TOGETHER),
    "an infinite channel": (at("channels", (1, 1), np.inf), "channels without a range"),
    "a channel upside down": (at("channels", (0, 1), 1.0), "channels without a range"),
    "another format": (
        field("format", cache.FORMAT + "0"),
        "was written by another version of qdqtool",
    ),
    "other octaves": (
        field("octaves", cache.OCTAVES + 1),
        "was written by another version of qdqtool",
    ),
    "tensors no list": (field("tensors", "ab"), '"ab" is no list'),
    "focused no list": (field("focused", {"a": 1}), '{"a": 1} is no list'),
    "a name that is a number": (field("tensors", [1, "b"]), "1 is no str"),
    "focus of an unknown tensor": (field("focused", ["c"]), "'c'"),
    "bins a truth value": (field("bins", True), "true is no int"),
    "no bins": (field("bins", 0), "bins is 0"),
    "a warning that is a number": (field("warnings", ["w", 5]), "5 is no str"),
    "skipped of one part": (field("skipped", [["x"]]), "not enough values"),
    "skipped for no reason": (field("skipped", [["x", None]]), "null is no str"),
    "model null": (field("model", None), "null is no str"),
    "looks no object": (field("looks", []), "[] is no dict"),
    "looks of an unknown name": (field("looks", {"unheard": 1}), "unheard"),
    "looks of a text": (field("looks", {"low": "0"}), "'low' of its header is no number"),
    "looks with a part of an image": (
        field("looks", {"total": 1.5}),
        "'total' of its header is no number",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change(name: str, good: Path, tmp_path: Path) -> None:
    change, text = CHANGES[name]
    path = changed(good, tmp_path, change)
    with pytest.raises(DataError) as caught:
        load_progress(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_limits_of_a_cache(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("done", "numbers", "range", "counts", "spots", "values"):
        with pytest.raises(DataError, match=f"{name}.*delete it"):
            load_progress(changed(good, tmp_path, lambda arrays, _, name=name: arrays.pop(name)))  # type: ignore[misc]
    for name in (
        "format",
        "octaves",
        "tensors",
        "focused",
        "bins",
        "images",
        "fingerprint",
        "warnings",
        "skipped",
        "total",
        "model",
        "looks",
    ):
        with pytest.raises(DataError, match=f"{name}.*delete it"):
            load_progress(changed(good, tmp_path, lambda _, header, name=name: header.pop(name)))  # type: ignore[misc]
    counts = len(TensorStatistics(load_progress(good).statistics["a"].bins).counter.counts)
    monkeypatch.setattr(budgets, "CACHE_MEMORY", 3 * 8 * counts)
    load_progress(good)
    monkeypatch.setattr(budgets, "CACHE_MEMORY", 3 * 8 * counts - 1)
    with raises(DataError, "load_progress 3"):
        load_progress(good)


@pytest.mark.parametrize(
    ("numbers", "ranges"),
    [
        ([], []),
        ([0], [[0, 1]]),
        ([3, 1, 2], [[1, 4]]),
        ([9, 0, 1, 5, 6, 8], [[0, 2], [5, 7], [8, 10]]),
    ],
)
def test_numbers_are_kept_as_ranges(numbers: list[int], ranges: list[list[int]]) -> None:
    found = cache._ranges_of(numbers)
    assert found.tolist() == ranges and found.shape == (len(ranges), 2) and found.dtype == np.int64
    assert cache._numbers_in(found) == set(numbers)


@pytest.mark.parametrize(
    "ranges", [[(3, 3)], [(0, 2), (2, 4)], [(5, 6), (0, 1)], [(-2, 1)], [(0, 1 << 60)]]
)
def test_damaged_ranges(ranges: list[tuple[int, int]]) -> None:
    with raises(ValueError, "_numbers_in"):
        cache._numbers_in(np.array(ranges))

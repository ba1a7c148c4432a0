import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import TensorStatistics, cache, collect
from calibration.cache import (
    CalibrationProgress,
    Statistics,
    load_progress,
    load_statistics,
    save_progress,
    save_statistics,
    write_tensorrt_cache,
)
from calibration.dataset import DataQuality
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.util import files
from tests.calibration.checks import check_limit, contents
from tests.calibration.nets import conv_net, write_pictures
from tests.calibration.watchers import WatchProgress, stop_after
from tests.errors import has
from tests.notes import note

NAMES = ["images", "c1", "r2"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "in", 8)
    return tmp_path / "in"


def test_saved_statistics_come_back(tmp_path: Path) -> None:
    arrays = {
        "none": [],
        "x/y:0": np.random.default_rng(0).normal(0, 1e-3, 999),
        "nothing": [],
        "zero": np.zeros(5),
        "nan": [np.nan, 1.0],
    }
    stats = Statistics(
        {n: TensorStatistics.of(np.array(a)) for n, a in arrays.items()},
        images=3,
        fingerprint="ab",
        warnings=["w"],
        skipped=[("p.png", "cut")],
    )
    save_statistics(stats, tmp_path / "s.npz")
    assert contents(load_statistics(tmp_path / "s.npz")) == contents(stats)


def test_arrays_of_the_file(tmp_path: Path) -> None:
    parts = {
        "one": TensorStatistics.of(np.array([0.75]), 64),
        "two": TensorStatistics.of(np.array([0.5, 0.75]), 64),
    }
    save_statistics(Statistics(parts), tmp_path / "s.npz")
    first = 1 + 19 * 32
    with np.load(tmp_path / "s.npz") as archive:
        assert archive["numbers"].tolist() == [
            [1, 0, 0, first + 16, first + 17],
            [2, 0, 0, first, first + 17],
        ]
        assert archive["counts"].tolist() == [1, 1, *[0] * 15, 1]
        assert json.loads(archive["header"].tobytes())["bins"] == 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.npz"


@pytest.mark.parametrize("count", [1, 7])
def test_interrupted_pass_goes_on(
    pictures: Path, watch_progress: WatchProgress, count: int, path: Path
) -> None:
    (pictures / "a-broken.png").write_text("no picture")
    whole = collect(conv_net(), pictures, NAMES, progress=False)
    watch_progress(stop_after(count))
    with pytest.raises(KeyboardInterrupt):
        collect(conv_net(), pictures, NAMES, cache=path)
    begun, numbers = load_progress(path), list[int]()
    assert begun.total is None and not begun.is_complete and len(begun.done) >= count
    watch_progress(numbers.append)
    resumed = collect(conv_net(), pictures, NAMES, cache=path)
    assert resumed.notes == [note("resumed", cache=path, images=begun.statistics.images)]
    assert len(numbers) + len(begun.done) == 9
    assert contents(resumed) == contents(whole) and load_progress(path).is_complete


@pytest.mark.parametrize(
    ("place", "message"), [("no/c.npz", "does not exist"), ("", "is a folder")]
)
def test_cache_has_to_be_a_file(tmp_path: Path, place: str, message: str) -> None:
    with pytest.raises(QdqtoolError, match=message):
        collect(conv_net(), [], NAMES, cache=tmp_path / place, progress=False)


@pytest.mark.parametrize(
    ("done", "ranges", "total", "complete"),
    [
        ([], [], None, False),
        ([], [], 0, True),
        ([0, 1], [[0, 2]], 3, False),
        ([0, 1, 2], [[0, 3]], 3, True),
        ([0, 1, 2], [[0, 3]], 2, True),
        ([0], [[0, 1]], None, False),
        ([3, 1, 2], [[1, 4]], 9, False),
        ([9, 0, 1, 5, 6, 8], [[0, 2], [5, 7], [8, 10]], None, False),
    ],
)
def test_progress_is_kept_as_ranges_of_samples(
    tmp_path: Path, done: list[int], ranges: list[list[int]], total: int | None, complete: bool
) -> None:
    path, quality = tmp_path / "c.npz", DataQuality(2, -1.5, 0.25, 1, 0, 4)
    progress = CalibrationProgress(
        "key", Statistics({"x": TensorStatistics.of(np.ones(3), 64)}), set(done), total, quality
    )
    assert progress.is_complete == complete
    save_progress(progress, path)
    with np.load(path) as archive:
        assert archive["done"].tolist() == ranges
    loaded = load_progress(path)
    assert (loaded.model, loaded.done, loaded.total, loaded.quality) == (
        "key",
        set(done),
        total,
        quality,
    )


def test_cache_may_be_read_and_replaced(path: Path) -> None:
    """No other file may be both an input and an output."""
    save_statistics(Statistics({}), path)
    with files.record_inputs() as guard:
        load_progress(path)
        guard.forbid_overwrite(path)
        files.record_input(path)
        with pytest.raises(QdqtoolError, check=has(None, path)):
            guard.forbid_overwrite(path)


# Damaged caches, and other files


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(b"text", "wrong-format", id="text"),
        pytest.param(b"PK\x03\x04" + bytes(50), "wrong-format", id="zip that is cut off"),
        pytest.param(b"", None, id="empty"),
    ],
)
def test_other_files_are_left_as_they_are(content: bytes, code: str | None, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match="another name", check=has(code, path)):
        load_statistics(path)
    assert path.read_bytes() == content


def test_flipped_bits_never_crash(pictures: Path, path: Path) -> None:
    collect(conv_net(), pictures, NAMES, cache=path, progress=False)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for position in rng.integers(0, len(whole), 150):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(flipped)
        with contextlib.suppress(DataError):
            load_progress(path)


Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    first, second = (TensorStatistics.of(rng.normal(0, 1 + k, 500)) for k in range(2))
    first.focus = TensorStatistics.of(rng.normal(0, 3, 50))
    first.spots, second.spots = ([rng.normal(0, 1, (3, 2)).astype(np.float32)] for _ in range(2))
    second.channels = np.array([[-1, 0, 1], [0, 0, 2]], np.float32)
    path = tmp_path_factory.mktemp("cache") / "good.npz"
    save_progress(
        CalibrationProgress(
            "", Statistics({"a": first, "b": second}, images=2, fingerprint="f"), {0, 1}, None
        ),
        path,
    )
    return path


def array(name: str, value: Callable[[Any], Any]) -> Change:
    return lambda arrays, header: arrays.update({name: value(arrays[name])})


def item(name: str, index: Any, value: Any) -> Change:
    return lambda arrays, header: arrays[name].__setitem__(index, value)


def field(name: str, value: Any) -> Change:
    return lambda arrays, header: header.update({name: value})


def done(*ranges: tuple[int, int]) -> Change:
    return array("done", lambda _: np.array(ranges, np.int64))


COUNTS, WINDOW = "do not add up", "outside its window"
# The columns of numbers: count, not finite, top octave, first bin, last bin + 1.
CHANGES = {
    "counts of another type": (array("counts", lambda a: a.astype(np.int32)), "counts"),
    "counts of two dimensions": (array("counts", lambda a: a[None]), "counts"),
    "done of three columns": (array("done", lambda a: np.zeros((1, 3), np.int64)), ""),
    "done below zero": (done((-2, 1)), "samples"),
    "done of too many samples": (done((0, 2_000_001)), "samples"),
    "numbers of too few rows": (array("numbers", lambda a: a[:-1]), ""),
    "range of too few rows": (array("range", lambda a: a[:-1]), ""),
    "a count too many": (item("numbers", (0, 0), 501), "of tensor 'a' do not add up"),
    "a count too many in the focus": (item("numbers", (2, 0), 51), "of tensor 'a' do not add up"),
    "minimum above maximum": (item("range", (1,), (2.0, 1.0)), COUNTS),
    "no minimum": (item("range", (0, 0), np.nan), COUNTS),
    "infinite maximum": (item("range", (0, 1), np.inf), COUNTS),
    "top too low": (item("numbers", (0, 2), cache.MIN_TOP - 1), WINDOW),
    "top too high": (item("numbers", (0, 2), 129), WINDOW),
    "first bin below 0": (item("numbers", (0, 3), -1), ""),
    "last bin beyond": (item("numbers", (0, slice(3, 5)), (10**7, 10**7 + 5)), ""),
    "spots of another type": (array("spots", lambda a: a.astype(np.int32)), "spots"),
    "spots of two columns": (array("spots", lambda a: a[:, :2]), ""),
    "spots of an unknown tensor": (item("spots", (0, 0), 2), ""),
    "spots of too many positions": (item("spots", (0, 1), 1000), ""),
    "channels of another type": (array("channels", lambda a: a.astype(np.float64)), "channels"),
    "a channel too many": (array("channels", lambda a: np.repeat(a, 2, axis=1)), "channels"),
    "widths of one tensor": (array("widths", lambda a: a[:1]), ""),
    "tensors no list": (field("tensors", "ab"), "tensors"),
    "focused no list": (field("focused", {"a": 1}), "focused"),
    "focus of an unknown tensor": (field("focused", ["c"]), "'c'"),
    "skipped of one part": (field("skipped", [["x"]]), "not enough values"),
    "model null": (field("model", None), "model"),
    "looks no object": (field("looks", []), "looks"),
    "looks of an unknown name": (field("looks", {"unheard": 1}), "unheard"),
    "looks of a text": (field("looks", {"low": "0"}), "looks"),
    **{
        f"no {name} in the header": (lambda _, header, name=name: header.pop(name), name)
        for name in [
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
            "format",
            "octaves",
        ]
    },
    **{
        f"no array {name}": (lambda arrays, _, name=name: arrays.pop(name), name)
        for name in ("done", "numbers", "range", "counts", "spots", "values", "widths", "channels")
    },
}
OTHER_CODES = {
    "another format": (field("format", cache.FORMAT + "0"), "wrong-version", "another version"),
    "other octaves": (field("octaves", cache.OCTAVES + 1), "wrong-version", "another version"),
    "no bins": (field("bins", 0), "out-of-range", "`bins` is 0"),
    "no header": (lambda arrays, _: arrays.pop("header"), "wrong-format", "not a calibration"),
}


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        *((change, "file-damaged", reason) for change, reason in CHANGES.values()),
        *OTHER_CODES.values(),
    ],
    ids=[*CHANGES, *OTHER_CODES],
)
def test_damage_is_reported(
    good: Path, tmp_path: Path, change: Change, code: str, reason: str
) -> None:
    with np.load(good) as archive:
        arrays = {k: v.copy() for k, v in archive.items()}
    header = json.loads(arrays["header"].tobytes())
    change(arrays, header)
    if "header" in arrays:
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path = tmp_path / "changed.npz"
    np.savez(path, **arrays)
    advice = "another name" if code == "wrong-format" else "delete it"
    with pytest.raises(DataError, check=has(code, reason, advice, path=str(path))):
        load_progress(path)


def test_statistics_may_take_the_limit(good: Path) -> None:
    size = 3 * TensorStatistics().counter.counts.nbytes  # two tensors and a focus
    check_limit("CACHE_MEMORY", size, lambda: load_progress(good), has(None, good, "2 tensors"))


# TensorRT's calibration table


def test_table_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.cache"
    write_tensorrt_cache(path, {"a:b": 0.5, "c": 1e-30}, "TRT-10000-EntropyCalibration2")
    assert path.read_text() == "TRT-10000-EntropyCalibration2\na:b: 3f000000\nc: 0da24260\n"


@pytest.mark.parametrize(
    ("name", "scale", "reason"),
    [
        ("x", 0.0, "scale is 0;"),
        ("x", -0.5, "scale is -0.5;"),
        ("x", math.inf, "scale is inf;"),
        ("x", math.nan, "scale is nan;"),
        ("x\ny", 0.5, "line break"),
    ],
)
def test_unsuitable_scale_or_name_is_not_written_to_table(
    tmp_path: Path, name: str, scale: float, reason: str
) -> None:
    path = tmp_path / "t.cache"
    path.write_text("before")
    with pytest.raises(DataError, check=has("invalid-scale", reason, node=name)):
        write_tensorrt_cache(path, {"a": 1.0, name: scale})
    assert path.read_text() == "before"

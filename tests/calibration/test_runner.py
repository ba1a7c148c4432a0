import inspect
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import pytest

from calibration import Focus, Statistics, open_data, runner
from calibration.cache import CalibrationProgress, load_progress, save_progress
from calibration.counting import SampleCounter
from calibration.listing import file_digest
from calibration.runner import CacheMismatch, collect
from calibration.session import input_specs
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir.modelfile import load
from tests.calibration.checks import counts_of
from tests.calibration.nets import conv_net, run_all, save_external, write_pictures
from tests.calibration.watchers import WatchProgress, stop_after
from tests.errors import has
from tests.notes import note

NAMES = ["images", "c1", "r2"]
FEEDS = [{"images": np.random.default_rng(k).random((1, 3, 16, 16), np.float32)} for k in range(6)]
FEW = note("few-images", images=6, enough=100)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "c.npz"


def run(
    cache: Path | None = None,
    data: Any = FEEDS,
    names: tuple[str, ...] = ("c1", "images"),
    model: Any = None,
    **options: Any,
) -> Statistics:
    options.setdefault("progress", False)
    return collect(model or conv_net(), data, names, cache=cache, **options)


def assert_same(statistics: Statistics, values: dict[str, Any], rel: float = 1e-5) -> None:
    for name, flat in values.items():
        part = statistics[name]
        assert part.count == flat.size == part.counter.counts.sum()
        assert part.minimum == pytest.approx(float(flat.min()), rel=rel, abs=1e-6)
        assert part.maximum == pytest.approx(float(flat.max()), rel=rel, abs=1e-6)
        counts, edges = part.linear(64)
        direct, _ = np.histogram(np.abs(flat), edges)
        assert np.abs(np.cumsum(counts) - np.cumsum(direct)).max() <= max(0.02 * flat.size, 3), name


# Statistics of every value


def test_statistics_of_pictures_are_those_of_every_value(tmp_path: Path) -> None:
    write_pictures(tmp_path, 9)
    model = conv_net()
    statistics = collect(model, tmp_path, NAMES, progress=False)
    samples = [dict(s) for s in open_data(tmp_path, input_specs(load(model)))]
    assert statistics.images == 9 and list(statistics) == NAMES
    assert_same(statistics, run_all(model, samples, NAMES))
    assert statistics.warnings == [note("few-images", images=9, enough=100)]


def test_fixed_batch_is_filled_up(tmp_path: Path) -> None:
    write_pictures(tmp_path, 5)
    statistics = run(data=tmp_path, names=("images",), model=conv_net((4, 3, 16, 16)))
    assert statistics.images == 5 and statistics["images"].count == 8 * 3 * 16 * 16


@pytest.mark.parametrize(
    ("model", "samples", "rel"),
    [
        pytest.param(
            conv_net(("n", 3, "h", "w")),
            [*FEEDS[:3], {"images": np.ones((2, 3, 8, 24), np.float32)}],
            1e-5,
            id="open sizes",
        ),
        pytest.param(
            conv_net(dtype=onnx.TensorProto.FLOAT16),
            [{"images": f["images"].astype("float16")} for f in FEEDS[:3]],
            5e-3,
            id="float16",
        ),
    ],
)
def test_statistics_of_samples_of_any_size_and_type(
    model: onnx.ModelProto, samples: list[dict[str, Any]], rel: float
) -> None:
    values = {n: v.astype(np.float32) for n, v in run_all(model, samples, NAMES).items()}
    assert_same(collect(model, samples, NAMES, progress=False), values, rel)


def test_image_size_is_an_argument_or_in_the_metadata(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    model = conv_net(("batch", 3, "height", "width"))

    def count(**options: Any) -> int:
        return run(data=tmp_path, names=("images",), model=model, **options)["images"].count

    with pytest.raises(DataError, check=has("missing-argument", parameter="size", node="images")):
        count()
    assert count(size=(8, 24)) == 2 * 3 * 8 * 24
    model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value="[24, 32]"))
    assert count() == 2 * 3 * 24 * 32


def test_iterator_is_read_as_far_as_needed() -> None:
    yielded: list[int] = []

    def generate() -> Iterator[Any]:
        for feed in itertools.cycle(FEEDS):
            yielded.append(1)
            yield feed

    statistics = run(data=generate(), max_images=6)
    assert (statistics.images, statistics.fingerprint) == (6, "") and len(yielded) <= 7


def test_unsorted_nodes_and_subgraphs_are_run() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[1, 4] x) => (float[1, 4] out) <bool c = {1}, float[1] k = {3}> {
            out = If (c) <
                then_branch = then () => (float[1, 4] z) { z = Mul (y, k) },
                else_branch = else () => (float[1, 4] w) { w = Identity (y) }
            >
            y = Relu (x)
        }""")
    sample = {"x": np.array([[-1, 2, 0, 5]], np.float32)}
    statistics = run(data=[sample], names=("out", "y"), model=model)
    ranges = {name: (part.minimum, part.maximum) for name, part in statistics.items()}
    assert ranges == {"out": (0.0, 15.0), "y": (0.0, 5.0)}


# Caches


def test_finished_cache_is_reused(cache: Path) -> None:
    first = run(cache)
    assert (first.notes, first.warnings, load_progress(cache).total) == ([], [FEW], 6)
    again = run(cache)
    assert again.notes == [note("reused", cache=cache, images=6)]
    assert (again.images, again.warnings, list(again)) == (6, first.warnings, ["c1", "images"])


@pytest.mark.parametrize(
    ("options", "code", "mismatch"),
    [
        pytest.param(
            {"model": conv_net(seed=1)}, "different-models", CacheMismatch.MODEL, id="other model"
        ),
        pytest.param({"data": FEEDS[:5]}, "different-data", CacheMismatch.DATA, id="other data"),
        pytest.param({"bins": 64}, "different-bins", CacheMismatch.BINS, id="other bins"),
    ],
)
def test_cache_of_another_calibration_is_replaced_only_on_request(
    cache: Path, options: dict[str, Any], code: str, mismatch: CacheMismatch
) -> None:
    run(cache)
    before = cache.read_bytes()
    with pytest.raises(DataError, match="`overwrite_cache`", check=has(code, path=str(cache))):
        run(cache, **options)
    assert cache.read_bytes() == before
    replaced = run(cache, overwrite_cache=True, **options)
    assert replaced.notes == [note("not-used", cache=cache, why=mismatch)]
    assert load_progress(cache).statistics.images == replaced.images


def test_iterator_replaces_only_a_cache_of_an_iterator(tmp_path: Path, cache: Path) -> None:
    listed, anew = tmp_path / "listed.npz", note("not-reused", cache=cache)
    assert run(cache, iter(FEEDS)).notes == [anew]
    assert run(cache, iter(FEEDS)).notes == [
        anew,
        note("not-used", cache=cache, why=CacheMismatch.DATA),
    ]
    run(listed)
    for path, data, model, code in (
        (cache, iter(FEEDS), conv_net(seed=1), "different-models"),
        (cache, FEEDS, None, "different-data"),
        (listed, iter(FEEDS), None, "different-data"),
    ):
        with pytest.raises(DataError, check=has(code, path=str(path))):
            run(path, data, model=model)


def test_other_tensors_are_added_to_a_finished_cache(cache: Path) -> None:
    first, more = run(cache, names=("c1",)), run(cache, names=("r2", "c1", "images"))
    assert more.notes == [note("reused-in-part", cache=cache, missing=2)]
    assert list(more) == ["r2", "c1", "images"] and more.images == 6
    assert counts_of(more["c1"]) == counts_of(first["c1"])
    added = load_progress(cache)
    assert added.is_complete and list(added.statistics) == ["c1", "r2", "images"]


def write_unfinished(cache: Path) -> None:
    run(cache)
    whole = load_progress(cache)
    run(cache, FEEDS[:2], overwrite_cache=True)
    part = load_progress(cache)
    part.statistics.fingerprint = whole.statistics.fingerprint
    progress = CalibrationProgress(part.model, part.statistics, {0, 1}, None, part.quality)
    save_progress(progress, cache)


def test_unfinished_cache_without_a_tensor_is_not_used(cache: Path) -> None:
    write_unfinished(cache)
    statistics = run(cache, names=("r2", "images", "c2"))
    assert statistics.notes == [note("unfinished", cache=cache, tensor="r2")]
    assert statistics.images == 6
    assert list(load_progress(cache).statistics) == ["r2", "images", "c2"]


def test_progress_of_a_resumed_pass_counts_samples_that_are_left(
    cache: Path, watch_progress: WatchProgress
) -> None:
    write_unfinished(cache)
    lines = watch_progress()
    assert run(cache, progress=True).notes == [note("resumed", cache=cache, images=2)]
    assert "of 4 " in lines.getvalue()


def test_progress_of_an_iterator_has_no_total(watch_progress: WatchProgress) -> None:
    lines = watch_progress()
    run(data=iter(FEEDS), progress=True)
    assert "Calibrating" in lines.getvalue() and " of " not in lines.getvalue()


@pytest.mark.parametrize(("seconds", "saves"), [(4.5, 3), (5.0, 3), (5.5, 6)])
def test_cache_is_saved_whenever_five_seconds_have_passed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, saves: int
) -> None:
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    totals: list[int | None] = []

    def save(progress: CalibrationProgress, path: Path) -> None:
        totals.append(progress.total)
        save_progress(progress, path)

    monkeypatch.setattr(runner, "save_progress", save)
    run(cache)
    assert totals == [None] * saves + [6]
    totals.clear()
    run(cache, names=("r2", "c1"))
    assert totals == [6], "with tensors of a finished pass, at the end alone"


def test_interrupted_pass_leaves_a_finished_cache(
    cache: Path, watch_progress: WatchProgress
) -> None:
    """Incomplete statistics of added tensors are discarded."""
    run(cache, names=("c1",))
    before = cache.read_bytes()
    watch_progress(stop_after(2))
    with pytest.raises(KeyboardInterrupt):
        run(cache, names=("c1", "r2"), progress=True)
    assert cache.read_bytes() == before


def test_cache_key_is_of_the_model_its_weight_files_and_the_focus(
    tmp_path: Path, cache: Path
) -> None:
    path, weights = tmp_path / "m.onnx", tmp_path / "w.bin"

    def key(model: Any, focus: Focus | None = None) -> str:
        run(cache, model=model, focus=focus, overwrite_cache=True)
        return load_progress(cache).model

    inside = load(conv_net())
    assert key(inside) == inside.sha256 and len(inside.sha256) == 64
    assert key(inside, Focus(("c1", "out"), -2.25, 0.5)) == f"{inside.sha256} -2.25 0.5 c1 out"
    save_external(path, threshold=500)
    outside = load(path)
    before = outside.sha256 + file_digest(weights).hex()
    assert key(outside) == before and key(outside, Focus(("c1",), 1, 1)) == f"{before} 1 1 c1"
    content = bytearray(weights.read_bytes())
    content[0] ^= 1
    weights.write_bytes(content)
    assert key(load(path)) == outside.sha256 + file_digest(weights).hex() != before


def test_model_that_cannot_be_identified_uses_no_cache(cache: Path) -> None:
    model, focus = load(conv_net()), Focus(("out",))
    model.sha256 = ""  # as of a model of more than 2 GB in memory
    run(cache, model=model, focus=focus)
    with pytest.raises(DataError, check=has("different-models", path=str(cache))):
        run(cache, model=model, focus=focus)


# Data that is broken or not finite


def test_values_that_are_not_finite_are_reported() -> None:
    samples = [{"images": f["images"].copy()} for f in FEEDS]
    samples[2]["images"][0, 0, :2, 0] = np.nan
    assert run(data=samples, names=("images",)).warnings == [
        FEW,
        note("nonfinite-samples", nonfinite=1, total=6),
        note("nonfinite-tensor", tensor="images", nonfinite=2, total=6 * 768),
    ]


def test_tensor_that_is_never_finite_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(conv_net(), path)
    nan = [{"images": np.full((1, 3, 16, 16), np.nan, np.float32)}]
    for model, name in ((None, "model"), (path, str(path))):
        with pytest.raises(DataError, check=has("not-finite", path=name, node="images")):
            run(data=nan, names=("images",), model=model)


def net_with_slice(start: int, end: int) -> onnx.ModelProto:
    model = conv_net()
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array([value]), name)
        for name, value in (("starts", start), ("ends", end), ("axes", 2))
    )
    model.graph.node.append(
        onnx.helper.make_node("Slice", ["c1", "starts", "ends", "axes"], ["row"])
    )
    return model


def test_input_that_is_not_finite_is_the_cause_of_a_tensor_that_never_is() -> None:
    samples = [{"images": np.full((1, 3, 16, 16), 0.5, np.float32)} for _ in range(3)]
    for sample in samples:
        sample["images"][0, :, 3, ::2] = np.nan  # makes every value of that row of `c1` NaN
    with pytest.raises(
        DataError, check=has("not-finite", 72, "'row'", parameter="data", node="images")
    ):
        run(data=samples, names=("images", "row"), model=net_with_slice(3, 4))


def test_tensor_without_values_is_no_error() -> None:
    statistics = run(names=("row",), model=net_with_slice(3, 3))
    assert statistics["row"].count == 0 and statistics.warnings == [FEW]


def test_images_that_are_all_broken_are_an_error(tmp_path: Path, cache: Path) -> None:
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_text("no picture")
    with pytest.raises(
        DataError, check=has("file-damaged", "2 images, a.png: not a JPEG", parameter="data")
    ):
        run(cache, tmp_path)
    assert not (cache).exists()


@pytest.mark.parametrize(
    ("data", "check"),
    [
        pytest.param([], has("empty", parameter="data"), id="no samples"),
        pytest.param(
            [{"images": np.zeros((1, 3, 5, 5), np.float32)}],
            has("wrong-shape", node="images"),
            id="other shape",
        ),
    ],
)
def test_arrays_that_cannot_be_used_leave_no_cache(cache: Path, data: Any, check: Any) -> None:
    with pytest.raises(DataError, check=check):
        run(cache, data)
    assert not cache.exists()


def test_dataset_can_be_used_again() -> None:
    data = open_data(FEEDS, input_specs(load(conv_net())))
    assert run(data=data).warnings == run(data=data).warnings == [FEW]


# Threads


def test_error_in_a_thread_reaches_the_caller_and_no_thread_stays() -> None:
    def generate() -> Iterator[Any]:
        yield from FEEDS[:2]
        raise QdqtoolError("the camera is gone")

    before = set(threading.enumerate())
    with pytest.raises(QdqtoolError, match="camera"):
        run(data=generate())
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("cores", "listed", "workers", "threads"),
    [(1, True, 1, 1), (2, True, 2, 1), (8, True, 4, 2), (8, False, 1, 8), (10, True, 4, 2)],
)
def test_cores_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, cores: int, listed: bool, workers: int, threads: int
) -> None:
    sessions: list[tuple[list[str], int]] = []
    counters: list[tuple[int, int | None]] = []
    open_session = runner.open_session

    def record_session(model: Any, names: list[str], count: int) -> Any:
        sessions.append((names, count))
        return open_session(model, names, count)

    def record_counter(*arguments: Any) -> SampleCounter:
        values = inspect.signature(SampleCounter).bind(*arguments).arguments
        counters.append((values["threads"], values["samples"]))
        return SampleCounter(*arguments)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setattr(runner, "open_session", record_session)
    monkeypatch.setattr(runner, "SampleCounter", record_counter)
    run(data=FEEDS if listed else iter(FEEDS), focus=Focus(("out",)))
    assert sessions == [(["c1", "out"], threads)]
    assert counters == [(threads, len(FEEDS) if listed else None)] * workers
    run(names=("images",))
    assert len(sessions) == 1, "inputs need no session"

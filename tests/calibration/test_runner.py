"""collect() against every value of the tensors as onnxruntime gives them."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import calibration
from calibration import Focus, runner
from calibration.arrays import open_data
from calibration.cache import Progress, Statistics, load_progress, save_progress
from calibration.runner import _identity, _model_key, collect
from calibration.session import input_specs
from calibration.statistics import TensorStatistics
from qdqtool.base.notes import Remark
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from tests.calibration.nets import conv_net, refused, run_all, write_pictures
from tests.raising import raises

NAMES = ["images", "c1", "r2"]


def feeds(
    count: int, shape: tuple[int, ...] = (1, 3, 16, 16), dtype: str = "float32"
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    return [{"images": rng.random(shape).astype(dtype)} for _ in range(count)]


def assert_same(found: calibration.Statistics, values: dict[str, Any], rel: float = 1e-5) -> None:
    """Fused kernels may differ in the last bits, which can move a value to the next bin but not further."""
    for name, flat in values.items():
        part, direct = found[name], TensorStatistics.of(flat)
        assert part.count == flat.size
        assert part.minimum == pytest.approx(float(flat.min()), rel=rel, abs=1e-6)
        assert part.maximum == pytest.approx(float(flat.max()), rel=rel, abs=1e-6)
        ours, edges = part.linear(64)
        theirs, _ = np.histogram(np.abs(flat), edges)
        assert np.abs(np.cumsum(ours) - np.cumsum(theirs)).max() <= max(0.02 * flat.size, 3), name
        assert part.counter.counts.sum() == direct.counter.counts.sum()


def test_statistics_are_those_of_every_value(tmp_path: Path) -> None:
    write_pictures(tmp_path, 9)
    model = conv_net()
    found = collect(model, tmp_path, NAMES, progress=False)
    samples = [dict(s) for s in open_data(tmp_path, input_specs(load(model)))]
    assert found.images == 9
    assert list(found) == NAMES
    assert_same(found, run_all(model, samples, NAMES))
    assert found.warnings == [Remark.FEW_IMAGES(images=9, enough=100)]
    write_pictures(tmp_path / "five", 5)
    found = collect(conv_net((4, 3, 16, 16)), tmp_path / "five", ["images"], progress=False)
    assert found.images == 5
    assert found["images"].count == 8 * 3 * 16 * 16


def test_samples_of_any_size_and_type() -> None:
    model = conv_net(("batch", 3, "height", "width"))
    samples = feeds(2) + feeds(2, (2, 3, 8, 24))
    assert_same(collect(model, samples, NAMES, progress=False), run_all(model, samples, NAMES))
    model = conv_net(dtype=TensorProto.FLOAT16)
    samples = feeds(3, dtype="float16")
    found = collect(model, samples, NAMES, progress=False)
    values = {n: v.astype(np.float32) for n, v in run_all(model, samples, NAMES).items()}
    assert_same(found, values, rel=5e-3)


def test_sizes_and_iterators(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    model = conv_net(("batch", 3, "height", "width"))
    with pytest.raises(DataError, match="size open"):
        collect(model, tmp_path, ["images"], progress=False)
    assert (
        collect(model, tmp_path, ["images"], progress=False, size=(8, 24))["images"].count
        == 2 * 3 * 8 * 24
    )
    model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value="[24, 32]"))
    assert collect(model, tmp_path, ["images"], progress=False)["images"].count == 2 * 3 * 24 * 32
    alive: list[int] = []

    def generate() -> Any:
        for feed in feeds(20):
            alive.append(1)
            yield feed

    found = collect(conv_net(), generate(), ["c1"], progress=False, max_images=6)
    assert found.images == 6 and len(alive) <= 7
    assert found.fingerprint == ""


def test_subgraphs_keep_what_they_read_and_unsorted_nodes_are_sorted() -> None:
    inner = [helper.make_node("Mul", ["y", "k"], ["z"])]
    then = helper.make_graph(inner, "then", [], [helper.make_tensor_value_info("z", 1, None)])
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["w"])],
        "else",
        [],
        [helper.make_tensor_value_info("w", 1, None)],
    )
    nodes = [
        helper.make_node("If", ["c"], ["out"], then_branch=then, else_branch=otherwise),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.array(True), "c"),
        numpy_helper.from_array(np.array([3], np.float32), "k"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 4])],
        [helper.make_tensor_value_info("out", 1, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    found = collect(
        model, [{"x": np.array([[-1, 2, 0, 5]], np.float32)}], ["out", "y"], progress=False
    )
    assert found["out"].maximum == 15.0 and found["y"].maximum == 5.0 and found["y"].minimum == 0.0


def test_an_error_in_a_worker_reaches_the_caller_and_no_thread_stays() -> None:
    def generate() -> Any:
        yield from feeds(2)
        raise QdqtoolError("the camera is gone")

    before = threading.active_count()
    with pytest.raises(QdqtoolError, match="camera"):
        collect(conv_net(), generate(), ["c1"], progress=False)
    for thread in threading.enumerate():
        if (
            thread is not threading.main_thread()
            and thread.daemon
            and "Worker" in type(thread).__name__
        ):
            thread.join(5)
    assert threading.active_count() <= before


FEEDS = [{"images": np.random.default_rng(k).random((1, 3, 16, 16), np.float32)} for k in range(6)]
FEW = Remark.FEW_IMAGES(images=6, enough=100)


def run(
    cache: Path | None = None,
    data: Any = None,
    names: tuple[str, ...] = ("c1", "images"),
    **options: Any,
) -> Any:
    model = options.pop("model", None) or conv_net()
    return collect(
        model, FEEDS if data is None else data, names, cache=cache, progress=False, **options
    )


def unfinished(cache: Path, done: int = 2, **options: Any) -> None:
    """A cache of which some samples are missing, as an interrupted run leaves it."""
    run(cache, **options)
    whole = load_progress(cache)
    run(cache, FEEDS[:done], overwrite_cache=True, **options)
    part = load_progress(cache)
    part.statistics.fingerprint = whole.statistics.fingerprint
    save_progress(Progress(part.model, part.statistics, set(range(done)), None, part.looks), cache)


def test_caches_that_are_found_and_of_iterators(tmp_path: Path) -> None:
    cache = tmp_path / "c.npz"
    assert run(cache).notes == [] and load_progress(cache).total == 6
    again = run(cache)
    assert again.notes == [Remark.REUSED(cache=cache, images=6)]
    assert (again.images, again.warnings, list(again)) == (
        6,
        [FEW],
        ["c1", "images"],
    ) and again.fingerprint
    refused(
        DataError,
        f"_Job._from_cache {cache}: model; `overwrite_cache`",
        run,
        cache,
        model=conv_net(seed=1),
    )
    refused(DataError, f"_Job._from_cache {cache}: data `overwrite_cache`", run, cache, FEEDS[:5])
    refused(DataError, f"_Job._from_cache {cache}: bins; `overwrite_cache`", run, cache, bins=64)
    replaced = run(cache, FEEDS[:5], overwrite_cache=True)
    assert replaced.notes == [Remark.NOT_USED(cache=cache, why=runner.Mismatch.DATA)]
    assert load_progress(cache).statistics.images == 5 == replaced.images
    cache = tmp_path / "iterated.npz"
    anew = Remark.NOT_REUSED(cache=cache)
    assert run(cache, iter(FEEDS)).notes == [anew]
    again = run(cache, iter(FEEDS))
    assert again.notes == [anew, Remark.NOT_USED(cache=cache, why=runner.Mismatch.DATA)]
    refused(
        DataError,
        f"_Job._from_cache {cache}: model",
        run,
        cache,
        iter(FEEDS),
        model=conv_net(seed=1),
    )
    refused(DataError, f"_Job._from_cache {cache}: data", run, cache)  # a list can be told from it
    run(tmp_path / "listed.npz")
    refused(
        DataError, "_Job._from_cache listed.npz: data", run, tmp_path / "listed.npz", iter(FEEDS)
    )


def test_what_other_tensors_do_to_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "c.npz"
    first = run(cache, names=("c1",))
    more = run(cache, names=("r2", "c1", "images"))
    assert more.notes == [Remark.REUSED_IN_PART(cache=cache, missing=2)]
    assert (
        list(more) == ["r2", "c1", "images"] and more.images == 6 and load_progress(cache).complete
    )
    assert np.array_equal(more["c1"].counter.counts, first["c1"].counter.counts)
    assert list(load_progress(cache).statistics) == ["c1", "r2", "images"]
    cache = tmp_path / "c.npz"
    unfinished(cache)
    found = run(cache, names=("r2", "images", "c2"))
    assert found.notes == [Remark.UNFINISHED(cache=cache, tensor="r2")]
    assert found.images == 6 and list(load_progress(cache).statistics) == ["r2", "images", "c2"]


def test_an_unfinished_pass_goes_on(tmp_path: Path) -> None:
    cache = tmp_path / "c.npz"
    whole = run()
    unfinished(cache)
    totals: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "track", lambda items, text, total: totals.append(total) or items)
        found = collect(conv_net(), FEEDS, ["c1", "images"], cache=cache)
        collect(conv_net(), iter(FEEDS), ["c1"])
    assert totals == [4, None]
    assert found.notes == [Remark.RESUMED(cache=cache, images=2)]
    assert (found.images, found.warnings) == (6, whole.warnings) and load_progress(cache).total == 6
    for name in whole:
        assert np.array_equal(found[name].counter.counts, whole[name].counter.counts)


def interfered(monkeypatch: pytest.MonkeyPatch, act: Any, after: int = 3) -> None:
    """Does something when so many samples are done."""

    def track(items: Iterator[int], text: str, total: int | None) -> Iterator[int]:
        for number, item in enumerate(items, 1):
            yield item
            if number == after:
                act()

    monkeypatch.setattr(runner, "track", track)


def test_what_another_process_wrote_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = tmp_path / "c.npz", tmp_path / "other.npz"
    run(other, model=conv_net(seed=1))
    theirs = other.read_bytes()
    interfered(monkeypatch, lambda: cache.write_bytes(theirs))
    refused(
        DataError,
        f"_Job._check_own {cache}: process model;",
        collect,
        conv_net(),
        FEEDS,
        ["c1"],
        cache=cache,
    )
    assert cache.read_bytes() == theirs
    found = collect(conv_net(), FEEDS, ["c1"], cache=cache, overwrite_cache=True)
    assert found.images == 6 and cache.read_bytes() != theirs
    run(tmp_path / "same.npz")  # of this model and data
    ours = (tmp_path / "same.npz").read_bytes()
    cache.unlink()
    interfered(monkeypatch, lambda: cache.write_bytes(ours))
    collect(conv_net(), FEEDS, ["c1"], cache=cache)
    assert list(load_progress(cache).statistics) == ["c1"]


@pytest.mark.parametrize(("seconds", "saves"), [(4.5, 3), (5.0, 3), (5.5, 6)])
def test_it_is_saved_whenever_five_seconds_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, saves: int
) -> None:
    """Six samples by a clock that goes on by so many seconds each time that it is read."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    totals: list[int | None] = []
    real = runner.save_progress
    monkeypatch.setattr(
        runner, "save_progress", lambda p, path: totals.append(p.total) or real(p, path)
    )
    run(tmp_path / "c.npz")
    assert totals == [None] * saves + [6]
    totals.clear()
    run(tmp_path / "c.npz", names=("r2", "c1"))  # with tensors of a finished pass, at the end alone
    assert totals == [6]


def test_a_failure_keeps_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "c.npz"

    def stop() -> None:
        raise KeyboardInterrupt

    interfered(monkeypatch, stop, 2)
    with pytest.raises(KeyboardInterrupt):
        collect(conv_net(), FEEDS, ["c1"], cache=cache)
    assert load_progress(cache).total is None and len(load_progress(cache).done) >= 2
    finished = tmp_path / "f.npz"
    run(finished, names=("c1",))
    before = finished.read_bytes()
    with pytest.raises(KeyboardInterrupt):  # of the tensors that are added, a part is worth nothing
        collect(conv_net(), FEEDS, ["c1", "r2"], cache=finished)
    assert finished.read_bytes() == before
    broken = [{"images": np.zeros((1, 3, 5, 5), np.float32)}]
    with pytest.raises(DataError, match="takes"):
        run(tmp_path / "none.npz", broken)
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize(
    ("cores", "listed", "workers", "threads"),
    [(1, True, 1, 1), (2, True, 2, 1), (8, True, 4, 2), (8, False, 1, 8), (10, True, 4, 2)],
)
def test_cores_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, cores: int, listed: bool, workers: int, threads: int
) -> None:
    opened: list[tuple[list[str], int]] = []
    counters: list[tuple[int, int | None]] = []
    session, tally = runner.open_session, runner.Tally

    def opening(model: Any, names: list[str], count: int) -> Any:
        opened.append((list(names), count))
        return session(model, names, count)

    def counting(*args: Any) -> Any:
        counters.append((args[4], args[5]))
        return tally(*args)

    monkeypatch.setattr(runner, "cores", lambda: cores)
    monkeypatch.setattr(runner, "open_session", opening)
    monkeypatch.setattr(runner, "Tally", counting)
    run(data=FEEDS if listed else iter(FEEDS), focus=Focus(("out",)))
    assert opened == [(["c1", "out"], threads)]
    assert counters == [(threads, len(FEEDS) if listed else None)] * workers
    opened.clear()
    run(names=("images",))
    assert opened == [], "inputs need no session"


def test_what_is_not_finite(tmp_path: Path) -> None:
    samples = [{"images": f["images"].copy()} for f in FEEDS]
    samples[2]["images"][0, 0, :2, 0] = np.nan
    found = run(data=samples, names=("images",))
    assert found.warnings == [
        FEW,
        Remark.NONFINITE_SAMPLES(nonfinite=1, total=6),
        Remark.NONFINITE_TENSOR(tensor="images", nonfinite=2, total=6 * 768),
    ]
    only = [{"images": np.full((1, 3, 16, 16), np.nan, np.float32)}]
    refused(DataError, "_checked model: 'images' NaN", run, data=only, names=("images",))
    path = tmp_path / "m.onnx"
    onnx.save(conv_net(), path)
    refused(
        DataError, f"_checked {path}: 'images' NaN", run, data=only, names=("images",), model=path
    )
    empty = Statistics({"x": TensorStatistics()})
    assert runner._checked(empty, ["x"], Model(conv_net())).warnings == []
    broken = [{"images": np.full((1, 3, 16, 16), 0.5, np.float32)} for _ in range(3)]
    for sample in broken:
        sample["images"][0, :, 3, ::2] = (
            np.nan
        )  # so that every value of the first convolution's row is NaN
    told = "_checked 72 images row"
    model = conv_net()
    for name, values in (("starts", [3]), ("ends", [4]), ("axes", [2])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), name))
    model.graph.node.append(
        onnx.helper.make_node("Slice", ["c1", "starts", "ends", "axes"], ["row"])
    )
    with raises(DataError, told):
        run(data=broken, names=("images", "row"), model=model)


def test_data_that_is_empty_or_counted_anew(tmp_path: Path) -> None:
    refused(DataError, "_Job.run samples", run, data=[])
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_text("no picture")
    refused(DataError, "_Job.run 2 a.png: 'a.png'", run, tmp_path / "c.npz", tmp_path)
    assert not (tmp_path / "c.npz").exists()
    data = open_data(FEEDS, input_specs(load(conv_net())))
    assert run(data=data).warnings == run(data=data).warnings == [FEW]


def test_what_a_model_is_recognised_by(tmp_path: Path) -> None:
    model = load(conv_net())
    assert _model_key(model, None) == model.sha256 and len(model.sha256) == 64
    assert _model_key(model, Focus(("a", "b"), -2.25, 0.5)) == f"{model.sha256} -2.25 0.5 a b"
    path = tmp_path / "m.onnx"
    onnx.save(conv_net(), path, save_as_external_data=True, location="w.bin", size_threshold=500)
    outside = load(path)
    key = _model_key(outside, None)
    assert key.startswith(outside.sha256) and len(key) == 64 + 32, (
        "and the digest of the one weight file"
    )
    assert _model_key(outside, Focus(("a",), 1, 1)) == f"{key} 1 1 a"
    weights = bytearray((tmp_path / "w.bin").read_bytes())
    weights[0] ^= 1
    (tmp_path / "w.bin").write_bytes(weights)
    assert _model_key(load(path), None) not in (key, outside.sha256)
    model.sha256 = ""
    assert _model_key(model, None) == ""


def test_a_model_that_cannot_be_told_takes_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_model_key", lambda *_: "")
    run(tmp_path / "c.npz")
    refused(DataError, f"_Job._from_cache {tmp_path / 'c.npz'}: model", run, tmp_path / "c.npz")


def test_whether_a_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert _identity(path) is None
    path.write_bytes(b"1")
    first = _identity(path)
    assert first == _identity(path) and first is not None
    os.utime(path, ns=(1, first[2]))
    path.write_bytes(b"22")
    os.utime(path, ns=(1, first[2]))
    assert _identity(path) != first, "of another size"

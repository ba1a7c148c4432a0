from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import Dataset, Focus, InputSpec, Statistics, cluster_pass, collect
from calibration.cluster.connection import Cluster, connect
from calibration.cluster.jobs import AHEAD, ClusterJob
from calibration.images import YOLO_PREPROCESS
from qdqtool.errors import ClusterError, DataError
from tests.calibration.checks import contents
from tests.calibration.cluster.clusters import (
    ENDLESS,
    ChangingSource,
    fail_on_three,
    kill_one,
    left_behind,
    multiply,
    put,
    record_arrivals,
    recorded,
    replace_facts,
    share_number,
    worker_pids,
)
from tests.calibration.nets import conv_net, save_external, write_pictures
from tests.calibration.watchers import WatchProgress, stop_after
from tests.errors import has
from tests.slow import slow_after

# find_spec does not import: collecting all tests does not load Dask.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, 12, 40, 30)
    (folder / "picture007.png").write_bytes(b"no picture")
    write_pictures(folder / "sub", 2, suffix=".jpg")
    return folder


def run(data: Any, client: Any = None, model: Any = None, **options: Any) -> Statistics:
    options.setdefault("progress", False)
    return collect(
        conv_net() if model is None else model,
        data,
        ["images", "c1", "r2"],
        cluster=client,
        **options,
    )


FOCUS = Focus(("out",))


@pytest.fixture(scope="module")
def alone(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    cache = tmp_path_factory.mktemp("alone") / "cache.npz"
    return contents(run(pictures, cache=cache, focus=FOCUS)), cache.read_bytes()


SetSize = Callable[[int], None]


@pytest.fixture
def portion_size(monkeypatch: pytest.MonkeyPatch) -> SetSize:
    return lambda size: monkeypatch.setattr(
        cluster_pass, "portion_size", lambda left, slots: min(left, size)
    )


@pytest.mark.parametrize("size", [1, 5, None])
def test_any_partition_gives_the_same_statistics(
    client: Any,
    pictures: Path,
    alone: tuple[Any, bytes],
    portion_size: SetSize,
    size: int | None,
    tmp_path: Path,
) -> None:
    if size is not None:
        portion_size(size)
    cache = tmp_path / "cache.npz"
    assert (contents(run(pictures, client, cache=cache, focus=FOCUS)), cache.read_bytes()) == alone
    assert left_behind(client) == (0, 0, [])


def test_fixed_batches_are_shared_out(client: Any, pictures: Path, portion_size: SetSize) -> None:
    portion_size(2)
    model = conv_net((4, 3, 16, 16))
    assert contents(run(pictures, client, model)) == contents(run(pictures, model=model))


def test_external_weights_reach_the_workers(client: Any, pictures: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_external(path)
    assert contents(run(pictures, client, path)) == contents(run(pictures))


@pytest.fixture
def stacked() -> Any:
    return np.random.default_rng(0).random((7, 3, 16, 16), np.float32)


@pytest.mark.parametrize("name", ["all.npz", "each", None])
def test_arrays_are_shared_out(
    client: Any, tmp_path: Path, stacked: Any, portion_size: SetSize, name: str | None
) -> None:
    portion_size(2)
    (tmp_path / "each").mkdir()
    np.savez(tmp_path / "all.npz", images=stacked)
    for k, array in enumerate(stacked):
        np.save(tmp_path / "each" / f"{k}.npy", array)
    data = stacked if name is None else tmp_path / name
    assert contents(run(data, client)) == contents(run(data))


def test_compressed_arrays_and_iterators_cannot_be_shared_out(
    client: Any, tmp_path: Path, stacked: Any
) -> None:
    path = tmp_path / "packed.npz"
    np.savez_compressed(path, images=stacked)
    with pytest.raises(DataError, check=has("compressed-archive", path=str(path))):
        run(path, client)
    with pytest.raises(DataError, check=has("not-shareable", parameter="data")):
        run(iter([{"images": stacked[:1]}]), client)


# A worker takes seconds of processor time to start.
@pytest.mark.parametrize("count", slow_after(1, [5, 1]))
def test_dead_worker_is_replaced_and_nothing_is_counted_twice(
    client: Any,
    pictures: Path,
    alone: tuple[Any, bytes],
    watch_progress: WatchProgress,
    portion_size: SetSize,
    count: int,
) -> None:
    portion_size(1)
    before = set(worker_pids(client).values())
    watch_progress(lambda number: number == count and kill_one(client))
    assert contents(run(pictures, client, focus=FOCUS, progress=True)) == alone[0]
    client.wait_for_workers(2, timeout=60)
    assert len(before & set(worker_pids(client).values())) == 1
    assert left_behind(client) == (0, 0, [])


def test_interrupted_run_leaves_nothing_behind_and_goes_on(
    client: Any,
    pictures: Path,
    alone: tuple[Any, bytes],
    watch_progress: WatchProgress,
    portion_size: SetSize,
    tmp_path: Path,
) -> None:
    portion_size(1)
    cache = tmp_path / "cache.npz"
    watch_progress(stop_after(5))
    with pytest.raises(KeyboardInterrupt):
        run(pictures, client, cache=cache, focus=FOCUS, progress=True)
    assert left_behind(client) == (0, 0, [])
    numbers: list[int] = []
    watch_progress(numbers.append)
    statistics = run(pictures, client, cache=cache, focus=FOCUS, progress=True)
    assert len(numbers) == 14 - 5, "the portions that had been merged are not done again"
    assert statistics.notes[0].code == "resumed"
    assert (contents(statistics), cache.read_bytes()) == alone
    # One process goes on where a cluster stopped, and finds it finished.
    assert run(pictures, cache=cache, focus=FOCUS).notes[0].code == "reused"


def test_model_travels_once_to_each_worker(
    client: Any, pictures: Path, portion_size: SetSize
) -> None:
    portion_size(1)
    client.run(record_arrivals)
    run(pictures, client)
    assert [len(sizes) for sizes, _ in client.run(recorded).values()] == [1, 1]


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        ({"qdqtool": "0.0.9"}, ["qdqtool 0.0.9"]),
        ({"onnxruntime": "1.0"}, ["onnxruntime 1.0"]),
        ({"test network": "x"}, ["`mixed_cpus`"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_worker_that_differs_is_rejected(
    client: Any, pictures: Path, facts: dict[str, str], values: list[str]
) -> None:
    worker = min(worker_pids(client))
    client.run(replace_facts, facts, workers=[worker])
    try:
        with pytest.raises(ClusterError, check=has("worker-mismatch", worker, *values)):
            run(pictures, client)
        assert left_behind(client) == (0, 0, [])
        if "test network" in facts:
            assert run(pictures, client, mixed_cpus=True).images
    finally:
        client.run(replace_facts, {}, workers=[worker])


def test_other_files_on_a_worker_are_rejected(client: Any, pictures: Path) -> None:
    inputs = [InputSpec("images", (1, 3, 16, 16))]
    source = ChangingSource(sorted(pictures.glob("*.png")), pictures, inputs, YOLO_PREPROCESS, None)
    with pytest.raises(ClusterError, check=has("different-files", "tcp://", "picture005.png")):
        run(Dataset(source, inputs, 100), client)
    assert left_behind(client) == (0, 0, [])


def test_errors_of_samples_name_the_worker(client: Any, tmp_path: Path) -> None:
    for k in range(4):
        np.save(tmp_path / f"{k}.npy", np.zeros((1, 3, 16, 8 if k == 2 else 16), np.float32))
    with pytest.raises(
        DataError, check=has("wrong-shape", "tcp://", "2.npy", "[1, 3, 16, 8]", node="images")
    ):
        run(tmp_path, client)


# fsspec's file system in memory stands for a store: each process has its own.


def test_urls_are_read_by_the_workers(client: Any, pictures: Path) -> None:
    store = {f"/qdqtool-cluster/{p.name}": p.read_bytes() for p in sorted(pictures.glob("*.png"))}
    put(store)
    url = "memory://qdqtool-cluster"
    with pytest.raises(ClusterError, check=has("file-unreadable", "tcp://", "picture")):
        run(url, client)
    alone = run(url)
    assert alone.images == 11 and alone.skipped[0][0] == "picture007.png"
    client.run(put, store)
    assert contents(run(url, client)) == contents(alone)


def test_other_content_behind_a_url_is_rejected(
    client: Any, pictures: Path, portion_size: SetSize
) -> None:
    portion_size(1)
    store = {
        f"/qdqtool-other/{k}.png": (pictures / f"picture00{k}.png").read_bytes() for k in range(4)
    }
    put(store)
    client.run(put, {**store, "/qdqtool-other/2.png": store["/qdqtool-other/3.png"]})
    with pytest.raises(ClusterError, check=has("different-files", "tcp://", "2.png")):
        run("memory://qdqtool-other", client)


# Jobs: each result once, nothing left behind, errors in one line


@pytest.fixture
def cluster(client: Any) -> Iterator[Cluster]:
    with connect(client) as opened:
        yield opened
    assert left_behind(client) == (0, 0, [])


def multiplication(cluster: Cluster, number: int = 7) -> ClusterJob:
    return ClusterJob(cluster, share_number, number, multiply)


def test_job_gives_each_result_once_and_limits_items_ahead(cluster: Cluster) -> None:
    taken: list[int] = []
    finished: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            assert len(taken) - len(finished) <= AHEAD * 2
            yield item

    with multiplication(cluster) as job:
        for item, result in job.results(items()):
            assert result == 7 * item
            finished.append(item)
    assert sorted(finished) == list(range(20))


def test_job_can_be_used_again_after_part_of_its_results(cluster: Cluster) -> None:
    with multiplication(cluster) as job:
        started = job.results(range(30, 60))
        next(started)
        started.close()
        assert sorted(job.results([1, 2])) == [(1, 7), (2, 14)] and list(job.results([])) == []


def test_work_ends_with_its_job(client: Any, cluster: Cluster) -> None:
    with multiplication(cluster) as job:
        running = job.results([1, ENDLESS, ENDLESS])
        assert next(running) == (1, 7)
        running.close()
    # Two endless pieces of work keep both workers busy unless they end with the job.
    with multiplication(cluster, 1) as job:
        assert sorted(job.results([1, 2, 3])) == [(1, 1), (2, 2), (3, 3)]
    assert [late for _, late in client.run(recorded).values()] == [[], []]


def test_job_reports_errors_of_workers(cluster: Cluster) -> None:
    with (
        pytest.raises(ClusterError, check=has("worker-failed", 3, "ValueError")),
        ClusterJob(cluster, share_number, 7, fail_on_three) as job,
    ):
        list(job.results(range(6)))

"""Calibration on a Dask cluster: the statistics of one process, bit for bit, whatever happens on the way."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibration import Focus, Statistics, collect
from calibration.clustered import ClusterPass, _Pace
from calibration.pictures import ImageSource
from qdqtool.base.notes import Remark
from qdqtool.errors import ClusterError, DataError
from tests.calibration.cluster.clusters import (
    arrivals,
    count_arrivals,
    kill_one,
    left_behind,
    pids,
    pretend,
    put,
)
from tests.calibration.nets import conv_net, state, write_pictures
from tests.raising import raises
from tests.slow import slow_after

#: Only looked for: reading all tests does not load it.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)

NAMES = ["images", "c1", "r2"]
FOCUS = Focus(("out",))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, 12, 40, 30)
    (folder / "picture007.png").write_bytes(b"no picture")
    (folder / "sub").mkdir()
    write_pictures(folder / "sub", 2, suffix=".jpg")
    return folder


@pytest.fixture(scope="module")
def alone(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Statistics, bytes]:
    """What one process makes of the pictures, and its cache."""
    cache = tmp_path_factory.mktemp("alone") / "cache.npz"
    return collect(
        conv_net(), pictures, NAMES, cache=cache, progress=False, focus=FOCUS
    ), cache.read_bytes()


def same(found: Statistics, wanted: Statistics) -> None:
    assert {n: state(p) for n, p in found.items()} == {n: state(p) for n, p in wanted.items()}
    assert list(found) == list(wanted)
    assert (found.images, found.fingerprint, found.warnings, found.skipped) == (
        wanted.images,
        wanted.fingerprint,
        wanted.warnings,
        wanted.skipped,
    )


def small_portions(monkeypatch: pytest.MonkeyPatch, size: int = 1) -> None:
    monkeypatch.setattr(_Pace, "size", lambda self, left, slots: min(left, size))


def after_portions(monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], None]) -> None:
    """Does something when so many portions have been merged."""
    seen: list[int] = []
    real = ClusterPass.results

    def results(self: ClusterPass) -> Iterator[int]:
        for number in real(self):
            seen.append(number)
            if len(seen) == count:
                act()
            yield number

    monkeypatch.setattr(ClusterPass, "results", results)


@pytest.mark.parametrize("portion", [1, 5, None])
def test_any_partition_is_the_same_bit_for_bit(
    client: Any,
    pictures: Path,
    alone: tuple[Statistics, bytes],
    monkeypatch: pytest.MonkeyPatch,
    portion: int | None,
    tmp_path: Path,
) -> None:
    if portion is not None:
        small_portions(monkeypatch, portion)
    cache = tmp_path / "cache.npz"
    same(
        collect(
            conv_net(), pictures, NAMES, cache=cache, progress=False, focus=FOCUS, cluster=client
        ),
        alone[0],
    )
    assert cache.read_bytes() == alone[1]
    assert left_behind(client) == (0, 0, [])


def test_fixed_batches_and_external_weights(
    client: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_portions(monkeypatch, 2)
    model = conv_net((4, 3, 16, 16))
    same(
        collect(model, pictures, NAMES, progress=False, cluster=client),
        collect(model, pictures, NAMES, progress=False),
    )
    onnx.save(
        conv_net(),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    same(
        collect(tmp_path / "m.onnx", pictures, NAMES, progress=False, cluster=client),
        collect(conv_net(), pictures, NAMES, progress=False),
    )


def test_array_files(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_portions(monkeypatch, 2)
    stacked = np.random.default_rng(0).random((7, 3, 16, 16), np.float32)
    np.savez(tmp_path / "all.npz", images=stacked)
    np.savez_compressed(tmp_path / "packed.npz", images=stacked)
    (tmp_path / "each").mkdir()
    for k, array in enumerate(stacked):
        np.save(tmp_path / "each" / f"{k}.npy", array)
    for data in (tmp_path / "all.npz", tmp_path / "each", stacked):
        same(
            collect(conv_net(), data, NAMES, progress=False, cluster=client),
            collect(conv_net(), data, NAMES, progress=False),
        )
    with pytest.raises(DataError, match=r"compressed.*numpy\.savez"):
        collect(conv_net(), tmp_path / "packed.npz", NAMES, progress=False, cluster=client)
    with raises(DataError, "MemorySource.portion"):
        collect(conv_net(), iter([{"images": stacked[:1]}]), NAMES, progress=False, cluster=client)


@pytest.mark.parametrize(
    "when", slow_after(1, [5, 1])
)  # a worker takes seconds of processor time to start
def test_a_worker_that_dies_is_replaced_and_nothing_counted_twice(
    client: Any,
    pictures: Path,
    alone: tuple[Statistics, bytes],
    monkeypatch: pytest.MonkeyPatch,
    when: int,
) -> None:
    small_portions(monkeypatch)
    before = set(pids(client).values())
    after_portions(monkeypatch, when, lambda: kill_one(client))
    same(
        collect(conv_net(), pictures, NAMES, progress=False, focus=FOCUS, cluster=client), alone[0]
    )
    client.wait_for_workers(2, timeout=60)
    assert len(before & set(pids(client).values())) == 1
    assert left_behind(client) == (0, 0, [])


def test_an_interrupted_run_leaves_the_cluster_clean_and_another_goes_on(
    client: Any,
    pictures: Path,
    alone: tuple[Statistics, bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache.npz"
    small_portions(monkeypatch)

    def stop() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_portions(patch, 5, stop)
        with pytest.raises(KeyboardInterrupt):
            collect(
                conv_net(),
                pictures,
                NAMES,
                cache=cache,
                progress=False,
                focus=FOCUS,
                cluster=client,
            )
    assert left_behind(client) == (0, 0, [])
    sent: list[int] = []
    real = ClusterPass._portions

    def portions(self: ClusterPass, job: Any) -> Iterator[Any]:
        for portion in real(self, job):
            sent.extend(portion.numbers)
            yield portion

    monkeypatch.setattr(ClusterPass, "_portions", portions)
    found = collect(
        conv_net(), pictures, NAMES, cache=cache, progress=False, focus=FOCUS, cluster=client
    )
    assert len(sent) == 14 - 5  # what had been merged, not more and not less, is not done again
    assert found.notes[0].remark is Remark.RESUMED
    same(found, alone[0])
    assert cache.read_bytes() == alone[1]
    # One process goes on where a cluster stopped, and finds it finished.
    again = collect(conv_net(), pictures, NAMES, cache=cache, progress=False, focus=FOCUS)
    assert again.notes[0].remark is Remark.REUSED


def test_the_model_travels_once_to_each_worker(
    client: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_portions(monkeypatch)
    client.run(count_arrivals)
    collect(conv_net(), pictures, NAMES, progress=False, cluster=client)
    assert [len(a) for a in client.run(arrivals).values()] == [1, 1]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"qdqtool": "0.0.9"}, "Job._hand_out tcp:// qdqtool 0.0.9"),
        ({"onnxruntime": "1.0"}, "Job._hand_out tcp:// onnxruntime 1.0"),
        ({"source": "x"}, "Job._hand_out tcp:// source"),
        ({"probe": "x", "processor": "Other"}, "Job._hand_out tcp:// 'Other' `mixed_cpus`"),
    ],
)
def test_a_worker_that_differs_is_refused(
    client: Any, pictures: Path, facts: dict[str, str], told: str
) -> None:
    one = sorted(pids(client))[0]
    client.run(pretend, facts, workers=[one])
    try:
        with raises(ClusterError, told) as caught:
            collect(conv_net(), pictures, NAMES, progress=False, cluster=client)
        assert "\n" not in str(caught.value) and one in str(caught.value)
        assert left_behind(client) == (0, 0, [])
        if "probe" in facts:
            assert collect(
                conv_net(), pictures, NAMES, progress=False, cluster=client, mixed_cpus=True
            ).images
    finally:
        client.run(pretend, {}, workers=[one])


def test_other_files_on_a_worker_are_refused(
    client: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ImageSource.identity

    def other(self: ImageSource, index: int) -> bytes:
        return b"changed" if index == 5 else real(self, index)

    monkeypatch.setattr(ImageSource, "identity", other)
    with pytest.raises(ClusterError, match=r"tcp://\S+: picture005\.png "):
        collect(conv_net(), pictures, NAMES, progress=False, cluster=client)
    assert left_behind(client) == (0, 0, [])


def test_errors_of_samples_name_the_worker(client: Any, tmp_path: Path) -> None:
    (tmp_path / "each").mkdir()
    for k in range(4):
        np.save(
            tmp_path / "each" / f"{k}.npy", np.zeros((1, 3, 16, 8 if k == 2 else 16), np.float32)
        )
    with pytest.raises(DataError, match=r"tcp://\S+: .*2\.npy: .* \[1, 3, 16, 8\]"):
        collect(conv_net(), tmp_path / "each", NAMES, progress=False, cluster=client)


def test_urls_are_read_by_the_workers(client: Any, pictures: Path) -> None:
    """fsspec's memory stands for a store here: a worker that has other files in it sees another store."""
    there = {f"/qdqtool-cluster/{p.name}": p.read_bytes() for p in sorted(pictures.glob("*.png"))}
    put(there)
    url = "memory://qdqtool-cluster"
    with pytest.raises(ClusterError, match=r"tcp://\S+: picture\d+\.png "):
        collect(conv_net(), url, NAMES, progress=False, cluster=client)
    alone = collect(conv_net(), url, NAMES, progress=False)
    assert alone.images == 11 and alone.skipped[0][0] == "picture007.png"
    client.run(put, there)
    same(collect(conv_net(), url, NAMES, progress=False, cluster=client), alone)


def test_another_content_behind_a_url_is_refused(
    client: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_portions(monkeypatch)
    data = {
        f"/qdqtool-other/{k}.png": (pictures / f"picture00{k}.png").read_bytes() for k in range(4)
    }
    put(data)
    client.run(put, {**data, "/qdqtool-other/2.png": (pictures / "picture003.png").read_bytes()})
    with pytest.raises(ClusterError, match=r"tcp://\S+: 2\.png "):
        collect(conv_net(), "memory://qdqtool-other", NAMES, progress=False, cluster=client)

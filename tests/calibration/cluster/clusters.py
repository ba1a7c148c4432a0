import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from calibration.images import ImageSource
from tests.calibration.watchers import HANG

#: Dask watches each process up to a hundred times a second, which takes a tenth of the time of the tests.
_QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "10s",
}


@contextlib.contextmanager
def processes(folder: Path, count: int = 2) -> Iterator[Any]:
    """Start workers of one thread each, and yield a client.

    The workers are forked from a process that has imported everything.
    """
    import dask
    from distributed import Client, LocalCluster
    from distributed.utils import get_mp_context

    quiet = dask.config.set({"distributed.worker.multiprocessing-method": "forkserver", **_QUIET})
    with pytest.MonkeyPatch.context() as patch, quiet:
        # onnxruntime starts a thread for telemetry, which a forked process would not have.
        patch.setenv("ORT_DISABLE_TELEMETRY", "1")
        get_mp_context().set_forkserver_preload(
            [
                "distributed",
                "calibration.cluster_pass",
                "calibration.cluster.worker",
                "onnxruntime",
                "qdqtool.tuning.measure",
            ]
        )
        cluster = LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
            local_directory=str(folder),
        )
        client = Client(cluster, set_as_default=False)
        try:
            yield client
        finally:
            client.close()
            cluster.close()
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # its processor time counts once it has ended


def worker_pids(client: Any) -> dict[str, int]:
    pids: dict[str, int] = client.run(os.getpid)
    return pids


def kill_one(client: Any) -> None:
    os.kill(min(worker_pids(client).values()), signal.SIGKILL)


def left_behind(client: Any) -> tuple[int, int, list[str]]:
    def on_scheduler(dask_scheduler: Any) -> tuple[int, list[str]]:
        plugins = [n for n in dask_scheduler.worker_plugins if n.startswith("qdqtool")]
        return len(dask_scheduler.tasks), plugins

    deadline = time.monotonic() + HANG
    while True:
        tasks, plugins = client.run_on_scheduler(on_scheduler)
        keys = sum(client.run(count_keys).values())
        if not (tasks or keys or plugins) or time.monotonic() > deadline:
            return tasks, keys, plugins
        time.sleep(0.1)


def count_keys(dask_worker: Any) -> int:
    return len(dask_worker.data) + len(dask_worker.state.tasks)


# Functions that workers call ----------------------------------------------------------------------------


def replace_facts(facts: dict[str, str]) -> None:
    from calibration.cluster import worker

    original = worker.__dict__.setdefault("original_facts", worker.worker_facts)
    worker.worker_facts = lambda: {**original(), **facts}


ARRIVALS: list[int] = []


def record_arrivals() -> None:
    from calibration.cluster_pass import CountingPayload

    def arrive(self: CountingPayload, state: dict[str, Any]) -> None:
        ARRIVALS.append(len(state["model"]))
        self.__dict__.update(state)

    ARRIVALS.clear()
    CountingPayload.__setstate__ = arrive  # type: ignore[attr-defined]


def recorded() -> tuple[list[int], list[float]]:
    return ARRIVALS, NOT_STOPPED


def put(pictures: dict[str, bytes]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, data in pictures.items():
        memory.pipe_file(name, data)


class ChangingSource(ImageSource):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pid = os.getpid()

    def identity(self, index: int) -> bytes:
        changed = os.getpid() == self.pid and self.name(index) == "picture005.png"
        return b"changed" if changed else super().identity(index)


ENDLESS = 100  # items from this number on run until their job ends
NOT_STOPPED: list[float] = []


def share_number(payload: int, threads: int) -> int:
    return payload


def multiply(number: int, item: float, stopped: Any) -> float:
    if item < ENDLESS:
        return number * item
    if not stopped.wait(HANG):
        NOT_STOPPED.append(item)
    return -1.0


def fail_on_three(number: int, item: float, stopped: Any) -> float:
    if item == 3:
        raise ValueError("three\nis refused")
    return item

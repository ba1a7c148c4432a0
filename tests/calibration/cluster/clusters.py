"""A small Dask cluster of processes for tests, and what its workers are told to do."""

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

#: What Dask looks at by itself, up to a hundred times a second in each process, takes a tenth of the tests' time.
_QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "10s",
}


@contextlib.contextmanager
def processes(folder: Path, count: int = 2) -> Iterator[Any]:
    """A client of workers of one thread each, which copy a process that has imported everything."""
    import dask
    from distributed import Client, LocalCluster
    from distributed.utils import get_mp_context

    quiet = dask.config.set({"distributed.worker.multiprocessing-method": "forkserver", **_QUIET})
    with pytest.MonkeyPatch.context() as patch, quiet:
        # onnxruntime starts a thread for telemetry, which no copy of the process would have.
        patch.setenv("ORT_DISABLE_TELEMETRY", "1")
        get_mp_context().set_forkserver_preload(
            [
                "distributed",
                "calibration.clustered",
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
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # what it took is counted once it has ended


def pids(client: Any) -> dict[str, int]:
    found: dict[str, int] = client.run(os.getpid)
    return found


def kill_one(client: Any) -> None:
    """Ends a worker as the kernel does when memory runs out."""
    os.kill(sorted(pids(client).values())[0], signal.SIGKILL)


def left_behind(client: Any) -> tuple[int, int, list[str]]:
    """Tasks on the scheduler, keys on workers, and plugins of ours."""

    def on_scheduler(dask_scheduler: Any) -> tuple[int, list[str]]:
        return len(dask_scheduler.tasks), [
            n for n in dask_scheduler.worker_plugins if n.startswith("qdqtool")
        ]

    deadline = time.monotonic() + 10
    while True:
        tasks, plugins = client.run_on_scheduler(on_scheduler)
        data = sum(client.run(keys).values())
        if not (tasks or data or plugins) or time.monotonic() > deadline:
            return tasks, data, plugins
        time.sleep(0.1)


def keys(dask_worker: Any) -> int:
    return len(dask_worker.data) + len(dask_worker.state.tasks)


# What a worker is told, by name ---------------------------------------------------------------------------------


def pretend(facts: dict[str, str]) -> None:
    """Makes this process tell other facts."""
    from calibration.cluster import worker

    real = worker.__dict__.setdefault("_real_facts", worker.facts)
    worker.facts = lambda threads=1: {**real(threads), **facts}


def count_arrivals() -> None:
    """Counts how often a model reaches this process."""
    from calibration import clustered

    def arrived(self: Any, state: dict[str, Any]) -> None:
        clustered.ARRIVALS.append(len(state["model"]))  # type: ignore[attr-defined]
        self.__dict__.update(state)

    clustered.ARRIVALS = []  # type: ignore[attr-defined]
    clustered.Assignment.__setstate__ = arrived  # type: ignore[attr-defined]


def arrivals() -> list[int]:
    from calibration import clustered

    found: list[int] = clustered.ARRIVALS  # type: ignore[attr-defined]
    return found


def put(pictures: dict[str, bytes]) -> None:
    """Writes files of fsspec's file system in memory, which each process has for itself."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, data in pictures.items():
        memory.pipe_file(name, data)


def shared_number(payload: int, threads: int) -> int:
    return payload


def slowly_times(number: int, item: float, stopped: Any) -> float:
    """The product, after a while; -1 when the job is over before that."""
    return -1.0 if stopped.wait(0.05 if item < 100 else 30.0) else number * item


def failing(number: int, item: float, stopped: Any) -> float:
    if item == 3:
        raise ValueError("three\nis refused")
    return item

"""What runs on a worker: the shared part of a job, held once for each worker process, and its pieces of work.

The shared part comes as a plugin of Dask's, which every worker gets once, those that join later as well, and which
takes it away again. No task runs on a worker whose facts are not those that the client told.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed.diagnostics.plugin import WorkerPlugin

from qdqtool.cluster.facts import difference, facts
from qdqtool.errors import ClusterError, QdqtoolError

#: Makes what the pieces of one job share, once for each process: (shared part, threads of the worker) to state.
Factory = Callable[[Any, int], Any]


@dataclass
class Shared:
    """A job as one worker process has it.

    Attributes:
        payload: The shared part.
        factory: ``module:function`` of a :data:`Factory`.
        threads: Pieces of work that this worker runs at the same time.
        refusal: Why this worker may not take part; empty where it may.
        stopped: Set when the job is over: pieces that are still being worked on end early.
    """

    payload: Any
    factory: str
    threads: int
    refusal: str
    stopped: threading.Event
    lock: threading.Lock
    state: Any = None

    def made(self) -> Any:
        """The state of this process, made by the first piece."""
        with self.lock:
            if self.state is None:
                self.state = named(self.factory)(self.payload, self.threads)
            return self.state


_JOBS: dict[tuple[str, str], Shared] = {}  # by job and worker: several workers may live in one process


class Carrier(WorkerPlugin):  # type: ignore[misc]
    """Brings a job's shared part to a worker, and takes it away again."""

    def __init__(self, job: str, factory: str, payload: Any, expected: dict[str, str], mixed_cpus: bool) -> None:
        self.name = job
        self.factory = factory
        self.payload = payload
        self.expected = expected
        self.mixed_cpus = mixed_cpus

    def setup(self, worker: Any) -> None:
        threads = int(worker.state.nthreads)
        refusal = difference(facts(threads), self.expected, self.mixed_cpus)
        _JOBS[self.name, worker.address] = Shared(
            self.payload, self.factory, threads, refusal, threading.Event(), threading.Lock()
        )
        self.payload = None  # the worker keeps its plugins; once is enough

    def teardown(self, worker: Any) -> None:
        shared = _JOBS.pop((self.name, worker.address), None)
        if shared is not None:
            shared.stopped.set()


def named(name: str) -> Any:
    """What ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def perform(job: str, function: str, item: Any) -> Any:
    """One piece of work: ``function(state, item, stopped)``.

    Raises:
        ClusterError: This worker may not take part, or the job is over.
    """
    from distributed import get_worker

    address = get_worker().address
    shared = _JOBS.get((job, address))
    if shared is None:
        raise ClusterError(f"cluster worker {address} got work of a job that is over or never reached it")
    if shared.refusal:
        raise ClusterError(f"cluster worker {address} {shared.refusal}")
    try:
        return named(function)(shared.made(), item, shared.stopped)
    except QdqtoolError as error:
        raise type(error)(f"cluster worker {address}: {error}") from None


def refusals(job: str, dask_worker: Any) -> str:
    """Why this worker may not take part in a job; empty where it may. Dask gives the worker."""
    shared = _JOBS.get((job, dask_worker.address))
    return "did not take the work over" if shared is None else shared.refusal

"""Tasks on the threads of this process, or on the workers of a cluster (:mod:`qdqtool.cluster`): the same rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from calibration.clustered import shared
from qdqtool.base.process import Crew
from qdqtool.cluster.mapping import Cluster
from qdqtool.cluster.mapping import Job as Handed
from qdqtool.model.sessions import cores
from qdqtool.tuning import metrics
from qdqtool.tuning.configuration import Recipe
from qdqtool.tuning.measure import Job, Mapper, Result, Task, iterate, run_task

_MAX_WORKERS = 8


def default_workers() -> int:
    """One worker for each core, up to eight: each holds samples and a session."""
    return max(1, min(_MAX_WORKERS, cores()))


def local(workers: int | None = None) -> Mapper:
    """A mapper over threads; onnxruntime computes outside Python's lock."""
    count = workers or default_workers()

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        crew: Crew[Task, Result] = Crew(tasks, metrics.end)

        def work() -> None:
            for task in crew.tasks():
                for result in iterate(job, task):
                    crew.put(result)
                    if crew.stopped:
                        return

        return crew.results([work] * min(count, len(tasks)))

    return run


# A cluster -----------------------------------------------------------------------------------------------------------

@dataclass
class Piece:
    """A task, and the base recipe that it was made for: the only part of a job that changes while one tunes."""

    base: Recipe
    task: Task

    def __str__(self) -> str:
        return f"task {self.task.key}"


class ClusterMapper(contextlib.ExitStack):
    """A mapper over a cluster. The network and the names of the samples reach each worker once. A context manager."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self._handed: Handed | None = None
        self._job: Job | None = None

    def __call__(self, job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        """Results as they are done, each task's once.

        Raises:
            ClusterError: The cluster is lost, or a worker is not fit or sees other samples.
            QdqtoolError: What a task raised.
        """
        handed = self._handed_out(job)
        for _, result in handed.results(Piece(job.base, task) for task in tasks):
            yield result

    def _handed_out(self, job: Job) -> Handed:
        if self._handed is None or self._job is None or replace(job, base=self._job.base) != self._job:
            self.close()
            given = replace(job, images=shared(job.images))
            made = Handed(self.cluster, "qdqtool.tuning.mapper:Bench", given, "qdqtool.tuning.mapper:work")
            self._handed = self.enter_context(made)
            self._job = job
        return self._handed


class Bench:
    """A job in a worker process, with the network parsed for the base recipe that was wanted last."""

    def __init__(self, job: Job, threads: int) -> None:
        self._job = job
        self._lock = threading.Lock()

    def job(self, base: Recipe) -> Job:
        with self._lock:
            if self._job.base.key != base.key:
                self._job = self._job.based_on(base)
            return self._job



def work(bench: Bench, piece: Piece, stopped: threading.Event) -> Result:
    """All rows of a task; ends early when the job is over."""
    return run_task(bench.job(piece.base), piece.task, stopped)

"""Tasks on the threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

from qdqtool.runtime import cores
from qdqtool.tuning.measure import Job, Mapper, Result, Task, iterate

_MAX_WORKERS = 8


def default_workers() -> int:
    """One worker for each core, up to eight: each holds samples and a session."""
    return max(1, min(_MAX_WORKERS, cores()))


def local(workers: int | None = None) -> Mapper:
    """A mapper over threads; onnxruntime computes outside Python's lock."""
    count = workers or default_workers()

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        shared = _Shared(job, tasks)
        threads = [threading.Thread(target=shared.work, daemon=True) for _ in range(min(count, len(tasks)))]
        for thread in threads:
            thread.start()
        try:
            yield from shared.results(len(threads))
        finally:
            shared.stop = True
            for thread in threads:
                thread.join()

    return run


class _Shared:
    def __init__(self, job: Job, tasks: Sequence[Task]) -> None:
        self.job = job
        self.tasks = iter(tasks)
        self.lock = threading.Lock()
        self.finished: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
        self.stop = False

    def work(self) -> None:
        try:
            while (task := self._next()) is not None:
                for result in iterate(self.job, task):
                    self.finished.put(result)
                    if self.stop:
                        break
            self.finished.put(None)
        except BaseException as error:
            self.finished.put(error)

    def _next(self) -> Task | None:
        with self.lock:
            return None if self.stop else next(self.tasks, None)

    def results(self, workers: int) -> Iterator[Result]:
        while workers:
            item = self.finished.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                workers -= 1
            else:
                yield item

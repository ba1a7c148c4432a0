"""Tasks on the threads of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qdqtool.runtime import cores
from qdqtool.threads import Crew
from qdqtool.tuning import limited
from qdqtool.tuning.measure import Job, Mapper, Result, Task, iterate

_MAX_WORKERS = 8


def default_workers() -> int:
    """One worker for each core, up to eight: each holds samples and a session."""
    return max(1, min(_MAX_WORKERS, cores()))


def local(workers: int | None = None) -> Mapper:
    """A mapper over threads; onnxruntime computes outside Python's lock."""
    count = workers or default_workers()

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        crew: Crew[Task, Result] = Crew(tasks, limited.end)

        def work() -> None:
            for task in crew.tasks():
                for result in iterate(job, task):
                    crew.put(result)
                    if crew.stopped:
                        return

        return crew.results([work] * min(count, len(tasks)))

    return run

"""Threads that take tasks from one place and hand their results to one reader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class SharedTasks(Generic[T]):
    """Tasks that several threads take from one iterable.

    Attributes:
        stopped: Set when no further task is wanted. A long task may look at it.
    """

    def __init__(self, tasks: Iterable[T]) -> None:
        self.stopped = False
        self._tasks = iter(tasks)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        """Yield tasks that no other thread has."""
        while True:
            with self._lock:
                if self.stopped:
                    return
                try:
                    task = next(self._tasks)
                except StopIteration:
                    return
            yield task


def run_threads(
    tasks: SharedTasks[T],
    workers: Sequence[Callable[[Callable[[R], None]], None]],
    on_stop: Callable[[], None] = lambda: None,
) -> Generator[R, None, None]:
    """Run each worker in a thread and yield results as they come.

    All threads have ended when the generator has.

    Args:
        tasks: Tasks that the workers take. They stop if a worker raises or the generator is closed.
        workers: Functions that take tasks and pass each result to their argument.
        on_stop: Called when the work ends, to wake workers that wait for something else.

    Raises:
        BaseException: The exception of a worker.
    """
    if not workers:
        return
    results: SimpleQueue[R | Future[Any]] = SimpleQueue()
    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for worker in workers:
                pool.submit(worker, results.put).add_done_callback(results.put)
            running = len(workers)
            while running:
                item = results.get()
                if isinstance(item, Future):
                    item.result()
                    running -= 1
                else:
                    yield item
        finally:
            tasks.stopped = True
            on_stop()

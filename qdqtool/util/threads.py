"""Process the items of one iterable in several threads, and collect the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class SharedTasks(Generic[T]):
    """Iterable that several threads can share: each task goes to one thread.

    Attributes:
        stopped: Whether no more tasks are handed out. Long tasks may check this to end early.
    """

    def __init__(self, tasks: Iterable[T]) -> None:
        self.stopped = False
        self._tasks = iter(tasks)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        """Yield tasks that no other thread receives, until all are done or work is stopped."""
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
    """Run each worker in a thread, and yield results as soon as they are available.

    When the generator ends, all threads have ended.

    Args:
        tasks: Tasks that the workers share, which are stopped if a worker fails or the generator is
            closed.
        workers: Functions that receive a callback and call it with each result.
        on_stop: Function that is called when the work ends, to wake up waiting workers.

    Raises:
        BaseException: A worker raised this exception.
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

"""Process the items of one iterable in several threads, and collect the results."""

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
        stopped: Whether iteration has been stopped. Long tasks may check this to end early.
    """

    def __init__(self, tasks: Iterable[T]) -> None:
        self.stopped = False
        self._tasks = iter(tasks)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
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
        tasks: Tasks that the workers share. They are stopped when the generator ends: after all
            results, after an error of a worker, or when the generator is closed.
        workers: Functions that receive a callback and call it with each result.
        on_stop: Function that is called after the tasks are stopped, to wake up waiting workers.

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

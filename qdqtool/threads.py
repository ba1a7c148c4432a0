"""Threads that take tasks from one place and bring their results to one place."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Crew(Generic[T, R]):
    """What threads share: the tasks, and the results for the thread that asked for them.

    Args:
        tasks: The tasks.
        ending: Called with the threads when they are to stop, to end what they wait for.

    Attributes:
        stopped: Set when the tasks left are not wanted any more; work at a long task may look at it.
    """

    def __init__(
        self, tasks: Iterable[T], ending: Callable[[Sequence[threading.Thread]], None] = lambda threads: None
    ) -> None:
        self.stopped = False
        self._ending = ending
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self._finished: queue.SimpleQueue[R | _Ended] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def tasks(self) -> Iterator[T]:
        """For the work of a thread: tasks that no other thread has, until there are no more or the crew stops."""
        while True:
            with self._lock:
                if self.stopped:
                    return
                try:
                    task = next(self._tasks)
                except StopIteration:
                    return
            yield task

    def put(self, result: R) -> None:
        """For the work of a thread: gives a result back."""
        self._finished.put(result)

    def results(self, work: Sequence[Callable[[], None]]) -> Generator[R, None, None]:
        """Results as they are put; all threads have ended when this has.

        Args:
            work: What each thread does, from its start to its end.

        Raises:
            BaseException: What a thread raised.
        """
        self._threads = [threading.Thread(target=self._run, args=(does,), daemon=True) for does in work]
        try:
            for thread in self._threads:
                thread.start()
            at_work = len(self._threads)
            while at_work:
                item = self._finished.get()
                if not isinstance(item, _Ended):
                    yield item
                elif item.error is not None:
                    raise item.error
                else:
                    at_work -= 1
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the threads after the tasks that they are at."""
        self.stopped = True
        self._ending(self._threads)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.stopped = True
            self._finished.put(_Ended(error))
        else:
            self._finished.put(_Ended())


@dataclass(frozen=True, slots=True)
class _Ended:
    """A thread is done, or has failed."""

    error: BaseException | None = None

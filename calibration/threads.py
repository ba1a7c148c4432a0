"""The samples of one pass, counted by threads of this process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Set
from typing import NamedTuple

from calibration.cache import Statistics
from calibration.counting import Tally
from calibration.dataset import Task


class Snapshot(NamedTuple):
    """What a pass has counted so far.

    Attributes:
        statistics: With the number of images.
        done: Numbers of the samples that went in.
    """

    statistics: Statistics
    done: Set[int]


class ThreadPass:
    """Threads that each load samples and count them on their own; a snapshot merges what they have."""

    def __init__(self, tasks: Iterator[tuple[int, Task]], tallies: list[Tally]) -> None:
        """Prepares the threads.

        Args:
            tasks: Of :meth:`calibration.dataset.Dataset.tasks`.
            tallies: One for each thread.
        """
        self.shared = _Shared(tasks)
        self.tallies = tallies
        self.threads = [_Worker(self.shared, tally) for tally in self.tallies]

    def results(self) -> Iterator[int]:
        """The numbers of samples as they are done; all threads have ended when this has.

        Raises:
            QdqtoolError: What a sample raised.
        """
        for thread in self.threads:
            thread.start()
        try:
            yield from self.shared.results(len(self.threads))
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the threads after the samples that they are at."""
        self.shared.stop = True
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def snapshot(self) -> Snapshot:
        """What was counted so far, whole samples only."""
        result = Statistics({})
        done: set[int] = set()
        with contextlib.ExitStack() as stack:
            for tally in self.tallies:
                stack.enter_context(tally.lock)
            for tally in self.tallies:
                copies = {n: part.copy() for n, part in tally.tensors.items()}  # the threads go on counting
                result = result.merge(Statistics(copies, images=tally.images))
                done |= tally.done
        return Snapshot(result, done)


class _Shared:
    """What the threads share: the tasks, and the results for the main thread."""

    def __init__(self, tasks: Iterator[tuple[int, Task]]) -> None:
        self.tasks = tasks
        self.lock = threading.Lock()
        self.finished: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self.stop = False

    def next(self) -> tuple[int, Task] | None:
        with self.lock:
            return None if self.stop else next(self.tasks, None)

    def results(self, workers: int) -> Iterator[int]:
        """The numbers of samples as they are done; an error of a thread is raised here."""
        while workers:
            item = self.finished.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                workers -= 1
            else:
                yield item


class _Worker(threading.Thread):
    """Loads samples and gives them to its tally."""

    def __init__(self, shared: _Shared, tally: Tally) -> None:
        super().__init__(daemon=True)
        self.shared = shared
        self.tally = tally

    def run(self) -> None:
        try:
            with self.tally:
                while (task := self.shared.next()) is not None:
                    number, load_sample = task
                    self.tally.add(number, load_sample())
                    self.shared.finished.put(number)
            self.shared.finished.put(None)
        except BaseException as error:
            self.shared.finished.put(error)

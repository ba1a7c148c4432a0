"""The samples of one pass, counted by threads of this process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Set
from typing import NamedTuple

from calibration.cache import Statistics
from calibration.counting import Tally
from calibration.dataset import Task
from qdqtool.threads import Crew


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
        self.crew: Crew[tuple[int, Task], int] = Crew(tasks)
        self.tallies = tallies
        self._ended = False

    def results(self) -> Iterator[int]:
        """The numbers of samples as they are done; all threads have ended when this has.

        Raises:
            QdqtoolError: What a sample raised.
        """
        yield from self.crew.results([functools.partial(self._count, tally) for tally in self.tallies])
        self._ended = True

    def stop(self) -> None:
        """Ends the threads after the samples that they are at."""
        self.crew.stop()
        self._ended = True

    def _count(self, tally: Tally) -> None:
        with tally:
            for number, load_sample in self.crew.tasks():
                tally.add(number, load_sample())
                self.crew.put(number)

    def snapshot(self) -> Snapshot:
        """What was counted so far, whole samples only."""
        result = Statistics({})
        done: set[int] = set()
        with contextlib.ExitStack() as stack:
            for tally in self.tallies:
                stack.enter_context(tally.lock)
            for tally in self.tallies:
                result = result.merge(Statistics(tally.tensors, images=tally.images))
                done |= tally.done
            if not self._ended:  # the threads go on counting
                result.tensors = {n: part.copy() for n, part in result.tensors.items()}
        return Snapshot(result, done)

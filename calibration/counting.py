"""Counting samples: what one thread, or one piece of work on a cluster, adds to its own statistics; threads that do."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import numpy.typing as npt

from calibration.cache import Statistics
from calibration.dataset import Sample, Task
from calibration.focus import Focus, FocusMap
from calibration.session import Fetcher
from calibration.statistics import TensorStatistics, scratch_buffer, spotted_samples, step
from qdqtool.util.threads import SharedTasks, run_threads


class Tally:
    """Runs samples through a session and counts their tensors. A context manager: it owns threads.

    Attributes:
        tensors: Statistics by tensor name.
        images: Images counted.
        done: Numbers of the samples done, those included of which no image could be read.
        lock: Held while a sample is being added, so that a snapshot has whole samples.
    """

    def __init__(
        self,
        session: Any,
        names: Sequence[str],
        bins: int,
        focus: Focus | None,
        counters: int,
        samples: int | None = None,
        by_channel: Collection[str] = (),
        turn: threading.Semaphore | None = None,
    ) -> None:
        """Begins with nothing counted.

        Args:
            session: Computes the tensors that are not inputs; None where all are.
            names: Tensors to count.
            bins: See :class:`calibration.statistics.TensorStatistics`.
            focus: See :func:`calibration.runner.collect`.
            counters: Threads that count the tensors of a sample.
            samples: How many there are in all, wherever they are counted; None where that is not known.
            by_channel: Tensors whose last axis holds channels to count apart.
            turn: What lets a few of the tallies beside this one count at the same time, see :func:`turns`.
        """
        self._names = tuple(names)
        self._bins = bins
        self._samples = samples
        self._spotted = spotted_samples(samples)
        self._by_channel = frozenset(by_channel)
        self._turn = turn or threading.Semaphore()
        self.lock = threading.Lock()
        self.forget()
        self._focus = focus
        self._fetcher = None if session is None else Fetcher(session)
        self._others = counters - 1  # beside the thread that calls
        self._pool = ThreadPoolExecutor(max(1, self._others))  # threads begin when they are needed

    def __enter__(self) -> Tally:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()

    def forget(self) -> None:
        """Begins again; the session's buffers and the threads are kept."""
        self.tensors = {n: TensorStatistics(self._bins) for n in self._names}
        self.images = 0
        self.done: set[int] = set()

    def add(self, number: int, loaded: tuple[Sample, int] | None) -> None:
        """Counts a sample.

        Args:
            number: The sample's.
            loaded: The sample and how many images are in it; None where none could be read.

        Raises:
            ModelError: onnxruntime fails on it.
        """
        if loaded is None:
            with self.lock:
                self.done.add(number)
            return
        sample, images = loaded
        arrays = {**sample, **(self._fetcher.run(sample) if self._fetcher else {})}
        with self._turn:
            self._add(number, arrays, images)

    def _add(self, number: int, arrays: Sample, images: int) -> None:
        looked_at = None if self._focus is None else self._focus.find(arrays)
        largest_first = iter(sorted(self.tensors, key=lambda n: -arrays[n].size))

        def count() -> None:
            while (name := next(largest_first, None)) is not None:
                self._count(number, name, arrays[name], looked_at)

        with self.lock:
            others = [self._pool.submit(count) for _ in range(self._others)]
            try:
                count()
            except BaseException:
                list(largest_first)  # nothing is left for the others
                raise
            finally:
                wait(others)
            for other in others:
                other.result()
            self.images += images
            self.done.add(number)

    def _count(
        self, number: int, name: str, array: npt.NDArray[Any], looked_at: FocusMap | None
    ) -> None:
        part = self.tensors[name]
        everywhere = looked_at is not None and looked_at.covers(array)
        part.add(array, _thread.scratch, everywhere, step(array.shape, self._samples))
        if number in self._spotted:
            part.add_spots(array, number)
        if name in self._by_channel:
            part.add_channels(array)
        if looked_at is not None and not everywhere:
            part.add_focus(looked_at.values(array), _thread.scratch)


def turns(tallies: int) -> threading.Semaphore:
    """Half of them count at a time, while the others run the network.

    Counting is many short steps, and between two of them a thread waits for the interpreter, if another one counts.
    """
    return threading.Semaphore(max(1, tallies // 2))


class _Thread(threading.local):
    """Work buffers of each thread, made when it first asks for them."""

    def __init__(self) -> None:
        self.scratch = scratch_buffer()


_thread = _Thread()


# One pass by the threads of this process ----------------------------------------------------------------------------


class ThreadPass:
    """Threads that each load samples and count them on their own; a snapshot merges what they have."""

    def __init__(self, tasks: Iterator[tuple[int, Task]], tallies: list[Tally]) -> None:
        """Prepares a thread for each tally; the tasks are those of :meth:`calibration.dataset.Dataset.tasks`."""
        self._tasks = SharedTasks(tasks)
        self.tallies = tallies
        self._ended = False

    def results(self) -> Generator[int, None, None]:
        """The numbers of samples as they are done; all threads have ended when this has, or is closed.

        Raises:
            QdqtoolError: What a sample raised.
        """
        try:
            workers = [functools.partial(self._count, tally) for tally in self.tallies]
            yield from run_threads(self._tasks, workers)
        finally:
            self._ended = True

    def _count(self, tally: Tally, put: Callable[[int], None]) -> None:
        with tally:
            for number, load_sample in self._tasks:
                tally.add(number, load_sample())
                put(number)

    def snapshot(self) -> tuple[Statistics, Set[int]]:
        """What was counted so far, whole samples only, and the numbers of these."""
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
        return result, done

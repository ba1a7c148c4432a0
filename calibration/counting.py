"""Collection of tensor statistics over samples by the threads of one process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy.typing as npt

from calibration.cache import Statistics
from calibration.dataset import Sample, Task
from calibration.focus import Focus, FocusMap
from calibration.session import TensorFetcher
from calibration.statistics import (
    TensorStatistics,
    allocate_scratch,
    sampling_step,
    spot_sample_numbers,
)
from qdqtool.util.threads import SharedTasks, run_threads


class SampleCounter:
    """Runs samples through a session, and adds their tensors to statistics.

    As a context manager, it ends its threads on exit.

    Attributes:
        tensors: Statistics by tensor name.
        images: Number of images counted.
        done: Numbers of the finished samples, including samples without a readable image.
        lock: Held while a sample is being counted, so that a snapshot contains only complete
            samples.
    """

    def __init__(
        self,
        session: Any,
        names: Sequence[str],
        bins: int,
        focus: Focus | None,
        threads: int,
        samples: int | None = None,
        by_channel: Collection[str] = (),
        turns: threading.Semaphore | None = None,
    ) -> None:
        """Create a counter whose counts are all zero.

        Args:
            session: onnxruntime session that computes the tensors; None if all are model inputs.
            names: Tensors to count.
            bins: See :class:`calibration.statistics.TensorStatistics`.
            focus: See :func:`calibration.runner.collect`.
            threads: Threads that count the tensors of a sample.
            samples: Number of samples of the whole pass; None if unknown.
            by_channel: Tensors for which the range of each channel (last axis) is recorded.
            turns: Semaphore that limits how many counters count at the same time; see
                :func:`make_counting_semaphore`.
        """
        self._names = tuple(names)
        self._bins = bins
        self._samples = samples
        self._spot_samples = spot_sample_numbers(samples)
        self._by_channel = frozenset(by_channel)
        self._turns = turns or threading.Semaphore()
        self.lock = threading.Lock()
        self.reset()
        self._focus = focus
        self._fetcher = None if session is None else TensorFetcher(session)
        self._helpers = threads - 1  # in addition to the calling thread
        self._pool = ThreadPoolExecutor(max(1, self._helpers))  # starts threads when needed

    def __enter__(self) -> SampleCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def reset(self) -> None:
        """Delete all counts, and keep the session and the threads."""
        self.tensors = {name: TensorStatistics(self._bins) for name in self._names}
        self.images = 0
        self.done: set[int] = set()

    def add(self, number: int, loaded: tuple[Sample, int] | None) -> None:
        """Run a sample through the session, and count the values of its tensors.

        Args:
            number: Number of the sample.
            loaded: The sample and its number of images; None if no image could be read.

        Raises:
            ModelError: onnxruntime fails on the sample.
        """
        if loaded is None:
            with self.lock:
                self.done.add(number)
            return
        sample, images = loaded
        arrays = dict(sample)
        if self._fetcher is not None:
            arrays.update(self._fetcher.run(sample))
        with self._turns:
            self._count_tensors(number, arrays, images)

    def _count_tensors(self, number: int, arrays: Sample, images: int) -> None:
        focus_map = None if self._focus is None else self._focus.find(arrays)
        names = iter(sorted(self.tensors, key=lambda name: -arrays[name].size))  # largest first

        def count_next() -> None:
            while (name := next(names, None)) is not None:
                self._count_tensor(number, name, arrays[name], focus_map)

        with self.lock:
            helpers = [self._pool.submit(count_next) for _ in range(self._helpers)]
            try:
                count_next()
            except BaseException:
                list(names)  # exhaust the iterator, so that the other threads stop
                raise
            finally:
                wait(helpers)
            for helper in helpers:
                helper.result()
            self.images += images
            self.done.add(number)

    def _count_tensor(
        self, number: int, name: str, array: npt.NDArray[Any], focus_map: FocusMap | None
    ) -> None:
        part = self.tensors[name]
        covered = focus_map is not None and focus_map.covers(array)
        part.add(array, _buffers.scratch, covered, sampling_step(array.shape, self._samples))
        if number in self._spot_samples:
            part.add_spots(array, number)
        if name in self._by_channel:
            part.add_channels(array)
        if focus_map is not None and not covered:
            part.add_focus(focus_map.values(array), _buffers.scratch)


def make_counting_semaphore(counters: int) -> threading.Semaphore:
    """Return a semaphore that lets half of the counters, at least one, count at the same time.

    The other counters run the network meanwhile. Counting consists of many short steps in Python,
    for which threads have to wait for Python's global interpreter lock.
    """
    return threading.Semaphore(max(1, counters // 2))


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.scratch = allocate_scratch()


_buffers = _ThreadBuffers()


# One pass by the threads of this process ----------------------------------------------------------


class ThreadPass:
    """One pass over the samples by several threads, each with its own counter.

    Args:
        tasks: Numbers of the samples and functions that load them; see
            :meth:`calibration.dataset.Dataset.tasks`.
        counters: Counter of each thread.
    """

    def __init__(self, tasks: Iterator[tuple[int, Task]], counters: list[SampleCounter]) -> None:
        self._tasks = SharedTasks(tasks)
        self.counters = counters
        self._ended = False

    def results(self) -> Generator[int, None, None]:
        """Yield the number of each sample when the sample is counted.

        When the generator ends or is closed, all threads have ended.

        Raises:
            QdqtoolError: A sample cannot be loaded or counted.
        """
        try:
            workers = [functools.partial(self._count_samples, counter) for counter in self.counters]
            yield from run_threads(self._tasks, workers)
        finally:
            self._ended = True

    def _count_samples(self, counter: SampleCounter, put: Callable[[int], None]) -> None:
        with counter:
            for number, load_sample in self._tasks:
                counter.add(number, load_sample())
                put(number)

    def snapshot(self) -> tuple[Statistics, Set[int]]:
        """Return the statistics of all samples counted so far, and the samples' numbers."""
        result = Statistics({})
        done: set[int] = set()
        with contextlib.ExitStack() as stack:
            for counter in self.counters:
                stack.enter_context(counter.lock)
            for counter in self.counters:
                result = result.merge(Statistics(counter.tensors, images=counter.images))
                done |= counter.done
            if not self._ended:  # the threads still change the statistics, so copy them
                result.tensors = {name: part.copy() for name, part in result.tensors.items()}
        return result, done

"""Calibration on a cluster: portions of the samples, counted by workers where they are read, merged by the client."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import queue
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from calibration.cache import Statistics
from calibration.cluster.mapping import Cluster, Job
from calibration.counting import SampleCounter, counting_turns
from calibration.dataset import DataQuality, Dataset, InputSpec, Sample, SampleSource, SubsetSource
from calibration.focus import Focus
from calibration.listing import UNREADABLE
from calibration.session import open_packed_session, pack_model, sample_bytes, worker_count
from calibration.statistics import TensorStatistics, histogram_bytes
from qdqtool.errors import ClusterError
from qdqtool.ir.graph import Model
from qdqtool.ir.sizes import linear_inputs


@dataclass
class Assignment:
    """What all portions share; it reaches each worker once."""

    model: bytes  # computes the tensors that are not inputs; serialized, empty where all are inputs
    sha256: str  # of these bytes
    path: str  # the model's, for messages
    names: tuple[str, ...]  # tensors to count
    bins: int  # see :class:`calibration.statistics.TensorStatistics`
    focus: Focus | None  # see :func:`calibration.runner.collect`
    inputs: tuple[InputSpec, ...]  # the model's
    fetched: int  # bytes of one sample's tensors
    samples: int  # of all portions
    by_channel: tuple[str, ...] = ()  # see :class:`calibration.counting.SampleCounter`


@dataclass
class Portion:
    """Some samples."""

    numbers: tuple[int, ...]  # the samples' numbers
    source: SampleSource  # their parts, in order; the last sample alone may be filled up
    identities: Sequence[bytes]  # of the parts, as the client sees them

    def __str__(self) -> str:
        return f"samples {self.numbers[0]} to {self.numbers[-1]}"


class Engine:
    """An assignment on one worker: the session, and how many portions may run at the same time."""

    def __init__(self, assignment: Assignment, threads: int) -> None:
        if hashlib.sha256(assignment.model).hexdigest() != assignment.sha256:
            raise ClusterError("the model arrived damaged", code="transfer-damaged")
        counted = histogram_bytes(len(assignment.names), assignment.bins)
        slots = worker_count(assignment.fetched, threads, counted)
        self.assignment = assignment
        threads_each = max(1, threads // slots)
        session = (
            open_packed_session(assignment.model, threads_each, assignment.path)
            if assignment.model
            else None
        )
        assignment.model = b""
        self._free: queue.SimpleQueue[SampleCounter] = queue.SimpleQueue()
        turn = counting_turns(slots)
        for _ in range(slots):
            self._free.put(
                SampleCounter(
                    session,
                    assignment.names,
                    assignment.bins,
                    assignment.focus,
                    threads_each,
                    assignment.samples,
                    assignment.by_channel,
                    turn,
                )
            )

    @contextlib.contextmanager
    def counter(self) -> Iterator[SampleCounter]:
        """One with nothing counted yet, as soon as one is free."""
        counter = self._free.get()
        try:
            yield counter
        finally:
            counter.reset()
            self._free.put(counter)


class Held(SubsetSource):
    """A source whose samples have to be those that the client of a cluster saw."""

    def __init__(self, source: SampleSource, identities: Sequence[bytes]) -> None:
        """Holds what this process reads, with each sample's ``identity`` as the client sees it."""
        super().__init__(source, range(len(identities)))
        self.identities = identities

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (self.whole, self.identities)

    def load(self, index: int) -> Sample:
        found = self.whole.identity(index)
        if found != self.identities[index]:
            unreadable = found.endswith(UNREADABLE)
            fault = "cannot be read" if unreadable else "is another file"
            raise ClusterError(
                f"{self.name(index)} {fault} there; let all machines see the same files",
                code="file-unreadable" if unreadable else "different-files",
            )
        return super().load(index)


def shared(dataset: Dataset) -> Dataset:
    """The same samples under the same numbers, as other processes can read them: what Dask can send.

    Raises:
        DataError: They are in this process only.
    """
    indices = list(dataset.indices or ())
    source = dataset.source.portion(indices)
    held = Held(source, [dataset.source.identity(i) for i in indices])
    return Dataset(held, dataset.inputs, len(indices))


def count(engine: Engine, portion: Portion, stopped: threading.Event) -> dict[str, Any]:
    """Statistics over the samples of a portion, and what was noticed about them.

    Raises:
        ClusterError: This worker sees other files than the client, or the job is over.
        QdqtoolError: What a sample raises.
    """
    given = engine.assignment
    with engine.counter() as counter, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        begin = time.perf_counter()
        dataset = Dataset(
            Held(portion.source, portion.identities), given.inputs, len(portion.identities)
        )
        for number, (_, load) in zip(portion.numbers, dataset.tasks(), strict=True):
            if stopped.is_set():
                raise ClusterError("the job is over", code="job-over")
            counter.add(number, load())
        return {
            "tensors": counter.tensors,
            "images": counter.images,
            "looks": asdict(dataset.quality),
            "skipped": dataset.skipped,
            "seconds": time.perf_counter() - begin,
        }


# The client ----------------------------------------------------------------------------------------------------------

_MOST_SAMPLES = (
    256  # of a portion: their names travel, and a scheduler remembers what it sent for a while
)
_FIRST = 2  # samples of a portion while nothing is known of their time
_MOST_SECONDS = 10.0  # of work in a portion, so that little is lost with a worker and the bar moves
_MERGING = 0.25  # at most so much of the client's time goes into merging
_SHARES = 2.5  # no portion is larger than what is left, divided by so many for each thread


class ClusterPass:
    """Portions of the samples sent to a cluster; what comes back is merged as it comes.

    The result does not depend on who counts what, or when: see :class:`calibration.statistics.TensorStatistics`.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        dataset: Dataset,
        done: Set[int],
        names: Sequence[str],
        computed: Sequence[str],
        bins: int,
        focus: Focus | None,
    ) -> None:
        """Prepares to count the tensors ``names``, of which the model computes some, on samples that are not ``done``.

        The dataset gets what is noticed about its samples; ``bins`` and ``focus`` are as in :class:`Assignment`.

        Raises:
            ModelError: The model cannot be sent.
            DataError: The data is in this process only.
        """
        dataset.source.portion(())
        packed = pack_model(model, computed) if computed else b""
        self.assignment = Assignment(
            packed,
            hashlib.sha256(packed).hexdigest(),
            model.path,
            tuple(names),
            bins,
            focus,
            tuple(dataset.inputs),
            sample_bytes(model, computed),
            len(dataset),
            tuple(sorted(linear_inputs(model).intersection(names))),
        )
        self.cluster, self.dataset, self.left_out = cluster, dataset, done
        self.names = tuple(names)
        self.tensors = {n: TensorStatistics(bins) for n in names}
        self.images = 0
        self.done: set[int] = set()
        self._sizer = PortionSizer()
        # A signal is raised in the main thread alone: no portion is ever merged in part.
        self._merger = ThreadPoolExecutor(1, "merging")

    def results(self) -> Generator[int, None, None]:
        """The numbers of samples as they are done; what is not done is taken back when this is closed.

        Raises:
            QdqtoolError: What a sample or the cluster raised.
        """
        assignment, self.assignment = self.assignment, None  # type: ignore[assignment]
        with Job(
            self.cluster, "calibration.clustered:Engine", assignment, "calibration.clustered:count"
        ) as job:
            del assignment
            with self._merger:
                for portion, packed in job.results(self._portions(job)):
                    self._merger.submit(self._merge, portion, packed).result()
                    yield from portion.numbers

    def _merge(self, portion: Portion, packed: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self.tensors = {n: self.tensors[n].merge(packed["tensors"][n]) for n in self.names}
        self.images += packed["images"]
        self.done.update(portion.numbers)
        self.dataset.take(DataQuality(**packed["looks"]), packed["skipped"])
        self._sizer.learn(len(portion.numbers), packed["seconds"], time.perf_counter() - begin)

    def snapshot(self) -> tuple[Statistics, Set[int]]:
        """What was merged so far, and the numbers of the samples."""
        return Statistics(self.tensors, images=self.images), self.done.copy()

    def _portions(self, job: Job) -> Iterator[Portion]:
        left = len(self.dataset) - len(self.left_out)
        samples = self._samples()
        while left > 0:
            taken = list(itertools.islice(samples, self._sizer.size(left, job.slots)))
            left -= len(taken)
            indices = [i for _, group, _ in taken for i in group]
            identities = [d for _, _, digests in taken for d in digests]
            if type(self.dataset.source).identity is not SampleSource.identity:
                identities = [self.dataset.source.identity(i) for i in indices]
            numbers = tuple(n for n, _, _ in taken)
            yield Portion(numbers, self.dataset.source.portion(indices), identities)

    def _samples(self) -> Iterator[tuple[int, list[int], list[bytes]]]:
        """Number, indices and digests of each sample that is left; all digests are read on the way."""
        digests = self.dataset.digests()
        for number in range(len(self.dataset)):
            group = self.dataset.group(number)
            found = list(itertools.islice(digests, len(group)))
            if number not in self.left_out:
                yield number, group, found
        for _ in digests:  # to its end, so that the fingerprint is known
            pass


class PortionSizer:
    """Number of samples of the next portion: neither merging nor waiting for the last portion may cost much.

    Only ratios of times measured in the same way count, which hold on a machine that has other work to do as well.
    """

    def __init__(self) -> None:
        self._counting = self._samples = 0.0  # seconds of the workers, and samples
        self._merging = 0.0  # seconds of the client for one portion

    def learn(self, samples: int, counting: float, merging: float) -> None:
        """Record a portion: its samples, the seconds of the worker, and those of the client to merge it."""
        self._samples += samples
        self._counting += counting
        self._merging = merging if not self._merging else 0.7 * self._merging + 0.3 * merging

    def size(self, left: int, slots: int) -> int:
        """Return the samples of the next portion, for `left` samples and `slots` threads of the cluster."""
        if not self._samples:
            return _FIRST
        each = self._counting / self._samples or 1e-9
        least = slots * self._merging / _MERGING / each
        share = left / (_SHARES * max(slots, 1))
        wanted = min(max(share, least), max(_MOST_SECONDS / each, least))
        return max(1, min(left, _MOST_SAMPLES, math.ceil(wanted)))

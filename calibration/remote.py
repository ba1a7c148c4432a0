"""Calibration as a worker of a cluster does it: a portion of the samples at a time, counted where they are read."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibration.counting import Tally
from calibration.dataset import Dataset, InputSpec, Sample, Source
from calibration.focus import Focus
from calibration.listing import UNREADABLE
from calibration.session import open_packed, worker_count
from qdqtool.errors import ClusterError


@dataclass
class Assignment:
    """What all portions share; it reaches each worker once.

    Attributes:
        model: Computes the tensors that are not inputs; serialized, empty where all are inputs.
        sha256: Of these bytes.
        path: The model's, for messages.
        names: Tensors to count.
        bins: See :class:`calibration.statistics.TensorStatistics`.
        focus: See :func:`calibration.runner.collect`.
        inputs: The model's.
        fetched: Bytes of one sample's tensors.
    """

    model: bytes
    sha256: str
    path: str
    names: tuple[str, ...]
    bins: int
    focus: Focus | None
    inputs: tuple[InputSpec, ...]
    fetched: int


@dataclass
class Portion:
    """Some samples.

    Attributes:
        numbers: The samples' numbers.
        source: Their parts, in order; the last sample alone may be filled up.
        identities: Of the parts, as the client sees them.
        spotted: Those of the numbers to look at closely, see :mod:`calibration.spots`.
    """

    numbers: tuple[int, ...]
    source: Source
    identities: Sequence[bytes]
    spotted: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"samples {self.numbers[0]} to {self.numbers[-1]}"


class Engine:
    """An assignment on one worker: the session, and how many portions may run at the same time."""

    def __init__(self, assignment: Assignment, threads: int) -> None:
        if hashlib.sha256(assignment.model).hexdigest() != assignment.sha256:
            raise ClusterError("the model arrived damaged")
        slots = worker_count(assignment.fetched, threads)
        self.assignment = assignment
        counters = max(1, threads // slots)
        session: Any = None
        if assignment.model:
            session = open_packed(assignment.model, counters, assignment.path)
            assignment.model = b""
        self._free: queue.SimpleQueue[Tally] = queue.SimpleQueue()
        for _ in range(slots):
            self._free.put(Tally(session, assignment.names, assignment.bins, assignment.focus, counters))

    @contextlib.contextmanager
    def tally(self) -> Iterator[Tally]:
        """One with nothing counted yet, as soon as one is free."""
        tally = self._free.get()
        try:
            yield tally
        finally:
            tally.forget()
            self._free.put(tally)


class Held(Source):
    """A source whose samples have to be those that the client of a cluster saw."""

    def __init__(self, source: Source, identities: Sequence[bytes]) -> None:
        """Holds them.

        Args:
            source: What this process reads.
            identities: :meth:`~calibration.dataset.Source.identity` of each sample, as the client sees it.
        """
        self.source = source
        self.identities = identities

    @property
    def single_rows(self) -> bool:  # type: ignore[override]
        return self.source.single_rows

    @property
    def is_images(self) -> bool:
        return self.source.is_images

    def count(self) -> int:
        return len(self.identities)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def settings(self) -> str:
        return self.source.settings()

    def digest(self, index: int) -> bytes:
        return self.source.digest(index)

    def load(self, index: int) -> Sample:
        found = self.source.identity(index)
        if found != self.identities[index]:
            fault = "cannot be read" if found.endswith(UNREADABLE) else "is another file"
            raise ClusterError(f"{self.source.name(index)} {fault} there; let all machines see the same files")
        return self.source.load(index)


def shared(dataset: Dataset) -> Dataset:
    """The same samples under the same numbers, as other processes can read them: what Dask can send.

    Raises:
        DataError: They are in this process only.
    """
    indices = list(dataset.indices or ())
    source = dataset.source.portion(indices)
    held = Held(source, [dataset.source.identity(i) for i in indices])
    return Dataset(held, dataset.inputs, len(indices))


def prepare(assignment: Assignment, threads: int) -> Engine:
    """What the portions share in a worker process of so many threads."""
    return Engine(assignment, threads)


def count(engine: Engine, portion: Portion, stopped: threading.Event) -> dict[str, Any]:
    """Statistics over the samples of a portion, and what was noticed about them.

    Raises:
        ClusterError: This worker sees other files than the client, or the job is over.
        QdqtoolError: What a sample raises.
    """
    given = engine.assignment
    with engine.tally() as tally, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        begin = time.perf_counter()
        dataset = Dataset(Held(portion.source, portion.identities), given.inputs, len(portion.identities))
        tally.spotted = portion.spotted
        for number, (_, load) in zip(portion.numbers, dataset.tasks(), strict=True):
            if stopped.is_set():
                raise ClusterError("the job is over")
            tally.add(number, load())
        return {
            "tensors": tally.tensors,
            "images": tally.images,
            "looks": asdict(dataset.looks),
            "skipped": dataset.skipped,
            "seconds": time.perf_counter() - begin,
        }

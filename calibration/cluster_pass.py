"""One pass over calibration data by the workers of a cluster.

Workers read portions of the samples and count the values. The client merges the statistics.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from calibration.cache import Statistics
from calibration.cluster.connection import Cluster
from calibration.cluster.jobs import ClusterJob
from calibration.counting import SampleCounter
from calibration.dataset import (
    DataQuality,
    Dataset,
    InputSpec,
    Sample,
    SampleSource,
    SubsetSource,
)
from calibration.focus import Focus
from calibration.listing import UNREADABLE
from calibration.session import open_packed_session, pack_model
from calibration.statistics import TensorStatistics
from qdqtool.errors import ClusterError
from qdqtool.ir.graph import Model
from qdqtool.ir.sizes import find_linear_inputs

# Workers ------------------------------------------------------------------------------------------


@dataclass
class CountingPayload:
    """Model and settings that all portions share, sent once to each worker.

    Attributes:
        model: Serialized model that computes the tensors; empty if all tensors are model inputs.
        path: Path of the original model for messages.
        inputs: Inputs of the model.
        counting: Arguments of :class:`calibration.counting.SampleCounter`, except the session and
            the number of threads.
    """

    model: bytes
    path: str
    inputs: tuple[InputSpec, ...]
    counting: dict[str, Any]


@dataclass
class SamplePortion:
    """Samples whose activation values a worker counts in one task.

    Attributes:
        numbers: Numbers of the samples.
        source: Images or rows of the samples, in order. Each sample has a full batch, except for
            the last sample of the pass.
    """

    numbers: tuple[int, ...]
    source: VerifiedSource

    def __str__(self) -> str:
        return f"samples {self.numbers[0]} to {self.numbers[-1]}"


class CountingEngine:
    """The onnxruntime session and the counter of one worker process.

    The threads of a process use the session and the counter in turn. A worker process with a
    single thread never waits.

    Args:
        payload: Model and settings.
        threads: Number of threads of the worker.
    """

    def __init__(self, payload: CountingPayload, threads: int) -> None:
        session = None
        if payload.model:
            session = open_packed_session(payload.model, threads, payload.path)
        self.inputs = payload.inputs
        self.counter = SampleCounter(session, threads=threads, **payload.counting)
        self.turn = threading.Lock()


class VerifiedSource(SubsetSource):
    """Samples on a worker. Loading a sample checks that the client has the same sample.

    Args:
        source: Samples as this worker reads them.
        identities: Digest of each sample, computed by the client.
    """

    def __init__(self, source: SampleSource, identities: Sequence[bytes]) -> None:
        super().__init__(source, range(len(identities)))
        self.identities = identities

    def __reduce__(self) -> tuple[Any, ...]:
        return VerifiedSource, (self.whole, self.identities)

    def load(self, index: int) -> Sample:
        """Return a sample with a batch dimension.

        Raises:
            ClusterError: The sample cannot be read here, or is not equal to the client's sample.
        """
        identity = self.whole.identity(index)
        if identity != self.identities[index]:
            unreadable = identity.endswith(UNREADABLE)
            fault = "cannot be read on" if unreadable else "is a different file on"
            raise ClusterError(
                f"{self.name(index)} {fault} this worker; give a path that all machines share",
                code="file-unreadable" if unreadable else "different-files",
            )
        return super().load(index)


def share_dataset(dataset: Dataset) -> Dataset:
    """Return a dataset with the same samples and sample numbers for use in other processes.

    Raises:
        DataError: The samples exist in this process only.
    """
    indices = list(dataset.indices or ())
    source = dataset.source.select_samples(indices)
    verified = VerifiedSource(source, [dataset.source.identity(i) for i in indices])
    return Dataset(verified, dataset.inputs, len(indices))


@dataclass
class CountedPortion:
    """Result of one portion of the samples: statistics, data quality and broken images.

    Attributes:
        statistics: Statistics of the tensors.
        quality: Counts and value range of the samples.
        skipped: Name of each broken image and the reason.
    """

    statistics: Statistics
    quality: DataQuality
    skipped: list[tuple[str, str]]


def count_portion(
    engine: CountingEngine, portion: SamplePortion, stopped: threading.Event
) -> CountedPortion:
    """Count the activation values of a portion's samples on a worker.

    Args:
        engine: Session and counter of this process.
        portion: Samples to count.
        stopped: Event that is set when the client has ended the job.

    Raises:
        ClusterError: This worker reads other files than the client, or the job has ended.
        QdqtoolError: A sample cannot be loaded or counted.
    """
    dataset = Dataset(portion.source, engine.inputs, portion.source.count())
    with engine.turn, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        counter = engine.counter
        counter.reset()
        for number, (_, load) in zip(portion.numbers, dataset.tasks(), strict=True):
            if stopped.is_set():
                raise ClusterError("the client has ended the job", code="job-over")
            counter.add(number, load())
        statistics = Statistics(counter.tensors, images=counter.images)
        return CountedPortion(statistics, dataset.quality, dataset.skipped)


# Client -------------------------------------------------------------------------------------------

_MAX_SAMPLES = 64  # maximum number of samples in a portion; limits the loss if a worker dies
_PORTIONS_PER_THREAD = 4  # portions per thread into which the remaining samples are split


class ClusterPass:
    """Sends portions of the samples to a cluster, and merges the results.

    The statistics do not depend on how the samples are split into portions, nor on the order; see
    :class:`calibration.statistics.TensorStatistics`.

    Args:
        cluster: Connection to the workers.
        model: Model that computes the tensors.
        dataset: Samples. The pass adds the quality counts and the skipped images of the workers.
        done: Numbers of the samples to skip.
        names: Tensors whose values are counted.
        computed: Tensors that the model has to compute, without its inputs.
        bins: See :class:`calibration.statistics.TensorStatistics`.
        focus: See :func:`calibration.runner.collect`.

    Raises:
        ModelError: The model cannot be sent.
        DataError: The samples exist in this process only.
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
        dataset.source.select_samples(())  # raises early if other processes cannot read the data
        counting = {
            "names": tuple(names),
            "bins": bins,
            "focus": focus,
            "samples": len(dataset),
            "by_channel": find_linear_inputs(model).intersection(names),
        }
        packed = pack_model(model, computed) if computed else b""
        self.payload: CountingPayload | None = CountingPayload(
            packed, model.path, tuple(dataset.inputs), counting
        )
        self.cluster, self.dataset, self.excluded = cluster, dataset, done
        empty = Statistics({name: TensorStatistics(bins) for name in names})
        self._merged: tuple[Statistics, frozenset[int]] = empty, frozenset()

    def results(self) -> Generator[int, None, None]:
        """Yield the number of each sample when its portion is merged.

        Closing the generator cancels the remaining portions.

        Raises:
            QdqtoolError: A sample cannot be counted, or the cluster fails.
        """
        payload, self.payload = self.payload, None
        job = ClusterJob(self.cluster, CountingEngine, payload, count_portion)
        del payload  # frees memory: the job deletes its payload once the workers have copies
        with job:
            for portion, counted in job.results(self._portions(job)):
                self._merge_portion(portion, counted)
                yield from portion.numbers

    def _merge_portion(self, portion: SamplePortion, counted: CountedPortion) -> None:
        statistics, done = self._merged
        # One assignment, so that Ctrl-C cannot leave some tensors merged and others not.
        self._merged = statistics.merge(counted.statistics), done.union(portion.numbers)
        self.dataset.take(counted.quality, counted.skipped)

    def snapshot(self) -> tuple[Statistics, Set[int]]:
        """Return the statistics merged so far, and the numbers of the counted samples."""
        return self._merged

    def _portions(self, job: ClusterJob) -> Iterator[SamplePortion]:
        source = self.dataset.source
        remaining = len(self.dataset) - len(self.excluded)
        samples = self._samples()
        while remaining > 0:
            group = list(itertools.islice(samples, portion_size(remaining, job.slots)))
            remaining -= len(group)
            numbers = tuple(number for number, _, _ in group)
            indices = [index for _, part, _ in group for index in part]
            identities = [digest for _, _, digests in group for digest in digests]
            if type(source).identity is not SampleSource.identity:
                identities = [source.identity(index) for index in indices]
            yield SamplePortion(numbers, VerifiedSource(source.select_samples(indices), identities))

    def _samples(self) -> Iterator[tuple[int, list[int], list[bytes]]]:
        """Yield the number of each remaining sample, and the indices and digests of its rows.

        At the end, the digests of all samples have been read, so the fingerprint is known.
        """
        digests = self.dataset.digests()
        for number in range(len(self.dataset)):
            indices = self.dataset.group(number)
            group_digests = list(itertools.islice(digests, len(indices)))
            if number not in self.excluded:
                yield number, indices, group_digests
        for _ in digests:  # ends the iterator, which then sets the fingerprint
            pass


def portion_size(remaining: int, slots: int) -> int:
    """Return the number of samples of the next portion.

    Large portions need less time for merging. Small portions at the end shorten the wait for the
    last portion.

    Args:
        remaining: Number of remaining samples.
        slots: Number of threads of the cluster.
    """
    return min(_MAX_SAMPLES, math.ceil(remaining / (_PORTIONS_PER_THREAD * max(slots, 1))))

"""One pass over calibration data by the workers of a cluster.

Workers read portions of the samples and count them. The client merges their statistics.
"""

from __future__ import annotations

import contextlib
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
from calibration.cluster.connection import Cluster
from calibration.cluster.jobs import ClusterJob
from calibration.counting import SampleCounter, counting_turns
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
from calibration.session import open_packed_session, pack_model, sample_bytes, worker_count
from calibration.statistics import TensorStatistics, histogram_bytes
from qdqtool.errors import ClusterError
from qdqtool.ir.graph import Model
from qdqtool.ir.sizes import linear_inputs

# Workers ------------------------------------------------------------------------------------------


@dataclass
class CountingPayload:
    """Data that all portions share; it is sent to each worker once.

    Attributes:
        model: Serialized model that computes the tensors; empty if all tensors are inputs.
        path: Path of the original model for messages.
        names: Tensors to count.
        bins: See :class:`calibration.statistics.TensorStatistics`.
        focus: See :func:`calibration.runner.collect`.
        inputs: Inputs of the model.
        sample_bytes: Bytes of one sample's tensors.
        samples: Number of samples of all portions.
        by_channel: See :class:`calibration.counting.SampleCounter`.
    """

    model: bytes
    path: str
    names: tuple[str, ...]
    bins: int
    focus: Focus | None
    inputs: tuple[InputSpec, ...]
    sample_bytes: int
    samples: int
    by_channel: tuple[str, ...] = ()


@dataclass
class SamplePortion:
    """Part of the samples, for one worker.

    Attributes:
        numbers: Numbers of the samples.
        source: Images or rows of the samples, in order. Only the last sample of a pass may have
            fewer than a batch.
        identities: Digests of the images or rows on the client.
    """

    numbers: tuple[int, ...]
    source: SampleSource
    identities: Sequence[bytes]

    def __str__(self) -> str:
        return f"samples {self.numbers[0]} to {self.numbers[-1]}"


class CountingEngine:
    """Session and counters of one worker process.

    Args:
        payload: Shared part; its model is released.
        threads: Threads of the worker.
    """

    def __init__(self, payload: CountingPayload, threads: int) -> None:
        counted = histogram_bytes(len(payload.names), payload.bins)
        count = worker_count(payload.sample_bytes, threads, counted)
        threads_each = max(1, threads // count)
        session = None
        if payload.model:
            session = open_packed_session(payload.model, threads_each, payload.path)
        payload.model = b""
        self.payload = payload
        self._free: queue.SimpleQueue[SampleCounter] = queue.SimpleQueue()
        turns = counting_turns(count)
        for _ in range(count):
            counter = SampleCounter(
                session,
                payload.names,
                payload.bins,
                payload.focus,
                threads_each,
                payload.samples,
                payload.by_channel,
                turns,
            )
            self._free.put(counter)

    @contextlib.contextmanager
    def counter(self) -> Iterator[SampleCounter]:
        """Yield an empty counter, as soon as one is free."""
        counter = self._free.get()
        try:
            yield counter
        finally:
            counter.reset()
            self._free.put(counter)


class VerifiedSource(SubsetSource):
    """A source whose samples must be those that the client of a cluster saw.

    Args:
        source: Source in this process.
        identities: Identity of each sample on the client.
    """

    def __init__(self, source: SampleSource, identities: Sequence[bytes]) -> None:
        super().__init__(source, range(len(identities)))
        self.identities = identities

    def __reduce__(self) -> tuple[Any, ...]:
        return VerifiedSource, (self.whole, self.identities)

    def load(self, index: int) -> Sample:
        """Return a sample.

        Raises:
            ClusterError: The sample differs from the client's.
        """
        identity = self.whole.identity(index)
        if identity != self.identities[index]:
            unreadable = identity.endswith(UNREADABLE)
            fault = "cannot be read" if unreadable else "is another file"
            raise ClusterError(
                f"{self.name(index)} {fault} there; let all machines see the same files",
                code="file-unreadable" if unreadable else "different-files",
            )
        return super().load(index)


def share_dataset(dataset: Dataset) -> Dataset:
    """Return a dataset with the same samples and numbers that other processes can read.

    Raises:
        DataError: The samples exist in this process only.
    """
    indices = list(dataset.indices or ())
    source = dataset.source.portion(indices)
    verified = VerifiedSource(source, [dataset.source.identity(i) for i in indices])
    return Dataset(verified, dataset.inputs, len(indices))


def count_portion(
    engine: CountingEngine, portion: SamplePortion, stopped: threading.Event
) -> dict[str, Any]:
    """Return statistics and quality of the samples of a portion.

    Raises:
        ClusterError: This worker sees other files than the client, or the job is over.
        QdqtoolError: The error of a sample.
    """
    source = VerifiedSource(portion.source, portion.identities)
    dataset = Dataset(source, engine.payload.inputs, len(portion.identities))
    with engine.counter() as counter, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        begin = time.perf_counter()
        for number, (_, load) in zip(portion.numbers, dataset.tasks(), strict=True):
            if stopped.is_set():
                raise ClusterError("the job is over", code="job-over")
            counter.add(number, load())
        return {
            "tensors": counter.tensors,
            "images": counter.images,
            "quality": asdict(dataset.quality),
            "skipped": dataset.skipped,
            "seconds": time.perf_counter() - begin,
        }


# Client -------------------------------------------------------------------------------------------

# Maximum number of samples in a portion: their names are sent, and a scheduler keeps messages for a
# while.
_MAX_SAMPLES = 256
_FIRST_SAMPLES = 2  # samples in a portion while the time per sample is unknown
_MAX_SECONDS = 10.0  # maximum work in a portion: a lost worker costs little, and progress shows
_MERGING = 0.25  # maximum share of the client's time for merging
_PORTIONS_LEFT = 2.5  # minimum number of portions per thread for the remaining samples


class ClusterPass:
    """A pass that sends portions of the samples to a cluster and merges the results.

    The statistics do not depend on the partition and the order; see
    :class:`calibration.statistics.TensorStatistics`.

    Args:
        cluster: Workers.
        model: Model that computes tensors.
        dataset: Samples; the pass adds quality and skipped images to it.
        done: Numbers of samples to leave out.
        names: Tensors to count.
        computed: Tensors that the model has to compute.
        bins: See :class:`CountingPayload`.
        focus: See :class:`CountingPayload`.

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
        dataset.source.portion(())  # fails early if other processes cannot read the data
        self.payload: CountingPayload | None = CountingPayload(
            pack_model(model, computed) if computed else b"",
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
        self.tensors = {name: TensorStatistics(bins) for name in names}
        self.images = 0
        self.done: set[int] = set()
        self._sizer = PortionSizer()
        # Python raises signals in the main thread only, so Ctrl-C interrupts no merge here.
        self._merger = ThreadPoolExecutor(1, "merging")

    def results(self) -> Generator[int, None, None]:
        """Yield the number of each sample when it is done; closing cancels the remaining ones.

        Raises:
            QdqtoolError: The error of a sample or of the cluster.
        """
        payload, self.payload = self.payload, None
        module = CountingEngine.__module__
        job = ClusterJob(
            self.cluster, f"{module}:CountingEngine", payload, f"{module}:count_portion"
        )
        del payload  # the model is large; the job releases it when the workers have it
        with job, self._merger:
            for portion, result in job.results(self._portions(job)):
                self._merger.submit(self._merge, portion, result).result()
                yield from portion.numbers

    def _merge(self, portion: SamplePortion, result: dict[str, Any]) -> None:
        begin = time.perf_counter()
        for name, part in result["tensors"].items():
            self.tensors[name] = self.tensors[name].merge(part)
        self.images += result["images"]
        self.done.update(portion.numbers)
        self.dataset.take(DataQuality(**result["quality"]), result["skipped"])
        merging = time.perf_counter() - begin
        self._sizer.learn(len(portion.numbers), result["seconds"], merging)

    def snapshot(self) -> tuple[Statistics, Set[int]]:
        """Return the statistics merged so far, and the numbers of their samples."""
        return Statistics(self.tensors, images=self.images), self.done.copy()

    def _portions(self, job: ClusterJob) -> Iterator[SamplePortion]:
        source = self.dataset.source
        left = len(self.dataset) - len(self.left_out)
        samples = self._samples()
        while left > 0:
            group = list(itertools.islice(samples, self._sizer.size(left, job.slots)))
            left -= len(group)
            numbers = tuple(number for number, _, _ in group)
            indices = [index for _, part, _ in group for index in part]
            identities = [digest for _, _, digests in group for digest in digests]
            if type(source).identity is not SampleSource.identity:
                identities = [source.identity(index) for index in indices]
            yield SamplePortion(numbers, source.portion(indices), identities)

    def _samples(self) -> Iterator[tuple[int, list[int], list[bytes]]]:
        """Yield number, indices and digests of each sample that is left; read all digests."""
        digests = self.dataset.digests()
        for number in range(len(self.dataset)):
            indices = self.dataset.group(number)
            group_digests = list(itertools.islice(digests, len(indices)))
            if number not in self.left_out:
                yield number, indices, group_digests
        for _ in digests:  # the fingerprint is known after the last one
            pass


class PortionSizer:
    """Chooses the number of samples of the next portion.

    Large portions save merging, small ones save waiting for the last portion. The size depends only
    on ratios of times that were measured in the same way, so that it is right on a busy machine.
    """

    def __init__(self) -> None:
        self._counting = self._samples = 0.0  # seconds of the workers, and samples
        self._merging = 0.0  # seconds of the client for one portion

    def learn(self, samples: int, counting: float, merging: float) -> None:
        """Record a portion.

        Args:
            samples: Number of samples.
            counting: Seconds of the worker.
            merging: Seconds of the client to merge it.
        """
        self._samples += samples
        self._counting += counting
        self._merging = merging if not self._merging else 0.7 * self._merging + 0.3 * merging

    def size(self, left: int, slots: int) -> int:
        """Return the number of samples of the next portion.

        Args:
            left: Samples that are left.
            slots: Threads of the cluster.
        """
        if not self._samples:
            return _FIRST_SAMPLES
        seconds = self._counting / self._samples or 1e-9
        least = slots * self._merging / _MERGING / seconds
        share = left / (_PORTIONS_LEFT * max(slots, 1))
        size = min(max(share, least), max(_MAX_SECONDS / seconds, least))
        return max(1, min(left, _MAX_SAMPLES, math.ceil(size)))

"""Measurement of candidates on samples.

A candidate is a recipe: a set of Q/DQ pairs with scales. A measurement depends only on the job and
the task. Tasks run on threads of this process or on workers elsewhere.

The network runs in parts (:mod:`qdqtool.tuning.partition`). Candidates with the same Q/DQ pairs in
a part share one session of the part. The outputs of a part depend only on the Q/DQ pairs of the
part and of all parts upstream. Candidates that agree in these pairs share the outputs. For example,
if candidates differ only in one branch of the head, the outputs of all other branches are shared.

onnxruntime runs each part on one thread and computes Q/DQ in float. The division into parts does
not depend on the candidates of a task. So the results of a candidate are equal, bit for bit, in any
task and with any number of workers.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper

from calibration import Focus
from calibration.cluster.connection import Cluster
from calibration.cluster.jobs import ClusterJob
from calibration.cluster_pass import share_dataset
from calibration.dataset import Dataset
from calibration.session import TensorFetcher, open_packed_session, partial_model
from qdqtool.accuracy import metrics
from qdqtool.accuracy.metrics import Evidence, Metric
from qdqtool.insertion.output_errors import ReferenceOutputs
from qdqtool.insertion.rewrite import name_rounded_weights, round_weights
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.proto.external_data import has_data, to_array
from qdqtool.proto.slim import strip_large_weights
from qdqtool.runtime.sessions import SharedWeights, core_count
from qdqtool.tuning.partition import NetworkPart, NetworkPartition, PartRun
from qdqtool.tuning.recipe import FLOAT_RECIPE, Recipe
from qdqtool.util import limits
from qdqtool.util.threads import SharedTasks, run_threads

# Increase this number if a change of the code changes measurements. Files with earlier measurements
# are then not used.
REVISION = 3

_MAX_WORKERS = 8  # limits memory: each worker holds samples and a session
_SESSION_BYTES = 128 << 10  # estimated memory of a session without its weights

_Arrays = dict[str, npt.NDArray[Any]]


# Jobs and tasks -----------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Measurement of one candidate on one sample.

    Attributes:
        error: Error of the compared tensors, see
            :class:`qdqtool.insertion.output_errors.ReferenceOutputs`.
        evidence: Intermediate result of the metric for this sample; None if the metric was not
            measured.
    """

    error: float
    evidence: Evidence = None


SampleMeasurements = dict[int, Measurement | None]
"""Measurements by number of the sample; None for a sample that cannot be read."""

TaskResult = dict[str, SampleMeasurements]
"""Measurements of one task or a part of the task, by the key of the candidate."""

_network_lock = threading.Lock()


@dataclass
class TuningJob:
    """Data that all tasks of a tuning share.

    Attributes:
        model: The prepared float network, serialized.
        images: Samples of the search and held-out samples.
        compared: Tensors whose error is measured.
        scores: Class outputs of a detector, from which the positions of objects follow. Errors are
            measured at these positions; everywhere if `scores` is empty.
        metric: Metric of the accuracy.
    """

    model: bytes
    images: Dataset
    compared: tuple[str, ...]
    scores: tuple[str, ...]
    metric: Metric
    _network: PartitionedNetwork | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_network": None}

    @property
    def network(self) -> PartitionedNetwork:
        """The parsed network in parts, which all tasks of one process share."""
        with _network_lock:
            if self._network is None:
                self._network = PartitionedNetwork(self)
            return self._network


@dataclass(frozen=True)
class MeasurementTask:
    """Candidates to measure on samples.

    Attributes:
        images: Indices of the samples.
        candidates: The candidates.
        with_metric: Whether to measure the metric in addition to the error.
    """

    images: tuple[int, ...]
    candidates: tuple[Recipe, ...]
    with_metric: bool = False


TaskMapper = Callable[[TuningJob, Sequence[MeasurementTask]], Iterator[TaskResult]]
"""Function that runs tasks and yields their results.

The results may come in any order and in parts. Together, they contain each candidate and sample.
"""


def run_task(
    job: TuningJob, task: MeasurementTask, stopped: threading.Event | None = None
) -> TaskResult:
    """Measure all candidates of a task.

    Equal jobs and tasks give equal results, bit for bit, on every machine and in any order.

    Args:
        job: Data that all tasks share.
        task: Candidates and samples.
        stopped: If this event is set, the task ends early and returns the measurements so far.

    Raises:
        ModelError: onnxruntime cannot run a candidate.
        DataError: A sample of arrays is damaged.
        QdqtoolError: The user's metric failed.
    """
    result: TaskResult = defaultdict(dict)
    for part in iterate_task(job, task):
        for key, measurements in part.items():
            result[key].update(measurements)
        if stopped is not None and stopped.is_set():
            break
    return dict(result)


def iterate_task(job: TuningJob, task: MeasurementTask) -> Iterator[TaskResult]:
    """Measure a task; yield each measurement (one candidate, one sample) when it is complete."""
    network = job.network
    for number in task.images:
        sample = job.images.load(number)
        if sample is None:
            yield {recipe.key: {number: None} for recipe in task.candidates}
            continue
        for key, row in network.measure(number, sample, task.candidates, task.with_metric):
            yield {key: {number: row}}


# Caches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloatReference:
    """Outputs of the float network on a sample, in the forms that errors and metric need.

    Attributes:
        compared: Reference of the tensors whose error is measured.
        metric_reference: Result of :meth:`Metric.prepare_reference`.
    """

    compared: ReferenceOutputs
    metric_reference: Any


def _count_bytes(content: Any) -> int:
    if isinstance(content, Mapping):
        return sum(map(_count_bytes, content.values()))
    if isinstance(content, list):
        return sum(map(_count_bytes, content))
    return int(getattr(content, "nbytes", 0))


class ReferenceCache:
    """Cache of the float network's outputs by number of the sample, up to a limit in bytes.

    Nothing is evicted: every step of a search reads all samples, so keeping other samples would not
    save more.
    """

    def __init__(self) -> None:
        self._references: dict[int, FloatReference] = {}
        self._bytes_left = limits.TUNING_REFERENCES
        self._lock = threading.Lock()

    def get(self, number: int) -> FloatReference | None:
        """Return the reference of a sample; None if it is not in the cache."""
        return self._references.get(number)

    def add(self, number: int, reference: FloatReference) -> None:
        """Add the reference of a sample if the cache has enough space."""
        size = _count_bytes([reference.compared, reference.metric_reference])
        with self._lock:
            if number not in self._references and size <= self._bytes_left:
                self._references[number] = reference
                self._bytes_left -= size


class ActivationCache:
    """Cache of the outputs of parts on one sample, until their last use.

    Above a limit in bytes, the outputs whose next use is latest are dropped. The caller computes
    dropped outputs again.

    Attributes:
        outputs: Output tensors of each run.
    """

    def __init__(self, uses: Mapping[PartRun, Sequence[int]]) -> None:
        """Create an empty cache.

        Args:
            uses: Ascending numbers of the steps (turns) that use the outputs of a run, by run.
        """
        self.outputs: dict[PartRun, _Arrays] = {}
        self._uses = uses
        self._bytes_left = limits.TUNING_HELD

    def add(self, run: PartRun, outputs: _Arrays) -> None:
        """Add the outputs of a run, even above the limit; `end_turn` enforces the limit."""
        self.outputs[run] = outputs
        self._bytes_left -= _count_bytes(outputs)

    def end_turn(self, turn: int) -> None:
        """Drop outputs that no later step uses, and further outputs if the limit is exceeded."""
        for run in [r for r in self.outputs if self._uses[r][-1] <= turn]:
            self._drop_outputs(run)
        while self._bytes_left < 0 and self.outputs:
            self._drop_outputs(max(self.outputs, key=lambda r: self._find_next_use(r, turn)))

    def _find_next_use(self, run: PartRun, turn: int) -> float:
        return next((use for use in self._uses[run] if use > turn), math.inf)

    def _drop_outputs(self, run: PartRun) -> None:
        self._bytes_left += _count_bytes(self.outputs.pop(run))


class SessionCache:
    """Cache of open sessions up to a limit in bytes; the least recently used is closed first."""

    def __init__(self) -> None:
        # Ordered by last use, with the most recently used session at the end.
        self._sessions: dict[tuple[int, str], tuple[TensorFetcher, int]] = {}
        self._bytes_left = limits.TUNING_SESSIONS
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def get(
        self, key: tuple[int, str], open_session: Callable[[], tuple[TensorFetcher, int]]
    ) -> TensorFetcher:
        """Return the session for a part and a recipe; open the session if it is not in the cache.

        Args:
            key: Number of the part and key of the recipe.
            open_session: Function that opens the session, and returns the session and its size in
                bytes.
        """
        with self._lock:
            if key in self._sessions:
                entry = self._sessions.pop(key)
            else:
                entry = open_session()
                self._bytes_left -= entry[1]
            self._sessions[key] = entry
            while self._bytes_left < 0 and len(self._sessions) > 1:
                oldest = next(iter(self._sessions))
                self._bytes_left += self._sessions.pop(oldest)[1]
            return entry[0]


# Networks -----------------------------------------------------------------------------


class PartitionedNetwork:
    """A network that runs in parts, with the Q/DQ pairs of any recipe.

    Attributes:
        job: Data that all tasks share.
        model: The network without large weights.
        weights: Large weights by name, both original weights and weights rounded by Q and DQ.
        parts: Parts of the network.
        references: Outputs of the float network.
        sessions: Open sessions of parts.
    """

    def __init__(self, job: TuningJob) -> None:
        self.job = job
        whole = Model(onnx.ModelProto.FromString(job.model))
        slim = strip_large_weights(whole.proto)
        self.weights = SharedWeights()
        for tensor in slim.graph.initializer:
            original = whole.initializers[tensor.name]
            if not has_data(tensor) and original.data_type in QUANTIZABLE:
                self.weights.add(tensor.name, to_array(original))
            else:
                tensor.CopyFrom(original)
        self.model = Model(slim, types=whole, constants=whole)
        self.references = ReferenceCache()
        self.sessions = SessionCache()
        self._tensors = tuple(dict.fromkeys((*job.compared, *job.metric.tensors)))
        partition = NetworkPartition(self.model, self._tensors)
        self.parts = partition.build_parts(partition.first_cut_after(job.compared))
        self._producer = {t: part.number for part in self.parts for t in part.outputs}
        self._focus = Focus(job.scores) if job.scores else None
        self._constants: _Arrays = {}  # constant tensors that the metric or the error uses
        for name in self._tensors:
            constant = self.model.constant(name) if name in self.model.initializers else None
            if constant is not None:
                self._constants[name] = constant
        self._runs: dict[tuple[int, str, tuple[PartRun, ...]], PartRun] = {}
        self._runs_of: dict[str, list[PartRun]] = {}

    def measure(
        self, number: int, sample: _Arrays, candidates: Sequence[Recipe], with_metric: bool
    ) -> Iterator[tuple[str, Measurement]]:
        """Measure candidates on one sample; yield the key and the measurement of each.

        Args:
            number: Number of the sample.
            sample: Arrays of the sample by input name.
            candidates: Recipes to measure.
            with_metric: Whether to measure the metric in addition to the error.
        """
        sample = {**sample, **self._constants}
        floats = [r for r in candidates if r.is_float]
        reference = self.references.get(number)
        if reference is None or floats:
            _, tensors = next(self._run_candidates(sample, [FLOAT_RECIPE], self._tensors))
            if reference is None:
                reference = self._make_reference(tensors)
                self.references.add(number, reference)
            for recipe in floats:
                yield recipe.key, self._make_measurement(number, reference, tensors, with_metric)
            del tensors
        others = [r for r in candidates if not r.is_float]
        names = self._tensors if with_metric else self.job.compared
        for recipe, tensors in self._run_candidates(sample, others, names):
            yield recipe.key, self._make_measurement(number, reference, tensors, with_metric)

    def _make_reference(self, tensors: _Arrays) -> FloatReference:
        job = self.job
        focus_map = self._focus.find(tensors) if self._focus else None
        compared = ReferenceOutputs({t: tensors[t] for t in job.compared}, focus_map)
        return FloatReference(
            compared, job.metric.prepare_reference({t: tensors[t] for t in job.metric.tensors})
        )

    def _make_measurement(
        self, number: int, reference: FloatReference, tensors: _Arrays, with_metric: bool
    ) -> Measurement:
        error = reference.compared.error(tensors)
        if not with_metric:
            return Measurement(error)
        metric = self.job.metric
        outputs = {t: tensors[t] for t in metric.tensors}
        image = self.job.images.name(number)
        return Measurement(error, metric.observe(reference.metric_reference, outputs, image))

    def _run_candidates(
        self, sample: _Arrays, candidates: Sequence[Recipe], names: Sequence[str]
    ) -> Iterator[tuple[Recipe, _Arrays]]:
        """Run candidates on a sample, and yield each candidate with the tensors in `names`.

        Candidates that share runs of parts follow each other, so the order may differ from
        `candidates`.
        """
        finals = [self._producer[t] for t in dict.fromkeys(names) if t in self._producer]
        numbers = self._list_upstream(finals)
        runs = {recipe: self._list_runs(recipe) for recipe in candidates}
        # Steps in order, each with the runs whose outputs it uses. A step runs a part, or yields
        # the final outputs of a recipe.
        turns: dict[PartRun | Recipe, Sequence[PartRun]] = {}
        for recipe in _order_by_sharing(runs, numbers):
            for number in numbers:
                run = runs[recipe][number]
                turns[run] = run.producers
            turns[recipe] = [runs[recipe][number] for number in finals]
        cache = ActivationCache(_list_uses(turns.values()))
        for turn, (item, sources) in enumerate(turns.items()):
            if isinstance(item, PartRun):
                self._run_part(item, sample, cache)
            else:
                yield item, self._collect_inputs(sources, sample, cache)
            cache.end_turn(turn)

    def _run_part(self, run: PartRun, sample: _Arrays, cache: ActivationCache) -> None:
        session = self.sessions.get(
            (run.part.number, run.recipe.key), lambda: self._open_session(run.part, run.recipe)
        )
        cache.add(run, session.run(self._collect_inputs(run.producers, sample, cache)))

    def _collect_inputs(
        self, sources: Iterable[PartRun], sample: _Arrays, cache: ActivationCache
    ) -> _Arrays:
        """Return the tensors of the sample and of the runs in `sources`.

        Runs whose outputs are not in the cache run again.
        """
        tensors = dict(sample)
        for source in sources:
            if source not in cache.outputs:
                self._run_part(source, sample, cache)
            tensors |= cache.outputs[source]
        return tensors

    def _list_upstream(self, parts: Iterable[int]) -> list[int]:
        """Return the numbers of `parts` and of all parts upstream of them, ascending."""
        numbers = set(parts)
        for part in reversed(self.parts):
            if part.number in numbers:
                numbers.update(part.producers)
        return sorted(numbers)

    def _list_runs(self, recipe: Recipe) -> list[PartRun]:
        """Return the run of each part for a recipe.

        Recipes share the objects of equal runs.
        """
        if recipe.key not in self._runs_of:
            runs: list[PartRun] = []
            for part in self.parts:
                restricted = recipe.restrict_to_nodes(part.nodes)
                producers = tuple(runs[number] for number in part.producers)
                run = PartRun(part, restricted, producers)
                runs.append(self._runs.setdefault((part.number, restricted.key, producers), run))
            self._runs_of[recipe.key] = runs
        return self._runs_of[recipe.key]

    def _open_session(self, part: NetworkPart, recipe: Recipe) -> tuple[TensorFetcher, int]:
        """Open a session for a part and a recipe; return it with its estimated memory in bytes.

        The memory includes the weights, which a session copies.
        """
        for _, tensor, axis in recipe.weights:
            name = name_rounded_weights(tensor, axis, recipe.number_format)
            if name not in self.weights and self.model.elem_type(tensor) == onnx.TensorProto.FLOAT:
                weight = self.model.constant(tensor)
                assert weight is not None
                self.weights.add(name, round_weights(weight, axis, recipe.number_format))
        quantized = recipe.build(self.model, "rounded")[0]
        inputs = [
            helper.make_tensor_value_info(t, self.model.elem_type(t), None) for t in part.inputs
        ]
        proto = partial_model(quantized, part.outputs, inputs)
        weights = self.weights.attach(proto)
        size = sum(4 * math.prod(t.dims) for t in proto.graph.initializer) + _SESSION_BYTES
        session = open_packed_session(
            proto.SerializeToString(),
            1,
            "the network",
            fold_qdq=False,
            values=weights,
            one_arena=True,
        )
        return TensorFetcher(session), size


def _order_by_sharing(
    runs: Mapping[Recipe, Sequence[PartRun]], numbers: Sequence[int]
) -> list[Recipe]:
    """Order recipes so that recipes with equal upstream runs follow each other.

    Recipes whose runs are shared least come first.

    Args:
        runs: Runs of all parts, by recipe.
        numbers: Numbers of the parts that are needed.
    """
    users = Counter(runs[recipe][number] for recipe in runs for number in numbers)
    rank = {run: position for position, run in enumerate(users)}
    return sorted(
        runs, key=lambda recipe: [(users[runs[recipe][n]], rank[runs[recipe][n]]) for n in numbers]
    )


# Mappers ------------------------------------------------------------------------------


def count_default_workers() -> int:
    """Return the number of cores that this process may use, at most 8."""
    return max(1, min(_MAX_WORKERS, core_count()))


def map_on_threads(workers: int | None = None) -> TaskMapper:
    """Return a mapper that runs tasks on threads.

    Threads are enough, because onnxruntime releases Python's global interpreter lock.

    Args:
        workers: Number of threads; None for :func:`count_default_workers`.
    """
    count = workers or count_default_workers()

    def run(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        shared_tasks = SharedTasks(tasks)

        def work(put: Callable[[TaskResult], None]) -> None:
            for task in shared_tasks:
                for result in iterate_task(job, task):
                    put(result)
                    if shared_tasks.stopped:
                        return

        return run_threads(shared_tasks, [work] * min(count, len(tasks)), metrics.cancel_calls)

    return run


class ClusterMapper(contextlib.ExitStack):
    """Runs tasks on a cluster; a context manager that removes its job from the cluster.

    The network and the names of the samples are sent to each worker once.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self._opened: tuple[ClusterJob, TuningJob] | None = None

    def __call__(self, job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        """Yield the result of each task once, in the order in which the tasks finish.

        Raises:
            ClusterError: The cluster is lost, or a worker has other software or other samples.
            QdqtoolError: A task failed.
        """
        if self._opened is None or job != self._opened[1]:
            self.close()
            cluster_job = ClusterJob(
                self.cluster,
                create_worker_state,
                replace(job, images=share_dataset(job.images), _network=None),
                run_task,
            )
            self._opened = self.enter_context(cluster_job), job
        yield from (result for _, result in self._opened[0].results(tasks))


def create_worker_state(job: TuningJob, threads: int) -> TuningJob:
    """Return the job as the state of a worker process, which parses the network on first use."""
    return job


def _list_uses(turns: Iterable[Sequence[PartRun]]) -> dict[PartRun, list[int]]:
    uses: dict[PartRun, list[int]] = defaultdict(list)
    for turn, sources in enumerate(turns):
        for source in sources:
            uses[source].append(turn)
    return uses

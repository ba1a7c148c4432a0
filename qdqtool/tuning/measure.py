"""Measuring placements on samples: a pure function of a job and a task, for threads here and workers elsewhere.

The network is run in *parts*, each from one node that can have weights in INT8 to the next. A part has one session for
each way to quantize what its nodes read, however many candidates do so. Candidates that agree from the inputs to a cut
share what lies in front of it: they are gone through as the branches of a tree, a sample at a time. Kernels are
onnxruntime's, Q/DQ computed in float, on one thread each; parts are the same whatever else is measured, so that a
candidate gives the same bits in any company and on any number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy.typing as npt
import onnx
from onnx import helper

from calibration import Focus
from calibration.cluster.mapping import Cluster
from calibration.cluster.mapping import Job as Handed
from calibration.clustered import shared
from calibration.dataset import Dataset
from calibration.session import Fetcher, open_packed, partial_model
from qdqtool.base import budgets
from qdqtool.base.process import Crew
from qdqtool.insertion.losses import Compared
from qdqtool.insertion.rewrite import rounded, rounded_name
from qdqtool.model.external import array_of, has_data
from qdqtool.model.graph import Model, without_large_weights
from qdqtool.model.operators import WEIGHTED
from qdqtool.model.sessions import SharedWeights, cores
from qdqtool.tuning import metrics
from qdqtool.tuning.configuration import Recipe
from qdqtool.tuning.metrics import Evidence, Metric


class Cuts:
    """Cuts through a float network in front of its nodes, in topological order.

    ``wanted`` are the tensors that are read at the end.
    """

    def __init__(self, model: Model, wanted: Sequence[str]) -> None:
        self.model = model
        self._made: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for position, node in enumerate(model.ordered):
            self._made.update((t, position) for t in node.outputs if t in wanted or (t and not model.is_constant(t)))
            self._last.update(dict.fromkeys((*node.inputs, *node.captured), position))
        self._made.update(dict.fromkeys((*model.inputs, *(t for t in wanted if t in model.initializers)), -1))
        self._last.update(dict.fromkeys(wanted, len(model.ordered)))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object for a whole tuning
    def crossing(self, position: int) -> tuple[str, ...]:
        """Tensors made in front of a node (graph inputs included) that it or what follows still reads."""
        return tuple(t for t, made in self._made.items() if made < position <= self._last.get(t, -1))

    def behind(self, tensors: Iterable[str]) -> int:
        """The first cut behind which all of some tensors are made."""
        return max((self._made[t] for t in tensors), default=-1) + 1

    def parts(self, more: int) -> list[Part]:
        """The parts from cut to cut: in front of each node with weights, and one ``more``.

        A cut through a tensor of unknown type is left out: it could not be fed.
        """
        model = self.model
        ends = {p for p, node in enumerate(model.ordered) if node.op in WEIGHTED} | {more}
        ends = {p for p in ends if p and all(model.elem_type(t) for t in self.crossing(p))}
        bounds = [0, *sorted(ends - {len(model.ordered)}), len(model.ordered)]
        return [
            Part(frozenset(n.index for n in model.ordered[a:b]), b,
                 tuple(t for t in self.crossing(a) if t not in model.inputs),
                 tuple(t for t in self.crossing(b) if self._made[t] >= a), self.crossing(b))
            for a, b in itertools.pairwise(bounds)
        ]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What lies between two cuts."""

    nodes: frozenset[int]  # indices
    end: int  # position of the cut behind it
    given: tuple[str, ...]  # tensors that cross the cut in front of it, the network's inputs apart
    made: tuple[str, ...]  # tensors that it makes and that cross the cut behind it
    left: tuple[str, ...]  # all that cross the cut behind it

    def of(self, recipe: Recipe) -> Recipe:
        """The pairs that nodes of the part read."""
        pairs = ((p, tuple(r for r in p.readers if r[0] in self.nodes)) for p in recipe.pairs)
        return Recipe(tuple(replace(p, readers=readers) for p, readers in pairs if readers),
                      tuple(w for w in recipe.weights if w[0] in self.nodes))  # fmt: skip


# Jobs and tasks ------------------------------------------------------------------------------------------------------

_Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Row:
    """One candidate on one sample."""

    error: float  # of the compared tensors, of their standard deviation (:class:`qdqtool.insertion.losses.Compared`)
    evidence: Evidence = None  # what the metric saw; None in a sweep

    def as_json(self) -> list[Any]:
        return [self.error, self.evidence]


Rows = dict[int, Row | None]  # by sample; None for one that cannot be read


@dataclass(frozen=True)
class Job:
    """What all tasks of a tuning share."""

    model: bytes  # the prepared float network, serialized
    images: Dataset  # the samples, by number
    compared: tuple[str, ...]  # tensors whose error is measured
    scores: tuple[str, ...]  # class outputs that show where the network looks; may be empty
    metric: Metric  # the metric
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    @property
    def network(self) -> Network:
        """The parsed model, kept for the tasks of one process."""
        with _parsing:
            if "network" not in self._kept:
                self._kept["network"] = Network(self)
        found: Network = self._kept["network"]
        return found


@dataclass(frozen=True)
class Task:
    """Which candidates to measure on which samples."""

    key: str  # names the task
    images: tuple[int, ...]  # numbers of samples
    candidates: tuple[Recipe, ...]  # what to measure
    whole: bool = False  # whether the metric is asked too; else only the error is measured


@dataclass(frozen=True)
class Result:
    """Rows of one task, or of a part of one, by candidate's key."""

    key: str
    rows: dict[str, Rows]


class Mapper(Protocol):
    """Runs tasks somewhere; what it yields may come in any order and in parts, each candidate and sample once."""

    def __call__(self, job: Job, tasks: Sequence[Task]) -> Iterator[Result]: ...


def run_task(job: Job, task: Task, stopped: threading.Event | None = None) -> Result:
    """All rows of a task; ends early, with the rows that there are, once ``stopped`` is set.

    The same job and task give the same bits, wherever and in whatever order they run.

    Raises:
        ModelError: onnxruntime cannot run a candidate.
        DataError: A sample of arrays is damaged.
        QdqtoolError: The user's metric failed.
    """
    rows: dict[str, Rows] = {}
    for part in iterate(job, task):
        for key, found in part.rows.items():
            rows.setdefault(key, {}).update(found)
        if stopped is not None and stopped.is_set():
            break
    return Result(task.key, rows)


def iterate(job: Job, task: Task) -> Iterator[Result]:
    """The same, candidate by candidate and sample by sample as they are measured."""
    network = job.network
    for number in task.images:
        sample = job.images.load(number)
        if sample is None:
            yield Result(task.key, {r.key: {number: None} for r in task.candidates})
            continue
        for key, row in network.rows(number, sample, task.candidates, task.whole):
            yield Result(task.key, {key: {number: row}})


_parsing = threading.Lock()


@dataclass(frozen=True)
class Reference:
    """What the float network does on a sample: where the error is measured, and what the metric keeps of it."""

    compared: Compared
    kept: Any

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self.compared.nbytes + _bytes(self.kept)


def _bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_bytes(v) for v in value.values())
    return sum(_bytes(v) for v in value) if isinstance(value, list) else int(getattr(value, "nbytes", 0))


class References:
    """References by sample, as many as there is room for: tasks go through all samples again and again, so that those
    that came first are worth as much as any others."""

    def __init__(self) -> None:
        self._known: dict[int, Reference] = {}
        self._left = budgets.TUNING_REFERENCES
        self._lock = threading.Lock()

    def known(self, number: int) -> Reference | None:
        with self._lock:
            return self._known.get(number)

    def add(self, number: int, reference: Reference) -> None:
        with self._lock:
            if number not in self._known and reference.nbytes <= self._left:
                self._known[number] = reference
                self._left -= reference.nbytes


class Network:
    """A network that can be run in parts, with any recipe."""

    def __init__(self, job: Job) -> None:
        self.job = job
        whole = Model(onnx.ModelProto.FromString(job.model))
        slim = without_large_weights(whole.proto)
        self.weights = SharedWeights()  # the large ones, as they are and as Q and DQ leave them
        for tensor in slim.graph.initializer:
            own = whole.initializers[tensor.name]
            if not has_data(tensor) and own.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
                self.weights.add(tensor.name, array_of(own))
            else:
                tensor.CopyFrom(own)
        self.model = Model(slim, types=whole, constants=whole)
        wanted = tuple(dict.fromkeys((*job.compared, *job.metric.tensors)))
        cuts = Cuts(self.model, wanted)
        self.compared_at = cuts.behind(job.compared)  # the cut behind which the error can be measured
        self.parts = cuts.parts(self.compared_at)
        self.focus = Focus(job.scores) if job.scores else None  # where it looks, if that is known
        self.references = References()
        constants = ((t, self.model.constant(t)) for t in wanted if t in self.model.initializers)
        self._constants = {t: value for t, value in constants if value is not None}  # outputs that nothing computes
        self._known: dict[str, list[Recipe]] = {}
        self._sessions: dict[tuple[int, str], Fetcher] = {}
        self._opening = threading.Lock()

    def rows(
        self, number: int, sample: _Arrays, candidates: Sequence[Recipe], whole: bool
    ) -> Iterator[tuple[str, Row]]:
        """Every candidate on one sample: its error and, for ``whole``, what the metric sees."""
        sample = {**sample, **self._constants}
        others = [r for r in candidates if r.pairs or r.weights]
        reference = self.references.known(number)
        if reference is None or len(others) < len(candidates):
            ((_, tensors),) = self._through(sample, [Recipe((), ())], math.inf)
            if reference is None:
                reference = self._referring(tensors)
                self.references.add(number, reference)
            for recipe in set(candidates).difference(others):
                yield recipe.key, self._row(number, reference, tensors, whole)
            del tensors
        for recipe, tensors in self._through(sample, others, math.inf if whole else self.compared_at) if others else ():
            yield recipe.key, self._row(number, reference, tensors, whole)

    def _referring(self, tensors: _Arrays) -> Reference:
        """What is kept of the float network's run."""
        job = self.job
        compared = Compared({t: tensors[t] for t in job.compared}, self.focus.find(tensors) if self.focus else None)
        return Reference(compared, job.metric.kept({t: tensors[t] for t in job.metric.tensors}))

    def _row(self, number: int, reference: Reference, tensors: _Arrays, whole: bool) -> Row:
        metric, error = self.job.metric, reference.compared.error(tensors)
        if not whole:
            return Row(error)
        outputs = {t: tensors[t] for t in metric.tensors}
        return Row(error, metric.look(reference.kept, outputs, self.job.images.name(number)))

    def _through(
        self, state: _Arrays, candidates: Sequence[Recipe], end: float, first: int = 0
    ) -> Iterator[tuple[Recipe, _Arrays]]:
        """What crosses the cut at ``end`` with each candidate; in front of part ``first`` they all agree.

        Of the branches behind a cut the one with most candidates comes last and needs what crosses the cut no longer
        than until it is past it, so that few cuts are held at a time.
        """
        here = list(candidates)
        for number in range(first, len(self.parts)):
            if number and self.parts[number - 1].end >= end:
                break
            branches: dict[str, list[Recipe]] = defaultdict(list)
            for recipe in here:
                branches[self._divided(recipe)[number].key].append(recipe)
            *others, here = sorted(branches.values(), key=len)
            for other in others:
                yield from self._through(self._run(number, other[0], state), other, end, number + 1)
            state = self._run(number, here[0], state)
        for recipe in here:
            yield recipe, state

    def _run(self, number: int, recipe: Recipe, state: _Arrays) -> _Arrays:
        """Takes a sample through a part."""
        part = self.parts[number]
        made = self._session(number, recipe).run(state) if part.made else {}
        return {t: made[t] if t in made else state[t] for t in part.left}

    def _divided(self, recipe: Recipe) -> list[Recipe]:
        """What each part has of a recipe."""
        if recipe.key not in self._known:
            self._known[recipe.key] = [part.of(recipe) for part in self.parts]
        return self._known[recipe.key]

    def _session(self, number: int, recipe: Recipe) -> Fetcher:
        here = self._divided(recipe)[number]
        with self._opening:
            if (number, here.key) not in self._sessions:
                self._sessions[number, here.key] = self._open(self.parts[number], here)
            return self._sessions[number, here.key]

    def _open(self, part: Part, recipe: Recipe) -> Fetcher:
        for _, tensor, axis in recipe.weights:
            name = rounded_name(tensor, axis)
            if name not in self.weights and self.model.elem_type(tensor) == onnx.TensorProto.FLOAT:
                value = self.model.constant(tensor)
                assert value is not None
                self.weights.add(name, rounded(value, axis))
        quantized = recipe.build(self.model, "rounded")[0]
        given = [helper.make_tensor_value_info(t, self.model.elem_type(t), None) for t in part.given]
        proto = partial_model(quantized, part.made, given)
        values = self.weights.used_by(proto)
        source = proto.SerializeToString()
        return Fetcher(open_packed(source, 1, "the network", fold_qdq=False, values=values, one_arena=True))


# Tasks on the threads of this process, or on the workers of a cluster (calibration.cluster): the same rows ------------


_MAX_WORKERS = 8


def default_workers() -> int:
    """One worker for each core, up to eight: each holds samples and a session."""
    return max(1, min(_MAX_WORKERS, cores()))


def local(workers: int | None = None) -> Mapper:
    """A mapper over threads; onnxruntime computes outside Python's lock."""
    count = workers or default_workers()

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        crew: Crew[Task, Result] = Crew(tasks, metrics.end)

        def work() -> None:
            for task in crew.tasks():
                for result in iterate(job, task):
                    crew.put(result)
                    if crew.stopped:
                        return

        return crew.results([work] * min(count, len(tasks)))

    return run


# A cluster -----------------------------------------------------------------------------------------------------------

class ClusterMapper(contextlib.ExitStack):
    """A mapper over a cluster. The network and the names of the samples reach each worker once. A context manager."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self._handed: tuple[Handed, Job] | None = None

    def __call__(self, job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        """Results as they are done, each task's once.

        Raises:
            ClusterError: The cluster is lost, or a worker is not fit or sees other samples.
            QdqtoolError: What a task raised.
        """
        if self._handed is None or job != self._handed[1]:
            self.close()
            given = replace(job, images=shared(job.images), _kept={})
            made = Handed(self.cluster, "qdqtool.tuning.measure:unpacked", given, "qdqtool.tuning.measure:run_task")
            self._handed = self.enter_context(made), job
        for _, result in self._handed[0].results(tasks):
            yield result


def unpacked(job: Job, threads: int) -> Job:
    """A job in a worker process, which keeps what it has parsed."""
    return job

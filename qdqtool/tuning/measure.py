"""Measuring placements on samples: a pure function of a job and a task, for threads here and workers elsewhere.

A sweep changes one site at a time. The network with everything as in the base recipe is rolled forward over the samples
of a task, from cut to cut; only the tensors that cross one cut are held. Each candidate then runs from the last cut in
front of its first change to the end. Kernels are onnxruntime's, Q/DQ computed in float, on one thread each; a candidate
always runs from the same cut, so that it gives the same bits on any number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
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
from qdqtool.model.live import bytes_of
from qdqtool.model.sessions import SharedWeights, cores
from qdqtool.tuning import metrics
from qdqtool.tuning.configuration import Recipe, first_change
from qdqtool.tuning.metrics import Evidence, Metric


class Cuts:
    """Cuts through a float network in front of each of its nodes, in topological order.

    ``wanted`` are the tensors that are read at the end.
    """

    def __init__(self, model: Model, wanted: Sequence[str]) -> None:
        self.model = model
        self._made: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for position, node in enumerate(model.ordered):
            self._made.update((t, position) for t in node.outputs if t and not model.is_constant(t))
            self._last.update(dict.fromkeys((*node.inputs, *node.captured), position))
        self._made.update(dict.fromkeys(model.inputs, -1))
        self._last.update(dict.fromkeys(wanted, len(model.ordered)))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object for a whole tuning
    def crossing(self, position: int) -> tuple[str, ...]:
        """Tensors made in front of a node (graph inputs included) that it or what follows still reads."""
        return tuple(t for t, made in self._made.items() if made < position <= self._last.get(t, -1))

    def usable(self, position: int) -> int:
        """The last cut at or in front of a node whose tensors all have a known type; 0 is the network's inputs."""
        while position and any(not self.model.elem_type(t) for t in self.crossing(position)):
            position -= 1
        return position

    def bytes_at(self, position: int) -> int:
        """Size of what crosses, open dimensions counted as 1."""
        return sum(bytes_of(self.model, tensor) for tensor in self.crossing(position))

    def behind(self, quantized: Model, position: int, outputs: Sequence[str]) -> onnx.ModelProto:
        """The part of a Q/DQ model of this network behind a cut that computes the given tensors."""
        given = [helper.make_tensor_value_info(t, self.model.elem_type(t), None)
                 for t in self.crossing(position) if t not in self.model.inputs]  # fmt: skip
        return partial_model(quantized, outputs, given)


# Jobs and tasks ------------------------------------------------------------------------------------------------------

_Arrays = dict[str, npt.NDArray[Any]]
_Samples = Mapping[int, _Arrays]


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
    base: Recipe  # the recipe that a sweep changes one site of
    compared: tuple[str, ...]  # tensors whose error is measured
    scores: tuple[str, ...]  # class outputs that show where the network looks; may be empty
    metric: Metric  # the metric
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def based_on(self, base: Recipe) -> Job:
        """The same with another base; what was parsed for the old one is not taken over."""
        return replace(self, base=base, _kept={"references": self.references})

    @property
    def network(self) -> Network:
        """The parsed model, kept for the tasks of one process."""
        with _parsing:
            if "network" not in self._kept:
                self._kept["network"] = Network(self)
        found: Network = self._kept["network"]
        return found

    @property
    def references(self) -> References:
        """What the float network does on samples, kept for the tasks of one process."""
        found: References = self._kept.setdefault("references", References())
        return found


@dataclass(frozen=True)
class Task:
    """Which candidates to measure on which samples."""

    key: str  # names the task
    images: tuple[int, ...]  # numbers of samples
    candidates: tuple[Recipe, ...]  # what to measure
    whole: bool = False  # whether the metric is asked too; else only the error is measured, from cuts


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
        rows.update(part.rows)
        if stopped is not None and stopped.is_set():
            break
    return Result(task.key, rows)


def iterate(job: Job, task: Task) -> Iterator[Result]:
    """The same, candidate by candidate as they are measured."""
    network = job.network
    loaded = {number: job.images.load(number) for number in task.images}
    samples = {number: sample for number, sample in loaded.items() if sample is not None}
    broken: Rows = dict.fromkeys(n for n in task.images if n not in samples)
    reference = network.reference(samples)
    for key, rows in (network.whole if task.whole else network.sweep)(samples, reference, task):
        yield Result(task.key, {key: {**rows, **broken}})


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

    def known(self, samples: Iterable[int]) -> dict[int, Reference]:
        with self._lock:
            return {n: self._known[n] for n in samples if n in self._known}

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
        self.cuts = Cuts(self.model, job.compared)
        self.focus = Focus(job.scores) if job.scores else None  # where it looks, if that is known

    @functools.cached_property
    def _everything(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.job.compared, *self.job.metric.tensors)))

    def reference(self, samples: _Samples) -> dict[int, Reference]:
        """What the float network does on samples; runs it on those that are not known yet."""
        job = self.job
        found = job.references.known(samples)
        if len(found) == len(samples):
            return found
        names = tuple(dict.fromkeys((*self._everything, *job.scores)))
        session = self._open(partial_model(self.model, [n for n in names if n not in self.model.inputs]))
        for number, sample in samples.items():
            if number in found:
                continue
            outputs = session.run(sample)
            compared = Compared({t: outputs[t] for t in job.compared}, self.focus.find(outputs) if self.focus else None)
            found[number] = Reference(compared, job.metric.kept({t: outputs[t] for t in job.metric.tensors}))
            job.references.add(number, found[number])
        return found

    def whole(self, samples: _Samples, reference: Mapping[int, Reference], task: Task) -> Iterator[tuple[str, Rows]]:
        """Every candidate from the network's inputs to its outputs."""
        metric, images = self.job.metric, self.job.images
        for recipe in task.candidates:
            session = self._session(recipe, 0, self._everything)
            rows: Rows = {}
            for number, sample in samples.items():
                outputs = session.run(sample)
                before = reference[number]
                seen = metric.look(before.kept, {t: outputs[t] for t in metric.tensors}, images.name(number))
                rows[number] = Row(before.compared.error(outputs), seen)
            yield recipe.key, rows

    def sweep(self, samples: _Samples, reference: Mapping[int, Reference], task: Task) -> Iterator[tuple[str, Rows]]:
        """Every candidate from its cut, the base recipe in front of it."""
        starts = [(first_change(self.model, self.job.base, r), i) for i, r in enumerate(task.candidates)]
        here = 0
        state = {number: dict(sample) for number, sample in samples.items()}
        for position, index in sorted(starts):
            at = self.cuts.usable(position)
            if at > here:
                self._roll(state, here, at)
                here = at
            recipe = task.candidates[index]
            behind = [t for t in self.job.compared if t not in self.cuts.crossing(here)]
            session = self._session(recipe, here, behind) if behind else None
            rows: Rows = {}
            for number, tensors in state.items():
                made = session.run(tensors) if session is not None else {}
                outputs = {t: tensors[t] for t in self.job.compared if t in tensors} | made
                rows[number] = Row(reference[number].compared.error(outputs))
            yield recipe.key, rows

    def _roll(self, state: dict[int, _Arrays], here: int, there: int) -> None:
        """Takes every sample from one cut to the next."""
        wanted = self.cuts.crossing(there)
        missing = [t for t in wanted if t not in self.cuts.crossing(here)]
        session = self._session(self.job.base, here, missing) if missing else None
        for number, tensors in state.items():
            made = session.run(tensors) if session is not None else {}
            state[number] = {t: made[t] if t in made else tensors[t] for t in wanted}

    def _session(self, recipe: Recipe, position: int, outputs: Sequence[str]) -> Fetcher:
        quantized = self._base if recipe is self.job.base else self._quantized(recipe)
        return self._open(self.cuts.behind(quantized, position, outputs))

    @functools.cached_property
    def _base(self) -> Model:
        return self._quantized(self.job.base)

    def _quantized(self, recipe: Recipe) -> Model:
        for _, tensor, axis in recipe.weights:
            name = rounded_name(tensor, axis)
            if name not in self.weights and self.model.elem_type(tensor) == onnx.TensorProto.FLOAT:
                value = self.model.constant(tensor)
                assert value is not None
                self.weights.add(name, rounded(value, axis))
        return recipe.build(self.model, "rounded")[0]

    def _open(self, proto: onnx.ModelProto) -> Fetcher:
        values = self.weights.used_by(proto)
        source = proto.SerializeToString()
        return Fetcher(open_packed(source, 1, "the network", optimize="extended", fold_qdq=False, values=values))

    def images_at_once(self, candidates: Iterable[Recipe], workers: int) -> int:
        """Samples whose cut tensors fit the budget, for one task of each worker at a time."""
        base = self.job.base
        positions = {self.cuts.usable(first_change(self.model, base, r)) for r in candidates}
        largest = max((self.cuts.bytes_at(p) for p in positions), default=1)
        return max(1, budgets.TUNING_CUTS // (2 * workers * max(largest, 1)))


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

@dataclass
class Piece:
    """A task, and the base recipe that it was made for: the only part of a job that changes while one tunes."""

    base: Recipe
    task: Task

    def __str__(self) -> str:
        return f"task {self.task.key}"


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
        if self._handed is None or replace(job, base=self._handed[1].base) != self._handed[1]:
            self.close()
            given = replace(job, images=shared(job.images))
            made = Handed(self.cluster, "qdqtool.tuning.measure:Bench", given, "qdqtool.tuning.measure:work")
            self._handed = self.enter_context(made), job
        for _, result in self._handed[0].results(Piece(job.base, task) for task in tasks):
            yield result


class Bench:
    """A job in a worker process, with the network parsed for the base recipe that was wanted last."""

    def __init__(self, job: Job, threads: int) -> None:
        self._job = job
        self._lock = threading.Lock()

    def job(self, base: Recipe) -> Job:
        with self._lock:
            if self._job.base.key != base.key:
                self._job = self._job.based_on(base)
            return self._job


def work(bench: Bench, piece: Piece, stopped: threading.Event) -> Result:
    """All rows of a task; ends early when the job is over."""
    return run_task(bench.job(piece.base), piece.task, stopped)

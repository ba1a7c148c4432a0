"""Measuring placements on samples: a pure function of a job and a task, for threads here and workers elsewhere.

The network is run in *parts*, each from one node that can have weights in INT8 to the next. A part has one session for
each way to quantize what its nodes read, however many candidates do so. What a part computes depends on how it and
those in front of it are quantized, and is computed once for all candidates that agree in that: what a change does not
reach, such as another branch of the head, is not run again. Kernels are onnxruntime's, Q/DQ computed in float, on one
thread each; parts are the same whatever else is measured, so that a candidate gives the same bits in any company and on
any number of workers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from calibration.session import TensorFetcher, open_packed_session, partial_model
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.losses import ReferenceOutputs
from qdqtool.insertion.rewrite import round_weights, rounded_weights_name
from qdqtool.ir.cuts import NetworkCuts
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.proto.external_data import has_data, to_array
from qdqtool.proto.slim import without_large_weights
from qdqtool.runtime.sessions import SharedWeights, core_count
from qdqtool.tuning import metrics
from qdqtool.tuning.configuration import Recipe
from qdqtool.tuning.metrics import LARGEST, Evidence, Metric
from qdqtool.util import limits
from qdqtool.util.said import said
from qdqtool.util.text import brief_repr, reason_of
from qdqtool.util.threads import SharedTasks, run_threads


class Partition(NetworkCuts):
    """A network in parts, each between two cuts."""

    def parts(self, more: int) -> list[Part]:
        """The parts from cut to cut: in front of each node with weights, and one ``more``; branches that lie side by
        side between two cuts are parts of their own.

        A cut through a tensor of unknown type is left out: it could not be fed.
        """
        model = self.model
        ends = {p for p, node in enumerate(model.ordered) if node.op in WEIGHTED} | {more}
        crossing = {p: self.crossing_tensors(p) for p in sorted(ends) if 0 < p < len(model.ordered)}
        bounds = [
            0,
            *(p for p, tensors in crossing.items() if all(map(model.elem_type, tensors))),
            len(model.ordered),
        ]
        crossing[bounds[-1]] = self.crossing_tensors(bounds[-1])
        found: list[Part] = []
        maker: dict[str, int] = {}  # number of the part that makes a tensor
        for a, b in itertools.pairwise(bounds):
            behind = set(crossing[b])
            for nodes in self._branches(a, b):
                made = [t for n in nodes for t in n.outputs if t in behind]
                given = dict.fromkeys(
                    t
                    for n in nodes
                    for t in (*n.inputs, *n.captured)
                    if self.positions.get(t, b) < a
                )
                after = dict.fromkeys(maker[t] for t in given if t in maker)
                if made:
                    maker.update(dict.fromkeys(made, len(found)))
                    found.append(
                        Part(
                            len(found),
                            frozenset(n.index for n in nodes),
                            tuple(given),
                            tuple(made),
                            tuple(after),
                        )
                    )
        return found

    def _branches(self, a: int, b: int) -> list[list[Node]]:
        """The nodes between two cuts, those together that read what another one of them makes."""
        together: dict[str, list[Node]] = {}  # by the tensors that they make
        for node in self.model.ordered[a:b]:
            read = {
                id(together[t]): together[t]
                for t in (*node.inputs, *node.captured)
                if t in together
            }
            *few, nodes = sorted(read.values(), key=len) or [[]]
            for others in few:
                nodes += others
                together.update(dict.fromkeys((t for n in others for t in n.outputs if t), nodes))
            nodes.append(node)
            together.update(dict.fromkeys(filter(None, node.outputs), nodes))
        place = {node.index: p for p, node in enumerate(self.model.ordered[a:b])}
        groups = {id(nodes): nodes for nodes in together.values()}.values()
        ordered = [sorted(nodes, key=lambda n: place[n.index]) for nodes in groups]
        return sorted(ordered, key=lambda nodes: place[nodes[-1].index])


@dataclass(frozen=True)
class Part:
    """What lies between two cuts, or one of several branches there."""

    number: int
    nodes: frozenset[int]  # indices
    given: tuple[
        str, ...
    ]  # tensors that it reads and other parts make, or that are the network's inputs
    made: tuple[str, ...]  # tensors that it makes and that cross the cut behind it
    after: tuple[int, ...]  # numbers of the parts that make what it reads

    def of(self, recipe: Recipe) -> Recipe:
        """The pairs that nodes of the part read."""
        return recipe.only(self.nodes)


@dataclass(frozen=True, eq=False)
class Step:
    """A part run in one way; there is one object for all candidates that agree in it and in all in front of it."""

    part: Part
    recipe: Recipe  # the pairs that its nodes read
    after: tuple[Step, ...]  # what makes that which it reads


# Jobs and tasks ------------------------------------------------------------------------------------------------------

REVISION = 2  # to be raised where a recipe and a sample give other rows than before: those of a file are not mixed
_Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Row:
    """One candidate on one sample."""

    error: float  # of the compared tensors, of their standard deviation (:class:`qdqtool.insertion.losses.ReferenceOutputs`)
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

    compared: ReferenceOutputs
    kept: Any

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self.compared.nbytes + _bytes(self.kept)


def _bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_bytes(v) for v in value.values())
    return (
        sum(_bytes(v) for v in value)
        if isinstance(value, list)
        else int(getattr(value, "nbytes", 0))
    )


class References:
    """References by sample, as many as there is room for: tasks go through all samples again and again, so that those
    that came first are worth as much as any others."""

    def __init__(self) -> None:
        self._known: dict[int, Reference] = {}
        self._left = limits.TUNING_REFERENCES
        self._lock = threading.Lock()

    def known(self, number: int) -> Reference | None:
        with self._lock:
            return self._known.get(number)

    def add(self, number: int, reference: Reference) -> None:
        with self._lock:
            if number not in self._known and reference.nbytes <= self._left:
                self._known[number] = reference
                self._left -= reference.nbytes


class Held:
    """What steps made of a sample, until it is read for the last time; ``read`` has the turns in which it is read.

    Where there is no room for all of it, that goes which is read last: it will be computed again.
    """

    def __init__(self, read: Mapping[Step, Sequence[int]]) -> None:
        self.made: dict[Step, _Arrays] = {}
        self._read = read
        self._left = limits.TUNING_HELD

    def add(self, step: Step, made: _Arrays) -> None:
        self.made[step] = made
        self._left -= _bytes(made)

    def leave(self, now: int) -> None:
        """Ends a turn: what nothing reads any more goes, also what was computed again on the way."""
        for step in [s for s in self.made if self._read[s][-1] <= now]:
            self._drop(step)
        while self._left < 0 and self.made:
            self._drop(
                max(self.made, key=lambda s: next((t for t in self._read[s] if t > now), math.inf))
            )

    def _drop(self, step: Step) -> None:
        self._left += _bytes(self.made.pop(step))


_SESSION = 128 << 10  # bytes of a session without weights


class Sessions:
    """Open sessions, those used last as far as there is room for their weights."""

    def __init__(self) -> None:
        self._open: dict[
            tuple[int, str], tuple[TensorFetcher, int]
        ] = {}  # with bytes, that used last at the end
        self._left = limits.TUNING_SESSIONS
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    def get(
        self, key: tuple[int, str], make: Callable[[], tuple[TensorFetcher, int]]
    ) -> TensorFetcher:
        """The session of that key; one that is not open is made, with the bytes that it takes."""
        with self._lock:
            if key in self._open:
                found = self._open.pop(key)
            else:
                found = make()
                self._left -= found[1]
            self._open[key] = found
            while self._left < 0 and len(self._open) > 1:
                self._left += self._open.pop(next(iter(self._open)))[1]
            return found[0]


class Network:
    """A network that can be run in parts, with any recipe."""

    def __init__(self, job: Job) -> None:
        self.job = job
        whole = Model(onnx.ModelProto.FromString(job.model))
        slim = without_large_weights(whole.proto)
        self.weights = SharedWeights()  # the large ones, as they are and as Q and DQ leave them
        for tensor in slim.graph.initializer:
            own = whole.initializers[tensor.name]
            if not has_data(tensor) and own.data_type in QUANTIZABLE:
                self.weights.add(tensor.name, to_array(own))
            else:
                tensor.CopyFrom(own)
        self.model = Model(slim, types=whole, constants=whole)
        self._all = tuple(dict.fromkeys((*job.compared, *job.metric.tensors)))
        cuts = Partition(self.model, self._all)
        self.parts = cuts.parts(cuts.first_cut_after(job.compared))
        self._maker = {t: part.number for part in self.parts for t in part.made}
        self.focus = Focus(job.scores) if job.scores else None  # where it looks, if that is known
        self.references = References()
        constants = ((t, self.model.constant(t)) for t in self._all if t in self.model.initializers)
        self._constants = {
            t: value for t, value in constants if value is not None
        }  # outputs that nothing computes
        self._known: dict[str, list[Step]] = {}
        self._steps: dict[tuple[int, str, tuple[Step, ...]], Step] = {}
        self.sessions = Sessions()

    def rows(
        self, number: int, sample: _Arrays, candidates: Sequence[Recipe], whole: bool
    ) -> Iterator[tuple[str, Row]]:
        """Every candidate on one sample: its error and, for ``whole``, what the metric sees."""
        sample = {**sample, **self._constants}
        plain = [r for r in candidates if r.is_float]
        reference = self.references.known(number)
        if reference is None or plain:
            ((_, tensors),) = self._through(sample, plain[:1] or [Recipe((), ())], self._all)
            if reference is None:
                reference = self._referring(tensors)
                self.references.add(number, reference)
            for recipe in plain:
                yield recipe.key, self._row(number, reference, tensors, whole)
            del tensors
        others = [r for r in candidates if not r.is_float]
        for recipe, tensors in self._through(
            sample, others, self._all if whole else self.job.compared
        ):
            yield recipe.key, self._row(number, reference, tensors, whole)

    def _referring(self, tensors: _Arrays) -> Reference:
        """What is kept of the float network's run."""
        job = self.job
        compared = ReferenceOutputs(
            {t: tensors[t] for t in job.compared}, self.focus.find(tensors) if self.focus else None
        )
        return Reference(compared, job.metric.kept({t: tensors[t] for t in job.metric.tensors}))

    def _row(self, number: int, reference: Reference, tensors: _Arrays, whole: bool) -> Row:
        metric, error = self.job.metric, reference.compared.error(tensors)
        if not whole:
            return Row(error)
        outputs = {t: tensors[t] for t in metric.tensors}
        return Row(error, metric.look(reference.kept, outputs, self.job.images.name(number)))

    def _through(
        self, sample: _Arrays, candidates: Sequence[Recipe], wanted: Sequence[str]
    ) -> Iterator[tuple[Recipe, _Arrays]]:
        """The tensors that are wanted, with each candidate.

        Candidates that agree in the front of the network follow each other, those that differ from most come first:
        what most share is let go of on the way.
        """
        makers = [self._maker[t] for t in dict.fromkeys(wanted) if t in self._maker]
        numbers = self._in_front(makers)
        lines = {r: self._line(r) for r in candidates}
        shared = Counter(lines[r][n] for r in lines for n in numbers)
        first = {step: k for k, step in enumerate(shared)}
        order = sorted(
            lines, key=lambda r: [(shared[lines[r][n]], first[lines[r][n]]) for n in numbers]
        )
        turns: dict[Step | Recipe, Sequence[Step]] = {}  # each with what it reads
        for recipe in order:
            turns |= {
                lines[recipe][n]: lines[recipe][n].after for n in numbers
            }  # a step comes once
            turns[recipe] = [lines[recipe][n] for n in makers]
        read: dict[Step, list[int]] = defaultdict(
            list
        )  # the turns in which something reads what a step made
        for now, sources in enumerate(turns.values()):
            for source in sources:
                read[source].append(now)
        held = Held(read)
        for now, (turn, sources) in enumerate(turns.items()):
            if isinstance(turn, Step):
                self._take(turn, sample, held)
            else:
                yield turn, self._given(sources, sample, held)
            held.leave(now)

    def _take(self, step: Step, sample: _Arrays, held: Held) -> None:
        """Runs a step."""
        held.add(step, self._session(step).run(self._given(step.after, sample, held)))

    def _given(self, sources: Iterable[Step], sample: _Arrays, held: Held) -> _Arrays:
        """The sample and what some steps make of it; what there was no room for is computed again."""
        found = dict(sample)
        for source in sources:
            if source not in held.made:
                self._take(source, sample, held)
            found |= held.made[source]
        return found

    def _in_front(self, parts: Iterable[int]) -> list[int]:
        """Numbers of some parts and of all that they need, in order."""
        found = set(parts)
        for part in reversed(self.parts):
            if part.number in found:
                found.update(part.after)
        return sorted(found)

    def _line(self, recipe: Recipe) -> list[Step]:
        """What each part does with a recipe."""
        if recipe.key not in self._known:
            line: list[Step] = []
            for part in self.parts:
                here, after = part.of(recipe), tuple(line[n] for n in part.after)
                line.append(
                    self._steps.setdefault((part.number, here.key, after), Step(part, here, after))
                )
            self._known[recipe.key] = line
        return self._known[recipe.key]

    def _session(self, step: Step) -> TensorFetcher:
        return self.sessions.get(
            (step.part.number, step.recipe.key), lambda: self._open(step.part, step.recipe)
        )

    def _open(self, part: Part, recipe: Recipe) -> tuple[TensorFetcher, int]:
        """A session, and about the bytes that it takes: those of its weights, which it lays out anew, and of any."""
        for _, tensor, axis in recipe.weights:
            name = rounded_weights_name(tensor, axis)
            if name not in self.weights and self.model.elem_type(tensor) == onnx.TensorProto.FLOAT:
                value = self.model.constant(tensor)
                assert value is not None
                self.weights.add(name, round_weights(value, axis))
        quantized = recipe.build(self.model, "rounded")[0]
        given = [
            helper.make_tensor_value_info(t, self.model.elem_type(t), None) for t in part.given
        ]
        proto = partial_model(quantized, part.made, given)
        values = self.weights.used_by(proto)
        source = proto.SerializeToString()
        size = sum(4 * math.prod(t.dims) for t in proto.graph.initializer) + _SESSION
        return TensorFetcher(
            open_packed_session(
                source, 1, "the network", fold_qdq=False, values=values, one_arena=True
            )
        ), size


# Tasks on the threads of this process, or on the workers of a cluster (calibration.cluster): the same rows ------------


_MAX_WORKERS = 8


def default_workers() -> int:
    """One worker for each core, up to eight: each holds samples and a session."""
    return max(1, min(_MAX_WORKERS, core_count()))


def local(workers: int | None = None) -> Mapper:
    """A mapper over threads; onnxruntime computes outside Python's lock."""
    count = workers or default_workers()

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        shared = SharedTasks(tasks)

        def work(put: Callable[[Result], None]) -> None:
            for task in shared:
                for result in iterate(job, task):
                    put(result)
                    if shared.stopped:
                        return

        return run_threads(shared, [work] * min(count, len(tasks)), metrics.cancel_calls)

    return run


def looked_at(mapper: Mapper) -> Mapper:
    """A mapper of the user's whose results are looked at when they come: those that were asked for, and all of them.

    One may come again, as where a task was tried twice. What comes after the last is not looked at.

    Calling it raises QdqtoolError where they are not.
    """

    def wrong(code: str, what: str, **values: Any) -> QdqtoolError:
        return QdqtoolError(
            said(
                "{`mapper`}: "
                + what
                + "; it has to give a Result with each candidate and sample of "
                "its tasks",
                **values,
            ),
            code=code,
            parameter="mapper",
        )

    def read(results: Iterable[Result]) -> Iterator[Result]:
        try:
            yield from results
        except (QdqtoolError, MemoryError):
            raise
        except Exception as error:
            raise wrong(
                "iteration-failed",
                "raises {kind} when it is read: {reason}",
                kind=type(error).__name__,
                reason=reason_of(error),
            ) from error

    def run(job: Job, tasks: Sequence[Task]) -> Iterator[Result]:
        asked = {(c.key, n) for t in tasks for c in t.candidates for n in t.images}
        left = set(asked)
        try:
            results = mapper(job, tasks)
            iter(results)
        except (QdqtoolError, MemoryError):
            raise
        except Exception as error:
            raise wrong(
                "function-raised",
                "raises {kind} when it is called: {reason}",
                kind=type(error).__name__,
                reason=reason_of(error),
            ) from error
        try:
            for result in read(results):
                if not left:
                    break  # one more is asked for, so that what stands behind the last runs
                if not isinstance(result, Result):
                    raise wrong("wrong-type", "gives {found}", found=brief_repr(result))
                if any(
                    row and abs(row.error) > LARGEST
                    for rows in result.rows.values()
                    for row in rows.values()
                ):
                    raise wrong(
                        "out-of-range",
                        "gives an error above {most:g} as the result of {task}",
                        most=LARGEST,
                        task=brief_repr(result.key),
                    )
                given = [(key, n) for key, rows in result.rows.items() for n in rows]
                if not asked.issuperset(given):
                    raise wrong(
                        "result-not-requested",
                        "gives what was not asked for as the result of {task}",
                        task=brief_repr(result.key),
                    )
                left.difference_update(given)
                yield result
            if left:
                raise wrong(
                    "result-missing",
                    "ends with {done} of {asked} measured",
                    done=len(asked) - len(left),
                    asked=len(asked),
                )
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()

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
            made = Handed(
                self.cluster,
                "qdqtool.tuning.measure:unpacked",
                given,
                "qdqtool.tuning.measure:run_task",
            )
            self._handed = self.enter_context(made), job
        for _, result in self._handed[0].results(tasks):
            yield result


def unpacked(job: Job, threads: int) -> Job:
    """A job in a worker process, which keeps what it has parsed."""
    return job

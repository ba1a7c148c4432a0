"""How well a quantized network does what the float network does: higher is better, the float network has the most.

A metric looks at one sample at a time and keeps what it saw as plain numbers (*evidence*), from which its value over
any samples follows: so that samples can be resampled, and measured on different machines. A function of the user's runs
for a limited time; the processes that it started are ended when that is over.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.losses import ReferenceOutputs, comparison_tensors
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_head
from qdqtool.util import limits
from qdqtool.util.files import read_input
from qdqtool.util.said import said

Floats = npt.NDArray[np.float64]
IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)


@dataclass
class Detections:
    """Boxes [n, 4], scores [n] and classes [n] of one image, best first."""

    boxes: Floats
    scores: Floats
    classes: npt.NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return int(self.boxes.nbytes + self.scores.nbytes + self.classes.nbytes)

    def above(self, score: float) -> Detections:
        keep = self.scores >= score
        return Detections(self.boxes[keep], self.scores[keep], self.classes[keep])


def iou(a: Floats, b: Floats) -> Floats:
    """Intersection over union of every box of ``a`` [n, 4] with every box of ``b`` [m, 4]: [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0.0, None), axis=2)
    areas = [np.prod(np.clip(x[:, 2:] - x[:, :2], 0.0, None), axis=1) for x in (a, b)]
    union = areas[0][:, None] + areas[1][None] - shared
    result: Floats = shared / np.maximum(union, 1e-9)
    return result


def decode(
    output: npt.NDArray[Any], score: float = 0.001, overlap: float = 0.7, limit: int = 300
) -> Detections:
    """Non-maximum suppression by class over an output [1, 4 + classes, anchors] (centre, size, scores)."""
    rows = output[0].T.astype(np.float64)
    scores = rows[:, 4:].max(axis=1)
    classes = rows[:, 4:].argmax(axis=1)
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= score][:3000]
    centre, extent = rows[order, :2], rows[order, 2:4]
    boxes = np.concatenate([centre - extent / 2, centre + extent / 2], axis=1)
    scores, classes = scores[order], classes[order]
    kept: list[int] = []
    alive = np.ones(len(order), bool)
    for i in range(len(order)):
        if not alive[i]:
            continue
        kept.append(i)
        if len(kept) == limit:
            break
        later = np.flatnonzero(alive[i + 1 :] & (classes[i + 1 :] == classes[i])) + i + 1
        alive[later[iou(boxes[i : i + 1], boxes[later])[0] > overlap]] = False
    return Detections(boxes[kept], scores[kept], classes[kept])


@dataclass
class Matches:
    """How the detections of one image fit its reference boxes; enough for every average precision over any images."""

    scores: Floats  # [n]
    hits: npt.NDArray[
        np.bool_
    ]  # [n, 10], whether a detection takes a reference box at each of IOUS
    classes: npt.NDArray[np.int64]  # [n]
    truth: npt.NDArray[np.int64]  # classes of the reference boxes

    def as_json(self) -> dict[str, list[Any]]:
        """As plain numbers: the hits of one detection are the bits of one number."""
        bits = self.hits @ (1 << np.arange(len(IOUS)))
        return {
            "scores": self.scores.tolist(),
            "hits": bits.tolist(),
            "classes": self.classes.tolist(),
            "truth": self.truth.tolist(),
        }

    @staticmethod
    def from_json(data: dict[str, list[Any]]) -> Matches:
        bits = np.asarray(data["hits"], np.int64).reshape(-1, 1)
        return Matches(
            np.asarray(data["scores"], np.float64),
            (bits >> np.arange(len(IOUS))) & 1 == 1,
            np.asarray(data["classes"], np.int64),
            np.asarray(data["truth"], np.int64),
        )


def match(reference: Detections, found: Detections) -> Matches:
    """Gives each detection, best first, the free reference box of its class that it overlaps most."""
    hits = np.zeros((len(found.scores), len(IOUS)), bool)
    for label in np.unique(found.classes):
        truth = reference.boxes[reference.classes == label]
        used = np.zeros((len(truth), len(IOUS)), bool)
        mine = np.flatnonzero(found.classes == label)
        overlaps = iou(found.boxes[mine], truth)
        for index, row in zip(mine, overlaps, strict=True):
            if not len(row) or row.max() < IOUS[0]:
                continue
            for k, threshold in enumerate(IOUS):
                free = np.where(used[:, k], -1.0, row)
                if free.max() >= threshold:
                    used[int(free.argmax()), k] = hits[index, k] = True
    return Matches(found.scores, hits, found.classes, reference.classes)


def precision(matches: Sequence[Matches], pooled: bool) -> Floats:
    """COCO's 101-point average precision at each of IOUS, [10]; NaN without reference boxes.

    ``matches`` are of the images, with repetition (for bootstrap). ``pooled`` ranks the detections of all classes
    together; else it is the mean over the classes that have references.
    """
    scores, hits, truth, classes = (
        np.concatenate([getattr(m, name) for m in matches])
        for name in ("scores", "hits", "truth", "classes")
    )
    if not len(truth):
        return np.full(len(IOUS), np.nan)
    if pooled:
        return _curve(scores, hits, len(truth))
    each = [
        _curve(scores[classes == c], hits[classes == c], int((truth == c).sum()))
        for c in np.unique(truth)
    ]
    result: Floats = np.mean(each, axis=0)
    return result


def _curve(scores: Floats, hits: npt.NDArray[np.bool_], total: int) -> Floats:
    if not len(scores):
        return np.zeros(len(IOUS))
    true = np.cumsum(hits[np.argsort(-scores, kind="stable")], axis=0)
    recall = true / total
    exact = true / np.arange(1, len(true) + 1)[:, None]
    exact = np.maximum.accumulate(exact[::-1], axis=0)[::-1]
    result = np.zeros(len(IOUS))
    for k in range(len(IOUS)):
        at = np.searchsorted(recall[:, k], RECALLS, side="left")
        result[k] = np.where(at < len(exact), exact[np.minimum(at, len(exact) - 1), k], 0.0).mean()
    return result


# Detections of YOLOv8-style outputs, and how well two sets of them agree; boxes are x1, y1, x2, y2 in input pixels ---


class CallNotFinished(Exception):
    """The time of a user's function is over, or its result is not wanted any more."""


_waiting: set[queue.SimpleQueue[Any]] = set()  # of calls whose result is waited for


def call_with_timeout(seconds: float, function: Callable[..., Any], *args: object) -> Any:
    """Call a user's function and return its result.

    The function runs in a thread. A thread cannot be ended: after a timeout it goes on in the background.

    Raises:
        CallNotFinished: The time is over, or `cancel_calls` was called.
        BaseException: The exception that the function raised.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(*args), None))
        except BaseException as error:
            results.put((None, error))

    _waiting.add(results)
    try:
        threading.Thread(target=run, daemon=True).start()
        answer = results.get(timeout=seconds)
    except queue.Empty:
        answer = None
    finally:
        _waiting.discard(results)
    if answer is None:
        raise CallNotFinished
    result, error = answer
    if error is not None:
        raise error
    return result


def cancel_calls() -> None:
    """End the wait for all calls of `call_with_timeout`."""
    for results in tuple(_waiting):
        results.put(None)


# Metrics -------------------------------------------------------------------------------------------------------------

Outputs = Mapping[str, npt.NDArray[Any]]
Evidence = Any  # of JSON's types
_BOXES = ("detect", "segment", "pose")  # tasks in the metadata that Ultralytics writes
_SCORE = 0.25  # of the float network's detections that count as there
LARGEST = 1e100  # of a value: sums and differences of thousands are numbers still


class Metric(Protocol):
    """What :func:`qdqtool.tune` asks of a metric; picklable."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str:
        """Another one's measurements are not this one's."""

    @property
    def sentence(self) -> str: ...
    @property
    def tensors(self) -> tuple[str, ...]:
        """What it looks at."""

    def kept(self, reference: Outputs) -> Any:
        """What is held of the float network's outputs on one sample, to look at many placements."""

    def look(self, kept: Any, found: Outputs, image: str) -> Evidence:
        """What one sample shows: what was kept of the float network's outputs, and the quantized one's, by name."""

    def value(self, evidence: Sequence[Evidence]) -> float:
        """The value over samples."""


@dataclass(frozen=True)
class AgreementMap:
    """Average precision of the detections, those of the float network taken as the truth."""

    # an output [n, 4 + classes + others, anchors]: centre, size, scores; or with the last two dimensions exchanged
    output: str
    classes: int  # number of classes
    transposed: bool = False  # whether they are exchanged
    name: str = "agreement-map"
    sentence: str = (
        "agreement mAP: average precision (IoU .50 to .95, all classes ranked together) of the INT8 detections, with "
        f"the float model's own detections of score {_SCORE:g} and more taken as the truth; 1 is the same detections"
    )

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.output,)

    @property
    def identity(self) -> str:
        return self.name

    def _detections(self, outputs: Outputs) -> list[Detections]:
        array = outputs[self.output]
        if self.transposed:
            array = array.swapaxes(1, 2)
        return [decode(row[None, : 4 + self.classes]) for row in array]

    def kept(self, reference: Outputs) -> Any:
        return [found.above(_SCORE) for found in self._detections(reference)]

    def look(self, kept: Any, found: Outputs, image: str) -> Evidence:
        pairs = zip(kept, self._detections(found), strict=True)
        return [match(wanted, made).as_json() for wanted, made in pairs]

    def value(self, evidence: Sequence[Evidence]) -> float:
        matches = [Matches.from_json(row) for rows in evidence for row in rows]
        return float(precision(matches, pooled=True).mean())


@dataclass(frozen=True)
class OutputAgreement:
    """One minus the relative error of the outputs."""

    tensors: tuple[str, ...]
    name: str = "output-agreement"
    sentence: str = (
        "output agreement: one minus the root mean square difference between the INT8 and the float model's outputs, "
        "as a part of the float outputs' standard deviation; 1 is the same outputs"
    )

    @property
    def identity(self) -> str:
        return self.name

    def kept(self, reference: Outputs) -> Any:
        return ReferenceOutputs({t: reference[t] for t in self.tensors}, None)

    def look(self, kept: Any, found: Outputs, image: str) -> Evidence:
        return 1.0 - kept.error(found)

    def value(self, evidence: Sequence[Evidence]) -> float:
        return _mean(evidence)


@dataclass(frozen=True)
class UserMetric:
    """A user's function ``(reference, outputs, image) -> float``, called once for each sample; its mean counts."""

    name: str  # ``package.module:function``, imported where it is called
    tensors: tuple[str, ...]  # the network's outputs
    function: Callable[[Outputs, Outputs, str], float] | None = (
        None  # the function itself, where it was given as one
    )
    seconds: float = limits.USER_SECONDS  # how long one call may take

    @property
    def identity(self) -> str:
        """Changes with the source of the function's module: what another one measured is not this one's."""
        function = self.function or imported(self.name)
        try:
            source = read_input(inspect.getfile(inspect.unwrap(function)), limits.LIST_FILE)
        except (QdqtoolError, TypeError):  # built in, or typed into an interpreter
            return self.name
        return f"{self.name} {hashlib.sha256(source).hexdigest()}"

    @property
    def sentence(self) -> str:
        return f"{self.name}: the mean of this function over the images, as a part of what it gives for the float model"

    def kept(self, reference: Outputs) -> Any:
        return dict(reference)

    def look(self, kept: Any, found: Outputs, image: str) -> Evidence:
        function = self.function or imported(self.name)
        reference, found = (
            {n: a.copy() for n, a in arrays.items()} for arrays in (kept, found)
        )  # others see the same
        try:
            value = float(call_with_timeout(self.seconds, function, reference, found, image))
        except CallNotFinished:
            raise QdqtoolError(
                said(
                    "{`metric`} {name}: did not end within {seconds:g} s on {image}; give it more with "
                    "{`check_timeout`}",
                    name=self.name,
                    seconds=self.seconds,
                    image=image,
                ),
                code="timeout",
                parameter="metric",
            ) from None
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            reason = " ".join(str(error).split())[:200]
            raise QdqtoolError(
                said(
                    "{`metric`} {name}: raised {kind} on {image}" + ": {reason}" * bool(reason),
                    name=self.name,
                    kind=type(error).__name__,
                    image=image,
                    reason=reason,
                ),
                code="function-raised",
                parameter="metric",
            ) from error
        if not abs(value) <= LARGEST:
            raise QdqtoolError(
                said(
                    "{`metric`} {name}: gave {value} on {image}; it has to be a finite number, of at "
                    "most {most:g}",
                    name=self.name,
                    value=value,
                    image=image,
                    most=LARGEST,
                ),
                code="out-of-range",
                parameter="metric",
            )
        return value

    def value(self, evidence: Sequence[Evidence]) -> float:
        return _mean(evidence)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def imported(name: str) -> Callable[[Outputs, Outputs, str], float]:
    """The function ``package.module:function``.

    Raises:
        QdqtoolError: There is none.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise QdqtoolError(
            said("{`metric`} {name}: is not package.module:function", name=name),
            code="wrong-format",
            parameter="metric",
        )
    try:
        found: Any = _module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # importing runs the user's module
        reason = " ".join(str(error).split())[:200]
        raise QdqtoolError(
            said(
                "{`metric`} {name}: cannot be imported: {kind}: {reason}",
                name=name,
                kind=type(error).__name__,
                reason=reason,
            ),
            code="import-failed",
            parameter="metric",
        ) from error
    if not callable(found):
        raise QdqtoolError(
            said("{`metric`} {name}: is no function", name=name),
            code="wrong-type",
            parameter="metric",
        )
    function: Callable[[Outputs, Outputs, str], float] = found
    return function


def _module(name: str) -> Any:
    """A module, also one of the current folder, which is no place to import from where a script was installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        importlib.invalidate_caches()
        return importlib.import_module(name)


def metric_for(
    model: Model,
    wanted: str | Callable[[Outputs, Outputs, str], float] | None,
    seconds: float = limits.USER_SECONDS,
) -> Metric:
    """The user's metric, or the one that fits the outputs.

    Raises:
        QdqtoolError: The user's cannot be imported, or is no function.
    """
    if isinstance(wanted, str):
        imported(wanted)
        return UserMetric(wanted, tuple(model.outputs), seconds=seconds)
    if wanted is not None:
        name = f"{getattr(wanted, '__module__', '')}:{getattr(wanted, '__qualname__', type(wanted).__name__)}"
        return UserMetric(name, tuple(model.outputs), wanted, seconds)
    floats = (
        [] if _sorts(model) else [t for t in model.outputs if model.elem_type(t) in (1, 10, 11)]
    )
    return _detector(model) or OutputAgreement(tuple(floats or compared(model)))


def _sorts(model: Model) -> bool:
    return any(n.op in ("TopK", "NonMaxSuppression", "ArgMax") for n in model.nodes)


def compared(model: Model) -> list[str]:
    """Where the output error is measured; of a network that sorts its results, what is not sorted yet."""
    found = comparison_tensors(model)
    if found == list(model.outputs) and _sorts(model):
        last = find_head(model).finals
        found = [n.output for n in model.ordered if n.index in last] or found
    return found


def _detector(model: Model) -> AgreementMap | None:
    """A YOLOv8-style output: the head has a DFL or class outputs, and one output of rank 3 holds boxes and scores."""
    scores = find_class_outputs(model)
    if not scores or not (find_head(model).dfl or model.metadata.get("task", "") in _BOXES):
        return None
    channels = {(model.shape(t) or (0, None))[1] for t in scores}
    if len(channels) != 1 or (classes := channels.pop()) is None or _sorts(model):
        return None
    for output in model.outputs:
        shape = model.shape(output)
        if shape is None or len(shape) != 3 or None in shape[1:]:
            continue
        rows, columns = (int(d or 0) for d in shape[1:])
        if 4 + classes <= min(rows, columns) and rows != columns:
            return AgreementMap(output, classes, rows > columns)
    return None


def resampled(
    metric: Metric, evidence: Sequence[Evidence], resamples: int = 300, seed: int = 0
) -> npt.NDArray[np.float64]:
    """Values of a metric over bootstrap resamples of the samples: the same samples for every call of that length."""
    rng = np.random.default_rng(seed)
    count = len(evidence)
    drawn = rng.integers(0, count, (resamples, count)) if count else np.zeros((0, 0), np.int64)
    return np.asarray([metric.value([evidence[i] for i in rows]) for rows in drawn])

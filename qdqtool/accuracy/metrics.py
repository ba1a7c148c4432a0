"""Metrics of how well a quantized network reproduces the float network; higher is better.

For each sample, a metric returns JSON that is called *evidence*. The value of the metric over a set
of samples is computed from the evidence of these samples alone. So samples can be drawn repeatedly
for a bootstrap, and measured on different machines. Calls of a user's function have a time limit.
"""

from __future__ import annotations

import ast
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
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.accuracy.detections import (
    DetectionCounts,
    DetectionMatches,
    Detections,
    compute_average_precision,
    count_detections,
    decode_detections,
    draw_boxes,
    match_detections,
    read_detections,
)
from qdqtool.accuracy.objectness import find_objectness_output, resembles_detector
from qdqtool.accuracy.output_shapes import find_output_shapes
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.output_errors import ReferenceOutputs, find_last_convolution_outputs
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_head
from qdqtool.util import limits
from qdqtool.util.files import read_input
from qdqtool.util.notes import Note

Outputs = Mapping[str, npt.NDArray[Any]]
MetricFunction = Callable[[Outputs, Outputs, str], float]
Evidence = Any  # JSON that a metric returns for one sample
LARGEST = 1e100  # limit for a metric value, so that sums of thousands of values are finite

_MAX_MASKS = 100  # maximum number of masks of an image that are compared
_REFERENCE_SCORE = 0.25  # lowest score of the float network's detections that count as truth
_RESULT_SORTERS = ("TopK", "NonMaxSuppression", "ArgMax")
# Results besides boxes and classes, by task in Ultralytics' metadata.
_FURTHER_RESULTS = {"segment": "masks", "pose": "keypoints", "obb": "angles of the boxes"}
_BOX_TASKS = ("detect", *_FURTHER_RESULTS)
_SORTED_COLUMNS = 6  # numbers of one detection: two corners (x and y), score and class
_SCORE_MOVES = ("Softmax", "LogSoftmax", "Flatten", "Reshape", "Squeeze", "Identity", "Cast")
_SCORE_PRODUCERS = ("Gemm", "MatMul", "Conv", "Add", "GlobalAveragePool", "ReduceMean")
_FLOAT_TYPES = (1, 10, 11)  # TensorProto's FLOAT, FLOAT16, DOUBLE
_RESAMPLES = 300  # number of bootstrap resamples
_FEW_SAMPLES = 10  # a bootstrap over fewer samples gives too narrow an interval
_DEVIATIONS = 1.96  # half width of a 95 % interval, in standard deviations


class CallNotFinished(Exception):
    """A user's function exceeded its time limit, or `cancel_calls` was called."""


_pending_calls: set[queue.SimpleQueue[Any]] = set()  # queues on which threads wait for results


def call_with_timeout(seconds: float, function: Callable[..., Any], *args: object) -> Any:
    """Call a user's function and return its result.

    The function runs in a separate thread. Threads cannot be stopped, so after a timeout the
    function continues in the background.

    Raises:
        CallNotFinished: `seconds` have passed, or `cancel_calls` was called.
        BaseException: The exception that the function raised.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((function(*args), None))
        except BaseException as error:
            results.put((None, error))

    _pending_calls.add(results)
    try:
        threading.Thread(target=run, daemon=True).start()
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise CallNotFinished from None
    finally:
        _pending_calls.discard(results)
    if error is not None:
        raise error
    return result


def cancel_calls() -> None:
    """Make every pending `call_with_timeout` raise :class:`CallNotFinished`."""
    for results in tuple(_pending_calls):
        results.put((None, CallNotFinished()))


class Metric:
    """Metric of how well a quantized network reproduces the float network.

    Metrics can be pickled. Unless a subclass does otherwise, the value is the mean of one number
    for each sample.

    Attributes:
        name: Name of the metric in the result's JSON.
        sentence: Definition of the metric.
        tensors: Tensors that the metric reads.
    """

    name: str
    sentence: str
    tensors: tuple[str, ...]

    @property
    def identity(self) -> str:
        """Text that is equal only for metrics whose evidence can be combined."""
        return self.name

    def prepare_reference(self, reference: Outputs) -> Any:
        """Return the part of the float network's outputs that `observe` needs for a sample."""
        return dict(reference)

    def observe(self, reference: Any, outputs: Outputs, image: str) -> Evidence:
        """Return the evidence of one sample.

        Args:
            reference: Result of `prepare_reference` on the sample.
            outputs: Tensors of the quantized network by name.
            image: Name of the sample.
        """
        raise NotImplementedError

    def value(self, evidence: Sequence[Evidence]) -> float:
        """Return the metric's value over samples from their evidence; NaN without samples."""
        return math.fsum(evidence) / len(evidence) if evidence else math.nan


def _read_matches(evidence: Sequence[Evidence]) -> list[DetectionMatches]:
    return [DetectionMatches.from_json(row) for rows in evidence for row in rows]


@dataclass(frozen=True)
class DetectionAgreementMetric(Metric):
    """Average precision of the detections, with the float network's detections as the truth.

    Attributes:
        output: Name of the output with center, size and scores, [n, 4 + classes + others, anchors].
        classes: Number of classes.
        transposed: Whether the last two dimensions of the output are exchanged.
        has_objectness: Whether a row with the objectness precedes the scores, which are multiplied
            with it.
    """

    output: str
    classes: int
    transposed: bool = False
    has_objectness: bool = False
    name: str = "agreement-map"
    sentence: str = (
        "agreement mAP: average precision (IoU 0.50 to 0.95, all classes ranked together) of the "
        "detections of the quantized model, with the float model's detections of score "
        f"{_REFERENCE_SCORE:g} and more as ground truth; 1 means that all of them "
        "are found and rank first"
    )

    @property
    def tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        """The output, which is the only tensor that the metric reads."""
        return (self.output,)

    def select_output(self, outputs: Outputs) -> npt.NDArray[Any]:
        """Return the output as [n, 4 + classes + others, anchors]."""
        array = outputs[self.output]
        array = array.swapaxes(1, 2) if self.transposed else array
        if not self.has_objectness:
            return array
        return np.concatenate([array[:, :4], array[:, 4:5] * array[:, 5:]], axis=1)

    def _decode_outputs(self, outputs: Outputs) -> list[Detections]:
        rows = self.select_output(outputs)[:, : 4 + self.classes]
        return [decode_detections(row[None]) for row in rows]

    def prepare_reference(self, reference: Outputs) -> Any:
        """Return the float network's detections of each image, without those of low scores."""
        return [
            image.filter_by_score(_REFERENCE_SCORE) for image in self._decode_outputs(reference)
        ]

    def observe(self, reference: Any, outputs: Outputs, image: str) -> Evidence:
        """Return the evidence of one sample."""
        pairs = zip(reference, self._decode_outputs(outputs), strict=True)
        return [match_detections(truth, detections).as_json() for truth, detections in pairs]

    def value(self, evidence: Sequence[Evidence]) -> float:
        """Return the average precision over the detections of all samples."""
        return float(compute_average_precision(_read_matches(evidence), pooled=True).mean())


@dataclass(frozen=True)
class SortedDetectionMetric(DetectionAgreementMetric):
    """Agreement mAP for networks that select their detections themselves (YOLOv10, YOLO26).

    The output [n, detections, 6 + others] holds two corners, score and class of each detection.

    Attributes:
        is_centered: Whether center and size take the place of the corners (rotated boxes).
    """

    is_centered: bool = False

    def _decode_outputs(self, outputs: Outputs) -> list[Detections]:
        rows = outputs[self.output]
        if self.is_centered:
            center, half = rows[..., :2], rows[..., 2:4] / 2
            rows = np.concatenate([center - half, center + half, rows[..., 4:]], axis=-1)
        return [read_detections(detections) for detections in rows]


@dataclass(frozen=True)
class MaskAgreementMetric(Metric):
    """Mean IoU of the masks of a segmentation network (YOLOv8-seg and similar).

    A mask is positive where the product of an anchor's coefficients with the prototypes is. It is
    cut to the box of the reference. The anchors are those with the largest scores of the reference.

    Attributes:
        detector: Metric of the boxes. The last rows of its output are the coefficients.
        prototypes: Name of the output with the prototypes, [n, coefficients, h, w].
    """

    detector: DetectionAgreementMetric
    prototypes: str
    name: str = "mask-agreement"
    sentence: str = (
        "mask agreement: mean IoU of the masks of both models, at the anchors where the float "
        f"model has a score of {_REFERENCE_SCORE:g} or more (at most {_MAX_MASKS} in an image)"
    )

    @property
    def tensors(self) -> tuple[str, ...]:  # type: ignore[override]
        """The output with the coefficients, and the prototypes."""
        return (self.detector.output, self.prototypes)

    def observe(self, reference: Any, outputs: Outputs, image: str) -> Evidence:
        """Return the IoU of each mask of one sample."""
        sides = [
            zip(self.detector.select_output(side), side[self.prototypes], strict=True)
            for side in (reference, outputs)
        ]
        overlaps: list[float] = []
        for (rows, prototypes), (other_rows, other_prototypes) in zip(*sides, strict=True):
            anchors = self._choose_anchors(rows)
            inside = draw_boxes(rows[:4, anchors], prototypes.shape[1:])
            first = self._draw_masks(rows[:, anchors], prototypes) & inside
            second = self._draw_masks(other_rows[:, anchors], other_prototypes) & inside
            union = (first | second).sum(axis=(1, 2))
            common = (first & second).sum(axis=(1, 2))
            overlaps += (common[union > 0] / union[union > 0]).tolist()
        return overlaps

    def _choose_anchors(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        scores = rows[4 : 4 + self.detector.classes].max(axis=0)
        best = np.argsort(-scores, kind="stable")[:_MAX_MASKS]
        return np.asarray(best[scores[best] >= _REFERENCE_SCORE])

    def _draw_masks(
        self, rows: npt.NDArray[Any], prototypes: npt.NDArray[Any]
    ) -> npt.NDArray[np.bool_]:
        coefficients = rows[4 + self.detector.classes :]
        values = np.einsum("ka,khw->ahw", coefficients, prototypes, optimize=True)
        return np.asarray(values > 0)

    def value(self, evidence: Sequence[Evidence]) -> float:
        """Return the mean IoU of the masks of all samples."""
        return super().value([overlap for overlaps in evidence for overlap in overlaps])


@dataclass(frozen=True)
class TopClassMetric(Metric):
    """Share of images for which both networks give the same class the largest score.

    Attributes:
        tensors: The only output: class scores [n, classes], possibly followed by dimensions of 1.
    """

    tensors: tuple[str]
    name: str = "top-1-agreement"
    sentence: str = (
        "top-1 agreement: share of the images on which the same class has the largest score in "
        "both models"
    )

    def prepare_reference(self, reference: Outputs) -> Any:
        """Return the class of the largest score for each image."""
        scores = reference[self.tensors[0]]
        return np.asarray(scores.reshape(len(scores), -1).argmax(axis=1))

    def observe(self, reference: Any, outputs: Outputs, image: str) -> Evidence:
        """Return the share of images with the same class; 0 for scores that are not finite."""
        is_finite = bool(np.isfinite(outputs[self.tensors[0]]).all())
        return float(is_finite and np.mean(self.prepare_reference(outputs) == reference))


@dataclass(frozen=True)
class OutputAgreementMetric(Metric):
    """One minus the output error as a fraction of the float outputs' standard deviation."""

    tensors: tuple[str, ...]
    name: str = "output-agreement"
    sentence: str = (
        "output agreement: one minus the root mean square difference between the outputs of the "
        "quantized and the float model, as a fraction of the standard deviation of the float "
        "model's outputs; 1 means equal outputs"
    )

    def prepare_reference(self, reference: Outputs) -> Any:
        """Return the float network's outputs with their standard deviation."""
        return ReferenceOutputs({t: reference[t] for t in self.tensors}, None)

    def observe(self, reference: Any, outputs: Outputs, image: str) -> Evidence:
        """Return one minus the outputs' error, see :meth:`ReferenceOutputs.error`."""
        return 1.0 - reference.error(outputs)


@dataclass(frozen=True)
class UserMetric(Metric):
    """Mean result of a user's function, which is called once for each sample.

    Attributes:
        name: Name ``package.module:function``. If `function` is None, the process that runs the
            metric imports the function by this name.
        tensors: Outputs of the network.
        function: The function, if the user passed a function and not a name.
        seconds: Time limit for one call.
    """

    name: str
    tensors: tuple[str, ...]
    function: MetricFunction | None = None
    seconds: float = limits.USER_SECONDS

    @property
    def identity(self) -> str:
        """Name of the function, with a hash of its module's source if there is a source file."""
        function = self.function or import_function(self.name)
        try:
            source = read_input(inspect.getfile(inspect.unwrap(function)), limits.LIST_FILE)
        except (QdqtoolError, TypeError):  # The function has no source file.
            return self.name
        return f"{self.name} {hashlib.sha256(source).hexdigest()}"

    @property
    def sentence(self) -> str:  # type: ignore[override]
        """Definition of the metric, with the name of the function."""
        return (
            f"{self.name}: the mean of this function over the images, as a fraction of its mean "
            "for the float model"
        )

    def observe(self, reference: Any, outputs: Outputs, image: str) -> Evidence:
        """Return the result of the function, which gets copies of the arrays."""
        function = self.function or import_function(self.name)
        # The function may change its arguments, and other calls use the same arrays.
        reference = {name: array.copy() for name, array in reference.items()}
        outputs = {name: array.copy() for name, array in outputs.items()}
        try:
            value = float(call_with_timeout(self.seconds, function, reference, outputs, image))
        except CallNotFinished:
            raise QdqtoolError(
                f"`metric` {self.name}: did not end within {self.seconds:g} s on {image}; "
                "increase `check_timeout`",
                code="timeout",
                parameter="metric",
            ) from None
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            reason = _shorten_reason(error)
            raise QdqtoolError(
                f"`metric` {self.name}: raised {type(error).__name__} on {image}"
                f"{': ' if reason else ''}{reason}. Correct the function",
                code="function-raised",
                parameter="metric",
            ) from error
        if not abs(value) <= LARGEST:
            raise QdqtoolError(
                f"`metric` {self.name}: returned {value} on {image}; return a finite number of at "
                f"most {LARGEST:g}",
                code="out-of-range",
                parameter="metric",
            )
        return value


def _shorten_reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def import_function(name: str) -> MetricFunction:
    """Import the function ``package.module:function``.

    Raises:
        QdqtoolError: The name cannot be imported, or is not a function.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise QdqtoolError(
            f"`metric` {name} is not the name of a function; give a name such as "
            "package.module:function",
            code="wrong-format",
            parameter="metric",
        )
    try:
        function: Any = _import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # importing runs the user's module
        raise QdqtoolError(
            f"`metric` {name} cannot be imported ({type(error).__name__}: "
            f"{_shorten_reason(error)}). Correct the module, or give another name such as "
            "package.module:function",
            code="import-failed",
            parameter="metric",
        ) from error
    if not callable(function):
        raise QdqtoolError(
            f"`metric` {name} is not a function; give the name of a function",
            code="wrong-type",
            parameter="metric",
        )
    return function  # type: ignore[no-any-return]


def _import_module(name: str) -> Any:
    """Import a module, from the current folder if necessary.

    Commands lack the current folder in `sys.path`, so the folder is added.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        folder = os.getcwd()
        if error.name != name.partition(".")[0] or folder in sys.path:
            raise
        sys.path.append(folder)
        importlib.invalidate_caches()
        return importlib.import_module(name)


def choose_metric(
    model: Model,
    metric: str | MetricFunction | None,
    seconds: float = limits.USER_SECONDS,
) -> Metric:
    """Return the user's metric, or the metric that fits the model's outputs.

    Without a user's metric, return the agreement mAP for YOLOv8-style detectors, and the output
    agreement for other networks.

    Args:
        model: The float model.
        metric: The user's function or its name ``package.module:function``; None for the built-in
            metric that fits the model.
        seconds: Time limit for one call of the user's function.

    Raises:
        QdqtoolError: The user's metric cannot be imported, or is not a function.
    """
    outputs = tuple(model.outputs)
    if isinstance(metric, str):
        import_function(metric)
        return UserMetric(metric, outputs, seconds=seconds)
    if metric is not None:
        qualified_name = getattr(metric, "__qualname__", type(metric).__name__)
        name = f"{getattr(metric, '__module__', '')}:{qualified_name}"
        return UserMetric(name, outputs, metric, seconds)
    floats = [t for t in outputs if model.elem_type(t) in _FLOAT_TYPES]
    if not floats or _has_sorted_results(model):
        floats = find_compared_tensors(model)
    return _detector_metric(model) or OutputAgreementMetric(tuple(floats))


def choose_agreement_metrics(model: Model) -> list[Metric]:
    """Return the metrics for a comparison of two networks, most suitable first.

    Detections or classes are compared if the network outputs them. :func:`choose_metric` prefers
    metrics that also show small differences between candidates of a tuning.
    """
    detector = _sorted_detector_metric(model) or _detector_metric(model)
    if detector is not None:
        return [detector, *_list_mask_metrics(model, detector)]
    classifier = _classifier_metric(model)
    outputs = choose_metric(model, None)
    return [outputs] if classifier is None else [classifier, outputs]


def _sorted_detector_metric(model: Model) -> SortedDetectionMetric | None:
    if not _has_sorted_results(model):
        return None
    task = model.metadata.get("task", "")
    has_more_columns = task in _FURTHER_RESULTS
    for output, shape in find_output_shapes(model).items():
        columns = int(shape[2] or 0) if len(shape) == 3 else 0
        if columns == _SORTED_COLUMNS or (has_more_columns and columns > _SORTED_COLUMNS):
            return SortedDetectionMetric(output, 0, is_centered=task == "obb")
    return None


def _list_mask_metrics(
    model: Model, detector: DetectionAgreementMetric
) -> list[MaskAgreementMetric]:
    """Return the metric of the masks if an output has a channel for each row after the scores."""
    coefficients = _count_further_rows(model, detector)
    return [
        MaskAgreementMetric(detector, output)
        for output, shape in find_output_shapes(model).items()
        if coefficients and len(shape) == 4 and shape[1] == coefficients
    ][:1]


def _count_further_rows(model: Model, detector: DetectionAgreementMetric) -> int:
    """Return the number of rows after boxes and scores; 0 for sorted detections."""
    if isinstance(detector, SortedDetectionMetric):
        return 0
    rows = find_output_shapes(model)[detector.output][2 if detector.transposed else 1] or 0
    return rows - 4 - detector.has_objectness - detector.classes


def _classifier_metric(model: Model) -> TopClassMetric | None:
    """Return the metric of a classifier; None for other networks.

    The only output of a classifier is one vector of class scores for each image.
    """
    if len(model.outputs) != 1:
        return None
    (output,) = model.outputs
    shape = [int(d or 0) for d in model.shape(output) or ()]
    if len(shape) < 2 or shape[1] < 2 or any(d != 1 for d in shape[2:]):
        return None
    return TopClassMetric((output,)) if _is_class_score(model, output) else None


def _is_class_score(model: Model, tensor: str) -> bool:
    node = model.producer(tensor)
    while node is not None and node.op in _SCORE_MOVES:
        node = model.producer(node.input(0))
    return node is not None and node.op in _SCORE_PRODUCERS


def _has_sorted_results(model: Model) -> bool:
    return any(node.op in _RESULT_SORTERS for node in model.nodes)


def find_compared_tensors(model: Model) -> list[str]:
    """Return the tensors that are compared to measure the output error of a network.

    These are the outputs of the last convolutions before any decoding. Without such convolutions,
    these are the outputs of the network; if the network sorts its results, the tensors before the
    sorting.
    """
    tensors = find_last_convolution_outputs(model)
    if tensors == list(model.outputs) and _has_sorted_results(model):
        last = find_head(model).finals
        tensors = [n.output for n in model.ordered if n.index in last] or tensors
    return tensors


def _detector_metric(model: Model) -> DetectionAgreementMetric | None:
    """Return the metric of a YOLOv8-style detector, None for other networks.

    The head of such a detector has a DFL or class outputs, and one output of rank 3 holds boxes and
    scores, possibly with objectness.
    """
    if _has_sorted_results(model):
        return None
    scores = find_class_outputs(model)
    has_boxes = find_head(model).dfl or model.metadata.get("task", "") in _BOX_TASKS
    channels = {(model.shape(t) or (0, None))[1] for t in scores}
    if len(channels) > 1:  # other outputs with a Sigmoid, such as the visibility of keypoints
        names = _count_names(model)
        channels &= {names} if names else _list_score_rows(model)
    if not has_boxes or len(channels) != 1 or None in channels:
        return _objectness_metric(model)
    return _find_detector_output(model, channels.pop() or 0)


def _objectness_metric(model: Model) -> DetectionAgreementMetric | None:
    output = find_objectness_output(model)
    if output is None or _count_names(model) not in (0, output.classes):
        return None
    return DetectionAgreementMetric(*output, has_objectness=True)


def _count_names(model: Model) -> int:
    """Return the number of classes in Ultralytics' metadata; 0 if missing or invalid."""
    try:
        names = ast.literal_eval(model.metadata.get("names", ""))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return 0
    return len(names) if isinstance(names, (dict, list)) else 0


def _list_score_rows(model: Model) -> set[int | None]:
    """Return the number of rows of each Sigmoid [n, rows, anchors].

    The Sigmoid of the classes reads all channels of its convolutions. That of the visibility of
    keypoints reads only some channels.
    """
    shapes = [model.shape(node.output) or () for node in model.nodes if node.op == "Sigmoid"]
    return {shape[1] for shape in shapes if len(shape) == 3}


def _find_detector_output(model: Model, classes: int) -> DetectionAgreementMetric | None:
    """Return the metric of the first output that has room for boxes and scores, if any."""
    for output, shape in find_output_shapes(model).items():
        if len(shape) != 3:
            continue
        rows, columns = int(shape[1] or 0), int(shape[2] or 0)
        if 4 + classes <= min(rows, columns) and rows != columns:
            return DetectionAgreementMetric(output, classes, rows > columns)
    return None


def note_unmeasured(model: Model, metrics: Sequence[Metric]) -> list[Note]:
    """Return a note on results of a detector that the metrics do not measure, if any."""
    task = model.metadata.get("task", "")
    if isinstance(metrics[0], DetectionAgreementMetric):
        missing = _FURTHER_RESULTS.get(task)
        if missing is None and _count_further_rows(model, metrics[0]):
            missing = "further values of the detections"
        if missing is None or any(isinstance(m, MaskAgreementMetric) for m in metrics):
            return []
        text = f"the agreement is that of boxes and classes: the {missing} are not measured"
        return [Note(text, code="boxes-only", unmeasured=missing)]
    has_boxes = task in _BOX_TASKS or find_head(model).dfl or resembles_detector(model)
    if not has_boxes or not isinstance(metrics[0], OutputAgreementMetric):
        return []
    subject = f"the metadata name the task '{task}'" if task else "the model has a detection head"
    text = (
        f"{subject}, but the metric compares raw outputs: it does not show lost detections. "
        "Compare the mAP of both models on images with labels"
    )
    return [Note(text, code="raw-outputs-compared", task=task)]


def resample_metric(
    metric: Metric, evidence: Sequence[Evidence], resamples: int = _RESAMPLES
) -> npt.NDArray[np.float64]:
    """Return the value of a metric over each bootstrap resample, [resamples].

    The same samples are drawn from all evidence of equal length, so that the results of several
    networks can be compared. Without evidence, the array is empty.
    """
    count = len(evidence)
    if not count:
        return np.empty(0)
    samples = np.random.default_rng(0).integers(0, count, (resamples, count))
    return np.asarray([metric.value([evidence[i] for i in rows]) for rows in samples])


def estimate_interval(metric: Metric, evidence: Sequence[Evidence]) -> tuple[float, float]:
    """Return the low and the high end of a metric's 95 % confidence interval over its samples.

    Wilson's interval is used for shares, and a bootstrap for other metrics. For the agreement of
    detections and masks, the interval includes Wilson's for one result per sample if the samples
    are fewer than ten, or if the bootstrap has no spread. Results between 0 and 1 vary at most as
    much as a share, so this interval is rather too wide than too narrow.

    Args:
        metric: The metric.
        evidence: Evidence of the samples, not empty.
    """
    if isinstance(metric, TopClassMetric):
        return _wilson_interval(metric.value(evidence), len(evidence))
    low, high = map(float, np.nanpercentile(resample_metric(metric, evidence), [2.5, 97.5]))
    has_few = len(evidence) < _FEW_SAMPLES or low == high
    if has_few and isinstance(metric, (DetectionAgreementMetric, MaskAgreementMetric)):
        share_low, share_high = _wilson_interval(metric.value(evidence), len(evidence))
        return min(low, share_low), max(high, share_high)
    return low, high


def note_wide_interval(metric: Metric, samples: int) -> list[Note]:
    """Return a note if :func:`estimate_interval` adds Wilson's interval, else an empty list.

    Without the note, the interval seems to contradict that of the same networks on more images.

    Args:
        metric: The metric.
        samples: Number of samples, one or more.
    """
    is_agreement = isinstance(metric, (DetectionAgreementMetric, MaskAgreementMetric))
    if samples >= _FEW_SAMPLES or not is_agreement:
        return []
    return [
        Note(
            f"fewer than {_FEW_SAMPLES} images: the 95 % interval of the agreement includes "
            "Wilson's interval for one result per image, so it is much wider than with "
            f"{_FEW_SAMPLES} or more images",
            code="wide-interval",
            images=samples,
            enough=_FEW_SAMPLES,
        )
    ]


def _wilson_interval(share: float, count: int) -> tuple[float, float]:
    squared = _DEVIATIONS**2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = _DEVIATIONS / (1 + squared) * math.sqrt((share * (1 - share) + squared / 4) / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def count_references(metric: Metric, evidence: Sequence[Evidence]) -> int:
    """Return the number of reference detections or masks; else the number of samples."""
    if isinstance(metric, DetectionAgreementMetric):
        return sum(len(row["truth"]) for rows in evidence for row in rows)
    if isinstance(metric, MaskAgreementMetric):
        return sum(map(len, evidence))
    return len(evidence)


def count_matches(metric: Metric, evidence: Sequence[Evidence]) -> DetectionCounts | None:
    """Count the detections of both networks of score 0.25 and more; None for other metrics."""
    if not isinstance(metric, DetectionAgreementMetric):
        return None
    return count_detections(_read_matches(evidence), _REFERENCE_SCORE)

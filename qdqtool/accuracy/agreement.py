"""Agreement of a network with a reference network, measured on images.

The detections, classes or outputs of the reference are the ground truth. Both networks run in
onnxruntime without integer kernels, so that Q and DQ compute as ONNX defines them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.arrays import CalibrationSource, open_data
from calibration.dataset import Dataset, InputSpec, Sample
from calibration.options import Preprocess
from calibration.presets import choose_preprocess
from calibration.session import TensorFetcher, choose_size, input_specs, open_session
from qdqtool.accuracy.detections import MAX_DETECTIONS, DetectionCounts
from qdqtool.accuracy.metrics import (
    Evidence,
    Metric,
    OutputAgreementMetric,
    choose_agreement_metrics,
    count_matches,
    count_references,
    estimate_interval,
    note_unmeasured,
    note_wide_interval,
)
from qdqtool.errors import DataError, ModelError
from qdqtool.findings.preprocess_notes import describe_preprocess
from qdqtool.insertion.options import ImageOptions
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import is_dq, is_q, is_qdq
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.runtime.sessions import core_count
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.progress import track_progress
from qdqtool.util.threads import SharedTasks, run_threads

_MAX_WORKERS = 4
_MAX_CHAIN = 8  # maximum number of Q and DQ nodes to follow after a tensor
_Arrays = Mapping[str, npt.NDArray[Any]]
# Name and definition of each metric for a model B that is compared with a model A. The sentences of
# the metrics name a quantized and a float model, but A may be quantized as well.
_DEFINITIONS = {
    "agreement-map": (
        "Agreement mAP",
        "average precision (IoU 0.50 to 0.95, all classes ranked together) of B's detections; A's "
        "detections of score 0.25 and more are the truth",
    ),
    "mask-agreement": (
        "Mask agreement",
        "mean IoU of the masks, at the positions where A has a score of 0.25 and more (at most 100 "
        "in an image). An object has several such positions, and non-maximum suppression keeps one "
        "of them as its detection, so the numbers of masks and detections differ",
    ),
    "top-1-agreement": ("Top-1 agreement", "share of the images with the same best class"),
    "output-agreement": (
        "Output agreement",
        "one minus the error of B's final outputs at all positions, divided by the standard "
        "deviation of A's",
    ),
}


@dataclass(frozen=True)
class AgreementMeasure:
    """Value of one metric over all images, with its confidence interval.

    Attributes:
        metric: Name of the metric.
        value: Value of the metric, 1 for equal networks. None if undefined, for example if the
            reference has no detections.
        low: Lower end of the 95 % confidence interval; None without a value.
        high: Upper end of the 95 % confidence interval; None without a value.
        count: Number of reference detections for a detection metric, else number of images.
        detections: Detections at score 0.25 and IoU 0.5; None for other metrics.
    """

    metric: str
    value: float | None
    low: float | None
    high: float | None
    count: int
    detections: DetectionCounts | None = None

    @property
    def title(self) -> str:
        """Name of the metric in texts."""
        return _DEFINITIONS[self.metric][0]

    @property
    def definition(self) -> str:
        """Definition of the metric, in which A is the reference and B the other network."""
        return _DEFINITIONS[self.metric][1]

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        numbers = {name: getattr(self, name) for name in ("value", "low", "high")}
        rounded = {name: None if v is None else round(v, 5) for name, v in numbers.items()}
        return {
            "metric": self.metric,
            "sentence": f"{self.title}: {self.definition}",
            **rounded,
            "count": self.count,
            "found": None if self.detections is None else self.detections.found,
            "extra": None if self.detections is None else self.detections.extra,
            "below": None if self.detections is None else self.detections.below,
        }


@dataclass(frozen=True)
class NetworkAgreement:
    """Agreement of two networks on images.

    Attributes:
        images: Number of images.
        unread: Name and reason of each image that could not be read.
        measures: All metrics. The first is the metric that fits the network best.
        preprocess: How images became inputs, as JSON; None for arrays.
        notes: Notes about the preprocessing and the metric.
    """

    images: int
    unread: tuple[tuple[str, str], ...]
    measures: tuple[AgreementMeasure, ...]
    preprocess: Json | None = None
    notes: tuple[Note, ...] = ()

    @property
    def measure(self) -> AgreementMeasure:
        """The metric that fits the network best."""
        return self.measures[0]

    @property
    def masks(self) -> AgreementMeasure | None:
        """The agreement of masks; None if the network has none or they are not measured."""
        return next((m for m in self.measures if m.metric == "mask-agreement"), None)

    @property
    def lowest(self) -> float | None:
        """The lower value of `measure` and `masks`; None if unknown."""
        measures = [self.measure] if self.masks is None else [self.measure, self.masks]
        values = [m.value for m in measures if m.value is not None]
        return min(values) if len(values) == len(measures) else None

    @property
    def has_most_detections(self) -> bool:
        """Whether the reference has the maximum number of detections in every image."""
        is_detector = self.measure.detections is not None
        return is_detector and self.measure.count >= MAX_DETECTIONS * self.images

    def as_json(self) -> Json:
        """Return the fields of the JSON output, with the first measure at the top level."""
        return {
            **self.measure.as_json(),
            "images": self.images,
            "unread": len(self.unread),
            "preprocess": self.preprocess,
            "measures": [measure.as_json() for measure in self.measures],
        }


def measure_agreement(
    reference: Model,
    model: Model,
    data: CalibrationSource,
    *,
    images: ImageOptions,
    max_images: int,
    counterparts: Mapping[str, str],
    progress: bool = False,
) -> NetworkAgreement:
    """Measure how well a network agrees with a reference.

    Args:
        reference: The reference, usually the float model.
        model: The other network, usually with Q/DQ.
        data: Images, as for :func:`calibration.open_data`.
        images: How images become inputs.
        max_images: Maximum number of images, spread evenly over the data.
        counterparts: Tensors of `model` by the name of the tensor in `reference`, for tensors whose
            names differ.
        progress: Whether to draw progress on stderr if stderr is a terminal.

    Raises:
        DataError: The data cannot be used, or does not fit one of the networks.
        ModelError: onnxruntime cannot run a network, or the inputs or outputs of the networks do
            not correspond.
    """
    metrics = _choose_metrics(reference)
    names = _pair_tensors(reference, model, metrics, counterparts)
    feeder = _SampleFeeder(reference, model, data, images, max_images)
    pair = _NetworkPair(reference, model, names, feeder)
    steps = pair.observe_each(metrics)
    if progress:
        steps = track_progress(steps, "agreement", feeder.length)
    rows = [rows for _, rows in sorted(steps, key=lambda step: step[0])]
    evidence = list(itertools.chain.from_iterable(rows))
    if not evidence:
        raise DataError(
            "none of the images could be read; give JPEG or PNG files, or arrays",
            code="no-images",
            parameter="data",
        )
    measures = tuple(
        _summarize_metric(metric, [row[position] for row in evidence])
        for position, metric in enumerate(metrics)
    )
    notes = [*feeder.notes, *note_unmeasured(reference, metrics)]
    if measures[0].value is not None:
        notes += note_wide_interval(metrics[0], len(evidence))
    return NetworkAgreement(len(evidence), feeder.unread, measures, feeder.preprocess, tuple(notes))


def _choose_metrics(reference: Model) -> list[Metric]:
    """Return the metrics that fit the reference, also if Q/DQ follow its class scores."""
    metrics = choose_agreement_metrics(reference)
    if not isinstance(metrics[0], OutputAgreementMetric) or not any(map(is_qdq, reference.nodes)):
        return metrics
    floats = choose_agreement_metrics(remove_quantizers(reference.copy(), weights=True))
    return [*floats[:-1], *metrics] if isinstance(floats[-1], OutputAgreementMetric) else floats


def _summarize_metric(metric: Metric, evidence: Sequence[Evidence]) -> AgreementMeasure:
    evidence = [row for row in evidence if row is not None]
    count = count_references(metric, evidence)
    value = metric.value(evidence) if count else math.nan
    if math.isnan(value):
        return AgreementMeasure(metric.name, None, None, None, count)
    low, high = estimate_interval(metric, evidence)
    return AgreementMeasure(metric.name, value, low, high, count, count_matches(metric, evidence))


# Tensors ------------------------------------------------------------------------------


def _pair_tensors(
    reference: Model, model: Model, metrics: Sequence[Metric], counterparts: Mapping[str, str]
) -> dict[str, str]:
    """Return the counterpart in `model` of each tensor that the metrics read, by tensor name.

    Raises:
        ModelError: A tensor of the reference has no counterpart.
    """
    tensors = dict.fromkeys(tensor for metric in metrics for tensor in metric.tensors)
    outputs = _pair_outputs(reference, model)
    names = {}
    for tensor in tensors:
        name = outputs.get(tensor) or counterparts.get(tensor)
        if name is None and tensor in model.producers:
            name = tensor
        if name is None:
            raise ModelError(
                f"has no tensor that corresponds to '{tensor}', so the results of the two "
                "networks cannot be compared. Give two versions of the same network",
                model.path or "model",
                code="missing-tensor",
                node=tensor,
            )
        names[tensor] = _last_dequantized(model, name)
    return names


def _pair_outputs(reference: Model, model: Model) -> dict[str, str]:
    """Return the output of `model` for each output of the reference, by name or position.

    If the names differ, outputs are paired by position, provided that both networks have the same
    number of outputs. Otherwise the result is empty.
    """
    if set(reference.outputs) <= set(model.outputs):
        return {name: name for name in reference.outputs}
    if len(reference.outputs) == len(model.outputs):
        return dict(zip(reference.outputs, model.outputs, strict=True))
    return {}


def _last_dequantized(model: Model, tensor: str) -> str:
    """Return the output of the last Q or DQ of a chain that starts at a tensor.

    The tensor itself is returned if it is an output of the network, has no consumer, or has a
    consumer other than Q and DQ.
    """
    for _ in range(_MAX_CHAIN):
        consumers = model.consumers(tensor)
        if tensor in model.outputs or not consumers:
            return tensor
        if not all(is_q(n) or is_dq(n) for n in consumers):
            return tensor
        tensor = consumers[0].output
    return tensor


# Samples ------------------------------------------------------------------------------


class _SampleFeeder:
    """Samples for two networks whose inputs may have different types.

    Attributes:
        dataset: Samples of the reference.
        length: Number of samples; None if unknown.
        preprocess: How images become inputs, as JSON; None for arrays.
        notes: Notes about the folders of the images and the preprocessing.
    """

    def __init__(
        self,
        reference: Model,
        model: Model,
        data: CalibrationSource,
        images: ImageOptions,
        max_images: int,
    ) -> None:
        specs = input_specs(reference), input_specs(model)
        self._pairs = _pair_inputs(reference, model, *specs)
        choice = choose_preprocess({**model.metadata, **reference.metadata}, images.preprocess)
        preprocess, size = choice.preprocess, choose_size(reference, images.size)
        self.dataset = open_data(data, [a for a, _ in self._pairs], preprocess, max_images, size)
        self.length = None if self.dataset.indices is None else len(self.dataset)
        self._pixels: Dataset | None = None
        if any(b.numpy_dtype.kind != a.numpy_dtype.kind for a, b in self._pairs):
            # The second network reads integers, because it scales the pixels itself.
            if not isinstance(preprocess, Preprocess):
                raise DataError(
                    f"`preprocess`: {model.path or 'the second model'} takes integer pixels, but "
                    "the result of a preprocessing function is float. Give a Preprocess object or "
                    "the name of a preset",
                    code="option-conflict",
                    parameter="preprocess",
                )
            raw = replace(preprocess, scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
            self._pixels = open_data(data, [b for _, b in self._pairs], raw, max_images, size)
            self._check_pixels(model)
        self.preprocess = self.dataset.source.preprocessing
        self.notes = [
            *self.dataset.folder_notes,
            *describe_preprocess(reference, self.preprocess, choice.origin, data),
        ]

    def _check_pixels(self, model: Model) -> None:
        """Check that the second network takes uint8 pixels, and that the data are images.

        Raises:
            ModelError: The data are not images of a folder, or an input is not uint8.
        """
        assert self._pixels is not None
        if self._pixels.source.is_images and self._pixels.indices is not None:
            if all(b.dtype == "uint8" for _, b in self._pairs):
                return
        names = ", ".join(f"'{b.name}' ({b.dtype})" for _, b in self._pairs)
        raise ModelError(
            f"the data do not fit the input {names}: each input must be float as in the other "
            "network, or uint8 if the data are a folder of images. Insert Q/DQ again with "
            "`input_type='float'`, and compare the new model",
            model.path or "model",
            code="wrong-type",
            node=self._pairs[0][1].name,
        )

    @property
    def unread(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(set(self.dataset.skipped)))

    def count_rows(self, sample: Sample, count: int) -> int:
        """Return the number of images in a sample, without repetitions that fill its batch."""
        if self.dataset.batch > 1:
            return count
        first = next(iter(sample.values()))
        if not first.ndim:
            return 1
        repeats = (i for i in range(1, len(first)) if np.array_equal(first[i], first[0]))
        return next(repeats, len(first))

    def convert_sample(self, number: int, sample: Sample) -> Sample | None:
        """Return the second network's inputs for a sample of the reference.

        None if the sample has to be loaded as pixels and cannot be read.
        """
        if self._pixels is not None:
            return self._pixels.load(number)
        return {
            b.name: np.asarray(sample[a.name], b.numpy_dtype, order="C") for a, b in self._pairs
        }


def _pair_inputs(
    reference: Model, model: Model, first: Sequence[InputSpec], second: Sequence[InputSpec]
) -> list[tuple[InputSpec, InputSpec]]:
    """Pair inputs by name or position; a dynamic dimension takes the size of the other input."""
    by_name = {spec.name: spec for spec in second}
    if all(spec.name in by_name for spec in first):
        second = [by_name[spec.name] for spec in first]
    pairs = []
    for a, b in zip(first, second, strict=False):
        shape = _merge_shapes(a.shape, b.shape)
        if shape is not None:
            pairs.append((replace(a, shape=shape), replace(b, shape=shape)))
    if not len(pairs) == len(first) == len(second):
        texts = [" ".join(s.shape_text() for s in specs) for specs in (first, second)]
        raise ModelError(
            f"takes inputs {texts[1]}, but {reference.path or 'the reference'} takes {texts[0]}. "
            "Export both networks with the same inputs",
            model.path or "model",
            code="wrong-shape",
        )
    return pairs


def _merge_shapes(
    first: Sequence[int | None], second: Sequence[int | None]
) -> tuple[int | None, ...] | None:
    if len(first) != len(second):
        return None
    merged = tuple(a if b is None else b for a, b in zip(first, second, strict=True))
    fits = all(a in (None, size) for a, size in zip(first, merged, strict=True))
    return merged if fits else None


# Runs ---------------------------------------------------------------------------------


class _NetworkPair:
    def __init__(
        self, reference: Model, model: Model, names: Mapping[str, str], feeder: _SampleFeeder
    ) -> None:
        self._path = reference.path or "model"
        self._names = names
        self._feeder = feeder
        self._workers = max(1, min(_MAX_WORKERS, core_count()))
        threads = max(1, core_count() // self._workers)
        self._first, self._second = (
            TensorFetcher(open_session(side, list(dict.fromkeys(tensors)), threads, fold_qdq=False))
            for side, tensors in ((reference, names.keys()), (model, names.values()))
        )

    def observe_each(self, metrics: Sequence[Metric]) -> Iterator[tuple[int, list[list[Evidence]]]]:
        """Yield the number of each sample, and its evidence as a list [images][metrics]."""
        dataset = self._feeder.dataset
        tasks = SharedTasks(dataset.tasks())

        def work(put: Callable[[tuple[int, list[list[Evidence]]]], None]) -> None:
            for number, load in tasks:
                loaded = load()
                if loaded is not None:
                    put((number, self._observe_sample(metrics, number, *loaded)))

        return run_threads(tasks, [work] * self._workers)

    def _observe_sample(
        self, metrics: Sequence[Metric], number: int, sample: Sample, count: int
    ) -> list[list[Evidence]]:
        other = self._feeder.convert_sample(number, sample)
        if other is None:
            return []
        rows = self._feeder.count_rows(sample, count)
        first = {name: _to_float(a) for name, a in self._first.run(sample).items()}
        if not all(np.isfinite(a).all() for a in first.values() if a.dtype.kind == "f"):
            raise ModelError(
                "the outputs are NaN or infinite on an image, so no agreement can be computed. "
                "Check the model and the preprocessing",
                self._path,
                code="not-finite",
            )
        values = self._second.run(other)
        second = {name: _to_float(values[theirs]) for name, theirs in self._names.items()}
        pairs = zip(_split_rows(first, rows), _split_rows(second, rows), strict=False)
        return [[_observe_image(metric, a, b) for metric in metrics] for a, b in pairs]


def _observe_image(metric: Metric, reference: _Arrays, outputs: _Arrays) -> Evidence:
    """Return the evidence of one image for a metric.

    Output agreement has no evidence (None) if the reference's outputs are constant, and the
    evidence 0 if the other outputs are not finite.
    """
    prepared = metric.prepare_reference({t: reference[t] for t in metric.tensors})
    if isinstance(metric, OutputAgreementMetric):
        if not prepared.has_variance:
            return None
        if not all(np.isfinite(outputs[t]).all() for t in metric.tensors):
            return 0.0
    return metric.observe(prepared, outputs, "")


def _to_float(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy (onnxruntime owns the original), in float32 if the array holds floats."""
    return np.array(array, np.float32 if array.dtype.kind == "f" else None)


def _split_rows(outputs: _Arrays, rows: int) -> list[dict[str, npt.NDArray[Any]]]:
    """Return the outputs of each image, or one entry if an output has fewer rows than images."""
    if rows == 1 or not all(a.ndim and len(a) >= rows for a in outputs.values()):
        return [dict(outputs)]
    return [{name: a[i : i + 1] for name, a in outputs.items()} for i in range(rows)]

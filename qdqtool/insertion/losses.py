"""Accuracy that quantized activations cost, measured at the outputs of a Q/DQ model.

On a few calibration samples the network runs with all activations float, with all quantized, and
with all but one quantized (:mod:`qdqtool.insertion.switchable_network`). The error inside the
tensors decides which activations are left out.

The error of an output is the root of the squared difference to the run with float activations, over
the variance of that run, at the positions of objects (at all positions if these are unknown). The
mean over the outputs is reported. The outputs are the last convolutions before any decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdqtool.errors import ModelError
from qdqtool.insertion.number_formats import FP8, INT8, NumberFormat
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES, run_samples
from qdqtool.insertion.switchable_network import Feeds, SwitchableNetwork
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.qdq import is_dq
from qdqtool.patterns.heads import find_head
from qdqtool.proto.slim import strip_large_weights
from qdqtool.runtime.run_cost import peak_activation_bytes, with_input_shapes
from qdqtool.runtime.sessions import core_count
from qdqtool.types import Json, Prediction, QuantizedTensor
from qdqtool.util.threads import SharedTasks, run_threads

if TYPE_CHECKING:
    from calibration import Dataset, FocusMap, TensorStatistics

CANDIDATES = 8
SAMPLES = 2
REPORTED = 5
# Part of the outputs' standard deviation: if INT8 moves them by less, detections hardly suffer
# (docs/accuracy.md).
SMALL_ERROR = 0.1


@dataclass(frozen=True)
class TensorLoss:
    """Accuracy that one quantized activation costs.

    Attributes:
        tensor: Its name.
        readers: Nodes that read it dequantized.
        gain: Part of the output error that disappears if this tensor alone is float.
        convolutions: Number of convolutions that would be float then; None if not predicted.
        conversions: Number of conversions that would be added; None if not predicted.
    """

    tensor: str
    readers: tuple[str, ...]
    gain: float
    convolutions: int | None = None
    conversions: int | None = None

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "tensor": self.tensor,
            "readers": list(self.readers),
            "gain": round(self.gain, 4),
            "convolutions": self.convolutions,
            "conversions": self.conversions,
        }


@dataclass(frozen=True)
class ActivationLosses:
    """Accuracy that the quantized activations cost together, and the worst of them.

    Attributes:
        error: Output error of all quantized activations together, as a part of the outputs'
            standard deviation.
        tensors: The worst activations, worst first.
        samples: Number of calibration samples.
        tried: Number of activations that were left out alone.
    """

    error: float
    tensors: list[TensorLoss]
    samples: int
    tried: int

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "error": round(self.error, 5),
            "samples": self.samples,
            "tried": self.tried,
            "tensors": [t.as_json() for t in self.tensors],
        }


def rank_activations(
    quantized: Sequence[QuantizedTensor],
    statistics: Mapping[str, TensorStatistics],
    sources: Mapping[str, Sequence[str]],
    count: int = CANDIDATES,
    number_format: NumberFormat = INT8,
) -> list[QuantizedTensor]:
    """Return the activations with the largest quantization error relative to their values.

    An activation has one or more `sources` with statistics, of which the worst decides.
    """
    ranked: list[tuple[float, int, QuantizedTensor]] = []
    for entry in quantized:
        assert not isinstance(entry.scale, list)
        amax = entry.scale * number_format.largest
        parts = [statistics[name] for name in sources[entry.tensor]]
        worst = max(_relative_error(part, amax, number_format) for part in parts)
        ranked.append((-worst, len(ranked), entry))
    return [entry for _, _, entry in sorted(ranked)[:count]]


def _relative_error(part: TensorStatistics, amax: float, number_format: NumberFormat) -> float:
    """Return the squared error of a range over the squared values of a tensor."""
    from calibration.methods import SEARCH_BITS, focused_error, fp8_error

    largest = part.absmax
    if largest <= 0.0:
        return 0.0
    # With everything clipped away, the error is the size of the tensor itself.
    errors = focused_error(part, np.array([amax, largest * 1e-6]), bits=SEARCH_BITS)
    if not errors[1] > 0.0:  # all values are below the smallest normal float32
        return 0.0
    return float((fp8_error(part, amax) if number_format == FP8 else errors[0]) / errors[1])


def measure_losses(
    model: Model,
    candidates: Sequence[QuantizedTensor],
    data: object,
    *,
    activations: Sequence[QuantizedTensor],
    images: ImageOptions = DEFAULT_IMAGES,
    samples: int | None = SAMPLES,
    reported: int = REPORTED,
) -> ActivationLosses | None:
    """Measure the error of all quantized activations together, and without each candidate.

    Args:
        model: The Q/DQ model with float inputs; it is not changed.
        candidates: Activations to leave out alone.
        data: The calibration data.
        activations: All quantized activations.
        images: How images become inputs.
        samples: Number of samples, spread evenly over the data. None: :data:`SAMPLES`, and the
            candidates are left out only if the error of all activations is not small.
        reported: Number of the worst activations to return.

    Returns:
        None if the data cannot be read a second time, or the outputs have no error.

    Raises:
        ModelError: onnxruntime cannot run the model, or its outputs are not finite.
    """
    from calibration import open_data
    from calibration.options import YOLO_PREPROCESS
    from calibration.session import input_specs

    if isinstance(data, Iterator):
        return None
    count = SAMPLES if samples is None else samples
    preprocess = images.preprocess or YOLO_PREPROCESS
    dataset = open_data(data, input_specs(model), preprocess, count, images.size)
    first = next(iter(dataset), None)
    if first is None:
        return None
    measurement = _ErrorMeasurement(model, activations, dataset, first, count)
    names = [entry.tensor for entry in candidates]
    if samples is None:
        errors = measurement.sum_errors([], [None])
    else:
        errors = measurement.sum_errors(candidates, [None, *names])
    total, used = errors[None], len(measurement.references)
    if total <= 0.0:
        return None
    if samples is None and total >= SMALL_ERROR * used:
        errors |= measurement.sum_errors(candidates, names)
    tried = [entry for entry in candidates if entry.tensor in errors]
    without = np.array([errors[entry.tensor] for entry in tried])
    losses = [
        TensorLoss(
            tried[i].tensor, _find_consumers(model, tried[i]), float(1.0 - without[i] / total)
        )
        for i in np.argsort(without, kind="stable")[:reported]
        if without[i] < total
    ]
    return ActivationLosses(float(total / used), losses, used, len(tried))


class _ErrorMeasurement:
    """Runs of a Q/DQ model on a few samples, with activations left out alone.

    Attributes:
        references: Outputs with all activations float, by the number of the sample.
    """

    def __init__(
        self,
        model: Model,
        activations: Sequence[QuantizedTensor],
        dataset: Dataset,
        first: Feeds,
        samples: int,
    ) -> None:
        from calibration import Focus
        from calibration.session import worker_count

        self.references: dict[int, ReferenceOutputs] = {}
        self._model = model
        self._activations = activations
        self._dataset = dataset
        scores = find_class_outputs(model)  # last convolutions, so they are outputs as well
        self._focus = Focus(scores) if scores else None
        shapes = {name: array.shape for name, array in first.items()}
        is_fixed = all(model.shape(name) == shape for name, shape in shapes.items())
        run_bytes = peak_activation_bytes(
            model if is_fixed else with_input_shapes(model.proto, shapes)
        )
        self._workers = max(1, min(samples, worker_count(run_bytes, core_count())))

    def sum_errors(
        self, alone: Sequence[QuantizedTensor], left_out: Sequence[str | None]
    ) -> dict[str | None, float]:
        """Return the sums over the samples of the output errors without one activation.

        Args:
            alone: Activations that are left out.
            left_out: Their names; None leaves none out.
        """
        from calibration.session import return_freed_memory

        network = SwitchableNetwork(
            self._model,
            self._activations,
            alone,
            comparison_tensors(self._model),
            max(1, core_count() // self._workers),
        )
        return_freed_memory()
        tasks = SharedTasks(self._dataset.tasks())

        def work(put: Callable[[tuple[int, dict[str | None, float]]], None]) -> None:
            for number, load in tasks:
                loaded = load()
                if loaded is not None:
                    sample, errors = loaded[0], {}
                    reference = self._find_reference(network, number, sample)
                    runs = network.run_each(sample, left_out)
                    while not tasks.stopped and (run := next(runs, None)):
                        errors[run[0]] = reference.error(run[1])
                    put((number, errors))

        results = [errors for _, errors in sorted(run_threads(tasks, [work] * self._workers))]
        return {name: float(np.sum([errors[name] for errors in results])) for name in left_out}

    def _find_reference(
        self, network: SwitchableNetwork, number: int, sample: Feeds
    ) -> ReferenceOutputs:
        if number not in self.references:
            outputs = network.run(sample, [entry.tensor for entry in self._activations])
            if not all(np.isfinite(array).all() for array in outputs.values()):
                raise ModelError(
                    "the network's outputs are NaN or infinite on the calibration data",
                    code="not-finite",
                )
            focus = self._focus.find(outputs) if self._focus else None
            self.references[number] = ReferenceOutputs(outputs, focus)
        return self.references[number]


class ReferenceOutputs:
    """Outputs of a float run, reduced to the values that are compared with other runs.

    Attributes:
        focus: Positions to compare; None for all.
    """

    def __init__(self, outputs: Mapping[str, npt.NDArray[Any]], focus: FocusMap | None) -> None:
        self.focus = focus
        self._values = {name: self._select(array) for name, array in outputs.items()}
        self._variances = {
            name: float(values.var()) if values.size else 0.0
            for name, values in self._values.items()
        }

    def _select(self, array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        selected = [] if self.focus is None else self.focus.values(array)
        return np.concatenate([a.reshape(-1) for a in selected or [array]]).astype(np.float64)

    @property
    def varies(self) -> bool:
        """Whether the values of any output differ, so that an error can be relative to them."""
        return any(variance > 0.0 for variance in self._variances.values())

    @property
    def nbytes(self) -> int:
        """Memory of the values, in bytes."""
        return sum(values.nbytes for values in self._values.values())

    def error(self, outputs: Mapping[str, npt.NDArray[Any]]) -> float:
        """Return the error of other outputs, as the module defines it."""
        errors = []
        for name, values in self._values.items():
            variance = self._variances[name]
            if variance > 0.0:
                difference = self._select(outputs[name])
                difference -= values
                errors.append(np.sqrt(np.square(difference, out=difference).mean() / variance))
        return float(np.mean(errors)) if errors else 0.0


def comparison_tensors(model: Model) -> list[str]:
    """Return the last convolutions before any decoding, else the network's outputs."""
    last = find_head(model).last_convolutions
    ends = [n.output for n in model.ordered if n.index in last and n.op == "Conv"]
    return list(dict.fromkeys(ends)) or list(model.outputs)


def remove_pair(model: Model, entry: QuantizedTensor) -> Model:
    """Return a copy of a Q/DQ model in which one activation is float."""
    copy = model.copy()
    quantizer = copy.node(entry.node)
    editor = Editor(copy)
    editor.remove_pairs(quantizer, [n for n in copy.consumers(quantizer.output) if is_dq(n)])
    return editor.finish()


def predict_changes(
    losses: ActivationLosses,
    model: Model,
    activations: Sequence[QuantizedTensor],
    before: Prediction,
    predict: Callable[[Model], Prediction],
) -> ActivationLosses:
    """Predict the convolutions and conversions of the engine with each activation float.

    `before` is the prediction of the finished Q/DQ model; `predict` predicts another one.
    """
    nodes = {n.name for n in model.nodes}
    slim = Model(strip_large_weights(model.proto), "", EDITED, types=model, constants=model)
    by_tensor = {a.tensor: a for a in activations}
    summary = before.summary()
    tensors = []
    for loss in losses.tensors:
        entry = by_tensor[loss.tensor]
        if entry.node in nodes:
            after = predict(remove_pair(slim, entry)).summary()
            added = None
            if summary["conversions"] is not None and after["conversions"] is not None:
                added = after["conversions"] - summary["conversions"]
            convolutions = summary["int8"] - after["int8"]
            loss = replace(loss, convolutions=convolutions, conversions=added)
        tensors.append(loss)
    return replace(losses, tensors=tensors)


def _find_consumers(model: Model, entry: QuantizedTensor) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for quantizer in model.consumers(entry.tensor):
        if quantizer.name != entry.node:
            continue
        for dequantizer in model.consumers(quantizer.output):
            names.update(dict.fromkeys(n.name for n in model.consumers(dequantizer.output)))
    return tuple(names)


@dataclass(frozen=True)
class Fp16Agreement:
    """Difference between the outputs of a finished model and those of the float model.

    Attributes:
        error: Root of the squared difference over the variance of the float model's outputs, the
            mean over the outputs; NaN if an output is not finite.
        samples: Number of calibration samples.
    """

    error: float
    samples: int

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "error": round(self.error, 5) if np.isfinite(self.error) else None,
            "samples": self.samples,
        }


def compare_outputs(
    float_model: Model,
    models: Sequence[Model],
    data: object,
    *,
    samples: int,
    images: ImageOptions = DEFAULT_IMAGES,
) -> list[Fp16Agreement]:
    """Compare the outputs of Q/DQ models with those of their float model.

    The outputs are the last convolutions before any decoding if the models have the same names
    there.

    Returns:
        The agreement of each model. Empty if no sample can be read, or the data not a second time.

    Raises:
        ModelError: onnxruntime cannot run one of them.
    """
    if isinstance(data, Iterator):
        return []
    tensors = [t for t in comparison_tensors(models[0]) if t in float_model.producers]
    tensors = tensors or list(models[0].outputs)
    errors: list[list[float]] = [[] for _ in models]
    for floats, *others in run_samples([float_model, *models], tensors, data, images, samples):
        reference = ReferenceOutputs(floats, None)
        for model_errors, outputs in zip(errors, others, strict=True):
            is_finite = all(np.isfinite(array).all() for array in outputs.values())
            model_errors.append(reference.error(outputs) if is_finite else float("nan"))
    return [Fp16Agreement(float(np.mean(each)), len(each)) for each in errors if each]

"""Accuracy that quantized activations cost, measured at the outputs of a Q/DQ model.

The network runs on a few calibration samples, with all activations float and with all quantized. If
the difference is not small, the activations with the largest quantization errors are tried: the
network runs with one of them float and all others quantized. The activations with the largest gains
are measured again on other samples, because the largest of eight gains on two samples is mostly
chance.

:mod:`qdqtool.insertion.output_errors` defines the error. The reference outputs are those with float
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from qdqtool.errors import ModelError
from qdqtool.insertion.number_formats import FP8, INT8, NumberFormat
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.output_errors import (
    SMALL_ERROR,
    ComparedOutputs,
    ReferenceOutputs,
    find_compared_outputs,
    round_error,
)
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES
from qdqtool.insertion.switchable_network import Feeds, SwitchableNetwork
from qdqtool.ir.graph import Model
from qdqtool.runtime.run_cost import peak_activation_bytes, with_input_shapes
from qdqtool.runtime.sessions import core_count
from qdqtool.util.json_text import Json
from qdqtool.util.text import build_name_pattern, round_significant
from qdqtool.util.threads import SharedTasks, run_threads

if TYPE_CHECKING:
    from calibration import Dataset, TensorStatistics
    from calibration.arrays import CalibrationSource

CANDIDATES = 8
SAMPLES = 8  # number of samples for the error with all activations quantized
TRIAL_SAMPLES = 2  # number of these samples on which each candidate is tried
REPORTED = 5
MIN_GAIN = 0.1  # minimum gain to be confirmed, as a fraction of the error
_MIN_CONFIRMING = 4  # minimum number of samples to confirm a gain
_MAX_CONFIRMED = 2  # maximum number of activations whose gain is confirmed
_MIN_DEVIATIONS = 2.0  # minimum of a confirmed gain, in standard errors


@dataclass(frozen=True)
class TensorLoss:
    """Accuracy that one quantized activation costs.

    Attributes:
        tensor: Name of the activation.
        readers: Names of the nodes that consume the dequantized activation.
        gain: Fraction of the output error that disappears if this activation alone is float,
            measured on the trial samples.
        convolutions: Number of convolutions that become float with the activation; None if not
            predicted.
        conversions: Number of conversions that the float activation adds; None if not predicted.
        ms: Milliseconds that the float activation adds on a GPU; None if not estimated.
        excluded_error: Output error of the insertion that excludes the consumers, on the samples of
            the total error; None if not measured.
        excludable: Whether the consumers can be excluded. They cannot if nothing else is quantized.
        unused_options: Name and value of each option of the insertion that has no effect if the
            consumers are excluded, such as ``method_for`` for the activation alone.
        confirmed_gain: Gain measured again on confirming samples, if possible other ones than the
            trial samples. None if there are too few of them, or if the activation was not measured
            on them.
        confirmed_on: Number of images in the confirming samples; 0 if the gain was not measured
            again.
        confirmed: Whether the confirmed gain is at least 0.1 and more than two standard errors.
    """

    tensor: str
    readers: tuple[str, ...]
    gain: float
    convolutions: int | None = None
    conversions: int | None = None
    confirmed_gain: float | None = None
    confirmed_on: int = 0
    confirmed: bool = False
    ms: float | None = None
    excluded_error: float | None = None
    excludable: bool = True
    unused_options: tuple[tuple[str, str], ...] = ()

    @property
    def exclude_pattern(self) -> str:
        """Regular expression that excludes the consumers."""
        return build_name_pattern(self.readers)

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "tensor": self.tensor,
            "readers": list(self.readers),
            "gain": round(self.gain, 4),
            "convolutions": self.convolutions,
            "conversions": self.conversions,
            "confirmed_gain": None
            if self.confirmed_gain is None
            else round(self.confirmed_gain, 4),
            "confirmed_on": self.confirmed_on,
            "confirmed": self.confirmed,
            "ms": None if self.ms is None else round_significant(self.ms),
            "excluded_error": None
            if self.excluded_error is None
            else round(self.excluded_error, 5),
        }


@dataclass(frozen=True)
class ActivationLosses:
    """Accuracy that all quantized activations cost together, and the worst activations.

    Attributes:
        error: Output error of all quantized activations together, as a fraction of the outputs'
            standard deviation.
        tensors: The worst activations, worst first.
        samples: Number of calibration images on which the error was measured. With a fixed batch, a
            sample has several images.
        tried: Number of activations that were left float one at a time.
        trial_samples: Number of images on which each of these activations was left float.
        at_objects: Whether the error is that of the last convolutions at the positions of objects,
            before decoding. If not, it is that of all outputs.
        uncovered: Outputs of the network that the error does not include, such as the prototypes of
            masks.
    """

    error: float
    tensors: list[TensorLoss]
    samples: int
    tried: int
    trial_samples: int = 0
    at_objects: bool = False
    uncovered: tuple[str, ...] = ()

    @property
    def proposed(self) -> list[TensorLoss]:
        """Confirmed activations whose exclusion reduces the error enough, worst first.

        If the error of the exclusion was measured, it must be lower by at least :data:`MIN_GAIN`.
        """
        highest = (1.0 - MIN_GAIN) * self.error
        return [
            t
            for t in self.tensors
            if t.confirmed
            and t.excludable
            and (t.excluded_error is None or t.excluded_error <= highest)
        ]

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "error": round(self.error, 5),
            "samples": self.samples,
            "tried": self.tried,
            "trial_samples": self.trial_samples,
            "at_objects": self.at_objects,
            "uncovered": list(self.uncovered),
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

    Args:
        quantized: Quantized activations.
        statistics: Statistics of the tensors in `sources`.
        sources: For each activation, the tensors whose values it contains. The tensor with the
            largest error determines the rank.
        count: Maximum number of activations to return, worst first.
        number_format: Format of the quantized numbers.
    """
    ranked: list[tuple[float, int, QuantizedTensor]] = []
    for activation in quantized:
        assert not isinstance(activation.scale, list)
        amax = activation.scale * number_format.largest
        parts = [statistics[name] for name in sources[activation.tensor]]
        worst = max(_relative_error(part, amax, number_format) for part in parts)
        ranked.append((-worst, len(ranked), activation))
    return [activation for _, _, activation in sorted(ranked)[:count]]


def _relative_error(part: TensorStatistics, amax: float, number_format: NumberFormat) -> float:
    from calibration.methods import SEARCH_BITS, focused_error, fp8_error

    largest = part.absmax
    if largest <= 0.0:
        return 0.0
    # A tiny range clips all values to almost 0, so its error is the mean square of the tensor.
    errors = focused_error(part, np.array([amax, largest * 1e-6]), bits=SEARCH_BITS)
    if not errors[1] > 0.0:  # all values are smaller than the smallest normal float32
        return 0.0
    return float((fp8_error(part, amax) if number_format == FP8 else errors[0]) / errors[1])


def measure_losses(
    model: Model,
    candidates: Sequence[QuantizedTensor],
    data: CalibrationSource,
    *,
    activations: Sequence[QuantizedTensor],
    images: ImageOptions = DEFAULT_IMAGES,
    samples: int | None = SAMPLES,
) -> ActivationLosses | None:
    """Measure the output error with all activations quantized, and with each candidate float.

    Args:
        model: The Q/DQ model with float inputs; it is not changed.
        candidates: Activations to leave float one at a time.
        data: The calibration data.
        activations: All quantized activations.
        images: How images become inputs.
        samples: Number of images, spread evenly over the data, for the error and each candidate.
            None: :data:`SAMPLES` for the error. If the error is not small, each candidate runs on
            :data:`TRIAL_SAMPLES` of these samples, and the best candidates on the others.

    Returns:
        The error, and the :data:`REPORTED` candidates with the largest positive gains. None if the
        data is an iterator or empty, or if the outputs have no error.

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
    names = [activation.tensor for activation in candidates]
    errors = measurement.measure([None] if samples is None else [None, *names])
    total = errors[None]
    trial = list(total)
    error = float(np.mean(list(total.values())))
    if error <= 0.0:
        return None
    result = ActivationLosses(
        error,
        [],
        measurement.count_images(total),
        0,
        at_objects=measurement.compared.at_objects,
        uncovered=_find_uncovered_outputs(model, measurement.compared),
    )
    if samples is None:
        if round_error(error) < SMALL_ERROR:
            return result
        trial = trial if len(trial) <= TRIAL_SAMPLES else [trial[0], trial[-1]]
        errors |= measurement.measure(names, trial)
    losses = _rank_losses(measurement, errors, candidates, trial)[:REPORTED]
    return replace(
        result,
        tensors=losses,
        tried=len(candidates),
        trial_samples=measurement.count_images(trial),
    )


def _find_uncovered_outputs(model: Model, compared: ComparedOutputs) -> tuple[str, ...]:
    """Return the outputs of the network that do not depend on the compared tensors."""
    covered = set(compared.tensors)
    for node in model.ordered:
        if not covered.isdisjoint((*node.inputs, *node.captured)):
            covered.update(node.outputs)
    return tuple(output for output in model.outputs if output not in covered)


def _rank_losses(
    measurement: _ErrorMeasurement,
    errors: Mapping[str | None, Mapping[int, float]],
    candidates: Sequence[QuantizedTensor],
    trial: Sequence[int],
) -> list[TensorLoss]:
    """Return the losses of candidates with a positive gain, largest gain first.

    The largest gains are confirmed on samples outside the trial, or on the samples of the trial if
    there are no others.

    Args:
        measurement: Runs the network on the samples.
        errors: Errors by the activation that is float, then by sample number. The key None stands
            for all activations quantized.
        candidates: Activations that were left float one at a time in the trial.
        trial: Numbers of the samples of the trial.
    """
    total = errors[None]
    others = [number for number in total if number not in trial]
    confirming = others or list(trial)
    before = sum(total[number] for number in trial)
    gains = {
        activation.tensor: 1.0 - sum(errors[activation.tensor].values()) / before
        for activation in candidates
    }
    ordered = sorted(candidates, key=lambda activation: -gains[activation.tensor])
    best: list[str] = []
    if len(confirming) >= _MIN_CONFIRMING:
        best = [e.tensor for e in ordered if gains[e.tensor] >= MIN_GAIN][:_MAX_CONFIRMED]
    confirmed = measurement.measure(best, others) if others and best else errors
    losses = []
    for activation in ordered:
        name = activation.tensor
        if gains[name] > 0.0:
            loss = TensorLoss(name, measurement.find_consumers(activation), gains[name])
            if name in best:
                loss = _confirm_gain(loss, total, confirmed[name], confirming)
                loss = replace(loss, confirmed_on=measurement.count_images(confirming))
            losses.append(loss)
    return losses


def _confirm_gain(
    loss: TensorLoss,
    total: Mapping[int, float],
    without: Mapping[int, float],
    numbers: Sequence[int],
) -> TensorLoss:
    before = np.array([total[number] for number in numbers])
    gains = before - np.array([without[number] for number in numbers])
    gain = float(gains.sum() / before.sum())
    deviation = float(gains.std(ddof=1) / np.sqrt(len(gains)))
    is_confirmed = gain >= MIN_GAIN and float(gains.mean()) > _MIN_DEVIATIONS * deviation
    return replace(loss, confirmed_gain=gain, confirmed=is_confirmed)


class _ErrorMeasurement:
    """Measures the output errors of a Q/DQ model on samples, with one activation float.

    Attributes:
        references: Outputs with all activations float, by sample number.
        images: Number of images in each sample, by sample number.
        compared: The compared outputs.
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
        from calibration.session import return_freed_memory, worker_count

        self.references: dict[int, ReferenceOutputs] = {}
        self.images: dict[int, int] = {}
        self._model = model
        self._activations = [activation.tensor for activation in activations]
        self._dataset = dataset
        self.compared = find_compared_outputs(model, model)
        self._focus = Focus(self.compared.scores) if self.compared.at_objects else None
        shapes = {name: array.shape for name, array in first.items()}
        is_fixed = all(model.shape(name) == shape for name, shape in shapes.items())
        run_bytes = peak_activation_bytes(
            model if is_fixed else with_input_shapes(model.proto, shapes)
        )
        self._workers = max(1, min(samples, worker_count(run_bytes, core_count())))
        threads = max(1, core_count() // self._workers)
        self._network = SwitchableNetwork(model, activations, self.compared.tensors, threads)
        return_freed_memory()

    def measure(
        self, left_out: Sequence[str | None], numbers: Collection[int] | None = None
    ) -> dict[str | None, dict[int, float]]:
        """Return output errors, by the activation that is left float, then by sample number.

        Args:
            left_out: Names of activations to leave float, one at a time. The entry None leaves no
                activation float.
            numbers: Numbers of the samples; None for all.
        """
        skipped = set() if numbers is None else set(range(len(self._dataset))) - set(numbers)
        tasks = SharedTasks(self._dataset.tasks(skipped))

        def work(put: Callable[[tuple[int, dict[str | None, float]]], None]) -> None:
            for number, load in tasks:
                loaded = load()
                if loaded is None:
                    continue
                sample, self.images[number] = loaded
                errors = {}
                reference = self._compute_reference(number, sample)
                for tensor in left_out:
                    if tasks.stopped:  # another thread has failed
                        return
                    floats = () if tensor is None else (tensor,)
                    errors[tensor] = reference.error(self._network.run(sample, floats))
                put((number, errors))

        results = sorted(run_threads(tasks, [work] * self._workers), key=lambda result: result[0])
        return {
            name: {number: float(errors[name]) for number, errors in results} for name in left_out
        }

    def count_images(self, numbers: Collection[int]) -> int:
        """Return the number of images in samples, without those that only fill a fixed batch."""
        return sum(self.images[number] for number in numbers)

    def find_consumers(self, activation: QuantizedTensor) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for quantizer in self._model.consumers(activation.tensor):
            if quantizer.name != activation.node:
                continue
            for dequantizer in self._model.consumers(quantizer.output):
                consumers = self._model.consumers(dequantizer.output)
                names.update(dict.fromkeys(n.name for n in consumers))
        return tuple(names)

    def _compute_reference(self, number: int, sample: Feeds) -> ReferenceOutputs:
        if number not in self.references:
            outputs = self._network.run(sample, self._activations)
            if not all(np.isfinite(array).all() for array in outputs.values()):
                raise ModelError(
                    "the network's outputs are NaN or infinite on the calibration data; check the "
                    "model and the preprocessing",
                    code="not-finite",
                )
            focus = self._focus.find(outputs) if self._focus else None
            self.references[number] = ReferenceOutputs(outputs, focus)
        return self.references[number]

"""What limits the accuracy of a Q/DQ model: the activations whose quantization costs most, measured at the outputs.

On a few calibration samples the network runs with all activations float, with all quantized, and with all but one
quantized (:mod:`qdqtool.insertion.switchable_network`). Which ones are tried is decided by the error inside the tensors.

The error of an output map is the root of the squared difference to the run with float activations, over the variance
of that run, at the positions where the network looks (all positions, where that is not known); the mean over the
outputs is what is reported. The outputs are the last convolutions in front of any decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import ModelError
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.placement import find_class_outputs
from qdqtool.insertion.switchable_network import Feeds, SwitchableNetwork
from qdqtool.ir.editor import Editor, with_nodes
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.qdq import is_dq
from qdqtool.patterns.half import find_fp16_nodes
from qdqtool.patterns.heads import find_head
from qdqtool.proto.slim import without_large_weights
from qdqtool.runtime.run_cost import peak_activation_bytes, with_input_shapes
from qdqtool.runtime.sessions import core_count
from qdqtool.types import Json, Prediction, QuantizedTensor
from qdqtool.util.threads import SharedTasks, run_threads

if TYPE_CHECKING:
    from calibration import FocusMap, TensorStatistics

TRIED = 8
SAMPLES = 2
NAMED = 5
# Part of the outputs' standard deviation: if INT8 moves them by less, detections hardly suffer (docs/accuracy.md).
LITTLE = 0.1
AS_CALIBRATED = ImageOptions()


@dataclass(frozen=True)
class TensorLoss:
    """What a quantized activation costs.

    Attributes:
        tensor: Its name.
        readers: Nodes that read it dequantized.
        gain: By how much the output error falls when this tensor alone is float, as a part of the output error.
        convolutions: How many convolutions would be float then; None when not predicted.
        conversions: How many conversions would be added; None when not predicted.
    """

    tensor: str
    readers: tuple[str, ...]
    gain: float
    convolutions: int | None = None
    conversions: int | None = None

    def as_json(self) -> Json:
        return {
            "tensor": self.tensor,
            "readers": list(self.readers),
            "gain": round(self.gain, 4),
            "convolutions": self.convolutions,
            "conversions": self.conversions,
        }


@dataclass(frozen=True)
class Losses:
    """What the activations cost together, and the worst of them.

    Attributes:
        error: Output error of all quantized activations together, as a part of the outputs' standard deviation.
        tensors: The worst, worst first.
        samples: Calibration samples that it was measured on.
        tried: Tensors that were tried.
    """

    error: float
    tensors: list[TensorLoss]
    samples: int
    tried: int

    def as_json(self) -> Json:
        return {
            "error": round(self.error, 5),
            "samples": self.samples,
            "tried": self.tried,
            "tensors": [t.as_json() for t in self.tensors],
        }


def candidates(
    quantized: Sequence[QuantizedTensor],
    statistics: Mapping[str, TensorStatistics],
    sources: Mapping[str, Sequence[str]],
    count: int = TRIED,
) -> list[QuantizedTensor]:
    """The activations with the largest error of their own, relative to the values of their ``sources``."""
    from calibration.methods import INT8_LEVELS, SEARCH_BITS, focused_error

    ranked: list[tuple[float, int, QuantizedTensor]] = []
    for entry in quantized:
        assert not isinstance(entry.scale, list)
        worst = 0.0
        for name in sources[entry.tensor]:
            seen = statistics[name]
            if seen.absmax > 0.0:
                ranges = np.array([entry.scale * INT8_LEVELS, seen.absmax * 1e-6])
                error = focused_error(seen, ranges, bits=SEARCH_BITS)
                if error[1] > 0.0:  # 0 where all values are below the smallest normal float32
                    worst = max(worst, float(error[0] / error[1]))
        ranked.append((-worst, len(ranked), entry))
    return [entry for _, _, entry in sorted(ranked)[:count]]


def measure(
    model: Model,
    tried: Sequence[QuantizedTensor],
    data: object,
    *,
    activations: Sequence[QuantizedTensor],
    images: ImageOptions = AS_CALIBRATED,
    samples: int | None = SAMPLES,
    named: int = NAMED,
) -> Losses | None:
    """Measures what all quantized activations cost together, and each of those that are tried.

    Args:
        model: The Q/DQ model, its float inputs unchanged; it is not changed.
        tried: Which activations to try.
        data: The calibration data; ``samples`` of it are used, evenly spread.
        activations: All quantized activations.
        images: How images become inputs.
        samples: How many samples; None for :data:`SAMPLES`, and for trying none where the error of all together is
            little.
        named: How many of the worst to return.

    Returns:
        None where the data cannot be read a second time, or the model has no output to look at.

    Raises:
        ModelError: onnxruntime cannot run the model, or its outputs are not finite.
    """
    from calibration import Focus, Preprocess, open_data
    from calibration.session import input_specs, return_freed_memory, worker_count

    if isinstance(data, Iterator):
        return None
    count = SAMPLES if samples is None else samples
    dataset = open_data(
        data, input_specs(model), images.preprocess or Preprocess(), count, images.size
    )
    scores = find_class_outputs(model)
    focus = Focus(scores) if scores else None  # they are outputs: last convolutions as well
    first = next(iter(dataset), None)
    if first is None:
        return None
    shapes = {n: array.shape for n, array in first.items()}
    known = all(model.shape(n) == shape for n, shape in shapes.items())
    fed = model if known else with_input_shapes(model.proto, shapes)
    held = peak_activation_bytes(fed)
    at_once = max(1, min(count, worker_count(held, core_count())))

    def opened(alone: Sequence[QuantizedTensor]) -> SwitchableNetwork:
        found = SwitchableNetwork(
            model, activations, alone, compared_tensors(model), max(1, core_count() // at_once)
        )
        return_freed_memory()
        return found

    network = opened([] if samples is None else tried)
    floats: dict[int, Compared] = {}
    everything = [entry.tensor for entry in activations]

    def compared(number: int, sample: Feeds) -> Compared:
        if number not in floats:
            found = network.run(sample, everything)
            if not all(np.isfinite(array).all() for array in found.values()):
                raise ModelError(
                    "the network's outputs are NaN or infinite on the calibration data",
                    code="not-finite",
                )
            floats[number] = Compared(found, focus.find(found) if focus else None)
        return floats[number]

    def errors(left_out: Sequence[str | None]) -> dict[str | None, float]:
        """With each of these float, with none for None; the sum over the samples."""
        tasks = SharedTasks(dataset.tasks())

        def work(put: Callable[[tuple[int, dict[str | None, float]]], None]) -> None:
            for number, load in tasks:
                loaded = load()
                if loaded is not None:
                    before, each = compared(number, loaded[0]), {}
                    runs = network.run_each(loaded[0], left_out)
                    while not tasks.stopped and (run := next(runs, None)):
                        each[run[0]] = before.error(run[1])
                    put((number, each))

        by_sample = [each for _, each in sorted(run_threads(tasks, [work] * at_once))]
        return {left: float(np.sum([each[left] for each in by_sample])) for left in left_out}

    names = [entry.tensor for entry in tried]
    found = errors([None, *names] if samples is not None else [None])
    total, used = found[None], len(floats)
    if total <= 0.0:
        return None
    if samples is None and total >= LITTLE * used:
        del network  # before there is another one
        network = opened(tried)
        found = errors(names)
    tried = [entry for entry in tried if entry.tensor in found]
    without = np.array([found[entry.tensor] for entry in tried])
    worst = [i for i in np.argsort(without, kind="stable")[:named] if without[i] < total]
    return Losses(
        float(total / used),
        [
            TensorLoss(tried[i].tensor, _readers(model, tried[i]), float(1.0 - without[i] / total))
            for i in worst
        ],
        used,
        len(tried),
    )


class Compared:
    """What the float network does where it is compared: worked out once for many runs, and no more of it held."""

    def __init__(self, wanted: Mapping[str, npt.NDArray[Any]], looked_at: FocusMap | None) -> None:
        self.looked_at = looked_at
        self._before = {name: self._values(array) for name, array in wanted.items()}
        self._spread = {
            name: float(values.var()) if values.size else 0.0
            for name, values in self._before.items()
        }

    def _values(self, array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        found = [] if self.looked_at is None else self.looked_at.values(array)
        return np.concatenate([a.reshape(-1) for a in found or [array]]).astype(np.float64)

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._before.values())

    def error(self, found: Mapping[str, npt.NDArray[Any]]) -> float:
        """Root of the squared difference over the variance, the mean over the outputs; see the module."""
        errors = []
        for name, before in self._before.items():
            spread = self._spread[name]
            if spread > 0.0:
                difference = self._values(found[name])
                difference -= before
                errors.append(np.sqrt(np.square(difference, out=difference).mean() / spread))
        return float(np.mean(errors)) if errors else 0.0


def compared_tensors(model: Model) -> list[str]:
    """Where the error is measured: the last convolutions in front of any decoding, else the network's outputs."""
    last = find_head(model).last_convolutions
    ends = [n.output for n in model.ordered if n.index in last and n.op == "Conv"]
    return list(dict.fromkeys(ends)) or list(model.outputs)


def without_pair(model: Model, entry: QuantizedTensor) -> Model:
    """A copy of a Q/DQ model in which one activation is float."""
    copy = model.copy()
    quantizer = copy.node(entry.node)
    editor = Editor(copy)
    editor.remove_pairs(quantizer, [n for n in copy.consumers(quantizer.output) if is_dq(n)])
    return editor.finish()


def with_predictions(
    losses: Losses,
    model: Model,
    activations: Sequence[QuantizedTensor],
    before: Prediction,
    predict: Callable[[Model], Prediction],
) -> Losses:
    """The same, with what each of them would change in the engine of the finished ``model``; ``before`` is its
    prediction, and ``predict`` makes others for the same target."""
    nodes = {n.name for n in model.nodes}
    slim = Model(without_large_weights(model.proto), "", EDITED, types=model, constants=model)
    by_tensor = {a.tensor: a for a in activations}
    known = before.summary()
    tensors = []
    for loss in losses.tensors:
        entry = by_tensor[loss.tensor]
        if entry.node in nodes:
            after = predict(without_pair(slim, entry)).summary()
            added = None
            if known["conversions"] is not None and after["conversions"] is not None:
                added = after["conversions"] - known["conversions"]
            loss = replace(loss, convolutions=known["int8"] - after["int8"], conversions=added)
        tensors.append(loss)
    return replace(losses, tensors=tensors)


def _readers(model: Model, entry: QuantizedTensor) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for reader in model.consumers(entry.tensor):
        if reader.name != entry.node:
            continue
        for dequantizer in model.consumers(reader.output):
            names.update(dict.fromkeys(r.name for r in model.consumers(dequantizer.output)))
    return tuple(names)


# What FP16 would do to a Q/DQ model ----------------------------------------------------------------------------------


_LARGEST = "/qdqtool/largest"  # behind a tensor's name
_AXES_OPSET = 18  # the first in which ReduceMax reads its axes
FEW = 8  # samples, to find large values on, beside the ranges of the calibration


@dataclass(frozen=True)
class Fidelity:
    """How near the outputs of the finished model are to those of the float model.

    Attributes:
        error: Root of the squared difference over the variance of the float model's outputs, the mean over the outputs;
            NaN where an output is not finite.
        samples: Calibration samples that it was measured on.
    """

    error: float
    samples: int

    def as_json(self) -> Json:
        return {
            "error": round(self.error, 5) if np.isfinite(self.error) else None,
            "samples": self.samples,
        }


def largest_values(
    model: Model, data: object, *, images: ImageOptions = AS_CALIBRATED, samples: int = FEW
) -> dict[str, float]:
    """The largest absolute value of every tensor of a Q/DQ model that FP16 would hold, on a few samples, evenly spread.

    Nothing is found where the data cannot be read a second time.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    if isinstance(data, Iterator):
        return {}
    half = find_fp16_nodes(model)
    tensors = list(
        dict.fromkeys(
            t
            for n in model.ordered
            if n.index in half
            for t in (*n.inputs, *n.outputs)
            if t
            and model.elem_type(t) == TensorProto.FLOAT
            and not model.is_constant(t)
            and 0 not in (model.shape(t) or ())
        )
    )
    found = _largest(model, tensors, data, images, samples)
    return {t: float(v) if np.isfinite(v) else float("inf") for t, v in found.items()}


def channel_maxima(
    model: Model,
    tensors: Mapping[str, int],
    data: object,
    *,
    images: ImageOptions = AS_CALIBRATED,
    samples: int = FEW,
) -> dict[str, npt.NDArray[Any]]:
    """The largest absolute value of tensors for each place of their last axis, whose length is given: ``[channels]``.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    return _largest(model, list(tensors), data, images, samples, tensors)


def values_of(
    model: Model,
    tensors: Sequence[str],
    shapes: Mapping[str, str],
    data: object,
    images: ImageOptions,
) -> dict[str, npt.NDArray[Any]]:
    """Tensors as the first sample makes them, and the ``shapes`` of others under the names given.

    Raises:
        ModelError: onnxruntime cannot run the model.
    """
    watched = with_nodes(
        model, [helper.make_node("Shape", [t], [name]) for t, name in shapes.items()]
    )
    (values,) = next(_runs([watched], [*tensors, *shapes.values()], data, images, 1, exact=True))
    return values


def _largest(
    model: Model,
    tensors: Sequence[str],
    data: object,
    images: ImageOptions,
    samples: int,
    channels: Mapping[str, int] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The largest absolute values of tensors, or for each place of last axes of these lengths; a NaN stays one."""
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    for tensor in tensors:
        source = tensor
        over: list[str] = []
        attributes: dict[str, Any] = {}
        if channels is not None:
            source = f"{tensor}{_LARGEST}/rows"
            lengths = numpy_helper.from_array(
                np.array([-1, channels[tensor]], np.int64), f"{source}/shape"
            )
            constants.append(lengths)
            nodes.append(helper.make_node("Reshape", [tensor, lengths.name], [source]))
            if model.opset >= _AXES_OPSET:
                over = [f"{source}/axes"]
                constants.append(numpy_helper.from_array(np.array([0], np.int64), over[0]))
            else:
                attributes["axes"] = [0]
        nodes.append(helper.make_node("Abs", [source], [f"{tensor}{_LARGEST}/abs"]))
        nodes.append(
            helper.make_node(
                "ReduceMax",
                [f"{tensor}{_LARGEST}/abs", *over],
                [tensor + _LARGEST],
                keepdims=0,
                **attributes,
            )
        )
    watched = with_nodes(model, nodes, constants)
    found: dict[str, npt.NDArray[Any]] = {}
    for values in _runs([watched], [t + _LARGEST for t in tensors], data, images, samples):
        for tensor in tensors:
            value = values[0][tensor + _LARGEST]
            found[tensor] = np.maximum(found[tensor], value) if tensor in found else value
    return found


def compare(
    floats: Model,
    made: Sequence[Model],
    data: object,
    *,
    samples: int,
    images: ImageOptions = AS_CALIBRATED,
) -> list[Fidelity]:
    """How far the outputs of Q/DQ models are from those of the float model that they were made from.

    The outputs are the last convolutions in front of any decoding, where the models name them alike. Empty where no
    sample can be read, or the data not a second time.

    Raises:
        ModelError: onnxruntime cannot run one of them.
    """
    if isinstance(data, Iterator):
        return []
    ends = [t for t in compared_tensors(made[0]) if t in floats.producers] or list(made[0].outputs)
    errors: list[list[float]] = []
    for one, *others in _runs([floats, *made], ends, data, images, samples):
        before = Compared(one, None)
        errors.append(
            [
                before.error(found)
                if all(np.isfinite(v).all() for v in found.values())
                else float("nan")
                for found in others
            ]
        )
    return [Fidelity(float(np.mean(each)), len(each)) for each in zip(*errors, strict=True)]


def _runs(
    models: Sequence[Model],
    tensors: Sequence[str],
    data: object,
    images: ImageOptions,
    samples: int,
    *,
    exact: bool = False,
) -> Iterator[list[dict[str, npt.NDArray[Any]]]]:
    """The tensors of each model, as float32 unless they are wanted exactly, for one sample after the other."""
    from calibration import Preprocess, open_data
    from calibration.session import TensorFetcher, input_specs, open_session

    fetchers = [TensorFetcher(open_session(model, tensors, core_count())) for model in models]
    preprocess = images.preprocess or Preprocess()
    for sample in open_data(data, input_specs(models[0]), preprocess, samples, images.size):
        yield [
            {t: np.array(v, None if exact else np.float32) for t, v in f.run(sample).items()}
            for f in fetchers
        ]

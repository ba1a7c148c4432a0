"""Errors of a network's outputs, separately for boxes and scores that share one output.

Boxes are in pixels, scores are from 0 to 1. A common error for both would hide wrong scores. To
find the parts of an output, the operators after the Concat are run once. In this run, each tensor
that the Concat joins is filled with a number. The output then shows the tensor that each element
comes from. This needs operators after the Concat that only move values.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from calibration.session import partial_model
from qdqtool.errors import DataError
from qdqtool.findings.preprocess_notes import describe_preprocess
from qdqtool.fixing.runner import Arrays, RunError
from qdqtool.fixing.site import ATOL
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.preprocessing import resolve_images
from qdqtool.ir.bounds import find_concat_parts
from qdqtool.ir.graph import Model, Node
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource

PART_SLACK = 0.02  # additional permitted error of a part: the errors of small parts vary more
MAX_PARTS = 16  # an output with more parts is compared as a whole
SAMPLES = 8  # number of images on which outputs are compared

Run = Callable[[onnx.ModelProto, Arrays], Arrays]


@dataclass(frozen=True)
class _SampleRun:
    """A network, one sample, and the function that runs models."""

    model: Model
    inputs: Arrays
    run: Run

    def compute(self, tensors: list[str]) -> Arrays:
        """Return the values of tensors, which may be inputs or constants.

        Raises:
            RunError: The network cannot be run, or a tensor has no value.
        """
        model = self.model
        values = dict(self.inputs)
        computed = [t for t in tensors if not model.is_constant(t) and t not in model.inputs]
        if computed:
            values.update(self.run(partial_model(model, computed), self.inputs))
        for tensor in filter(model.is_constant, tensors):
            constant = model.constant(tensor)
            if constant is not None:
                values[tensor] = constant
        for tensor in tensors:
            if tensor not in values:
                raise RunError(
                    f"onnxruntime returned no value for tensor '{tensor}'",
                    code="no-value",
                    node=tensor,
                )
        return {t: values[t] for t in tensors}


@dataclass(frozen=True)
class OutputNoise:
    """Errors of a model's outputs, compared with the outputs of the float network.

    Attributes:
        each: For each output, the root mean square of the difference divided by the root mean
            square of the float network's output.
        finite: Whether all values are finite.
        parts: The same ratio for each part of an output, by output and joined tensor.
        lost: Parts that are constant, but vary in the float network.
    """

    each: dict[str, float]
    finite: bool
    parts: dict[tuple[str, str], float] = field(default_factory=dict)
    lost: frozenset[tuple[str, str]] = frozenset()

    @property
    def relative(self) -> float:
        """Largest error among the outputs."""
        return max(self.each.values(), default=0.0)


@dataclass(frozen=True, eq=False)
class OutputPart:
    """Part of an output that is compared separately.

    Attributes:
        output: Name of the output.
        tensor: Tensor that a Concat joins into the output.
        channels: First and last index along `axis`. None if the part is not a range of indices
            along one axis.
        axis: Axis of `channels`; 0 if `channels` is None.
        mask: For each element of the output, whether it belongs to the part. The shape is that of
            the output.
    """

    output: str
    tensor: str
    channels: tuple[int, int] | None
    axis: int
    mask: npt.NDArray[np.bool_]

    @property
    def key(self) -> tuple[str, str]:
        """Output and tensor, which identify the part."""
        return self.output, self.tensor


@dataclass(frozen=True)
class OutputError:
    """Error of an output, or of a part of an output, against the float network.

    Attributes:
        output: Name of the output.
        tensor: Tensor that a Concat joins into the output. Empty for a whole output.
        channels: First and last channel. None for a whole output, or if the part is not a range of
            channels.
        before: Error before fixing: root mean square of the difference divided by the root mean
            square of the float network's output.
        after: Error after fixing.
        lost: Whether all values of the output or part are equal in the fixed model, but not in the
            float network.
    """

    output: str
    tensor: str
    channels: tuple[int, int] | None
    before: float
    after: float
    lost: bool = False

    @property
    def has_grown(self) -> bool:
        """Whether the error grew by more than 10 % plus 0.001."""
        return self.after > 1.1 * self.before + 1e-3

    @property
    def has_fallen(self) -> bool:
        """Whether the error fell by more than 10 % plus 0.001."""
        return self.before > 1.1 * self.after + 1e-3

    @property
    def title(self) -> str:
        """Name of the output, with the channels and the tensor of a part."""
        channels = ""
        if self.channels is not None:
            first, last = self.channels
            channels = f" channel {first}" if first == last else f" channels {first} to {last}"
        return f"{self.output}{channels}" + (f" ({self.tensor})" if self.tensor else "")

    def as_json(self) -> dict[str, object]:
        """Return the error as a JSON object."""
        return {
            "output": self.output,
            "tensor": self.tensor,
            "channels": None if self.channels is None else list(self.channels),
            "before": self.before,
            "after": self.after,
            "grew": self.has_grown,
            "lost": self.lost,
        }


def find_output_parts(floats: Model, inputs: Arrays, run: Run) -> list[OutputPart]:
    """Return the parts that Concats join into outputs, for each output with 2 to 16 parts.

    Args:
        floats: The network without activation quantizers.
        inputs: One sample.
        run: Function that runs a model.
    """
    network = _SampleRun(floats, inputs, run)
    output_parts: list[OutputPart] = []
    for output in dict.fromkeys(floats.outputs):
        parts = find_concat_parts(floats, output)
        if not 1 < len(parts) <= MAX_PARTS:
            continue
        try:
            labels = _label_elements(network, output, parts)
        except RunError:
            continue  # the output is compared as a whole
        for number, tensor in enumerate(parts):
            mask = labels == number
            if mask.any():
                channels, axis = _find_channel_range(mask)
                output_parts.append(OutputPart(output, tensor, channels, axis, mask))
    return output_parts


def _copy_constants(model: Model, tensors: Iterable[str]) -> list[onnx.TensorProto]:
    constants = []
    for tensor in tensors:
        constant = model.constant_proto(tensor)
        if constant is not None:
            copy = onnx.TensorProto()
            copy.CopyFrom(constant)
            copy.name = tensor
            constants.append(copy)
    return constants


def _label_elements(network: _SampleRun, output: str, parts: list[str]) -> npt.NDArray[Any]:
    """Return, for each element of an output, the index in `parts` of its source tensor.

    Raises:
        RunError: A model cannot be run, or a tensor has no value.
    """
    model = network.model
    nodes = _nodes_between(model, output, parts)
    produced = set(itertools.chain.from_iterable(node.outputs for node in nodes))
    consumed = _list_inputs(nodes)
    operands = [t for t in consumed if t not in produced and not model.is_constant(t)]
    feeds = network.compute(list(dict.fromkeys([*parts, *operands])))
    for number, tensor in enumerate(parts):
        feeds[tensor] = np.full_like(feeds[tensor], number)
    labels = network.run(_join_nodes(model, nodes, output, feeds), feeds).get(output)
    if labels is None:
        raise RunError(
            f"onnxruntime returned no value for output '{output}'", code="no-value", node=output
        )
    return labels


def _list_inputs(nodes: Iterable[Node]) -> list[str]:
    inputs = itertools.chain.from_iterable(node.inputs for node in nodes)
    return list(dict.fromkeys(filter(None, inputs)))


def _join_nodes(model: Model, nodes: Sequence[Node], output: str, feeds: Arrays) -> onnx.ModelProto:
    """Return a model of some nodes of a network, whose inputs get the given values."""
    constants = _copy_constants(model, [t for t in _list_inputs(nodes) if t not in feeds])
    starts = [
        helper.make_tensor_value_info(t, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for t, v in feeds.items()
    ]
    ends = [onnx.ValueInfoProto(name=output)]
    graph = helper.make_graph([n.proto for n in nodes], "parts", starts, ends, constants)
    return helper.make_model(graph, opset_imports=list(model.proto.opset_import))


def _nodes_between(model: Model, output: str, parts: list[str]) -> list[Node]:
    indices: set[int] = set()
    stack = [output]
    while stack:
        tensor = stack.pop()
        node = None if tensor in parts else model.producer(tensor)
        if node is None or node.index in indices:
            continue
        indices.add(node.index)
        stack += node.inputs if node.op == "Concat" else node.inputs[:1]
    return [n for n in model.ordered if n.index in indices]


def _find_channel_range(mask: npt.NDArray[np.bool_]) -> tuple[tuple[int, int] | None, int]:
    """Return the first and last index of the masked range, and its axis.

    If the mask is not one range along one axis, return None and 0.
    """
    for axis in range(mask.ndim):
        others = tuple(i for i in range(mask.ndim) if i != axis)
        touched = mask.any(axis=others)
        places = np.flatnonzero(touched)
        is_complete = np.array_equal(touched, mask.all(axis=others))
        if is_complete and 0 < places.size < mask.shape[axis]:
            if places[-1] - places[0] + 1 == places.size:
                return (int(places[0]), int(places[-1])), axis
    return None, 0


def read_samples(
    model: Model, data: CalibrationSource | None, images: ImageOptions
) -> tuple[list[Arrays], int, list[Note]]:
    """Return evenly spread samples as inputs of a model, and notes on their origin.

    The number is that of the images or arrays in the samples: with a fixed batch, each sample has
    several. Both lists are empty if `data` is None.

    Raises:
        DataError: The data has no usable sample.
    """
    from calibration import open_data
    from calibration.session import input_specs

    if data is None:
        return [], 0, []
    images, origin = resolve_images(model, images)
    assert images.preprocess is not None
    dataset = open_data(data, input_specs(model), images.preprocess, SAMPLES, images.size)
    loaded = [sample for _, load in dataset.tasks() if (sample := load()) is not None]
    if not loaded:
        raise DataError(
            "`data` contains no samples; give images or arrays",
            code="no-samples",
            parameter="data",
        )
    notes = describe_preprocess(model, dataset.source.preprocessing, origin, data)
    samples, counts = zip(*loaded, strict=True)
    return list(samples), sum(counts), [*dataset.folder_notes, *notes]


def measure_noise(
    samples: Sequence[tuple[Arrays, Arrays]], parts: Sequence[OutputPart] = ()
) -> OutputNoise:
    """Return the errors of outputs against the float network's outputs, over all samples.

    If an output is missing or has another shape, its error is infinite, and the errors of the other
    outputs are left out.

    Args:
        samples: For each sample, the outputs and the outputs of the float network. Outputs that are
            not floats are ignored.
        parts: Parts of outputs that are measured separately, in addition.
    """
    sums: defaultdict[str, ErrorSums] = defaultdict(ErrorSums)
    part_sums: defaultdict[tuple[str, str], ErrorSums] = defaultdict(ErrorSums)
    finite = True
    for outputs, reference in samples:
        for name, expected in reference.items():
            actual = outputs.get(name)
            if actual is None or actual.shape != expected.shape:
                return OutputNoise({name: float("inf")}, False)
            if np.issubdtype(expected.dtype, np.floating) and expected.size:
                finite = finite and bool(np.all(np.isfinite(actual)))
                sums[name].add(actual, expected)
        for part in parts:
            if part.output in reference and reference[part.output].shape == part.mask.shape:
                actual, expected = outputs[part.output], reference[part.output]
                part_sums[part.key].add(actual[part.mask], expected[part.mask])
    return OutputNoise(
        {name: total.relative_error for name, total in sums.items()},
        finite,
        {key: total.relative_error for key, total in part_sums.items()},
        frozenset(key for key, total in part_sums.items() if total.is_lost),
    )


class ErrorSums:
    """Sums from which the error of an output, or of a part of an output, is computed.

    The sums are over all values in all samples.
    """

    def __init__(self) -> None:
        self._difference = self._level = 0.0  # sums of squares
        self._count = 0
        self._actual_values: set[float] = set()  # smallest and largest value of each sample
        self._expected_values: set[float] = set()

    def add(self, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        """Add the values of one sample."""
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
        self._difference += float(np.sum((actual - expected) ** 2))
        self._level += float(np.sum(expected**2))
        self._count += expected.size
        self._actual_values |= {float(actual.min()), float(actual.max())}
        self._expected_values |= {float(expected.min()), float(expected.max())}

    @property
    def relative_error(self) -> float:
        """Root mean square of the difference divided by the root mean square of expected values.

        If all expected values are 0, it is the root mean square of the difference.
        """
        return math.sqrt(self._difference / (self._level or self._count))

    @property
    def is_lost(self) -> bool:
        """Whether the actual values are all the same value, but the expected values are not."""
        return len(self._actual_values) == 1 < len(self._expected_values)


def list_output_errors(
    parts: Sequence[OutputPart], before: OutputNoise, after: OutputNoise
) -> list[OutputError]:
    """Return the errors of the parts of outputs, and of outputs without parts."""
    errors = [
        OutputError(
            p.output,
            p.tensor,
            p.channels,
            before.parts[p.key],
            after.parts[p.key],
            lost=p.key in after.lost,
        )
        for p in parts
        if p.key in before.parts and p.key in after.parts
    ]
    with_parts = {e.output for e in errors}
    errors.extend(
        OutputError(name, "", None, error, after.each[name])
        for name, error in before.each.items()
        if name not in with_parts and name in after.each
    )
    return errors


def is_growth_permitted(
    before: OutputNoise,
    after: OutputNoise,
    factor: float,
    rounding: float = ATOL,
    *,
    parts: bool = False,
) -> bool:
    """Return whether the error of every output is at most ``before * factor + rounding``.

    NaN or infinite outputs of the changed model are not permitted. If only the model without the
    change has such outputs, all errors are permitted.

    Args:
        before: Errors of the model without the change.
        after: Errors of the changed model.
        factor: Permitted growth factor.
        rounding: Permitted growth in addition to the factor.
        parts: Whether to check the parts of outputs too.
    """
    if not after.finite:
        return False
    if not before.finite:
        return True
    if parts and find_worst_part(before, after, factor) is not None:
        return False
    return all(
        noise <= before.each.get(name, 0.0) * factor + rounding
        for name, noise in after.each.items()
    )


def find_worst_part(
    before: OutputNoise, after: OutputNoise, factor: float
) -> tuple[str, str] | None:
    """Return output and tensor of the part beyond its limit whose error grew most.

    Parts that became constant count as beyond their limit. None without such a part.
    """
    growth = {
        key: noise / (before.parts.get(key, 0.0) + 1e-9)
        for key, noise in after.parts.items()
        if noise > before.parts.get(key, 0.0) * factor + PART_SLACK
        or key in after.lost - before.lost
    }
    return max(growth, key=lambda key: growth[key]) if growth else None

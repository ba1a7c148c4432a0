"""Parts of a network's outputs that are compared apart: boxes and scores of a detector share one output.

The error of boxes in pixels hides that of scores from 0 to 1, so that a detector without any scores looks exact. Which
element of an output belongs to which tensor of a Concat follows from the operators between them. They only move
values, so that they are run once on arrays that hold the number of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from calibration.session import partial_model
from qdqtool.errors import DataError
from qdqtool.fixing.sandbox import Arrays, RunError
from qdqtool.ir.bounds import joined_parts
from qdqtool.ir.graph import Model, Node
from qdqtool.util.said import said

if TYPE_CHECKING:
    from calibration.options import Preprocess

MAX_PARTS = 16  # of one output; those of another network are no groups of its outputs
SAMPLES = 8  # images that outputs are compared on

Run = Callable[[onnx.ModelProto, Arrays], Arrays]


@dataclass(frozen=True, eq=False)
class OutputPart:
    """A part of an output that is compared apart.

    Attributes:
        output: Name of the output.
        tensor: The tensor that a Concat joins into it.
        channels: First and last index along the axis ``axis``; None if the part is no such range.
        axis: The axis.
        mask: Elements of the output that belong to the part, of the output's shape.
    """

    output: str
    tensor: str
    channels: tuple[int, int] | None
    axis: int
    mask: npt.NDArray[np.bool_]

    @property
    def key(self) -> tuple[str, str]:
        return self.output, self.tensor


@dataclass(frozen=True)
class OutputError:
    """The distance of an output, or of a part of one, from the float network.

    Attributes:
        output: Name of the output.
        tensor: The tensor that a Concat joins into it; empty for a whole output.
        channels: First and last channel; None for a whole output, or if the part is no range of channels.
        before: Root mean square of the difference over that of the float output, of the model given.
        after: The same of the fixed model.
        lost: Whether the fixed model writes one value for all of it, where the float network does not.
    """

    output: str
    tensor: str
    channels: tuple[int, int] | None
    before: float
    after: float
    lost: bool = False

    @property
    def grew(self) -> bool:
        """Whether the error grew by more than rounding explains."""
        return self.after > 1.1 * self.before + 1e-3

    @property
    def title(self) -> str:
        """The output, and the part."""
        where = ""
        if self.channels is not None:
            first, last = self.channels
            where = f" channel {first}" if first == last else f" channels {first} to {last}"
        return f"{self.output}{where}" + (f" ({self.tensor})" if self.tensor else "")

    def as_json(self) -> dict[str, object]:
        return {
            "output": self.output,
            "tensor": self.tensor,
            "channels": None if self.channels is None else list(self.channels),
            "before": self.before,
            "after": self.after,
            "grew": self.grew,
            "lost": self.lost,
        }


def find_output_parts(floats: Model, inputs: Arrays, run: Run) -> list[OutputPart]:
    """Return the parts of all outputs that Concats join, found with one run of the float network.

    Args:
        floats: The network without activation quantizers.
        inputs: One sample.
        run: Runs a model.
    """
    found: list[OutputPart] = []
    for output in dict.fromkeys(floats.outputs):
        parts = joined_parts(floats, output)
        if 1 < len(parts) <= MAX_PARTS:
            try:
                labels = _label(floats, output, parts, inputs, run)
            except RunError:
                continue  # the output is compared as a whole
            masks = ((tensor, labels == number) for number, tensor in enumerate(parts))
            found += [OutputPart(output, t, *_channels(m), m) for t, m in masks if m.any()]
    return found


def _label(
    model: Model, output: str, parts: list[str], inputs: Arrays, run: Run
) -> npt.NDArray[Any]:
    """For each element of an output the number of the part that it comes from."""
    nodes = _nodes_between(model, output, parts)
    made = {t for n in nodes for t in n.outputs}
    operands = [
        t
        for n in nodes
        for t in n.inputs
        if t and t not in made and t not in parts and not model.is_constant(t)
    ]
    wanted = [t for t in dict.fromkeys([*parts, *operands]) if not model.is_constant(t)]
    computed = [t for t in wanted if t not in model.inputs]
    values = dict(inputs)
    if computed:
        values.update(run(partial_model(model, computed), inputs))
    values.update((t, v) for t in parts if (v := model.constant(t)) is not None)
    try:
        feeds = {t: values[t] for t in (*parts, *operands)}
    except KeyError as error:
        raise RunError(f"tensor {error} has no value", code="no-value") from None
    feeds.update((t, np.full_like(feeds[t], number)) for number, t in enumerate(parts))
    constants = []
    for tensor in dict.fromkeys(t for n in nodes for t in n.inputs if t and t not in feeds):
        proto = model.constant_proto(tensor)
        if proto is not None:
            copy = onnx.TensorProto()
            copy.CopyFrom(proto)
            copy.name = tensor
            constants.append(copy)
    graph = helper.make_graph(
        [n.proto for n in nodes],
        "parts",
        [
            helper.make_tensor_value_info(t, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for t, v in feeds.items()
        ],
        [onnx.ValueInfoProto(name=output)],
        constants,
    )
    proto = helper.make_model(graph, opset_imports=list(model.proto.opset_import))
    labels = run(proto, feeds).get(output)
    if labels is None:
        raise RunError(f"output '{output}' has no value", code="no-value", node=output)
    return labels


def _nodes_between(model: Model, output: str, parts: list[str]) -> list[Node]:
    """The nodes between the parts and the output, in graph order; constants apart."""
    found: dict[int, Node] = {}
    stack = [output]
    while stack:
        tensor = stack.pop()
        node = None if tensor in parts else model.producer(tensor)
        if node is None or node.index in found:
            continue
        found[node.index] = node
        stack += node.inputs if node.op == "Concat" else node.inputs[:1]
    return [n for n in model.ordered if n.index in found]


def _channels(mask: npt.NDArray[np.bool_]) -> tuple[tuple[int, int] | None, int]:
    """The range along one axis that a mask is, with the axis; None if it is no such range."""
    for axis in range(mask.ndim):
        others = tuple(i for i in range(mask.ndim) if i != axis)
        any_, all_ = mask.any(axis=others), mask.all(axis=others)
        places = np.flatnonzero(any_)
        if np.array_equal(any_, all_) and 0 < places.size < mask.shape[axis]:
            if places[-1] - places[0] + 1 == places.size:
                return (int(places[0]), int(places[-1])), axis
    return None, 0


def read_samples(
    model: Model,
    data: object,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
    count: int = SAMPLES,
) -> list[Arrays]:
    """Return samples of some data, evenly spread, as inputs of a model.

    Raises:
        DataError: There is no usable data.
    """
    from calibration import Preprocess, open_data
    from calibration.session import input_specs, metadata_size

    size = size or metadata_size(model)
    dataset = open_data(data, input_specs(model), preprocess or Preprocess(), count, size)
    found = list(dataset)
    if not found:
        raise DataError(said("{`data`}: holds no samples"), code="no-samples", parameter="data")
    return found


def sums_of_squares(
    got: Arrays, reference: Arrays, parts: Iterable[OutputPart]
) -> Iterator[tuple[tuple[str, str], float, float]]:
    """For each part its key, and the sums of squares of the difference and of the reference."""
    for part in parts:
        a, b = got.get(part.output), reference.get(part.output)
        if a is None or b is None or a.shape != b.shape or part.mask.shape != b.shape:
            continue
        one, other = a[part.mask].astype(np.float64), b[part.mask].astype(np.float64)
        yield part.key, float(np.sum((one - other) ** 2)), float(np.sum(other**2))


def is_lost(samples: Iterable[tuple[Arrays, Arrays]], part: OutputPart) -> bool:
    """Whether a part has one value on all samples, and more than one in the float network."""
    ends = np.array([np.inf, -np.inf, np.inf, -np.inf])
    for got, reference in samples:
        a, b = got.get(part.output), reference.get(part.output)
        if a is None or b is None or a.shape != b.shape or part.mask.shape != b.shape:
            return False
        a, b = a[part.mask], b[part.mask]
        ends[::2] = np.minimum(ends[::2], (a.min(), b.min()))
        ends[1::2] = np.maximum(ends[1::2], (a.max(), b.max()))
    return bool(ends[0] == ends[1] and ends[2] < ends[3])


def relative(difference: float, level: float) -> float:
    """Root of a sum of squares over that of the reference."""
    return float(np.sqrt(difference / level)) if level > 0 else float(np.sqrt(difference))


def errors_of(
    parts: Iterable[OutputPart],
    each: tuple[Mapping[str, float], Mapping[str, float]],
    by_part: tuple[Mapping[tuple[str, str], float], Mapping[tuple[str, str], float]],
    lost: frozenset[tuple[str, str]],
) -> list[OutputError]:
    """Return the errors before and after: of the parts of an output, and of outputs without parts."""
    before, after = by_part
    found = [
        OutputError(p.output, p.tensor, p.channels, before[p.key], after[p.key], lost=p.key in lost)
        for p in parts
        if p.key in before and p.key in after
    ]
    divided = {e.output for e in found}
    whole = [
        OutputError(name, "", None, error, each[1][name])
        for name, error in each[0].items()
        if name not in divided and name in each[1]
    ]
    return [*found, *whole]

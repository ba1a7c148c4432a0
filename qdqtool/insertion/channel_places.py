"""Channel numbers of a tensor's entries, traced through operators that only move values.

A `Places` array has the channel number of each entry of a tensor, or -1 if the entry belongs to no
channel. The array broadcasts to the shape of the tensor. In the compact form, an axis along which
the channel does not change has size 1, and leading axes of size 1 are omitted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.sample_runs import compute_sample_values
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import operator_of
from qdqtool.ir.sizes import MOVES, find_size_constants
from qdqtool.proto.subgraphs import STANDARD, copy_node

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource

Places = npt.NDArray[np.int64]
_MAX_ENTRIES = 1 << 25  # entries of the largest tensor that is traced entry by entry
_SHAPE_SUFFIX = "/qdqtool/shape"


def compact_places(places: Places) -> Places:
    """Return the compact form of an array; see the docstring of the module."""
    for axis in range(places.ndim):
        first = places.take([0], axis)
        if places.shape[axis] > 1 and (places == first).all():
            places = first
    while places.ndim > 1 and len(places) == 1:
        places = places[0]
    return places


class NetworkShapes:
    """Shapes of a network's tensors, and the values of shape tensors.

    A run of the model on one sample gives the shapes that the file does not state, except shapes
    that depend on the data. If an input has a dynamic size, the model is not run, and only the
    shapes in the file are available.

    Attributes:
        has_dynamic_inputs: Whether an input has a dynamic size.
    """

    def __init__(self, model: Model, data: CalibrationSource, images: ImageOptions) -> None:
        """Run the model on one sample if the file lacks shapes and no input size is dynamic.

        Raises:
            ModelError: onnxruntime cannot run the model.
        """
        self.model = model
        self._shapes: dict[str, tuple[int | None, ...]] = {}
        self._values: dict[str, npt.NDArray[Any]] = {}
        sizes = [size for t in model.inputs for size in model.shape(t) or (None,)]
        self.has_dynamic_inputs = any(size is None or size <= 0 for size in sizes)
        if self.has_dynamic_inputs:
            return
        constants, open_shapes = find_size_constants(model)
        if open_shapes:
            names = {t: t + _SHAPE_SUFFIX for t in open_shapes}
            values = compute_sample_values(model, constants, names, data, images)
            self._values = {t: values[t] for t in constants}
            self._shapes = {t: tuple(map(int, values[name])) for t, name in names.items()}

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Return the shape, with None for each dynamic size; None if the rank is unknown."""
        return self._shapes.get(tensor) or self.model.shape(tensor)

    def value(self, tensor: str) -> npt.NDArray[Any] | None:
        """Return the values of a shape tensor or constant; None if unknown."""
        return self._values[tensor] if tensor in self._values else self.model.constant(tensor)

    def rank(self, tensor: str) -> int:
        """Return the number of axes of a tensor, 0 if unknown."""
        return len(self.shape(tensor) or ())

    def map_upstream(self, node: Node, position: int, places: Places) -> list[Places] | None:
        """Return the channels of the entries of each data input, given those of one output.

        `position` is the index of the output. None if the entries cannot be traced
        (:meth:`_trace_entries`), or if an input entry would belong to two channels.
        """
        trace = self._trace_entries(node)
        if trace is None:
            return None
        shapes, outputs = trace
        entries = outputs[position]
        sizes = [math.prod(shape) for shape in shapes]
        flat = np.full(sum(sizes), -1)
        expanded = np.broadcast_to(places, entries.shape)
        flat[entries] = expanded
        if (flat[entries] != expanded).any():
            return None
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [
            compact_places(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)
        ]

    def map_downstream(self, node: Node, position: int, places: Places) -> list[Places] | None:
        """Return the channels of the entries of each output, given those of one input.

        `position` is the index of the input. None if it is not a data input, or if the entries
        cannot be traced (:meth:`_trace_entries`).
        """
        trace = self._trace_entries(node)
        if trace is None or position >= len(trace[0]):
            return None
        shapes, outputs = trace
        parts = [np.full(math.prod(shape), -1) for shape in shapes]
        parts[position] = np.broadcast_to(places, shapes[position]).ravel()
        flat = np.concatenate(parts)
        return [compact_places(flat[entries]) for entries in outputs]

    def _trace_entries(self, node: Node) -> tuple[list[tuple[int, ...]], list[Places]] | None:
        """Return the shapes of a node's data inputs, and the source of each output entry.

        A source is the index of an input entry in the concatenation of all flattened data inputs.
        None if the node does more than move values, if the shape of a data input or the value of
        another input is unknown, if a data input is empty or too large, or if onnx cannot run the
        node.
        """
        operator = operator_of(node)
        moves_values = operator.joins or operator.cuts or node.op in MOVES
        if not moves_values or node.domain not in STANDARD:
            return None
        data_inputs = len(node.inputs) if operator.joins else 1
        shapes: list[tuple[int, ...]] = []
        feeds: dict[str, npt.NDArray[Any]] = {}
        start = 0
        for position, tensor in enumerate(node.inputs):
            if position < data_inputs:
                shape = self._complete_shape(tensor)
                if shape is None:
                    return None
                shapes.append(shape)
                count = math.prod(shape)
                feeds[f"{position}"] = np.arange(start, start + count).reshape(shape)
                start += count
            elif tensor:
                value = self.value(tensor)
                if value is None:
                    return None
                feeds[f"{position}"] = value
        outputs = self._run_node(node, feeds)
        return (shapes, outputs) if outputs else None

    def _run_node(self, node: Node, feeds: dict[str, npt.NDArray[Any]]) -> list[Places]:
        from onnx.reference import ReferenceEvaluator

        names = [f"{p}" if t else "" for p, t in enumerate(node.inputs)]
        alone = copy_node(node.proto, names, node.outputs)
        try:
            outputs = ReferenceEvaluator(alone, opsets={"": self.model.opset}).run(None, feeds)
        except Exception:  # unsupported operator, or invalid values in a damaged model
            return []
        return [np.asarray(output) for output in outputs or ()]

    def _complete_shape(self, tensor: str) -> tuple[int, ...] | None:
        shape = self.shape(tensor) or ()
        sizes = tuple(size for size in shape if size is not None)
        is_complete = bool(shape) and len(sizes) == len(shape)
        return sizes if is_complete and 0 < math.prod(sizes) <= _MAX_ENTRIES else None


def has_axes_of_places(shape: tuple[int | None, ...], places: Places) -> bool:
    """Return whether `places` broadcasts to a shape. A dynamic size fits only a size of 1."""
    if len(shape) < places.ndim:
        return False
    axes = zip(reversed(places.shape), reversed(shape), strict=False)
    return all(size in (1, length) for size, length in axes)

"""Shapes of tensors that depend on computed values: exports that split and reshape by ``Shape`` arithmetic.

onnx's inference stops at a Slice whose bounds are computed. Here values of small tensors are worked out on the way,
node by node, and each node's own inference is asked with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.model.external import has_data
from qdqtool.model.graph import Model, Node
from qdqtool.model.inference import stays_small

Array = npt.NDArray[Any]
Known = tuple[int, ...]
_SMALL = 4096  # elements; larger values are no shapes


class Shapes:
    """Complete shapes of a model's tensors, as far as they can be known."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def get(self, tensor: str) -> Known | None:
        """Dimensions of a tensor; None when one is not known."""
        shape = self._plain(tensor)
        return shape if shape is not None else self._worked_out.get(tensor)

    def _plain(self, tensor: str) -> Known | None:
        shape = self._model.shape(tensor)
        if shape is None or any(d is None for d in shape):
            return None
        return tuple(d for d in shape if d is not None)

    @functools.cached_property
    def _worked_out(self) -> dict[str, Known]:
        """One pass over the graph; only nodes whose outputs are not known are inferred again."""
        model = self._model
        found: dict[str, Known] = {}
        values: dict[str, Array] = {}
        for node in model.ordered:
            for output in node.outputs:
                if not output or node.domain not in ("", "ai.onnx"):
                    continue
                known = self._plain(output)
                if known is None:
                    known = self._inferred(node, found, values).get(output)
                    if known is not None:
                        found[output] = known
            value = self._value(node, found, values)
            if value is not None and value.size <= _SMALL:
                values[node.output] = value
                found.setdefault(node.output, value.shape)
        return found

    def _constant(self, tensor: str, values: dict[str, Array]) -> Array | None:
        if tensor in values:
            return values[tensor]
        shape = self._model.constant_shape(tensor)
        if shape is None or int(np.prod(shape, dtype=np.float64)) > _SMALL:
            return None
        stored = self._model.constant_proto(tensor)
        if stored is not None and not has_data(stored):
            return None
        return self._model.constant(tensor)

    def _inferred(self, node: Node, found: dict[str, Known], values: dict[str, Array]) -> dict[str, Known]:
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for tensor in node.inputs:
            if not tensor:
                continue
            shape = self._plain(tensor) or found.get(tensor)
            value = self._constant(tensor, values)
            kind = self._model.elem_type(tensor) or (
                helper.np_dtype_to_tensor_dtype(value.dtype) if value is not None else TensorProto.FLOAT
            )
            if shape is None and value is None:
                return {}
            types[tensor] = helper.make_tensor_type_proto(
                kind, value.shape if shape is None and value is not None else shape
            )
            if value is not None:
                data[tensor] = numpy_helper.from_array(np.ascontiguousarray(value), tensor)
        if not stays_small(node.proto, types, self._model.opset):
            return {}
        try:
            schema = onnx.defs.get_schema(node.op, self._model.opset, "")
            result = onnx.shape_inference.infer_node_outputs(schema, node.proto, types, data)
        except Exception:  # a custom or odd node: its shape stays unknown
            return {}
        shapes: dict[str, Known] = {}
        for name, kind_of in result.items():
            tensor_type = kind_of.tensor_type
            if tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in tensor_type.shape.dim):
                shapes[name] = tuple(d.dim_value for d in tensor_type.shape.dim)
        return shapes

    def _value(self, node: Node, found: dict[str, Known], values: dict[str, Array]) -> Array | None:
        if node.op == "Shape" and not node.attributes:
            shape = self._plain(node.input(0)) or found.get(node.input(0))
            return None if shape is None else np.asarray(shape, np.int64)
        work = _OPERATORS.get(node.op)
        if work is None:
            return None
        inputs = [self._constant(t, values) for t in node.inputs if t]
        if not inputs or any(i is None for i in inputs):
            return None
        try:
            return np.asarray(work(node, *inputs))
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
            return None


def _divide(_: Node, a: Array, b: Array) -> Array:
    return a // b if np.issubdtype(a.dtype, np.integer) else a / b


def _axes(node: Node, given: tuple[Array, ...]) -> tuple[int, ...]:
    axes = given[0].reshape(-1).tolist() if given else node.attributes.get("axes", [])
    return tuple(int(a) for a in axes)


def _slice(
    node: Node, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    places = range(len(starts)) if axes is None else axes.reshape(-1).tolist()
    index: list[slice] = [slice(None)] * x.ndim
    for i, axis in enumerate(places):
        index[int(axis)] = slice(int(starts[i]), int(ends[i]), int(steps[i]) if steps is not None else 1)
    return x[tuple(index)]


_OPERATORS: dict[str, Callable[..., Array]] = {
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Mul": lambda _, a, b: a * b,
    "Div": _divide,
    "Floor": lambda _, a: np.floor(a),
    "Cast": lambda node, a: a.astype(helper.tensor_dtype_to_np_dtype(node.integer("to", 7))),
    "Identity": lambda _, a: a,
    "Gather": lambda node, a, i: np.take(a, i.astype(np.int64), axis=node.integer("axis", 0)),
    "Concat": lambda node, *a: np.concatenate(a, axis=node.integer("axis", 0)),
    "Unsqueeze": lambda node, a, *axes: np.expand_dims(a, _axes(node, axes)),
    "Squeeze": lambda node, a, *axes: np.squeeze(a, axis=_axes(node, axes) or None),
    "Slice": _slice,
}

"""Models to estimate: with all shapes known, without their Q/DQ, and with as much Q/DQ as can help."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from qdqtool.errors import QdqtoolError
from qdqtool.findings.left_float import nothing_to_quantize
from qdqtool.ir.editor import placeholder
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import FLOATS, is_qdq
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.proto.external_data import has_data
from qdqtool.proto.shapes import infer_node
from qdqtool.proto.slim import without_large_weights
from qdqtool.proto.subgraphs import STANDARD
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note, Remark

_MOST_FILLED = 1 << 28  # bytes of weights that stand in for those that are not available


def has_qdq(model: Model) -> bool:
    """Whether the model has any Q or DQ."""
    return any(is_qdq(node) for node in model.nodes)


def float_twin(model: Model) -> Model:
    """The same network without its Q and DQ, constants without data where they are large; the model is not changed."""
    found = remove_quantizers(
        Model(light(model), model.path, types=model), weights=True, stored=placeholder
    )
    found.sha256 = model.sha256
    return found


def light(model: Model, only: Container[str] | None = None) -> onnx.ModelProto:
    """A model's message with placeholders for its large constants, or for those among the constants named."""
    proto = without_large_weights(model.proto, only=only)
    proto.metadata_props.extend(model.proto.metadata_props)
    for tensor, given in zip(proto.graph.initializer, model.proto.graph.initializer, strict=True):
        if has_data(given) and not has_data(tensor):
            tensor.CopyFrom(placeholder(tensor.name, tensor.dims, tensor.data_type))
    return proto


def with_weights(model: Model) -> Model | None:
    """A float twin whose placeholders hold ones, for what looks at weights; None where they would take much memory."""
    missing = [t for t in model.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    if sum(4 * math.prod(t.dims) for t in missing) > _MOST_FILLED:
        return None
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type in FLOATS:
            filled = np.ones(tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(filled, tensor.name))
    return Model(proto, model.path, sha256=model.sha256, types=model)


def best_placement(model: Model, target: Target) -> Model:
    """A float network with Q/DQ as ``insert`` would put them; the scales are made up, one for each scale group.

    Raises:
        ModelError: Nothing can be quantized.
    """
    from qdqtool.insertion.api import prepared
    from qdqtool.insertion.fp16 import convert_to_fp16
    from qdqtool.insertion.options import PlacementOptions
    from qdqtool.insertion.rules import choose_placement, sketch
    from qdqtool.insertion.scales import find_scale_groups

    work, half, _, _ = prepared(model, model, target, PlacementOptions().weights, None)
    _, placement = choose_placement(work, PlacementOptions(), target)
    if not placement.inputs:
        raise nothing_to_quantize(placement.skipped, model.path or "model")
    placed = sketch(work, placement, find_scale_groups(work, placement.inputs))
    if half:
        for tensor in placed.proto.graph.initializer:
            if not has_data(tensor):
                tensor.CopyFrom(placeholder(tensor.name, tensor.dims, tensor.data_type))
        convert_to_fp16(placed)
    return placed


def half_twin(model: Model, target: Target) -> Model | None:
    """A float network as a file in FP16, as ``insert`` would write it; None where it cannot be converted."""
    from qdqtool.insertion.api import prepared
    from qdqtool.insertion.fp16 import convert_to_fp16

    try:
        work, half, _, _ = prepared(model, model, target, "float", None)
        return work if half and convert_to_fp16(work) else None
    except QdqtoolError:
        return None


def resolved(model: Model, batch: int = 1) -> tuple[Model, list[Note]]:
    """The model with its symbolic input dimensions chosen, and what was chosen.

    The first dimension becomes ``batch``, height and width those of the ``imgsz`` metadata, else 640 where
    it has four dimensions.
    """
    notes: list[Note] = []
    chosen: dict[str, list[int]] = {}
    size = _image_size(model)
    for name in model.inputs:
        shape = model.shape(name)
        if shape is None or all(d is not None and d > 0 for d in shape):
            continue
        dims = [
            d if d else (batch if i == 0 else size[i - 2] if len(shape) == 4 and i >= 2 else 1)
            for i, d in enumerate(shape)
        ]
        chosen[name] = dims
        notes.append(Remark.INPUT_TAKEN(name=name, shape=[str(d) for d in dims]))
    if not chosen:
        return model, notes
    proto = light(model)
    del proto.graph.value_info[:]
    for value in proto.graph.input:
        if value.name in chosen:
            shape = (
                value.type.tensor_type.shape
            )  # written anew: an output of that name may have given another rank
            del shape.dim[:]
            shape.dim.extend(
                onnx.TensorShapeProto.Dimension(dim_value=d) for d in chosen[value.name]
            )
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    return Model(proto, model.path, sha256=model.sha256), notes


def _image_size(model: Model) -> tuple[int, int]:
    digits = "".join(
        c if c.isdigit() else " " for c in model.metadata.get("imgsz", "")[:100]
    ).split()
    found = [int(d) for d in digits if 0 < int(d) <= 65536]
    return (found[0], found[-1]) if found else (640, 640)


# Shapes that depend on computed values -------------------------------------------------------------------------------

Array = npt.NDArray[Any]
Known = tuple[int, ...]
_SMALL = 4096  # elements; larger values are no shapes


class Shapes:
    """Complete shapes of a model's tensors, as far as they can be known."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._found: dict[str, Known] = {}
        self._values: dict[str, Array] = {}
        self._walked = False

    def get(self, tensor: str) -> Known | None:
        """Dimensions of a tensor; None when one is not known."""
        shape = self._plain(tensor)
        if shape is None and not self._walked:
            self._walked = True
            self._walk()
        return shape if shape is not None else self._found.get(tensor)

    def _plain(self, tensor: str) -> Known | None:
        shape = self._model.shape(tensor)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def _known(self, tensor: str) -> Known | None:
        return self._plain(tensor) or self._found.get(tensor)

    def _walk(self) -> None:
        """One pass over the graph; only nodes whose outputs are not known are inferred again."""
        for node in self._model.ordered:
            for output in node.outputs:
                if output and node.domain in STANDARD and self._plain(output) is None:
                    known = self._inferred(node).get(output)
                    if known is not None:
                        self._found[output] = known
            value = self._value(node)
            if value is not None and value.size <= _SMALL:
                self._values[node.output] = value
                self._found.setdefault(node.output, value.shape)

    def _constant(self, tensor: str) -> Array | None:
        if tensor in self._values:
            return self._values[tensor]
        shape = self._model.constant_shape(tensor)
        if shape is None or int(np.prod(shape, dtype=np.float64)) > _SMALL:
            return None
        stored = self._model.constant_proto(tensor)
        return None if stored is not None and not has_data(stored) else self._model.constant(tensor)

    def _inferred(self, node: Node) -> dict[str, Known]:
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for tensor in filter(None, node.inputs):
            shape, value = self._known(tensor), self._constant(tensor)
            if value is not None:
                data[tensor] = numpy_helper.from_array(np.ascontiguousarray(value), tensor)
                shape = value.shape if shape is None else shape
            if shape is None:
                return {}
            kind = self._model.elem_type(tensor) or (
                TensorProto.FLOAT if value is None else helper.np_dtype_to_tensor_dtype(value.dtype)
            )
            types[tensor] = helper.make_tensor_type_proto(kind, shape)
        result = infer_node(node.proto, types, self._model.opset, data)
        dims = {
            name: kind.tensor_type.shape.dim
            for name, kind in result.items()
            if kind.tensor_type.HasField("shape")
        }
        return {
            name: tuple(d.dim_value for d in found)
            for name, found in dims.items()
            if all(d.HasField("dim_value") for d in found)
        }

    def _value(self, node: Node) -> Array | None:
        if node.op == "Shape" and not node.attributes:
            shape = self._known(node.input(0))
            return None if shape is None else np.asarray(shape, np.int64)
        work = _OPERATORS.get(node.op)
        inputs = [] if work is None else [self._constant(t) for t in node.inputs if t]
        if work is None or not inputs or any(i is None for i in inputs):
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
    node: Node,
    x: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    places = range(len(starts)) if axes is None else axes.reshape(-1).tolist()
    index: list[slice] = [slice(None)] * x.ndim
    for i, axis in enumerate(places):
        index[int(axis)] = slice(
            int(starts[i]), int(ends[i]), int(steps[i]) if steps is not None else 1
        )
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

"""How much memory and work a network takes to run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from qdqtool.model.graph import Model, Node, without_large_weights


@dataclass(frozen=True, slots=True)
class Load:
    """What a run takes.

    Attributes:
        peak_bytes: Of the activations that live at the same time, weights apart.
        operations: Multiplications of weighted operators, and one for each element that another operator writes.
    """

    peak_bytes: int
    operations: int


def peak_bytes(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes of the activations that live at the same time; see :func:`load_of`."""
    return load_of(proto, shapes).peak_bytes


def load_of(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Load:
    """What a run of a network takes.

    Inputs and outputs live from the beginning and to the end. What the file says of dimensions is not believed but for
    inputs whose shape is not given; a tensor whose shape cannot be inferred counts nothing, an open dimension 1.

    Args:
        proto: The network.
        shapes: What its inputs will be.
    """
    slim = without_large_weights(proto)
    graph = slim.graph
    del graph.value_info[:]
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for value in graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, list(shapes[value.name])))
    model = Model(slim, sha256="edited")
    last: dict[str, int] = {}
    for position, node in enumerate(model.ordered):
        last.update(dict.fromkeys((*node.inputs, *node.captured), position))
    last.update(dict.fromkeys((*model.inputs, *model.outputs), len(model.ordered)))
    sizes = {t: bytes_of(model, t) for t in (*model.inputs, *model.producers)}
    operations = 0
    live = peak = sum(sizes[t] for t in model.inputs)
    for position, node in enumerate(model.ordered):
        live += sum(sizes[t] for t in node.outputs if t)
        operations += _operations(model, node)
        peak = max(peak, live)
        done = {t for t in (*node.inputs, *node.captured, *node.outputs) if last.get(t, position) == position}
        live -= sum(sizes.get(t, 0) for t in done)
    return Load(peak, operations)


def _operations(model: Model, node: Node) -> int:
    """One for each element written, times those read for each where an operator sums products."""
    written = sum(_elements(model.shape(t)) for t in node.outputs if t)
    if len(node.inputs) < 2:
        return written
    data, weights = (model.shape(t) for t in node.inputs[:2])
    if data is None or weights is None:
        return written
    if node.op in ("Conv", "ConvInteger"):
        return written * _elements(weights[1:])
    if node.op == "ConvTranspose":
        return _elements(data) * _elements(weights[1:])
    if node.op in ("MatMul", "MatMulInteger") and data:
        return written * _elements(data[-1:])
    if node.op == "Gemm" and len(data) == 2:
        return written * _elements(data[:1] if node.attributes.get("transA", 0) else data[1:])
    return written


def _elements(shape: Sequence[int | None] | None) -> int:
    return 0 if shape is None else math.prod(max(d or 1, 1) for d in shape)


def bytes_of(model: Model, tensor: str) -> int:
    """Bytes of an activation; open dimensions count as 1, a constant or a tensor of unknown shape counts nothing."""
    shape = None if model.is_constant(tensor) else model.shape(tensor)
    if shape is None:
        return 0
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(model.elem_type(tensor)).itemsize
    except (KeyError, TypeError):
        width = 4
    return int(width) * _elements(shape)

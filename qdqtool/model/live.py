"""How much memory and work a network takes to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx
from onnx import numpy_helper

from qdqtool.base import budgets
from qdqtool.errors import ModelError
from qdqtool.model.constants import Constants
from qdqtool.model.graph import Model, Node
from qdqtool.model.multiplications import elements, known_number, multiplications, one_number
from qdqtool.model.slim import without_large_weights
from qdqtool.model.subgraphs import held


@dataclass(frozen=True, slots=True)
class Load:
    """What a run takes.

    Attributes:
        peak_bytes: Of the activations that live at the same time, weights apart.
        operations: Multiplications (:mod:`qdqtool.model.multiplications`), and of loops so many for each node inside,
            as often as they are known to turn.
    """

    peak_bytes: int
    operations: int


def peak_bytes(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes of the activations that live at the same time; see :func:`load_of`."""
    return peak_of(_fed(proto, shapes))


def load_of(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Load:
    """What a run of a network takes.

    What the file says of dimensions is not believed but for inputs whose shape is not given.

    Args:
        proto: The network.
        shapes: What its inputs will be.
    """
    model = _fed(proto, shapes)
    constants, operations = Constants(model), 0
    for node in model.ordered:
        operations += _of_loop(model, node, constants) if node.op in _WITH_GRAPHS else 0
        operations += multiplications(model, node, constants)
    return Load(peak_of(model), operations)


def _fed(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Model:
    """A network with inputs of these shapes, which knows no others but by inference."""
    slim = without_large_weights(proto)
    graph = slim.graph
    del graph.value_info[:]
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for value in graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(
                onnx.helper.make_tensor_value_info(value.name, kind, list(shapes[value.name]))
            )
    return Model(slim, sha256="edited")


def peak_of(model: Model) -> int:
    """Bytes of the activations that live at the same time.

    Inputs and outputs live from the beginning and to the end. A tensor whose shape is not known counts nothing, an open
    dimension 1.
    """
    last: dict[str, int] = {}
    for position, node in enumerate(model.ordered):
        last.update(dict.fromkeys((*node.inputs, *node.captured), position))
    last.update(dict.fromkeys((*model.inputs, *model.outputs), len(model.ordered)))
    sizes = {t: bytes_of(model, t) for t in (*model.inputs, *model.producers)}
    live = peak = sum(sizes[t] for t in model.inputs)
    for position, node in enumerate(model.ordered):
        live += sum(sizes[t] for t in node.outputs if t)
        peak = max(peak, live)
        done = {
            t
            for t in (*node.inputs, *node.captured, *node.outputs)
            if last.get(t, position) == position
        }
        live -= sum(sizes.get(t, 0) for t in done)
    return peak


def check_loops(model: Model) -> None:
    """Refuses a model whose loops turn so often that one run would not end.

    Raises:
        ModelError: One takes more than :data:`qdqtool.base.budgets.LOOP_WORK`.
    """
    constants = Constants(model)
    for node in model.nodes:
        if node.op in _WITH_GRAPHS and _of_loop(model, node, constants) > budgets.LOOP_WORK:
            raise ModelError(
                f"node '{node.name}' ({node.op}) turns so often that one run "
                "would take days; check its trip count, or cut it off",
                model.path or "model",
                code="loop-too-long",
                node=node.name,
            )


def _of_loop(model: Model, node: Node, constants: Constants) -> int:
    return _inner_operations(node.proto, lambda t: known_number(constants, t), model.shape)


_WITH_GRAPHS = ("Loop", "Scan", "If", "SequenceMap")
_Number = Callable[[str], "int | None"]
_Shape = Callable[[str], "Sequence[int | None] | None"]


def _inner_operations(node: onnx.NodeProto, number: _Number, shape: _Shape) -> int:
    """What the graphs inside a node take: shapes are not known there, so that each node counts alike."""
    work = 0
    for graph in (g for a in node.attribute for g in held(a)):
        known = {t.name: t for t in graph.initializer}
        known |= {
            n.output[0]: a.t
            for n in graph.node
            if n.op_type == "Constant" and n.output
            for a in n.attribute
            if a.name == "value"
        }

        def inside(name: str, known: Mapping[str, onnx.TensorProto] = known) -> int | None:
            return one_number(_array(known[name])) if name in known else number(name)

        each = sum(
            budgets.INNER_NODE + _inner_operations(n, inside, lambda name: None) for n in graph.node
        )
        work += each * _turns(node, graph, number, inside, shape)
    return work


def _turns(
    node: onnx.NodeProto, body: onnx.GraphProto, outside: _Number, inside: _Number, shape: _Shape
) -> int:
    """How often a Loop or Scan surely turns; 1 where only a run tells, as where a condition may end it."""
    if node.op_type == "Scan":
        count = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        axes = next((list(a.ints) for a in node.attribute if a.name == "scan_input_axes"), [0])
        first = shape(node.input[-count]) if 0 < count <= len(node.input) else None
        long = first[axes[0]] if first and axes and -len(first) <= axes[0] < len(first) else None
        return max(1, long or 1)
    if node.op_type != "Loop" or len(body.input) < 2 or not body.output:
        return 1
    ends, made = body.output[0].name, {t: n for n in body.node for t in n.output}
    while ends in made and made[ends].op_type == "Identity" and made[ends].input:
        ends = made.pop(ends).input[0]
    goes_on = ends == body.input[1].name or inside(ends) == 1
    starts = not node.input[1:2] or not node.input[1] or outside(node.input[1]) == 1
    turns = outside(node.input[0]) if node.input and goes_on and starts else None
    return max(1, turns or 1)


def _array(tensor: onnx.TensorProto) -> npt.NDArray[Any] | None:
    try:
        return numpy_helper.to_array(tensor) if math.prod(tensor.dims) == 1 else None
    except (ValueError, TypeError, KeyError):  # a damaged one
        return None


def bytes_of(model: Model, tensor: str) -> int:
    """Bytes of an activation; open dimensions count as 1, a constant or a tensor of unknown shape counts nothing."""
    shape = None if model.is_constant(tensor) else model.shape(tensor)
    if shape is None:
        return 0
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(model.elem_type(tensor)).itemsize
    except (KeyError, TypeError):
        width = 4
    return int(width) * elements(shape)

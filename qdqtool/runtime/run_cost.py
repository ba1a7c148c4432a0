"""Estimate memory and work of one run of a network in onnxruntime, before the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.input_shapes import set_input_shapes
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import DOMAINS, nested_graphs
from qdqtool.util import limits

_PRODUCTS = ("Attention", "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul")


@dataclass(frozen=True, slots=True)
class RunCost:
    """Memory and work of one run.

    Attributes:
        peak_bytes: Maximum number of bytes of activations in memory at the same time, without
            weights.
        operations: Sum over all nodes of the number of multiplications, or of the number of
            elements read or written if that is larger.
    """

    peak_bytes: int
    operations: int


def estimate_run_cost(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> RunCost:
    """Estimate memory and work of a run.

    The shapes in the file are not trusted. All shapes are inferred from the input shapes.

    Args:
        proto: The network.
        shapes: Shape of each input in the run.
    """
    model = with_input_shapes(proto, shapes)
    operations = 0
    for node in model.ordered:
        operations += _count_operations(model, node) + _count_subgraph_operations(node.proto)
    return RunCost(peak_activation_bytes(model), operations)


def with_input_shapes(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Model:
    """Return a copy of a network with the given input shapes.

    All other shapes are inferred from the input shapes. The copy has no data of large weights.
    """
    slim = strip_large_weights(proto)
    set_input_shapes(slim, shapes)
    return Model(slim, sha256="edited")


def peak_activation_bytes(model: Model) -> int:
    """Return the maximum number of bytes of activations in memory at the same time.

    Inputs and outputs remain in memory until the end. A tensor of unknown shape counts as 0 bytes,
    and a dynamic dimension as 1.
    """
    last_use: dict[str, int] = {}
    for position, node in enumerate(model.ordered):
        last_use.update(dict.fromkeys((*node.inputs, *node.captured), position))
    last_use.update(dict.fromkeys((*model.inputs, *model.outputs), len(model.ordered)))
    sizes = {t: activation_bytes(model, t) for t in (*model.inputs, *model.producers)}
    live = peak = sum(sizes[t] for t in model.inputs)
    for position, node in enumerate(model.ordered):
        live += sum(sizes[t] for t in node.outputs if t)
        peak = max(peak, live)
        tensors = {*node.inputs, *node.captured, *node.outputs}
        ended = [t for t in tensors if last_use.get(t, position) == position]
        live -= sum(sizes.get(t, 0) for t in ended)
    return peak


def activation_bytes(model: Model, tensor: str) -> int:
    """Return the size of an activation in bytes; 0 for constants and unknown shapes."""
    shape = None if model.is_constant(tensor) else model.shape(tensor)
    if shape is None:
        return 0
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(model.elem_type(tensor)).itemsize
    except (KeyError, TypeError):
        width = 4
    return int(width) * _count_elements(shape)


def _count_elements(shape: Iterable[int | None] | None) -> int:
    """Return the number of elements: dynamic dimensions count as 1, an unknown shape as 0."""
    return 0 if shape is None else math.prod(max(d or 1, 1) for d in shape)


def _dimension_sizes(model: Model, tensor: str) -> list[int]:
    return [max(d or 1, 1) for d in model.shape(tensor) or ()]


def _count_operations(model: Model, node: Node) -> int:
    """Return the number of multiplications of a node, or of elements moved if that is larger."""
    written = sum(_count_elements(model.shape(t)) for t in filter(None, node.outputs))
    moved = max(written, sum(_count_elements(model.shape(t)) for t in filter(None, node.inputs)))
    if node.domain not in DOMAINS:
        return moved
    weights = _dimension_sizes(model, node.input(3 if node.op == "QLinearConv" else 1))
    if node.op in ("Conv", "ConvInteger", "QLinearConv", "DeformConv"):
        return max(moved, written * math.prod(weights[1:]))
    if node.op == "ConvTranspose":
        return max(
            moved, math.prod(_dimension_sizes(model, node.input(0))) * math.prod(weights[1:])
        )
    if node.op in _PRODUCTS:
        inner = max(_dimension_sizes(model, node.input(0))[-2:], default=1)
        return max(moved, written * inner)
    if node.op in ("GRU", "LSTM", "RNN"):
        state = _dimension_sizes(model, node.input(2))
        steps = math.prod(_dimension_sizes(model, node.input(0))[:2])
        return max(moved, steps * (math.prod(weights) + math.prod(state)))
    return moved


def _count_subgraph_operations(node: onnx.NodeProto) -> int:
    """Return the work of a node's subgraphs: a fixed number per inner node, for one iteration."""
    return limits.INNER_NODE * sum(len(graph.node) for graph in nested_graphs([node]))

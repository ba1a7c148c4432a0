"""Searches in a float graph, for the placement of Q/DQ pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx

from qdqtool.ir.graph import Model
from qdqtool.ir.operators import commuting_inputs
from qdqtool.patterns.fake_quantizers import ATEN
from qdqtool.patterns.pointwise import activation_outputs, pointwise_region


def walk_tensors(start: str, neighbors: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield `start` and all tensors that repeated calls of `neighbors` reach, each once."""
    visited: set[str] = set()
    stack = [start]
    while stack:
        name = stack.pop()
        if name not in visited:
            visited.add(name)
            yield name
            stack.extend(neighbors(name))


def commuting_outputs(model: Model, tensor: str) -> Iterator[str]:
    """Yield the outputs of those consumers that only move a tensor's values (Reshape ...)."""
    for consumer in model.consumers(tensor):
        if tensor in commuting_inputs(model, consumer):
            yield from consumer.outputs


def branch_lengths(model: Model, left: str, right: str) -> tuple[int, int]:
    """Return the lengths of the branches that lead to two tensors.

    A branch has the nodes that are upstream of only one of the tensors. Its length is the number of
    nodes on its longest path.
    """
    left_nodes, right_nodes = _upstream_nodes(model, left), _upstream_nodes(model, right)
    lengths: dict[str, int] = {}
    for node in model.ordered:
        is_on_one_side = (node.index in left_nodes) != (node.index in right_nodes)
        if is_on_one_side and not model.is_constant(node.output):
            length = 1 + max((lengths.get(t, 0) for t in node.inputs), default=0)
            lengths.update(dict.fromkeys(node.outputs, length))
    return lengths.get(left, 0), lengths.get(right, 0)


def _upstream_nodes(model: Model, tensor: str) -> set[int]:
    names = walk_tensors(
        tensor, lambda t: () if (node := model.producer(t)) is None else node.inputs
    )
    return {node.index for t in names if (node := model.producer(t)) is not None}


def has_only_quantized_consumers(
    model: Model, tensor: str, quantized_consumers: Callable[[str], set[int]]
) -> bool:
    """Return whether every consumer of a tensor reads it dequantized.

    False for a network output. If a consumer is the activation or only moves values, its output is
    checked in the same way. `quantized_consumers` returns the indices of the nodes that will read a
    tensor dequantized.
    """
    visited: set[str] = set()
    stack = [tensor]
    while stack:
        name = stack.pop()
        if name in visited:
            continue
        visited.add(name)
        if model.is_output(name):
            return False
        activations = list(activation_outputs(model, name))
        stack.extend(activations)
        covered = quantized_consumers(name) | _activation_nodes(model, name, activations)
        for consumer in model.consumers(name):
            if consumer.index in covered:
                continue
            if name not in commuting_inputs(model, consumer):
                return False
            stack.extend(consumer.outputs)
    return True


def _activation_nodes(model: Model, tensor: str, outputs: Iterable[str]) -> set[int]:
    indices: set[int] = set()
    for output in outputs:
        last = model.producer(output)
        if last is not None:
            indices.update(n.index for n in pointwise_region(model, tensor, last))
    return indices


def describe_hidden_layers(model: Model) -> str:
    """Return how to avoid an operator of ATen or onnxruntime, which may contain layers.

    The text is empty if the network has no such operator.
    """
    for node in model.nodes:
        if node.domain == ATEN:
            return f"'{node.name}' is an operator of ATen; export without the fallback to ATen"
        if node.domain.startswith("com.m") and not onnx.defs.has(node.op):
            return (
                f"'{node.name}' is the operator {node.op} of onnxruntime; give the model that "
                "onnxruntime has not optimized"
            )
    return ""

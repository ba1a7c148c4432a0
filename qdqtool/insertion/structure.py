"""Patterns in a float graph that placement has to know: which operators commute with Q, what an activation is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from qdqtool.graph import Model, Node

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
POOLS = ("GlobalAveragePool", "AveragePool")

# Pointwise operators with one data input that TensorRT runs behind a convolution in the same layer.
ACTIVATIONS = frozenset(
    {"Relu", "LeakyRelu", "Clip", "PRelu", "Sigmoid", "Tanh", "Elu", "Selu", "Celu", "HardSigmoid", "HardSwish",
     "Softplus", "Softsign", "Mish", "Gelu", "Swish", "ThresholdedRelu"}
)  # fmt: skip
# Operators that only move values: Q(op(x)) = op(Q(x)). Concat and Resize are special, see commuting_inputs.
_MOVES = frozenset(
    {"MaxPool", "GlobalMaxPool", "Split", "Slice", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze",
     "Identity", "DepthToSpace", "SpaceToDepth", "Dropout"}
)  # fmt: skip


def commuting_inputs(node: Node) -> tuple[str, ...]:
    """The data inputs that a Q behind ``node`` moves up to; empty when the operator does not commute with Q.

    TensorRT moves a Q up through an operator that only moves values, and merges it with the Q of its neighbours where
    the scales are equal (developer guide, "Q/DQ propagation"; seen for MaxPool, Resize, Flatten, Slice and Concat).
    """
    if node.domain not in ("", "ai.onnx"):
        return ()
    if node.op == "Concat":
        return tuple(t for t in node.inputs if t)
    if node.op in ("Resize", "Upsample"):
        mode = node.attributes.get("mode", "nearest")
        return node.inputs[:1] if mode == "nearest" else ()
    return node.inputs[:1] if node.op in _MOVES else ()


def activation_input(model: Model, node: Node) -> str | None:
    """The tensor that an activation works on: ``x`` of ``Relu(x)`` or of ``Mul(x, Sigmoid(x))``; None for others."""
    if node.op in ACTIVATIONS:
        return str(node.input(0))
    if node.op == "Mul" and len(node.inputs) == 2:
        for gate, data in (node.inputs, node.inputs[::-1]):
            producer = model.producer(gate)
            if producer is not None and producer.op in ("Sigmoid", "HardSigmoid") and producer.input(0) == data:
                return str(data)
    return None


def activation_outputs(model: Model, tensor: str) -> Iterator[str]:
    """Results of the activations that read ``tensor``; SiLU gives its Mul's output, not its Sigmoid's."""
    for reader in dict.fromkeys(model.readers(tensor)):
        if activation_input(model, reader) == tensor:
            gates = [r for r in model.readers(reader.output) if activation_input(model, r) == tensor]
            if not gates:
                yield reader.output


@dataclass(frozen=True)
class ConvBehind:
    """The convolution that makes one input of an Add."""

    node: Node
    activation: bool


def convolution_behind(model: Model, tensor: str, reader: Node) -> ConvBehind | None:
    """The Conv or ConvTranspose whose (activated) result only ``reader`` reads; None when there is none."""
    activation = False
    allowed = {reader.index}
    while True:
        if model.is_output(tensor) or any(r.index not in allowed for r in model.readers(tensor)):
            return None
        node = model.producer(tensor)
        if node is None:
            return None
        if node.op in ("Conv", "ConvTranspose"):
            return ConvBehind(node, activation)
        source = activation_input(model, node)
        if source is None and node.op == "BatchNormalization":
            source = node.input(0)
        elif source is not None:
            activation = True
        if source is None:
            return None
        allowed = {node.index}
        for gate in model.readers(source):  # the Sigmoid of a SiLU reads the convolution as well
            if gate.op in ("Sigmoid", "HardSigmoid") and gate.output in node.inputs:
                allowed.add(gate.index)
        tensor = source


def longest_path(model: Model, tensor: str, other: str) -> tuple[int, int]:
    """Longest way, in nodes, from each tensor up to what both descend from (their nearest common ancestor)."""
    mine, theirs = _ancestors(model, tensor), _ancestors(model, other)
    common = mine & theirs
    return _height(model, tensor, common), _height(model, other, common)


def _ancestors(model: Model, tensor: str) -> set[int]:
    seen: set[int] = set()
    stack = [tensor]
    while stack:
        node = model.producer(stack.pop())
        if node is not None and node.index not in seen:
            seen.add(node.index)
            stack.extend(t for t in node.inputs if t)
    return seen


def _height(model: Model, tensor: str, common: set[int]) -> int:
    memory: dict[str, int] = {}
    stack = [tensor]
    while stack:
        name = stack[-1]
        if name in memory:
            stack.pop()
            continue
        node = model.producer(name)
        if node is None or node.index in common:
            memory[name] = 0
            stack.pop()
            continue
        waiting = [t for t in node.inputs if t and t not in memory]
        if waiting:
            stack.extend(waiting)
            continue
        memory[name] = 1 + max((memory[t] for t in node.inputs if t), default=0)
        stack.pop()
    return memory[tensor]


def weight_axis(model: Model, node: Node) -> int | None:
    """The output-channel axis of a weighted node's weights; None when one scale for all of them is safer.

    Source: NVIDIA's rule of one scale per output channel (Conv axis 0, ConvTranspose axis 1, Gemm by transB). The axis
    1 of a grouped ConvTranspose counts the channels of one group only, so it gets one scale for all.
    """
    if node.op == "Conv":
        return 0
    if node.op == "ConvTranspose":
        return 1 if node.integer("group", 1) == 1 else None
    if node.op == "Gemm":
        return 0 if node.integer("transB", 0) else 1
    return 1


def counts_up(model: Model, tensor: str) -> bool:
    """Whether a constant holds 0, 1, 2, ... n-1 with n of at least 4: the bins of a DFL."""
    shape = model.constant_shape(tensor)
    if shape is None or not 4 <= int(np.prod(shape)) <= 256:
        return False
    value = model.constant(tensor)
    return value is not None and bool(np.array_equal(value.reshape(-1), np.arange(value.size)))

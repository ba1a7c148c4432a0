"""Detection heads, recognised by their structure; names play no part.

A YOLOv8-style head turns each box side's distribution over n bins into its mean: Softmax, then a product with the
constants 0 ... n-1 (a 1x1 convolution in Ultralytics' exports). That product is the DFL. The bare convolutions that
feed the Softmax are the box outputs, those beside them in the same Concat or Split are the class outputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from qdqtool.graph import Model, Node
from qdqtool.onnxgraph.pointwise import activation_outputs, region, run_time_inputs
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import WEIGHTED, inputs_behind_q, of, rearranges

_Range = tuple[int, int] | None  # channels [from, to) of axis 1; None for all of them


@dataclass
class Head:
    """Convolutions of a detection head, by node index.

    Attributes:
        dfl: The DFL convolutions (or MatMuls).
        boxes: Last convolutions of the box branches.
        finals: All convolutions with no other convolution behind them, the DFL apart.
    """

    dfl: set[int] = field(default_factory=set)
    boxes: set[int] = field(default_factory=set)
    finals: set[int] = field(default_factory=set)


def find_head(model: Model) -> Head:
    """Finds the head by structure; names play no part."""
    head = Head()
    softmaxes = [n for n in model.ordered if n.op == "Softmax"]
    for softmax in softmaxes:
        products = _bin_products(model, softmax)
        if not products:
            continue
        head.dfl.update(n.index for n in products)
        head.boxes.update(convolutions_above(model, softmax.input(0)))
    head.finals = _finals(model, head.dfl)
    return head


def _bin_products(model: Model, softmax: Node) -> list[Node]:
    """Conv, MatMul or Mul nodes behind a Softmax that multiply with 0, 1, ... n-1."""
    found = []
    queue = [softmax.output]
    for tensor in queue:
        for reader in model.readers(tensor):
            known = of(reader)
            multiplies = known.weights is not None or known.operation == "PROD"
            if multiplies and any(
                counts_up(model, t) for t in reader.inputs if t and t != tensor
            ):
                found.append(reader)
            elif rearranges(reader) or known.joins or known.cuts:
                queue.extend(reader.outputs)
    return found


def convolutions_above(model: Model, tensor: str) -> set[int]:
    """Weighted nodes that make the channels of ``tensor``, followed up through operators that only move values."""
    found: set[int] = set()
    seen: set[tuple[str, _Range]] = set()
    stack: list[tuple[str, _Range]] = [(tensor, None)]
    while stack:
        name, channels = stack.pop()
        if (name, channels) in seen:
            continue
        seen.add((name, channels))
        node = model.producer(name)
        if node is None:
            continue
        known = of(node)
        if known.weights is not None:
            found.add(node.index)
        elif known.joins:
            stack.extend(_concat_inputs(model, node, channels))
        elif known.cuts:
            part = _slice_range(model, node, channels) if node.op == "Slice" else None
            if node.op == "Split":
                part = _split_range(model, node, name, channels)
            stack.append((node.input(0), part))
        elif known.kind == LayerKind.SHUFFLE:
            stack.append((node.input(0), channels if _keeps_channels(model, node) else None))
        elif inputs_behind_q(model, node):
            stack.append((node.input(0), channels))
    return found


def _keeps_channels(model: Model, node: Node) -> bool:
    """Whether axis 1 means the same in front of and behind a Reshape or Transpose."""
    if node.op == "Transpose":
        perm = node.attributes.get("perm", [])
        return len(perm) > 1 and perm[1] == 1
    before, after = model.shape(node.input(0)), model.shape(node.output)
    return (
        before is not None and after is not None and len(before) > 1 and len(after) > 1
        and before[1] is not None and before[1] == after[1]
    )  # fmt: skip


def _axis(model: Model, node: Node) -> int | None:
    axis = node.integer("axis", 0)
    if axis >= 0:
        return axis
    shape = model.shape(node.input(0))
    return None if shape is None else axis + len(shape)


def _split_range(model: Model, node: Node, output: str, channels: _Range) -> _Range:
    if _axis(model, node) != 1:
        return channels
    start = 0
    for name in node.outputs:
        shape = model.shape(name)
        size = shape[1] if shape is not None and len(shape) > 1 else None
        if size is None:
            return None
        if name == output:
            low, high = channels or (0, size)
            return start + low, start + high
        start += size
    return None


def _slice_range(model: Model, node: Node, channels: _Range) -> _Range:
    values = [model.constant(node.input(i)) for i in (1, 2, 3)]
    if any(v is None or v.size != 1 for v in values):
        return None
    start, end, axis = (int(v.reshape(-1)[0]) for v in values if v is not None)
    shape = model.shape(node.input(0))
    if axis != 1:
        return channels
    if shape is None or shape[1] is None or start < 0 or model.constant(node.input(4)) is not None:
        return None
    low, high = channels or (0, min(end, shape[1]) - start)
    return start + low, start + high


def _concat_inputs(model: Model, node: Node, channels: _Range) -> list[tuple[str, _Range]]:
    """The inputs of a Concat that make the given channels."""
    if _axis(model, node) != 1 or channels is None:
        return [(t, channels) for t in node.inputs]
    wanted: list[tuple[str, _Range]] = []
    start = 0
    for name in node.inputs:
        shape = model.shape(name)
        size = shape[1] if shape is not None and len(shape) > 1 else None
        if size is None:
            return [(t, None) for t in node.inputs]
        low, high = max(channels[0], start), min(channels[1], start + size)
        if low < high:
            wanted.append((name, (low - start, high - start)))
        start += size
    return wanted


def _finals(model: Model, dfl: set[int]) -> set[int]:
    """Bare convolutions from which an output is reached without passing another weighted node (the DFL apart)."""
    feeding = feeding_weighted(model, dfl)
    return {
        n.index
        for n in model.ordered
        if n.op in WEIGHTED and n.index not in dfl and feeding.isdisjoint(n.outputs)
        and not _is_activated(model, n.output)
    }  # fmt: skip


def feeding_weighted(model: Model, dfl: Collection[int]) -> set[str]:
    """Tensors from which a Conv, ConvTranspose, Gemm or MatMul is reached, the nodes of a DFL apart."""
    found: set[str] = set()
    for node in reversed(model.ordered):
        if (node.op in WEIGHTED and node.index not in dfl) or not found.isdisjoint(node.outputs):
            found.update(t for t in (*node.inputs, *node.captured) if t)
    return found


def _is_activated(model: Model, tensor: str) -> bool:
    """Whether an activation follows, a bare Sigmoid apart, which turns scores into probabilities."""
    same = [tensor]  # under each name that it has behind a Cast
    for name in same:
        for result in activation_outputs(model, name):
            last = model.producer(result)
            for node in region(model, name, last) if last is not None else ():
                known = of(node)
                if known.activation is not None and known.activation.type != "SIGMOID":
                    return True
                if known.operation == "PROD" and len(run_time_inputs(model, node)) == 2:  # x * gate(x)
                    return True
        same += [n.output for n in model.readers(name) if of(n).kind == LayerKind.IDENTITY and n.output not in same]
    return False


def counts_up(model: Model, tensor: str) -> bool:
    """Whether a constant holds 0, 1, 2, ... n-1 with n of at least 4: the bins of a DFL."""
    shape = model.constant_shape(tensor)
    if shape is None or not 4 <= int(np.prod(shape)) <= 256:
        return False
    value = model.constant(tensor)
    return value is not None and bool(np.array_equal(value.reshape(-1), np.arange(value.size)))

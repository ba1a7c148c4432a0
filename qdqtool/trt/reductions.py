"""Which reductions are poolings to TensorRT."""

from __future__ import annotations

from qdqtool.graph import Model, Node


def pooling_of(model: Model, node: Node) -> str | None:
    """The pooling that a reduction over height and width is turned into: ``AVERAGE``, ``MAX``, None for no pooling.

    GlobalAveragePool was seen so (resnet18-qat-rtx2000-trt8510). NVIDIA's guide documents the same of a Reduce that
    averages over H and W and keeps its dimensions, which is what ReduceMean with ``keepdims=1`` becomes. With
    ``keepdims=0``, or over other axes, it stays a reduction.
    """
    if node.op == "GlobalAveragePool":
        return "AVERAGE"
    if node.op == "GlobalMaxPool":
        return "MAX"
    if node.op != "ReduceMean" or not node.integer("keepdims", 1):
        return None
    shape = model.shape(node.input(0))
    given = model.constant(node.input(1)) if node.input(1) else node.attributes.get("axes")
    if shape is None or given is None:
        return None
    axes = sorted(int(a) % len(shape) for a in given)
    return "AVERAGE" if len(shape) > 2 and axes == list(range(2, len(shape))) else None

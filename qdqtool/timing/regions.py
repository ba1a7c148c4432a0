"""Regions that Myelin makes few kernels of: attention and what is between one LayerNormalization and the next.

Inside a region a product with weights is a kernel, an attention (MatMul, Softmax, MatMul) is one, a normalization is
one; what only maps or moves values, Q and DQ included, is part of the kernel in front of it. So it is in listings of
TensorRT 10 (quantized Gemms: ``gemm`` Int8 to Int8, one ``kgen`` for a Q at the edge; a linear layer on 10.3), and
48 quantized layers of a ViT-B/16 take .73 times FP16's time on an L4, which 48 kernels for their Qs would not leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from qdqtool.graph import Model, Node
from qdqtool.onnxgraph.attention import is_computed_product
from qdqtool.timing import work
from qdqtool.timing.work import Work, width
from qdqtool.types import Precision

_NORMS = ("LayerNormalization", "ReduceMean", "GroupNormalization", "InstanceNormalization")
_OUTSIDE = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize", "TopK", "NonMaxSuppression")
ShapeOf = Callable[[str], tuple[int, ...] | None]


def region_nodes(model: Model) -> frozenset[str]:
    """Names of the nodes that lie in a region: those on a path from one attention or normalization to the next."""
    seeds = {n.name for n in model.nodes if n.op == "LayerNormalization" or is_computed_product(model, n)}
    if not seeds:
        return frozenset()
    behind, front = set(seeds), set(seeds)
    for node in model.ordered:
        if node.name not in behind and node.op not in _OUTSIDE:
            if any(p is not None and p.name in behind for p in map(model.producer, filter(None, node.inputs))):
                behind.add(node.name)
    for node in reversed(model.ordered):
        if node.name not in front and node.op not in _OUTSIDE:
            if any(r.name in front for t in node.outputs for r in model.readers(t)):
                front.add(node.name)
    return frozenset(behind & front)


def work_in_region(model: Model, node: Node, shape_of: ShapeOf, plain: Precision) -> Work:
    """The kernel of a node of a region that has no weights; nothing where it is part of another kernel."""
    nothing = Work(work.NOTHING, plain, plain)
    written = _elements(shape_of(node.output))
    sizes = [_elements(shape_of(t)) for t in node.inputs if t and not model.is_constant(t)]
    if not written or any(s is None for s in sizes):
        return nothing
    read = sum(s for s in sizes if s is not None)
    size = width(plain)
    if is_computed_product(model, node):
        shape, target = shape_of(node.input(0)), shape_of(node.output)
        assert shape and target
        depth, columns = float(shape[-1]), float(target[-1])
        first = any(r.op in ("Softmax", "Mul", "Div", "Add") for r in model.readers(node.output))
        ends = (read, 0.0) if first else ((sizes[-1] or 0.0), written)  # the scores stay inside
        return Work(work.CONV, plain, plain, written / columns, columns, depth, depth, 1.0, ends[0] * size, 0.0,
                    ends[1] * size, 1.0 if first else 0.0)  # fmt: skip
    if node.op in _NORMS:
        return Work(work.POOL, plain, plain, read=read * size, written=written * size)
    if node.op == "Add" and len(sizes) > 1 and min(s or 0.0 for s in sizes) == written:  # a skip: read and kept
        return Work(work.POINTWISE, plain, plain, read=written * size, written=written * size, steps=0.0)
    return nothing


def _elements(shape: tuple[int, ...] | None) -> float | None:
    return None if shape is None else float(math.prod(shape))

"""The matrix product behind a node with weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from qdqtool.graph import Node
from qdqtool.operators import CONVOLUTIONS
from qdqtool.timing import work


@dataclass(slots=True)
class Product:
    """A matrix product: ``rows`` x ``depth`` times ``depth`` x ``columns`` for each of ``groups``.

    ``source`` and ``out`` are the elements of the data input and of the output.
    """

    kind: str
    rows: float
    columns: float
    depth: float
    channels: float
    groups: float
    source: float
    out: float


def product_of(node: Node, shape_of: Callable[[str], tuple[int, ...] | None]) -> Product | None:
    """Rows, columns and depth of a Conv, ConvTranspose, Gemm or MatMul; None where a shape is not known."""
    source, target, weights = (shape_of(t) for t in (node.input(0), node.output, node.input(1)))
    if source is None or target is None or weights is None or not target:
        return None
    total, out = float(math.prod(source)), float(math.prod(target))
    if node.op in CONVOLUTIONS:
        if len(weights) < 3 or len(target) < 3:
            return None
        groups = max(1, node.integer("group", 1))
        kernel = float(math.prod(weights[2:]))
        if node.op == "ConvTranspose":
            rows = total / max(1, source[1])
            return Product(work.DECONV, rows, weights[1] * kernel, float(source[1] // groups),
                            float(source[1] // groups), float(groups), total, out)  # fmt: skip
        channels = float(weights[1])
        columns = target[1] / groups
        kind = work.DEPTHWISE if groups > 1 and columns * channels <= 16 else work.CONV
        return Product(
            kind, out / max(1, target[1]), columns, channels * kernel, channels, float(groups), total, out
        )
    depth = float(source[0] if node.op == "Gemm" and node.integer("transA", 0) else source[-1])
    columns = float(target[-1])
    return Product(work.CONV, out / max(1.0, columns), columns, depth, depth, 1.0, total, out)

"""Regions that Myelin compiles (attention, normalization), and the kernels inside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import is_dq, is_qdq, read_params
from qdqtool.patterns.heads import INT8_HEAD_SIZES, is_computed_product
from qdqtool.timing.work import (
    CONV,
    NOTHING,
    POINTWISE,
    POOL,
    LayerWork,
    ShapeLookup,
    bytes_per_element,
)

_NORMS = ("LayerNormalization", "ReduceMean", "GroupNormalization", "InstanceNormalization")
# Operators that are not part of a Myelin region.
_OUTSIDE = (
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "AveragePool",
    "Resize",
    "TopK",
    "NonMaxSuppression",
)


def find_region_nodes(model: Model) -> frozenset[str]:
    """Return the names of the nodes in Myelin's regions.

    A region contains the paths from one attention or normalization to the next.
    """
    seeds = {
        node.name
        for node in model.nodes
        if node.op == "LayerNormalization" or is_computed_product(model, node)
    }
    if not seeds:
        return frozenset()
    candidates = [node for node in model.ordered if node.op not in _OUTSIDE]
    downstream = _extend_region(
        seeds, candidates, lambda node: filter(None, map(model.producer, filter(None, node.inputs)))
    )
    upstream = _extend_region(
        seeds,
        reversed(candidates),
        lambda node: itertools.chain.from_iterable(map(model.consumers, node.outputs)),
    )
    return frozenset(downstream & upstream)


def _extend_region(
    seeds: set[str], nodes: Iterable[Node], neighbors: Callable[[Node], Iterable[Node]]
) -> set[str]:
    """Return the seeds and, in the order of `nodes`, each node with a neighbor in the region."""
    region = set(seeds)
    for node in nodes:
        if any(neighbor.name in region for neighbor in neighbors(node)):
            region.add(node.name)
    return region


@dataclass(frozen=True, slots=True)
class RegionNodes:
    """Estimates the work of the nodes without weights in Myelin's regions.

    Attributes:
        model: The model.
        lookup_shape: Function that returns the shape of a tensor; None if unknown.
        float_type: Type of float tensors.
    """

    model: Model
    lookup_shape: ShapeLookup
    float_type: Precision

    def node_work(self, node: Node) -> LayerWork:
        """Return the work of the kernel that computes a node without weights.

        The kind of the work is ``nothing`` if the node is part of another kernel, or if a shape is
        unknown.
        """
        nothing = LayerWork(NOTHING, self.float_type, self.float_type)
        if is_computed_product(self.model, node):
            return self._product_work(node) or nothing
        written = self._count_elements(node.output)
        sizes = self._input_sizes(node)
        if not written or sizes is None:
            return nothing
        if node.op in _NORMS:
            return self._moving_work(POOL, sum(sizes), written)
        if node.op == "Softmax" and not self._is_fused_softmax(node):
            return self._moving_work(POINTWISE, sum(sizes), written)
        if node.op == "Add" and len(sizes) > 1 and min(sizes) == written:
            # Another node's kernel computes the Add, and therefore also reads the residual and
            # writes the sum.
            return self._moving_work(POINTWISE, written, written, steps=0.0)
        return nothing

    def attention_work(self, scores: Node, values: Node, written_as: Precision) -> LayerWork | None:
        """Return the work of one kernel with both products of an attention.

        None if a shape is unknown. The kernel reads queries, keys and values, and does not write
        the scores.

        Args:
            scores: The first product.
            values: The second product.
            written_as: Type of the result.
        """
        first, second = self._product_work(scores), self._product_work(values)
        if first is None or second is None:
            return None
        element = bytes_per_element(first.precision)
        probabilities = first.rows * first.columns * element
        return replace(
            first,
            written_as=written_as,
            depth=first.depth + second.macs / (first.rows * first.columns),
            read=first.read + second.read - probabilities,
            written=second.rows * second.columns * bytes_per_element(written_as),
        )

    def _moving_work(self, kind: str, read: float, written: float, steps: float = 1.0) -> LayerWork:
        element = bytes_per_element(self.float_type)
        return LayerWork(
            kind,
            self.float_type,
            self.float_type,
            read=read * element,
            written=written * element,
            steps=steps,
        )

    def _product_work(self, node: Node) -> LayerWork | None:
        """Return the work of a product of two computed tensors; None if a shape is unknown.

        In a fused attention, one kernel computes both products and does not write the scores. The
        kernel is counted at the first product. Otherwise each product is a kernel, and the scores
        are written and read.
        """
        shape, target = self.lookup_shape(node.input(0)), self.lookup_shape(node.output)
        sizes = self._input_sizes(node)
        if not shape or target is None or not math.prod(target) or sizes is None:
            return None
        depth, columns = float(shape[-1]), float(target[-1]) if target else 1.0
        out = float(math.prod(target))
        is_first = self._computes_attention_scores(node)
        is_fused = self._is_fused_product(node)
        precision = self._quantized_type(node) or self.float_type
        read, written = sum(sizes), out
        if is_fused:
            read, written = (sum(sizes), 0.0) if is_first else (sizes[-1], out)
        return LayerWork(
            CONV,
            precision,
            self.float_type,
            rows=out / columns,
            columns=columns,
            depth=depth,
            channels=depth,
            read=read * bytes_per_element(precision),
            written=written * bytes_per_element(self.float_type),
            steps=1.0 if is_first or not is_fused else 0.0,
            is_matrix_product=True,
        )

    def _computes_attention_scores(self, node: Node) -> bool:
        consumers = self.model.consumers(node.output)
        return any(c.op in ("Softmax", "Mul", "Div", "Add") for c in consumers)

    def _is_fused_product(self, node: Node) -> bool:
        """Return whether a product shares one kernel with the other product of the attention.

        Such kernels do not exist for FP32. For INT8, they exist for some head sizes. For FP8, the
        prediction already has one layer with both products (:meth:`attention_work`).
        """
        quantized = self._quantized_type(node)
        if self.float_type == Precision.FP32 or quantized == Precision.FP8:
            return False
        if quantized is None:
            return True
        tensor = node.input(0) if self._computes_attention_scores(node) else node.output
        shape = self.lookup_shape(tensor)
        return shape is not None and bool(shape) and shape[-1] in INT8_HEAD_SIZES

    def _is_fused_softmax(self, node: Node) -> bool:
        """Return whether a softmax has no kernel of its own.

        True if the softmax is part of a fused attention, or if no product reads its result.
        """
        product = self._downstream_product(node)
        return product is None or self._is_fused_product(product)

    def _downstream_product(self, node: Node) -> Node | None:
        """Return the product of two computed tensors downstream of a node, after any Q and DQ.

        None if the result has several consumers, or if its consumer is not such a product.
        """
        for _ in range(3):
            consumers = self.model.consumers(node.output)
            if len(consumers) != 1:
                return None
            node = consumers[0]
            if not is_qdq(node):
                return node if is_computed_product(self.model, node) else None
        return None

    def _quantized_type(self, node: Node) -> Precision | None:
        """Return the type of a product whose inputs come from DQs; None for other products.

        FP8 if all DQs are FP8, else INT8.
        """
        dqs = [self.model.producer(tensor) for tensor in node.inputs]
        if not all(map(is_dq, dqs)):
            return None
        types = {read_params(self.model, dq).precision for dq in dqs if dq is not None}
        return Precision.FP8 if types == {Precision.FP8} else Precision.INT8

    def _input_sizes(self, node: Node) -> list[float] | None:
        """Return the number of elements of each computed input; None if a shape is unknown."""
        sizes = []
        for tensor in node.inputs:
            if tensor and not self.model.is_constant(tensor):
                size = self._count_elements(tensor)
                if size is None:
                    return None
                sizes.append(size)
        return sizes

    def _count_elements(self, tensor: str) -> float | None:
        shape = self.lookup_shape(tensor)
        return None if shape is None else float(math.prod(shape))

"""Attention, recognised by its structure: a Softmax between two products of computed tensors; names play no part."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.graph import Model, Node
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import DOMAINS, is_pointwise, of, rearranges
from qdqtool.qdq import is_qdq

_HOPS = 64  # tensors looked at around a Softmax; scale, mask and reshaping of windows are a dozen


@dataclass(frozen=True)
class Attention:
    """One attention.

    Attributes:
        scores: The product of queries and keys.
        softmax: The Softmax behind it.
        values: The product of its result with the values.
        shares: The tensor that ``values`` reads the Softmax's result from: 0 to 1.
    """

    scores: Node
    softmax: Node
    values: Node
    shares: str


def attentions(model: Model) -> list[Attention]:
    """Every attention of a float or Q/DQ model, in graph order."""
    found = []
    for softmax in model.ordered:
        if softmax.op != "Softmax":
            continue
        scores = _scores(model, softmax)
        values = _values(model, softmax) if scores is not None else None
        if scores is not None and values is not None:
            found.append(Attention(scores, softmax, *values))
    return found


def is_computed_product(model: Model, node: Node | None) -> bool:
    """Whether a node is a MatMul of two tensors that are computed at run time, Q/DQ aside."""
    if node is None or node.op != "MatMul" or of(node).kind != LayerKind.MATRIX_MULTIPLY:
        return False
    return len(node.inputs) == 2 and not any(_from_constant(model, t) for t in node.inputs)


def holds_shares(model: Model, tensor: str) -> bool:
    """Whether a tensor has values of 0 to 1 for a product: a Softmax's result, or that with some of it moved or masked.

    A mask behind a Softmax (Where) puts zeros in.
    """
    if not any(is_computed_product(model, r) for r in model.readers(tensor)):
        return False
    for _ in range(_HOPS):
        node = model.producer(tensor)
        if node is None or not (_moves(node) or node.op == "Softmax"):
            return False
        if node.op == "Softmax":
            return True
        if node.op == "Where":
            other = model.constant(node.input(1))
            if other is None or other.size != 1 or not 0.0 <= float(other.reshape(-1)[0]) <= 1.0:
                return False
        tensor = node.input(_data_of(node))
    return False


def _scores(model: Model, softmax: Node) -> Node | None:
    """The nearest product above a Softmax, past scale, mask and what moves values."""
    queue = [softmax.input(0)]
    for tensor in queue:
        node = model.producer(tensor)
        if node is None or len(queue) > _HOPS:
            continue
        if is_computed_product(model, node):
            return node
        if is_pointwise(node) or _moves(node):
            queue.extend(t for t in node.inputs if t and t not in queue and not model.is_constant(t))
    return None


def _values(model: Model, softmax: Node) -> tuple[Node, str] | None:
    queue = [softmax.output]
    for tensor in queue:
        if len(queue) > _HOPS:
            return None
        for reader in model.readers(tensor):
            if is_computed_product(model, reader):
                return reader, tensor
            if _moves(reader) and tensor == reader.input(_data_of(reader)):
                queue.extend(t for t in reader.outputs if t and t not in queue)
    return None


def _moves(node: Node) -> bool:
    return rearranges(node) or is_qdq(node) or (node.op == "Where" and node.domain in DOMAINS)


def _data_of(node: Node) -> int:
    return 2 if node.op == "Where" else 0


def _from_constant(model: Model, tensor: str) -> bool:
    while not model.is_constant(tensor):
        node = model.producer(tensor)
        if node is None or not (rearranges(node) or is_qdq(node)) or not node.inputs:
            return False
        tensor = node.input(0)
    return True

"""A Q/DQ model as the checks look at it: where weights come from, what is constant, what lies downstream."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qdqtool.base.records import record
from qdqtool.model import operators, qdq
from qdqtool.model.graph import Model, Node
from qdqtool.model.heads import find_dfl, tensors_upstream_of_weighted
from qdqtool.model.operators import (
    WEIGHTED,
    LayerKind,
    commuting_inputs,
    operator_of,
    output_axis,
    rearranges,
)
from qdqtool.model.qdq import QuantParams

SHAPE_LIMIT = (
    20_000  # nodes; above, shape inference costs more than the sizes in the messages are worth
)


class NodeChain:
    """Nodes in a row, from a tensor up, the nearest first: a list that the tensors on the way share.

    Attributes:
        node: The nearest one; None where there is none.
        begin: The tensor that the topmost node reads.
        top: The topmost node.
    """

    __slots__ = ("_above", "_length", "begin", "node", "top")

    def __init__(
        self, begin: str, node: Node | None = None, above: NodeChain | None = None
    ) -> None:
        self.begin, self.node, self._above = begin, node, above
        self.top: Node | None = above.top if above else node
        self._length = 0 if above is None else len(above) + 1

    def __iter__(self) -> Iterator[Node]:
        chain: NodeChain | None = self
        while chain is not None and chain.node is not None:
            yield chain.node
            chain = chain._above

    def __len__(self) -> int:
        return self._length


@dataclass(slots=True)
class WeightSource:
    """Where the second input of a Conv, ConvTranspose, Gemm or MatMul comes from.

    Attributes:
        dq: The DequantizeLinear in front of it, behind ``after``.
        q: The QuantizeLinear in front of that.
        source: The tensor that Q (or DQ, or the node itself) reads.
        constant: Whether ``source`` is an initializer or Constant.
        folded: Whether ``source`` depends on constants only.
        before: Nodes between the constant and Q, the nearest to Q first.
        after: Nodes between DQ and the node.
        shape: Dimensions of ``source`` where it is a constant that the node reads as it is, Q and DQ apart.
    """

    dq: Node | None
    q: Node | None
    source: str
    constant: bool
    folded: bool
    before: NodeChain
    after: NodeChain
    shape: tuple[int, ...] | None = None

    @property
    def first_quantizer(self) -> Node | None:
        """The quantizer next to the constant."""
        return self.q or self.dq


class View:
    """A model with what several checks need, computed once.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._weights: dict[str, WeightSource] = {}
        self._before: dict[str, NodeChain] = {}
        self._after: dict[str, NodeChain] = {}
        #: What functions over a view worked out about tensors, by the function's name.
        self.cache: dict[str, dict[str, Any]] = {}

    def params(self, node: Node) -> QuantParams:
        """Scale and zero point of a Q or DQ."""
        return qdq.read_params(self.model, node)

    def axis(self, node: Node) -> int | None:
        """The channel axis of a per-channel Q or DQ; None for a per-tensor one.

        Below opset 13 ONNX has no axis, and TensorRT's parser takes 0.
        """
        params = self.params(node)
        return (
            0
            if params.per_channel and not params.has_axis and self.model.opset < 13
            else params.axis
        )

    @functools.cached_property
    def quantizers(self) -> list[Node]:
        return list(qdq.quantizers(self.model))

    @functools.cached_property
    def weighted(self) -> list[Node]:
        """Conv, ConvTranspose, Gemm and MatMul nodes."""
        return [n for n in self.model.ordered if n.op in WEIGHTED]

    @functools.cached_property
    def quantized(self) -> frozenset[int]:
        """Indices of the weighted nodes whose data and weights come from a DQ."""
        return frozenset(
            n.index
            for n in self.weighted
            if qdq.find_pair(self.model, n.input(0)) is not None and self.weights(n).dq is not None
        )

    @functools.cached_property
    def constants(self) -> frozenset[str]:
        """Tensors that depend on constants only, quantized weights included."""
        found = set(self.model.initializers)
        found.add("")  # an input that is not set
        for node in self.model.ordered:
            if node.op == "Constant" or (node.inputs and found.issuperset(node.inputs)):
                found.update(node.outputs)
        found.discard("")
        return frozenset(found)

    @functools.cached_property
    def varying(self) -> frozenset[str]:
        """Tensors that depend on the values of the network's inputs, and not on their shapes alone."""
        found = set(self.model.inputs)
        for node in self.model.ordered:
            reads = not (found.isdisjoint(node.inputs) and found.isdisjoint(node.captured))
            if reads and operator_of(node).kind != LayerKind.SHAPE:
                found.update(node.outputs)
                found.discard("")
        return frozenset(found)

    @functools.cached_property
    def activation_qs(self) -> list[Node]:
        """QuantizeLinear nodes on tensors that are computed at run time."""
        return [n for n in self.quantizers if qdq.is_q(n) and n.input(0) not in self.constants]

    def is_weight(self, node: Node) -> bool:
        """Whether a Q or DQ works on a constant."""
        return node.input(0) in self.constants

    def weights(self, node: Node) -> WeightSource:
        """Where the weights of a convolution come from (its second input)."""
        tensor = node.input(1)
        found = self._weights.get(tensor)
        if found is None:
            found = self._weights[tensor] = self._trace(tensor)
            if not found.before and not found.after:
                found.shape = self.model.constant_shape(found.source) or None
        return found

    def _trace(self, tensor: str) -> WeightSource:
        model = self.model
        after = _chain(self._after, tensor, self._rearranged)
        dq = model.producer(after.begin)
        if dq is None or not qdq.is_dq(dq):
            return WeightSource(
                None,
                None,
                tensor,
                model.is_constant(tensor),
                tensor in self.constants,
                NodeChain(tensor),
                NodeChain(tensor),
            )
        maker = model.producer(dq.input(0))
        q = maker if qdq.is_q(maker) else None
        source = (q or dq).input(0)
        constant, folded = model.is_constant(source), source in self.constants
        before = (
            _chain(self._before, source, self._computed)
            if folded and not constant
            else NodeChain(source)
        )
        return WeightSource(dq, q, source, constant, folded, before, after)

    def _rearranged(self, tensor: str) -> tuple[Node, str] | None:
        """What only moves the values of a tensor, and that tensor."""
        maker = self.model.producer(tensor)
        return (
            (maker, maker.input(0))
            if maker is not None and rearranges(maker) and maker.input(0)
            else None
        )

    def _computed(self, tensor: str) -> tuple[Node, str] | None:
        """What makes a tensor of constants, and its first input that is computed too; empty where none is."""
        maker = self.model.producer(tensor) if tensor else None
        if maker is None or maker.op == "Constant":
            return None
        return maker, next((t for t in maker.inputs if t and not self.model.is_constant(t)), "")

    def folded_nodes(self) -> set[str]:
        """Names of the nodes between constants and the quantizers of weights."""
        for node in self.weighted:
            self.weights(node)
        return {chain.node.name for chain in self._before.values() if chain.node is not None}

    def weight_shape(self, node: Node) -> tuple[int, ...] | None:
        """Dimensions of a convolution's weights: [Cout, Cin/groups, ...], for ConvTranspose [Cin, Cout/groups, ...]."""
        return self.weights(node).shape

    def channels(self, node: Node) -> tuple[int, int, int] | None:
        """Input channels, output channels and groups of a Conv or ConvTranspose."""
        shape = self.weight_shape(node)
        if shape is None or len(shape) < 3:
            return None
        groups = node.integer("group", 1) or 1
        if output_axis(node, len(shape)) == 1:
            return shape[0], shape[1] * groups, groups
        return shape[1] * groups, shape[0], groups

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Dimensions where they are known or cheap to infer."""
        return self.model.shape(tensor) if len(self.model.nodes) <= SHAPE_LIMIT else None

    def element_count(self, tensor: str) -> int | None:
        """Number of elements of a tensor, an unknown batch counted as 1; None when its shape is not known."""
        shape = self.shape(tensor)
        if shape is None or any(not d for d in shape[1:]):
            return None
        return math.prod(d or 1 for d in shape)

    @functools.cached_property
    def feeds_weighted(self) -> frozenset[int]:
        """Indices of the nodes with a Conv, ConvTranspose, Gemm or MatMul downstream, the DFL convolution apart."""
        feeding = tensors_upstream_of_weighted(self.model, find_dfl(self.model))
        return frozenset(n.index for n in self.model.nodes if not feeding.isdisjoint(n.outputs))

    def consuming_convolutions(self, node: Node) -> list[str]:
        """Names of the convolutions that read a Q or DQ as data, weights or bias, past what a DQ moves past."""
        dqs = (
            [n for n in self.model.consumers(node.output) if qdq.is_dq(n)]
            if qdq.is_q(node)
            else [node]
        )
        readers = (use.node for dq in dqs for use in find_consumers(self, dq.output))
        return [n.name for n in readers if n is not None and n.op in WEIGHTED]

    def pairs(self) -> Iterator[tuple[Node, list[Node]]]:
        """Each activation Q with the DQs that read it."""
        for q in self.activation_qs:
            yield q, [n for n in self.model.consumers(q.output) if qdq.is_dq(n)]


_LIMIT = 400  # readers looked at from one tensor


@record
class Consumer:
    """A reader of a tensor, behind the operators on the way to it that a Q passes.

    Attributes:
        kind: ``q``, ``add`` (a sum of two computed tensors), ``op`` or ``output`` (of the network).
        node: The reader; None for a network output.
        path: The nodes between that a Q passes, the nearest to the tensor first.
    """

    kind: str
    node: Node | None
    path: tuple[Node, ...] = ()


_KEPT = 4096  # tensors whose readers are remembered


def find_consumers(view: View, tensor: str) -> list[Consumer]:
    """The readers of a tensor, looked for past operators that a Q passes; kept for the next caller."""
    known: dict[str, list[Consumer]] = view.cache.setdefault("uses", {})
    if tensor not in known:
        if len(known) > _KEPT:
            known.clear()
        known[tensor] = _uses(view, tensor)
    return known[tensor]


def _uses(view: View, tensor: str) -> list[Consumer]:
    found: list[Consumer] = []
    queue: list[tuple[str, tuple[Node, ...]]] = [(tensor, ())]
    visited: set[str] = {tensor}
    for current, path in queue:
        if len(visited) > _LIMIT:
            break
        if view.model.is_output(current):
            found.append(Consumer("output", None, path))
        for node in dict.fromkeys(view.model.consumers(current)):
            if qdq.is_q(node):
                found.append(Consumer("q", node, path))
            elif current in commuting_inputs(view.model, node):
                for output in node.outputs:
                    if output and output not in visited:
                        visited.add(output)
                        queue.append((output, (*path, node)))
            else:
                found.append(Consumer("add" if adds_computed(view, node) else "op", node, path))
    return found


def adds_computed(view: View, node: Node) -> bool:
    """Whether a node adds two computed tensors (a bias is not one)."""
    return operators.is_sum(node) and sum(t not in view.constants for t in node.inputs if t) >= 2


def _chain(
    known: dict[str, NodeChain], tensor: str, step: Callable[[str], tuple[Node, str] | None]
) -> NodeChain:
    """The nodes up from a tensor: ``step`` tells what makes one, and the tensor in front of that."""
    way: list[tuple[str, Node]] = []
    while tensor not in known and (found := step(tensor)) is not None:
        way.append((tensor, found[0]))
        tensor = found[1]
    chain = known.get(tensor) or NodeChain(tensor)
    for made, node in reversed(way):
        chain = known[made] = NodeChain(chain.begin, node, chain)
    return chain

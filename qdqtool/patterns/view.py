"""A Q/DQ model with properties that several checks need: weights, constants, consumers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from onnx import TensorProto

from qdqtool.ir import operators, qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import (
    WEIGHTED,
    LayerKind,
    commuting_inputs,
    operator_of,
    output_axis,
    rearranges,
)
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import QuantParams
from qdqtool.patterns.heads import find_dfl, tensors_upstream_of_weighted

AXIS_OPSET = 13  # first opset in which Q and DQ have an axis
SHAPE_LIMIT = 20_000  # maximum number of nodes for inferring shapes; larger models take too long
_MAX_TENSORS = 400  # maximum number of tensors that are visited downstream of a tensor
_MAX_CACHED_TENSORS = 4096  # maximum number of tensors whose consumers are cached


class NodeChain:
    """Consecutive nodes upstream of a tensor, nearest first.

    Chains that meet share their upstream nodes, so that many chains take little memory.

    Attributes:
        node: The nearest node; None for an empty chain.
        begin: The tensor that the topmost node reads; the tensor itself for an empty chain.
        top: The topmost node; None for an empty chain.
    """

    __slots__ = ("_length", "_upstream", "begin", "node", "top")

    def __init__(
        self, begin: str, node: Node | None = None, upstream: NodeChain | None = None
    ) -> None:
        self.begin, self.node, self._upstream = begin, node, upstream
        self.top: Node | None = upstream.top if upstream else node
        self._length = 0 if upstream is None else len(upstream) + 1

    def __iter__(self) -> Iterator[Node]:
        chain: NodeChain | None = self
        while chain is not None and chain.node is not None:
            yield chain.node
            chain = chain._upstream

    def __len__(self) -> int:
        return self._length


@dataclass(eq=False, repr=False, slots=True)
class WeightSource:
    """Source of the second input of a Conv, ConvTranspose, Gemm or MatMul.

    Attributes:
        dq: The DequantizeLinear upstream; None for weights without DQ.
        q: The QuantizeLinear before ``dq``; None for stored integers.
        source: The tensor that Q (or DQ, or the node itself) reads.
        constant: Whether ``source`` is an initializer or Constant.
        folded: Whether ``source`` depends on constants only, so that the builder computes it.
        before: Nodes between the constant and its first quantizer, the nearest to the quantizer
            first.
        after: Nodes between DQ and the node, which only move values.
        shape: Dimensions of ``source`` if it is a constant with only Q and DQ between it and the
            node, else None.
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
        """The quantizer next to the constant: Q, else DQ; None if the weights have neither."""
        return self.q or self.dq


class ChannelCounts(NamedTuple):
    """Numbers of input channels, output channels and groups of a convolution."""

    inputs: int
    outputs: int
    groups: int


class View:
    """A model with properties that several checks need, which are computed on first use.

    Attributes:
        model: The model.
        cache: Results of functions of the view: a dict for each function, by its name.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.cache: dict[str, dict[str, Any]] = {}
        self._params: dict[int, QuantParams] = {}  # by node index
        self._weights: dict[str, WeightSource] = {}
        self._before: dict[str, NodeChain] = {}
        self._after: dict[str, NodeChain] = {}

    def params(self, node: Node) -> QuantParams:
        """Return scale and zero point of a Q or DQ."""
        params = self._params.get(node.index)
        if params is None:
            params = self._params[node.index] = qdq.read_params(self.model, node)
        return params

    def axis(self, node: Node) -> int | None:
        """Return the channel axis of a Q or DQ; None for a per-tensor quantizer.

        Below opset 13 ONNX has no axis, and TensorRT's parser uses 0.
        """
        params = self.params(node)
        if params.is_per_channel and not params.has_axis and self.model.opset < AXIS_OPSET:
            return 0
        return params.axis

    @property
    def needs_axis_opset(self) -> bool:
        """Whether the model has per-channel Q/DQ in an opset without an axis."""
        return self.model.opset < AXIS_OPSET and any(
            self.params(q).is_per_channel for q in self.quantizers
        )

    @functools.cached_property
    def quantizers(self) -> list[Node]:
        """Q and DQ nodes in graph order."""
        return list(qdq.quantizers(self.model))

    @functools.cached_property
    def fp8_quantizers(self) -> list[Node]:
        """Q and DQ nodes of FP8 in graph order."""
        return [node for node in self.quantizers if self.params(node).precision == Precision.FP8]

    @functools.cached_property
    def nodes_with_weights(self) -> list[Node]:
        """Conv, ConvTranspose, Gemm and MatMul nodes in graph order."""
        return [node for node in self.model.ordered if node.op in WEIGHTED]

    @functools.cached_property
    def fully_quantized_nodes(self) -> frozenset[int]:
        """Indices of the nodes with weights whose data and weights come from a DQ."""
        indices: set[int] = set()
        for node in self.nodes_with_weights:
            pair = qdq.find_pair(self.model, node.input(0))
            if pair is not None and self.weights(node).dq is not None:
                indices.add(node.index)
        return frozenset(indices)

    @functools.cached_property
    def constants(self) -> frozenset[str]:
        """Tensors that depend on constants only, including quantized weights."""
        tensors = set(self.model.initializers)
        tensors.add("")  # missing optional input
        for node in self.model.ordered:
            if node.op == "Constant" or (node.inputs and tensors.issuperset(node.inputs)):
                tensors.update(node.outputs)
        tensors.discard("")
        return frozenset(tensors)

    @functools.cached_property
    def varying(self) -> frozenset[str]:
        """Tensors that depend on the values of the network's inputs, not only on their shapes."""
        tensors = set(self.model.inputs)
        for node in self.model.ordered:
            if tensors.isdisjoint(node.inputs) and tensors.isdisjoint(node.captured):
                continue
            if operator_of(node).kind != LayerKind.SHAPE:
                tensors.update(node.outputs)
                tensors.discard("")
        return frozenset(tensors)

    def find_network_input(self, tensor: str, ops: Collection[str]) -> str | None:
        """Return the network input that a tensor is computed from by the given operators only.

        None if another operator, or a node with several computed inputs, is between them.
        """
        model = self.model
        node = model.producer(tensor)
        while node is not None and node.op in ops:
            computed = [name for name in node.inputs if not model.is_constant(name)]
            if len(computed) != 1:
                return None
            tensor = computed[0]
            node = model.producer(tensor)
        return tensor if tensor in model.inputs else None

    def quantizes_uint8_input(self, q: Node) -> bool:
        """Return whether a Q quantizes a uint8 network input, which Casts make float."""
        # An FP16 model may convert the input to FP32 first.
        source = self.find_network_input(q.input(0), ("Cast",))
        return source is not None and self.model.elem_type(source) == TensorProto.UINT8

    @functools.cached_property
    def activation_qs(self) -> list[Node]:
        """QuantizeLinear nodes of tensors that are computed at run time."""
        return [n for n in self.quantizers if qdq.is_q(n) and n.input(0) not in self.constants]

    def is_weight(self, node: Node) -> bool:
        """Return whether the input of a Q or DQ depends on constants only."""
        return node.input(0) in self.constants

    def weights(self, node: Node) -> WeightSource:
        """Return the source of the weights (second input) of a convolution or matrix product."""
        tensor = node.input(1)
        source = self._weights.get(tensor)
        if source is None:
            source = self._weights[tensor] = self._trace_weights(tensor)
            if not source.before and not source.after:
                source.shape = self.model.constant_shape(source.source) or None
        return source

    def _trace_weights(self, tensor: str) -> WeightSource:
        model = self.model
        after = _chain_upstream(self._after, tensor, self._rearranging_producer)
        dq = model.producer(after.begin)
        if dq is None or not qdq.is_dq(dq):
            constant, folded = model.is_constant(tensor), tensor in self.constants
            empty = NodeChain(tensor)
            return WeightSource(None, None, tensor, constant, folded, empty, empty)
        producer = model.producer(dq.input(0))
        q = producer if qdq.is_q(producer) else None
        source = (q or dq).input(0)
        constant, folded = model.is_constant(source), source in self.constants
        before = NodeChain(source)
        if folded and not constant:
            before = _chain_upstream(self._before, source, self._constant_producer)
        return WeightSource(dq, q, source, constant, folded, before, after)

    def _rearranging_producer(self, tensor: str) -> tuple[Node, str] | None:
        producer = self.model.producer(tensor)
        if producer is None or not rearranges(producer) or not producer.input(0):
            return None
        return producer, producer.input(0)

    def _constant_producer(self, tensor: str) -> tuple[Node, str] | None:
        """Return the producer of a computed constant, and the producer's first computed input.

        The input is empty if all inputs are stored. None if the tensor itself is stored.
        """
        producer = self.model.producer(tensor) if tensor else None
        if producer is None or producer.op == "Constant":
            return None
        for source in producer.inputs:
            if source and not self.model.is_constant(source):
                return producer, source
        return producer, ""

    def folded_nodes(self) -> set[str]:
        """Return the names of the nodes between constants and the quantizers of weights."""
        for node in self.nodes_with_weights:
            self.weights(node)
        return {chain.node.name for chain in self._before.values() if chain.node is not None}

    def weight_shape(self, node: Node) -> tuple[int, ...] | None:
        """Return the dimensions of a convolution's weights.

        None if unknown, or if the weights are reshaped or computed. The dimensions are
        [Cout, Cin/groups, ...], for ConvTranspose [Cin, Cout/groups, ...].
        """
        return self.weights(node).shape

    def channels(self, node: Node) -> ChannelCounts | None:
        """Return the channels and groups of a Conv or ConvTranspose; None if they are unknown."""
        shape = self.weight_shape(node)
        if shape is None or len(shape) < 3:
            return None
        groups = node.integer("group", 1) or 1
        if output_axis(node, len(shape)) == 1:
            return ChannelCounts(shape[0], shape[1] * groups, groups)
        return ChannelCounts(shape[1] * groups, shape[0], groups)

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Return a tensor's dimensions; None if unknown or if the model is too large to infer."""
        return self.model.shape(tensor) if len(self.model.nodes) <= SHAPE_LIMIT else None

    def element_count(self, tensor: str) -> int | None:
        """Return the number of elements of a tensor; None if its shape is unknown.

        An unknown batch size counts as 1.
        """
        shape = self.shape(tensor)
        if shape is None or any(not size for size in shape[1:]):
            return None
        return math.prod(size or 1 for size in shape)

    @functools.cached_property
    def feeds_weighted(self) -> frozenset[int]:
        """Indices of the nodes upstream of a node with weights that is not the DFL."""
        upstream = tensors_upstream_of_weighted(self.model, find_dfl(self.model))
        nodes = self.model.nodes
        return frozenset(node.index for node in nodes if not upstream.isdisjoint(node.outputs))

    def consuming_convolutions(self, node: Node) -> list[str]:
        """Return the names of convolutions and matrix products that read a quantized tensor.

        They read the tensor as data, weights or bias. Operators that a DQ can pass may be in
        between.

        Args:
            node: The Q or DQ of the tensor.
        """
        dqs = [node]
        if qdq.is_q(node):
            dqs = [n for n in self.model.consumers(node.output) if qdq.is_dq(n)]
        names: list[str] = []
        for dq in dqs:
            names += [
                consumer.node.name
                for consumer in find_consumers(self, dq.output)
                if consumer.node is not None and consumer.node.op in WEIGHTED
            ]
        return names

    def pairs(self) -> Iterator[tuple[Node, list[Node]]]:
        """Yield each activation Q with the DQs that consume it."""
        for q in self.activation_qs:
            yield q, [node for node in self.model.consumers(q.output) if qdq.is_dq(node)]


class Consumer(NamedTuple):
    """A consumer of a tensor, downstream of operators that a Q can pass.

    Attributes:
        kind: ``q``, ``add`` (a sum of two computed tensors), ``op`` or ``output`` (of the network).
        node: The consumer; None for a network output.
        path: Nodes from the tensor to the consumer, in this order. A Q can pass each of them.
    """

    kind: str
    node: Node | None
    path: tuple[Node, ...] = ()


def find_consumers(view: View, tensor: str) -> list[Consumer]:
    """Return the consumers of a tensor, downstream of operators that a Q can pass.

    The search ends after 400 tensors.
    """
    cache: dict[str, list[Consumer]] = view.cache.setdefault("consumers", {})
    if tensor not in cache:
        if len(cache) > _MAX_CACHED_TENSORS:
            cache.clear()
        cache[tensor] = _find_consumers(view, tensor)
    return cache[tensor]


def _find_consumers(view: View, tensor: str) -> list[Consumer]:
    consumers: list[Consumer] = []
    queue: list[tuple[str, tuple[Node, ...]]] = [(tensor, ())]
    visited: set[str] = {tensor}
    for current, path in queue:
        if len(visited) > _MAX_TENSORS:
            break
        if view.model.is_output(current):
            consumers.append(Consumer("output", None, path))
        for node in dict.fromkeys(view.model.consumers(current)):
            if qdq.is_q(node) or current not in commuting_inputs(view.model, node):
                consumers.append(Consumer(_consumer_kind(view, node), node, path))
                continue
            for output in node.outputs:
                if output and output not in visited:
                    visited.add(output)
                    queue.append((output, (*path, node)))
    return consumers


def _consumer_kind(view: View, node: Node) -> str:
    if qdq.is_q(node):
        return "q"
    return "add" if is_sum_of_computed(view, node) else "op"


def is_sum_of_computed(view: View, node: Node) -> bool:
    """Return whether a node adds two computed tensors; False for adding a constant bias."""
    return operators.is_sum(node) and sum(t not in view.constants for t in node.inputs if t) >= 2


def _chain_upstream(
    cache: dict[str, NodeChain],
    tensor: str,
    find_producer: Callable[[str], tuple[Node, str] | None],
) -> NodeChain:
    """Return the chain of nodes upstream of a tensor.

    Args:
        cache: Chains by tensor.
        tensor: The tensor to start at.
        find_producer: Function that returns the producer of a tensor and the input at which to
            continue; None at the end of the chain.
    """
    steps: list[tuple[str, Node]] = []
    while tensor not in cache:
        step = find_producer(tensor)
        if step is None:
            break
        steps.append((tensor, step[0]))
        tensor = step[1]
    chain = cache.get(tensor) or NodeChain(tensor)
    for output, node in reversed(steps):
        chain = cache[output] = NodeChain(chain.begin, node, chain)
    return chain

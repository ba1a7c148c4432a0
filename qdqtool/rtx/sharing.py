"""What else reads a tensor: the questions that the motion of integers asks about the graph around a node.

The compiler merges equal quantizers first, copies a DQ in front of each operator that it can pass, and pulls Qs up
towards the pools; so what becomes of one reader depends on the others.
"""

from __future__ import annotations

import functools

import numpy as np

from qdqtool import qdq
from qdqtool.graph import Model, Node
from qdqtool.rtx.constants import Constants

# A Q behind these is pulled up in front of them, whatever else reads them.
_PULLED = frozenset({
    "Transpose", "MaxPool", "Neg", "Abs", "Pad", "Tile", "Gather", "Concat", "Max", "Min", "Slice", "Split", "Expand",
    "Identity", "Dropout", "GatherElements", "Where",
})
# The same, only where the Q is all that reads them.
_PULLED_ALONE = frozenset({
    "DepthToSpace", "SpaceToDepth", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Resize", "Mul", "Div",
})


class Sharing:
    """Questions about the readers of tensors."""

    def __init__(self, model: Model, constants: Constants) -> None:
        self.model = model
        self.constants = constants
        self._alone: dict[tuple[str, str, str], bool] = {}
        self._groups: dict[str, dict[object, list[Node]]] = {}
        self._known: dict[str, tuple[float, ...] | None] = {}

    @functools.cached_property
    def live(self) -> set[int]:
        """Indices of the nodes that an output depends on."""
        found: set[int] = set()
        for node in reversed(self.model.ordered):
            for tensor in filter(None, node.outputs):
                readers = self.model.readers(tensor)
                if self.model.is_output(tensor) or any(r.index in found for r in readers):
                    found.add(node.index)
        return found

    def readers(self, tensor: str) -> list[Node]:
        """The readers that are not dead."""
        return [r for r in self.model.readers(tensor) if r.index in self.live]

    def same_value(self, a: str, b: str) -> bool:
        """Whether two constants hold equal numbers, whatever their shape."""
        if a == b:
            return True
        one = self._numbers(a)
        return one is not None and one == self._numbers(b)

    def _numbers(self, name: str) -> tuple[float, ...] | None:
        """A constant's numbers, kept: a tensor of many readers has each of their scales compared with all others."""
        if name not in self._known:
            value = self.constants.value(name)
            self._known[name] = None if value is None else tuple(value.reshape(-1).tolist())
        return self._known[name]

    def same_quantizer(self, a: Node, b: Node) -> bool:
        """Whether two Qs, or two DQs, are merged: one input, one scale for the whole tensor."""
        if a is b:
            return True
        if a.op != b.op or not self.same_value(a.input(1), b.input(1)) or self._count(a) != 1:
            return False
        if a.input(0) == b.input(0):
            return True
        one, other = self.model.producer(a.input(0)), self.model.producer(b.input(0))
        return one is not None and other is not None and qdq.is_q(one) and qdq.is_q(other) and self.same_quantizer(
            one, other)

    def _count(self, node: Node) -> int:
        shape = self.constants.shape(node.input(1))
        return int(np.prod(shape)) if shape is not None else 0

    def merged(self, dq: Node) -> list[Node]:
        """The live DQs that the compiler makes one of, in graph order; it keeps the last one's scale shape."""
        maker = self.model.producer(dq.input(0))
        sources = [dq.input(0)]
        if maker is not None and qdq.is_q(maker):
            alike = self._by_scale(maker.input(0)).get(self._scale_key(maker), [])
            sources = [q.output for q in alike if self.same_quantizer(q, maker)]
        found = [r for s in sources for r in self.readers(s) if qdq.is_dq(r) and self.same_quantizer(r, dq)]
        return sorted({n.index: n for n in [*found, dq]}.values(), key=lambda n: n.index)

    def _scale_key(self, node: Node) -> object:
        return self._numbers(node.input(1)) or node.input(1)

    def _by_scale(self, tensor: str) -> dict[object, list[Node]]:
        """The live Qs on a tensor, by their scale: one with thousands of readers is gone through once."""
        if tensor not in self._groups:
            groups: dict[object, list[Node]] = {}
            for q in self.readers(tensor):
                if qdq.is_q(q):
                    groups.setdefault(self._scale_key(q), []).append(q)
            self._groups[tensor] = groups
        return self._groups[tensor]

    def is_alone(self, node: Node, tensor: str, constant: str, free: frozenset[str]) -> bool:
        """Whether a factor can join the scale: all else that reads the tensor moves its integers, or is the same.

        Args:
            node: The Mul, Div or Reciprocal.
            tensor: Its data input.
            constant: Its constant input; empty for a Reciprocal.
            free: Operators in front of which a DQ is copied and moved on.
        """
        key = (tensor, node.op, constant)
        if key not in self._alone:
            self._alone[key] = self._all_like(node, tensor, constant, free)
        return self._alone[key]

    def _all_like(self, node: Node, tensor: str, constant: str, free: frozenset[str]) -> bool:
        maker = self.model.producer(tensor)
        equal = [n.output for n in self.merged(maker)] if maker is not None and qdq.is_dq(maker) else [tensor]
        for same in equal:
            if self.model.is_output(same):
                return False
            for reader in self.readers(same):
                if reader is node or reader.op in free:
                    continue
                if reader.op != node.op:
                    return False
                if constant and not any(self.same_value(constant, t) for t in reader.inputs if t and t != same):
                    return False
        return True

    def reaches_quantizer(self, tensor: str) -> bool:
        """Whether a Q behind a tensor is pulled up to it, through operators that a Q passes."""
        return tensor in self._reaching

    @functools.cached_property
    def _reaching(self) -> set[str]:
        found: set[str] = set()
        for node in reversed(self.model.ordered):
            if node.index in self.live and self._pulls(node, found):
                found.update(t for t in node.inputs if t)
        return found

    def _pulls(self, node: Node, found: set[str]) -> bool:
        if qdq.is_q(node):
            return True
        if not any(o in found for o in node.outputs):
            return False
        if node.op == "Cast":
            return self.model.elem_type(node.input(0)) == node.integer("to", 0)
        if node.op in _PULLED:
            return True
        if node.op in _PULLED_ALONE and not self.model.is_output(node.output):
            if node.op in ("Mul", "Div") and not self._scalar_factor(node):
                return False
            return len(self.readers(node.output)) == 1
        return False

    def _scalar_factor(self, node: Node) -> bool:
        factor = node.input(1) if self.constants.is_plain(node.input(1)) else node.input(0)
        return self.constants.is_plain(factor) and self.constants.scalar(factor) is not None

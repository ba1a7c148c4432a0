"""What else reads a tensor: the questions that the motion of integers asks about the graph around a node.

The compiler merges equal quantizers first, copies a DQ in front of each operator that it can pass, and pulls Qs up
towards the pools; so what becomes of one reader depends on the others.
"""

from __future__ import annotations

import functools
import math

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.rtx.operands import Constants

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
        self._alone: dict[tuple[object, str, object], bool] = {}
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

    def merged(self, dq: Node) -> list[Node]:
        """The live DQs that the compiler makes one of, in graph order; it keeps the last one's scale shape.

        Two are merged when they have one scale for the whole tensor, the same one, and read the same tensor, or Qs that
        are merged in the same way.
        """
        alike = self._alike.get(self._classes.get(dq.index, -1), [])
        if dq.index in self.live and alike:
            return alike
        return [*alike, dq] if not alike or alike[-1].index < dq.index else [dq, *alike]

    @functools.cached_property
    def _classes(self) -> dict[int, int]:
        """A number for each Q and DQ with a scalar scale: equal ones are merged. In one pass, for chains and crowds."""
        numbers: dict[tuple[str, object, object], int] = {}
        found: dict[int, int] = {}
        for node in self.model.ordered:
            if not (qdq.is_q(node) or qdq.is_dq(node)) or self._count(node) != 1:
                continue
            maker = self.model.producer(node.input(0))
            above = found.get(maker.index) if maker is not None and qdq.is_q(maker) else None
            key = (node.op, self._numbers(node.input(1)) or node.input(1), node.input(0) if above is None else above)
            found[node.index] = numbers.setdefault(key, len(numbers))
        return found

    @functools.cached_property
    def _alike(self) -> dict[int, list[Node]]:
        """The live DQs of each class, in graph order."""
        groups: dict[int, list[Node]] = {}
        for node in self.model.nodes:
            if qdq.is_dq(node) and node.index in self.live and node.index in self._classes:
                groups.setdefault(self._classes[node.index], []).append(node)
        return groups

    def _count(self, node: Node) -> int:
        shape = self.constants.shape(node.input(1))
        return math.prod(shape) if shape is not None else 0

    def is_alone(self, node: Node, tensor: str, constant: str, free: frozenset[str]) -> bool:
        """Whether a factor can join the scale: all else that reads the tensor moves its integers, or is the same.

        Args:
            node: The Mul, Div or Reciprocal.
            tensor: Its data input.
            constant: Its constant input; empty for a Reciprocal.
            free: Operators in front of which a DQ is copied and moved on.
        """
        maker = self.model.producer(tensor)
        number = self._classes.get(maker.index) if maker is not None and qdq.is_dq(maker) else None
        key = (tensor if number is None else number, node.op, self._numbers(constant) or constant)
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

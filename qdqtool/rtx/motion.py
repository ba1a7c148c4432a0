"""How integers move through operators: which ones the compiler runs on INT8 data, so that what follows inherits it.

Every rule was found by building the smallest graph that decides it: Q, DQ, the operator, a convolution with quantized
weights and no pair of its own. Operators that are not listed turn integers into floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.rtx.operands import Constants
from qdqtool.rtx.records import NOTHING, WIDTH, Dequantized, Float, State, Why
from qdqtool.rtx.sharing import Sharing

# One data input, integers stay as they are (or are negated, or reordered), the scale stays.
MOVES = frozenset({
    "Identity", "Dropout", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "Transpose", "Reshape", "Flatten",
    "Squeeze", "Unsqueeze", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Slice", "Split", "Gather", "GatherND",
    "GatherElements", "TopK", "Neg", "Abs", "Reciprocal",
})
# All data inputs need the same scale.
JOINS = frozenset({"Concat", "Max", "Min", "Where"})
# In front of these a DQ is copied and moved on, so that they do not hold a factor back.
_FREE = (MOVES - {"Reciprocal"}) | JOINS


class Motion:
    """Applies one node to the states of its inputs."""

    def __init__(self, model: Model, constants: Constants) -> None:
        self.model = model
        self.constants = constants
        self.sharing = Sharing(model, constants)
        self._rules: dict[str, Callable[[Node, Dequantized], State]] = {
            "Cast": self._cast,
            "Mul": self._scaled,
            "Div": self._scaled,
            "Pad": self._pad,
            "Resize": self._resize,
            "Upsample": self._resize,
            "AveragePool": self._average,
            "Einsum": self._einsum,
            "MaxPool": self._max_pool,
        }

    def through(self, node: Node, inputs: list[State]) -> State:
        """The state of the node's first output.

        Args:
            node: Any node but a quantizer, Conv, ConvTranspose, Gemm or MatMul.
            inputs: States of its inputs, in order; constants and unset inputs are ``Float``.
        """
        data = inputs[1:] if node.op == "Where" else inputs
        quantized = [s for s in data if isinstance(s, Dequantized)]
        if not quantized:
            return next((s for s in data if isinstance(s, Float) and s.reason), NOTHING)
        first = quantized[0]
        if any(s.pad is not None for s in quantized) and node.op != "Pad":
            return self._lost(Why.PAD, node, first)
        if node.op in ("Sum", "Mean", "Max", "Min", "Concat") and len(node.inputs) == 1:
            return first
        if node.op in JOINS:
            return self._join(node, data, quantized)
        if len(quantized) > 1 and node.op != "Einsum":
            return self._lost(Why.OPERATOR, node, first)
        if node.op in self._rules:
            return self._rules[node.op](node, first)
        if node.op in MOVES and data[0] is first:
            if node.op == "Reciprocal" and not self.sharing.is_alone(node, node.input(0), "", _FREE):
                return self._lost(Why.SHARED, node, first)
            moved = replace(first, inverted=not first.inverted) if node.op == "Reciprocal" else first
            return self._with_axes(node, moved)
        return self._lost(Why.OPERATOR, node, first)

    def _lost(self, reason: Why, node: Node, state: Dequantized) -> Float:
        return Float(reason, node, state.dq)

    def _join(self, node: Node, data: list[State], quantized: list[Dequantized]) -> State:
        first = quantized[0]
        if len(quantized) != len([t for t in node.inputs if t]) - (node.op == "Where"):
            return self._lost(Why.JOIN_FLOAT, node, first)
        shape = self.model.shape(node.output)
        axis = node.integer("axis", 1)
        if node.op == "Concat" and shape is not None:
            axis %= len(shape)
        if any(s.axes != first.axes for s in quantized):
            return self._lost(Why.JOIN_SCALE, node, first)
        if node.op == "Concat" and first.axes == frozenset({axis}):
            return first  # scales are joined along the axis together with the integers
        if not all(first.same_scale(s) for s in quantized):
            return self._lost(Why.JOIN_SCALE, node, first)
        return replace(first, scalar=all(s.scalar for s in quantized))

    def _cast(self, node: Node, state: Dequantized) -> State:
        width = WIDTH.get(node.integer("to", 0))
        if width is None:
            return self._lost(Why.OPERATOR, node, state)
        return replace(state, width=width, narrowest=min(width, state.narrowest))

    def _scaled(self, node: Node, state: Dequantized) -> State:
        """Mul or Div by a constant: a factor of the scale. A vector makes the scale vary along its axes."""
        other = node.input(1)
        reverse = other and not self.constants.is_plain(other)
        if reverse:
            other = node.input(0)
        if not self.constants.is_plain(other):
            return self._lost(Why.OPERATOR, node, state)
        dims = self.constants.shape(other)
        if dims is None:
            return self._lost(Why.OPERATOR, node, state)
        rank = len(self.model.shape(node.output) or dims)
        data = node.input(1 if reverse else 0)
        if not self.sharing.is_alone(node, data, other, _FREE):
            return self._lost(Why.SHARED, node, state)
        own = len(self.model.shape(data) or dims)
        axes = {a + max(rank - own, 0) for a in state.axes}
        axes.update(rank - len(dims) + i for i, d in enumerate(dims) if d != 1)
        inverted = state.inverted
        factor = np.float32(state.factor)
        value = self.constants.scalar(other)
        with np.errstate(all="ignore"):
            if node.op == "Div" and reverse:
                inverted = not inverted
                factor = np.float32(1) / factor
            step = np.float32(math.nan if value is None else value)
            if math.prod(dims) == 1:
                factor = factor / step if node.op == "Div" and not reverse else factor * step
        return replace(state, axes=frozenset(axes), factor=float(factor), inverted=inverted)

    def _pad(self, node: Node, state: Dequantized) -> State:
        """Zeros around height and width join the convolution behind; cutting and repeating edges are moves."""
        if node.attributes.get("mode", "constant") != "constant" and state.pad is None:
            return self._with_axes(node, state)
        pads = node.attributes.get("pads")
        if pads is None:
            pads = self.constants.ints(node.input(1)) if node.input(1) else None
        if pads is None:
            return self._lost(Why.PAD, node, state)
        pads = [int(p) for p in pads]
        if max(pads, default=0) <= 0 and state.pad is None:
            return self._with_axes(node, state)
        value: float | None = float(node.attributes.get("value", 0.0))
        if node.input(2):
            value = self.constants.scalar(node.input(2))
        half = len(pads) // 2
        rank = len(self.model.shape(node.input(0)) or ())
        axes = list(range(half))
        if node.input(3):
            axes = [a % max(rank, 1) for a in self.constants.ints(node.input(3)) or ()]
        outer = any(pads[i] or pads[half + i] for i, a in enumerate(axes) if a < 2)
        if value != 0 or min(pads) < 0 or outer or rank not in (4, 5):
            return self._lost(Why.PAD, node, state)
        if len(self.model.readers(node.output)) != 1 or self.model.is_output(node.output):
            return self._lost(Why.PAD, node, state)
        return replace(state, pad=node)

    def _resize(self, node: Node, state: Dequantized) -> State:
        """Resize blocks, unless it changes nothing."""
        before, after = self.model.shape(node.input(0)), self.model.shape(node.output)
        if before is not None and before == after and None not in before:
            return state
        return self._lost(Why.OPERATOR, node, state)

    def _average(self, node: Node, state: Dequantized) -> State:
        """AveragePool blocks, unless it is 1x1 with stride 1."""
        sizes = [*node.attributes.get("kernel_shape", [0]), *node.attributes.get("strides", [1])]
        if all(s == 1 for s in sizes) and not any(node.attributes.get("pads", [])):
            return state
        return self._lost(Why.OPERATOR, node, state)

    def _max_pool(self, node: Node, state: Dequantized) -> State:
        """A MaxPool just behind a DQ becomes an INT8 pool for the Q that reads it; other readers get a float one."""
        attributes = node.attributes
        if all(v == 1 for v in (*attributes.get("kernel_shape", [0]), *attributes.get("strides", [1]))):
            return state
        maker = self.model.producer(node.input(0))
        while maker is not None and (maker.op in ("Identity", "Dropout", "Cast") or self._does_nothing(maker)):
            maker = self.model.producer(maker.input(0))
        if qdq.is_dq(maker) and self.sharing.reaches_quantizer(node.output):
            return self._lost(Why.POOL, node, state)
        return self._with_axes(node, state)

    def _does_nothing(self, node: Node) -> bool:
        """A Tile, Expand or Resize to the size that its input has: removed before anything moves."""
        before, after = self.model.shape(node.input(0)), self.model.shape(node.output)
        return node.op in ("Tile", "Expand", "Resize") and before is not None and None not in before and before == after

    def _einsum(self, node: Node, state: Dequantized) -> State:
        """Einsum with one input is a Transpose when it only reorders."""
        terms = str(node.attributes.get("equation", "")).replace(" ", "").split("->")
        if len(node.inputs) == 1 and len(terms) == 2 and sorted(terms[0]) == sorted(terms[1]) and not state.axes:
            return state
        return self._lost(Why.OPERATOR, node, state)

    def _with_axes(self, node: Node, state: Dequantized) -> State:
        """Carries the axes of a varying scale to their new places; a scalar scale goes anywhere."""
        if not state.axes:
            return state
        before, after = self.model.shape(node.input(0)), self.model.shape(node.output)
        axes = _moved_axes(self, node, state.axes, before, after)
        return state.along(axes) if axes is not None else self._lost(Why.AXIS, node, state)


def _moved_axes(
    motion: Motion, node: Node, axes: frozenset[int], before: tuple[int | None, ...] | None,
    after: tuple[int | None, ...] | None,
) -> set[int] | None:
    if before is None or after is None:
        return None
    if node.op == "Transpose":
        perm = node.attributes.get("perm") or list(range(len(before) - 1, -1, -1))
        if not isinstance(perm, list) or sorted(map(str, perm)) != sorted(map(str, range(len(before)))):
            return None
        return {perm.index(a) for a in axes}
    if node.op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
        return _reshaped_axes(axes, before, after)
    if len(before) != len(after):
        return None
    return set(axes)


def _reshaped_axes(
    axes: frozenset[int], before: tuple[int | None, ...], after: tuple[int | None, ...]
) -> set[int] | None:
    """An axis survives a reshape when its size and the number of elements in front of it stay."""
    if None in before or None in after:
        return None
    old = [d or 0 for d in before]
    new = [d or 0 for d in after]
    found: set[int] = set()
    for axis in axes:
        place = next((i for i, d in enumerate(new)
                      if d == old[axis] and math.prod(new[:i]) == math.prod(old[:axis])), None)
        if place is None:
            return None
        found.add(place)
    return found

"""How integers move through operators: which ones the compiler runs on INT8 data, so that what follows inherits it.

Every rule was found by building the smallest graph that decides it: Q, DQ, the operator, a convolution with quantized
weights and no pair of its own. Operators that are not listed turn integers into floats.

The compiler merges equal quantizers first, copies a DQ in front of each operator that it can pass, and pulls Qs up
towards the pools; so what becomes of one reader of a tensor depends on the others.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.trt.rtx.operands import NOTHING, WIDTH, Constants, Dequantized, Float, State, Why
from qdqtool.util.records import replaced

# A Q behind these is pulled up in front of them, whatever else reads them.
_PULLED = frozenset(
    {
        "Transpose",
        "MaxPool",
        "Neg",
        "Abs",
        "Pad",
        "Tile",
        "Gather",
        "Concat",
        "Max",
        "Min",
        "Slice",
        "Split",
        "Expand",
        "Identity",
        "Dropout",
        "GatherElements",
        "Where",
    }
)
# The same, only where the Q is all that reads them.
_PULLED_ALONE = frozenset(
    {
        "DepthToSpace",
        "SpaceToDepth",
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Resize",
        "Mul",
        "Div",
    }
)


class Sharing:
    """Questions about the readers of tensors."""

    def __init__(self, model: Model, constants: Constants) -> None:
        self.model = model
        self.constants = constants
        self._alone: dict[tuple[object, str, object], bool] = {}
        self._known: dict[str, tuple[float, ...] | None] = {}

    @functools.cached_property
    def live(self) -> set[int]:
        """Indices of the nodes that an output depends on; a Shape that is known is a constant, and reads nothing."""
        found: set[int] = set()
        for node in reversed(self.model.ordered):
            if node.op in ("Shape", "Size") and node.output in self.constants.plain:
                continue
            for tensor in filter(None, node.outputs):
                readers = self.model.consumers(tensor)
                if self.model.is_output(tensor) or any(r.index in found for r in readers):
                    found.add(node.index)
        return found

    def readers(self, tensor: str) -> list[Node]:
        """The readers that are not dead."""
        return [r for r in self.model.consumers(tensor) if r.index in self.live]

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
        for node in filter(qdq.is_qdq, self.model.ordered):
            shape = self.constants.shape(node.input(1))
            if shape is None or math.prod(shape) != 1:
                continue
            maker = self.model.producer(node.input(0))
            above = found.get(maker.index) if maker is not None and qdq.is_q(maker) else None
            key = (
                node.op,
                self._numbers(node.input(1)) or node.input(1),
                node.input(0) if above is None else above,
            )
            found[node.index] = numbers.setdefault(key, len(numbers))
        return found

    @functools.cached_property
    def _alike(self) -> dict[int, list[Node]]:
        """The live DQs of each class, in graph order."""
        groups: defaultdict[int, list[Node]] = defaultdict(list)
        for node in self.model.nodes:
            if qdq.is_dq(node) and node.index in self.live and node.index in self._classes:
                groups[self._classes[node.index]].append(node)
        return groups

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
        equal = (
            [n.output for n in self.merged(maker)]
            if maker is not None and qdq.is_dq(maker)
            else [tensor]
        )
        for same in equal:
            if self.model.is_output(same):
                return False
            for reader in self.readers(same):
                if reader is node or reader.op in free:
                    continue
                if reader.op != node.op:
                    return False
                if constant and not any(
                    self.same_value(constant, t) for t in reader.inputs if t and t != same
                ):
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
        if node.op in ("Mul", "Div"):
            factor = node.input(1) if node.input(1) in self.constants.plain else node.input(0)
            if factor not in self.constants.plain or self.constants.scalar(factor) is None:
                return False
        output = node.output
        return (
            node.op in _PULLED_ALONE
            and not self.model.is_output(output)
            and len(self.readers(output)) == 1
        )


# What else reads a tensor --------------------------------------------------------------------------------------------


# One data input, integers stay as they are (or are negated, or reordered), the scale stays.
MOVES = frozenset(
    {
        "Identity",
        "Dropout",
        "MaxPool",
        "GlobalMaxPool",
        "ReduceMax",
        "ReduceMin",
        "Transpose",
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Expand",
        "Tile",
        "DepthToSpace",
        "SpaceToDepth",
        "Slice",
        "Split",
        "Gather",
        "GatherND",
        "GatherElements",
        "TopK",
        "Neg",
        "Abs",
        "Reciprocal",
    }
)
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
            "MaxPool": self._max_pool,
            **dict.fromkeys(("Resize", "Upsample", "AveragePool", "Einsum"), self._float),
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
            if node.op == "Reciprocal" and not self.sharing.is_alone(
                node, node.input(0), "", _FREE
            ):
                return self._lost(Why.SHARED, node, first)
            moved = (
                replaced(first, inverted=not first.inverted) if node.op == "Reciprocal" else first
            )
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
        if node.op == "Concat" and shape:
            axis %= len(shape)
        if any(s.axes != first.axes for s in quantized):
            return self._lost(Why.JOIN_SCALE, node, first)
        if node.op == "Concat" and first.axes == frozenset({axis}):
            return first  # scales are joined along the axis together with the integers
        if not all(first.same_scale(s) for s in quantized):
            return self._lost(Why.JOIN_SCALE, node, first)
        return replaced(first, scalar=all(s.scalar for s in quantized))

    def _cast(self, node: Node, state: Dequantized) -> State:
        width = WIDTH.get(node.integer("to", 0))
        if width is None:
            return self._lost(Why.OPERATOR, node, state)
        return replaced(state, width=width, narrowest=min(width, state.narrowest))

    def _scaled(self, node: Node, state: Dequantized) -> State:
        """Mul or Div by a constant: a factor of the scale. A vector makes the scale vary along its axes."""
        other = node.input(1)
        reverse = other and other not in self.constants.plain
        if reverse:
            other = node.input(0)
        dims = self.constants.shape(other) if other in self.constants.plain else None
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
        return replaced(state, axes=frozenset(axes), factor=float(factor), inverted=inverted)

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
        if len(self.sharing.readers(node.output)) != 1 or self.model.is_output(node.output):
            return self._lost(Why.PAD, node, state)
        return replaced(state, pad=node)

    def _float(self, node: Node, state: Dequantized) -> State:
        """It blocks, unless it changes nothing."""
        nothing = self._keeps_shape(node)
        if node.op == "AveragePool":
            nothing = _is_single(node) and not any(node.attributes.get("pads", []))
        elif node.op == "Einsum":  # with one input that is only reordered
            terms = str(node.attributes.get("equation", "")).replace(" ", "").split("->")
            nothing = (
                len(node.inputs) == 1 and len(terms) == 2 and sorted(terms[0]) == sorted(terms[1])
            )
            nothing = nothing and not state.axes
        return state if nothing else self._lost(Why.OPERATOR, node, state)

    def _max_pool(self, node: Node, state: Dequantized) -> State:
        """A MaxPool just behind a DQ becomes an INT8 pool for the Q that reads it; other readers get a float one."""
        if _is_single(node):
            return state
        maker = self.model.producer(node.input(0))
        # A Tile, Expand or Resize to the size that its input has is removed before anything moves.
        while maker is not None and (
            maker.op in ("Identity", "Dropout", "Cast")
            or (maker.op in ("Tile", "Expand", "Resize") and self._keeps_shape(maker))
        ):
            maker = self.model.producer(maker.input(0))
        if qdq.is_dq(maker) and self.sharing.reaches_quantizer(node.output):
            return self._lost(Why.POOL, node, state)
        return self._with_axes(node, state)

    def _keeps_shape(self, node: Node) -> bool:
        before = self.model.shape(node.input(0))
        return before is not None and None not in before and before == self.model.shape(node.output)

    def _with_axes(self, node: Node, state: Dequantized) -> State:
        """Carries the axes of a varying scale to their new places; a scalar scale goes anywhere."""
        if not state.axes:
            return state
        before, after = self.model.shape(node.input(0)), self.model.shape(node.output)
        axes = (
            None
            if before is None or after is None
            else _moved_axes(node, state.axes, before, after)
        )
        return (
            self._lost(Why.AXIS, node, state)
            if axes is None
            else replaced(state, axes=frozenset(axes))
        )


def _is_single(pool: Node) -> bool:
    """Whether a pool is 1x1 with stride 1."""
    return all(
        v == 1
        for v in (*pool.attributes.get("kernel_shape", [0]), *pool.attributes.get("strides", [1]))
    )


def _moved_axes(
    node: Node, axes: frozenset[int], before: tuple[int | None, ...], after: tuple[int | None, ...]
) -> set[int] | None:
    if node.op == "Transpose":
        perm = node.attributes.get("perm") or list(range(len(before) - 1, -1, -1))
        if not isinstance(perm, list) or sorted(map(str, perm)) != sorted(
            map(str, range(len(before)))
        ):
            return None
        return {perm.index(a) for a in axes}
    if node.op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
        return _reshaped_axes(axes, before, after)
    return set(axes) if len(before) == len(after) else None


def _reshaped_axes(
    axes: frozenset[int], before: tuple[int | None, ...], after: tuple[int | None, ...]
) -> set[int] | None:
    """An axis survives a reshape when its size and the number of elements in front of it stay."""
    if None in before or None in after:
        return None
    old, new = [d or 0 for d in before], [d or 0 for d in after]
    found: set[int] = set()
    for axis in axes:
        place = next(
            (
                i
                for i, d in enumerate(new)
                if d == old[axis] and math.prod(new[:i]) == math.prod(old[:axis])
            ),
            None,
        )
        if place is None:
            return None
        found.add(place)
    return found

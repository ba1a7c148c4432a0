"""Rules for operators that TensorRT-RTX runs on the integers of a DQ.

A convolution after such operators can be INT8 without a Q/DQ pair of its own. Each rule comes from
a build of a minimal graph: Q, DQ, the operator, a convolution with quantized weights. Operators
without a rule turn integers into floats.

TensorRT-RTX's compiler first merges equal quantizers, copies a DQ before each operator that the DQ
can pass, and moves Qs up before operators such as poolings. Therefore, the precision of a consumer
of a tensor also depends on the tensor's other consumers.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import Precision
from qdqtool.reasons.compiler import LossCause
from qdqtool.trt.rtx.operands import (
    NEVER_QUANTIZED,
    WIDTH,
    ConstantTensors,
    FloatState,
    IntegerState,
    State,
)

# The compiler moves a Q upstream past these operators, even if they have other consumers.
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
# The compiler moves a Q upstream past these operators if the Q is their only consumer.
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


class ConsumerIndex:
    """Index of the consumers of tensors, without dead nodes and with equal DQs merged."""

    def __init__(self, model: Model, constants: ConstantTensors) -> None:
        self.model = model
        self.constants = constants
        self._joinable: dict[tuple[object, str, object], bool] = {}
        self._numbers: dict[str, tuple[float, ...] | None] = {}

    @functools.cached_property
    def live(self) -> set[int]:
        """Indices of the nodes that a network output depends on.

        The result of a Shape (or Size) of known dimensions is a constant, so no output depends on
        its input.
        """
        live: set[int] = set()
        for node in reversed(self.model.ordered):
            if node.op in ("Shape", "Size") and node.output in self.constants.plain:
                continue
            for tensor in filter(None, node.outputs):
                consumers = self.model.consumers(tensor)
                if self.model.is_output(tensor) or any(c.index in live for c in consumers):
                    live.add(node.index)
        return live

    def live_consumers(self, tensor: str) -> list[Node]:
        """Return the consumers of a tensor that are in :attr:`live`."""
        return [c for c in self.model.consumers(tensor) if c.index in self.live]

    def _read_numbers(self, name: str) -> tuple[float, ...] | None:
        """Return the numbers of a constant; None if they are unknown.

        The result is cached, because the scales of one tensor are compared often.
        """
        if name not in self._numbers:
            value = self.constants.value(name)
            self._numbers[name] = None if value is None else tuple(value.reshape(-1).tolist())
        return self._numbers[name]

    def find_merged(self, dq: Node) -> list[Node]:
        """Return a DQ and the live DQs that the compiler merges with it, in graph order.

        The merged DQ has the scale shape of the last DQ in the list. DQs are merged if they have
        equal scales of one number and read the same tensor, or read Qs that are merged under the
        same condition.
        """
        members = self._class_members.get(self._classes.get(dq.index, -1), [])
        if dq.index in self.live and members:
            return members
        if not members or members[-1].index < dq.index:
            return [*members, dq]
        return [dq, *members]

    @functools.cached_property
    def _classes(self) -> dict[int, int]:
        """Group number of each Q and DQ with a scale of one element, by node index.

        The compiler merges the quantizers of a group.
        """
        numbers: dict[tuple[str, object, object], int] = {}
        classes: dict[int, int] = {}
        for node in filter(qdq.is_qdq, self.model.ordered):
            shape = self.constants.shape(node.input(1))
            if shape is None or math.prod(shape) != 1:
                continue
            source: object = node.input(0)
            producer = self.model.producer(node.input(0))
            if producer is not None and qdq.is_q(producer):
                source = classes.get(producer.index, source)
            scale = self._read_numbers(node.input(1)) or node.input(1)
            classes[node.index] = numbers.setdefault((node.op, scale, source), len(numbers))
        return classes

    @functools.cached_property
    def _class_members(self) -> dict[int, list[Node]]:
        """Live DQs of each group of :attr:`_classes`, in graph order."""
        members: defaultdict[int, list[Node]] = defaultdict(list)
        for node in self.model.nodes:
            if qdq.is_dq(node) and node.index in self.live and node.index in self._classes:
                members[self._classes[node.index]].append(node)
        return members

    def can_join_scale(
        self, node: Node, tensor: str, constant: str, transparent: frozenset[str]
    ) -> bool:
        """Return whether the compiler can merge the factor of a node into the scale of a DQ.

        This requires that the tensor is not a network output, and that each other consumer is one
        of the ``transparent`` operators, or has the same factor. A copy of the DQ can move past
        ``transparent`` operators. The node is a Mul, Div or Reciprocal with the data input
        ``tensor`` and the input ``constant``, which is empty for a Reciprocal.
        """
        producer = self.model.producer(tensor)
        source: object = tensor
        if producer is not None and qdq.is_dq(producer):
            source = self._classes.get(producer.index, source)
        key = (source, node.op, self._read_numbers(constant) or constant)
        if key not in self._joinable:
            self._joinable[key] = self._has_compatible_consumers(
                node, tensor, constant, transparent
            )
        return self._joinable[key]

    def _has_compatible_consumers(
        self, node: Node, tensor: str, constant: str, transparent: frozenset[str]
    ) -> bool:
        producer = self.model.producer(tensor)
        tensors = [tensor]
        if producer is not None and qdq.is_dq(producer):
            tensors = [dq.output for dq in self.find_merged(producer)]
        for name in tensors:
            if self.model.is_output(name):
                return False
            for consumer in self.live_consumers(name):
                if consumer is node or consumer.op in transparent:
                    continue
                if consumer.op != node.op:
                    return False
                if constant and not self._reads_equal_values(consumer, name, constant):
                    return False
        return True

    def _reads_equal_values(self, consumer: Node, tensor: str, constant: str) -> bool:
        """Return whether an input other than ``tensor`` holds the numbers of a constant.

        The shapes may differ.
        """
        numbers = self._read_numbers(constant)
        others = [other for other in consumer.inputs if other and other != tensor]
        is_equal = numbers is not None and numbers in map(self._read_numbers, others)
        return constant in others or is_equal

    @functools.cached_property
    def quantized_downstream(self) -> set[str]:
        """Tensors up to which the compiler moves a downstream Q, past all operators in between."""
        tensors: set[str] = set()
        for node in reversed(self.model.ordered):
            if node.index in self.live and self._is_passed_by_q(node, tensors):
                tensors.update(t for t in node.inputs if t)
        return tensors

    def _is_passed_by_q(self, node: Node, quantized: set[str]) -> bool:
        if qdq.is_q(node):
            return True
        if quantized.isdisjoint(node.outputs):
            return False
        if node.op == "Cast":
            return self.model.elem_type(node.input(0)) == node.integer("to", 0)
        if node.op in _PULLED:
            return True
        if node.op in ("Mul", "Div"):
            factor = node.input(1) if node.input(1) in self.constants.plain else node.input(0)
            if factor not in self.constants.plain or self.constants.scalar(factor) is None:
                return False
        return (
            node.op in _PULLED_ALONE
            and not self.model.is_output(node.output)
            and len(self.live_consumers(node.output)) == 1
        )


# Rules of operators ---------------------------------------------------------------------------


# Operators with one data input that select, reorder or invert integers or change their sign, and
# keep the scale.
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
# Operators that keep integers if all data inputs have the same scale.
JOINS = frozenset({"Concat", "Max", "Min", "Where"})
# Operators that may read a DQ's output in addition to a Mul, Div or Reciprocal. A copy of the DQ
# moves past them, so that the factor can still be merged into the scale of the DQ.
_TRANSPARENT = (MOVES - {"Reciprocal"}) | JOINS
_TRANSPARENT_TO_FP8 = _TRANSPARENT - {"MaxPool"}


class IntegerMotion:
    """Rules that derive the state of a node's output from the states of its inputs."""

    def __init__(self, model: Model, constants: ConstantTensors) -> None:
        self.model = model
        self.constants = constants
        self.consumers = ConsumerIndex(model, constants)
        self._rules: dict[str, Callable[[Node, IntegerState], State]] = {
            "Cast": self._state_after_cast,
            "Mul": self._state_after_scaling,
            "Div": self._state_after_scaling,
            "Pad": self._state_after_pad,
            "MaxPool": self._state_after_max_pool,
            "Reciprocal": self._state_after_reciprocal,
            **dict.fromkeys(
                ("Resize", "Upsample", "AveragePool", "Einsum"), self._state_after_float_operator
            ),
        }

    def apply(self, node: Node, inputs: list[State]) -> State:
        """Return the state of the node's first output.

        Args:
            node: Any node but a quantizer, convolution or matrix product.
            inputs: States of the inputs in order, ``FloatState`` for constant and missing inputs.
        """
        data = inputs[1:] if node.op == "Where" else inputs
        quantized = [state for state in data if isinstance(state, IntegerState)]
        if quantized:
            return self._apply_to_integers(node, data[0], quantized)
        losses = (s for s in data if isinstance(s, FloatState) and s.reason)
        return next(losses, NEVER_QUANTIZED)

    def _apply_to_integers(self, node: Node, data: State, quantized: list[IntegerState]) -> State:
        first = quantized[0]
        if node.op != "Pad" and any(state.pad is not None for state in quantized):
            return _to_float_state(LossCause.PAD, node, first)
        if len(node.inputs) == 1 and node.op in ("Sum", "Mean", "Max", "Min", "Concat"):
            return first
        if node.op in JOINS:
            return self._state_after_join(node, quantized)
        if len(quantized) > 1 and node.op != "Einsum":
            return _to_float_state(LossCause.OPERATOR, node, first)
        if node.op in self._rules and (node.op != "Reciprocal" or data is first):
            return self._rules[node.op](node, first)
        if node.op in MOVES and data is first:
            return self._move_axes(node, first)
        return _to_float_state(LossCause.OPERATOR, node, first)

    def _state_after_reciprocal(self, node: Node, state: IntegerState) -> State:
        if not self.consumers.can_join_scale(node, node.input(0), "", _find_transparent(state)):
            return _to_float_state(LossCause.SHARED, node, state)
        return self._move_axes(node, replace(state, inverted=not state.inverted))

    def _state_after_join(self, node: Node, quantized: list[IntegerState]) -> State:
        first = quantized[0]
        count = len(list(filter(None, node.inputs))) - (node.op == "Where")
        if len(quantized) != count:
            return _to_float_state(LossCause.JOIN_FLOAT, node, first)
        if any(state.axes != first.axes for state in quantized):
            return _to_float_state(LossCause.JOIN_SCALE, node, first)
        if node.op == "Concat":
            shape, axis = self.model.shape(node.output), node.integer("axis", 1)
            if first.axes == frozenset({axis % len(shape) if shape else axis}):
                return first  # the compiler concatenates the scales along with the integers
        if not all(first.has_scale_of(state) for state in quantized):
            return _to_float_state(LossCause.JOIN_SCALE, node, first)
        return replace(first, scalar=all(state.scalar for state in quantized))

    def _state_after_cast(self, node: Node, state: IntegerState) -> State:
        width = WIDTH.get(node.integer("to", 0))
        if width is None:
            return _to_float_state(LossCause.OPERATOR, node, state)
        return replace(state, width=width, narrowest=min(width, state.narrowest))

    def _state_after_scaling(self, node: Node, state: IntegerState) -> State:
        """Return the state after a Mul or Div, whose constant becomes a factor of the scale.

        A constant of several numbers makes the scale vary along the constant's axes.
        """
        data, constant = node.input(0), node.input(1)
        is_reversed = bool(constant) and constant not in self.constants.plain
        if is_reversed:
            data, constant = constant, data
        dims = self.constants.shape(constant) if constant in self.constants.plain else None
        if dims is None:
            return _to_float_state(LossCause.OPERATOR, node, state)
        if not self.consumers.can_join_scale(node, data, constant, _find_transparent(state)):
            return _to_float_state(LossCause.SHARED, node, state)
        is_reciprocal = node.op == "Div" and is_reversed
        factor, inverted = np.float32(state.factor), state.inverted != is_reciprocal
        with np.errstate(all="ignore"):
            if is_reciprocal:
                factor = np.float32(1) / factor
            if math.prod(dims) == 1:
                value = self.constants.scalar(constant)
                step = np.float32(math.nan if value is None else value)
                factor = factor * step if node.op == "Mul" or is_reversed else factor / step
        axes = self._find_scale_axes(node, data, dims, state)
        return replace(state, axes=axes, factor=float(factor), inverted=inverted)

    def _find_scale_axes(
        self, node: Node, data: str, dims: tuple[int, ...], state: IntegerState
    ) -> frozenset[int]:
        """Return the output axes along which the scale varies.

        The scale includes the node's constant, which has the shape `dims`.
        """
        rank = len(self.model.shape(node.output) or dims)
        offset = max(rank - len(self.model.shape(data) or dims), 0)
        axes = {axis + offset for axis in state.axes}
        axes.update(rank - len(dims) + i for i, d in enumerate(dims) if d != 1)
        return frozenset(axes)

    def _read_pads(self, node: Node) -> list[int] | None:
        pads = node.attributes.get("pads")
        if pads is None and node.input(1):
            pads = self.constants.ints(node.input(1))
        return None if pads is None else list(map(int, pads))

    def _state_after_pad(self, node: Node, state: IntegerState) -> State:
        """Return the state after a Pad.

        A zero Pad of the spatial axes keeps integers if only one node reads the result, because the
        compiler can fuse the Pad into a convolution. A Pad that only cuts off values, or that
        repeats or reflects values, keeps integers as a Slice does, unless a zero Pad is before it.
        After any other Pad, the state is float.
        """
        if node.attributes.get("mode", "constant") != "constant" and state.pad is None:
            return self._move_axes(node, state)
        pads = self._read_pads(node)
        if pads is None:
            return _to_float_state(LossCause.PAD, node, state)
        if max(pads, default=0) <= 0 and state.pad is None:
            return self._move_axes(node, state)
        is_joined = (
            not self.model.is_output(node.output)
            and len(self.consumers.live_consumers(node.output)) == 1
        )
        if not is_joined or not self._is_zero_border(node, pads):
            return _to_float_state(LossCause.PAD, node, state)
        return replace(state, pad=node)

    def _is_zero_border(self, node: Node, pads: list[int]) -> bool:
        """Return whether a Pad adds zeros only around spatial axes of a tensor of rank 4 or 5."""
        value: float | None = float(node.attributes.get("value", 0.0))
        if node.input(2):
            value = self.constants.scalar(node.input(2))
        rank = len(self.model.shape(node.input(0)) or ())
        if value != 0 or min(pads) < 0 or rank not in (4, 5):
            return False
        half = len(pads) // 2
        axes = list(range(half))
        if node.input(3):
            axes = [axis % rank for axis in self.constants.ints(node.input(3)) or ()]
        return not any(pads[i] or pads[half + i] for i, axis in enumerate(axes) if axis < 2)

    def _state_after_float_operator(self, node: Node, state: IntegerState) -> State:
        """Return a float state, or the given state if the node has no effect (1x1 pooling)."""
        is_identity = self._keeps_shape(node)
        if node.op == "AveragePool":
            is_identity = _is_unit_pooling(node) and not any(node.attributes.get("pads", []))
        elif node.op == "Einsum":  # without effect if it has one input and keeps all axes
            terms = str(node.attributes.get("equation", "")).replace(" ", "").split("->")
            is_identity = (
                len(node.inputs) == 1
                and len(terms) == 2
                and sorted(terms[0]) == sorted(terms[1])
                and not state.axes
            )
        return state if is_identity else _to_float_state(LossCause.OPERATOR, node, state)

    def _state_after_max_pool(self, node: Node, state: IntegerState) -> State:
        """Return the state after a MaxPool.

        A pooling without effect (1x1) keeps integers. Otherwise FP8 data becomes float. INT8 data
        becomes float if the MaxPool is directly after a DQ, and a Q moves up to the output of the
        MaxPool. The compiler then creates an INT8 pooling for the Q, and a float pooling for the
        other consumers.
        """
        if _is_unit_pooling(node):
            return state
        if state.precision == Precision.FP8:
            return _to_float_state(LossCause.FP8_POOL, node, state)
        producer = self.model.producer(node.input(0))
        # The compiler removes a Tile, Expand or Resize without effect before it moves quantizers.
        while producer is not None and (
            producer.op in ("Identity", "Dropout", "Cast")
            or (producer.op in ("Tile", "Expand", "Resize") and self._keeps_shape(producer))
        ):
            producer = self.model.producer(producer.input(0))
        if qdq.is_dq(producer) and node.output in self.consumers.quantized_downstream:
            return _to_float_state(LossCause.POOL, node, state)
        return self._move_axes(node, state)

    def _keeps_shape(self, node: Node) -> bool:
        before = self.model.shape(node.input(0))
        return before is not None and None not in before and before == self.model.shape(node.output)

    def _move_axes(self, node: Node, state: IntegerState) -> State:
        if not state.axes:
            return state
        before, after = self.model.shape(node.input(0)), self.model.shape(node.output)
        axes = None
        if before is not None and after is not None:
            axes = _map_axes(node, state.axes, before, after)
        if axes is None:
            return _to_float_state(LossCause.AXIS, node, state)
        return replace(state, axes=frozenset(axes))


def _find_transparent(state: IntegerState) -> frozenset[str]:
    return _TRANSPARENT_TO_FP8 if state.precision == Precision.FP8 else _TRANSPARENT


def _to_float_state(reason: LossCause, node: Node, state: IntegerState) -> FloatState:
    return FloatState(reason, node, state.dq)


def _is_unit_pooling(pool: Node) -> bool:
    sizes = (*pool.attributes.get("kernel_shape", [0]), *pool.attributes.get("strides", [1]))
    return all(size == 1 for size in sizes)


_Shape = tuple[int | None, ...]


def _map_axes(node: Node, axes: frozenset[int], before: _Shape, after: _Shape) -> set[int] | None:
    """Return the axes that the given axes become after a node; None if one is lost or unknown."""
    if node.op == "Transpose":
        order = node.attributes.get("perm") or list(range(len(before) - 1, -1, -1))
        if not isinstance(order, list) or sorted(order) != list(range(len(before))):
            return None
        return {order.index(axis) for axis in axes}
    if node.op in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
        return _reshape_axes(axes, before, after)
    return set(axes) if len(before) == len(after) else None


def _reshape_axes(axes: frozenset[int], before: _Shape, after: _Shape) -> set[int] | None:
    """Return the axes that the given axes become after a reshape; None if one is lost.

    An axis is kept if its size, and the product of the sizes before it, do not change.
    """
    if None in before or None in after:
        return None
    old, new = [d or 0 for d in before], [d or 0 for d in after]
    positions = {(math.prod(new[:i]), size): i for i, size in reversed([*enumerate(new)])}
    moved = {positions.get((math.prod(old[:axis]), old[axis])) for axis in axes}
    return None if None in moved else {i for i in moved if i is not None}

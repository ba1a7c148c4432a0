"""Sizes, scales, paths, producers and consumers of tensors, as reasons record them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from qdqtool.ir.operators import CUTS, JOINS
from qdqtool.ir.qdq import PerChannel
from qdqtool.util.records import SharedTuple

Scale = float | PerChannel | None
"""One scale, the scales of all channels, or None if unknown."""

STEPS = 100  # maximum number of listed steps of a path; real networks have about a dozen


@dataclass(frozen=True)
class TensorSize:
    """Size of a tensor.

    Attributes:
        shape: Shape of the tensor without the batch, such as ``64x80x80``.
        values: Number of values. An unknown batch counts as 1.
    """

    shape: str
    values: int


@dataclass(frozen=True)
class PathStep:
    """An operator between a tensor and its consumer, or an operator that a Q or DQ moved past.

    Attributes:
        node: The ONNX node.
        op: Operator of the node.
        part: For a Concat, the index of its input on the path; -1 for other operators.
    """

    node: str
    op: str
    part: int = -1


class OperatorPath:
    """Operators past which a Q moved up, or a DQ moved down.

    The path is an immutable linked list. Paths of copies of a Q share their first steps.

    Attributes:
        ops: Types of the operators.
    """

    __slots__ = ("_before", "_step", "ops")
    ops: frozenset[str]

    def __init__(self, step: PathStep | None = None, before: OperatorPath | None = None) -> None:
        self._step = step
        self._before = before
        ops = before.ops if before is not None else frozenset()
        self.ops = ops if step is None or step.op in ops else ops | {step.op}

    def with_step(self, step: PathStep) -> OperatorPath:
        return OperatorPath(step, self)

    def latest_steps(self, most: int = STEPS) -> tuple[PathStep, ...]:
        """Return at most ``most`` of the latest steps, the latest step first."""
        steps: list[PathStep] = []
        path: OperatorPath | None = self
        while path is not None and path._step is not None and len(steps) < most:
            steps.append(path._step)
            path = path._before
        return tuple(steps)

    def steps(self) -> tuple[PathStep, ...]:
        """Return the steps in the order of the moves, at most the last :data:`STEPS`."""
        return self.latest_steps()[::-1]


EMPTY_PATH = OperatorPath()


class ConsumerKind(StrEnum):
    """Kind of a consumer: a Q, a sum of two computed tensors, another operator, or an output."""

    Q = "q"
    SUM = "sum"
    OP = "op"
    OUTPUT = "output"


@dataclass(frozen=True)
class TensorConsumer:
    """A consumer of a tensor, downstream of operators that a Q could pass.

    Attributes:
        kind: Kind of the consumer.
        node: The ONNX node; the tensor's name for a network output.
        op: Operator of the node.
        path: Operators between the tensor and the consumer, the nearest to the tensor first. For
            a Q, this includes operators that the Q moved up past.
        scale: Scale of a Q; None for other consumers.
        feeds_weighted: Whether a layer with weights, such as a convolution, is downstream. For a
            layer that has weights itself: whether one of its inputs comes from a DQ.
        gains: Whether Q/DQ before the consumer makes the engine faster: the consumer has INT8
            kernels, and other layers need its result in INT8.
        shares: For a sum, whether the input on this path comes from a DQ, or is read by a Q with
            one scale, so that Q/DQ on this input need no new scale.
    """

    kind: ConsumerKind
    node: str
    op: str
    path: tuple[PathStep, ...] = ()
    scale: Scale = None
    feeds_weighted: bool = False
    gains: bool = False
    shares: bool = False


@dataclass(frozen=True)
class TensorOrigin:
    """Producer of a tensor, upstream of operators that a Q could pass.

    Attributes:
        tensor: The tensor upstream of all these operators.
        node: The ONNX node that produces this tensor; empty for a network input. For a kernel of
            several pointwise nodes, the last of them.
        op: Operator of the node; ``SiLU`` for the last node of a SiLU.
        convolution: The node, if it is a convolution or matrix product; else empty.
        path: Operators between the producer and the tensor whose origin this is, the nearest to
            this tensor first, at most :data:`STEPS`.
        int8: Whether the layer computes in INT8 or FP8, or writes INT8 or FP8.
        layer_ends: The first and the last ONNX node of the layer that produces the tensor. Reasons
            are recorded at one of them.
        quantizer: Node of the Q before a producing DQ; the DQ's own node if it has no Q, and empty
            if the producer is not a quantizer.
        scale: Scale of the producing Q or DQ; None for other producers.
        input: Network input of integers that the node and the nodes before it convert to float;
            empty for other producers.
    """

    tensor: str
    node: str
    op: str
    convolution: str = ""
    path: tuple[PathStep, ...] = ()
    int8: bool = False
    layer_ends: tuple[str, ...] = ()
    quantizer: str = ""
    scale: Scale = None
    input: str = ""


_R = TypeVar("_R")


def _cache_shared(
    function: Callable[[Sequence[TensorConsumer]], _R],
) -> Callable[[Sequence[TensorConsumer]], _R]:
    """Decorate a function of a sequence: cache its result if the sequence is a `SharedTuple`."""
    return functools.wraps(function)(
        lambda items: (
            items.compute_once(function) if type(items) is SharedTuple else function(items)
        )
    )


@_cache_shared
def float_consumers(consumers: Sequence[TensorConsumer]) -> list[TensorConsumer]:
    """Return the consumers that are not Qs."""
    return [r for r in consumers if r.kind is not ConsumerKind.Q]


@_cache_shared
def quantizer_consumers(consumers: Sequence[TensorConsumer]) -> list[TensorConsumer]:
    """Return the consumers that are Qs."""
    return [r for r in consumers if r.kind is ConsumerKind.Q]


def find_shareable_quantizer(quantizers: Sequence[TensorConsumer]) -> TensorConsumer | None:
    """Return the first Q that reads a tensor directly and has one known scale, else None.

    Another consumer of the tensor can read the output of this Q's DQ.
    """
    return next((q for q in quantizers if not q.path and isinstance(q.scale, float)), None)


def find_operator_between_scales(steps: Sequence[PathStep]) -> PathStep | None:
    """Return the operator that messages name as the cause of different scales on a path.

    The first Concat (or other join) is preferred, then the first Split or Slice, then the first
    operator. None for an empty path.
    """
    joins = (s for s in steps if s.op in JOINS)
    cuts = (s for s in steps if s.op in CUTS)
    return next(joins, None) or next(cuts, None) or (steps[0] if steps else None)


@_cache_shared
def find_operator_between_quantizers(consumers: Sequence[TensorConsumer]) -> PathStep | None:
    """Return :func:`find_operator_between_scales` for the paths of all Qs that read a tensor."""
    return find_operator_between_scales([s for q in quantizer_consumers(consumers) for s in q.path])

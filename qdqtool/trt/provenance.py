"""What refusals say of a tensor: who reads it, what writes it, what lies between, how large it is."""

from __future__ import annotations

from enum import StrEnum

from qdqtool.base.records import record
from qdqtool.model.qdq import PerChannel

Scale = float | PerChannel | None
"""One scale, one for each channel, or None where it is not known."""

STEPS = 100  # of a way that are listed; networks have a dozen


@record
class Size:
    """How large a tensor is.

    Attributes:
        shape: Its dimensions without the batch, for instance ``64x80x80``.
        values: Number of its elements, an unknown batch counted as 1.
    """

    shape: str
    values: int


@record
class Step:
    """An operator that lies between a tensor and its reader, or that a Q moved past.

    Attributes:
        node: The ONNX node.
        op: Its operator.
        part: For a Concat, which of its inputs the way leads through; -1 elsewhere.
    """

    node: str
    op: str
    part: int = -1


class Way:
    """What a Q moved up past, or a DQ down: a list that grows at its end, and that copies of the layer share.

    Attributes:
        ops: The operators in it, each once.
    """

    __slots__ = ("_before", "_step", "ops")
    ops: frozenset[str]

    def __init__(self, step: Step | None = None, before: Way | None = None) -> None:
        self._step = step
        self._before = before
        ops = before.ops if before is not None else frozenset()
        self.ops = ops if step is None or step.op in ops else ops | {step.op}

    def then(self, step: Step) -> Way:
        """The way with one more step at its end."""
        return Way(step, self)

    def last(self) -> tuple[Step, ...]:
        """The latest steps first, :data:`STEPS` of them at most."""
        found: list[Step] = []
        way: Way | None = self
        while way is not None and way._step is not None and len(found) < STEPS:
            found.append(way._step)
            way = way._before
        return tuple(found)

    def steps(self) -> tuple[Step, ...]:
        """The steps in order; of a longer way the last :data:`STEPS`."""
        return self.last()[::-1]


NOWHERE = Way()


class ReaderKind(StrEnum):
    """A QuantizeLinear, a sum of two computed tensors, another operator, or an output of the network."""

    Q = "q"
    SUM = "sum"
    OP = "op"
    OUTPUT = "output"


@record
class Reader:
    """Who reads a tensor, looked for past the operators that a Q could pass.

    Attributes:
        kind: What it is.
        node: The ONNX node; the tensor's name for a network output.
        op: Its operator.
        path: The operators on the way to it, and for a Q those that it moved up past, the nearest to the tensor first.
        scale: A Q's scale.
        feeds_weighted: Whether a convolution (or other layer with weights) lies behind it.
        gains: Whether Q/DQ in front of it is worth while: INT8 kernels exist for it, and its result is wanted in INT8.
    """

    kind: ReaderKind
    node: str
    op: str
    path: tuple[Step, ...] = ()
    scale: Scale = None
    feeds_weighted: bool = False
    gains: bool = False


@record
class Origin:
    """What writes a tensor, looked for up past the operators that a Q could pass.

    Attributes:
        tensor: The tensor above the first of them.
        node: The ONNX node that writes it; empty for a network input.
        op: Its operator.
        convolution: The convolution whose layer the node is a part of; empty where it is none.
        path: The operators passed, the nearest to the tensor that was asked for first.
        int8: Whether the layer computes in INT8.
        boundary: The last node of that layer.
        quantizer: For a tensor that comes from a DQ: the Q's node in front of it, else the DQ's.
        scale: The scale of that.
    """

    tensor: str
    node: str
    op: str
    convolution: str = ""
    path: tuple[Step, ...] = ()
    int8: bool = False
    boundary: str = ""
    quantizer: str = ""
    scale: Scale = None

"""Why a pass did not fire: one frozen class for each reason, with the nodes and values that decided.

The explanations (``qdqtool.explain``) are made from these records and look nothing up again, so that what a user reads
is what the simulator saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from qdqtool.types import Precision, Refusal

Scale = float | tuple[float, ...] | None
"""One scale, one for each channel, or None where it is not known."""


@dataclass(frozen=True, slots=True)
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


class ReaderKind(StrEnum):
    """A QuantizeLinear, a sum of two computed tensors, another operator, or an output of the network."""

    Q = "q"
    SUM = "sum"
    OP = "op"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a tensor, looked for past the operators that a Q could pass.

    Attributes:
        kind: What it is.
        node: The ONNX node; the tensor's name for a network output.
        op: Its operator.
        path: The operators on the way to it, and for a Q those that it moved up past, the nearest to the tensor first.
        scale: A Q's scale.
        feeds_weighted: Whether a convolution (or other layer with weights) lies behind it.
    """

    kind: ReaderKind
    node: str
    op: str
    path: tuple[Step, ...] = ()
    scale: Scale = None
    feeds_weighted: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """What writes a tensor, looked for up past the operators that a Q could pass.

    Attributes:
        tensor: The tensor above the first of them.
        node: The ONNX node that writes it; empty for a network input.
        op: Its operator.
        convolution: The convolution whose layer the node is a part of; empty where it is none.
        path: The operators passed, the nearest to the tensor that was asked for first.
        int8: Whether the layer computes in INT8.
        quantizer: For a tensor that comes from a DQ: the Q's node in front of it, else the DQ's.
        scale: The scale of that.
    """

    tensor: str
    node: str
    op: str
    convolution: str = ""
    path: tuple[Step, ...] = ()
    int8: bool = False
    quantizer: str = ""
    scale: Scale = None


# Inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputNotDequantized(Refusal):
    """The data input does not come from a DQ.

    Attributes:
        tensor: The input's ONNX tensor.
        producer: What writes it.
        op: The producer's operator, ``Input`` for a network input.
        weights_quantized: Whether the weights come from a DQ.
        dq: The nearest DQ above, which cannot come down; empty where there is none.
        blocker: The first operator between that a DQ cannot pass.
    """

    reason: ClassVar[str] = "input-not-dequantized"

    tensor: str
    producer: str
    op: str
    weights_quantized: bool = False
    dq: str = ""
    blocker: Step | None = None


@dataclass(frozen=True, slots=True)
class WeightsNotDequantized(Refusal):
    """The weights do not come from a DQ, though the data does."""

    reason: ClassVar[str] = "weights-not-dequantized"

    weight: str
    dq: str = ""


@dataclass(frozen=True, slots=True)
class WeightsNotConstant(Refusal):
    """The weights are computed at run time."""

    reason: ClassVar[str] = "weights-not-constant"

    weight: str


@dataclass(frozen=True, slots=True)
class ScaleComputed(Refusal):
    """A scale is computed at run time."""

    reason: ClassVar[str] = "scale-computed"

    quantizer: str


@dataclass(frozen=True, slots=True)
class TypesDiffer(Refusal):
    """Data and weights are quantized to types that cannot be multiplied."""

    reason: ClassVar[str] = "types"

    dq: str
    weight_dq: str
    types: tuple[Precision, Precision]


@dataclass(frozen=True, slots=True)
class ActivationPerChannel(Refusal):
    """The data input has one scale per channel."""

    reason: ClassVar[str] = "activation-per-channel"

    dq: str
    scales: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class NonzeroZeroPoint(Refusal):
    """A zero point is not 0."""

    reason: ClassVar[str] = "zero-point"

    dq: str
    zero_point: int


@dataclass(frozen=True, slots=True)
class WeightsAxis(Refusal):
    """The weights are quantized along an axis that is not the outputs'."""

    reason: ClassVar[str] = "weights-axis"

    dq: str
    axis: int
    expected: int


@dataclass(frozen=True, slots=True)
class WeightsShared(Refusal):
    """Several convolutions read one quantized constant, which can be folded into one of them only."""

    reason: ClassVar[str] = "weights-shared"

    weight: str
    convolutions: tuple[str, ...]


# Outputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputNotQuantized(Refusal):
    """No Q reads the result."""

    reason: ClassVar[str] = "output-not-quantized"

    tensor: str
    readers: tuple[Reader, ...]
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class OutputDifferentScales(Refusal):
    """Several Qs with different scales read the result, and nothing else."""

    reason: ClassVar[str] = "output-different-scales"

    tensor: str
    readers: tuple[Reader, ...]
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class OutputManyConsumers(Refusal):
    """A Q and something that reads float read the result."""

    reason: ClassVar[str] = "output-many-consumers"

    tensor: str
    readers: tuple[Reader, ...]
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class OutputScale(Refusal):
    """The Q behind cannot be taken in: its scale is computed, or there is one for each channel."""

    reason: ClassVar[str] = "output-scale"

    quantizer: str
    computed: bool


# Residual Adds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResidualFloat(Refusal):
    """The Add's other input is float."""

    reason: ClassVar[str] = "residual-float"

    add: str
    residual: Origin
    readers: tuple[Reader, ...]
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class ResidualBothQuantized(Refusal):
    """A Q stands between the convolution and the Add, whose other input is quantized as well."""

    reason: ClassVar[str] = "residual-both-quantized"

    add: str
    quantizer: str


@dataclass(frozen=True, slots=True)
class AddOutputNotQuantized(Refusal):
    """The residual is quantized, what reads the Add is not (or not alone)."""

    reason: ClassVar[str] = "add-output-not-quantized"

    add: str
    residual: Origin
    readers: tuple[Reader, ...]
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class ActivationBeforeAdd(Refusal):
    """An activation stands between the convolution and the Add."""

    reason: ClassVar[str] = "activation-before-add"

    add: str
    activation: str
    residual: Origin | None = None
    elements: int | None = None


# Folding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchNormNotConstant(Refusal):
    """The BatchNormalization's parameters are not plain constants; the parser decomposed it."""

    reason: ClassVar[str] = "batchnorm-not-constant"

    batchnorm: str
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class ConvTransposeBatchNorm(Refusal):
    """A BatchNormalization behind a quantized ConvTranspose is not folded."""

    reason: ClassVar[str] = "convtranspose-batchnorm"

    batchnorm: str
    elements: int | None = None


# Motion ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotCommuting(Refusal):
    """A Q cannot move up past the operator."""

    reason: ClassVar[str] = "not-commuting"

    op: str
    quantizer: str


@dataclass(frozen=True, slots=True)
class ManyConsumers(Refusal):
    """The operator's result has other readers than the Q (or the DQ other readers than the operator)."""

    reason: ClassVar[str] = "many-consumers"

    op: str
    quantizer: str
    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True)
class ConcatReadElsewhere(Refusal):
    """The Concat's result is read by something else than the Q."""

    reason: ClassVar[str] = "output-not-only-quantized"

    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True)
class ScalesDiffer(Refusal):
    """Quantizers in a row, or on one tensor, have different scales."""

    reason: ClassVar[str] = "scales-differ"

    tensor: str
    quantizers: tuple[str, ...]
    scales: tuple[Scale, ...]


@dataclass(frozen=True, slots=True)
class PoolingOneSide(Refusal):
    """An averaging pooling is quantized on one side only.

    Attributes:
        quantized_input: Whether the side is its input.
    """

    reason: ClassVar[str] = "pooling-one-side"

    quantized_input: bool
    origin: Origin
    readers: tuple[Reader, ...]
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class Stays(Refusal):
    """Nothing absorbed a Q or DQ: it is a conversion of the engine.

    Attributes:
        name: The conversion's name in the engine (a copy in front of a Concat ends with ``_clone_<input>``).
        quantize: Whether it is a Q.
        tensor: The ONNX tensor that it converts.
        scale: Its scale.
        origin: What writes that tensor.
        siblings: Everything that reads it.
        behind: Everything that reads the converted tensor.
        passed: What it moved past, the last first.
        blocked: What kept it from moving on.
        elements: Values converted each time; None where shapes are not known.
    """

    reason: ClassVar[str] = "stays"

    name: str
    quantize: bool
    tensor: str
    scale: Scale
    origin: Origin
    siblings: tuple[Reader, ...]
    behind: tuple[Reader, ...]
    passed: tuple[Step, ...] = ()
    blocked: Refusal | None = None
    elements: int | None = None

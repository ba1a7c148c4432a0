"""Why a pass did not fire: one frozen class for each reason, with the nodes and values that decided.

The explanations (``qdqtool.findings``) are made from these records and look nothing up again, so that what a user reads
is what the simulator saw.

What they say of a tensor stands first: who reads it, what writes it, what lies between, how large it is.
"""

from __future__ import annotations

from enum import StrEnum

from qdqtool.ir.qdq import PerChannel
from qdqtool.types import Evidence, Precision, Refusal
from qdqtool.util.records import record

Scale = float | PerChannel | None
"""One scale, one for each channel, or None where it is not known."""

STEPS = 100  # of a way that are listed; networks have a dozen


@record
class TensorSize:
    """How large a tensor is: its ``shape`` without the batch (``64x80x80``), and how many ``values`` it has.

    An unknown batch counts as 1.
    """

    shape: str
    values: int


@record
class PathStep:
    """An operator between a tensor and its reader, or that a Q moved past: the ONNX node, and its operator.

    ``part``: for a Concat, which of its inputs the way leads through; -1 elsewhere.
    """

    node: str
    op: str
    part: int = -1


class OperatorPath:
    """What a Q moved up past, or a DQ down: a list that grows at its end, and that copies of the layer share.

    ``ops`` are the operators in it, each once.
    """

    __slots__ = ("_before", "_step", "ops")
    ops: frozenset[str]

    def __init__(self, step: PathStep | None = None, before: OperatorPath | None = None) -> None:
        self._step = step
        self._before = before
        ops = before.ops if before is not None else frozenset()
        self.ops = ops if step is None or step.op in ops else ops | {step.op}

    def with_step(self, step: PathStep) -> OperatorPath:
        """The way with one more step at its end."""
        return OperatorPath(step, self)

    def latest_steps(self, most: int = STEPS) -> tuple[PathStep, ...]:
        """The latest steps first, ``most`` of them at most."""
        found: list[PathStep] = []
        way: OperatorPath | None = self
        while way is not None and way._step is not None and len(found) < most:
            found.append(way._step)
            way = way._before
        return tuple(found)

    def steps(self) -> tuple[PathStep, ...]:
        """The steps in order; of a longer way the last :data:`STEPS`."""
        return self.latest_steps()[::-1]


EMPTY_PATH = OperatorPath()


class ConsumerKind(StrEnum):
    """A QuantizeLinear, a sum of two computed tensors, another operator, or an output of the network."""

    Q = "q"
    SUM = "sum"
    OP = "op"
    OUTPUT = "output"


@record
class TensorConsumer:
    """Who reads a tensor, looked for past the operators that a Q could pass.

    Attributes:
        kind: What it is.
        node: The ONNX node; the tensor's name for a network output.
        op: Its operator.
        path: The operators on the way to it, and for a Q those that it moved up past, the nearest to the tensor first.
        scale: A Q's scale.
        feeds_weighted: Whether a convolution (or other layer with weights) lies behind it.
        gains: Whether Q/DQ in front of it is worth while: INT8 kernels exist for it, and its result is wanted in INT8.
        shares: Of a sum, whether each input comes from a DQ or is read by a Q, whose scale the sum can share.
    """

    kind: ConsumerKind
    node: str
    op: str
    path: tuple[PathStep, ...] = ()
    scale: Scale = None
    feeds_weighted: bool = False
    gains: bool = False
    shares: bool = False


@record
class TensorOrigin:
    """What writes a tensor, looked for up past operators that a Q could pass.

    Attributes:
        tensor: The tensor above the first of them.
        node: The ONNX node that writes it; empty for a network input.
        op: Its operator.
        convolution: The convolution whose layer the node is a part of; empty where it is none.
        path: The operators passed, the nearest to the tensor that was asked for first; a way of more than
            :data:`STEPS` is not followed further.
        int8: Whether the layer computes in INT8.
        boundary: The last node of that layer.
        quantizer: For a tensor that comes from a DQ: the Q's node in front of it, else the DQ's.
        scale: The scale of that.
    """

    tensor: str
    node: str
    op: str
    convolution: str = ""
    path: tuple[PathStep, ...] = ()
    int8: bool = False
    boundary: str = ""
    quantizer: str = ""
    scale: Scale = None


# Inputs ---------------------------------------------------------------------------------------------------------


class InputNotDequantized(Refusal, reason="input-not-dequantized"):
    """The data input does not come from a DQ.

    Attributes:
        tensor: The input's ONNX tensor.
        producer: What writes it.
        op: The producer's operator, ``Input`` for a network input.
        weights_quantized: Whether the weights come from a DQ.
        dq: The nearest DQ above, which cannot come down; empty where there is none.
        blocker: The first operator between that a DQ cannot pass.
    """

    tensor: str
    producer: str
    op: str
    weights_quantized: bool = False
    dq: str = ""
    blocker: PathStep | None = None
    elements: TensorSize | None = None


class WeightsNotDequantized(Refusal, reason="weights-not-dequantized"):
    """The weights do not come from a DQ, though the data does."""

    weight: str
    dq: str = ""
    elements: TensorSize | None = None


class WeightsNotConstant(Refusal, reason="weights-not-constant"):
    """The weights are computed at run time, or stored as a sparse tensor."""

    weight: str
    sparse: bool = False


class ScaleComputed(Refusal, reason="scale-computed"):
    """A scale is computed at run time, and written to ``tensor``."""

    apart = (*Refusal.apart, "node")  # whichever reads it

    quantizer: str
    tensor: str = ""


class TypesDiffer(Refusal, reason="types"):
    """Data and weights are quantized to types that cannot be multiplied."""

    dq: str
    weight_dq: str
    types: tuple[Precision, Precision]


class FloatTypesDiffer(Refusal, reason="float-types"):
    """Data and weights are dequantized to float types that differ; ``floats``: the float types of data and weights."""

    dq: str
    weight_dq: str
    floats: tuple[Precision, Precision]


class Deconvolution3D(Refusal, reason="convtranspose-3d"):
    """A ConvTranspose of three spatial dimensions without an activation and a Q behind it."""

    dq: str
    elements: TensorSize | None = None


class ActivationPerChannel(Refusal, reason="activation-per-channel"):
    """The data input has one scale per channel."""

    apart = (*Refusal.apart, "node")  # whichever reads it

    dq: str
    scales: Scale


class NonzeroZeroPoint(Refusal, reason="zero-point"):
    """A zero point is not 0; ``zero_points`` are the least and the greatest."""

    apart = (*Refusal.apart, "node")  # whichever reads it

    dq: str
    zero_points: tuple[int, int]
    unsigned: bool = False


class WeightsAxis(Refusal, reason="weights-axis"):
    """The weights are quantized along an axis that is not the outputs', by the Q or DQ ``dq``.

    ``transposed``: they are those of a ConvTranspose; ``written``: the node has the attribute; ``shape`` is that of the
    weights, empty where it is not known.
    """

    dq: str
    axis: int
    expected: int
    transposed: bool = False
    written: bool = True
    shape: tuple[int, ...] = ()


class WeightsShared(Refusal, reason="weights-shared"):
    """Several convolutions, and ``more``, read one quantized constant, which can be folded into one of them only."""

    apart = (*Refusal.apart, "node")  # whichever reads it

    weight: str
    convolutions: tuple[str, ...]
    more: int = 0


# Outputs --------------------------------------------------------------------------------------------------------


class OutputNotQuantized(Refusal, reason="output-not-quantized"):
    """No Q reads the result; ``activation`` is the pointwise one that the layer took in (``SiLU`` for a gated one)."""

    tensor: str
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None
    activation: PathStep | None = None


class OutputDifferentScales(Refusal, reason="output-different-scales"):
    """Several Qs with different scales read the result, and nothing else."""

    tensor: str
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class OutputManyConsumers(Refusal, reason="output-many-consumers"):
    """A Q and something that reads float read the result."""

    tensor: str
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class OutputScale(Refusal, reason="output-scale"):
    """The Q behind cannot be taken in: its scale is computed, or there is one for each channel."""

    quantizer: str
    computed: bool


# Residual Adds --------------------------------------------------------------------------------------------------


class ResidualFloat(Refusal, reason="residual-float"):
    """The Add's other input is float: the ONNX tensor ``tensor``, which ``residual`` writes and ``quantizers`` read.

    ``readers`` are all that read the sum.
    """

    add: str
    residual: TensorOrigin
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None
    tensor: str = ""
    quantizers: tuple[TensorConsumer, ...] = ()


class ResidualBothQuantized(Refusal, reason="residual-both-quantized"):
    """A Q is between the convolution and the Add, whose other input is quantized as well."""

    add: str
    quantizer: str
    scales: tuple[Scale, Scale] = (None, None)
    elements: TensorSize | None = None


class AddOutputNotQuantized(Refusal, reason="add-output-not-quantized"):
    """The residual is quantized, what reads the Add is not (or not alone)."""

    add: str
    residual: TensorOrigin
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class ActivationBeforeAdd(Refusal, reason="activation-before-add"):
    """An activation is between the convolution and the Add; ``readers``: everything that reads the sum."""

    apart = (*Refusal.apart, "readers")

    add: str
    activation: str
    residual: TensorOrigin | None = None
    elements: TensorSize | None = None
    readers: tuple[TensorConsumer, ...] = ()


class ActivationJoined(Refusal, reason="activation-joined"):
    """What follows the convolution is one kernel of ``pointwise`` nodes, which reads from ``others`` as well."""

    pointwise: tuple[str, ...]
    others: tuple[TensorOrigin, ...]
    elements: TensorSize | None = None


class InsideActivation(Refusal, reason="inside-activation"):
    """A Q between a convolution and its activation, or between a SiLU's gate and its Mul: they stay layers apart.

    Attributes:
        convolution: The convolution.
        activation: The activation behind, for a gate the Sigmoid.
        silu: Whether it is SiLU.
        gate: Whether the Q is behind the Sigmoid.
        second: A Q behind the Sigmoid as well.
    """

    apart = (*Refusal.apart, "second")

    convolution: str
    activation: str
    silu: bool
    gate: bool = False
    second: str = ""
    elements: TensorSize | None = None


# Pads -----------------------------------------------------------------------------------------------------------


class BehindPad(Refusal, reason="behind-pad"):
    """A pair is between a Pad of zeros and its convolution, so that the Pad runs in INT8 as a layer of its own."""

    pad: str


# Folding --------------------------------------------------------------------------------------------------------


class BatchNormNotConstant(Refusal, reason="batchnorm-not-constant"):
    """The BatchNormalization's parameters are not plain constants; the parser decomposed it."""

    batchnorm: str
    elements: TensorSize | None = None


class ConvTransposeBatchNorm(Refusal, reason="convtranspose-batchnorm"):
    """A BatchNormalization behind a quantized ConvTranspose is not folded."""

    batchnorm: str
    elements: TensorSize | None = None


# Motion ---------------------------------------------------------------------------------------------------------


class NotCommuting(Refusal, reason="not-commuting"):
    """A Q cannot move up past the operator."""

    op: str
    quantizer: str


class ManyConsumers(Refusal, reason="many-consumers"):
    """The operator's result has other readers than the Q (or the DQ other readers than the operator)."""

    op: str
    quantizer: str
    readers: tuple[TensorConsumer, ...]


class ConcatReadElsewhere(Refusal, reason="output-not-only-quantized"):
    """The Concat's result is read by something else than the Q."""

    readers: tuple[TensorConsumer, ...]


class ConcatScales(Refusal, reason="concat-scales"):
    """The parts of a Concat are quantized with other scales than the Concat.

    ``parts``: the scale of each input, of its DQ or another Q on it, or None where it has neither; ``behind``: that of
    the Q that went to each of them.
    """

    parts: tuple[Scale, ...]
    behind: Scale
    elements: TensorSize | None = None


class ScalesDiffer(Refusal, reason="scales-differ"):
    """Quantizers in a row, or on one tensor, have different scales."""

    tensor: str
    quantizers: tuple[str, ...]
    scales: tuple[Scale, ...]


class PoolingOneSide(Refusal, reason="pooling-one-side"):
    """An averaging pooling is quantized on one side only; ``quantized_input``: whether the side is its input."""

    quantized_input: bool
    origin: TensorOrigin
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class ReduceNotPooling(Refusal, reason="reduce-not-pooling"):
    """An average that is not over height and width with keepdims=1 is no pooling, and runs in float.

    ``dq`` is in front of it (empty where none is), ``readers`` are all that read its result.
    """

    apart = (*Refusal.apart, "dq", "readers")

    dq: str
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class InMyelin(Refusal, reason="in-myelin"):
    """A layer with weights was handed to Myelin with what is connected to it, and runs in float there.

    ``trigger`` is the operator that only Myelin runs; whether data and weights come from DQs.
    """

    trigger: PathStep
    data_quantized: bool
    weights_quantized: bool


class OutsideRules(Refusal, reason="outside-rules"):
    """Data or weights are quantized to FP8 or INT4, of which the Q/DQ passes of INT8 say nothing."""

    dq: str
    precision: Precision


class RemainingConversion(Refusal, reason="stays"):
    """Nothing absorbed a Q or DQ: it is a conversion of the engine.

    Attributes:
        name: The conversion's name in the engine (a copy in front of a Concat ends with ``_clone_<input>``).
        convolutions: What has the converted tensor as its data.
        pair: For a DQ the Q in front of it, for a conversion from INT8 to INT8 that of the first pair.
        first_scale: For such a conversion the scale that it reads.
        requantizes: Whether it is one.
        precision: The quantized type.
        quantize: Whether it is a Q.
        attention: Whether it quantizes what a Softmax gives to a MatMul of two computed tensors.
        evidence: How well it is proven that it stays there.
        tensor: The ONNX tensor that it converts.
        scale: Its scale.
        origin: What writes that tensor.
        siblings: Everything that reads it.
        behind: Everything that reads the converted tensor.
        passed: What it moved past, the last first.
        blocked: What kept it from moving on.
        elements: Values converted each time; None where shapes are not known.
    """

    name: str
    quantize: bool
    tensor: str
    scale: Scale
    origin: TensorOrigin
    siblings: tuple[TensorConsumer, ...]
    behind: tuple[TensorConsumer, ...]
    passed: tuple[PathStep, ...] = ()
    blocked: Refusal | None = None
    elements: TensorSize | None = None
    convolutions: tuple[str, ...] = ()
    pair: str = ""
    first_scale: Scale = None
    requantizes: bool = False
    precision: Precision = Precision.INT8
    attention: bool = False
    evidence: Evidence = Evidence.SEEN

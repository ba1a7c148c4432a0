"""Reasons for which a pass did not fire: one frozen class for each.

A record has the nodes and values that decided. The findings (``qdqtool.findings``) are made from
these records and look nothing up again, so that users read what the simulator saw.

The first classes describe a tensor: its consumers, its producer, the path between, its size.
"""

from __future__ import annotations

from enum import StrEnum

from qdqtool.ir.qdq import PerChannel
from qdqtool.types import Evidence, Precision, Refusal
from qdqtool.util.records import record

Scale = float | PerChannel | None
"""One scale, one for each channel, or None if unknown."""

STEPS = 100  # of a path that are listed; networks have a dozen


@record
class TensorSize:
    """Size of a tensor.

    Attributes:
        shape: Its shape without the batch, such as ``64x80x80``.
        values: Number of values. An unknown batch counts as 1.
    """

    shape: str
    values: int


@record
class PathStep:
    """An operator between a tensor and its consumer, or one that a Q moved past.

    Attributes:
        node: The ONNX node.
        op: Its operator.
        part: Position of the Concat's input that the path leads through; -1 for other operators.
    """

    node: str
    op: str
    part: int = -1


class OperatorPath:
    """Operators that a Q moved up past, or a DQ down past.

    A list that grows at its end and shares its beginning with the paths of copies.

    Attributes:
        ops: Types of the operators, each once.
    """

    __slots__ = ("_before", "_step", "ops")
    ops: frozenset[str]

    def __init__(self, step: PathStep | None = None, before: OperatorPath | None = None) -> None:
        self._step = step
        self._before = before
        ops = before.ops if before is not None else frozenset()
        self.ops = ops if step is None or step.op in ops else ops | {step.op}

    def with_step(self, step: PathStep) -> OperatorPath:
        """Return the path with one more step at its end."""
        return OperatorPath(step, self)

    def latest_steps(self, most: int = STEPS) -> tuple[PathStep, ...]:
        """Return at most ``most`` steps, the latest first."""
        steps: list[PathStep] = []
        path: OperatorPath | None = self
        while path is not None and path._step is not None and len(steps) < most:
            steps.append(path._step)
            path = path._before
        return tuple(steps)

    def steps(self) -> tuple[PathStep, ...]:
        """Return the steps in order; of a longer path the last :data:`STEPS`."""
        return self.latest_steps()[::-1]


EMPTY_PATH = OperatorPath()


class ConsumerKind(StrEnum):
    """Q, sum of two computed tensors, another operator, or an output of the network."""

    Q = "q"
    SUM = "sum"
    OP = "op"
    OUTPUT = "output"


@record
class TensorConsumer:
    """A consumer of a tensor, past the operators that a Q could pass.

    Attributes:
        kind: Its kind.
        node: The ONNX node; the tensor's name for a network output.
        op: Its operator.
        path: Operators on the way to it, and for a Q those that it moved up past, the nearest to
            the tensor first.
        scale: A Q's scale.
        feeds_weighted: Whether a convolution (or other layer with weights) follows.
        gains: Whether Q/DQ before it pays off: INT8 kernels exist for it, and its result is needed
            in INT8.
        shares: For a sum, whether each input comes from a DQ or is read by a Q, whose scale the sum
            can share.
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
    """Producer of a tensor, past the operators that a Q could pass.

    Attributes:
        tensor: The tensor before the first of them.
        node: The ONNX node that produces it; empty for a network input.
        op: Its operator.
        convolution: The convolution whose layer contains the node; empty if there is none.
        path: The operators passed, the nearest to the first tensor first. A path ends after
            :data:`STEPS` operators.
        int8: Whether the layer computes in INT8.
        boundary: The last node of that layer.
        quantizer: For a tensor that comes from a DQ: the Q's node before it, else the DQ's.
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


# Inputs ---------------------------------------------------------------------------------------


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

    apart = (*Refusal.apart, "node")  # all consumers are alike

    quantizer: str
    tensor: str = ""


class TypesDiffer(Refusal, reason="types"):
    """Data and weights are quantized to types that cannot be multiplied."""

    dq: str
    weight_dq: str
    types: tuple[Precision, Precision]


class FloatTypesDiffer(Refusal, reason="float-types"):
    """Data and weights are dequantized to float types that differ.

    Attributes:
        dq: DQ of the data.
        weight_dq: DQ of the weights.
        floats: Float types of data and weights.
    """

    dq: str
    weight_dq: str
    floats: tuple[Precision, Precision]


class Deconvolution3D(Refusal, reason="convtranspose-3d"):
    """A ConvTranspose of three spatial dimensions without an activation and a Q after it."""

    dq: str
    elements: TensorSize | None = None


class ActivationPerChannel(Refusal, reason="activation-per-channel"):
    """The data input has one scale per channel."""

    apart = (*Refusal.apart, "node")  # all consumers are alike

    dq: str
    scales: Scale


class NonzeroZeroPoint(Refusal, reason="zero-point"):
    """A zero point is not 0; ``zero_points`` are the smallest and the largest."""

    apart = (*Refusal.apart, "node")  # all consumers are alike

    dq: str
    zero_points: tuple[int, int]
    unsigned: bool = False


class WeightsAxis(Refusal, reason="weights-axis"):
    """The weights are quantized along an axis that is not that of the outputs.

    Attributes:
        dq: Q or DQ of the weights.
        axis: Axis of the scales.
        expected: Axis of the outputs.
        transposed: Whether they are weights of a ConvTranspose.
        written: Whether the node has the attribute.
        shape: Shape of the weights; empty if unknown.
    """

    dq: str
    axis: int
    expected: int
    transposed: bool = False
    written: bool = True
    shape: tuple[int, ...] = ()


class WeightsShared(Refusal, reason="weights-shared"):
    """Several convolutions read one quantized constant, which only one of them can fold.

    Attributes:
        weight: The constant.
        convolutions: The convolutions.
        more: Number of further ones.
    """

    apart = (*Refusal.apart, "node")  # all consumers are alike

    weight: str
    convolutions: tuple[str, ...]
    more: int = 0


# Outputs --------------------------------------------------------------------------------------


class OutputNotQuantized(Refusal, reason="output-not-quantized"):
    """No Q reads the result.

    Attributes:
        tensor: The result.
        readers: Its consumers.
        elements: Its size.
        activation: Pointwise activation that the layer fused (``SiLU`` for a gated one).
    """

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
    """The Q after it cannot be fused: its scale is computed, or varies by channel."""

    quantizer: str
    computed: bool


# Residual Adds --------------------------------------------------------------------------------


class ResidualFloat(Refusal, reason="residual-float"):
    """The Add's other input is float.

    Attributes:
        add: The Add.
        residual: Producer of the other input.
        readers: Consumers of the sum.
        elements: TensorSize of the sum.
        tensor: ONNX tensor of the other input.
        quantizers: Qs that read that tensor.
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
    """The residual is quantized, but not all consumers of the Add are."""

    add: str
    residual: TensorOrigin
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class ActivationBeforeAdd(Refusal, reason="activation-before-add"):
    """An activation is between the convolution and the Add.

    Attributes:
        add: The Add.
        activation: The activation.
        residual: Producer of the Add's other input.
        elements: TensorSize of the sum.
        readers: Consumers of the sum.
    """

    apart = (*Refusal.apart, "readers")

    add: str
    activation: str
    residual: TensorOrigin | None = None
    elements: TensorSize | None = None
    readers: tuple[TensorConsumer, ...] = ()


class ActivationJoined(Refusal, reason="activation-joined"):
    """The convolution is followed by one kernel that has other inputs as well.

    Attributes:
        pointwise: Nodes of the kernel.
        others: Producers of its other inputs.
        elements: TensorSize of the result.
    """

    pointwise: tuple[str, ...]
    others: tuple[TensorOrigin, ...]
    elements: TensorSize | None = None


class InsideActivation(Refusal, reason="inside-activation"):
    """A Q separates a convolution from its activation, or a SiLU's Sigmoid from its Mul.

    Both remain separate layers.

    Attributes:
        convolution: The convolution.
        activation: The activation; for a gate the Sigmoid.
        silu: Whether it is SiLU.
        gate: Whether the Q is after the Sigmoid.
        second: A further Q after the Sigmoid.
    """

    apart = (*Refusal.apart, "second")

    convolution: str
    activation: str
    silu: bool
    gate: bool = False
    second: str = ""
    elements: TensorSize | None = None


# Pads -----------------------------------------------------------------------------------------


class BehindPad(Refusal, reason="behind-pad"):
    """A Q/DQ pair is between a Pad of zeros and its convolution.

    The Pad becomes a separate layer in INT8.
    """

    pad: str


# Folding --------------------------------------------------------------------------------------


class BatchNormNotConstant(Refusal, reason="batchnorm-not-constant"):
    """The BatchNormalization's parameters are not plain constants; the parser decomposed it."""

    batchnorm: str
    elements: TensorSize | None = None


class ConvTransposeBatchNorm(Refusal, reason="convtranspose-batchnorm"):
    """A BatchNormalization after a quantized ConvTranspose is not folded."""

    batchnorm: str
    elements: TensorSize | None = None


# Motion ---------------------------------------------------------------------------------------


class NotCommuting(Refusal, reason="not-commuting"):
    """A Q cannot move up past the operator."""

    op: str
    quantizer: str


class ManyConsumers(Refusal, reason="many-consumers"):
    """The operator's result has other consumers than the Q.

    Or the DQ has other consumers than the operator.
    """

    op: str
    quantizer: str
    readers: tuple[TensorConsumer, ...]


class ConcatReadElsewhere(Refusal, reason="output-not-only-quantized"):
    """The Concat's result has other consumers than the Q."""

    readers: tuple[TensorConsumer, ...]


class ConcatScales(Refusal, reason="concat-scales"):
    """The parts of a Concat are quantized with other scales than the Concat.

    Attributes:
        parts: Scale of each input, of its DQ or another Q on it; None if it has neither.
        behind: Scale of the Q that moved to each of them.
        elements: TensorSize of the result.
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
    """An averaging pooling is quantized on one side only.

    Attributes:
        quantized_input: Whether that side is its input.
        origin: Producer of its input.
        readers: Consumers of its result.
        elements: TensorSize of its result.
    """

    quantized_input: bool
    origin: TensorOrigin
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class ReduceNotPooling(Refusal, reason="reduce-not-pooling"):
    """An average that does not become a pooling, and runs in float.

    It is not over height and width with keepdims=1.

    Attributes:
        dq: DQ before it; empty if there is none.
        readers: Consumers of its result.
        elements: TensorSize of its result.
    """

    apart = (*Refusal.apart, "dq", "readers")

    dq: str
    readers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None


class InMyelin(Refusal, reason="in-myelin"):
    """A layer with weights runs in float in Myelin, together with connected layers.

    Attributes:
        trigger: Operator that only Myelin runs.
        data_quantized: Whether the data comes from a DQ.
        weights_quantized: Whether the weights come from a DQ.
    """

    trigger: PathStep
    data_quantized: bool
    weights_quantized: bool


class OutsideRules(Refusal, reason="outside-rules"):
    """Data or weights are quantized to FP8 or INT4.

    The Q/DQ passes of INT8 do not cover these types.
    """

    dq: str
    precision: Precision


class RemainingConversion(Refusal, reason="stays"):
    """A Q or DQ that nothing absorbed: it is a conversion of the engine.

    Attributes:
        name: The conversion's name in the engine (a copy before a Concat ends with
            ``_clone_<input>``).
        quantize: Whether it is a Q.
        tensor: The ONNX tensor that it converts.
        scale: Its scale.
        origin: Producer of that tensor.
        siblings: Consumers of that tensor.
        behind: Consumers of the converted tensor.
        passed: Operators that it moved past, the last first.
        blocked: Refusal that kept it from moving on.
        elements: Values converted in each run; None if shapes are unknown.
        convolutions: Layers with weights that have the converted tensor as their data.
        pair: For a DQ the Q before it, for a conversion from INT8 to INT8 that of the first pair.
        first_scale: For such a conversion the scale that it reads.
        requantizes: Whether it is one.
        precision: The quantized type.
        attention: Whether it quantizes the result of a Softmax for a MatMul of two computed
            tensors.
        evidence: How well it is proven that it remains there.
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

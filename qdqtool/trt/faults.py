"""What the checks of a model find, without simulation: one frozen class for each kind, as the passes' refusals are.

What Myelin takes of a network, which no pass refuses, is reported in the same way.
A fault that a pass finds too (weights without a DQ, a zero point that is not 0) is the pass's class.
"""

from enum import StrEnum

from qdqtool.trt.refusals import PathStep, Scale
from qdqtool.types import Precision, Refusal
from qdqtool.util.records import record

CHECK = "model"  # who looked: no pass


class NothingQuantized(Refusal):
    """A model without any Q/DQ or integer operator, with so many ``convolutions`` that could have some.

    These are Conv, ConvTranspose, Gemm and MatMul with constant weights.
    """

    convolutions: int


# Quantizers -----------------------------------------------------------------------------------------------------


class TypeUnknown(Refusal):
    """A quantizer of a type that TensorRT does not have; ``kind`` names it."""

    kind: str


class UnsignedZeroPoint(Refusal):
    """uint8 with zero point 0. ``given`` is False where the zero point is missing, which means uint8 in ONNX."""

    given: bool
    scale: Scale


class ZeroPointMissing(Refusal):
    """A quantizer without its third input."""

    op: str


class ZeroPointCount(Refusal):
    """Other numbers of scales and zero points."""

    scales: int
    zero_points: int


class ScaleHalf(Refusal):
    """float16 scales, all read as float32."""

    scale: Scale


class ScaleNotPositive(Refusal):
    """A scale that is zero, negative or no number.

    Attributes:
        value: The first such scale.
        bad: How many there are.
        count: How many scales there are.
        channels: The first channels with one.
    """

    value: float
    bad: int
    count: int
    channels: tuple[int, ...]


@record
class DeadPart:
    """A tensor of which a quantizer makes one value.

    Attributes:
        tensor: Its name; a part of what the quantizer reads, or all of it.
        low: Its least possible value.
        high: Its greatest possible value.
        node: The node that bounds it.
        op: That node's operator.
        value: What every value becomes.
    """

    tensor: str
    low: float
    high: float
    node: str
    op: str
    value: float


class ScaleDead(Refusal):
    """A scale that makes one value of every possible value of a tensor.

    Attributes:
        scale: Of the quantizer.
        zero_point: Of the quantizer.
        parts: The tensors.
        whole: Whether the first part is all that the quantizer reads; else a Concat joins the parts with others.
    """

    scale: float
    zero_point: int
    parts: tuple[DeadPart, ...]
    whole: bool

    @property
    def reach(self) -> float | None:
        """The largest magnitude that the whole tensor can have; None if no scale follows from it."""
        reach = max(abs(self.parts[0].low), abs(self.parts[0].high))
        return reach if self.whole and 0 < reach < float("inf") else None


class ScaleRank(Refusal):
    """A scale of several dimensions; ``blocked`` where that means blocks."""

    shape: tuple[int, ...]
    blocked: bool


class ScaleCount(Refusal):
    """Another number of scales than the axis of the tensor is long."""

    count: int
    axis: int
    shape: tuple[int | None, ...]


class AxisOpset(Refusal):
    """Scales for each channel in an opset without an axis; ``given`` where one is written all the same."""

    opset: int
    given: bool


# Weights and biases ---------------------------------------------------------------------------------------------


class WeightsBehind(Refusal):
    """Operators between the constant and its first quantizer, the nearest to it first, and how many more there are.

    ``stored`` where that quantizer is a DQ, of stored integers.
    """

    steps: tuple[PathStep, ...]
    quantizer: str
    stored: bool
    more: int = 0


class MisreadConstant(Refusal):
    """Something else than a DQ reads stored integers."""

    op: str
    tensor: str


class WeightsStored(Refusal):
    """Weights stored as integers, with a DQ alone."""

    convolution: str
    weight: str


@record
class ActivationFit:
    """How a Q fits the values that were seen in front of it.

    Attributes:
        quantizer: The Q.
        scale: Its scale, in units of the tensor per integer step.
        clipped: Share of the values that it clips.
        lost: Share of the tensor's power (sum of squares) that lies beyond what the scale holds.
        used: Largest magnitude over the largest that the scale holds: the share of the steps that is used.
    """

    quantizer: str
    scale: float
    clipped: float
    lost: float
    used: float


class ActivationScales(Refusal):
    """Scales of activations that do not fit the data; the node is the worst Q.

    Attributes:
        worst: The worst ones, the worst first.
        bad: How many there are.
        total: How many were looked at.
        samples: On how many samples.
        factor: Largest magnitude over what the scales hold, where that is about the same for all; 0 where it is not.
    """

    worst: tuple[ActivationFit, ...]
    bad: int
    total: int
    samples: int
    factor: float = 0.0


class OutlierScales(Refusal):
    """Scales that have to cover a few values far larger than the others; the node is the worst Q.

    Attributes:
        worst: The worst Qs with their scales and the largest value held over the typical one, the worst first.
        bad: How many there are.
        total: How many were looked at.
        samples: On how many samples; 0 where the gains of normalizations in front tell it.
        linear: Whether a matrix product reads one of them: what ``--smooth`` can help.
    """

    worst: tuple[tuple[str, float, float], ...]
    bad: int
    total: int
    samples: int
    linear: bool


class QuantizedStream(Refusal):
    """An Add of a transformer's residual stream that reads the DQs of ``pairs``; ``norm`` normalizes the sum."""

    pairs: tuple[str, ...]
    norm: str


class WeightScalesCause(StrEnum):
    """Why scales do not fit the weights that they are for."""

    AXIS = "axis"
    FACTOR = "factor"
    OTHER_WEIGHTS = "other-weights"
    TENSOR = "tensor"
    TOO_LARGE = "too-large"
    EXCEPTION = "exception"


class WeightScales(Refusal):
    """Scales that do not fit the weights; the node is the worst layer.

    Attributes:
        cause: The likely cause.
        layers: The layers where they do not fit.
        total: Layers that were looked at.
        clipped: Share of the channels whose largest weight is more than half beyond what their scale holds.
        wasted: Share of those whose scale holds four times their largest weight or more.
        worst: Largest weight over the largest that the scale holds, in the worst layer.
        factor: The one factor, where it is one.
        channels: How many channels are exceptions, where the others fit.
    """

    cause: WeightScalesCause
    layers: tuple[str, ...]
    total: int
    clipped: float
    wasted: float
    worst: float
    factor: float
    channels: int = 0


class WeightsPerTensor(Refusal):
    """Weights with one scale for all output channels, whose ranges differ; the node is the worst layer.

    Attributes:
        layers: The layers.
        total: Layers with quantized weights that were looked at.
        spread: Range of the widest channel over that of the narrowest, in the worst layer.
        lost: Share of the channels of the worst layer that lose two bits or more.
        lossy: Layers where at least a quarter of the channels lose two bits or more.
        rounded: Layers of whose weights the file holds the rounded values only.
    """

    layers: tuple[str, ...]
    total: int
    spread: float
    lost: float
    lossy: int
    rounded: int


class WeightsOutput(Refusal):
    """Quantized weights that are an output of the network."""

    convolution: str


class BiasQuantized(Refusal):
    """A bias behind a DQ."""

    convolution: str
    precision: Precision


class ProductOfActivations(Refusal):
    """A product of two quantized tensors that are computed at run time."""


class FloatDeconvolution(Refusal):
    """A quantized ConvTranspose on a target that computes it in float."""


# Placement ------------------------------------------------------------------------------------------------------


class ConcatAfterHead(Refusal):
    """One scale for everything that a Concat behind the head joins.

    Attributes:
        concat: The Concat.
        scale: The scale; None if it is not known or not the same for all channels.
        scores: A part that a Sigmoid or Softmax makes, at most 1; empty if none is known.
        own: The scale that the scores have before the Concat; None if they have none.
        raw: Whether it joins results of the last convolutions as they are: logits.
    """

    concat: str
    scale: float | None = None
    scores: str = ""
    own: float | None = None
    raw: bool = False

    @property
    def lost_below(self) -> float:
        """The scores that become 0: all up to this one."""
        return 0.0 if self.scale is None or not self.scores else self.scale / 2


class HeadQuantized(Refusal):
    """A quantized layer of a head's end; ``branch``: ``dfl``, ``box``, ``class``, ``coordinates`` or ``head``."""

    branch: str


# Operators and shapes -------------------------------------------------------------------------------------------


class IntegerOperator(Refusal):
    """An operator of onnxruntime's integer formats."""

    op: str


class UnknownOperator(Refusal):
    """A plugin or unknown operator; ``more`` others have it too."""

    op: str
    more: int


class OtherTypes(Refusal):
    """Quantizers of other types than 8-bit integers; ``kinds`` are the types and how many nodes have them."""

    kinds: tuple[tuple[str, int], ...]


class FusedByMyelin(Refusal):
    """Attention and normalizations of a network, which Myelin compiles; the node is the first in graph order.

    Attributes:
        last: The last node in graph order.
        nodes: How many nodes it takes, Q and DQ apart.
        products: Matrix products among them.
        int8: Those of them that compute in INT8.
        softmaxes: Softmax nodes among them.
        norms: Normalizations among them.
        fused: Q and DQ that become part of its kernels.
        uncertain: How many of these may be conversions instead.
        possible: Conversions that may be part of it instead.
    """

    last: str
    nodes: int
    products: int
    int8: int
    softmaxes: int
    norms: int
    fused: int
    uncertain: int
    possible: int


class FloatNormalization(Refusal):
    """A normalization or Softmax behind a DQ."""

    op: str


class Convolution3D(Refusal):
    """A quantized convolution of three spatial dimensions."""


class LargeKernel(Refusal):
    """A quantized convolution with a kernel that builds failed on."""

    kernel: tuple[int, ...]


class GroupedConvolution(Refusal):
    """A grouped convolution that is not depthwise."""

    groups: int
    channels: int


class ChannelNumbers(Refusal):
    """Numbers of channels that INT8 kernels dislike; ``odd`` are no multiples of 16, ``small``: one is less than 16."""

    inputs: int
    outputs: int
    odd: tuple[int, ...]
    small: bool


class DepthwiseSilu(Refusal):
    """A depthwise convolution with SiLU; ``last`` where it is known that no convolution lies behind it."""

    last: bool = False


class DepthwiseAdd(Refusal):
    """A depthwise convolution in front of an Add."""

    add: str


class FloatFlag(Refusal):
    """What is not quantized needs the builder's permission to run in FP16."""


class FloatEinsum(Refusal):
    """A matrix product that an Einsum computes; ``quantized`` where both operands are dequantized in front of it."""

    equation: str
    quantized: bool


class DecomposedNorm(Refusal):
    """A layer normalization in pieces, whose squares FP16 may not hold; the node squares.

    Attributes:
        exact: Whether a LayerNormalization, which the target takes, computes the same.
        opset: The model's.
        alone: The operator that squares, where no whole normalization was recognised.
    """

    exact: bool
    opset: int
    alone: str = ""


class ConstantsInHalf(Refusal):
    """Operands of arithmetic that FP16 cannot hold; the node reads the first.

    ``first``: the first nodes that read one, with the value. How many are too ``large``, become zero or FP16's smallest
    number (``small``), or are ``denormal`` in FP16 otherwise.
    """

    first: tuple[tuple[str, float], ...]
    large: int
    small: int
    denormal: int


class RemainingFloat(Refusal):
    """Convolutions and matrix products (``products`` of ``total``) read or write FP32, which strong types keep."""

    convolutions: int
    total: int
    first: str
    products: int = 0

"""Faults that the checks of a model find without simulation: one frozen class for each.

They are like the passes' refusals. What Myelin compiles of a network is reported in the same way.
A fault that a pass finds too (weights without a DQ, a zero point that is not 0) has the pass's
class.
"""

from enum import StrEnum

from qdqtool.trt.refusals import PathStep, Scale
from qdqtool.types import Precision, Refusal
from qdqtool.util.records import record

CHECK = "model"  # stands for the pass in faults


class NothingQuantized(Refusal):
    """A model without any Q/DQ or integer operator.

    Attributes:
        convolutions: Number of Conv, ConvTranspose, Gemm and MatMul with constant weights, which
            could have Q/DQ.
    """

    convolutions: int


# Quantizers -----------------------------------------------------------------------------------


class TypeUnknown(Refusal):
    """A quantizer of a type that TensorRT does not have; ``kind`` names the type."""

    kind: str


class UnsignedZeroPoint(Refusal):
    """A quantizer to uint8 with zero point 0.

    Attributes:
        is_explicit: Whether it has a zero point. A missing one means uint8 in ONNX.
        scale: Its scale.
    """

    is_explicit: bool
    scale: Scale


class ZeroPointMissing(Refusal):
    """A quantizer without its third input."""

    op: str


class ZeroPointCount(Refusal):
    """Different numbers of scales and zero points."""

    scales: int
    zero_points: int


class ScaleHalf(Refusal):
    """float16 scales, all read as float32."""

    scale: Scale


class ScaleNotPositive(Refusal):
    """A scale that is zero, negative or not a number.

    Attributes:
        value: The first such scale.
        bad: Number of such scales.
        count: Number of all scales.
        channels: The first channels with such a scale.
    """

    value: float
    bad: int
    count: int
    channels: tuple[int, ...]


@record
class DeadPart:
    """A tensor whose values all become one value in a quantizer.

    Attributes:
        tensor: Its name: all or a part of the quantizer's input.
        low: Smallest possible value.
        high: Largest possible value.
        node: Node that bounds it.
        op: Operator of that node.
        value: The value that all values become.
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
        scale: Scale of the quantizer.
        zero_point: Zero point of the quantizer.
        parts: The tensors.
        whole: Whether the first part is the quantizer's whole input. Else a Concat joins the parts
            with others.
    """

    scale: float
    zero_point: int
    parts: tuple[DeadPart, ...]
    whole: bool

    @property
    def reach(self) -> float | None:
        """Largest magnitude of the whole tensor; None if no scale follows from it."""
        reach = max(abs(self.parts[0].low), abs(self.parts[0].high))
        return reach if self.whole and 0 < reach < float("inf") else None


class ScaleRank(Refusal):
    """A scale of several dimensions; ``blocked`` if they mean blocks."""

    shape: tuple[int, ...]
    blocked: bool


class ScaleCount(Refusal):
    """The number of scales differs from the length of the tensor's axis."""

    count: int
    axis: int
    shape: tuple[int | None, ...]


class AxisOpset(Refusal):
    """Scales for each channel in an opset without an axis.

    Attributes:
        opset: The opset.
        is_explicit: Whether the node has an axis nevertheless.
    """

    opset: int
    is_explicit: bool


# Weights and biases ---------------------------------------------------------------------------


class WeightsBehind(Refusal):
    """Operators are between a constant and its first quantizer.

    Attributes:
        steps: The operators, the nearest to the constant first.
        quantizer: The quantizer.
        stored: Whether it is a DQ of stored integers.
        more: Number of further operators.
    """

    steps: tuple[PathStep, ...]
    quantizer: str
    stored: bool
    more: int = 0


class MisreadConstant(Refusal):
    """A node other than a DQ reads stored integers."""

    op: str
    tensor: str


class WeightsStored(Refusal):
    """Weights stored as integers, with a DQ alone."""

    convolution: str
    weight: str


@record
class ActivationFit:
    """Fit of a Q to the values that were measured before it.

    Attributes:
        quantizer: The Q.
        scale: Its scale, in units of the tensor per integer step.
        clipped: Share of the values that it clips.
        lost: Share of the tensor's power (sum of squares) beyond the range of the scale.
        used: Largest magnitude over the largest in range: the share of the steps in use.
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
        bad: Number of such scales.
        total: Number of scales that were checked.
        samples: Number of samples.
        factor: Largest magnitude over the range of the scales, if it is about the same for all;
            else 0.
    """

    worst: tuple[ActivationFit, ...]
    bad: int
    total: int
    samples: int
    factor: float = 0.0


class OutlierScales(Refusal):
    """Scales that have to cover a few values far larger than the others.

    The node is the worst Q.

    Attributes:
        worst: The worst Qs with their scales and the largest value in range over the typical one,
            the worst first.
        bad: Number of such scales.
        total: Number of scales that were checked.
        samples: Number of samples; 0 if the gains of normalizations before show the outliers.
        linear: Whether a matrix product reads one of them, which ``--smooth`` can help.
    """

    worst: tuple[tuple[str, float, float], ...]
    bad: int
    total: int
    samples: int
    linear: bool


class QuantizedStream(Refusal):
    """An Add of a transformer's residual stream that reads DQs.

    Attributes:
        pairs: The DQs.
        norm: Normalization of the sum.
    """

    pairs: tuple[str, ...]
    norm: str


class WeightScalesCause(StrEnum):
    """Cause for which scales do not fit their weights."""

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
        layers: Layers where they do not fit.
        total: Number of layers that were checked.
        clipped: Share of the channels whose largest weight is more than half beyond the range of
            their scale.
        wasted: Share of the channels whose range is four times their largest weight or more.
        worst: Largest weight over the largest in range, in the worst layer.
        factor: The common factor, if there is one.
        channels: Number of channels that are exceptions, if the others fit.
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
    """Weights with one scale for output channels whose ranges differ.

    The node is the worst layer.

    Attributes:
        layers: The layers.
        total: Number of layers with quantized weights that were checked.
        spread: Range of the widest channel over that of the narrowest, in the worst layer.
        lost: Share of the channels of the worst layer that lose two bits or more.
        lossy: Number of layers where at least a quarter of the channels lose two bits or more.
        rounded: Number of layers whose exact weights the file lacks.
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
    """A bias that comes from a DQ."""

    convolution: str
    precision: Precision


class ProductOfActivations(Refusal):
    """A product of two quantized tensors that are computed at run time."""


class FloatDeconvolution(Refusal):
    """A quantized ConvTranspose on a target that computes it in float."""


# Placement ------------------------------------------------------------------------------------


class ConcatAfterHead(Refusal):
    """One scale for all parts of a Concat after the head.

    Attributes:
        concat: The Concat.
        scale: The scale; None if it is unknown or differs between channels.
        scores: A part that a Sigmoid or Softmax produces, at most 1; empty if none is known.
        own: Scale of the scores before the Concat; None if they have none.
        raw: Whether it joins results of the last convolutions unchanged: logits.
    """

    concat: str
    scale: float | None = None
    scores: str = ""
    own: float | None = None
    raw: bool = False

    @property
    def zero_limit(self) -> float:
        """Largest score that becomes 0."""
        return 0.0 if self.scale is None or not self.scores else self.scale / 2


class HeadQuantized(Refusal):
    """A quantized layer at the end of a head.

    Attributes:
        branch: ``dfl``, ``box``, ``class``, ``coordinates`` or ``head``.
    """

    branch: str


# Operators and shapes -------------------------------------------------------------------------


class IntegerOperator(Refusal):
    """An operator of onnxruntime's integer formats."""

    op: str


class UnknownOperator(Refusal):
    """A plugin or unknown operator; ``more`` other nodes have it too."""

    op: str
    more: int


class OtherTypes(Refusal):
    """Quantizers of other types than 8-bit integers.

    Attributes:
        kinds: The types, and the number of nodes of each.
    """

    kinds: tuple[tuple[str, int], ...]


class FusedByMyelin(Refusal):
    """Attention and normalizations that Myelin compiles; the node is the first one.

    Attributes:
        last: The last node in graph order.
        nodes: Number of nodes without Q and DQ.
        products: Number of matrix products.
        int8: Number of matrix products that compute in INT8.
        softmaxes: Number of Softmax nodes.
        norms: Number of normalizations.
        fused: Number of Q and DQ that become part of its kernels.
        uncertain: Number of these that may be conversions instead.
        possible: Number of conversions that may be part of it instead.
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
    """A normalization or Softmax after a DQ."""

    op: str


class Convolution3D(Refusal):
    """A quantized convolution of three spatial dimensions."""


class LargeKernel(Refusal):
    """A quantized convolution with a kernel size for which builds failed."""

    kernel: tuple[int, ...]


class GroupedConvolution(Refusal):
    """A grouped convolution that is not depthwise."""

    groups: int
    channels: int


class ChannelNumbers(Refusal):
    """Numbers of channels for which INT8 kernels are slow.

    Attributes:
        inputs: Input channels.
        outputs: Output channels.
        odd: Those that are not multiples of 16.
        small: Whether one is less than 16.
    """

    inputs: int
    outputs: int
    odd: tuple[int, ...]
    small: bool


class DepthwiseSilu(Refusal):
    """A depthwise convolution with SiLU.

    Attributes:
        last: Whether certainly no convolution follows.
    """

    last: bool = False


class DepthwiseAdd(Refusal):
    """A depthwise convolution before an Add."""

    add: str


class FloatFlag(Refusal):
    """The builder needs permission to run float layers in FP16."""


class FloatEinsum(Refusal):
    """A matrix product that an Einsum computes.

    Attributes:
        equation: Its equation.
        quantized: Whether both operands come from DQs.
    """

    equation: str
    quantized: bool


class DecomposedNorm(Refusal):
    """A decomposed LayerNorm, whose squares FP16 may not hold; the node squares.

    Attributes:
        exact: Whether a LayerNormalization, which the target accepts, computes the same.
        opset: Opset of the model.
        alone: Operator that squares, if no whole normalization was recognized.
    """

    exact: bool
    opset: int
    alone: str = ""


class ConstantsInHalf(Refusal):
    """Constants of arithmetic that FP16 cannot hold; the node reads the first.

    Attributes:
        first: The first nodes that read one, with the value.
        large: Number of constants that are too large.
        small: Number of constants that become zero or FP16's smallest number.
        denormal: Number of other constants that are denormal in FP16.
    """

    first: tuple[tuple[str, float], ...]
    large: int
    small: int
    denormal: int


class RemainingFloat(Refusal):
    """Layers that read or write FP32, which strong types keep.

    Attributes:
        convolutions: Number of convolutions and matrix products that do.
        total: Number of all.
        first: The first such layer.
        products: Number of matrix products that do.
    """

    convolutions: int
    total: int
    first: str
    products: int = 0

"""Reasons that concern weights and biases: their quantizers, scales and storage."""

from enum import StrEnum

from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.tensors import PathStep, TensorSize
from qdqtool.reasons.text import Message, list_names
from qdqtool.util.text import format_count


class OperatorsOnWeights(Reason):
    """Operators are between a constant and its first quantizer.

    Attributes:
        steps: The operators, the nearest to the constant first.
        quantizer: The quantizer.
        stored: Whether the quantizer is a DQ of stored integers.
        more: Number of operators that ``steps`` does not list.
    """

    rules = (fixable_rule("W-NONCONST", lambda r: not r.stored), fixable_rule("WEIGHT-INDIRECT"))

    steps: tuple[PathStep, ...]
    quantizer: str
    stored: bool
    more: int = 0

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node}: "
            f"{list_names((f'{s.node} ({s.op})' for s in self.steps), more=self.more)} "
            f"{'is' if len(self.steps) == 1 else 'are'} between the weights and {self.quantizer}."
        )


class MisreadConstant(Reason):
    """A node other than a DQ reads stored integers.

    Attributes:
        op: Operator of the node.
        tensor: ONNX tensor of the integers.
        quantizer: Quantizer whose zero point the node computes; empty for other nodes.
    """

    rules = (fixable_rule("WEIGHT-INDIRECT"),)

    op: str
    tensor: str
    quantizer: str

    def message(self, finding: Finding, cause: Cause) -> Message:
        if not self.quantizer:
            return f"{self.node} ({self.op}) reads the stored integers '{self.tensor}'.", ""
        return (
            f"{self.node} ({self.op}) is between the stored zero point '{self.tensor}' and "
            f"{self.quantizer}.",
            "Fold the node, so that the zero point itself is stored.",
        )


class WeightsStoredAsIntegers(Reason):
    """Weights stored as integers, with a DQ but no Q."""

    rules = (fixable_rule("WEIGHT-PREQUANT"),)

    convolution: str
    weight: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.convolution}: weights '{self.weight}' are stored as integers, with a DQ "
            f"({self.node}) but no Q."
        )


class WeightsNotDequantized(Reason, key="weights-not-dequantized"):
    """Weights that do not come from a DQ, although the data does.

    Attributes:
        weight: The weights.
        dq: Name of the DQ of the data; empty if it is obvious.
        elements: Size of the data.
        separate_activation: Activation that needs its own kernel if the layer computes in INT8 and
            writes float; empty if there is none.
        fp8: Whether the data is FP8, not INT8.
        slow_fp8: Whether the layer has no fast FP8 kernel, and the data is FP8.
    """

    # The separate activation, and two layout changes around it, may cost more than INT8 saves.
    rules = (
        FindingRule("W-NO-DQ", lambda r: r.slow_fp8),
        fixable_rule("W-NO-DQ", lambda r: not r.separate_activation),
        fixable_rule("W-NO-DQ", on_request=True),
    )

    identity_excludes = (*Reason.identity_excludes, "separate_activation", "fp8", "slow_fp8")

    weight: str
    dq: str = ""
    elements: TensorSize | None = None
    separate_activation: str = ""
    fp8: bool = False
    slow_fp8: bool = False

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        text = (
            f"{self.node} runs in float: its input is quantized"
            f"{f' ({self.dq})' if self.dq else ''}, but its weights '{self.weight}' are not."
        )
        if self.slow_fp8:
            return text, "Keep the weights float: this layer has no fast FP8 kernel (FP8-SLOW)."
        largest = 448 if self.fp8 else 127
        fix = f"Add Q/DQ to the weights: per output channel, scale = max|w| / {largest}."
        if not self.separate_activation:
            return text, f"{fix} No calibration is needed."
        return text, (
            f"{fix} This needs no calibration, but may cost time: a quantized layer that writes "
            f"float does not fuse its {self.separate_activation}. Q/DQ on the output as well "
            "prevent this, but need calibration."
        )


class WeightsNotConstant(Reason, key="weights-not-constant"):
    """Weights that are computed at run time, or stored as a sparse tensor."""

    rules = (FindingRule("W-NONCONST"),)

    weight: str
    sparse: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        state = "computed at run time"
        if self.sparse:
            state = "stored as a sparse tensor (store them as a dense tensor)"
        return f"{self.node} runs in float: its weights '{self.weight}' are {state}."

    def skip_reason(self) -> str:
        if self.sparse:
            return "its weights are stored as a sparse tensor: store them as a dense tensor"
        return "its weights are computed, not constant"


class WeightsAxis(Reason, key="weights-axis"):
    """Weights quantized along an axis that the target is not known to accept.

    This is an axis other than the output channels; for a ConvTranspose, it may be any axis.

    Attributes:
        dq: Q or DQ of the weights.
        axis: Axis of the scales.
        expected: Axis of the output channels.
        transposed: Whether the layer is a ConvTranspose.
        written: Whether the quantizer has the attribute ``axis``.
        shape: Shape of the weights; empty if unknown.
    """

    rules = (fixable_rule("CT-AXIS", lambda r: r.transposed), FindingRule("W-AXIS"))

    dq: str
    axis: int
    expected: int
    transposed: bool = False
    written: bool = True
    shape: tuple[int, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        shape = f" {list(self.shape)}" if self.shape else ""
        if self.transposed:
            return (
                (
                    f"{self.node}: {self.dq} has several scales along axis {self.axis} of the "
                    f"weights{shape}: no TensorRT version is known to compute a ConvTranspose "
                    "with per-channel scales correctly."
                ),
                ("Use one scale, the largest, for all weights of the ConvTranspose."),
            )
        written = (
            ""
            if self.written
            else (" (not stated: the default is 1 in ONNX, but 0 in TensorRT 8 and 9)")
        )
        return (
            f"{self.node}: {self.dq} uses axis {self.axis}{written} of the weights{shape}; the "
            f"output channels are axis {self.expected}."
        )


class WeightsShared(Reason, key="weights-shared"):
    """Quantized weights that several layers read, or that are also a network output.

    TensorRT can fuse the weights only into a single consumer.

    Attributes:
        weight: The weights.
        convolutions: Layers that read the weights.
        more: Number of layers that ``convolutions`` omits.
    """

    rules = (fixable_rule("W-SHARED"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all layers

    weight: str
    convolutions: tuple[str, ...]
    more: int = 0

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"weights '{self.weight}' are shared by "
            f"{list_names(self.convolutions, more=self.more)}; TensorRT folds the weights into "
            "only one of these layers."
        )


WeightScalesCause = StrEnum(
    "WeightScalesCause",
    [
        "AXIS",
        "FACTOR",
        "OTHER_WEIGHTS",
        "TENSOR",
        "TOO_LARGE",
        "SATURATED",
        "EXCEPTION",
    ],
)
"""Cause of scales that do not fit their weights."""


_WEIGHT_SCALE_ADVICE = {
    WeightScalesCause.AXIS: (
        "the scales fit another axis of the weights",
        "Compute the scales along the axis of the output channels, and set this axis in Q and DQ.",
    ),
    WeightScalesCause.FACTOR: (
        "all scales are wrong by the same factor, {factor:.4g}",
        "Use scale = max|w| / 127 for each channel. A factor of 1.008 comes from 128 instead of "
        "127, a factor of 2 from a wrong range.",
    ),
    WeightScalesCause.OTHER_WEIGHTS: (
        (
            "the scales were probably computed before BatchNormalization was folded into the "
            "weights, or from another checkpoint"
        ),
        "Compute the scales from the weights in this file: fold BatchNormalization first, then "
        "quantize.",
    ),
    WeightScalesCause.TENSOR: (
        "each layer has one scale for all channels, computed from some of them or from other "
        "weights",
        ("Use max|w| / 127 of the whole tensor, or better a scale for each output channel."),
    ),
    WeightScalesCause.TOO_LARGE: (
        (
            "the scales were probably computed from other weights, or from the range of a whole "
            "network"
        ),
        "Use scale = max|w| / 127 for each channel of the weights in this file.",
    ),
    WeightScalesCause.SATURATED: (
        "most weights are beyond the range of their scale, so the quantizer was not calibrated, "
        "or its range belongs to other weights",
        "Use scale = max|w| / 127 for each channel of the weights in this file.",
    ),
    WeightScalesCause.EXCEPTION: (
        "only {channels} do not fit",
        "Use scale = max|w| / 127 for every channel whose weights are not clipped on purpose.",
    ),
}


class WeightScales(Reason):
    """Weight scales that do not fit the weights; ``node`` is the layer with the worst fit.

    Attributes:
        cause: Likely cause.
        layers: Layers whose scales do not fit.
        total: Number of layers that were checked.
        clipped: Share of the channels whose weights are clipped.
        wasted: Share of the channels whose scale is more than four times too large.
        worst: Largest weight divided by the range of its scale, in the worst layer.
        factor: Factor by which all scales are wrong, if it is equal for all channels; else 1.
        channels: Number of channels whose scales do not fit, if all other channels fit.
    """

    rules = (fixable_rule("W-SCALE"),)

    cause: WeightScalesCause
    layers: tuple[str, ...]
    total: int
    clipped: float
    wasted: float
    worst: float
    factor: float
    channels: int = 0

    def message(self, finding: Finding, cause: Cause) -> Message:
        why, fix = _WEIGHT_SCALE_ADVICE[self.cause]
        channels = format_count(self.channels, "channel")
        shares = (
            f"{self.clipped:.0%} of the channels are clipped, {self.wasted:.0%} use a quarter of "
            f"the steps or less"
        )
        off = f"{self.worst:.3g} {'times' if self.worst >= 1 else 'of'} the range of its scale"
        return (
            f"the scales of the weights do not fit the weights in {len(self.layers)} of "
            f"{self.total} checked layers: "
            f"{why.format(factor=self.factor, channels=channels)} ({shares}; the largest "
            f"weight of {self.node} is {off}).",
            fix,
        )


class WeightsPerTensor(Reason):
    """Weights with a single scale although the ranges of the output channels differ.

    ``node`` is the worst layer.

    Attributes:
        layers: Layers with such weights. Layers with one scale for equal ranges are left out.
        total: Number of layers with quantized weights that were checked.
        spread: Largest range of a channel divided by the smallest, in the worst layer. It is that
            of the weights in the file, which may be rounded.
        lost: Share of the channels of the worst layer that lose two bits or more.
        lossy: Number of layers where at least a quarter of the channels lose two bits or more.
        rounded: Number of layers whose weights in the file are already rounded to the scale.
    """

    rules = (fixable_rule("W-PER-TENSOR"),)

    layers: tuple[str, ...]
    total: int
    spread: float
    lost: float
    lossy: int
    rounded: int

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = (
            f"in {len(self.layers)} of {self.total} layers with quantized weights, all output "
            "channels share one scale although their ranges differ. The ranges of the channels of "
            f"{self.node} differ by up to a factor of {self.spread:.3g}, and {self.lost:.0%} of "
            "these channels lose two bits or more"
        )
        text += (
            f". In {format_count(self.lossy, 'layer')}, at least a quarter of the channels lose "
            "two bits or more."
            if self.lossy
            else "."
        )
        if not self.rounded:
            return text, "Give each output channel its own scale: max|w| / 127."
        weights = "The weights" if self.rounded == len(self.layers) else "Some of the weights"
        text += f" {weights} in the file are rounded, so these numbers are approximate."
        some = "" if self.rounded == len(self.layers) else f" of {self.rounded} of these layers"
        return text, (
            f"The file has no float weights{some}. Quantize again from the float model, with "
            "qdqtool insert or with quantize_static(..., per_channel=True)."
        )


class QuantizedWeightsOutput(Reason):
    """Quantized weights that are also an output of the network."""

    rules = (FindingRule("W-Q-OUTPUT"),)

    convolution: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node}: the quantized weights of {self.convolution} are a network output."


class BiasQuantized(Reason):
    """A bias that comes from a DQ."""

    rules = (fixable_rule("BIAS-DQ"),)

    convolution: str
    precision: Precision

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{f'{self.convolution}: its bias' if self.convolution else 'a bias'} is "
            f"{str(self.precision).lower()} and goes through {self.node}."
        )

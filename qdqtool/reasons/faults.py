"""Faults that checks of the model find without simulation, and regions of Myelin.

Faults that passes of the simulator find as well, such as a zero point that is not 0, are in
`qdqtool.reasons.simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from qdqtool.reasons.tensors import PathStep, Scale
from qdqtool.reasons.text import Message, format_number, format_scale, list_names
from qdqtool.types import (
    Cause,
    Finding,
    FindingRule,
    Precision,
    Refusal,
    Severity,
    fixable,
)
from qdqtool.util.records import record
from qdqtool.util.text import format_count, format_layer_counts

_FAILED_BUILDS = (
    ": TensorRT builds with such a quantized layer failed (`include` quantizes it anyway)"
)
CHECK = "model"  # pass name in faults that checks of the model find


def _more(bad: int, listed: int) -> str:
    return f"; and {bad - listed} more" if bad > listed else ""


def describe_lost_scores(r: ConcatAfterHead) -> str:
    """Describe which scores of a detector become 0 because of the scale of a Concat."""
    if r.zero_limit >= 1:
        return "all scores become 0, and the detector finds nothing"
    return f"scores up to {format_number(r.zero_limit)} become 0"


def describe_harm(findings: Sequence[Finding]) -> str:
    """Describe the scores that a wrong Concat scale destroys; empty if none are destroyed."""
    for finding in findings:
        r = finding.causes[0].refusal
        if finding.severity == Severity.ERROR and isinstance(r, ConcatAfterHead) and r.scores:
            return f"{describe_lost_scores(r)} (the scale is {format_number(r.scale or 0.0)})"
    return ""


_HEADS = {
    "coordinates": "produces or reads boxes, reference points or sampling offsets",
    "dfl": "is the DFL (the mean over the bins of a box side)",
}


class NothingQuantized(Refusal):
    """A model without any Q/DQ or integer operator.

    Attributes:
        convolutions: Number of Conv, ConvTranspose, Gemm and MatMul with constant weights, which
            could have Q/DQ.
    """

    rules = (FindingRule("NO-QDQ"),)

    convolutions: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            "this model has no Q/DQ; "
            f"{'one layer' if self.convolutions == 1 else f'{self.convolutions} layers'} with "
            "constant weights could run in INT8."
        )


# Quantizers -----------------------------------------------------------------------------------


class TypeUnknown(Refusal):
    """A quantizer to a type that TensorRT lacks; ``kind`` names the type."""

    rules = (FindingRule("QTYPE"),)

    kind: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} quantizes to {self.kind}, which TensorRT does not support."


class UnsignedZeroPoint(Refusal):
    """A quantizer to uint8 with zero point 0.

    Attributes:
        is_explicit: Whether it has a zero point. A missing one means uint8 in ONNX.
        scale: Its scale.
    """

    rules = (fixable("ZP-UINT8"),)

    is_explicit: bool
    scale: Scale

    def message(self, finding: Finding, cause: Cause) -> str:
        default = "" if self.is_explicit else " (it has no zero point, which means uint8 in ONNX)"
        return (
            f"{self.node} quantizes to uint8{default}: TensorRT reads int8 and clips everything "
            f"above 127 x {format_scale(self.scale)}."
        )


class ZeroPointMissing(Refusal):
    """A quantizer without a zero point (third input)."""

    rules = (fixable("DQ-3-INPUTS"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} ({self.op}) has no zero-point input."


class ZeroPointCount(Refusal):
    """Different numbers of scales and zero points."""

    rules = (fixable("ZP-VOLUME"),)

    scales: int
    zero_points: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} has {self.scales} scales and {self.zero_points} zero points."


class ScaleHalf(Refusal):
    """float16 scales, all read as float32."""

    rules = (fixable("SCALE-FP16"),)

    scale: Scale

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} has float16 scales ({format_scale(self.scale)}), which TensorRT 8 reads "
            f"as float32."
        )


class ScaleOwner(StrEnum):
    """The values that a scale quantizes.

    Members: a tensor that is computed at run time; weights that are stored as floats; weights with
    values that are not finite; weights that are stored as integers, or whose data is missing.
    """

    ACTIVATION = "activation"
    WEIGHTS = "weights"
    BROKEN_WEIGHTS = "broken weights"
    INTEGERS = "integers"


_UNCALIBRATED = (
    "the quantizer was not calibrated, its range (amax) was not loaded before the export"
)
_RECALIBRATE = (
    "Calibrate again, and export the model with its ranges (check each amax for NaN, "
    "0 and infinity first). The file does not contain the range of an activation, so no fix "
    "without data can supply it. Alternatively, quantize the float model again (insert with "
    "images)."
)
_SMALLEST_HALF = 6e-8  # the smallest number that FP16 can hold


class ScaleNotPositive(Refusal):
    """A scale that is zero, negative or not a number.

    Attributes:
        value: The first such scale.
        bad: Number of such scales.
        count: Number of all scales.
        channels: The first channels with such a scale.
        owner: The values that it quantizes.
        is_finite: Whether all such scales are finite.
        is_negative: Whether all such scales are finite and below 0.
        is_half: Whether the scale is float16.
    """

    rules = (
        fixable("SCALE-NONPOS", lambda r: r.is_recomputable),
        FindingRule("SCALE-NONPOS"),
    )

    value: float
    bad: int
    count: int
    channels: tuple[int, ...]
    owner: ScaleOwner
    is_finite: bool
    is_negative: bool
    is_half: bool

    @property
    def is_recomputable(self) -> bool:
        """Whether the file alone determines a positive scale to replace this one."""
        if self.owner == ScaleOwner.INTEGERS:
            return self.is_finite
        return self.owner == ScaleOwner.WEIGHTS or self.is_negative

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = f"{self.node} has scale {format_number(self.value)}{self._place()}"
        if self.is_negative:
            return (f"{text}: a scale cannot be negative."), (
                "Use the absolute value of the scale."
            )
        if self.owner == ScaleOwner.ACTIVATION:
            return f"{text}: {self._activation_cause()}.", _RECALIBRATE
        if self.owner == ScaleOwner.BROKEN_WEIGHTS:
            return (
                f"{text}: the weights contain NaN or infinity, so the training diverged or the "
                "checkpoint is damaged.",
                "Export from a checkpoint with finite weights.",
            )
        if self.owner == ScaleOwner.INTEGERS and not self.is_finite:
            return (
                f"{text}: {_UNCALIBRATED}, or training diverged. The weights are stored as "
                "integers, from which their scale does not follow.",
                "Quantize the float weights again: max|w| of each output channel over 127.",
            )
        if self.value == 0:
            return (
                f"{text}: these weights are all 0 (pruned or dead){self._half_cause()}, or the "
                "quantizer was not calibrated.",
                "Use any positive scale for weights of zeros, max|w| over 127 for others.",
            )
        return (
            f"{text}: {_UNCALIBRATED}, or training diverged.",
            "Compute the scale from the weights in the file: max|w| over 127.",
        )

    def _activation_cause(self) -> str:
        if self.value == 0:
            return (
                f"the tensor was 0 on every calibration image{self._half_cause()}, or "
                f"{_UNCALIBRATED}"
            )
        half = " (or the scale exceeded FP16's 65504)" if self.is_half else ""
        return f"{_UNCALIBRATED}, or training or calibration diverged{half}"

    def _half_cause(self) -> str:
        """Return the text that a float16 scale may have been rounded to 0; empty for float32."""
        if not self.is_half:
            return ""
        return f", or its scale is below {_SMALLEST_HALF:g}, which float16 cannot hold"

    def _place(self) -> str:
        where = ""
        if self.count > 1:
            channels = ", ".join(map(str, self.channels)) + (
                " ..." if self.bad > len(self.channels) else ""
            )
            where = f" in {self.bad} of {self.count} channels ({channels})"
        return where


class ScaleImplausible(Refusal):
    """A positive scale that is too large or too small to come from a calibration.

    Attributes:
        value: The first such scale.
        bad: Number of such scales.
        count: Number of all scales.
        owner: The values that it quantizes.
        largest: Largest weight that such a scale quantizes; None if the weights are unknown.
    """

    rules = (
        fixable("SCALE-EXTREME", lambda r: r.owner == ScaleOwner.WEIGHTS),
        FindingRule("SCALE-EXTREME"),
    )

    value: float
    bad: int
    count: int
    owner: ScaleOwner = ScaleOwner.ACTIVATION
    largest: float | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        where = f" in {self.bad} of {self.count} channels" if self.count > 1 else ""
        text = (
            f"{self.node} has scale {format_number(self.value)}{where}, a range of "
            f"+-{format_number(127 * self.value)}: "
        )
        reason = f"{_UNCALIBRATED[0].upper()}{_UNCALIBRATED[1:]}, or training diverged."
        if self.largest is not None:
            effect = "clipped to it" if 127 * self.value < self.largest else "rounded to 0"
            return (
                f"{text}the weights, up to {format_number(self.largest)}, are {effect}. {reason}",
                "Compute the scale from the weights in the file: max|w| over 127.",
            )
        if self.owner != ScaleOwner.ACTIVATION:
            return (
                f"{text}no weights have such a range. {reason}",
                "Quantize the float weights again: max|w| of each output channel over 127.",
            )
        effect = (
            f"every value below {format_number(self.value / 2)} becomes 0"
            if self.value > 1
            else f"every value beyond +-{format_number(127 * self.value)} is clipped to it"
        )
        return f"{text}{effect}. {reason}", _RECALIBRATE


@record
class DeadPart:
    """A tensor, or part of one, all of whose values a quantizer maps to one value.

    Attributes:
        tensor: Name of the tensor: the quantizer's input, or a part that a Concat joins into it.
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
    """A scale with which a quantizer maps every possible value of a tensor to one value.

    Attributes:
        scale: Scale of the quantizer.
        zero_point: Zero point of the quantizer.
        parts: The tensors.
        whole: Whether the first part is the quantizer's whole input. Otherwise a Concat joins the
            parts with further tensors.
    """

    rules = (fixable("SCALE-DEAD"),)

    scale: float
    zero_point: int
    parts: tuple[DeadPart, ...]
    whole: bool

    @property
    def reach(self) -> float | None:
        """Largest magnitude of the whole tensor; None if it does not determine a scale."""
        reach = max(abs(self.parts[0].low), abs(self.parts[0].high))
        return reach if self.whole and 0 < reach < float("inf") else None

    def message(self, finding: Finding, cause: Cause) -> Message:
        first = self.parts[0]
        values = f"every value of '{first.tensor}'"
        if len(self.parts) > 1:
            values += f" (and of {len(self.parts) - 1} more parts)"
        bounds = f"{first.op} gives {format_number(first.low)} to {format_number(first.high)}"
        shift = f" and zero point {self.zero_point}" if self.zero_point else ""
        text = (
            f"{self.node} has scale {format_number(self.scale)}{shift}, which makes {values} "
            f"{format_number(first.value)}: {bounds}."
        )
        if not self.whole:
            return text, (
                "Keep the Concat in float, or quantize its inputs separately: no common scale "
                "fits all of them."
            )
        if self.reach is None:
            return text, ("Calibrate again: the scale and zero point belong to another tensor.")
        return text, (
            f"Scale {format_number(self.reach / 127)} covers all values of {first.op}; calibration "
            "may find a smaller one."
        )


class ScaleRank(Refusal):
    """A scale of several dimensions, which TensorRT reads as blocks if ``blocked``."""

    rules = (FindingRule("SCALE-RANK"),)

    shape: tuple[int, ...]
    blocked: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} has {'blocked ' if self.blocked else ''}scales of shape "
            f"{list(self.shape)}; TensorRT requires a scalar or a vector."
        )


class ScaleCount(Refusal):
    """The number of scales differs from the length of the tensor's axis."""

    rules = (FindingRule("SCALE-COUNT"),)

    count: int
    axis: int
    shape: tuple[int | None, ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        text = f"{self.node} has {self.count} scales for axis {self.axis} of weights "
        text += str(list(self.shape))
        if -len(self.shape) <= self.axis < len(self.shape):
            text += f", which has size {self.shape[self.axis]}"
        return f"{text}."


class AxisOpset(Refusal):
    """Scales for each channel in an opset without an axis.

    Attributes:
        opset: The opset.
        is_explicit: Whether the node has the axis attribute, although the opset does not allow it.
    """

    rules = (FindingRule("OPSET-AXIS"),)

    opset: int
    is_explicit: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        axis = "without an axis"
        if self.is_explicit:
            axis = "with the attribute axis, which this opset does not have"
        return f"{self.node} is per-channel in opset {self.opset}, {axis}."


# Weights and biases ---------------------------------------------------------------------------


class OperatorsOnWeights(Refusal):
    """Operators are between a constant and its first quantizer.

    Attributes:
        steps: The operators, the nearest to the constant first.
        quantizer: The quantizer.
        stored: Whether the quantizer is a DQ of stored integers.
        more: Number of operators that ``steps`` does not list.
    """

    rules = (fixable("W-NONCONST", lambda r: not r.stored), fixable("WEIGHT-INDIRECT"))

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


class MisreadConstant(Refusal):
    """A node other than a DQ reads stored integers.

    Attributes:
        op: Operator of the node.
        tensor: The integers.
        quantizer: Quantizer whose zero point the node computes; empty for other nodes.
    """

    rules = (fixable("WEIGHT-INDIRECT"),)

    op: str
    tensor: str
    quantizer: str

    def message(self, finding: Finding, cause: Cause) -> Message:
        if not self.quantizer:
            return f"{self.node} ({self.op}) reads the stored integers '{self.tensor}'.", ""
        return (
            f"{self.node} ({self.op}) is between the stored zero point '{self.tensor}' and "
            f"{self.quantizer}.",
            "Fold the node, so that the zero point is a stored constant.",
        )


class ParameterIndirect(Refusal):
    """A scale or zero point that operators compute from constants.

    Attributes:
        parameter: ``scale`` or ``zero point``.
        tensor: The parameter.
        op: Operator that computes it.
        producer: Node with that operator.
        more: Number of further quantizers that read it.
    """

    rules = (fixable("SCALE-INDIRECT"),)

    parameter: str
    tensor: str
    op: str
    producer: str
    more: int

    def message(self, finding: Finding, cause: Cause) -> str:
        more = f" (and of {self.more} more)" if self.more else ""
        return (
            f"the {self.parameter} '{self.tensor}' of {self.node}{more} is not stored: "
            f"{self.producer} ({self.op}) computes it from constants."
        )


class WeightsStored(Refusal):
    """Weights stored as integers, with a DQ but no Q."""

    rules = (fixable("WEIGHT-PREQUANT"),)

    convolution: str
    weight: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.convolution}: weights '{self.weight}' are stored as integers, with only "
            f"{self.node}."
        )


@record
class ActivationFit:
    """Fit of a Q to the values that were measured before it.

    Attributes:
        quantizer: The Q.
        scale: Its scale, in units of the tensor per integer step.
        clipped: Share of the values that it clips.
        lost: Share of the tensor's power (sum of squares) beyond the range of the scale.
        used: Largest magnitude over the largest one in range, which is the share of the integer
            steps in use.
    """

    quantizer: str
    scale: float
    clipped: float
    lost: float
    used: float


class ActivationScales(Refusal):
    """Activation scales that do not fit the data; the node is the Q with the worst fit.

    Attributes:
        worst: Qs with the worst fit, the worst first.
        bad: Number of such scales.
        total: Number of scales that were checked.
        samples: Number of samples.
        factor: Largest magnitude over the range of the scale, if this ratio is about equal for all
            Qs; otherwise 0.
    """

    rules = (FindingRule("ACT-SCALE"),)

    worst: tuple[ActivationFit, ...]
    bad: int
    total: int
    samples: int
    factor: float = 0.0

    def message(self, finding: Finding, cause: Cause) -> str:
        def fit(f: ActivationFit) -> str:
            clips = f"clips {f.clipped:.1%} of its values, which reach {f.used:.1f} times its range"
            effect = clips if f.used > 1 else f"uses {f.used:.1%} of its steps"
            return f"{f.quantizer} (scale {format_number(f.scale)}) {effect}"

        off = (
            f"{self.factor:.2g} times too small"
            if self.factor > 1
            else f"{1 / (self.factor or 1):.2g} times too large"
        )
        factor = f", all by about the same factor ({off})" if self.factor else ""
        return (
            f"{self.bad} of {self.total} activation scales do not fit "
            f"{format_count(self.samples, 'sample')}{factor}: "
            f"{'; '.join(map(fit, self.worst))}{_more(self.bad, len(self.worst))}."
        )


class OutlierScales(Refusal):
    """Scales whose range covers a few values that are far larger than all other values.

    The node is the worst Q.

    Attributes:
        worst: The worst Qs, the worst first: name, scale, and ratio of the largest value in range
            to the typical value.
        bad: Number of such scales.
        total: Number of scales that were checked.
        samples: Number of samples; 0 if the outliers were found from the gains of the
            normalizations upstream.
        linear: Whether a matrix product reads one of the tensors, so that ``--smooth`` can help.
    """

    rules = (FindingRule("ACT-OUTLIER"),)

    worst: tuple[tuple[str, float, float], ...]
    bad: int
    total: int
    samples: int
    linear: bool

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        listed = "; ".join(
            f"{q} (scale {format_number(scale)}) {ratio:.0f} times"
            for q, scale, ratio in self.worst
        )
        where = (
            f"On {format_count(self.samples, 'sample')}"
            if self.samples
            else "By the gains of the normalizations before them"
        )
        message = (
            f"{self.bad} of {self.total} activation scales cover outliers, so other values "
            f"have only one or two of 127 steps. {where}, the largest value is many times the "
            f"typical one: {listed}{_more(self.bad, len(self.worst))}."
        )
        if self.linear:
            return message
        return message, (
            "Keep the consumers of these tensors float (--exclude), and compare the accuracy. A "
            "method that clips (--method-for TENSOR=percentile) helps if the outliers do not "
            "matter."
        )


class QuantizedStream(Refusal):
    """An Add in the residual stream of a transformer whose inputs come from DQs.

    Attributes:
        pairs: The DQs.
        norm: Normalization of the sum.
    """

    rules = (FindingRule("RESIDUAL-STREAM"),)

    pairs: tuple[str, ...]
    norm: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} adds to the residual stream that {self.norm} normalizes, and reads it "
            f"through {list_names(self.pairs)}."
        )


class WeightScalesCause(StrEnum):
    """Cause of scales that do not fit their weights."""

    AXIS = "axis"
    FACTOR = "factor"
    OTHER_WEIGHTS = "other-weights"
    TENSOR = "tensor"
    TOO_LARGE = "too-large"
    SATURATED = "saturated"
    EXCEPTION = "exception"


_WEIGHT_SCALE_ADVICE = {
    WeightScalesCause.AXIS: (
        ("the scales fit along the other axis of the weights"),
        "Compute the scales along the output channels, and set that axis.",
    ),
    WeightScalesCause.FACTOR: (
        "all by the same factor, {factor:.4g}",
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
        "only {channels} channels do not fit",
        (
            "Use scale = max|w| / 127 for these channels as well, unless their weights are "
            "clipped on purpose."
        ),
    ),
}


class WeightScales(Refusal):
    """Weight scales that do not fit the weights; the node is the layer with the worst fit.

    Attributes:
        cause: The likely cause.
        layers: Layers where they do not fit.
        total: Number of layers that were checked.
        clipped: Share of the channels whose largest weight is more than half beyond the range of
            their scale.
        wasted: Share of the channels whose range is four times their largest weight or more.
        worst: Ratio of the largest weight to the largest weight in range, in the worst layer.
        factor: Factor between scales and weights, if it is the same for all channels.
        channels: Number of channels whose scales do not fit, if all other channels fit.
    """

    rules = (fixable("W-SCALE"),)

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
        shares = (
            f"{self.clipped:.0%} of the channels are clipped, {self.wasted:.0%} use a quarter of "
            f"the steps or less"
        )
        off = f"{self.worst:.3g} {'times' if self.worst >= 1 else 'of'} the range of its scale"
        return (
            f"the scales of the weights do not fit the weights in {len(self.layers)} of "
            f"{self.total} checked layers: "
            f"{why.format(factor=self.factor, channels=self.channels)} ({shares}; the largest "
            f"weight of {self.node} is {off}).",
            fix,
        )


class WeightsPerTensor(Refusal):
    """Weights with a single scale although the ranges of the output channels differ.

    The node is the worst layer.

    Attributes:
        layers: The layers.
        total: Number of layers with quantized weights that were checked.
        spread: Range of the widest channel over that of the narrowest, in the worst layer.
        lost: Share of the channels of the worst layer that lose two bits or more.
        lossy: Number of layers where at least a quarter of the channels lose two bits or more.
        rounded: Number of layers whose exact weights the file lacks.
    """

    rules = (fixable("W-PER-TENSOR"),)

    layers: tuple[str, ...]
    total: int
    spread: float
    lost: float
    lossy: int
    rounded: int

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = (
            f"{len(self.layers)} of {self.total} layers have one scale for all output channels of "
            f"their weights; ranges of the channels of {self.node} differ {self.spread:.3g}-fold, "
            f"and {self.lost:.0%} of them lose two bits or more"
        )
        text += (
            f" ({self.lossy} layers with such a loss in a quarter of the channels)."
            if self.lossy
            else "."
        )
        if not self.rounded:
            return text, "Give each output channel a scale of its own: max|w| / 127."
        some = "" if self.rounded == len(self.layers) else f" of {self.rounded} of these layers"
        return text, (
            f"The file has no float weights{some}, so quantize again from the float model: qdqtool "
            "insert FLOAT.onnx --calib images/, or quantize_static(..., per_channel=True)."
        )


class WeightsOutput(Refusal):
    """Quantized weights that are also an output of the network."""

    rules = (FindingRule("W-Q-OUTPUT"),)

    convolution: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node}: the quantized weights of {self.convolution} are a network output."


class BiasQuantized(Refusal):
    """A bias that comes from a DQ."""

    rules = (fixable("BIAS-DQ"),)

    convolution: str
    precision: Precision

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{f'{self.convolution}: its bias' if self.convolution else 'a bias'} is "
            f"{str(self.precision).lower()} and goes through {self.node}."
        )


class ProductOfActivations(Refusal):
    """A product of two quantized tensors that are computed at run time."""

    rules = (FindingRule("MATMUL-COMPUTED"),)

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} multiplies two quantized activations."


class FloatDeconvolution(Refusal):
    """A quantized ConvTranspose on a target that computes it in float."""

    rules = (FindingRule("CT-FLOAT"),)

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} has Q/DQ, but this target computes ConvTranspose in float."

    def skip_reason(self) -> str:
        return "TensorRT-RTX 1.7 never runs ConvTranspose in INT8"


# Placement ------------------------------------------------------------------------------------


class ConcatAfterHead(Refusal):
    """One scale for all inputs of a Concat after the head of a detector.

    Attributes:
        concat: The Concat.
        scale: The scale; None if it is unknown or differs between channels.
        scores: Input of the Concat with scores of at most 1 (from a Sigmoid or Softmax); empty if
            no such input is known.
        own: Scale of the scores before the Concat; None if they are not quantized there.
        raw: Whether the Concat joins unchanged results of the last convolutions (logits).
    """

    rules = (fixable("HEAD-CONCAT"),)

    concat: str
    scale: float | None = None
    scores: str = ""
    own: float | None = None
    raw: bool = False

    @property
    def zero_limit(self) -> float:
        """Largest score that the scale rounds to 0; 0 if scale or scores are unknown."""
        return 0.0 if self.scale is None or not self.scores else self.scale / 2

    def message(self, finding: Finding, cause: Cause) -> str:
        scale = "" if self.scale is None else f", {format_number(self.scale)}"
        text = f"{self.node} has one scale for all inputs of {self.concat} after the head{scale}"
        if not self.scores:
            return f"{text}."
        own = "" if self.own is None else f", their own scale is {format_number(self.own)}"
        return f"{text}: {describe_lost_scores(self)} (scores are '{self.scores}', at most 1{own})."


class HeadQuantized(Refusal):
    """A quantized layer at the end of a detection head, which is better left float.

    Attributes:
        branch: ``dfl``, ``box``, ``class``, ``coordinates`` or ``head``.
        sums: Names of the Adds after the DFL, which add anchors to distances.
    """

    rules = (FindingRule("HEAD-SCORE", lambda r: r.branch == "class"), fixable("HEAD-QUANT"))

    branch: str
    sums: tuple[str, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} "
            f"{_HEADS.get(self.branch, f'is the last convolution of a {self.branch} branch')} and "
            "is quantized."
        )


# Operators and shapes -------------------------------------------------------------------------


class IntegerOperator(Refusal):
    """An operator of onnxruntime's integer formats."""

    rules = (FindingRule("QOPERATOR"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} is a {self.op}, which TensorRT cannot import."


_FORMS = {  # by form of simulated quantizers: its operators, and how to export Q/DQ instead
    "decomposed": (
        "arithmetic (Mul, Round, Clip, Mul) in place of Q/DQ, which TensorRT computes in float",
        "Export with torch.onnx.export(..., dynamo=False), which writes Q/DQ for fake quantizers",
    ),
    "QONNX": (
        "Quant operators of QONNX, at which TensorRT's parser stops",
        "Export with brevitas.export.export_onnx_qcdq, which writes Q/DQ",
    ),
    "OpenVINO": (
        "FakeQuantize operators of OpenVINO, at which TensorRT's parser stops",
        "Export from NNCF with the option export_to_onnx_standard_ops, which writes Q/DQ",
    ),
    "AIMET": (
        "QcQuantizeOp operators of AIMET, at which TensorRT's parser stops",
        "Export with aimet_torch.onnx.export (aimet_onnx: sim.to_onnx_qdq()), which writes Q/DQ, "
        "or insert Q/DQ in the exported float model with AIMET's encodings (`calib_table`)",
    ),
    "ATen": (
        "fake_quantize operators of ATen, at which TensorRT's parser stops",
        "Export without the fallback to ATen (operator_export_type=OperatorExportTypes.ONNX), with "
        "opset 13 or later and dynamo=False",
    ),
    "PT2E": (
        "operators of torch's quantized_decomposed, at which TensorRT's parser stops",
        "Export the fake-quantized model (before convert_pt2e) with dynamo=False, or quantize the "
        "float model with ModelOpt or insert",
    ),
    "MQBench": (
        "fake quantizers of MQBench, at which TensorRT's parser stops",
        "Export with MQBench's ONNX_QNN or TensorRT backend, which writes Q/DQ or ranges",
    ),
}


class FakeQuantizers(Refusal):
    """Simulated quantizers that are not Q and DQ; the node is the first one.

    Attributes:
        form: Tool or exporter that writes them.
        count: Number of simulated quantizers.
        exact: Number of simulated quantizers that Q and DQ can express.
        problem: Reason why the first one of the rest cannot be written as Q and DQ.
        other: Name of the quantizer with ``problem``.
    """

    rules = (fixable("FAKE-QUANT", lambda r: r.exact), FindingRule("FAKE-QUANT"))

    form: str
    count: int
    exact: int
    problem: str
    other: str

    def message(self, finding: Finding, cause: Cause) -> Message:
        text, export = _FORMS[self.form]
        message = f"{format_count(self.count, 'quantizer')} ({self.node} first) are {text}."
        if self.count == 1:
            message = f"{self.node} is a quantizer in the form of {text}."
        if self.problem:
            message += (
                f" {format_count(self.count - self.exact, 'quantizer')} cannot be written as Q/DQ "
                f"({self.other}: {self.problem})."
            )
        rewrite = ""
        if self.exact:
            share = "them" if self.exact == self.count else f"{self.exact} of them"
            rewrite = f", or let fix rewrite {share} as Q/DQ"
        return message, (f"{export}{rewrite}. Do not insert Q/DQ next to these quantizers.")


class AtenNodes(Refusal):
    """Nodes with operators of ATen other than quantizers; the node is the first one.

    Attributes:
        operator: Operator of the first node.
        more: Number of further nodes.
    """

    rules = (FindingRule("ATEN-FALLBACK"),)

    operator: str
    more: int

    def message(self, finding: Finding, cause: Cause) -> str:
        more = f" (and {format_count(self.more, 'more node')})" if self.more else ""
        return (
            f"{self.node}{more} is the operator {self.operator} of ATen: the exporter found "
            "no ONNX operator and fell back. TensorRT's parser stops at this node, and the "
            "prediction does not cover the convolutions inside."
        )


class UnreadBfloat16(Refusal):
    """bfloat16 tensors, which the target's parser does not read; the node is the first one.

    Attributes:
        tensor: The first such tensor.
    """

    rules = (FindingRule("FLOAT-BF16"),)

    tensor: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"'{self.tensor}' is bfloat16, which TensorRT before 9.0 cannot import."


class UnanalyzedSubgraphs(Refusal):
    """Convolutions and quantizers in the branches of an If, or in the body of a Loop or Scan.

    Attributes:
        op: Operator with the subgraphs.
        convolutions: Number of convolutions in them.
        products: Number of matrix products in them.
        quantizers: Number of Q and DQ in them.
        int8: Number of INT8 layers if each subgraph is predicted alone; None if that is impossible.
    """

    rules = (FindingRule("SUBGRAPH"),)

    op: str
    convolutions: int
    products: int
    quantizers: int
    int8: int | None

    def message(self, finding: Finding, cause: Cause) -> str:
        counts = (
            (self.convolutions, "convolution"),
            (self.products, "matrix product"),
            (self.quantizers, "Q/DQ node"),
        )
        content = ", ".join(format_count(count, noun) for count, noun in counts if count)
        place = "its branches" if self.op == "If" else "its body"
        alone = ""
        if self.int8 is not None and self.quantizers:
            alone = f" Predicted alone, {self.int8} of these layers run in INT8."
        return f"{self.node} ({self.op}): {content} in {place} were not analyzed.{alone}"


class RuntimeOperators(Refusal):
    """Operators that onnxruntime's optimizer or quantizer writes; the node is the first one.

    Attributes:
        ops: Their operator types.
        count: Number of nodes.
        packs_weights: Whether the first node has packed weights of few bits (such as 4).
    """

    rules = (FindingRule("ORT-OPERATOR"),)

    ops: tuple[str, ...]
    count: int
    packs_weights: bool

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = (
            f"{format_count(self.count, 'node')} ({self.node} first) are operators of onnxruntime "
            f"({list_names(self.ops)}), for which TensorRT's parser has no importer."
        )
        if self.count == 1:
            text = (
                f"{self.node} is the operator {self.ops[0]} of onnxruntime, for which TensorRT's "
                "parser has no importer."
            )
        if self.packs_weights:
            return (
                text,
                "Quantize the weights of the float model in Q/DQ form: INT4 blocks with a "
                "DequantizeLinear (onnxruntime's quantizer: quant_format QDQ; ModelOpt: int4_awq).",
            )
        return (
            text,
            (
                "Use the model before onnxruntime's optimizer (optimized_model_filepath, optimum, "
                "transformers.optimizer), or save the model with ORT_ENABLE_BASIC, which writes "
                "no such operators."
            ),
        )


class FloatOperator(Refusal):
    """An operator without INT8 kernels whose inputs are quantized."""

    rules = (FindingRule("OP-FLOAT"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} ({self.op}) has Q/DQ before it but runs in float: the pairs cost "
            "precision and conversions, and save no time."
        )


class PairScalesDiffer(Refusal):
    """A Q and its DQ with different scales; the node is the DQ.

    Attributes:
        quantizer: The Q.
        scales: Scales of the Q and of the DQ.
    """

    rules = (FindingRule("PAIR-SCALE"),)

    quantizer: str
    scales: tuple[Scale, Scale]

    def message(self, finding: Finding, cause: Cause) -> str:
        first, second = self.scales
        factor = ""
        if isinstance(first, float) and isinstance(second, float) and first:
            factor = f", so that the pair multiplies the tensor by {format_number(second / first)}"
        return (
            f"{self.node} has scale {format_scale(second)}, and {self.quantizer} before it "
            f"{format_scale(first)}{factor}."
        )


class LocalFunctions(Refusal):
    """Functions of the model that the parser does not inline."""

    rules = (fixable("FUNC-LOCAL"),)

    functions: tuple[str, ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        count = format_count(len(self.functions), "function")
        return (
            f"the model defines {count} of its own ({list_names(self.functions)}), which "
            "TensorRT's parser cannot import. The prediction holds for the model with the "
            "functions inlined."
        )


class UnknownOperator(Refusal):
    """A plugin or unknown operator; ``more`` is the number of further nodes with it."""

    rules = (FindingRule("PLUGIN-OUTSIDE"),)

    op: str
    more: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node}{f' (and {self.more} more)' if self.more else ''} is a plugin or "
            f"unknown operator ({self.op}): no Q or DQ moves past this node or is fused into it."
        )


class OtherTypes(Refusal):
    """Quantizers of other types than 8-bit integers.

    Attributes:
        kinds: The types, and the number of nodes of each.
    """

    rules = (FindingRule("FP8-OUTSIDE"),)

    kinds: tuple[tuple[str, int], ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{' and '.join(f'{count} Q/DQ nodes of {kind}' for kind, count in self.kinds)} "
            f"({self.node} first) are not "
            "covered by this prediction, which has rules for INT8 and FP8."
        )


class FusedByMyelin(Refusal):
    """Attention and normalizations that Myelin compiles; the node is the first one.

    Attributes:
        last: The last node in graph order.
        nodes: Number of nodes without Q and DQ.
        products: Number of matrix products.
        int8: Number of matrix products that compute in INT8.
        fp8: Number of matrix products that compute in FP8.
        softmaxes: Number of Softmax nodes.
        norms: Number of normalizations.
        fused: Number of Q and DQ that the region's kernels absorb.
        uncertain: Number of the absorbed Q and DQ that may be conversions instead.
        possible: Number of conversions that the region may absorb instead.
    """

    rules = (FindingRule("MYELIN-REGION"),)

    last: str
    nodes: int
    products: int
    int8: int
    fp8: int
    softmaxes: int
    norms: int
    fused: int
    uncertain: int
    possible: int

    def message(self, finding: Finding, cause: Cause) -> str:
        fp8 = f"{self.fp8} FP8, " if self.fp8 else ""
        floats = self.products - self.int8 - self.fp8
        parts = [
            f"{self.products} matrix products ({self.int8} INT8, {fp8}{floats} float)"
            if self.products
            else "",
            f"{self.softmaxes} Softmax" if self.softmaxes else "",
            format_count(self.norms, "normalization") if self.norms else "",
        ]
        where = (
            f"{self.nodes} nodes from {self.node} to {self.last}, with "
            f"{', '.join(p for p in parts if p)}"
        )
        if self.possible:
            return (
                f"Myelin may compile {where}: up to {self.possible} of the conversions counted "
                "here would then be part of its kernels."
            )
        text = f"Myelin compiles {where}"
        if self.fused:
            text += f": {self.fused} Q and DQ become part of its kernels"
            text += (
                f", but up to {self.uncertain} of them may be conversions" if self.uncertain else ""
            )
        return f"{text}."


class FloatNormalization(Refusal):
    """A normalization or Softmax after a DQ."""

    rules = (FindingRule("NORM-FLOAT"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} ({self.op}) reads the output of a DQ and is computed in float."


class Convolution3D(Refusal):
    """A quantized convolution of three spatial dimensions."""

    rules = (FindingRule("CONV3D-INT8"),)

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} is a quantized 3D convolution: builds with such layers failed on "
            "TensorRT 8.2.2 and 8.2.5."
        )


class LargeKernel(Refusal):
    """A quantized convolution with a kernel size for which builds failed."""

    rules = (FindingRule("KERNEL-LARGE"),)

    kernel: tuple[int, ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} has a kernel of {'x'.join(map(str, self.kernel))}: builds with a "
            "32x32 kernel failed on TensorRT 8.6."
        )

    def skip_reason(self) -> str:
        return f"kernel {'x'.join(map(str, self.kernel))}{_FAILED_BUILDS}"


class GroupedConvolution(Refusal):
    """A grouped convolution that is not depthwise."""

    rules = (
        FindingRule("GROUP-KERNELS", lambda r: r.channels > 8 and r.channels % 16 != 0),
        FindingRule("GROUP-SLOW"),
    )

    groups: int
    channels: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} has {self.groups} groups of {self.channels} channels."


class AttentionHead(Refusal):
    """A quantized matrix product of an attention whose head size has no INT8 kernel.

    Attributes:
        size: Head size: products per score.
    """

    rules = (FindingRule("ATT-HEAD"),)

    size: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} computes scores of an attention in INT8; the head size is {self.size}."


class ChannelNumbers(Refusal):
    """Numbers of channels for which INT8 kernels are slow.

    Attributes:
        inputs: Input channels.
        outputs: Output channels.
        odd: Those that are not multiples of 16.
        small: Whether one of both numbers is less than 16.
    """

    rules = (FindingRule("CH-SMALL", lambda r: r.small), FindingRule("CH-ALIGN"))

    inputs: int
    outputs: int
    odd: tuple[int, ...]
    small: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        text = f"{self.node} has {self.inputs} input and {self.outputs} output channels"
        if self.small:
            return f"{text}."
        return (
            f"{text}; {list_names(map(str, self.odd))} "
            f"{'is' if len(set(self.odd)) == 1 else 'are'} not a multiple of 16."
        )


class DepthwiseSilu(Refusal):
    """A depthwise convolution with SiLU.

    Attributes:
        last: Whether certainly no convolution is downstream.
    """

    rules = (FindingRule("DW-SILU"),)

    last: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} is a depthwise convolution with "
            f"SiLU{' at the end of the network' if self.last else ''}."
        )

    def skip_reason(self) -> str:
        return f"depthwise convolution with SiLU{_FAILED_BUILDS}"


class DepthwiseAdd(Refusal):
    """A depthwise convolution before an Add."""

    rules = (FindingRule("DW-ADD"),)

    add: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} is a depthwise convolution whose result goes into {self.add}."

    def skip_reason(self) -> str:
        return f"depthwise convolution into an Add{_FAILED_BUILDS}"


class FloatEinsum(Refusal):
    """A matrix product that an Einsum computes.

    Attributes:
        equation: Its equation.
        quantized: Whether both operands come from DQs.
    """

    rules = (FindingRule("EINSUM-FLOAT"),)

    equation: str
    quantized: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} computes a matrix product as an Einsum ({self.equation}), in float; its "
            f"operands are {'' if self.quantized else 'not all '}dequantized."
        )


class DecomposedNorm(Refusal):
    """A decomposed LayerNorm whose squares may exceed FP16; the node computes the squares.

    Attributes:
        exact: Whether a LayerNormalization, which the target accepts, computes the same.
        opset: Opset of the model.
        alone: Operator that computes the squares, if no complete normalization was recognized.
    """

    rules = (fixable("NORM-PIECES"),)

    exact: bool
    opset: int
    alone: str = ""

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        if self.alone:
            return (
                (
                    f"{self.node} ({self.alone}) squares values that are summed: in FP16, the "
                    "square of 256 is infinite, and the square of 2e-4 is zero."
                ),
                "Keep these nodes FP32, or scale the values before them so that FP16 holds the "
                "squares.",
            )
        text = (
            f"{self.node} squares values in a decomposed normalization: in FP16, the square "
            "of 256 is already infinite."
        )
        if self.exact:
            raised = f", raising opset {self.opset} to 17" if self.opset < 17 else ""
            return (
                text,
                "qdqtool fix --only NORM-PIECES writes a LayerNormalization, which computes the "
                f"same{raised}.",
            )
        if self.opset >= 17:
            return text, "Keep these nodes FP32: no LayerNormalization computes the same."
        return text


class ConstantsInHalf(Refusal):
    """Arithmetic constants that FP16 cannot hold; the node reads the first constant.

    Attributes:
        first: The first nodes that read such a constant, each with the value.
        large: Number of constants that are too large.
        small: Number of constants that become zero or FP16's smallest number.
        denormal: Number of other constants that are denormal in FP16.
    """

    rules = (FindingRule("CONST-FP16"),)

    first: tuple[tuple[str, float], ...]
    large: int
    small: int
    denormal: int

    def message(self, finding: Finding, cause: Cause) -> str:
        counts = (
            (self.large, "above 65504"),
            (self.small, "below 6e-8"),
            (self.denormal, "denormal"),
        )
        listed = ", ".join(f"{node} reads {format_number(value)}" for node, value in self.first)
        verb = "cannot hold" if self.large or self.small else "holds with fewer digits"
        kinds = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        return f"constants that FP16 {verb}: {kinds}; {listed}."


class RemainingFloat(Refusal):
    """Layers that read or write FP32, which a strongly typed network keeps.

    Attributes:
        convolutions: Number of convolutions and matrix products that read or write FP32.
        total: Number of all convolutions and matrix products.
        first: The first such layer.
        products: Number of matrix products that read or write FP32.
    """

    rules = (fixable("FLOAT-FP32"),)

    convolutions: int
    total: int
    first: str
    products: int = 0

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"the float part of the model is FP32 ({self.convolutions} of "
            f"{format_layer_counts(self.total - self.products, self.products)} read or write FP32 "
            f"and could use FP16, {self.first} first)."
        )

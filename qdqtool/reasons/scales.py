"""Reasons that concern scales: invalid, implausible, computed, or different scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qdqtool.ir.operators import CUTS, JOINS
from qdqtool.ir.qdq import PerChannel
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.tensors import (
    PathStep,
    Scale,
    TensorConsumer,
    TensorSize,
    find_operator_between_quantizers,
    quantizer_consumers,
)
from qdqtool.reasons.text import (
    NO_ACTION,
    Message,
    advise_common_scale,
    consumer_names,
    describe_unanalyzed_consumers,
    format_node,
    format_number,
    format_scale,
    is_common_scale_too_coarse,
    list_names,
)
from qdqtool.util.text import build_name_pattern, format_count


def list_scale_rules(find_operator: Callable[[Any], PathStep | None]) -> tuple[FindingRule, ...]:
    """Return the rules for different scales. The operator between them determines the code.

    ``find_operator`` returns this operator for a reason; None if the scales are on one tensor.
    """
    return (
        fixable_rule(
            "CONCAT-SCALE", lambda r: (s := find_operator(r)) is not None and s.op in JOINS
        ),
        fixable_rule("SPLIT-SCALE", lambda r: (s := find_operator(r)) is not None and s.op in CUTS),
        fixable_rule("POOL-SCALE", find_operator),
        fixable_rule("SIBLING-SCALE"),
    )


_MAX_LISTED_SCALES = 12


def describe_concat_scales(r: ConcatScales, consequence: str, scales: Sequence[Scale]) -> Message:
    """Return the message on scales around a Concat and their consequence, and the advice.

    Args:
        r: The Concat's scales.
        consequence: What the compiler does because the scales differ.
        scales: Further scales that the common scale in the advice replaces.
    """
    parts = [format_scale(p) for p in r.parts if p is not None]
    listed = ", ".join(parts[:_MAX_LISTED_SCALES]) + (
        ", ..." if len(parts) > _MAX_LISTED_SCALES else ""
    )
    without = len(r.parts) - len(parts)
    if without:
        listed += f"{' and ' if parts else ''}no scale ({format_count(without, 'input')})"
    return (
        f"{format_node(r.node, 'Concat')}: its output has scale {format_scale(r.output_scale)}, "
        f"but its inputs have {listed}; {consequence}.",
        advise_common_scale([*r.parts, r.output_scale, *scales]),
    )


def needs_coarse_common_scale(cause: Cause) -> bool:
    """Return whether a common scale would cost more than two bits, so that ``fix`` rejects it.

    False if the fix of the reason is not a common scale.
    """
    scales = list(cause.reason.scales_to_unify())
    if not scales:
        return False
    for reason in cause.also:
        scales += reason.scales_to_unify()
    return is_common_scale_too_coarse(scales)


def describe_different_scales(
    cause: Cause, tensor: str, consumers: Sequence[TensorConsumer], consequence: str
) -> Message:
    """Return the message on different scales of the Qs that read a tensor, and the advice."""
    quantizers = quantizer_consumers(consumers)
    scales = [q.scale for q in quantizers]
    if cause.also and isinstance(cause.also[0], ConcatScales):
        return describe_concat_scales(cause.also[0], consequence, scales)
    if len({s for s in scales if s is not None}) < 2:
        return (
            f"{consequence}: {list_names(consumer_names(quantizers))} quantize "
            f"the tensor{describe_unanalyzed_consumers(consumers)}, and the scales of these nodes "
            "are not available to compare.",
            "",
        )
    listed = list_names(
        (f"{format_scale(q.scale)} ({q.node})" for q in quantizers), _MAX_LISTED_SCALES
    ) + describe_unanalyzed_consumers(consumers)
    between = find_operator_between_quantizers(consumers)
    where = (
        f"'{tensor}' is quantized with different scales, {listed}"
        if between is None
        else f"{between.node} ({between.op}) is between different scales, {listed}"
    )
    return f"{where}; {consequence}.", advise_common_scale(scales)


class ConcatScales(Reason, key="concat-scales"):
    """The scales of a Concat's inputs differ from the scale of its result.

    Attributes:
        parts: Scale of each input, from the input's DQ or another Q that reads the input. None for
            an input with neither.
        output_scale: Scale of the Q after the Concat, which moved to each input.
        elements: Number of elements of the result.
    """

    rules = (fixable_rule("CONCAT-SCALE"),)

    parts: tuple[Scale, ...]
    output_scale: Scale
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        if finding.gains:
            return describe_concat_scales(
                self, "each input with a different scale is converted", ()
            )
        consequence = "the layers that write these inputs convert them to the scale of the output"
        return describe_concat_scales(self, consequence, ())[0], NO_ACTION

    def scales_to_unify(self) -> Sequence[Scale]:
        return [*self.parts, self.output_scale]


class ScalesDiffer(Reason, key="scales-differ"):
    """Consecutive quantizers, or quantizers of one tensor, have different scales."""

    rules = (fixable_rule("DOUBLE-QDQ"),)

    tensor: str
    quantizers: tuple[str, ...]
    scales: tuple[Scale, ...]


class PairScalesDiffer(Reason):
    """A Q and its DQ with different scales; ``node`` is the DQ.

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
            f"{self.node} has scale {format_scale(second)}, and {self.quantizer} before it has "
            f"{format_scale(first)}{factor}."
        )


def _format_omitted_count(bad: int, listed: int) -> str:
    return f"; and {bad - listed} more" if bad > listed else ""


class Float16Scale(Reason):
    """Scales in float16, which TensorRT 8 reads as float32."""

    rules = (fixable_rule("SCALE-FP16"),)

    scale: Scale

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} has float16 scales ({format_scale(self.scale)}), which TensorRT 8 reads "
            "as float32."
        )


class ScaleOwner(StrEnum):
    """Kind of the values that a scale quantizes.

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


_SMALLEST_HALF = 6e-8  # the smallest positive number of FP16


class ScaleNotPositive(Reason):
    """A scale that is zero, negative, infinite or not a number.

    Attributes:
        value: The first faulty scale.
        bad: Number of faulty scales.
        count: Number of all scales of the quantizer.
        channels: The first channels with a faulty scale.
        owner: Kind of values that the quantizer quantizes.
        is_finite: Whether all faulty scales are finite.
        is_negative: Whether all faulty scales are finite and below 0.
        is_half: Whether the scales are float16.
    """

    rules = (
        fixable_rule("SCALE-NONPOS", lambda r: r.is_recomputable),
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
        """Whether a valid scale can be computed from the file alone, without calibration."""
        if self.owner == ScaleOwner.INTEGERS:
            return self.is_finite
        return self.owner == ScaleOwner.WEIGHTS or self.is_negative

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = f"{self.node} has scale {format_number(self.value)}{self._describe_channels()}"
        if self.is_negative:
            return (f"{text}: a scale cannot be negative."), (
                "Use the absolute value of the scale."
            )
        if self.owner == ScaleOwner.ACTIVATION:
            return f"{text}: {self._explain_activation_scale()}.", _RECALIBRATE
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
                f"{text}: these weights are all 0 (pruned or "
                f"dead){self._describe_rounding_to_zero()}, or the "
                "quantizer was not calibrated.",
                "Use any positive scale for weights of zeros, max|w| over 127 for others.",
            )
        return (
            f"{text}: {_UNCALIBRATED}, or training diverged.",
            "Compute the scale from the weights in the file: max|w| over 127.",
        )

    def _explain_activation_scale(self) -> str:
        if self.value == 0:
            return (
                f"the tensor was 0 on every calibration image{self._describe_rounding_to_zero()}, "
                "the quantizer "
                "was not calibrated, or its range (amax) was not loaded before the export"
            )
        half = " (or the scale exceeded FP16's 65504)" if self.is_half else ""
        return f"{_UNCALIBRATED}, or training or calibration diverged{half}"

    def _describe_rounding_to_zero(self) -> str:
        """Return a remark that float16 rounded a scale to 0; empty for scales of another type."""
        if not self.is_half:
            return ""
        return f", float16 rounded a scale below {_SMALLEST_HALF:g} to 0"

    def _describe_channels(self) -> str:
        where = ""
        if self.count > 1:
            channels = ", ".join(map(str, self.channels)) + (
                " ..." if self.bad > len(self.channels) else ""
            )
            where = (
                f" in {self.bad} of {self.count} channels "
                f"({'channel' if self.bad == 1 else 'channels'} {channels})"
            )
        return where


class ScaleImplausible(Reason):
    """A positive scale that is too large or too small to come from a calibration.

    Attributes:
        value: The first implausible scale.
        bad: Number of implausible scales.
        count: Number of all scales of the quantizer.
        owner: Kind of values that the quantizer quantizes.
        largest: Largest magnitude of the weights with an implausible scale; None for an activation
            or unknown weights.
    """

    rules = (
        fixable_rule("SCALE-EXTREME", lambda r: r.owner == ScaleOwner.WEIGHTS),
        FindingRule("SCALE-EXTREME"),
    )

    value: float
    bad: int
    count: int
    owner: ScaleOwner = ScaleOwner.ACTIVATION
    largest: float | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = f"{self._describe_range()}: "
        reason = (
            f"{_UNCALIBRATED[0].upper()}{_UNCALIBRATED[1:]}, the network is untrained, or training "
            "diverged."
        )
        if self.largest is not None:
            effect = "clipped to this range" if 127 * self.value < self.largest else "rounded to 0"
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
            else f"every value beyond +-{format_number(127 * self.value)} is clipped to this range"
        )
        return f"{text}{effect}. {reason}", _RECALIBRATE

    def message_after_calibration(self) -> str:
        """Return the message for an activation whose scale was computed from images."""
        return (
            f"{self._describe_range()}: the float network computes such values from the "
            "calibration images. The network is untrained, the training diverged, or the images "
            "are not prepared as in training. Check the outputs of the float network."
        )

    def _describe_range(self) -> str:
        where = f" in {self.bad} of {self.count} channels" if self.count > 1 else ""
        return (
            f"{self.node} has scale {format_number(self.value)}{where}, a range of "
            f"+-{format_number(127 * self.value)}"
        )


@dataclass(frozen=True)
class DeadTensor:
    """A tensor, or a part of a Concat, whose values all become one value after Q and DQ.

    Attributes:
        tensor: Name of the tensor: the quantizer's input, or a part that a Concat joins into it.
        low: Smallest possible value.
        high: Largest possible value.
        node: Node that bounds the values.
        op: Operator of this node.
        value: Value after Q and DQ, equal for all possible values.
    """

    tensor: str
    low: float
    high: float
    node: str
    op: str
    value: float


class ScaleDead(Reason):
    """A scale that maps every possible value of a tensor to the same value.

    Attributes:
        scale: Scale of the quantizer.
        zero_point: Zero point of the quantizer.
        parts: Tensors whose values all become one value.
        whole: Whether the first part is the quantizer's whole input. Otherwise a Concat joins the
            parts with further tensors.
    """

    rules = (fixable_rule("SCALE-DEAD"),)

    scale: float
    zero_point: int
    parts: tuple[DeadTensor, ...]
    whole: bool

    @property
    def largest_magnitude(self) -> float | None:
        """Largest possible magnitude of the input, from which a scale can be computed.

        None if the magnitude is 0 or infinite, or if only a part of the input is known.
        """
        magnitude = max(abs(self.parts[0].low), abs(self.parts[0].high))
        return magnitude if self.whole and 0 < magnitude < float("inf") else None

    def message(self, finding: Finding, cause: Cause) -> Message:
        first = self.parts[0]
        values = f"every value of '{first.tensor}'"
        if len(self.parts) > 1:
            values += f" (and of {format_count(len(self.parts) - 1, 'more part')})"
        bounds = (
            f"the results of {first.op} are {format_number(first.low)} to "
            f"{format_number(first.high)}"
        )
        shift = f" and zero point {self.zero_point}" if self.zero_point else ""
        text = (
            f"{self.node} has scale {format_number(self.scale)}{shift}, which maps {values} to "
            f"{format_number(first.value)}: {bounds}."
        )
        if not self.whole:
            return text, (
                "Keep the Concat in float, or quantize its inputs separately: no common scale "
                "fits all of them."
            )
        if self.largest_magnitude is None:
            return text, ("Calibrate again: the scale and zero point belong to another tensor.")
        return text, (
            f"Scale {format_number(self.largest_magnitude / 127)} covers all results of "
            f"{first.op}. Calibration may find a smaller scale."
        )


class ScaleRank(Reason):
    """A scale of several dimensions, which TensorRT reads as blocks if ``blocked``."""

    rules = (FindingRule("SCALE-RANK"),)

    shape: tuple[int, ...]
    blocked: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} has {'blocked ' if self.blocked else ''}scales of shape "
            f"{list(self.shape)}; TensorRT requires a scalar or a vector."
        )


class ScaleCount(Reason):
    """The number of scales differs from the length of the tensor's axis."""

    rules = (FindingRule("SCALE-COUNT"),)

    count: int
    axis: int
    shape: tuple[int | None, ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        text = f"{self.node} has {self.count} scales for axis {self.axis} of weights "
        text += str(list(self.shape))
        if -len(self.shape) <= self.axis < len(self.shape):
            text += f"; this axis has size {self.shape[self.axis]}"
        return f"{text}."


class ScaleComputed(Reason, key="scale-computed"):
    """A scale that is computed at run time; ``tensor`` is its name, empty if unknown."""

    rules = (FindingRule("SCALE-DYNAMIC"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all layers

    quantizer: str
    tensor: str = ""

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.quantizer}: its scale "
            + (f"'{self.tensor}' " if self.tensor else "")
            + "is computed at run time."
        )


class ActivationPerChannel(Reason, key="activation-per-channel"):
    """An activation with one scale per channel."""

    rules = (fixable_rule("ACT-PER-CHANNEL"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all layers

    dq: str
    scales: Scale

    def message(self, finding: Finding, cause: Cause) -> str:
        count = (
            self.scales.count
            if isinstance(self.scales, PerChannel)
            else int(self.scales is not None)
        )
        scales = (
            f"{format_count(count, 'scale')}, {format_scale(self.scales)}"
            if count
            else "one scale per channel"
        )
        return f"{self.dq} quantizes an activation per channel ({scales})."


@dataclass(frozen=True)
class ActivationFit:
    """Fit of a Q's scale to the measured values of its input.

    Attributes:
        quantizer: The Q.
        scale: Scale of the Q, in units of the tensor per integer step.
        clipped: Share of the values that the Q clips.
        lost: Share of the tensor's power (sum of squares) beyond the range of the scale.
        used: Largest measured magnitude divided by the range for its sign, which depends on the
            zero point; above 1 if values are clipped.
    """

    quantizer: str
    scale: float
    clipped: float
    lost: float
    used: float


class ActivationScales(Reason):
    """Activation scales that do not fit the data; ``node`` is the Q with the worst fit.

    Attributes:
        worst: Qs with the worst fit, the worst first.
        bad: Number of scales that do not fit.
        total: Number of scales that were checked.
        samples: Number of calibration samples.
        factor: Largest magnitude divided by the range of the scale, if this ratio is about equal
            for all Qs; otherwise 0.
    """

    rules = (FindingRule("ACT-SCALE"),)

    worst: tuple[ActivationFit, ...]
    bad: int
    total: int
    samples: int
    factor: float = 0.0

    def message(self, finding: Finding, cause: Cause) -> str:
        def describe_fit(f: ActivationFit) -> str:
            clips = f"clips {f.clipped:.1%} of its values, which reach {f.used:.1f} times its range"
            effect = clips if f.used > 1 else f"uses {f.used:.1%} of its steps"
            return f"{f.quantizer} (scale {format_number(f.scale)}) {effect}"

        off = (
            f"{self.factor:.2g} times too small"
            if self.factor > 1
            else f"{1 / (self.factor or 1):.2g} times too large"
        )
        are = "is" if self.bad == 1 else "are all"
        factor = f" and {are} about {off}" if self.factor else ""
        return (
            f"{self.bad} of {self.total} activation scales "
            f"{'does' if self.bad == 1 else 'do'} not fit "
            f"{format_count(self.samples, 'sample')}{factor}: "
            f"{'; '.join(map(describe_fit, self.worst))}"
            f"{_format_omitted_count(self.bad, len(self.worst))}."
        )


class UniformScales(Reason):
    """Activations and weights that all have the same scale.

    Attributes:
        scale: The scale.
        activations: Number of quantizers of activations.
        weights: Number of quantized weights.
    """

    rules = (FindingRule("SCALE-UNIFORM"),)

    scale: float
    activations: int
    weights: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"all {self.activations} quantizers of activations and all {self.weights} quantized "
            f"weights have the scale {format_number(self.scale)}, so the scales are placeholders."
        )


class OutlierScales(Reason):
    """Scales whose range covers a few values that are far larger than all other values.

    ``node`` is the Q with the largest ratio.

    Attributes:
        worst: Qs with the largest ratios, in descending order: name, scale, and ratio of the
            largest value in range to the typical value.
        bad: Number of scales that cover outliers.
        total: Number of scales that were checked.
        samples: Number of samples; 0 if the outliers were found from the gains of the
            normalizations upstream.
        linear: Whether a matrix product reads one of the tensors, so that ``--smooth`` can help.
        tensor: Input of the Q with the largest ratio.
        consumers: Names of the nodes that consume the output of its DQs.
        percentile: Percentile, in percent, of the magnitudes of this tensor that is below the range
            of its scale; None if the scale clips more, or without samples.
    """

    rules = (FindingRule("ACT-OUTLIER"),)

    worst: tuple[tuple[str, float, float], ...]
    bad: int
    total: int
    samples: int
    linear: bool
    tensor: str
    consumers: tuple[str, ...]
    percentile: float | None

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        listed = "; ".join(
            f"{q} (scale {format_number(scale)}) {ratio:.0f} times"
            for q, scale, ratio in self.worst
        )
        largest = "According to the gains of the normalizations upstream, the range of the scale"
        if self.samples:
            samples = format_count(self.samples, "sample")
            # The scale clips larger values, so this is not always the largest value.
            largest = f"On {samples}, the largest value within the range of the scale"
        steps = f"{127 / self.worst[0][2]:.2g}"
        first = " of the first tensor" if self.bad > 1 else ""
        message = (
            f"{self.bad} of {self.total} activation scales "
            f"{'covers' if self.bad == 1 else 'cover'} outliers. {largest} is many times the "
            f"typical value: {listed}{_format_omitted_count(self.bad, len(self.worst))}. So a "
            f"typical value{first} is at most {steps} of the 127 steps."
        )
        if self.linear:
            return message
        return message, " ".join(self._list_fixes())

    def _list_fixes(self) -> Iterator[str]:
        option = "`exclude`"
        if self.consumers:
            option = f"`exclude='{build_name_pattern(self.consumers)}'`"
        first = " for the first tensor" if self.bad > 1 else ""
        yield (
            f"Keep the consumers of these tensors float (insert {option}{first}), and compare the "
            "accuracy."
        )
        if self.percentile is not None:
            method = f"`method_for='{build_name_pattern([self.tensor])}=percentile'`"
            yield (
                f"A smaller range (insert {method} `percentile={self.percentile:g}`{first}) helps "
                "if the outliers do not matter."
            )

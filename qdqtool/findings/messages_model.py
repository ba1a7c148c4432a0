"""Messages of findings from the checks of the model."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.findings.messages import Words, names, number, says, scale_words, words
from qdqtool.trt import faults as lint
from qdqtool.types import Cause, Finding, Severity
from qdqtool.util.text import layers_counted

# Quantizers -----------------------------------------------------------------------------------------------------

says(
    lint.TypeUnknown, lambda r: f"{r.node} quantizes to {r.kind}, which TensorRT does not support."
)
says(
    lint.UnsignedZeroPoint,
    lambda r: (
        f"{r.node} quantizes to uint8{'' if r.is_explicit else ' (it has no zero point, which means uint8 in ONNX)'}: TensorRT "
        f"reads int8 and clips everything above 127 x {scale_words(r.scale)}."
    ),
)
says(lint.ZeroPointMissing, lambda r: f"{r.node} ({r.op}) has no zero-point input.")
says(
    lint.ZeroPointCount,
    lambda r: f"{r.node} has {r.scales} scales and {r.zero_points} zero points.",
)
says(
    lint.ScaleHalf,
    lambda r: (
        f"{r.node} has float16 scales ({scale_words(r.scale)}), which TensorRT 8 reads as float32."
    ),
)
says(
    lint.ScaleRank,
    lambda r: (
        f"{r.node} has {'blocked ' if r.blocked else ''}scales of shape {list(r.shape)}; TensorRT requires a scalar or a vector."
    ),
)
says(
    lint.ScaleCount,
    lambda r: (
        f"{r.node} has {r.count} scales for axis {r.axis} of weights {list(r.shape)}"
        f"{f', which has size {r.shape[r.axis]}' if -len(r.shape) <= r.axis < len(r.shape) else ''}."
    ),
)
says(
    lint.AxisOpset,
    lambda r: (
        f"{r.node} is per-channel in opset {r.opset}, "
        f"{'with the attribute axis, which this opset does not have' if r.is_explicit else 'without an axis'}."
    ),
)


@words(lint.ScaleNotPositive)
def _not_positive(finding: Finding, cause: Cause, r: lint.ScaleNotPositive) -> str:
    where = ""
    if r.count > 1:
        channels = ", ".join(map(str, r.channels)) + (" ..." if r.bad > len(r.channels) else "")
        where = f" in {r.bad} of {r.count} channels ({channels})"
    return f"{r.node} has scale {number(r.value)}{where}."


@words(lint.ScaleDead)
def _dead(finding: Finding, cause: Cause, r: lint.ScaleDead) -> Words:
    first = r.parts[0]
    what = f"every value of '{first.tensor}'"
    if len(r.parts) > 1:
        what += f" (and of {len(r.parts) - 1} more parts)"
    bounds = f"{first.op} gives {number(first.low)} to {number(first.high)}"
    shift = f" and zero point {r.zero_point}" if r.zero_point else ""
    text = (
        f"{r.node} has scale {number(r.scale)}{shift}, which makes {what} {number(first.value)}: "
        f"{bounds}."
    )
    if not r.whole:
        return text, (
            "Keep it in float, or quantize the inputs of the Concat separately: no common scale fits all of them."
        )
    if r.reach is None:
        return text, "Calibrate again: the scale and zero point are those of another tensor."
    return text, (
        f"Scale {number(r.reach / 127)} covers all values of {first.op}; calibration may find a "
        "smaller one."
    )


# Weights and biases ---------------------------------------------------------------------------------------------

says(
    lint.WeightsBehind,
    lambda r: (
        f"{r.node}: {names((f'{s.node} ({s.op})' for s in r.steps), more=r.more)} "
        f"{'is' if len(r.steps) == 1 else 'are'} between the weights and {r.quantizer}."
    ),
)
says(lint.MisreadConstant, lambda r: f"{r.node} ({r.op}) reads the stored integers '{r.tensor}'.")
says(
    lint.WeightsStored,
    lambda r: f"{r.convolution}: weights '{r.weight}' are stored as integers, with only {r.node}.",
)
says(
    lint.QuantizedStream,
    lambda r: (
        f"{r.node} adds to the residual stream that {r.norm} normalizes, and reads it through {names(r.pairs)}."
    ),
)
says(
    lint.NothingQuantized,
    lambda r: (
        f"this model has no Q/DQ; {'one layer' if r.convolutions == 1 else f'{r.convolutions} layers'} with "
        "constant weights could run in INT8."
    ),
)
says(
    lint.WeightsOutput,
    lambda r: f"{r.node}: the quantized weights of {r.convolution} are a network output.",
)
says(
    lint.BiasQuantized,
    lambda r: (
        f"{f'{r.convolution}: its bias' if r.convolution else 'a bias'} is {str(r.precision).lower()} and goes through {r.node}."
    ),
)
says(lint.ProductOfActivations, lambda r: f"{r.node} multiplies two quantized activations.")
says(
    lint.FloatDeconvolution,
    lambda r: f"{r.node} has Q/DQ, but this target computes ConvTranspose in float.",
)


def _more(bad: int, listed: int) -> str:
    return f"; and {bad - listed} more" if bad > listed else ""


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


@words(lint.ActivationScales)
def _activation_scales(finding: Finding, cause: Cause, r: lint.ActivationScales) -> str:
    def fit(f: lint.ActivationFit) -> str:
        clips = f"clips {f.clipped:.1%} of its values, which reach {f.used:.1f} times its range"
        what = clips if f.used > 1 else f"uses {f.used:.1%} of its steps"
        return f"{f.quantizer} (scale {number(f.scale)}) {what}"

    off = (
        f"{r.factor:.2g} times too small"
        if r.factor > 1
        else f"{1 / (r.factor or 1):.2g} times too large"
    )
    factor = f", all by about the same factor ({off})" if r.factor else ""
    return (
        f"{r.bad} of {r.total} activation scales do not fit {_samples(r.samples)}{factor}: "
        f"{'; '.join(map(fit, r.worst))}{_more(r.bad, len(r.worst))}."
    )


@words(lint.OutlierScales)
def _outliers(finding: Finding, cause: Cause, r: lint.OutlierScales) -> Words | str:
    listed = "; ".join(
        f"{q} (scale {number(scale)}) {ratio:.0f} times" for q, scale, ratio in r.worst
    )
    where = (
        f"On {_samples(r.samples)}"
        if r.samples
        else "By the gains of the normalizations before them"
    )
    said = (
        f"{r.bad} of {r.total} activation scales cover outliers, and leave other values one or two of 127 steps. "
        f"{where}, the largest value is many times the typical one: {listed}{_more(r.bad, len(r.worst))}."
    )
    if r.linear:
        return said
    return said, (
        "Keep them float (--exclude), and compare the accuracy. A method that clips (--method-for "
        "TENSOR=percentile) helps if the outliers do not matter."
    )


_SCALES = {
    lint.WeightScalesCause.AXIS: (
        "they fit along the other axis of the weights",
        "Compute the scales along the output channels, and set that axis.",
    ),
    lint.WeightScalesCause.FACTOR: (
        "all by the same factor, {factor:.4g}",
        "Use scale = max|w| / 127 for each channel. A factor of 1.008 comes from 128 instead of 127, a factor of 2 from a wrong range.",
    ),
    lint.WeightScalesCause.OTHER_WEIGHTS: (
        "they were probably computed before BatchNormalization was folded into the weights, or from another checkpoint",
        "Compute the scales from the weights in this file: fold BatchNormalization first, then quantize.",
    ),
    lint.WeightScalesCause.TENSOR: (
        "each layer has one scale for all channels, computed from some of them or from other weights",
        "Use max|w| / 127 of the whole tensor, or better one scale for each output channel.",
    ),
    lint.WeightScalesCause.TOO_LARGE: (
        "they were probably computed from other weights, or from the range of a whole network",
        "Use scale = max|w| / 127 for each channel of the weights in this file.",
    ),
    lint.WeightScalesCause.EXCEPTION: (
        "only {channels} channels do not fit",
        "Use scale = max|w| / 127 for these channels too, unless they are clipped on purpose.",
    ),
}


@words(lint.WeightScales)
def _scales(finding: Finding, cause: Cause, r: lint.WeightScales) -> Words:
    why, fix = _SCALES[r.cause]
    shares = f"{r.clipped:.0%} of the channels are clipped, {r.wasted:.0%} use a quarter of the steps or less"
    off = f"{r.worst:.3g} {'times' if r.worst >= 1 else 'of'} the range of its scale"
    return (
        f"the scales of the weights do not fit the weights in {len(r.layers)} of {r.total} checked layers: "
        f"{why.format(factor=r.factor, channels=r.channels)} ({shares}; the largest weight of {r.node} is {off}).",
        fix,
    )


@words(lint.WeightsPerTensor)
def _per_tensor(finding: Finding, cause: Cause, r: lint.WeightsPerTensor) -> Words:
    text = (
        f"{len(r.layers)} of {r.total} layers have one scale for all output channels of their weights; "
        f"ranges of the channels of {r.node} differ {r.spread:.3g}-fold, and {r.lost:.0%} of them lose "
        f"two bits or more"
    )
    text += (
        f" ({r.lossy} layers with such a loss in a quarter of the channels)." if r.lossy else "."
    )
    if not r.rounded:
        return text, "Give each output channel a scale of its own: max|w| / 127."
    some = "" if r.rounded == len(r.layers) else f" of {r.rounded} of these layers"
    return text, (
        f"The file has no float weights{some}, so quantize again from the float model: qdqtool insert "
        "FLOAT.onnx --calib images/, or quantize_static(..., per_channel=True)."
    )


# Placement ------------------------------------------------------------------------------------------------------


@words(lint.ConcatAfterHead)
def _joined(finding: Finding, cause: Cause, r: lint.ConcatAfterHead) -> str:
    scale = "" if r.scale is None else f", {number(r.scale)}"
    text = f"{r.node} has one scale for all inputs of {r.concat} after the head{scale}"
    if not r.scores:
        return f"{text}."
    own = "" if r.own is None else f", their own scale is {number(r.own)}"
    return f"{text}: {lost_scores(r)} (scores are '{r.scores}', at most 1{own})."


def lost_scores(r: lint.ConcatAfterHead) -> str:
    """What the scale of a Concat makes of the scores in it."""
    if r.zero_limit >= 1:
        return "all scores become 0, and the detector finds nothing"
    return f"scores up to {number(r.zero_limit)} become 0"


def harm(findings: Sequence[Finding]) -> str:
    """What the values of one of several findings of one code show to be lost, for its first line; empty for nothing."""
    for finding in findings:
        r = finding.causes[0].refusal
        if finding.severity == Severity.ERROR and isinstance(r, lint.ConcatAfterHead) and r.scores:
            return f"{lost_scores(r)} (the scale is {number(r.scale or 0.0)})"
    return ""


_HEADS = {
    "coordinates": "produces or reads boxes, reference points or sampling offsets",
    "dfl": "is the DFL (the mean over the bins of a box side)",
}
says(
    lint.HeadQuantized,
    lambda r: (
        f"{r.node} {_HEADS.get(r.branch, f'is the last convolution of a {r.branch} branch')} and is quantized."
    ),
)

# Operators and shapes -------------------------------------------------------------------------------------------

says(lint.IntegerOperator, lambda r: f"{r.node} is a {r.op}: TensorRT cannot import it.")
says(
    lint.UnknownOperator,
    lambda r: (
        f"{r.node}{f' (and {r.more} more)' if r.more else ''} is a plugin or unknown operator, {r.op}: no Q or DQ moves "
        "past it or is fused into it."
    ),
)
says(
    lint.OtherTypes,
    lambda r: (
        f"{' and '.join(f'{count} Q/DQ nodes of {kind}' for kind, count in r.kinds)} ({r.node} first) are not "
        "covered by this prediction, which has only rules for INT8."
    ),
)
says(
    lint.FloatNormalization,
    lambda r: f"{r.node} ({r.op}) reads the output of a DQ and is computed in float.",
)
says(
    lint.Convolution3D,
    lambda r: (
        f"{r.node} is a quantized 3D convolution: builds with these failed on 8.2.2 and 8.2.5."
    ),
)
says(
    lint.LargeKernel,
    lambda r: (
        f"{r.node} has a kernel of {'x'.join(map(str, r.kernel))}: builds with a 32x32 kernel failed on 8.6."
    ),
)
says(
    lint.RemainingFloat,
    lambda r: (
        f"the float part of the model stays FP32 ({r.convolutions} of "
        f"{layers_counted(r.total - r.products, r.products)} read or write FP32 and could use FP16, {r.first} first)."
    ),
)
says(lint.GroupedConvolution, lambda r: f"{r.node} has {r.groups} groups of {r.channels} channels.")
says(
    lint.DepthwiseSilu,
    lambda r: (
        f"{r.node} is a depthwise convolution with SiLU{' at the end of the network' if r.last else ''}."
    ),
)
says(
    lint.DepthwiseAdd,
    lambda r: f"{r.node} is a depthwise convolution whose result goes into {r.add}.",
)
says(
    lint.FloatEinsum,
    lambda r: (
        f"{r.node} computes a matrix product as an Einsum ({r.equation}), in float; its operands are "
        f"{'' if r.quantized else 'not all '}dequantized."
    ),
)


@words(lint.ChannelNumbers)
def _channels(finding: Finding, cause: Cause, r: lint.ChannelNumbers) -> str:
    text = f"{r.node} has {r.inputs} input and {r.outputs} output channels"
    if r.small:
        return f"{text}."
    return f"{text}; {names(map(str, r.odd))} {'is' if len(set(r.odd)) == 1 else 'are'} not a multiple of 16."


@words(lint.FloatFlag)
def _flag(finding: Finding, cause: Cause, r: lint.FloatFlag) -> Words:
    from qdqtool.findings.ways import fp16_words

    return fp16_words(finding.way)


@words(lint.DecomposedNorm)
def _pieces(finding: Finding, cause: Cause, r: lint.DecomposedNorm) -> Words | str:
    if r.alone:
        return (
            f"{r.node} ({r.alone}) squares values that are summed: in FP16 the square of 256 is infinite, and that of "
            "2e-4 is zero."
        ), "Keep these nodes FP32, or scale the values before them so that FP16 holds the squares."
    text = f"{r.node} squares values in a decomposed normalization: in FP16 the square of 256 is already infinite."
    if r.exact:
        raised = f", raising opset {r.opset} to 17" if r.opset < 17 else ""
        return (
            text,
            f"qdqtool fix --only NORM-PIECES writes a LayerNormalization, which computes the same{raised}.",
        )
    if r.opset >= 17:
        return text, "Keep these nodes FP32: no LayerNormalization computes the same."
    return text


@words(lint.ConstantsInHalf)
def _constants_in_half(finding: Finding, cause: Cause, r: lint.ConstantsInHalf) -> str:
    counts = ((r.large, "above 65504"), (r.small, "below 6e-8"), (r.denormal, "denormal"))
    listed = ", ".join(f"{node} reads {number(value)}" for node, value in r.first)
    what = "cannot hold" if r.large or r.small else "holds with fewer digits"
    return f"constants that FP16 {what}: {', '.join(f'{count} {which}' for count, which in counts if count)}; {listed}."


@words(lint.FusedByMyelin)
def _taken_by_myelin(finding: Finding, cause: Cause, r: lint.FusedByMyelin) -> str:
    parts = [
        f"{r.products} matrix products ({r.int8} INT8, {r.products - r.int8} float)"
        if r.products
        else "",
        f"{r.softmaxes} Softmax" if r.softmaxes else "",
        f"{r.norms} normalization{'' if r.norms == 1 else 's'}" if r.norms else "",
    ]
    where = f"{r.nodes} nodes from {r.node} to {r.last}, with {', '.join(p for p in parts if p)}"
    if r.possible:
        return (
            f"Myelin may compile {where}: up to {r.possible} of the conversions counted here would then be part of "
            "its kernels."
        )
    text = f"Myelin compiles {where}"
    if r.fused:
        text += f": {r.fused} Q and DQ become part of its kernels"
        text += f", but up to {r.uncertain} of them may be conversions" if r.uncertain else ""
    return f"{text}."

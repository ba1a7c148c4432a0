"""What findings say that come from the checks of the model."""

from __future__ import annotations

from qdqtool.base.text import layers_counted
from qdqtool.explain.messages import Words, names, number, scale_words, words
from qdqtool.trt import faults as lint
from qdqtool.types import Cause, Finding

# Quantizers -----------------------------------------------------------------------------------------------------


@words(lint.TypeUnknown)
def _type(finding: Finding, cause: Cause, r: lint.TypeUnknown) -> str:
    return f"{r.node} quantizes to {r.kind}, which TensorRT does not have."


@words(lint.UnsignedZeroPoint)
def _unsigned(finding: Finding, cause: Cause, r: lint.UnsignedZeroPoint) -> str:
    missing = "" if r.given else " (it has no zero point, which means uint8 in ONNX)"
    return (
        f"{r.node} quantizes to uint8{missing}: TensorRT reads int8 and cuts off everything above "
        f"127 x {scale_words(r.scale)}."
    )


@words(lint.ZeroPointMissing)
def _zero_point_missing(finding: Finding, cause: Cause, r: lint.ZeroPointMissing) -> str:
    return f"{r.node} ({r.op}) has no zero-point input."


@words(lint.ZeroPointCount)
def _zero_points(finding: Finding, cause: Cause, r: lint.ZeroPointCount) -> str:
    return f"{r.node} has {r.scales} scales and {r.zero_points} zero points."


@words(lint.ScaleHalf)
def _half(finding: Finding, cause: Cause, r: lint.ScaleHalf) -> str:
    return f"{r.node} has float16 scales ({scale_words(r.scale)}), all read as float32."


@words(lint.ScaleNotPositive)
def _not_positive(finding: Finding, cause: Cause, r: lint.ScaleNotPositive) -> str:
    where = ""
    if r.count > 1:
        channels = ", ".join(map(str, r.channels)) + (" ..." if r.bad > len(r.channels) else "")
        where = f" in {r.bad} of {r.count} channels ({channels})"
    return f"{r.node} has scale {number(r.value)}{where}."


@words(lint.ScaleRank)
def _rank(finding: Finding, cause: Cause, r: lint.ScaleRank) -> str:
    blocked = "blocked " if r.blocked else ""
    return f"{r.node} has {blocked}scales of shape {list(r.shape)}; a scalar or a vector is wanted."


@words(lint.ScaleCount)
def _count(finding: Finding, cause: Cause, r: lint.ScaleCount) -> str:
    length = f", which is {r.shape[r.axis]} long" if -len(r.shape) <= r.axis < len(r.shape) else ""
    return f"{r.node} has {r.count} scales for axis {r.axis} of weights {list(r.shape)}{length}."


@words(lint.AxisOpset)
def _opset(finding: Finding, cause: Cause, r: lint.AxisOpset) -> str:
    axis = "with an attribute axis that this opset does not have" if r.given else "without an axis"
    return f"{r.node} is per-channel in opset {r.opset}, {axis}."


# Weights and biases ---------------------------------------------------------------------------------------------


@words(lint.WeightsBehind)
def _behind(finding: Finding, cause: Cause, r: lint.WeightsBehind) -> str:
    verb = "is" if len(r.steps) == 1 else "are"
    via = names(f"{s.node} ({s.op})" for s in r.steps)
    return f"{r.node}: {via} {verb} between the weights and {r.quantizer}."


@words(lint.StoredReadElsewhere)
def _read_elsewhere(finding: Finding, cause: Cause, r: lint.StoredReadElsewhere) -> str:
    return f"{r.node} ({r.op}) reads the stored integers '{r.tensor}'."


@words(lint.WeightsStored)
def _stored(finding: Finding, cause: Cause, r: lint.WeightsStored) -> str:
    return f"{r.convolution}: weights '{r.weight}' are stored as integers, with {r.node} alone."


@words(lint.ActivationScales)
def _activation_scales(finding: Finding, cause: Cause, r: lint.ActivationScales) -> str:
    def fit(f: lint.ActivationFit) -> str:
        clips = f"clips {f.clipped:.1%} of its values, up to {f.used:.1f} times what it holds"
        what = clips if f.used > 1 else f"uses {f.used:.1%} of its steps"
        return f"{f.quantizer} (scale {number(f.scale)}) {what}"

    off = f"{r.factor:.2g} times too small" if r.factor > 1 else f"{1 / (r.factor or 1):.2g} times too large"
    factor = f", all by about one factor ({off})" if r.factor else ""
    listed = "; ".join(map(fit, r.worst))
    more = f"; and {r.bad - len(r.worst)} more" if r.bad > len(r.worst) else ""
    samples = "1 sample" if r.samples == 1 else f"{r.samples} samples"
    return f"{r.bad} of {r.total} scales of activations do not fit {samples}{factor}: {listed}{more}."


@words(lint.OutlierScales)
def _outliers(finding: Finding, cause: Cause, r: lint.OutlierScales) -> Words | str:
    listed = "; ".join(f"{q} (scale {number(scale)}) {ratio:.0f} times" for q, scale, ratio in r.worst)
    more = f"; and {r.bad - len(r.worst)} more" if r.bad > len(r.worst) else ""
    where = ("By the gains of the normalizations in front" if not r.samples
             else "On 1 sample" if r.samples == 1 else f"On {r.samples} samples")
    said = (f"{r.bad} of {r.total} scales of activations cover outliers, and leave others a step or two of 127. "
            f"{where} the largest value held is many times the typical one: {listed}{more}.")
    if r.linear:
        return said
    return said, ("Leave them float (--exclude), and compare the accuracy. A method that clips (--method-for "
                  "TENSOR=percentile) helps where the outliers do not matter.")


@words(lint.QuantizedStream)
def _stream(finding: Finding, cause: Cause, r: lint.QuantizedStream) -> str:
    return f"{r.node} adds to the residual stream that {r.norm} normalizes, and reads it through {names(r.pairs)}."


@words(lint.NothingQuantized)
def _nothing(finding: Finding, cause: Cause, r: lint.NothingQuantized) -> str:
    some = "one layer" if r.convolutions == 1 else f"{r.convolutions} layers"
    return f"there is no Q/DQ in this model; {some} with constant weights could run in INT8."


_SCALES = {
    lint.WeightScalesCause.AXIS: (
        "they fit along the other axis of the weights",
        "Take the scales along the output channels, and write that axis.",
    ),
    lint.WeightScalesCause.FACTOR: (
        "all by one factor, {factor:.4g}",
        "Take scale = max|w| / 127 for each channel; a factor of 1.008 is that of 128 codes, 2 one of a wrong range.",
    ),
    lint.WeightScalesCause.OTHER_WEIGHTS: (
        "they were most likely taken before BatchNormalization was folded into the weights, or from another checkpoint",
        "Take the scales from the weights that this file holds: fold BatchNormalization first, then quantize.",
    ),
    lint.WeightScalesCause.TENSOR: (
        "there is one scale for all channels of a layer, taken from a part of them or from other weights",
        "Take max|w| / 127 of the whole tensor, or better one scale for each output channel.",
    ),
    lint.WeightScalesCause.TOO_LARGE: (
        "they were most likely taken from other weights, or from the range of a whole network",
        "Take scale = max|w| / 127 for each channel of the weights that this file holds.",
    ),
    lint.WeightScalesCause.EXCEPTION: (
        "{channels} channels, while all others have theirs",
        "Take scale = max|w| / 127 for these channels too; unless they are clipped on purpose.",
    ),
}


@words(lint.WeightScales)
def _scales(finding: Finding, cause: Cause, r: lint.WeightScales) -> Words:
    why, fix = _SCALES[r.cause]
    shares = f"{r.clipped:.0%} of the channels are clipped, {r.wasted:.0%} use a quarter of the steps or less"
    off = f"{r.worst:.3g} times what the scale holds" if r.worst >= 1 else f"{r.worst:.3g} of what the scale holds"
    return (
        f"the scales of the weights do not fit the weights in {len(r.layers)} of {r.total} layers looked at: "
        f"{why.format(factor=r.factor, channels=r.channels)} ({shares}; the largest weight of {r.node} is {off}).", fix,
    )


@words(lint.WeightsOutput)
def _output(finding: Finding, cause: Cause, r: lint.WeightsOutput) -> str:
    return f"{r.node}: the quantized weights of {r.convolution} are a network output."


@words(lint.BiasQuantized)
def _bias(finding: Finding, cause: Cause, r: lint.BiasQuantized) -> str:
    whose = f"{r.convolution}: its bias" if r.convolution else "a bias"
    return f"{whose} is {str(r.precision).lower()} behind {r.node}."


@words(lint.ProductOfActivations)
def _product(finding: Finding, cause: Cause, r: lint.ProductOfActivations) -> str:
    return f"{r.node} multiplies two quantized activations."


@words(lint.DeconvolutionFloat)
def _deconvolution(finding: Finding, cause: Cause, r: lint.DeconvolutionFloat) -> str:
    return f"{r.node} has Q/DQ, but this target computes ConvTranspose in float."


# Placement ------------------------------------------------------------------------------------------------------


@words(lint.InsideActivation)
def _inside(finding: Finding, cause: Cause, r: lint.InsideActivation) -> str:
    if r.gate:
        return f"{r.node} is between {r.activation} and the Mul of {r.convolution}'s SiLU."
    return f"{r.node} is between {r.convolution} and {'SiLU' if r.silu else r.activation or 'its activation'}."


@words(lint.BehindPad)
def _pad(finding: Finding, cause: Cause, r: lint.BehindPad) -> str:
    return f"{r.quantizer} is between {r.pad} and {r.node}."


@words(lint.JoinedBehindHead)
def _joined(finding: Finding, cause: Cause, r: lint.JoinedBehindHead) -> str:
    return f"{r.node} gives everything that {r.concat} joins behind the head one scale."


@words(lint.HeadQuantized)
def _head(finding: Finding, cause: Cause, r: lint.HeadQuantized) -> str:
    if r.branch == "coordinates":
        return f"{r.node} makes or reads boxes, reference points or sampling offsets and is quantized."
    what = "the DFL (the mean over a box side's bins)" if r.branch == "dfl" else (
        f"the last convolution of a {r.branch} branch"
    )
    return f"{r.node} is {what} and is quantized."


# Operators and shapes -------------------------------------------------------------------------------------------


@words(lint.IntegerOperator)
def _integer(finding: Finding, cause: Cause, r: lint.IntegerOperator) -> str:
    return f"{r.node} is a {r.op}: TensorRT cannot import it."


@words(lint.UnknownOperator)
def _unknown(finding: Finding, cause: Cause, r: lint.UnknownOperator) -> str:
    more = f" (and {r.more} more)" if r.more else ""
    return f"{r.node}{more} is a plugin or unknown operator, {r.op}: no Q or DQ moves past it or is taken into it."


@words(lint.OtherTypes)
def _other_types(finding: Finding, cause: Cause, r: lint.OtherTypes) -> str:
    kinds = " and ".join(f"{count} Q/DQ nodes of {kind}" for kind, count in r.kinds)
    return (
        f"{kinds} ({r.node} first) are outside the rules of this prediction, which are those of INT8: what becomes of "
        "them is not known here."
    )


@words(lint.NormalizationFloat)
def _normalization(finding: Finding, cause: Cause, r: lint.NormalizationFloat) -> str:
    return f"{r.node} ({r.op}) reads a dequantized tensor and is computed in float."


@words(lint.Convolution3D)
def _three_dimensions(finding: Finding, cause: Cause, r: lint.Convolution3D) -> str:
    return f"{r.node} is a quantized 3D convolution: builds of such failed on 8.2.2 and 8.2.5."


@words(lint.LargeKernel)
def _kernel(finding: Finding, cause: Cause, r: lint.LargeKernel) -> str:
    kernel = "x".join(map(str, r.kernel))
    return f"{r.node} has a kernel of {kernel}: builds with one of 32x32 failed on 8.6."


@words(lint.Grouped)
def _grouped(finding: Finding, cause: Cause, r: lint.Grouped) -> str:
    return f"{r.node} has {r.groups} groups of {r.channels} channels."


@words(lint.Channels)
def _channels(finding: Finding, cause: Cause, r: lint.Channels) -> str:
    text = f"{r.node} has {r.inputs} input and {r.outputs} output channels"
    if finding.code == "CH-SMALL":
        return f"{text}."
    return f"{text}; {names(map(str, r.odd))} {'is' if len(set(r.odd)) == 1 else 'are'} not a multiple of 16."


@words(lint.DepthwiseSilu)
def _silu(finding: Finding, cause: Cause, r: lint.DepthwiseSilu) -> str:
    return f"{r.node} is a depthwise convolution with SiLU{' at the end of the network' if r.last else ''}."


@words(lint.DepthwiseAdd)
def _add(finding: Finding, cause: Cause, r: lint.DepthwiseAdd) -> str:
    return f"{r.node} is a depthwise convolution whose result goes into {r.add}."


@words(lint.FloatFlag)
def _flag(finding: Finding, cause: Cause, r: lint.FloatFlag) -> Words:
    from qdqtool.explain.ways import fp16_words

    return fp16_words(finding.way)


@words(lint.EinsumFloat)
def _einsum(finding: Finding, cause: Cause, r: lint.EinsumFloat) -> str:
    what = "operands are dequantized" if r.quantized else "operands are not all dequantized"
    return f"{r.node} computes a matrix product as an Einsum ({r.equation}), in float; its {what}."


@words(lint.NormInPieces)
def _pieces(finding: Finding, cause: Cause, r: lint.NormInPieces) -> Words | str:
    if r.alone:
        return (f"{r.node} ({r.alone}) squares what is summed then: in FP16 the square of 256 is infinite, that of "
                "2e-4 zero."), "Keep these nodes FP32, or put a factor in front that FP16 holds the squares of."
    text = f"{r.node} squares in a normalization in pieces: in FP16 the square of 256 is infinite already."
    if r.exact:
        raised = f", raising opset {r.opset} to 17" if r.opset < 17 else ""
        return text, f"qdqtool fix --only NORM-PIECES writes a LayerNormalization, which computes the same{raised}."
    if r.opset >= 17:
        return text, "Keep these nodes FP32: no LayerNormalization computes the same."
    return text


@words(lint.ConstantsInHalf)
def _constants_in_half(finding: Finding, cause: Cause, r: lint.ConstantsInHalf) -> str:
    counts = [f"{r.large} above 65504" if r.large else "", f"{r.small} below 6e-8" if r.small else "",
              f"{r.denormal} denormal" if r.denormal else ""]
    listed = ", ".join(f"{node} reads {number(value)}" for node, value in r.first)
    what = "cannot hold" if r.large or r.small else "holds with fewer digits"
    return f"constants that FP16 {what}: {', '.join(c for c in counts if c)}; {listed}."


@words(lint.FloatStays)
def _float_stays(finding: Finding, cause: Cause, r: lint.FloatStays) -> str:
    layers = layers_counted(r.total - r.products, r.products)
    return (
        f"the float part of the model is FP32 and stays FP32 ({r.convolutions} of {layers} read or write it and could "
        f"be FP16, {r.first} first)."
    )


@words(lint.TakenByMyelin)
def _taken_by_myelin(finding: Finding, cause: Cause, r: lint.TakenByMyelin) -> str:
    parts = [
        f"{r.products} matrix products ({r.int8} INT8, {r.products - r.int8} float)" if r.products else "",
        f"{r.softmaxes} Softmax" if r.softmaxes else "",
        f"{r.norms} normalization{'' if r.norms == 1 else 's'}" if r.norms else "",
    ]
    where = f"{r.nodes} nodes from {r.node} to {r.last}, with {', '.join(p for p in parts if p)}"
    if r.possible:
        return (f"Myelin may take {where}: up to {r.possible} of the conversions counted here would then be part of "
                "its kernels.")
    text = f"Myelin takes {where}"
    if r.fused:
        text += f": {r.fused} Q and DQ become part of its kernels"
        text += f", up to {r.uncertain} of which may be conversions instead" if r.uncertain else ""
    return f"{text}."

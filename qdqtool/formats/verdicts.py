"""Verdicts in one sentence: whether TensorRT builds the model, its layer types, its speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qdqtool.evidence import Evidence
from qdqtool.formats.output import Style
from qdqtool.ir.precision import EIGHT_BITS, Precision
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.reasons.gpus import GpuLimit
from qdqtool.reasons.quantizers import UncoveredOperandType
from qdqtool.trt.result import Assumption, EngineLayer, Prediction
from qdqtool.util.text import (
    format_count,
    format_excess,
    format_factor,
    format_layer_counts,
    format_list,
    format_speed,
    is_small_factor,
)

if TYPE_CHECKING:
    from qdqtool.timing.results import SpeedGain, TimeEstimate

EVEN = "about as fast"
RAW_ERROR_REMARK = (
    "It compares raw values, not detections or labels: these are measured by 'qdqtool compare "
    "--calib'."
)
_FP8_ERRORS = ("FP8-GPU", "FP8-TARGET")  # the target or the GPU has no FP8
# Codes of Q/DQ that cost accuracy, and that `insert` does not write.
_LOSSY_PLACEMENTS = ("HEAD-CONCAT", "HEAD-QUANT", "RESIDUAL-STREAM", "W-PER-TENSOR")


class Verdict(NamedTuple):
    """Sentence on a result, with a green, yellow or red style."""

    text: str
    style: Style


# Layers -------------------------------------------------------------------------------------------


def verdict(
    prediction: Prediction, *, half: bool = True, times: Sequence[TimeEstimate] = ()
) -> str:
    """Return the predicted types of convolutions and the number of Q/DQ layers in one line.

    If TensorRT rejects the model, the line says why instead.

    Example: ``60 of 64 convolutions in INT8 (6 of them with FP16 output), 4 in FP16; 1 Q/DQ layer
    remains``.

    Args:
        prediction: The prediction.
        half: Whether the builder may use FP16.
        times: Estimated time on each GPU, for the type of float layers.
    """
    rejection = describe_rejection(prediction)
    if rejection:
        return rejection
    float_type = name_estimated_float_type(prediction, times, half=half)
    nested = describe_subgraphs(prediction.model.subgraphs)
    if not is_analyzed(prediction):
        return f"Not analyzed: {nested}"
    if has_no_qdq(prediction):
        return f"Nothing is quantized: {describe_layer_counts(prediction, float_type)}"
    rows = describe_layers_by_kind(prediction, float_type, nouns=True)
    if not rows:
        return (
            f"{describe_uncovered_types(prediction, float_type)}{describe_layer_counts(prediction)}"
        )
    if prediction.conversions is not None:
        number, dependence = count_conversions(prediction)
        verb = "remains" if number == 1 else "remain"
        open_names = describe_uncertain_conversions(prediction)
        uncertain = f" ({open_names})" if open_names else ""
        rows["Q/DQ layers"] = f"{format_count(number, 'Q/DQ layer')} {verb}{dependence}{uncertain}"
    parts = filter(None, (*rows.values(), describe_myelin_kernels(prediction)))
    return f"{describe_uncovered_types(prediction, float_type)}{'; '.join(parts)}"


def has_no_qdq(prediction: Prediction) -> bool:
    """Return whether a model has no Q/DQ, neither in its graph nor in subgraphs."""
    return not has_nested_quantizers(prediction) and any(
        f.code == "NO-QDQ" for f in prediction.findings
    )


def has_nested_quantizers(prediction: Prediction) -> bool:
    """Return whether subgraphs of the model have Q/DQ. These are not analyzed."""
    return bool(prediction.model.subgraphs.get("quantizers"))


def is_analyzed(prediction: Prediction) -> bool:
    """Return whether the prediction covers the layers of the model.

    False if convolutions, matrix products or Q/DQ are in subgraphs (branches of If, bodies of Loop
    and Scan), and the main graph has no convolution or matrix product.
    """
    return bool(prediction.convolutions) or not prediction.model.subgraphs


def describe_subgraphs(counts: Mapping[str, int]) -> str:
    """Return a text on layers and Q/DQ in subgraphs; empty without subgraphs.

    Args:
        counts: Numbers by kind, as in :attr:`qdqtool.ir.input_shapes.ModelInfo.subgraphs`.
    """
    nouns = {
        "convolutions": "convolution",
        "matrix_products": "matrix product",
        "quantizers": "Q/DQ node",
    }
    parts = [format_count(counts[key], noun) for key, noun in nouns.items() if counts.get(key)]
    if not parts:
        return ""
    content = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{content} in branches of If or bodies of Loop and Scan"


def name_float_type(prediction: Prediction, *, half: bool = True) -> Precision:
    """Return the type of layers that are not quantized: FP16, BF16 or FP32.

    This is the most frequent type of float convolutions. Without float convolutions, it is the most
    frequent type of the float outputs of quantized convolutions. If the builder chooses the types,
    it is BF16 for a model with bfloat16, else FP16 if `half` is set, else FP32.
    """
    convolutions = prediction.convolutions
    for types in ([c.precision for c in convolutions], [c.output for c in convolutions]):
        counts = Counter(t for t in types if t.is_float and t != Precision.FLOAT)
        if counts:
            return counts.most_common(1)[0][0]
    if prediction.model.has_bfloat16:
        return Precision.BF16
    return Precision.FP16 if half else Precision.FP32


def name_estimated_float_type(
    prediction: Prediction, times: Sequence[TimeEstimate], *, half: bool = True
) -> str:
    """Return :func:`name_float_type` as the times were estimated, such as ``FP16 or FP32``.

    An estimate uses FP32 instead of FP16 if the engine is then faster on the GPU.
    """
    uses_half = [not time.fp32_layers for time in times if time.is_supported] or [True]
    types = {name_float_type(prediction, half=half and use) for use in uses_half}
    return " or ".join(sorted(types))


def describe_layer_counts(prediction: Prediction, float_type: str | None = None) -> str:
    """Return a text with the numbers of convolutions and matrix products, and their float type."""
    counts = prediction.summary()
    convolutions = sum(not c.is_product for c in prediction.convolutions)
    if not convolutions and not counts["matrix_products"]:
        return "no convolution or matrix product"
    layers = format_layer_counts(convolutions, counts["matrix_products"])
    if float_type is None:
        return layers
    types = [c.precision for c in prediction.convolutions if not c.is_product]
    types += _list_product_types(prediction)
    return f"{layers} in {' and '.join(_count_float_types(types, float_type)) or float_type}"


def describe_layers_by_kind(
    prediction: Prediction, float_type: str, *, nouns: bool = False
) -> dict[str, str]:
    """Return texts on the types of convolutions and of matrix products, by label.

    Args:
        prediction: The prediction.
        float_type: Type of layers that are not quantized.
        nouns: Whether the texts name the kind of layer, for use without the label.
    """
    counts, rows = prediction.summary(), {}
    if any(not c.is_product for c in prediction.convolutions):
        noun = "convolution" if nouns else ""
        rows["Convolutions"] = _describe_convolutions(prediction, float_type, noun)
    total = counts["matrix_products"]
    if total:
        noun = "matrix product" if nouns else ""
        shares = {
            t: counts[f"matrix_products_{t.lower()}"] for t in (Precision.INT8, Precision.FP8)
        }
        rests = _count_float_types(_list_product_types(prediction), float_type)
        rows["Matrix products"] = _describe_types(shares, total, noun, rests)
    return rows


def _list_product_types(prediction: Prediction) -> list[Precision]:
    """Return the type of each matrix product, ``FLOAT`` if the builder chooses it."""
    types = [c.precision for c in prediction.convolutions if c.is_product]
    listed = sum(t not in EIGHT_BITS for t in types)
    # Products of two activations without Q/DQ are counted, but not listed.
    return types + [Precision.FLOAT] * (prediction.summary()["matrix_products_float"] - listed)


def _count_float_types(types: Iterable[Precision], float_type: str) -> dict[str, int | str]:
    """Count the types that are not quantized, the most frequent one first.

    `float_type` stands for types that the builder chooses.
    """
    known = (Precision.FP16, Precision.BF16, Precision.FP32)
    names = (str(t) if t in known else float_type for t in types if t not in EIGHT_BITS)
    return dict(Counter(names).most_common())


def _describe_convolutions(prediction: Prediction, float_type: str, noun: str) -> str:
    """Describe convolutions by type. A number is a range if it depends on an open assumption."""
    convolutions = [c for c in prediction.convolutions if not c.is_product]
    int8, int8_to_int8 = _count_convolutions(prediction, Precision.INT8)
    fp8, fp8_to_fp8 = _count_convolutions(prediction, Precision.FP8)
    quantized = [a + b for a, b in zip(int8, fp8, strict=True)]
    inside = [a + b for a, b in zip(int8_to_int8, fp8_to_fp8, strict=True)]
    to_float = [total - same for total, same in zip(quantized, inside, strict=True)]
    shares = {Precision.INT8: _format_range(int8), Precision.FP8: _format_range(fp8)}
    outputs = ""
    if prediction.conversions is not None and any(to_float):
        written = (c.output for c in convolutions if c.is_quantized)
        types = " or ".join(_count_float_types(written, float_type)) or float_type
        outputs = f" ({_describe_float_share(to_float, quantized)}with {types} output)"
    rests = _count_float_types((c.precision for c in convolutions), float_type)
    rest = _format_range([len(convolutions) - n for n in quantized])
    if len(rests) < 2:
        rests = {next(iter(rests), float_type): rest} if rest else {}
    return _describe_types(shares, len(convolutions), noun, rests, outputs)


def _describe_float_share(to_float: Sequence[int], quantized: Sequence[int]) -> str:
    """Return how many quantized convolutions write float, such as ``6 of them`` or ``all``."""
    if to_float != quantized:
        return f"{_format_range(to_float)} of them "
    return "" if max(quantized) == 1 else "all "


def _count_convolutions(
    prediction: Prediction, precision: Precision
) -> tuple[list[int], list[int]]:
    """Return numbers of convolutions that compute in a type, and of those that also write it.

    Both are lists. The first number of a list is for the prediction, the others are for the
    alternatives of open assumptions.
    """
    name = precision.lower()
    products = [c for c in prediction.convolutions if c.is_product and c.computes_in(precision)]
    product_inside = sum(c.quantized_in_quantized_out for c in products)
    counts = [prediction.summary()]
    for assumption in open_assumptions(prediction):
        counts += [c.as_json() for c in assumption.alternatives.values()]
    inside = [c[f"{name}_to_{name}"] - product_inside for c in counts]
    return [c[name] - len(products) for c in counts], inside


def _describe_share(shares: Mapping[Precision, int | str], total: int, noun: str) -> str:
    """Return a text such as ``60 of 64 convolutions in INT8``, with FP8 if it occurs."""
    counted = format_count(total, noun) if noun else str(total)
    int8, fp8 = shares[Precision.INT8], shares[Precision.FP8]
    if int8 and fp8:
        return f"{int8} of {counted} in INT8 and {fp8} in FP8"
    if not int8 and not fp8:
        return f"none of {counted} in INT8 or FP8"
    part, precision = (fp8, Precision.FP8) if fp8 else (int8, Precision.INT8)
    share = f"{part} of " if part != total else "all " if total > 1 else ""
    return f"{share}{counted} in {precision}"


def _describe_types(
    shares: Mapping[Precision, int | str],
    total: int,
    noun: str,
    rests: Mapping[str, int | str],
    outputs: str = "",
) -> str:
    """Return a text such as ``60 of 64 convolutions in INT8, 4 in FP16``.

    `rests` has the number of float layers by type, and `outputs` is a remark on the types that are
    written.
    """
    if total == 1 and not any(shares.values()):
        return f"{format_count(total, noun) if noun else total} in {next(iter(rests))}"
    text = _describe_share(shares, total, noun) + outputs
    return ", ".join([text, *(f"{count} in {name}" for name, count in rests.items())])


def _format_range(numbers: Sequence[int]) -> int | str:
    low, high = min(numbers), max(numbers)
    return low if low == high else f"{low} to {high}"


def count_conversions(prediction: Prediction) -> tuple[int | str, str]:
    """Return the number or range of remaining Q and DQ, and a text on the reasons for a range."""
    bounds = prediction.conversions_range or [prediction.conversions or 0]
    if len(set(bounds)) == 1:
        return bounds[0], ""
    causes = []
    if open_assumptions(prediction):
        causes.append("the fusion of Conv + activation + Add")
    if any(r.uncertain or r.possible for r in prediction.regions):
        causes.append("how many of them Myelin absorbs")
    return _format_range(bounds), f", depending on {' and '.join(causes)}" if causes else ""


def describe_uncertain_conversions(prediction: Prediction, most: int = 3) -> str:
    """Return ``uncertain:`` and at most `most` names of Q/DQ that may remain; empty without any."""
    names = prediction.uncertain_conversions
    return f"uncertain: {format_list(names, most)}" if names else ""


def myelin_kernels(prediction: Prediction) -> list[str]:
    """Return the names of Qs and DQs that run as kernels inside Myelin layers.

    Each name is listed once, also if TensorRT copies the node, as for the inputs of a Concat.
    """
    return list(dict.fromkeys(name for region in prediction.regions for name in region.kernels))


def describe_myelin_kernels(prediction: Prediction) -> str:
    """Return a text on the Q and DQ that run inside layers of Myelin; empty if none do."""
    count = len(myelin_kernels(prediction))
    if not count:
        return ""
    verb = "runs" if count == 1 else "run"
    content = _list_myelin_content(prediction)
    return f"{format_count(count, 'Q/DQ node')} {verb} inside Myelin's layers ({content})"


def _list_myelin_content(prediction: Prediction) -> str:
    """Return the kinds of layers in the regions that have Q/DQ kernels."""
    regions = [region for region in prediction.regions if region.kernels]
    kinds = {
        "matrix products": any(r.products for r in regions),
        "Softmax": any(r.softmaxes for r in regions),
        "normalizations": any(r.norms for r in regions),
    }
    named = [kind for kind, is_present in kinds.items() if is_present]
    return ", ".join(named or dict.fromkeys(region.op for region in regions))


def open_assumptions(prediction: Prediction) -> list[Assumption]:
    """Return the assumptions that neither the user nor a build has replaced by a fact."""
    return [a for a in prediction.assumptions if not a.given]


def describe_uncovered_types(prediction: Prediction, float_type: str) -> str:
    """Return the start of the verdict if a model has INT4 or FP4, else an empty text.

    These types are not predicted.
    """
    types = sorted(
        {str(r.precision) for r in prediction.refusals if isinstance(r, UncoveredOperandType)}
    )
    if not types and all(f.code != "FP8-OUTSIDE" for f in prediction.findings):
        return ""
    return f"{' and '.join(types) or 'FP4'} Q/DQ is not predicted and counts as {float_type}; "


def describe_moved_quantizer(layer: EngineLayer) -> str:
    """Return a remark on a Cast or Identity of quantized values; empty for other layers.

    In the model, such a node reads and writes float: the Q is after it, or the DQ before it.
    """
    types = {tensor.precision for tensor in (*layer.inputs, *layer.outputs)}
    is_moved = layer.type == "Identity" and types.issubset(EIGHT_BITS)
    return "Q/DQ moves past it" if is_moved else ""


def describe_assumed_typing(prediction: Prediction) -> str:
    """Return a text if a weakly typed build of a file with FP16 types is assumed; else empty."""
    target = prediction.choose_typing(prediction.named_target)
    is_weakly_typed = target.has_strong_typing and not target.strongly_typed
    has_types = prediction.model.has_float16 and not has_no_qdq(prediction)
    if not (has_types and is_weakly_typed and prediction.convolutions):
        return ""
    return (
        "weakly typed build assumed, which may change the FP16 types of the file. With "
        "--strongly-typed, the prediction is for a build with these types"
    )


def remarks(prediction: Prediction) -> list[str]:
    """Return paragraphs on the limits of the verdict, such as assumptions and confidence."""
    lines = [describe_assumption(prediction, a) for a in prediction.assumptions]
    if any(c.evidence == "assumed" for c in prediction.convolutions):
        lines.append(f"Confidence: {describe_confidence(prediction)}.")
    if typing := describe_assumed_typing(prediction):
        lines.append(f"Typing: {typing}.")
    if rules := prediction.named_target.borrowed_rules:
        lines.append(f"Rules: {rules}.")
    if prediction.conversions is None and prediction.convolutions:
        lines.append("This target quantizes inside its kernels, so it has no Q/DQ layers.")
    return lines


def describe_assumption(prediction: Prediction, assumption: Assumption, why: bool = True) -> str:
    """Describe a choice of TensorRT that is assumed, and the results of its alternatives.

    Args:
        prediction: The prediction.
        assumption: The choice.
        why: Whether to add the reason for the assumption.
    """
    a, counts = assumption, prediction.summary()
    adds = format_count(len(a.places), "residual Add")
    kind = Precision.FP8 if counts["fp8"] and not counts["int8"] else Precision.INT8
    field = f"{kind.lower()}_to_{kind.lower()}"
    numbers = {a.value: (counts[field], counts["conversions"])}
    numbers |= {name: (c.as_json()[field], c.conversions) for name, c in a.alternatives.items()}
    first = f" ({'such as ' if a.places[1:] else ''}{a.places[0]})" if a.places else ""
    results = [
        f"{value}{' (assumed here)' if value == a.value else ''}: "
        f"{format_count(inside, 'convolution')} with {kind} output, "
        f"{format_count(layers, 'Q/DQ layer')}"
        for value, (inside, layers) in sorted(numbers.items())
    ]
    text = (
        f"{a.name}: reports differ on whether TensorRT fuses {adds}{first} into the convolution "
        f"before the activation. If {'; if '.join(results)}."
    )
    if why:
        text += f" Reason: {a.why}."
    if not a.given:
        text += f" --assume {a.name}={next(iter(a.alternatives))} shows the other result."
    return text


def describe_confidence(prediction: Prediction) -> str:
    """Describe for how many layers real builds or documents confirm the result.

    Products of two float activations are not counted. The text states their number.
    """
    total = len(prediction.convolutions)
    products = sum(c.is_product for c in prediction.convolutions)
    uncounted = prediction.summary()["matrix_products"] - products
    text = _describe_evidence(prediction, total)
    if uncounted:
        text += f"; without {format_count(uncounted, 'product')} of two activations (no Q/DQ)"
    return text


def _describe_evidence(prediction: Prediction, total: int) -> str:
    assumed = sum(c.evidence == "assumed" for c in prediction.convolutions)
    layers = f"all {total} layers" if total > 1 else "the only layer"
    if assumed == total:
        return f"{layers} assumed: no build or document confirms the rules"
    target = prediction.named_target
    origin = f", by the rules of {target.rules_title}" if target.borrows_rules else ""
    if not assumed:
        return f"{layers} seen in real builds or documented{origin}"
    confirmed = f"{total - assumed} of {total} layers seen in real builds or documented"
    return f"{confirmed}, {assumed} assumed{origin}"


# Builds -------------------------------------------------------------------------------------------


def describe_rejection(prediction: Prediction) -> str:
    """Return a sentence on why TensorRT rejects a model; empty if TensorRT builds the model.

    If the rules of all errors that prevent the build are assumed, the sentence says "probably". An
    error that prevents the build comes first. Errors that only make results wrong come last.
    """
    if not prediction.rejection:
        return ""
    errors = sorted(prediction.errors(), key=lambda f: (f.is_built, f.evidence == Evidence.ASSUMED))
    return _describe_errors(errors, f"TensorRT {prediction.rejection} this model")


def build_verdict(prediction: Prediction) -> Verdict | None:
    """Return the verdict if TensorRT rejects the model or computes wrong results, else None."""
    text = describe_rejection(prediction) or _describe_errors(
        prediction.errors(), "TensorRT builds this model, but its results will be wrong"
    )
    return Verdict(f"{text}.", Style.BAD) if text else None


def _describe_errors(findings: Iterable[Finding], consequence: str) -> str:
    """Return a sentence with the first error and the codes of further errors, else empty."""
    from qdqtool.findings import codes

    errors = Counter(f.code for f in findings)
    chosen = list(errors)
    if not chosen:
        return ""
    title, count = codes.get(chosen[0]).title, errors[chosen[0]]
    places = f", {count} places" if count > 1 else ""
    others = f"; further errors: {', '.join(chosen[1:])}" if chosen[1:] else ""
    return f"{consequence}: {title[0].lower()}{title[1:]} ({chosen[0]}{places}){others}"


def has_model_errors(prediction: Prediction) -> bool:
    """Return whether the model itself, not a limit of the GPU, causes an error."""
    return any(
        f.severity == Severity.ERROR and not isinstance(f.causes[0].reason, GpuLimit)
        for f in prediction.findings
    )


def has_lossy_placement(prediction: Prediction) -> bool:
    """Return whether warnings concern placements that cost accuracy and that ``insert`` avoids."""
    return any(
        f.code in _LOSSY_PLACEMENTS and f.severity == Severity.WARNING for f in prediction.findings
    )


def needs_other_format(prediction: Prediction) -> bool:
    """Return whether TensorRT rejects the model because the target or GPU has no FP8.

    Other fixes of the model are useless then.
    """
    return any(f.code in _FP8_ERRORS for f in prediction.errors())


def quality_verdict(prediction: Prediction, float_type: str) -> Verdict:
    """Return a verdict on types and findings, for a model that TensorRT builds."""
    counts = prediction.summary()
    nested = describe_subgraphs(prediction.model.subgraphs)
    if not is_analyzed(prediction):
        return Verdict(f"Not analyzed: {nested}.", Style.UNCLEAR)
    if not (counts["int8"] or counts["fp8"]):
        subject = "Nothing is quantized" if has_no_qdq(prediction) else "No layer is INT8 or FP8"
        if nested:
            subject += " outside of the subgraphs"
        layers = describe_layer_counts(prediction, float_type)
        return Verdict(f"{subject}: {layers}.", Style.UNCLEAR)
    if all(f.severity != Severity.WARNING for f in prediction.findings):
        types = " and ".join(t for t in ("INT8", "FP8") if counts[t.lower()])
        return Verdict(f"TensorRT runs this model in {types} as intended.", Style.GOOD)
    return Verdict(
        "TensorRT builds this model, but the warnings below cost speed or accuracy.",
        Style.UNCLEAR,
    )


def overall_verdict(
    prediction: Prediction, time: TimeEstimate | None, *, half: bool = True
) -> Verdict:
    """Return the verdict on errors, else on the speed, else on types and findings.

    The verdict is on errors if TensorRT rejects the model or computes wrong results, and on the
    speed if times are known. `half` is whether the builder may use FP16.
    """
    problem = build_verdict(prediction)
    if problem is not None:
        return problem
    if time is not None and is_analyzed(prediction):
        return speed_verdict(time)
    return quality_verdict(prediction, name_float_type(prediction, half=half))


# Speed --------------------------------------------------------------------------------------------


def speed_verdict(time: TimeEstimate) -> Verdict:
    """Return whether INT8 or FP8 is faster than FP16 or FP32 on a GPU, and by how much."""
    if not time.gpu.has_int8:
        return Verdict(f"{time.gpu.name} has no INT8: deploy the float model there.", Style.BAD)
    gain = time.faster_range if time.is_float else time.gain_range
    if gain is None:
        return Verdict(f"The gain of {time.quantized} is unknown.", Style.UNCLEAR)
    text, verb = (
        describe_ratio(gain) + _explain_small_gain(time),
        "would be" if time.is_float else "is",
    )
    if time.is_float or gain.is_sure:
        return Verdict(f"{gain.quantized} {verb} {text}.", ratio_style(gain))
    return Verdict(f"{text[0].upper()}{text[1:]}.", ratio_style(gain))


def _explain_small_gain(time: TimeEstimate) -> str:
    if time.quantized is not Precision.INT8 or time.gpu.int8_rate_over_fp16 > 1:
        return ""
    return f": {time.gpu.name} computes INT8 no faster than {time.gpu.float_type}"


def ratio_style(gain: SpeedGain) -> Style:
    """Return green for a gain, red for a loss, and yellow if the range includes both."""
    if not gain.is_sure:
        return Style.UNCLEAR
    return Style.GOOD if gain.value > 1 else Style.BAD


def describe_ratio(gain: SpeedGain) -> str:
    """Return a text such as ``1.7x faster than FP16 (80 % range 1.3x to 2.2x)``."""
    ratio, bounds = format_ratio(gain), f"80 % range {describe_range(gain)}"
    if gain.is_sure:
        return f"{ratio} than {gain.precision} ({bounds})"
    if ratio == EVEN:
        return f"{ratio} as {gain.precision} ({bounds})"
    return f"about {ratio} than {gain.precision}, but not certainly ({bounds})"


def format_ratio(gain: SpeedGain) -> str:
    """Return ``1.7x faster``, or :data:`EVEN` for an uncertain ratio of 1.0."""
    factor = max(gain.value, 1 / gain.value)
    if f"{factor:.1f}" == "1.0" and not gain.is_sure:
        return EVEN
    return format_speed(gain.value)


def describe_range(gain: SpeedGain) -> str:
    """Return the range of a gain, such as ``1.3x to 2.2x``.

    If the whole range is a loss, the factors say how many times slower the engine is. A sure gain
    or loss below 20 % has a range such as ``5 % to 40 % slower``. If the range includes gain and
    loss, the factors are ratios of speeds, and "its speed" is added if a loss is likelier.
    """
    is_slower = gain.value < 1
    low, high = gain.low, gain.high
    if gain.is_sure and is_slower:
        low, high = 1 / gain.high, 1 / gain.low
    if gain.is_sure and is_small_factor(max(gain.value, 1 / gain.value)):
        direction = "slower" if is_slower else "faster"
        return f"{format_excess(low)} to {format_excess(high)} {direction}"
    unit = " its speed" if is_slower and not gain.is_sure else ""
    return f"{format_factor(low)} to {format_factor(high)}{unit}"

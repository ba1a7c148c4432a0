"""Text of ``predict``: the verdict first, then the findings by code."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qdqtool.findings.obstacles import suggest_recipe
from qdqtool.findings.report import (
    group_findings,
    list_shown_findings,
    sort_conversions,
    title_of,
)
from qdqtool.formats import verdicts
from qdqtool.formats.float_names import can_use_fp16, find_float_type, name_floats
from qdqtool.formats.output import SEVERITY_STYLES, Style, TextPage, fixed_model_path, wrap_call
from qdqtool.formats.time_text import (
    add_slowest_layers,
    add_speed_verdict,
    add_time_notes,
    describe_clock,
    describe_fixed_time,
    describe_request_cost,
    describe_saving,
    describe_slower_fix,
    list_choice_notes,
    name_fix_gpu,
)
from qdqtool.ir.input_shapes import ModelInfo
from qdqtool.ir.precision import EIGHT_BITS, Precision
from qdqtool.patterns.view import AXIS_OPSET
from qdqtool.reasons.finding import Finding, Severity, split_fixable
from qdqtool.trt.result import ConvOutcome, EngineLayer, Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target
from qdqtool.util.text import drop_repeated_sentences, format_count, format_layer_counts, format_ms

if TYPE_CHECKING:
    from qdqtool.findings.build_methods import BuildMethod
    from qdqtool.timing.gpus import Gpu
    from qdqtool.timing.results import TimeEstimate

# Maximum lengths of lists if --all is not given.
_MAX_NAMES = 3  # number of names in one line
_MAX_CONVERSIONS = 3
_CONVERSION_CODES = ("CONVERSION", "INPUT-CONVERSION")
_BY_FIX, _ON_REQUEST = "[*]", "[+]"  # changed by `fix`, or by `fix --only`
_RECIPE_IMPORTS = "from onnxruntime.quantization import (QuantFormat, QuantType, quantize_static)"
_RECIPE_OUTPUT = "QDQ.onnx"
_LABEL = 9  # width of the labels in a finding, in columns


class NextOptions(NamedTuple):
    """Options of the user that the suggested commands repeat, each with a space before it.

    Attributes:
        target: ``--target`` and ``--strongly-typed``.
        gpu: ``--gpu`` and ``--power``, if the user gave a single GPU.
        images: ``--calib`` and the options about images.
        size: ``--size``, if the user gave it.
        precision: ``--precision`` for ``insert``, if INT8 is not the fastest type of a float model.
    """

    target: str = ""
    gpu: str = ""
    images: str = ""
    size: str = ""
    precision: str = ""


def render(
    prediction: Prediction,
    width: int = 80,
    *,
    everything: bool = False,
    layers: bool = False,
    trace: bool = False,
    times: Sequence[TimeEstimate] = (),
    way: BuildMethod | None = None,
    half: bool = True,
    target: Target | None = None,
    options: NextOptions | None = None,
) -> TextPage:
    """Return the text of ``predict``.

    Args:
        prediction: The prediction.
        width: Columns.
        everything: Whether to print all convolutions (unless the model is rejected) and the full
            findings.
        layers: Whether to list the layers of the engine.
        trace: Whether to print the predicted lines of TensorRT's log.
        times: Estimated time on each GPU.
        way: Build method to describe.
        half: Whether the builder may use FP16.
        target: Target, with the version that the user named.
        options: Options that the suggested commands repeat.
    """
    page = TextPage(width, everything)
    target = target or prediction.choose_typing(prediction.named_target)
    half = half and can_use_fp16(times)
    is_rejected = prediction.rejected
    engine_times = [] if is_rejected else times
    allowed_type = verdicts.name_float_type(prediction, half=half)
    float_type = verdicts.name_estimated_float_type(prediction, engine_times, half=half)
    common_type = find_float_type(prediction, half=half, times=engine_times)
    page.fill(_describe_subject(prediction, times, target), style=Style.BOLD)
    page.add_gap()
    _add_verdict(page, prediction, times, float_type)
    if not is_rejected:
        page.add_gap()
        _add_uncovered_parts(page, prediction, float_type)
        _add_layer_facts(page, prediction, times, float_type)
        _add_basis(page, prediction, target)
    if way is not None:
        _add_build_method(page, way, prediction.target)
    _add_findings(page, prediction, engine_times, common_type)
    _add_conversions(page, prediction, common_type)
    _add_convolution_tables(page, prediction, float_type)
    if everything or layers:
        add_slowest_layers(page, engine_times)
    if layers:
        # The times of the layers are those of the first supported GPU.
        listed = next((time for time in engine_times if time.is_supported), None)
        is_fp32 = listed is not None and listed.fp32_layers
        _add_layers(page, prediction, Precision.FP32 if is_fp32 else allowed_type)
    if trace:
        _add_trace(page, prediction)
    options = options or NextOptions(target_option(target.display_name))
    _add_next_steps(page, prediction, times, _choose_precision(options, times))
    return page


def _choose_precision(options: NextOptions, times: Sequence[TimeEstimate]) -> NextOptions:
    if any(time.fastest not in (None, Precision.INT8) for time in times):
        return options._replace(precision=" --precision auto")
    return options


def _add_trace(page: TextPage, prediction: Prediction) -> None:
    from qdqtool.trt.trace import render as render_event

    page.add_heading(f"TensorRT's optimizer log ({len(prediction.trace)} lines)")
    page.add_verbatim(*map(render_event, prediction.trace))


def _describe_subject(prediction: Prediction, times: Sequence[TimeEstimate], target: Target) -> str:
    """Return model, GPU and target as a text: ``a.onnx on L4 (2040 MHz), TensorRT 10``."""
    text = prediction.model.path or "Model"
    if len(times) == 1:
        text += f" on {times[0].gpu.name} ({describe_clock(times[0])})"
    elif not times and prediction.compute_capabilities:
        text += f" on compute capability {', '.join(prediction.compute_capabilities)}"
    if times and times[0].requested_batch is not None:
        batch, factor = times[0].requested_batch, times[0].batch
        text += f", batch {batch}"
        if factor != 1:
            text += f" (file: {batch / factor:g})"
    return f"{text}, {target.title}"


def _add_verdict(
    page: TextPage,
    prediction: Prediction,
    times: Sequence[TimeEstimate],
    float_type: str,
) -> None:
    problem = verdicts.build_verdict(prediction)
    if problem is not None:
        page.fill(problem.text, 2, "  ", problem.style)
        if prediction.rejected:
            if times:
                names = ", ".join(time.gpu.name for time in times)
                page.fill(
                    f"No times for {names}: TensorRT {prediction.rejection} the model.", 4, "  "
                )
            return
    if times and verdicts.is_analyzed(prediction):
        add_speed_verdict(page, times, prediction)
        add_time_notes(page, list_choice_notes(times, prediction))
    elif problem is None:
        text, style = verdicts.quality_verdict(prediction, float_type)
        page.fill(text, 2, "  ", style)


def _add_uncovered_parts(page: TextPage, prediction: Prediction, float_type: str) -> None:
    outside = verdicts.describe_uncovered_types(prediction, float_type)
    if outside:
        page.add_row("Not covered", outside.rstrip("; "))
    nested = verdicts.describe_subgraphs(prediction.model.subgraphs)
    if nested and prediction.convolutions:
        page.add_row("Not analyzed", nested)
    if prediction.model.is_part:
        text = "the end of a detection head: by its metadata, this is a part of another model"
        page.add_row("Not checked", text)


def _add_layer_facts(
    page: TextPage,
    prediction: Prediction,
    times: Sequence[TimeEstimate],
    float_type: str,
) -> None:
    """Add the layers by kind and the Q/DQ layers, if there are any."""
    if not verdicts.is_analyzed(prediction) or verdicts.has_no_qdq(prediction):
        return
    for label, text in verdicts.describe_layers_by_kind(prediction, float_type).items():
        page.add_row(label, text)
    page.add_row("Q/DQ layers", _describe_conversions(prediction, times))
    most = len(prediction.uncertain_conversions) if page.everything else _MAX_NAMES
    if uncertain := verdicts.describe_uncertain_conversions(prediction, most):
        page.add_row("", uncertain)
    if kernels := verdicts.myelin_kernels(prediction):
        names = f": {_format_names(kernels, with_total=True)}" if page.everything else ""
        page.add_row("", f"{verdicts.describe_myelin_kernels(prediction)}{names}")


def _add_basis(page: TextPage, prediction: Prediction, target: Target) -> None:
    """Add assumptions, confidence and the origin of the rules."""
    for assumption in prediction.assumptions:
        text = verdicts.describe_assumption(prediction, assumption, why=page.everything)
        page.add_row("Open question", text)
    if prediction.convolutions and not verdicts.has_no_qdq(prediction):
        page.add_row("Confidence", verdicts.describe_confidence(prediction))
        if typing := verdicts.describe_assumed_typing(prediction):
            page.add_row("Typing", typing)
    if target.borrows_rules:
        page.add_row("Rules", target.borrowed_rules)
    if page.everything and prediction.target_evidence:
        page.add_row("Evidence", prediction.target_evidence)


def _describe_conversions(prediction: Prediction, times: Sequence[TimeEstimate]) -> str:
    if prediction.conversions is None:
        return "none: this target quantizes inside its kernels"
    number, dependence = verdicts.count_conversions(prediction)
    verb = "remains" if number == 1 else "remain"
    ms = ""
    if len(times) == 1 and prediction.conversions_ms:
        ms = format_ms(prediction.conversions_ms)
    if _converts_input_only(prediction):
        facts = ", ".join(filter(None, ("INPUT-CONVERSION", ms)))
        return f"{number} {verb}{dependence}: the network's input ({facts})"
    text = f"{number or 'none'} {verb} at run time{dependence}"
    return f"{text} ({ms})" if ms else text


def _converts_input_only(prediction: Prediction) -> bool:
    codes = [f.code for f in prediction.findings if f.code in _CONVERSION_CODES]
    return codes == ["INPUT-CONVERSION"]


def _add_build_method(page: TextPage, way: BuildMethod, target: str) -> None:
    page.add_heading(f"Build with {way.title}")
    rows = (
        ("flags", way.flags(target)),
        ("log", way.log),
        ("note", way.care),
        ("source", way.source),
    )
    for label, text in rows:
        page.fill(f"{label}: {text}", 4, "  - ")


def _add_convolution_tables(page: TextPage, prediction: Prediction, float_type: str) -> None:
    unexplained = [c for c in prediction.convolutions if _is_unexplained(c, prediction)]
    if unexplained:
        title = "Not INT8 to INT8, for an unknown reason"
        _add_convolutions(page, title, unexplained, prediction.findings, float_type)
    if page.everything and not prediction.rejected:
        _add_convolutions(
            page, "Every convolution", prediction.convolutions, prediction.findings, float_type
        )


def _is_unexplained(conv: ConvOutcome, prediction: Prediction) -> bool:
    # A target without conversion layers quantizes inside its kernels, so the output may be float.
    is_best = (
        conv.is_quantized if prediction.conversions is None else conv.quantized_in_quantized_out
    )
    return not conv.findings and not is_best


def has_quantized_layer(prediction: Prediction) -> bool:
    """Return whether a layer of the engine, which may be an Add, reads or writes INT8 or FP8."""
    return any(
        t.precision in EIGHT_BITS
        for layer in prediction.layers
        for t in (*layer.inputs, *layer.outputs)
    )


def is_built_quantized(prediction: Prediction) -> bool:
    """Return whether TensorRT builds the model, and the engine uses INT8 or FP8."""
    return has_quantized_layer(prediction) and not prediction.rejected


def build_commands(
    target: Target,
    path: str,
    width: int,
    model: ModelInfo,
    *,
    half: bool = True,
    batch: int | None = None,
    on_jetson: bool | None = None,
) -> TextPage:
    """Return the commands that build a model and compare the build with the prediction."""
    from qdqtool.findings.build_methods import trtexec_advice, trtexec_command

    page = TextPage(width)
    shapes = {
        name: (batch or 1, *shape[1:]) if shape[0] == -1 else shape
        for name, shape in model.open_inputs.items()
    }
    command = trtexec_command(
        target,
        path,
        half=half,
        bfloat16=model.has_bfloat16,
        open_inputs=shapes,
        input_types=model.input_types,
    )
    page.add_command("Build:", command)
    page.add_command("Verify:", f"qdqtool verify {shlex.quote(path)} build.log")
    advice = trtexec_advice(target, on_jetson)
    if shapes:
        advice.append(
            "The model has dynamic dimensions. For a range of sizes, replace --shapes by "
            "--minShapes, --optShapes and --maxShapes."
        )
    for text in advice:
        page.fill(text, _LABEL, " " * _LABEL)
    return page


# Findings -----------------------------------------------------------------------------------------


def _add_findings(
    page: TextPage,
    prediction: Prediction,
    times: Sequence[TimeEstimate],
    float_type: Precision | None,
) -> None:
    products = {c.name for c in prediction.convolutions if c.is_product}
    default, on_request = _list_fixable(prediction)
    marks = {id(f): f" {_BY_FIX}" for f in default}
    marks |= {id(f): f" {_ON_REQUEST}" for f in on_request}
    for same in group_findings(list_shown_findings(prediction)):
        if same[0].code == "CONVERSION":  # is in the list of Q/DQ layers
            continue
        if same[0].severity != Severity.INFO or page.everything:
            page.add_gap()
            mark = next((marks[id(f)] for f in same if id(f) in marks), "")
            _add_finding_title(page, same, mark, products, float_type)
            _add_places(page, same, float_type)
            if saving := describe_saving(same, times):
                page.add_row("saves:", saving, _LABEL)
            elif slower := describe_slower_fix(same[0], times):
                page.add_row("note:", slower, _LABEL)
            if page.everything:
                page.add_row("basis:", f"rule {same[0].evidence}", _LABEL)


def _list_fixable(prediction: Prediction) -> tuple[list[Finding], list[Finding]]:
    """Return the findings with an offered fix: by default, and on request."""
    if verdicts.needs_other_format(prediction):
        return [], []
    return split_fixable(prediction.findings)


def _add_finding_title(
    page: TextPage,
    same: list[Finding],
    mark: str,
    products: set[str],
    float_type: Precision | None,
) -> None:
    from qdqtool.reasons.heads import describe_destroyed_results

    head = same[0]
    title = name_floats(title_of(head.code), head.code, float_type)
    title = ": ".join(filter(None, (title, describe_destroyed_results(same))))
    extent = _describe_extent(same, products)
    page.fill(
        f"{head.severity.word} {head.code}{mark}  {title}{f' ({extent})' if extent else ''}",
        4,
        style=SEVERITY_STYLES[head.severity],
    )


def _add_places(page: TextPage, same: list[Finding], float_type: Precision | None) -> None:
    """Add the message and the fix of the first place, or of all places if everything is shown.

    The first place is one that ``fix`` repairs, if there is any.
    """
    places = sorted(same, key=lambda f: not f.automatic)[: None if page.everything else 1]
    messages = [name_floats(f.message, f.code, float_type) for f in places]
    messages = drop_repeated_sentences(messages)
    fixes = drop_repeated_sentences([name_floats(f.fix, f.code, float_type) for f in places])
    label = "first:" if len(same) > 1 else "place:"
    for message, fix in zip(messages, fixes, strict=True):
        page.add_row(label, message, _LABEL)
        label = "also:"
        if fix and any(fixes[1:]):
            page.add_row("fix:", fix, _LABEL)
    if fixes[0] and not any(fixes[1:]):
        page.add_row("fix:", fixes[0], _LABEL)


def _describe_extent(same: list[Finding], products: set[str]) -> str:
    facts = [format_count(len(same), "place")] if len(same) > 1 else []
    fixable = sum(finding.automatic for finding in same)
    if 0 < fixable < len(same):
        facts.append(f"{fixable} of them fixable")
    concerned = {name for finding in same for name in finding.convolutions}
    if len(concerned) > 1:
        count = len(concerned & products)
        facts.append(format_layer_counts(len(concerned) - count, count))
    return ", ".join(facts)


def _add_conversions(page: TextPage, prediction: Prediction, float_type: Precision | None) -> None:
    conversions = [f for f in list_shown_findings(prediction) if f.code in _CONVERSION_CODES]
    if all(f.code == "INPUT-CONVERSION" for f in conversions):
        return
    count = Counter(f.code for f in conversions)
    codes = ", ".join(f"{code} ({count[code]})" for code in _CONVERSION_CODES if count[code])
    page.add_heading(f"note {codes}  Remaining Q/DQ, the largest first")
    for finding in page.iterate_rows(sort_conversions(conversions), _MAX_CONVERSIONS, "    "):
        amount = f" ({_format_amount(finding.values)})" if finding.values else ""
        message = name_floats(finding.message, finding.code, float_type)
        page.fill(f"{message.rstrip('.')}{amount}", 4, "  - ")


def _count_findings(groups: Sequence[Sequence[Finding]]) -> list[str]:
    counts = []
    for severity in (Severity.ERROR, Severity.WARNING):
        sizes = [len(g) for g in groups if g[0].severity == severity]
        if sizes:
            places = f" ({format_count(sum(sizes), 'place')})" if sum(sizes) > len(sizes) else ""
            counts.append(f"{format_count(len(sizes), severity.word)}{places}")
    return counts


def _add_next_steps(
    page: TextPage, prediction: Prediction, times: Sequence[TimeEstimate], options: NextOptions
) -> None:
    groups = group_findings(list_shown_findings(prediction))
    notes = [same[0].code for same in groups if same[0].severity == Severity.INFO]
    counts = _count_findings(groups)
    page.add_gap()
    page.fill(
        f"Found {' and '.join(counts)}." if counts else "No errors, no warnings.", style=Style.BOLD
    )
    if notes and not page.everything:
        page.fill(f"{format_count(len(notes), 'note')} with --all: {', '.join(notes)}")
    if times and not any(time.gpu.has_int8 for time in times):
        flag = " with --fp16" if can_use_fp16(times) else ""
        page.fill(f"Next: build the float model{flag}, because the GPU has no INT8.")
    else:
        _add_remedies(page, prediction, times, options)


def target_option(name: str) -> str:
    """Return the option for a target; empty for the default target."""
    return "" if name == DEFAULT_TARGET else f" --target {name}"


def _add_remedies(
    page: TextPage, prediction: Prediction, times: Sequence[TimeEstimate], options: NextOptions
) -> None:
    path = prediction.model.path or "MODEL.onnx"
    images = options.images or " --calib images/"
    insert = f"{images}{options.target}{options.precision}{options.gpu}"
    if verdicts.has_no_qdq(prediction):
        page.add_lines("Quantize it, with a few hundred of your images:")
        size = prediction.model.assumed_size
        if not options.size and size is not None:
            insert += f" --size {size[0]}x{size[1]}"
        elif not options.images:  # else they contain the size
            insert += options.size
        page.add_command("", f"qdqtool insert {shlex.quote(path)}{insert}")
        return
    gpu = options.gpu
    if len(times) > 1 and (name := name_fix_gpu(times)):
        gpu = f" --gpu {shlex.quote(name)}"
    fix_options = f"{options.target}{gpu}{options.images or (gpu and options.size)}"
    _add_fix_commands(page, prediction, path, fix_options, times)
    is_unusable = verdicts.has_model_errors(prediction) or verdicts.needs_other_format(prediction)
    if is_unusable or verdicts.has_lossy_placement(prediction):
        use = "recommended" if is_unusable else "recommended for accuracy, except after QAT"
        page.fill(f"From the float model instead ({use}):")
        page.add_command("", f"qdqtool insert FLOAT.onnx{insert}")
    if is_unusable:
        _add_recipe(page, prediction, f"{options.target}{options.gpu}{images}")


def _add_recipe(page: TextPage, prediction: Prediction, options: str) -> None:
    """Add two steps with onnxruntime's quantizer, if another call of it avoids errors."""
    recipe = suggest_recipe(prediction, "FLOAT.onnx", _RECIPE_OUTPUT)
    if not recipe:
        return
    page.fill("Or with onnxruntime, in two steps:")
    page.fill("In Python (reader: a CalibrationDataReader of your images):", 3, "1. ")
    for call in (_RECIPE_IMPORTS, recipe):
        page.add_lines(*wrap_call(call, page.width), style=Style.COMMAND)
    opset = ""
    if 0 < prediction.model.opset < AXIS_OPSET:
        opset = f"opset {AXIS_OPSET} (required by per-channel scales) and for "
    page.fill(f"In the shell, for {opset}one scale at the inputs of each Concat:", 3, "2. ")
    fixed = fixed_model_path(_RECIPE_OUTPUT)
    page.add_command("", f"qdqtool fix {_RECIPE_OUTPUT} -o {fixed}{options}")


def _add_fix_commands(
    page: TextPage,
    prediction: Prediction,
    path: str,
    options: str,
    times: Sequence[TimeEstimate],
) -> None:
    engine_times = [] if prediction.rejected else times
    default, on_request = _list_fixable(prediction)
    has_warnings = any(f.severity == Severity.WARNING for f in default)
    lacks_images = "--calib" not in options
    if lacks_images and (has_warnings or on_request):  # fix measures errors only with images
        options += " --calib images/"
    fixed = path
    if default:
        fixed = fixed_model_path(path)
        caution = ""
        if has_warnings:
            random = " (on random inputs without --calib)" if lacks_images else ""
            caution = f"; fix may refuse changes that cost accuracy on your images{random}"
        only = _select_codes(prediction.findings, default)
        fixed_time = describe_fixed_time(engine_times)
        result = f" ({fixed_time})" if fixed_time else ""
        page.fill(f"{_BY_FIX} {_count_fixable(default)}{result}{caution}:")
        page.add_command(
            "", f"qdqtool fix {shlex.quote(path)}{only} -o {shlex.quote(fixed)}{options}"
        )
    if on_request:
        requested = dict.fromkeys(f.code for f in on_request)
        codes = " ".join(f"--only {code}" for code in requested)
        other = fixed_model_path(fixed)
        places = format_count(len(on_request), "place")
        cost = describe_request_cost(requested, engine_times, after_others=bool(default))
        page.fill(f"{_ON_REQUEST} {places} can be fixed on request, {cost}:")
        page.add_command(
            "",
            f"qdqtool fix {shlex.quote(fixed)} {codes} -o {shlex.quote(other)}{options}",
        )


def _count_fixable(findings: Sequence[Finding]) -> str:
    """Return a text with the number of places that ``fix`` can change.

    The fix of a note may make other layers worse. Only the prediction of the fixed model shows
    this.
    """
    places = format_count(len(findings), "place")
    notes = sum(finding.severity == Severity.INFO for finding in findings)
    if notes == len(findings):
        return f"{places} may be fixed without new data, if the prediction improves"
    text = f"{places} can be fixed without new data"
    if notes:
        text += f" ({format_count(notes, 'note')} only if the prediction improves)"
    if any(finding.severity == Severity.ERROR for finding in findings):
        text += ", and possibly others that the errors hide"
    return text


def _select_codes(findings: Iterable[Finding], default: Iterable[Finding]) -> str:
    """Return the ``--only`` options of ``fix``; empty if none are needed.

    Without these options, ``fix`` would also change FP32 layers that would not be faster in FP16 on
    this GPU.
    """
    if all(finding.code != "FLOAT-FP32" or finding.gains for finding in findings):
        return ""
    return "".join(f" --only {code}" for code in dict.fromkeys(f.code for f in default))


def _add_convolutions(
    page: TextPage,
    title: str,
    convolutions: Sequence[ConvOutcome],
    findings: list[Finding],
    float_type: str,
) -> None:
    signatures = [
        f"{_format_types(c.inputs, float_type, ' + ')} -> {_format_types([c.output], float_type)}"
        for c in convolutions
    ]
    column = max(map(len, signatures), default=0)
    page.add_heading(title)
    for conv, signature in zip(convolutions, signatures, strict=True):
        concerned = [findings[i] for i in conv.findings if i < len(findings)]
        serious = dict.fromkeys(f.code for f in concerned if f.severity != Severity.INFO)
        text = conv.name
        text += f"  + {', '.join(conv.fused)}" if conv.fused else ""
        text += f"  [{', '.join(serious)}]" if serious else ""
        text += "  (assumed)" if conv.evidence == "assumed" else ""
        page.fill(text, column + 6, f"  {signature:<{column}}  ")


def _format_types(types: Iterable[Precision], float_type: str, between: str = ", ") -> str:
    names = [str(float_type if t == Precision.FLOAT else t) for t in types]
    return between.join(names) or "-"


def _add_layers(page: TextPage, prediction: Prediction, float_type: Precision) -> None:
    count = str(len(prediction.layers))
    if prediction.engine_nodes != len(prediction.layers):
        count += f"; {prediction.engine_nodes} if each region of Myelin is one layer"
    page.add_heading(f"Engine layers ({count})")
    layers_of: dict[int | None, list[EngineLayer]] = defaultdict(list)
    for layer, region in zip(prediction.layers, prediction.layer_regions, strict=True):
        layers_of[region].append(layer)
    for layer, region in zip(prediction.layers, prediction.layer_regions, strict=True):
        inside = layers_of[region]
        if region is None or len(inside) == 1:
            _add_layer(page, layer, float_type, "  ")
        elif layer is inside[0]:
            nodes = prediction.regions[region].nodes
            page.fill(
                f"Myelin: {format_count(len(inside), 'layer')}, "
                f"{{ForeignNode[{nodes[0]}...{nodes[-1]}]}}",
                4,
                "  ",
            )
            for part in inside:
                _add_layer(page, part, float_type, "    ")


def _add_layer(page: TextPage, layer: EngineLayer, float_type: Precision, start: str) -> None:
    indent = len(start) + 2
    for c in layer.layouts:
        types = f"{c['from']} -> {c['to']}"
        page.fill(f"Reformat: {types}, {c['ms']:.4f} ms, {c['tensor']}", indent, start)
    inputs, outputs = (
        _format_types((t.precision for t in ends), float_type)
        for ends in (layer.inputs, layer.outputs)
    )
    time = "" if layer.ms is None else f", {layer.ms:.4f} ms"
    moved = verdicts.describe_moved_quantizer(layer)
    name = f"{layer.name} ({moved})" if moved else layer.name
    page.fill(f"{layer.type}: {inputs} -> {outputs}{time}, {name}", indent, start)


def _format_names(names: list[str], *, with_total: bool = False) -> str:
    unique = [name for name in dict.fromkeys(names) if name]
    text = ", ".join(unique[:_MAX_NAMES])
    if len(unique) <= _MAX_NAMES:
        return text
    return f"{text}, ... ({len(unique)} in all)" if with_total else f"{text}, ..."


def _format_amount(values: int) -> str:
    for size, unit in ((1_000_000, " M"), (1_000, " k")):
        if values >= size:
            return f"{values / size:.1f}{unit} values"
    return f"{values} values"


def _add_power_modes(page: TextPage, gpu: Gpu) -> None:
    """Add the modes for ``--power``, and one line for each source."""
    for source, group in itertools.groupby(
        gpu.power_modes, key=lambda m: f"{m.evidence}: {m.source}"
    ):
        limits = "; ".join(f"{mode.name} {mode.limits}" for mode in group)
        page.fill(f"--power: {limits} ({source})", 4, "    ")


def render_gpus(gpus: list[Gpu], width: int, *, sources: bool = False) -> str:
    """Return the table of known GPUs. If `sources` is set, it has the origin of each figure."""
    page = TextPage(width)
    page.add_lines(
        f"{'TOPS':>64}{'TFLOPS':>7}",
        f"{'GPU':<27}{'CC':>5}{'SMs':>5}{'MHz':>6}{'GB/s':>7}{'L2 MB':>7}{'INT8':>7}{'FP16':>7}"
        "  INT8 by",
    )
    for gpu in gpus:
        tops = gpu.as_json()["tops"]
        page.add_lines(
            f"{gpu.name:<27}{gpu.cc:>5}{gpu.sms:>5}{gpu.clock:>6.0f}{gpu.bandwidth:>7g}"
            f"{gpu.l2:>7g}{tops['int8']:>7.0f}{tops['fp16']:>7.0f}  {gpu.rates.int8_path}"
        )
        if sources:
            rates = f"{gpu.rates.evidence}: {gpu.rates.source}"
            page.fill(f"{gpu.evidence}: {gpu.source}; {rates}", 4, "    ")
            _add_power_modes(page, gpu)
    page.add_gap()
    page.fill(
        "Rates are dense and at the boost clock; 'predict --clock' sets another clock. --sources "
        "shows the origin of each figure.",
        0,
    )
    return str(page)

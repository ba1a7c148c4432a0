"""A prediction and its time as text: the verdict first, then the findings by code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qdqtool.findings.obstacles import describe_obstacles
from qdqtool.findings.report import title_of
from qdqtool.formats.output import TextPage, as_options
from qdqtool.reasons.simulation import OutsideRules
from qdqtool.types import ConvOutcome, EngineLayer, Finding, Precision, Prediction, Severity
from qdqtool.util.text import format_count, format_layer_counts, keep_end

if TYPE_CHECKING:
    from qdqtool.findings.ways import BuildMethod
    from qdqtool.timing.estimate import TimeEstimate
    from qdqtool.timing.gpus import Gpu
    from qdqtool.trt.targets import Target
    from qdqtool.types import Assumption, ModelInfo

# Limits of lists, unless everything is printed.
_MAX_PLACES = 3  # findings of one code, and names in a line
_MAX_CONVERSIONS, _MAX_LAYERS, _MAX_FIXES = 12, 10, 6
_GOOD_GAIN = 1.3  # below it the decision states the cost of conversions and layouts
_MIN_SAVING = 0.002  # share of the total time from which a fix is listed
_SEVERITY_WORDS = {Severity.ERROR: "ERROR", Severity.WARNING: "warning", Severity.INFO: "note"}
_CONVERSION_CODES = ("CONVERSION", "INPUT-CONVERSION")
_FREQUENT_NOTES = ("FLAG-FP16", "HEAD-SCORE")  # on every network: printed only with everything
_ASSUMED_LAYERS = {
    "fused": "one layer with the convolution and activation",
    "apart": "a layer of its own",
}


def verdict(prediction: Prediction) -> str:
    """Return the outcome in one line, matrix products apart from convolutions.

    Example: ``64 convolutions: 60 INT8 (52 to INT8, 8 to float), 4 float; 11 conversions``.
    """
    counts = prediction.summary()
    convolutions = sum(not c.is_product for c in prediction.convolutions)
    outside = _describe_outside(prediction)
    layers = format_layer_counts(convolutions, counts["matrix_products"])
    forms = describe_obstacles(prediction.findings)
    if not counts["convolutions"] and not counts["matrix_products"]:
        if forms:
            return f"{outside}nothing in INT8: the model has {forms}"
        return f"{outside}{layers}: nothing to run in INT8"
    if not counts["int8"] and any(f.code == "NO-QDQ" for f in prediction.findings):
        text = (
            f"{outside}{layers}: none in INT8, because the model has no Q/DQ; "
            "'qdqtool insert' adds them"
        )
        if prediction.time is None:
            text += ", and 'predict --gpu NAME' estimates what they gain"
        return text
    if forms and not counts["int8"]:
        return f"{outside}{layers}: none in INT8, because the model has {forms}"
    text = "; ".join(_describe_outcomes(prediction))
    return f"{outside}the model has {forms}; apart from that {text}" if forms else outside + text


def _describe_outcomes(prediction: Prediction) -> list[str]:
    counts = prediction.summary()
    parts = []
    if not all(c.is_product for c in prediction.convolutions):
        parts.append(_describe_convolutions(prediction))
    if counts["matrix_products"]:
        parts.append(
            f"{format_count(counts['matrix_products'], 'matrix product')}: "
            f"{counts['matrix_products_int8']} INT8, {counts['matrix_products_float']} float"
        )
    if prediction.conversions is None:
        return parts
    causes = []
    if _open_assumptions(prediction):
        causes.append("Conv + activation + Add")
    if any(r.uncertain or r.possible for r in prediction.regions):
        causes.append("how much Myelin absorbs")
    bounds = prediction.conversions_range or [prediction.conversions]
    conversions = format_count(_format_range(bounds), "conversion")
    parts.append(f"{conversions}, depending on {' and '.join(causes)}" if causes else conversions)
    kernels = _myelin_kernels(prediction)
    if kernels:
        parts.append(f"{format_count(len(kernels), 'Q/DQ kernel')} of Myelin")
    return parts


def _describe_convolutions(prediction: Prediction) -> str:
    """Describe convolutions by type: ``64 convolutions: 60 INT8 (52 to INT8, ...), 4 float``."""
    convolutions = [c for c in prediction.convolutions if not c.is_product]
    products = [c for c in prediction.convolutions if c.is_product]
    product_int8 = sum(c.is_int8 for c in products)
    product_inside = sum(c.int8_in_int8_out for c in products)
    counts = prediction.summary()
    cases = [(counts["int8"], counts["int8_to_int8"])]
    for assumption in _open_assumptions(prediction):
        cases += [(c.int8, c.int8_to_int8) for c in assumption.alternatives.values()]
    int8 = [total - product_int8 for total, _ in cases]
    inside = [to_int8 - product_inside for _, to_int8 in cases]
    to_float = [total - to_int8 for total, to_int8 in zip(int8, inside, strict=True)]
    outputs = ""
    if prediction.conversions is not None and any(int8):
        outputs = f" ({_format_range(inside)} to INT8, {_format_range(to_float)} to float)"
    return (
        f"{format_count(len(convolutions), 'convolution')}: {_format_range(int8)} INT8{outputs}, "
        f"{_format_range([len(convolutions) - n for n in int8])} float"
    )


def _format_range(numbers: Sequence[int]) -> int | str:
    low, high = min(numbers), max(numbers)
    return low if low == high else f"{low} to {high}"


def _myelin_kernels(prediction: Prediction) -> list[str]:
    """Return Q and DQ that are kernels in Myelin: no conversion layers, but as much work."""
    return [name for region in prediction.regions for name in region.kernels]


def _open_assumptions(prediction: Prediction) -> list[Assumption]:
    return [a for a in prediction.assumptions if not a.given]


def remarks(prediction: Prediction) -> list[str]:
    """Return paragraphs that qualify the verdict: assumptions, and outcomes without counts."""
    return [*_describe_assumptions(prediction), *_describe_limits(prediction)]


def _describe_assumptions(prediction: Prediction) -> list[str]:
    """Return a paragraph for each assumption: reason, results of the choices, choice."""
    counts = prediction.summary()
    paragraphs = []
    for a in prediction.assumptions:
        first = ""
        if a.places:
            first = f" ({a.places[0]} first)" if len(a.places) > 1 else f" ({a.places[0]})"
        numbers = {a.value: (counts["int8_to_int8"], counts["conversions"])}
        numbers |= {name: (c.int8_to_int8, c.conversions) for name, c in a.alternatives.items()}
        results = [
            f"{value.capitalize()}, {_ASSUMED_LAYERS[value]}: {inside} INT8 to INT8, "
            f"{format_count(conversions, 'conversion')}."
            for value, (inside, conversions) in sorted(numbers.items())
        ]
        choice = f"Counted as {a.value}: {a.why}."
        if not a.given:
            other = next(iter(a.alternatives))
            choice += f" --assume {a.name}={other} shows the other in full."
        paragraphs.append(
            f"{a.name}: reports differ on TensorRT's fusion of "
            f"{format_count(len(a.places), 'residual Add')} after an activation{first}, and the "
            f"timing of its kernels may decide. {' '.join(results)} {choice}"
        )
    return paragraphs


def _describe_outside(prediction: Prediction) -> str:
    """Return the start of a verdict whose numbers do not cover FP8 and INT4."""
    types = sorted({str(r.precision) for r in prediction.refusals if isinstance(r, OutsideRules)})
    if not types and all(f.code != "FP8-OUTSIDE" for f in prediction.findings):
        return ""
    return (
        f"{' and '.join(types) or 'FP8'} Q/DQ is outside the rules of this prediction, "
        "and counted as float; "
    )


def _describe_limits(prediction: Prediction) -> list[str]:
    lines = []
    total = len(prediction.convolutions)
    assumed = sum(c.evidence == "assumed" for c in prediction.convolutions)
    if 0 < assumed < total:
        lines.append(f"{assumed} of {total} outcomes rest on a rule that is assumed, not seen")
    if prediction.conversions is None and prediction.convolutions:
        lines.append("this target quantizes inside its kernels: conversion layers do not exist")
    return lines


def render(
    prediction: Prediction,
    width: int = 80,
    *,
    everything: bool = False,
    layers: bool = False,
    trace: bool = False,
    time: TimeEstimate | None = None,
    way: BuildMethod | None = None,
) -> str:
    """Return the text of ``predict``.

    Args:
        prediction: The prediction.
        width: Columns.
        everything: Print every convolution, and every finding in full.
        layers: List the layers of the engine.
        trace: Print TensorRT's log lines.
        time: Estimated time on a GPU.
        way: Build method to describe.
    """
    page = TextPage(width, everything)
    if time is not None:
        for sentence in decision(time):
            page.fill(sentence)
        page.add_gap()
    page.fill(verdict(prediction))
    if time is not None:
        _add_summary(page, time)
    for text in _describe_assumptions(prediction):
        page.fill(text, 2, "  ")
    proof = f": {prediction.target_evidence}" if prediction.target_evidence else ""
    for text in (f"target {prediction.target}{proof}", *_describe_limits(prediction)):
        page.fill(text, 2, "  ")
    if way is not None:
        _add_build_method(page, way, prediction.target)
    if time is not None:
        _add_details(page, time, prediction, layers=layers)
    _add_findings(page, prediction)
    _add_convolution_tables(page, prediction)
    if layers:
        _add_layers(page, prediction.layers)
    if trace:
        from qdqtool.trt.trace import render as render_event

        page.add_lines("", f"TensorRT's optimizer log ({len(prediction.trace)} lines)")
        page.add_lines(*map(render_event, prediction.trace))
    return str(page)


def _add_build_method(page: TextPage, way: BuildMethod, target: str) -> None:
    page.add_lines("", f"To build it with {way.title}")
    rows = (
        ("flags", way.flags(target)),
        ("log", way.log),
        ("note", way.care),
        ("source", way.source),
    )
    for label, text in rows:
        page.fill(f"{label}: {text}", 4, "  - ")


def _add_convolution_tables(page: TextPage, prediction: Prediction) -> None:
    unexplained = [c for c in prediction.convolutions if _is_unexplained(c, prediction)]
    if unexplained:
        title = "Not INT8 to INT8, for a reason not known"
        _add_convolutions(page, title, unexplained, prediction.findings)
    if page.everything:
        _add_convolutions(page, "Every convolution", prediction.convolutions, prediction.findings)


def _is_unexplained(conv: ConvOutcome, prediction: Prediction) -> bool:
    """Return whether a convolution is not INT8 to INT8, and no finding names it."""
    # Targets that quantize inside their kernels have no INT8 outputs to expect.
    is_best = conv.is_int8 if prediction.conversions is None else conv.int8_in_int8_out
    return not conv.findings and not is_best


def has_int8(prediction: Prediction) -> bool:
    """Return whether any layer of the engine reads or writes INT8, such as an Add with Q/DQ."""
    return any(
        t.precision == Precision.INT8
        for layer in prediction.layers
        for t in (*layer.inputs, *layer.outputs)
    )


def format_build_command(
    target: Target,
    path: str,
    width: int,
    model: ModelInfo,
    *,
    half: bool = True,
    batch: int | None = None,
) -> str:
    """Return the command that builds a model, on one line, with advice below it."""
    from qdqtool.findings.ways import trtexec_advice, trtexec_command

    page = TextPage(width)
    shapes = {
        name: (batch or 1, *shape[1:]) if shape[0] == -1 else shape
        for name, shape in model.open_inputs.items()
    }
    page.add_lines(f"build: {trtexec_command(target, path, half=half, open_inputs=shapes)}")
    advice = trtexec_advice(target)
    if advice:
        page.fill(advice, 2, "  ")
    if shapes:
        page.fill(
            "The model leaves dimensions open. For a range of sizes, replace --shapes by "
            "--minShapes, --optShapes and --maxShapes.",
            2,
            "  ",
        )
    return str(page).rstrip()


# Findings -----------------------------------------------------------------------------------------


def _add_findings(page: TextPage, prediction: Prediction) -> None:
    notes: list[list[Finding]] = []
    conversions: list[Finding] = []
    products = {c.name for c in prediction.convolutions if c.is_product}
    for same in _group_by_code(prediction.findings):
        if same[0].code in _CONVERSION_CODES:
            conversions += same
        elif same[0].severity == Severity.INFO and not page.everything:
            notes.append(same)
        else:
            _add_code(page, same, products)
    if conversions:
        page.add_lines("", f"Conversions that remain at run time ({len(conversions)})")
    for finding in page.iterate_rows(conversions, _MAX_CONVERSIONS, "    "):
        amount = f" [{_format_amount(finding.values)}]" if finding.values else ""
        page.fill(finding.message + amount, 4, "  - ")
    if notes:
        has_qdq = all(f.code not in ("NO-QDQ", "QOPERATOR") for f in prediction.findings)
        _add_notes(page, notes, has_qdq)
    kernels = _myelin_kernels(prediction)
    if kernels:
        page.add_heading(
            "Q and DQ that are kernels of their own in Myelin, at matrix products: "
            f"{_format_names(kernels, with_total=True)}"
        )


def _add_notes(page: TextPage, notes: list[list[Finding]], has_qdq: bool) -> None:
    """Add one line for each code; codes that repeat on every network are only named."""
    frequent = _FREQUENT_NOTES if has_qdq else (*_FREQUENT_NOTES, "NOT-QUANTIZED")
    hidden = [same[0].code for same in notes if same[0].code in frequent]
    if len(hidden) == len(notes):
        page.add_heading(f"Notes with --all: {', '.join(hidden)}")
        return
    more = f"; {', '.join(hidden)} only there" if hidden else ""
    page.add_heading(f"Notes (--all shows them in full{more})")
    for same in notes:
        head = same[0]
        if head.code not in hidden:
            places = f"{title_of(head.code)} ({len(same)} places)"
            page.fill(f"{head.code}: {head.message if len(same) == 1 else places}", 4, "  - ")


def _group_by_code(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings by code, in the order in which each code first comes."""
    groups: dict[tuple[str, Severity], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity), []).append(finding)
    together = itertools.chain.from_iterable(groups.values())
    return [list(group) for _, group in itertools.groupby(together, key=lambda f: f.code)]


def _add_code(page: TextPage, same: list[Finding], products: set[str]) -> None:
    """Add the findings of one code: title, places and fixes."""
    from qdqtool.reasons.faults import describe_harm

    head = same[0]
    title = ": ".join(filter(None, (title_of(head.code), describe_harm(same))))
    start = f"{_SEVERITY_WORDS[head.severity]} {head.code}: "
    page.add_gap()
    page.fill(f"{title} [{_describe_extent(same, products)}]", 4, start)
    places = page.first_rows(same, _MAX_PLACES)
    fixes = {f.fix for f in same}
    for finding in places:
        page.fill(finding.message, 4, "  - ")
        if len(fixes) > 1 and finding.fix:
            page.fill(finding.fix, 6, "    > ")
    rest = same[len(places) :]
    if rest:
        page.fill(f"and {len(rest)} more: {_format_names([f.node for f in rest])}", 4, "    ")
    if len(fixes) == 1 and head.fix:
        page.fill(head.fix, 4, "  > ")
    command = f"qdqtool fix --only {head.code} "
    if head.automatic and not any(command in fix for fix in fixes):
        page.fill(f"{command}tries that.", 4, "  > ")


def _describe_extent(same: list[Finding], products: set[str]) -> str:
    """Return the numbers of places and layers, and the evidence."""
    facts = [format_count(len(same), "place")] if len(same) > 1 else []
    concerned = {name for finding in same for name in finding.convolutions}
    if len(concerned) > 1:
        count = len(concerned & products)
        facts.append(format_layer_counts(len(concerned) - count, count))
    return ", ".join([*facts, str(same[0].evidence)])


def _add_convolutions(
    page: TextPage, title: str, convolutions: Sequence[ConvOutcome], findings: list[Finding]
) -> None:
    """Add a row for each convolution: types, name, fused nodes, codes of errors and warnings."""
    signatures = [f"{' + '.join(c.inputs)} -> {c.output}" for c in convolutions]
    column = max(map(len, signatures), default=0)
    page.add_lines("", title)
    for conv, signature in zip(convolutions, signatures, strict=True):
        concerned = [findings[i] for i in conv.findings if i < len(findings)]
        serious = dict.fromkeys(f.code for f in concerned if f.severity != Severity.INFO)
        text = conv.name
        text += f"  + {', '.join(conv.fused)}" if conv.fused else ""
        text += f"  [{', '.join(serious)}]" if serious else ""
        text += "  (assumed)" if conv.evidence == "assumed" else ""
        page.fill(text, column + 6, f"  {signature:<{column}}  ")


def _add_layers(page: TextPage, layers: list[EngineLayer]) -> None:
    page.add_lines("", f"Engine layers ({len(layers)})")
    for layer in layers:
        for c in layer.layouts:
            types = f"{c['from']} -> {c['to']}"
            page.add_lines(f"  Reformat: {types}  {c['tensor']}  {c['ms']:.4f} ms")
        inputs, outputs = (
            ", ".join(str(t.precision) for t in ends) or "-"
            for ends in (layer.inputs, layer.outputs)
        )
        time = "" if layer.ms is None else f"  {layer.ms:.4f} ms"
        page.add_lines(f"  {layer.type}: {inputs} -> {outputs}  {layer.name}{time}")


def _format_names(names: list[str], *, with_total: bool = False) -> str:
    unique = [name for name in dict.fromkeys(names) if name]
    text = ", ".join(unique[:_MAX_PLACES])
    if len(unique) <= _MAX_PLACES:
        return text
    return f"{text}, ... ({len(unique)} in all)" if with_total else f"{text}, ..."


def _format_amount(values: int) -> str:
    """Return a number of tensor elements: ``34.2 M values``."""
    for size, unit in ((1_000_000, " M"), (1_000, " k")):
        if values >= size:
            return f"{values / size:.1f}{unit} values"
    return f"{values} values"


# Time ---------------------------------------------------------------------------------------------


def decision(time: TimeEstimate) -> list[str]:
    """Return sentences on whether INT8 is worthwhile: times, then the gain and its range."""
    if time.float_time is None:
        return []
    sentences = [f"{'; '.join(_list_times(time))} ({_describe_estimate(time)})."]
    if not time.gpu.has_int8:
        return [*sentences, f"No INT8 on {time.gpu.name}: nothing to gain."]
    gain = time.best_range if time.is_float else time.gain_range
    if gain is None:
        return [*sentences, "The gain of INT8 is unknown."]
    from qdqtool.timing.results import MIN_GAIN

    subject = "INT8 placed by qdqtool" if time.is_float else "this model"
    if abs(gain.value - 1) < MIN_GAIN - 1:
        text = f"{subject[0].upper()}{subject[1:]} is about as fast as {gain.precision}"
    elif gain.value > 1:
        verb = "would be" if time.is_float else "is"
        text = f"INT8 {verb} {gain.value:.2f} times as fast as {gain.precision}"
    else:
        text = f"{gain.precision} is faster than {subject}, which is {gain.value:.2f} times as fast"
    unsure = "" if gain.is_sure else ", so that either may be faster"
    text += f" ({gain.low:.2f} to {gain.high:.2f}{unsure})"
    costs = _describe_costs(time)
    if costs and _decision_has_costs(time):
        text += f": {costs}"
    return [*sentences, f"{text}."]


def _list_times(time: TimeEstimate) -> list[str]:
    base = time.float_time
    assert base is not None
    parts = [] if time.is_float else [f"INT8 as placed: {format_ms(time.total_ms)}"]
    parts.append(f"{base.precision}: {format_ms(base.total_ms)}")
    if base.fp32_ms is not None:
        label = "FP32, as it is" if time.is_float else "FP32"
        parts.append(f"{label}: {format_ms(base.fp32_ms)}")
    if time.best is not None:
        parts.append(f"placed by qdqtool: {format_ms(time.best.total_ms)}")
    return parts


def _describe_estimate(time: TimeEstimate) -> str:
    if time.calibration is None:
        return "estimated"
    return f"estimated, corrected by {time.calibration.source}"


def _decision_has_costs(time: TimeEstimate) -> bool:
    gain = time.gain_range
    return not time.is_float and gain is not None and gain.value < _GOOD_GAIN and time.gpu.has_int8


def _describe_costs(time: TimeEstimate) -> str:
    """Return the cost of conversions and changes of layout, ``""`` if there are none."""
    costs = []
    if time.conversions:
        costs.append(format_count(time.conversions, "conversion"))
    if time.layouts:
        costs.append(format_count(time.layouts, "layout change"))
    total = format_ms(time.conversions_ms + time.layouts_ms)
    return f"{total} in {' and '.join(costs)}" if costs else ""


def describe_gain(time: TimeEstimate, prediction: Prediction, width: int) -> list[str]:
    """Return lines of ``insert`` on its result: the decision, and why it is slow if it is."""
    from qdqtool.timing.results import MIN_GAIN

    page, gain = TextPage(width), time.gain_range
    for sentence in decision(time):
        page.fill(sentence)
    if not time.gpu.has_int8:
        page.fill(f"warning: no INT8 on {time.gpu.name}: deploy the float model there")
    elif gain is None and not page.lines:
        page.add_lines(
            "no gain to say: the shapes of most layers are not known; "
            "export the model with fixed shapes"
        )
    elif gain is not None and gain.value < MIN_GAIN:
        page.fill(
            f"warning: not expected to be at least {MIN_GAIN:g} times as fast as {gain.precision} "
            f"on {time.gpu.name}: {_explain_slowness(time, prediction, width)}"
        )
    return page.lines


def _explain_slowness(time: TimeEstimate, prediction: Prediction, width: int) -> str:
    """Name the main cost: starting small kernels, or conversions and layouts."""
    if 2 * time.launch_ms > time.total_ms:
        return (
            f"{format_ms(time.launch_ms)} of {format_ms(time.total_ms)} is what its "
            f"{len(time.kernels)} kernels take at least, whatever their type; "
            "a larger batch or image would gain"
        )
    reason = _describe_costs(time) or "no kernel gains enough by INT8"
    conversions = [layer for layer in prediction.layers if layer.type == "Conversion"]
    if not conversions or not time.conversions:
        return reason
    slowest = max(conversions, key=lambda layer: layer.ms or 0.0)
    return f"{reason}; the slowest is {keep_end(slowest.name, width)}"


def time_summary(time: TimeEstimate) -> str:
    """Return the time, the GPU and the range in one line."""
    batch = "" if time.batch == 1 else f", batch x{time.batch:g}"
    method = "estimated" if time.calibration is None else "corrected by a measurement"
    return (
        f"{format_ms(time.total_ms)} on {time.gpu.name} ({time.gpu.clock:.0f} MHz{batch}), "
        f"{method}; 80 % of measured engines lie within {format_ms(time.low_ms, unit=False)} "
        f"to {format_ms(time.high_ms)}"
    )


def _add_summary(page: TextPage, time: TimeEstimate) -> None:
    """Add the time of the engine and remarks on it."""
    texts = [time_summary(time)]
    if time.is_float and time.best is not None:
        texts.append(
            "with INT8 wherever insert would put it: "
            f"{time.best.int8} of {time.best.convolutions} convolutions"
        )
    costs = []
    if time.conversions_ms:
        costs.append(f"conversions {format_ms(time.conversions_ms)}")
    if time.layouts:
        costs.append(f"{time.layouts} changes of memory layout {format_ms(time.layouts_ms)}")
    if costs and (page.everything or not _decision_has_costs(time)):
        texts.append(f"of which {', '.join(costs)}")
    calibration = time.calibration
    if calibration:
        text = f"corrected by {calibration.source}: x{calibration.factor:.2f}"
        if calibration.kernel_us:
            text += f", {calibration.kernel_us:+.1f} us a kernel"
        if calibration.overhead_us:
            text += f"; the profile added {calibration.overhead_us:.1f} us to each layer"
        texts.append(text)
    for text in texts:
        page.fill(text, 2, "  ")
    for note in time.notes:
        page.fill(f"note: {as_options(note)}", 4, "  ")


def _add_details(
    page: TextPage, time: TimeEstimate, prediction: Prediction, *, layers: bool
) -> None:
    """Add the savings of fixes if there are problems, and the slowest layers if requested."""
    if page.everything or any(f.severity != Severity.INFO for f in prediction.findings):
        _add_simulated_savings(page, time)
        _add_other_savings(page, time, prediction)
    if not (page.everything or layers):
        return
    if time.kernels:
        page.add_heading("Slowest layers, as in a profile (profiling adds a few us per layer)")
    for kernel in page.first_rows(time.kernels, _MAX_LAYERS):
        name = kernel.name if page.everything else keep_end(kernel.title, page.width - 27)
        page.fill(f"{kernel.kind:<11} {name}", 26, f"  {format_ms(kernel.ms):>10}  ")


def _add_simulated_savings(page: TextPage, time: TimeEstimate) -> None:
    fixes = [fix for fix in time.fixes if fix.saves_ms > _min_saving(page, time)]
    if fixes:
        page.add_lines("", "Time that qdqtool fix saves, by simulating the fixed network")
    for fix in fixes:
        places = f"{len(fix.nodes)} places" if len(fix.nodes) > 1 else fix.nodes[0]
        page.fill(f"{', '.join(fix.codes)}  {places}", 16, f"  {format_ms(fix.saves_ms):>10}  ")


def _add_other_savings(page: TextPage, time: TimeEstimate, prediction: Prediction) -> None:
    """Add upper bounds of savings that are not simulated."""
    simulated = {(code, node) for fix in time.fixes for code in fix.codes for node in fix.nodes}
    others = [f for f in prediction.findings if (f.code, f.node) not in simulated]
    fixes = find_savings(others, _min_saving(page, time))
    if fixes:
        page.add_lines(
            "", "Time that each fix saves at most, neighbors quantized (savings do not add up)"
        )
    listed = page.first_rows(fixes, _MAX_FIXES)
    for finding in listed:
        saving = format_ms(finding.saves_ms or 0.0)
        page.fill(f"{finding.code}  {finding.node}", 16, f"  {saving:>10}  ")
    if len(fixes) > len(listed):
        rest = sum(f.saves_ms or 0.0 for f in fixes[len(listed) :])
        page.add_lines(f"  and {len(fixes) - len(listed)} more, {format_ms(rest)} together (--all)")


def _min_saving(page: TextPage, time: TimeEstimate) -> float:
    return 0.0 if page.everything else _MIN_SAVING * time.total_ms


def find_savings(findings: list[Finding], minimum: float) -> list[Finding]:
    """Return findings whose fix saves more than `minimum`, the largest saving first.

    Of several findings with the same node and saving only the first is returned.
    """
    saving = sorted(
        (f for f in findings if (f.saves_ms or 0.0) > minimum), key=lambda f: -(f.saves_ms or 0.0)
    )
    first = {(f.node, f.saves_ms): f for f in reversed(saving)}
    return list(first.values())[::-1]


def format_ms(value: float, *, unit: bool = True) -> str:
    """Return milliseconds with about three significant digits: ``0.681 ms``."""
    digits = next((d for d, bound in enumerate((1000, 100, 1, 0.1)) if value >= bound), 4)
    return f"{value:.{digits}f}" + (" ms" if unit else "")


def gpus_text(gpus: list[Gpu], width: int, *, sources: bool = False) -> str:
    """Return the table of known GPUs."""
    page = TextPage(width)
    page.add_lines(
        f"{'GPU':<27}{'CC':>5}{'SMs':>5}{'MHz':>6}{'GB/s':>7}{'L2 MB':>7}{'INT8':>7}{'FP16':>7}"
        "  INT8 by"
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
    page.add_gap()
    page.fill(
        "INT8 and FP16 in dense tera-operations a second at the boost clock. Give --clock for "
        "another; --sources shows where each figure comes from.",
        0,
    )
    return str(page)

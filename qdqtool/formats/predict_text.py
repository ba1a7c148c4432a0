"""A prediction and its time as text for a terminal: the verdict first, then what is not INT8 to INT8, by cause."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qdqtool.findings.obstacles import obstacles
from qdqtool.findings.report import title_of
from qdqtool.formats.output import TextPage, as_options
from qdqtool.reasons.simulation import OutsideRules
from qdqtool.types import ConvOutcome, EngineLayer, Finding, Json, Precision, Prediction, Severity
from qdqtool.util.text import format_count, format_layer_counts, keep_end

if TYPE_CHECKING:
    from qdqtool.findings.ways import BuildMethod
    from qdqtool.timing.estimate import TimeEstimate
    from qdqtool.timing.gpus import Gpu
    from qdqtool.trt.targets import Target
    from qdqtool.types import Assumption

_SHOWN = 3  # findings of one code shown in full, unless everything is asked for
_LISTED = 12  # lines of a list, unless everything is asked for
_SLOWEST, _FIXES = 10, 6  # layers, and fixes
_MATTERS = 1.3  # gain below which what conversions and layouts cost is said first
_WORTH = 0.002  # share of the total below which a fix is not listed
_MARK = {Severity.ERROR: "ERROR", Severity.WARNING: "warning", Severity.INFO: "note"}
_LEDGER = ("CONVERSION", "INPUT-CONVERSION")


def verdict(prediction: Prediction) -> str:
    """One line: ``64 convolutions: 60 INT8 (52 to INT8, 8 to float), 4 float; 11 conversions``.

    Matrix products are counted for themselves: ``1 convolution: ...; 73 matrix products: 49 INT8, 24 float; ...``.
    """
    s = prediction.summary()
    products = s["matrix_products"]
    outside, count = (
        _describe_outside(prediction),
        format_layer_counts(s["convolutions"] - _weighted_products(prediction), products),
    )
    forms = obstacles(prediction.findings)
    if not s["convolutions"] and not products:
        return f"{outside}{f'nothing in INT8: the model has {forms}' if forms else f'{count}: nothing to run in INT8'}"
    if not s["int8"] and any(f.code == "NO-QDQ" for f in prediction.findings):
        gain = (
            ""
            if prediction.time is not None
            else ", and 'predict --gpu NAME' estimates what they gain"
        )
        return f"{outside}{count}: none in INT8, because the model has no Q/DQ; 'qdqtool insert' adds them{gain}"
    if forms and not s["int8"]:
        return f"{outside}{count}: none in INT8, because the model has {forms}"
    parts = (
        [_format_types(prediction)] if s["convolutions"] > _weighted_products(prediction) else []
    )
    if products:
        parts.append(
            f"{format_count(products, 'matrix product')}: {s['matrix_products_int8']} INT8, "
            f"{s['matrix_products_float']} float"
        )
    if s["conversions"] is not None:
        causes = ["Conv + activation + Add"] if _open_assumptions(prediction) else []
        if any(r.uncertain or r.possible for r in prediction.regions):
            causes.append("how much Myelin takes in")
        open_choice = f", depending on {' and '.join(causes)}" if causes else ""
        parts.append(
            format_count(_summary_ranges(prediction)["conversions"], "conversion") + open_choice
        )
        if kernels := _kernels(prediction):
            parts.append(f"{format_count(len(kernels), 'Q/DQ kernel')} of Myelin")
    said = "; ".join(parts)
    return f"{outside}the model has {forms}; apart from that {said}" if forms else outside + said


def _kernels(prediction: Prediction) -> list[str]:
    """The Q and DQ that are kernels of their own in Myelin: no conversions of the engine, but as much to do."""
    return [name for region in prediction.regions for name in region.kernels]


def _weighted_products(prediction: Prediction) -> int:
    """The matrix products among what the prediction lists as convolutions."""
    return sum(c.is_product for c in prediction.convolutions)


def _format_types(prediction: Prediction) -> str:
    """Convolutions by type, products aside: ``64 convolutions: 60 INT8 (52 to INT8, 8 to float), 4 float``."""
    s = _summary_ranges(prediction, [c for c in prediction.convolutions if c.is_product])
    count = format_count(s["convolutions"], "convolution")
    if s["conversions"] is None or not s["int8"]:
        return f"{count}: {s['int8']} INT8, {s['float']} float"
    both = f" ({s['int8_to_int8']} to INT8, {s['int8_to_float']} to float)"
    return f"{count}: {s['int8']} INT8{both}, {s['float']} float"


def _open_assumptions(prediction: Prediction) -> list[Assumption]:
    """What the user did not settle."""
    return [a for a in prediction.assumptions if not a.given]


def _summary_ranges(
    prediction: Prediction, without: Sequence[ConvOutcome] = ()
) -> dict[str, int | str | None]:
    """The summary, with ranges (``1 to 7``) where it depends on what is assumed; ``without`` are not counted."""

    def counted_as(total: int, int8: int, inside: int, conversions: int | None) -> Json:
        return {
            "int8": int8,
            "int8_to_int8": inside,
            "int8_to_float": int8 - inside,
            "float": total - int8,
            "conversions": conversions,
        }

    summary = prediction.summary()
    total = summary["convolutions"]
    cases = [
        summary,
        *(
            counted_as(total, c.int8, c.int8_to_int8, c.conversions)
            for assumption in _open_assumptions(prediction)
            for c in assumption.alternatives.values()
        ),
    ]
    apart = counted_as(
        len(without), sum(c.is_int8 for c in without), sum(c.int8_in_int8_out for c in without), 0
    )
    counts: dict[str, int | str | None] = {**summary, "convolutions": total - len(without)}
    for key, aside in apart.items():
        values = {case[key] if case[key] is None else case[key] - aside for case in cases}
        if key == "conversions" and prediction.conversions_range is not None:
            values = set(prediction.conversions_range)
        counts[key] = (
            f"{min(values)} to {max(values)}"
            if len(values) > 1 and None not in values
            else values.pop()
        )
    return counts


_MEANS = {"fused": "one layer with the convolution and activation", "apart": "a layer of its own"}


def remarks(prediction: Prediction) -> list[str]:
    """What has to be known beside the verdict, one paragraph each: what is assumed, and what cannot be counted."""
    return [*_describe_assumptions(prediction), *_describe_limits(prediction)]


def _describe_assumptions(prediction: Prediction) -> list[str]:
    """One paragraph for each: what decides, what each choice gives, and what is counted."""
    lines = []
    for a in prediction.assumptions:
        places = format_count(len(a.places), "residual Add")
        where = (
            f" ({a.places[0]} first)"
            if len(a.places) > 1
            else f" ({a.places[0]})"
            if a.places
            else ""
        )
        s = prediction.summary()
        numbers = {a.value: (s["int8_to_int8"], s["conversions"])}
        numbers |= {name: (c.int8_to_int8, c.conversions) for name, c in a.alternatives.items()}
        each = " ".join(
            f"{value.capitalize()}, {_MEANS[value]}: {inside} INT8 to INT8, {format_count(conversions, 'conversion')}."
            for value, (inside, conversions) in sorted(numbers.items())
        )
        other = next(iter(a.alternatives))
        taken = f"Counted as {a.value}: {a.why}."
        taken += "" if a.given else f" --assume {a.name}={other} shows the other in full."
        lines.append(
            f"{a.name}: reports differ on what TensorRT makes of {places} behind an activation{where}, and the timing "
            f"of its kernels may decide. {each} {taken}"
        )
    return lines


def _describe_outside(prediction: Prediction) -> str:
    """What has to be known before the numbers: they do not cover FP8 and INT4."""
    types = sorted({str(r.precision) for r in prediction.refusals if isinstance(r, OutsideRules)})
    if not types and all(f.code != "FP8-OUTSIDE" for f in prediction.findings):
        return ""
    return f"{' and '.join(types) or 'FP8'} Q/DQ is outside the rules of this prediction, and counted as float; "


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
    """The whole answer: ``everything`` shows every convolution and every finding in full, ``layers`` lists those of the
    engine, ``trace`` TensorRT's own log lines; ``time`` is how long it takes on a GPU, ``way`` how it is to be built.
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
        page.add_lines("", f"To build it with {way.title}")
        for label, text in (
            ("flags", way.flags(prediction.target)),
            ("log", way.log),
            ("note", way.care),
            ("source", way.source),
        ):
            page.fill(f"{label}: {text}", 4, "  - ")
    if time is not None:
        _add_details(page, time, prediction, layers=layers)
    _add_findings(page, prediction)
    # Convolutions that are not INT8 to INT8 and that no finding names: never silently left out.
    unexplained = [
        c
        for c in prediction.convolutions
        if not c.findings
        and not (c.is_int8 if prediction.conversions is None else c.int8_in_int8_out)
    ]
    if unexplained:
        _add_table(
            page, "Not INT8 to INT8, for a reason not known", unexplained, prediction.findings
        )
    if everything:
        _add_table(page, "Every convolution", prediction.convolutions, prediction.findings)
    if layers:
        _add_layers(page, prediction.layers)
    if trace:
        from qdqtool.trt.trace import render as line_of

        page.add_lines("", f"TensorRT's optimizer log ({len(prediction.trace)} lines)")
        page.add_lines(*map(line_of, prediction.trace))
    return str(page)


def has_int8(prediction: Prediction) -> bool:
    """Whether anything of the engine is in INT8, which is more than convolutions: an Add with Q/DQ is one."""
    return any(
        t.precision == Precision.INT8
        for layer in prediction.layers
        for t in (*layer.inputs, *layer.outputs)
    )


def format_build_command(target: Target, model: str, width: int, *, half: bool = True) -> str:
    """The command that builds a model, as one line to be pasted, and what to know of it below."""
    from qdqtool.findings.ways import trtexec_advice, trtexec_command

    page = TextPage(width)
    page.add_lines(f"build: {trtexec_command(target, model, half=half)}")
    if remark := trtexec_advice(target):
        page.fill(remark, 2, "  ")
    return str(page).rstrip()


def _describe_limits(prediction: Prediction) -> list[str]:
    """What the outcomes rest on where that is an assumption, and what is not counted."""
    lines = []
    weak = [c for c in prediction.convolutions if c.evidence == "assumed"]
    if weak and len(weak) < len(prediction.convolutions):
        lines.append(
            f"{len(weak)} of {len(prediction.convolutions)} outcomes rest on a rule that is assumed, not seen"
        )
    if prediction.conversions is None and prediction.convolutions:
        lines.append(
            "this target quantizes inside its kernels: there are no conversion layers to count"
        )
    return lines


def _add_findings(page: TextPage, prediction: Prediction) -> None:
    notes: list[list[Finding]] = []
    ledger: list[Finding] = []
    products = {c.name for c in prediction.convolutions if c.is_product}
    for same in _group_by_code(prediction.findings):
        if same[0].code in _LEDGER:
            ledger += same
        elif same[0].severity == Severity.INFO and not page.everything:
            notes.append(same)
        else:
            _add_group(page, same, products)
    if ledger:
        page.add_lines("", f"Conversions that stay at run time ({len(ledger)})")
    for finding in page.iterate_rows(ledger, _LISTED, "    "):
        page.fill(
            finding.message + (f" [{_format_amount(finding.values)}]" if finding.values else ""),
            4,
            "  - ",
        )
    if notes:
        nothing = any(f.code in ("NO-QDQ", "QOPERATOR") for f in prediction.findings)
        shown = [
            n
            for n in notes
            if n[0].code not in _EVERYWHERE and not (nothing and n[0].code == "NOT-QUANTIZED")
        ]
        hidden = [same[0].code for same in notes if same not in shown]
        more = f"; {', '.join(hidden)} only there" if hidden else ""
        page.add_heading(
            f"Notes (--all shows them in full{more})"
            if shown
            else f"Notes with --all: {', '.join(hidden)}"
        )
        for same in shown:
            head = same[0]
            text = head.message if len(same) == 1 else f"{title_of(head.code)} ({len(same)} places)"
            page.fill(f"{head.code}: {text}", 4, "  - ")
    if kernels := _kernels(prediction):
        page.add_heading(
            f"Q and DQ that are kernels of their own in Myelin, at matrix products: {_format_names(kernels)}"
        )


# Notes that repeat on every network: shown with --all alone.
_EVERYWHERE = ("FLAG-FP16", "HEAD-SCORE")


def _group_by_code(findings: Iterable[Finding]) -> list[list[Finding]]:
    """The findings of each code, in the order in which each code first comes."""
    first: dict[tuple[str, Severity], list[Finding]] = {}
    for finding in findings:
        first.setdefault((finding.code, finding.severity), []).append(finding)
    together = itertools.chain.from_iterable(first.values())
    return [list(group) for _, group in itertools.groupby(together, key=lambda f: f.code)]


def _add_group(page: TextPage, same: list[Finding], products: set[str]) -> None:
    head = same[0]
    concerned = list(dict.fromkeys(n for f in same for n in f.convolutions))
    facts = [format_count(len(same), "place")] if len(same) > 1 else []
    if len(concerned) > 1:
        inside = sum(name in products for name in concerned)
        facts.append(format_layer_counts(len(concerned) - inside, inside))
    facts.append(str(head.evidence))
    page.add_gap()
    from qdqtool.reasons.faults import describe_harm

    title = ": ".join(filter(None, (title_of(head.code), describe_harm(same))))
    page.fill(f"{title} [{', '.join(facts)}]", 4, f"{_MARK[head.severity]} {head.code}: ")
    shown = page.first_rows(same, _SHOWN)
    fixes = {f.fix for f in same}
    for finding in shown:
        page.fill(finding.message, 4, "  - ")
        if len(fixes) > 1 and finding.fix:
            page.fill(finding.fix, 6, "    > ")
    rest = same[len(shown) :]
    if rest:
        page.fill(
            f"and {len(rest)} more: {_format_names([f.node for f in rest], in_all=False)}",
            4,
            "    ",
        )
    if len(fixes) == 1 and head.fix:
        page.fill(head.fix, 4, "  > ")
    command = f"qdqtool fix --only {head.code} "
    if head.automatic and not any(command in fix for fix in fixes):
        page.fill(f"{command}tries that.", 4, "  > ")


def _add_table(
    page: TextPage, title: str, rows: Sequence[ConvOutcome], findings: list[Finding]
) -> None:
    """One row for each: types, name, what it takes in, and the codes of its errors and warnings."""
    signatures = [f"{' + '.join(c.inputs)} -> {c.output}" for c in rows]
    wide = max((len(s) for s in signatures), default=0)
    page.add_lines("", title)
    for conv, signature in zip(rows, signatures, strict=True):
        concerned = [findings[i] for i in conv.findings if i < len(findings)]
        serious = dict.fromkeys(f.code for f in concerned if f.severity != Severity.INFO)
        text = conv.name
        text += f"  + {', '.join(conv.fused)}" if conv.fused else ""
        text += f"  [{', '.join(serious)}]" if serious else ""
        text += "  (assumed)" if conv.evidence == "assumed" else ""
        page.fill(text, wide + 6, f"  {signature:<{wide}}  ")


def _add_layers(page: TextPage, layers: list[EngineLayer]) -> None:
    page.add_lines("", f"Engine layers ({len(layers)})")
    for layer in layers:
        inputs, outputs = (
            ", ".join(str(t.precision) for t in ends) or "-"
            for ends in (layer.inputs, layer.outputs)
        )
        page.add_lines(
            *(
                f"  Reformat: {c['from']} -> {c['to']}  {c['tensor']}  {c['ms']:.4f} ms"
                for c in layer.layouts
            )
        )
        page.add_lines(
            f"  {layer.type}: {inputs} -> {outputs}  {layer.name}"
            + ("" if layer.ms is None else f"  {layer.ms:.4f} ms")
        )


def _format_names(items: list[str], in_all: bool = True) -> str:
    unique = [i for i in dict.fromkeys(items) if i]
    text = ", ".join(unique[:_SHOWN])
    return text if len(unique) <= _SHOWN else f"{text}, ..." + f" ({len(unique)} in all)" * in_all


def _format_amount(values: int) -> str:
    """A number of tensor elements: ``34.2 M values``."""
    for size, unit in ((1_000_000, " M"), (1_000, " k")):
        if values >= size:
            return f"{values / size:.1f}{unit} values"
    return f"{values} values"


# The time -----------------------------------------------------------------------------------------------------------


def decision(time: TimeEstimate) -> list[str]:
    """Whether INT8 pays, in sentences: the times of the placements, then the gain, its range, and what costs."""
    base = time.float_time
    if base is None:
        return []
    best, gain = time.best, time.best_range if time.is_float else time.gain_range
    parts = [] if time.is_float else [f"INT8 as placed: {format_ms(time.total_ms)}"]
    parts.append(f"{base.precision}: {format_ms(base.total_ms)}")
    parts += (
        []
        if base.fp32_ms is None
        else [f"FP32{', as it is' * time.is_float}: {format_ms(base.fp32_ms)}"]
    )
    parts += [f"placed by qdqtool: {format_ms(best.total_ms)}"] if best is not None else []
    how = (
        "estimated"
        if time.calibration is None
        else f"estimated, corrected by {time.calibration.source}"
    )
    sentences = [f"{'; '.join(parts)} ({how})."]
    if not time.gpu.has_int8:
        return [*sentences, f"No INT8 on {time.gpu.name}: nothing to gain."]
    if gain is None:
        return [*sentences, "What INT8 could gain is not known."]
    from qdqtool.timing.results import MIN_GAIN

    what = "INT8 placed by qdqtool" if time.is_float else "this model"
    if abs(gain.value - 1) < MIN_GAIN - 1:
        text = f"{what[0].upper()}{what[1:]} is about as fast as {gain.precision}"
    elif gain.value > 1:
        text = f"INT8 {'would be' if time.is_float else 'is'} {gain.value:.2f} times as fast as {gain.precision}"
    else:
        text = f"{gain.precision} is faster than {what}, which is {gain.value:.2f} times as fast"
    text += f" ({gain.low:.2f} to {gain.high:.2f}{'' if gain.is_sure else ', so that either may be faster'})"
    if _decision_has_costs(time) and (costs := _describe_costs(time)):
        text += f": {costs}"
    return [*sentences, f"{text}."]


def _decision_has_costs(time: TimeEstimate) -> bool:
    gain = time.gain_range
    return not time.is_float and gain is not None and gain.value < _MATTERS and time.gpu.has_int8


def _describe_costs(time: TimeEstimate) -> str:
    """What the conversions and changes of layout cost together; empty where there are none."""
    costs = [format_count(time.conversions, "conversion")] if time.conversions else []
    costs += [format_count(time.layouts, "layout change")] if time.layouts else []
    return (
        f"{format_ms(time.conversions_ms + time.layouts_ms)} in {' and '.join(costs)}"
        if costs
        else ""
    )


def describe_gain(time: TimeEstimate, prediction: Prediction, width: int) -> list[str]:
    """What ``insert`` says of its own result: the decision, and what makes it slow where it does not pay."""
    from qdqtool.timing.results import MIN_GAIN

    page, gain = TextPage(width), time.gain_range
    for sentence in decision(time):
        page.fill(sentence)
    if not time.gpu.has_int8:
        page.fill(f"warning: no INT8 on {time.gpu.name}: deploy the float model there")
    elif gain is None and not page.lines:
        page.add_lines(
            "no gain to say: the shapes of most layers are not known; export the model with fixed shapes"
        )
    elif gain is not None and gain.value < MIN_GAIN:
        page.fill(
            f"warning: not expected to be at least {MIN_GAIN:g} times as fast as {gain.precision} on "
            f"{time.gpu.name}: {_explain_slowness(time, prediction, width)}"
        )
    return page.lines


def _explain_slowness(time: TimeEstimate, prediction: Prediction, width: int) -> str:
    """What makes a placement slow: conversions and layouts, or kernels so small that starting them is most of it."""
    if 2 * time.launch_ms > time.total_ms:
        return (
            f"{format_ms(time.launch_ms)} of {format_ms(time.total_ms)} is what its {len(time.kernels)} kernels take at least, "
            "whatever their type; a larger batch or image would gain"
        )
    slowest = max(
        (layer for layer in prediction.layers if layer.type == "Conversion"),
        key=lambda x: x.ms or 0.0,
        default=None,
    )
    why = _describe_costs(time) or "no kernel gains enough by INT8"
    return (
        f"{why}; the slowest is {keep_end(slowest.name, width)}"
        if slowest is not None and time.conversions
        else why
    )


def time_summary(time: TimeEstimate) -> str:
    """The time, where it is, and its range."""
    batch = "" if time.batch == 1 else f", batch x{time.batch:g}"
    how = "estimated" if time.calibration is None else "corrected by a measurement"
    return (
        f"{format_ms(time.total_ms)} on {time.gpu.name} ({time.gpu.clock:.0f} MHz{batch}), {how}; 80 % of measured "
        f"engines lie within {format_ms(time.low_ms, unit=False)} to {format_ms(time.high_ms)}"
    )


def _add_summary(page: TextPage, time: TimeEstimate) -> None:
    """The time end to end, against the float network; what to know about the figures."""
    texts = [time_summary(time)]
    if time.is_float and time.best is not None:
        texts.append(
            f"with INT8 wherever insert would put it: {time.best.int8} of {time.best.convolutions} "
            "convolutions"
        )
    moving = [f"conversions {format_ms(time.conversions_ms)}"] if time.conversions_ms else []
    moving += (
        [f"{time.layouts} changes of memory layout {format_ms(time.layouts_ms)}"]
        if time.layouts
        else []
    )
    if moving and (
        page.everything or not _decision_has_costs(time)
    ):  # else the decision has said it
        texts.append(f"of which {', '.join(moving)}")
    if time.calibration:
        text = f"corrected by {time.calibration.source}: x{time.calibration.factor:.2f}"
        if time.calibration.kernel_us:
            text += f", {time.calibration.kernel_us:+.1f} us a kernel"
        if time.calibration.overhead_us:
            text += f"; the profile added {time.calibration.overhead_us:.1f} us to each layer"
        texts.append(text)
    for text in texts:
        page.fill(text, 2, "  ")
    for note in time.notes:
        page.fill(f"note: {as_options(note)}", 4, "  ")


def _add_details(
    page: TextPage, time: TimeEstimate, prediction: Prediction, *, layers: bool
) -> None:
    """What each fix saves, where something is to be fixed; the slowest layers, where ``layers`` are asked for."""
    if page.everything or any(f.severity != Severity.INFO for f in prediction.findings):
        _add_savings(page, time, prediction)
    if not (page.everything or layers):
        return
    if time.kernels:
        page.add_heading("Slowest layers, as in a profile (profiling adds a few us per layer)")
    for kernel in page.first_rows(time.kernels, _SLOWEST):
        name = kernel.name if page.everything else keep_end(kernel.title, page.width - 27)
        page.fill(f"{kernel.kind:<11} {name}", 26, f"  {format_ms(kernel.ms):>10}  ")


def _add_savings(page: TextPage, time: TimeEstimate, prediction: Prediction) -> None:
    """What each fix saves, simulated or at most."""
    least = 0.0 if page.everything else _WORTH * time.total_ms
    together = [f for f in time.fixes if f.saves_ms > least]
    if together:
        page.add_lines("", "What qdqtool fix saves, by simulating the fixed network")
    for fix in together:
        places = f"{len(fix.nodes)} places" if len(fix.nodes) > 1 else fix.nodes[0]
        page.fill(f"{', '.join(fix.codes)}  {places}", 16, f"  {format_ms(fix.saves_ms):>10}  ")
    simulated = {(code, node) for fix in time.fixes for code in fix.codes for node in fix.nodes}
    fixes = find_savings(
        [f for f in prediction.findings if (f.code, f.node) not in simulated], least
    )
    if fixes:
        page.add_lines(
            "", "What each fix saves at most, neighbours quantized (savings do not add up)"
        )
    shown = page.first_rows(fixes, _FIXES)
    for finding in shown:
        page.fill(
            f"{finding.code}  {finding.node}", 16, f"  {format_ms(finding.saves_ms or 0.0):>10}  "
        )
    if len(fixes) > len(shown):
        rest = sum(f.saves_ms or 0.0 for f in fixes[len(shown) :])
        page.add_lines(f"  and {len(fixes) - len(shown)} more, {format_ms(rest)} together (--all)")


def find_savings(findings: list[Finding], least: float) -> list[Finding]:
    """The findings whose fix saves time, the most first; one of a node and amount."""
    found = sorted(
        (f for f in findings if (f.saves_ms or 0.0) > least), key=lambda f: -(f.saves_ms or 0.0)
    )
    return list({(f.node, f.saves_ms): f for f in reversed(found)}.values())[::-1]


def format_ms(value: float, *, unit: bool = True) -> str:
    """``0.681 ms``: three digits that count."""
    digits = (
        0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    )
    return f"{value:.{digits}f}" + (" ms" if unit else "")


def gpus_text(gpus: list[Gpu], width: int, *, sources: bool = False) -> str:
    """The table of known GPUs."""
    page = TextPage(width)
    page.add_lines(
        f"{'GPU':<27}{'CC':>5}{'SMs':>5}{'MHz':>6}{'GB/s':>7}{'L2 MB':>7}{'INT8':>7}{'FP16':>7}  INT8 by"
    )
    for gpu in gpus:
        tops = gpu.as_json()["tops"]
        page.add_lines(
            f"{gpu.name:<27}{gpu.cc:>5}{gpu.sms:>5}{gpu.clock:>6.0f}{gpu.bandwidth:>7g}{gpu.l2:>7g}"
            f"{tops['int8']:>7.0f}{tops['fp16']:>7.0f}  {gpu.rates.int8_path}"
        )
        if sources:
            page.fill(
                f"{gpu.evidence}: {gpu.source}; {gpu.rates.evidence}: {gpu.rates.source}", 4, "    "
            )
    page.add_gap()
    page.fill(
        "INT8 and FP16 in dense tera-operations a second at the boost clock. Give --clock for another; --sources "
        "shows where each figure comes from.",
        0,
    )
    return str(page)

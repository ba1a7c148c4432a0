"""Text of ``engine``, ``compare`` and ``verify``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qdqtool.buildlog.agreement import MismatchKind, TraceCounts
from qdqtool.buildlog.build_status import IMPLICIT_INT8
from qdqtool.buildlog.costs import EngineReport, LayerCost, LayerTotals, format_tensor, layer_title
from qdqtool.formats.float_names import name_floats
from qdqtool.formats.output import ROW_COLUMN, Style, TextPage, as_options
from qdqtool.formats.verdicts import describe_subgraphs
from qdqtool.ir.precision import Precision
from qdqtool.trt.targets import target_named
from qdqtool.util.limits import format_bytes
from qdqtool.util.text import cut_middle, format_count, format_layer_counts, format_ms

if TYPE_CHECKING:
    from qdqtool.accuracy.agreement import NetworkAgreement
    from qdqtool.buildlog.engine_comparison import EngineComparison, LayerPair
    from qdqtool.comparison.result import Comparison, NodeChange, SideSummary, TimeChange
    from qdqtool.verification.result import Verification

# Maximum lengths of lists if --all is not given.
_MAX_LAYERS, _MAX_SLOW_LAYERS, _MAX_NODES, _MAX_MISMATCHES = 20, 10, 8, 10
_MIN_MS = 5e-5  # smallest change in milliseconds that is not printed as 0
# Titles of the members of qdqtool.comparison.result.ChangeKind, the most serious change first.
_CHANGE_TITLES = {
    "lost-int8": "Lost INT8",
    "lost-int8-output": "In INT8, but with float output",
    "lost-qdq": "Nodes with removed Q/DQ",
    "gained-int8": "Gained INT8",
    "gained-int8-output": "With INT8 output",
    "gained-qdq": "Nodes with added Q/DQ",
    "format": "In another format",
    "residual": "Residual input of another type",
    "weights-scale": "Scales of weights differ",
    "scale": "Scales of activations differ",
    "fusion": "Fused with other layers",
    "only-in-a": "Only in A",
    "only-in-b": "Only in B",
}
_MISMATCH_TITLES = {
    MismatchKind.CONVOLUTION: "Convolutions",
    MismatchKind.CONVERSION: "Q/DQ layers",
    MismatchKind.LAYER: "Engine layers",
    MismatchKind.TRACE: "Optimizer lines",
    MismatchKind.COPY: "Slices, concatenations and copies",
    MismatchKind.BUILD: "Build",
}
_SLOW_RATIO = 1.5  # a layer is listed if it takes more than this many times its expected time


def render(
    report: EngineReport, sort: str, width: int = 80, *, everything: bool = False
) -> TextPage:
    """Return the text of ``engine``: layers, and totals by kind, precision and type.

    If `everything` is set, all layers are listed.
    """
    page = TextPage(width, everything)
    build = report.build
    device = f" on {build.device}" if build.device else ""
    time = f", {report.total_ms:.4f} ms" if report.has_times else ""
    page.add_lines(f"{build.title}{device}: {format_count(len(report.rows), 'layer')}{time}")
    if report.implicit_int8:
        page.fill(IMPLICIT_INT8)
    page.add_gap()
    page.fill(
        "MACs and bytes of one execution; MAC/B is the arithmetic intensity. Below each layer: its "
        "inputs -> outputs",
        0,
    )
    page.add_lines(f"{'#':>4} {'ms':>8} {'share':>6} {'MMACs':>9} {'bytes':>9} {'MAC/B':>7}  layer")
    for row in page.iterate_rows(report.sorted_rows(sort), _MAX_LAYERS, "... "):
        _add_layer(page, row)
    _add_slow_layers(page, report)
    for key in ("kind", "precision", "type"):
        _add_totals(page, key, report.totals(key), timed=report.has_times)
    if report.unmatched:
        names = ", ".join(report.unmatched[:10])
        page.add_heading(f"Layers in the profile without a match in the layer listing: {names}")
    return page


def _add_layer(page: TextPage, row: LayerCost) -> None:
    ms = f"{row.ms:8.4f}" if row.ms is not None else " " * 8
    share = f"{row.share:6.1%}" if row.share is not None else " " * 6
    size = "?" if row.total_bytes is None else format_bytes(row.total_bytes)
    intensity = f"{row.intensity:7.1f}" if row.intensity else " " * 7
    name = row.name if page.everything else layer_title(row)
    numbers = f"{row.index:>4} {ms} {share} {_format_macs(row):>9} {size:>9} {intensity}"
    if len(numbers) + 2 + len(name) <= page.width:
        page.add_lines(f"{numbers}  {name}")
    else:
        page.add_lines(numbers, f"        {name}")
    inputs, outputs = (
        ", ".join(map(format_tensor, tensors)) or "-"
        for tensors in (row.layer.inputs, row.layer.outputs)
    )
    page.fill(f"{row.layer.type}: {inputs} -> {outputs}{_describe_expected(row)}", 8, " " * 8)


def _describe_expected(row: LayerCost) -> str:
    if not row.expected_ms or not row.best_ms:
        return ""
    return f"; expected {row.expected_ms:.4f} ms, lower bound {row.best_ms:.4f}"


def _format_macs(row: LayerCost) -> str:
    if row.macs is None:
        return "?"
    return f"{row.macs / 1e6:.1f}" if row.macs else ""


def _add_slow_layers(page: TextPage, report: EngineReport) -> None:
    slow = [r for r in report.rows if (r.times_expected or 0.0) > _SLOW_RATIO]
    slow.sort(key=lambda r: (r.expected_ms or 0.0) - (r.ms or 0.0))
    if slow:
        page.add_heading(
            f"Slower than expected on {report.gpu} ({len(slow)}); the cause may be a slow tactic "
            "or format"
        )
    for row in slow[:_MAX_SLOW_LAYERS]:
        lost = (row.ms or 0.0) - (row.expected_ms or 0.0)
        name = row.layer.extras.get("TacticName") or row.layer.tactic
        tactic = f"  [{cut_middle(str(name), 60)}]" if name else ""
        start = f"  x{row.times_expected:.1f}, {lost:.4f} ms more  #{row.index} "
        page.fill(f"{layer_title(row)}{tactic}", 8, start)


def _add_totals(page: TextPage, key: str, totals: dict[str, LayerTotals], *, timed: bool) -> None:
    page.add_lines("", f"{f'By {key}':<26} {'layers':>6} {'ms':>9} {'GMACs':>9} {'bytes':>10}")
    for name, total in totals.items():
        ms = f"{total.ms:9.4f}" if timed else " " * 9
        page.add_lines(
            f"  {cut_middle(name, 24):<24} {total.layers:>6} {ms} {total.macs / 1e9:9.3f} "
            f"{format_bytes(total.bytes):>10}"
        )
    unknown = sum(total.unknown for total in totals.values())
    if unknown and key == "kind":
        layers = format_count(unknown, "layer")
        page.add_lines(f"  MACs or bytes of {layers} are unknown (?) and not in the totals")


# Two builds or models -----------------------------------------------------------------------------


def _find_float_type(comparison: Comparison) -> Precision | None:
    """Return the type of layers that are not quantized in two models; None if it is unknown."""
    a, b = comparison.a, comparison.b
    types = a.float_types | b.float_types
    if len(types) != 1 or a.kind != "model" or b.kind != "model":
        return None
    return Precision.FP16 if types == {Precision.FLOAT} else next(iter(types))


def _add_changes(page: TextPage, comparison: Comparison, float_type: Precision | None) -> None:
    """Add each changed node once, under its most serious change."""
    from qdqtool.comparison.result import ChangeKind
    from qdqtool.comparison.text import name_formats

    listed: set[int] = set()
    for change, title in _CHANGE_TITLES.items():
        nodes = [n for n in comparison.nodes if change in n.changes and id(n) not in listed]
        listed.update(map(id, nodes))
        if nodes:
            others = comparison.count(ChangeKind(change)) - len(nodes)
            count = f"{len(nodes)}, and {others} listed above" if others else f"{len(nodes)}"
            title = name_formats(name_floats(title, "", float_type), ChangeKind(change), nodes)
            time = _format_change(": ", [node.change_ms for node in nodes])
            page.add_heading(f"{title} ({count}){time}")
            _add_changed_nodes(page, nodes, float_type)


def render_comparison(
    comparison: Comparison, width: int = 80, *, everything: bool = False
) -> TextPage:
    """Return the text of ``compare``: the summary, then the changes of each node.

    If `everything` is set, all nodes and layers are listed.
    """
    from qdqtool.comparison.result import ChangeKind
    from qdqtool.comparison.text import is_interface_listed, summarize_comparison

    page = TextPage(width, everything)
    losses = comparison.count(ChangeKind.LOST_INT8) or comparison.is_slower
    style = Style.BAD if losses else Style.GOOD if comparison.changed else Style.BOLD
    float_type = _find_float_type(comparison)
    summary = name_floats(summarize_comparison(comparison), "", float_type)
    page.fill(f"B against A: {summary}", style=style)
    page.add_gap()
    _add_side_summary(page, "A", comparison.a)
    _add_side_summary(page, "B", comparison.b)
    page.fill(f"Matched by {comparison.summary()['matched_by']}.", 0)
    _add_layout_changes(page, comparison.a, comparison.b)
    _add_time_change(page, comparison.time_change, comparison.b.gpu)
    if comparison.agreement is not None:
        page.add_gap()
        add_agreement(page, comparison.agreement)
    for note in comparison.notes:
        page.fill(f"note: {as_options(note)}", style=Style.NOTE)
    if is_interface_listed(comparison):
        page.add_heading(f"Inputs and outputs that differ ({len(comparison.interface)})")
        for change in page.iterate_rows(comparison.interface, _MAX_LAYERS, "  ... "):
            page.fill(change.why, 4, "  ")
    _add_changes(page, comparison, float_type)
    if comparison.engines is not None:
        page.add_gap()
        add_engines(page, comparison.engines)
    return page


def add_times_on_gpus(page: TextPage, comparisons: Sequence[Comparison]) -> None:
    """Add a line with the estimated times for each GPU, from a comparison on each GPU."""
    from qdqtool.comparison.text import describe_speed

    page.add_heading("Times by GPU (estimated)")
    for comparison in comparisons:
        a, b = comparison.a, comparison.b
        if a.ms is None or b.ms is None or comparison.times_as_long is None:
            continue
        times = f"A {format_ms(a.ms):<9}  B {format_ms(b.ms):<9}"
        unsure = "" if comparison.is_faster_surely else ", uncertain"
        page.add_lines(f"  {b.gpu:<26}  {times}  {describe_speed(comparison)}{unsure}")


_COUNTED = {"agreement-map": "detection", "mask-agreement": "mask"}


def add_agreement(page: TextPage, agreement: NetworkAgreement) -> None:
    """Add the agreement of two models on images."""
    images = format_count(agreement.images, "image")
    for measure in agreement.measures:
        value = "unknown"
        if measure.value is not None:
            value = f"{measure.value:.3f} (95 % interval {measure.low:.3f} to {measure.high:.3f})"
        counted = ""
        if measure.metric in _COUNTED:
            counted = f" with {format_count(measure.count, _COUNTED[measure.metric])}"
        page.fill(f"{measure.title} of B with A: {value} on {images}{counted}", 2)
        page.fill(measure.definition, 2, "  ")
        if measure.detections is not None:
            total, found, extra, below = measure.detections
            near = f" ({below} others at scores of 0.2 to 0.25)" if below else ""
            page.fill(
                f"At score 0.25 and IoU 0.5: B finds {found} of A's "
                f"{format_count(total, 'detection')}{near}, and {extra} more",
                2,
            )


def _add_side_summary(page: TextPage, label: str, side: SideSummary) -> None:
    layers = format_layer_counts(side.plain, side.products)
    if side.kind == "build" and side.int8 is None:
        layers = "times of layers, no data types"
    parts = [layers]
    if not side.quantized and side.kind == "model" and not side.subgraphs.get("quantizers"):
        parts.append("no Q/DQ")
    elif side.int8 is not None and not side.rejected:
        parts.append(_describe_formats(side))
    parts += _describe_conversions(side)
    nested = describe_subgraphs(side.subgraphs)
    if nested:
        parts.append(f"not compared: {nested}")
    if side.rejected:
        parts.append(f"TensorRT {side.rejection} it")
    parts += _describe_time(side)
    target = f", predicted for {side.target_title}" if side.target else ""
    page.fill(f"{side.title}: {', '.join(parts)}{target}", 3, f"{label}  ")


def _describe_conversions(side: SideSummary) -> list[str]:
    """Return the number of remaining Q/DQ layers as one text; empty if it is unknown."""
    if side.conversions is None or not side.quantized or side.rejected:
        return []
    low, high = side.conversion_bounds
    layers = format_count(high, "Q/DQ layer")
    return [layers if low == high else f"{low} to {layers}"]


def _describe_time(side: SideSummary) -> list[str]:
    """Return the time as one text; empty if it is unknown."""
    if side.ms is None:
        return []
    source = "" if side.measured else f" on {side.gpu} (estimated)"
    float_type = f" in {side.float_type}" if side.float_type else ""
    return [f"{format_ms(side.ms)}{float_type}{source}"]


def _add_layout_changes(page: TextPage, a: SideSummary, b: SideSummary) -> None:
    """Add the layout changes of two models if their estimated times differ."""
    if a.layouts_ms is None or b.layouts_ms is None or abs(b.layouts_ms - a.layouts_ms) < _MIN_MS:
        return
    times = (
        f"{side.layouts} ({format_ms(side.layouts_ms)})" if side.layouts_ms else "0"
        for side in (a, b)
    )
    page.fill(f"Layout changes (reformats): {' -> '.join(times)}.", 0)


def _add_time_change(page: TextPage, change: TimeChange | None, gpu: str) -> None:
    """Add the difference of two estimated times, and below it the parts that add up to it."""
    if change is None or abs(change.total_ms) < _MIN_MS:
        return
    page.add_gap()
    page.add_lines(f"Time of B minus time of A on {gpu}: {change.total_ms:+.4f} ms")
    in_a, in_b = change.other_layers
    for title, ms in (
        ("nodes listed below", change.nodes_ms),
        ("layers shared by such nodes, counted once", change.shared_ms),
        ("layout changes", change.layouts_ms),
        (f"other layers ({in_a} in A, {in_b} in B)", change.other_layers_ms),
    ):
        if abs(ms) >= _MIN_MS:
            page.add_lines(f"  {title:<41} {ms:+.4f} ms")
    for name, ms in change.largest_other_layers.items():
        if abs(ms) >= _MIN_MS:
            page.fill(f"about {ms:+.4f} ms: {name}", 6, "    ")


def _format_change(separator: str, changes: Iterable[float | None]) -> str:
    """Return the sum of the changes of times after a separator; empty if the sum is about 0."""
    ms = sum(change or 0.0 for change in changes)
    return f"{separator}{ms:+.4f} ms" if abs(ms) >= _MIN_MS else ""


def _describe_formats(side: SideSummary) -> str:
    """Return the counts above 0, such as ``60 in INT8 (54 with INT8 output) and 2 in FP8``."""
    counts = (
        ("INT8", side.int8, side.int8_to_int8, side.int8_to_int8_range),
        ("FP8", side.fp8, side.fp8_to_fp8, side.fp8_to_fp8_range),
    )
    texts = [
        f"{count} in {name}"
        + (f" ({_format_range(inside, bounds)} with {name} output)" if inside is not None else "")
        for name, count, inside, bounds in counts
        if count
    ]
    return " and ".join(texts) or "0 in INT8"


def _format_range(number: int, bounds: tuple[int, int] | None) -> str:
    low, high = bounds or (number, number)
    return f"{low} to {high}" if low < high else f"{number}"


def _add_changed_nodes(
    page: TextPage, nodes: list[NodeChange], float_type: Precision | None
) -> None:
    for node in page.iterate_rows(nodes, _MAX_NODES):
        other = f" ({node.b.name} in B)" if node.a and node.b and node.a.name != node.b.name else ""
        time = _format_change("; ", [node.change_ms])
        why = name_floats(node.why, node.finding or "", float_type)
        why = why.removesuffix(".") if time else why
        page.fill(f"{node.name}{other}: {why}{time}", 6, "  ")


def _add_kind_table(page: TextPage, comparison: EngineComparison, timed: bool) -> None:
    columns = f" {'A ms':>10} {'B ms':>10} {'change':>10}" if timed else ""
    page.add_lines(f"{'By kind':<26} {'A':>7} {'B':>7}{columns}")
    for kind, (a, b) in comparison.totals_by_kind.items():
        times = f" {a.ms:10.4f} {b.ms:10.4f} {b.ms - a.ms:+10.4f}" if timed else ""
        page.add_lines(f"  {kind:<24} {a.layers:>7} {b.layers:>7}{times}")


def add_engines(page: TextPage, comparison: EngineComparison) -> None:
    """Add a comparison of two engines by kind of layer and by layer.

    With times, the layers with the largest changes are first. Without times, layers are in the
    order of the first engine, and layers of equal types are listed only with ``--all``.
    """
    first, second = comparison.first, comparison.second
    timed = first.has_times and second.has_times
    if timed and first.total_ms:
        change = second.total_ms - first.total_ms
        page.add_lines(
            f"Sum of layers: B takes {abs(change):.4f} ms ({abs(change) / first.total_ms:.1%}) "
            f"{'more' if change > 0 else 'less'}"
        )
    _add_kind_table(page, comparison, timed)
    pairs = comparison.pairs
    order = "in the order of A"
    if timed:
        pairs = sorted(pairs, key=lambda pair: -abs(pair.change_ms or 0.0))
        order = "the largest changes first"
    elif not page.everything:
        pairs = [pair for pair in pairs if _format_types(pair.first) != _format_types(pair.second)]
        if not pairs:
            return
    page.add_lines(
        "", f"By layer, {order} (aligned by {comparison.aligned_by}); ms in A, in B, change"
    )
    for pair in page.iterate_rows(pairs, _MAX_LAYERS, "... "):
        _add_layer_pair(page, pair, timed)


def _format_types(cost: LayerCost | None) -> str | None:
    """Return the types of a layer's inputs and output; empty if unknown, None without `cost`."""
    if cost is None:
        return None
    if not cost.layer.type:
        return ""
    inputs = ", ".join(str(t.precision) for t in cost.layer.inputs)
    return f"{inputs} -> {cost.layer.output_precision}"


def _add_layer_pair(page: TextPage, pair: LayerPair, timed: bool) -> None:
    first, second = (
        f"{cost.ms:9.4f}" if cost is not None and cost.ms is not None else f"{'-':>9}"
        for cost in (pair.first, pair.second)
    )
    change = f"{pair.change_ms:+9.4f}" if timed and pair.change_ms is not None else " " * 9
    numbers = f"{first} {second} {change}"
    for label, cost in (("A", pair.first), ("B", pair.second)):
        if cost is not None:
            name = cost.name if page.everything else layer_title(cost)
            page.add_lines(f"{numbers}  {label} {_format_types(cost) or '':<20} {name}")
            numbers = " " * 29


# A prediction and a build -------------------------------------------------------------------------


_STATUS = {
    0: ("PASS", "built what was predicted", Style.GOOD),
    1: ("FAIL", "did not build what was predicted", Style.BAD),
    2: ("INCOMPLETE", "", Style.UNCLEAR),
}


def verdict(result: Verification) -> str:
    """Return one line on how layers, Q/DQ layers, log lines and time agree with a prediction."""
    trace, counts = result.trace, _list_counts(result)
    parts = [text if label == "Layers" else f"{label} {text}" for label, text in counts.items()]
    if trace.built:
        parts.append(f"{trace.agree} of {trace.built} optimizer lines")
    mismatch = _describe_time_mismatch(result)
    return "; ".join([*parts, mismatch] if mismatch else parts)


def _list_counts(result: Verification) -> dict[str, str]:
    conv, conversions, products = result.convolutions, result.conversions, result.products
    counts = {
        "Layers": f"{conv.agree} of {format_layer_counts(conv.total - products, products)} run as "
        "predicted"
    }
    if conv.unknown:
        counts["Layers"] += f", {conv.unknown} unknown"
    if conversions.built is not None and conversions.predicted is not None:
        counts["Q/DQ layers"] = f"{conversions.predicted} predicted, {conversions.built} built"
    return counts


def _describe_time_mismatch(result: Verification) -> str:
    times = result.times
    if times is None or times["within"]:
        return ""
    return (
        f"{times['built_ms']:.3f} ms measured, outside the estimated {times['low_ms']:.3f} to "
        f"{times['high_ms']:.3f}"
    )


def render_verification(
    result: Verification,
    width: int = 80,
    *,
    allow_partial: bool = False,
    require_shapes: bool = False,
) -> TextPage:
    """Return the text of ``verify``: the verdict, the compared numbers, and the mismatches."""
    from qdqtool.verification.api import exit_code

    page = TextPage(width)
    outcome, consequence, style = _STATUS[exit_code(result, allow_partial, require_shapes)]
    if not (result.mismatches or result.complete):
        consequence = _describe_missing(result)
    elif outcome == "INCOMPLETE":
        consequence = "agrees, but lists no shapes to compare"
    exceptions = _describe_exceptions(result)
    if outcome == "PASS" and not result.has_shapes:
        outcome, exceptions = "PASS by names", f"{exceptions}; the build lists no shapes"
    page.fill(f"{outcome}: {_describe_build(result)} {consequence}{exceptions}", style=style)
    page.add_gap()
    _add_compared_counts(page, result)
    _add_times(page, result)
    for note in result.notes:
        page.fill(f"note: {as_options(note)}.", style=Style.NOTE)
    _add_mismatches(page, result)
    return page


def _describe_missing(result: Verification) -> str:
    if result.build.names_only and not (result.convolutions.agree or result.trace.agree):
        return "has no data types to compare: the build lists names of layers only"
    if not any((result.convolutions.agree, result.layers.agree, result.trace.agree)):
        return "has no data to compare"
    if not result.build.complete:
        return "agrees, but parts of the build are missing"
    listed = format_count(result.convolutions.unknown, "layer")
    return f"agrees, but the data types of {listed} are unknown"


def _describe_exceptions(result: Verification) -> str:
    layers, parts = result.layers, []
    if layers.unmatched:
        verb = "has" if len(layers.unmatched) == 1 else "have"
        parts.append(f"{len(layers.unmatched)} of {layers.total} engine layers {verb} another name")
    mismatch = _describe_time_mismatch(result)
    return "".join(f"; {part}" for part in [*parts, *([mismatch] if mismatch else [])])


def _add_mismatches(page: TextPage, result: Verification) -> None:
    for kind, title in _MISMATCH_TITLES.items():
        mismatches = [m for m in result.mismatches if m.kind == kind]
        if mismatches:
            plural = "es" if len(mismatches) > 1 else ""
            page.add_heading(f"{title}: {len(mismatches)} mismatch{plural}")
        for m in page.iterate_rows(mismatches, _MAX_MISMATCHES, hint=" (all in --format json)"):
            page.fill(m.name, 4, "  ")
            page.fill((f"line {m.line}: " if m.line else "") + m.why, 4, "    ")
    unknown = result.convolutions.unknown_names
    if unknown:
        page.add_heading("Not stated by the build")
    for name in page.iterate_rows(unknown, _MAX_MISMATCHES, hint=""):
        page.add_lines(f"  {name}")


def _describe_build(result: Verification) -> str:
    build, prediction = result.build, result.prediction
    is_rtx = prediction is not None and target_named(prediction.target).is_rtx
    product = "TensorRT-RTX" if is_rtx else "TensorRT"
    version = f"{product} {build.tensorrt}" if build.tensorrt else f"{product} (unknown version)"
    return f"{version} on {build.device}" if build.device else version


def _add_compared_counts(page: TextPage, result: Verification) -> None:
    build, prediction = result.build, result.prediction
    target = target_named(prediction.target).title if prediction else "no target"
    page.add_row("Compared", f"{build.source} with the prediction for {target}")
    if not build.complete or build.missing:
        label = "Not given" if build.complete else "Incomplete"
        page.add_row(label, ", ".join(build.missing or ["not stated"]))
    for label, text in _list_counts(result).items():
        page.add_row(label, text)
    if result.layers.total:
        counts = f"{result.layers.agree} of {result.layers.total}"
        compared = "name" if build.names_only else "name and types"
        page.add_row("Engine layers", f"{counts} have the predicted {compared}")
    kinds = result.layers.not_compared
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        further = format_count(sum(kinds.values()), "further layer")
        page.add_row("Not compared", f"{further} that the builder adds ({listed})")
    for name in page.iterate_rows(result.layers.unmatched, _MAX_MISMATCHES, " " * ROW_COLUMN, ""):
        page.add_row("", f"other name: {cut_middle(name, page.width - 31)}")
    _add_line_counts(page, "Optimizer lines", result.trace)
    _add_line_counts(page, "Copy lines", result.copies)


def _add_line_counts(page: TextPage, label: str, counts: TraceCounts) -> None:
    if counts.built:
        order = "" if counts.in_order is None else f", {counts.in_order} of them in the log's order"
        text = f"{counts.agree} of {counts.built} ({counts.predicted} predicted){order}"
        page.add_row(label, text)


def _add_times(page: TextPage, result: Verification) -> None:
    times = result.times
    if times is None:
        return
    outcome = "outside the range (expected for one in five engines)"
    if times["within"]:
        outcome = "within the range"
    page.add_row(
        "Time",
        f"{times['built_ms']:.3f} ms measured ({times['built_from']}), "
        f"{times['predicted_ms']:.3f} ms estimated for {times['gpu']} at "
        f"{times['running_clock_mhz']} MHz (range {times['low_ms']:.3f} to "
        f"{times['high_ms']:.3f}): {outcome}",
    )
    if not times["within"]:
        advice = (
            "If the time is far outside, check the GPU, its clock (--gpu, --clock) and its load"
        )
        page.add_row("", advice)
    layers = times["layers"]
    if layers["compared"]:
        page.add_row(
            "Times of layers",
            f"{layers['compared']} compared, half of them within {layers['median_error']:.0%} of "
            "the estimate",
        )
    for note in times["notes"]:
        page.fill(f"note: {as_options(note)}", 4, "  ")
    for slow in times["slow"]:
        numbers = f"{slow['built_ms']:.4f} ms measured, {slow['predicted_ms']:.4f} ms estimated"
        page.fill(f"slow: {numbers}: {slow['name']}", 4, "  ")

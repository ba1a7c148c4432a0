"""A prediction as text for a terminal: the verdict first, then what is not INT8 to INT8, by cause."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qdqtool.explain.report import title_of
from qdqtool.render.output import wrap
from qdqtool.text import as_text, layers_counted
from qdqtool.trt.refusals import OutsideRules
from qdqtool.types import ConvOutcome, EngineLayer, Finding, Prediction, Severity

if TYPE_CHECKING:
    from qdqtool.assumption import Assumption
    from qdqtool.explain.ways import Way
    from qdqtool.timing.estimate import TimeEstimate

_SHOWN = 3  # findings of one code shown in full, unless everything is asked for
_LISTED = 12  # lines of a list, unless everything is asked for
_MARK = {Severity.ERROR: "ERROR", Severity.WARNING: "warning", Severity.INFO: "note"}
_LEDGER = ("CONVERSION", "INPUT-CONVERSION")


_NOTHING = {
    "NO-QDQ": "for the model has no Q/DQ; 'qdqtool insert' adds them",
    "QOPERATOR": "for it has integer operators instead of Q/DQ, which TensorRT does not take",
}


def verdict(prediction: Prediction) -> str:
    """One line: ``64 convolutions: 60 INT8 (52 to INT8, 8 to float), 4 float; 11 conversions``.

    Matrix products are counted for themselves: ``1 convolution: ...; 73 matrix products: 49 INT8, 24 float; ...``.
    """
    s = prediction.summary()
    products = s["matrix_products"]
    outside, count = _outside(prediction), layers_counted(s["convolutions"] - _weighted_products(prediction), products)
    if not s["convolutions"] and not products:
        return f"{outside}{count}: nothing to run in INT8"
    why = next((text for code, text in _NOTHING.items() if any(f.code == code for f in prediction.findings)), "")
    if why and not s["int8"]:
        return f"{outside}{count}: none in INT8, {why}"
    parts = [_types_of(prediction)] if s["convolutions"] > _weighted_products(prediction) else []
    if products:
        parts.append(f"{_count(products, 'matrix product')}: {s['matrix_products_int8']} INT8, "
                     f"{s['matrix_products_float']} float")
    if s["conversions"] is not None:
        causes = ["Conv + activation + Add"] if _open(prediction) else []
        if any(r.uncertain or r.possible for r in prediction.regions):
            causes.append("how much Myelin takes in")
        open_choice = f", depending on {' and '.join(causes)}" if causes else ""
        parts.append(_count(_ranges(prediction)["conversions"], "conversion") + open_choice)
    return outside + "; ".join(parts)


def _weighted_products(prediction: Prediction) -> int:
    """The matrix products among what the prediction lists as convolutions."""
    return sum(c.is_product for c in prediction.convolutions)


def _types_of(prediction: Prediction) -> str:
    """Convolutions by type, products aside: ``64 convolutions: 60 INT8 (52 to INT8, 8 to float), 4 float``."""
    s = _ranges(prediction, [c for c in prediction.convolutions if c.is_product])
    count = _count(s["convolutions"], "convolution")
    if s["conversions"] is None or not s["int8"]:
        return f"{count}: {s['int8']} INT8, {s['float']} float"
    both = f" ({s['int8_to_int8']} to INT8, {s['int8_to_float']} to float)"
    return f"{count}: {s['int8']} INT8{both}, {s['float']} float"


def _open(prediction: Prediction) -> list[Assumption]:
    """What the user did not settle."""
    return [a for a in prediction.assumptions if not a.given]


def _ranges(prediction: Prediction, without: Sequence[ConvOutcome] = ()) -> dict[str, int | str | None]:
    """The summary, with ranges (``1 to 7``) where it depends on what is assumed; ``without`` are not counted."""
    summary = prediction.summary()
    cases = [summary]
    for assumption in _open(prediction):
        for c in assumption.alternatives.values():
            cases.append({
                "int8": c.int8, "int8_to_int8": c.int8_to_int8, "int8_to_float": c.int8 - c.int8_to_int8,
                "float": summary["convolutions"] - c.int8, "conversions": c.conversions,
            })
    apart = {"convolutions": len(without), "int8": sum(c.is_int8 for c in without),
             "int8_to_int8": sum(c.int8_in_int8_out for c in without)}
    apart |= {"int8_to_float": apart["int8"] - apart["int8_to_int8"], "float": len(without) - apart["int8"]}
    counts: dict[str, int | str | None] = {**summary, "convolutions": summary["convolutions"] - len(without)}
    for key in ("int8", "int8_to_int8", "int8_to_float", "float", "conversions"):
        values = {case[key] if case[key] is None else case[key] - apart.get(key, 0) for case in cases}
        if key == "conversions" and prediction.conversions_range is not None:
            values = set(prediction.conversions_range)
        counts[key] = f"{min(values)} to {max(values)}" if len(values) > 1 and None not in values else values.pop()
    return counts


_MEANS = {"fused": "one layer with the convolution and activation", "apart": "a layer of its own"}


def remarks(prediction: Prediction) -> list[str]:
    """What has to be known beside the verdict, one paragraph each: what is assumed, and what cannot be counted."""
    return [*_assumptions(prediction), *_weak(prediction)]


def _assumptions(prediction: Prediction) -> list[str]:
    """One paragraph for each: what decides, what each choice gives, and what is counted."""
    lines = []
    for a in prediction.assumptions:
        places = _count(len(a.places), "residual Add")
        where = f" ({a.places[0]} first)" if len(a.places) > 1 else f" ({a.places[0]})" if a.places else ""
        s = prediction.summary()
        numbers = {a.value: (s["int8_to_int8"], s["conversions"])}
        numbers |= {name: (c.int8_to_int8, c.conversions) for name, c in a.alternatives.items()}
        each = " ".join(
            f"{value.capitalize()}, {_MEANS[value]}: {inside} INT8 to INT8, {_count(conversions, 'conversion')}."
            for value, (inside, conversions) in sorted(numbers.items())
        )
        other = next(iter(a.alternatives))
        counted = f"Counted as {a.value}: {a.why}."
        counted += "" if a.given else f" --assume {a.name}={other} shows the other in full."
        lines.append(
            f"{a.name}: reports differ on what TensorRT makes of {places} behind an activation{where}, and the timing "
            f"of its kernels may decide. {each} {counted}"
        )
    return lines


def _way(way: Way, target: str, width: int) -> list[str]:
    """How to build it."""
    return [
        f"To build it with {way.title}",
        *wrap(f"flags: {way.flags(target)}", 4, width, "  - "), *wrap(f"log: {way.log}", 4, width, "  - "),
        *wrap(f"note: {way.care}", 4, width, "  - "), *wrap(f"source: {way.source}", 4, width, "  - "),
    ]


def _outside(prediction: Prediction) -> str:
    """What has to be known before the numbers: they do not cover FP8 and INT4."""
    types = sorted({str(r.precision) for r in prediction.refusals if isinstance(r, OutsideRules)})
    if not types and all(f.code != "FP8-OUTSIDE" for f in prediction.findings):
        return ""
    return f"{' and '.join(types) or 'FP8'} Q/DQ is outside the rules of this prediction, and counted as float; "


def render(
    prediction: Prediction, width: int = 80, *, everything: bool = False, layers: bool = False, trace: bool = False,
    time: TimeEstimate | None = None, way: Way | None = None,
) -> str:
    """The whole answer.

    Args:
        prediction: What to show.
        width: Columns.
        everything: Show every convolution and every finding in full.
        layers: List the engine's layers.
        trace: List TensorRT's own log lines.
        time: How long it takes on a GPU.
        way: How it is to be built.
    """
    lines = wrap(verdict(prediction), 2, width, "")
    if time is not None:
        from qdqtool.render.time_text import decision_lines, detail_lines, summary_lines

        decision = decision_lines(time, prediction, width)
        lines = [*decision, *([""] if decision else []), *lines, *summary_lines(time, width)]
    lines += [line for text in _assumptions(prediction) for line in wrap(text, 2, width)]
    lines += _header(prediction, width)
    if way is not None:
        lines += ["", *_way(way, prediction.target, width)]
    if time is not None:
        lines += detail_lines(time, prediction, width, everything=everything)
    lines += _findings(prediction, width, everything)
    lines += _unexplained(prediction, width)
    if everything:
        lines += ["", "Every convolution", *_table(prediction.convolutions, prediction.findings, width)]
    if layers:
        lines += ["", f"Engine layers ({len(prediction.layers)})", *_layers(prediction.layers)]
    if trace:
        from qdqtool.trt.trace import render as line_of

        lines += ["", f"TensorRT's optimizer log ({len(prediction.trace)} lines)"]
        lines += [line_of(event) for event in prediction.trace]
    return as_text(lines)


def _header(prediction: Prediction, width: int) -> list[str]:
    proof = f": {prediction.target_evidence}" if prediction.target_evidence else ""
    lines = wrap(f"target {prediction.target}{proof}", 2, width)
    return lines + [line for text in _weak(prediction) for line in wrap(text, 2, width)]


def _weak(prediction: Prediction) -> list[str]:
    """What the outcomes rest on where that is an assumption, and what is not counted."""
    lines = []
    weak = [c for c in prediction.convolutions if c.evidence == "assumed"]
    if weak and len(weak) < len(prediction.convolutions):
        lines.append(f"{len(weak)} of {len(prediction.convolutions)} outcomes rest on a rule that is assumed, not seen "
                     f"({weak[0].name} first)")
    if prediction.conversions is None and prediction.convolutions:
        lines.append("this target quantizes inside its kernels: there are no conversion layers to count")
    return lines


def _findings(prediction: Prediction, width: int, everything: bool) -> list[str]:
    lines: list[str] = []
    notes: list[list[Finding]] = []
    ledger: list[Finding] = []
    products = {c.name for c in prediction.convolutions if c.is_product}
    for same in _grouped(prediction.findings):
        if same[0].code in _LEDGER:
            ledger += same
        elif same[0].severity == Severity.INFO and not everything:
            notes.append(same)
        else:
            lines += ["", *_group(same, products, width, everything)]
    if ledger:
        lines += ["", *_conversions(ledger, width, everything)]
    if notes:
        nothing = any(same[0].code in _NOTHING for same in _grouped(prediction.findings))
        shown = [n for n in notes if n[0].code not in _EVERYWHERE and not (nothing and n[0].code == "NOT-QUANTIZED")]
        hidden = [same[0].code for same in notes if same not in shown]
        more = f"; {', '.join(hidden)} only there" if hidden else ""
        title = f"Notes (--all shows them in full{more})" if shown else f"Notes with --all: {', '.join(hidden)}"
        lines += ["", *wrap(title, 2, width, "")]
        for same in shown:
            lines += _note(same, width)
    return lines


# Notes that repeat on every network: shown with --all alone.
_EVERYWHERE = ("FLAG-FP16", "HEAD-SCORE")


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """The findings of each code."""
    return [list(group) for _, group in itertools.groupby(_by_code(findings), key=lambda f: f.code)]


def _by_code(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with those of one code together, in the order in which each code first comes."""
    first: dict[tuple[str, Severity], int] = {}
    ordered = list(findings)
    for position, finding in enumerate(ordered):
        first.setdefault((finding.code, finding.severity), position)
    return sorted(ordered, key=lambda f: first[f.code, f.severity])


def _group(same: list[Finding], products: set[str], width: int, everything: bool) -> list[str]:
    head = same[0]
    title = title_of(head.code)
    concerned = list(dict.fromkeys(n for f in same for n in f.convolutions))
    facts = [_count(len(same), "place")] if len(same) > 1 else []
    if len(concerned) > 1:
        inside = sum(name in products for name in concerned)
        facts.append(layers_counted(len(concerned) - inside, inside))
    facts.append(str(head.evidence))
    lines = wrap(f"{title} [{', '.join(facts)}]", 4, width, f"{_MARK[head.severity]} {head.code}: ")
    shown = same if everything else same[:_SHOWN]
    fixes = {f.fix for f in same}
    for finding in shown:
        lines += wrap(finding.message, 4, width, "  - ")
        if len(fixes) > 1 and finding.fix:
            lines += wrap(finding.fix, 6, width, "    > ")
    rest = same[len(shown):]
    if rest:
        lines += wrap(f"and {len(rest)} more: {_names([f.node for f in rest], counted=False)}", 4, width)
    if len(fixes) == 1 and head.fix:
        lines += wrap(head.fix, 4, width, "  > ")
    if head.automatic:
        lines += wrap(f"qdqtool fix --only {head.code} tries that.", 4, width, "  > ")
    return lines


def _conversions(ledger: list[Finding], width: int, everything: bool) -> list[str]:
    lines = [f"Conversions that stay at run time ({len(ledger)})"]
    shown = ledger if everything else ledger[:_LISTED]
    for finding in shown:
        size = f" [{_amount(finding.values)}]" if finding.values else ""
        lines += wrap(finding.message + size, 4, width, "  - ")
    if len(ledger) > len(shown):
        lines.append(f"    and {len(ledger) - len(shown)} more (--all)")
    return lines


def _note(same: list[Finding], width: int) -> list[str]:
    head = same[0]
    if len(same) == 1:
        return wrap(f"{head.code}: {head.message}", 4, width, "  - ")
    title = title_of(head.code)
    return wrap(f"{head.code}: {title}: {_names([f.node for f in same])}", 4, width, "  - ")


def _unexplained(prediction: Prediction, width: int) -> list[str]:
    """Convolutions that are not INT8 to INT8 and that no finding names: never silently left out."""
    if prediction.conversions is None:
        left = [c for c in prediction.convolutions if not c.is_int8 and not c.findings]
    else:
        left = [c for c in prediction.convolutions if not c.int8_in_int8_out and not c.findings]
    if not left:
        return []
    return ["", "Not INT8 to INT8, for a reason not known", *_table(left, prediction.findings, width)]


def _table(convolutions: Iterable[ConvOutcome], findings: list[Finding], width: int) -> list[str]:
    """One row for each: types, name, what it takes in, and the codes of its errors and warnings."""
    rows = list(convolutions)
    signatures = [f"{' + '.join(c.inputs)} -> {c.output}" for c in rows]
    wide = max((len(s) for s in signatures), default=0)
    lines = []
    for conv, signature in zip(rows, signatures, strict=True):
        concerned = [findings[i] for i in conv.findings if i < len(findings)]
        serious = dict.fromkeys(f.code for f in concerned if f.severity != Severity.INFO)
        text = conv.name
        text += f"  + {', '.join(conv.fused)}" if conv.fused else ""
        text += f"  [{', '.join(serious)}]" if serious else ""
        text += "  (assumed)" if conv.evidence == "assumed" else ""
        lines += wrap(text, wide + 6, width, f"  {signature:<{wide}}  ")
    return lines


def _layers(layers: Iterable[EngineLayer]) -> list[str]:
    lines = []
    for layer in layers:
        inputs = ", ".join(str(t.precision) for t in layer.inputs) or "-"
        outputs = ", ".join(str(t.precision) for t in layer.outputs) or "-"
        for change in layer.layouts:
            lines.append(f"  Reformat: {change['from']} -> {change['to']}  {change['tensor']}")
        lines.append(f"  {layer.type}: {inputs} -> {outputs}  {layer.name}")
    return lines


def _names(items: list[str], limit: int = 3, counted: bool = True) -> str:
    unique = [i for i in dict.fromkeys(items) if i]
    text = ", ".join(unique[:limit])
    return text if len(unique) <= limit else f"{text}, ..." + f" ({len(unique)} in all)" * counted


def _count(number: int | str | None, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _amount(values: int) -> str:
    """A number of tensor elements: ``34.2 M values``."""
    for size, unit in ((1_000_000, " M"), (1_000, " k")):
        if values >= size:
            return f"{values / size:.1f}{unit} values"
    return f"{values} values"

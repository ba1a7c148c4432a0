"""Puts static checks and the reasons of the simulation together, orders and numbers the findings."""

from __future__ import annotations

from collections import defaultdict

from qdqtool.advice import causes, conversions, inputs, refusals, static, structure
from qdqtool.advice.report import Report
from qdqtool.graph import Model, Node
from qdqtool.onnxgraph.view import View
from qdqtool.types import ConvOutcome, Finding, Prediction, Refusal, Severity

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)


def collect(model: Model, prediction: Prediction) -> list[Finding]:
    """See :func:`qdqtool.advice.advise`."""
    view = View(model, prediction.target)
    report = Report(prediction.target)
    static.run(view, report)
    if prediction.conversions is None and prediction.findings:
        findings = _ordered([*prediction.findings, *_beside(prediction.findings, report.findings)])
        _number(findings, prediction)
        return findings
    outcomes = {c.index: c for c in prediction.convolutions}
    quantized = {i for i, c in outcomes.items() if c.is_int8}
    structure.run(view, report, quantized)
    by_node: dict[str, list[Refusal]] = defaultdict(list)
    for refusal in prediction.refusals:
        by_node[refusal.node].append(refusal)
    for conv in view.weighted:
        outcome = outcomes.get(conv.index)
        if outcome is None:
            continue
        if not outcome.is_int8:
            inputs.explain(view, report, conv)
        elif not outcome.int8_in_int8_out and prediction.conversions is not None:
            cause = causes.of_convolution(view, conv)
            if cause.code == "CONVERSION":  # nothing in the graph says why: the pass that refused does
                told = refusals.reason(by_node.get(conv.name, ()), conv.name)
                message = f"{conv.name} writes float" + (f" ({told})." if told else ", for a reason not known.")
                cause = causes.Cause("OUT-FLOAT", conv.name, message, values=cause.values)
            report.add(
                cause.code, cause.node, cause.message, cause.fix, [conv.name, *cause.convolutions], cause.values,
                joined=cause.code == "SKIP-FLOAT",
            )

    _without_reason(report, prediction, by_node)

    def outcome_of(node: Node) -> ConvOutcome | None:
        return outcomes.get(node.index)

    made_of = {layer.name: layer.nodes[-1] for layer in prediction.layers if layer.nodes}
    conversions.explain(view, report, prediction.conversion_nodes, outcome_of, made_of)
    findings = _ordered(report.findings)
    _number(findings, prediction)
    return findings


def _without_reason(report: Report, prediction: Prediction, refused: dict[str, list[Refusal]]) -> None:
    """A finding for each float convolution that no check explains, with what the passes said."""
    named = {n for f in report.findings for n in f.convolutions}
    for outcome in prediction.convolutions:
        if not outcome.is_int8 and outcome.name not in named:
            told = refusals.reason(refused.get(outcome.name, ()), outcome.name)
            report.add(
                "FLOAT-OTHER", outcome.name,
                f"{outcome.name} runs in float" + (f" ({told})." if told else "; no pass says why."),
                convolutions=[outcome.name],
            )


def _beside(simulated: list[Finding], found: list[Finding]) -> list[Finding]:
    """What the model alone shows and the simulation did not say: it knows faults and reasons of its target better."""
    known = {f.code for f in simulated}
    return [f for f in found if f.severity != Severity.ERROR and f.code not in known]


def _ordered(findings: list[Finding]) -> list[Finding]:
    """Errors first; within a severity the code that costs most first, and in it the widest tensor first."""
    total: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    first: dict[str, int] = {}
    for position, finding in enumerate(findings):
        total[finding.code] += finding.values or 0
        count[finding.code] += 1
        first.setdefault(finding.code, position)
    return sorted(
        findings,
        key=lambda f: (
            _ORDER.index(f.severity), -total[f.code], -count[f.code], first[f.code], -(f.values or 0)
        ),
    )


def _number(findings: list[Finding], prediction: Prediction) -> None:
    by_name: dict[str, ConvOutcome] = {c.name: c for c in prediction.convolutions}
    for outcome in prediction.convolutions:
        outcome.findings.clear()
    for number, finding in enumerate(findings):
        finding.id = number
        if finding.node in by_name and finding.node not in finding.convolutions:
            finding.convolutions.append(finding.node)
        for name in finding.convolutions:
            concerned = by_name.get(name)
            if concerned is not None:
                concerned.findings.append(number)

"""Findings made from what the simulator refused: nothing is looked up in the model again."""

from __future__ import annotations

from qdqtool.explain import conversions, inputs, outputs, scales
from qdqtool.explain.cause import Cause, Known
from qdqtool.explain.report import Report
from qdqtool.explain.words import scale_words
from qdqtool.finding_codes import FindingCode
from qdqtool.trt.refusals import ConcatScales, OutsideRules, ResidualBothQuantized, Stays, WeightsShared
from qdqtool.types import ConvOutcome, Prediction

# Faults that the lint tells at their quantizer, with more of its numbers.
_OF_LINT: frozenset[FindingCode] = frozenset({
    "ACT-PER-CHANNEL", "CT-AXIS", "CT3D-FLOAT", "FLOAT-MIXED", "FP8-OUTSIDE", "QTYPE", "SCALE-DYNAMIC", "W-AXIS",
    "W-NO-DQ", "W-NONCONST", "ZP-NONZERO",
})


def explain(prediction: Prediction, report: Report) -> None:
    """Adds a finding for every float convolution, every float output and every conversion.

    Args:
        prediction: Its convolutions and refusals are read; its findings are not.
        report: Where findings go; those of the lint are there already, so that texts can refer to them.
    """
    known = Known(prediction, report)
    _both_quantized(known)
    for outcome in prediction.convolutions:
        if outcome.int8_in_int8_out:
            continue
        cause = _cause(known, outcome)
        if cause is not None and not (cause.code in _OF_LINT and report.names(cause.code, outcome.name)):
            known.add(cause, (outcome.name,))
    for shared in known.every(WeightsShared):
        if not (report.names("W-SHARED", shared.node) or report.names("W-Q-OUTPUT", shared.node)):
            known.add(inputs.explain(known, shared))
    for stays in known.every(Stays):
        conversions.explain(known, stays)
    for parts in known.every(ConcatScales):
        if not report.has("CONCAT-SCALE", parts.node):
            known.add(scales.of_concat(parts))


def _cause(known: Known, outcome: ConvOutcome) -> Cause | None:
    refused = known.at(outcome.name)
    if outcome.is_int8:
        output = outputs.deciding(refused)
        return outputs.explain(known, output) if output is not None else None
    found = inputs.deciding(refused)
    if found is None and known.first(OutsideRules, outcome.name) is None:
        output = outputs.deciding(refused)
        return outputs.explain(known, output) if output is not None else None
    return inputs.explain(known, found) if found is not None else None


def _both_quantized(known: Known) -> None:
    """A pair on the convolution's side of a residual Add, where the Add could have joined the convolution."""
    for r in known.every(ResidualBothQuantized):
        outcome = known.outcomes.get(r.node)
        if outcome is None or not outcome.is_int8:
            continue
        told = " and ".join(scale_words(s) for s in r.scales)
        known.add(Cause(
            "ADD-BOTH", r.add,
            f"{r.add} has Q/DQ on both inputs (scales {told}): {r.node} takes {r.quantizer}, so the Add is a layer of "
            "its own.",
            f"Remove {r.quantizer} and its DequantizeLinear.", r.elements, (r.node,),
        ))

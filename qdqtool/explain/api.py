"""Findings made from what the simulator refused: nothing is looked up in the model again."""

from __future__ import annotations

from qdqtool.explain import inputs, outputs
from qdqtool.explain.report import Diagnosis, Known, Report
from qdqtool.trt.faults import TakenByMyelin
from qdqtool.trt.refusals import (
    ConcatScales,
    OutsideRules,
    ResidualBothQuantized,
    Stays,
    WeightsShared,
)
from qdqtool.types import Cause, ConvOutcome, Evidence, Prediction


def explain(prediction: Prediction, report: Report) -> None:
    """Adds a finding for every float convolution, every float output and every conversion.

    Args:
        prediction: Its convolutions and refusals are read; its findings are not.
        report: Where findings go; those of the lint are there already, so that others can refer to them, and a fault
            that it found at its quantizer is not reported again at the convolution.
    """
    known = Known(prediction, report)
    for both in known.every(ResidualBothQuantized):
        outcome = known.outcomes.get(both.node)
        if outcome is not None and outcome.is_int8:
            known.add(Diagnosis("ADD-BOTH", both.add, Cause(both), both.elements, (both.node,)))
    for outcome in prediction.convolutions:
        if outcome.int8_in_int8_out:
            continue
        found = _diagnosis(known, outcome)
        if found is None:
            continue
        place = report.place(found.code, outcome.name)  # of a fault that the check of the model found
        if place is None:
            known.add(found, (outcome.name,))
        else:
            known.explain(outcome.name, (found.code, place))
    for shared in known.every(WeightsShared):
        if report.place("W-SHARED", shared.node) is None and report.place("W-Q-OUTPUT", shared.node) is None:
            known.add(inputs.diagnose(known, shared))
    for stays in known.every(Stays):
        outputs.explain(known, stays)
    for parts in known.every(ConcatScales):
        if not report.has("CONCAT-SCALE", parts.node):
            known.add(outputs.of_concat(parts))


def name_regions(prediction: Prediction, report: Report) -> None:
    """Names regions of Myelin with attention or normalizations; one of other products is counted and needs no word."""
    for region in prediction.regions:
        if region.norms or (region.softmaxes and region.products):
            sure = not (region.uncertain or region.possible)
            report.add("MYELIN-REGION", TakenByMyelin(
                "MyelinRegions", region.nodes[0], region.nodes[-1], len(region.nodes), region.products,
                region.int8_products, region.softmaxes, region.norms, len(region.fused), region.uncertain,
                len(region.possible),
            ), evidence=Evidence.SEEN if sure else Evidence.ASSUMED)  # fmt: skip


def _diagnosis(known: Known, outcome: ConvOutcome) -> Diagnosis | None:
    refused = known.at(outcome.name)
    if not outcome.is_int8:
        found = inputs.deciding(refused)
        if found is not None:
            return inputs.diagnose(known, found)
        if known.first(OutsideRules, outcome.name) is not None:
            return None
    output = outputs.deciding(refused)
    return outputs.diagnose(known, output) if output is not None else None

"""Findings made from what the simulator refused: nothing is looked up in the model again."""

from __future__ import annotations

from qdqtool.findings import outputs
from qdqtool.findings.report import Diagnosis, Known, Report
from qdqtool.findings.rules import finding_codes
from qdqtool.reasons import simulation
from qdqtool.reasons.faults import FusedByMyelin
from qdqtool.types import Cause, Evidence, FindingCode, Prediction, Refusal
from qdqtool.util.records import nearest

FAULTS: dict[type[Refusal], tuple[FindingCode, ...]] = {
    **dict.fromkeys(
        (
            simulation.FloatTypesDiffer,
            simulation.Deconvolution3D,
            simulation.ScaleComputed,
            simulation.ActivationPerChannel,
            simulation.NonzeroZeroPoint,
        ),
        (),
    ),
    simulation.OutsideRules: ("FP8-OUTSIDE",),
    simulation.TypesDiffer: ("QTYPE", "FP8-OUTSIDE"),
    simulation.WeightsAxis: (
        "OPSET-AXIS",
        "SCALE-COUNT",
        "SCALE-RANK",
        "W-NONCONST",
        "WEIGHT-INDIRECT",
    ),
    simulation.WeightsNotConstant: ("WEIGHT-INDIRECT",),
}
"""What keeps a layer from INT8 and is a fault of the model, also where no layer reads it: the checks report it, and the
layer's refusal makes no finding of its own. With it the codes of what they may come to first.
"""
_FAULTY = tuple(FAULTS)


def explain(prediction: Prediction, report: Report) -> None:
    """Adds a finding for every float convolution, every float output and every conversion of a prediction.

    Findings of the lint are in the report already, so that others can refer to them.
    """
    known = Known(prediction, report)
    for both in known.every(simulation.ResidualBothQuantized):
        outcome = known.outcomes.get(both.node)
        if outcome is not None and outcome.is_int8:
            known.add(Diagnosis(both.add, Cause(both), both.elements, (both.node,)))
    for pair in known.every(simulation.InsideActivation):
        size = pair.elements.values if pair.elements is not None else None
        report.add(pair, convolutions=[pair.convolution], values=size)
    for pad in known.every(simulation.BehindPad):
        report.add(pad, convolutions=[pad.node])
    for outcome in prediction.convolutions:
        if outcome.int8_in_int8_out:
            continue
        refused = known.at(outcome.name)
        fault = (
            None
            if outcome.is_int8
            else next((type(r) for r in refused if isinstance(r, _FAULTY)), None)
        )
        if fault is not None:
            known.refer(outcome.name, (*finding_codes(fault), *(nearest(FAULTS, fault) or ())))
            continue
        found = None if outcome.is_int8 else outputs.of_inputs(known, refused)
        found = found or outputs.diagnose(known, refused)
        if found is not None:
            known.add(found, (outcome.name,))
    for stays in known.every(simulation.RemainingConversion):
        outputs.explain(known, stays)
    for parts in known.every(simulation.ConcatScales):
        known.add(
            Diagnosis(parts.node, Cause(parts), parts.elements)
        )  # where no convolution pays for it


def name_regions(prediction: Prediction, report: Report) -> None:
    """Names regions of Myelin with attention or normalizations; one of other products is counted and needs no word."""
    for region in prediction.regions:
        if region.norms or (region.softmaxes and region.products):
            sure = not (region.uncertain or region.possible)
            report.add(
                FusedByMyelin(
                    "MyelinRegions",
                    region.nodes[0],
                    region.nodes[-1],
                    len(region.nodes),
                    region.products,
                    region.int8_products,
                    region.softmaxes,
                    region.norms,
                    len(region.fused),
                    region.uncertain,
                    len(region.possible),
                ),
                evidence=Evidence.SEEN if sure else Evidence.ASSUMED,
            )

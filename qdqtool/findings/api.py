"""Create findings from the reasons that the simulation recorded."""

from __future__ import annotations

from qdqtool.evidence import Evidence
from qdqtool.findings.diagnosis import diagnose_inputs, diagnose_output, report_conversion
from qdqtool.findings.report import Diagnosis, FindingReport, RecordedReasons
from qdqtool.findings.rules import finding_codes
from qdqtool.reasons.attention import MyelinCompiledRegion
from qdqtool.reasons.conversions import RemainingConversion
from qdqtool.reasons.convolutions import Deconvolution3D
from qdqtool.reasons.finding import Cause, FindingCode, Reason
from qdqtool.reasons.float_types import FloatTypesDiffer
from qdqtool.reasons.fusions import QuantizerAfterPad, QuantizerInsideActivation, StemBeforePool
from qdqtool.reasons.inputs import OperandTypesDiffer
from qdqtool.reasons.quantizers import NonzeroZeroPoint, UncoveredOperandType
from qdqtool.reasons.residuals import ResidualBothQuantized
from qdqtool.reasons.scales import ActivationPerChannel, ConcatScales, ScaleComputed
from qdqtool.reasons.weights import WeightsAxis, WeightsNotConstant
from qdqtool.trt.result import ConvOutcome, MyelinRegion, Prediction
from qdqtool.util.records import find_by_class

MODEL_FAULTS: dict[type[Reason], tuple[FindingCode, ...]] = {
    FloatTypesDiffer: (),
    Deconvolution3D: (),
    ScaleComputed: (),
    ActivationPerChannel: (),
    NonzeroZeroPoint: (),
    UncoveredOperandType: ("FP8-OUTSIDE",),
    OperandTypesDiffer: ("QTYPE", "FP8-OUTSIDE"),
    WeightsAxis: (
        "OPSET-AXIS",
        "SCALE-COUNT",
        "SCALE-RANK",
        "W-NONCONST",
        "WEIGHT-INDIRECT",
    ),
    WeightsNotConstant: ("WEIGHT-INDIRECT",),
}
"""Reasons that are faults of the model, with other finding codes under which checks report them.

The checks of the model report these faults at the quantizer. The convolutions that read the
quantizer therefore get no finding of their own.
"""


def _explain_residuals(recorded: RecordedReasons) -> None:
    for residual in recorded.reasons_of_kind(ResidualBothQuantized):
        outcome = recorded.outcomes.get(residual.node)
        if outcome is not None and outcome.is_quantized:
            recorded.add(
                Diagnosis(residual.add, Cause(residual), residual.elements, (residual.node,))
            )


def explain_prediction(prediction: Prediction, report: FindingReport) -> None:
    """Add findings on float convolutions, float outputs, misplaced pairs and conversions.

    Args:
        prediction: The prediction.
        report: Report to which findings are added. It must have the findings of the checks already,
            because further findings refer to them.
    """
    recorded = RecordedReasons(prediction, report)
    _explain_residuals(recorded)
    for pair in recorded.reasons_of_kind(QuantizerInsideActivation):
        size = pair.elements.values if pair.elements is not None else None
        report.add(pair, convolutions=[pair.convolution], values=size)
    for stem in recorded.reasons_of_kind(StemBeforePool):
        report.add(stem, convolutions=[stem.node])
    for pad in recorded.reasons_of_kind(QuantizerAfterPad):
        report.add(pad, convolutions=[pad.node])
    for outcome in prediction.convolutions:
        if not outcome.quantized_in_quantized_out:
            _explain_convolution(recorded, outcome)
    for conversion in recorded.reasons_of_kind(RemainingConversion):
        report_conversion(recorded, conversion)
    # Concats with different scales that no finding on a convolution has reported yet.
    conversions = recorded.reasons_of_kind(RemainingConversion)
    converted = {step.node for conversion in conversions for step in conversion.path}
    for concat in recorded.reasons_of_kind(ConcatScales):
        gains = concat.node in converted
        recorded.add(Diagnosis(concat.node, Cause(concat), concat.elements, gains=gains))


def _explain_convolution(recorded: RecordedReasons, outcome: ConvOutcome) -> None:
    reasons = recorded.reasons_at(outcome.name)
    diagnosis = None
    if not outcome.is_quantized:
        for reason in reasons:
            if isinstance(reason, tuple(MODEL_FAULTS)):
                kind = type(reason)
                codes = (*finding_codes(kind), *(find_by_class(MODEL_FAULTS, kind) or ()))
                recorded.explain_by_codes(outcome.name, codes)
                return
        diagnosis = diagnose_inputs(recorded, reasons)
    diagnosis = diagnosis or diagnose_output(recorded, reasons)
    if diagnosis is not None:
        recorded.add(diagnosis, (outcome.name,))


def report_regions(prediction: Prediction, report: FindingReport) -> None:
    """Report regions of Myelin with attention or normalizations.

    Other regions are in the prediction too, but they get no finding.
    """
    for region in prediction.regions:
        if region.norms or (region.softmaxes and region.products):
            is_certain = not (region.uncertain or region.possible)
            evidence = Evidence.SEEN if is_certain else Evidence.ASSUMED
            report.add(_describe_region(region), evidence=evidence)


def _describe_region(region: MyelinRegion) -> MyelinCompiledRegion:
    return MyelinCompiledRegion(
        "MyelinRegions",
        region.nodes[0],
        region.nodes[-1],
        len(region.nodes),
        region.products,
        region.int8_products,
        region.fp8_products,
        region.softmaxes,
        region.norms,
        len(region.fused),
        region.uncertain,
        len(region.possible),
    )

"""Findings made from what TensorRT-RTX refuses or computes in float."""

from __future__ import annotations

from qdqtool.explain.report import Report
from qdqtool.rtx.operands import CompilerFault, Fault, IntegersLost, Why, ends_build
from qdqtool.trt import faults as lint
from qdqtool.trt import refusals as trt
from qdqtool.types import FindingCode, Prediction, Refusal

_LOST: dict[Why, FindingCode] = {
    Why.POOL: "POOL-MIXED", Why.JOIN_SCALE: "CONCAT-SCALE",
    Why.INPUT_AXIS: "ACT-PER-CHANNEL", Why.INPUT_SHAPE1: "SCALE-SHAPE1", Why.WEIGHTS_AXIS: "W-AXIS",
    Why.TYPES: "QTYPE", Why.TURING: "FLOAT-SM75",
}
_AT_NODE = (Why.OPERATOR, Why.SHARED, Why.POOL, Why.JOIN_FLOAT, Why.JOIN_SCALE, Why.PAD)  # reported there
_FAULTS: dict[Fault, FindingCode] = {
    Fault.CONSTANT_TYPE: "QTYPE", Fault.UINT8_INPUT: "ZP-UINT8", Fault.SCALE: "BUILD-CRASHES",
    Fault.BLOCKS: "SCALE-RANK", Fault.ZERO_POINT: "ZP-NONZERO", Fault.HALF_SHAPE1: "SCALE-SHAPE1",
    Fault.HARDWARE_TYPE: "QTYPE",
}
_OTHERS: dict[type[Refusal], FindingCode] = {
    trt.WeightsNotDequantized: "W-NO-DQ", lint.DeconvolutionFloat: "CT-FLOAT", lint.IntegerOperator: "QOPERATOR",
    lint.StoredReadElsewhere: "WEIGHT-INDIRECT", lint.BiasQuantized: "BIAS-DQ", lint.ScaleCount: "SCALE-COUNT",
    lint.ScaleNotPositive: "SCALE-NONPOS", lint.ScaleRank: "SCALE-RANK", trt.NonzeroZeroPoint: "ZP-NONZERO",
}


def code_of(r: Refusal) -> FindingCode:
    """The finding code of a refusal of TensorRT-RTX."""
    if isinstance(r, CompilerFault):
        return _FAULTS.get(r.fault, "BUILD-FAILS")
    if isinstance(r, trt.InputNotDequantized):
        return "IN-FLOAT" if r.weights_quantized else "NOT-QUANTIZED"
    if isinstance(r, IntegersLost):
        code = _LOST.get(r.why, "IN-BLOCKED")
        if r.why in (Why.AXIS, Why.SUM_AXIS):
            return "W-AXIS" if r.weights else "ACT-PER-CHANNEL"
        return "W-NO-DQ" if r.weights and code == "IN-BLOCKED" else code
    return _OTHERS[type(r)]


def explain(prediction: Prediction, report: Report) -> None:
    """Adds a finding for every refusal of a prediction for TensorRT-RTX."""
    convolutions = {c.name for c in prediction.convolutions}
    for r in prediction.refusals:
        at = r.at.node if isinstance(r, IntegersLost) and r.at is not None and r.why in _AT_NODE else r.node
        concerned = [r.node] if r.node in convolutions else []
        report.add(code_of(r), r, at, concerned, joined=isinstance(r, CompilerFault), fatal=ends_build(r))

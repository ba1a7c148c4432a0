"""Findings made from what TensorRT-RTX refuses or computes in float."""

from __future__ import annotations

from qdqtool.explain.report import Report
from qdqtool.model import qdq
from qdqtool.model.graph import Node
from qdqtool.model.view import View
from qdqtool.trt import faults as lint
from qdqtool.trt import refusals as trt
from qdqtool.trt.rtx.operands import CompilerFault, Fault, IntegersLost, Why, ends_build
from qdqtool.types import FindingCode, Prediction, Refusal

_LOST: dict[Why, FindingCode] = {
    Why.POOL: "POOL-MIXED", Why.JOIN_SCALE: "CONCAT-SCALE",
    Why.INPUT_AXIS: "ACT-PER-CHANNEL", Why.INPUT_SHAPE1: "SCALE-SHAPE1", Why.WEIGHTS_AXIS: "W-AXIS",
    Why.TYPES: "QTYPE", Why.TURING: "FLOAT-SM75",
}
_AT_NODE = (Why.OPERATOR, Why.SHARED, Why.POOL, Why.JOIN_FLOAT, Why.JOIN_SCALE, Why.PAD)  # reported there
_FAULTS: dict[Fault, FindingCode] = {
    Fault.CONSTANT_TYPE: "QTYPE", Fault.SCALE: "BUILD-CRASHES", Fault.BLOCKS: "SCALE-RANK",
    Fault.ZERO_POINT: "ZP-NONZERO", Fault.HARDWARE_TYPE: "QTYPE",
}
_OTHERS: dict[type[Refusal], FindingCode] = {
    trt.WeightsNotDequantized: "W-NO-DQ", lint.DeconvolutionFloat: "CT-FLOAT", lint.IntegerOperator: "QOPERATOR",
    lint.StoredReadElsewhere: "WEIGHT-INDIRECT", lint.BiasQuantized: "BIAS-DQ", lint.ScaleCount: "SCALE-COUNT",
    lint.ScaleNotPositive: "SCALE-NONPOS", lint.ScaleRank: "SCALE-RANK", trt.NonzeroZeroPoint: "ZP-NONZERO",
    lint.ZeroPointCount: "ZP-VOLUME",
}
_BY_SIDE: tuple[FindingCode, ...] = ("BUILD-FAILS", "IN-FLOAT", "IN-BLOCKED", "NOT-QUANTIZED", "W-NO-DQ")
CODES = frozenset((*_LOST.values(), *_FAULTS.values(), *_OTHERS.values(), *_BY_SIDE))
"""The codes that say what the compiler does; what the model alone shows has others there."""
_OF_PAIR = ("ACT-PER-CHANNEL", "SCALE-SHAPE1")  # what a pair's scale costs all that read it


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


def explain(prediction: Prediction, report: Report, view: View) -> None:
    """Adds a finding for every refusal of a prediction for TensorRT-RTX; what is wrong with a pair is told once."""
    convolutions = {c.name for c in prediction.convolutions}
    for r in prediction.refusals:
        code = code_of(r)
        lost = r if isinstance(r, IntegersLost) else None
        quantizer = _quantizer(view, lost.dq if lost is not None and code in _OF_PAIR else r.node)
        at = r.node if quantizer is None else quantizer.name
        if lost is not None and lost.at is not None and lost.why in _AT_NODE:
            at = lost.at.node
        concerned = [r.node] if r.node in convolutions or quantizer is None else view.convolutions_behind(quantizer)
        joined = code in _OF_PAIR or (ends_build(r) and code != "QTYPE")
        report.add(code, r, at, [c for c in concerned if c in convolutions], joined=joined, fatal=ends_build(r))


def _quantizer(view: View, name: str) -> Node | None:
    """The quantizer of that name, or that reads the tensor of that name; of a pair its Q. None where there is none."""
    try:
        node: Node | None = view.model.node(name)
    except KeyError:
        node = next(filter(qdq.is_qdq, view.model.readers(name)), None)
    if node is None or not qdq.is_qdq(node):
        return None
    q = view.model.producer(node.input(0)) if qdq.is_dq(node) else None
    return q if q is not None and qdq.is_q(q) else node

"""Findings made from what TensorRT-RTX refuses or computes in float."""

from __future__ import annotations

from qdqtool.findings.report import Report
from qdqtool.findings.rules import finding_code, finding_codes
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.patterns.view import View
from qdqtool.reasons import faults, simulation
from qdqtool.reasons.compiler import (
    CompilerFault,
    IntegersLost,
    LossCause,
    ScalesJoined,
    ends_build,
)
from qdqtool.types import Prediction, Refusal

REFUSALS: tuple[type[Refusal], ...] = (
    IntegersLost,
    ScalesJoined,
    CompilerFault,
    simulation.InputNotDequantized,
    simulation.WeightsNotDequantized,
    simulation.NonzeroZeroPoint,
    faults.FloatDeconvolution,
    faults.IntegerOperator,
    faults.MisreadConstant,
    faults.BiasQuantized,
    faults.ScaleCount,
    faults.ScaleNotPositive,
    faults.ScaleRank,
    faults.ZeroPointCount,
)
_AT_NODE = (
    LossCause.OPERATOR,
    LossCause.SHARED,
    LossCause.POOL,
    LossCause.JOIN_FLOAT,
    LossCause.JOIN_SCALE,
    LossCause.PAD,
)  # reported there
CODES = frozenset(code for kind in REFUSALS for code in finding_codes(kind))
"""The codes that say what the compiler does; what the model alone shows has others there."""
_OF_PAIR = ("ACT-PER-CHANNEL", "SCALE-SHAPE1")  # what a pair's scale costs all that read it


def explain(prediction: Prediction, report: Report, view: View) -> None:
    """Adds a finding for every refusal of a prediction for TensorRT-RTX; what is wrong with a pair is told once."""
    convolutions = {c.name for c in prediction.convolutions}
    for r in prediction.refusals:
        code = finding_code(r)
        lost = r if isinstance(r, IntegersLost) else None
        quantizer = _quantizer(view, lost.dq if lost is not None and code in _OF_PAIR else r.node)
        at = r.node if quantizer is None else quantizer.name
        if lost is not None and lost.step is not None and lost.why in _AT_NODE:
            at = lost.step.node
        concerned = (
            [r.node]
            if r.node in convolutions or quantizer is None
            else view.consuming_convolutions(quantizer)
        )
        joined = code in _OF_PAIR or (ends_build(r) and code != "QTYPE")
        report.add(
            r, at, [c for c in concerned if c in convolutions], joined=joined, fatal=ends_build(r)
        )


def _quantizer(view: View, name: str) -> Node | None:
    """The quantizer of that name, or that reads the tensor of that name; of a pair its Q. None where there is none."""
    try:
        node: Node | None = view.model.node(name)
    except KeyError:
        node = next(filter(qdq.is_qdq, view.model.consumers(name)), None)
    if node is None or not qdq.is_qdq(node):
        return None
    q = view.model.producer(node.input(0)) if qdq.is_dq(node) else None
    return q if q is not None and qdq.is_q(q) else node

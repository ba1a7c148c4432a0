"""Findings on models that TensorRT-RTX rejects or runs in float."""

from __future__ import annotations

from qdqtool.findings.report import FindingReport
from qdqtool.findings.rules import finding_code, finding_codes
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.patterns.view import View
from qdqtool.reasons import fp8
from qdqtool.reasons.compiler import (
    CompilerFault,
    IntegersLost,
    IntegersLostAtJoin,
    LossCause,
    is_build_failure,
)
from qdqtool.reasons.convolutions import FloatDeconvolution
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.reasons.operators import IntegerOperator
from qdqtool.reasons.quantizers import NonzeroZeroPoint, ZeroPointCount
from qdqtool.reasons.scales import ScaleCount, ScaleNotPositive, ScaleRank
from qdqtool.reasons.weights import BiasQuantized, MisreadConstant, WeightsNotDequantized
from qdqtool.trt.result import Prediction

REASONS: tuple[type[Reason], ...] = (
    IntegersLost,
    IntegersLostAtJoin,
    CompilerFault,
    InputNotDequantized,
    WeightsNotDequantized,
    NonzeroZeroPoint,
    fp8.LargeFp8Kernel,
    fp8.FloatFp8Column,
    fp8.NonzeroFp8ZeroPoint,
    FloatDeconvolution,
    IntegerOperator,
    MisreadConstant,
    BiasQuantized,
    ScaleCount,
    ScaleNotPositive,
    ScaleRank,
    ZeroPointCount,
)
_NODE_CAUSES = (  # causes that are reported at the node whose output becomes float
    LossCause.OPERATOR,
    LossCause.SHARED,
    LossCause.POOL,
    LossCause.FP8_POOL,
    LossCause.JOIN_FLOAT,
    LossCause.JOIN_SCALE,
    LossCause.PAD,
)
CODES = frozenset(code for kind in REASONS for code in finding_codes(kind))
"""Codes that :func:`explain_compiler` reports. The checks of the model do not report them."""
_PAIR_CODES = ("ACT-PER-CHANNEL", "SCALE-SHAPE1")  # faults of a Q/DQ pair, for all its consumers


def explain_compiler(prediction: Prediction, report: FindingReport, view: View) -> None:
    """Add a finding for each reason of a prediction for TensorRT-RTX.

    A fault of a Q/DQ pair is reported once for all convolutions that read the pair.
    """
    convolutions = {c.name for c in prediction.convolutions}
    for reason in prediction.refusals:
        code = finding_code(reason)
        is_pair_fault = code in _PAIR_CODES
        name = reason.dq if is_pair_fault and isinstance(reason, IntegersLost) else reason.node
        quantizer = _find_quantizer(view, name)
        affected = [reason.node]
        if quantizer is not None and reason.node not in convolutions:
            affected = view.consuming_convolutions(quantizer)
        is_fatal = is_build_failure(reason)
        # The build succeeds, but the network computes wrong results.
        is_wrong_result = isinstance(reason, fp8.NonzeroFp8ZeroPoint)
        is_joined = is_pair_fault or (is_fatal and code != "QTYPE")
        report.add(
            reason,
            _locate_fault(reason, quantizer),
            [c for c in affected if c in convolutions],
            joined=is_joined,
            fatal=None if is_wrong_result else is_fatal,
        )


def _locate_fault(reason: Reason, quantizer: Node | None) -> str:
    """Return the node to name in the finding of a reason.

    This is the node that prevents the use of the DQ's integers, if such a node is the cause, else
    the quantizer, else the reason's node.
    """
    if isinstance(reason, IntegersLost) and reason.step is not None and reason.why in _NODE_CAUSES:
        return reason.step.node
    return reason.node if quantizer is None else quantizer.name


def _find_quantizer(view: View, name: str) -> Node | None:
    """Return the quantizer with a node name, else the first one that reads the tensor `name`.

    If it is a DQ after a Q, the Q is returned. None without such a quantizer.
    """
    node = view.model.find_node(name) or next(filter(qdq.is_qdq, view.model.consumers(name)), None)
    if node is None or not qdq.is_qdq(node):
        return None
    return qdq.find_first_quantizer(view.model, node)

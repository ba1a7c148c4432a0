"""Why a convolution runs in float, from the refusal of the pass that would have quantized it."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.explain.report import Diagnosis, Known
from qdqtool.trt.refusals import (
    ActivationPerChannel,
    Deconvolution3D,
    FloatTypesDiffer,
    InMyelin,
    InputNotDequantized,
    ManyConsumers,
    NonzeroZeroPoint,
    OutsideRules,
    ScaleComputed,
    TypesDiffer,
    WeightsAxis,
    WeightsNotConstant,
    WeightsNotDequantized,
)
from qdqtool.types import Cause, FindingCode, Refusal

FAULTS: dict[type[Refusal], tuple[FindingCode, ...]] = {
    OutsideRules: ("FP8-OUTSIDE",),
    TypesDiffer: ("QTYPE", "FP8-OUTSIDE"),
    FloatTypesDiffer: ("FLOAT-MIXED",),
    Deconvolution3D: ("CT3D-FLOAT",),
    ScaleComputed: ("SCALE-DYNAMIC",),
    ActivationPerChannel: ("ACT-PER-CHANNEL",),
    NonzeroZeroPoint: ("ZP-NONZERO",),
    WeightsAxis: ("W-AXIS", "CT-AXIS", "OPSET-AXIS", "SCALE-COUNT", "SCALE-RANK", "W-NONCONST"),
    WeightsNotConstant: ("W-NONCONST", "WEIGHT-INDIRECT"),
}
"""What keeps a layer from INT8 and is a fault of the model, also where no layer reads it: the checks find it, under one
of these codes, and the layer's refusal makes no finding of its own.
"""


def diagnose(known: Known, refusals: Sequence[Refusal]) -> Diagnosis | None:
    """The diagnosis of what keeps a layer from INT8; None where nothing does."""
    for r in refusals:
        if isinstance(r, InputNotDequantized):
            return _not_dequantized(known, r)
        if isinstance(r, InMyelin):
            code: FindingCode = "FLOAT-OTHER" if r.data_quantized and r.weights_quantized else "NOT-QUANTIZED"
            return Diagnosis(code, r.node, Cause(r), None, (r.node,))
        if isinstance(r, WeightsNotDequantized):
            return Diagnosis("W-NO-DQ", r.node, Cause(r), r.elements, (r.node,))
    return None


def _not_dequantized(known: Known, r: InputNotDequantized) -> Diagnosis:
    code: FindingCode = "IN-FLOAT"
    shared = known.first(ManyConsumers, r.dq) if r.dq and r.weights_quantized else None
    if not r.weights_quantized:
        code = "NOT-QUANTIZED"
    elif r.dq:
        code = "IN-BLOCKED"
    return Diagnosis(code, r.node, Cause(r, () if shared is None else (shared,)), r.elements, (r.node,))

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
    WeightsShared,
)
from qdqtool.types import Cause, FindingCode, Precision, Refusal

INPUT: dict[type[Refusal], FindingCode] = {
    OutsideRules: "FP8-OUTSIDE",
    InMyelin: "NOT-QUANTIZED",
    TypesDiffer: "QTYPE",
    FloatTypesDiffer: "FLOAT-MIXED",
    Deconvolution3D: "CT3D-FLOAT",
    ScaleComputed: "SCALE-DYNAMIC",
    ActivationPerChannel: "ACT-PER-CHANNEL",
    NonzeroZeroPoint: "ZP-NONZERO",
    WeightsAxis: "W-AXIS",
    WeightsNotConstant: "W-NONCONST",
    WeightsNotDequantized: "W-NO-DQ",
    InputNotDequantized: "IN-FLOAT",
    WeightsShared: "W-SHARED",
}
"""The refusals that keep a layer from INT8, the one that decides first, and what they become as a rule."""


def deciding(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that explains a float convolution: what keeps it from INT8 before what comes of that."""
    return next((r for kind in INPUT for r in refusals if type(r) is kind), None)


def diagnose(known: Known, r: Refusal) -> Diagnosis:
    """The diagnosis of a deciding refusal."""
    code, node = INPUT[type(r)], r.node
    convolutions: tuple[str, ...] = (r.node,)
    size = getattr(r, "elements", None)
    if isinstance(r, InputNotDequantized):
        return _not_dequantized(known, r)
    if isinstance(r, InMyelin):
        code = "FLOAT-OTHER" if r.data_quantized and r.weights_quantized else code
    elif isinstance(r, TypesDiffer) and (Precision.FP8 in r.types or Precision.INT4 in r.types):
        code, node = "FP8-OUTSIDE", ""
    elif isinstance(r, OutsideRules):
        node = ""  # one finding for the model
    elif isinstance(r, ScaleComputed):
        node = r.quantizer
    elif isinstance(r, ActivationPerChannel | NonzeroZeroPoint):
        node = r.dq
    elif isinstance(r, WeightsAxis):
        code = "CT-AXIS" if r.transposed else code
    elif isinstance(r, WeightsShared):
        node, convolutions = r.weight, r.convolutions
    return Diagnosis(code, node, Cause(r), size, convolutions)


def _not_dequantized(known: Known, r: InputNotDequantized) -> Diagnosis:
    code: FindingCode = "IN-FLOAT"
    shared = known.first(ManyConsumers, r.dq) if r.dq and r.weights_quantized else None
    if not r.weights_quantized:
        code = "NOT-QUANTIZED"
    elif r.dq:
        code = "IN-BLOCKED"
    return Diagnosis(code, r.node, Cause(r, () if shared is None else (shared,)), r.elements, (r.node,))

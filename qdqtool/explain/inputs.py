"""Why a convolution runs in float, from the refusal of the pass that would have quantized it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qdqtool.explain.cause import Cause, Known
from qdqtool.explain.words import names, node_words
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
from qdqtool.types import Precision, Refusal


def deciding(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that explains a float convolution: what keeps it from INT8 before what comes of that."""
    return next((r for kind in INPUT for r in refusals if type(r) is kind), None)


def explain(known: Known, refusal: Refusal) -> Cause:
    """The cause of a deciding refusal."""
    cause: Cause = INPUT[type(refusal)](known, refusal)
    return cause


def _not_dequantized(known: Known, r: InputNotDequantized) -> Cause:
    if r.dq and not r.weights_quantized:
        message = f"{r.node} has no Q/DQ on its weights and runs in float."
        return Cause("NOT-QUANTIZED", r.node, message, size=r.elements, convolutions=(r.node,))
    shared = known.first(ManyConsumers, r.dq) if r.dq else None
    if shared is not None:
        past = "" if r.blocker is None else f" past {r.blocker.node} ({r.blocker.op})"
        message = (
            f"{r.node} runs in float: {r.dq} has {len(shared.readers)} readers, and only a DQ with a single one moves "
            f"down{past}."
        )
        return Cause(
            "IN-BLOCKED", r.node, message, f"Give {r.node} a DequantizeLinear of its own, behind the same "
            "QuantizeLinear.", r.elements, (r.node,),
        )  # fmt: skip
    if r.dq:
        fix = f"Quantize '{r.tensor}', directly in front of {r.node}."
        what = f"past {r.blocker.node} ({r.blocker.op}) to it" if r.blocker is not None else (
            f"to it: it has other readers, and stays in front of {node_words(r.producer, r.op)}"
        )
        message = f"{r.node} runs in float: {r.dq} cannot move down {what}."
        return Cause("IN-BLOCKED", r.node, message, fix, r.elements, (r.node,))
    if not r.weights_quantized:
        message = f"{r.node} has no Q/DQ and runs in float."
        return Cause("NOT-QUANTIZED", r.node, message, size=r.elements, convolutions=(r.node,))
    return Cause(
        "IN-FLOAT", r.node, f"{r.node} runs in float: its weights are quantized, its input '{r.tensor}' is not.",
        f"Put Q/DQ on '{r.tensor}' (its scale needs calibration).", r.elements, (r.node,),
    )


def _weights_not_dequantized(known: Known, r: WeightsNotDequantized) -> Cause:
    return Cause(
        "W-NO-DQ", r.node,
        f"{r.node}: its input is quantized ({r.dq}), its weights '{r.weight}' are not, so it runs in float.",
        size=r.elements, convolutions=(r.node,),
    )


def _weights_not_constant(known: Known, r: WeightsNotConstant) -> Cause:
    message = f"{r.node}: its weights '{r.weight}' are computed at run time, so it runs in float."
    return Cause("W-NONCONST", r.node, message, convolutions=(r.node,))


def _scale_computed(known: Known, r: ScaleComputed) -> Cause:
    message = f"{r.node} runs in float: the scale of {r.quantizer} is computed at run time."
    return Cause("SCALE-DYNAMIC", r.quantizer, message, convolutions=(r.node,))


def _types(known: Known, r: TypesDiffer) -> Cause:
    outside = next((t for t in r.types if t in (Precision.FP8, Precision.INT4)), None)
    if outside is not None:
        return _outside(known, OutsideRules(r.pass_name, r.node, r.dq, outside))
    return Cause(
        "QTYPE", r.node,
        f"{r.node} runs in float: its data is {r.types[0]} ({r.dq}) and its weights are {r.types[1]} ({r.weight_dq}), "
        "which cannot be multiplied.",
        "Quantize both to int8.", convolutions=(r.node,),
    )


def _floats(known: Known, r: FloatTypesDiffer) -> Cause:
    return Cause(
        "FLOAT-MIXED", r.node,
        f"{r.node}: its data comes from {r.dq} as {r.floats[0]}, its weights from {r.weight_dq} as {r.floats[1]}.",
        convolutions=(r.node,),
    )


def _three_dimensions(known: Known, r: Deconvolution3D) -> Cause:
    return Cause(
        "CT3D-FLOAT", r.node, f"{r.node} is a quantized 3D ConvTranspose without an activation and a Q behind it.",
        size=r.elements, convolutions=(r.node,),
    )


def _outside(known: Known, r: OutsideRules) -> Cause:
    return Cause(
        "FP8-OUTSIDE", "",  # one finding for the model, which the lint has made
        f"{r.node} reads {r.precision} from {r.dq}: the rules of INT8's Q/DQ passes say nothing about that.",
        convolutions=(r.node,),
    )


def _per_channel(known: Known, r: ActivationPerChannel) -> Cause:
    shape = f", of shape {list(r.scales)}" if r.scales else ""
    return Cause(
        "ACT-PER-CHANNEL", r.dq, f"{r.node} runs in float: its input has one scale for each channel ({r.dq}{shape}).",
        convolutions=(r.node,),
    )


def _zero_point(known: Known, r: NonzeroZeroPoint) -> Cause:
    message = f"{r.node}: {r.dq} has zero point {r.zero_point}; TensorRT wants 0."
    return Cause("ZP-NONZERO", r.dq, message, convolutions=(r.node,))


def _axis(known: Known, r: WeightsAxis) -> Cause:
    outcome = known.outcomes.get(r.node)
    transposed = outcome is not None and outcome.op == "ConvTranspose"
    return Cause(
        "CT-AXIS" if transposed else "W-AXIS", r.node,
        f"{r.node}: {r.dq} works along axis {r.axis} of the weights; the output channels are axis {r.expected}.",
        convolutions=(r.node,),
    )


def _shared(known: Known, r: WeightsShared) -> Cause:
    return Cause(
        "W-SHARED", r.weight, f"weights '{r.weight}' are shared by {names(r.convolutions)}; TensorRT folds them into "
        "one.", convolutions=r.convolutions,
    )


def _myelin(known: Known, r: InMyelin) -> Cause:
    where = f"goes to Myelin with {node_words(r.trigger.node, r.trigger.op)}"
    if r.data_quantized and r.weights_quantized:
        return Cause(
            "FLOAT-OTHER", r.node, f"{r.node} {where}; what its Q/DQ come to there is not known, and it is counted as "
            "float.", "Measure it, or leave it float.", convolutions=(r.node,),
        )
    missing = "no Q/DQ" if not (r.data_quantized or r.weights_quantized) else (
        "no Q/DQ on its weights" if r.data_quantized else "no Q/DQ on its input"
    )
    return Cause("NOT-QUANTIZED", r.node, f"{r.node} {where}, has {missing} and runs in float.", convolutions=(r.node,))


INPUT: dict[type[Refusal], Callable[[Known, Any], Cause]] = {
    OutsideRules: _outside,
    InMyelin: _myelin,
    TypesDiffer: _types,
    FloatTypesDiffer: _floats,
    Deconvolution3D: _three_dimensions,
    ScaleComputed: _scale_computed,
    ActivationPerChannel: _per_channel,
    NonzeroZeroPoint: _zero_point,
    WeightsAxis: _axis,
    WeightsNotConstant: _weights_not_constant,
    WeightsNotDequantized: _weights_not_dequantized,
    InputNotDequantized: _not_dequantized,
    WeightsShared: _shared,
}
"""The refusals that keep a layer from INT8."""


"""Messages of findings from the simulation: a pass inspected a node and did not apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdqtool.findings.coded import (
    ScalesAround,
    before_norm,
    crossed,
    crossed_by,
    float_sum,
    left_float,
    shared_pool,
    with_own,
)
from qdqtool.findings.messages import (
    Words,
    floats_of,
    known_scale,
    names,
    node_words,
    origin_words,
    others_words,
    quantizers_of,
    reader_names,
    readers_words,
    says,
    scale_words,
    size_words,
    step_words,
    unified,
    words,
)
from qdqtool.findings.outputs import behind_pool
from qdqtool.ir.operators import JOINS
from qdqtool.ir.qdq import PerChannel
from qdqtool.trt import refusals as trt
from qdqtool.trt.refusals import ConsumerKind, Scale, TensorConsumer
from qdqtool.types import Cause, Finding, Precision, Refusal

# Inputs ---------------------------------------------------------------------------------------------------------


@words(trt.InputNotDequantized)
def _not_dequantized(finding: Finding, cause: Cause, r: trt.InputNotDequantized) -> Words | str:
    if not r.weights_quantized:
        return f"{r.node} has no Q/DQ{' on its weights' if r.dq else ''} and runs in float."
    if not r.dq:
        return (
            f"{r.node} runs in float: its weights are quantized, its input '{r.tensor}' is not.",
            f"Put Q/DQ on '{r.tensor}' (its scale needs calibration).",
        )
    shared = next((a for a in cause.also if isinstance(a, trt.ManyConsumers)), None)
    if shared is not None:
        past = "" if r.blocker is None else f" past {r.blocker.node} ({r.blocker.op})"
        return (
            f"{r.node} runs in float: {r.dq} has {len(shared.readers)} consumers, and only a DQ with a single one "
            f"moves down{past}.",
            f"Give {r.node} its own DequantizeLinear, after the same QuantizeLinear.",
        )
    where = (
        f"past {r.blocker.node} ({r.blocker.op}) to it"
        if r.blocker is not None
        else (f"to it: it has other consumers, and remains before {node_words(r.producer, r.op)}")
    )
    return (
        f"{r.node} runs in float: {r.dq} cannot move down {where}.",
        f"Quantize '{r.tensor}', directly before {r.node}.",
    )


says(
    trt.WeightsNotDequantized,
    lambda r: (
        f"{r.node}: its input is quantized{f' ({r.dq})' if r.dq else ''}, but its weights '{r.weight}' are not, so it runs "
        "in float."
    ),
)
says(
    trt.WeightsNotConstant,
    lambda r: (
        f"{r.node}: its weights '{r.weight}' are "
        f"{'stored as a sparse tensor (store them in full)' if r.sparse else 'computed at run time'}, so it runs in "
        "float."
    ),
)
says(
    trt.ScaleComputed,
    lambda r: (
        f"{r.quantizer}: its scale "
        + (f"'{r.tensor}' " if r.tensor else "")
        + "is computed at run time."
    ),
)
says(
    trt.FloatTypesDiffer,
    lambda r: f"{r.node}: its data is {r.floats[0]}, its weights are {r.floats[1]}.",
)
says(
    trt.Deconvolution3D,
    lambda r: (
        f"{r.node} is a quantized 3D ConvTranspose: INT8 is predicted only if an activation and a Q follow it."
    ),
)
says(
    trt.NonzeroZeroPoint,
    lambda r: (
        f"{r.dq} has {'uint8 ' if r.unsigned else ''}zero point {' to '.join(map(str, dict.fromkeys(r.zero_points)))}; "
        "TensorRT requires 0."
    ),
)
says(
    trt.WeightsShared,
    lambda r: (
        f"weights '{r.weight}' are shared by {names(r.convolutions, more=r.more)}; TensorRT folds them into one."
    ),
)


@words(trt.ActivationPerChannel)
def _per_channel(finding: Finding, cause: Cause, r: trt.ActivationPerChannel) -> str:
    count = r.scales.count if isinstance(r.scales, PerChannel) else int(r.scales is not None)
    scales = f"{count} scales, {scale_words(r.scales)}" if count else "one scale per channel"
    return f"{r.dq} quantizes an activation per channel ({scales})."


@words(trt.WeightsAxis)
def _axis(finding: Finding, cause: Cause, r: trt.WeightsAxis) -> Words | str:
    shape = f" {list(r.shape)}" if r.shape else ""
    if r.transposed:
        return (
            f"{r.node}: {r.dq} has several scales along axis {r.axis} of the weights{shape}: no version is known to "
            "compute per-channel scales of a ConvTranspose correctly.",
            "Use one scale, the largest, for all its weights.",
        )
    written = "" if r.written else " (not stated: the default is 1 in ONNX, 0 in TensorRT 8 and 9)"
    return (
        f"{r.node}: {r.dq} uses axis {r.axis}{written} of the weights{shape}; the output channels are axis "
        f"{r.expected}."
    )


@words(trt.InMyelin)
def _myelin(finding: Finding, cause: Cause, r: trt.InMyelin) -> Words | str:
    where = f"is compiled by Myelin together with {step_words(r.trigger)}"
    missing = (
        "no Q/DQ"
        if not (r.data_quantized or r.weights_quantized)
        else ("no Q/DQ on its weights" if r.data_quantized else "no Q/DQ on its input")
    )
    return f"{r.node} {where}, has {missing} and runs in float."


# Outputs --------------------------------------------------------------------------------------------------------


def _writes(refusal: Any) -> str:
    return f"{refusal.node} writes float{size_words(refusal.elements)}"


says(
    trt.BatchNormNotConstant,
    lambda r: (
        f"{r.node} writes float because {r.batchnorm} after it remains a separate layer: its parameters are not plain "
        "constants."
    ),
)
says(
    trt.ConvTransposeBatchNorm,
    lambda r: (
        f"{r.node}: {r.batchnorm} after it is not folded, so its output stays float{size_words(r.elements)}.",
        f"Fold {r.batchnorm} into the weights of {r.node} before quantizing.",
    ),
)
says(
    trt.OutputScale,
    lambda r: (
        f"{r.node} writes float: "
        + (
            f"the scale of {r.quantizer} after it is computed at run time."
            if r.computed
            else f"{r.quantizer} after it has one scale per channel."
        ),
        f"Give {r.quantizer} one constant scale for the whole tensor.",
    ),
)


@words(trt.OutputDifferentScales)
def _different(finding: Finding, cause: Cause, r: trt.OutputDifferentScales) -> Words:
    writes = (
        _writes(r) if r.node in finding.convolutions else f"'{r.tensor}' is converted once for each"
    )
    return _scales(cause, r.tensor, r.readers, writes)


@words(trt.OutputManyConsumers)
def _many(finding: Finding, cause: Cause, r: trt.OutputManyConsumers) -> Words:
    quantized, floats = quantizers_of(r.readers), floats_of(r.readers)
    add, pool = float_sum(r), shared_pool(r)
    if pool is not None:
        return (
            f"{_writes(r)} because {pool.node} ({pool.op}) is consumed in INT8 by {names(reader_names(quantized))} and "
            f"as float by {names(reader_names(floats))}{others_words(r.readers)}: no Q can move up past it.",
            _skip_fix(add.node, f"the result of {pool.node}", behind_pool(r))
            if add is not None
            else "",
        )
    if add is not None:
        return (
            f"{_writes(r)} because {add.node} reads it as float (its residual input has no Q/DQ), in addition to "
            f"{names(reader_names(quantized))}{others_words(r.readers)}.",
            _skip_fix(add.node, f"'{r.tensor}'", quantized),
        )
    readers = list(dict.fromkeys(reader_names(floats)))
    return (
        f"{_writes(r)} because {names(readers)} {'reads' if len(readers) == 1 else 'read'} it as float, in addition to "
        f"{names(reader_names(quantized))}{others_words(r.readers)}.",
        f"Quantize the float consumer too, with scale {scale_words(quantized[0].scale)}."
        if finding.gains
        else "No action needed: INT8 gains nothing for this consumer.",
    )


@words(trt.OutputNotQuantized)
def _not_quantized(finding: Finding, cause: Cause, r: trt.OutputNotQuantized) -> Words | str:
    quantized = quantizers_of(r.readers)
    if finding.code == "POOL-FLOAT":
        if cause.also and isinstance(cause.also[0], trt.ReduceNotPooling):
            return f"{_writes(r)} because {_reduction(cause.also[0])}", _REDUCTION
        one = cause.also[0] if cause.also else None
        behind = quantizers_of(one.readers) if isinstance(one, trt.PoolingOneSide) else []
        why = (
            f"only its output is quantized ({behind[0].node})" if behind else "it is not quantized"
        )
        return f"{_writes(r)} because {finding.node} runs in float: {why}."
    if before_norm(r) and r.node in finding.convolutions:
        norm = r.readers[0]
        return (
            f"{_writes(r)}: {norm.node} ({norm.op}) reads it as float.",
            f"Put Q/DQ before {norm.node}: {r.node} then writes INT8 with faster kernels (ModelOpt pull request "
            "1117). The normalization itself is computed in float either way.",
        )
    if quantized:
        past = names(step_words(s) for s in quantized[0].path)
        return f"{_writes(r)}: {quantized[0].node} remains after {past or 'it'} and cannot move up."
    readers = readers_words(r.readers)
    if finding.code == "SILU-NO-Q-AFTER":
        return f"{_writes(r)} after SiLU: {readers}."
    outputs = all(x.kind == ConsumerKind.OUTPUT for x in r.readers)
    return f"{_writes(r)}: {readers}{' (left float)' if r.readers and left_float(r) and not outputs else ''}."


# Residual Adds --------------------------------------------------------------------------------------------------


@words(trt.ResidualFloat)
def _residual_float(finding: Finding, cause: Cause, r: trt.ResidualFloat) -> Words:
    origin = origin_words(r.residual, r.tensor)
    how = (
        f"{r.add} is fused into it and reads {origin} as float"
        if cause.fused
        else (f"{r.add} adds it to {origin}, both as float")
    )
    fix = _skip_fix(r.add, f"'{r.tensor}'", r.quantizers)
    others = [x for x in r.readers if x.kind in (ConsumerKind.OP, ConsumerKind.OUTPUT)]
    if others:  # a quantized skip alone would then only add a DQ that remains (resnet18-a100-qat-residual, last block)
        fix += f" This helps only if the result of {r.add} is quantized as well: {readers_words(others)}."
    return f"{_writes(r)} because {how}.", fix


def _skip_fix(add: str, what: str, quantizers: Sequence[TensorConsumer]) -> str:
    q = known_scale(quantizers)
    if q is None:
        return f"Put Q/DQ on {what} before {add}; its scale needs calibration."
    return (
        f"Connect {add} to the DequantizeLinear of {q.node} (scale {scale_words(q.scale)}) instead of {what}: no new "
        "scale is needed."
    )


says(
    trt.ResidualBothQuantized,
    lambda r: (
        f"{r.add} has Q/DQ on both inputs (scales {' and '.join(map(scale_words, r.scales))}): "
        f"{r.quantizer} is fused into {r.node}, so the Add is a separate layer.",
        f"Remove {r.quantizer} and its DequantizeLinear.",
    ),
)


@words(trt.AddOutputNotQuantized)
def _add_output(finding: Finding, cause: Cause, r: trt.AddOutputNotQuantized) -> Words:
    readers, residual = readers_words(r.readers), r.residual.node
    if r.node == r.add:
        return (
            f"{r.add} runs in float{size_words(r.elements)}: its inputs are quantized, but {readers}.",
            f"Quantize the result of {r.add}, or remove the pairs before it.",
        )
    return (
        f"{r.node} reads and writes float{size_words(r.elements)} at {r.add}: its residual is quantized ({residual}), "
        f"but {readers}.",
        f"Quantize the result of {r.add}, or remove the pair of {residual} before the Add.",
    )


@words(trt.ActivationBeforeAdd)
def _activation(finding: Finding, cause: Cause, r: trt.ActivationBeforeAdd) -> str:
    other = ""
    if r.residual is not None:
        state = "is quantized" if r.residual.quantizer else "is not quantized either"
        other = f", whose other input, {origin_words(r.residual)}, {state}"
    return f"{_writes(r)}: {r.activation} is between it and {r.add}{other}."


says(
    trt.ActivationJoined,
    lambda r: (
        f"{_writes(r)}: the nodes after it ({names(r.pointwise)}) are one pointwise kernel, which also reads "
        f"{names(map(origin_words, r.others))} and is not fused into a convolution."
    ),
)


says(
    trt.InsideActivation,
    lambda r: (
        f"{r.node} is between {r.activation} and the Mul of {r.convolution}'s SiLU."
        if r.gate
        else f"{r.node} is between {r.convolution} and {'SiLU' if r.silu else r.activation or 'its activation'}."
    ),
)
says(trt.BehindPad, lambda r: f"a Q/DQ pair is between {r.pad} and {r.node}.")


# Averages -------------------------------------------------------------------------------------------------------

_REDUCTION = (
    "Use GlobalAveragePool and Flatten instead (the same result), with Q/DQ before and after it, or remove the pair "
    "before it."
)


def _reduction(r: trt.ReduceNotPooling) -> str:
    return (
        f"{r.node} (ReduceMean) runs in float: TensorRT converts it to a pooling only over height and width with "
        "keepdims=1."
    )


says(trt.ReduceNotPooling, lambda r: (_reduction(r), _REDUCTION))


@words(trt.PoolingOneSide)
def _one_side(finding: Finding, cause: Cause, r: trt.PoolingOneSide) -> str:
    behind = quantizers_of(r.readers)
    if r.quantized_input:
        why = (
            f"{behind[0].node} is not its only consumer"
            if behind
            else "no QuantizeLinear is after it"
        )
        return f"{r.node} runs in float: {r.origin.node} is before it, but {why}."
    return f"{r.node} runs in float: {names(reader_names(behind))} is after it, but no DequantizeLinear is before it."


# Scales ---------------------------------------------------------------------------------------------------------


says(trt.ConcatScales, lambda r: _parts(r, "each input with another scale is converted", ()))

_PARTS = 12  # named in a sentence


def _parts(r: trt.ConcatScales, consequence: str, own: Sequence[Scale]) -> Words:
    parts = ["none" if p is None else scale_words(p) for p in r.parts]
    listed = ", ".join(parts[:_PARTS]) + ", ..." * (len(parts) > _PARTS)
    return (
        f"{r.node} has inputs with scales {listed}, and its output has scale {scale_words(r.behind)}; {consequence}.",
        unified([*r.parts, r.behind, *own]),
    )


def _scales(
    cause: Cause, tensor: str, readers: Sequence[TensorConsumer], consequence: str
) -> Words:
    quantizers = quantizers_of(readers)
    own = [q.scale for q in quantizers]
    if cause.also and isinstance(cause.also[0], trt.ConcatScales):
        return _parts(cause.also[0], consequence, own)
    if len({s for s in own if s is not None}) < 2:
        return (
            f"{consequence}: {names(reader_names(quantizers))} quantize it{others_words(readers)}, and their scales "
            "are not available to compare.",
            "",
        )
    listed = names(
        (f"{scale_words(q.scale)} ({q.node})" for q in quantizers), _PARTS
    ) + others_words(readers)
    between = crossed_by(readers)
    where = (
        f"scales {listed} on '{tensor}'"
        if between is None
        else (f"{between.node} ({between.op}) is between scales {listed}")
    )
    return f"{where}; {consequence}.", unified(own)


# Conversions ----------------------------------------------------------------------------------------------------


@words(trt.RemainingConversion)
def _stays(finding: Finding, cause: Cause, r: trt.RemainingConversion) -> str:
    scale = scale_words(r.scale)
    if finding.code == "INPUT-CONVERSION":
        return f"{r.name} converts the network's input '{r.origin.tensor}' to {r.precision} (scale {scale})."
    assumed = (
        " This is assumed: if the attention becomes one kernel, the conversion is part of it."
        if r.attention
        else ""
    )
    return f"{r.name} (scale {scale}) remains as a conversion: {_why(cause, r)}.{assumed}"


@words(ScalesAround)
def _around(finding: Finding, cause: Cause, r: ScalesAround) -> Words | str:
    if not r.requantizes:
        return _scales(
            cause, r.origin.tensor, r.siblings, f"'{r.origin.tensor}' is converted once for each"
        )
    before, scale = scale_words(r.first_scale), scale_words(r.scale)
    if finding.code == "DOUBLE-QDQ":
        return f"scales {before} ({r.pair}) and {scale} ({r.node}): INT8 is converted to INT8."
    own = with_own(r)
    if finding.code == "CONCAT-SCALE" and (
        cause.also or len({q.scale for q in own if q.scale is not None}) > 1
    ):
        return _scales(cause, r.tensor, own, f"{r.node} requantizes")
    between = crossed(r.passed)
    where = "" if between is None else f"{between.node} ({between.op}) is between "
    return (
        f"{where}scales {before} ({r.pair}) and {scale} ({r.node}): INT8 is converted to INT8.",
        unified([r.first_scale, r.scale]),
    )


def _why(cause: Cause, r: trt.RemainingConversion) -> str:
    """Return why a conversion remains: a related finding, a refusal, or the node that cannot absorb it."""
    origin = r.origin
    if r.precision not in (Precision.INT8, Precision.INT32) and origin.node:
        return f"{r.precision} is not covered by the prediction"
    if cause.see:
        return "see " + ", and ".join(f"{code} at {node}" for code, node in cause.see)
    if not r.quantize:
        who = names(
            "the network's output" if x.kind == ConsumerKind.OUTPUT else x.node for x in r.behind
        )
        return f"{who or 'its consumer'} cannot absorb it"
    if cause.also:
        return _blocked(r, cause.also[0])
    if origin.int8:
        return f"{node_words(origin.node, origin.op)} runs in INT8 but cannot absorb it"
    joined = " joins several tensors and" if origin.op in JOINS else ""
    return f"{origin.node} ({origin.op}){joined} runs in float"


def _blocked(r: trt.RemainingConversion, refusal: Refusal) -> str:
    if isinstance(refusal, trt.OutputScale):
        return f"{r.origin.node} cannot use its scale"
    if isinstance(refusal, trt.NotCommuting):
        return f"a Q cannot move up past {node_words(refusal.node, refusal.op)}"
    if isinstance(refusal, trt.ManyConsumers):
        floats = floats_of(refusal.readers)
        plain = all(x.kind != ConsumerKind.OUTPUT for x in floats)
        others = others_words(refusal.readers)
        who = (
            f", which {readers_words(floats, it='')}{others}"
            if plain
            else (f", which is also read by {names(reader_names(floats))}{others}")
        )
        return f"it cannot move up past {node_words(refusal.node, refusal.op)}{who}"
    if isinstance(refusal, trt.ConcatReadElsewhere):
        return (
            f"{refusal.node} (Concat) is also read as float by {names(reader_names(floats_of(refusal.readers)))}"
            f"{others_words(refusal.readers)}"
        )
    return f"{refusal.node} runs in float"

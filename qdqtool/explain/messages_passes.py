"""What findings say that come from the simulation: a pass looked at a node and did not fire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdqtool.explain.coded import (
    ScalesAround,
    before_norm,
    crossed,
    crossed_by,
    float_sum,
    left_float,
    shared_pool,
    with_own,
)
from qdqtool.explain.messages import (
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
from qdqtool.explain.outputs import behind_pool
from qdqtool.model.operators import JOINS
from qdqtool.model.qdq import PerChannel
from qdqtool.trt import refusals as trt
from qdqtool.trt.refusals import Reader, ReaderKind, Scale
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
            f"{r.node} runs in float: {r.dq} has {len(shared.readers)} readers, and only a DQ with a single one moves "
            f"down{past}.",
            f"Give {r.node} a DequantizeLinear of its own, behind the same QuantizeLinear.",
        )
    where = (
        f"past {r.blocker.node} ({r.blocker.op}) to it"
        if r.blocker is not None
        else (f"to it: it has other readers, and stays in front of {node_words(r.producer, r.op)}")
    )
    return (
        f"{r.node} runs in float: {r.dq} cannot move down {where}.",
        f"Quantize '{r.tensor}', directly in front of {r.node}.",
    )


says(
    trt.WeightsNotDequantized,
    lambda r: (
        f"{r.node}: its input is quantized{f' ({r.dq})' if r.dq else ''}, its weights '{r.weight}' are not, so it runs in "
        "float."
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
        f"{r.quantizer} takes its scale "
        + (f"'{r.tensor}' " if r.tensor else "")
        + "from the running network."
    ),
)
says(
    trt.FloatTypesDiffer,
    lambda r: f"{r.node}: its data is {r.floats[0]}, its weights are {r.floats[1]}.",
)
says(
    trt.Deconvolution3D,
    lambda r: (
        f"{r.node} is a quantized 3D ConvTranspose: it is taken to run in INT8 only where an activation and a Q are behind "
        "it."
    ),
)
says(
    trt.NonzeroZeroPoint,
    lambda r: (
        f"{r.dq} has {'uint8 ' if r.unsigned else ''}zero point {' to '.join(map(str, dict.fromkeys(r.zero_points)))}; "
        "TensorRT wants 0."
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
    scales = f"{count} scales, {scale_words(r.scales)}" if count else "one scale for each channel"
    return f"{r.dq} quantizes an activation per channel ({scales})."


@words(trt.WeightsAxis)
def _axis(finding: Finding, cause: Cause, r: trt.WeightsAxis) -> Words | str:
    shape = f" {list(r.shape)}" if r.shape else ""
    if r.transposed:
        return (
            f"{r.node}: {r.dq} has several scales along axis {r.axis} of the weights{shape}: no version is known to "
            "take scales for each channel of a ConvTranspose rightly.",
            "Use one scale for all its weights, the largest.",
        )
    written = "" if r.written else " (not written: ONNX means 1, TensorRT 8 and 9 take 0)"
    return (
        f"{r.node}: {r.dq} works along axis {r.axis}{written} of the weights{shape}; the output channels are axis "
        f"{r.expected}."
    )


@words(trt.InMyelin)
def _myelin(finding: Finding, cause: Cause, r: trt.InMyelin) -> Words | str:
    where = f"goes to Myelin with {step_words(r.trigger)}"
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
        f"{r.node} writes float because {r.batchnorm} behind it has parameters that are not plain constants and stays a "
        "layer of its own."
    ),
)
says(
    trt.ConvTransposeBatchNorm,
    lambda r: (
        f"{r.node}: {r.batchnorm} behind it is not folded, so its output stays float{size_words(r.elements)}.",
        f"Fold {r.batchnorm} into the weights of {r.node} before quantizing.",
    ),
)
says(
    trt.OutputScale,
    lambda r: (
        f"{r.node} writes float: "
        + (
            f"the scale of {r.quantizer} behind it is computed at run time."
            if r.computed
            else f"{r.quantizer} behind it has one scale for each channel."
        ),
        f"Give {r.quantizer} one scale for the whole tensor, known when the engine is built.",
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
            f"{_writes(r)} because {pool.node} ({pool.op}) is read by {names(reader_names(quantized))} in INT8 and by "
            f"{names(reader_names(floats))} as float{others_words(r.readers)}: no Q can move up past it.",
            _skip_fix(add.node, f"the result of {pool.node}", behind_pool(r))
            if add is not None
            else "",
        )
    if add is not None:
        return (
            f"{_writes(r)} because {add.node} reads it as float (its residual input has no Q/DQ), beside "
            f"{names(reader_names(quantized))}{others_words(r.readers)}.",
            _skip_fix(add.node, f"'{r.tensor}'", quantized),
        )
    readers = list(dict.fromkeys(reader_names(floats)))
    return (
        f"{_writes(r)} because {names(readers)} {'reads' if len(readers) == 1 else 'read'} it as float, beside "
        f"{names(reader_names(quantized))}{others_words(r.readers)}.",
        f"Quantize the float reader too with scale {scale_words(quantized[0].scale)}."
        if finding.gains
        else "No action needed: INT8 brings nothing to that reader.",
    )


@words(trt.OutputNotQuantized)
def _not_quantized(finding: Finding, cause: Cause, r: trt.OutputNotQuantized) -> Words | str:
    quantized = quantizers_of(r.readers)
    if finding.code == "POOL-FLOAT":
        if cause.also and isinstance(cause.also[0], trt.ReduceNotPooling):
            return f"{_writes(r)} because {_reduction(cause.also[0])}", _REDUCTION
        one = cause.also[0] if cause.also else None
        behind = quantizers_of(one.readers) if isinstance(one, trt.PoolingOneSide) else []
        why = f"only {behind[0].node} behind it is there" if behind else "nothing quantizes it"
        return f"{_writes(r)} because {finding.node} runs in float: {why}."
    if before_norm(r) and r.node in finding.convolutions:
        norm = r.readers[0]
        return (
            f"{_writes(r)}: {norm.node} ({norm.op}) reads it as float.",
            f"Put Q/DQ in front of {norm.node}: {r.node} then writes INT8, by faster kernels (ModelOpt pull request "
            "1117), and the normalization itself is computed in float either way.",
        )
    if quantized:
        past = names(step_words(s) for s in quantized[0].path)
        return f"{_writes(r)}: {quantized[0].node} stays behind {past or 'it'}, where it cannot move on."
    readers = readers_words(r.readers)
    if finding.code == "SILU-NO-Q-AFTER":
        return f"{_writes(r)} behind SiLU: {readers}."
    outputs = all(x.kind == ReaderKind.OUTPUT for x in r.readers)
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
    others = [x for x in r.readers if x.kind in (ReaderKind.OP, ReaderKind.OUTPUT)]
    if others:  # a quantized skip alone would then only add a DQ that stays (resnet18-a100-qat-residual, last block)
        fix += f" It helps only if {r.add}'s result is quantized as well: {readers_words(others)}."
    return f"{_writes(r)} because {how}.", fix


def _skip_fix(add: str, what: str, quantizers: Sequence[Reader]) -> str:
    q = known_scale(quantizers)
    if q is None:
        return f"Put Q/DQ on {what} in front of {add}; its scale needs calibration."
    return (
        f"Let {add} read {what} through {q.node} and its DequantizeLinear (scale {scale_words(q.scale)}): no new "
        "scale is needed."
    )


says(
    trt.ResidualBothQuantized,
    lambda r: (
        f"{r.add} has Q/DQ on both inputs (scales {' and '.join(map(scale_words, r.scales))}): {r.node} takes "
        f"{r.quantizer}, so the Add is a layer of its own.",
        f"Remove {r.quantizer} and its DequantizeLinear.",
    ),
)


@words(trt.AddOutputNotQuantized)
def _add_output(finding: Finding, cause: Cause, r: trt.AddOutputNotQuantized) -> Words:
    readers, residual = readers_words(r.readers), r.residual.node
    if r.node == r.add:
        return (
            f"{r.add} runs in float{size_words(r.elements)}: its inputs are quantized, but {readers}.",
            f"Quantize {r.add}'s result, or remove the pairs in front of it.",
        )
    return (
        f"{r.node} reads and writes float{size_words(r.elements)} at {r.add}: its residual is quantized ({residual}), "
        f"but {readers}.",
        f"Quantize {r.add}'s result, or remove {residual}'s pair in front of the Add.",
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
        f"{_writes(r)}: what follows it ({names(r.pointwise)}) is one pointwise kernel, which reads "
        f"{names(map(origin_words, r.others))} as well and is not taken into a convolution."
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
    "Use GlobalAveragePool and Flatten instead (the same result), with Q/DQ in front and behind; or remove the pair in "
    "front of it."
)


def _reduction(r: trt.ReduceNotPooling) -> str:
    return (
        f"{r.node} (ReduceMean) runs in float: TensorRT makes a pooling only of one over height and width with "
        "keepdims=1."
    )


says(trt.ReduceNotPooling, lambda r: (_reduction(r), _REDUCTION))


@words(trt.PoolingOneSide)
def _one_side(finding: Finding, cause: Cause, r: trt.PoolingOneSide) -> str:
    behind = quantizers_of(r.readers)
    if r.quantized_input:
        why = f"{behind[0].node} is not all that reads it" if behind else "no QuantizeLinear behind"
        return f"{r.node} runs in float: {r.origin.node} is in front of it, {why}."
    return f"{r.node} runs in float: {names(reader_names(behind))} is behind it, no DequantizeLinear in front."


# Scales ---------------------------------------------------------------------------------------------------------


says(trt.ConcatScales, lambda r: _parts(r, "each part with another scale is converted", ()))

_PARTS = 12  # named in a sentence


def _parts(r: trt.ConcatScales, consequence: str, own: Sequence[Scale]) -> Words:
    parts = ["none" if p is None else scale_words(p) for p in r.parts]
    listed = ", ".join(parts[:_PARTS]) + ", ..." * (len(parts) > _PARTS)
    return (
        f"{r.node} takes scales {listed} and is quantized with {scale_words(r.behind)} behind it; {consequence}.",
        unified([*r.parts, r.behind, *own]),
    )


def _scales(cause: Cause, tensor: str, readers: Sequence[Reader], consequence: str) -> Words:
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


@words(trt.Stays)
def _stays(finding: Finding, cause: Cause, r: trt.Stays) -> str:
    scale = scale_words(r.scale)
    if finding.code == "INPUT-CONVERSION":
        return f"{r.name} converts the network's input '{r.origin.tensor}' to {r.precision} (scale {scale})."
    assumed = (
        " That is assumed: where the attention becomes one kernel, it is inside."
        if r.attention
        else ""
    )
    return f"{r.name} (scale {scale}) stays: {_why(cause, r)}.{assumed}"


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


def _why(cause: Cause, r: trt.Stays) -> str:
    """Why a conversion stays: the finding that says so, or the refusal, or the node that does not take it."""
    origin = r.origin
    if r.precision not in (Precision.INT8, Precision.INT32) and origin.node:
        return f"{r.precision} is outside the rules"
    if cause.see:
        return "see " + ", and ".join(f"{code} at {node}" for code, node in cause.see)
    if not r.quantize:
        who = names(
            "the network's output" if x.kind == ReaderKind.OUTPUT else x.node for x in r.behind
        )
        return f"{who or 'its reader'} cannot take it"
    if cause.also:
        return _blocked(r, cause.also[0])
    if origin.int8:
        return f"{node_words(origin.node, origin.op)} is in INT8 and does not take it"
    joined = " joins what is in front of it, and" if origin.op in JOINS else ""
    return f"{origin.node} ({origin.op}){joined} runs in float"


def _blocked(r: trt.Stays, refusal: Refusal) -> str:
    if isinstance(refusal, trt.OutputScale):
        return f"{r.origin.node} cannot take its scale"
    if isinstance(refusal, trt.NotCommuting):
        return f"a Q cannot move up past {node_words(refusal.node, refusal.op)}"
    if isinstance(refusal, trt.ManyConsumers):
        floats = floats_of(refusal.readers)
        plain = all(x.kind != ReaderKind.OUTPUT for x in floats)
        others = others_words(refusal.readers)
        who = (
            f", which {readers_words(floats, it='')}{others}"
            if plain
            else (f", whose result is read by {names(reader_names(floats))} as well{others}")
        )
        return f"it cannot move up past {node_words(refusal.node, refusal.op)}{who}"
    if isinstance(refusal, trt.ConcatReadElsewhere):
        return (
            f"{refusal.node} (Concat) is read by {names(reader_names(floats_of(refusal.readers)))} as float as well"
            f"{others_words(refusal.readers)}"
        )
    return f"{refusal.node} runs in float"

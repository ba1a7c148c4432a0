"""Why an INT8 convolution writes float, from the refusal that decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qdqtool.explain import scales
from qdqtool.explain.cause import Cause, Known
from qdqtool.explain.words import (
    floats_of,
    names,
    node_words,
    origin_words,
    quantizers_of,
    reader_names,
    readers_words,
    scale_words,
    size_words,
)
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import AVERAGES, OPERATORS
from qdqtool.trt.provenance import Reader, ReaderKind
from qdqtool.trt.refusals import (
    ActivationBeforeAdd,
    ActivationJoined,
    AddOutputNotQuantized,
    BatchNormNotConstant,
    ConvTransposeBatchNorm,
    OutputDifferentScales,
    OutputManyConsumers,
    OutputNotQuantized,
    OutputScale,
    PoolingOneSide,
    ReduceNotPooling,
    ResidualFloat,
)
from qdqtool.types import Refusal

_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def deciding(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that explains a convolution which writes float: the nearest to the convolution.

    What keeps its own fusions apart (BatchNormalization, Add, activation) comes before who reads the result.
    """
    for kind in OUTPUT:
        found = next((r for r in refusals if type(r) is kind), None)
        if found is not None:
            return found
    return None


def explain(known: Known, refusal: Refusal) -> Cause:
    """The cause of a deciding refusal."""
    cause: Cause = OUTPUT[type(refusal)](known, refusal)
    return cause


def _writes(refusal: Any) -> str:
    return f"{refusal.node} writes float{size_words(refusal.elements)}"


def _batch_norm(known: Known, r: BatchNormNotConstant) -> Cause:
    return Cause(
        "BN-UNFOLDED", r.batchnorm,
        f"{r.node} writes float because {r.batchnorm} behind it has parameters that are not plain constants and stays "
        "a layer of its own.",
        size=r.elements, convolutions=(r.node,),
    )


def _transposed(known: Known, r: ConvTransposeBatchNorm) -> Cause:
    return Cause(
        "CT-BN", r.node, f"{r.node}: {r.batchnorm} behind it is not folded, so its output stays float"
        f"{size_words(r.elements)}.",
        f"Fold {r.batchnorm} into the weights of {r.node} before quantizing.", r.elements, (r.node,),
    )


def _residual_float(known: Known, r: ResidualFloat) -> Cause:
    outcome = known.outcomes.get(r.node)
    origin = origin_words(r.residual, r.tensor)
    if outcome is not None and r.add in outcome.fused:
        message = f"{_writes(r)} because {r.add} is fused into it and reads {origin} as float."
    else:
        message = f"{_writes(r)} because {r.add} adds it to {origin}, both as float."
    fix = _skip_fix(r.add, f"'{r.tensor}'", r.quantizers)
    others = [x for x in r.readers if x.kind in (ReaderKind.OP, ReaderKind.OUTPUT)]
    if others:  # a quantized skip alone would then only add a DQ that stays (resnet18-a100-qat-residual, last block)
        fix += f" It helps only if {r.add}'s result is quantized as well: {readers_words(others)}."
    return Cause("SKIP-FLOAT", r.add, message, fix, r.elements, (r.node,), joined=True, gains=not others)


def _skip_fix(add: str, what: str, quantizers: Sequence[Reader]) -> str:
    q = _known_scale(quantizers)
    if q is None:
        return f"Put Q/DQ on {what} in front of {add}; its scale needs calibration."
    return (
        f"Let {add} read {what} through {q.node} and its DequantizeLinear (scale {scale_words(q.scale)}): no new "
        "scale is needed."
    )


def _known_scale(quantizers: Sequence[Reader]) -> Reader | None:
    """A Q right behind a tensor, whose pair another reader can share."""
    return next((q for q in quantizers if not q.path and isinstance(q.scale, float)), None)


def _add_output(known: Known, r: AddOutputNotQuantized) -> Cause:
    readers = readers_words(r.readers)
    residual = r.residual.node
    if r.node == r.add:
        return Cause(
            "ADD-OUT-FLOAT", r.add, f"{r.add} runs in float{size_words(r.elements)}: its inputs are quantized, but "
            f"{readers}.",
            f"Quantize {r.add}'s result, or remove the pairs in front of it.", r.elements,
        )
    return Cause(
        "ADD-OUT-FLOAT", r.add,
        f"{r.node} reads and writes float{size_words(r.elements)} at {r.add}: its residual is quantized ({residual}), "
        f"but {readers}.",
        f"Quantize {r.add}'s result, or remove {residual}'s pair in front of the Add.", r.elements, (r.node,),
    )


def _activation(known: Known, r: ActivationBeforeAdd) -> Cause:
    other = ""
    if r.residual is not None:
        told = "is quantized" if r.residual.quantizer else "is not quantized either"
        other = f", whose other input {origin_words(r.residual)} {told}"
    return Cause(
        "ADD-ACT", r.add, f"{_writes(r)}: {r.activation} stands between it and {r.add}{other}.", size=r.elements,
        convolutions=(r.node,), gains=bool(quantizers_of(r.readers)),
    )


def _joined(known: Known, r: ActivationJoined) -> Cause:
    others = names(origin_words(o) for o in r.others)
    return Cause(
        "OUT-FLOAT", r.node,
        f"{_writes(r)}: what follows it ({names(r.pointwise)}) is one pointwise kernel, which reads {others} as well "
        "and is not taken into a convolution.",
        size=r.elements, convolutions=(r.node,),
    )


def _different(known: Known, r: OutputDifferentScales) -> Cause:
    writes = _writes(r) if r.node in known.outcomes else f"'{r.tensor}' is converted once for each"
    concerned = (r.node,) if r.node in known.outcomes else ()
    return scales.of_readers(known, r.tensor, r.readers, writes, r.elements, concerned)


def _many(known: Known, r: OutputManyConsumers) -> Cause:
    quantized, floats = quantizers_of(r.readers), floats_of(r.readers)
    add = next((x for x in floats if x.kind == ReaderKind.SUM), None)
    concerned = (r.node,) if r.node in known.outcomes else ()
    shared = r.readers[0].path[0] if r.readers[0].path else None
    if shared is not None and all(x.path and x.path[0].node == shared.node for x in r.readers) and _is_pool(shared.op):
        behind = [Reader(q.kind, q.node, q.op, q.path[1:], q.scale) for q in quantized]
        fix = _skip_fix(add.node, f"the result of {shared.node}", behind) if add is not None else ""
        return Cause(
            "POOL-MIXED", shared.node,
            f"{_writes(r)} because {shared.node} ({shared.op}) is read by {names(reader_names(quantized))} in INT8 and "
            f"by {names(reader_names(floats))} as float: no Q can move up past it.",
            fix, r.elements, concerned, gains=add is not None and add.feeds_weighted,
            automatic=_known_scale(behind) is not None,
        )
    if add is not None:
        return Cause(
            "SKIP-FLOAT", add.node,
            f"{_writes(r)} because {add.node} reads it as float (its residual input has no Q/DQ), beside "
            f"{names(reader_names(quantized))}.",
            _skip_fix(add.node, f"'{r.tensor}'", quantized), r.elements, concerned, joined=True,
            gains=add.feeds_weighted,
        )
    first = floats[0]
    told = list(dict.fromkeys(reader_names(floats)))
    return Cause(
        "OUT-MIXED", first.node if first.kind != ReaderKind.OUTPUT else r.tensor,
        f"{_writes(r)} because {names(told)} {'reads' if len(told) == 1 else 'read'} it as float, beside "
        f"{names(reader_names(quantized))}.",
        f"Quantize the float reader too with scale {scale_words(quantized[0].scale)}, if it can run in INT8.",
        r.elements, concerned,
    )


def _is_pool(op: str) -> bool:
    known = OPERATORS.get(op)
    return known is not None and known.passage is not None and (known.kind in _POOLS or op == "GlobalMaxPool")


def _not_quantized(known: Known, r: OutputNotQuantized) -> Cause:
    average = next((x for x in r.readers if x.op in AVERAGES), None)
    if average is not None and len(r.readers) == 1:
        return _average(known, r, average)
    norm = next((x for x in r.readers if x.op == "LayerNormalization"), None)
    if norm is not None and len(r.readers) == 1 and r.node in known.outcomes:
        return Cause(
            "OUT-FLOAT", r.node, f"{_writes(r)}: {norm.node} ({norm.op}) reads it as float.",
            f"Put Q/DQ in front of {norm.node}: {r.node} then writes INT8, by faster kernels (ModelOpt pull request "
            "1117), and the normalization itself is computed in float either way.", r.elements, (r.node,),
        )
    concerned = (r.node,) if r.node in known.outcomes else ()
    if quantizers_of(r.readers):
        q = quantizers_of(r.readers)[0]
        past = names(node_words(s.node, s.op) for s in q.path)
        message = f"{_writes(r)}: {q.node} stays behind {past or 'it'}, where it cannot move on."
        return Cause("OUT-FLOAT", r.node, message, size=r.elements, convolutions=concerned)
    told = readers_words(r.readers)
    by_design = all(x.kind == ReaderKind.OUTPUT or not x.feeds_weighted for x in r.readers)
    if r.activation is not None and r.activation.op == "SiLU" and not by_design:
        return Cause(
            "SILU-NO-Q-AFTER", r.activation.node, f"{_writes(r)} behind SiLU: {told}.", size=r.elements,
            convolutions=concerned,
        )
    outputs = all(x.kind == ReaderKind.OUTPUT for x in r.readers)
    why = " (left float)" if r.readers and by_design and not outputs else ""
    return Cause("OUT-FLOAT", r.node, f"{_writes(r)}: {told}{why}.", size=r.elements, convolutions=concerned)


def _average(known: Known, r: OutputNotQuantized, average: Reader) -> Cause:
    reduce = known.first(ReduceNotPooling, average.node)
    concerned = (r.node,) if r.node in known.outcomes else ()
    if reduce is not None:
        return reduction(reduce, f"{_writes(r)} because ", concerned)
    one = known.first(PoolingOneSide, average.node)
    behind = quantizers_of(one.readers) if one is not None else []
    told = f"only {behind[0].node} behind it is there" if behind else "nothing quantizes it"
    # With other readers the convolution writes float anyway, with none behind the pooling's result is converted back.
    return Cause(
        "POOL-FLOAT", average.node, f"{_writes(r)} because {average.node} runs in float: {told}.", size=r.elements,
        convolutions=concerned, gains=bool(behind) and len(r.readers) == 1,
    )


def reduction(r: ReduceNotPooling, lead: str = "", convolutions: tuple[str, ...] = ()) -> Cause:
    """A ReduceMean that TensorRT does not turn into a pooling, and so runs in float whatever is around it."""
    return Cause(
        "POOL-FLOAT", r.node,
        f"{lead}{r.node} (ReduceMean) runs in float: TensorRT makes a pooling only of one over height and width with "
        "keepdims=1.",
        "Use GlobalAveragePool and Flatten instead (the same result), with Q/DQ in front and behind; or remove the "
        "pair in front of it.",
        r.elements, convolutions,
    )


def one_side(r: PoolingOneSide) -> Cause:
    """An average pooling between a DQ and something else than one Q, or the other way round."""
    if r.quantized_input:
        behind = quantizers_of(r.readers)
        why = f"{behind[0].node} is not all that reads it" if behind else "no QuantizeLinear behind"
        told = f"{r.origin.node} is in front of it, {why}"
    else:
        told = f"{names(reader_names(quantizers_of(r.readers)))} is behind it, no DequantizeLinear in front"
    return Cause("POOL-FLOAT", r.node, f"{r.node} runs in float: {told}.", size=r.elements, gains=r.quantized_input)


def _scale(known: Known, r: OutputScale) -> Cause:
    why = "is computed at run time" if r.computed else "has one scale for each channel"
    return Cause(
        "OUT-FLOAT", r.node, f"{r.node} writes float: the scale of {r.quantizer} behind it {why}." if r.computed else
        f"{r.node} writes float: {r.quantizer} behind it {why}.",
        f"Give {r.quantizer} one scale for the whole tensor, known when the engine is built.",
        convolutions=(r.node,) if r.node in known.outcomes else (),
    )


OUTPUT: dict[type[Refusal], Callable[[Known, Any], Cause]] = {
    BatchNormNotConstant: _batch_norm,
    ConvTransposeBatchNorm: _transposed,
    ResidualFloat: _residual_float,
    AddOutputNotQuantized: _add_output,
    ActivationBeforeAdd: _activation,
    ActivationJoined: _joined,
    OutputScale: _scale,
    OutputDifferentScales: _different,
    OutputManyConsumers: _many,
    OutputNotQuantized: _not_quantized,
}
"""The refusals that make a layer write float, the one that decides first."""

"""Why each Q or DQ that stays in the engine stays."""

from __future__ import annotations

from qdqtool.explain import outputs, scales
from qdqtool.explain.cause import Cause, Known
from qdqtool.explain.words import floats_of, names, node_words, quantizers_of, reader_names, readers_words, scale_words
from qdqtool.operators import JOINS, SUMS
from qdqtool.trt.provenance import Reader, ReaderKind
from qdqtool.trt.refusals import (
    AddOutputNotQuantized,
    ConcatReadElsewhere,
    ConcatScales,
    ManyConsumers,
    NotCommuting,
    OutputScale,
    PoolingOneSide,
    ReduceNotPooling,
    Stays,
)
from qdqtool.trt.surroundings import differ
from qdqtool.types import Evidence, Precision


def explain(known: Known, stays: Stays) -> None:
    """Adds the finding about a conversion, and one about what causes it where no convolution's finding says that."""
    if stays.precision not in (Precision.INT8, Precision.INT32) and stays.origin.node:
        _stays(known, stays, f"{stays.precision} is outside the rules")
    elif stays.requantizes:
        _requantized(known, stays)
    elif not stays.quantize:
        _dequantize(known, stays)
    elif not stays.origin.node:
        convolutions = _behind(stays)
        known.add(Cause(
            "INPUT-CONVERSION", stays.name,
            f"{stays.name} converts the network's input '{stays.origin.tensor}' to {stays.precision} (scale "
            f"{scale_words(stays.scale)}).",
            size=stays.elements, convolutions=convolutions,
        ), (stays.node,))
        _beside(known, stays)
    else:
        _stays(known, stays, _why_q(known, stays))


def _stays(known: Known, stays: Stays, why: str, convolutions: tuple[str, ...] | None = None) -> None:
    assumed = " That is assumed: where the attention becomes one kernel, it is inside." if stays.attention else ""
    known.add(Cause(
        "CONVERSION", stays.name, f"{stays.name} (scale {scale_words(stays.scale)}) stays: {why}.{assumed}",
        size=stays.elements, convolutions=_behind(stays) if convolutions is None else convolutions,
        evidence=Evidence.ASSUMED if stays.attention else None,
    ), (stays.node,))


def _behind(stays: Stays) -> tuple[str, ...]:
    return stays.convolutions


def _beside(known: Known, stays: Stays) -> str:
    """The finding about Qs of other scales on the same tensor; empty where there is none."""
    quantizers = quantizers_of(stays.siblings)
    if not differ(quantizers):
        return ""
    tensor = stays.origin.tensor
    code, crossed = scales.crossing([s for q in quantizers for s in q.path])
    node = crossed.node if crossed is not None else tensor
    if not known.report.has(code, node):
        told = f"'{tensor}' is converted once for each"
        if not known.add(scales.of_readers(known, tensor, stays.siblings, told, stays.elements, _maker(stays))):
            return ""
    return f"{code} at {node}"


def _maker(stays: Stays) -> tuple[str, ...]:
    return (stays.origin.convolution,) if stays.origin.convolution else ()


def _why_q(known: Known, stays: Stays) -> str:
    origin = stays.origin
    seen = known.see(origin.convolution or origin.node) or known.see(origin.boundary)
    scale = _beside(known, stays) if seen or origin.convolution or _shares(stays) else ""
    if seen:
        return f"{seen}, and {scale}" if scale and scale not in seen else seen
    if scale:
        return f"see {scale}"
    side = known.first(PoolingOneSide, origin.node)
    if side is not None:
        known.add(outputs.one_side(side), (side.node,))
        return known.see(side.node) or f"{side.node} runs in float"
    reduce = known.first(ReduceNotPooling, origin.node)
    if reduce is not None:
        known.add(outputs.reduction(reduce), (reduce.node,))
        return known.see(reduce.node) or f"{reduce.node} runs in float"
    own = known.first(OutputScale, origin.node)
    if own is not None:
        return f"{origin.node} cannot take its scale"
    blocked = _blocked(stays)
    if blocked:
        return blocked
    inner = known.see(origin.quantizer) if origin.quantizer else ""
    if inner:
        return inner
    joined = " joins what is in front of it, and" if origin.op in JOINS else ""
    if origin.int8:
        return f"{node_words(origin.node, origin.op)} is in INT8 and does not take it"
    return f"{origin.node} ({origin.op}){joined} runs in float"


def _shares(stays: Stays) -> bool:
    """Whether other Qs on the tensor are worth a word although no convolution makes it: a sum, or parts of a tensor."""
    cut = any(scales.crossing(q.path)[0] in ("CONCAT-SCALE", "SPLIT-SCALE") for q in quantizers_of(stays.siblings))
    return cut or stays.origin.op in SUMS


def _blocked(stays: Stays) -> str:
    refusal = stays.blocked
    if isinstance(refusal, ManyConsumers):
        floats = floats_of(refusal.readers)
        told = f", which {readers_words(floats).replace(' it ', ' ')}" if floats and all(
            r.kind != ReaderKind.OUTPUT for r in floats
        ) else ""
        if floats and not told:
            told = f", whose result is read by {names(reader_names(floats))} as well"
        return f"it cannot move up past {node_words(refusal.node, refusal.op)}{told}" if told else ""
    if isinstance(refusal, NotCommuting):
        return f"a Q cannot move up past {node_words(refusal.node, refusal.op)}"
    if isinstance(refusal, ConcatReadElsewhere):
        floats = floats_of(refusal.readers)
        return f"{refusal.node} (Concat) is read by {names(reader_names(floats))} as float as well" if floats else ""
    return ""


def _requantized(known: Known, stays: Stays) -> None:
    before, after = scale_words(stays.first_scale), scale_words(stays.scale)
    code, crossed = scales.crossing(stays.passed)
    quantizers = quantizers_of(stays.siblings)
    if code == "SIBLING-SCALE" or crossed is None:
        cause = Cause(
            "DOUBLE-QDQ", stays.node,
            f"scales {before} ({stays.pair}) and {after} ({stays.node}): INT8 is converted to INT8.",
            size=stays.elements,
        )
    elif code == "CONCAT-SCALE" and (known.first(ConcatScales, crossed.node) or differ([*quantizers, _own(stays)])):
        cause = scales.of_readers(
            known, stays.tensor, [*quantizers, _own(stays)], f"{stays.node} requantizes", stays.elements, ()
        )
    else:
        cause = Cause(
            code, crossed.node,
            f"{crossed.node} ({crossed.op}) stands between scales {before} ({stays.pair}) and {after} ({stays.node}): "
            "INT8 is converted to INT8.",
            scales.unified([stays.first_scale, stays.scale]), stays.elements,
        )
    known.add(cause, (stays.node,))
    _stays(known, stays, f"see {cause.code} at {cause.node}")


def _own(stays: Stays) -> Reader:
    return Reader(ReaderKind.Q, stays.node, "QuantizeLinear", stays.passed, stays.scale)


def _dequantize(known: Known, stays: Stays) -> None:
    inner = known.see(stays.pair) if stays.pair else ""
    for reader in stays.behind:
        cause = None
        side = known.first(PoolingOneSide, reader.node)
        reduce = known.first(ReduceNotPooling, reader.node)
        add = known.first(AddOutputNotQuantized, reader.node)
        if side is not None:
            cause = outputs.one_side(side)
        elif reduce is not None:
            cause = outputs.reduction(reduce)
        elif add is not None:
            cause = outputs.explain(known, add)
        if cause is not None:
            known.add(cause, (reader.node,))
    taker = known.sum_of(stays.node)
    if taker and known.see(taker):
        _stays(known, stays, known.see(taker), (taker,) if taker in known.outcomes else ())
        return
    seen = next((s for r in stays.behind if (s := known.see(r.node))), "")
    who = names("the network's output" if r.kind == ReaderKind.OUTPUT else r.node for r in stays.behind) or "its reader"
    _stays(known, stays, inner or seen or f"{who} cannot take it", ())

"""Why a convolution runs in float or writes it, whose scales differ, and why a Q or DQ stays in the engine."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.base.records import replaced
from qdqtool.explain.messages import floats_of, known_scale, quantizers_of
from qdqtool.explain.report import Diagnosis, Known, See
from qdqtool.model.operators import AVERAGES, CUTS, JOINS, OPERATORS, SUMS, LayerKind
from qdqtool.trt import refusals as trt
from qdqtool.trt.refusals import OutputManyConsumers, OutputNotQuantized, Reader, ReaderKind, Size, Stays, Step
from qdqtool.trt.surroundings import differ
from qdqtool.types import Cause, FindingCode, Precision, Refusal

# Inputs --------------------------------------------------------------------------------------------------------------


def of_inputs(known: Known, refusals: Sequence[Refusal]) -> Diagnosis | None:
    """Why a convolution runs in float, from the refusal of the pass that would have quantized it; None where none."""
    for r in refusals:
        if isinstance(r, trt.InputNotDequantized):
            code: FindingCode = "NOT-QUANTIZED" if not r.weights_quantized else "IN-BLOCKED" if r.dq else "IN-FLOAT"
            shared = known.first(trt.ManyConsumers, r.dq) if code == "IN-BLOCKED" else None
            return Diagnosis(code, r.node, Cause(r, () if shared is None else (shared,)), r.elements, (r.node,))
        if isinstance(r, trt.InMyelin):
            code = "FLOAT-OTHER" if r.data_quantized and r.weights_quantized else "NOT-QUANTIZED"
            return Diagnosis(code, r.node, Cause(r), None, (r.node,))
        if isinstance(r, trt.WeightsNotDequantized):
            return Diagnosis("W-NO-DQ", r.node, Cause(r), r.elements, (r.node,))
    return None


# Scales that differ --------------------------------------------------------------------------------------------------


def crossing(steps: Sequence[Step]) -> tuple[FindingCode, Step | None]:
    """The code for scales on the two sides of some operators, and the operator to name."""
    joins = next((s for s in steps if s.op in JOINS), None)
    if joins is not None:
        return "CONCAT-SCALE", joins
    cuts = next((s for s in steps if s.op in CUTS), None)
    if cuts is not None:
        return "SPLIT-SCALE", cuts
    return ("POOL-SCALE", steps[0]) if steps else ("SIBLING-SCALE", None)


def crossed_by(readers: Sequence[Reader]) -> tuple[FindingCode, Step | None]:
    """The same for the Qs that read one tensor."""
    return crossing([s for q in quantizers_of(readers) for s in q.path])


def of_readers(
    known: Known, r: Refusal, readers: Sequence[Reader], size: Size | None, convolutions: tuple[str, ...],
) -> Diagnosis:
    """The diagnosis of different scales of a tensor's Qs; a Concat's refusal says what scales its parts have."""
    code, crossed = crossed_by(readers)
    node = crossed.node if crossed is not None else str(getattr(r, "tensor", r.node))
    if isinstance(r, Stays) and not r.requantizes:
        node = crossed.node if crossed is not None else r.origin.tensor
    parts = known.first(trt.ConcatScales, node) if code == "CONCAT-SCALE" else None
    return Diagnosis(code, node, Cause(r, () if parts is None else (parts,)), size, convolutions)


def of_concat(parts: trt.ConcatScales) -> Diagnosis:
    """A Concat whose parts have other scales than the Q behind it, where no convolution pays for it."""
    return Diagnosis("CONCAT-SCALE", parts.node, Cause(parts), parts.elements)


def with_own(r: Stays) -> list[Reader]:
    """The Qs that read a requantized tensor, its own included."""
    own = Reader(ReaderKind.Q, r.node, "QuantizeLinear", r.passed, r.scale)
    return [*quantizers_of(r.siblings), own]


# Outputs -------------------------------------------------------------------------------------------------------------


OUTPUT: dict[type[Refusal], FindingCode] = {
    trt.BatchNormNotConstant: "BN-UNFOLDED",
    trt.ConvTransposeBatchNorm: "CT-BN",
    trt.ResidualFloat: "SKIP-FLOAT",
    trt.AddOutputNotQuantized: "ADD-OUT-FLOAT",
    trt.ActivationBeforeAdd: "ADD-ACT",
    trt.ActivationJoined: "OUT-FLOAT",
    trt.OutputScale: "OUT-FLOAT",
}
"""What keeps a layer's own fusions apart (BatchNormalization, Add, activation): the first decides; its code."""
_READ = (trt.OutputDifferentScales, OutputManyConsumers, OutputNotQuantized)  # decided by the readers, after them
_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def diagnose(known: Known, refusals: Sequence[Refusal]) -> Diagnosis | None:
    """The diagnosis of a layer that writes float, of the refusal nearest to it; None where there is none."""
    r = next((r for kind in (*OUTPUT, *_READ) for r in refusals if type(r) is kind), None)
    if r is None:
        return None
    concerned = known.concerned(r.node)
    if isinstance(r, trt.OutputDifferentScales):
        return of_readers(known, r, r.readers, r.elements, concerned)
    if isinstance(r, OutputManyConsumers):
        return _many(r, concerned)
    if isinstance(r, OutputNotQuantized):
        return _not_quantized(known, r, concerned)
    code, node, size = OUTPUT[type(r)], r.node, getattr(r, "elements", None)
    fused, gains = False, True
    if isinstance(r, trt.BatchNormNotConstant):
        node = r.batchnorm
    elif isinstance(r, trt.ResidualFloat):
        outcome = known.outcomes.get(r.node)
        node, fused = r.add, outcome is not None and r.add in outcome.fused
        gains = wanted(r.readers)  # else it only adds a DQ that stays (resnet18-a100-qat-residual, last block)
    elif isinstance(r, trt.AddOutputNotQuantized | trt.ActivationBeforeAdd):
        node, gains = r.add, wanted(r.readers)
    return Diagnosis(code, node, Cause(r, fused=fused), size, concerned, code == "SKIP-FLOAT", gains=gains)


def wanted(readers: Sequence[Reader]) -> bool:
    """Whether a tensor can become INT8 for all that read it: one that cannot keeps it float for the others too."""
    return bool(readers) and all(x.kind == ReaderKind.Q or x.gains for x in readers)


def shared_pool(r: OutputManyConsumers) -> Step | None:
    """The pooling in front of all readers, where there is one: no Q moves up past it."""
    shared = r.readers[0].path[0] if r.readers[0].path else None
    if shared is None or any(not x.path or x.path[0].node != shared.node for x in r.readers):
        return None
    known = OPERATORS.get(shared.op)
    if known is None or known.passage is None:
        return None
    return shared if known.kind in _POOLS or shared.op == "GlobalMaxPool" else None


def behind_pool(r: OutputManyConsumers) -> list[Reader]:
    """The Qs that read the result of that pooling, as seen from there."""
    return [replaced(q, path=q.path[1:]) for q in quantizers_of(r.readers)]


def _many(r: OutputManyConsumers, concerned: tuple[str, ...]) -> Diagnosis:
    floats = floats_of(r.readers)
    add = next((x for x in floats if x.kind == ReaderKind.SUM), None)
    pool = shared_pool(r)
    if pool is not None:
        return Diagnosis("POOL-MIXED", pool.node, Cause(r), r.elements, concerned,
                         gains=add is not None and wanted(r.readers), automatic=known_scale(behind_pool(r)) is not None)
    if add is not None:
        return Diagnosis("SKIP-FLOAT", add.node, Cause(r), r.elements, concerned, joined=True, gains=wanted(r.readers))
    node = floats[0].node if floats[0].kind != ReaderKind.OUTPUT else r.tensor
    return Diagnosis("OUT-MIXED", node, Cause(r), r.elements, concerned, gains=wanted(r.readers))


def _not_quantized(known: Known, r: OutputNotQuantized, concerned: tuple[str, ...]) -> Diagnosis:
    average = r.readers[0] if len(r.readers) == 1 and r.readers[0].op in AVERAGES else None
    if average is not None:
        found = known.first(trt.ReduceNotPooling, average.node) or known.first(trt.PoolingOneSide, average.node)
        also = () if found is None else (found,)
        # With none behind it, the pooling's result is converted back.
        gains = isinstance(found, trt.ReduceNotPooling) or (
            isinstance(found, trt.PoolingOneSide) and bool(quantizers_of(found.readers))
        )
        size = found.elements if isinstance(found, trt.ReduceNotPooling) else r.elements
        return Diagnosis("POOL-FLOAT", average.node, Cause(r, also), size, concerned, gains=gains)
    by_design = left_float(r)
    if (
        r.activation is not None and r.activation.op == "SiLU" and not by_design and not quantizers_of(r.readers)
        and not (concerned and before_norm(r))
    ):
        return Diagnosis("SILU-NO-Q-AFTER", r.activation.node, Cause(r), r.elements, concerned, gains=wanted(r.readers))
    return Diagnosis("OUT-FLOAT", r.node, Cause(r), r.elements, concerned)


def left_float(r: OutputNotQuantized) -> bool:
    """Whether no convolution lies behind what reads the result: it was left float."""
    return all(x.kind == ReaderKind.OUTPUT or not x.feeds_weighted for x in r.readers)


def before_norm(r: OutputNotQuantized) -> bool:
    """Whether a LayerNormalization alone reads the result."""
    return len(r.readers) == 1 and r.readers[0].op == "LayerNormalization"


def of_average(known: Known, node: str) -> Diagnosis | None:
    """An average that runs in float, and why; None for another node."""
    r = known.first(trt.PoolingOneSide, node) or known.first(trt.ReduceNotPooling, node)
    if r is None:
        return None
    return Diagnosis("POOL-FLOAT", r.node, Cause(r), r.elements,
                     gains=isinstance(r, trt.ReduceNotPooling) or r.quantized_input)


# Conversions ---------------------------------------------------------------------------------------------------------


def explain(known: Known, stays: Stays) -> None:
    """Adds the finding about a conversion, and one about what causes it where no convolution's finding says that."""
    if stays.precision not in (Precision.INT8, Precision.INT32) and stays.origin.node:
        _stays(known, stays)
    elif stays.requantizes:
        _requantized(known, stays)
    elif not stays.quantize:
        _dequantize(known, stays)
    elif not stays.origin.node:
        known.add(
            Diagnosis("INPUT-CONVERSION", stays.name, Cause(stays), stays.elements, stays.convolutions), (stays.node,)
        )
        _beside(known, stays)
    else:
        see, also = _why_q(known, stays)
        _stays(known, stays, see, also)


def _stays(
    known: Known, stays: Stays, see: tuple[See, ...] = (), also: Refusal | None = None,
    convolutions: tuple[str, ...] | None = None,
) -> None:
    cause = Cause(stays, () if also is None else (also,), see)
    known.add(
        Diagnosis(
            "CONVERSION", stays.name, cause, stays.elements,
            stays.convolutions if convolutions is None else convolutions,
        ),
        (stays.node,),
    )


def _beside(known: Known, stays: Stays) -> tuple[See, ...]:
    """The finding about Qs of other scales on the same tensor; empty where there is none."""
    if not differ(quantizers_of(stays.siblings)):
        return ()
    maker = (stays.origin.convolution,) if stays.origin.convolution else ()
    found = of_readers(known, stays, stays.siblings, stays.elements, maker)
    if not known.report.has(found.code, found.node) and not known.add(found):
        return ()
    return ((found.code, found.node),)


def _why_q(known: Known, stays: Stays) -> tuple[tuple[See, ...], Refusal | None]:
    """The findings that explain a Q that stays, or else the refusal that does."""
    origin = stays.origin
    seen = known.see(origin.convolution or origin.node) or known.see(origin.boundary)
    # Other Qs on the tensor are worth a word also where no convolution makes it: of a sum, or of parts of a tensor.
    cut = any(crossing(q.path)[0] in ("CONCAT-SCALE", "SPLIT-SCALE") for q in quantizers_of(stays.siblings))
    scale = _beside(known, stays) if seen or origin.convolution or cut or origin.op in SUMS else ()
    if seen or scale:
        return tuple(dict.fromkeys((*seen, *scale))), None
    average = of_average(known, origin.node)
    if average is not None:
        known.add(average, (average.node,))
        return known.see(average.node), average.cause.refusal
    own = known.first(trt.OutputScale, origin.node)
    if own is not None:
        return (), own
    blocked = stays.blocked  # that says why where it is an operator, or readers as float
    read_elsewhere = isinstance(blocked, trt.ManyConsumers | trt.ConcatReadElsewhere) and floats_of(blocked.readers)
    if read_elsewhere or isinstance(blocked, trt.NotCommuting):
        return (), blocked
    return (known.see(origin.quantizer) if origin.quantizer else ()), None


def _requantized(known: Known, stays: Stays) -> None:
    code, crossed = crossing(stays.passed)
    if code == "SIBLING-SCALE" or crossed is None:
        found = Diagnosis("DOUBLE-QDQ", stays.node, Cause(stays), stays.elements)
    elif code == "CONCAT-SCALE" and (known.first(trt.ConcatScales, crossed.node) or differ(with_own(stays))):
        found = of_readers(known, stays, with_own(stays), stays.elements, ())
    else:
        found = Diagnosis(code, crossed.node, Cause(stays), stays.elements)
    known.add(found, (stays.node,))
    _stays(known, stays, ((found.code, found.node),))


def _dequantize(known: Known, stays: Stays) -> None:
    inner = known.see(stays.pair) if stays.pair else ()
    for reader in stays.behind:
        found = of_average(known, reader.node)
        add = known.first(trt.AddOutputNotQuantized, reader.node)
        if found is None and add is not None:
            found = diagnose(known, (add,))
        if found is not None:
            known.add(found, (reader.node,))
    taker = known.sums.get(stays.node, "")
    if taker and known.see(taker):
        _stays(known, stays, known.see(taker), convolutions=known.concerned(taker))
        return
    seen = next((s for r in stays.behind if (s := known.see(r.node))), ())
    _stays(known, stays, inner or seen, convolutions=())

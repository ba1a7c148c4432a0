"""Why a convolution runs in float or writes it, whose scales differ, and why a Q or DQ stays in the engine."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.findings.report import Diagnosis, Known, See
from qdqtool.ir.operators import CUTS, JOINS, SUMS
from qdqtool.reasons import simulation
from qdqtool.reasons.simulation import (
    OutputManyConsumers,
    OutputNotQuantized,
    RemainingConversion,
    ScalesAround,
    find_float_sum,
    find_shared_pooling,
    find_single_average,
    quantizers_with_own,
)
from qdqtool.reasons.tensors import (
    ConsumerKind,
    TensorConsumer,
    find_shareable_quantizer,
    float_consumers,
    operator_between,
    operator_between_quantizers,
    quantizer_consumers,
)
from qdqtool.trt.surroundings import have_different_scales
from qdqtool.types import Cause, Precision, Refusal
from qdqtool.util.records import replace_fields

# Inputs --------------------------------------------------------------------------------------------------------------


def of_inputs(known: Known, refusals: Sequence[Refusal]) -> Diagnosis | None:
    """Why a convolution runs in float, from the refusal of the pass that would have quantized it; None where none."""
    for r in refusals:
        if isinstance(r, simulation.InputNotDequantized):
            shared = (
                known.first(simulation.ManyConsumers, r.dq)
                if r.weights_quantized and r.dq
                else None
            )
            return Diagnosis(
                r.node, Cause(r, () if shared is None else (shared,)), r.elements, (r.node,)
            )
        if isinstance(r, simulation.InMyelin | simulation.WeightsNotDequantized):
            return Diagnosis(r.node, Cause(r), getattr(r, "elements", None), (r.node,))
    return None


# Scales that differ --------------------------------------------------------------------------------------------------


def of_readers(
    known: Known,
    r: simulation.OutputDifferentScales | ScalesAround,
    readers: Sequence[TensorConsumer],
    convolutions: tuple[str, ...],
) -> Diagnosis:
    """The diagnosis of different scales of a tensor's Qs; a Concat's refusal says what scales its parts have."""
    between = operator_between_quantizers(readers)
    tensor = (
        r.origin.tensor if isinstance(r, RemainingConversion) and not r.requantizes else r.tensor
    )
    parts = (
        known.first(simulation.ConcatScales, between.node)
        if between is not None and between.op in JOINS
        else None
    )
    return Diagnosis(
        between.node if between is not None else tensor,
        Cause(r, () if parts is None else (parts,)),
        r.elements,
        convolutions,
    )


# Outputs -------------------------------------------------------------------------------------------------------------


# What keeps a layer's own fusions apart (BatchNormalization, Add, activation), then what the readers decide: the first
# is reported.
OUTPUT: tuple[type[Refusal], ...] = (
    simulation.BatchNormNotConstant,
    simulation.ConvTransposeBatchNorm,
    simulation.ResidualFloat,
    simulation.AddOutputNotQuantized,
    simulation.ActivationBeforeAdd,
    simulation.ActivationJoined,
    simulation.OutputScale,
    simulation.OutputDifferentScales,
    OutputManyConsumers,
    OutputNotQuantized,
)


def diagnose(known: Known, refusals: Sequence[Refusal]) -> Diagnosis | None:
    """The diagnosis of a layer that writes float, of the refusal nearest to it; None where there is none."""
    r = next((r for kind in OUTPUT for r in refusals if isinstance(r, kind)), None)
    if r is None:
        return None
    concerned = known.concerned(r.node)
    if isinstance(r, simulation.OutputDifferentScales):
        return of_readers(known, r, r.readers, concerned)
    if isinstance(r, OutputManyConsumers):
        return _many(known, r, concerned)
    if isinstance(r, OutputNotQuantized):
        return _not_quantized(known, r, concerned)
    node, fused, gains, automatic = r.node, False, True, True
    if isinstance(r, simulation.BatchNormNotConstant):
        node = r.batchnorm
    elif isinstance(r, simulation.ResidualFloat):
        outcome = known.outcomes.get(r.node)
        node, fused = r.add, outcome is not None and r.add in outcome.fused
        gains = wanted(
            r.readers
        )  # else it only adds a DQ that stays (resnet18-a100-qat-residual, last block)
        automatic = _has_scale(known, r.add)
    elif isinstance(r, simulation.AddOutputNotQuantized | simulation.ActivationBeforeAdd):
        node, gains = r.add, wanted(r.readers)
    return Diagnosis(
        node,
        Cause(r, fused=fused),
        getattr(r, "elements", None),
        concerned,
        joined=isinstance(r, simulation.ResidualFloat),
        gains=gains,
        automatic=automatic,
    )


def _has_scale(known: Known, add: str, shares: bool = False) -> bool:
    """Whether a Q has the scale that a sum lacks: on the residual of one that a convolution could take in, else
    ``shares``."""
    residual = known.residuals.get(add)
    return shares if residual is None else find_shareable_quantizer(residual.quantizers) is not None


def wanted(readers: Sequence[TensorConsumer]) -> bool:
    """Whether a tensor can become INT8 for all that read it: one that cannot keeps it float for the others too."""
    return bool(readers) and all(x.kind == ConsumerKind.Q or x.gains for x in readers)


def behind_pool(r: OutputManyConsumers) -> list[TensorConsumer]:
    """The Qs that read the result of that pooling, as seen from there."""
    return [replace_fields(q, path=q.path[1:]) for q in quantizer_consumers(r.readers)]


def _many(known: Known, r: OutputManyConsumers, concerned: tuple[str, ...]) -> Diagnosis:
    add, pool = find_float_sum(r), find_shared_pooling(r)
    if pool is not None:
        return Diagnosis(
            pool.node,
            Cause(r),
            r.elements,
            concerned,
            gains=add is not None and wanted(r.readers),
            automatic=find_shareable_quantizer(behind_pool(r)) is not None,
        )
    if add is not None:
        return Diagnosis(
            add.node,
            Cause(r),
            r.elements,
            concerned,
            joined=True,
            gains=wanted(r.readers),
            automatic=_has_scale(known, add.node, add.shares),
        )
    first = (float_consumers(r.readers) or r.readers)[
        0
    ]  # the float one may be farther than was looked
    node = first.node if first.kind != ConsumerKind.OUTPUT else r.tensor
    return Diagnosis(node, Cause(r), r.elements, concerned, gains=wanted(r.readers))


def _not_quantized(known: Known, r: OutputNotQuantized, concerned: tuple[str, ...]) -> Diagnosis:
    average = find_single_average(r)
    if average is not None:
        found = known.first(simulation.ReduceNotPooling, average.node) or known.first(
            simulation.PoolingOneSide, average.node
        )
        also = () if found is None else (found,)
        # With none behind it, the pooling's result is converted back.
        gains = isinstance(found, simulation.ReduceNotPooling) or (
            isinstance(found, simulation.PoolingOneSide)
            and bool(quantizer_consumers(found.readers))
        )
        size = found.elements if isinstance(found, simulation.ReduceNotPooling) else r.elements
        return Diagnosis(average.node, Cause(r, also), size, concerned, gains=gains)
    plain = Diagnosis(r.node, Cause(r), r.elements, concerned)
    if r.activation is None or plain.code != "SILU-NO-Q-AFTER":
        return plain
    return replace_fields(plain, node=r.activation.node, gains=wanted(r.readers))


def of_average(known: Known, node: str) -> Diagnosis | None:
    """An average that runs in float, and why; None for another node."""
    r = known.first(simulation.PoolingOneSide, node) or known.first(
        simulation.ReduceNotPooling, node
    )
    if r is None:
        return None
    return Diagnosis(
        r.node,
        Cause(r),
        r.elements,
        gains=isinstance(r, simulation.ReduceNotPooling) or r.quantized_input,
    )


# Conversions ---------------------------------------------------------------------------------------------------------


def explain(known: Known, stays: RemainingConversion) -> None:
    """Adds the finding about a conversion, and one about what causes it where no convolution's finding says that."""
    if stays.precision not in (Precision.INT8, Precision.INT32) and stays.origin.node:
        _stays(known, stays)
    elif stays.requantizes:
        _requantized(known, stays)
    elif not stays.quantize:
        _dequantize(known, stays)
    elif not stays.origin.node:
        _stays(known, stays)
        _beside(known, stays)
    else:
        see, also = _why_q(known, stays)
        _stays(known, stays, see, also)


def _stays(
    known: Known,
    stays: RemainingConversion,
    see: tuple[See, ...] = (),
    also: Refusal | None = None,
    convolutions: tuple[str, ...] | None = None,
) -> None:
    cause = Cause(stays, () if also is None else (also,), see)
    concerned = stays.convolutions if convolutions is None else convolutions
    known.add(Diagnosis(stays.name, cause, stays.elements, concerned), (stays.node,))


def _beside(known: Known, stays: RemainingConversion) -> tuple[See, ...]:
    """The finding about Qs of other scales on the same tensor; empty where there is none."""
    if not have_different_scales(quantizer_consumers(stays.siblings)):
        return ()
    maker = (stays.origin.convolution,) if stays.origin.convolution else ()
    found = of_readers(known, ScalesAround.from_conversion(stays), stays.siblings, maker)
    if not known.report.has(found.code, found.node) and not known.add(found):
        return ()
    return ((found.code, found.node),)


def _why_q(known: Known, stays: RemainingConversion) -> tuple[tuple[See, ...], Refusal | None]:
    """The findings that explain a Q that stays, or else the refusal that does."""
    origin = stays.origin
    seen = known.see(origin.convolution or origin.node) or known.see(origin.boundary)
    # Other Qs on the tensor are worth a word also where no convolution makes it: of a sum, or of parts of a tensor.
    cut = any(s.op in (*JOINS, *CUTS) for q in quantizer_consumers(stays.siblings) for s in q.path)
    scale = _beside(known, stays) if seen or origin.convolution or cut or origin.op in SUMS else ()
    if seen or scale:
        return tuple(dict.fromkeys((*seen, *scale))), None
    average = of_average(known, origin.node)
    if average is not None:
        known.add(average, (average.node,))
        return known.see(average.node), average.cause.refusal
    own = known.first(simulation.OutputScale, origin.node)
    if own is not None:
        return (), own
    blocked = stays.blocked  # that says why where it is an operator, or readers as float
    read_elsewhere = isinstance(
        blocked, simulation.ManyConsumers | simulation.ConcatReadElsewhere
    ) and float_consumers(blocked.readers)
    if read_elsewhere or isinstance(blocked, simulation.NotCommuting):
        return (), blocked
    return (known.see(origin.quantizer) if origin.quantizer else ()), None


def _requantized(known: Known, stays: RemainingConversion) -> None:
    between = operator_between(stays.passed)
    joined = (
        between is not None
        and between.op in JOINS
        and (
            known.first(simulation.ConcatScales, between.node)
            or have_different_scales(quantizers_with_own(stays))
        )
    )
    if joined:
        found = of_readers(
            known, ScalesAround.from_conversion(stays), quantizers_with_own(stays), ()
        )
    else:
        node = stays.node if between is None else between.node
        found = Diagnosis(node, Cause(ScalesAround.from_conversion(stays)), stays.elements)
    known.add(found, (stays.node,))
    _stays(known, stays, ((found.code, found.node),))


def _dequantize(known: Known, stays: RemainingConversion) -> None:
    inner = known.see(stays.pair) if stays.pair else ()
    for reader in stays.behind:
        found = of_average(known, reader.node)
        add = known.first(simulation.AddOutputNotQuantized, reader.node)
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

"""Why an INT8 convolution writes float, from the refusal that decided."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.base.records import replaced
from qdqtool.explain import scales
from qdqtool.explain.cause import Diagnosis, Known
from qdqtool.explain.readers import floats_of, known_scale, quantizers_of
from qdqtool.model.operators import AVERAGES, OPERATORS, LayerKind
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
    Reader,
    ReaderKind,
    ReduceNotPooling,
    ResidualFloat,
    Step,
)
from qdqtool.types import Cause, FindingCode, Refusal

OUTPUT: dict[type[Refusal], FindingCode] = {
    BatchNormNotConstant: "BN-UNFOLDED",
    ConvTransposeBatchNorm: "CT-BN",
    ResidualFloat: "SKIP-FLOAT",
    AddOutputNotQuantized: "ADD-OUT-FLOAT",
    ActivationBeforeAdd: "ADD-ACT",
    ActivationJoined: "OUT-FLOAT",
    OutputScale: "OUT-FLOAT",
    OutputDifferentScales: "SIBLING-SCALE",
    OutputManyConsumers: "OUT-MIXED",
    OutputNotQuantized: "OUT-FLOAT",
}
"""The refusals that make a layer write float, the one that decides first, and what they become as a rule.

What keeps its own fusions apart (BatchNormalization, Add, activation) comes before who reads the result.
"""
_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def deciding(refusals: Sequence[Refusal]) -> Refusal | None:
    """The refusal that explains a convolution which writes float: the nearest to the convolution."""
    return next((r for kind in OUTPUT for r in refusals if type(r) is kind), None)


def diagnose(known: Known, r: Refusal) -> Diagnosis:
    """The diagnosis of a deciding refusal."""
    concerned = known.concerned(r.node)
    if isinstance(r, OutputDifferentScales):
        return scales.of_readers(known, r, r.readers, r.elements, concerned)
    if isinstance(r, OutputManyConsumers):
        return _many(r, concerned)
    if isinstance(r, OutputNotQuantized):
        return _not_quantized(known, r, concerned)
    code, node, size = OUTPUT[type(r)], r.node, getattr(r, "elements", None)
    fused, gains = False, True
    if isinstance(r, BatchNormNotConstant):
        node = r.batchnorm
    elif isinstance(r, ResidualFloat):
        outcome = known.outcomes.get(r.node)
        node, fused = r.add, outcome is not None and r.add in outcome.fused
        gains = wanted(r.readers)  # else it only adds a DQ that stays (resnet18-a100-qat-residual, last block)
    elif isinstance(r, AddOutputNotQuantized | ActivationBeforeAdd):
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
    is_pool = known is not None and known.passage is not None
    return shared if is_pool and known is not None and (known.kind in _POOLS or shared.op == "GlobalMaxPool") else None


def _many(r: OutputManyConsumers, concerned: tuple[str, ...]) -> Diagnosis:
    floats = floats_of(r.readers)
    add = next((x for x in floats if x.kind == ReaderKind.SUM), None)
    pool = shared_pool(r)
    if pool is not None:
        behind = [replaced(q, path=q.path[1:]) for q in quantizers_of(r.readers)]
        return Diagnosis("POOL-MIXED", pool.node, Cause(r), r.elements, concerned,
                         gains=add is not None and wanted(r.readers), automatic=known_scale(behind) is not None)
    if add is not None:
        return Diagnosis("SKIP-FLOAT", add.node, Cause(r), r.elements, concerned, joined=True,
                         gains=wanted(r.readers))
    node = floats[0].node if floats[0].kind != ReaderKind.OUTPUT else r.tensor
    return Diagnosis("OUT-MIXED", node, Cause(r), r.elements, concerned, gains=wanted(r.readers))


def _not_quantized(known: Known, r: OutputNotQuantized, concerned: tuple[str, ...]) -> Diagnosis:
    average = r.readers[0] if len(r.readers) == 1 and r.readers[0].op in AVERAGES else None
    if average is not None:
        found = known.first(ReduceNotPooling, average.node) or known.first(PoolingOneSide, average.node)
        also = () if found is None else (found,)
        # With none behind it, the pooling's result is converted back.
        gains = isinstance(found, ReduceNotPooling) or (
            isinstance(found, PoolingOneSide) and bool(quantizers_of(found.readers))
        )
        size = found.elements if isinstance(found, ReduceNotPooling) else r.elements
        return Diagnosis("POOL-FLOAT", average.node, Cause(r, also), size, concerned, gains=gains)
    by_design = left_float(r)
    if (
        r.activation is not None and r.activation.op == "SiLU" and not by_design and not quantizers_of(r.readers)
        and not (concerned and before_norm(r))
    ):
        return Diagnosis("SILU-NO-Q-AFTER", r.activation.node, Cause(r), r.elements, concerned,
                         gains=wanted(r.readers))
    return Diagnosis("OUT-FLOAT", r.node, Cause(r), r.elements, concerned)


def left_float(r: OutputNotQuantized) -> bool:
    """Whether no convolution lies behind what reads the result: it was left float."""
    return all(x.kind == ReaderKind.OUTPUT or not x.feeds_weighted for x in r.readers)


def before_norm(r: OutputNotQuantized) -> bool:
    """Whether a LayerNormalization alone reads the result."""
    return len(r.readers) == 1 and r.readers[0].op == "LayerNormalization"


def of_average(known: Known, node: str) -> Diagnosis | None:
    """An average that runs in float, and why; None for another node."""
    r = known.first(PoolingOneSide, node) or known.first(ReduceNotPooling, node)
    if r is None:
        return None
    return Diagnosis("POOL-FLOAT", r.node, Cause(r), r.elements,
                     gains=isinstance(r, ReduceNotPooling) or r.quantized_input)

"""Why each Q or DQ that stays in the engine stays."""

from __future__ import annotations

from qdqtool.explain import outputs, scales
from qdqtool.explain.cause import Diagnosis, Known, See
from qdqtool.explain.readers import floats_of, quantizers_of
from qdqtool.model.operators import SUMS
from qdqtool.trt.refusals import (
    AddOutputNotQuantized,
    ConcatReadElsewhere,
    ConcatScales,
    ManyConsumers,
    NotCommuting,
    OutputScale,
    Stays,
)
from qdqtool.trt.surroundings import differ
from qdqtool.types import Cause, Evidence, Precision, Refusal


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
            evidence=Evidence.ASSUMED if stays.attention else Evidence.SEEN,
        ),
        (stays.node,),
    )


def _beside(known: Known, stays: Stays) -> tuple[See, ...]:
    """The finding about Qs of other scales on the same tensor; empty where there is none."""
    if not differ(quantizers_of(stays.siblings)):
        return ()
    maker = (stays.origin.convolution,) if stays.origin.convolution else ()
    found = scales.of_readers(known, stays, stays.siblings, stays.elements, maker)
    if not known.report.has(found.code, found.node) and not known.add(found):
        return ()
    return ((found.code, found.node),)


def _why_q(known: Known, stays: Stays) -> tuple[tuple[See, ...], Refusal | None]:
    """The findings that explain a Q that stays, or else the refusal that does."""
    origin = stays.origin
    seen = known.see(origin.convolution or origin.node) or known.see(origin.boundary)
    scale = _beside(known, stays) if seen or origin.convolution or _shares(stays) else ()
    if seen or scale:
        return tuple(dict.fromkeys((*seen, *scale))), None
    average = outputs.of_average(known, origin.node)
    if average is not None:
        known.add(average, (average.node,))
        return known.see(average.node), average.cause.refusal
    own = known.first(OutputScale, origin.node)
    if own is not None:
        return (), own
    if _blocks(stays.blocked):
        return (), stays.blocked
    return (known.see(origin.quantizer) if origin.quantizer else ()), None


def _shares(stays: Stays) -> bool:
    """Whether other Qs on the tensor are worth a word although no convolution makes it: a sum, or parts of a tensor."""
    cut = any(scales.crossing(q.path)[0] in ("CONCAT-SCALE", "SPLIT-SCALE") for q in quantizers_of(stays.siblings))
    return cut or stays.origin.op in SUMS


def _blocks(refusal: Refusal | None) -> bool:
    """Whether what kept a Q from moving on says why: an operator, or readers as float."""
    if isinstance(refusal, ManyConsumers | ConcatReadElsewhere):
        return bool(floats_of(refusal.readers))
    return isinstance(refusal, NotCommuting)


def _requantized(known: Known, stays: Stays) -> None:
    code, crossed = scales.crossing(stays.passed)
    if code == "SIBLING-SCALE" or crossed is None:
        found = Diagnosis("DOUBLE-QDQ", stays.node, Cause(stays), stays.elements)
    elif code == "CONCAT-SCALE" and (known.first(ConcatScales, crossed.node) or differ(scales.with_own(stays))):
        found = scales.of_readers(known, stays, scales.with_own(stays), stays.elements, ())
    else:
        found = Diagnosis(code, crossed.node, Cause(stays), stays.elements)
    known.add(found, (stays.node,))
    _stays(known, stays, ((found.code, found.node),))


def _dequantize(known: Known, stays: Stays) -> None:
    inner = known.see(stays.pair) if stays.pair else ()
    for reader in stays.behind:
        found = outputs.of_average(known, reader.node)
        add = known.first(AddOutputNotQuantized, reader.node)
        if found is None and add is not None:
            found = outputs.diagnose(known, add)
        if found is not None:
            known.add(found, (reader.node,))
    taker = known.sum_of(stays.node)
    if taker and known.see(taker):
        _stays(known, stays, known.see(taker), convolutions=known.concerned(taker))
        return
    seen = next((s for r in stays.behind if (s := known.see(r.node))), ())
    _stays(known, stays, inner or seen, convolutions=())

"""Scales that differ: which of the four findings it is goes by what the Qs moved past."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.explain.cause import Diagnosis, Known
from qdqtool.explain.readers import quantizers_of
from qdqtool.model.operators import CUTS, JOINS
from qdqtool.trt.refusals import ConcatScales, Reader, ReaderKind, Size, Stays, Step
from qdqtool.types import Cause, FindingCode, Refusal


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
    """The diagnosis of different scales of a tensor's Qs.

    Args:
        known: All refusals; those of a Concat say what scales its parts have.
        r: The refusal that has the readers.
        readers: Everything that reads the tensor.
        size: Of the tensor.
        convolutions: Those concerned.
    """
    code, crossed = crossed_by(readers)
    node = crossed.node if crossed is not None else str(getattr(r, "tensor", r.node))
    if isinstance(r, Stays) and not r.requantizes:
        node = crossed.node if crossed is not None else r.origin.tensor
    parts = known.first(ConcatScales, node) if code == "CONCAT-SCALE" else None
    return Diagnosis(code, node, Cause(r, () if parts is None else (parts,)), size, convolutions)


def of_concat(parts: ConcatScales) -> Diagnosis:
    """A Concat whose parts have other scales than the Q behind it, where no convolution pays for it."""
    return Diagnosis("CONCAT-SCALE", parts.node, Cause(parts), parts.elements)


def with_own(r: Stays) -> list[Reader]:
    """The Qs that read a requantized tensor, its own included."""
    own = Reader(ReaderKind.Q, r.node, "QuantizeLinear", r.passed, r.scale)
    return [*quantizers_of(r.siblings), own]

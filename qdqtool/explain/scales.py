"""Scales that differ: which of the four findings it is goes by what the Qs moved past."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qdqtool.explain.cause import Cause, Known
from qdqtool.explain.words import names, number, quantizers_of, reader_names, scale_words
from qdqtool.finding_codes import FindingCode
from qdqtool.operators import CUTS, JOINS
from qdqtool.trt.provenance import Reader, Scale, Size, Step
from qdqtool.trt.refusals import ConcatScales


def crossing(steps: Sequence[Step]) -> tuple[FindingCode, Step | None]:
    """The code for scales on the two sides of some operators, and the operator to name."""
    for code, ops in (("CONCAT-SCALE", JOINS), ("SPLIT-SCALE", CUTS)):
        found = next((s for s in steps if s.op in ops), None)
        if found is not None:
            return ("CONCAT-SCALE" if code == "CONCAT-SCALE" else "SPLIT-SCALE"), found
    return ("POOL-SCALE", steps[0]) if steps else ("SIBLING-SCALE", None)


def of_readers(
    known: Known, tensor: str, readers: Sequence[Reader], told: str, size: Size | None, convolutions: tuple[str, ...]
) -> Cause:
    """The cause that consists of the different scales of a tensor's Qs.

    Args:
        known: All refusals; those of a Concat say what scales its parts have.
        tensor: The ONNX tensor.
        readers: Everything that reads it.
        told: The consequence, for the end of the sentence.
        size: Of the tensor.
        convolutions: Those concerned.
    """
    quantizers = quantizers_of(readers)
    code, crossed = crossing([s for q in quantizers for s in q.path])
    own = [q.scale for q in quantizers]
    node = crossed.node if crossed is not None else tensor
    parts = known.first(ConcatScales, node)
    if code == "CONCAT-SCALE" and parts is not None:
        return _of_concat(parts, told, size, convolutions, own)
    if len({s for s in own if s is not None}) < 2:
        message = f"{told}: {names(reader_names(quantizers))} quantize it, and their scales are not at hand to compare."
        return Cause(code, node, message, size=size, convolutions=convolutions)
    listed = ", ".join(f"{scale_words(q.scale)} ({q.node})" for q in quantizers)
    where = f"{crossed.node} ({crossed.op}) stands between scales {listed}" if crossed is not None else (
        f"scales {listed} on '{tensor}'"
    )
    return Cause(code, node, f"{where}; {told}.", unified(own), size, convolutions)


def _of_concat(
    parts: ConcatScales, told: str, size: Size | None, convolutions: tuple[str, ...], own: Sequence[Scale]
) -> Cause:
    return Cause(
        "CONCAT-SCALE", parts.node,
        f"{_joined_words(parts)}; {told}.", unified([*parts.parts, parts.behind, *own]), size, convolutions,
    )


def _joined_words(parts: ConcatScales) -> str:
    listed = ", ".join("none" if p is None else scale_words(p) for p in parts.parts)
    return f"{parts.node} takes scales {listed} and is quantized with {scale_words(parts.behind)} behind it"


def of_concat(parts: ConcatScales) -> Cause:
    """A Concat whose parts have other scales than the Q behind it, where no convolution pays for it."""
    return _of_concat(parts, "each part with another scale is converted", parts.elements, (), ())


def unified(scales: Sequence[Scale]) -> str:
    """The advice to take the largest scale, and what that costs; empty where no two are known."""
    given = [s for s in scales if isinstance(s, float) and s > 0]
    if not given:
        return ""
    largest, smallest = max(given), min(given)
    cost = f" (the smallest range loses {math.log2(largest / smallest):.1f} bits)" if largest > smallest else ""
    return f"Give them one scale, {number(largest)}{cost}."

"""Reasons about scales that differ: in a pair, a row, or around a Concat or pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qdqtool.ir.operators import CUTS, JOINS
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable
from qdqtool.reasons.tensors import (
    PathStep,
    Scale,
    TensorConsumer,
    TensorSize,
    operator_between_quantizers,
    quantizer_consumers,
)
from qdqtool.reasons.text import (
    Message,
    advise_common_scale,
    consumer_names,
    describe_unread_consumers,
    format_number,
    format_scale,
    list_names,
)


def list_scale_rules(steps: Callable[[Any], PathStep | None]) -> tuple[FindingRule, ...]:
    """Return the rules for different scales; the code depends on the operator between them.

    ``steps`` returns this operator for a reason; None if the scales are on one tensor.
    """
    return (
        fixable("CONCAT-SCALE", lambda r: (s := steps(r)) is not None and s.op in JOINS),
        fixable("SPLIT-SCALE", lambda r: (s := steps(r)) is not None and s.op in CUTS),
        fixable("POOL-SCALE", steps),
        fixable("SIBLING-SCALE"),
    )


_MAX_LISTED_SCALES = 12


def describe_concat_scales(r: ConcatScales, consequence: str, own: Sequence[Scale]) -> Message:
    """Return the scales around a Concat with their consequence, and the advice."""
    parts = ["none" if p is None else format_scale(p) for p in r.parts]
    listed = ", ".join(parts[:_MAX_LISTED_SCALES]) + (
        ", ..." if len(parts) > _MAX_LISTED_SCALES else ""
    )
    return (
        f"{r.node} has inputs with scales {listed}, and its output has scale "
        f"{format_scale(r.output_scale)}; {consequence}.",
        advise_common_scale([*r.parts, r.output_scale, *own]),
    )


def describe_different_scales(
    cause: Cause, tensor: str, consumers: Sequence[TensorConsumer], consequence: str
) -> Message:
    """Return the different scales of the Qs that read a tensor, and the advice."""
    quantizers = quantizer_consumers(consumers)
    own = [q.scale for q in quantizers]
    if cause.also and isinstance(cause.also[0], ConcatScales):
        return describe_concat_scales(cause.also[0], consequence, own)
    if len({s for s in own if s is not None}) < 2:
        return (
            f"{consequence}: {list_names(consumer_names(quantizers))} quantize "
            f"it{describe_unread_consumers(consumers)}, and their scales "
            "are not available to compare.",
            "",
        )
    listed = list_names(
        (f"{format_scale(q.scale)} ({q.node})" for q in quantizers), _MAX_LISTED_SCALES
    ) + describe_unread_consumers(consumers)
    between = operator_between_quantizers(consumers)
    where = (
        f"scales {listed} on '{tensor}'"
        if between is None
        else (f"{between.node} ({between.op}) is between scales {listed}")
    )
    return f"{where}; {consequence}.", advise_common_scale(own)


class ConcatScales(Reason, key="concat-scales"):
    """The inputs of a Concat are quantized with other scales than its result.

    Attributes:
        parts: Scale of each input, from the input's DQ or another Q that reads the input. None for
            an input with neither.
        output_scale: Scale of the Q after the Concat, which moved to each input.
        elements: Number of elements of the result.
    """

    rules = (fixable("CONCAT-SCALE"),)

    parts: tuple[Scale, ...]
    output_scale: Scale
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return describe_concat_scales(self, "each input with another scale is converted", ())


class ScalesDiffer(Reason, key="scales-differ"):
    """Quantizers in a row, or on one tensor, have different scales."""

    rules = (fixable("DOUBLE-QDQ"),)

    tensor: str
    quantizers: tuple[str, ...]
    scales: tuple[Scale, ...]


class PairScalesDiffer(Reason):
    """A Q and its DQ with different scales; the node is the DQ.

    Attributes:
        quantizer: The Q.
        scales: Scales of the Q and of the DQ.
    """

    rules = (FindingRule("PAIR-SCALE"),)

    quantizer: str
    scales: tuple[Scale, Scale]

    def message(self, finding: Finding, cause: Cause) -> str:
        first, second = self.scales
        factor = ""
        if isinstance(first, float) and isinstance(second, float) and first:
            factor = f", so that the pair multiplies the tensor by {format_number(second / first)}"
        return (
            f"{self.node} has scale {format_scale(second)}, and {self.quantizer} before it "
            f"{format_scale(first)}{factor}."
        )

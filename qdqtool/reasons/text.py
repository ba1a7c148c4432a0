"""Parts of messages: scales, sizes, nodes, consumers and producers as text."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from qdqtool.ir.operators import SUMS
from qdqtool.ir.qdq import PerChannel
from qdqtool.reasons.tensors import (
    ConsumerKind,
    PathStep,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
    float_consumers,
)

Message = tuple[str, str]
"""Message of a finding, and its fix.

An empty fix stands for the general advice of the finding code, `NO_ACTION` for no advice.
"""

NO_ACTION = "no action needed"

# Ratio of the smallest to the largest scale at which a common scale costs two bits.
_MIN_SCALE_RATIO = 0.25


def format_number(value: float | None) -> str:
    """Return a number with four significant digits; ``unknown`` for None."""
    return "unknown" if value is None else f"{value:.4g}"


def format_scale(scale: Scale) -> str:
    """Return a scale as a number, or the range of scales per channel; ``unknown`` for None."""
    if isinstance(scale, PerChannel):
        if not scale.count:
            return "unknown"
        least, greatest = format_number(scale.least), format_number(scale.greatest)
        return least if least == greatest else f"{least} to {greatest}"
    return format_number(scale)


def list_names(items: Iterable[str], limit: int = 3, more: int = 0) -> str:
    """Return the first distinct names, and the number of others: ``a, b and 4 more``.

    ``more`` is the number of names that are not among the items.
    """
    unique = list(dict.fromkeys(items))
    shown = ", ".join(unique[:limit])
    further = max(len(unique) - limit, 0) + more
    return f"{shown} and {further} more" if further else shown


def format_size(size: TensorSize | None) -> str:
    """Return a size as `` (64x80x80)`` with a space before it; empty if unknown."""
    return f" ({size.shape})" if size is not None and size.shape else ""


def format_node(name: str, op: str) -> str:
    """Return ``name (Op)``; only the name if it contains the operator or no operator is known."""
    return name if not op or op in name else f"{name} ({op})"


def name_first(node: str, count: int) -> str:
    """Return ``(name)`` for a single node, ``(the first is name)`` for the first of several."""
    return f"({node})" if count == 1 else f"(the first is {node})"


def format_step(step: PathStep) -> str:
    """Return the node of a path step as ``name (Op)``."""
    return format_node(step.node, step.op)


def consumer_names(consumers: Sequence[TensorConsumer]) -> list[str]:
    """Return the name of each consumer that is a Q or an output, and ``name (Op)`` of others."""
    return [
        "the network's output"
        if r.kind == ConsumerKind.OUTPUT
        else r.node
        if r.kind == ConsumerKind.Q
        else format_node(r.node, r.op)
        for r in consumers
    ]


def describe_consumers(consumers: Sequence[TensorConsumer], it: str = " the result") -> str:
    """Return a clause on a tensor's consumers: ``/add (Add) reads the result as float``.

    If only Qs read the tensor, the clause names them. ``it`` is the object of the verb. For a
    clause that begins with ``which``, ``it`` is empty.
    """
    if not consumers:
        return f"nothing reads{it}"
    if all(r.kind == ConsumerKind.OUTPUT for r in consumers):
        return f"{it.strip() or 'it'} is the network's output"
    more = getattr(consumers, "more", "")
    if more and [r.node for r in consumers] == [more]:
        return f"its consumers come after {more} and were not analyzed"
    floats = list(dict.fromkeys(consumer_names(float_consumers(consumers))))
    if not floats:
        names = list(dict.fromkeys(consumer_names(consumers)))
        return (
            f"{list_names(names)} {'quantize' if len(names) > 1 else 'quantizes'}{it}"
            f"{describe_unanalyzed_consumers(consumers)}"
        )
    return (
        f"{list_names(floats)} {'read' if len(floats) > 1 else 'reads'}{it} as "
        f"float{describe_unanalyzed_consumers(consumers)}"
    )


def describe_unanalyzed_consumers(consumers: Sequence[TensorConsumer]) -> str:
    """Return a remark about consumers that were not analyzed; empty if all were analyzed."""
    more = getattr(consumers, "more", "")
    return f" (and others after {more}, which were not analyzed)" if more else ""


def describe_origin(origin: TensorOrigin, tensor: str = "") -> str:
    """Describe the producer of a tensor, such as ``the result of /conv1/Conv``.

    ``tensor`` is the name of the tensor. The text includes the name if the producer directly writes
    the tensor and is not a convolution or sum. An empty name is left out.
    """
    if origin.convolution:
        return f"the result of {origin.convolution}"
    if not origin.node:
        return f"the network's input '{origin.tensor}'"
    producer = format_node(origin.node, origin.op)
    if origin.op in SUMS or origin.path or not tensor:
        return f"the result of {producer}"
    return f"'{tensor}' of {producer}"


def _select_positive(scales: Sequence[Scale]) -> list[float]:
    return [s for s in scales if isinstance(s, float) and s > 0]


def differ_by_over_two_bits(smallest: float, largest: float) -> bool:
    """Return whether the largest scale would cost the smallest range more than two bits."""
    return smallest < largest * _MIN_SCALE_RATIO


def count_lost_bits(smallest: float, largest: float) -> float:
    """Return how many bits the largest scale would cost the smallest range."""
    return math.log2(largest / smallest) if smallest > 0 else math.inf


def format_lost_bits(bits: float, limit: str = "") -> str:
    """Return ``1.3 bits``, after a word such as ``at most``, or ``less than 0.1 bit``."""
    return "less than 0.1 bit" if bits < 0.1 else f"{limit}{bits:.1f} bits"


def is_common_scale_too_coarse(scales: Sequence[Scale]) -> bool:
    """Return whether a common scale would cost the smallest range more than two bits."""
    positive = _select_positive(scales)
    return bool(positive) and differ_by_over_two_bits(min(positive), max(positive))


def advise_common_scale(scales: Sequence[Scale]) -> str:
    """Return the advice on a common scale, with its cost in bits; empty if no scale is known.

    The advice is to keep separate scales if the common scale costs more than two bits.
    """
    positive = _select_positive(scales)
    if not positive:
        return ""
    largest, smallest = max(positive), min(positive)
    lost = format_lost_bits(count_lost_bits(smallest, largest))
    cost = f" (the smallest range loses {lost})" if largest > smallest else ""
    if differ_by_over_two_bits(smallest, largest):
        return (
            f"One scale, {format_number(largest)}, would cost the smallest range "
            f"{lost}: keep separate scales, or leave the side with the largest range in "
            "float."
        )
    return f"Use one scale for all, {format_number(largest)}{cost}."


def describe_float_result(reason: Any) -> str:
    """Return ``node writes float``, with the size of the node's output if it is known."""
    return f"{reason.node} writes float{format_size(reason.elements)}"

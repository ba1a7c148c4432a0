"""The words in which readers, origins, scales and sizes are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qdqtool.operators import SUMS
from qdqtool.qdq import PerChannel
from qdqtool.trt.provenance import Origin, Reader, ReaderKind, Scale, Size


def number(value: float | None) -> str:
    """A scale as text, four digits; ``unknown`` where the data is not at hand."""
    return "unknown" if value is None else f"{value:.4g}"


def scale_words(scale: Scale) -> str:
    """A number, or the range of one for each channel."""
    if isinstance(scale, PerChannel):
        return f"{number(scale.least)} to {number(scale.greatest)}" if scale.count else "unknown"
    return number(scale)


def names(items: Iterable[str], limit: int = 3) -> str:
    """Names for a sentence: ``a, b, c and 4 more``."""
    unique = list(dict.fromkeys(items))
    shown = ", ".join(unique[:limit])
    return shown if len(unique) <= limit else f"{shown} and {len(unique) - limit} more"


def size_words(size: Size | None) -> str:
    """`` (64x80x80)``; empty where the size is not known."""
    return f" ({size.shape})" if size is not None and size.shape else ""


def node_words(name: str, op: str) -> str:
    """``name (Op)``, or the name alone where it tells the operator."""
    return name if not op or op in name else f"{name} ({op})"


def reader_names(readers: Sequence[Reader]) -> list[str]:
    found = []
    for reader in readers:
        if reader.kind == ReaderKind.OUTPUT:
            found.append("the network's output")
        elif reader.kind == ReaderKind.Q:
            found.append(reader.node)
        else:
            found.append(node_words(reader.node, reader.op))
    return found


def floats_of(readers: Sequence[Reader]) -> list[Reader]:
    """Those that are no Q."""
    return [r for r in readers if r.kind != ReaderKind.Q]


def quantizers_of(readers: Sequence[Reader]) -> list[Reader]:
    return [r for r in readers if r.kind == ReaderKind.Q]


def readers_words(readers: Sequence[Reader]) -> str:
    """Who reads a tensor as float, as a clause."""
    if not readers:
        return "nothing reads it"
    if all(r.kind == ReaderKind.OUTPUT for r in readers):
        return "it is the network's output"
    told = list(dict.fromkeys(reader_names(floats_of(readers))))
    if not told:
        return f"{names(reader_names(readers))} quantizes it"
    return f"{names(told)} {'read' if len(told) > 1 else 'reads'} it as float"


def origin_words(origin: Origin, tensor: str = "") -> str:
    """Where a tensor comes from."""
    if origin.convolution:
        return f"the result of {origin.convolution}"
    if not origin.node:
        return f"the network's input '{origin.tensor}'"
    told = node_words(origin.node, origin.op)
    if origin.op in SUMS or origin.path or not tensor:
        return f"the result of {told}"
    return f"'{tensor}' of {told}"

"""When two findings report the same, of a model and of a part of it: by their causes' values, never by their words.

What a cut changes without touching the cause is left out: sizes, what lies behind the readers of a tensor, the name of
an output, and of a conversion all that another finding, or the refusal beside it, explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qdqtool.base.records import contents
from qdqtool.explain.coded import average_behind, left_float, with_own
from qdqtool.explain.messages import quantizers_of
from qdqtool.trt import refusals as trt
from qdqtool.trt.refusals import Reader, ReaderKind, Stays
from qdqtool.types import Cause, Finding, Precision, Refusal

Key = tuple[Any, ...]


class _Reading(NamedTuple):
    node: str
    kind: ReaderKind
    op: str
    scale: Any


def key(finding: Finding) -> Key:
    """Equal for two findings that report the same."""
    return finding.code, finding.severity, finding.node, finding.gains, *(_cause(finding, c) for c in finding.causes)


def readers_in(found: Key) -> Iterator[str]:
    """The nodes that a key lists as readers: where one is missing, the finding is another."""
    for value in found:
        if isinstance(value, _Reading):
            yield value.node
        elif isinstance(value, tuple):
            yield from readers_in(value)


def _cause(finding: Finding, cause: Cause) -> Key:
    r = cause.refusal
    also = tuple(_values(other) for other in cause.also if not _says_nothing(other))
    if isinstance(r, Stays):
        return type(r), r.name, r.scale, *_conversion(finding, cause, r, also)
    return type(r), _values(r), also, cause.see, cause.fused


def _says_nothing(refusal: Refusal) -> bool:
    """A pooling without a Q behind it, beside a result that nothing quantizes."""
    return isinstance(refusal, trt.PoolingOneSide) and not quantizers_of(refusal.readers)


def _conversion(finding: Finding, cause: Cause, r: Stays, also: Key) -> Key:
    """What is told of a conversion, by what explains it."""
    if finding.code == "INPUT-CONVERSION":
        return r.precision, r.origin.tensor
    if finding.code == "CONVERSION":
        if r.precision not in (Precision.INT8, Precision.INT32) and r.origin.node:
            return r.attention, r.precision
        if cause.see:
            return r.attention, *cause.see
        if not r.quantize:
            return r.attention, *_readers(r.behind)
        return r.attention, also or (r.origin.node, r.origin.op, r.origin.int8)
    own = with_own(r) if r.requantizes else r.siblings
    return r.pair, r.first_scale, r.tensor, r.requantizes, _readers(quantizers_of(own)), also


def _values(refusal: Any) -> Key:
    """The values of a refusal, sizes apart."""
    found = [_value(v) for name, v in zip(refusal._fields, contents(refusal), strict=True)
             if name not in refusal.sizes]
    if isinstance(refusal, trt.OutputNotQuantized) and average_behind(refusal) is None:
        found.append(left_float(refusal))
    return type(refusal), *found


def _value(value: Any) -> Any:
    if isinstance(value, Refusal):
        return _values(value)
    if isinstance(value, tuple):
        return _readers(value) if value and isinstance(value[0], Reader) else tuple(map(_value, value))
    return "nan" if value != value else value


def _readers(readers: Sequence[Reader]) -> Key:
    """Who reads a tensor; neither in what order, nor what lies behind."""
    found = (_Reading("" if r.kind == ReaderKind.OUTPUT else r.node, r.kind, r.op, _value(r.scale)) for r in readers)
    return tuple(sorted(found, key=str))

"""A comparison in sentences: the answer in one line, and what happened at a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qdqtool.comparison.result import (
    NO_LISTING,
    Change,
    Comparison,
    Lost,
    NodeChange,
    Scales,
)
from qdqtool.util.notes import Remark
from qdqtool.util.text import counted, layers_counted

PRODUCTS = (
    "Gemm",
    "MatMul",
    "gemm",
    "fusion",
    "kgen",
)  # operators of a model, kinds of layers of a build
_LOST = {
    Lost.PAIRS: "{} Q/DQ are gone",
    Lost.WEIGHTS: "the Q/DQ of {} weights are gone",
    Lost.DATA: "the Q/DQ of {} input are gone",
    Lost.FLOAT_BUILD: Remark.OF_FLOAT_MODEL(),
    Lost.UNEXPLAINED: "predicted INT8; this build does not say why",
}

_HAPPENED = {
    Change.GAINED_INT8: "gained INT8",
    Change.LOST_QDQ: "Q/DQ removed",
    Change.GAINED_QDQ: "Q/DQ added",
    Change.ONLY_IN_A: "only in A",
    Change.ONLY_IN_B: "only in B",
}
_TENTH = 0.1
_LITTLE = 1e-3  # what rounding scales to FP16 makes of them, and no choice of ranges


def answer(comparison: Comparison) -> str:
    """One line: what B lost and gained against A."""
    makers = (_partial, _realized, _lost, _gained, _outputs, _conversions, _scales)
    parts = [part for make in makers for part in make(comparison)]
    for change, side in ((Change.ONLY_IN_A, "A"), (Change.ONLY_IN_B, "B")):
        if found := comparison.where(change):
            parts.append(f"{_layers(found)} only in {side}")
    if not parts:
        parts.append(
            f"{len(comparison.changed)} nodes differ"
            if comparison.changed
            else "no difference"
            if comparison.nodes and not comparison.unknown
            else "data types are not known"
        )
    parts += _times(comparison)
    return "; ".join(parts)


def _partial(comparison: Comparison) -> list[str]:
    """What has to be known before anything else: a build that is cut off, a model that TensorRT does not take."""
    sides = (("A", comparison.a), ("B", comparison.b))
    cut = [
        f"{label} is incomplete ({', '.join(side.missing)})"
        for label, side in sides
        if side.missing
    ]
    return cut + [f"{label} has {side.obstacle}" for label, side in sides if side.obstacle]


def _realized(comparison: Comparison) -> list[str]:
    """Of a model and its build: how many of the convolutions that the model quantizes run in INT8."""
    asked, built = comparison.a, comparison.b
    if {asked.kind, built.kind} != {"model", "build"}:
        return []
    first = asked.kind == "model"
    asked_for = [n for n in comparison.nodes if n.a and n.b and (n.a if first else n.b).is_int8]
    run = sum((n.b if first else n.a).is_int8 for n in asked_for if n.a and n.b)
    open_ = sum(n.is_unknown for n in asked_for)
    alone = " by the optimizer's lines alone" if NO_LISTING in built.gaps + asked.gaps else ""
    return [
        f"{run} of {_layers(asked_for)} that the model quantizes run in INT8{alone}"
        + (f", {open_} unknown: the build does not show their data types" if open_ else "")
    ]


def _layers(nodes: Sequence[NodeChange]) -> str:
    products = sum(n.op in PRODUCTS for n in nodes)
    return layers_counted(len(nodes) - products, products)


def _lost(comparison: Comparison) -> list[str]:
    lost = comparison.where(Change.LOST_INT8)
    some = {(n.lost, n.finding): n for n in lost}
    reasons = [
        (number, _reason(some[key], many=number > 1))
        for key, number in Counter((n.lost, n.finding) for n in lost).most_common()
    ]
    each = "; ".join(f"{number}: {reason or 'unknown'}" for number, reason in reasons)
    one = "".join(f": {reason}" for _, reason in reasons if reason)
    return (
        [f"{_layers(lost)} lost INT8{one if len(reasons) == 1 else f' ({each})'}"] if lost else []
    )


def _reason(node: NodeChange, *, many: bool) -> str:
    if node.lost in _LOST:
        return _LOST[node.lost].format("their" if many else "its")
    return node.finding


def _gained(comparison: Comparison) -> list[str]:
    found = comparison.where(Change.GAINED_INT8)
    return [f"{_layers(found)} gained INT8"] if found else []


def _outputs(comparison: Comparison) -> list[str]:
    said = ["still in INT8 but writing float now", "in INT8 as before and writing INT8 now"]
    if comparison.a.kind != comparison.b.kind:
        said = ["write float where INT8 is predicted", "write INT8 where float is predicted"]
        if comparison.a.kind == "build":
            said.reverse()
    changes = (Change.LOST_INT8_OUTPUT, Change.GAINED_INT8_OUTPUT)
    return [
        f"{_layers(found)} {what}"
        for change, what in zip(changes, said, strict=True)
        if (found := comparison.where(change))
    ]


def _conversions(comparison: Comparison) -> list[str]:
    more, kinds = comparison.more_conversions, (comparison.a.kind, comparison.b.kind)
    predicted = "" if kinds[0] == kinds[1] else " than predicted"
    is_more = (more or 0) < 0 if kinds == ("build", "model") else (more or 0) > 0
    return (
        [f"{counted(abs(more), 'conversion')} {'more' if is_more else 'fewer'}{predicted}"]
        if more
        else []
    )


def _scales(comparison: Comparison) -> list[str]:
    parts = []
    for change, what in ((Change.SCALE, "activations"), (Change.WEIGHTS_SCALE, "weights")):
        factors = [
            n.factor if change == Change.SCALE else n.weights_factor
            for n in comparison.where(change)
        ]
        known = [f for f in factors if f is not None]
        one = (
            len(known) == len(factors)
            and bool(known)
            and max(known) - min(known) <= _LITTLE * max(known)
        )
        how = (
            f", by less than {_LITTLE:.1%}"
            if all(f is not None and abs(f - 1.0) < _LITTLE for f in factors)
            else f", all by one factor ({_times_or_percent(known[0])})"
            if one and len(factors) > 1
            else f" ({_times_or_percent(known[0])})"
            if one
            else ""
        )
        parts += (
            [f"scales of {what} differ at {counted(len(factors), 'node')}{how}"] if factors else []
        )
    return parts


def _times(comparison: Comparison) -> list[str]:
    times, place = comparison.times_as_long, comparison.b.gpu or comparison.a.gpu
    estimated = f"{f' on {place}' if place else ''}, estimated"
    how = "" if comparison.a.measured and comparison.b.measured else estimated
    return [] if times is None else [f"{times:.2f} times as long{how}"]


def why(node: NodeChange, finding: str = "", said: tuple[str, str] = ("wrote", "writes")) -> str:
    """What happened at one node.

    ``finding`` is the message of the one that explains a lost INT8; ``said`` is how what A and B write is told.
    """
    a, b = node.a, node.b
    parts: list[str] = []
    for change in node.changes:
        if change in _HAPPENED:
            parts.append(_HAPPENED[change])
        elif change == Change.LOST_INT8:
            reason = _reason(node, many=False) if node.lost in _LOST else finding
            parts.append(f"lost INT8: {reason}" if reason else "lost INT8")
        elif change == Change.LOST_INT8_OUTPUT:
            parts.append(
                f"{said[0]} INT8, {said[1]} {b.output if b else ''}{f': {finding}' if finding else ''}"
            )
        elif change == Change.GAINED_INT8_OUTPUT:
            parts.append(f"{said[0]} {a.output if a else ''}, {said[1]} INT8")
        elif change == Change.RESIDUAL and a is not None and b is not None:
            parts.append(f"reads the residual as {b.inputs[1]} instead of {a.inputs[1]}")
        elif change == Change.SCALE and node.scales is not None:
            parts.append(_changed("scale", *node.scales, node.factor))
        elif change == Change.WEIGHTS_SCALE and a is not None and b is not None:
            parts.append(
                _changed("weights' scale", a.weights_scale, b.weights_scale, node.weights_factor)
            )
        elif change == Change.FUSION and a is not None and b is not None:
            before, after = (", ".join(s.fused) or "nothing" for s in (a, b))
            again = "" if a.fused and b.fused else "fused "
            parts.append(f"fused with {before} in A, {again}with {after} in B")
    return "; ".join([*(p.removesuffix(".") for p in parts[:-1]), *parts[-1:]])


def _changed(what: str, a: Scales | None, b: Scales | None, factor: float | None) -> str:
    """``scale 0.1 -> 0.2 (times 2)``, and what else differs."""
    changes = [] if factor is None or factor == 1.0 else [_times_or_percent(factor)]
    if a is not None and b is not None:
        changes += [
            f"{part} {getattr(a, part)} -> {getattr(b, part)}"
            for part in ("axis", "type")
            if a.count == b.count and getattr(a, part) != getattr(b, part)
        ]
        changes += ["zero points differ"] * (a.zero != b.zero)
    changes += [
        f"{side} is not a valid scale"
        for side, s in (("A", a), ("B", b))
        if s is not None and not s.valid
    ]
    return f"{what} {scale(a)} -> {scale(b)}" + (f" ({', '.join(changes)})" if changes else "")


def _times_or_percent(factor: float) -> str:
    """``times 2``, and below a tenth ``+0.79%``, in which small factors are told apart."""
    return (
        f"times {factor:.3g}" if abs(factor - 1.0) >= _TENTH else f"{100.0 * (factor - 1.0):+.2g}%"
    )


def scale(scales: Scales | None) -> str:
    """A scale, or the ends of several."""
    if scales is None:
        return "unknown"
    least, greatest = scales.ends
    return (
        f"{least:.4g}"
        if scales.count == 1
        else f"{least:.4g} to {greatest:.4g} ({scales.count} channels)"
    )

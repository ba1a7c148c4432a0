"""A comparison in sentences: a one-line summary, and the changes at a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qdqtool.comparison.result import (
    NO_LISTING,
    ChangeKind,
    Comparison,
    LossReason,
    NodeChange,
    QuantizerScales,
)
from qdqtool.util.text import counted, layers_counted

# Operators of a model, and kinds of layers of a build.
_PRODUCTS = ("Gemm", "MatMul", "gemm", "fusion", "kgen")
FLOAT_BUILD = "the build has no Q/DQ: it was built from a float model"
_LOSS_REASONS = {
    LossReason.PAIRS: "{} Q/DQ are gone",
    LossReason.WEIGHTS: "the Q/DQ of {} weights are gone",
    LossReason.DATA: "the Q/DQ of {} input are gone",
    LossReason.FLOAT_BUILD: FLOAT_BUILD,
    LossReason.UNEXPLAINED: "predicted INT8; this build does not say why",
}
_CHANGES = {
    ChangeKind.GAINED_INT8: "gained INT8",
    ChangeKind.LOST_QDQ: "Q/DQ removed",
    ChangeKind.GAINED_QDQ: "Q/DQ added",
    ChangeKind.ONLY_IN_A: "only in A",
    ChangeKind.ONLY_IN_B: "only in B",
}
_MIN_TIMES = 0.1  # relative change from which a factor is printed as "times 2"
_ROUNDING = 1e-3  # relative changes below this come from scales rounded to FP16


def summarize(comparison: Comparison) -> str:
    """Summarize the losses and gains of B against A in one line."""
    parts = [
        *_missing_parts(comparison),
        *_realized_int8(comparison),
        *_lost_int8(comparison),
        *_gained_int8(comparison),
        *_changed_outputs(comparison),
        *_changed_conversions(comparison),
        *_changed_scales(comparison),
    ]
    for change, side in ((ChangeKind.ONLY_IN_A, "A"), (ChangeKind.ONLY_IN_B, "B")):
        nodes = comparison.where(change)
        if nodes:
            parts.append(f"{_count_layers(nodes)} only in {side}")
    if not parts:
        if comparison.changed:
            parts.append(f"{len(comparison.changed)} nodes differ")
        elif comparison.nodes and not comparison.unknown:
            parts.append("no difference")
        else:
            parts.append("data types are not known")
    return "; ".join([*parts, *_changed_time(comparison)])


def _missing_parts(comparison: Comparison) -> list[str]:
    """Describe truncated builds, and models that TensorRT rejects."""
    sides = (("A", comparison.a), ("B", comparison.b))
    return [
        f"{label} is incomplete ({', '.join(side.missing)})"
        for label, side in sides
        if side.missing
    ] + [f"{label} has {side.obstacle}" for label, side in sides if side.obstacle]


def _realized_int8(comparison: Comparison) -> list[str]:
    """Count the quantized convolutions of a model that run in INT8 in its build."""
    if {comparison.a.kind, comparison.b.kind} != {"model", "build"}:
        return []
    model_first = comparison.a.kind == "model"
    quantized: list[NodeChange] = []
    realized = 0
    for node in comparison.nodes:
        if node.a and node.b and (node.a if model_first else node.b).is_int8:
            quantized.append(node)
            realized += (node.b if model_first else node.a).is_int8
    text = f"{realized} of {_count_layers(quantized)} that the model quantizes run in INT8"
    unknown = sum(node.is_unknown for node in quantized)
    if NO_LISTING in (*comparison.a.gaps, *comparison.b.gaps):
        text += " by the optimizer's lines alone"
    if unknown:
        text += f", {unknown} unknown: the build does not show their data types"
    return [text]


def _count_layers(nodes: Sequence[NodeChange]) -> str:
    products = sum(n.op in _PRODUCTS for n in nodes)
    return layers_counted(len(nodes) - products, products)


def _lost_int8(comparison: Comparison) -> list[str]:
    nodes = comparison.where(ChangeKind.LOST_INT8)
    if not nodes:
        return []
    examples = {(n.lost, n.finding): n for n in nodes}
    counts = Counter((n.lost, n.finding) for n in nodes).most_common()
    reasons = [(count, _loss_reason(examples[key], many=count > 1)) for key, count in counts]
    text = f"{_count_layers(nodes)} lost INT8"
    if len(reasons) > 1:
        each = "; ".join(f"{count}: {reason or 'unknown'}" for count, reason in reasons)
        return [f"{text} ({each})"]
    reason = reasons[0][1]
    return [f"{text}: {reason}" if reason else text]


def _loss_reason(node: NodeChange, *, many: bool) -> str:
    if node.lost in _LOSS_REASONS:
        return _LOSS_REASONS[node.lost].format("their" if many else "its")
    return node.finding


def _gained_int8(comparison: Comparison) -> list[str]:
    nodes = comparison.where(ChangeKind.GAINED_INT8)
    return [f"{_count_layers(nodes)} gained INT8"] if nodes else []


def _changed_outputs(comparison: Comparison) -> list[str]:
    lost = "still in INT8 but writing float now"
    gained = "in INT8 as before and writing INT8 now"
    if comparison.a.kind != comparison.b.kind:
        lost = "write float where INT8 is predicted"
        gained = "write INT8 where float is predicted"
        if comparison.a.kind == "build":
            lost, gained = gained, lost
    parts = []
    for change, text in (
        (ChangeKind.LOST_INT8_OUTPUT, lost),
        (ChangeKind.GAINED_INT8_OUTPUT, gained),
    ):
        nodes = comparison.where(change)
        if nodes:
            parts.append(f"{_count_layers(nodes)} {text}")
    return parts


def _changed_conversions(comparison: Comparison) -> list[str]:
    more, kinds = comparison.more_conversions, (comparison.a.kind, comparison.b.kind)
    if not more:
        return []
    predicted = "" if kinds[0] == kinds[1] else " than predicted"
    is_more = more < 0 if kinds == ("build", "model") else more > 0
    return [f"{counted(abs(more), 'conversion')} {'more' if is_more else 'fewer'}{predicted}"]


def _changed_scales(comparison: Comparison) -> list[str]:
    activations = [n.factor for n in comparison.where(ChangeKind.SCALE)]
    weights = [n.weights_factor for n in comparison.where(ChangeKind.WEIGHTS_SCALE)]
    return [
        f"scales of {tensors} differ at {counted(len(factors), 'node')}{_describe_factors(factors)}"
        for tensors, factors in (("activations", activations), ("weights", weights))
        if factors
    ]


def _describe_factors(factors: list[float | None]) -> str:
    """Describe the factors if they are small or equal."""
    known = [f for f in factors if f is not None]
    if len(known) < len(factors):
        return ""
    if all(abs(f - 1.0) < _ROUNDING for f in known):
        return f", by less than {_ROUNDING:.1%}"
    if max(known) - min(known) > _ROUNDING * max(known):
        return ""
    factor = _format_factor(known[0])
    return f", all by one factor ({factor})" if len(known) > 1 else f" ({factor})"


def _changed_time(comparison: Comparison) -> list[str]:
    if comparison.times_as_long is None:
        return []
    text = f"{comparison.times_as_long:.2f} times as long"
    if comparison.a.measured and comparison.b.measured:
        return [text]
    gpu = comparison.b.gpu or comparison.a.gpu
    return [f"{text} on {gpu}, estimated" if gpu else f"{text}, estimated"]


def describe_changes(
    node: NodeChange, finding: str = "", verbs: tuple[str, str] = ("wrote", "writes")
) -> str:
    """Describe all changes at one node.

    Args:
        finding: Message of the finding that explains a lost INT8.
        verbs: Verbs for the outputs of A and B.
    """
    parts = [_describe_change(node, kind, finding, verbs) for kind in node.changes]
    return "; ".join([*(p.removesuffix(".") for p in parts[:-1]), *parts[-1:]])


def _describe_change(
    node: NodeChange, kind: ChangeKind, finding: str, verbs: tuple[str, str]
) -> str:
    a, b = node.a, node.b
    if kind in _CHANGES:
        return _CHANGES[kind]
    assert a is not None and b is not None
    if kind == ChangeKind.LOST_INT8:
        reason = _loss_reason(node, many=False) if node.lost in _LOSS_REASONS else finding
        return f"lost INT8: {reason}" if reason else "lost INT8"
    if kind == ChangeKind.LOST_INT8_OUTPUT:
        text = f"{verbs[0]} INT8, {verbs[1]} {b.output}"
        return f"{text}: {finding}" if finding else text
    if kind == ChangeKind.GAINED_INT8_OUTPUT:
        return f"{verbs[0]} {a.output}, {verbs[1]} INT8"
    if kind == ChangeKind.RESIDUAL:
        return f"reads the residual as {b.inputs[1]} instead of {a.inputs[1]}"
    if kind == ChangeKind.SCALE:
        scales = node.scales or (a.scale, b.scale)
        return _describe_scales("scale", *scales, node.factor)
    if kind == ChangeKind.WEIGHTS_SCALE:
        scales = (a.weights_scale, b.weights_scale)
        return _describe_scales("weights' scale", *scales, node.weights_factor)
    before, after = (", ".join(side.fused) or "nothing" for side in (a, b))
    again = "" if a.fused and b.fused else "fused "
    return f"fused with {before} in A, {again}with {after} in B"


def _describe_scales(
    name: str, a: QuantizerScales | None, b: QuantizerScales | None, factor: float | None
) -> str:
    """Return ``scale 0.1 -> 0.2 (times 2)``, with the other differences in the parentheses."""
    changes = [] if factor is None or factor == 1.0 else [_format_factor(factor)]
    if a is not None and b is not None:
        if a.count == b.count and a.axis != b.axis:
            changes.append(f"axis {a.axis} -> {b.axis}")
        if a.count == b.count and a.type != b.type:
            changes.append(f"type {a.type} -> {b.type}")
        if a.zero != b.zero:
            changes.append("zero points differ")
    for side, scales in (("A", a), ("B", b)):
        if scales is not None and not scales.valid:
            changes.append(f"{side} is not a valid scale")
    text = f"{name} {format_scales(a)} -> {format_scales(b)}"
    return f"{text} ({', '.join(changes)})" if changes else text


def _format_factor(factor: float) -> str:
    """Return ``times 2``, or ``+0.79%`` for a small change."""
    if abs(factor - 1.0) >= _MIN_TIMES:
        return f"times {factor:.3g}"
    return f"{100.0 * (factor - 1.0):+.2g}%"


def format_scales(scales: QuantizerScales | None) -> str:
    """Return a scale, or the smallest and the largest of several."""
    if scales is None:
        return "unknown"
    least, greatest = scales.ends
    if scales.count == 1:
        return f"{least:.4g}"
    return f"{least:.4g} to {greatest:.4g} ({scales.count} channels)"

"""A comparison in sentences: a one-line summary, and the changes at a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qdqtool.comparison.result import (
    NO_LISTING,
    ChangeKind,
    Comparison,
    LossReason,
    NodeChange,
    NodeSide,
    QuantizerScales,
)
from qdqtool.ir.precision import Precision, name_type
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_count_were, format_layer_counts, format_speed

if TYPE_CHECKING:
    from qdqtool.accuracy.agreement import NetworkAgreement

# Operators of a model and layer types of a build that are matrix products.
_PRODUCTS = ("Gemm", "MatMul", "gemm", "fusion", "kgen")
FLOAT_BUILD = "the build has no Q/DQ: it was built from a float model"
_CHANGES = {
    ChangeKind.LOST_QDQ: "Q/DQ removed",
    ChangeKind.GAINED_QDQ: "Q/DQ added",
    ChangeKind.ONLY_IN_A: "only in A",
    ChangeKind.ONLY_IN_B: "only in B",
}
_ONE_SIDED = (ChangeKind.ONLY_IN_A, ChangeKind.ONLY_IN_B)
_UNKNOWN = "unknown"
_MIN_IMAGES = 100  # with 100 images, the 95 % interval of an agreement near 0.97 is about 0.03 wide
_MIN_TIMES = 0.1  # a relative change of at least this is printed as a factor, such as "times 2"
_MAX_INTERFACE_CHANGES = 2  # more inputs and outputs that differ are listed below the summary
_ROUNDING = 1e-3  # relative changes below this come from scales rounded to FP16


def summarize_comparison(comparison: Comparison) -> str:
    """Summarize agreement, losses, gains and time of B compared with A in one line."""
    parts = [
        *_describe_obstacles_and_gaps(comparison),
        *_describe_realized_int8(comparison),
        *_describe_change_counts(comparison, {ChangeKind.FORMAT: _describe_format(comparison)}),
        *_describe_losses(comparison),
        *_describe_change_counts(comparison, {ChangeKind.GAINED_INT8: _describe_gains(comparison)}),
        *_describe_change_counts(comparison, _make_output_texts(comparison)),
        *_describe_conversions(comparison),
        *_describe_all_scales(comparison),
        *_describe_change_counts(comparison, {kind: _CHANGES[kind] for kind in _ONE_SIDED}),
        *_describe_interface(comparison),
    ]
    if not parts and comparison.changed:
        verb = "differs" if len(comparison.changed) == 1 else "differ"
        parts = [f"{format_count(len(comparison.changed), 'node')} {verb}"]
    elif not parts:
        is_equal = comparison.nodes and not comparison.unknown
        parts = [_describe_equal_nodes(comparison) if is_equal else "data types are not known"]
        if not comparison.nodes and (comparison.a.subgraphs or comparison.b.subgraphs):
            parts = ["nothing to compare outside of the subgraphs of If, Loop and Scan"]
    return "; ".join([*_describe_agreement(comparison), *parts, *_describe_time(comparison)])


def _describe_equal_nodes(comparison: Comparison) -> str:
    is_other_time = comparison.times_as_long is not None and not comparison.is_as_fast
    return "no difference at layers with weights or Q/DQ" if is_other_time else "no difference"


def _describe_interface(comparison: Comparison) -> list[str]:
    """Describe the changes of inputs and outputs, or only count them if they are listed."""
    if is_interface_listed(comparison):
        return [f"{len(comparison.interface)} inputs and outputs differ"]
    return [change.why for change in comparison.interface]


def is_interface_listed(comparison: Comparison) -> bool:
    """Return whether the inputs and outputs that differ are too many for the summary."""
    return len(comparison.interface) > _MAX_INTERFACE_CHANGES


def _describe_agreement(comparison: Comparison) -> list[str]:
    if comparison.agreement is None:
        return []
    measure = comparison.agreement.measure
    images = format_count(comparison.agreement.images, "image")
    if measure.value is None:
        return [f"agreement unknown on {images}"]
    masks = comparison.agreement.masks
    of_masks = "" if masks is None or masks.value is None else f", of masks {masks.value:.3f}"
    interval = f"{measure.low:.3f} to {measure.high:.3f}"
    return [f"agreement {measure.value:.3f} ({interval}){of_masks} on {images}"]


def note_quantized_reference(comparison: Comparison) -> list[Note]:
    """Return a note if both compared models are quantized, else an empty list."""
    if not (comparison.a.quantized and comparison.b.quantized):
        return []
    return [
        Note(
            "A is quantized too, so the agreement does not show which model is more accurate. "
            "Compare each model with the float model.",
            code="reference-quantized",
        )
    ]


def list_image_notes(agreement: NetworkAgreement) -> list[Note]:
    """Return notes about unreadable images, too few images, and implausible detections."""
    notes = []
    if agreement.unread:
        name, reason = agreement.unread[0]
        count = len(agreement.unread)
        notes.append(
            Note(
                f"{format_count_were(count, 'image')} left out because of reading errors; the "
                f"first is {name}: {reason}",
                code="unread-images",
                count=count,
                file=name,
            )
        )
    if agreement.measure.value is None:
        notes.append(
            Note(
                "no agreement: model A detects nothing on these images. Give images like those of "
                "the deployment, and check the preprocessing.",
                code="nothing-detected",
            )
        )
        return notes
    if agreement.has_most_detections:
        notes.append(
            Note(
                f"model A has {agreement.measure.count // agreement.images} detections in every "
                "image, the maximum. Check the preprocessing: wrong pixel values can cause this",
                code="most-detections",
            )
        )
    if agreement.images < _MIN_IMAGES:
        notes.append(
            Note(
                f"{format_count(agreement.images, 'image')} can show only large differences; give "
                f"{_MIN_IMAGES} or more images",
                code="few-images",
                images=agreement.images,
                enough=_MIN_IMAGES,
            )
        )
    return notes


def _describe_obstacles_and_gaps(comparison: Comparison) -> list[str]:
    sides = (("A", comparison.a), ("B", comparison.b))
    cut = [f"{name} is incomplete ({', '.join(s.missing)})" for name, s in sides if s.missing]
    obstacles = [f"{name} has {side.obstacle}" for name, side in sides if side.obstacle]
    rejected = [
        f"TensorRT {side.rejection} {name} (see qdqtool predict)"
        for name, side in sides
        if side.rejected and not side.obstacle
    ]
    return [*cut, *obstacles, *rejected]


def _describe_format(comparison: Comparison) -> str:
    """Return ``in FP8 instead of INT8``, or a general text if formats changed both ways."""
    sides = [(n.a, n.b) for n in comparison.where(ChangeKind.FORMAT)]
    pairs = {(_name_format(a), _name_format(b)) for a, b in sides}
    if len(pairs) != 1:
        return "change between INT8 and FP8"
    ((before, after),) = pairs
    return f"in {after} instead of {before}"


def name_formats(title: str, kind: ChangeKind, nodes: Sequence[NodeChange]) -> str:
    """Return the title of a change with the 8-bit formats of its nodes in place of INT8.

    Args:
        title: Title of the kind of change.
        kind: Kind of change.
        nodes: Nodes with this kind of change.
    """
    is_loss = kind == ChangeKind.LOST_INT8
    sides = [node.a if is_loss else node.b for node in nodes]
    formats = _join_formats_by_or(sides)
    if kind == ChangeKind.FORMAT:
        before = _join_formats_by_or([node.a for node in nodes])
        return f"{formats} instead of {before}" if formats != before else title
    return title.replace("INT8", formats)


def _name_format(side: NodeSide | None) -> str:
    return "FP8" if side is not None and side.precision == Precision.FP8 else "INT8"


def _join_formats_by_or(sides: Iterable[NodeSide | None]) -> str:
    """Return the 8-bit formats of nodes: ``FP8``, ``INT8 or FP8``; ``INT8`` without nodes."""
    return " or ".join(sorted(set(map(_name_format, sides)), reverse=True)) or "INT8"


def _list_requested(comparison: Comparison) -> list[NodeChange]:
    """Return the nodes that the model quantizes, in a comparison of a model and a build."""
    both = [node for node in comparison.nodes if node.a and node.b]
    models = [node.a if comparison.a.kind == "model" else node.b for node in both]
    return [n for n, model in zip(both, models, strict=True) if model and model.is_quantized]


def _describe_realized_int8(comparison: Comparison) -> list[str]:
    """Describe how many quantized convolutions of a model run in INT8 or FP8 in its build.

    Empty unless the comparison is of a model and a build.
    """
    a, b = comparison.a, comparison.b
    if {a.kind, b.kind} != {"model", "build"}:
        return []
    requested = _list_requested(comparison)
    realized = sum(node.is_quantized for node in requested)
    is_model_first = a.kind == "model"
    built = [n.b if is_model_first else n.a for n in requested if n.is_quantized]
    planned = [n.a if is_model_first else n.b for n in requested]
    formats = _join_formats_by_or(built or planned)
    text = (
        f"{realized} of {_format_layer_count(requested)} that the model quantizes run in {formats}"
    )
    if NO_LISTING in (*a.gaps, *b.gaps):
        text += " according to the optimizer's lines alone"
    unknown = sum(node.is_unknown for node in requested)
    if unknown:
        text += f", {unknown} unknown: the build does not show the data type"
    return [text]


def _describe_change_counts(comparison: Comparison, texts: dict[ChangeKind, str]) -> list[str]:
    """Return a text such as ``3 convolutions <text>`` for each kind of change that occurs."""
    nodes = {kind: comparison.where(kind) for kind in texts}
    return [
        f"{_format_layer_count(nodes[kind])} {text}" for kind, text in texts.items() if nodes[kind]
    ]


def _format_layer_count(nodes: Sequence[NodeChange]) -> str:
    products = sum(n.op in _PRODUCTS for n in nodes)
    return format_layer_counts(len(nodes) - products, products)


def _count_loss_reasons(nodes: Sequence[NodeChange]) -> list[tuple[int, str]]:
    examples = {(n.lost, n.finding): n for n in nodes}
    counts = Counter((n.lost, n.finding) for n in nodes).most_common()
    grouped: Counter[str] = Counter()
    owner = "their" if len(nodes) > 1 else "its"
    for key, count in counts:
        node = examples[key]
        grouped[_describe_loss_reason(node.lost, owner) or node.finding] += count
    return [(count, reason) for reason, count in grouped.most_common()]


def _describe_losses(comparison: Comparison) -> list[str]:
    nodes = comparison.where(ChangeKind.LOST_INT8)
    reasons = _count_loss_reasons(nodes)
    if not reasons:
        return []
    text = f": {reasons[0][1]}" if reasons[0][1] else ""
    if len(reasons) > 1:
        text = f" ({'; '.join(f'{count}: {reason or _UNKNOWN}' for count, reason in reasons)})"
    return [f"{_format_layer_count(nodes)} lost {_join_formats_by_and([n.a for n in nodes])}{text}"]


def _describe_gains(comparison: Comparison) -> str:
    return f"gained {_join_formats_by_and([n.b for n in comparison.where(ChangeKind.GAINED_INT8)])}"


def _join_formats_by_and(sides: Sequence[NodeSide | None]) -> str:
    return " and ".join(sorted(set(map(_name_format, sides)), reverse=True))


def _describe_loss_reason(reason: LossReason | None, owner: str) -> str:
    """Return the text of a reason; empty if a finding explains the loss, or nothing does.

    Args:
        reason: The reason.
        owner: Possessive of the layers that lost INT8: ``its`` or ``their``.
    """
    match reason:
        case LossReason.PAIRS:
            return f"{owner} Q/DQ are gone"
        case LossReason.WEIGHTS:
            return f"the Q/DQ of {owner} weights are gone"
        case LossReason.DATA:
            return f"the Q/DQ of {owner} input are gone"
        case LossReason.FLOAT_BUILD:
            return FLOAT_BUILD
        case LossReason.UNEXPLAINED:
            return "INT8 is predicted but not built, and the build does not show why"
    return ""


def _make_output_texts(comparison: Comparison) -> dict[ChangeKind, str]:
    before = _join_formats_by_or([n.a for n in comparison.where(ChangeKind.LOST_INT8_OUTPUT)])
    after = _join_formats_by_or([n.b for n in comparison.where(ChangeKind.GAINED_INT8_OUTPUT)])
    lost, gained = "now with float output", f"now with {after} output"
    if (comparison.a.kind, comparison.b.kind) == ("model", "build"):
        lost = f"with float output where {before} is predicted"
        gained = f"with {after} output where float is predicted"
    elif (comparison.a.kind, comparison.b.kind) == ("build", "model"):
        lost = f"with {before} output where float is predicted"
        gained = f"with float output where {after} is predicted"
    return {ChangeKind.LOST_INT8_OUTPUT: lost, ChangeKind.GAINED_INT8_OUTPUT: gained}


def _describe_conversions(comparison: Comparison) -> list[str]:
    a, b = comparison.a, comparison.b
    more, kinds = comparison.more_conversions, (a.kind, b.kind)
    if a.rejected or b.rejected or more is None:
        return []
    bounds = [a.conversion_bounds, b.conversion_bounds]
    if bounds[0] != bounds[1] and any(low != high for low, high in bounds):
        in_a, in_b = (str(low) if low == high else f"{low} to {high}" for low, high in bounds)
        return [f"Q/DQ layers: {in_a} in A, {in_b} in B"]
    if not more:
        return []
    predicted = "" if kinds[0] == kinds[1] else " than predicted"
    is_more = more < 0 if kinds == ("build", "model") else more > 0
    layers = "Q/DQ layer" if abs(more) == 1 else "Q/DQ layers"
    return [f"{abs(more)} {'more' if is_more else 'fewer'} {layers}{predicted}"]


def _describe_all_scales(comparison: Comparison) -> list[str]:
    factors = {
        "activations": [n.factor for n in comparison.where(ChangeKind.SCALE)],
        "weights": [
            None if _is_per_channel_on_one_side(n) else n.weights_factor
            for n in comparison.where(ChangeKind.WEIGHTS_SCALE)
        ],
    }
    name = "ranges" if comparison.count(ChangeKind.FORMAT) else "scales"
    return [
        f"{name} of {tensors} differ at "
        f"{format_count(len(values), 'node')}{_describe_factors(values)}"
        for tensors, values in factors.items()
        if values
    ]


def _is_per_channel_on_one_side(node: NodeChange) -> bool:
    """Return whether only one side has a scale for each channel of the weights.

    In this case, `weights_factor` compares the largest scales of the two sides, and the scales of
    other channels differ by more.
    """
    counts = {side.weights_scale.count for side in (node.a, node.b) if side and side.weights_scale}
    return len(counts) > 1


def _describe_factors(factors: list[float | None]) -> str:
    """Describe scale factors if all are equal or close to 1; else return an empty text."""
    valid = [f for f in factors if f is not None]
    if len(valid) < len(factors):
        return ""
    if all(abs(f - 1.0) < _ROUNDING for f in valid):
        return f", by less than {_ROUNDING:.1%}"
    if max(valid) - min(valid) > _ROUNDING * max(valid):
        return ""
    factor = _format_factor(valid[0])
    return f", all by one factor ({factor})" if len(valid) > 1 else f" ({factor})"


def _describe_time(comparison: Comparison) -> list[str]:
    if comparison.times_as_long is None:
        return []
    gpu = comparison.b.gpu or comparison.a.gpu
    unsure = "" if comparison.is_faster_surely else ", uncertain"
    estimated = f"{f' on {gpu}' if gpu else ''} (estimated{unsure})"
    is_measured = comparison.a.measured and comparison.b.measured
    if is_measured and comparison.is_as_fast:
        return [f"as fast (the times differ by less than {100 * comparison.min_speed_change:g} %)"]
    return [f"{describe_speed(comparison)}{'' if is_measured else estimated}"]


def describe_speed(comparison: Comparison) -> str:
    """Return ``1.3x faster``, ``5 % slower`` or ``as fast`` for B compared with A.

    The times of both sides must be known.
    """
    assert comparison.times_as_long is not None
    return "as fast" if comparison.is_as_fast else format_speed(1 / comparison.times_as_long)


def describe_changes(
    node: NodeChange, finding: str = "", verbs: tuple[str, str] = ("wrote", "writes")
) -> str:
    """Describe all changes at one node.

    Args:
        node: The two sides of the node.
        finding: Message of the finding that explains a lost INT8.
        verbs: Verbs of the text about a changed output, for the type on A and the type on B.
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
    if kind == ChangeKind.GAINED_INT8:
        return f"gained {_name_format(b)}"
    if kind == ChangeKind.LOST_INT8:
        reason = _describe_loss_reason(node.lost, "its") or finding
        return _append_reason(f"lost {_name_format(a)}", reason)
    if kind == ChangeKind.FORMAT:
        return f"{b.precision} instead of {a.precision}"
    if kind == ChangeKind.WEIGHTS_SCALE:
        scales = a.weights_scale, b.weights_scale
        return _describe_scales("weights' scale", *scales, node.weights_factor)
    if kind == ChangeKind.SCALE:
        name = "scale" if node.scales_input is None else f"input {node.scales_input + 1}: scale"
        return _describe_scales(name, *(node.scales or (a.scale, b.scale)), node.factor)
    if kind == ChangeKind.LOST_INT8_OUTPUT:
        text = f"{verbs[0]} {_name_format(a)}, {verbs[1]} {name_type(b.output)}"
        return _append_reason(text, finding, f"{b.name} writes float")
    if kind == ChangeKind.GAINED_INT8_OUTPUT:
        return f"{verbs[0]} {name_type(a.output)}, {verbs[1]} {_name_format(b)}"
    if kind == ChangeKind.RESIDUAL:
        return f"reads the residual as {name_type(b.residual)} instead of {name_type(a.residual)}"
    return _describe_fusions(a, b)


def _append_reason(text: str, reason: str, repeated: str = "") -> str:
    """Append a reason to a text, without the beginning of the reason that repeats the text."""
    if repeated and reason.startswith(repeated):
        return f"{text}{reason.removeprefix(repeated)}"
    return f"{text}: {reason}" if reason else text


def _describe_fusions(a: NodeSide, b: NodeSide) -> str:
    if not (a.fused and b.fused):
        return f"fused with {', '.join(a.fused or b.fused)} only in {'A' if a.fused else 'B'}"
    return f"fused with {', '.join(a.fused)} in A, with {', '.join(b.fused)} in B"


def _describe_scales(
    name: str, a: QuantizerScales | None, b: QuantizerScales | None, factor: float | None
) -> str:
    """Return ``scale 0.1 -> 0.2 (times 2)``, with the other differences in the parentheses.

    If the types differ, the factor is that of the ranges.
    """
    changes = [] if factor is None or factor == 1.0 else [_format_factor(factor)]
    if a is not None and b is not None:
        if changes and a.type != b.type:
            changes = [f"range {changes[0]}"]
            # Scales of two formats are not comparable, but their ranges are.
            if (a.count, a.axis, a.zero) == (b.count, b.axis, b.zero):
                return f"{name.removesuffix('scale')}{changes[0]}"
        changes += _list_quantizer_differences(a, b)
    for side, scales in (("A", a), ("B", b)):
        if scales is not None and not scales.valid:
            changes.append(f"the scale of {side} is invalid")
    text = f"{name} {format_scales(a)} -> {format_scales(b)}"
    return f"{text} ({', '.join(changes)})" if changes else text


def _list_quantizer_differences(a: QuantizerScales, b: QuantizerScales) -> list[str]:
    """Return the differences in axis, type and zero points."""
    differences = []
    if a.count == b.count and a.axis != b.axis:
        differences.append(f"axis {a.axis} -> {b.axis}")
    if a.count == b.count and a.type != b.type:
        differences.append(f"type {a.type} -> {b.type}")
    if a.zero != b.zero:
        differences.append("zero points differ")
    return differences


def _format_factor(factor: float) -> str:
    """Return ``times 2``, or ``+0.79%`` for a small change."""
    if abs(factor - 1.0) >= _MIN_TIMES:
        return f"times {factor:.3g}"
    return f"{100.0 * (factor - 1.0):+.2g}%"


def format_scales(scales: QuantizerScales | None) -> str:
    """Return a scale, or the smallest and the largest scale, as text; ``unknown`` for None."""
    if scales is None:
        return _UNKNOWN
    least, greatest = scales.ends
    if scales.count == 1:
        return f"{least:.4g}"
    return f"{least:.4g} to {greatest:.4g} ({scales.count} channels)"

"""A comparison for a terminal: the answer first, then what happened to which node."""

from __future__ import annotations

from qdqtool.comparing import words
from qdqtool.comparing.result import Change, Comparison, NodeChange, Side
from qdqtool.render.engine_text import render_engines
from qdqtool.render.output import wrap
from qdqtool.text import as_text, layers_counted

_LISTED = 8
_TITLES = {
    Change.LOST_INT8: "Lost INT8",
    Change.LOST_INT8_OUTPUT: "In INT8, but writing float now",
    Change.LOST_QDQ: "Q/DQ removed",
    Change.GAINED_INT8: "Gained INT8",
    Change.GAINED_INT8_OUTPUT: "Writing INT8 now",
    Change.GAINED_QDQ: "Q/DQ added",
    Change.RESIDUAL: "Residual input of another type",
    Change.WEIGHTS_SCALE: "Scales of weights differ",
    Change.SCALE: "Scales of activations differ",
    Change.FUSION: "Fused with something else",
    Change.ONLY_IN_A: "Only in A",
    Change.ONLY_IN_B: "Only in B",
}


def render(comparison: Comparison, width: int = 80, *, everything: bool = False) -> str:
    """The whole answer.

    Args:
        comparison: What to show.
        width: Columns.
        everything: List every node and layer.
    """
    lines = [*wrap(words.answer(comparison), 0, width), ""]
    lines += [line for label, side in (("A", comparison.a), ("B", comparison.b)) for line in _side(label, side, width)]
    lines += wrap(f"Matched by {comparison.matched_by}.", 0, width)
    for note in comparison.notes:
        lines += wrap(f"note: {note}", 2, width, "")
    shown: set[int] = set()
    for change, title in _TITLES.items():
        # Each node is listed once, under the gravest thing that happened to it.
        nodes = [n for n in comparison.nodes if change in n.changes and id(n) not in shown]
        shown.update(map(id, nodes))
        if nodes:
            lines += ["", f"{title} ({len(nodes)})", *_nodes(nodes, width, everything)]
    if comparison.engines is not None:
        lines += ["", *render_engines(comparison.engines, everything=everything)]
    return as_text(lines)


def _side(label: str, side: Side, width: int) -> list[str]:
    parts = [layers_counted(side.plain, side.products)]
    if not side.quantized and side.kind == "model":
        parts.append("no Q/DQ")
    elif side.int8 is not None:
        to = f" ({side.int8_to_int8} writing INT8)" if side.int8_to_int8 is not None and side.int8 else ""
        parts.append(f"{side.int8} INT8{to}")
    if side.conversions is not None:
        parts.append(f"{side.conversions} conversion{'s' if side.conversions != 1 else ''}")
    if side.ms is not None:
        parts.append(f"{side.ms:.3f} ms{'' if side.measured else f' on {side.gpu}, estimated'}")
    target = f", predicted for {side.target}" if side.target else ""
    return wrap(f"{side.title}: {', '.join(parts)}{target}", 3, width, f"{label}  ")


def _nodes(nodes: list[NodeChange], width: int, everything: bool) -> list[str]:
    lines: list[str] = []
    for node in nodes if everything else nodes[:_LISTED]:
        other = f" ({node.b.name} in B)" if node.a and node.b and node.a.name != node.b.name else ""
        time = f"; {node.change_ms:+.4f} ms" if node.change_ms is not None else ""
        lines += wrap(f"{node.name}{other}: {node.why}{time}", 6, width, "  ")
    if len(nodes) > _LISTED and not everything:
        lines.append(f"  ... and {len(nodes) - _LISTED} more (--all)")
    return lines

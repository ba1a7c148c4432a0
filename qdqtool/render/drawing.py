"""An engine's graph as a picture: SVG, laid out as the report's graphs are, and DOT for Graphviz."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from html import escape

from qdqtool.engine import layout
from qdqtool.engine.graph import LAYER, Arrow, Box, Drawing
from qdqtool.errors import QdqtoolError
from qdqtool.text import as_line, as_text
from qdqtool.types import Precision

BOX_WIDTH, ROW_GAP, COLUMN_GAP, LINE_HEIGHT, MARGIN = 276, 62, 64, 16, 30
# Labels stay readable over lines; drawn on its own, for viewers without paint-order would draw it over the label.
_HALO = 'fill="none" stroke="white" stroke-width="3" aria-hidden="true"'
# Those that users know from NVIDIA's engine pictures: INT8 green, FP16 orange, FP32 red.
_FILL = {
    Precision.INT8: "#a5d65a", Precision.UINT8: "#a5d65a", Precision.INT4: "#7fd1ae", Precision.FP8: "#5cc6c0",
    Precision.FP16: "#ffc066", Precision.BF16: "#ffd699", Precision.FP32: "#f4837d", Precision.FLOAT: "#f4837d",
    Precision.INT32: "#c9b8e8", Precision.INT64: "#b7a3e0", Precision.BOOL: "#d9d9d9", Precision.UNKNOWN: "#e6e6e6",
}
_LINE = {
    Precision.INT8: "#4c8a00", Precision.UINT8: "#4c8a00", Precision.INT4: "#1f8a63", Precision.FP8: "#11827c",
    Precision.FP16: "#c26a00", Precision.BF16: "#c26a00", Precision.FP32: "#b3261e", Precision.FLOAT: "#b3261e",
}
LEGEND = (Precision.INT8, Precision.FP16, Precision.FP32, Precision.INT32, Precision.UNKNOWN)


def fill(precision: Precision) -> str:
    """Background of a box."""
    return _FILL[precision]


def line(precision: Precision) -> str:
    """Colour of an arrow or border."""
    return _LINE.get(precision, "#5f5f5f")


# DOT --------------------------------------------------------------------------------------------------------------


def dot(drawing: Drawing) -> str:
    """DOT text: boxes coloured by precision, edges labelled with tensor, shape and precision."""
    lines = [
        "digraph engine {", f"  label={_quoted([drawing.title])}; labelloc=t; fontname=Helvetica; rankdir=TB;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11];',
        "  edge [fontname=Helvetica, fontsize=9];",
    ]
    for box in drawing.boxes:
        shape = "" if box.role == LAYER else ", shape=oval"
        label = _quoted([text for text in box.lines if text])
        colours = f'fillcolor="{fill(box.precision)}", color="{line(box.precision)}"'
        lines.append(f"  {box.key} [label={label}, tooltip={_quoted([box.tip])}, {colours}{shape}];")
    for arrow in drawing.arrows:
        colour = line(arrow.precision)
        source, target = (drawing.boxes[place].key for place in (arrow.source, arrow.target))
        lines.append(f'  {source} -> {target} [label={_quoted(arrow.lines)}, color="{colour}"];')
    return as_text([*lines, "}"])


def _quoted(lines: Iterable[str]) -> str:
    return '"' + "\\n".join(as_line(text).replace("\\", "\\\\").replace('"', '\\"') for text in lines) + '"'


# SVG --------------------------------------------------------------------------------------------------------------


def svg(drawing: Drawing) -> str:
    """The picture, without Graphviz.

    Raises:
        QdqtoolError: fast-sugiyama is not installed, or the engine has too many layers to draw.
    """
    if not layout.installed():
        raise QdqtoolError("drawing needs fast-sugiyama: pip install 'qdqtool[draw]' (or use --dot and Graphviz)")
    for box in drawing.boxes:
        box.w, box.h = BOX_WIDTH, 14 + LINE_HEIGHT * len([text for text in box.lines if text])
    width, height, excess = layout.lay_out(drawing.boxes, drawing.arrows, COLUMN_GAP, ROW_GAP, MARGIN, 40)
    if excess:
        raise QdqtoolError(f"{excess}; --dot writes them as text")
    width = max(width, 2 * MARGIN + 9.5 * len(drawing.title))  # the title's font is 16 high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>', *_legend(drawing),
        *(text for arrow in drawing.arrows for text in _arrow(arrow)),
        *(text for box in drawing.boxes for text in _box(box)), "</svg>",
    ]  # fmt: skip
    return as_text(parts)


def _arrow(arrow: Arrow) -> list[str]:
    colour = line(arrow.precision)
    points = arrow.points
    x, y = points[0]
    path = f"M{x:.1f},{y:.1f}"
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        middle = (y1 + y2) / 2
        path += f" C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"
    x, y = points[-1]
    head = f"M{x - 4:.1f},{y - 8:.1f} L{x:.1f},{y:.1f} L{x + 4:.1f},{y - 8:.1f} Z"
    previous = points[-2]
    label_x, label_y = (previous[0] + x) / 2 + 6, (previous[1] + y) / 2 - 4
    rows = [
        f'<text x="{label_x:.1f}" y="{label_y + 11 * i:.1f}" font-size="9" {paint}>{_text(row)}</text>'
        for i, row in enumerate(arrow.lines)
        for paint in (_HALO, f'fill="{colour}"')
    ]
    return [
        f'<g><title>{_text(arrow.tensor)}</title><path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        f'<path d="{head}" fill="{colour}"/>', *rows, "</g>",
    ]


def _box(box: Box) -> list[str]:
    round_ = 6 if box.role == LAYER else box.h / 2
    parts = [
        f'<g><title>{_text(box.tip)}</title><rect x="{box.x:.1f}" y="{box.y:.1f}" width="{BOX_WIDTH}" '
        f'height="{box.h:.1f}" rx="{round_:.0f}" fill="{fill(box.precision)}" stroke="{line(box.precision)}"/>'
    ]
    for i, text in enumerate(t for t in box.lines if t):
        weight = ' font-weight="bold"' if i == 0 else ""
        baseline = box.y + 7 + LINE_HEIGHT * i + 12
        parts.append(
            f'<text x="{box.x + box.w / 2:.1f}" y="{baseline:.1f}" font-size="{12 if i == 0 else 11}"{weight} '
            f'text-anchor="middle">{_text(text)}</text>'
        )
    return [*parts, "</g>"]


def _legend(drawing: Drawing) -> list[str]:
    used = {box.precision for box in drawing.boxes}
    parts = [f'<text x="{MARGIN}" y="{MARGIN}" font-size="16" font-weight="bold">{_text(drawing.title)}</text>']
    x = float(MARGIN)
    for precision in LEGEND:
        if precision in used:
            parts.append(f'<rect x="{x:.0f}" y="{MARGIN + 12}" width="14" height="14" fill="{fill(precision)}"/>')
            parts.append(f'<text x="{x + 19:.0f}" y="{MARGIN + 23}" font-size="11">{precision}</text>')
            x += 90
    return parts


def _text(text: str) -> str:
    """Text that XML allows: no control characters, signs escaped."""
    return escape(as_line(text))

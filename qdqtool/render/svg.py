"""An engine's graph as an SVG picture, laid out by fast-sugiyama (:mod:`qdqtool.render.layout`), without Graphviz."""

from __future__ import annotations

import itertools
from html import escape

from qdqtool.engine.graph import LAYER, Arrow, Box, Drawing
from qdqtool.errors import QdqtoolError
from qdqtool.render import layout
from qdqtool.render.colours import LEGEND, fill, line
from qdqtool.render.layout import Point
from qdqtool.text import as_line, as_text

BOX_WIDTH, ROW_GAP, COLUMN_GAP, LINE_HEIGHT, MARGIN = 276, 62, 64, 16, 30
# Labels stay readable over lines; drawn on its own, for viewers without paint-order would draw it over the label.
_HALO = 'fill="none" stroke="white" stroke-width="3" aria-hidden="true"'


def render(drawing: Drawing) -> str:
    """The picture.

    Raises:
        QdqtoolError: fast-sugiyama is not installed, or the engine has too many layers to draw.
    """
    if not layout.installed():
        raise QdqtoolError("drawing needs fast-sugiyama: pip install 'qdqtool[draw]' (or use --dot and Graphviz)")
    edges = [(arrow.source, arrow.target) for arrow in drawing.arrows]
    ranks = layout.ranks_of([box.key for box in drawing.boxes], edges)
    excess = layout.too_large(ranks, edges)
    if excess:
        raise QdqtoolError(f"{excess}; --dot writes them as text")
    placed = layout.place(ranks, edges, BOX_WIDTH, COLUMN_GAP, MARGIN)
    heights = {box.key: 14 + LINE_HEIGHT * len([text for text in box.lines if text]) for box in drawing.boxes}
    tallest = max(heights.values(), default=0)
    pitch = tallest + ROW_GAP
    width = max(placed.x.values(), default=0.0) + BOX_WIDTH / 2 + MARGIN
    width = max(width, 2 * MARGIN + 9.5 * len(drawing.title))  # the title's font is 16 high
    height = (max(ranks.values(), default=0) + 1) * pitch + 2 * MARGIN + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>', *_legend(drawing),
    ]
    top = MARGIN + 40

    def centre(key: str) -> Point:
        return placed.x[key], top + ranks[key] * pitch + tallest / 2

    for number, arrow in enumerate(drawing.arrows):
        x1, y1 = centre(arrow.source)
        x2, y2 = centre(arrow.target)
        points = [(x1, y1 + heights[arrow.source] / 2)]
        points += [(x, top + rank * pitch + tallest / 2) for x, rank in placed.ways[number]]
        points.append((x2, y2 - heights[arrow.target] / 2))
        parts += _arrow(arrow, points)
    for box in drawing.boxes:
        parts += _box(box, centre(box.key), heights[box.key])
    return as_text([*parts, "</svg>"])


def _arrow(arrow: Arrow, points: list[Point]) -> list[str]:
    colour = line(arrow.precision)
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


def _box(box: Box, centre: Point, height: float) -> list[str]:
    x, y = centre
    left, top = x - BOX_WIDTH / 2, y - height / 2
    round_ = 6 if box.role == LAYER else height / 2
    parts = [
        f'<g><title>{_text(box.tip)}</title><rect x="{left:.1f}" y="{top:.1f}" width="{BOX_WIDTH}" '
        f'height="{height:.1f}" rx="{round_:.0f}" fill="{fill(box.precision)}" stroke="{line(box.precision)}"/>'
    ]
    for i, text in enumerate(t for t in box.lines if t):
        weight = ' font-weight="bold"' if i == 0 else ""
        baseline = top + 7 + LINE_HEIGHT * i + 12
        parts.append(
            f'<text x="{x:.1f}" y="{baseline:.1f}" font-size="{12 if i == 0 else 11}"{weight} '
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

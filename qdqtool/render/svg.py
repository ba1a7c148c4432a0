"""An engine's graph as an SVG picture, laid out by fast-sugiyama; Graphviz is not needed.

Layers are ranked top to bottom. An edge over several ranks is cut by invisible vertices, one in each, so that the
layout keeps room for it and it is drawn around the boxes.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from html import escape

from qdqtool import budgets
from qdqtool.engine.graph import LAYER, Arrow, Box, Drawing
from qdqtool.errors import QdqtoolError
from qdqtool.render.colours import LEGEND, fill, line
from qdqtool.text import as_line, as_text

BOX_WIDTH, ROW_GAP, COLUMN_GAP, LINE_HEIGHT, MARGIN = 276, 62, 64, 16, 30
_PASS_WIDTH = 0.45  # of a column: what an edge that passes by is given
# Labels stay readable over lines; drawn on its own, for viewers without paint-order would draw it over the label.
_HALO = 'fill="none" stroke="white" stroke-width="3" aria-hidden="true"'

Point = tuple[float, float]


def render(drawing: Drawing) -> str:
    """The picture.

    Raises:
        QdqtoolError: fast-sugiyama is not installed, or the engine has too many layers to draw.
    """
    if importlib.util.find_spec("fast_sugiyama") is None:
        raise QdqtoolError("drawing needs fast-sugiyama: pip install 'qdqtool[draw]' (or use --dot and Graphviz)")
    if len(drawing.boxes) > budgets.DRAWN_LAYERS:
        raise QdqtoolError(f"{len(drawing.boxes)} layers are too many for a picture, the limit is "
                           f"{budgets.DRAWN_LAYERS}; --dot writes them as text")
    ranks = _ranks(drawing)
    # The layout is quadratic in what stands in one row, and an edge stands in every row that it passes.
    passed = sum(max(1, ranks[a.target] - ranks[a.source]) for a in drawing.arrows)
    rows = Counter(ranks.values())
    if passed > budgets.DRAWN_POINTS or max(rows.values(), default=0) > budgets.DRAWN_ROW:
        raise QdqtoolError(f"{len(drawing.boxes)} layers and {len(drawing.arrows)} edges, up to "
                           f"{max(rows.values(), default=0)} in one row, are too many for a picture; the limits are "
                           f"{budgets.DRAWN_POINTS} edges, one for each row that they pass, and {budgets.DRAWN_ROW} "
                           "in a row; --dot writes them as text")
    places, waypoints = _layout(drawing, ranks)
    heights = {box.key: 14 + LINE_HEIGHT * len([text for text in box.lines if text]) for box in drawing.boxes}
    tallest = max(heights.values(), default=0)
    pitch = tallest + ROW_GAP
    width = max((x for x, _ in places.values()), default=0.0) + BOX_WIDTH / 2 + MARGIN
    width = max(width, 2 * MARGIN + 9.5 * len(drawing.title))  # the title's font is 16 high
    height = (max(ranks.values(), default=0) + 1) * pitch + 2 * MARGIN + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>', *_legend(drawing),
    ]
    top = MARGIN + 40

    def centre(key: str) -> Point:
        x, rank = places[key]
        return x, top + rank * pitch + tallest / 2

    for number, arrow in enumerate(drawing.arrows):
        x1, y1 = centre(arrow.source)
        x2, y2 = centre(arrow.target)
        points = [(x1, y1 + heights[arrow.source] / 2)]
        points += [(x, top + rank * pitch + tallest / 2) for x, rank in waypoints.get(number, ())]
        points.append((x2, y2 - heights[arrow.target] / 2))
        parts += _arrow(arrow, points)
    for box in drawing.boxes:
        parts += _box(box, centre(box.key), heights[box.key])
    return as_text([*parts, "</svg>"])


def _ranks(drawing: Drawing) -> dict[str, int]:
    """Rank of each box: one below its deepest maker. Boxes are in an order in which makers come first."""
    ranks = {box.key: 0 for box in drawing.boxes}
    incoming: dict[str, list[str]] = {}
    for arrow in drawing.arrows:
        incoming.setdefault(arrow.target, []).append(arrow.source)
    for box in drawing.boxes:
        ranks[box.key] = max((ranks[source] + 1 for source in incoming.get(box.key, ())), default=0)
    outgoing: dict[str, list[str]] = {}
    for arrow in drawing.arrows:
        outgoing.setdefault(arrow.source, []).append(arrow.target)
    last = max(ranks.values(), default=0)
    for box in drawing.boxes:
        if not incoming.get(box.key):  # an input or constant stands right above its first reader, a lone box below all
            readers = outgoing.get(box.key, ())
            ranks[box.key] = max(0, min((ranks[target] for target in readers), default=last + 2) - 1)
    return ranks


def _layout(
    drawing: Drawing, ranks: dict[str, int]
) -> tuple[dict[str, tuple[float, int]], dict[int, list[tuple[float, int]]]]:
    """Places of the boxes (x in pixels, rank) and the points that long edges pass through, by number of the arrow."""
    from fast_sugiyama import from_edges

    edges: list[tuple[str, str]] = []
    passing: dict[int, list[str]] = {}
    at: dict[str, int] = dict(ranks)
    for number, arrow in enumerate(drawing.arrows):
        chain = [arrow.source]
        for rank in range(ranks[arrow.source] + 1, ranks[arrow.target]):
            name = f"P{number}_{rank}"
            at[name] = rank
            chain.append(name)
        passing[number] = chain[1:]
        chain.append(arrow.target)
        edges += [(a, b) for a, b in itertools.pairwise(chain) if a != b]
    columns: dict[str, float] = {}
    offset = 0.0
    linked: set[str] = set()
    if edges:
        unique = list(dict.fromkeys(edges))
        for positions, *_ in from_edges(unique, vertex_spacing=4, crossing_minimization="barycenter"):
            placed = {str(name): x / 4 for name, (x, _y) in positions}
            low = min(placed.values())
            columns.update({name: x - low + offset for name, x in placed.items()})
            offset = max(columns[name] for name in placed) + 1.0
            linked |= set(placed)
    alone = [box.key for box in drawing.boxes if box.key not in linked]
    columns.update({key: float(column) for column, key in enumerate(alone)})
    spread = _spread(columns, at)
    places = {box.key: (spread[box.key], ranks[box.key]) for box in drawing.boxes}
    ways = {number: [(spread[name], at[name]) for name in names] for number, names in passing.items()}
    return places, ways


def _spread(columns: dict[str, float], ranks: dict[str, int]) -> dict[str, float]:
    """Pixels for columns: the layout's order and proportions, boxes never overlapping in a rank."""
    pitch = BOX_WIDTH + COLUMN_GAP
    result: dict[str, float] = {}
    rows: dict[int, list[str]] = {}
    for name in columns:
        rows.setdefault(ranks[name], []).append(name)
    for names in rows.values():
        names.sort(key=lambda name: columns[name])
        edge = float("-inf")
        for name in names:
            half = pitch / 2 if not name.startswith("P") else pitch * _PASS_WIDTH / 2
            x = max(columns[name] * pitch, edge + half)
            result[name] = x
            edge = x + half
    low = min(result.values(), default=0.0) - BOX_WIDTH / 2 - MARGIN
    return {name: x - low for name, x in result.items()}


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

"""Layout of graphs: positions of boxes and points of edges. Needs fast-sugiyama.

Boxes are ranked from top to bottom. An edge over several ranks passes an invisible vertex in each
rank, so that the layout reserves space for the edge and draws the edge around the boxes.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from qdqtool.util import limits

_PASSING_WIDTH = 0.45  # width of an edge that passes a row of boxes, as a fraction of a column
_Link = tuple[str, str]


@dataclass(slots=True, kw_only=True)
class LayoutBox:
    """Box of a graph, in pixels. The layout sets the top left corner (x, y).

    Attributes:
        w: Width.
        h: Height.
    """

    x: float = 0.0
    y: float = 0.0
    w: float = 0.0
    h: float = 0.0


@dataclass(slots=True)
class LayoutEdge:
    """Edge of a graph.

    Attributes:
        source: Index of the box at which the edge begins.
        target: Index of the box at which the edge ends.
        points: Points of the curve in pixels, which the layout sets.
    """

    source: int
    target: int
    points: list[list[float]] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True, slots=True)
class DrawingSize:
    """Size of a drawing in pixels.

    Attributes:
        width: Width; 0 if the graph is too large to be drawn.
        height: Height; 0 if the graph is too large to be drawn.
        excess: Why the graph is too large; empty if it is drawn.
    """

    width: float = 0.0
    height: float = 0.0
    excess: str = ""


class _Row(NamedTuple):
    """Vertical extent of the boxes of one rank, in pixels."""

    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height


def is_layout_available() -> bool:
    """Return whether fast-sugiyama is installed."""
    return importlib.util.find_spec("fast_sugiyama") is not None


def _compute_ranks(keys: Sequence[str], links: Sequence[_Link]) -> dict[str, int]:
    """Return the rank of each box: the rank of its deepest producer plus 1.

    A box without producers is placed above its first consumer.

    Args:
        keys: Boxes, producers first.
        links: Pairs of producer and consumer.
    """
    ranks = dict.fromkeys(keys, 0)
    incoming: dict[str, list[str]] = defaultdict(list)
    outgoing: dict[str, list[str]] = defaultdict(list)
    for source, target in links:
        incoming[target].append(source)
        outgoing[source].append(target)
    for key in keys:
        ranks[key] = max((ranks[source] + 1 for source in incoming[key]), default=0)
    last = max(ranks.values(), default=0)
    for key in keys:
        if not incoming[key]:
            # A box without edges is placed below all others.
            first = min((ranks[target] for target in outgoing[key]), default=last + 2)
            ranks[key] = max(0, first - 1)
    return ranks


def _describe_excess(ranks: dict[str, int], links: Sequence[_Link]) -> str:
    """Return why a graph is too large for a layout; empty if the graph is small enough.

    The layout takes time quadratic in the size of a row. An edge counts in every row that the edge
    passes.
    """
    if len(ranks) > limits.DRAWN_LAYERS:
        return f"{len(ranks)} layers are too many for a drawing; the limit is {limits.DRAWN_LAYERS}"
    points = sum(max(1, ranks[target] - ranks[source]) for source, target in links)
    widest = max(Counter(ranks.values()).values(), default=0)
    if points > limits.DRAWN_POINTS or widest > limits.DRAWN_ROW:
        return (
            f"{len(ranks)} layers and {len(links)} edges, up to {widest} in one row, are too "
            f"many for a drawing; the limits are {limits.DRAWN_POINTS} edges (an edge counts once "
            f"for each row that it passes) and {limits.DRAWN_ROW} layers in a row"
        )
    return ""


def lay_out(
    boxes: Sequence[LayoutBox],
    edges: Sequence[LayoutEdge],
    column_gap: float,
    row_gap: float,
    margin: float,
    head: float = 0,
) -> DrawingSize:
    """Set the positions of boxes and the points of edges, and return the size of the drawing.

    If the graph is too large, boxes and edges are unchanged.

    Args:
        boxes: Boxes of equal width, producers first.
        edges: Edges between the boxes.
        column_gap: Pixels between columns.
        row_gap: Pixels between rows.
        margin: Pixels around the drawing.
        head: Pixels above the first row, for a title.
    """
    keys = [f"B{i}" for i in range(len(boxes))]
    links = [(keys[edge.source], keys[edge.target]) for edge in edges]
    ranks = _compute_ranks(keys, links)
    excess = _describe_excess(ranks, links)
    if excess:
        return DrawingSize(excess=excess)
    passing = _list_passing_vertices(ranks, links)
    all_ranks = ranks.copy()
    for vertices in passing:
        all_ranks |= vertices
    columns = _compute_columns(all_ranks, _split_links(links, passing))
    box_width = max((box.w for box in boxes), default=0.0)
    centers = _convert_to_pixels(columns, all_ranks, box_width + column_gap)
    left = min(centers.values(), default=0.0) - box_width / 2 - margin
    centers = {name: center - left for name, center in centers.items()}
    rows = _compute_rows(list(ranks.values()), boxes, row_gap, head + margin)
    for (key, rank), box in zip(ranks.items(), boxes, strict=True):
        box.x = round(centers[key] - box.w / 2, 1)
        box.y = round(rows[rank].top + (rows[rank].height - box.h) / 2, 1)
    for edge, vertices in zip(edges, passing, strict=True):
        edge.points = _cross_rows(vertices, centers, rows)
    _attach_edges(boxes, edges)
    bottom = rows[-1].bottom if rows else head + margin - row_gap
    return DrawingSize(round(_find_right_end(boxes, edges) + margin, 1), round(bottom + margin, 1))


def _compute_rows(
    ranks: Sequence[int], boxes: Sequence[LayoutBox], gap: float, top: float
) -> list[_Row]:
    """Return the rows of boxes, whose ranks are given, from a top downwards."""
    heights = [0.0] * (max(ranks, default=-1) + 1)
    for rank, box in zip(ranks, boxes, strict=True):
        heights[rank] = max(heights[rank], box.h)
    tops = itertools.accumulate((height + gap for height in heights), initial=top)
    return list(map(_Row, tops, heights))


def _cross_rows(
    vertices: dict[str, int], centers: dict[str, float], rows: Sequence[_Row]
) -> list[list[float]]:
    """Return the points of an edge: top and bottom of each row at the edge's vertex in the row."""
    points = []
    for vertex, rank in vertices.items():
        x = round(centers[vertex], 1)
        points += [[x, rows[rank].top], [x, rows[rank].bottom]]
    return points


def _find_right_end(boxes: Sequence[LayoutBox], edges: Sequence[LayoutEdge]) -> float:
    points = itertools.chain.from_iterable(edge.points for edge in edges)
    return max([0.0, *(box.x + box.w for box in boxes), *(x for x, _ in points)])


def _attach_edges(boxes: Sequence[LayoutBox], edges: Sequence[LayoutEdge]) -> None:
    """Spread the ends of edges along the sides of boxes, in an order that avoids crossings.

    At each side, the edges are sorted by the x of their adjacent point. An edge without points is
    sorted by the center of the box at its other end.
    """
    for end, other, position in (("source", "target", 0), ("target", "source", -1)):
        groups: dict[int, list[tuple[float, LayoutEdge]]] = defaultdict(list)
        for edge in edges:
            far = boxes[getattr(edge, other)]
            x = edge.points[position][0] if edge.points else far.x + far.w / 2
            groups[getattr(edge, end)].append((x, edge))
        for number, group in groups.items():
            box = boxes[number]
            y = box.y + (box.h if end == "source" else 0.0)
            for i, (_, edge) in enumerate(sorted(group, key=lambda item: item[0])):
                port = [round(box.x + box.w * (i + 1) / (len(group) + 1), 1), y]
                edge.points.insert(0 if end == "source" else len(edge.points), port)


def _list_passing_vertices(ranks: dict[str, int], links: Sequence[_Link]) -> list[dict[str, int]]:
    """Return, for each edge, the invisible vertices between its ends, with their ranks."""
    passing = []
    for number, (source, target) in enumerate(links):
        between = range(ranks[source] + 1, ranks[target])
        passing.append({f"P{number}_{rank}": rank for rank in between})
    return passing


def _split_links(links: Sequence[_Link], passing: Sequence[dict[str, int]]) -> list[_Link]:
    """Return the links between neighboring boxes and vertices."""
    short_links: dict[_Link, None] = {}
    for (source, target), vertices in zip(links, passing, strict=True):
        if source != target:
            short_links |= dict.fromkeys(itertools.pairwise([source, *vertices, target]))
    return list(short_links)


def _compute_columns(ranks: dict[str, int], links: list[_Link]) -> dict[str, float]:
    """Return the column of each box and vertex; boxes without edges are side by side."""
    columns = _compute_connected_columns(ranks, links) if links else {}
    alone = [name for name in ranks if name not in columns]
    return columns | {name: float(column) for column, name in enumerate(alone)}


def _compute_connected_columns(ranks: dict[str, int], links: list[_Link]) -> dict[str, float]:
    """Return the column of each box and vertex with edges; unconnected parts are side by side."""
    from fast_sugiyama import from_edges

    names = list(dict.fromkeys(itertools.chain.from_iterable(links)))
    # The layout depends on hashes. Hashes of strings differ between runs, hashes of numbers do not.
    numbers = {name: number for number, name in enumerate(names)}
    starts = {source for source, _ in links} - {target for _, target in links}
    has_one_start = len({ranks[name] for name in starts}) == 1
    parts = from_edges(
        [(numbers[source], numbers[target]) for source, target in links],
        vertex_spacing=4,
        # "minimize" (shortest edges) takes quadratic time. If all edges start from one rank, "up"
        # gives the same result.
        ranking_type="up" if has_one_start else "minimize",
        crossing_minimization="barycenter",
    )
    columns: dict[str, float] = {}
    offset = 0.0
    for positions in sorted(sorted(part[0]) for part in parts):
        low = min(x for _, (x, _y) in positions) / 4
        part_columns = {names[number]: x / 4 - low + offset for number, (x, _y) in positions}
        columns |= part_columns
        offset = max(part_columns.values()) + 1.0
    return columns


def _convert_to_pixels(
    columns: dict[str, float], ranks: dict[str, int], pitch: float
) -> dict[str, float]:
    """Return the x center of each box and vertex in pixels; boxes of a rank do not overlap.

    `pitch` is the distance of two columns.
    """
    centers: dict[str, float] = {}
    ends: dict[int, float] = defaultdict(lambda: float("-inf"))  # right end of each rank so far
    for name in sorted(columns, key=lambda name: columns[name]):
        half = pitch / 2 if not name.startswith("P") else pitch * _PASSING_WIDTH / 2
        centers[name] = max(columns[name] * pitch, ends[ranks[name]] + half)
        ends[ranks[name]] = centers[name] + half
    return centers

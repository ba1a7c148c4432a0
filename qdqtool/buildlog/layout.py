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
) -> tuple[float, float, str]:
    """Set the positions of boxes and the points of edges.

    Args:
        boxes: Boxes of equal width, producers first.
        edges: Edges between the boxes.
        column_gap: Pixels between columns.
        row_gap: Pixels between rows.
        margin: Pixels around the drawing.
        head: Pixels above the first row, for a title.

    Returns:
        Width and height of the drawing in pixels, and an empty text. If the graph is too large: 0,
        0 and the reason; boxes and edges are unchanged.
    """
    keys = [f"B{i}" for i in range(len(boxes))]
    links = [(keys[edge.source], keys[edge.target]) for edge in edges]
    ranks = _compute_ranks(keys, links)
    excess = _describe_excess(ranks, links)
    if excess:
        return 0.0, 0.0, excess
    all_ranks, passing, short_links = _insert_vertices(ranks, links)
    columns = _compute_columns(all_ranks, short_links)
    alone = [key for key in keys if key not in columns]
    columns |= {key: float(column) for column, key in enumerate(alone)}
    box_width = max((box.w for box in boxes), default=0.0)
    centers = _convert_to_pixels(columns, all_ranks, box_width, column_gap, margin)
    heights: dict[int, float] = defaultdict(float)
    for key, box in zip(keys, boxes, strict=True):
        heights[ranks[key]] = max(heights[ranks[key]], box.h)
    last = max(ranks.values(), default=-1)
    steps = (heights[rank] + row_gap for rank in range(last + 1))
    tops = list(itertools.accumulate(steps, initial=head + margin))
    for key, box in zip(keys, boxes, strict=True):
        box.x = round(centers[key] - box.w / 2, 1)
        box.y = round(tops[ranks[key]] + (heights[ranks[key]] - box.h) / 2, 1)
    for edge, vertices in zip(edges, passing, strict=True):
        edge.points = []
        for vertex in vertices:
            x, top = round(centers[vertex], 1), tops[all_ranks[vertex]]
            edge.points += [[x, top], [x, top + heights[all_ranks[vertex]]]]
    _attach_edges(boxes, edges)
    points = itertools.chain.from_iterable(edge.points for edge in edges)
    right = max([0.0, *(box.x + box.w for box in boxes), *(x for x, _ in points)])
    return round(right + margin, 1), round(tops[-1] - row_gap + margin, 1), ""


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


def _insert_vertices(
    ranks: dict[str, int], links: Sequence[_Link]
) -> tuple[dict[str, int], list[list[str]], list[_Link]]:
    """Add invisible vertices for edges over several ranks.

    Returns the ranks of boxes and vertices, the names of the vertices of each edge, and the links
    between neighboring boxes and vertices.
    """
    all_ranks = dict(ranks)
    passing: list[list[str]] = []
    short_links: dict[_Link, None] = {}
    for number, (source, target) in enumerate(links):
        vertices = {f"P{number}_{rank}": rank for rank in range(ranks[source] + 1, ranks[target])}
        all_ranks |= vertices
        passing.append(list(vertices))
        if source != target:
            short_links |= dict.fromkeys(itertools.pairwise([source, *vertices, target]))
    return all_ranks, passing, list(short_links)


def _compute_columns(ranks: dict[str, int], links: list[_Link]) -> dict[str, float]:
    """Return the column of each box and vertex with edges; unconnected parts are side by side."""
    from fast_sugiyama import from_edges

    if not links:
        return {}
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
    columns: dict[str, float], ranks: dict[str, int], width: float, gap: float, margin: float
) -> dict[str, float]:
    """Return the x center of each box and vertex in pixels; boxes of a rank do not overlap."""
    pitch = width + gap
    centers: dict[str, float] = {}
    ends: dict[int, float] = defaultdict(lambda: float("-inf"))  # right end of each rank so far
    for name in sorted(columns, key=lambda name: columns[name]):
        half = pitch / 2 if not name.startswith("P") else pitch * _PASSING_WIDTH / 2
        centers[name] = max(columns[name] * pitch, ends[ranks[name]] + half)
        ends[ranks[name]] = centers[name] + half
    left = min(centers.values(), default=0.0) - width / 2 - margin
    return {name: center - left for name, center in centers.items()}

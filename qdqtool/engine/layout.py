"""Where the boxes of a layered drawing are and how its edges run, laid out by fast-sugiyama.

Boxes are ranked top to bottom. An edge over several ranks is cut by invisible vertices, one in each, so that the layout
keeps room for it and it is drawn around the boxes.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from qdqtool import budgets

_PASS_WIDTH = 0.45  # of a column: what an edge that passes by is given
_Link = tuple[str, str]


@dataclass(slots=True, kw_only=True)
class Placed:
    """A box: its size in pixels, and its top left corner once it is laid out."""

    x: float = 0.0
    y: float = 0.0
    w: float = 0.0
    h: float = 0.0


@dataclass(slots=True)
class Linked:
    """An edge from one box to another, by their places in the drawing, and the points of its curve once laid out."""

    source: int
    target: int
    points: list[list[float]] = field(default_factory=list, kw_only=True)


def installed() -> bool:
    """Whether fast-sugiyama is there."""
    return importlib.util.find_spec("fast_sugiyama") is not None


def ranks_of(keys: Sequence[str], edges: Sequence[_Link]) -> dict[str, int]:
    """Rank of each box: one below its deepest maker. Boxes are in an order in which makers come first."""
    ranks = dict.fromkeys(keys, 0)
    incoming: dict[str, list[str]] = {}
    outgoing: dict[str, list[str]] = {}
    for source, target in edges:
        incoming.setdefault(target, []).append(source)
        outgoing.setdefault(source, []).append(target)
    for key in keys:
        ranks[key] = max((ranks[source] + 1 for source in incoming.get(key, ())), default=0)
    last = max(ranks.values(), default=0)
    for key in keys:
        if not incoming.get(key):  # an input or constant is right above its first reader, a lone box below all
            ranks[key] = max(0, min((ranks[t] for t in outgoing.get(key, ())), default=last + 2) - 1)
    return ranks


def too_large(ranks: dict[str, int], edges: Sequence[_Link]) -> str:
    """What of a drawing is above the limits, an empty string for one that can be laid out.

    The layout is quadratic in what is in one row, and an edge is in every row that it passes.
    """
    if len(ranks) > budgets.DRAWN_LAYERS:
        return f"{len(ranks)} layers are too many for a picture, the limit is {budgets.DRAWN_LAYERS}"
    passed = sum(max(1, ranks[target] - ranks[source]) for source, target in edges)
    widest = max(Counter(ranks.values()).values(), default=0)
    if passed > budgets.DRAWN_POINTS or widest > budgets.DRAWN_ROW:
        return (f"{len(ranks)} layers and {len(edges)} edges, up to {widest} in one row, are too many for a picture; "
                f"the limits are {budgets.DRAWN_POINTS} edges, one for each row that they pass, and "
                f"{budgets.DRAWN_ROW} in a row")
    return ""


def lay_out(
    boxes: Sequence[Placed], edges: Sequence[Linked], column_gap: float, row_gap: float, margin: float, head: float = 0
) -> tuple[float, float, str]:
    """Gives boxes and edges their places.

    Args:
        boxes: Of one width, in an order in which makers come first.
        edges: Between them.
        column_gap: Pixels between two boxes side by side.
        row_gap: Between two rows.
        margin: Around everything.
        head: Above the first row.

    Returns:
        Width and height of the drawing, and what of it is above the limits: then nothing is placed.
    """
    keys = [f"B{i}" for i in range(len(boxes))]
    links = [(keys[e.source], keys[e.target]) for e in edges]
    ranks = ranks_of(keys, links)
    excess = too_large(ranks, links)
    if excess:
        return 0.0, 0.0, excess
    box_width = max((box.w for box in boxes), default=0.0)
    centres, ways = _place(ranks, links, box_width, column_gap, margin)
    heights: dict[int, float] = defaultdict(float)
    for key, box in zip(keys, boxes, strict=True):
        heights[ranks[key]] = max(heights[ranks[key]], box.h)
    tops: dict[int, float] = {}
    y = head + margin
    for rank in range(max(ranks.values(), default=-1) + 1):
        tops[rank] = y
        y += heights[rank] + row_gap
    for key, box in zip(keys, boxes, strict=True):
        box.x = round(centres[key] - box.w / 2, 1)
        box.y = round(tops[ranks[key]] + (heights[ranks[key]] - box.h) / 2, 1)
    for number, edge in enumerate(edges):
        edge.points = [[round(x, 1), yy] for x, rank in ways[number] for yy in (tops[rank], tops[rank] + heights[rank])]
    _attach(boxes, edges)
    width = max([0.0, *(b.x + b.w for b in boxes), *(x for e in edges for x, _ in e.points)]) + margin
    return round(width, 1), round(y - row_gap + margin, 1), ""


def _attach(boxes: Sequence[Placed], edges: Sequence[Linked]) -> None:
    """Spreads the ends of edges over the bottoms and tops of boxes, in the order of where they come from."""
    for end, other, place in (("source", "target", 0), ("target", "source", -1)):
        groups: dict[int, list[Linked]] = defaultdict(list)
        for edge in edges:
            groups[getattr(edge, end)].append(edge)
        ports: list[tuple[Linked, list[float]]] = []
        for number, group in groups.items():
            box = boxes[number]
            far = {id(e): boxes[getattr(e, other)] for e in group}
            group.sort(key=lambda e: e.points[place][0] if e.points else far[id(e)].x + far[id(e)].w / 2)
            y = box.y + (box.h if end == "source" else 0.0)
            ports += [(e, [round(box.x + box.w * (i + 1) / (len(group) + 1), 1), y]) for i, e in enumerate(group)]
        for edge, port in ports:
            edge.points.insert(0 if end == "source" else len(edge.points), port)


def _place(
    ranks: dict[str, int], edges: Sequence[_Link], width: float, gap: float, margin: float
) -> tuple[dict[str, float], dict[int, list[tuple[float, int]]]]:
    """Centre of each box in pixels, and for each edge the points between its ends: x in pixels, and the rank."""
    from fast_sugiyama import from_edges

    chains: list[_Link] = []
    passing: dict[int, list[str]] = {}
    at: dict[str, int] = dict(ranks)
    for number, (source, target) in enumerate(edges):
        chain = [source]
        for rank in range(ranks[source] + 1, ranks[target]):
            name = f"P{number}_{rank}"
            at[name] = rank
            chain.append(name)
        passing[number] = chain[1:]
        chain.append(target)
        chains += [(a, b) for a, b in itertools.pairwise(chain) if a != b]
    columns: dict[str, float] = {}
    offset = 0.0
    linked: set[str] = set()
    if chains:
        unique = list(dict.fromkeys(chains))
        names = list(dict.fromkeys(itertools.chain.from_iterable(unique)))
        numbers = {name: i for i, name in enumerate(names)}  # the layout follows hashes; those of text change
        parts = from_edges([(numbers[a], numbers[b]) for a, b in unique], vertex_spacing=4,
                           crossing_minimization="barycenter")
        for positions in sorted(sorted(part[0]) for part in parts):
            placed = {names[number]: x / 4 for number, (x, _y) in positions}
            low = min(placed.values())
            columns.update({name: x - low + offset for name, x in placed.items()})
            offset = max(columns[name] for name in placed) + 1.0
            linked |= set(placed)
    alone = [key for key in ranks if key not in linked]
    columns.update({key: float(column) for column, key in enumerate(alone)})
    spread = _spread(columns, at, width, gap, margin)
    ways = {number: [(spread[name], at[name]) for name in names] for number, names in passing.items()}
    return spread, ways


def _spread(
    columns: dict[str, float], ranks: dict[str, int], width: float, gap: float, margin: float
) -> dict[str, float]:
    """Pixels for columns: the layout's order and proportions, boxes never overlapping in a rank."""
    pitch = width + gap
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
    low = min(result.values(), default=0.0) - width / 2 - margin
    return {name: x - low for name, x in result.items()}

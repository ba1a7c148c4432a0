"""Where the boxes of a layered drawing stand and how its edges run, laid out by fast-sugiyama.

Boxes are ranked top to bottom. An edge over several ranks is cut by invisible vertices, one in each, so that the layout
keeps room for it and it is drawn around the boxes.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool import budgets

Point = tuple[float, float]
Edge = tuple[str, str]
_PASS_WIDTH = 0.45  # of a column: what an edge that passes by is given


@dataclass(frozen=True, slots=True)
class Placement:
    """A finished layout.

    Attributes:
        x: Centre of each box in pixels; the leftmost box begins at ``margin``.
        ways: For each edge, by its number, the points between its ends: x in pixels, and the rank.
    """

    x: dict[str, float]
    ways: dict[int, list[tuple[float, int]]]


def installed() -> bool:
    """Whether fast-sugiyama is there."""
    return importlib.util.find_spec("fast_sugiyama") is not None


def ranks_of(keys: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
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
        if not incoming.get(key):  # an input or constant stands right above its first reader, a lone box below all
            ranks[key] = max(0, min((ranks[t] for t in outgoing.get(key, ())), default=last + 2) - 1)
    return ranks


def too_large(ranks: dict[str, int], edges: Sequence[Edge]) -> str:
    """What of a drawing is above the limits, an empty string for one that can be laid out.

    The layout is quadratic in what stands in one row, and an edge stands in every row that it passes.
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


def place(ranks: dict[str, int], edges: Sequence[Edge], width: float, gap: float, margin: float) -> Placement:
    """Lays out a drawing of boxes of one width.

    Args:
        ranks: As :func:`ranks_of` makes them.
        edges: Key of the maker, key of the reader.
        width: Of a box, in pixels.
        gap: Between two boxes of a rank.
        margin: Left of the leftmost box.
    """
    from fast_sugiyama import from_edges

    chains: list[Edge] = []
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
    return Placement({key: spread[key] for key in ranks}, ways)


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

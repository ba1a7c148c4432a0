"""Which nodes a finding depends on: grown from the nodes that it names until it shows, then trimmed while it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qdqtool.base import budgets
from qdqtool.extraction.cut import Cutter, Part
from qdqtool.model.graph import Node

Holds = Callable[[Part], bool]
_FINDING = 8  # times as long as finding what is left of a part does predicting it take

_RADII = (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 30, 40, 60, 90, 140, 220, 400, 1000)


def grow(cutter: Cutter, anchors: Sequence[Node], holds: Holds) -> Iterator[Part | None]:
    """Parts around the anchors, wider and wider; yields None for each that does not hold and ends with one that does.

    The whole model is tried last and is taken as it is: what it shows is what was asked for.
    """
    tried: set[Part] = set()
    total = len(cutter.model.nodes)
    for hops in _RADII:
        around = cutter.around(anchors, hops)
        for every in (False, True):
            part = cutter.part(around, every)
            if len(part.nodes) == total:
                yield cutter.whole()
                return
            if part in tried or not part.outputs:
                continue
            tried.add(part)
            if holds(part):
                yield part
                return
            yield None
    yield cutter.whole()


class Effort:
    """How many nodes trimming may still predict: where each node of a wide part counts, its tries go with the square.

    Attributes:
        left: Nodes; below zero trimming has been broken off.
    """

    def __init__(self) -> None:
        self.left = budgets.TRIMMED_NODES


def trim(
    cutter: Cutter, part: Part, anchors: Sequence[Node], holds: Holds, effort: Effort | None = None
) -> Iterator[Part | None]:
    """Smaller and smaller parts of one; yields None for each one that does not hold.

    Nodes far from the anchors go first, in groups, then one by one; what no longer hangs together with the anchors
    goes with them. It ends early where the effort is spent.
    """
    effort = effort or Effort()
    fixed = {n.index for n in anchors}
    size = max(1, len(part.nodes) // 2)
    while True:
        order = [i for i in _by_distance(cutter, part, anchors) if i not in fixed]
        shrunk = False
        start = 0
        while start < len(order):
            gone = set(order[start : start + size])
            start += size
            effort.left -= len(part.nodes) // _FINDING
            smaller = _without(cutter, part, gone, anchors)
            if smaller is None and effort.left >= 0:
                continue
            if smaller is None:
                return
            effort.left -= len(smaller.nodes)
            if effort.left < 0:
                return
            if holds(smaller):
                part, shrunk = smaller, True
                yield part
                order = order[:start] + [i for i in order[start:] if i in part.nodes]
            else:
                yield None
        if size > 1:
            size = max(1, min(size // 2, len(part.nodes) // 2))
        elif not shrunk:
            return


def _without(cutter: Cutter, part: Part, gone: set[int], anchors: Sequence[Node]) -> Part | None:
    """The part without some nodes; None where it would be no smaller."""
    left = part.nodes - gone - cutter.constant
    joined = _joined(cutter, left, anchors)
    for every in (False, True):
        smaller = cutter.part(joined, every)
        if smaller.outputs and len(smaller.nodes) < len(part.nodes) and smaller.nodes < part.nodes:
            return smaller
    return None


def _joined(cutter: Cutter, nodes: frozenset[int], anchors: Sequence[Node]) -> set[int]:
    found = {n.index for n in anchors}
    work = list(anchors)
    while work:
        for other in cutter.neighbours(work.pop()):
            if other.index in nodes and other.index not in found:
                found.add(other.index)
                work.append(other)
    return found


def _by_distance(cutter: Cutter, part: Part, anchors: Sequence[Node]) -> list[int]:
    """The part's nodes, the farthest from the anchors first, constant ones apart."""
    distance = {n.index: 0 for n in anchors}
    queue = list(anchors)
    for node in queue:
        for other in cutter.neighbours(node):
            if other.index in part.nodes and other.index not in distance:
                distance[other.index] = distance[node.index] + 1
                queue.append(other)
    return sorted(part.nodes - cutter.constant, key=lambda i: (-distance.get(i, len(part.nodes)), i))

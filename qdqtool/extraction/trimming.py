"""Search for a small part of a model that passes a check.

A part grows from the nodes that a finding names (the anchors) until the part passes the check. Then
nodes are removed from the part, first those farthest from the anchors.
"""

from collections.abc import Callable, Iterator, Sequence

from qdqtool.extraction.cut import ModelCutter, ModelPart
from qdqtool.ir.graph import Node
from qdqtool.util import limits

PartCheck = Callable[[ModelPart], bool]
_FINDING_COST = 8  # finding a part spends 1/8 of the budget that its prediction spends
# Distances from the anchors, in nodes. For each distance, the part with all nodes within this
# distance is tried.
_HOPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 30, 40, 60, 90, 140, 220, 400, 1000)


def grow_part(
    cutter: ModelCutter,
    anchors: Sequence[Node],
    holds: PartCheck,
    needed: frozenset[int] = frozenset(),
) -> Iterator[ModelPart | None]:
    """Try larger and larger parts around the anchors until a part passes the check.

    If no smaller part passes, the result is the whole model, which is not checked.

    Args:
        cutter: Cuts parts out of the model.
        anchors: Nodes of the smallest part.
        holds: Function that returns whether a part passes the check.
        needed: Indices of nodes that each tried part must contain.

    Yields:
        None for each part that fails, then the first part that passes.
    """
    tried: set[ModelPart] = set()
    for hops in _HOPS:
        nodes = cutter.find_nodes_within(anchors, hops)
        for every_output in (False, True):
            part = cutter.complete_part(nodes, every_output)
            if len(part.nodes) == len(cutter.model.nodes):
                yield cutter.whole_part()
                return
            if part in tried or not part.outputs or not needed <= part.nodes:
                continue
            tried.add(part)
            if holds(part):
                yield part
                return
            yield None
    yield cutter.whole_part()


class TrimBudget:
    """Limit of the work of trimming: the total number of nodes in all predicted parts.

    Without a limit, the time for wide parts would grow with the square of their size. For a part
    that has more findings than nodes, its number of findings is subtracted.

    Attributes:
        nodes_left: Remaining number of nodes. Trimming ends if the number is negative.
    """

    def __init__(self) -> None:
        self.nodes_left = limits.TRIMMED_NODES

    def spend(self, nodes: int) -> bool:
        """Subtract nodes from the budget, and return whether the budget is not exceeded."""
        self.nodes_left -= nodes
        return self.nodes_left >= 0


class PartTrimmer:
    """Makes a part smaller while the part passes a check.

    Args:
        cutter: Cuts parts out of the model.
        part: Part that passes the check.
        anchors: Nodes that remain in the part. Nodes that are not connected to an anchor are
            removed.
        holds: Function that returns whether a part passes the check.
        budget: Limit of the total number of nodes in predicted parts.
        needed: Indices of further nodes that remain in the part.

    Attributes:
        part: Smallest part found so far that passes the check.
    """

    def __init__(
        self,
        cutter: ModelCutter,
        part: ModelPart,
        anchors: Sequence[Node],
        holds: PartCheck,
        budget: TrimBudget,
        needed: frozenset[int] = frozenset(),
    ) -> None:
        self.part = part
        self._cutter = cutter
        self._anchors = anchors
        self._holds = holds
        self._budget = budget
        self._needed = needed

    def steps(self) -> Iterator[bool]:
        """Try smaller parts until none passes or the budget ends; yield whether each one passes."""
        fixed = self._needed.union(n.index for n in self._anchors)
        size = max(1, len(self.part.nodes) // 2)
        while True:
            order = _order_by_distance(self._cutter, self.part, self._anchors)
            order = [i for i in order if i not in fixed]
            progress = False
            while order:
                removed, order = set(order[:size]), order[size:]
                is_affordable = self._budget.spend(len(self.part.nodes) // _FINDING_COST)
                smaller = self._remove_nodes(removed)
                if smaller is not None:
                    is_affordable = self._budget.spend(len(smaller.nodes))
                if not is_affordable:
                    return
                if smaller is None:
                    continue
                if self._holds(smaller):
                    self.part, progress = smaller, True
                    order = [i for i in order if i in smaller.nodes]
                yield self.part is smaller
            if size > 1:
                size = max(1, min(size // 2, len(self.part.nodes) // 2))
            elif not progress:
                return

    def _remove_nodes(self, removed: set[int]) -> ModelPart | None:
        """Return the part without some nodes.

        Returns:
            The smaller part. None if it would not be smaller, or would have no output or lack a
            needed node.
        """
        nodes = self._find_connected(self.part.nodes - removed - self._cutter.constant)
        if not self._needed <= nodes:
            return None
        for every_output in (False, True):
            smaller = self._cutter.complete_part(nodes, every_output)
            if smaller.outputs and smaller.nodes < self.part.nodes:
                return smaller
        return None

    def _find_connected(self, nodes: frozenset[int]) -> set[int]:
        indices = {n.index for n in self._anchors}
        stack = list(self._anchors)
        while stack:
            for other in self._cutter.neighbors(stack.pop()):
                if other.index in nodes and other.index not in indices:
                    indices.add(other.index)
                    stack.append(other)
        return indices


def _order_by_distance(cutter: ModelCutter, part: ModelPart, anchors: Sequence[Node]) -> list[int]:
    """Return the indices of a part's nodes, farthest from the anchors first.

    The distance of two nodes is the number of steps from node to node. Constant nodes are left out.
    """
    distances = {n.index: 0 for n in anchors}
    queue = list(anchors)
    for node in queue:
        for other in cutter.neighbors(node):
            if other.index in part.nodes and other.index not in distances:
                distances[other.index] = distances[node.index] + 1
                queue.append(other)
    inner = part.nodes - cutter.constant
    return sorted(inner, key=lambda i: (-distances.get(i, len(part.nodes)), i))

"""Division of a network into parts, with a cut before each weighted node."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.insertion.scales import UnionFind
from qdqtool.ir.cuts import NetworkCuts
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.tuning.recipe import Recipe


@dataclass(frozen=True)
class NetworkPart:
    """The nodes between two cuts, or one of several parallel branches between the cuts.

    Attributes:
        number: Position in the list of parts.
        nodes: Indices of the nodes.
        inputs: Tensors of other parts and network inputs that the part consumes.
        outputs: Tensors of the part that are used after the next cut.
        producers: Numbers of the parts that produce `inputs`.
    """

    number: int
    nodes: frozenset[int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    producers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PartRun:
    """A part of the network, and the Q/DQ pairs of the part and of everything upstream.

    Candidates with the same Q/DQ pairs in the part and upstream of it share one object.

    Attributes:
        part: Part of the network.
        recipe: Q/DQ pairs at the inputs of the part's nodes.
        producers: Runs of the parts that produce the inputs of the part.
    """

    part: NetworkPart
    recipe: Recipe
    producers: tuple[PartRun, ...]


class NetworkPartition(NetworkCuts):
    """Divides a network into parts between cuts."""

    def build_parts(self, extra_cut: int) -> list[NetworkPart]:
        """Cut the network before each weighted node and at one more position; return the parts.

        Parallel branches between two cuts are separate parts. A cut that a tensor of unknown type
        would cross is left out, because such a tensor cannot be the input of a part.

        Args:
            extra_cut: Position of the additional cut in the order of nodes.
        """
        parts: list[NetworkPart] = []
        producer: dict[str, int] = {}  # number of the producing part, by tensor
        cuts = self._find_cuts(extra_cut)
        for start, end in itertools.pairwise([0, *cuts]):
            crossing = set(cuts[end])
            for nodes in self._split_branches(start, end):
                outputs = tuple(t for n in nodes for t in n.outputs if t in crossing)
                if not outputs:
                    continue
                consumed = dict.fromkeys(t for n in nodes for t in n.consumed_tensors)
                inputs = tuple(t for t in consumed if self.positions.get(t, end) < start)
                producers = dict.fromkeys(producer[t] for t in inputs if t in producer)
                producer.update(dict.fromkeys(outputs, len(parts)))
                indices = frozenset(n.index for n in nodes)
                parts.append(NetworkPart(len(parts), indices, inputs, outputs, tuple(producers)))
        return parts

    def _find_cuts(self, extra_cut: int) -> dict[int, tuple[str, ...]]:
        """Return the tensors that cross each cut, by position of the cut in the order of nodes."""
        nodes = self.model.ordered
        cuts = {}
        for position in range(1, len(nodes)):
            if position == extra_cut or nodes[position].op in WEIGHTED:
                tensors = self.crossing_tensors(position)
                if all(map(self.model.elem_type, tensors)):
                    cuts[position] = tensors
        cuts[len(nodes)] = self.crossing_tensors(len(nodes))
        return cuts

    def _split_branches(self, start: int, end: int) -> Sequence[list[Node]]:
        """Group the nodes between two cuts into branches that do not consume each other's tensors.

        Branches are ordered by their last nodes.
        """
        nodes = self.model.ordered[start:end]
        branches: UnionFind[int] = UnionFind()  # the last position of a branch represents it
        producer: dict[str, int] = {}
        for position, node in enumerate(nodes):
            for tensor in node.consumed_tensors:
                if tensor in producer:
                    branches.union(position, producer[tensor])
            producer.update(dict.fromkeys(filter(None, node.outputs), position))
        groups: dict[int, list[Node]] = defaultdict(list)
        for position, node in enumerate(nodes):
            groups[branches.find(position)].append(node)
        return [groups[last] for last in sorted(groups)]

"""Division of a network into parts that run separately, cut before each node with weights."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
        inputs: Tensors from other parts and network inputs that the part consumes.
        outputs: Tensors of the part that cross the cut after it.
        producers: Numbers of the parts that produce `inputs`.
    """

    number: int
    nodes: frozenset[int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    producers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PartRun:
    """A part with the quantization of the part and of everything upstream.

    Candidates with the same part and quantization share one object.

    Attributes:
        part: The part.
        recipe: Q/DQ pairs whose results the nodes of the part consume.
        producers: Runs of the parts that produce its inputs.
    """

    part: NetworkPart
    recipe: Recipe
    producers: tuple[PartRun, ...]


class NetworkPartition(NetworkCuts):
    """Division of a network into parts between cuts."""

    def build_parts(self, extra_cut: int) -> list[NetworkPart]:
        """Return the parts: there is a cut before each node with weights, and at `extra_cut`.

        Parallel branches between two cuts are separate parts. There is no cut where a tensor of
        unknown type would cross it, because such a tensor cannot be the input of a part.
        """
        parts: list[NetworkPart] = []
        producer: dict[str, int] = {}  # number of the producing part by tensor
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
        """Return the position of each cut after the first node, with the tensors that cross it."""
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
        """Group the nodes between two cuts so that no group consumes tensors of another group.

        Groups are ordered by their last nodes.
        """
        nodes = self.model.ordered[start:end]
        later = list(range(len(nodes)))  # later node of the same group, or the node itself

        def find_last(position: int) -> int:
            while later[position] != position:
                later[position] = later[later[position]]
                position = later[position]
            return position

        producer: dict[str, int] = {}
        for position, node in enumerate(nodes):
            for tensor in node.consumed_tensors:
                if tensor in producer:
                    later[find_last(producer[tensor])] = position
            producer.update(dict.fromkeys(filter(None, node.outputs), position))
        groups: dict[int, list[Node]] = defaultdict(list)
        for position, node in enumerate(nodes):
            groups[find_last(position)].append(node)
        return [groups[last] for last in sorted(groups)]

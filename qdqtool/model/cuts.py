"""Where a network can be cut in two, and what crosses the cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qdqtool.model.graph import Model


class NetworkCuts:
    """Cuts through a network in front of its nodes, in topological order.

    Attributes:
        model: The network.
        positions: The position of the node that makes each tensor but the constants; -1 for those that are given.
    """

    def __init__(self, model: Model, wanted: Sequence[str]) -> None:
        """``wanted`` are the tensors that are read at the end."""
        self.model = model
        self.positions: dict[str, int] = {}
        at_end = frozenset(wanted)
        self._last: dict[str, int] = {}
        for position, node in enumerate(model.ordered):
            self.positions.update(
                (t, position)
                for t in node.outputs
                if t in at_end or (t and not model.is_constant(t))
            )
            self._last.update(dict.fromkeys((*node.inputs, *node.captured), position))
        self.positions.update(
            dict.fromkeys((*model.inputs, *(t for t in wanted if t in model.initializers)), -1)
        )
        self._last.update(dict.fromkeys(wanted, len(model.ordered)))

    def crossing_tensors(self, position: int) -> tuple[str, ...]:
        """Tensors made in front of a node (graph inputs included) that it or what follows still reads."""
        return tuple(
            t for t, made in self.positions.items() if made < position <= self._last.get(t, -1)
        )

    def first_cut_after(self, tensors: Iterable[str]) -> int:
        """The first cut behind which all of some tensors are made."""
        return max((self.positions[t] for t in tensors), default=-1) + 1

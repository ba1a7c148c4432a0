"""Cuts of a network into parts, and the tensors that cross a cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qdqtool.ir.graph import Model


class NetworkCuts:
    """Possible cuts of a network: cut ``i`` is before the node ``i`` in topological order.

    Attributes:
        model: The network.
        positions: Position of the node that produces each tensor; -1 for network inputs. Constants
            are left out, unless they are among the outputs.
    """

    def __init__(self, model: Model, outputs: Sequence[str]) -> None:
        """Index the positions of producers and of the last consumers.

        Args:
            model: The network.
            outputs: Tensors that are needed after the last node.
        """
        self.model = model
        self.positions: dict[str, int] = {}
        self._last: dict[str, int] = {}
        required = frozenset(outputs)
        for position, node in enumerate(model.ordered):
            for tensor in node.outputs:
                if tensor in required or (tensor and not model.is_constant(tensor)):
                    self.positions[tensor] = position
            self._last.update(dict.fromkeys((*node.inputs, *node.captured), position))
        stored_outputs = [tensor for tensor in outputs if tensor in model.initializers]
        self.positions.update(dict.fromkeys((*model.inputs, *stored_outputs), -1))
        self._last.update(dict.fromkeys(outputs, len(model.ordered)))

    def crossing_tensors(self, position: int) -> tuple[str, ...]:
        """Return the tensors that are produced before a position and consumed at or after it.

        Network inputs count as produced before the first node.
        """
        return tuple(
            tensor
            for tensor, produced in self.positions.items()
            if produced < position <= self._last.get(tensor, -1)
        )

    def first_cut_after(self, tensors: Iterable[str]) -> int:
        """Return the position of the first cut after the producers of all tensors."""
        return max((self.positions[tensor] for tensor in tensors), default=-1) + 1

"""A Q/DQ placement with its scales as plain data: what a worker needs to build the model, and no more."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from qdqtool.graph import Model
from qdqtool.insertion.placement import Placement, Reader, WeightSite
from qdqtool.insertion.rewrite import ActivationScale, rewrite
from qdqtool.types import QuantizedTensor


@dataclass(frozen=True)
class Pair:
    """One quantized activation.

    Attributes:
        tensor: Its name.
        readers: Node index, input position and role of everything that reads it dequantized.
        scale: In units of the tensor per integer step.
        method: How the scale was chosen.
        group: Number of its scale group; None for a scale of its own.
    """

    tensor: str
    readers: tuple[tuple[int, int, str], ...]
    scale: float
    method: str
    group: int | None = None


@dataclass(frozen=True)
class Recipe:
    """All pairs of a Q/DQ model: those of activations, and node index, tensor and axis of quantized weights."""

    pairs: tuple[Pair, ...]
    weights: tuple[tuple[int, str, int | None], ...]

    @functools.cached_property
    def key(self) -> str:
        """Recipes of the same key make models that compute the same."""
        told = ([(p.tensor, p.readers, p.scale.hex()) for p in self.pairs], self.weights)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:20]

    @functools.cached_property
    def reads(self) -> Mapping[int, tuple[object, ...]]:
        """For each node what it reads quantized: equal entries compute the same from the same inputs."""
        found: dict[int, list[object]] = {}
        for pair in self.pairs:
            for index, position, _ in pair.readers:
                found.setdefault(index, []).append((position, pair.tensor, pair.scale))
        for index, tensor, axis in self.weights:
            found.setdefault(index, []).append((tensor, axis))
        return {index: tuple(sorted(entries, key=repr)) for index, entries in found.items()}

    def build(self, model: Model, weights: str = "float") -> tuple[Model, list[QuantizedTensor]]:
        """The Q/DQ model.

        Args:
            model: The prepared float model that the recipe was made for; it is not changed.
            weights: One of :data:`qdqtool.insertion.rewrite.WEIGHT_FORMS`, or ``sketch``.

        Returns:
            The model, and what got a Q/DQ pair.
        """
        copy = model.copy()
        placement = Placement(
            {p.tensor: [Reader(copy.nodes[i], position, role) for i, position, role in p.readers] for p in self.pairs},
            [WeightSite(copy.nodes[i], tensor, axis) for i, tensor, axis in self.weights],
        )
        scales = {p.tensor: ActivationScale(p.scale, p.method, p.group) for p in self.pairs}
        return copy, rewrite(copy, placement, scales, weights)


def first_change(model: Model, one: Recipe, other: Recipe) -> int:
    """Position in ``model.ordered`` of the first node that reads something else; the number of nodes if none does."""
    for position, node in enumerate(model.ordered):
        if one.reads.get(node.index) != other.reads.get(node.index):
            return position
    return len(model.ordered)

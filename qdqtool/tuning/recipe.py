"""Recipes: the Q/DQ pairs and scales of a model, as data without references to the model."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from qdqtool.insertion.number_formats import INT8, NumberFormat
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import Placement, QuantizedInput, WeightSite
from qdqtool.insertion.rewrite import ActivationScale, QuantizedTensor, insert_pairs
from qdqtool.insertion.scales import GroupScale
from qdqtool.ir.graph import Model


@dataclass(frozen=True)
class ActivationPair:
    """Q/DQ pair of an activation.

    Attributes:
        tensor: Name of the tensor.
        consumers: Node index, input position and role (``input`` or ``residual``) of each consumer
            of the dequantized tensor.
        scale: Scale in units of the tensor per integer step.
        method: Calibration method that chose the scale.
        group: Number of the scale group; None if the tensor does not share its scale.
    """

    tensor: str
    consumers: tuple[tuple[int, int, str], ...]
    scale: float
    method: str
    group: int | None = None


@dataclass(frozen=True)
class Recipe:
    """All Q/DQ pairs of a model.

    Attributes:
        pairs: Q/DQ pairs of activations.
        weights: Node index, tensor and channel axis of each quantized weight.
        number_format: Format of the quantized numbers.
    """

    pairs: tuple[ActivationPair, ...]
    weights: tuple[tuple[int, str, int | None], ...]
    number_format: NumberFormat = INT8

    @staticmethod
    def from_placement(placement: Placement, scales: Iterable[GroupScale]) -> Recipe:
        """Return the recipe of a placement with the scales of its groups."""
        group_numbers = itertools.count()
        scale_of: dict[str, tuple[float, str, int | None]] = {}
        for scale in scales:
            number = next(group_numbers) if scale.group.is_shared else None
            for tensor in scale.group.quantized:
                scale_of[tensor] = (scale.scale, scale.method, number)
        pairs = []
        for tensor, inputs in placement.inputs.items():
            consumers = tuple((i.node.index, i.position, i.role) for i in inputs)
            pairs.append(ActivationPair(tensor, consumers, *scale_of[tensor]))
        weights = tuple((w.node.index, w.tensor, w.axis) for w in placement.weights)
        return Recipe(tuple(pairs), weights, placement.number_format)

    @functools.cached_property
    def key(self) -> str:
        """Hash of the pairs, their scales and the weights; equal keys mean equal results."""
        content: tuple[object, ...] = (
            [(p.tensor, p.consumers, p.scale.hex()) for p in self.pairs],
            self.weights,
        )
        if self.number_format != INT8:
            content += (self.number_format.name,)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:20]

    @functools.cached_property
    def quantized_inputs(self) -> Mapping[int, tuple[object, ...]]:
        """Quantization of the inputs and weights of each node, by node index.

        The entries of two recipes can be compared: if a node has equal entries, equal inputs of the
        node give equal outputs.
        """
        inputs: dict[int, list[object]] = defaultdict(list)
        for pair in self.pairs:
            for index, position, _ in pair.consumers:
                inputs[index].append((position, pair.tensor, pair.scale))
        for index, tensor, axis in self.weights:
            inputs[index].append((tensor, axis))
        return {index: tuple(sorted(entries, key=repr)) for index, entries in inputs.items()}

    def restrict_to_nodes(self, nodes: Container[int]) -> Recipe:
        """Return a recipe with only the pairs and weights of some nodes.

        Args:
            nodes: Indices of the nodes.
        """
        pairs = []
        for pair in self.pairs:
            consumers = tuple(c for c in pair.consumers if c[0] in nodes)
            if consumers:
                pairs.append(replace(pair, consumers=consumers))
        weights = tuple(w for w in self.weights if w[0] in nodes)
        return Recipe(tuple(pairs), weights, self.number_format)

    @property
    def is_float(self) -> bool:
        """Whether the recipe has no Q/DQ pairs, so that the network is float."""
        return not self.pairs and not self.weights

    def build(
        self, model: Model, weights: str = PlacementOptions.weights
    ) -> tuple[Model, list[QuantizedTensor]]:
        """Build the Q/DQ model; return it with its quantized tensors.

        Args:
            model: The prepared float model of the recipe, which is not changed.
            weights: Form of the weights, as for :func:`qdqtool.insertion.rewrite.insert_pairs`.
        """
        copy = model.copy()
        inputs = {}
        for pair in self.pairs:
            inputs[pair.tensor] = [
                QuantizedInput(copy.nodes[index], position, role)
                for index, position, role in pair.consumers
            ]
        sites = [WeightSite(copy.nodes[i], tensor, axis) for i, tensor, axis in self.weights]
        scales = {p.tensor: ActivationScale(p.scale, p.method, p.group) for p in self.pairs}
        placement = Placement(inputs, sites, number_format=self.number_format)
        return copy, insert_pairs(copy, placement, scales, weights)


FLOAT_RECIPE = Recipe((), ())


def restrict_to_differences(a: Recipe, b: Recipe) -> tuple[Recipe, Recipe]:
    """Restrict two recipes to the nodes whose quantized inputs differ between them."""
    first, second = a.quantized_inputs, b.quantized_inputs
    nodes = {n for n in {*first, *second} if first.get(n) != second.get(n)}
    return a.restrict_to_nodes(nodes), b.restrict_to_nodes(nodes)

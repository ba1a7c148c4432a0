"""Tensors that have to share one scale.

TensorRT moves a Q up past the operators of :mod:`qdqtool.model.operators` that have a passage (Concat, Split,
MaxPool, Pad, Resize, Reshape ...), and eliminates Concat and Split by letting the tensors share memory. With
different scales on their two sides a conversion stays in the engine ("Guidance of QAT performance optimization",
NVIDIA yolo_deepstream), or a convolution writes float because two Qs with different scales reach it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qdqtool.model.graph import Model
from qdqtool.model.heads import holds_shares
from qdqtool.model.operators import inputs_behind_q


@dataclass(frozen=True)
class ScaleGroup:
    """Tensors with one scale.

    Attributes:
        quantized: The tensors of the group that get a Q/DQ pair, in graph order.
        tensors: Those and all that are tied to them.
        sources: Tensors of the group whose values all others are made of; what calibration has to look at.
        largest: The largest value, where that is known without looking: 1 for what a Softmax gives to a product.
    """

    quantized: tuple[str, ...]
    tensors: tuple[str, ...]
    sources: tuple[str, ...]
    largest: float | None = None

    @property
    def tied(self) -> bool:
        """Whether the scale is a compromise between several tensors."""
        return len(self.sources) > 1


def scale_groups(model: Model, quantized: Iterable[str], unify: bool = True) -> list[ScaleGroup]:
    """Groups the quantized tensors by union-find over the operators that a Q passes.

    Args:
        model: The float model.
        quantized: Tensors that get a Q/DQ pair.
        unify: False gives every tensor a group of its own.

    Returns:
        Groups in the order of their first quantized tensor; chained Concats fall into one.
    """
    names = list(dict.fromkeys(quantized))
    if not unify:
        return [ScaleGroup((t,), (t,), (t,), _largest(model, (t,))) for t in names]
    parent: dict[str, str] = {}

    def find(tensor: str) -> str:
        parent.setdefault(tensor, tensor)
        while parent[tensor] != tensor:
            parent[tensor] = parent[parent[tensor]]
            tensor = parent[tensor]
        return tensor

    sources: dict[str, None] = {}
    stack = names[::-1]
    seen: set[str] = set()
    while stack:
        tensor = stack.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        find(tensor)
        node = model.producer(tensor)
        inputs = inputs_behind_q(model, node)
        above = [t for t in inputs if not model.is_constant(t)]
        if not above or len(above) < len(inputs):  # a constant that is joined in has a range as well
            sources[tensor] = None
        for name in above:
            parent[find(name)] = find(tensor)
            stack.append(name)
    groups: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for tensor in names:
        groups.setdefault(find(tensor), ([], [], []))[0].append(tensor)
    for tensor in parent:
        groups[find(tensor)][1].append(tensor)
    for tensor in sources:
        groups[find(tensor)][2].append(tensor)
    return [ScaleGroup(tuple(q), tuple(t), tuple(s), _largest(model, q)) for q, t, s in groups.values()]


def _largest(model: Model, quantized: Sequence[str]) -> float | None:
    return 1.0 if all(holds_shares(model, t) for t in quantized) else None

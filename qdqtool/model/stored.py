"""Constants of a model's message, by name, in whatever graph or function they lie; without an index of its graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import onnx

from qdqtool.model.subgraphs import inner_graphs

_SMALL = 64  # entries of one whose values are looked at


class Stored:
    """Constants of the nodes given, and of all graphs.

    Attributes:
        nodes: Those given.
    """

    def __init__(self, proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
        self._proto = proto
        self.nodes = nodes

    @cached_property
    def graphs(self) -> tuple[onnx.GraphProto, ...]:
        """The model's, and all inside nodes."""
        return (self._proto.graph, *inner_graphs(self.nodes))

    @cached_property
    def several(self) -> frozenset[str]:
        """Names that more than one graph, node or function has: there is no telling which is meant."""
        made = Counter(
            [
                *(t.name for g in self.graphs for t in g.initializer),
                *(t for n in self.nodes for t in n.output),
                *(v.name for g in self.graphs[1:] for v in g.input),
                *(t for f in self._proto.functions for t in f.input),
            ]
        )
        return frozenset(name for name, count in made.items() if count > 1)

    @cached_property
    def constants(self) -> list[tuple[str, onnx.AttributeProto]]:
        """What nodes that are constants state."""
        return [
            (n.output[0], a)
            for n in self.nodes
            if n.op_type == "Constant" and n.output
            for a in n.attribute
        ]

    @cached_property
    def all(self) -> list[tuple[str, onnx.TensorProto]]:
        """Every tensor that is stored."""
        return [
            *((t.name, t) for g in self.graphs for t in g.initializer),
            *(
                (name, a.t)
                for name, a in self.constants
                if a.name == "value" and not a.ref_attr_name
            ),
        ]

    @cached_property
    def _by_name(self) -> dict[str, onnx.TensorProto]:
        return {name: tensor for name, tensor in self.all if name not in self.several}

    @cached_property
    def _listed(self) -> dict[str, list[float]]:
        """Small constants that are stated as a list, not as a tensor."""
        return {
            name: [float(v) for v in a.ints]
            for name, a in self.constants
            if a.name == "value_ints"
            and a.type == a.INTS
            and not a.ref_attr_name
            and len(a.ints) <= _SMALL
            and name not in self.several
        }

    def get(self, tensor: str) -> onnx.TensorProto | None:
        """A constant; None where there is none of that name, or several."""
        return self._by_name.get(tensor)

    def values(self, tensor: str) -> list[float] | None:
        """The values of a small constant; None for others."""
        found = self.get(tensor)
        if found is None:
            return self._listed.get(tensor)
        if found.external_data or math.prod(found.dims) > _SMALL:
            return None
        try:
            return [float(v) for v in onnx.numpy_helper.to_array(found).flat]
        except Exception:  # it is damaged
            return None

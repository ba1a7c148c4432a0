"""Cutting a network in two: what crosses a cut, and the part behind it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx
from onnx import helper

from calibration.partial import partial_model
from qdqtool.graph import Model
from qdqtool.onnxgraph.live import bytes_of


class Cuts:
    """Cuts through a network in front of each of its nodes, in topological order.

    Args:
        model: The float network.
        wanted: Tensors that are read at the end.
    """

    def __init__(self, model: Model, wanted: Sequence[str]) -> None:
        self.model = model
        end = len(model.ordered)
        self._made: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for position, node in enumerate(model.ordered):
            for tensor in node.outputs:
                if tensor and not model.is_constant(tensor):
                    self._made[tensor] = position
            for tensor in (*node.inputs, *node.captured):
                if tensor:
                    self._last[tensor] = position
        self._made.update(dict.fromkeys(model.inputs, -1))
        self._last.update(dict.fromkeys(wanted, end))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object for a whole tuning
    def crossing(self, position: int) -> tuple[str, ...]:
        """Tensors made in front of a node (graph inputs included) that it or what follows still reads."""
        return tuple(t for t, made in self._made.items() if made < position <= self._last.get(t, -1))

    def usable(self, position: int) -> int:
        """The last cut at or in front of a node whose tensors all have a known type; 0 is the network's inputs."""
        while position and any(not self.model.elem_type(t) for t in self.crossing(position)):
            position -= 1
        return position

    def bytes_at(self, position: int) -> int:
        """Size of what crosses, open dimensions counted as 1."""
        return sum(bytes_of(self.model, tensor) for tensor in self.crossing(position))

    def given(self, position: int) -> list[onnx.ValueInfoProto]:
        """What has to be fed at a cut."""
        return [
            helper.make_tensor_value_info(t, self.model.elem_type(t), None)
            for t in self.crossing(position) if t not in self.model.inputs
        ]

    def behind(self, quantized: Model, position: int, outputs: Sequence[str]) -> onnx.ModelProto:
        """The part of a Q/DQ model of this network behind a cut that computes the given tensors."""
        return partial_model(quantized, outputs, self.given(position))

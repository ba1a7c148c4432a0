"""Slice elimination."""

from __future__ import annotations

from qdqtool.evidence import seen
from qdqtool.operators import LayerKind
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import ELIMINATING_SLICE

VIEW = seen(
    "view", "A Slice with steps of 1 becomes a view of the tensor that it is cut from.",
    "yolov8-orin-trt8412-excerpts:237", "bevfusion-camera-orin-trt8502:882",
    "bevfusion-camera-rtx3080ti-trt8600:5818",
)


class SliceRemoval(Pass):
    """Lets a slice be a view of its input instead of a copy; one with a step of more than 1 stays (assumed)."""

    cases = (VIEW,)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.SLICE):
            if layer.strided or layer.in_myelin or layer.data.producer is None:
                continue
            view = layer.out.name
            self.fire(VIEW, layer, ELIMINATING_SLICE, layer.name, f"{view} from {view} to {layer.data.name}", by="")
            layer.eliminated = True
            layer.out.view_of = layer.data

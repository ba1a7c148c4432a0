"""Slice elimination."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import ELIMINATING_SLICE


class SliceRemoval(Pass):
    """Lets a slice be a view of its input instead of a copy.

    Cases:
        * Slice with steps of 1: ``Eliminating slice <s> by retargeting <t> from <t> to <u>``, u the tensor it is cut
          from (yolov8-orin-trt8412-excerpts, three slices of a head). When TensorRT declines is not known (assumed:
          with a step of more than 1).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.SLICE):
            if layer.attrs.get("strided") or in_myelin(layer) or layer.data.producer is None:
                continue
            view = layer.out.name
            self.unowned(ELIMINATING_SLICE, layer.name, f"{view} from {view} to {layer.data.name}")
            layer.attrs["eliminated"] = True
            layer.out.view_of = layer.data

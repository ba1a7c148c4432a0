"""EltwiseAddToPwn."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import SWAP_TYPE


class EltwiseAddToPwn(Pass):
    """Turns a sum that no convolution took into a pointwise layer.

    Cases:
        * ELEMENTWISE sum to POINTWISE (yolov8-orin-trt8412-excerpts; NVIDIA/TensorRT issue 3345 on ``<Add> + <Relu>``).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.ELEMENTWISE):
            if layer.attrs.get("operation") != "SUM" or in_myelin(layer):
                continue
            self.running(layer)
            self.event(SWAP_TYPE, layer.name, "ELEMENTWISE to POINTWISE")
            network.set_kind(layer, net.POINTWISE)

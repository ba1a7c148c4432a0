"""ReduceToPoolingFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, weaken
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import SWAP_TYPE
from qdqtool.types import Evidence


class ReduceToPoolingFusion(Pass):
    """Turns a global reduction into a pooling.

    Cases:
        * GlobalAveragePool: REDUCE to POOLING (resnet18-qat-rtx2000-trt8510). GlobalMaxPool alike (assumed).
        * ReduceMean over height and width that keeps its dimensions alike (assumed); any other is left.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.REDUCE):
            pooling = layer.attrs.get("as_pooling")
            if pooling is None or in_myelin(layer):
                continue
            if layer.op != "GlobalAveragePool":
                weaken(layer, Evidence.ASSUMED)
            self.running(layer)
            self.event(SWAP_TYPE, layer.name, "REDUCE to POOLING")
            layer.attrs["pooling"] = pooling
            network.set_kind(layer, net.POOLING)

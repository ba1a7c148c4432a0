"""ReduceToPoolingFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import SWAP_TYPE


class ReduceToPoolingFusion(Pass):
    """Turns a global reduction into a pooling.

    Cases:
        * GlobalAveragePool: REDUCE to POOLING (resnet18-qat-rtx2000-trt8510). GlobalMaxPool alike (assumed).
          ReduceMean is left as it is: no log shows one.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.REDUCE):
            if layer.op not in ("GlobalAveragePool", "GlobalMaxPool") or in_myelin(layer):
                continue
            self.running(layer)
            self.event(SWAP_TYPE, layer.name, "REDUCE to POOLING")
            layer.attrs["pooling"] = "AVERAGE" if layer.op == "GlobalAveragePool" else "MAX"
            network.set_kind(layer, net.POOLING)

"""EltReluFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import FUSING


class EltReluFusion(Pass):
    """Joins an elementwise layer and the Relu behind it.

    Cases:
        * ELEMENTWISE -> Relu, single reader: ``<Add> + <Relu>`` (first pass of the quantization phase in both
          complete 8.5 logs, 8 of 8 residual Adds in each).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.ELEMENTWISE):
            relu = layer.out.only_reader()
            if relu is None or relu.attrs.get("activation") != "RELU" or in_myelin(layer):
                continue
            self.running(layer)
            self.event(FUSING, layer.name, relu.name)
            network.absorb_reader(layer, relu, f"{layer.name} + {relu.name}")
            layer.attrs["relu"] = relu.name

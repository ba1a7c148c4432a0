"""ScaleScaleFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import MAX_JOINED, Pass
from qdqtool.trt.trace import FUSING


class ScaleScaleFusion(Pass):
    """Joins two scales in a row (yolo-resnet18-orin-trt8502, the decomposed BatchNormalizations)."""

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.SCALE):
            if not network.alive(layer):
                continue
            while True:
                reader = layer.out.only_reader()
                if reader is None or reader.kind != net.SCALE or layer.attrs.get("relu_name"):
                    break
                if len(layer.nodes) >= MAX_JOINED:
                    break
                self.running(layer)
                self.event(FUSING, layer.name, reader.name)
                layer.attrs["relu_name"] = reader.attrs.get("relu_name")
                network.absorb_reader(layer, reader, f"{layer.name} + {reader.name}")

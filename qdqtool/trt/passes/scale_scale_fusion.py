"""ScaleScaleFusion."""

from __future__ import annotations

from qdqtool.knowledge.evidence import seen
from qdqtool.model.operators import LayerKind
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import MAX_JOINED, Pass
from qdqtool.trt.trace import FUSING

PLAIN = seen("two-scales", "Two scales in a row become one.", "yolo-resnet18-orin-trt8502:5765")


class ScaleScaleFusion(Pass):
    """Joins two scales in a row (the decomposed BatchNormalizations)."""

    cases = (PLAIN,)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.SCALE):
            if not network.alive(layer):
                continue
            while True:
                reader = layer.out.only_reader()
                if reader is None or reader.kind != LayerKind.SCALE or layer.relu:
                    break
                if len(layer.nodes) >= MAX_JOINED:
                    break
                self.running(PLAIN, layer)
                self.fire(PLAIN, layer, FUSING, layer.name, reader.name)
                layer.relu = reader.relu
                network.absorb_reader(layer, reader, f"{layer.name} + {reader.name}")

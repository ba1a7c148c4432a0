"""QDQToCopy."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import SWAP_TYPE


class QDQToCopy(Pass):
    """Turns every Q and DQ that nothing absorbed into a conversion of the engine.

    Cases:
        * Q: QUANTIZE to kQDQ, engine line ``Layer(Reformat): <Q>`` (yolo-resnet18-orin-trt8502: 12,
          resnet18-qat-rtx2000-trt8510: 1, the network input's).
        * DQ: the engine line is seen (resnet18-a100-qat-residual, DequantizeLinear_291), the pass line is assumed.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.QUANTIZE, net.DEQUANTIZE):
            self.running(layer)
            self.event(SWAP_TYPE, layer.name, f"{layer.kind} to kQDQ")
            self.refuse(
                layer,
                "stays",
                tensor=layer.data.source,
                scale=None if layer.quant is None or layer.quant.scale is None else layer.quant.scale.tolist(),
                kind=layer.kind,
            )
            network.set_kind(layer, net.COPY)

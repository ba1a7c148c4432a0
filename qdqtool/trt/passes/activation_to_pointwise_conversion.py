"""ActivationToPointwiseConversion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.passes.myelin import in_myelin
from qdqtool.trt.trace import SWAP_TYPE


class ActivationToPointwiseConversion(Pass):
    """Turns an activation other than Relu into a pointwise layer, ``PWN(<activation>)``.

    Cases:
        * LeakyRelu (yolo-resnet18-orin-trt8502, 20 of 20); Clip, whose engine name ``PWN(Clip_13)`` shows the same
          (mobilenetv2-titanrtx-qat-residual); every other activation that is left alike (assumed).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.ACTIVATION):
            if layer.attrs.get("activation") == "RELU" or in_myelin(layer):
                continue
            self.running(layer)
            self.event(SWAP_TYPE, layer.name, "ACTIVATION to POINTWISE")
            network.set_kind(layer, net.POINTWISE)
            layer.name = f"PWN({layer.name})"

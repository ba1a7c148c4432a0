"""ScaleActivationFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import FUSING


class ScaleActivationFusion(Pass):
    """Joins a BatchNormalization and the Relu behind it.

    Cases:
        * SCALE -> Relu, single reader: ``<BN> + <Relu>`` (yolo-resnet18-orin-trt8502: 9 of 40 BatchNormalizations,
          resnet18-qat-rtx2000-trt8510: 9 of 20; those before an Add or a LeakyRelu are left alone).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.SCALE):
            relu = layer.out.only_reader()
            if relu is None or relu.attrs.get("activation") != "RELU":
                continue
            self.running(layer)
            self.event(FUSING, layer.name, relu.name)
            layer.attrs["relu_name"] = relu.name
            network.absorb_reader(layer, relu, f"{layer.name} + {relu.name}")

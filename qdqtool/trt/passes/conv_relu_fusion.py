"""ConvReluFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import FUSING


class ConvReluFusion(Pass):
    """Joins a convolution and the Relu right behind it.

    Cases:
        * CONVOLUTION -> Relu, single reader, BatchNormalization already folded in the ONNX file: ``<Conv> + <Relu>``
          (yolov8-orin-trt8412-excerpts: the float head convolutions; centernet-resnet34-qat-trt80 keeps
          ``+ Relu_618`` in quantized ones).
        * DECONVOLUTION -> Relu is logged as DeconvReluFusion (centerpoint-a100-trt823-fp16).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.CONVOLUTION, net.DECONVOLUTION):
            relu = layer.out.only_reader()
            if relu is None or relu.attrs.get("activation") != "RELU":
                continue
            logged = self.name if layer.kind == net.CONVOLUTION else "DeconvReluFusion"
            self.event("Running", layer.name, pass_name=logged)
            self.event(FUSING, layer.name, relu.name, pass_name=logged)
            network.absorb_reader(layer, relu, f"{layer.name} + {relu.name}")
            layer.attrs["activated"] = True

"""QConvScaleFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, dq_of, evidence_of, node_name, weaken, weights_position
from qdqtool.trt.trace import REMOVING
from qdqtool.types import Evidence


class QConvScaleFusion(Pass):
    """Folds a BatchNormalization (and the Relu fused to it) into a quantized convolution.

    Cases:
        * CONVOLUTION with both inputs from DQs -> SCALE, single reader: the names of BatchNormalization and Relu
          disappear (yolo-resnet18-orin-trt8502: 37, resnet18-qat-rtx2000-trt8510: 20). TensorRT 8.0 keeps ``+ Relu_11``
          (centernet-resnet34-qat-trt80).
        * A BatchNormalization that was decomposed because a parameter is not a plain constant is not folded
          (yolo-resnet18-orin-trt8502: three downsample branches).
        * ConvTranspose: "no support for Q/DQ + convTranspose + BN fusion yet" (NVIDIA, NVIDIA/TensorRT issue 3412,
          2023); nothing newer says that a later version folds it.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.CONVOLUTION, net.DECONVOLUTION):
            position = weights_position(layer)
            if position is None or dq_of(layer.data) is None or dq_of(layer.inputs[position]) is None:
                continue
            scale = layer.out.only_reader()
            if scale is None:
                continue
            if scale.op == "BatchNormalization" and scale.kind != net.SCALE:
                self.refuse(layer, "batchnorm-not-constant", batchnorm=node_name(scale))
                continue
            if scale.kind != net.SCALE or layer.attrs.get("activated"):
                continue
            if layer.kind == net.DECONVOLUTION:
                self.refuse(layer, "convtranspose-batchnorm", batchnorm=node_name(scale))
                weaken(layer, Evidence.DOCUMENTED)
                continue
            weaken(layer, evidence_of(scale))
            self.running(layer)
            self.event(REMOVING, scale.name)
            relu = scale.attrs.get("relu_name")
            if relu:
                layer.attrs["activated"] = True
            keep = relu and self.target.keeps_relu_name
            network.absorb_reader(layer, scale, f"{layer.name} + {relu}" if keep else layer.name)

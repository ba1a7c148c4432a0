"""GenericConvActFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass, node_name, weaken
from qdqtool.trt.trace import FUSING
from qdqtool.types import Evidence


class GenericConvActFusion(Pass):
    """Joins a convolution and a pointwise layer that reads nothing else.

    Cases:
        * CONVOLUTION -> PWN of one input, single reader: ``<Conv> + PWN(...)``, before Qs are absorbed, so that the Q
          behind the activation can be (yolo-resnet18-orin-trt8502: 20 LeakyRelu; mobilenetv2-titanrtx-qat-residual:
          Clip). SiLU: the fused name is seen with Q/DQ (NVIDIA/TensorRT issue 3385), the INT8 output behind it is
          documented.
        * PWN with a second input (SiLU joined with a residual Add): refused, the convolution writes float.
        * Depthwise with SiLU: NVIDIA prefers its own depthwise kernel and may leave the pair apart (issue 3205), so
          the outcome is assumed.
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.CONVOLUTION, net.DECONVOLUTION):
            pointwise = layer.out.only_reader()
            if pointwise is None or pointwise.kind != net.POINTWISE or layer.attrs.get("activated"):
                continue
            if len(pointwise.inputs) != 1:
                self.refuse(
                    layer, "activation-before-add", activation=node_name(pointwise), nodes=tuple(pointwise.nodes)
                )
                weaken(layer, Evidence.DOCUMENTED)  # NVIDIA/TensorRT issue 2204: INT8 to float
                continue
            self.running(layer)
            self.event(FUSING, layer.name, pointwise.name)
            network.absorb_reader(layer, pointwise, f"{layer.name} + {pointwise.name}")
            layer.attrs["activated"] = True
            layer.attrs["pointwise"] = True
            self._judge(layer, pointwise)

    @staticmethod
    def _judge(layer: Layer, pointwise: Layer) -> None:
        seen = pointwise.op in ("LeakyRelu", "Clip") and len(pointwise.nodes) == 1
        depthwise = layer.attrs.get("group", 1) > 1
        if layer.kind == net.DECONVOLUTION or (depthwise and not seen):
            weaken(layer, Evidence.ASSUMED)
        elif not seen:
            weaken(layer, Evidence.DOCUMENTED)

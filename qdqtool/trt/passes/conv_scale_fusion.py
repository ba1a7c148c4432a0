"""ConvScaleFusion."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, dq_of, evidence_of, weaken, weights_position
from qdqtool.trt.trace import FUSING
from qdqtool.types import Evidence


class ConvScaleFusion(Pass):
    """Folds a scale into a convolution whose weights can be rescaled, or a bias into any.

    Cases:
        * Gemm turned convolution -> bias: ``<Gemm> + <bias ...>`` (resnet18-qat-rtx2000-trt8510).
        * Float convolution -> BatchNormalization: ``<Conv> + <BN>`` (assumed; DeconvScaleFusion with the same wording
          is seen in centerpoint-a100-trt823-fp16).
    """

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(net.CONVOLUTION, net.DECONVOLUTION):
            scale = layer.out.only_reader()
            if scale is None or scale.kind != net.SCALE or layer.attrs.get("activated"):
                continue
            position = weights_position(layer)
            quantized = position is not None and dq_of(layer.inputs[position]) is not None
            if position is not None and not scale.attrs.get("shift_only"):
                continue
            if not quantized and layer.kind == net.CONVOLUTION:
                weaken(layer, Evidence.ASSUMED)
            logged = self.name if layer.kind == net.CONVOLUTION else "DeconvScaleFusion"
            self.event("Running", layer.name, pass_name=logged)
            self.event(FUSING, layer.name, scale.name, pass_name=logged)
            weaken(layer, evidence_of(scale))
            if "relu_name" in scale.attrs:
                layer.attrs["activated"] = True
            network.absorb_reader(layer, scale, f"{layer.name} + {scale.name}")

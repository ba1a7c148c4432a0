"""ConvReluFusion, and DeconvReluFusion for deconvolutions."""

from __future__ import annotations

from qdqtool.knowledge.evidence import seen
from qdqtool.model.operators import LayerKind, activation_of
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, is_relu
from qdqtool.trt.trace import FUSING

CONVOLUTION = activation_of("Relu").case
DECONVOLUTION = seen(
    "deconvolution", "A deconvolution takes the Relu that alone reads it; logged as DeconvReluFusion.",
    "centerpoint-a100-trt823-fp16:1668",
)


class ConvReluFusion(Pass):
    """Joins a convolution and the Relu right behind it (BatchNormalization already folded in the ONNX file)."""

    cases = (CONVOLUTION,)

    def apply(self, network: Network) -> None:
        self._join(network, LayerKind.CONVOLUTION)

    def _join(self, network: Network, kind: LayerKind) -> None:
        (case,) = self.cases
        for layer in network.of_kind(kind):
            relu = layer.out.only_reader()
            if relu is None or not is_relu(relu):
                continue
            self.running(case, layer)
            self.fire(case, layer, FUSING, layer.name, relu.name)
            network.absorb_reader(layer, relu, f"{layer.name} + {relu.name}")
            layer.fusion.activated = True


class DeconvReluFusion(ConvReluFusion):
    """The same for a deconvolution."""

    cases = (DECONVOLUTION,)

    def apply(self, network: Network) -> None:
        self._join(network, LayerKind.DECONVOLUTION)

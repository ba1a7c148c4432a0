"""ConvReluFusion, and DeconvReluFusion for deconvolutions."""

from qdqtool.knowledge.tables import seen
from qdqtool.model.operators import LayerKind, case_of
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, is_relu

CONVOLUTION = case_of("Relu")
DECONVOLUTION = seen(
    "deconvolution", "A deconvolution takes the Relu that alone reads it; logged as DeconvReluFusion.",
    "centerpoint-a100-trt823-fp16:1668",
)


class ConvReluFusion(Pass):
    """Joins a convolution and the Relu right behind it (BatchNormalization already folded in the ONNX file)."""

    cases = (CONVOLUTION,)
    kind = LayerKind.CONVOLUTION

    def apply(self, network: Network) -> None:
        (case,) = self.cases
        for layer in network.of_kind(self.kind):
            relu = layer.out.only_reader()
            if relu is None or not is_relu(relu):
                continue
            self.join(network, case, layer, relu)
            layer.fusion.activated = True


class DeconvReluFusion(ConvReluFusion):
    """The same for a deconvolution."""

    cases = (DECONVOLUTION,)
    kind = LayerKind.DECONVOLUTION

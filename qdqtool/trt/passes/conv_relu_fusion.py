"""ConvReluFusion, and DeconvReluFusion for deconvolutions."""

from qdqtool.model.operators import case_of
from qdqtool.trt.passes._infra import LayerKind, ReluFusion, seen

CONVOLUTION = case_of("Relu")
DECONVOLUTION = seen(
    "deconvolution",
    "A deconvolution takes the Relu that alone reads it; logged as DeconvReluFusion.",
    "centerpoint-a100-trt823-fp16:1668",
)


class ConvReluFusion(ReluFusion):
    """Joins a convolution and the Relu right behind it (BatchNormalization already folded in the ONNX file)."""

    cases = (CONVOLUTION,)
    kind = LayerKind.CONVOLUTION


class DeconvReluFusion(ReluFusion):
    """The same for a deconvolution."""

    cases = (DECONVOLUTION,)
    kind = LayerKind.DECONVOLUTION

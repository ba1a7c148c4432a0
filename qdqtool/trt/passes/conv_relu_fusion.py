"""ConvReluFusion, and DeconvReluFusion for deconvolutions."""

from qdqtool.ir.operators import find_case
from qdqtool.trt.passes._infra import LayerKind, ReluFusion, seen

CONVOLUTION = find_case("Relu")
DECONVOLUTION = seen(
    "deconvolution",
    "A deconvolution fuses the Relu that alone reads it; logged as DeconvReluFusion.",
    "centerpoint-a100-trt823-fp16:1668",
)


class ConvReluFusion(ReluFusion):
    """Fuses a convolution and the Relu directly after it.

    Exporters have folded the BatchNormalization of such a convolution.
    """

    cases = (CONVOLUTION,)
    kind = LayerKind.CONVOLUTION


class DeconvReluFusion(ReluFusion):
    """Fuses a deconvolution and the Relu directly after it."""

    cases = (DECONVOLUTION,)
    kind = LayerKind.DECONVOLUTION

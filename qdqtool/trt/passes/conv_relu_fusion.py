from qdqtool.trt.passes._infra import LayerKind, ReluFusion, find_case, seen

CONVOLUTION = find_case("Relu")
DECONVOLUTION = seen(
    "deconvolution",
    "A deconvolution fuses a Relu that is its single consumer; logged as DeconvReluFusion.",
    "centerpoint-a100-trt823-fp16:1668",
)


class ConvReluFusion(ReluFusion):
    """Fuses a convolution and the Relu directly after it.

    A Relu directly after a convolution is common, because exporters fold the BatchNormalization
    into the weights.
    """

    cases = (CONVOLUTION,)
    kind = LayerKind.CONVOLUTION


class DeconvReluFusion(ReluFusion):
    """Fuses a deconvolution and the Relu directly after it."""

    cases = (DECONVOLUTION,)
    kind = LayerKind.DECONVOLUTION

from typing import ClassVar

from qdqtool.trt.passes._infra import (
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    assumed,
    dq_before,
    seen,
    weights_position,
)

BIAS = seen(
    "bias",
    "A quantized fully connected layer absorbs its bias, <Gemm> + <bias ...>.",
    "resnet18-qat-rtx2000-trt8510:2577",
    about=("Gemm",),
)
FLOAT = assumed(
    "float",
    "A float convolution folds a BatchNormalization.",
    "a deconvolution does (centerpoint-a100-trt823-fp16:1666), with the same wording",
    about=("Conv", "BatchNormalization"),
)
DECONVOLUTION = seen(
    "deconvolution",
    "A deconvolution folds a BatchNormalization; logged as DeconvScaleFusion.",
    "centerpoint-a100-trt823-fp16:1666",
)


class ConvScaleFusion(Pass):
    """Folds the SCALE layer after a convolution into the convolution.

    If the weights are not plain (for example, if they have Q/DQ), only a bias is folded.
    """

    cases: ClassVar[tuple[Case, ...]] = (BIAS, FLOAT)
    kind = LayerKind.CONVOLUTION

    def _apply(self, network: Network) -> None:
        for layer, scale in network.single_consumer_pairs(self.kind, consumer_kind=LayerKind.SCALE):
            position = weights_position(layer)
            if layer.fusion.has_activation or (position and not scale.shift_only):
                continue
            layer.fusion.has_activation = bool(scale.relu_name)
            self.fuse_consumer(network, self._choose_case(layer, position), layer, scale)

    def _choose_case(self, layer: Layer, position: int | None) -> Case:
        return BIAS if position and dq_before(layer.inputs[position]) else FLOAT


class DeconvScaleFusion(ConvScaleFusion):
    """Folds the SCALE layer after a deconvolution into the deconvolution."""

    cases = (DECONVOLUTION,)
    kind = LayerKind.DECONVOLUTION

    def _choose_case(self, layer: Layer, position: int | None) -> Case:
        return DECONVOLUTION

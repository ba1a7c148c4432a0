from qdqtool.reasons.fusions import StemBeforePool
from qdqtool.trt.passes._infra import (
    Layer,
    LayerKind,
    Network,
    Pass,
    PoolingWindow,
    assumed,
    node_name,
    seen,
)

STEM = seen(
    "stem-7x7",
    "The 7x7 stem of an image network fuses the 3x3 MaxPool after it, and reads and writes INT8.",
    "resnet18-qat-rtx2000-trt8510:2804",
    "resnet18-a100-qat-residual",
    "resnet18-a100-qat-residual-qgap",
    "bevfusion-camera-orin-trt8502:862",
    "bevfusion-camera-rtx3080ti-trt8600:5798",
    source="TensorRT 8.0 does not fuse the pooling (centernet-resnet34-qat-trt80)",
)
OTHER_STEM = assumed(
    "stem-other",
    "A stem with another kernel fuses the MaxPool as well.",
    "only ResNet's 7x7 stem was seen; an engine with separate layers would refute it",
)

MAX_IMAGE_CHANNELS = 4


class ConvActPoolFusion(Pass):
    """Fuses a stem convolution and the MaxPool after it.

    The convolution reads an image of at most 4 channels, has stride 2, and reads and writes INT8.
    Its single consumer is a 3x3 MaxPool with stride 2.
    """

    cases = (STEM, OTHER_STEM)

    def _apply(self, network: Network) -> None:
        if not self.target.fuses_stem_pool:
            return
        pairs = network.single_consumer_pairs(
            LayerKind.CONVOLUTION, consumer_kind=LayerKind.POOLING
        )
        for conv, pool in pairs:
            if conv.int8 and conv.int8_out and _is_stem(conv) and _is_stem_pool(pool.window):
                relu = conv.fusion.quantized_relu
                if relu:  # TensorRT may have no kernel for convolution, Relu and pooling
                    self.refuse(StemBeforePool(self.name, node_name(conv), relu, node_name(pool)))
                case = STEM if conv.weights.kernel == (7, 7) else OTHER_STEM
                self.fuse_consumer(network, case, conv, pool)
                conv.fusion.has_pooling = True


def _is_stem(conv: Layer) -> bool:
    weights = conv.weights
    if len(weights.dims) != 4 or conv.fusion.has_pointwise:
        return False
    channels = weights.dims[1]
    is_image = isinstance(channels, int) and channels <= MAX_IMAGE_CHANNELS
    return is_image and weights.group == 1 and weights.strides == (2, 2)


def _is_stem_pool(window: PoolingWindow | None) -> bool:
    return (
        window is not None
        and window.type == "MAX"
        and window.kernel == (3, 3)
        and window.strides == (2, 2)
    )

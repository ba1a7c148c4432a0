"""ConvActPoolFusion."""

from qdqtool.trt.layers import PoolingWindow
from qdqtool.trt.passes._infra import Layer, LayerKind, Network, Pass, assumed, seen

STEM = seen(
    "stem-7x7",
    "The 7x7 stem of an image network takes the 3x3 MaxPool behind it, INT8 in and out.",
    "resnet18-qat-rtx2000-trt8510:2804",
    "resnet18-a100-qat-residual",
    "resnet18-a100-qat-residual-qgap",
    "bevfusion-camera-orin-trt8502:862",
    "bevfusion-camera-rtx3080ti-trt8600:5798",
    source="TensorRT 8.0 keeps the pooling apart (centernet-resnet34-qat-trt80)",
)
OTHER_STEM = assumed(
    "stem-other",
    "A stem with another kernel takes the MaxPool as well.",
    "only ResNet's 7x7 stem was seen; an engine that keeps them apart would refute it",
)


class ConvActPoolFusion(Pass):
    """Joins the stem convolution and the MaxPool behind it.

    An INT8 to INT8 convolution of an image (at most 4 channels) with stride 2, and a MaxPool 3x3 with stride 2 that
    alone reads it.
    """

    cases = (STEM, OTHER_STEM)

    def apply(self, network: Network) -> None:
        if not self.target.fuses_stem_pool:
            return
        for conv, pool in network.single_consumer_pairs(
            LayerKind.CONVOLUTION, consumer_kind=LayerKind.POOLING
        ):
            if conv.int8 and conv.int8_out and _is_stem(conv) and _is_stem_pool(pool.window):
                self.fuse_consumer(
                    network, STEM if conv.weights.kernel == (7, 7) else OTHER_STEM, conv, pool
                )
                conv.fusion.has_pooling = True


def _is_stem(conv: Layer) -> bool:
    known = conv.weights
    if len(known.dims) != 4 or conv.fusion.has_pointwise:
        return False
    channels = known.dims[1]
    return (
        isinstance(channels, int) and channels <= 4 and known.group == 1 and known.strides == (2, 2)
    )


def _is_stem_pool(window: PoolingWindow | None) -> bool:
    return window is not None and (window.type, window.kernel, window.strides) == (
        "MAX",
        (3, 3),
        (2, 2),
    )

"""Horizontal merging of convolutions."""

from collections import Counter

from qdqtool.trt.passes._infra import Layer, LayerKind, Network, Pass, seen
from qdqtool.trt.trace import MERGING

EQUAL = seen(
    "equal-convolutions",
    "Convolutions of equal shape and precision that read one tensor become one layer, A || B.",
    "yolov8-orin-trt8412-excerpts:232",
    "centerpoint-a100-trt823-fp16:1747",
    source="different kernels stay apart (yolo-resnet18-orin-trt8502), and so do a convolution with Relu and one "
    "without (bevfusion-camera-orin-trt8502: Conv_47 and Conv_79, also in INT8); TensorRT 8.0 does not merge quantized "
    "ones (centernet-resnet34-qat-trt80, NVIDIA/TensorRT issue 1602); one with a pointwise activation is left alone: "
    "no merged one was seen",
)


class MergeLayers(Pass):
    """Makes one layer of convolutions of equal shape that read the same tensor, logged as ``Merging layers: A || B``.

    Same input, kernel, stride, padding and dilation, no groups, equal activation, equal precision of input and output,
    no residual.
    """

    cases = (EQUAL,)
    anonymous_lines = (MERGING,)

    def apply(self, network: Network) -> None:
        if not self.target.merges_parallel:
            return
        alike = Counter(
            _key(conv) for conv in network.layers_of_kind(LayerKind.CONVOLUTION) if _mergeable(conv)
        )
        if max(alike.values(), default=0) < 2:
            return
        groups: dict[tuple[object, ...], list[Layer]] = {}
        for conv in network.depth_first():
            if conv.kind == LayerKind.CONVOLUTION and _mergeable(conv):
                groups.setdefault(_key(conv), []).append(conv)
        for group in groups.values():
            if len(group) > 1:
                name = " || ".join(c.name for c in group)
                for conv in group:
                    conv.fusion.merged_name = name
                    conv.add_cases(EQUAL)
                self.fire(EQUAL, group[0], MERGING, name, by="")


def _mergeable(conv: Layer) -> bool:
    fusion, known = conv.fusion, conv.weights
    return (
        conv.residual is None
        and len(conv.inputs) == 1
        and known.group == 1
        and not (
            fusion.has_pointwise or fusion.has_pooling or fusion.has_padding or known.from_matmul
        )
        and known.auto_pad in ("NOTSET", "VALID")
    )


def _key(conv: Layer) -> tuple[object, ...]:
    known = conv.weights
    return (
        id(conv.data),
        known.kernel,
        known.strides,
        known.pads,
        known.dilations,
        conv.int8,
        conv.int8_out,
        conv.fusion.has_activation,
    )

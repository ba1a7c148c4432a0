from collections import Counter

from qdqtool.trt.passes._infra import MERGING, Layer, LayerKind, Network, Pass, seen

EQUAL = seen(
    "equal-convolutions",
    "Convolutions of equal shape and precision that read one tensor become one layer, A || B.",
    "yolov8-orin-trt8412-excerpts:232",
    "centerpoint-a100-trt823-fp16:1747",
    source="not merged: different kernels (yolo-resnet18-orin-trt8502); a convolution with Relu "
    "and another without (bevfusion-camera-orin-trt8502: Conv_47 and Conv_79, also in INT8); "
    "quantized convolutions on TensorRT 8.0 (centernet-resnet34-qat-trt80, NVIDIA/TensorRT issue "
    "1602); convolutions with a pointwise activation, of which no build shows a merge",
)


class MergeLayers(Pass):
    """Merges convolutions of equal shape that read the same tensor, logged as ``A || B``.

    Merged convolutions have equal kernels, strides, pads, dilations and precisions of input and
    output. All or none of them have a Relu. They have no groups, and have fused no residual, Pad,
    pooling or pointwise activation. TensorRT's log does not name this pass.
    """

    cases = (EQUAL,)
    anonymous_lines = (MERGING,)

    def _apply(self, network: Network) -> None:
        if not self.target.merges_parallel:
            return
        convolutions = filter(_can_merge, network.layers_of_kind(LayerKind.CONVOLUTION))
        if max(Counter(map(_merging_key, convolutions)).values(), default=0) < 2:
            return
        groups: dict[tuple[object, ...], list[Layer]] = {}
        for conv in network.depth_first():
            if conv.kind == LayerKind.CONVOLUTION and _can_merge(conv):
                groups.setdefault(_merging_key(conv), []).append(conv)
        for group in groups.values():
            if len(group) > 1:
                self._merge_convolutions(group)

    def _merge_convolutions(self, group: list[Layer]) -> None:
        name = " || ".join(conv.name for conv in group)
        for conv in group:
            conv.fusion.merged_name = name
            conv.add_cases(EQUAL)
        self.fire(EQUAL, group[0], MERGING, name, logged_pass="")


def _can_merge(conv: Layer) -> bool:
    fusion, weights = conv.fusion, conv.weights
    return (
        conv.residual is None
        and len(conv.inputs) == 1
        and not fusion.has_pointwise
        and not fusion.has_pooling
        and not fusion.has_padding
        and weights.group == 1
        and not weights.from_matmul
        and weights.auto_pad in ("NOTSET", "VALID")
    )


def _merging_key(conv: Layer) -> tuple[object, ...]:
    weights = conv.weights
    return (
        id(conv.data),
        weights.kernel,
        weights.strides,
        weights.pads,
        weights.dilations,
        conv.int8,
        conv.int8_out,
        conv.fusion.has_activation,
    )

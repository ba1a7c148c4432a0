"""Horizontal merging of convolutions."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.trace import MERGING


class MergeLayers(Pass):
    """Makes one layer of convolutions of equal shape that read the same tensor, logged as ``Merging layers: A || B``.

    Cases:
        * Same input, kernel, stride, padding and dilation, no groups, equal precision of input and output, no residual:
          merged in the order of visits, the INT8 ones and the float ones apart (yolov8-orin-trt8412-excerpts).
        * Different kernels stay apart (yolo-resnet18-orin-trt8502: 3x3 beside 1x1 downsample).
        * A convolution with a pointwise activation fused to it is left alone (assumed: no merged one was seen).
        * TensorRT 8.0 does not merge quantized convolutions (centernet-resnet34-qat-trt80, NVIDIA/TensorRT issue 1602).
    """

    def apply(self, network: Network) -> None:
        if not self.target.merges_parallel:
            return
        groups: dict[tuple[object, ...], list[Layer]] = {}
        for conv in network.of_kind(net.CONVOLUTION):
            if _mergeable(conv):
                groups.setdefault(_key(conv), []).append(conv)
        for group in groups.values():
            if len(group) > 1:
                name = " || ".join(c.name for c in group)
                self.unowned(MERGING, name)
                for conv in group:
                    conv.attrs["merged"] = name


def _mergeable(conv: Layer) -> bool:
    return (
        conv.residual is None
        and len(conv.inputs) == 1
        and conv.attrs.get("group") == 1
        and not conv.attrs.get("pointwise")
        and not conv.attrs.get("pooled")
        and not conv.attrs.get("from_matmul")
        and not conv.attrs.get("padded")
        and conv.attrs.get("auto_pad") in ("NOTSET", "VALID", None)
    )


def _key(conv: Layer) -> tuple[object, ...]:
    attrs = conv.attrs
    return (
        id(conv.data),
        attrs.get("kernel"),
        tuple(attrs.get("strides", ())),
        tuple(attrs.get("pads", ())),
        tuple(attrs.get("dilations", ())),
        conv.int8,
        conv.int8_out,
        bool(attrs.get("activated")) and not conv.int8,
    )

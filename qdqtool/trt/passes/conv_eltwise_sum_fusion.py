from typing import TypeGuard

from qdqtool.trt.passes._infra import (
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    constant_before,
    dq_before,
    seen,
    weights_position,
)

PLAIN = seen(
    "float-residual",
    "A convolution that writes float fuses the sum after it: INT8, FLOAT -> FLOAT.",
    "yolo-resnet18-orin-trt8502:5719",
    "mobilenetv2-titanrtx-qat-residual",
    source="the Q after the sum remains a conversion even if nothing else reads the sum",
)
BOTH = seen(
    "two-convolutions",
    "If convolutions feed both inputs of a sum, the convolution at the second input fuses the sum.",
    "resnet18-a100-qat",
    source="the downsample branches",
)
FIRST = seen(
    "two-convolutions-first",
    "On TensorRT 10, the convolution at the first input fuses a sum of two convolutions.",
    "unet-resnet50-orinnano-trt10162",
    source="conv3 in all four blocks with a downsample convolution, in FP16 and in INT8",
)
DEQUANTIZED = seen(
    "dequantized-residual",
    "If only the residual is quantized and not the sum, the fused layer reads the residual as "
    "float and the DQ remains.",
    "resnet18-a100-qat-residual",
    source="DequantizeLinear_291",
)


class ConvEltwiseSumFusion(Pass):
    """Fuses a convolution that writes float with the sum (and its Relu) after it.

    Convolution and sum are not fused if the other operand is a constant, or if the operands have
    different shapes. An unknown shape counts as equal.
    """

    cases = (PLAIN, BOTH, FIRST, DEQUANTIZED)

    def _apply(self, network: Network) -> None:
        pairs = network.single_consumer_pairs(
            LayerKind.CONVOLUTION, consumer_kind=LayerKind.ELEMENTWISE
        )
        for conv, add in pairs:
            if add.operation != "SUM" or len(add.inputs) != 2 or not _can_fuse_sum(conv):
                continue
            first, last = (t.producer_of_kind(LayerKind.CONVOLUTION) for t in add.inputs)
            if not _can_fuse_sum(last) or last.out.single_consumer() is not add:
                self._fuse_sum(network, PLAIN, conv, add)
            elif _can_fuse_sum(first):
                if self.target.sums_into_first:
                    self._fuse_sum(network, FIRST, first, add)
                else:
                    self._fuse_sum(network, BOTH, last, add)
            else:
                self._fuse_sum(network, PLAIN, last, add)

    def _fuse_sum(self, network: Network, case: Case, conv: Layer, add: Layer) -> None:
        residual = next((t for t in add.inputs if t is not conv.out), None)
        if residual is None or constant_before(residual) is not None:
            return
        shapes = {residual.shape, conv.out.shape}
        if len(shapes) > 1 and None not in shapes:
            return
        self.fuse_consumer(network, DEQUANTIZED if dq_before(residual) else case, conv, add)
        conv.residual = residual
        conv.fusion.has_activation = True


def _can_fuse_sum(conv: Layer | None) -> TypeGuard[Layer]:
    if conv is None or conv.int8_out or conv.fusion.has_activation:
        return False
    return weights_position(conv) is None

"""ConvEltwiseSumFusion."""

from qdqtool.trt.layers import weights_position
from qdqtool.trt.passes._infra import (
    Case,
    Layer,
    LayerKind,
    Network,
    Pass,
    constant_before,
    dq_before,
    seen,
)

PLAIN = seen(
    "float-residual",
    "A convolution that writes float takes the sum it feeds; INT8, FLOAT -> FLOAT.",
    "yolo-resnet18-orin-trt8502:5719",
    "mobilenetv2-titanrtx-qat-residual",
    source="the Q behind the sum stays a conversion even if it is its only reader",
)
BOTH = seen(
    "two-convolutions",
    "Where convolutions feed both inputs of the sum, the later-listed one takes it.",
    "resnet18-a100-qat",
    source="the downsample branches",
)
DEQUANTIZED = seen(
    "dequantized-residual",
    "A quantized residual of a sum that is not quantized is taken as float, its DQ stays.",
    "resnet18-a100-qat-residual",
    source="DequantizeLinear_291",
)


class ConvEltwiseSumFusion(Pass):
    """Joins a convolution that writes float and the sum it feeds (with its Relu), of equal shape."""

    cases = (PLAIN, BOTH, DEQUANTIZED)

    def apply(self, network: Network) -> None:
        for conv, add in network.single_consumer_pairs(
            LayerKind.CONVOLUTION, consumer_kind=LayerKind.ELEMENTWISE
        ):
            if add.operation != "SUM" or len(add.inputs) != 2:
                continue
            if not _can_take(conv):
                continue
            first, last = (t.producer_of_kind(LayerKind.CONVOLUTION) for t in add.inputs)
            case = PLAIN
            if last is not None and _can_take(last) and last.out.single_consumer() is add:
                case = BOTH if first is not None and _can_take(first) else PLAIN
                conv = last
            self._take(network, case, conv, add)

    def _take(self, network: Network, case: Case, conv: Layer, add: Layer) -> None:
        other = next((t for t in add.inputs if t is not conv.out), None)
        if other is None or constant_before(other) is not None:
            return
        if other.shape is not None and conv.out.shape is not None and other.shape != conv.out.shape:
            return
        self.fuse_consumer(network, DEQUANTIZED if dq_before(other) else case, conv, add)
        conv.residual = other
        conv.fusion.has_activation = True


def _can_take(conv: Layer) -> bool:
    return not conv.int8_out and not conv.fusion.has_activation and weights_position(conv) is None

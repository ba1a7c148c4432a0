"""ConstEltFusion."""

import math

from qdqtool.knowledge.tables import assumed, seen
from qdqtool.model.operators import LayerKind
from qdqtool.trt.layers import Layer
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, constant_of
from qdqtool.trt.trace import FUSING

PLAIN = seen(
    "sum-or-product", "A sum or product with a constant becomes a scale, <constant> + <elementwise>.",
    "yolo-resnet18-orin-trt8502:5194", "resnet18-qat-rtx2000-trt8510:2575",
    source="the last-listed constant where both operands are; differences and quotients are left",
)
WITH_RELU = assumed(
    "with-relu", "Such a sum with its Relu right behind a convolution becomes a scale with Relu.",
    "otherwise no hidden fully connected layer could write INT8; an engine with one that writes float would refute it",
)


class ConstEltFusion(Pass):
    """Turns an elementwise sum or product with a constant into a scale."""

    cases = (PLAIN, WITH_RELU)

    def apply(self, network: Network) -> None:
        for layer in network.of_kind(LayerKind.ELEMENTWISE):
            if layer.operation not in ("SUM", "PROD") or len(layer.inputs) != 2 or layer.in_myelin:
                continue
            constant = next((c for c in map(constant_of, reversed(layer.inputs)) if c is not None), None)
            if constant is None or constant.out.only_reader() is not layer:
                continue
            if layer.relu and not _of_convolution(layer):
                continue
            if any(_behind_matmul(t.producer) for t in layer.inputs):
                continue  # the reshape is pushed behind the sum first
            case = WITH_RELU if layer.relu else PLAIN
            self.running(case, constant)
            self.fire(case, layer, FUSING, constant.name, layer.name)
            layer.per_channel = _count(constant) != 1
            layer.shift_only = layer.operation == "SUM"
            layer.name = f"{constant.name} + {layer.name}"
            network.drop_input(layer, layer.inputs.index(constant.out))
            network.remove(constant)
            network.set_kind(layer, LayerKind.SCALE)


def _behind_matmul(layer: Layer | None) -> bool:
    """Whether a layer is the reshape behind a Gemm turned convolution."""
    return layer is not None and layer.kind == LayerKind.SHUFFLE and layer.shuffling.after_matmul


def _of_convolution(layer: Layer) -> bool:
    """Whether the other operand comes straight from a convolution, which then takes sum and Relu."""
    producers = [t.producer for t in layer.inputs if t.only_reader() is layer]
    return any(p is not None and p.kind in (LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION) for p in producers)


def _count(constant: Layer) -> int:
    return 1 if constant.dims is None else math.prod(constant.dims)

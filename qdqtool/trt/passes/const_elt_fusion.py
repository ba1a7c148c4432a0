"""ConstEltFusion."""

import math

from qdqtool.trt.passes._infra import (
    CONVOLVE,
    Layer,
    LayerKind,
    Network,
    Pass,
    assumed,
    constant_before,
    seen,
)

PLAIN = seen(
    "sum-or-product",
    "A sum or product with a constant becomes a scale, <constant> + <elementwise>.",
    "yolo-resnet18-orin-trt8502:5194",
    "resnet18-qat-rtx2000-trt8510:2575",
    source="the last-listed constant where both operands are; differences and quotients are left",
    about=("Add", "Mul"),
)
WITH_RELU = assumed(
    "with-relu",
    "Such a sum with its Relu right behind a convolution becomes a scale with Relu.",
    "otherwise no hidden fully connected layer could write INT8; an engine with one that writes float would refute it",
    about=("Add", "Relu"),
)


class ConstEltFusion(Pass):
    """Turns an elementwise sum or product with a constant into a scale."""

    cases = (PLAIN, WITH_RELU)
    is_compared = False

    def apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.ELEMENTWISE):
            constant = next(filter(None, map(constant_before, reversed(layer.inputs))), None)
            if constant is None or constant.out.single_consumer() is not layer or _left(layer):
                continue
            self.fire_fusing(WITH_RELU if layer.relu_name else PLAIN, layer, constant, layer)
            layer.per_channel = constant.dims is not None and math.prod(constant.dims) != 1
            layer.shift_only = layer.operation == "SUM"
            layer.name = f"{constant.name} + {layer.name}"
            network.drop_input(layer, layer.inputs.index(constant.out))
            network.remove(constant)
            network.set_kind(layer, LayerKind.SCALE)


def _left(layer: Layer) -> bool:
    """Whether an elementwise layer stays one, or has the reshape behind a matrix product pushed behind it first."""
    if layer.operation not in ("SUM", "PROD") or len(layer.inputs) != 2 or layer.in_myelin:
        return True
    if layer.relu_name and not any(
        t.producer_of_kind(*CONVOLVE) for t in layer.inputs if t.single_consumer() is layer
    ):
        return True  # a convolution would take sum and Relu
    return any(
        s.shuffling.after_matmul
        for t in layer.inputs
        if (s := t.producer_of_kind(LayerKind.SHUFFLE))
    )

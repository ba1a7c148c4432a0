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
    source="if both operands are constants, the second is folded; differences and quotients do "
    "not become scales",
    about=("Add", "Mul"),
)
WITH_RELU = assumed(
    "with-relu",
    "The sum of a convolution's output and a constant becomes a scale together with its Relu.",
    "otherwise no hidden fully connected layer could write INT8; an engine in which such a layer "
    "writes float would refute it",
    about=("Add", "Relu"),
)


class ConstEltFusion(Pass):
    """Turns an elementwise sum or product with a constant into a SCALE layer."""

    cases = (PLAIN, WITH_RELU)
    is_compared = False

    def _apply(self, network: Network) -> None:
        for layer in network.layers_of_kind(LayerKind.ELEMENTWISE):
            constant = next(filter(None, map(constant_before, reversed(layer.inputs))), None)
            if constant is None or constant.out.single_consumer() is not layer:
                continue
            if not _can_become_scale(layer):
                continue
            self.fire_fusing(WITH_RELU if layer.relu_name else PLAIN, layer, constant, layer)
            layer.per_channel = constant.dims is not None and math.prod(constant.dims) != 1
            layer.shift_only = layer.operation == "SUM"
            layer.name = f"{constant.name} + {layer.name}"
            network.drop_input(layer, layer.inputs.index(constant.out))
            network.remove(constant)
            network.set_kind(layer, LayerKind.SCALE)


def _can_become_scale(layer: Layer) -> bool:
    if layer.operation not in ("SUM", "PROD") or len(layer.inputs) != 2 or layer.in_myelin:
        return False
    if layer.relu_name and not _follows_convolution(layer):
        return False
    # SqueezePushDownJoin first moves the reshape after a matrix product past the bias. A later
    # run of this pass then turns the bias into a scale.
    shuffles = [tensor.producer_of_kind(LayerKind.SHUFFLE) for tensor in layer.inputs]
    return not any(s is not None and s.shuffling.after_matmul for s in shuffles)


def _follows_convolution(layer: Layer) -> bool:
    return any(
        tensor.producer_of_kind(*CONVOLVE)
        for tensor in layer.inputs
        if tensor.single_consumer() is layer
    )

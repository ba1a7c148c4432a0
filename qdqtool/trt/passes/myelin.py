from collections.abc import Container

from qdqtool.reasons.attention import FloatMyelinLayer
from qdqtool.trt.neighbors import to_step
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    QDQ,
    WEIGHTED,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    constant_before,
    dq_before,
    find_reachable,
    needs_myelin,
    node_name,
)

TAIL = assumed(
    "tail",
    "Post-processing after the last convolution, Q and DQ goes to Myelin as one "
    "{ForeignNode[...]} if it contains an operator that only Myelin runs.",
    "yolo-resnet18-orin-trt8502 (from 730 layers to 388); a head without such operators does not "
    "go to Myelin (yolov8-orin-trt8412-excerpts). It is assumed that all networks have this "
    "boundary; no INT8 outcome depends on it",
)
CONSTANTS = assumed(
    "constants",
    "An operator that only Myelin runs and that depends on constants alone is fused with these "
    "constants only.",
    "yolov8-orin-trt8412-excerpts: a {ForeignNode[...]} without inputs that does not contain the "
    "post-processing next to it",
)
_OPERATORS_OUTSIDE = ("NonMaxSuppression",)  # operators for which TensorRT 8.5 has its own layer
_KINDS_OUTSIDE = (*CONVOLVE, *QDQ, LayerKind.POOLING, LayerKind.RESIZE, LayerKind.SCALE)


class MyelinOptimization(Pass):
    """Marks post-processing that TensorRT hands to Myelin.

    Later passes skip these layers. A quantized fully connected layer, with its bias and activation,
    is not marked, because this layer is INT8 in all seven recorded engines that have one.
    """

    cases = (TAIL, CONSTANTS)
    is_compared = False

    def _apply(self, network: Network) -> None:
        if any(map(needs_myelin, network.layers.values())):
            self._mark_regions(network)
        # TensorRT logs the number of layers at this point.
        network.counts["After Myelin optimization"] = len(network.layers)

    def _mark_regions(self, network: Network) -> None:
        tail = _find_tail(network)
        varying = _find_varying(network)
        remaining = set(tail)
        for layer in filter(needs_myelin, tail):
            if layer not in remaining:
                continue
            is_varying = layer in varying
            region = _find_connected(layer, remaining, () if is_varying else varying)
            remaining -= region.keys()
            for member in region:
                if member.kind in WEIGHTED:
                    self._refuse_member(layer, member)
                member.in_myelin = True
                member.add_cases(TAIL if is_varying else CONSTANTS)
            network.was_relisted = network.was_relisted or is_varying

    def _refuse_member(self, trigger: Layer, member: Layer) -> None:
        data, *weights = (dq_before(tensor) is not None for tensor in member.inputs[:2])
        name = node_name(member)
        self.refuse(FloatMyelinLayer(self.name, name, to_step(trigger), data, all(weights)))


def _find_varying(network: Network) -> dict[Layer, None]:
    first = [layer for tensor in network.inputs for layer in tensor.consumers]
    return find_reachable(first, lambda layer: layer.consumers)


def _find_tail(network: Network) -> list[Layer]:
    """Return the layers of post-processing, which have no convolution, Q or DQ downstream.

    Quantized matrix products, and layers that TensorRT never hands to Myelin, are left out.
    """
    upstream = find_reachable(
        network.layers_of_kind(*CONVOLVE, *QDQ), lambda layer: layer.producers
    )
    outside = upstream.keys() | _find_quantized_products(network)
    return [
        layer
        for layer in network.layers.values()
        if layer not in outside
        and layer.kind not in _KINDS_OUTSIDE
        and layer.op not in _OPERATORS_OUTSIDE
    ]


def _find_connected(
    trigger: Layer, layers: Container[Layer], excluded: Container[Layer]
) -> dict[Layer, None]:
    """Return ``trigger`` and the layers that are connected to it.

    The search stays within ``layers`` and does not enter ``excluded``.
    """
    return find_reachable(
        [trigger],
        lambda layer: [n for n in layer.neighbors if n in layers and n not in excluded],
    )


def _find_quantized_products(network: Network) -> set[Layer]:
    layers: set[Layer] = set()
    for product in network.layers_of_kind(LayerKind.MATRIX_MULTIPLY):
        if not any(map(dq_before, product.inputs)):
            continue
        layers.add(product)
        consumer = product.out.single_consumer()
        if consumer is not None and consumer.kind == LayerKind.ELEMENTWISE:
            constants = set(filter(None, map(_constant_operand, consumer.inputs)))
            if constants:
                layers |= {consumer, *constants}
                consumer = consumer.out.single_consumer()
        if consumer is not None and consumer.kind == LayerKind.ACTIVATION:
            layers.add(consumer)
    return layers


def _constant_operand(tensor: Tensor) -> Layer | None:
    """Return the producer of a constant operand (a constant or its reshape), else None."""
    shuffle = tensor.producer_of_kind(LayerKind.SHUFFLE)
    if shuffle is not None and constant_before(shuffle.data):
        return shuffle
    return constant_before(tensor)

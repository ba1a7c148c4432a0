"""Which layers go to Myelin."""

from collections.abc import Container

from qdqtool.trt.layers import WEIGHTED, constant_before, find_reachable, needs_myelin, node_name
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    QDQ,
    Layer,
    LayerKind,
    Network,
    Pass,
    Tensor,
    assumed,
    dq_before,
)
from qdqtool.trt.refusals import InMyelin
from qdqtool.trt.surroundings import to_step

TAIL = assumed(
    "tail",
    "Post-processing behind the last convolution, Q and DQ goes to Myelin as one {ForeignNode[...]} if an "
    "operator that only Myelin runs is in it.",
    "yolo-resnet18-orin-trt8502 (730 layers to 388); a head without such operators stays out "
    "(yolov8-orin-trt8412-excerpts). That this is the boundary in general is assumed; no INT8 outcome depends on it",
)
CONSTANTS = assumed(
    "constants",
    "Such an operator among constants alone takes those constants only.",
    "yolov8-orin-trt8412-excerpts: a {ForeignNode[...]} without inputs beside a tail that is not in it",
)
_OWN_LAYER = ("NonMaxSuppression",)  # TensorRT 8.5 has a layer of its own for it
_KEPT_OUT = (*CONVOLVE, *QDQ, LayerKind.POOLING, LayerKind.RESIZE, LayerKind.SCALE)


class MyelinOptimization(Pass):
    """Takes post-processing out of the passes' sight: TensorRT hands it to Myelin.

    A quantized fully connected layer, with its bias and activation, stays with the passes: it is INT8 in all seven
    recorded engines that have one.
    """

    cases = (TAIL, CONSTANTS)
    is_compared = False

    def apply(self, network: Network) -> None:
        if any(map(needs_myelin, network.layers.values())):
            self._take(network)
        network.counts["After Myelin optimization"] = len(network.layers)  # TensorRT logs it here

    def _take(self, network: Network) -> None:
        tail = self._tail(network)
        varying = find_reachable(
            (r for t in network.inputs for r in t.consumers), lambda layer: layer.consumers
        )
        left = set(tail)
        for layer in filter(needs_myelin, tail):
            if layer not in left:
                continue
            moves = layer in varying
            region = _connected(layer, left, () if moves else varying)
            left -= region.keys()
            for member in region:
                if member.kind in WEIGHTED:
                    self._refuse(layer, member)
                member.in_myelin = True
                member.add_cases(TAIL if moves else CONSTANTS)
            network.was_relisted = network.was_relisted or moves

    def _refuse(self, trigger: Layer, member: Layer) -> None:
        quantized = [dq_before(t) is not None for t in member.inputs[:2]]
        self.refuse(
            InMyelin(
                self.name, node_name(member), to_step(trigger), quantized[0], all(quantized[1:])
            )
        )

    @staticmethod
    def _tail(network: Network) -> list[Layer]:
        """Layers from which no convolution, Q or DQ can be reached."""
        above = find_reachable(
            network.layers_of_kind(*CONVOLVE, *QDQ), lambda layer: layer.producers
        )
        kept = above.keys() | _quantized_products(network)
        return [
            layer
            for layer in network.layers.values()
            if layer not in kept and layer.kind not in _KEPT_OUT and layer.op not in _OWN_LAYER
        ]


def _connected(
    trigger: Layer, left: Container[Layer], apart: Container[Layer]
) -> dict[Layer, None]:
    """The layers around one, of those that are left and not kept apart."""
    return find_reachable(
        [trigger], lambda layer: (o for o in layer.neighbors if o in left and o not in apart)
    )


def _quantized_products(network: Network) -> set[Layer]:
    """Matrix products with dequantized inputs, and the sum with a constant and the activation behind each."""
    found: set[Layer] = set()
    for layer in network.layers_of_kind(LayerKind.MATRIX_MULTIPLY):
        if not any(map(dq_before, layer.inputs)):
            continue
        found.add(layer)
        reader = layer.out.single_consumer()
        constants = (
            {*filter(None, map(_constant_behind, reader.inputs))} if reader is not None else set()
        )
        if reader is not None and reader.kind == LayerKind.ELEMENTWISE and constants:
            found |= {reader, *constants}
            reader = reader.out.single_consumer()
        if reader is not None and reader.kind == LayerKind.ACTIVATION:
            found.add(reader)
    return found


def _constant_behind(tensor: Tensor) -> Layer | None:
    """What makes a constant operand: the constant or the reshape of one."""
    shuffle = tensor.producer_of_kind(LayerKind.SHUFFLE)
    return (
        shuffle
        if shuffle is not None and constant_before(shuffle.data)
        else constant_before(tensor)
    )

"""Which layers go to Myelin."""

from qdqtool.knowledge.tables import assumed
from qdqtool.model.operators import LayerKind
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, beside, dq_of, needs_myelin, node_name
from qdqtool.trt.refusals import InMyelin
from qdqtool.trt.surroundings import step_of

TAIL = assumed(
    "tail", "Post-processing behind the last convolution, Q and DQ goes to Myelin as one {ForeignNode[...]} if an "
    "operator that only Myelin runs is in it.",
    "yolo-resnet18-orin-trt8502 (730 layers to 388); a head without such operators stays out "
    "(yolov8-orin-trt8412-excerpts). That this is the boundary in general is assumed; no INT8 outcome depends on it",
)
CONSTANTS = assumed(
    "constants", "Such an operator among constants alone takes those constants only.",
    "yolov8-orin-trt8412-excerpts: a {ForeignNode[...]} without inputs beside a tail that is not in it",
)
_OWN_LAYER = ("NonMaxSuppression",)  # TensorRT 8.5 has a layer of its own for it
_KEPT_OUT = (
    LayerKind.CONVOLUTION,
    LayerKind.DECONVOLUTION,
    LayerKind.QUANTIZE,
    LayerKind.DEQUANTIZE,
    LayerKind.POOLING,
    LayerKind.RESIZE,
    LayerKind.SCALE,
)


class MyelinOptimization(Pass):
    """Takes post-processing out of the passes' sight: TensorRT hands it to Myelin.

    A quantized fully connected layer, with its bias and activation, stays with the passes: it is INT8 in all seven
    recorded engines that have one.
    """

    cases = (TAIL, CONSTANTS)

    def apply(self, network: Network) -> None:
        tail = self._tail(network)
        varying = self._varying(network)
        seen: set[int] = set()
        for layer in [layer for layer in tail.values() if needs_myelin(layer)]:
            if layer.id in seen:
                continue
            moves = layer.id in varying
            region = [layer]
            seen.add(layer.id)
            for member in region:
                for other in beside(member):
                    if other.id in tail and other.id not in seen and (moves or other.id not in varying):
                        seen.add(other.id)
                        region.append(other)
            for member in region:
                if member.kind in WEIGHTED:
                    self._refuse(layer, member)
                member.in_myelin = True
                member.rest_on(TAIL if moves else CONSTANTS)
            network.relisted = network.relisted or moves

    def _refuse(self, trigger: Layer, member: Layer) -> None:
        quantized = [dq_of(t) is not None for t in member.inputs[:2]]
        self.refuse(InMyelin(self.name, node_name(member), step_of(trigger), quantized[0], all(quantized[1:])))

    @staticmethod
    def _varying(network: Network) -> set[int]:
        """Layers that depend on a network input."""
        found: set[int] = set()
        stack = [r for t in network.inputs for r in t.consumers]
        while stack:
            layer = stack.pop()
            if layer.id not in found:
                found.add(layer.id)
                stack.extend(r for t in layer.outputs for r in t.consumers)
        return found

    @staticmethod
    def _tail(network: Network) -> dict[int, Layer]:
        """Layers from which no convolution, Q or DQ can be reached."""
        reaches: set[int] = set()
        stack = network.of_kind(
            LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION, LayerKind.QUANTIZE, LayerKind.DEQUANTIZE
        )
        reaches.update(layer.id for layer in stack)
        while stack:
            for tensor in stack.pop().inputs:
                producer = tensor.producer
                if producer is not None and producer.id not in reaches:
                    reaches.add(producer.id)
                    stack.append(producer)
        kept = _quantized_products(network)
        return {
            i: layer
            for i, layer in network.layers.items()
            if i not in reaches and i not in kept and layer.kind not in _KEPT_OUT and layer.op not in _OWN_LAYER
        }


def _quantized_products(network: Network) -> set[int]:
    """Matrix products with dequantized inputs, and the sum with a constant and the activation behind each."""
    found: set[int] = set()
    for layer in network.of_kind(LayerKind.MATRIX_MULTIPLY):
        if not any(dq_of(t) is not None for t in layer.inputs):
            continue
        found.add(layer.id)
        reader = layer.out.only_reader()
        if reader is not None and reader.kind == LayerKind.ELEMENTWISE and any(map(_constant_behind, reader.inputs)):
            found.add(reader.id)
            found.update(s.id for s in map(_constant_behind, reader.inputs) if s is not None)
            reader = reader.out.only_reader()
        if reader is not None and reader.kind == LayerKind.ACTIVATION:
            found.add(reader.id)
    return found


def _constant_behind(tensor: Tensor) -> Layer | None:
    """What makes a constant operand: the constant or the reshape of one."""
    layer = tensor.producer
    if layer is None or layer.kind == LayerKind.CONSTANT:
        return layer
    inner = layer.data.producer if layer.kind == LayerKind.SHUFFLE and layer.inputs else None
    return layer if inner is not None and inner.kind == LayerKind.CONSTANT else None

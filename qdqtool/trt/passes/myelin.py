"""Which layers go to Myelin."""

from __future__ import annotations

from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.types import Evidence

TRIGGERS = frozenset(
    {
        "ArgMax", "ArgMin", "Compress", "CumSum", "Einsum", "Expand", "Gather", "GatherElements", "GatherND", "If",
        "LayerNormalization", "Loop", "NonZero", "OneHot", "Range", "RoiAlign", "Scan",
        "ScatterElements", "ScatterND", "Tile", "TopK", "Unique", "Where",
    }
)
_OWN_LAYER = ("NonMaxSuppression",)  # TensorRT 8.5 has a layer of its own for it
_KEPT_OUT = (
    net.CONVOLUTION,
    net.DECONVOLUTION,
    net.QUANTIZE,
    net.DEQUANTIZE,
    net.POOLING,
    net.RESIZE,
    net.SCALE,
)


class MyelinOptimization(Pass):
    """Takes post-processing out of the passes' sight: TensorRT hands it to Myelin as one ``{ForeignNode[...]}``.

    Cases:
        * A layer behind which no convolution, Q or DQ follows, connected through such layers to an operator that
          only Myelin runs (Gather, TopK, Where, ...). yolo-resnet18-orin-trt8502: everything behind the three head
          convolutions, 730 layers to 388; yolov8-orin-trt8412-excerpts: a head without such operators stays out.
          That this is the boundary in general is assumed; no INT8 outcome depends on it.
        * Such an operator among constants alone (anchors made by Range and Expand): those constants only
          (yolov8-orin-trt8412-excerpts, a ``{ForeignNode[...]}`` without inputs beside a tail that is not in it).
    """

    evidence = Evidence.ASSUMED

    def apply(self, network: Network) -> None:
        tail = self._tail(network)
        varying = self._varying(network)
        seen: set[int] = set()
        for layer in [layer for layer in tail.values() if layer.op in TRIGGERS]:
            if layer.id in seen:
                continue
            moves = layer.id in varying
            region = [layer]
            seen.add(layer.id)
            for member in region:
                for other in _neighbours(member):
                    if other.id in tail and other.id not in seen and (moves or other.id not in varying):
                        seen.add(other.id)
                        region.append(other)
            for member in region:
                member.attrs["myelin"] = True
            network.relisted = network.relisted or moves

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
        stack = network.of_kind(net.CONVOLUTION, net.DECONVOLUTION, net.QUANTIZE, net.DEQUANTIZE)
        reaches.update(layer.id for layer in stack)
        while stack:
            for tensor in stack.pop().inputs:
                producer = tensor.producer
                if producer is not None and producer.id not in reaches:
                    reaches.add(producer.id)
                    stack.append(producer)
        return {
            i: layer
            for i, layer in network.layers.items()
            if i not in reaches and layer.kind not in _KEPT_OUT and layer.op not in _OWN_LAYER
        }


def _neighbours(layer: Layer) -> list[Layer]:
    found = [t.producer for t in layer.inputs if t.producer is not None]
    found.extend(r for t in layer.outputs for r in t.consumers)
    return found


def in_myelin(layer: Layer) -> bool:
    """Whether a layer was handed to Myelin."""
    return bool(layer.attrs.get("myelin"))

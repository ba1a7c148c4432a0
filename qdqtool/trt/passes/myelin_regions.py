"""Which matrix products, Softmax and normalizations run in Myelin on TensorRT 10, with the Q and DQ around them."""

from qdqtool.knowledge.tables import assumed, seen
from qdqtool.model.operators import LayerKind
from qdqtool.trt.layers import Layer
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, beside, needs_myelin, node_name
from qdqtool.types import MyelinRegion

PRODUCT = seen(
    "product", "Matrix products, Softmax and normalizations run in Myelin on 10, with the pointwise layers and "
    "shuffles between them.",
    "gemm-mlp-trt10", "linear-orinnano-trt103",
)
EDGE = seen(
    "edge", "A Q in front of such a region and a DQ behind it are kernels of the region, no conversions.",
    "gemm-mlp-trt10", "linear-orinnano-trt103", source="kgen MulMinMaxRounCast, kgen CastMul",
)
INSIDE = seen(
    "inside", "A Q behind a product, Softmax or normalization is fused into its kernel, a DQ into the kernel behind.",
    "gemm-mlp-trt10", "yolov8n-modelopt-rtx2060-trt1014",
    source="one conversion fewer than Q layers of a YOLOv8n: the one behind the Softmax of its DFL",
)
POINTWISE = assumed(
    "pointwise", "A Q behind a pointwise layer of the region is fused alike.",
    "how far such a region reaches into pointwise layers around it is not logged",
)
_OUTSIDE = (
    LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION, LayerKind.POOLING, LayerKind.RESIZE, LayerKind.CONSTANT,
    LayerKind.QUANTIZE, LayerKind.DEQUANTIZE, LayerKind.COPY, LayerKind.SHAPE,
)
_QDQ = (LayerKind.QUANTIZE, LayerKind.DEQUANTIZE)


class MyelinRegions(Pass):
    """Marks the regions that Myelin takes, and takes the Q and DQ around them from what stays in the engine.

    TensorRT logs no line for it; layer listings of 10 show the kernels.
    """

    cases = (PRODUCT, EDGE, INSIDE, POINTWISE)

    def apply(self, network: Network) -> None:
        if not self.target.products_in_myelin:
            self._possible(network)
            return
        done: set[int] = set()
        for seed in [layer for layer in network.in_order() if _is_seed(layer)]:
            if seed.id not in done:
                members = _connected(seed)
                done.update(members)
                region = self._region(seed, members)
                if region.fused or region.kernels or any(_multiplies(m) for m in members.values()):
                    network.regions.append(region)

    def _possible(self, network: Network) -> None:
        """Attention and normalizations, which Myelin may take on 8.x with the Q and DQ around: nothing is taken."""
        done: set[int] = set()
        for seed in [layer for layer in network.in_order() if _is_transformer(layer)]:
            if seed.id not in done:
                members = _connected(seed)
                done.update(members)
                region = MyelinRegion(node_name(seed), seed.op)
                for layer in members.values():
                    region.nodes.extend(layer.nodes)
                region.possible.extend(q.name for q in _quantizers_around(members))
                network.regions.append(region)

    def _region(self, seed: Layer, members: dict[int, Layer]) -> MyelinRegion:
        region = MyelinRegion(node_name(seed), seed.op)
        for layer in members.values():
            layer.region = region
            layer.rest_on(PRODUCT)
            region.nodes.extend(layer.nodes)
        for layer in _quantizers_around(members):
            self._take(region, members, layer)
        return region

    def _take(self, region: MyelinRegion, members: dict[int, Layer], layer: Layer) -> None:
        """Takes a Q or DQ into the region, if nothing outside needs it."""
        maker = layer.data.producer
        behind = list(layer.out.consumers)
        written = maker is not None and maker.id in members
        read = bool(behind) and not layer.out.is_output and all(r.id in members for r in behind)
        names = layer.nodes or [layer.of or layer.name]
        if layer.kind == LayerKind.QUANTIZE and written:
            assert maker is not None
            certain = _is_seed(maker) or maker.kind == LayerKind.SHUFFLE
            layer.rest_on(INSIDE if certain else POINTWISE)
            region.fused.extend(names)
            if not certain:
                region.uncertain += 1
        elif layer.kind == LayerKind.DEQUANTIZE and read:
            layer.rest_on(INSIDE)
            region.fused.extend(names)
        elif (read if layer.kind == LayerKind.QUANTIZE else written):
            layer.rest_on(EDGE)
            region.kernels.extend(names)
        else:
            return
        layer.region = region


def _multiplies(layer: Layer) -> bool:
    """A matrix product, also where it became a convolution."""
    return layer.kind == LayerKind.MATRIX_MULTIPLY or (
        layer.kind == LayerKind.CONVOLUTION and layer.weights.from_matmul
    )


def _is_transformer(layer: Layer) -> bool:
    """A product of two computed tensors, or a layer normalization."""
    return layer.op == "LayerNormalization" or (
        layer.kind == LayerKind.MATRIX_MULTIPLY and layer.op == "MatMul" and not layer.weights.constant
    )


def _is_seed(layer: Layer) -> bool:
    """What Myelin alone runs on 10."""
    return _multiplies(layer) or layer.kind == LayerKind.SOFTMAX or needs_myelin(layer)


def _connected(seed: Layer) -> dict[int, Layer]:
    """The region around a seed: what is connected to it past Q and DQ, in the order of the search."""
    found = {seed.id: seed}
    queue = [seed]
    for layer in queue:
        for other in _past_quantizers(layer):
            if other.id not in found and (_is_seed(other) or other.kind not in _OUTSIDE):
                found[other.id] = other
                queue.append(other)
    return found


def _past_quantizers(layer: Layer) -> list[Layer]:
    """Neighbours of a layer, and those behind the Q and DQ among them."""
    found: list[Layer] = []
    queue = beside(layer)
    looked = {layer.id}
    for other in queue:
        if other.id in looked:
            continue
        looked.add(other.id)
        if other.kind in _QDQ:
            queue.extend(beside(other))
        else:
            found.append(other)
    return found


def _quantizers_around(members: dict[int, Layer]) -> list[Layer]:
    """The Q and DQ that a region's layers read or write, and those behind a Q or in front of a DQ of these."""
    found: dict[int, Layer] = {}
    queue = [q for layer in members.values() for q in beside(layer)]
    for layer in queue:
        if layer.kind in _QDQ and layer.id not in found and layer.inputs and layer.outputs:
            found[layer.id] = layer
            queue.extend(beside(layer))
    return sorted(found.values(), key=lambda layer: layer.rank)

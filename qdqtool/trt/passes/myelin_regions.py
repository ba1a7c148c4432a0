"""Which matrix products, Softmax and normalizations run in Myelin on TensorRT 10, with the Q and DQ around them."""

from collections.abc import Collection, Iterable, Iterator

from qdqtool.model.operators import CONVOLVE
from qdqtool.trt.layers import QDQ, Layer, find_reachable, needs_myelin, node_name
from qdqtool.trt.passes._infra import LayerKind, Network, Pass, assumed, seen
from qdqtool.types import MyelinRegion

PRODUCT = seen(
    "product",
    "Matrix products, Softmax and normalizations run in Myelin on 10, with the pointwise layers and "
    "shuffles between them.",
    "gemm-mlp-trt10",
    "linear-orinnano-trt103",
)
EDGE = seen(
    "edge",
    "A Q in front of such a region and a DQ behind it are kernels of the region, no conversions.",
    "gemm-mlp-trt10",
    "linear-orinnano-trt103",
    source="kgen MulMinMaxRounCast, kgen CastMul",
)
INSIDE = seen(
    "inside",
    "A Q behind a product, Softmax or normalization is fused into its kernel, a DQ into the kernel behind.",
    "gemm-mlp-trt10",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="one conversion fewer than Q layers of a YOLOv8n: the one behind the Softmax of its DFL",
)
POINTWISE = assumed(
    "pointwise",
    "A Q behind a pointwise layer of the region is fused alike.",
    "how far such a region reaches into pointwise layers around it is not logged",
)
_OUTSIDE = (
    *CONVOLVE,
    *QDQ,
    LayerKind.POOLING,
    LayerKind.RESIZE,
    LayerKind.CONSTANT,
    LayerKind.COPY,
    LayerKind.SHAPE,
)


class MyelinRegions(Pass):
    """Marks the regions that Myelin takes, and takes the Q and DQ around them from what stays in the engine.

    TensorRT logs no line for it; layer listings of 10 show the kernels. On 8.x, where Myelin may take attention and
    normalizations with the Q and DQ around, nothing is taken.
    """

    cases = (PRODUCT, EDGE, INSIDE, POINTWISE)
    is_compared = False

    def apply(self, network: Network) -> None:
        takes = self.target.products_in_myelin
        seeds = set(filter(_is_seed if takes else _is_transformer, network.layers.values()))
        done: set[Layer] = set()
        for seed in network.breadth_first() if seeds else ():
            if seed not in seeds or seed in done:
                continue
            members = _connected(seed)
            done.update(members)
            region = MyelinRegion(
                node_name(seed), seed.op, [node for layer in members for node in layer.nodes]
            )
            if takes:
                self._take(region, members)
            else:
                region.possible.extend(q.name for q in _quantizers_around(members))
            if not takes or region.fused or region.kernels or any(map(_multiplies, members)):
                network.regions.append(region)

    def _take(self, region: MyelinRegion, members: Collection[Layer]) -> None:
        """Takes the layers into the region, and each Q and DQ around that nothing outside needs."""
        for layer in members:
            layer.region = region
            layer.add_cases(PRODUCT)
        for layer in _quantizers_around(members):
            maker, behind = layer.data.producer, layer.out.consumers
            written = maker is not None and maker in members
            read = bool(behind) and not layer.out.is_output and all(r in members for r in behind)
            quantizes = layer.kind == LayerKind.QUANTIZE
            names = layer.nodes or [layer.owner or layer.name]
            if quantizes and maker is not None and written:
                certain = _is_seed(maker) or maker.kind == LayerKind.SHUFFLE
                layer.add_cases(INSIDE if certain else POINTWISE)
                region.fused.extend(names)
                region.uncertain += not certain
            elif read and not quantizes:
                layer.add_cases(INSIDE)
                region.fused.extend(names)
            elif read or written:
                layer.add_cases(EDGE)
                region.kernels.extend(names)
            else:
                continue
            layer.region = region


def _multiplies(layer: Layer) -> bool:
    """A matrix product, also where it became a convolution."""
    return layer.kind == LayerKind.MATRIX_MULTIPLY or (
        layer.kind == LayerKind.CONVOLUTION and layer.weights.from_matmul
    )


def _is_transformer(layer: Layer) -> bool:
    """A product of two computed tensors, or a layer normalization."""
    return layer.op == "LayerNormalization" or (
        layer.kind == LayerKind.MATRIX_MULTIPLY
        and layer.op == "MatMul"
        and not layer.weights.constant
    )


def _is_seed(layer: Layer) -> bool:
    """What Myelin alone runs on 10."""
    return _multiplies(layer) or layer.kind == LayerKind.SOFTMAX or needs_myelin(layer)


def _connected(seed: Layer) -> Collection[Layer]:
    """The region around a seed: what is connected to it past Q and DQ, in the order of the search."""

    def further(layer: Layer) -> Iterator[Layer]:
        past = find_reachable(
            [layer], lambda other: other.neighbors if other is layer or other.kind in QDQ else ()
        )
        return (other for other in past if other.kind not in _OUTSIDE or _is_seed(other))

    return find_reachable([seed], further)


def _quantizers_around(members: Iterable[Layer]) -> list[Layer]:
    """The Q and DQ that a region's layers read or write, and those behind a Q or in front of a DQ of these."""
    around = find_reachable(
        members,
        lambda layer: (q for q in layer.neighbors if q.kind in QDQ and q.inputs and q.outputs),
    )
    return sorted((q for q in around if q.kind in QDQ), key=lambda q: q.rank)

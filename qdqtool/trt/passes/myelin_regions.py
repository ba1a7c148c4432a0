from collections.abc import Collection, Iterable

from qdqtool.trt import fault_checks
from qdqtool.trt.passes._infra import (
    CONVOLVE,
    QDQ,
    Layer,
    LayerKind,
    Network,
    Pass,
    Precision,
    Tensor,
    assumed,
    documented,
    dq_before,
    find_reachable,
    needs_myelin,
    node_name,
    seen,
)
from qdqtool.trt.result import MyelinRegion

PRODUCT = seen(
    "product",
    "Matrix products, Softmax and normalizations run in Myelin on TensorRT 10, with the pointwise "
    "layers and shuffles between them.",
    "gemm-mlp-trt10",
    "linear-orinnano-trt103",
)
EDGE = seen(
    "edge",
    "A Q before a Myelin region and a DQ after it are kernels of the region, not conversions.",
    "gemm-mlp-trt10",
    "linear-orinnano-trt103",
    source="kgen MulMinMaxRounCast, kgen CastMul",
)
INSIDE = seen(
    "inside",
    "A Q after a product, Softmax or normalization is fused into the kernel before the Q. A DQ is "
    "fused into the kernel after the DQ.",
    "gemm-mlp-trt10",
    "yolov8n-modelopt-rtx2060-trt1014",
    source="the YOLOv8n engine has one conversion fewer than Q layers; the Q after the Softmax of "
    "its DFL is missing",
)
POINTWISE = assumed(
    "pointwise",
    "A Q after a pointwise layer of a Myelin region is fused into the kernel before the Q.",
    "how far such a region reaches into pointwise layers around it is not logged",
)
ACTIVATION = seen(
    "activation",
    "A matrix product of constant weights fuses the pointwise layer that is its single consumer, "
    "such as GELU.",
    "vitpose-l4-trt113",
    source="324 to 348 engine layers for 24 blocks, which have 27 nodes each after merging",
)
SIDE_BY_SIDE = seen(
    "side-by-side",
    "Matrix products of constant weights that read one tensor are one layer: query, key and value.",
    "vitpose-l4-trt113",
    source="324 to 348 engine layers for 24 blocks with ten products of constant weights each",
)
FP8_ATTENTION = documented(
    "fp8-attention",
    "From TensorRT 10.6 on, an attention with head size 9 to 64 and at most 3,072 keys is one "
    "kernel if both products have FP8 Q/DQ on all inputs and a Q is after the second product.",
    "release notes of 10.6 (compute capability 8.9); it is assumed for other GPUs. TensorRT-RTX "
    "1.7.1 builds one kernel for heads of 32, 64 and 80",
    about=("MatMul",),
)
_KINDS_OUTSIDE = (
    *CONVOLVE,
    *QDQ,
    LayerKind.POOLING,
    LayerKind.RESIZE,
    LayerKind.CONSTANT,
    LayerKind.COPY,
    LayerKind.SHAPE,
)


_MAX_HOPS = 8  # maximum number of layers that a search passes upstream or downstream of a product
_POINTWISE_KINDS = (
    LayerKind.ACTIVATION,
    LayerKind.ELEMENTWISE,
    LayerKind.POINTWISE,
    LayerKind.UNARY,
)


# Layers between the two products of an attention: scale, mask, Softmax and the Q after it.
_ATTENTION_KINDS = (
    LayerKind.SCALE,
    LayerKind.ELEMENTWISE,
    LayerKind.POINTWISE,
    LayerKind.SOFTMAX,
    LayerKind.QUANTIZE,
)


class MyelinRegions(Pass):
    """Marks the regions that Myelin runs, with the Q and DQ around them that Myelin absorbs.

    A region contains matrix products, Softmax and normalizations, with the pointwise layers,
    shuffles, Q and DQ between them.

    TensorRT does not log the regions; layer listings of TensorRT 10 show their kernels. On 8.x,
    Myelin may run attention and normalizations with the Q and DQ around them. For these targets the
    pass records the regions, but does not mark any layer.
    """

    cases = (PRODUCT, EDGE, INSIDE, POINTWISE, ACTIVATION, SIDE_BY_SIDE, FP8_ATTENTION)
    is_compared = False

    def _apply(self, network: Network) -> None:
        is_absorbed = self.target.products_in_myelin
        is_seed = _needs_myelin_on_10 if is_absorbed else _is_attention_or_norm
        seeds = set(filter(is_seed, network.layers.values()))
        if not seeds:
            return
        assigned: set[Layer] = set()
        parts = _ConvexParts(network.breadth_first())
        for seed in filter(seeds.__contains__, parts.order):
            if seed in assigned:
                continue
            members = parts.find_part(seed)
            assigned.update(members)
            nodes = [node for layer in members for node in layer.nodes]
            region = MyelinRegion(node_name(seed), seed.op, nodes)
            if not is_absorbed:
                region.possible.extend(q.name for q in _quantizers_around(members))
                network.regions.append(region)
                continue
            self._absorb_layers(region, members)
            if region.fused or region.kernels or any(map(_is_product, members)):
                network.regions.append(region)
            _fuse_activations(network, members)
            _merge_products(members)
            for product in filter(_multiplies_activations_in_fp8, members):
                if product.outputs:  # a product that was fused into another one has no outputs
                    self._fuse_attention(network, product)

    def _absorb_layers(self, region: MyelinRegion, members: Collection[Layer]) -> None:
        for layer in members:
            layer.region = region
            layer.add_cases(PRODUCT)
        for quantizer in _quantizers_around(members):
            if quantizer.kind == LayerKind.QUANTIZE:
                self._absorb_q(region, members, quantizer)
            else:
                self._absorb_dq(region, members, quantizer)

    @staticmethod
    def _absorb_q(region: MyelinRegion, members: Collection[Layer], q: Layer) -> None:
        """Fuse a Q into the kernel before it, or mark it as a separate kernel before the region.

        A Q before the region is left unchanged if a layer outside the region reads its result.
        """
        producer = q.data.producer
        if producer is not None and producer in members:
            is_certain = _needs_myelin_on_10(producer) or producer.kind == LayerKind.SHUFFLE
            q.add_cases(INSIDE if is_certain else POINTWISE)
            region.fused.extend(_node_names(q))
            if not is_certain:
                region.uncertain += 1
                region.uncertain_nodes.extend(_node_names(q))
        elif _is_read_inside(q, members):
            q.add_cases(EDGE)
            region.kernels.extend(_node_names(q))
        else:
            return
        q.region = region

    @staticmethod
    def _absorb_dq(region: MyelinRegion, members: Collection[Layer], dq: Layer) -> None:
        """Fuse a DQ into the kernel after it, or mark it as a separate kernel after the region.

        Other DQs are left unchanged.
        """
        if _is_read_inside(dq, members):
            dq.add_cases(INSIDE)
            region.fused.extend(_node_names(dq))
        elif dq.data.producer is not None and dq.data.producer in members:
            dq.add_cases(EDGE)
            region.kernels.extend(_node_names(dq))
        else:
            return
        dq.region = region

    def _fuse_attention(self, network: Network, scores: Layer) -> None:
        """Fuse an FP8 attention into one layer if the target has a kernel for its sizes.

        ``scores`` is the first product (query times key), which becomes the layer of the whole
        attention.
        """
        chain = _find_attention(scores)
        if not chain:
            return
        queries, products = scores.data.shape, scores.out.shape
        sizes = (queries[-1] if queries else None), (products[-1] if products else None)
        if not fault_checks.fuses_fp8_attention(*sizes, self.target.fp8_head):
            return
        scores.int8_out = chain[-1].int8_out
        for layer in chain:
            network.absorb_consumer(scores, layer, scores.name)
        scores.add_cases(FP8_ATTENTION)


class _ConvexParts:
    """Divides connected layers so that no part is both before and after a layer outside of it.

    TensorRT runs a region as one layer, so no input of a region may depend on its result. In a
    detection head, the Softmax of the DFL and the layers after the DFL's convolution are therefore
    in different parts. A ReduceMean between two layers of a part belongs to the part.

    Attributes:
        order: All layers, each after its producers.
    """

    def __init__(self, order: list[Layer]) -> None:
        self.order = order
        self._positions = {layer: position for position, layer in enumerate(order)}
        self._stages: dict[Layer, int] = {}  # of the layers that can be in a region

    def find_part(self, seed: Layer) -> dict[Layer, None]:
        """Return the part that contains ``seed``."""
        if seed not in self._stages:
            self._set_stages(find_reachable([seed], _neighbors_in_region))
        return find_reachable([seed], self._neighbors_in_part)

    def _neighbors_in_part(self, layer: Layer) -> list[Layer]:
        stage = self._stages[layer]
        neighbors = _neighbors_past_quantizers(layer)
        return [other for other in neighbors if self._stages.get(other) == stage]

    def _set_stages(self, members: Collection[Layer]) -> None:
        """Set the stages of connected layers, and of the reductions between them.

        A path that leaves the members and enters them again ends at a later stage. Stages of
        members are even, those of other layers are odd. Q, DQ and reductions do not end a stage.
        """
        positions = [self._positions[member] for member in members]
        span = self.order[min(positions) : max(positions) + 1]
        stages: dict[Layer, int] = {}
        for layer in span:
            before = [stages[producer] for producer in layer.producers if producer in stages]
            stage = max(before, default=0)
            if layer in members:
                self._stages[layer] = stages[layer] = stage + stage % 2
            elif before and layer.kind != LayerKind.SHAPE:  # a shape does not wait for values
                is_inside = layer.kind in QDQ or _is_reduction(layer)
                stages[layer] = stage if is_inside else stage | 1
        for layer in filter(_is_reduction, reversed(span)):
            neighbors = _neighbors_past_quantizers(layer)
            after = [
                other for other in neighbors if self._positions[other] > self._positions[layer]
            ]
            if layer in stages and stages[layer] in map(self._stages.get, after):
                self._stages[layer] = stages[layer]


def _find_attention(scores: Layer) -> list[Layer]:
    """Return the layers of an FP8 attention after its first product, up to the second product.

    In an FP8 attention, the single consumer of each of these layers is the next one, one Softmax
    and one Q are between the products, and the second product writes FP8. Empty for any other
    structure.
    """
    chain: list[Layer] = []
    layer = scores.out.single_consumer()
    while layer is not None and len(chain) < _MAX_HOPS:
        chain.append(layer)
        if _multiplies_activations_in_fp8(layer):
            kinds = [link.kind for link in chain]
            has_softmax = kinds.count(LayerKind.SOFTMAX) == kinds.count(LayerKind.QUANTIZE) == 1
            return chain if has_softmax and layer.int8_out and chain[-2].out is layer.data else []
        if layer.kind not in _ATTENTION_KINDS and not _keeps_order(layer):
            break
        layer = layer.out.single_consumer()
    return []


def _multiplies_activations_in_fp8(layer: Layer) -> bool:
    is_product = layer.kind == LayerKind.MATRIX_MULTIPLY and not layer.weights.constant
    return is_product and layer.int8 and layer.quantized_type == Precision.FP8


def _fuse_activations(network: Network, members: Iterable[Layer]) -> None:
    """Fuse the pointwise layer after each product with constant weights into the product.

    Reshapes may be between the two layers. No other layer may read the result of the product.
    """
    for product in filter(_has_constant_weights, members):
        pointwise = product.out.single_consumer()
        while pointwise is not None and _keeps_order(pointwise):
            pointwise = pointwise.out.single_consumer()
        if pointwise is None or pointwise.kind not in _POINTWISE_KINDS:
            continue
        if len(pointwise.inputs) == 1 and pointwise.region is product.region:
            product.add_cases(ACTIVATION, *pointwise.cases)
            product.nodes.extend(pointwise.nodes)
            network.redirect_consumers(pointwise.out, pointwise.data)
            network.remove(pointwise)


def _merge_products(members: Iterable[Layer]) -> None:
    products: dict[tuple[int, bool], list[Layer]] = {}
    for product in filter(_has_constant_weights, members):
        source = _find_source(product)
        products.setdefault((id(source), dq_before(product.data) is not None), []).append(product)
    for group in products.values():
        if len(group) > 1:
            name = " || ".join(node_name(product) for product in group)
            for product in group:
                product.fusion.merged_name = name
                product.add_cases(SIDE_BY_SIDE)


def _find_source(product: Layer) -> Tensor:
    tensor = product.data
    for _ in range(_MAX_HOPS):
        layer = tensor.producer
        if layer is None or not layer.inputs:
            break
        if layer.kind not in QDQ and not _keeps_order(layer):
            break
        tensor = layer.data
    return tensor


def _keeps_order(layer: Layer) -> bool:
    return layer.kind == LayerKind.SHUFFLE and not layer.shuffling.reorders_values


def _has_constant_weights(layer: Layer) -> bool:
    return _is_product(layer) and layer.weights.constant


def _node_names(layer: Layer) -> list[str]:
    return layer.nodes or [layer.owner or layer.name]


def _is_read_inside(quantizer: Layer, members: Collection[Layer]) -> bool:
    out = quantizer.out
    return (
        not out.is_output
        and bool(out.consumers)
        and all(consumer in members for consumer in out.consumers)
    )


def _is_product(layer: Layer) -> bool:
    if layer.kind == LayerKind.CONVOLUTION:
        return layer.weights.from_matmul
    return layer.kind == LayerKind.MATRIX_MULTIPLY


def _is_attention_or_norm(layer: Layer) -> bool:
    if layer.kind == LayerKind.MATRIX_MULTIPLY and layer.op == "MatMul":
        return not layer.weights.constant
    return layer.op == "LayerNormalization"


def _needs_myelin_on_10(layer: Layer) -> bool:
    return _is_product(layer) or layer.kind == LayerKind.SOFTMAX or needs_myelin(layer)


def _neighbors_in_region(layer: Layer) -> list[Layer]:
    return [
        other
        for other in _neighbors_past_quantizers(layer)
        if other.kind not in _KINDS_OUTSIDE or _needs_myelin_on_10(other)
    ]


def _neighbors_past_quantizers(layer: Layer) -> dict[Layer, None]:
    """Return a layer, its neighbors, and the neighbors of the Q and DQ among them."""
    return find_reachable(
        [layer], lambda other: other.neighbors if other is layer or other.kind in QDQ else ()
    )


def _is_reduction(layer: Layer) -> bool:
    return layer.kind == LayerKind.POOLING and layer.op.startswith("Reduce")


def _quantizers_around(members: Collection[Layer]) -> list[Layer]:
    """Return the Q and DQ that are connected to a region directly or through other Q and DQ."""
    around = find_reachable(members, _neighboring_quantizers)
    return sorted((q for q in around if q.kind in QDQ), key=lambda q: q.rank)


def _neighboring_quantizers(layer: Layer) -> list[Layer]:
    return [q for q in layer.neighbors if q.kind in QDQ and q.inputs and q.outputs]

"""Detection heads, attentions and coordinate layers, recognized by structure.

A YOLOv8-style head computes each box side as the mean of a distribution over n bins: a Softmax,
then a product with the constants 0 ... n-1 (a 1x1 convolution in Ultralytics' exports). This
product is the DFL (distribution focal loss). The convolutions that feed the Softmax are the box
outputs. The other convolutions that feed the same Concat or Split are the class outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import (
    CUTS,
    JOINS,
    WEIGHTED,
    LayerKind,
    commuting_inputs,
    is_pointwise,
    is_run_time,
    operator_of,
    output_axis,
    rearranges,
)
from qdqtool.ir.qdq import find_float_tensor, is_dq, is_qdq
from qdqtool.patterns.pointwise import (
    activation_input,
    activation_outputs,
    is_bias,
    pointwise_region,
    run_time_inputs,
)
from qdqtool.proto.subgraphs import DOMAINS

_Range = tuple[int, int] | None  # channels [start, end) of axis 1; None for all channels

_MIN_BINS, _MAX_BINS = 4, 256
_MAX_BIN_ERROR = 0.1  # maximum error of a bin after INT8 rounding; a DFL of 16 bins has 0.06
_MAX_HOPS = 64  # maximum number of tensors searched around a Softmax; a dozen are usual
_SIDES = 4  # sides of a box; reference points have two or four numbers
_MAX_ROUNDS = 64  # maximum number of rounds of a search; each round finds the next decoder layer
_PICKS = (
    "Gather",
    "GatherElements",
    "GatherND",
    "Expand",
    "Tile",
)  # operators whose outputs are copies of input values
_SCATTERS = ("ScatterND", "ScatterElements")


# Heads -----------------------------------------------------------------------------------------


class Head:
    """Convolutions of a detection head, by node index.

    Attributes:
        dfl: The DFL convolutions (or MatMuls).
        boxes: Last convolutions of the box branches.
        finals: Convolutions and matrix products that have no convolution or matrix product
            downstream and that no activation directly follows. The DFL does not count.
    """

    def __init__(
        self, dfl: Iterable[int] = (), boxes: Iterable[int] = (), finals: Iterable[int] = ()
    ) -> None:
        self.dfl, self.boxes, self.finals = set(dfl), set(boxes), set(finals)

    @property
    def last_convolutions(self) -> set[int]:
        """Indices of the last convolutions before decoding: ``finals`` and ``boxes``."""
        return self.finals | self.boxes


def find_head(model: Model) -> Head:
    """Return the convolutions of the detection head."""
    head = Head()
    for softmax in _list_softmaxes(model):
        products = _find_bin_products(model, softmax, set())
        if products:
            head.dfl.update(node.index for node in products)
            head.boxes.update(convolutions_upstream(model, softmax.input(0)))
    upstream = tensors_upstream_of_weighted(model, head.dfl)
    for node in model.ordered:
        is_last = node.index not in head.dfl and upstream.isdisjoint(node.outputs)
        if node.op in WEIGHTED and is_last and not _is_activated(model, node.output):
            head.finals.add(node.index)
    return head


def find_dfl(model: Model) -> set[int]:
    """Return the DFL's convolutions (or MatMuls) of a float or Q/DQ model, by node index."""
    seen: set[str] = set()  # shared, because several Softmaxes may lead to the same tensor
    products: set[int] = set()
    for softmax in _list_softmaxes(model):
        products.update(node.index for node in _find_bin_products(model, softmax, seen))
    return products


def _list_softmaxes(model: Model) -> list[Node]:
    return [node for node in model.ordered if node.op == "Softmax"]


def _find_bin_products(model: Model, softmax: Node, seen: set[str]) -> list[Node]:
    """Return the Conv, MatMul or Mul nodes after a Softmax that multiply with 0, 1, ... n-1.

    Tensors in ``seen`` are skipped, and visited tensors are added to ``seen``.
    """
    products = []
    queue = [softmax.output]
    for tensor in queue:
        if tensor in seen:
            continue
        seen.add(tensor)
        for consumer in model.consumers(tensor):
            if _multiplies_with_bins(model, consumer, tensor):
                products.append(consumer)
            elif rearranges(consumer) or is_qdq(consumer) or consumer.op in (*CUTS, *JOINS):
                queue.extend(consumer.outputs)
    return products


def _multiplies_with_bins(model: Model, node: Node, tensor: str) -> bool:
    operator = operator_of(node)
    if operator.weights is None and operator.operation != "PROD":
        return False
    operands = [operand for operand in node.inputs if operand and operand != tensor]
    return any(_are_bins(model, node, operand) for operand in operands)


def _are_bins(model: Model, node: Node, tensor: str) -> bool:
    """Return whether an operand is 0, 1, ... n-1.

    If the values of a convolution's weights are not available, or are stored integers, the shape
    [1, n, 1, 1] decides.
    """
    source = find_float_tensor(model, tensor)
    if node.op != "Conv" or tensor != node.input(1) or model.constant(source) is not None:
        return is_bin_sequence(model, source)
    if not model.is_constant(tensor) and not is_dq(model.producer(tensor)):
        return False
    shape = model.shape(tensor)
    return shape is not None and shape[:1] == (1,) and all(size == 1 for size in shape[2:])


def is_bin_sequence(model: Model, tensor: str) -> bool:
    """Return whether a constant holds the bins of a DFL: 0, 1, ... n-1 with n of 4 to 256.

    Bins that were quantized with one scale and stored as floats are off by up to half a step.
    """
    shape = model.constant_shape(tensor)
    if shape is None or not _MIN_BINS <= int(np.prod(shape)) <= _MAX_BINS:
        return False
    value = model.constant(tensor)
    if value is None:
        return False
    errors = np.abs(value.reshape(-1).astype(np.float64) - np.arange(value.size))
    half_step = (value.size - 1) / 254
    return bool(np.all(errors <= min(_MAX_BIN_ERROR, half_step + 1e-6)))


def tensors_upstream_of_weighted(model: Model, dfl: Collection[int]) -> set[str]:
    """Return the tensors with a Conv, ConvTranspose, Gemm or MatMul downstream.

    Nodes of the DFL (indices ``dfl``) do not count.
    """
    tensors: set[str] = set()
    for node in reversed(model.ordered):
        is_weighted = node.op in WEIGHTED and node.index not in dfl
        if is_weighted or not tensors.isdisjoint(node.outputs):
            tensors.update(node.inputs, node.captured)
            tensors.discard("")  # missing optional input
    return tensors


def _is_activated(model: Model, tensor: str) -> bool:
    """Return whether an activation directly follows a tensor or its Casts.

    A Sigmoid alone does not count, because it turns scores into probabilities.
    """
    aliases = [tensor]  # the tensor and its Casts
    for alias in aliases:
        for result in activation_outputs(model, alias):
            last = model.producer(result)
            region = [] if last is None else pointwise_region(model, alias, last)
            if any(_is_part_of_activation(model, node) for node in region):
                return True
        for consumer in model.consumers(alias):
            is_cast = operator_of(consumer).kind == LayerKind.IDENTITY
            if is_cast and consumer.output not in aliases:
                aliases.append(consumer.output)
    return False


def _is_part_of_activation(model: Model, node: Node) -> bool:
    operator = operator_of(node)
    if operator.activation is not None and operator.activation.type != "SIGMOID":
        return True
    # The node is the product in x * gate(x).
    return operator.operation == "PROD" and len(run_time_inputs(model, node)) == 2


# Convolutions that produce channels ------------------------------------------------------------


def convolutions_upstream(model: Model, tensor: str) -> set[int]:
    """Return the indices of the nodes with weights that produce the channels of a tensor.

    Only operators that move values may be between these nodes and the tensor.
    """
    indices: set[int] = set()
    queue: list[tuple[str, _Range]] = [(tensor, None)]
    seen = set(queue)
    for name, channels in queue:
        node = model.producer(name)
        if node is None:
            continue
        if operator_of(node).weights is not None:
            indices.add(node.index)
            continue
        for source in _channel_sources(model, node, name, channels):
            if source not in seen:
                seen.add(source)
                queue.append(source)
    return indices


def _channel_sources(
    model: Model, node: Node, output: str, channels: _Range
) -> list[tuple[str, _Range]]:
    """Return the inputs whose values become channels of a node's output.

    Each input comes with the range of its channels. Empty if the node computes the channels
    instead of moving them.
    """
    operator = operator_of(node)
    if operator.joins:
        return _concat_inputs(model, node, channels)
    if operator.cuts:
        if node.op == "Split":
            return [(node.input(0), _split_range(model, node, output, channels))]
        return [(node.input(0), _slice_range(model, node, channels))]
    if operator.kind == LayerKind.SHUFFLE:
        return [(node.input(0), channels if _keeps_channels(model, node) else None)]
    if commuting_inputs(model, node):
        return [(node.input(0), channels)]
    return []


def _keeps_channels(model: Model, node: Node) -> bool:
    if node.op == "Transpose":
        perm = node.attributes.get("perm", [])
        return len(perm) > 1 and perm[1] == 1
    before, after = _channel_count(model, node.input(0)), _channel_count(model, node.output)
    return before is not None and before == after


def _channel_count(model: Model, tensor: str) -> int | None:
    shape = model.shape(tensor)
    return shape[1] if shape is not None and len(shape) > 1 else None


def _positive_axis(model: Model, node: Node) -> int | None:
    axis = node.integer("axis", 0)
    if axis >= 0:
        return axis
    shape = model.shape(node.input(0))
    return None if shape is None else axis + len(shape)


def _split_range(model: Model, node: Node, output: str, channels: _Range) -> _Range:
    if _positive_axis(model, node) != 1:
        return channels
    start = 0
    for name in node.outputs:
        size = _channel_count(model, name)
        if size is None:
            return None
        if name == output:
            low, high = channels or (0, size)
            return start + low, start + high
        start += size
    return None


def _slice_range(model: Model, node: Node, channels: _Range) -> _Range:
    parameters: list[int] = []
    for position in (1, 2, 3):  # start, end, axis
        value = model.constant(node.input(position))
        if value is None or value.size != 1:
            return None
        parameters.append(int(value.reshape(-1)[0]))
    start, end, axis = parameters
    if axis != 1:
        return channels
    size = _channel_count(model, node.input(0))
    has_steps = model.constant(node.input(4)) is not None
    if size is None or start < 0 or has_steps:
        return None
    low, high = channels or (0, min(end, size) - start)
    return start + low, start + high


def _concat_inputs(model: Model, node: Node, channels: _Range) -> list[tuple[str, _Range]]:
    if _positive_axis(model, node) != 1 or channels is None:
        return [(tensor, channels) for tensor in node.inputs]
    parts: list[tuple[str, _Range]] = []
    start = 0
    for tensor in node.inputs:
        size = _channel_count(model, tensor)
        if size is None:
            return [(tensor, None) for tensor in node.inputs]
        low, high = max(channels[0], start), min(channels[1], start + size)
        if low < high:
            parts.append((tensor, (low - start, high - start)))
        start += size
    return parts


# Attention -------------------------------------------------------------------------------------


class Attention(NamedTuple):
    """The matrix products of one attention.

    Attributes:
        scores: The product of queries and keys.
        softmax: The Softmax of the scores.
        values: The product of the probabilities with the values.
        probabilities: The input of ``values`` that holds the Softmax's result, from 0 to 1.
    """

    scores: Node
    softmax: Node
    values: Node
    probabilities: str


def find_attentions(model: Model) -> list[Attention]:
    """Return the attentions of a float or Q/DQ model in graph order."""
    attentions: list[Attention] = []
    for softmax in _list_softmaxes(model):
        scores = _find_score_product(model, softmax)
        values = None if scores is None else _find_value_product(model, softmax)
        if scores is not None and values is not None:
            attentions.append(Attention(scores, softmax, *values))
    return attentions


# Head sizes with an INT8 kernel for the whole attention, seen in builds of TensorRT 10.9 on an RTX
# 4090. The documentation also lists 64, but with TensorRT 11.3, Q/DQ slow down a ViTPose with heads
# of 64 by 18 %.
INT8_HEAD_SIZES = (16, 32)


def is_computed_product(model: Model, node: Node | None) -> bool:
    """Return whether a node is a MatMul of two computed tensors, with or without Q/DQ."""
    return (
        node is not None
        and node.op == "MatMul"
        and operator_of(node).kind == LayerKind.MATRIX_MULTIPLY
        and len(node.inputs) == 2
        and not any(_comes_from_constant(model, tensor) for tensor in node.inputs)
    )


def is_attention_probability(model: Model, tensor: str, *, quantized: bool = False) -> bool:
    """Return whether a tensor holds attention probabilities, from 0 to 1.

    A matrix product reads the tensor, and a Softmax produces the values. Nodes that move values, or
    a Where that masks values, may be between the Softmax and the tensor.

    Args:
        model: The model.
        tensor: Name of the tensor.
        quantized: Whether the product reads the tensor through a Q/DQ pair. If so, the consumers
            of the tensor are not checked.
    """
    consumers = model.consumers(tensor)
    if not quantized and not any(is_computed_product(model, node) for node in consumers):
        return False
    for _ in range(_MAX_HOPS):
        node = model.producer(tensor)
        if node is None or node.op == "Softmax":
            return node is not None
        if not _moves_values(node) or not _fills_with_probability(model, node):
            return False
        tensor = node.input(_data_position(node))
    return False


def _fills_with_probability(model: Model, node: Node) -> bool:
    """Return whether a Where inserts a number from 0 to 1; True for any other node."""
    if node.op != "Where":
        return True
    fill = model.scalar(node.input(1))
    return fill is not None and 0.0 <= fill <= 1.0


def _find_score_product(model: Model, softmax: Node) -> Node | None:
    """Return the nearest matrix product upstream of a Softmax; None if not found.

    Scaling, masking and nodes that move values may be in between.
    """
    queue = [softmax.input(0)]
    for tensor in queue:
        node = model.producer(tensor)
        if node is None or len(queue) > _MAX_HOPS:
            continue
        if is_computed_product(model, node):
            return node
        if is_pointwise(node) or _moves_values(node):
            queue.extend(t for t in run_time_inputs(model, node) if t not in queue)
    return None


def _find_value_product(model: Model, softmax: Node) -> tuple[Node, str] | None:
    """Return the matrix product after a Softmax, and its input that holds the probabilities.

    None if no matrix product is found.
    """
    queue = [softmax.output]
    for tensor in queue:
        if len(queue) > _MAX_HOPS:
            return None
        for consumer in model.consumers(tensor):
            if is_computed_product(model, consumer):
                return consumer, tensor
            if _moves_values(consumer) and tensor == consumer.input(_data_position(consumer)):
                queue.extend(t for t in consumer.outputs if t and t not in queue)
    return None


def _moves_values(node: Node) -> bool:
    return rearranges(node) or is_qdq(node) or (node.op == "Where" and node.domain in DOMAINS)


def _data_position(node: Node) -> int:
    return 2 if node.op == "Where" else 0


def _comes_from_constant(model: Model, tensor: str) -> bool:
    while not model.is_constant(tensor):
        node = model.producer(tensor)
        if node is None or not (rearranges(node) or is_qdq(node)) or not node.inputs:
            return False
        tensor = node.input(0)
    return True


# Coordinates -----------------------------------------------------------------------------------


class CoordinateLayers:
    """Layers that produce or read coordinates, by node index. The sets may be empty.

    Attributes:
        producers: Layers whose results are boxes, reference points or sampling offsets.
        mlps: Layers of an MLP before a layer of ``producers``.
        consumers: Linears that read coordinates of at most four numbers each.
        scores: Layers that produce the scores by which a decoder's queries are selected.
    """

    def __init__(self) -> None:
        self.producers: set[int] = set()
        self.mlps: set[int] = set()
        self.consumers: set[int] = set()
        self.scores: set[int] = set()

    @property
    def all(self) -> set[int]:
        """Layers of ``producers``, ``mlps`` and ``consumers``."""
        return self.producers | self.mlps | self.consumers


def find_coordinates(model: Model, finals: Iterable[int]) -> CoordinateLayers:
    """Return the layers of a float network that produce or read coordinates.

    Args:
        model: The float network.
        finals: The network's last convolutions and Linears, see :class:`Head`.
    """
    layers = CoordinateLayers()
    layers.producers = _find_sampling_layers(model) or _find_boxes_without_grid(model, finals)
    if not layers.producers:
        return layers
    coordinates = _add_refinements(model, layers)
    for index in layers.producers:
        layers.mlps |= _find_mlp_upstream(model, model.nodes[index])
    layers.mlps -= layers.producers
    for node in model.nodes:
        if node.input(0) in coordinates and _multiplies_few_columns(model, node):
            layers.consumers.add(node.index)
        if node.op == "TopK":
            layers.scores |= _find_weighted_sources(model, node.input(0), reduced=True)[0]
    layers.scores -= layers.all
    return layers


def _find_sampling_layers(model: Model) -> set[int]:
    indices: set[int] = set()
    for node in model.ordered:
        if node.op == "GridSample" and node.domain in DOMAINS:
            indices |= _find_weighted_sources(model, node.input(1))[0]
    return indices


def _find_boxes_without_grid(model: Model, finals: Iterable[int]) -> set[int]:
    """Return indices of the Linears that compute boxes in a network with attention.

    A last Linear computes boxes if it has four columns and comes after an MLP. Empty if all last
    Linears meet these conditions.
    """
    linears = [
        model.nodes[index]
        for index in finals
        if operator_of(model.nodes[index]).kind == LayerKind.MATRIX_MULTIPLY
    ]
    if len(linears) < 2 or not find_attentions(model):
        return set()
    boxes = {
        node.index
        for node in linears
        if _column_count(model, node) == _SIDES and _find_mlp_upstream(model, node)
    }
    return boxes if len(boxes) < len(linears) else set()


def _multiplies_few_columns(model: Model, node: Node) -> bool:
    if operator_of(node).kind != LayerKind.MATRIX_MULTIPLY:
        return False
    shape = model.constant_shape(node.input(1))
    return (
        shape is not None and len(shape) == 2 and shape[1 - (output_axis(node, 2) or 0)] <= _SIDES
    )


def _add_refinements(model: Model, layers: CoordinateLayers) -> set[str]:
    """Add to `layers.producers` the layers whose results are combined with coordinates.

    Returns:
        Tensors of coordinates.
    """
    coordinates: set[str] = set()
    for _ in range(_MAX_ROUNDS):
        count = len(layers.producers)
        coordinates = set()
        for node in model.ordered:
            inputs = _value_inputs(model, node)
            is_producer = node.index in layers.producers
            if not is_producer and coordinates.isdisjoint(inputs):
                continue
            coordinates.update(tensor for tensor in node.outputs if tensor)
            if not is_producer and is_pointwise(node):
                layers.producers |= _find_combined_producers(model, inputs, coordinates)
        if len(layers.producers) == count:
            break
    return coordinates


def _find_combined_producers(
    model: Model, operands: tuple[str, ...], coordinates: set[str]
) -> set[int]:
    """Return the indices of layers with weights that produce operands outside `coordinates`.

    Operands that also depend on anything other than such layers are left out.
    """
    producers: set[int] = set()
    if len(operands) > 1:
        for tensor in operands:
            if tensor not in coordinates:
                sources, is_pure = _find_weighted_sources(model, tensor)
                if is_pure:
                    producers |= sources
    return producers


def _find_weighted_sources(
    model: Model, tensor: str, *, reduced: bool = False
) -> tuple[set[int], bool]:
    """Return the nearest layers with weights from which a tensor is computed.

    Args:
        model: The model.
        tensor: Name of the tensor.
        reduced: Whether reductions may be between the layers and the tensor.

    Returns:
        Node indices of the layers, and whether all paths upstream of the tensor end at one of these
        layers.
    """
    indices: set[int] = set()
    is_pure = True
    seen = {tensor}
    stack = [tensor]
    while stack:
        node = model.producer(stack.pop())
        if node is None:
            is_pure = False
            continue
        if _has_constant_weights(model, node):
            indices.add(node.index)
            sources: tuple[str, ...] = (_find_distribution_logits(model, node),)
        else:
            sources = _value_inputs(model, node, reduced)
            is_pure = is_pure and bool(sources)
        for source in sources:
            if source and source not in seen and is_run_time(model, source):
                seen.add(source)
                stack.append(source)
    return indices, is_pure


def _has_constant_weights(model: Model, node: Node) -> bool:
    return operator_of(node).weights is not None and not is_run_time(model, node.input(1))


def _value_inputs(model: Model, node: Node, reduced: bool = False) -> tuple[str, ...]:
    """Return the inputs whose values a node copies, or uses to compute values.

    Empty for operators that are neither pointwise nor move values.

    Args:
        model: The model.
        node: The node.
        reduced: Whether the inputs of reductions count.
    """
    if is_pointwise(node):
        return tuple(run_time_inputs(model, node))
    if operator_of(node).joins:
        return tuple(node.inputs)
    if node.domain in DOMAINS and node.op == "Where":
        return tuple(node.inputs[1:3])
    if node.domain in DOMAINS and node.op in _SCATTERS:  # these operators write parts of a box
        return (node.input(0), node.input(2))
    if _passes_first_input(node, reduced):
        return tuple(node.inputs[:1])
    return ()


def _passes_first_input(node: Node, reduced: bool) -> bool:
    kind = operator_of(node).kind
    return (
        rearranges(node)
        or kind == LayerKind.SLICE
        or (node.op in _PICKS and node.domain in DOMAINS)
        or (reduced and kind == LayerKind.REDUCE)
    )


def _find_distribution_logits(model: Model, node: Node) -> str:
    """Return the input of the Softmax over bins before a layer that computes the mean bin.

    In D-FINE and in YOLO's DFL, the layer has one column. Empty for any other layer.
    """
    if _column_count(model, node) != 1:
        return ""
    producer = model.producer(node.input(0))
    while producer is not None and rearranges(producer) and producer.inputs:
        producer = model.producer(producer.input(0))
    return "" if producer is None or producer.op != "Softmax" else producer.input(0)


def _column_count(model: Model, node: Node) -> int | None:
    """Return the number of outputs per position of a layer; None if it is unknown."""
    shape = model.constant_shape(node.input(1))
    if not shape:
        return None
    if len(shape) == 1 and node.op == "MatMul":
        return 1
    axis = output_axis(node, len(shape))
    return shape[axis] if axis is not None and axis < len(shape) else None


def _find_mlp_upstream(model: Model, node: Node) -> set[int]:
    """Return indices of the preceding Linears of an MLP, given its last Linear.

    The output of each preceding Linear has a single consumer and is not a network output.
    """
    indices: set[int] = set()
    while operator_of(node).kind == LayerKind.MATRIX_MULTIPLY:
        previous = _layer_before_activation(model, node)
        if operator_of(previous).kind != LayerKind.MATRIX_MULTIPLY or previous is None:
            break
        if len(model.consumers(previous.output)) != 1 or model.is_output(previous.output):
            break
        indices.add(previous.index)
        node = previous
    return indices


def _layer_before_activation(model: Model, node: Node) -> Node | None:
    is_activated = False
    producer = model.producer(node.input(0))
    while producer is not None and not _has_constant_weights(model, producer):
        source = activation_input(model, producer)
        if source is not None:
            is_activated = is_activated or not is_bias(model, producer)
        elif rearranges(producer) and producer.inputs:
            source = producer.input(0)
        else:
            return None
        producer = model.producer(source)
    return producer if is_activated else None

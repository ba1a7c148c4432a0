"""Searches for consumers and producers of tensors.

The searches look past operators that a Q could pass. Passes record the results in their reasons.
The module also finds the reason why a layer with weights cannot absorb the DQs of its inputs.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from qdqtool.ir.operators import OPERATORS, LayerKind
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.ir.qdq import precision_of
from qdqtool.reasons import fp8
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.inputs import InputNotDequantized, OperandTypesDiffer
from qdqtool.reasons.outputs import OutputDifferentScales, OutputMixedConsumers, OutputNotQuantized
from qdqtool.reasons.quantizers import UncoveredOperandType
from qdqtool.reasons.scales import ScalesDiffer
from qdqtool.reasons.tensors import (
    STEPS,
    ConsumerKind,
    OperatorPath,
    PathStep,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
)
from qdqtool.reasons.weights import WeightsNotDequantized
from qdqtool.trt import fault_checks
from qdqtool.trt.layers import (
    QDQ,
    SILU,
    WEIGHTED,
    Dims,
    Layer,
    Tensor,
    constant_before,
    dq_before,
    node_name,
    q_after,
    walk,
    weights_position,
)
from qdqtool.trt.targets import Target
from qdqtool.util.records import SharedTuple

# Limits of the search for the consumers of one tensor.
MAX_CONSUMERS = 100  # maximum number of listed consumers; networks have at most about a dozen
MAX_TENSORS = 100  # maximum number of tensors that are visited; a block of DenseNet-201 has 48
MAX_PATH_STEPS = 1200  # maximum sum of the steps on all paths; the DenseNet block has 1176
MAX_Q_STEPS = 400  # maximum sum of the steps on the paths of all Qs
MIN_Q_STEPS = 4  # steps that each Q keeps even when MAX_Q_STEPS is used up
# Maximum number of layers that are visited downstream of a layer, to find a convolution or a Q.
MAX_LAYERS_AFTER = 100
# Maximum number of tensors that are visited upstream of a convolution, to find a DQ.
MAX_TENSORS_BEFORE = 40

# Activations that an INT8 layer fuses only if it writes INT8.
_SEPARATE_ACTIVATIONS = (SILU, "Sigmoid", "Mish", "HardSwish")
_KINDS_OF_ACTIVATIONS = (LayerKind.ACTIVATION, LayerKind.POINTWISE)
# Operators (Identity, Cast) that may change the type of a tensor.
_RETYPING_OPERATORS = frozenset(
    name for name, operator in OPERATORS.items() if operator.kind == LayerKind.IDENTITY
)

_Path = tuple[PathStep, ...]
# Positions of values are followed past a Concat with at most this number of inputs. The cost grows
# with the square of the number of inputs.
_MAX_CONCAT_INPUTS = 16
_Spans = dict[int, tuple[int, int]]
"""Where values lie in a tensor: for an axis, the first index and the index after the last one."""


def quantizer_scale(layer: Layer | None) -> Scale:
    """Return the scale of a Q or DQ: one number, or one number for each channel.

    None if the scale is unknown, or if the layer is None.
    """
    return None if layer is None or layer.quant is None else layer.quant.summary


def tensor_size(tensor: Tensor) -> TensorSize | None:
    """Return the size of a tensor; None if a dimension other than the batch is unknown or 0."""
    shape = tensor.shape
    if shape is None:
        shuffle = tensor.single_consumer(LayerKind.SHUFFLE)
        if shuffle is not None:
            # The result of a matrix product that became a convolution has the shape after the
            # inserted reshape.
            shape = shuffle.out.shape
    if shape is None or any(not d for d in shape[1:]):
        return None
    return TensorSize("x".join(map(str, shape[1:])), math.prod(d or 1 for d in shape))


def to_step(layer: Layer, part: int = -1) -> PathStep:
    """Return a layer as a step of a path.

    ``part`` is the index of the input of a Concat on the path; -1 for other operators.
    """
    return PathStep(node_name(layer), layer.op or layer.kind.value.title(), part)


# Consumers ------------------------------------------------------------------------------------


def find_consumers(
    tensor: Tensor, *, through: bool = True, precision: Precision = Precision.INT8
) -> SharedTuple[TensorConsumer]:
    """Return the consumers of a tensor, looking past the operators that a Q could pass.

    If ``through`` is False, return only direct consumers. If the list is not complete, its
    attribute ``more`` names the node or tensor after which consumers are missing. ``precision`` is
    the type to which Q/DQ before a consumer would quantize.
    """
    return _ConsumerSearch(tensor, through, precision).run()


class _ConsumerSearch:
    """Breadth-first search for the consumers of a tensor.

    The limits are :data:`MAX_CONSUMERS`, :data:`MAX_TENSORS` and :data:`MAX_PATH_STEPS`.
    """

    def __init__(self, tensor: Tensor, through: bool, precision: Precision) -> None:
        self.tensor = tensor
        self.through = through
        self.precision = precision
        self.consumers: list[TensorConsumer] = []
        self.more = ""
        self.queue: list[tuple[Tensor, _Path]] = [(tensor, ())]
        self.visited = {id(tensor)}
        # By id of a visited tensor: the spans with values of the start tensor. None if the visited
        # tensor contains no such values.
        self.spans: dict[int, _Spans | None] = {id(tensor): {}}
        # Consumers of tensors that contain no value of the start tensor.
        self.other_consumers: list[TensorConsumer] = []
        self.has_several_paths = False  # True if several paths lead to one tensor
        self.path_steps_left = MAX_PATH_STEPS
        self.q_steps_left = MAX_Q_STEPS
        # First operator at which the search stopped, with its input and the path to it.
        self.last_operator: tuple[Layer, Tensor, _Path] | None = None

    def run(self) -> SharedTuple[TensorConsumer]:
        for tensor, path in self.queue:
            if len(self.consumers) >= MAX_CONSUMERS:
                self.record_omission(tensor, path)
                break
            first = len(self.consumers)
            self.visit(tensor, path)
            if self.spans[id(tensor)] is None:
                self.other_consumers += self.consumers[first:]
        self.remove_other_consumers()
        if len(self.consumers) > MAX_CONSUMERS:
            self.record_omission(self.tensor, ())
        if not self.consumers and self.last_operator is not None:
            # Without this entry the list would be empty. The operator stands for the consumers
            # after it.
            self.consumers.append(_describe_consumer(*self.last_operator, self.precision))
        return SharedTuple(self.consumers[:MAX_CONSUMERS], self.more)

    def remove_other_consumers(self) -> None:
        """Remove consumers that read no value of the start tensor.

        An example is a tensor that a Concat joins with the start tensor and a Split separates
        again. No consumer is removed if one of them is a Q, because the others keep this Q from
        moving up past the Split. No consumer is removed either if none would be left, or if several
        paths lead to one tensor, because the spans in that tensor are unknown.
        """
        has_q = any(consumer.kind == ConsumerKind.Q for consumer in self.consumers)
        if self.has_several_paths or has_q or len(self.other_consumers) == len(self.consumers):
            return
        others = set(map(id, self.other_consumers))
        self.consumers = [c for c in self.consumers if id(c) not in others]

    def record_omission(self, tensor: Tensor, path: _Path) -> None:
        self.more = self.more or (path[-1].node if path else tensor.source)

    def visit(self, tensor: Tensor, path: _Path) -> None:
        if len(tensor.consumers) > MAX_CONSUMERS:
            self.record_omission(tensor, path)
        if tensor.is_output:
            self.consumers.append(TensorConsumer(ConsumerKind.OUTPUT, tensor.name, "Output", path))
        for layer in itertools.islice(tensor.consumers, MAX_CONSUMERS):
            if layer.kind == LayerKind.QUANTIZE and layer.data is tensor:
                self.add_quantizers(layer, path)
            elif self.through and _can_q_pass(layer, tensor):
                self.follow(layer, tensor, path)
            else:
                self.consumers.append(_describe_consumer(layer, tensor, path, self.precision))

    def add_quantizers(self, q: Layer, path: _Path) -> None:
        """Add a Q as consumer, and each Q that was merged into it."""
        scale = quantizer_scale(q)
        for name, moves in [(node_name(q), q.path), *q.merged_quantizers]:
            steps = moves.latest_steps(max(MIN_Q_STEPS, min(self.q_steps_left, STEPS)))
            self.q_steps_left -= len(steps)
            self.consumers.append(
                TensorConsumer(ConsumerKind.Q, name, q.op, (*path, *steps), scale)
            )

    def follow(self, layer: Layer, tensor: Tensor, path: _Path) -> None:
        if len(self.visited) > MAX_TENSORS or self.path_steps_left <= len(path):
            self.last_operator = self.last_operator or (layer, tensor, path)
            self.more = self.more or node_name(layer)
            return
        is_concat = layer.kind == LayerKind.CONCATENATION
        part = layer.inputs.index(tensor) if is_concat else -1
        for output in layer.outputs:
            if id(output) not in self.visited:
                self.visited.add(id(output))
                self.spans[id(output)] = _follow_spans(
                    layer, tensor, output, self.spans[id(tensor)]
                )
                self.path_steps_left -= len(path) + 1
                self.queue.append((output, (*path, to_step(layer, part))))
            else:
                self.has_several_paths = True


def _follow_spans(
    layer: Layer, tensor: Tensor, output: Tensor, spans: _Spans | None
) -> _Spans | None:
    """Return the spans of values in an output of a layer, from their spans in an input.

    None if the output has none of the values. Axes on which the positions are unknown have no span.
    """
    before, after = tensor.shape, output.shape
    if spans is None:
        return None
    if before is None or after is None:
        return {}
    if layer.part_of_split is not None:
        return _follow_spans_past_split(*layer.part_of_split, after, spans)
    if layer.kind == LayerKind.CONCATENATION:
        return _follow_spans_past_concat(layer, tensor, after, spans)
    if layer.kind == LayerKind.SHUFFLE and not layer.shuffling.reorders_values:
        return _follow_spans_past_reshape(before, after, spans)
    return spans if layer.kind == LayerKind.IDENTITY and before == after else {}


def _follow_spans_past_split(axis: int, start: int, shape: Dims, spans: _Spans) -> _Spans | None:
    """Return the spans in a part of a Split, which begins at an index of the split axis."""
    size = shape[axis] if axis < len(shape) else None
    if axis not in spans or size is None:
        return {other: span for other, span in spans.items() if other != axis}
    low, high = (min(max(index - start, 0), size) for index in spans[axis])
    return {**spans, axis: (low, high)} if low < high else None


def _follow_spans_past_reshape(before: Dims, after: Dims, spans: _Spans) -> _Spans:
    """Return the spans on the leading axes whose sizes a Reshape keeps."""
    kept = 0
    for size, new_size in zip(before, after, strict=False):
        if size != new_size or (kept and size is None):
            break
        kept += 1
    return {axis: span for axis, span in spans.items() if axis < kept}


def _follow_spans_past_concat(layer: Layer, tensor: Tensor, shape: Dims, spans: _Spans) -> _Spans:
    if len(layer.inputs) > _MAX_CONCAT_INPUTS or layer.inputs.count(tensor) != 1:
        return {}
    shapes = [x.shape or () for x in layer.inputs]
    axis = _find_concat_axis(shapes, shape)
    if axis is None:
        return {}
    sizes = [input_shape[axis] or 0 for input_shape in shapes]
    if sum(sizes) != shape[axis] or not all(sizes):
        return {}
    position = layer.inputs.index(tensor)
    start = sum(sizes[:position])
    low, high = spans.get(axis, (0, sizes[position]))
    return {**spans, axis: (start + low, start + high)}


def _find_concat_axis(shapes: Sequence[Dims], joined: Dims) -> int | None:
    """Return the only axis on which the sizes of inputs and output differ, if there is one."""
    if any(len(shape) != len(joined) for shape in shapes):
        return None
    axes = [n for n, sizes in enumerate(zip(joined, *shapes, strict=True)) if len(set(sizes)) > 1]
    return axes[0] if len(axes) == 1 else None


def _can_q_pass(layer: Layer, tensor: Tensor) -> bool:
    is_moved_input = layer.kind == LayerKind.CONCATENATION or layer.data is tensor
    return layer.passage is not None and is_moved_input


def _describe_consumer(
    layer: Layer, tensor: Tensor, path: _Path, precision: Precision
) -> TensorConsumer:
    kind = ConsumerKind.SUM if is_sum(layer) else ConsumerKind.OP
    node, op = node_name(layer), layer.op or layer.kind.value
    if layer.activation_and_add is not None and tensor is not layer.data:
        kind, node, op = ConsumerKind.SUM, layer.activation_and_add[1], "Add"
    return TensorConsumer(
        kind,
        node,
        op,
        path,
        scale=None,
        feeds_weighted=_feeds_weighted(layer),
        gains=_gains_from_qdq(layer, precision),
        shares=kind == ConsumerKind.SUM and _has_scale(tensor),
    )


def _has_scale(tensor: Tensor) -> bool:
    while (cast := tensor.producer) is not None and cast.op == "Cast":
        if cast.data.elem_type != tensor.elem_type:
            break
        tensor = cast.data
    dq = dq_before(tensor)
    return (dq is not None and not dq.path.ops) or any(
        _quantizes_directly(consumer) for consumer in tensor.consumers
    )


def _quantizes_directly(layer: Layer) -> bool:
    """Return whether a layer is a Q that has one scale and has not moved.

    A Q that has moved counts if a Q that has not moved was merged into it.
    """
    if layer.kind != LayerKind.QUANTIZE or not isinstance(quantizer_scale(layer), float):
        return False
    paths: list[OperatorPath] = [layer.path, *(path for _, path in layer.merged_quantizers)]
    return any(not path.ops for path in paths)


def is_sum(layer: Layer) -> bool:
    """Return whether a layer adds at least two computed tensors."""
    return layer.operation == "SUM" and sum(not constant_before(t) for t in layer.inputs) > 1


def find_weighted_consumers(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of layers with weights that read a tensor as their data.

    DQs and operators that a Q could pass may be between the tensor and such a layer. The search
    ends after about :data:`MAX_TENSORS` tensors.
    """
    names: dict[str, None] = {}
    queue, visited = [tensor], {id(tensor)}
    for current in queue:
        for layer in current.consumers:
            if layer.kind in WEIGHTED and layer.data is current:
                names[node_name(layer)] = None
                continue
            is_transparent = layer.passage is not None or layer.kind == LayerKind.DEQUANTIZE
            if is_transparent and len(visited) <= MAX_TENSORS:
                outputs = [output for output in layer.outputs if id(output) not in visited]
                visited.update(map(id, outputs))
                queue.extend(outputs)
    return tuple(names)


# Gains ----------------------------------------------------------------------------------------


def _gains_from_qdq(layer: Layer, precision: Precision) -> bool:
    """Return whether Q/DQ before a layer that reads float would make the engine faster.

    A layer with constant or quantized weights gains if another layer with weights is downstream,
    unless the layer is a convolution without a fast kernel of the precision.
    An average, a pointwise layer of activation and Add, and a sum with an operand that can be INT8
    gain if only Qs read the result. Activations, other sums and operators that a Q can pass may be
    between the layer and these Qs.
    """
    if layer.kind in WEIGHTED:
        if precision == Precision.FP8 and _is_slow_in_fp8(layer):
            return False
        has_int8_weights = layer.weights.constant or any(map(dq_before, layer.inputs[1:]))
        return has_int8_weights and _precedes_weighted(layer)
    is_int8_sum = is_sum(layer) and any(map(_can_be_int8_operand, layer.inputs))
    if layer.activation_and_add is None and not _is_average(layer) and not is_int8_sum:
        return False
    return _has_only_q_consumers(layer)


def _is_slow_in_fp8(layer: Layer) -> bool:
    if layer.kind != LayerKind.CONVOLUTION:
        return layer.kind == LayerKind.DECONVOLUTION
    channels = [size for size in layer.weights.dims[:2] if size]
    return fault_checks.is_slow_fp8_convolution(channels, layer.weights.group)


def _has_only_q_consumers(layer: Layer) -> bool:
    """Return whether Qs are the only consumers of a layer's result; False without a Q.

    Layers that can write INT8 may be between the layer and the Qs. True also if the search stops
    after :data:`MAX_LAYERS_AFTER` layers.
    """
    is_quantized = False
    for number, follower in enumerate(walk([layer], _float_consumers)):
        if number > MAX_LAYERS_AFTER:
            return True
        if any(tensor.is_output for tensor in follower.outputs):
            return False
        if follower is not layer and not _can_pass_int8_on(follower):
            return False
        is_quantized |= any(c.kind == LayerKind.QUANTIZE for c in follower.consumers)
    return is_quantized


def _float_consumers(layer: Layer) -> list[Layer]:
    return [consumer for consumer in layer.consumers if consumer.kind != LayerKind.QUANTIZE]


def _can_pass_int8_on(layer: Layer) -> bool:
    return (
        layer.operation == "SUM"
        or layer.kind in _KINDS_OF_ACTIVATIONS
        or layer.passage is not None
        or _is_average(layer)
    )


def _can_be_int8_operand(tensor: Tensor) -> bool:
    """Return whether an operand of a sum comes from a DQ or a layer that could fuse the sum."""
    return dq_before(tensor) is not None or bool(
        tensor.producer_of_kind(*WEIGHTED) and tensor.single_consumer()
    )


def _is_average(layer: Layer) -> bool:
    return "AVERAGE" in (layer.possible_pooling, layer.pooling_type)


def _feeds_weighted(layer: Layer) -> bool:
    """Return whether a layer is upstream of a layer with weights.

    For a layer that has weights itself: whether one of its inputs comes from a DQ.
    """
    if layer.kind in WEIGHTED:
        return any(map(dq_before, layer.inputs))
    return _precedes_weighted(layer)


def _precedes_weighted(layer: Layer) -> bool:
    """Return whether a layer with weights, except YOLO's DFL, is downstream of a layer.

    True also if the search stops after :data:`MAX_LAYERS_AFTER` layers.
    """
    for number, follower in enumerate(walk([layer], lambda current: current.consumers)):
        is_weighted = follower.kind in WEIGHTED and not follower.weights.dfl
        if number > MAX_LAYERS_AFTER or (is_weighted and follower is not layer):
            return True
    return False


# Outputs and scales ---------------------------------------------------------------------------


def explain_float_output(
    layer: Layer, pass_name: str
) -> OutputNotQuantized | OutputDifferentScales | OutputMixedConsumers:
    """Return the reason why an INT8 layer writes float, from the consumers of its output."""
    consumers = find_consumers(layer.out, precision=layer.quantized_type)
    node, tensor, size = node_name(layer), layer.out.source, tensor_size(layer.out)
    quantizers = [consumer for consumer in consumers if consumer.kind == ConsumerKind.Q]
    if quantizers and len(quantizers) < len(consumers):
        return OutputMixedConsumers(pass_name, node, tensor, consumers, size)
    different = check_output_scales(pass_name, node, tensor, consumers, size)
    if different is not None:
        return different
    activation = layer.fusion.activation
    return OutputNotQuantized(pass_name, node, tensor, consumers, size, activation)


def check_output_scales(
    pass_name: str,
    node: str,
    tensor: str,
    consumers: tuple[TensorConsumer, ...],
    size: TensorSize | None,
) -> OutputDifferentScales | None:
    """Return a reason if all consumers are Qs and their scales may differ; None otherwise."""
    if not have_different_scales(consumers):
        return None
    if any(consumer.kind != ConsumerKind.Q for consumer in consumers):
        return None
    return OutputDifferentScales(pass_name, node, tensor, consumers, size)


def check_equal_scales(
    pass_name: str, node: str, tensor: Tensor, quantizers: Sequence[Layer]
) -> ScalesDiffer | None:
    """Return a reason if quantizers may differ in scale, zero point or type; else None.

    ``quantizers`` are a DQ and the Q after it, or Qs that read one tensor.
    """
    keys = {None if q.quant is None else q.quant.key for q in quantizers}
    if len(quantizers) < 2 or (len(keys) == 1 and None not in keys):
        return None
    names, scales = map(node_name, quantizers), map(quantizer_scale, quantizers)
    return ScalesDiffer(pass_name, node, tensor.source, tuple(names), tuple(scales))


def have_different_scales(quantizers: Sequence[TensorConsumer]) -> bool:
    """Return whether the scales of two or more consumers differ, or one of them is unknown."""
    scales = {q.scale for q in quantizers}
    return len(quantizers) > 1 and (len(scales) > 1 or None in scales)


# Origin ---------------------------------------------------------------------------------


_PIXEL_OPERATORS = ("Mul", "Div", "Add", "Sub")  # operators that scale pixels of a uint8 input


def find_origin(tensor: Tensor) -> TensorOrigin:
    """Return the producer of a tensor, upstream of operators that a Q could pass.

    The search passes at most :data:`STEPS` operators and ends at a Concat.
    """
    path: list[PathStep] = []
    producer = tensor.producer
    while producer is not None and len(path) < STEPS and producer.inputs:
        if producer.passage is None or producer.kind == LayerKind.CONCATENATION:
            break
        path.append(to_step(producer))
        tensor = producer.data
        producer = tensor.producer
    if producer is None:
        return TensorOrigin(tensor.source, "", "Input", path=tuple(path))
    return _describe_origin(producer, tensor, tuple(path))


def _describe_origin(producer: Layer, tensor: Tensor, path: _Path) -> TensorOrigin:
    is_quantizer = producer.kind in QDQ
    nodes = producer.nodes or [""]
    node, op = _find_writing_node(producer)
    return TensorOrigin(
        tensor.source,
        node,
        op,
        convolution=nodes[0] if producer.kind in WEIGHTED else "",
        path=path,
        int8=producer.int8 or producer.int8_out,
        layer_ends=(node_name(producer), nodes[-1]),
        quantizer=(producer.paired_q or node_name(producer)) if is_quantizer else "",
        scale=quantizer_scale(producer) if is_quantizer else None,
        input=_find_converted_input(producer),
    )


def _find_writing_node(layer: Layer) -> tuple[str, str]:
    """Return the ONNX node that writes a layer's output, and its operator.

    For a kernel of several pointwise nodes, this is the last node. Messages name any other layer
    by its first node.
    """
    if layer.kind == LayerKind.POINTWISE and len(layer.nodes) > 1:
        return layer.nodes[-1], layer.acts_as or layer.op
    return node_name(layer), layer.op


def _find_converted_input(layer: Layer) -> str:
    """Return the network input that a Cast and pointwise layers turn into a layer's output.

    Empty without a Cast directly after a network input.
    """
    for _ in range(STEPS):
        source = layer.data.producer if layer.inputs else None
        if layer.op == "Cast" and layer.inputs and source is None:
            return layer.data.source
        if layer.op not in _PIXEL_OPERATORS or source is None:
            break
        layer = source
    return ""


# Layers with weights --------------------------------------------------------------------------


def find_int8_obstacle(layer: Layer, pass_name: str, target: Target) -> Reason | None:
    """Return the reason why a layer with weights cannot run in INT8 or FP8; None if it can."""
    position = weights_position(layer)
    data = dq_before(layer.data)
    weights = dq_before(layer.inputs[position]) if position is not None else None
    if data is None:
        return _explain_float_data(layer, pass_name, weights is not None)
    if weights is None:
        # Name the DQ only if the DQ has moved, or if both operands of the layer are computed.
        # Otherwise the DQ is obvious.
        is_named = data.path.ops or not layer.weights.constant
        dq_name = node_name(data) if is_named else ""
        is_fp8 = data.quant is not None and data.quant.precision == Precision.FP8
        return WeightsNotDequantized(
            pass_name,
            node_name(layer),
            layer.weights.name,
            dq_name,
            tensor_size(layer.data),
            _find_separate_activation(layer),
            is_fp8,
            is_fp8 and not layer.weights.from_matmul and _is_slow_in_fp8(layer),
        )
    obstacles = itertools.chain(
        _find_type_obstacles(layer, pass_name, target, (data, weights)),
        _find_quantizer_obstacles(layer, pass_name, (data, weights)),
    )
    return next(filter(None, obstacles), None)


def _find_separate_activation(layer: Layer) -> str:
    """Return the activation that the layer does not fuse in INT8; empty if there is none.

    An INT8 layer that writes float does not fuse SiLU and similar activations.
    """
    activation = layer.fusion.activation
    if activation is None or q_after(layer.out) is not None:
        return ""
    return activation.op if activation.op in _SEPARATE_ACTIVATIONS else ""


def _explain_float_data(
    layer: Layer, pass_name: str, weights_quantized: bool
) -> InputNotDequantized:
    producer = layer.data.producer
    name, op = layer.data.name, "Input"
    if producer is not None:
        name, op = node_name(producer), producer.op or producer.kind.value
    dq_name, blocker = _find_nearest_dq(layer)
    return InputNotDequantized(
        pass_name,
        node_name(layer),
        layer.data.source,
        name,
        op,
        weights_quantized,
        dq_name,
        blocker,
        tensor_size(layer.out),
    )


def _find_type_obstacles(
    layer: Layer, pass_name: str, target: Target, dqs: tuple[Layer, Layer]
) -> Iterator[Reason | None]:
    node = node_name(layer)
    for dq in dqs:
        yield fault_checks.check_scale_constant(
            pass_name, node, node_name(dq), dq.has_computed_scale
        )
    data, weights = dqs
    types = (_quantized_precision(data), _quantized_precision(weights))
    if Precision.INT4 in types:
        int4 = data if types[0] == Precision.INT4 else weights
        yield UncoveredOperandType(pass_name, node, node_name(int4), Precision.INT4)
    computed_type = _product_type(data)
    if {computed_type, _product_type(weights)} == {"INT8", "FP8"}:
        dq_names = node_name(data), node_name(weights)
        yield fp8.MixedOperands(pass_name, node, dq_names, types, tensor_size(layer.out))
    if computed_type is None or computed_type != _product_type(weights):
        yield OperandTypesDiffer(pass_name, node, node_name(data), node_name(weights), types)
    if target.float16_scales:
        floats = (_output_float_type(data), _output_float_type(weights))
        yield fault_checks.check_float_types(
            pass_name, node, floats, node_name(data), node_name(weights)
        )
    if computed_type == "FP8":
        yield _find_fp8_obstacle(layer, pass_name, target)


def _find_fp8_obstacle(layer: Layer, pass_name: str, target: Target) -> Reason | None:
    node, size = node_name(layer), tensor_size(layer.out)
    if not target.has_fp8:
        return None  # the whole build fails, which a check of the model reports
    if layer.kind == LayerKind.DECONVOLUTION:
        return fp8.FloatFp8Deconvolution(pass_name, node, size)
    if layer.kind == LayerKind.CONVOLUTION and layer.op == "Conv":
        if not target.has_fp8_convolutions:
            capability = target.named_capability if target.needs_hopper_for_fp8 else ""
            return fp8.EarlyFp8Convolution(pass_name, node, target.version_name, size, capability)
        return fault_checks.check_fp8_kernel_size(pass_name, node, layer.weights.kernel, size)
    return None


def _find_quantizer_obstacles(
    layer: Layer, pass_name: str, dqs: tuple[Layer, Layer]
) -> Iterator[Reason | None]:
    node, layer_weights = node_name(layer), layer.weights
    data, weights = dqs
    yield fault_checks.check_activation_per_tensor(pass_name, node, node_name(data), data.quant)
    yield from (
        fault_checks.check_zero_points(pass_name, node, node_name(dq), dq.quant.zero_points)
        for dq in dqs
        # The parser ignores the zero point of an FP8 quantizer.
        if dq.quant is not None and dq.quant.precision != Precision.FP8
    )
    if weights.quant is not None and not layer_weights.from_matmul:
        yield fault_checks.check_weights_axis(
            pass_name,
            node,
            node_name(weights),
            weights.quant,
            weights.quant.axis,
            layer_weights.axis,
            layer_weights.dims,
            layer.kind == LayerKind.DECONVOLUTION,
        )
    if layer.kind != LayerKind.MATRIX_MULTIPLY:
        is_constant = layer_weights.constant or constant_before(weights.data) is not None
        yield fault_checks.check_weights_constant(pass_name, node, layer_weights.name, is_constant)


def _find_nearest_dq(layer: Layer) -> tuple[str, PathStep | None]:
    """Return the nearest DQ upstream of a layer's data, and the operator that stops the DQ.

    The search ends at constants and at layers with weights. ``("", None)`` if it finds no DQ within
    :data:`MAX_TENSORS_BEFORE` tensors.
    """
    blocker: PathStep | None = None
    queue = [layer.data]
    visited = {id(layer.data)}
    for tensor in queue:
        producer = tensor.producer
        if producer is None or len(visited) > MAX_TENSORS_BEFORE:
            continue
        if producer.kind in (LayerKind.CONSTANT, *WEIGHTED):
            continue
        if producer.kind == LayerKind.DEQUANTIZE:
            return node_name(producer), blocker
        if blocker is None and _is_dq_barrier(producer):
            blocker = to_step(producer)
        for source in producer.inputs:
            if id(source) not in visited:
                visited.add(id(source))
                queue.append(source)
    return "", None


def _is_dq_barrier(layer: Layer) -> bool:
    """Return whether a DQ cannot move down past a layer.

    This includes every operator directly after a DQ: the DQ would have moved past the operator if
    neither other consumers nor per-channel scales kept the DQ from moving.
    """
    return (
        layer.passage is None
        or layer.kind == LayerKind.CONCATENATION
        or dq_before(layer.data) is not None
    )


def _output_float_type(dq: Layer) -> Precision:
    """Return the float type of a DQ's output.

    This is the type of the scale. If the DQ has moved past a Cast, it is the Cast's output type.
    """
    has_passed_cast = not _RETYPING_OPERATORS.isdisjoint(dq.path.ops)
    if dq.quant is None or has_passed_cast:
        return precision_of(dq.out.elem_type)
    return precision_of(dq.quant.scale_type)


def _quantized_precision(dq: Layer) -> Precision:
    return dq.quant.precision if dq.quant is not None else Precision.UNKNOWN


def _product_type(dq: Layer) -> str | None:
    """Return the type, ``INT8`` or ``FP8``, in which a consumer of the DQ can multiply.

    None if no convolution computes in the type of the DQ's input, or if the parameters of the DQ
    are unknown. A DQ of unknown type counts as INT8 if it has no zero point.
    """
    if dq.quant is None:
        return None
    precision = dq.quant.precision
    if precision in BYTES:
        return "INT8"
    if precision == Precision.FP8:
        return "FP8"
    is_default = precision == Precision.UNKNOWN and not dq.quant.has_zero_point
    return "INT8" if is_default else None

"""Who reads a tensor and what writes it, past the operators that a Q could pass: what refusals record.

Whether a layer with weights can take in the DQs of its two inputs is decided by them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from qdqtool.base.records import Shared
from qdqtool.model.operators import OPERATORS, LayerKind
from qdqtool.model.qdq import precision_of
from qdqtool.trt import detect, refusals
from qdqtool.trt.layers import (
    QDQ,
    WEIGHTED,
    Layer,
    Tensor,
    constant_before,
    dq_before,
    node_name,
    weights_position,
)
from qdqtool.trt.refusals import STEPS, Origin, Reader, ReaderKind, Scale, Size, Step
from qdqtool.trt.targets import Target
from qdqtool.types import BYTES, Precision, Refusal

_LIMIT = 100  # tensors looked at from one; a block of DenseNet-201 has 48
_BEHIND = 100  # layers looked at behind one
_READERS = 100  # of one tensor that are listed; a network has a dozen
_PATHS = 1200  # steps on the ways to those tensors together; there are 1176 in that block
_STEPS = 400  # on the ways of the Qs among them together; of further ones the last few
_FEW = 4
_RETYPING = frozenset(name for name, known in OPERATORS.items() if known.kind == LayerKind.IDENTITY)
_ELEMENTWISE = (LayerKind.ACTIVATION, LayerKind.POINTWISE)


def quantizer_scale(layer: Layer | None) -> Scale:
    """The scale of a Q or DQ: one number, or one for each channel."""
    return None if layer is None or layer.quant is None else layer.quant.summary


def tensor_size(tensor: Tensor) -> Size | None:
    """How large a tensor is; None where its shape is not known."""
    shape = tensor.shape
    if shape is None and (reader := tensor.single_consumer(LayerKind.SHUFFLE)) is not None:
        shape = reader.out.shape  # behind a matrix product that became a convolution
    if shape is None or any(not d for d in shape[1:]):
        return None
    return Size("x".join(map(str, shape[1:])), math.prod(d or 1 for d in shape))


def to_step(layer: Layer, part: int = -1) -> Step:
    return Step(node_name(layer), layer.op or layer.kind.value.title(), part)


def find_consumers(tensor: Tensor, *, through: bool = True) -> tuple[Reader, ...]:
    """The readers of a tensor, looked for past the operators that a Q could pass.

    Args:
        tensor: The tensor.
        through: False names the direct readers only.

    Returns:
        The readers; where there are too many to list, ``more`` of the tuple names what others are behind.
    """
    more = ""
    found: list[Reader] = []
    left, room = _STEPS, _PATHS
    queue: list[tuple[Tensor, tuple[Step, ...]]] = [(tensor, ())]
    visited: set[int] = {id(tensor)}
    beyond: tuple[Layer, Tensor, tuple[Step, ...]] | None = (
        None  # the first operator behind which nobody looked
    )
    for current, path in queue:
        if len(found) >= _READERS:
            more = more or _place(current, path)
            break
        if len(current.consumers) > _READERS:
            more = more or _place(current, path)
        if current.is_output:
            found.append(Reader(ReaderKind.OUTPUT, current.name, "Output", path))
        for layer in itertools.islice(current.consumers, _READERS):
            if layer.kind == LayerKind.QUANTIZE and layer.data is current:
                scale = quantizer_scale(layer)
                for name, passed in ((node_name(layer), layer.path), *layer.merged_quantizers):
                    steps = passed.latest_steps(max(_FEW, min(left, STEPS)))
                    left -= len(steps)
                    found.append(Reader(ReaderKind.Q, name, layer.op, (*path, *steps), scale))
            elif (
                through
                and layer.passage is not None
                and (layer.data is current or layer.kind == LayerKind.CONCATENATION)
            ):
                if len(visited) > _LIMIT or room <= len(path):
                    beyond = beyond or (layer, current, path)
                    more = more or node_name(layer)
                    continue
                part = layer.inputs.index(current) if layer.kind == LayerKind.CONCATENATION else -1
                for output in layer.outputs:
                    if id(output) not in visited:
                        visited.add(id(output))
                        room -= len(path) + 1
                        queue.append((output, (*path, to_step(layer, part))))
            else:
                found.append(_reader(layer, current, path))
    if len(found) > _READERS:
        more = more or _place(tensor, ())
    if not found and beyond is not None:  # which is called a reader only where no other is known
        found.append(_reader(*beyond))
    return Shared(found[:_READERS], more)


def _place(tensor: Tensor, path: tuple[Step, ...]) -> str:
    """What readers of a tensor are behind: the operator on the way there, or the tensor."""
    return path[-1].node if path else tensor.source


def _reader(layer: Layer, tensor: Tensor, path: tuple[Step, ...]) -> Reader:
    kind = ReaderKind.SUM if is_sum(layer) else ReaderKind.OP
    node, name = node_name(layer), layer.op or layer.kind.value
    if layer.activation_and_add is not None and tensor is not layer.data:
        kind, node, name = ReaderKind.SUM, layer.activation_and_add[1], "Add"
    shares = kind == ReaderKind.SUM and all(map(_has_scale, layer.inputs))
    return Reader(kind, node, name, path, None, _feeds_weighted(layer), _gains(layer), shares)


def _has_scale(tensor: Tensor) -> bool:
    """Whether a DQ right there makes a tensor, or a Q with one scale reads it right there."""
    dq = dq_before(tensor)
    return (dq is not None and not dq.path.ops) or any(
        q.kind == LayerKind.QUANTIZE
        and isinstance(quantizer_scale(q), float)
        and any(not way.ops for way in (q.path, *(way for _, way in q.merged_quantizers)))
        for q in tensor.consumers
    )


def is_sum(layer: Layer) -> bool:
    """Whether a layer adds two computed tensors."""
    return layer.operation == "SUM" and sum(not constant_before(t) for t in layer.inputs) > 1


def _gains(layer: Layer) -> bool:
    """Whether Q/DQ in front of a layer that reads float pays: it has INT8 kernels, and its result is wanted in INT8.

    That is a convolution (or the like) with constant weights and another behind it; a sum or an average where all that
    reads its result, past activations, other sums and what a Q passes, are Qs.
    """
    if layer.kind in WEIGHTED:
        return (
            layer.weights.constant or any(map(dq_before, layer.inputs[1:]))
        ) and _leads_to_weights(layer)
    if not (
        layer.activation_and_add is not None
        or _averages(layer)
        or (is_sum(layer) and any(map(_taken, layer.inputs)))
    ):
        return False
    queue, seen, found = [layer], {layer.id}, False
    for current in queue:
        for tensor in current.outputs:
            if tensor.is_output:
                return False
            for reader in tensor.consumers:
                if reader.kind == LayerKind.QUANTIZE:
                    found = True
                elif reader.id not in seen:
                    if not (
                        reader.operation == "SUM"
                        or reader.kind in _ELEMENTWISE
                        or reader.passage is not None
                        or _averages(reader)
                    ):
                        return False
                    seen.add(reader.id)
                    queue.append(reader)
        if len(seen) > _BEHIND:
            return True
    return found


def _taken(tensor: Tensor) -> bool:
    """Whether a sum can read a tensor in INT8, or be part of the convolution that writes it for the sum alone."""
    return dq_before(tensor) is not None or bool(
        tensor.producer_of_kind(*WEIGHTED) and tensor.single_consumer()
    )


def _averages(layer: Layer) -> bool:
    return "AVERAGE" in (layer.possible_pooling, layer.pooling_type)


def _feeds_weighted(layer: Layer) -> bool:
    """Whether it is a quantized convolution, or a convolution lies behind it (YOLO's DFL does not count)."""
    return any(map(dq_before, layer.inputs)) if layer.kind in WEIGHTED else _leads_to_weights(layer)


def _leads_to_weights(layer: Layer) -> bool:
    queue, seen = [layer], {layer.id}
    for current in queue:
        for reader in [
            r for tensor in current.outputs for r in tensor.consumers if r.id not in seen
        ]:
            if reader.kind in WEIGHTED and not reader.weights.dfl:
                return True
            if reader.id not in seen:
                seen.add(reader.id)
                queue.append(reader)
        if len(seen) > _BEHIND:
            return True
    return False


def explain_float_output(
    layer: Layer, by: str
) -> refusals.OutputNotQuantized | refusals.OutputDifferentScales | refusals.OutputManyConsumers:
    """Why a layer writes float, judged by everything that reads its result."""
    readers = find_consumers(layer.out)
    told = (by, node_name(layer), layer.out.source, readers, tensor_size(layer.out))
    quantizers = [r for r in readers if r.kind == ReaderKind.Q]
    if quantizers and len(quantizers) < len(readers):
        return refusals.OutputManyConsumers(*told)
    return check_output_scales(*told) or refusals.OutputNotQuantized(*told, layer.fusion.activation)


def check_output_scales(
    by: str, node: str, tensor: str, readers: tuple[Reader, ...], size: Size | None
) -> refusals.OutputDifferentScales | None:
    """Whether Qs of different scales read a result, and nothing else does."""
    if not have_different_scales(readers) or any(r.kind != ReaderKind.Q for r in readers):
        return None
    return refusals.OutputDifferentScales(by, node, tensor, readers, size)


def check_equal_scales(
    by: str, node: str, tensor: Tensor, quantizers: Sequence[Layer]
) -> refusals.ScalesDiffer | None:
    """Whether quantizers in a row, or on one tensor, quantize differently, as far as is known."""
    keys = {None if q.quant is None else q.quant.key for q in quantizers}
    if len(quantizers) < 2 or (len(keys) == 1 and None not in keys):
        return None
    names = tuple(map(node_name, quantizers))
    return refusals.ScalesDiffer(
        by, node, tensor.source, names, tuple(map(quantizer_scale, quantizers))
    )


def have_different_scales(quantizers: Sequence[Reader]) -> bool:
    """Whether Qs have different scales; one that is not known differs from any other."""
    scales = {r.scale for r in quantizers}
    return len(quantizers) > 1 and (len(scales) > 1 or None in scales)


def find_origin(tensor: Tensor) -> Origin:
    """What writes a tensor, looked for up past at most :data:`STEPS` operators that a Q could pass, but no Concat."""
    path: list[Step] = []
    maker = tensor.producer
    for _ in range(STEPS):
        if (
            maker is None
            or not maker.inputs
            or maker.passage is None
            or maker.kind == LayerKind.CONCATENATION
        ):
            break
        path.append(to_step(maker))
        tensor = maker.data
        maker = tensor.producer
    if maker is None:
        return Origin(tensor.source, "", "Input", path=tuple(path))
    convolution = next(iter(maker.nodes), "") if maker.kind in WEIGHTED else ""
    quantizer = ""
    if maker.kind in QDQ:
        quantizer = maker.paired_q or node_name(maker)
    return Origin(
        tensor.source,
        node_name(maker),
        maker.op,
        convolution,
        tuple(path),
        maker.int8 or maker.int8_out,
        maker.nodes[-1] if maker.nodes else "",
        quantizer,
        quantizer_scale(maker) if quantizer else None,
    )


def find_weighted_consumers(tensor: Tensor) -> tuple[str, ...]:
    """The convolutions (and other layers with weights) whose data a tensor is, through DQs and what a Q could pass."""
    found: dict[str, None] = {}
    queue, visited = [tensor], {id(tensor)}
    for current in queue:
        for layer in current.consumers:
            if layer.kind in WEIGHTED and layer.data is current:
                found[node_name(layer)] = None
            elif (layer.passage is not None or layer.kind == LayerKind.DEQUANTIZE) and len(
                visited
            ) <= _LIMIT:
                new = [o for o in layer.outputs if id(o) not in visited]
                visited.update(map(id, new))
                queue.extend(new)
    return tuple(found)


_HOPS = 40  # layers looked at above a convolution for the DQ that does not reach it


def find_int8_obstacle(layer: Layer, by: str, target: Target) -> Refusal | None:
    """Why a weighted layer cannot run in INT8; None when it can.

    Args:
        layer: A convolution, deconvolution or matrix product.
        by: The pass that asks.
        target: Where it would run.
    """
    node = node_name(layer)
    position = weights_position(layer)
    data = dq_before(layer.data)
    weights = dq_before(layer.inputs[position]) if position is not None else None
    if data is None:
        producer = layer.data.producer
        return refusals.InputNotDequantized(
            by,
            node,
            layer.data.source,
            node_name(producer) if producer else layer.data.name,
            (producer.op or producer.kind.value) if producer else "Input",
            weights is not None,
            *_nearest_dq(layer),
            tensor_size(layer.out),
        )
    if position is None or weights is None:
        # A DQ right in front needs no name; of two computed operands it tells which one is quantized.
        named = node_name(data) if data.path.ops or not layer.weights.constant else ""
        return refusals.WeightsNotDequantized(
            by, node, layer.weights.name, named, tensor_size(layer.data)
        )
    for dq in (data, weights):
        if (
            computed := detect.scale_computed(by, node, node_name(dq), dq.has_computed_scale)
        ) is not None:
            return computed
    types = (_precision(data), _precision(weights))
    if Precision.INT4 in types:
        outside = data if types[0] == Precision.INT4 else weights
        return refusals.OutsideRules(by, node, node_name(outside), Precision.INT4)
    kind = _kind(data)
    if kind is None or kind != _kind(weights):
        return refusals.TypesDiffer(by, node, node_name(data), node_name(weights), types)
    if target.float16_scales:
        floats = (_float(data), _float(weights))
        mixed = detect.float_types_differ(by, node, floats, node_name(data), node_name(weights))
        if mixed is not None:
            return mixed
    return next(filter(None, _of_quantizers(layer, by, data, weights)), None)


def _of_quantizers(layer: Layer, by: str, data: Layer, weights: Layer) -> Iterator[Refusal | None]:
    """What is wrong with the DQs of a layer's data and weights, of types that it can multiply."""
    node, known = node_name(layer), layer.weights
    yield detect.activation_per_channel(by, node, node_name(data), data.quant)
    for dq in (data, weights):
        if dq.quant is not None:
            yield detect.nonzero_zero_point(by, node, node_name(dq), dq.quant.zero_points)
    if weights.quant is not None and not known.from_matmul:
        yield detect.weights_axis(
            by,
            node,
            node_name(weights),
            weights.quant,
            weights.quant.axis,
            known.axis,
            known.dims,
            layer.kind == LayerKind.DECONVOLUTION,
        )
    if layer.kind != LayerKind.MATRIX_MULTIPLY:
        constant = known.constant or constant_before(weights.data) is not None
        yield detect.weights_not_constant(by, node, known.name, constant)


def _nearest_dq(layer: Layer) -> tuple[str, Step | None]:
    """The first DQ above a layer's data input, and the first operator between that a DQ cannot pass."""
    blocker: Step | None = None
    queue = [layer.data]
    seen = {id(layer.data)}
    for tensor in queue:
        above = tensor.producer
        if above is None or len(seen) > _HOPS or above.kind in (LayerKind.CONSTANT, *WEIGHTED):
            continue
        if above.kind == LayerKind.DEQUANTIZE:
            return node_name(above), blocker
        visible = above.passage is None or above.kind == LayerKind.CONCATENATION
        # A DQ still in front of what DQs pass stays there: it has other readers, or a scale for each channel.
        if blocker is None and (visible or dq_before(above.data) is not None):
            blocker = to_step(above)
        for source in above.inputs:
            if id(source) not in seen:
                seen.add(id(source))
                queue.append(source)
    return "", None


def _float(dq: Layer) -> Precision:
    """The float type that a DQ gives its reader: that of its scale, or of the Cast that it moved down past."""
    if dq.quant is None or not _RETYPING.isdisjoint(dq.path.ops):
        return precision_of(dq.out.elem_type)
    return precision_of(dq.quant.scale_type)


def _precision(dq: Layer) -> Precision:
    return dq.quant.precision if dq.quant is not None else Precision.UNKNOWN


def _kind(dq: Layer) -> str | None:
    """``INT8`` or ``FP8``, the types that both inputs must share; None for a type that no convolution computes in."""
    quant = dq.quant
    if quant is None or quant.precision in BYTES:
        return None if quant is None else "INT8"
    if quant.precision == Precision.FP8:
        return "FP8"
    return "INT8" if quant.precision == Precision.UNKNOWN and not quant.has_zero_point else None

"""Who reads a tensor and what writes it, past the operators that a Q could pass: what refusals record."""

from __future__ import annotations

import math

from qdqtool.operators import LayerKind
from qdqtool.trt.network import WEIGHTED, Layer, Tensor
from qdqtool.trt.passes._infra import node_name
from qdqtool.trt.refusals import Origin, Reader, ReaderKind, Scale, Step

_LIMIT = 400  # tensors looked at from one


def scale_of(layer: Layer | None) -> Scale:
    """The scale of a Q or DQ: one number, or one for each channel."""
    if layer is None or layer.quant is None or layer.quant.scale is None:
        return None
    values = layer.quant.scale
    return float(values[0]) if values.size == 1 else tuple(values.tolist())


def elements(tensor: Tensor) -> int | None:
    """Number of elements of a tensor, an unknown batch counted as 1; None where its shape is not known."""
    shape = tensor.shape
    if shape is None or any(not d for d in shape[1:]):
        return None
    return math.prod(d or 1 for d in shape)


def step_of(layer: Layer, part: int = -1) -> Step:
    return Step(node_name(layer), layer.op or layer.kind.value.title(), part)


def readers_of(tensor: Tensor, *, through: bool = True) -> tuple[Reader, ...]:
    """The readers of a tensor, looked for past the operators that a Q could pass.

    Args:
        tensor: The tensor.
        through: False names the direct readers only.
    """
    found: list[Reader] = []
    queue: list[tuple[Tensor, tuple[Step, ...]]] = [(tensor, ())]
    visited: set[int] = {id(tensor)}
    for current, path in queue:
        if current.is_output:
            found.append(Reader(ReaderKind.OUTPUT, current.name, "Output", path))
        for layer in current.consumers:
            if layer.kind == LayerKind.QUANTIZE and layer.data is current:
                way = (*path, *reversed(layer.passed))
                found.append(Reader(ReaderKind.Q, node_name(layer), layer.op, way, scale_of(layer)))
            elif through and layer.passage is not None and len(visited) <= _LIMIT and _data_of(layer, current):
                part = layer.inputs.index(current) if layer.kind == LayerKind.CONCATENATION else -1
                for output in layer.outputs:
                    if id(output) not in visited:
                        visited.add(id(output))
                        queue.append((output, (*path, step_of(layer, part))))
            else:
                found.append(_reader(layer, path))
    return tuple(found)


def _data_of(layer: Layer, tensor: Tensor) -> bool:
    return layer.kind == LayerKind.CONCATENATION or layer.data is tensor


def _reader(layer: Layer, path: tuple[Step, ...]) -> Reader:
    sums = layer.operation == "SUM" and sum(not _constant(t) for t in layer.inputs) > 1
    kind = ReaderKind.SUM if sums else ReaderKind.OP
    return Reader(kind, node_name(layer), layer.op or layer.kind.value, path)


def _constant(tensor: Tensor) -> bool:
    return tensor.producer is not None and tensor.producer.kind == LayerKind.CONSTANT


def origin_of(tensor: Tensor) -> Origin:
    """What writes a tensor, looked for up past the operators that a Q could pass; it ends at a Concat."""
    path: list[Step] = []
    maker = tensor.producer
    while maker is not None and maker.passage is not None and maker.kind != LayerKind.CONCATENATION:
        path.append(step_of(maker))
        tensor = maker.data
        maker = tensor.producer
    if maker is None:
        return Origin(tensor.source, "", "Input", path=tuple(path))
    convolution = next(iter(maker.nodes), "") if maker.kind in WEIGHTED else ""
    quantizer = ""
    if maker.kind in (LayerKind.DEQUANTIZE, LayerKind.QUANTIZE):
        q = maker.data.producer
        quantizer = node_name(q if q is not None and q.kind == LayerKind.QUANTIZE else maker)
    return Origin(
        tensor.source, node_name(maker), maker.op, convolution, tuple(path), maker.int8 or maker.int8_out, quantizer,
        scale_of(maker) if quantizer else None,
    )

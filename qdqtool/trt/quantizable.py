"""Whether a layer with weights can take in the DQs of its two inputs, and the refusal where it cannot."""

from __future__ import annotations

import numpy as np

from qdqtool.model.operators import OPERATORS, LayerKind
from qdqtool.model.qdq import precision_of
from qdqtool.trt.layers import Layer
from qdqtool.trt.passes._infra import constant_of, dq_of, node_name, weights_position
from qdqtool.trt.provenance import Step
from qdqtool.trt.refusals import (
    ActivationPerChannel,
    FloatTypesDiffer,
    InputNotDequantized,
    NonzeroZeroPoint,
    OutsideRules,
    ScaleComputed,
    TypesDiffer,
    WeightsAxis,
    WeightsNotConstant,
    WeightsNotDequantized,
)
from qdqtool.trt.surroundings import elements, step_of
from qdqtool.trt.targets import Target
from qdqtool.types import Precision, Refusal

_HOPS = 40  # layers looked at above a convolution for the DQ that does not reach it


def refusal_of(layer: Layer, by: str, target: Target) -> Refusal | None:
    """Why a weighted layer cannot run in INT8; None when it can.

    Args:
        layer: A convolution, deconvolution or matrix product.
        by: The pass that asks.
        target: Where it would run.
    """
    node = node_name(layer)
    position = weights_position(layer)
    data = dq_of(layer.data)
    weights = dq_of(layer.inputs[position]) if position is not None else None
    if data is None:
        return _no_dq(layer, by, node, weights is not None)
    if position is None or weights is None:
        return WeightsNotDequantized(by, node, layer.weights.name, node_name(data), elements(layer.data))
    for dq in (data, weights):
        if dq.computed_scale:
            return ScaleComputed(by, node, node_name(dq))
    outside = next((dq for dq in (data, weights) if _precision(dq) == Precision.INT4), None)
    if outside is not None:
        return OutsideRules(by, node, node_name(outside), _precision(outside))
    kinds = [_kind(dq) for dq in (data, weights)]
    if None in kinds or kinds[0] != kinds[1]:
        types = (_precision(data), _precision(weights))
        return TypesDiffer(by, node, node_name(data), node_name(weights), types)
    floats = (_float(data), _float(weights))
    if target.float16_scales and floats[0] != floats[1] and Precision.UNKNOWN not in floats:
        return FloatTypesDiffer(by, node, node_name(data), node_name(weights), floats)
    if data.quant is not None and data.quant.per_channel:
        scales = data.quant.scales
        return ActivationPerChannel(by, node, node_name(data), None if scales is None else scales.summary)
    for dq in (data, weights):
        zero = dq.quant.zero_point if dq.quant is not None else None
        if zero is not None and np.any(zero):
            return NonzeroZeroPoint(by, node, node_name(dq), (int(zero.min()), int(zero.max())))
    known = layer.weights
    if weights.quant is not None and weights.quant.axis is not None and not known.from_matmul:
        rank = len(known.dims) or 4
        if weights.quant.axis % rank != known.axis:
            transposed = layer.kind == LayerKind.DECONVOLUTION
            return WeightsAxis(by, node, node_name(weights), weights.quant.axis, known.axis, transposed)
    if not known.constant and layer.kind != LayerKind.MATRIX_MULTIPLY and constant_of(weights.data) is None:
        return WeightsNotConstant(by, node, known.name)
    return None


def _no_dq(layer: Layer, by: str, node: str, weights_quantized: bool) -> Refusal:
    producer = layer.data.producer
    dq, blocker = _nearest_dq(layer)
    return InputNotDequantized(
        by, node, layer.data.source, node_name(producer) if producer else layer.data.name,
        (producer.op or producer.kind.value) if producer else "Input", weights_quantized, dq, blocker,
        elements(layer.out),
    )


def _nearest_dq(layer: Layer) -> tuple[str, Step | None]:
    """The first DQ above a layer's data input, and the first operator between that a DQ cannot pass."""
    blocker: Step | None = None
    queue = [layer.data]
    seen = {id(layer.data)}
    for tensor in queue:
        above = tensor.producer
        if above is None or len(seen) > _HOPS or above.kind == LayerKind.CONSTANT:
            continue
        if above.kind == LayerKind.DEQUANTIZE:
            return node_name(above), blocker
        if above.kind in (LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION, LayerKind.MATRIX_MULTIPLY):
            continue
        visible = above.passage is None or above.kind == LayerKind.CONCATENATION
        # A DQ still in front of what DQs pass stays there: it has other readers, or a scale for each channel.
        if blocker is None and (visible or dq_of(above.data) is not None):
            blocker = step_of(above)
        for source in above.inputs:
            if id(source) not in seen:
                seen.add(id(source))
                queue.append(source)
    return "", None


def _float(dq: Layer) -> Precision:
    """The float type that a DQ gives its reader: that of its scale, or of the Cast that it moved down past."""
    known = (OPERATORS.get(op) for op in dq.passed.ops)
    if dq.quant is None or any(op is not None and op.kind == LayerKind.IDENTITY for op in known):
        return precision_of(dq.out.elem_type)
    return precision_of(dq.quant.scale_type)


def _precision(dq: Layer) -> Precision:
    return dq.quant.precision if dq.quant is not None else Precision.UNKNOWN


def _kind(dq: Layer) -> str | None:
    """``INT8`` or ``FP8``, the types that both inputs must share; None for a type that no convolution computes in."""
    quant = dq.quant
    if quant is None or quant.precision == Precision.FP8:
        return None if quant is None else "FP8"
    known = quant.precision in (Precision.INT8, Precision.UINT8)
    return "INT8" if known or (quant.precision == Precision.UNKNOWN and not quant.has_zero_point) else None

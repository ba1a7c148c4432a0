"""The work of the layers of a built engine, from its listing (layer JSON, or the layers of a log)."""

from __future__ import annotations

import math

from qdqtool.buildlog.layers import int_list
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor
from qdqtool.engine.costs import LayerCost
from qdqtool.timing import work
from qdqtool.timing.work import Work, width
from qdqtool.types import Precision


def work_of(cost: LayerCost) -> Work | None:
    """The work of a built layer; None where its shapes are not known."""
    layer = cost.layer
    kind = _kind(layer)
    if kind == work.NOTHING:
        return Work(kind)
    if cost.input_bytes is None or cost.output_bytes is None or not layer.outputs or not layer.inputs:
        return None
    source = _dims(layer.inputs)
    result = Work(
        kind, _single(layer.input_precision), _single(layer.output_precision),
        channels=float(source[1]) if source and len(source) > 2 else 64.0, read=float(cost.input_bytes),
        weights=float(cost.weight_bytes or 0), written=float(cost.output_bytes),
    )  # fmt: skip
    if kind not in work.COMPUTING:
        return result
    return _convolution(cost, result)


def _single(precision: Precision) -> Precision:
    return Precision.FP32 if precision == Precision.FLOAT else precision


def _kind(layer: BuiltLayer) -> str:
    name = layer.type.lower()
    if name in ("noop", "constant", "signal", "wait"):
        return work.NOTHING
    if layer.kind == "conversion":
        return work.CONVERSION
    if name in ("reformat", "copy"):
        return work.REFORMAT if layer.fused().kind.startswith("reformat") else work.COPY
    if layer.is_deconvolution:
        return work.DECONV
    if layer.is_convolution or "gemm" in name or "matrixmultiply" in name or "fullyconnected" in name:
        return work.CONV
    for word, kind in (
        ("pool", work.POOL),
        ("softmax", work.SOFTMAX),
        ("resize", work.RESIZE),
        ("reduce", work.REDUCE),
        ("shuffle", work.SHUFFLE),
        ("pointwise", work.POINTWISE),
        ("elementwise", work.POINTWISE),
        ("scale", work.POINTWISE),
        ("activation", work.POINTWISE),
        ("unary", work.POINTWISE),
        ("slice", work.COPY),
        ("concat", work.COPY),
        ("myelin", work.MYELIN),
    ):
        if word in name:
            return kind
    return work.UNKNOWN


def _convolution(cost: LayerCost, result: Work) -> Work | None:
    layer = cost.layer
    source, target = _dims(layer.inputs), _dims(layer.outputs)
    if source is None or target is None or len(target) < 2 or not cost.macs:
        return None
    groups = layer.extras.get("Groups", 1)
    groups = groups if isinstance(groups, int) and groups > 0 else 1
    columns = sum(d[1] for d in (_dims([t]) for t in layer.outputs) if d is not None and len(d) > 1) or target[1]
    columns = max(1, columns // groups)
    if len(target) == 2:
        rows: float = target[0]
        depth: float = cost.macs / (rows * columns)
        channels: float = source[1]
    else:
        kernel = int_list(layer.extras.get("Kernel", layer.extras.get("ConvKernel")), 1)
        channels = max(1, source[1] // groups)
        depth = channels * math.prod(kernel) if kernel else cost.macs / (target[0] * math.prod(target[2:]) * columns)
        rows = cost.macs / (columns * groups * depth)
    count = math.prod(source)
    skipped = (count - work.touched(count, rows, depth, groups)) * width(result.precision)
    kind = work.DEPTHWISE if groups > 1 and columns * channels <= 16 else result.kind
    return Work(
        kind, result.precision, result.written_as, rows, float(columns), depth, float(channels), float(groups),
        max(0.0, result.read - skipped), result.weights or columns * groups * depth * width(result.precision),
        result.written,
    )  # fmt: skip


def _dims(tensors: list[BuiltTensor]) -> list[int] | None:
    if not tensors or tensors[0].shape is None or any(d is None for d in tensors[0].shape):
        return None
    shape = [d for d in tensors[0].shape if d is not None]
    return shape[1:] if len(shape) == 5 and shape[0] == 1 else shape

"""Static checks of every QuantizeLinear and DequantizeLinear: types, scales, zero points, axes, opset."""

from __future__ import annotations

import math

import numpy as np
import onnx

from qdqtool import qdq
from qdqtool.explain.report import Report, number, scale_text
from qdqtool.graph import Node
from qdqtool.onnxgraph.view import View
from qdqtool.qdq import QuantParams
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision

_WIDE: dict[int, str] = {
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.FLOAT8E5M2: "FP8 E5M2",
}


def run(view: View, report: Report) -> None:
    """Adds the findings about quantizers."""
    for node in view.quantizers:
        if _is_bias(view, node) or _repeats(view, node):
            continue  # judged with its convolution, or with its Q
        params = view.params(node)
        first = len(report.findings)
        _zero_point(view, report, node, params)
        _scale(view, report, node, params)
        _axis(view, report, node, params)
        for finding in report.findings[first:]:
            report.concerns(finding, view.convolutions_behind(node))


def _is_bias(view: View, node: Node) -> bool:
    return qdq.is_dq(node) and view.model.elem_type(node.input(0)) == onnx.TensorProto.INT32 and view.is_weight(node)


def _repeats(view: View, node: Node) -> bool:
    """Whether a DQ only says again what its Q says."""
    if not qdq.is_dq(node):
        return False
    q = view.model.producer(node.input(0))
    if q is None or not qdq.is_q(q):
        return False
    if q.inputs[1:] == node.inputs[1:]:
        return True
    first, params = view.params(q), view.params(node)
    return (
        first.has_zero_point == params.has_zero_point
        and first.scale_shape == params.scale_shape
        and first.same_as(params) is True
    )


def _zero_point(view: View, report: Report, node: Node, params: QuantParams) -> None:
    name = node.name
    wide = _WIDE.get(view.model.elem_type(node.input(2))) if params.has_zero_point else None
    if wide:
        report.add("QTYPE", name, f"{name} quantizes to {wide}, which TensorRT does not have.")
        return
    values = params.zero_point
    if values is not None and values.size and np.any(values != 0):
        told = str(int(values[0])) if values.size == 1 else f"{values.min()} to {values.max()}"
        kind = "uint8 " if params.precision == Precision.UINT8 else ""
        report.add("ZP-NONZERO", name, f"{name} has {kind}zero point {told}; TensorRT wants 0.")
    elif params.precision == Precision.UINT8 and not _reads_int8(view, node):
        missing = "" if params.has_zero_point else " (it has no zero point, which means uint8 in ONNX)"
        report.add(
            "ZP-UINT8", name,
            f"{name} quantizes to uint8{missing}: TensorRT reads int8 and cuts off everything above "
            f"127 x {scale_text(params)}.",
        )
    if not params.has_zero_point:
        report.add("DQ-3-INPUTS", name, f"{name} ({node.op}) has no zero-point input.")
    elif values is not None and params.scale_shape is not None:
        count = math.prod(params.scale_shape)
        if values.size != count:
            report.add("ZP-VOLUME", name, f"{name} has {count} scales and {values.size} zero points.")


def _reads_int8(view: View, node: Node) -> bool:
    """A DQ without zero point takes the type of what it reads."""
    maker = view.model.producer(node.input(0))
    return qdq.is_dq(node) and not node.input(2) and maker is not None and qdq.is_q(maker)


def _scale(view: View, report: Report, node: Node, params: QuantParams) -> None:
    name, scale = node.name, params.scale
    if node.input(1) not in view.constants:
        report.add("SCALE-DYNAMIC", name, f"{name} takes its scale '{node.input(1)}' from the running network.")
        return
    if params.scale_type == onnx.TensorProto.FLOAT16:
        report.add("SCALE-FP16", name, f"{name} has float16 scales ({scale_text(params)}), all read as float32.")
    if scale is not None and scale.size:
        bad = ~(scale > 0) | ~np.isfinite(scale)
        if bad.any():
            which = ""
            if scale.size > 1:
                channels = ", ".join(str(i) for i in np.flatnonzero(bad)[:5])
                which = f" in {int(bad.sum())} of {scale.size} channels ({channels}{' ...' if bad.sum() > 5 else ''})"
            report.add("SCALE-NONPOS", name, f"{name} has scale {number(float(scale[bad][0]))}{which}.")
    shape = params.scale_shape
    blocks = target_named(report.target).blocked_scales
    if shape is not None and len(shape) > 1 and (math.prod(shape) != 1 or not blocks):
        blocked = node.integer("block_size", 0) > 0
        report.add(
            "SCALE-RANK", name,
            f"{name} has {'blocked ' if blocked else ''}scales of shape {list(shape)}; a scalar or a vector is wanted.",
        )
    if shape == (1,) and not view.is_weight(node) and qdq.is_q(node):
        report.add(
            "SCALE-SHAPE1", name, f"{name} has a scale of shape [1]: taken as per-channel, what reads it stays float."
        )


def _axis(view: View, report: Report, node: Node, params: QuantParams) -> None:
    if not params.per_channel or (params.scale_shape is not None and len(params.scale_shape) > 1):
        return
    name = node.name
    if view.model.opset < 13:
        report.add(
            "OPSET-AXIS", name,
            f"{name} is per-channel in opset {view.model.opset}, "
            + ("with an attribute axis that this opset does not have." if params.axis_given else "without an axis."),
        )
    if not view.is_weight(node):
        if qdq.is_q(node):
            count = 0 if params.scale is None else params.scale.size
            told = f"{count} scales, {scale_text(params)}" if count else "one scale for each channel"
            report.add("ACT-PER-CHANNEL", name, f"{name} quantizes an activation per channel ({told}).")
        return
    shape = view.model.constant_shape(node.input(0))
    axis = view.axis(node) or 0
    count = math.prod(params.scale_shape) if params.scale_shape is not None else 0
    if shape and count and -len(shape) <= axis < len(shape) and shape[axis] != count:
        report.add(
            "SCALE-COUNT", name,
            f"{name} has {count} scales for axis {axis} of weights {list(shape)}, which is {shape[axis]} long.",
        )


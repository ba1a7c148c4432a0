"""Checks of types, scales, zero points and axes of all quantizers."""

import math
from collections.abc import Container, Iterator

import numpy as np
import onnx

from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.constants import find_computed_parameters
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import PIXEL_FACTOR
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.ir.qdq import ParameterValues, QuantParams
from qdqtool.patterns.view import AXIS_OPSET, View
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.quantizers import (
    AxisOpset,
    ParameterIndirect,
    UnsignedZeroPoint,
    UnsupportedQuantizedType,
    ZeroPointMissing,
)
from qdqtool.reasons.scales import Float16Scale, PairScalesDiffer
from qdqtool.trt import fault_checks
from qdqtool.trt.targets import target_named

_SUPPORTED = (*BYTES, Precision.INT4, Precision.FP8)
_UNSUPPORTED_FP8: dict[int, str] = {
    onnx.TensorProto.FLOAT8E5M2: "FP8 E5M2",
    onnx.TensorProto.FLOAT8E5M2FNUZ: "FP8 E5M2 FNUZ",
    onnx.TensorProto.FLOAT8E4M3FNUZ: "FP8 E4M3 FNUZ",
}
_HALF = onnx.TensorProto.FLOAT16
_INT32 = onnx.TensorProto.INT32
# Maximum relative difference between the scales of a Q and its DQ: twice the difference that
# rounding to float16 causes.
_SCALE_TOLERANCE = 1e-3
# Default factor by which `insert --input-type uint8` divides the scale of the first Q.
_PIXEL_FACTOR = 1 / 255


def run(view: View, report: FindingReport) -> None:
    """Add the findings on quantizers, those of activations first."""
    _check_pairs(view, report)
    clean: set[tuple[str, ...] | None] = set()
    limit = fault_checks.find_implausible_limit(_list_activation_scales(view))
    for node in sorted(view.quantizers, key=view.is_weight):
        if qdq.is_dq(node) and (_repeats_its_quantizer(view, node) or _reads_bias(view, node)):
            continue  # checked with the Q before it, or with the convolution of the bias
        params = view.params(node)
        shared = node.inputs[1:] if _depends_on_parameters(node, params) else None
        if shared in clean:
            continue
        faults_of_node = [
            *_find_zero_point_faults(view, node, params),
            *_find_scale_faults(view, report.target, node, limit),
            *_find_axis_faults(view, node, params),
        ]
        for fault in filter(None, faults_of_node):
            report.add(fault, convolutions=view.consuming_convolutions(node))
        if shared is not None and not any(faults_of_node):
            clean.add(shared)


def _list_activation_scales(view: View) -> set[float]:
    nodes = (node for node in view.quantizers if not view.is_weight(node))
    unique = {id(s): s for node in nodes if (s := view.params(node).scales) is not None}
    return {value for scales in unique.values() for value in scales.values.reshape(-1).tolist()}


def _check_pairs(view: View, report: FindingReport) -> None:
    """Add a finding for each DQ whose scale differs from that of its Q, if both are positive.

    The scales of a uint8 input may differ by the factor of the preprocessing.
    """
    for dq in filter(qdq.is_dq, view.quantizers):
        q = view.model.producer(dq.input(0))
        if q is None or not qdq.is_q(q) or q.inputs[1:] == dq.inputs[1:]:
            continue
        first, second = view.params(q), view.params(dq)
        if first.scales is None or second.scales is None:
            continue
        if not (first.scales.is_positive and second.scales.is_positive):
            continue
        if not _are_close_scales(first.scales, second.scales) and not _converts_pixels(view, q, dq):
            scales = (first.scales.summary, second.scales.summary)
            fault = PairScalesDiffer(MODEL_CHECK, dq.name, q.name, scales)
            report.add(fault, convolutions=view.consuming_convolutions(dq))


def _converts_pixels(view: View, q: Node, dq: Node) -> bool:
    """Return whether the scales of a pair differ by the preprocessing factor of a uint8 input."""
    if not view.quantizes_uint8_input(q):
        return False
    first, second = (view.params(node).scales for node in (q, dq))
    if first is None or second is None or first.values.size != second.values.size:
        return False
    ratios = second.values / first.values
    factor = _read_pixel_factor(view.model)
    return bool(np.allclose(ratios, factor, rtol=2 * _SCALE_TOLERANCE, atol=0))


def _read_pixel_factor(model: Model) -> float:
    """Return the preprocessing factor that `insert` recorded; 1/255 without a record."""
    try:
        return float(model.metadata[PIXEL_FACTOR])
    except (KeyError, ValueError):
        return _PIXEL_FACTOR


def _are_close_scales(first: ParameterValues, second: ParameterValues) -> bool:
    a, b = first.values, second.values
    return a.size == b.size and bool(np.allclose(a, b, rtol=_SCALE_TOLERANCE, atol=0))


def check_parameters(model: Model, view: View, report: FindingReport) -> None:
    """Add findings on scales and zero points that nodes compute from constants.

    Args:
        model: The model.
        view: The same model with folded constants.
        report: Report to which the findings are added.
    """
    folds = report.tensorrt.folds_identities
    misread = list(fault_checks.check_misread_constants(MODEL_CHECK, model, folds))
    for fault in misread:
        if fault.quantizer:
            report.add(fault, convolutions=_consuming_convolutions(view, fault.quantizer))
    _check_computed_parameters(model, view, report, {fault.quantizer for fault in misread})


def _depends_on_parameters(node: Node, params: QuantParams) -> bool:
    """Return whether the faults of a node depend only on its scale and zero point.

    This is true for a Q with one scale, a zero point and no attributes.
    """
    is_plain = not (params.is_per_channel or node.attributes)
    return qdq.is_q(node) and is_plain and params.has_zero_point


def _check_computed_parameters(
    model: Model, view: View, report: FindingReport, reported: Container[str]
) -> None:
    for tensor, nodes in find_computed_parameters(model).items():
        is_scale = tensor == nodes[0].input(1)
        producer = model.producer(tensor)
        if producer is None or (not is_scale and nodes[0].name in reported):
            continue
        indirect = ParameterIndirect(
            MODEL_CHECK,
            nodes[0].name,
            "scale" if is_scale else "zero point",
            tensor,
            producer.op,
            producer.name,
            len({node.name for node in nodes}) - 1,
        )
        affected = [c for node in nodes for c in _consuming_convolutions(view, node.name)]
        report.add(indirect, convolutions=affected)


def _consuming_convolutions(view: View, quantizer: str) -> list[str]:
    return view.consuming_convolutions(view.model.node(quantizer))


def _repeats_its_quantizer(view: View, node: Node) -> bool:
    """Return whether a DQ has the scale and zero point of the Q before it."""
    q = view.model.producer(node.input(0))
    if q is None or not qdq.is_q(q):
        return False
    if q.inputs[1:] == node.inputs[1:]:
        return True
    first, params = view.params(q), view.params(node)
    return (
        first.has_zero_point == params.has_zero_point
        and first.scale_shape == params.scale_shape
        and (first.same_as(params) is True or _are_equal_bytes(first.scales, params.scales))
    )


def _reads_bias(view: View, dq: Node) -> bool:
    return view.is_weight(dq) and view.model.elem_type(dq.input(0)) == _INT32


def _are_equal_bytes(first: ParameterValues | None, other: ParameterValues | None) -> bool:
    """Return whether two scales have equal bytes, so that NaN equals NaN."""
    return first is not None and other is not None and first.digest == other.digest


def _find_zero_point_faults(view: View, node: Node, params: QuantParams) -> Iterator[Reason | None]:
    name = node.name
    kind = _find_type(view, node, params)
    is_unknown = kind == onnx.TensorProto.UNDEFINED
    if not (is_unknown or params.precision in _SUPPORTED) or kind in _UNSUPPORTED_FP8:
        type_name = onnx.TensorProto.DataType.Name(kind).lower()
        yield UnsupportedQuantizedType(MODEL_CHECK, name, _UNSUPPORTED_FP8.get(kind, type_name))
        return
    if params.precision == Precision.FP8:
        # TensorRT's parser ignores the zero points of FP8 quantizers.
        yield fault_checks.check_fp8_zero_point(MODEL_CHECK, name, params.zero_points)
        return
    unsigned = params.precision == Precision.UINT8
    nonzero = fault_checks.check_zero_points(
        MODEL_CHECK, name, name, params.zero_points, unsigned, node.input(0)
    )
    if nonzero is not None:
        yield nonzero
    elif unsigned and not _has_type_of_q(view, node):
        yield UnsignedZeroPoint(MODEL_CHECK, name, params.has_zero_point, params.summary)
    if not params.has_zero_point:
        yield ZeroPointMissing(MODEL_CHECK, name, node.op)
    elif params.zero_point is not None and params.scale_shape is not None:
        yield fault_checks.check_zero_point_count(
            MODEL_CHECK, name, math.prod(params.scale_shape), params.zero_point.size
        )


def _has_type_of_q(view: View, node: Node) -> bool:
    """Return whether a node is a DQ after a Q and has no zero point that states its type."""
    if not qdq.is_dq(node) or node.input(2):
        return False
    return qdq.is_q(view.model.producer(node.input(0)))


def _find_type(view: View, node: Node, params: QuantParams) -> int:
    if params.has_zero_point:
        return view.model.elem_type(node.input(2))
    if qdq.is_q(node):
        return node.integer("output_dtype", 0) or view.model.elem_type(node.output)
    return view.model.elem_type(node.input(0))


def _find_scale_faults(
    view: View, target: str, node: Node, limit: float
) -> Iterator[Reason | None]:
    name, params = node.name, view.params(node)
    computed_inputs = [t for t in node.inputs[1:] if t and not view.model.is_constant(t)]
    computed = fault_checks.check_scale_constant(
        MODEL_CHECK,
        name,
        name,
        bool(computed_inputs),
        node.input(1) if node.input(1) in computed_inputs else "",
    )
    if computed is not None:
        yield computed
        return
    is_rtx = target_named(target).is_rtx
    if params.scale_type == _HALF and params.precision != Precision.FP8:
        # The finding FP8-TARGET reports FP8 on a TensorRT that reads no float16 scales.
        yield Float16Scale(MODEL_CHECK, name, params.summary)
    yield fault_checks.check_scale_positive(MODEL_CHECK, view.model, node, params.scales)
    yield fault_checks.check_scale_plausible(
        MODEL_CHECK, view.model, node, params.scales, is_rtx, limit
    )
    shape = params.scale_shape or ()
    accepted = math.prod(shape) == 1 and target_named(target).blocked_scales
    yield fault_checks.check_scale_rank(
        MODEL_CHECK, name, shape, node.integer("block_size", 0) > 0, accepted
    )


def _find_axis_faults(view: View, node: Node, params: QuantParams) -> Iterator[Reason | None]:
    if not params.is_per_channel or (
        params.scale_shape is not None and len(params.scale_shape) > 1
    ):
        return
    name = node.name
    if view.model.opset < AXIS_OPSET:
        yield AxisOpset(MODEL_CHECK, name, view.model.opset, params.has_axis)
    if not view.is_weight(node):
        yield fault_checks.check_activation_per_tensor(MODEL_CHECK, name, name, params)
        return
    shape = view.model.constant_shape(node.input(0))
    count = math.prod(params.scale_shape) if params.scale_shape is not None else 0
    yield fault_checks.check_scale_count(
        MODEL_CHECK, name, count, view.axis(node) or 0, shape or ()
    )

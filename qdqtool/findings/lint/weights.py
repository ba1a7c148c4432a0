"""Checks of the weights and biases of convolutions and matrix products."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import CONVOLUTIONS, LayerKind, is_sum, operator_of, output_axis
from qdqtool.ir.precision import Precision
from qdqtool.patterns.view import View, WeightSource
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.attention import ProductOfActivations
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.tensors import STEPS, PathStep
from qdqtool.reasons.weights import (
    OperatorsOnWeights,
    QuantizedWeightsOutput,
    WeightsStoredAsIntegers,
)
from qdqtool.trt import fault_checks
from qdqtool.trt.targets import target_named


def run(view: View, report: FindingReport) -> None:
    """Add the findings on weights and biases."""
    sources: dict[str, list[tuple[Node, WeightSource]]] = defaultdict(list)
    for conv in view.nodes_with_weights:
        weights = view.weights(conv)
        if weights.dq is not None and weights.folded:
            sources[weights.source].append((conv, weights))
            _check_quantized_weights(view, report, conv, weights)
        elif weights.dq is not None and conv.op in CONVOLUTIONS:
            sparse = qdq.is_sparse(view.model, weights.source)
            fault = fault_checks.check_weights_constant(
                MODEL_CHECK, conv.name, weights.source, weights.folded, sparse
            )
            _report_fault(report, fault, conv)
        elif _multiplies_int8_activations(view, conv, weights):
            report.add(ProductOfActivations(MODEL_CHECK, conv.name), convolutions=[conv.name])
        _check_bias(view, report, conv)
        _check_float_types(view, report, conv)
    for users in sources.values():
        _check_shared(view, report, users)
    _report_misread_constants(view, report)


def _check_shared(
    view: View, report: FindingReport, users: Sequence[tuple[Node, WeightSource]]
) -> None:
    source = users[0][1].source
    convs = [conv for conv, _ in users]
    consumers = [conv.name for conv in convs]
    if len(users) == 1:
        consumers += _other_consumers(view, *users[0])
    fault = fault_checks.check_weights_shared(MODEL_CHECK, source, source, tuple(consumers))
    _report_fault(report, fault, *convs)


def _report_fault(report: FindingReport, fault: Reason | None, *convolutions: Node) -> None:
    if fault is not None:
        report.add(fault, convolutions=[c.name for c in convolutions])


def _other_consumers(view: View, conv: Node, weights: WeightSource) -> list[str]:
    """Return the other consumers of a convolution's weights and of the DQ of the weights."""
    dq = weights.dq
    if dq is None or weights.after:
        return []
    return [
        n.name
        for tensor in (dq.input(0), dq.output)
        for n in view.model.consumers(tensor)
        if n not in (dq, conv)
    ]


def _report_misread_constants(view: View, report: FindingReport) -> None:
    """Report integer constants, except weights, that a node other than a DQ reads."""
    reported = view.folded_nodes()
    for fault in fault_checks.check_misread_constants(MODEL_CHECK, view.model):
        if fault.node not in reported:
            report.add(fault)


def _check_float_types(view: View, report: FindingReport, conv: Node) -> None:
    """Report data and weights of different float types. A DQ writes the type of its scale."""
    data, weights = (_float_type(view, conv.input(i)) for i in (0, 1))
    _report_fault(
        report, fault_checks.check_float_types(MODEL_CHECK, conv.name, (data, weights)), conv
    )


def _float_type(view: View, tensor: str) -> Precision:
    dq = view.model.producer(tensor)
    kind = (
        view.params(dq).scale_type
        if dq is not None and qdq.is_dq(dq)
        else view.model.elem_type(tensor)
    )
    return qdq.precision_of(kind)


def _multiplies_int8_activations(view: View, conv: Node, weights: WeightSource) -> bool:
    """Return whether both inputs are activations with INT8 pairs, as in INT8 attention."""
    if weights.dq is None or view.params(weights.dq).precision == Precision.FP8:
        return False
    return qdq.find_pair(view.model, conv.input(0)) is not None


def _check_quantized_weights(
    view: View, report: FindingReport, conv: Node, weights: WeightSource
) -> None:
    first = weights.first_quantizer
    assert first is not None
    convolutions = [conv.name]
    if weights.before:
        steps = tuple(PathStep(n.name, n.op) for n in itertools.islice(weights.before, STEPS))
        further = len(weights.before) - len(steps)
        fault = OperatorsOnWeights(
            MODEL_CHECK, conv.name, steps, first.name, weights.q is None, further
        )
        report.add(fault, convolutions=convolutions)
    if weights.q is None:
        report.add(
            WeightsStoredAsIntegers(MODEL_CHECK, first.name, conv.name, weights.source),
            convolutions=convolutions,
        )
    for node in (weights.q, weights.dq):
        if node is not None and view.model.is_output(node.output):
            report.add(
                QuantizedWeightsOutput(MODEL_CHECK, node.name, conv.name), convolutions=convolutions
            )
    _check_axis(view, report, conv, weights)


def _has_wrong_count(
    q: Node, params: qdq.QuantParams, axis: int | None, shape: tuple[int, ...]
) -> bool:
    count = params.scale.size if params.scale is not None and axis is not None else 0
    return fault_checks.check_scale_count(MODEL_CHECK, q.name, count, axis or 0, shape) is not None


def _check_axis(view: View, report: FindingReport, conv: Node, weights: WeightSource) -> None:
    shape = view.weight_shape(conv)
    if shape is None:
        return
    channel_axis = (output_axis(conv, len(shape)) or 0) if shape else 0
    transposed = operator_of(conv).kind == LayerKind.DECONVOLUTION
    if transposed and len(shape) == 5 and report.tensorrt.deconvolution_3d_float:
        return  # the layer runs in float, whatever its scales are
    proven = not transposed or target_named(report.target).transposed_per_channel
    for node in filter(None, (weights.q, weights.dq)):
        params, axis = view.params(node), view.axis(node)
        if node is weights.first_quantizer and _has_wrong_count(node, params, axis, shape):
            return
        _report_fault(
            report,
            fault_checks.check_weights_axis(
                MODEL_CHECK,
                conv.name,
                node.name,
                params,
                axis,
                channel_axis,
                shape,
                transposed,
                proven,
            ),
            conv,
        )


def _check_bias(view: View, report: FindingReport, conv: Node) -> None:
    candidates = [conv.input(2)]
    if conv.op == "MatMul":
        sums = filter(is_sum, view.model.consumers(conv.output))
        candidates = [t for add in sums for t in add.inputs if t != conv.output]
    for tensor in filter(None, candidates):
        pair = qdq.find_pair(view.model, tensor)
        if pair is None or not view.is_weight(pair[0]):
            continue
        precision = view.params(pair[0]).precision
        fault = fault_checks.check_bias(
            MODEL_CHECK, pair[0].name, conv.name, precision, conv.op != "MatMul"
        )
        _report_fault(report, fault, conv)

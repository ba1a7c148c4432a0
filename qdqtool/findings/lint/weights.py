"""Static checks of the weights and bias of every convolution."""

import itertools
from collections import defaultdict

from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import CONVOLUTIONS, LayerKind, is_sum, operator_of, output_axis
from qdqtool.patterns.view import View, WeightSource
from qdqtool.reasons import faults
from qdqtool.reasons.faults import CHECK
from qdqtool.reasons.tensors import STEPS, PathStep
from qdqtool.trt import fault_checks
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision, Refusal


def run(view: View, report: FindingReport) -> None:
    """Adds the findings about weights and biases."""
    sources: dict[str, list[tuple[Node, WeightSource]]] = defaultdict(list)
    for conv in view.nodes_with_weights:
        weights = view.weights(conv)
        if weights.dq is not None and weights.folded:
            sources[weights.source].append((conv, weights))
            _quantized(view, report, conv, weights)
        elif weights.dq is not None and conv.op in CONVOLUTIONS:
            sparse = qdq.is_sparse(view.model, weights.source)
            found = fault_checks.weights_not_constant(
                CHECK, conv.name, weights.source, weights.folded, sparse
            )
            _add(report, found, conv)
        elif weights.dq is not None and qdq.find_pair(view.model, conv.input(0)) is not None:
            report.add(faults.ProductOfActivations(CHECK, conv.name), convolutions=[conv.name])
        _bias(view, report, conv)
        _floats(view, report, conv)
    for source, users in sources.items():
        convs = tuple(c.name for c, _ in users)
        readers = convs if len(users) > 1 else (*convs, *_others(view, *users[0]))
        _add(
            report,
            fault_checks.weights_shared(CHECK, source, source, readers),
            *(c for c, _ in users),
        )
    _misread(view, report)


def _add(report: FindingReport, found: Refusal | None, *concerned: Node) -> None:
    if found is not None:
        report.add(found, convolutions=[c.name for c in concerned])


def _others(view: View, conv: Node, weights: WeightSource) -> list[str]:
    """What else reads a convolution's quantized weights, or what their DQ makes of them."""
    dq = weights.dq
    if dq is None or weights.after:
        return []
    return [
        n.name
        for tensor in (dq.input(0), dq.output)
        for n in view.model.consumers(tensor)
        if n not in (dq, conv)
    ]


def _misread(view: View, report: FindingReport) -> None:
    """Stored integers of no convolution's weights that something else than a DQ reads; those are reported above."""
    reported = view.folded_nodes()
    for found in fault_checks.misread_constants(CHECK, view.model):
        if found.node not in reported:
            report.add(found)


def _floats(view: View, report: FindingReport, conv: Node) -> None:
    """Data and weights of different float types; a DQ makes the type of its scale."""
    data, weights = (_float_type(view, conv.input(i)) for i in (0, 1))
    _add(report, fault_checks.float_types_differ(CHECK, conv.name, (data, weights)), conv)


def _float_type(view: View, tensor: str) -> Precision:
    dq = view.model.producer(tensor)
    kind = (
        view.params(dq).scale_type
        if dq is not None and qdq.is_dq(dq)
        else view.model.elem_type(tensor)
    )
    return qdq.precision_of(kind)


def _quantized(view: View, report: FindingReport, conv: Node, weights: WeightSource) -> None:
    first = weights.first_quantizer
    assert first is not None
    concerned = [conv.name]
    if weights.before:
        steps = tuple(PathStep(n.name, n.op) for n in itertools.islice(weights.before, STEPS))
        further = len(weights.before) - len(steps)
        found = faults.WeightsBehind(
            CHECK, conv.name, steps, first.name, weights.q is None, further
        )
        report.add(found, convolutions=concerned)
    if weights.q is None:
        stored = faults.WeightsStored(CHECK, first.name, conv.name, weights.source)
        report.add(stored, convolutions=concerned)
    for node in (weights.q, weights.dq):
        if node is not None and view.model.is_output(node.output):
            report.add(faults.WeightsOutput(CHECK, node.name, conv.name), convolutions=concerned)
    _axis(view, report, conv, weights)


def _axis(view: View, report: FindingReport, conv: Node, weights: WeightSource) -> None:
    shape = view.weight_shape(conv)
    if shape is None:
        return
    wanted = (output_axis(conv, len(shape)) or 0) if shape else 0
    transposed = operator_of(conv).kind == LayerKind.DECONVOLUTION
    proven = not transposed or target_named(report.target).transposed_per_channel
    for node in (weights.q, weights.dq):
        if node is None:
            continue
        params, axis = view.params(node), view.axis(node)
        count = params.scale.size if params.scale is not None and axis is not None else 0
        if (
            node is weights.first_quantizer
            and fault_checks.scale_count(CHECK, node.name, count, axis or 0, shape) is not None
        ):
            return
        _add(
            report,
            fault_checks.weights_axis(
                CHECK, conv.name, node.name, params, axis, wanted, shape, transposed, proven
            ),
            conv,
        )


def _bias(view: View, report: FindingReport, conv: Node) -> None:
    candidates = [conv.input(2)]
    if conv.op == "MatMul":
        sums = filter(is_sum, view.model.consumers(conv.output))
        candidates = [t for reader in sums for t in reader.inputs if t != conv.output]
    for tensor in filter(None, candidates):
        found = qdq.find_pair(view.model, tensor)
        if found is None or not view.is_weight(found[0]):
            continue
        precision = view.params(found[0]).precision  # what is added to a product may be a residual
        _add(
            report,
            fault_checks.bias_quantized(
                CHECK, found[0].name, conv.name, precision, conv.op != "MatMul"
            ),
            conv,
        )

"""Static checks of the weights and bias of every convolution."""

import itertools
from collections import defaultdict

from qdqtool.explain.report import Report
from qdqtool.model import qdq
from qdqtool.model.graph import Node
from qdqtool.model.operators import CONVOLUTIONS, LayerKind, is_sum, of, output_axis
from qdqtool.model.view import View, Weights
from qdqtool.trt import faults, refusals
from qdqtool.trt.faults import CHECK
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision


def run(view: View, report: Report) -> None:
    """Adds the findings about weights and biases."""
    sources: dict[str, list[tuple[Node, Weights]]] = defaultdict(list)
    for conv in view.weighted:
        weights = view.weights(conv)
        if weights.dq is not None and weights.folded:
            sources[weights.source].append((conv, weights))
            _quantized(view, report, conv, weights)
        elif weights.dq is not None and conv.op in CONVOLUTIONS:
            sparse = qdq.is_sparse(view.model, weights.source)
            found = refusals.WeightsNotConstant(CHECK, conv.name, weights.source, sparse)
            report.add(found, convolutions=[conv.name])
        elif weights.dq is not None and qdq.source_of_dq(view.model, conv.input(0)) is not None:
            report.add(faults.ProductOfActivations(CHECK, conv.name), convolutions=[conv.name])
        _bias(view, report, conv)
        _floats(view, report, conv)
    for source, users in sources.items():
        convs = tuple(c.name for c, _ in users)
        readers = convs if len(users) > 1 else (*convs, *_others(view, *users[0]))
        if len(readers) > 1:
            report.add(refusals.WeightsShared(CHECK, source, source, readers), convolutions=convs)
    _misread(view, report)


def _others(view: View, conv: Node, weights: Weights) -> list[str]:
    """What else reads a convolution's quantized weights, or what their DQ makes of them."""
    dq = weights.dq
    if dq is None or weights.after:
        return []
    return [n.name for tensor in (dq.input(0), dq.output) for n in view.model.readers(tensor) if n not in (dq, conv)]


def _misread(view: View, report: Report) -> None:
    """Stored integers of no convolution's weights that something else than a DQ reads; those are reported above."""
    reported = view.folding()
    for node, tensor in qdq.misread_constants(view.model):
        if node.name not in reported:
            report.add(faults.StoredReadElsewhere(CHECK, node.name, node.op, tensor))


def _floats(view: View, report: Report, conv: Node) -> None:
    """Data and weights of different float types; a DQ makes the type of its scale."""
    types = _float_type(view, conv.input(0)), _float_type(view, conv.input(1))
    if types[0] == types[1]:
        return
    data, weights = map(qdq.precision_of, types)
    if data != weights and data.is_float and weights.is_float:
        found = refusals.FloatTypesDiffer(CHECK, conv.name, "", "", (data, weights))
        report.add(found, convolutions=[conv.name])


def _float_type(view: View, tensor: str) -> int:
    dq = view.model.producer(tensor)
    return view.params(dq).scale_type if dq is not None and qdq.is_dq(dq) else view.model.elem_type(tensor)


def _quantized(view: View, report: Report, conv: Node, weights: Weights) -> None:
    first = weights.first
    assert first is not None
    concerned = [conv.name]
    if weights.before:
        steps = tuple(refusals.Step(n.name, n.op) for n in itertools.islice(weights.before, refusals.STEPS))
        further = len(weights.before) - len(steps)
        found = faults.WeightsBehind(CHECK, conv.name, steps, first.name, weights.q is None, further)
        report.add(found, convolutions=concerned)
    if weights.q is None:
        stored = faults.WeightsStored(CHECK, first.name, conv.name, weights.source)
        report.add(stored, convolutions=concerned)
    for node in (weights.q, weights.dq):
        if node is not None and view.model.is_output(node.output):
            report.add(faults.WeightsOutput(CHECK, node.name, conv.name), convolutions=concerned)
    _axis(view, report, conv, weights)


def _axis(view: View, report: Report, conv: Node, weights: Weights) -> None:
    shape = view.weight_shape(conv)
    if shape is None:
        return
    wanted = (output_axis(conv, len(shape)) or 0) if shape else 0
    transposed = of(conv).kind == LayerKind.DECONVOLUTION
    for node in (weights.q, weights.dq):
        axis = None if node is None else view.axis(node)
        if node is None or axis is None:
            continue
        params = view.params(node)
        count = params.scale.size if params.scale is not None else 0
        if node is weights.first and count and -len(shape) <= axis < len(shape) and shape[axis] != count:
            return  # SCALE-COUNT
        axis %= len(shape)
        if axis != wanted or (transposed and not target_named(report.target).transposed_per_channel):
            given = params.axis_given
            found = refusals.WeightsAxis(CHECK, conv.name, node.name, axis, wanted, transposed, given, shape)
            report.add(found, convolutions=[conv.name])


def _bias(view: View, report: Report, conv: Node) -> None:
    candidates = [conv.input(2)]
    if conv.op == "MatMul":
        sums = filter(is_sum, view.model.readers(conv.output))
        candidates = [t for reader in sums for t in reader.inputs if t != conv.output]
    for tensor in filter(None, candidates):
        found = qdq.source_of_dq(view.model, tensor)
        if found is None or not view.is_weight(found[0]):
            continue
        precision = view.params(found[0]).precision
        if precision == Precision.INT32 or conv.op != "MatMul":
            report.add(faults.BiasQuantized(CHECK, found[0].name, conv.name, precision),
                       convolutions=[conv.name])

"""Static checks of the weights and bias of every convolution."""

from __future__ import annotations

from collections import defaultdict

from qdqtool import qdq
from qdqtool.explain.report import Report, names
from qdqtool.graph import Node
from qdqtool.onnxgraph.view import View, Weights
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import CONVOLUTIONS, is_sum, of, output_axis
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision


def run(view: View, report: Report) -> None:
    """Adds the findings about weights and biases."""
    sources: dict[str, list[tuple[Node, Weights]]] = defaultdict(list)
    for conv in view.weighted:
        weights = view.weights(conv)
        quantized_input = qdq.source_of_dq(view.model, conv.input(0)) is not None
        if weights.dq is None:
            if quantized_input and weights.folded:
                _no_dq(view, report, conv, weights)
        elif weights.folded:
            sources[weights.source].append((conv, weights))
            _check_quantized(view, report, conv, weights)
        elif conv.op in CONVOLUTIONS:
            report.add(
                "W-NONCONST", conv.name,
                f"{conv.name}: its weights '{weights.source}' are computed at run time.",
                convolutions=[conv.name],
            )
        elif quantized_input:
            report.add("MATMUL-COMPUTED", conv.name, f"{conv.name} multiplies two quantized activations.",
                       convolutions=[conv.name])
        _bias(view, report, conv)
        _floats(view, report, conv)
    for source, users in sources.items():
        if len(users) > 1:
            convs = [c.name for c, _ in users]
            report.add(
                "W-SHARED", source, f"weights '{source}' are shared by {names(convs)}; TensorRT folds them into one.",
                convolutions=convs,
            )
    _misread(view, report)


def _misread(view: View, report: Report) -> None:
    """Stored integers of no convolution's weights that something else than a DQ reads; the weights' were told."""
    told = {n.name for conv in view.weighted for n in view.weights(conv).before}
    for node, tensor in qdq.misread_constants(view.model):
        if node.name not in told:
            report.add("WEIGHT-INDIRECT", node.name, f"{node.name} ({node.op}) reads the stored integers '{tensor}'.")


def _floats(view: View, report: Report, conv: Node) -> None:
    """Data and weights of different float types; a DQ makes the type of its scale."""
    data, weights = (_float_of(view, tensor) for tensor in (conv.input(0), conv.input(1)))
    if data != weights and data.is_float and weights.is_float:
        report.add("FLOAT-MIXED", conv.name, f"{conv.name}: its data is {data}, its weights are {weights}.",
                   convolutions=[conv.name])


def _float_of(view: View, tensor: str) -> Precision:
    found = qdq.source_of_dq(view.model, tensor)
    return qdq.precision_of(view.params(found[0]).scale_type if found is not None else view.model.elem_type(tensor))


def _no_dq(view: View, report: Report, conv: Node, weights: Weights) -> None:
    report.add(
        "W-NO-DQ", conv.name,
        f"{conv.name}: its input is quantized, its weights '{weights.source}' are not, so it runs in float.",
        convolutions=[conv.name], values=view.values(conv.input(0)),
    )


def _check_quantized(view: View, report: Report, conv: Node, weights: Weights) -> None:
    first = weights.first
    assert first is not None
    concerned = [conv.name]
    if weights.before:
        via = names(f"{n.name} ({n.op})" for n in weights.before)
        report.add(
            "WEIGHT-INDIRECT" if weights.q is None else "W-NONCONST", conv.name,
            f"{conv.name}: {via} {'stands' if len(weights.before) == 1 else 'stand'} between the weights and "
            f"{first.name}.",
            convolutions=concerned,
        )
    if weights.q is None:
        report.add(
            "WEIGHT-PREQUANT", first.name,
            f"{conv.name}: weights '{weights.source}' are stored as integers, with {first.name} alone.",
            convolutions=concerned,
        )
    for node in (weights.q, weights.dq):
        if node is not None and view.model.is_output(node.output):
            report.add(
                "W-Q-OUTPUT", node.name, f"{node.name}: the quantized weights of {conv.name} are a network output.",
                convolutions=concerned,
            )
    _axis(view, report, conv, weights)
    if conv.op == "ConvTranspose":
        report.add("CT-FLOAT", conv.name, f"{conv.name} has Q/DQ, but this target computes ConvTranspose in float.",
                   convolutions=concerned)


def _axis(view: View, report: Report, conv: Node, weights: Weights) -> None:
    shape = view.weight_shape(conv)
    wanted = (output_axis(conv, len(shape)) or 0) if shape else 0
    transposed = of(conv).kind == LayerKind.DECONVOLUTION
    for node in (weights.q, weights.dq):
        if node is None or shape is None:
            continue
        params = view.params(node)
        count = params.scale.size if params.scale is not None else 0
        axis = view.axis(node)
        if axis is None or (count and -len(shape) <= axis < len(shape) and shape[axis] != count):
            continue  # per tensor, or SCALE-COUNT
        axis %= len(shape)
        if transposed and (axis != wanted or not target_named(report.target).transposed_per_channel):
            report.add(
                "CT-AXIS", conv.name,
                f"{conv.name}: {node.name} has {count or 'several'} scales along axis {axis} of weights {list(shape)}: "
                "no version is known to take scales for each channel of a ConvTranspose rightly.",
                "Use one scale for all its weights, the largest.", [conv.name],
            )
        if transposed or axis == wanted:
            continue
        written = "" if params.axis_given else " (not written: ONNX means 1, TensorRT 8 and 9 take 0)"
        report.add(
            "W-AXIS", conv.name,
            f"{conv.name}: {node.name} works along axis {axis}{written} of weights {list(shape)}; the output channels "
            f"are axis {wanted}.",
            convolutions=[conv.name],
        )


def _bias(view: View, report: Report, conv: Node) -> None:
    candidates: list[str] = []
    if conv.op == "MatMul":
        for reader in view.model.readers(conv.output):
            if is_sum(reader):
                candidates.extend(t for t in reader.inputs if t != conv.output)
    elif conv.input(2):
        candidates.append(conv.input(2))
    for tensor in candidates:
        found = qdq.source_of_dq(view.model, tensor)
        if found is None or not view.is_weight(found[0]):
            continue
        dq = found[0]
        precision = view.params(dq).precision
        if precision == Precision.INT32 or conv.op != "MatMul":
            report.add(
                "BIAS-DQ", dq.name, f"{conv.name}: its bias is {str(precision).lower()} behind {dq.name}.",
                convolutions=[conv.name],
            )

"""The part that is not quantized: what FP16 would spoil in it where the builder may use it, and where it stays FP32."""

import numpy as np
import onnx

from qdqtool.findings.report import FindingReport
from qdqtool.findings.ways import FloatFlag
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import OPERATORS, LayerKind, operator_of
from qdqtool.patterns.half import find_fp16_nodes
from qdqtool.patterns.layernorm import (
    computes_in_fp16,
    find_decomposed_layer_norms,
    find_sums_of_squares,
    layer_norm_inputs,
)
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.reasons import faults
from qdqtool.reasons.faults import CHECK
from qdqtool.trt.targets import target_named

_LARGEST = 65504.0
_SMALLEST = 6e-8  # of FP16's denormal numbers
_NORMAL = 2.0**-14
_VALUES = 1 << 20  # of a constant that is looked at; masks are smaller
_NAMED = 3


def half(view: View, report: FindingReport) -> None:
    """Adds findings for a Q/DQ model; where types are those of the file, only for what is FP16 in it."""
    if not qdq.is_quantized(view.model):
        return
    norms(view, report)
    if not target_named(report.target).strongly_typed:
        _constants(view, report)


def norms(view: View, report: FindingReport) -> None:
    """Adds a finding for each normalization in pieces and other sum of squares, where these are or may be FP16."""
    target, model = target_named(report.target), view.model
    whole = find_decomposed_layer_norms(model)
    for pieces in whole:
        if not target.strongly_typed or computes_in_fp16(model, (pieces.square, pieces.mean)):
            exact = target.layer_normalization and layer_norm_inputs(model, pieces) is not None
            found = faults.DecomposedNorm(CHECK, pieces.square.name, exact, model.opset)
            report.add(found, automatic=exact)
    for square, *others in find_sums_of_squares(model, whole):
        if not target.strongly_typed or computes_in_fp16(model, (square, *others)):
            found = faults.DecomposedNorm(CHECK, square.name, False, model.opset, square.op)
            report.add(found, automatic=False)


def _constants(view: View, report: FindingReport) -> None:
    """Operands of arithmetic; bounds of a Clip, Min or Max may be infinite, and weights are TensorRT's to report."""
    found: list[tuple[str, float]] = []
    held: list[tuple[str, float]] = []  # with fewer digits
    large = small = denormal = 0
    arithmetic = {op for op, known in OPERATORS.items() if known.kind == LayerKind.ELEMENTWISE} | {
        "Where"
    }
    for node in (n for n in view.model.nodes if n.op in arithmetic):
        for tensor in _operands(node):
            value = view.model.constant(tensor)
            if value is None or value.dtype != np.float32 or not 0 < value.size <= _VALUES:
                continue
            sizes = np.abs(value[np.isfinite(value) & (value != 0)])
            above = (
                0
                if operator_of(node).operation in ("MIN", "MAX")
                else int((sizes > _LARGEST).any())
            )
            below = tiny = 0
            if value.size == 1:  # an epsilon; in a vector, a bias, small values do no harm
                below, tiny = (
                    int((sizes < _SMALLEST).any()),
                    int(((sizes >= _SMALLEST) & (sizes < _NORMAL)).any()),
                )
            large, small, denormal = large + above, small + below, denormal + tiny
            if above or below or tiny:
                (held if tiny else found).append(
                    (node.name, float(sizes.max() if above else sizes.min()))
                )
    values = found or held
    if values:
        spoilt = faults.ConstantsInHalf(
            CHECK, values[0][0], tuple(values[:_NAMED]), large, small, denormal
        )
        report.add(spoilt, gains=bool(found))


def _operands(node: Node) -> tuple[str, ...]:
    if node.domain not in DOMAINS:
        return ()
    if node.op == "Where":
        return tuple(node.inputs[1:3])
    return tuple(node.inputs) if operator_of(node).kind == LayerKind.ELEMENTWISE else ()


def float_types(view: View, report: FindingReport) -> None:
    """Adds a finding about what is not quantized: FP16 is asked for by a flag, or has to stand in the file."""
    if not view.fully_quantized_nodes:
        return
    if not target_named(report.target).strongly_typed:
        report.add(FloatFlag(CHECK, ""))
        return
    weighted = [n for n in view.nodes_with_weights if n.output in view.varying]
    types = {n.index: _computes_in(view, n) for n in weighted}
    if onnx.TensorProto.FLOAT not in types.values() or onnx.TensorProto.FLOAT16 in types.values():
        return  # a file with both types says of each node what it wants
    half = find_fp16_nodes(view.model)
    float32 = [n for n in weighted if n.index in half and types[n.index] == onnx.TensorProto.FLOAT]
    if float32:
        products = sum(operator_of(n).kind == LayerKind.MATRIX_MULTIPLY for n in weighted)
        report.add(
            faults.RemainingFloat(CHECK, "", len(float32), len(weighted), float32[0].name, products)
        )


def _computes_in(view: View, conv: Node) -> int:
    found = qdq.find_pair(view.model, conv.input(0))
    if found is not None:
        return view.params(found[0]).scale_type
    return view.model.elem_type(conv.input(1))

"""What FP16 would spoil where the builder may use it: squares of layer normalizations, constants out of its range."""

from __future__ import annotations

import numpy as np
import onnx

from qdqtool.explain.report import Report
from qdqtool.model import qdq
from qdqtool.model.graph import Node
from qdqtool.model.layernorm import as_one, layer_norms
from qdqtool.model.operators import DOMAINS, LayerKind, of
from qdqtool.model.view import View
from qdqtool.trt.faults import CHECK, ConstantsInHalf, NormInPieces
from qdqtool.trt.targets import target_named

_LARGEST = 65504.0
_SMALLEST = 6e-8  # of FP16's denormal numbers
_NORMAL = 2.0**-14
_VALUES = 1 << 20  # of a constant that is looked at; masks are smaller
_NAMED = 3


def run(view: View, report: Report) -> None:
    """Adds findings for a Q/DQ model; where types are those of the file, only for what is FP16 in it."""
    if not qdq.is_quantized(view.model):
        return
    _norms(view, report)
    if not target_named(report.target).strongly_typed:
        _constants(view, report)


def _norms(view: View, report: Report) -> None:
    target = target_named(report.target)
    half = onnx.TensorProto.FLOAT16
    for pieces in layer_norms(view.model):
        if not target.strongly_typed or view.model.elem_type(pieces.square.output) == half:
            exact = target.layer_normalization and as_one(view.model, pieces) is not None
            report.add("NORM-PIECES", NormInPieces(CHECK, pieces.square.name, exact, view.model.opset), automatic=exact)


def _constants(view: View, report: Report) -> None:
    """Operands of arithmetic; bounds of a Clip, Min or Max may be infinite, and weights are TensorRT's to report."""
    found: list[tuple[str, float]] = []
    held: list[tuple[str, float]] = []  # with fewer digits
    large = small = denormal = 0
    for node in view.model.nodes:
        for tensor in _operands(node):
            value = view.model.constant(tensor)
            if value is None or value.dtype != np.float32 or not 0 < value.size <= _VALUES:
                continue
            sizes = np.abs(value[np.isfinite(value) & (value != 0)])
            above = 0 if of(node).operation in ("MIN", "MAX") else int((sizes > _LARGEST).any())
            below = tiny = 0
            if value.size == 1:  # an epsilon; in a vector, a bias, small values do no harm
                below, tiny = int((sizes < _SMALLEST).any()), int(((sizes >= _SMALLEST) & (sizes < _NORMAL)).any())
            large, small, denormal = large + above, small + below, denormal + tiny
            if above or below or tiny:
                (held if tiny else found).append((node.name, float(sizes.max() if above else sizes.min())))
    values = found or held
    if values:
        report.add("CONST-FP16", ConstantsInHalf(CHECK, values[0][0], tuple(values[:_NAMED]), large, small, denormal),
                   gains=bool(found))


def _operands(node: Node) -> tuple[str, ...]:
    if node.domain not in DOMAINS or qdq.is_qdq(node):
        return ()
    if node.op == "Where":
        return tuple(node.inputs[1:3])
    return tuple(node.inputs) if of(node).kind == LayerKind.ELEMENTWISE else ()

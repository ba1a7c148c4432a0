"""Operators that a target does not take or quantize, and what FP16 would spoil where the builder may use it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from qdqtool.explain.report import Report
from qdqtool.model import qdq
from qdqtool.model.graph import Node
from qdqtool.model.layernorm import as_one, in_half, layer_norms, sums_of_squares
from qdqtool.model.operators import CONVOLVE, OPERATORS, LayerKind, of
from qdqtool.model.sizes import contraction
from qdqtool.model.subgraphs import DOMAINS
from qdqtool.model.view import View
from qdqtool.trt import detect, faults
from qdqtool.trt.faults import CHECK
from qdqtool.trt.layers import SILU
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision

_OTHER_TYPES = (Precision.FP8, Precision.INT4)
_LARGE_KERNEL = 14  # the smallest usual patch of a vision transformer; detectors have 7 at most
_TYPES_IN_NAMES = ("FP8", "FP4", "INT4")  # of quantizers that are operators of their own (ModelOpt's, domain trt)


def run(view: View, report: Report) -> None:
    """Adds findings about operators."""
    outside: dict[str, list[Node]] = defaultdict(list)
    unknown: dict[str, list[Node]] = defaultdict(list)
    plain: dict[tuple[str, str], bool] = {}
    quantized = view.quantized
    for node in view.model.nodes:
        kind = node.op, node.domain
        if kind not in plain:
            plain[kind] = _is_plain(node)
        if plain[kind]:
            if node.index in quantized and of(node).kind in CONVOLVE:
                _convolution(view, report, node)
            continue
        if qdq.is_qdq(node):
            if (precision := view.params(node).precision) in _OTHER_TYPES:
                outside[precision].append(node)
        elif (integers := detect.integer_operator(CHECK, node)) is not None:
            report.add(integers)
        elif named := _other_type(node):
            outside[named].append(node)
        elif of(node).name == "" and (node.domain not in DOMAINS or not onnx.defs.has(node.op)):
            unknown[node.op].append(node)
        elif _normalizes(node) and qdq.source_of_dq(view.model, node.input(0)) is not None:
            report.add(faults.NormalizationFloat(CHECK, node.name, node.op),
                       values=view.values(node.input(0)))
        elif contraction(view.model, node) is not None and not target_named(report.target).is_rtx:
            _einsum(view, report, node)
    if outside:
        nodes = [n for same in outside.values() for n in same]
        kinds = tuple((kind, len(same)) for kind, same in outside.items())
        report.add(faults.OtherTypes(CHECK, nodes[0].name, kinds), "",
                   [c for n in nodes for c in view.convolutions_behind(n)])
    for op, nodes in unknown.items():
        report.add(faults.UnknownOperator(CHECK, nodes[0].name, op, len(nodes) - 1))
    if not outside and not qdq.is_quantized(view.model):
        floats = [n for n in view.weighted if view.weights(n).folded]
        if floats and not any(detect.computes_integers(n) for n in view.model.nodes):
            report.add(faults.NothingQuantized(CHECK, "", len(floats)))


def _is_plain(node: Node) -> bool:
    """Whether nothing is asked of the nodes of an operator, whatever they read, but the form of a convolution."""
    return of(node).name != "" and node.op not in (qdq.Q, qdq.DQ, "Einsum") and not (
        detect.computes_integers(node) or _normalizes(node))


def _einsum(view: View, report: Report, node: Node) -> None:
    """A product that would be INT8 as a MatMul: behind a DQ, or of weights in a model with Q/DQ."""
    read = [qdq.source_of_dq(view.model, t) is not None for t in node.inputs]
    weights = any(t in view.constants for t in node.inputs)
    if any(read) or (weights and qdq.is_quantized(view.model)):
        report.add(faults.EinsumFloat(CHECK, node.name, str(node.attributes["equation"]), all(read)))


def _normalizes(node: Node) -> bool:
    named = node.op.endswith("Normalization") and node.op != "BatchNormalization"
    return named or of(node).kind == LayerKind.SOFTMAX


def _other_type(node: Node) -> str:
    """``FP8`` for a quantizer of that type that is an operator of its own, ``""`` for everything else."""
    if node.op.endswith(("QuantizeLinear", "DequantizeLinear")):
        return next((t for t in _TYPES_IN_NAMES if t in node.op.upper()), "")
    return ""


def _convolution(view: View, report: Report, conv: Node) -> None:
    """Quantized convolutions of forms that users' builds did not take, or left float."""
    shape, stated, concerned = view.weight_shape(conv), conv.attributes.get("kernel_shape"), [conv.name]
    kernel = tuple(shape[2:]) if shape is not None else tuple(stated) if isinstance(stated, (list, tuple)) else ()
    if of(conv).kind == LayerKind.DECONVOLUTION:
        if (found := detect.deconvolution_3d(CHECK, conv.name, kernel)) is not None:
            report.add(found, convolutions=concerned)
        return
    if len(kernel) == 3:
        report.add(faults.Convolution3D(CHECK, conv.name), convolutions=concerned)
    if (large := large_kernel(CHECK, conv, kernel)) is not None:
        report.add(large, convolutions=concerned)


# Forms that placement leaves float where builds failed on them --------------------------------------------------------


def large_kernel(looked: str, conv: Node, kernel: Sequence[int]) -> faults.LargeKernel | None:
    """A patch embedding; ``kernel`` is its extent, ``looked`` says who asks."""
    return faults.LargeKernel(looked, conv.name, tuple(kernel)) if min(kernel, default=0) >= _LARGE_KERNEL else None


def depthwise(
    looked: str, conv: Node, activation: str, readers: Sequence[Node], last: bool = False
) -> Iterator[faults.DepthwiseSilu | faults.DepthwiseAdd]:
    """Forms of a depthwise convolution; ``activation`` is what its layer took in, ``readers`` those in front of it."""
    if activation == SILU:
        yield faults.DepthwiseSilu(looked, conv.name, last)
    if {n.op for n in readers} == {"Add"}:
        yield faults.DepthwiseAdd(looked, conv.name, readers[0].name)


# What FP16 would spoil where the builder may use it ------------------------------------------------------------------


_LARGEST = 65504.0
_SMALLEST = 6e-8  # of FP16's denormal numbers
_NORMAL = 2.0**-14
_VALUES = 1 << 20  # of a constant that is looked at; masks are smaller
_NAMED = 3


def half(view: View, report: Report) -> None:
    """Adds findings for a Q/DQ model; where types are those of the file, only for what is FP16 in it."""
    if not qdq.is_quantized(view.model):
        return
    norms(view, report)
    if not target_named(report.target).strongly_typed:
        _constants(view, report)


def norms(view: View, report: Report) -> None:
    """Adds a finding for each normalization in pieces and other sum of squares, where these are or may be FP16."""
    target, model = target_named(report.target), view.model
    whole = layer_norms(model)
    for pieces in whole:
        if not target.strongly_typed or in_half(model, (pieces.square, pieces.mean)):
            exact = target.layer_normalization and as_one(model, pieces) is not None
            found = faults.NormInPieces(CHECK, pieces.square.name, exact, model.opset)
            report.add(found, automatic=exact)
    for square, *others in sums_of_squares(model, whole):
        if not target.strongly_typed or in_half(model, (square, *others)):
            found = faults.NormInPieces(CHECK, square.name, False, model.opset, square.op)
            report.add(found, automatic=False)


def _constants(view: View, report: Report) -> None:
    """Operands of arithmetic; bounds of a Clip, Min or Max may be infinite, and weights are TensorRT's to report."""
    found: list[tuple[str, float]] = []
    held: list[tuple[str, float]] = []  # with fewer digits
    large = small = denormal = 0
    arithmetic = {op for op, known in OPERATORS.items() if known.kind == LayerKind.ELEMENTWISE} | {"Where"}
    for node in (n for n in view.model.nodes if n.op in arithmetic):
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
        spoilt = faults.ConstantsInHalf(CHECK, values[0][0], tuple(values[:_NAMED]), large, small, denormal)
        report.add(spoilt, gains=bool(found))


def _operands(node: Node) -> tuple[str, ...]:
    if node.domain not in DOMAINS:
        return ()
    if node.op == "Where":
        return tuple(node.inputs[1:3])
    return tuple(node.inputs) if of(node).kind == LayerKind.ELEMENTWISE else ()

"""Operators that a target does not take, or of which the rules of Q/DQ passes say nothing."""

from __future__ import annotations

from collections import defaultdict

import onnx

from qdqtool import operators, qdq
from qdqtool.explain.report import Report
from qdqtool.graph import Node
from qdqtool.lint.structure import is_quantized
from qdqtool.onnxgraph.view import View
from qdqtool.operator_facts import LayerKind
from qdqtool.types import Precision

_OTHER_TYPES = (Precision.FP8, Precision.INT4)
_LARGE_KERNEL = 14  # the smallest usual patch of a vision transformer; detectors have 7 at most
_TYPES_IN_NAMES = ("FP8", "FP4", "INT4")  # of quantizers that are operators of their own (ModelOpt's, domain trt)


def run(view: View, report: Report) -> None:
    """Adds findings about operators."""
    outside: dict[str, list[Node]] = defaultdict(list)
    unknown: dict[str, list[Node]] = defaultdict(list)
    for node in view.model.nodes:
        if _computes_integers(node):
            report.add("QOPERATOR", node.name, f"{node.name} is a {node.op}: TensorRT cannot import it.")
        elif precision := _other_type(view, node):
            outside[precision].append(node)
        elif operators.of(node).name == "" and (node.domain not in operators.DOMAINS or not onnx.defs.has(node.op)):
            unknown[node.op].append(node)
        elif _normalizes(node) and qdq.source_of_dq(view.model, node.input(0)) is not None:
            message = f"{node.name} ({node.op}) reads a dequantized tensor and is computed in float."
            report.add("NORM-FLOAT", node.name, message, values=view.values(node.input(0)))
        elif operators.of(node).kind in (LayerKind.CONVOLUTION, LayerKind.DECONVOLUTION) and is_quantized(view, node):
            _convolution(view, report, node)
    _outside(view, report, outside)
    for op, nodes in unknown.items():
        more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
        told = f"{nodes[0].name}{more} is a plugin or unknown operator, {op}"
        report.add("PLUGIN-OUTSIDE", nodes[0].name, f"{told}: no Q or DQ moves past it or is taken into it.")


def _computes_integers(node: Node) -> bool:
    """Operators of onnxruntime's integer formats."""
    return node.op.startswith(("QLinear", "DynamicQuantize")) or node.op.endswith("Integer") or node.op == "QGemm"


def _normalizes(node: Node) -> bool:
    return operators.of(node).kind == LayerKind.SOFTMAX or (
        node.op.endswith("Normalization") and node.op != "BatchNormalization"
    )


def _other_type(view: View, node: Node) -> str:
    """``FP8`` for a quantizer of a type other than 8-bit integers, ``""`` for everything else."""
    if qdq.is_qdq(node):
        precision = view.params(node).precision
        return str(precision) if precision in _OTHER_TYPES else ""
    if node.op.endswith(("QuantizeLinear", "DequantizeLinear")):
        return next((t for t in _TYPES_IN_NAMES if t in node.op.upper()), "")
    return ""


def _outside(view: View, report: Report, found: dict[str, list[Node]]) -> None:
    if not found:
        return
    nodes = [n for same in found.values() for n in same]
    told = " and ".join(f"{len(same)} Q/DQ nodes of {kind}" for kind, same in found.items())
    report.add(
        "FP8-OUTSIDE", "", f"{told} ({nodes[0].name} first) are outside the rules of this prediction, which are those "
        "of INT8: what becomes of them is not known here.",
        convolutions=[c for n in nodes for c in view.convolutions_behind(n)],
    )


def _kernel(view: View, conv: Node) -> tuple[int, ...]:
    """Extent of a convolution's kernel, one number for each spatial dimension; empty where it is not known."""
    shape = view.weight_shape(conv)
    kernel = conv.attributes.get("kernel_shape")
    return tuple(shape[2:]) if shape is not None else tuple(kernel) if isinstance(kernel, (list, tuple)) else ()


def _convolution(view: View, report: Report, conv: Node) -> None:
    """Quantized convolutions of forms that users' builds did not take, or left float."""
    kernel = _kernel(view, conv)
    deconvolution = operators.of(conv).kind == LayerKind.DECONVOLUTION
    if len(kernel) == 3 and deconvolution:
        message = f"{conv.name} is a quantized 3D ConvTranspose: it is taken to run in INT8 only where an activation " \
                  "and a Q stand behind it."
        report.add("CT3D-FLOAT", conv.name, message, convolutions=[conv.name])
    elif len(kernel) == 3:
        message = f"{conv.name} is a quantized 3D convolution: builds of such failed on 8.2.2 and 8.2.5."
        report.add("CONV3D-INT8", conv.name, message, convolutions=[conv.name])
    if kernel and min(kernel) >= _LARGE_KERNEL and not deconvolution:
        message = f"{conv.name} has a kernel of {'x'.join(map(str, kernel))}: builds with one of 32x32 failed on 8.6."
        report.add("KERNEL-LARGE", conv.name, message, convolutions=[conv.name])

"""Operators that a target does not take, or of which the rules of Q/DQ passes say nothing."""

from __future__ import annotations

from qdqtool.explain.report import Report
from qdqtool.onnxgraph.view import View

INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm")


def run(view: View, report: Report) -> None:
    """Adds findings about operators."""
    for node in view.model.nodes:
        if node.op in INTEGER_OPS or node.op.startswith("QLinear"):
            report.add("QOPERATOR", node.name, f"{node.name} is a {node.op}: TensorRT cannot import it.")

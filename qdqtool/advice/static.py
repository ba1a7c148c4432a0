"""What the model alone shows: everything that fails a build or changes its result, and shapes that INT8 dislikes."""

from __future__ import annotations

from qdqtool.advice import static_head, static_quantizers, static_weights
from qdqtool.advice.report import Report
from qdqtool.graph import Model
from qdqtool.onnxgraph.view import View
from qdqtool.types import Finding

INTEGER_OPS = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QGemm")


def check(model: Model, target: str) -> list[Finding]:
    """Findings that need no simulation.

    Args:
        model: The model; its external data may be missing.
        target: ``trt8.0``, ``trt8.4``, ``trt8.5``, ``trt8.6``, ``trt10``, ``trt11`` or ``rtx1.7``.
    """
    report = Report(target)
    run(View(model, target), report)
    return report.findings


def run(view: View, report: Report) -> None:
    """Adds the findings of every static check."""
    for node in view.model.nodes:
        if node.op in INTEGER_OPS or node.op.startswith("QLinear"):
            report.add("QOPERATOR", node.name, f"{node.name} is a {node.op}: TensorRT cannot import it.")
    static_quantizers.run(view, report)
    static_weights.run(view, report)
    static_head.run(view, report)

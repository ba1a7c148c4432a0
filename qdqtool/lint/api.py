"""Everything that the model alone shows: what fails a build or changes its result, and shapes that INT8 dislikes."""

from __future__ import annotations

from qdqtool.explain.report import Report
from qdqtool.graph import Model
from qdqtool.lint import head, operators, quantizers, structure, weights
from qdqtool.onnxgraph.view import View
from qdqtool.trt.targets import target_named
from qdqtool.types import Finding


def check(model: Model, target: str) -> list[Finding]:
    """Findings that need no simulation.

    Args:
        model: The model; its external data may be missing.
        target: ``trt8.0``, ``trt8.4``, ``trt8.5``, ``trt8.6``, ``trt10``, ``trt11`` or ``rtx1.7``.
    """
    report = Report(target)
    run(View(model, target_named(target).residual_through_activation), report)
    return report.findings


def run(view: View, report: Report) -> None:
    """Adds the findings of every check."""
    operators.run(view, report)
    quantizers.run(view, report)
    weights.run(view, report)
    head.run(view, report)
    structure.run(view, report)

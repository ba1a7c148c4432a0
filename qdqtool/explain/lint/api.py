"""Everything that the model alone shows: what fails a build or changes its result, and shapes that INT8 dislikes."""

from qdqtool.explain.compiler import CODES
from qdqtool.explain.lint import activation_scales, operators, quantizers, structure, weight_scales, weights
from qdqtool.explain.lint.structure import Fused
from qdqtool.explain.report import Report
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.trt.outcome import settled
from qdqtool.trt.targets import target_named
from qdqtool.types import Finding, Prediction


def check(model: Model, target: str) -> list[Finding]:
    """The findings of every check, without those of the simulation (which says what each convolution takes in).

    Args:
        model: The model; its external data may be missing.
        target: The name of a target.
    """
    report = Report(target)
    chosen = target_named(target)
    run(View(model), report, {} if chosen.is_rtx else fused_in(settled(model, chosen)))
    return report.findings


def fused_in(prediction: Prediction) -> Fused:
    """The nodes that the layer of each convolution took in."""
    return {c.name: c.fused for c in prediction.convolutions}


def run(view: View, report: Report, fused: Fused) -> None:
    """Adds the findings of every check; ``fused`` are the nodes that the layer of each convolution took in.

    What TensorRT-RTX does with a model its own simulation says, so that the checks say nothing of that there.
    """
    report.left_out = CODES if target_named(report.target).is_rtx else frozenset()
    operators.run(view, report)
    quantizers.run(view, report)
    weights.run(view, report)
    weight_scales.run(view, report)
    activation_scales.by_gains(view, report)
    structure.heads(view, report, fused)
    operators.half(view, report)
    structure.run(view, report, fused)
    report.left_out = frozenset()

"""Everything that the model alone shows: what fails a build or changes its result, and shapes that INT8 dislikes."""

from collections.abc import Iterable

from qdqtool.findings.compiler import CODES
from qdqtool.findings.lint import (
    activation_scales,
    dead_scales,
    floats,
    heads,
    operators,
    quantizers,
    weight_granularity,
    weight_scales,
    weights,
)
from qdqtool.findings.report import FindingReport
from qdqtool.patterns.view import View
from qdqtool.trt.targets import target_named
from qdqtool.types import ConvOutcome


def run(view: View, report: FindingReport, convolutions: Iterable[ConvOutcome]) -> None:
    """Adds the findings of every check; what the layer of each convolution took in its outcome says.

    What TensorRT-RTX does with a model its own simulation says, so that the checks say nothing of that there.
    """
    report.ignored_codes = CODES if target_named(report.target).is_rtx else frozenset()
    operators.run(view, report)
    quantizers.run(view, report)
    weights.run(view, report)
    weight_scales.run(view, report)
    weight_granularity.run(view, report)
    activation_scales.by_gains(view, report)
    heads.run(view, report)
    dead_scales.run(view, report)
    operators.shapes(view, report, {c.name: c for c in convolutions})
    floats.float_types(view, report)
    floats.half(view, report)
    heads.streams(view, report)
    report.ignored_codes = frozenset()

"""All checks of a Q/DQ model that do not need the simulated passes."""

from collections.abc import Iterable

from qdqtool.findings.compiler import CODES
from qdqtool.findings.lint import (
    activation_scales,
    dead_scales,
    floats,
    fp8,
    heads,
    operators,
    quantizers,
    weight_granularity,
    weight_scales,
    weights,
)
from qdqtool.findings.report import FindingReport
from qdqtool.patterns.view import View
from qdqtool.trt.result import ConvOutcome
from qdqtool.trt.targets import target_named


def run(view: View, report: FindingReport, convolutions: Iterable[ConvOutcome]) -> None:
    """Add the findings of all checks to a report.

    Args:
        view: The model.
        report: Report to which the findings are added. For TensorRT-RTX, codes that the prediction
            reports are left out.
        convolutions: Predicted outcomes. They name the nodes that are fused into each convolution.
    """
    outcomes = {c.name: c for c in convolutions}
    report.ignored_codes = CODES if target_named(report.target).is_rtx else frozenset()
    operators.check_functions(view, report)
    operators.run(view, report)
    operators.check_attention(view, report, outcomes)
    quantizers.run(view, report)
    fp8.run(view, report)
    weights.run(view, report)
    weight_scales.run(view, report)
    weight_granularity.run(view, report)
    activation_scales.check_outliers_by_gains(view, report)
    activation_scales.check_uniform_scales(view, report)
    heads.run(view, report)
    dead_scales.run(view, report)
    operators.check_shapes(view, report, outcomes)
    floats.check_bfloat16(view, report)
    floats.check_float_types(view, report, outcomes)
    floats.check_fp16_limits(view, report)
    heads.check_residual_streams(view, report)
    report.ignored_codes = frozenset()

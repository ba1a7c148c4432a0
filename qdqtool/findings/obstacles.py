"""Texts on rejected quantization formats."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import QuantParams
from qdqtool.patterns.view import View
from qdqtool.reasons.finding import Finding, FindingCode, Reason, name_rejection
from qdqtool.reasons.weights import BiasQuantized
from qdqtool.trt.result import Prediction
from qdqtool.util.text import format_count

_REJECTED_FORMS: tuple[FindingCode, ...] = ("QOPERATOR", "ZP-NONZERO", "ZP-UINT8")
_MAX_EXCLUDED = 8  # if there are more nodes to exclude, the recipe excludes none


def onnxruntime_recipe(model: str, output: str, exclude: Sequence[str] = ()) -> str:
    """Return the call of onnxruntime's quantization tool that makes a Q/DQ model for TensorRT.

    With this call, biases remain float, no pair is inserted between a Conv or Add and its
    activation, and the outputs of a Split have the scale of its input. The inputs of a Concat do
    not get the same scale, because onnxruntime has no option for this.

    Args:
        model: Path of the float model.
        output: Path of the Q/DQ model.
        exclude: Names of nodes that remain float, such as those of a detection head.
    """
    excluded = f"nodes_to_exclude={list(exclude)!r}, " if exclude else ""
    return (
        f"quantize_static({model!r}, {output!r}, reader, quant_format=QuantFormat.QDQ, "
        "activation_type=QuantType.QInt8, weight_type=QuantType.QInt8, per_channel=True, "
        f"op_types_to_quantize=['Conv', 'Add', 'Split'], {excluded}"
        "extra_options={'ActivationSymmetric': True, 'QuantizeBias': False, "
        "'OpTypesToExcludeOutputQuantization': ['Conv', 'Add']})"
    )


def describe_obstacles(findings: Sequence[Finding], view: View) -> str:
    """Describe the rejected quantization formats of a model; empty if none.

    Args:
        findings: Findings of the model.
        view: The model, whose Q and DQ nodes are counted.
    """
    reasons: dict[FindingCode, list[Reason]] = defaultdict(list)
    for finding in findings:
        if finding.code in _REJECTED_FORMS:
            reasons[finding.code] += [cause.reason for cause in finding.causes]
    if not reasons:
        return ""
    forms = ", ".join(_describe_rejected_form(code, group, view) for code, group in reasons.items())
    if set(reasons) == {"ZP-UINT8"}:
        return f"{forms}: TensorRT builds the model, but clips every value above 127 steps"
    return (
        f"{forms}: TensorRT {name_rejection(findings)} the model, because it reads INT8 only "
        "from Q/DQ nodes with zero point 0"
    )


def suggest_recipe(prediction: Prediction, model: str, output: str) -> str:
    """Return :func:`onnxruntime_recipe` if another call of onnxruntime avoids errors, else "".

    These errors are rejected quantization formats and INT32 biases.

    Args:
        prediction: Prediction of a Q/DQ model.
        model: Path of the float model.
        output: Path of the new Q/DQ model.
    """
    if not any(f.code in _REJECTED_FORMS or _has_int32_bias(f) for f in prediction.findings):
        return ""
    head = prediction.head_nodes
    return onnxruntime_recipe(model, output, head if len(head) <= _MAX_EXCLUDED else ())


def _has_int32_bias(finding: Finding) -> bool:
    """Return whether a finding reports an INT32 bias, which onnxruntime writes by default."""
    reasons = (cause.reason for cause in finding.causes)
    return any(isinstance(r, BiasQuantized) and r.precision == Precision.INT32 for r in reasons)


def _describe_rejected_form(code: FindingCode, reasons: Sequence[Reason], view: View) -> str:
    if code == "QOPERATOR":
        counts = Counter(getattr(reason, "op", "") for reason in reasons).most_common()
        operators = ", ".join(f"{count} {op}" for op, count in counts[:3])
        return f"integer operators instead of Q/DQ ({operators}{', ...' if counts[3:] else ''})"
    # Findings report a Q and the DQ after it once, but a user who counts the nodes counts both.
    quantizers = [view.params(node) for node in view.quantizers]
    if code == "ZP-UINT8":
        unsigned = sum(params.precision == Precision.UINT8 for params in quantizers)
        return format_count(unsigned, "UINT8 Q or DQ node")
    nonzero = sum(_has_nonzero_zero_point(params) for params in quantizers)
    return f"zero points other than 0 at {format_count(nonzero, 'Q or DQ node')}"


def _has_nonzero_zero_point(params: QuantParams) -> bool:
    zeros = params.zero_points
    # TensorRT's parser ignores the zero points of FP8 quantizers.
    return params.precision != Precision.FP8 and zeros is not None and not zeros.is_zero

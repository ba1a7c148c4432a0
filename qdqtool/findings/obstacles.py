"""Quantization formats that TensorRT does not accept, for the headline of a prediction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from qdqtool.findings import codes
from qdqtool.reasons.finding import Finding, FindingCode, Reason, Severity
from qdqtool.reasons.quantizers import FakeQuantizers
from qdqtool.util.text import format_count

_REJECTED_FORMS: tuple[FindingCode, ...] = ("QOPERATOR", "ZP-NONZERO", "ZP-UINT8")
_MAX_EXCLUDED = 8  # maximum number of nodes that a recipe excludes


def onnxruntime_recipe(exclude: Sequence[str] = ()) -> str:
    """Return the call of onnxruntime's quantizer that creates a Q/DQ model for TensorRT.

    The call keeps biases float, and inserts no pair between a Conv or Add and its activation. It
    does not give all inputs of a Concat the same scale, because onnxruntime has no such option.

    Args:
        exclude: Nodes that remain float, such as those of a detection head.
    """
    excluded = f"nodes_to_exclude={list(exclude)!r}, " if exclude else ""
    return (
        "quantize_static(..., quant_format=QuantFormat.QDQ, activation_type=QuantType.QInt8, "
        "weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=['Conv', 'Add'], "
        f"{excluded}extra_options={{'ActivationSymmetric': True, 'QuantizeBias': False, "
        "'OpTypesToExcludeOutputQuantization': ['Conv', 'Add']})"
    )


def is_rejected(findings: Iterable[Finding]) -> bool:
    """Return whether TensorRT builds no engine from a model with these findings."""
    return any(f.severity == Severity.ERROR and not is_built(f) for f in findings)


def is_built(error: Finding) -> bool:
    """Return whether TensorRT builds an engine in spite of an error, with wrong results."""
    reason = error.causes[0].reason if error.causes else None
    is_misread = isinstance(reason, FakeQuantizers) and reason.is_misread
    return codes.get(error.code).builds or is_misread


def describe_obstacles(findings: Iterable[Finding]) -> str:
    """Describe the quantization formats that TensorRT rejects, from findings; empty if none."""
    reasons: dict[FindingCode, list[Reason]] = defaultdict(list)
    for finding in findings:
        if finding.code in _REJECTED_FORMS:
            reasons[finding.code] += [cause.reason for cause in finding.causes]
    if not reasons:
        return ""
    forms = " and ".join(_describe_rejected_form(code, group) for code, group in reasons.items())
    if set(reasons) == {"ZP-UINT8"}:
        return f"{forms}: TensorRT rejects this or clips every value above 127"
    return f"{forms}: TensorRT rejects this, because it supports only symmetric INT8"


def suggest_recipe(findings: Sequence[Finding]) -> str:
    """Return onnxruntime's recipe if findings report a rejected format, else an empty text."""
    if all(finding.code not in _REJECTED_FORMS for finding in findings):
        return ""
    head = []
    for finding in findings:
        if finding.code == "HEAD-QUANT":
            # onnxruntime would quantize the anchors that these Adds read.
            head += [finding.node, *getattr(finding.causes[0].reason, "sums", ())]
    return onnxruntime_recipe(head if len(head) <= _MAX_EXCLUDED else ())


def _describe_rejected_form(code: FindingCode, reasons: Sequence[Reason]) -> str:
    if code == "QOPERATOR":
        counts = Counter(getattr(reason, "op", "") for reason in reasons).most_common()
        operators = ", ".join(f"{count} {op}" for op, count in counts[:3])
        return f"integer operators instead of Q/DQ ({operators}{', ...' if counts[3:] else ''})"
    quantizers = format_count(len(reasons), "quantizer")
    if code == "ZP-UINT8":
        return f"{quantizers} to UINT8"
    return f"zero points other than 0 at {quantizers}"

"""Quantization formats that TensorRT does not accept, for the headline of a prediction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from qdqtool.types import Finding, FindingCode, Refusal
from qdqtool.util.text import format_count

_OBSTACLES: dict[FindingCode, str] = {
    "QOPERATOR": "integer operators instead of Q/DQ ({ops})",
    "ZP-NONZERO": "zero points other than 0 at {n}",
    "ZP-UINT8": "{n} to UINT8",
}
_EXCLUDED = 8  # names of nodes in a recipe


def onnxruntime_recipe(exclude: Sequence[str] = ()) -> str:
    """Return the call of onnxruntime's quantizer that makes a Q/DQ model for TensorRT.

    Biases are float, results of Conv and Add get no pair of their own before the activation, and the nodes to
    exclude are those of a detection head. It cannot give the parts of a Concat one scale.
    """
    excluded = f"nodes_to_exclude={list(exclude)!r}, " if exclude else ""
    return (
        "quantize_static(..., quant_format=QuantFormat.QDQ, activation_type=QuantType.QInt8, "
        "weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=['Conv', 'Add'], "
        f"{excluded}extra_options={{'ActivationSymmetric': True, 'QuantizeBias': False, "
        "'OpTypesToExcludeOutputQuantization': ['Conv', 'Add']})"
    )


def obstacles(findings: Iterable[Finding]) -> str:
    """In what forms a model is quantized that TensorRT does not take at all; empty for none."""
    found: dict[FindingCode, list[Refusal]] = defaultdict(list)
    head: list[str] = []
    for finding in findings:
        if finding.code == "HEAD-QUANT":
            head.append(finding.node)
        if finding.code in _OBSTACLES:
            found[finding.code] += [cause.refusal for cause in finding.causes]
    parts = []
    for code, refusals in found.items():
        counts = Counter(getattr(r, "op", "") for r in refusals).most_common()
        ops = ", ".join(f"{count} {op}" for op, count in counts[:3]) + ", ..." * (len(counts) > 3)
        parts.append(_OBSTACLES[code].format(ops=ops, n=format_count(len(refusals), "quantizer")))
    if not parts:
        return ""
    cut = set(found) == {"ZP-UINT8"}
    built = (
        "and rejects this or clips every value above 127" if cut else "so this model does not build"
    )
    mend = "" if "QOPERATOR" in found else "'qdqtool fix' converts it, or "
    return (
        f"{' and '.join(parts)}: TensorRT supports only Q/DQ with symmetric INT8, {built}; {mend}"
        "quantize the float model: qdqtool insert FLOAT.onnx --calib images/ (or onnxruntime's "
        f"{onnxruntime_recipe(head if len(head) <= _EXCLUDED else ())} and then qdqtool fix)"
    )

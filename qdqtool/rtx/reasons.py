"""The words for why a convolution is float on TensorRT-RTX: code, message and fix of each reason."""

from __future__ import annotations

from qdqtool.finding_codes import FindingCode
from qdqtool.graph import Node
from qdqtool.rtx.operands import Verdict
from qdqtool.types import Evidence, Finding, Severity

TARGET = "rtx1.7"

# reason: (code, severity, message, fix); {conv}, {node}, {op}, {dq} are filled in.
_TEXTS: dict[str, tuple[FindingCode, Severity, str, str]] = {
    "nothing": (
        "NOT-QUANTIZED", Severity.INFO, "{conv} has no Q/DQ on input or weights: it runs in float.",
        "Nothing, where it was left out on purpose; else quantize its input and weights."),
    "input": (
        "IN-FLOAT", Severity.WARNING, "{conv}: its weights are quantized, its input is not; the weights are "
        "dequantized and it runs in float.", "Put Q/DQ directly in front of {conv}."),
    "weights": (
        "W-NO-DQ", Severity.WARNING, "{conv}: its input is quantized ({dq}), its weights are not; it runs in float.",
        "Quantize the weights, one scale for each output channel."),
    "operator": (
        "IN-BLOCKED", Severity.WARNING, "{conv}: {node} ({op}) stands between {dq} and it, and TensorRT-RTX computes "
        "{op} in float.", "Put Q/DQ behind {node}, directly in front of {conv}."),
    "shared": (
        "IN-BLOCKED", Severity.WARNING, "{conv}: the factor of {node} ({op}) cannot join the scale of {dq}, because "
        "other nodes read the same tensor.", "Put Q/DQ behind {node}, directly in front of {conv}."),
    "pool": (
        "POOL-MIXED", Severity.WARNING, "{conv}: {node} ({op}) stands between {dq} and a Q, which makes an INT8 pool "
        "of it with the Q's scale; {conv} reads a second, float one.",
        "Put Q/DQ on {conv}'s input as well, or let the other reader take it without a Q."),
    "join-float": (
        "IN-BLOCKED", Severity.WARNING, "{conv}: {node} ({op}) has an input without Q/DQ, so its result is float.",
        "Put Q/DQ directly in front of {conv}, or on every input of {node} with one scale."),
    "join-scale": (
        "CONCAT-SCALE", Severity.WARNING, "{conv}: the inputs of {node} ({op}) have different scales, so its result is "
        "float.", "Give all inputs of {node} one scale, or put Q/DQ directly in front of {conv}."),
    "pad": (
        "IN-BLOCKED", Severity.WARNING, "{conv}: {node} ({op}) is computed in float. Only a Pad with zeros on height "
        "and width joins a convolution, when it is directly in front of it and nothing else reads it.",
        "Put Q/DQ between {node} and {conv}, or write the padding into the convolution's pads."),
    "axis": (
        "ACT-PER-CHANNEL", Severity.WARNING, "{conv}: the scales of {dq} vary along an axis that {node} ({op}) does "
        "not keep.", "Use one scale for the whole tensor."),
    "input-axis": (
        "ACT-PER-CHANNEL", Severity.WARNING, "{conv}: the scale of its input ({dq}) varies along an axis; TensorRT-RTX "
        "takes one scale for the whole tensor.", "Quantize the input with one scalar scale."),
    "input-shape1": (
        "SCALE-SHAPE1", Severity.WARNING, "{conv}: the scale of {dq} has shape [1], which TensorRT-RTX takes for "
        "per-channel; the convolution runs in float.", "Give {dq} a scalar scale (shape [])."),
    "weights-axis": (
        "W-AXIS", Severity.WARNING, "{conv}: the scales of its weights ({dq}) vary along another axis than the output "
        "channels (0).", "Quantize the weights along axis 0."),
    "sum-axis": (
        "W-AXIS", Severity.WARNING, "{conv}: the scales of {dq} vary along the axis that is summed up, or by batch.",
        "Quantize along the output columns, or with one scale."),
    "cast": (
        "IN-BLOCKED", Severity.WARNING, "{conv}: a Cast to a wider float stands between {dq} and it.",
        "Let the DQ make the wider type: give it scales of that type."),
    "types": (
        "QTYPE", Severity.WARNING, "{conv}: its inputs are quantized to types that do not multiply with each other.",
        "Quantize both sides to int8."),
    "deconvolution": (
        "CT-FLOAT", Severity.WARNING, "{conv}: TensorRT-RTX computes ConvTranspose in float, quantized or not.",
        "Remove the Q/DQ on its input and weights: they only cost time and accuracy."),
    "turing": (
        "FLOAT-SM75", Severity.WARNING, "{conv}: TensorRT-RTX has no INT8 on SM75, and one SM75 among the targets "
        "takes it from all.", "Build for SM80 and later only."),
}


def finding(conv: Node, verdict: Verdict) -> Finding | None:
    """The finding for a float convolution; None when it is not float."""
    if not verdict.reason:
        return None
    reason = verdict.reason
    prefix = ""
    if reason not in _TEXTS and reason.startswith("weights-"):
        reason = reason.removeprefix("weights-")
        prefix = "on the way of the weights: "
    code, severity, message, fix = _TEXTS[reason]
    if prefix and code == "IN-BLOCKED":
        code = "W-NONCONST"
    words = {
        "conv": conv.name,
        "node": verdict.node.name if verdict.node else "",
        "op": verdict.node.op if verdict.node else "",
        "dq": verdict.dq.name if verdict.dq else "the DQ",
    }
    blame = verdict.node if reason in ("operator", "shared", "pool", "join-float", "join-scale", "pad") else None
    place = blame.name if blame else conv.name
    return Finding(code, severity, place, prefix + message.format(**words), fix.format(**words), Evidence.SEEN,
                   target=TARGET)

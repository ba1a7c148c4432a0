"""Messages of findings: one function for each class of refusal returns the message and the fix.

The message modules of the other packages are loaded with the first finding that needs them.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from qdqtool.ir.operators import SUMS
from qdqtool.ir.qdq import PerChannel
from qdqtool.trt.refusals import (
    ConsumerKind,
    PathStep,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
)
from qdqtool.types import Cause, Finding, FindingCode, Refusal, Severity
from qdqtool.util.records import once
from qdqtool.util.text import counted

Words = tuple[str, str]
"""The message, and what to change; the second is empty where the code's general advice fits."""
Wording = Callable[[Finding, Cause, Any], "Words | str"]
F = TypeVar("F", bound=Callable[..., "Words | str"])
R = TypeVar("R", bound=Refusal)

MOST_SHARED = 0.25  # of the larger scale: two bits, the most that sharing one may cost a tensor
WORDINGS: dict[type[Refusal], Wording] = {}
MODULES = {
    "qdqtool.trt.refusals": "qdqtool.findings.messages_passes",
    "qdqtool.trt.faults": "qdqtool.findings.messages_model",
    "qdqtool.trt.rtx.operands": "qdqtool.findings.messages_rtx",
    "qdqtool.findings.messages": "qdqtool.findings.messages",
    "qdqtool.findings.coded": "qdqtool.findings.messages_passes",
}


def words(kind: type[Refusal]) -> Callable[[F], F]:
    """Registers a function as that which words a class."""

    def register(function: F) -> F:
        if kind in WORDINGS:
            raise ValueError(f"{kind.__name__} is worded twice")
        WORDINGS[kind] = function
        return function

    return register


def says(kind: type[R], text: Callable[[R], Words | str]) -> None:
    """Words a class by what its refusal holds alone."""
    words(kind)(lambda finding, cause, refusal: text(refusal))


def worded(finding: Finding) -> Words:
    """The message and the fix."""
    from qdqtool.findings import codes

    entry = codes.get(finding.code)
    message = fix = ""
    for cause in finding.causes:
        refusal = cause.refusal
        found = _wording(type(refusal))(finding, cause, refusal)
        text, advice = (found, "") if isinstance(found, str) else found
        if not message:
            message, fix = text, advice or entry.fix
            fails = finding.severity == Severity.ERROR and not refusal.quotes
            error = entry.error_text(finding.target) if fails else ""
            message += f' TensorRT says: "{error}"' if error else ""
        elif text not in message:
            message += f" {text}"
    return message, fix


def _wording(kind: type[Refusal]) -> Wording:
    """That of a class, or of the nearest of its bases; its room is loaded where it has one."""
    for base in kind.__mro__:
        if base not in WORDINGS and base.__module__ in MODULES:
            importlib.import_module(MODULES[base.__module__])
        if base in WORDINGS:
            return WORDINGS[base]
    raise KeyError(kind)


def number(value: float | None) -> str:
    """A scale as text, four digits; ``unknown`` where it is not available."""
    return "unknown" if value is None else f"{value:.4g}"


def scale_words(scale: Scale) -> str:
    """A number, or the range of one for each channel."""
    if isinstance(scale, PerChannel):
        return f"{number(scale.least)} to {number(scale.greatest)}" if scale.count else "unknown"
    return number(scale)


def names(items: Iterable[str], limit: int = 3, more: int = 0) -> str:
    """Names for a sentence: ``a, b, c and 4 more``; ``more`` are not among the items."""
    unique = list(dict.fromkeys(items))
    shown = ", ".join(unique[:limit])
    further = max(len(unique) - limit, 0) + more
    return f"{shown} and {further} more" if further else shown


def size_words(size: TensorSize | None) -> str:
    """`` (64x80x80)``; empty where the size is not known."""
    return f" ({size.shape})" if size is not None and size.shape else ""


def node_words(name: str, op: str) -> str:
    """``name (Op)``, or the name alone where it says the operator."""
    return name if not op or op in name else f"{name} ({op})"


def step_words(step: PathStep) -> str:
    """The same for an operator on the way."""
    return node_words(step.node, step.op)


def reader_names(readers: Sequence[TensorConsumer]) -> list[str]:
    return [
        "the network's output"
        if r.kind == ConsumerKind.OUTPUT
        else r.node
        if r.kind == ConsumerKind.Q
        else node_words(r.node, r.op)
        for r in readers
    ]


def readers_words(readers: Sequence[TensorConsumer], it: str = " it") -> str:
    """Who reads a tensor as float, as a clause; ``it`` is empty in a clause that begins with ``which``."""
    if not readers:
        return f"nothing reads{it}"
    if all(r.kind == ConsumerKind.OUTPUT for r in readers):
        return "it is the network's output"
    more = getattr(readers, "more", "")
    if more and [r.node for r in readers] == [more]:
        return f"its consumers come after {more} and were not analyzed"
    floats = list(dict.fromkeys(reader_names(floats_of(readers))))
    if not floats:
        return f"{names(reader_names(readers))} quantizes{it}{others_words(readers)}"
    return f"{names(floats)} {'read' if len(floats) > 1 else 'reads'}{it} as float{others_words(readers)}"


def others_words(readers: Sequence[TensorConsumer]) -> str:
    """Return `` (and others after cat7, which were not analyzed)``, or an empty string if no consumer is missing."""
    more = getattr(readers, "more", "")
    return f" (and others after {more}, which were not analyzed)" if more else ""


def origin_words(origin: TensorOrigin, tensor: str = "") -> str:
    """Where a tensor comes from."""
    if origin.convolution:
        return f"the result of {origin.convolution}"
    if not origin.node:
        return f"the network's input '{origin.tensor}'"
    maker = node_words(origin.node, origin.op)
    if origin.op in SUMS or origin.path or not tensor:
        return f"the result of {maker}"
    return f"'{tensor}' of {maker}"


def unified(scales: Sequence[Scale]) -> str:
    """The advice to take the largest scale, and what that costs; empty where no two are known."""
    given = [s for s in scales if isinstance(s, float) and s > 0]
    if not given:
        return ""
    largest, smallest = max(given), min(given)
    cost = (
        f" (the smallest range loses {math.log2(largest / smallest):.1f} bits)"
        if largest > smallest
        else ""
    )
    if smallest < largest * MOST_SHARED:
        return (
            f"One scale, {number(largest)}, would cost the smallest range "
            f"{math.log2(largest / smallest):.1f} bits: keep separate scales, or leave the side with the largest "
            "range in float."
        )
    return f"Give them one scale, {number(largest)}{cost}."


@once
def floats_of(readers: Sequence[TensorConsumer]) -> list[TensorConsumer]:
    """Those that are no Q."""
    return [r for r in readers if r.kind is not ConsumerKind.Q]


@once
def quantizers_of(readers: Sequence[TensorConsumer]) -> list[TensorConsumer]:
    return [r for r in readers if r.kind is ConsumerKind.Q]


def known_scale(quantizers: Sequence[TensorConsumer]) -> TensorConsumer | None:
    """A Q right behind a tensor, whose pair another reader can share."""
    return next((q for q in quantizers if not q.path and isinstance(q.scale, float)), None)


# What a GPU lacks for a prediction -----------------------------------------------------------------------------------


class GpuFact(StrEnum):
    """A fact of the GPU table that concerns a Q/DQ network."""

    NO_INT8 = "no INT8"
    DP4A_TENSOR = "INT8 by dp4a, FP16 on tensor cores"
    DP4A_FP16 = "INT8 by dp4a, FP16 at twice the rate of FP32"
    DP4A_FP32 = "INT8 by dp4a, FP16 no faster than FP32"
    FUSION = "INT8 without tensor cores, and pointwise activations"
    KERNELS = "INT8 without tensor cores, and depthwise convolutions"
    JETSON = "a Jetson"
    NO_FP16 = "no fast FP16"
    SINCE = "an architecture that is newer than the target"
    DROPPED = "an architecture that the target dropped"


class GpuLacks(Refusal):
    """What a GPU cannot do with a prediction.

    Attributes:
        fact: Which fact of the GPU table.
        gpu: The GPU with its compute capability.
        count: How many convolutions it concerns.
        first: The first of them.
        values: What else its words name.
    """

    fact: GpuFact
    gpu: str
    count: int
    first: str
    values: tuple[str, ...] = ()


_DP4A = "{gpu} computes INT8 by dp4a, without tensor cores; "
# {gpu}, {count} and {first} are filled in, and {0}, {1} ... are the values.
_TEXTS: dict[GpuFact, str] = {
    GpuFact.NO_INT8: "{gpu} has no INT8: a network with Q/DQ cannot be built for it.",
    GpuFact.DP4A_TENSOR: _DP4A + "FP16 runs on tensor cores there.",
    GpuFact.DP4A_FP16: _DP4A + "FP16 has twice the rate of FP32 there.",
    GpuFact.DP4A_FP32: _DP4A + "FP16 is no faster than FP32 there.",
    GpuFact.FUSION: (
        "{gpu} has no INT8 tensor cores: the activations (LeakyRelu, SiLU, GELU or similar) after {count} convolutions "
        "({first} first) may not be fused, so that these write float."
    ),
    GpuFact.KERNELS: "{gpu}: {count} depthwise convolutions ({first} first) may have no INT8 kernel there.",
    GpuFact.JETSON: (
        "{gpu}: the prediction is for its GPU, which runs the Q/DQ passes of desktop GPUs (all 868 pass and copy lines "
        "of one network are the same on AGX Orin and RTX 3080 Ti). Its DLA does not support Q/DQ."
    ),
    GpuFact.NO_FP16: "{gpu} has no fast FP16: {count} float convolutions run in FP32.",
    GpuFact.SINCE: "{gpu} needs TensorRT {1} or later; the target is {0}.",
    GpuFact.DROPPED: "{gpu} is no longer supported by TensorRT of the target {0}.",
}


says(GpuLacks, lambda r: _TEXTS[r.fact].format(*r.values, gpu=r.gpu, count=r.count, first=r.first))


# What of a model TensorRT does not take at all, in the headline ------------------------------------------------------

_OBSTACLES: dict[FindingCode, str] = {
    "QOPERATOR": "integer operators instead of Q/DQ ({ops})",
    "ZP-NONZERO": "zero points other than 0 at {n}",
    "ZP-UINT8": "{n} to UINT8",
}
_EXCLUDED = 8  # names of nodes in a recipe


def onnxruntime_recipe(exclude: Sequence[str] = ()) -> str:
    """Return the call of onnxruntime's quantizer that makes a Q/DQ model for TensorRT.

    Biases stay float, results of Conv and Add get no pair of their own in front of the activation, and the nodes to
    exclude are those of a detection head. What it cannot do is to give the parts of a Concat one scale.
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
        parts.append(_OBSTACLES[code].format(ops=ops, n=counted(len(refusals), "quantizer")))
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

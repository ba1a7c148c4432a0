"""What a named GPU cannot do with a prediction: findings, made from the facts of the GPU table."""

from __future__ import annotations

from qdqtool.explain import codes
from qdqtool.explain.gpu import GpuFact, GpuLacks
from qdqtool.explain.report import worded
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.timing.gpus import Gpu
from qdqtool.trt.targets import target_named
from qdqtool.types import Cause, Evidence, Finding, FindingCode, Prediction, Refusal

_SINCE = ((10.0, (10, 0)), (8.9, (8, 5)), (8.6, (8, 0)))  # compute capability, first target that knows it
_DROPPED = ((5.3, (10, 0)), (7.0, (11, 0)))  # below or at this capability, from this target on


def gpu_findings(prediction: Prediction, gpu: Gpu, model: Model | None = None) -> list[Finding]:
    """Findings about running a predicted engine on a GPU; ids go on from the prediction's.

    A prediction for TensorRT-RTX gets none: its own rules refer to the GPUs that it supports.
    ``model`` shows which convolutions are depthwise; without it nothing is said of those.
    """
    if target_named(prediction.target).is_rtx:
        return []
    int8 = [c.name for c in prediction.convolutions if c.is_int8]
    floats = [c.name for c in prediction.convolutions if not c.is_int8]
    rates = gpu.rates
    found: list[tuple[FindingCode, Refusal, list[str], Evidence]] = []
    where = f"{gpu.name} (compute capability {rates.cc}, {rates.architecture})"

    def add(code: FindingCode, fact: GpuFact, named: list[str], evidence: Evidence, *values: str) -> None:
        first = named[0] if named else ""
        found.append((code, GpuLacks("GPU", "", fact, where, len(named), first, values), named, evidence))

    if int8 and not gpu.has_int8:
        add("GPU-NO-INT8", GpuFact.NO_INT8, int8, rates.evidence)
    elif int8 and rates.int8_path == "dp4a":
        fact = GpuFact.DP4A_TENSOR if gpu.has_tensor_cores else (
            GpuFact.DP4A_FP16 if rates.fp16 > rates.fp32_pipe else GpuFact.DP4A_FP32
        )
        add("GPU-DP4A", fact, int8, rates.evidence)
    if gpu.has_int8 and rates.int8_path != "tensor":
        pointwise = [c.name for c in prediction.convolutions if c.is_int8 and "PWN(" in (c.layer or "")]
        if pointwise:
            add("GPU-FUSION", GpuFact.FUSION, pointwise, Evidence.DOCUMENTED)
        places = depthwise(model) if model is not None else frozenset()
        deep = [c.name for c in prediction.convolutions if c.is_int8 and c.index in places]
        if deep:
            add("GPU-KERNELS", GpuFact.KERNELS, deep, Evidence.DOCUMENTED)
    if int8 and gpu.is_jetson and gpu.has_int8:
        add("GPU-JETSON", GpuFact.JETSON, [], Evidence.SEEN if rates.cc == "8.7" else Evidence.ASSUMED)
    if floats and rates.fp16 < rates.fp32_pipe:
        add("GPU-NO-FP16", GpuFact.NO_FP16, floats, rates.evidence)
    since, dropped = _unsupported(float(rates.cc), target_named(prediction.target).version)
    if since or dropped:
        fact = GpuFact.SINCE if since else GpuFact.DROPPED
        add("GPU-VERSION", fact, [], Evidence.ASSUMED, prediction.target, since)
    start = max((f.id for f in prediction.findings), default=-1) + 1
    return [
        Finding(
            code, codes.get(code).severity, "", (Cause(refusal),), evidence, worded, start + number, prediction.target,
            convolutions=convolutions,
        )
        for number, (code, refusal, convolutions, evidence) in enumerate(found)
    ]


def depthwise(model: Model) -> frozenset[int]:
    """Places of the convolutions with as many groups as input channels, and more than one."""
    view = View(model)
    shapes = ((n, view.weight_shape(n)) for n in view.weighted if n.op == "Conv" and n.attributes.get("group", 1) != 1)
    return frozenset(node.index for node, shape in shapes if shape is not None and len(shape) > 1 and shape[1] == 1)


def _unsupported(cc: float, version: tuple[int, int]) -> tuple[str, bool]:
    """The version from which an architecture is known, where this one is older, and whether it was dropped before."""
    for capability, first in _SINCE:
        if cc >= capability:
            if version < first:
                return f"{first[0]}.{first[1]}", False
            break
    return "", any(cc <= capability and version >= gone for capability, gone in _DROPPED)

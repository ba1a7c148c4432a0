"""What a named GPU cannot do with a prediction: findings, made from the facts of the GPU table."""

from __future__ import annotations

from qdqtool.explain import codes
from qdqtool.finding_codes import FindingCode
from qdqtool.graph import Model
from qdqtool.onnxgraph.view import View
from qdqtool.timing.gpus import Gpu
from qdqtool.trt.targets import target_named
from qdqtool.types import Evidence, Finding, Prediction

_SINCE = ((10.0, (10, 0)), (8.9, (8, 5)), (8.6, (8, 0)))  # compute capability, first target that knows it
_DROPPED = ((5.3, (10, 0)), (7.0, (11, 0)))  # below or at this capability, from this target on


def gpu_findings(prediction: Prediction, gpu: Gpu, model: Model | None = None) -> list[Finding]:
    """Findings about running a predicted engine on a GPU; ids go on from the prediction's.

    A prediction for TensorRT-RTX gets none: its own rules speak of the GPUs that it supports.
    ``model`` tells which convolutions are depthwise; without it nothing is said of those.
    """
    if target_named(prediction.target).is_rtx:
        return []
    int8 = [c.name for c in prediction.convolutions if c.is_int8]
    floats = [c.name for c in prediction.convolutions if not c.is_int8]
    rates = gpu.rates
    found: list[tuple[FindingCode, str, list[str], Evidence]] = []
    where = f"{gpu.name} (compute capability {rates.cc}, {rates.architecture})"
    if int8 and not gpu.has_int8:
        found.append(
            ("GPU-NO-INT8", f"{where} has no INT8: a network with Q/DQ cannot be built for it.", int8, rates.evidence)
        )
    elif int8 and rates.int8_path == "dp4a":
        versus = (
            "FP16 runs on tensor cores there"
            if gpu.has_tensor_cores
            else (
                "FP16 has twice the rate of FP32 there"
                if rates.fp16 > rates.fp32_pipe
                else "FP32 is what it replaces there"
            )
        )
        found.append(
            ("GPU-DP4A", f"{where} computes INT8 by dp4a, without tensor cores; {versus}.", int8, rates.evidence)
        )
    if gpu.has_int8 and rates.int8_path != "tensor":
        pointwise = [c.name for c in prediction.convolutions if c.is_int8 and "PWN(" in (c.layer or "")]
        if pointwise:
            message = (f"{where} has no INT8 tensor cores: {len(pointwise)} convolutions with LeakyRelu, SiLU, GELU or "
                       f"the like behind them ({pointwise[0]} first) may stay apart from it and write float.")
            found.append(("GPU-FUSION", message, pointwise, Evidence.DOCUMENTED))
        places = depthwise(model) if model is not None else frozenset()
        deep = [c.name for c in prediction.convolutions if c.is_int8 and c.index in places]
        if deep:
            message = f"{where}: {len(deep)} depthwise convolutions ({deep[0]} first) may have no INT8 kernel there."
            found.append(("GPU-KERNELS", message, deep, Evidence.DOCUMENTED))
    if int8 and gpu.is_jetson and gpu.has_int8:
        message = (f"{where}: this is what its GPU does, with the Q/DQ passes of desktop GPUs (all 868 pass and copy "
                   "lines of one network are the same on AGX Orin and RTX 3080 Ti); its DLA takes no Q/DQ.")
        found.append(("GPU-JETSON", message, [], Evidence.SEEN if rates.cc == "8.7" else Evidence.ASSUMED))
    if floats and rates.fp16 < rates.fp32_pipe:
        found.append(
            (
                "GPU-NO-FP16",
                f"{where} has no fast FP16: {len(floats)} float convolutions run in FP32.",
                floats,
                rates.evidence,
            )
        )
    version = _version(prediction.target)
    told = _unsupported(float(rates.cc), version)
    if told:
        found.append(("GPU-VERSION", f"{prediction.target} and {where}: {told}.", [], Evidence.ASSUMED))
    start = max((f.id for f in prediction.findings), default=-1) + 1
    result = []
    for number, (code, message, convolutions, evidence) in enumerate(found):
        entry = codes.get(code)
        result.append(
            Finding(
                code, entry.severity, "", message, entry.fix, evidence, start + number, prediction.target, convolutions
            )
        )
    return result


def depthwise(model: Model) -> frozenset[int]:
    """Places of the convolutions with as many groups as input channels, and more than one."""
    view = View(model)
    shapes = ((n, view.weight_shape(n)) for n in view.weighted if n.op == "Conv" and n.attributes.get("group", 1) != 1)
    return frozenset(node.index for node, shape in shapes if shape is not None and len(shape) > 1 and shape[1] == 1)


def _version(target: str) -> tuple[int, int]:
    major, _, minor = target.removeprefix("trt").partition(".")
    return int(major), int(minor or 0)


def _unsupported(cc: float, version: tuple[int, int]) -> str:
    for capability, first in _SINCE:
        if cc >= capability:
            if version < first:
                return f"that architecture is known from TensorRT {first[0]}.{first[1]} on"
            break
    if any(cc <= capability and version >= gone for capability, gone in _DROPPED):
        return "that architecture was dropped before this version"
    return ""

"""What findings say about a GPU."""

from __future__ import annotations

from qdqtool.explain.gpu import GpuFact, GpuLacks
from qdqtool.explain.messages import words
from qdqtool.types import Cause, Finding

_DP4A = "{gpu} computes INT8 by dp4a, without tensor cores; "
# {gpu}, {count} and {first} are filled in, and {0}, {1} ... are the values.
_TEXTS: dict[GpuFact, str] = {
    GpuFact.NO_INT8: "{gpu} has no INT8: a network with Q/DQ cannot be built for it.",
    GpuFact.DP4A_TENSOR: _DP4A + "FP16 runs on tensor cores there.",
    GpuFact.DP4A_FP16: _DP4A + "FP16 has twice the rate of FP32 there.",
    GpuFact.DP4A_FP32: _DP4A + "FP32 is what it replaces there.",
    GpuFact.FUSION: (
        "{gpu} has no INT8 tensor cores: {count} convolutions with LeakyRelu, SiLU, GELU or the like behind them "
        "({first} first) may stay apart from it and write float."),
    GpuFact.KERNELS: "{gpu}: {count} depthwise convolutions ({first} first) may have no INT8 kernel there.",
    GpuFact.JETSON: (
        "{gpu}: this is what its GPU does, with the Q/DQ passes of desktop GPUs (all 868 pass and copy lines of one "
        "network are the same on AGX Orin and RTX 3080 Ti); its DLA takes no Q/DQ."),
    GpuFact.NO_FP16: "{gpu} has no fast FP16: {count} float convolutions run in FP32.",
    GpuFact.SINCE: "{0} and {gpu}: that architecture is known from TensorRT {1} on.",
    GpuFact.DROPPED: "{0} and {gpu}: that architecture was dropped before this version.",
}


@words(GpuLacks)
def _lacks(finding: Finding, cause: Cause, r: GpuLacks) -> str:
    return _TEXTS[r.fact].format(*r.values, gpu=r.gpu, count=r.count, first=r.first)

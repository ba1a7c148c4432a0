"""What a GPU lacks for a prediction, and the words for it."""

from __future__ import annotations

from enum import StrEnum

from qdqtool.base.records import record
from qdqtool.explain.messages import words
from qdqtool.types import Cause, Finding, Refusal


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


@record
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

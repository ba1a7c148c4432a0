"""What a GPU lacks for a prediction."""

from __future__ import annotations

from enum import StrEnum

from qdqtool.base.records import record
from qdqtool.types import Refusal


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

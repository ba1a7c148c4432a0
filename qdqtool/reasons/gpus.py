"""Reasons from the GPU table: limits of a GPU."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason
from qdqtool.reasons.text import NO_ACTION, Message, name_first
from qdqtool.util.text import format_count

GpuFact = StrEnum(
    "GpuFact",
    [
        "NO_INT8",
        "NO_FP8",
        "NO_BF16",
        "DP4A_TENSOR",
        "DP4A_FP16",
        "DP4A_FP32",
        "FUSION",
        "KERNELS",
        "JETSON",
        "NO_FP16",
        "SINCE",
        "DROPPED",
        "PARTLY",
    ],
)
"""Fact of the GPU table that concerns a Q/DQ network (messages: ``_TEXTS``)."""


def _match_facts(*facts: GpuFact) -> Callable[[Any], bool]:
    return lambda r: r.fact in facts


_DP4A = "computes INT8 by dp4a, without tensor cores"
_TEXTS: dict[GpuFact, Callable[["GpuLimit"], str]] = {
    GpuFact.NO_INT8: lambda limit: (
        f"{limit.gpu} has no INT8: a network with Q/DQ cannot be built for it."
    ),
    GpuFact.NO_FP8: lambda limit: (
        f"{limit.gpu} has no FP8, so {limit.layers} in FP8 {limit.first_layer} cannot be built."
    ),
    GpuFact.NO_BF16: lambda limit: (
        f"{limit.gpu} has no BF16, which the model uses: the build fails."
    ),
    GpuFact.DP4A_TENSOR: lambda limit: f"{limit.gpu} {_DP4A}; FP16 runs on tensor cores.",
    GpuFact.DP4A_FP16: lambda limit: f"{limit.gpu} {_DP4A}; FP16 has twice the rate of FP32.",
    GpuFact.DP4A_FP32: lambda limit: (
        f"{limit.gpu} {_DP4A}; FP16 is not faster than FP32, INT8 is up to four times as fast."
    ),
    GpuFact.FUSION: lambda limit: (
        f"{limit.gpu} has no INT8 tensor cores: TensorRT may not fuse LeakyRelu, SiLU, GELU and "
        f"similar activations into convolutions. Then {limit.layers} {limit.first_layer} would "
        "write float."
    ),
    GpuFact.KERNELS: lambda limit: (
        f"{limit.gpu} may have no INT8 kernel for depthwise convolutions: {limit.layers} "
        f"{limit.first_layer}."
    ),
    GpuFact.JETSON: lambda limit: (
        f"{limit.gpu}: this prediction is for the GPU of the Jetson. The DLA does not support Q/DQ."
    ),
    GpuFact.NO_FP16: lambda limit: (
        f"{limit.gpu} has no fast FP16, so the float convolutions ({limit.count}) run in FP32."
    ),
    GpuFact.SINCE: lambda limit: (
        f"{limit.gpu} needs TensorRT {limit.values[1]}; the target is {limit.values[0]}."
    ),
    GpuFact.DROPPED: lambda limit: (
        f"{limit.gpu} needs TensorRT {limit.values[1]}; the target is {limit.values[0]}."
    ),
    GpuFact.PARTLY: lambda limit: (
        f"{limit.gpu} needs TensorRT {limit.values[1]}, but the target {limit.values[0]} covers "
        "all minor versions. Give the exact version as target."
    ),
}


class GpuLimit(Reason):
    """A limit of the GPU that affects the network.

    Attributes:
        fact: The fact of the GPU table.
        gpu: The GPU with its compute capability.
        count: Number of convolutions that the limit affects; 0 if it affects no single layers.
        first: The first of these convolutions; empty if there is none.
        values: Other values that the message names.
    """

    rules = (
        FindingRule("GPU-NO-INT8", _match_facts(GpuFact.NO_INT8)),
        FindingRule("FP8-GPU", _match_facts(GpuFact.NO_FP8)),
        FindingRule("GPU-NO-BF16", _match_facts(GpuFact.NO_BF16)),
        FindingRule(
            "GPU-DP4A", _match_facts(GpuFact.DP4A_TENSOR, GpuFact.DP4A_FP16, GpuFact.DP4A_FP32)
        ),
        FindingRule("GPU-FUSION", _match_facts(GpuFact.FUSION)),
        FindingRule("GPU-KERNELS", _match_facts(GpuFact.KERNELS)),
        FindingRule("GPU-JETSON", _match_facts(GpuFact.JETSON)),
        FindingRule("GPU-NO-FP16", _match_facts(GpuFact.NO_FP16)),
        FindingRule("GPU-VERSION"),
    )

    fact: GpuFact
    gpu: str
    count: int
    first: str
    values: tuple[str, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = _TEXTS[self.fact](self)
        return text, NO_ACTION if self.fact == GpuFact.DP4A_FP32 else ""

    @property
    def layers(self) -> str:
        """Number of the affected convolutions, as layers."""
        return format_count(self.count, "layer")

    @property
    def first_layer(self) -> str:
        """Name of the first affected convolution, in parentheses."""
        return name_first(self.first, self.count)

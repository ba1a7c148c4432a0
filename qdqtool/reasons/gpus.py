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


_DP4A = "{gpu} computes INT8 by dp4a, without tensor cores; "
# Placeholders: the fields {gpu} and {count}, the {layers} with their number, the {first} of them,
# and the values {0}, {1} ...
_TEXTS: dict[GpuFact, str] = {
    GpuFact.NO_INT8: "{gpu} has no INT8: a network with Q/DQ cannot be built for it.",
    GpuFact.NO_FP8: ("{gpu} has no FP8, so {layers} in FP8 {first} cannot be built."),
    GpuFact.NO_BF16: "{gpu} has no BF16, which the model uses: the build fails.",
    GpuFact.DP4A_TENSOR: _DP4A + "FP16 runs on tensor cores.",
    GpuFact.DP4A_FP16: _DP4A + "FP16 has twice the rate of FP32.",
    GpuFact.DP4A_FP32: _DP4A + "FP16 is not faster than FP32, INT8 is up to four times as fast.",
    GpuFact.FUSION: (
        "{gpu} has no INT8 tensor cores: TensorRT may not fuse LeakyRelu, SiLU, GELU and similar "
        "activations into convolutions. Then {layers} {first} would write float."
    ),
    GpuFact.KERNELS: (
        "{gpu} may have no INT8 kernel for depthwise convolutions: {layers} {first}."
    ),
    GpuFact.JETSON: (
        "{gpu}: this prediction is for the GPU of the Jetson. The DLA does not support Q/DQ."
    ),
    GpuFact.NO_FP16: "{gpu} has no fast FP16, so the float convolutions ({count}) run in FP32.",
    GpuFact.SINCE: "{gpu} needs TensorRT {1}; the target is {0}.",
    GpuFact.DROPPED: "{gpu} needs TensorRT {1}; the target is {0}.",
    GpuFact.PARTLY: (
        "{gpu} needs TensorRT {1}, but the target {0} covers all minor versions. Give the exact "
        "version as target."
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
        text = _TEXTS[self.fact].format(
            *self.values,
            gpu=self.gpu,
            count=self.count,
            layers=format_count(self.count, "layer"),
            first=name_first(self.first, self.count),
        )
        return text, NO_ACTION if self.fact == GpuFact.DP4A_FP32 else ""

"""Reasons why average poolings and ReduceMeans run in float."""

from __future__ import annotations

from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason
from qdqtool.reasons.tensors import TensorConsumer, TensorOrigin, TensorSize, quantizer_consumers
from qdqtool.reasons.text import Message, consumer_names, list_names

REDUCTION_ADVICE = (
    "Replace the ReduceMean by GlobalAveragePool and Flatten (the same result) with Q/DQ before "
    "and after the pooling, or remove the Q/DQ pair before the ReduceMean."
)


def describe_reduction(r: ReduceNotPooling) -> str:
    """Describe why a ReduceMean runs in float."""
    return (
        f"{r.node} (ReduceMean) runs in float: TensorRT converts it to a pooling only over height "
        "and width with keepdims=1."
    )


class PoolingOneSide(Reason, key="pooling-one-side"):
    """An averaging pooling is quantized on one side only.

    Attributes:
        quantized_input: Whether the input is quantized, and not the result.
        origin: Producer of the input.
        consumers: Consumers of the result.
        elements: Size of its result.
    """

    rules = (FindingRule("POOL-FLOAT"),)

    quantized_input: bool
    origin: TensorOrigin
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        quantizers_after = quantizer_consumers(self.consumers)
        if self.quantized_input:
            why = (
                f"{quantizers_after[0].node} is not its only consumer"
                if quantizers_after
                else "no QuantizeLinear is after it"
            )
            return f"{self.node} runs in float: {self.origin.node} is before it, but {why}."
        return (
            f"{self.node} runs in float: {list_names(consumer_names(quantizers_after))} is after "
            f"it, but no DequantizeLinear is before it."
        )


class ReduceNotPooling(Reason, key="reduce-not-pooling"):
    """An average that does not become a pooling, and runs in float.

    The node does not average over height and width with keepdims=1.

    Attributes:
        dq: DQ before the node; empty if missing.
        consumers: Consumers of the result.
        elements: Size of its result.
    """

    rules = (FindingRule("POOL-FLOAT"),)

    identity_excludes = (*Reason.identity_excludes, "dq", "consumers")

    dq: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (describe_reduction(self), REDUCTION_ADVICE)

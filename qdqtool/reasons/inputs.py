"""Reasons why the data and weights of a convolution cannot be multiplied in INT8 or FP8."""

from qdqtool.ir.precision import Precision
from qdqtool.reasons.conversions import ManyConsumers
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason
from qdqtool.reasons.tensors import PathStep, TensorSize
from qdqtool.reasons.text import Message, format_node


class InputNotDequantized(Reason, key="input-not-dequantized"):
    """The data of a convolution or matrix product does not come from a DQ.

    Attributes:
        tensor: The input's ONNX tensor.
        producer: Node that writes the tensor.
        op: The producer's operator, ``Input`` for a network input.
        weights_quantized: Whether the weights come from a DQ.
        dq: The nearest DQ upstream, which cannot move down to the input; empty if no DQ was found.
        blocker: The first operator that a DQ cannot pass, upstream of the input; None if other
            consumers keep the DQ from moving.
    """

    rules = (
        FindingRule("NOT-QUANTIZED", lambda r: not r.weights_quantized),
        FindingRule("IN-BLOCKED", lambda r: r.dq),
        FindingRule("IN-FLOAT"),
    )

    tensor: str
    producer: str
    op: str
    weights_quantized: bool = False
    dq: str = ""
    blocker: PathStep | None = None
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        if not self.weights_quantized:
            return (
                f"{self.node} has no Q/DQ{' on its weights' if self.dq else ''} and runs in float."
            )
        if not self.dq:
            return (
                (
                    f"{self.node} runs in float: its weights are quantized, but its input "
                    f"'{self.tensor}' is not."
                ),
                f"Put Q/DQ on '{self.tensor}' (its scale needs calibration).",
            )
        shared = next((a for a in cause.also if isinstance(a, ManyConsumers)), None)
        if shared is not None:
            past = "" if self.blocker is None else f" past {self.blocker.node} ({self.blocker.op})"
            return (
                f"{self.node} runs in float: {self.dq} has {len(shared.consumers)} consumers, and "
                f"only a DQ with a single consumer moves down{past}.",
                f"Give {self.node} a DequantizeLinear of its own, after the same QuantizeLinear.",
            )
        where = (
            f"past {self.blocker.node} ({self.blocker.op}) to this layer"
            if self.blocker is not None
            else (
                "to this layer, because the DQ has other consumers and remains before "
                f"{format_node(self.producer, self.op)}"
            )
        )
        return (
            f"{self.node} runs in float: {self.dq} cannot move down {where}.",
            f"Quantize '{self.tensor}', directly before {self.node}.",
        )


class OperandTypesDiffer(Reason, key="types"):
    """Data and weights are quantized to types that cannot be multiplied."""

    dq: str
    weight_dq: str
    types: tuple[Precision, Precision]

"""Reasons that concern residual Adds and the convolutions before them."""

from collections.abc import Sequence

from qdqtool.reasons.finding import Cause, Finding, Reason, attempted_rule, fixable_rule
from qdqtool.reasons.tensors import (
    ConsumerKind,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
    find_shareable_quantizer,
)
from qdqtool.reasons.text import (
    Message,
    describe_consumers,
    describe_float_result,
    describe_origin,
    format_scale,
    format_size,
)


def advise_residual_pair(
    add: str, residual: str, quantizers: Sequence[TensorConsumer], shares: bool = False
) -> str:
    """Return the advice to quantize the residual input of an Add.

    Args:
        add: The Add.
        residual: The residual, for the text.
        quantizers: Qs that read the residual.
        shares: Whether a Q after a Split or Concat already reads the input of the Add.
    """
    q = find_shareable_quantizer(quantizers)
    if q is None and shares:
        return (
            f"Put Q/DQ before the residual input of {add}, with the scale of the Q that already "
            "reads this input: no new scale is needed."
        )
    if q is None:
        return f"Put Q/DQ on {residual} before {add}; its scale needs calibration."
    return (
        f"Connect the input of {add} that comes from {residual} to the DequantizeLinear of "
        f"{q.node} (scale {format_scale(q.scale)}): no new scale is needed."
    )


class ResidualFloat(Reason, key="residual-float"):
    """A residual Add after a convolution; the other input of the Add, the residual, is float.

    Attributes:
        add: The Add.
        residual: Producer of the residual.
        consumers: Consumers of the sum.
        elements: Size of the sum.
        tensor: ONNX tensor of the residual.
        quantizers: Qs that read the residual.
    """

    rules = (fixable_rule("SKIP-FLOAT"),)

    add: str
    residual: TensorOrigin
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None
    tensor: str = ""
    quantizers: tuple[TensorConsumer, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> Message:
        origin = describe_origin(self.residual, self.tensor)
        how = (
            f"{self.add} is fused into this layer and reads {origin} as float"
            if cause.fused
            else (f"{self.add} adds the result to {origin}, both as float")
        )
        fix = advise_residual_pair(self.add, f"'{self.tensor}'", self.quantizers)
        others = [x for x in self.consumers if x.kind in (ConsumerKind.OP, ConsumerKind.OUTPUT)]
        if others:
            # If the sum remains float, Q/DQ on the residual only add a conversion (seen in the
            # build resnet18-a100-qat-residual).
            fix += (
                f" This helps only if the result of {self.add} is quantized as well. At present, "
                f"{describe_consumers(others)}."
            )
        return f"{describe_float_result(self)} because {how}.", fix


class ResidualBothQuantized(Reason, key="residual-both-quantized"):
    """A residual Add with two quantized inputs; ``node`` is the convolution before the Add."""

    rules = (fixable_rule("ADD-BOTH"),)

    add: str
    quantizer: str
    scales: tuple[Scale, Scale] = (None, None)
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (
            f"{self.add} has Q/DQ on both inputs (scales "
            f"{' and '.join(map(format_scale, self.scales))}): "
            f"{self.quantizer} is fused into {self.node}, so the Add is a separate layer.",
            f"Remove {self.quantizer} and its DequantizeLinear.",
        )


class AddOutputNotQuantized(Reason, key="add-output-not-quantized"):
    """A residual Add with a quantized residual writes float.

    The sum is a network output, or has consumers other than a single Q.
    """

    rules = (attempted_rule("ADD-OUT-FLOAT"),)

    add: str
    residual: TensorOrigin
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        clause, residual = describe_consumers(self.consumers, " the sum"), self.residual.node
        if self.node == self.add:
            return (
                f"{self.add} runs in float{format_size(self.elements)}: its inputs are quantized, "
                f"but {clause}.",
                f"Quantize the result of {self.add}, or remove the Q/DQ pairs before it.",
            )
        return (
            f"{self.node} reads the residual of {self.add} as float and writes "
            f"float{format_size(self.elements)}, although the residual is quantized ({residual}): "
            f"{clause}.",
            f"Quantize the result of {self.add}, or remove the Q/DQ pair of {residual} before the "
            "Add.",
        )

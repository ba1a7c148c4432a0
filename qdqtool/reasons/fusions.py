"""Reasons why activations, BatchNormalizations, Pads and poolings are not fused."""

from qdqtool.reasons.finding import (
    Cause,
    Finding,
    FindingRule,
    Reason,
    attempted_rule,
    fixable_rule,
)
from qdqtool.reasons.tensors import TensorConsumer, TensorOrigin, TensorSize
from qdqtool.reasons.text import Message, describe_float_result, describe_origin, list_names


class ActivationBeforeAdd(Reason, key="activation-before-add"):
    """An activation is between a convolution and an Add.

    Attributes:
        add: The Add.
        activation: The activation.
        residual: Producer of the other input of the Add; None if the Add has no other input.
        elements: Size of the sum.
        consumers: Consumers of the sum.
    """

    rules = (attempted_rule("ADD-ACT"),)

    identity_excludes = (*Reason.identity_excludes, "consumers")

    add: str
    activation: str
    residual: TensorOrigin | None = None
    elements: TensorSize | None = None
    consumers: tuple[TensorConsumer, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> str:
        other = ""
        if self.residual is not None:
            state = "is quantized" if self.residual.quantizer else "is not quantized either"
            other = f". The other input of {self.add}, {describe_origin(self.residual)}, {state}"
        return (
            f"{describe_float_result(self)}: {self.activation} is between this "
            f"layer and {self.add}{other}."
        )


class PointwiseReadsOtherTensors(Reason, key="activation-joined"):
    """A convolution cannot fuse a pointwise kernel that reads other tensors as well.

    Attributes:
        pointwise: Nodes of the kernel.
        others: Producers of the kernel's other inputs.
        elements: Size of the convolution's result.
    """

    rules = (FindingRule("OUT-FLOAT"),)

    pointwise: tuple[str, ...]
    others: tuple[TensorOrigin, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{describe_float_result(self)}: the nodes after this layer "
            f"({list_names(self.pointwise)}) "
            "become one pointwise kernel, which also reads "
            f"{list_names(map(describe_origin, self.others))}. No convolution fuses such a kernel."
        )


class QuantizerInsideActivation(Reason, key="inside-activation"):
    """A Q separates a convolution from its activation, or a SiLU's Sigmoid from its Mul.

    Convolution and activation then remain separate layers.

    Attributes:
        convolution: The convolution.
        activation: Node of the activation; the Sigmoid of a SiLU.
        silu: Whether the activation is SiLU.
        gate: Whether the Q is between the Sigmoid and the Mul.
        second: Second Q, between Sigmoid and Mul, if ``gate`` is False; empty if no second Q is
            there.
    """

    rules = (fixable_rule("SILU-INNER-Q", lambda r: r.silu), fixable_rule("ACT-INNER-Q"))

    identity_excludes = (*Reason.identity_excludes, "second")

    convolution: str
    activation: str
    silu: bool
    gate: bool = False
    second: str = ""
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} is between {self.activation} and the Mul of {self.convolution}'s SiLU."
            if self.gate
            else f"{self.node} is between {self.convolution} and "
            f"{'SiLU' if self.silu else self.activation or 'its activation'}."
        )


class QuantizerAfterPad(Reason, key="behind-pad"):
    """A Q/DQ pair is between a Pad of zeros and its convolution.

    The Pad becomes a separate layer in INT8.
    """

    rules = (attempted_rule("PAD-SPLIT"),)

    pad: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"a Q/DQ pair is between {self.pad} and {self.node}."


class StemBeforePool(Reason, key="stem-before-pool"):
    """A stem convolution fuses a Relu with Q/DQ on both sides, and the MaxPool after the Relu.

    Attributes:
        relu: The Relu.
        pool: The MaxPool.
    """

    rules = (FindingRule("STEM-POOL"),)

    relu: str
    pool: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node}, {self.relu} and {self.pool} become one INT8 layer, for which TensorRT "
            "may have no kernel."
        )


class BatchNormNotConstant(Reason, key="batchnorm-not-constant"):
    """A BatchNormalization that is not folded, because its parameters are not constants."""

    rules = (fixable_rule("BN-UNFOLDED"),)

    batchnorm: str
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} writes float because {self.batchnorm} remains a separate layer: "
            f"the parameters of {self.batchnorm} are not plain constants."
        )


class ConvTransposeBatchNorm(Reason, key="convtranspose-batchnorm"):
    """A BatchNormalization after a quantized ConvTranspose is not folded."""

    rules = (fixable_rule("CT-BN"),)

    batchnorm: str
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (
            f"{describe_float_result(self)}: {self.batchnorm} after this layer is not folded.",
            f"Fold {self.batchnorm} into the weights of {self.node} before quantizing.",
        )

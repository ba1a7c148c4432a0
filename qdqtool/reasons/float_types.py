"""Reasons that concern float types: FP32, FP16 and bfloat16 in a quantized model."""

from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.text import format_number, name_first
from qdqtool.util.text import format_layer_counts


class UnsupportedBfloat16(Reason):
    """bfloat16 tensors, which the target's parser does not support.

    Attributes:
        tensor: The first bfloat16 tensor.
    """

    rules = (FindingRule("FLOAT-BF16"),)

    tensor: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"'{self.tensor}' is bfloat16, which TensorRT before 9.0 cannot import."


class ConstantsBeyondFp16(Reason):
    """Arithmetic constants outside FP16's normal range; ``node`` reads the first constant.

    Attributes:
        first: The first nodes that read such a constant, each with the value.
        large: Number of constants that are too large.
        small: Number of constants that become zero or FP16's smallest number.
        denormal: Number of other constants that are denormal in FP16.
    """

    rules = (FindingRule("CONST-FP16"),)

    first: tuple[tuple[str, float], ...]
    large: int
    small: int
    denormal: int

    def message(self, finding: Finding, cause: Cause) -> str:
        counts = (
            (self.large, "above 65504"),
            (self.small, "below 6e-8"),
            (self.denormal, "denormal (fewer digits)"),
        )
        listed = ", ".join(f"{node} reads {format_number(value)}" for node, value in self.first)
        kinds = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        return f"constants outside FP16's normal range: {kinds}; {listed}."


class RemainingFloat(Reason):
    """Layers that read or write FP32 in a strongly typed network.

    Attributes:
        convolutions: Number of convolutions and matrix products that read or write FP32 in the
            engine, and that could use FP16.
        total: Number of all convolutions and matrix products.
        first: The first of these layers that reads or writes FP32; empty if there is none.
        products: Number of matrix products in `total`, of any type.
        quantized: Number of convolutions and matrix products with quantized inputs and weights.
    """

    # FP16 saves time in layers that are not quantized. However, an INT8 convolution needs a
    # reformat to write FP16, but not to write FP32. Therefore, FP16 may cost time if nearly all
    # layers are quantized.
    rules = (
        fixable_rule("FLOAT-FP32", lambda r: r.quantized < 0.9 * r.total),
        fixable_rule("FLOAT-FP32", on_request=True),
    )

    convolutions: int
    total: int
    first: str
    products: int = 0
    quantized: int = 0

    def message(self, finding: Finding, cause: Cause) -> str:
        layers = format_layer_counts(self.total - self.products, self.products)
        if not self.convolutions:
            return f"the float part of the model is FP32. None of {layers} reads or writes it."
        return (
            f"the float part of the model is FP32: {self.convolutions} of {layers} could read or "
            f"write FP16 instead {name_first(self.first, self.convolutions)}."
        )


class FloatTypesDiffer(Reason, key="float-types"):
    """Data and weights of a layer are dequantized to different float types.

    Attributes:
        dq: DQ of the data.
        weight_dq: DQ of the weights.
        floats: Float types of data and weights.
    """

    rules = (FindingRule("FLOAT-MIXED"),)

    dq: str
    weight_dq: str
    floats: tuple[Precision, Precision]

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node}: its data is {self.floats[0]}, but its weights are {self.floats[1]}."

"""Reasons that concern matrix products, attention, normalizations and regions of Myelin."""

from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.tensors import PathStep
from qdqtool.reasons.text import Message, format_step, list_names
from qdqtool.util.text import format_count


class ProductOfActivations(Reason):
    """A product of two quantized tensors that are computed at run time."""

    rules = (FindingRule("MATMUL-COMPUTED"),)

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} multiplies two quantized activations."


class AttentionHead(Reason):
    """A quantized matrix product of an attention that TensorRT does not fuse into one kernel.

    Attributes:
        size: Head size, the number of products that are summed for one score.
        precision: Type of the product, INT8 or FP8.
    """

    rules = (FindingRule("ATT-HEAD"),)

    size: int
    precision: Precision = Precision.INT8

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        text = (
            f"{self.node} computes the scores of an attention with head size {self.size} in "
            f"{self.precision}. The attention does not become one kernel."
        )
        if self.precision == Precision.INT8:
            return text
        return (
            text,
            "Use TensorRT 10.6 or later with head sizes of 9 to 64 and at most 3,072 keys, and "
            "put Q/DQ on all inputs of both products and after the second product. Otherwise "
            "leave the attention float.",
        )


class FloatEinsum(Reason):
    """A matrix product that an Einsum computes.

    Attributes:
        equation: Equation of the Einsum.
        quantized: Whether both operands come from DQs.
    """

    rules = (FindingRule("EINSUM-FLOAT"),)

    equation: str
    quantized: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        operands = "Both operands" if self.quantized else "Not all operands"
        return (
            f"{self.node} computes a matrix product as an Einsum ({self.equation}), which runs in "
            f"float. {operands} come from DQs."
        )


class FloatNormalization(Reason):
    """A normalization or Softmax after a DQ."""

    rules = (FindingRule("NORM-FLOAT"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} ({self.op}) reads the output of a DQ and is computed in float."


class DecomposedNorm(Reason):
    """Squares that FP16 may not hold, in a decomposed LayerNorm or before another sum.

    ``node`` computes the squares.

    Attributes:
        exact: Whether the target accepts LayerNormalization, and a LayerNormalization computes the
            same result.
        opset: Opset of the model.
        alone: Operator of ``node`` if it is not part of a known normalization; else empty.
    """

    rules = (fixable_rule("NORM-PIECES"),)

    exact: bool
    opset: int
    alone: str = ""

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        if self.alone:
            return (
                (
                    f"{self.node} ({self.alone}) squares values that are summed: in FP16, the "
                    "square of 256 is infinite, and the square of 2e-4 is zero."
                ),
                "Keep the square and the sum FP32, or scale the values before them so that FP16 "
                "holds the squares.",
            )
        text = (
            f"{self.node} squares values in a decomposed normalization: in FP16, the square of "
            "256 is infinite."
        )
        if self.exact:
            raised = f", and raises the opset from {self.opset} to 17" if self.opset < 17 else ""
            return (
                text,
                "qdqtool fix --only NORM-PIECES writes a LayerNormalization, which computes the "
                f"same result{raised}.",
            )
        if self.opset >= 17:
            return (
                text,
                "Keep the normalization FP32: no LayerNormalization computes the same result.",
            )
        return text


class MyelinCompiledRegion(Reason):
    """Attention and normalizations that Myelin compiles; ``node`` is the first node.

    Attributes:
        last: The last node in graph order.
        nodes: Number of nodes without Q and DQ.
        products: Number of matrix products.
        int8: Number of matrix products that compute in INT8.
        fp8: Number of matrix products that compute in FP8.
        softmaxes: Number of Softmax nodes.
        norms: Number of normalizations.
        fused: Number of Q and DQ that the region's kernels absorb.
        uncertain: Number of Q and DQ in ``fused`` that may be conversions instead.
        possible: Number of predicted conversions that the region may absorb instead.
    """

    rules = (FindingRule("MYELIN-REGION"),)

    last: str
    nodes: int
    products: int
    int8: int
    fp8: int
    softmaxes: int
    norms: int
    fused: int
    uncertain: int
    possible: int

    def message(self, finding: Finding, cause: Cause) -> str:
        fp8 = f"{self.fp8} FP8, " if self.fp8 else ""
        floats = self.products - self.int8 - self.fp8
        products = format_count(self.products, "matrix product")
        parts = [
            f"{products} ({self.int8} INT8, {fp8}{floats} float)" if self.products else "",
            f"{self.softmaxes} Softmax" if self.softmaxes else "",
            format_count(self.norms, "normalization") if self.norms else "",
        ]
        where = (
            f"{self.nodes} nodes from {self.node} to {self.last}, with "
            f"{', '.join(p for p in parts if p)}"
        )
        if self.possible:
            return (
                f"Myelin may compile {where}: up to {self.possible} of the predicted conversions "
                "would then be part of Myelin's kernels."
            )
        text = f"Myelin compiles {where}"
        if self.fused:
            verb = "becomes" if self.fused == 1 else "become"
            text += f": {format_count(self.fused, 'Q/DQ node')} {verb} part of Myelin's kernels"
            text += (
                f" (up to {self.uncertain} may be conversions instead)" if self.uncertain else ""
            )
        return f"{text}."


class FloatMyelinLayer(Reason, key="in-myelin"):
    """A layer with weights that Myelin runs in float, together with connected layers.

    Attributes:
        trigger: Operator that only Myelin runs.
        data_quantized: Whether the data comes from a DQ.
        weights_quantized: Whether the weights come from a DQ.
    """

    rules = (FindingRule("NOT-QUANTIZED"),)

    trigger: PathStep
    data_quantized: bool
    weights_quantized: bool

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        where = f"is compiled by Myelin together with {format_step(self.trigger)}"
        missing = (
            "no Q/DQ"
            if not (self.data_quantized or self.weights_quantized)
            else ("no Q/DQ on its weights" if self.data_quantized else "no Q/DQ on its input")
        )
        return f"{self.node} {where}, has {missing} and runs in float."


class QuantizedResidualStream(Reason):
    """An Add in a transformer's residual stream with at least one input from a DQ.

    Attributes:
        pairs: DQs that produce inputs of the Add.
        norm: Normalization of the sum.
    """

    rules = (FindingRule("RESIDUAL-STREAM"),)

    pairs: tuple[str, ...]
    norm: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} adds to the residual stream that {self.norm} normalizes, and reads the "
            f"stream through Q/DQ ({list_names(self.pairs)})."
        )

"""Reasons that concern operators that TensorRT cannot import, or that were not analyzed."""

from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.text import Message, list_names, name_first
from qdqtool.util.text import format_count


class IntegerOperator(Reason):
    """An operator of onnxruntime's integer formats."""

    rules = (FindingRule("QOPERATOR"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} is a {self.op}, which TensorRT cannot import."


class AtenNodes(Reason):
    """Nodes with operators of ATen other than quantizers; ``node`` is the first of them.

    Attributes:
        operator: Operator of the first node.
        more: Number of further nodes.
    """

    rules = (FindingRule("ATEN-FALLBACK"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all nodes

    operator: str
    more: int

    def message(self, finding: Finding, cause: Cause) -> str:
        more = f" (and {format_count(self.more, 'more node')})" if self.more else ""
        return (
            f"{self.node}{more} is the ATen operator {self.operator}, for which the exporter found "
            "no ONNX operator. TensorRT's parser stops at this node, and the prediction does not "
            "cover convolutions inside the operator."
        )


class UnanalyzedSubgraphs(Reason):
    """Layers and quantizers in the branches of an If, or in the body of a Loop or Scan.

    Attributes:
        op: Operator with the subgraphs.
        convolutions: Number of convolutions in the subgraphs.
        products: Number of matrix products in the subgraphs.
        quantizers: Number of Q and DQ in the subgraphs.
        int8: Number of INT8 layers if each subgraph is predicted separately; None if this is not
            possible.
    """

    rules = (FindingRule("SUBGRAPH"),)

    op: str
    convolutions: int
    products: int
    quantizers: int
    int8: int | None

    def message(self, finding: Finding, cause: Cause) -> str:
        counts = (
            (self.convolutions, "convolution"),
            (self.products, "matrix product"),
            (self.quantizers, "Q/DQ node"),
        )
        content = " and ".join(format_count(count, noun) for count, noun in counts if count)
        place = "its branches" if self.op == "If" else "its body"
        alone = ""
        if self.int8 is not None and self.quantizers:
            layers = format_count(self.int8, "layer")
            alone = f" A separate prediction of {place} shows {layers} in INT8."
        return (
            f"{self.node} ({self.op}): the prediction does not cover {content} in {place}.{alone}"
        )


class RuntimeOperators(Reason):
    """Operators of onnxruntime's optimizer or quantization tool; ``node`` is the first node.

    Attributes:
        ops: Types of the operators.
        count: Number of nodes.
        packs_weights: Whether the first node has packed weights of few bits (such as 4).
    """

    rules = (FindingRule("ORT-OPERATOR"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all nodes

    ops: tuple[str, ...]
    count: int
    packs_weights: bool

    def message(self, finding: Finding, cause: Cause) -> Message:
        first = name_first(self.node, self.count)
        text = (
            f"{format_count(self.count, 'node')} {first} are operators of onnxruntime "
            f"({list_names(self.ops)}), for which TensorRT's parser has no importer."
        )
        if self.count == 1:
            text = (
                f"{self.node} is the operator {self.ops[0]} of onnxruntime, for which TensorRT's "
                "parser has no importer."
            )
        if self.packs_weights:
            return (
                text,
                "Quantize the weights of the float model in Q/DQ form: INT4 blocks with a "
                "DequantizeLinear (onnxruntime's quantizer: quant_format QDQ; ModelOpt: int4_awq).",
            )
        return (
            text,
            (
                "Use the model before onnxruntime's optimizer (optimized_model_filepath, optimum, "
                "transformers.optimizer), or save the model with ORT_ENABLE_BASIC, which writes "
                "no such operators."
            ),
        )


class FloatOperator(Reason):
    """An operator without INT8 kernels whose inputs are quantized."""

    rules = (FindingRule("OP-FLOAT"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} ({self.op}) runs in float: the Q/DQ before this node reduce the "
            "precision, remain as conversions and save no time."
        )


class LocalFunctions(Reason):
    """Functions of the model that the parser does not inline."""

    rules = (fixable_rule("FUNC-LOCAL"),)

    functions: tuple[str, ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        count = format_count(len(self.functions), "function")
        return (
            f"the model defines {count} of its own ({list_names(self.functions)}), which "
            "TensorRT's parser cannot import. The prediction holds for the model with the "
            "functions inlined."
        )


class UnknownOperator(Reason):
    """A plugin or unknown operator; ``more`` is the number of further nodes of this operator."""

    rules = (FindingRule("PLUGIN-OUTSIDE"),)

    op: str
    more: int

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node}{f' (and {self.more} more)' if self.more else ''} is a plugin or "
            f"unknown operator ({self.op}): no Q or DQ moves past this node or is fused into it."
        )

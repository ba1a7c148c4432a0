"""Reasons that concern conversions that remain as layers, and quantizers that cannot move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qdqtool.evidence import Evidence
from qdqtool.ir.operators import JOINS
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import (
    Cause,
    Finding,
    FindingRule,
    Reason,
    attempted_rule,
    fixable_rule,
)
from qdqtool.reasons.outputs import UnfusableOutputScale
from qdqtool.reasons.scales import describe_different_scales, list_scale_rules
from qdqtool.reasons.tensors import (
    ConsumerKind,
    PathStep,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
    find_operator_between_quantizers,
    find_operator_between_scales,
    float_consumers,
    quantizer_consumers,
)
from qdqtool.reasons.text import (
    NO_ACTION,
    Message,
    advise_common_scale,
    consumer_names,
    describe_consumers,
    describe_unanalyzed_consumers,
    format_node,
    format_scale,
    list_names,
)
from qdqtool.util.records import field_values


class OperatorNotCommuting(Reason, key="not-commuting"):
    """A Q cannot move up past an operator of this type."""

    op: str
    quantizer: str


class ManyConsumers(Reason, key="many-consumers"):
    """A Q or DQ cannot move past an operator because of other consumers.

    The operator's result has consumers other than the Q, or the DQ's result has consumers other
    than the operator.
    """

    op: str
    quantizer: str
    consumers: tuple[TensorConsumer, ...]


class ConcatReadAsFloat(Reason, key="output-not-only-quantized"):
    """A Q cannot pass a Concat whose result has consumers other than the Q."""

    consumers: tuple[TensorConsumer, ...]


def sibling_quantizers(r: RemainingConversion) -> list[TensorConsumer]:
    """Return the Qs that read the tensor before a remaining Q, with this Q as the last."""
    converter = TensorConsumer(ConsumerKind.Q, r.node, "QuantizeLinear", r.path, r.scale)
    return [*quantizer_consumers(r.siblings), converter]


# UNKNOWN stands for a type that TensorRT lacks (FP8 E5M2), which another finding reports.
COVERED_TYPES = (Precision.INT8, Precision.FP8, Precision.INT32, Precision.UNKNOWN)


def _list_consumers(r: RemainingConversion) -> str:
    return list_names(
        "the network's output" if x.kind == ConsumerKind.OUTPUT else x.node for x in r.consumers
    )


def _describe_remaining(cause: Cause, r: RemainingConversion) -> str:
    """Return the text after ``remains as a layer:`` that explains a remaining conversion."""
    origin = r.origin
    if r.precision not in COVERED_TYPES and origin.node:
        return f"{r.precision} is not covered by the prediction"
    if cause.see:
        places = (f"{code} at {node}" if node else code for code, node in cause.see)
        return f"see {', and '.join(places)}"
    if not r.quantize:
        if r.consumers and all(x.kind == ConsumerKind.OUTPUT for x in r.consumers):
            return "its result is the network's output"
        return f"{_list_consumers(r) or 'its consumer'} cannot absorb it"
    if cause.also:
        return _describe_obstacle(r, cause.also[0])
    if origin.int8:
        kind = Precision.FP8 if r.precision is Precision.FP8 else Precision.INT8
        return f"{format_node(origin.node, origin.op)} runs in {kind}, but cannot absorb the Q"
    joined = " joins several tensors and" if origin.op in JOINS else ""
    return f"{origin.node} ({origin.op}){joined} runs in float"


def _describe_obstacle(r: RemainingConversion, reason: Reason) -> str:
    if isinstance(reason, UnfusableOutputScale):
        scale = "a computed scale" if reason.computed else "one scale per channel"
        return f"{r.origin.node} cannot absorb a Q with {scale}"
    if isinstance(reason, OperatorNotCommuting):
        return f"a Q cannot move up past {format_node(reason.node, reason.op)}"
    if isinstance(reason, ManyConsumers):
        floats = float_consumers(reason.consumers)
        unread = describe_unanalyzed_consumers(reason.consumers)
        clause = describe_consumers(floats, it="")
        if any(x.kind == ConsumerKind.OUTPUT for x in floats):
            clause = f"is also read by {list_names(consumer_names(floats))}"
        operator = format_node(reason.node, reason.op)
        return f"the Q cannot move up past {operator}, which {clause}{unread}"
    if isinstance(reason, ConcatReadAsFloat):
        return (
            f"{reason.node} (Concat) is also read as float by "
            f"{list_names(consumer_names(float_consumers(reason.consumers)))}"
            f"{describe_unanalyzed_consumers(reason.consumers)}"
        )
    return f"{reason.node} runs in float"


class RemainingConversion(Reason, key="stays"):
    """A Q or DQ that no layer has absorbed and that is a conversion in the engine.

    Attributes:
        name: Name of the conversion in the engine. The copy of a Q that moved up past a Concat has
            a name that ends with ``_clone_<input>``.
        quantize: Whether the node is a Q.
        tensor: ONNX tensor that the node quantizes or dequantizes.
        scale: Scale of the node.
        origin: Producer of the tensor before the conversion.
        siblings: Consumers of the tensor before the conversion.
        consumers: Consumers of the converted tensor.
        path: Operators that the Q or DQ moved past, in the order of the moves.
        blocked: Reason why the Q or DQ did not move farther; None if unknown.
        elements: Size of the converted tensor; None if unknown.
        convolutions: Layers with weights that have the converted tensor as their data.
        pair: For a DQ, the Q before it. For a requantization, the Q of the first pair.
        first_scale: For a requantization, the scale of the input.
        requantizes: Whether the conversion is a requantization: it reads and writes quantized
            values.
        precision: Quantized type.
        attention: Whether the node quantizes the result of a Softmax for a MatMul of two computed
            tensors.
        evidence: Evidence that the conversion remains in the engine.
    """

    rules: ClassVar[tuple[FindingRule, ...]] = (
        attempted_rule("CONVERSION", lambda r: not r.quantize or r.requantizes or r.origin.node),
        # A common scale of several Qs at the input is a fix of SIBLING-SCALE. One Q always remains.
        FindingRule("INPUT-CONVERSION"),
    )

    name: str
    quantize: bool
    tensor: str
    scale: Scale
    origin: TensorOrigin
    siblings: tuple[TensorConsumer, ...]
    consumers: tuple[TensorConsumer, ...]
    path: tuple[PathStep, ...] = ()
    blocked: Reason | None = None
    elements: TensorSize | None = None
    convolutions: tuple[str, ...] = ()
    pair: str = ""
    first_scale: Scale = None
    requantizes: bool = False
    precision: Precision = Precision.INT8
    attention: bool = False
    evidence: Evidence = Evidence.SEEN

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        scale = format_scale(self.scale)
        if finding.code == "INPUT-CONVERSION":
            is_unknown = self.precision == Precision.UNKNOWN
            kind = "a type that TensorRT does not support" if is_unknown else self.precision
            text = (
                f"{self.name} converts the network's input '{self.origin.tensor}' to {kind} "
                f"(scale {scale})."
            )
            # The general advice for INPUT-CONVERSION is about INT8 and UINT8 images.
            return (text, NO_ACTION) if self.precision == Precision.FP8 else text
        assumed = (
            (
                " This assumes that the attention does not become one kernel. Such a kernel would "
                "include the conversion."
            )
            if self.attention
            else ""
        )
        text = f"{self.name} (scale {scale}) remains as a layer: "
        if finding.code == "CONVERSION" and self.quantize and self.origin.input:
            node = format_node(self.origin.node, self.origin.op)
            text += f"it quantizes the network's input '{self.origin.input}' after {node}."
            if self.precision == Precision.INT8:
                text += (
                    " If the application can feed INT8 images, quantize the model with the float "
                    "input by insert --input-type int8: the engine then has no such layer."
                )
            return text, NO_ACTION
        return f"{text}{_describe_remaining(cause, self)}.{assumed}"


class ConversionBetweenScales(RemainingConversion):
    """A remaining conversion that is reported because of different scales around it."""

    rules = (
        fixable_rule("DOUBLE-QDQ", lambda r: r.requantizes and not r.path),
        *list_scale_rules(
            lambda r: (
                find_operator_between_scales(r.path)
                if r.requantizes
                else find_operator_between_quantizers(r.siblings)
            )
        ),
    )

    @staticmethod
    def from_conversion(conversion: RemainingConversion) -> ConversionBetweenScales:
        """Return a copy of a conversion as an instance of this class."""
        return ConversionBetweenScales(*field_values(conversion))

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        if not self.requantizes:
            return describe_different_scales(
                cause,
                self.origin.tensor,
                self.siblings,
                f"'{self.origin.tensor}' is converted once for each scale",
            )
        before, scale = format_scale(self.first_scale), format_scale(self.scale)
        if finding.code == "DOUBLE-QDQ":
            return (
                f"{self.pair} has scale {before}, and {self.node} after it has {scale}: "
                f"{self.precision} is converted to {self.precision}."
            )
        quantizers = sibling_quantizers(self)
        if finding.code == "CONCAT-SCALE" and (
            cause.also or len({q.scale for q in quantizers if q.scale is not None}) > 1
        ):
            consequence = f"{self.node} requantizes"
            return describe_different_scales(cause, self.tensor, quantizers, consequence)
        between = find_operator_between_scales(self.path)
        where = "" if between is None else f", with {between.node} ({between.op}) between them"
        return (
            f"{self.pair} has scale {before}, and {self.node} has {scale}{where}: "
            f"{self.precision} is converted to {self.precision}.",
            advise_common_scale(self.scales_to_unify()),
        )

    def scales_to_unify(self) -> Sequence[Scale]:
        if self.requantizes and not self.path:  # DOUBLE-QDQ: one of the two pairs is removed
            return ()
        between = (self.first_scale, self.scale) if self.requantizes else ()
        return [*(q.scale for q in quantizer_consumers(self.siblings)), *between]

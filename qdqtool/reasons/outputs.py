"""Reasons why quantized layers write float, and why averages run in float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdqtool.ir.operators import AVERAGES, OPERATORS, LayerKind
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.residuals import advise_residual_pair
from qdqtool.reasons.scales import describe_different_scales, list_scale_rules
from qdqtool.reasons.tensors import (
    ConsumerKind,
    PathStep,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
    find_operator_between_quantizers,
    float_consumers,
    quantizer_consumers,
)
from qdqtool.reasons.text import (
    NO_ACTION,
    Message,
    consumer_names,
    describe_consumers,
    describe_float_result,
    describe_unanalyzed_consumers,
    format_scale,
    format_step,
    list_names,
)


def advise_reduction(r: ReduceNotPooling) -> str:
    """Return the advice for a ReduceMean that runs in float."""
    text = (
        "Replace the ReduceMean by GlobalAveragePool and Flatten (the same result) with Q/DQ "
        "before and after the pooling"
    )
    return f"{text}, or remove the Q/DQ pair before the ReduceMean." if r.dq else f"{text}."


def describe_reduction(r: ReduceNotPooling) -> str:
    """Describe why a ReduceMean runs in float."""
    return (
        f"{r.node} (ReduceMean) runs in float: TensorRT converts it to a pooling only over height "
        "and width with keepdims=1."
    )


class PoolingQuantizedOnOneSide(Reason, key="pooling-one-side"):
    """An averaging pooling is quantized on one side only.

    Attributes:
        quantized_input: Whether the quantized side is the input; otherwise it is the result.
        origin: Producer of the input.
        consumers: Consumers of the result.
        elements: Size of the input.
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
                f"the result has consumers other than {quantizers_after[0].node}"
                if quantizers_after
                else "no QuantizeLinear is after this node"
            )
            return f"{self.node} runs in float: {self.origin.node} is before this node, but {why}."
        return (
            f"{self.node} runs in float: its output is quantized "
            f"({list_names(consumer_names(quantizers_after))}), but its input is not."
        )


class ReduceNotPooling(Reason, key="reduce-not-pooling"):
    """An average that does not become a pooling, and runs in float.

    The node does not average over height and width with keepdims=1.

    Attributes:
        dq: DQ before the node; empty if the input does not come from a DQ.
        consumers: Consumers of the result.
        elements: Size of the input.
    """

    rules = (FindingRule("POOL-FLOAT"),)

    identity_excludes = (*Reason.identity_excludes, "dq", "consumers")

    dq: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (describe_reduction(self), advise_reduction(self))


def find_float_sum(r: OutputMixedConsumers) -> TensorConsumer | None:
    """Return the first residual sum that reads a result as float, else None."""
    return next((x for x in float_consumers(r.consumers) if x.kind == ConsumerKind.SUM), None)


def find_single_average(r: OutputNotQuantized) -> TensorConsumer | None:
    """Return the averaging pooling that is the only consumer of a result, else None."""
    return r.consumers[0] if len(r.consumers) == 1 and r.consumers[0].op in AVERAGES else None


def feeds_no_weighted_layer(r: OutputNotQuantized) -> bool:
    """Return whether no consumer of a result feeds a layer with weights."""
    return all(x.kind == ConsumerKind.OUTPUT or not x.feeds_weighted for x in r.consumers)


def is_before_normalization(r: OutputNotQuantized) -> bool:
    """Return whether a LayerNormalization is the only consumer of a result."""
    return len(r.consumers) == 1 and r.consumers[0].op == "LayerNormalization"


def _is_silu_last(r: OutputNotQuantized) -> bool:
    silu = r.activation is not None and r.activation.op == "SiLU"
    return silu and not (
        feeds_no_weighted_layer(r) or quantizer_consumers(r.consumers) or is_before_normalization(r)
    )


_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def find_shared_pooling(r: OutputMixedConsumers) -> PathStep | None:
    """Return the pooling or Resize between a result and all its consumers, else None.

    This operator has quantized and float consumers, so that no Q can move up past it.
    """
    shared = r.consumers[0].path[0] if r.consumers[0].path else None
    if shared is None or any(not x.path or x.path[0].node != shared.node for x in r.consumers):
        return None
    operator = OPERATORS.get(shared.op)
    if operator is None or operator.passage is None:
        return None
    return shared if operator.kind in _POOLS or shared.op == "GlobalMaxPool" else None


def quantizers_after_pooling(r: OutputMixedConsumers) -> list[TensorConsumer]:
    """Return the Qs after a shared pooling, with paths that begin after the pooling."""
    return [replace(q, path=q.path[1:]) for q in quantizer_consumers(r.consumers)]


class OutputNotQuantized(Reason, key="output-not-quantized"):
    """A quantized layer writes float, because no Q after the layer can be absorbed.

    No Q reads the result, or an operator between the layer and the Q keeps the Q from moving up.

    Attributes:
        tensor: ONNX tensor of the result.
        consumers: Consumers of the result.
        elements: Size of the result.
        activation: Pointwise activation that the layer has fused; None without an activation.
    """

    rules = (
        FindingRule("POOL-FLOAT", find_single_average),
        FindingRule("SILU-NO-Q-AFTER", _is_silu_last),
        FindingRule("OUT-FLOAT"),
    )

    tensor: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None
    activation: PathStep | None = None

    def _explain_pooling(self, finding: Finding, pooling: Reason | None) -> Message | str:
        if isinstance(pooling, ReduceNotPooling):
            return (
                f"{describe_float_result(self)} because {describe_reduction(pooling)}",
                advise_reduction(pooling),
            )
        why = "it is not quantized"
        if isinstance(pooling, PoolingQuantizedOnOneSide):
            quantizers_after = quantizer_consumers(pooling.consumers)
            if quantizers_after:
                why = f"only its output is quantized ({quantizers_after[0].node})"
        return f"{describe_float_result(self)} because {finding.node} runs in float: {why}."

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        quantized = quantizer_consumers(self.consumers)
        if finding.code == "POOL-FLOAT":
            return self._explain_pooling(finding, cause.also[0] if cause.also else None)
        if is_before_normalization(self) and self.node in finding.convolutions:
            norm = self.consumers[0]
            return (
                f"{describe_float_result(self)}: {norm.node} ({norm.op}) reads the result as "
                "float.",
                (
                    f"Put Q/DQ before {norm.node}: {self.node} then writes 8 bits with faster "
                    "kernels (ModelOpt pull request 1117). The normalization itself remains "
                    "float."
                ),
            )
        if quantized:
            past = list_names(format_step(s) for s in quantized[0].path)
            return (
                f"{describe_float_result(self)}: {quantized[0].node} remains after "
                f"{past or 'this layer'} "
                "and cannot move up."
            )
        clause = describe_consumers(self.consumers)
        if finding.code == "SILU-NO-Q-AFTER":
            return f"{describe_float_result(self)} after SiLU: {clause}."
        if feeds_no_weighted_layer(self) and any(
            x.kind != ConsumerKind.OUTPUT for x in self.consumers
        ):
            several = len({x.node for x in self.consumers}) > 1
            clause += f" ({'those layers are' if several else 'that layer is'} not quantized)"
        return f"{describe_float_result(self)}: {clause}."


class OutputDifferentScales(Reason, key="output-different-scales"):
    """Several Qs with different scales are the only consumers of a layer's result."""

    rules = list_scale_rules(lambda r: find_operator_between_quantizers(r.consumers))

    tensor: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        writes = (
            describe_float_result(self)
            if self.node in finding.convolutions
            else f"'{self.tensor}' is converted once for each scale"
        )
        return describe_different_scales(cause, self.tensor, self.consumers, writes)

    def scales_to_unify(self) -> Sequence[Scale]:
        return [q.scale for q in quantizer_consumers(self.consumers)]


class OutputMixedConsumers(Reason, key="output-many-consumers"):
    """The result of a quantized layer has both a Q and a float consumer."""

    rules = (
        fixable_rule("POOL-MIXED", find_shared_pooling),
        fixable_rule("SKIP-FLOAT", find_float_sum),
        FindingRule("OUT-MIXED"),
    )

    tensor: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        quantized, floats = quantizer_consumers(self.consumers), float_consumers(self.consumers)
        add, pool = find_float_sum(self), find_shared_pooling(self)
        if pool is not None:
            return (
                f"{describe_float_result(self)} because {pool.node} ({pool.op}) is read through "
                "Q/DQ by "
                f"{list_names(consumer_names(quantized))} and as float by "
                f"{list_names(consumer_names(floats))}"
                f"{describe_unanalyzed_consumers(self.consumers)}: "
                f"no Q can move up past {pool.node}.",
                advise_residual_pair(
                    add.node, f"the result of {pool.node}", quantizers_after_pooling(self)
                )
                if add is not None
                else "",
            )
        if add is not None:
            fix = advise_residual_pair(add.node, f"'{self.tensor}'", quantized, add.shares)
            others = list(dict.fromkeys(consumer_names([x for x in floats if x.node != add.node])))
            if others:
                fix += (
                    f" This helps only if {list_names(others)} "
                    f"{'reads' if len(others) == 1 else 'read'} the result through Q/DQ as well."
                )
            return (
                f"{describe_float_result(self)} because {add.node} reads the result as float (the "
                "residual "
                f"input of the {add.op} has no "
                f"Q/DQ){describe_unanalyzed_consumers(self.consumers)}.",
                fix,
            )
        names = list(dict.fromkeys(consumer_names(floats)))
        quantizer_names = list(dict.fromkeys(consumer_names(quantized)))
        return (
            f"{describe_float_result(self)} because {list_names(names)} "
            f"{'reads' if len(names) == 1 else 'read'} the result as float, although "
            f"{list_names(quantizer_names)} "
            f"{'quantizes' if len(quantizer_names) == 1 else 'quantize'} the result"
            f"{describe_unanalyzed_consumers(self.consumers)}."
            + ("" if finding.gains else " No action needed: more Q/DQ would gain nothing."),
            f"Put Q/DQ with scale {format_scale(quantized[0].scale)} before {list_names(names)}."
            if finding.gains
            else NO_ACTION,
        )


class UnfusableOutputScale(Reason, key="output-scale"):
    """The Q after a layer cannot be fused: its scale is computed, or varies by channel."""

    rules = (FindingRule("OUT-FLOAT"),)

    quantizer: str
    computed: bool

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (
            f"{self.node} writes float: "
            + (
                f"the Q after the node, {self.quantizer}, has a scale that is computed at run time."
                if self.computed
                else f"the Q after the node, {self.quantizer}, has one scale per channel."
            ),
            f"Give {self.quantizer} one constant scale for the whole tensor.",
        )

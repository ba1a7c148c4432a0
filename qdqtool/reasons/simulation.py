"""Reasons of the simulator: a pass did not fire at a node, or a conversion remains.

Findings are built from these records alone, so they show the values that the simulator used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from qdqtool.ir.operators import AVERAGES, CUTS, JOINS, OPERATORS, LayerKind
from qdqtool.ir.qdq import PerChannel
from qdqtool.reasons.tensors import (
    ConsumerKind,
    PathStep,
    Scale,
    TensorConsumer,
    TensorOrigin,
    TensorSize,
    find_shareable_quantizer,
    float_consumers,
    operator_between,
    operator_between_quantizers,
    quantizer_consumers,
)
from qdqtool.reasons.text import (
    NO_ACTION,
    Message,
    advise_common_scale,
    consumer_names,
    describe_consumers,
    describe_origin,
    describe_unread_consumers,
    format_node,
    format_scale,
    format_size,
    format_step,
    list_names,
)
from qdqtool.types import (
    Cause,
    Evidence,
    Finding,
    FindingRule,
    Precision,
    Refusal,
    attempted,
    fixable,
)
from qdqtool.util.records import field_values, replace_fields


def quantizers_with_own(r: RemainingConversion) -> list[TensorConsumer]:
    """Return the Qs that read a tensor, including the Q that is the conversion itself."""
    own = TensorConsumer(ConsumerKind.Q, r.node, "QuantizeLinear", r.path, r.scale)
    return [*quantizer_consumers(r.siblings), own]


_POOLS = (LayerKind.POOLING, LayerKind.RESIZE)


def find_shared_pooling(r: OutputManyConsumers) -> PathStep | None:
    """Return the pooling before all consumers, which no Q moves up past."""
    shared = r.consumers[0].path[0] if r.consumers[0].path else None
    if shared is None or any(not x.path or x.path[0].node != shared.node for x in r.consumers):
        return None
    operator = OPERATORS.get(shared.op)
    if operator is None or operator.passage is None:
        return None
    return shared if operator.kind in _POOLS or shared.op == "GlobalMaxPool" else None


def find_float_sum(r: OutputManyConsumers) -> TensorConsumer | None:
    """Return the first residual sum that reads a result as float, else None."""
    return next((x for x in float_consumers(r.consumers) if x.kind == ConsumerKind.SUM), None)


def find_single_average(r: OutputNotQuantized) -> TensorConsumer | None:
    """Return the averaging pooling that is the only consumer of a result, else None."""
    return r.consumers[0] if len(r.consumers) == 1 and r.consumers[0].op in AVERAGES else None


def is_left_float(r: OutputNotQuantized) -> bool:
    """Return whether no consumer (except network outputs) has ``feeds_weighted``."""
    return all(x.kind == ConsumerKind.OUTPUT or not x.feeds_weighted for x in r.consumers)


def is_before_normalization(r: OutputNotQuantized) -> bool:
    """Return whether a LayerNormalization is the only consumer of a result."""
    return len(r.consumers) == 1 and r.consumers[0].op == "LayerNormalization"


def _silu_is_last(r: OutputNotQuantized) -> bool:
    silu = r.activation is not None and r.activation.op == "SiLU"
    return silu and not (
        is_left_float(r) or quantizer_consumers(r.consumers) or is_before_normalization(r)
    )


def quantizers_after_pooling(r: OutputManyConsumers) -> list[TensorConsumer]:
    """Return the Qs after a pooling that all consumers share, with paths that begin after it."""
    return [replace_fields(q, path=q.path[1:]) for q in quantizer_consumers(r.consumers)]


def _scale_rules(steps: Callable[[Any], PathStep | None]) -> tuple[FindingRule, ...]:
    """Return the rules for different scales; the code depends on the operator in between."""
    return (
        fixable("CONCAT-SCALE", lambda r: (s := steps(r)) is not None and s.op in JOINS),
        fixable("SPLIT-SCALE", lambda r: (s := steps(r)) is not None and s.op in CUTS),
        fixable("POOL-SCALE", steps),
        fixable("SIBLING-SCALE"),
    )


def _writes(refusal: Any) -> str:
    return f"{refusal.node} writes float{format_size(refusal.elements)}"


def _skip_fix(add: str, residual: str, quantizers: Sequence[TensorConsumer]) -> str:
    q = find_shareable_quantizer(quantizers)
    if q is None:
        return f"Put Q/DQ on {residual} before {add}; its scale needs calibration."
    return (
        f"Connect {add} to the DequantizeLinear of {q.node} (scale {format_scale(q.scale)}) "
        f"instead of {residual}: no new scale is needed."
    )


_REDUCTION = (
    "Use GlobalAveragePool and Flatten instead (the same result), with Q/DQ before and after it, "
    "or remove the pair before it."
)


def _reduction(r: ReduceNotPooling) -> str:
    return (
        f"{r.node} (ReduceMean) runs in float: TensorRT converts it to a pooling only over height "
        "and width with keepdims=1."
    )


_MAX_LISTED_SCALES = 12


def _parts(r: ConcatScales, consequence: str, own: Sequence[Scale]) -> Message:
    parts = ["none" if p is None else format_scale(p) for p in r.parts]
    listed = ", ".join(parts[:_MAX_LISTED_SCALES]) + (
        ", ..." if len(parts) > _MAX_LISTED_SCALES else ""
    )
    return (
        f"{r.node} has inputs with scales {listed}, and its output has scale "
        f"{format_scale(r.output_scale)}; {consequence}.",
        advise_common_scale([*r.parts, r.output_scale, *own]),
    )


def _scales(
    cause: Cause, tensor: str, consumers: Sequence[TensorConsumer], consequence: str
) -> Message:
    quantizers = quantizer_consumers(consumers)
    own = [q.scale for q in quantizers]
    if cause.also and isinstance(cause.also[0], ConcatScales):
        return _parts(cause.also[0], consequence, own)
    if len({s for s in own if s is not None}) < 2:
        return (
            f"{consequence}: {list_names(consumer_names(quantizers))} quantize "
            f"it{describe_unread_consumers(consumers)}, and their scales "
            "are not available to compare.",
            "",
        )
    listed = list_names(
        (f"{format_scale(q.scale)} ({q.node})" for q in quantizers), _MAX_LISTED_SCALES
    ) + describe_unread_consumers(consumers)
    between = operator_between_quantizers(consumers)
    where = (
        f"scales {listed} on '{tensor}'"
        if between is None
        else (f"{between.node} ({between.op}) is between scales {listed}")
    )
    return f"{where}; {consequence}.", advise_common_scale(own)


def _describe_remaining(cause: Cause, r: RemainingConversion) -> str:
    """Return the reason for a remaining conversion as text, by finding, refusal or node."""
    origin = r.origin
    if r.precision not in (Precision.INT8, Precision.FP8, Precision.INT32) and origin.node:
        return f"{r.precision} is not covered by the prediction"
    if cause.see:
        return "see " + ", and ".join(
            f"{code} at {node}" if node else code for code, node in cause.see
        )
    if not r.quantize:
        who = list_names(
            "the network's output" if x.kind == ConsumerKind.OUTPUT else x.node for x in r.consumers
        )
        return f"{who or 'its consumer'} cannot absorb it"
    if cause.also:
        return _describe_obstacle(r, cause.also[0])
    if origin.int8:
        kind = Precision.FP8 if r.precision is Precision.FP8 else Precision.INT8
        return f"{format_node(origin.node, origin.op)} runs in {kind} but cannot absorb it"
    joined = " joins several tensors and" if origin.op in JOINS else ""
    return f"{origin.node} ({origin.op}){joined} runs in float"


def _describe_obstacle(r: RemainingConversion, refusal: Refusal) -> str:
    if isinstance(refusal, OutputScale):
        return f"{r.origin.node} cannot use its scale"
    if isinstance(refusal, NotCommuting):
        return f"a Q cannot move up past {format_node(refusal.node, refusal.op)}"
    if isinstance(refusal, ManyConsumers):
        floats = float_consumers(refusal.consumers)
        plain = all(x.kind != ConsumerKind.OUTPUT for x in floats)
        others = describe_unread_consumers(refusal.consumers)
        who = (
            f", which {describe_consumers(floats, it='')}{others}"
            if plain
            else (f", which is also read by {list_names(consumer_names(floats))}{others}")
        )
        return f"it cannot move up past {format_node(refusal.node, refusal.op)}{who}"
    if isinstance(refusal, ConcatReadElsewhere):
        return (
            f"{refusal.node} (Concat) is also read as float by "
            f"{list_names(consumer_names(float_consumers(refusal.consumers)))}"
            f"{describe_unread_consumers(refusal.consumers)}"
        )
    return f"{refusal.node} runs in float"


# Inputs ---------------------------------------------------------------------------------------


class InputNotDequantized(Refusal, reason="input-not-dequantized"):
    """The data input does not come from a DQ.

    Attributes:
        tensor: The input's ONNX tensor.
        producer: Node that writes the tensor.
        op: The producer's operator, ``Input`` for a network input.
        weights_quantized: Whether the weights come from a DQ.
        dq: The nearest DQ upstream, which cannot move down to the input; empty if there is none.
        blocker: The first operator in between that a DQ cannot pass.
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
                f"only a DQ with a single one moves down{past}.",
                f"Give {self.node} its own DequantizeLinear, after the same QuantizeLinear.",
            )
        where = (
            f"past {self.blocker.node} ({self.blocker.op}) to it"
            if self.blocker is not None
            else (
                "to it: it has other consumers, and remains before "
                f"{format_node(self.producer, self.op)}"
            )
        )
        return (
            f"{self.node} runs in float: {self.dq} cannot move down {where}.",
            f"Quantize '{self.tensor}', directly before {self.node}.",
        )


class WeightsNotDequantized(Refusal, reason="weights-not-dequantized"):
    """The weights do not come from a DQ, although the data does."""

    rules = (fixable("W-NO-DQ"),)

    weight: str
    dq: str = ""
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node}: its input is quantized{f' ({self.dq})' if self.dq else ''}, but its "
            f"weights '{self.weight}' are not, so it runs in float."
        )


class WeightsNotConstant(Refusal, reason="weights-not-constant"):
    """The weights are computed at run time, or stored as a sparse tensor."""

    rules = (FindingRule("W-NONCONST"),)

    weight: str
    sparse: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        state = "computed at run time"
        if self.sparse:
            state = "stored as a sparse tensor (store them in full)"
        return f"{self.node}: its weights '{self.weight}' are {state}, so it runs in float."

    def skip_reason(self) -> str:
        if self.sparse:
            return "its weights are stored as a sparse tensor: store them in full"
        return "its weights are computed, not constant"


class ScaleComputed(Refusal, reason="scale-computed"):
    """A scale is computed at run time; ``tensor`` is the scale."""

    rules = (FindingRule("SCALE-DYNAMIC"),)

    identity_excludes = (*Refusal.identity_excludes, "node")  # all consumers are alike

    quantizer: str
    tensor: str = ""

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.quantizer}: its scale "
            + (f"'{self.tensor}' " if self.tensor else "")
            + "is computed at run time."
        )


class TypesDiffer(Refusal, reason="types"):
    """Data and weights are quantized to types that cannot be multiplied."""

    dq: str
    weight_dq: str
    types: tuple[Precision, Precision]


class FloatTypesDiffer(Refusal, reason="float-types"):
    """Data and weights are dequantized to float types that differ.

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


class Deconvolution3D(Refusal, reason="convtranspose-3d"):
    """A ConvTranspose of three spatial dimensions that runs in float.

    Attributes:
        dq: DQ of its data.
        is_always_float: Whether it runs in float even with an activation and a Q after it.
        elements: Size of its result.
    """

    rules = (FindingRule("CT3D-FLOAT"),)

    dq: str
    is_always_float: bool
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = f"{self.node} is a quantized 3D ConvTranspose: "
        if self.is_always_float:
            return (
                (f"{text}it runs in float on TensorRT 10, as in engines of TensorRT 10.13."),
                "Remove its Q/DQ, which only add conversions, or use a Resize and a 3D "
                "convolution, which runs in INT8.",
            )
        return (f"{text}INT8 is predicted only if an activation and a Q follow the node."), ""


class ActivationPerChannel(Refusal, reason="activation-per-channel"):
    """The data input has one scale per channel."""

    rules = (fixable("ACT-PER-CHANNEL"),)

    identity_excludes = (*Refusal.identity_excludes, "node")  # all consumers are alike

    dq: str
    scales: Scale

    def message(self, finding: Finding, cause: Cause) -> str:
        count = (
            self.scales.count
            if isinstance(self.scales, PerChannel)
            else int(self.scales is not None)
        )
        scales = (
            f"{count} scales, {format_scale(self.scales)}" if count else "one scale per channel"
        )
        return f"{self.dq} quantizes an activation per channel ({scales})."


class NonzeroZeroPoint(Refusal, reason="zero-point"):
    """A zero point is not 0; ``zero_points`` has the smallest and the largest one."""

    rules = (fixable("ZP-NONZERO"),)

    identity_excludes = (*Refusal.identity_excludes, "node")  # all consumers are alike

    dq: str
    zero_points: tuple[int, int]
    unsigned: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.dq} has {'uint8 ' if self.unsigned else ''}zero point "
            f"{' to '.join(map(str, dict.fromkeys(self.zero_points)))}; TensorRT requires 0."
        )


class WeightsAxis(Refusal, reason="weights-axis"):
    """The weights are quantized along an axis other than that of the output channels.

    Attributes:
        dq: Q or DQ of the weights.
        axis: Axis of the scales.
        expected: Axis of the output channels.
        transposed: Whether they are weights of a ConvTranspose.
        written: Whether the node has the attribute.
        shape: Shape of the weights; empty if unknown.
    """

    rules = (fixable("CT-AXIS", lambda r: r.transposed), FindingRule("W-AXIS"))

    dq: str
    axis: int
    expected: int
    transposed: bool = False
    written: bool = True
    shape: tuple[int, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        shape = f" {list(self.shape)}" if self.shape else ""
        if self.transposed:
            return (
                (
                    f"{self.node}: {self.dq} has several scales along axis {self.axis} of the "
                    f"weights{shape}: no TensorRT version is known to compute a ConvTranspose "
                    "with per-channel scales correctly."
                ),
                ("Use one scale, the largest, for all weights of the ConvTranspose."),
            )
        written = (
            ""
            if self.written
            else (" (not stated: the default is 1 in ONNX, but 0 in TensorRT 8 and 9)")
        )
        return (
            f"{self.node}: {self.dq} uses axis {self.axis}{written} of the weights{shape}; the "
            f"output channels are axis {self.expected}."
        )


class WeightsShared(Refusal, reason="weights-shared"):
    """Several convolutions read one quantized constant, which only one of them can fold.

    Attributes:
        weight: The constant.
        convolutions: The convolutions.
        more: Number of convolutions that are not listed.
    """

    rules = (fixable("W-SHARED"),)

    identity_excludes = (*Refusal.identity_excludes, "node")  # all consumers are alike

    weight: str
    convolutions: tuple[str, ...]
    more: int = 0

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"weights '{self.weight}' are shared by "
            f"{list_names(self.convolutions, more=self.more)}; TensorRT folds the weights into "
            "only one of these layers."
        )


# Outputs --------------------------------------------------------------------------------------


class OutputNotQuantized(Refusal, reason="output-not-quantized"):
    """No Q reads the result.

    Attributes:
        tensor: The result.
        consumers: Its consumers.
        elements: Its size.
        activation: Pointwise activation that the layer fused (``SiLU`` for a gated one).
    """

    rules = (
        FindingRule("POOL-FLOAT", find_single_average),
        FindingRule("SILU-NO-Q-AFTER", _silu_is_last),
        FindingRule("OUT-FLOAT"),
    )

    tensor: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None
    activation: PathStep | None = None

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        quantized = quantizer_consumers(self.consumers)
        if finding.code == "POOL-FLOAT":
            if cause.also and isinstance(cause.also[0], ReduceNotPooling):
                return f"{_writes(self)} because {_reduction(cause.also[0])}", _REDUCTION
            pooling = cause.also[0] if cause.also else None
            quantizers_after = (
                quantizer_consumers(pooling.consumers)
                if isinstance(pooling, PoolingOneSide)
                else []
            )
            why = (
                f"only its output is quantized ({quantizers_after[0].node})"
                if quantizers_after
                else "it is not quantized"
            )
            return f"{_writes(self)} because {finding.node} runs in float: {why}."
        if is_before_normalization(self) and self.node in finding.convolutions:
            norm = self.consumers[0]
            return (
                f"{_writes(self)}: {norm.node} ({norm.op}) reads it as float.",
                (
                    f"Put Q/DQ before {norm.node}: {self.node} then writes INT8 with faster "
                    "kernels (ModelOpt pull request 1117). The normalization itself remains "
                    "float."
                ),
            )
        if quantized:
            past = list_names(format_step(s) for s in quantized[0].path)
            return (
                f"{_writes(self)}: {quantized[0].node} remains after {past or 'it'} and cannot "
                f"move up."
            )
        clause = describe_consumers(self.consumers)
        if finding.code == "SILU-NO-Q-AFTER":
            return f"{_writes(self)} after SiLU: {clause}."
        if is_left_float(self) and any(x.kind != ConsumerKind.OUTPUT for x in self.consumers):
            clause += " (that layer is not quantized)"
        return f"{_writes(self)}: {clause}."


class OutputDifferentScales(Refusal, reason="output-different-scales"):
    """Several Qs with different scales are the only consumers of the result."""

    rules = _scale_rules(lambda r: operator_between_quantizers(r.consumers))

    tensor: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        writes = (
            _writes(self)
            if self.node in finding.convolutions
            else f"'{self.tensor}' is converted once for each"
        )
        return _scales(cause, self.tensor, self.consumers, writes)


class OutputManyConsumers(Refusal, reason="output-many-consumers"):
    """The result has a Q and a float consumer."""

    rules = (
        fixable("POOL-MIXED", find_shared_pooling),
        fixable("SKIP-FLOAT", find_float_sum),
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
                f"{_writes(self)} because {pool.node} ({pool.op}) is consumed in INT8 by "
                f"{list_names(consumer_names(quantized))} and as float by "
                f"{list_names(consumer_names(floats))}{describe_unread_consumers(self.consumers)}: "
                "no Q can move up past it.",
                _skip_fix(add.node, f"the result of {pool.node}", quantizers_after_pooling(self))
                if add is not None
                else "",
            )
        if add is not None:
            return (
                f"{_writes(self)} because {add.node} reads it as float (its residual input has no "
                f"Q/DQ){describe_unread_consumers(self.consumers)}.",
                _skip_fix(add.node, f"'{self.tensor}'", quantized),
            )
        names = list(dict.fromkeys(consumer_names(floats)))
        return (
            f"{_writes(self)} because {list_names(names)} "
            f"{'reads' if len(names) == 1 else 'read'} it as float, in addition to "
            f"{list_names(consumer_names(quantized))}{describe_unread_consumers(self.consumers)}."
            + ("" if finding.gains else " No action needed: INT8 gains nothing for this consumer."),
            (f"Quantize the float consumer as well, with scale {format_scale(quantized[0].scale)}.")
            if finding.gains
            else NO_ACTION,
        )


class OutputScale(Refusal, reason="output-scale"):
    """The Q after a layer cannot be fused: its scale is computed, or varies by channel."""

    rules = (FindingRule("OUT-FLOAT"),)

    quantizer: str
    computed: bool

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (
            f"{self.node} writes float: "
            + (
                f"the scale of {self.quantizer} after it is computed at run time."
                if self.computed
                else f"{self.quantizer} after it has one scale per channel."
            ),
            f"Give {self.quantizer} one constant scale for the whole tensor.",
        )


# Residual Adds --------------------------------------------------------------------------------


class ResidualFloat(Refusal, reason="residual-float"):
    """The Add's other input is float.

    Attributes:
        add: The Add.
        residual: Producer of the other input.
        consumers: Consumers of the sum.
        elements: TensorSize of the sum.
        tensor: ONNX tensor of the other input.
        quantizers: Qs that read the other input's tensor.
    """

    rules = (fixable("SKIP-FLOAT"),)

    add: str
    residual: TensorOrigin
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None
    tensor: str = ""
    quantizers: tuple[TensorConsumer, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> Message:
        origin = describe_origin(self.residual, self.tensor)
        how = (
            f"{self.add} is fused into it and reads {origin} as float"
            if cause.fused
            else (f"{self.add} adds it to {origin}, both as float")
        )
        fix = _skip_fix(self.add, f"'{self.tensor}'", self.quantizers)
        others = [x for x in self.consumers if x.kind in (ConsumerKind.OP, ConsumerKind.OUTPUT)]
        if others:
            # Otherwise a quantized skip only adds a DQ that remains (resnet18-a100-qat-residual).
            fix += (
                f" This helps only if the result of {self.add} is quantized as well: "
                f"{describe_consumers(others)}."
            )
        return f"{_writes(self)} because {how}.", fix


class ResidualBothQuantized(Refusal, reason="residual-both-quantized"):
    """A Q is between the convolution and the Add, whose other input is quantized as well."""

    rules = (fixable("ADD-BOTH"),)

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


class AddOutputNotQuantized(Refusal, reason="add-output-not-quantized"):
    """The residual is quantized, but not all consumers of the Add are."""

    rules = (attempted("ADD-OUT-FLOAT"),)

    add: str
    residual: TensorOrigin
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        clause, residual = describe_consumers(self.consumers), self.residual.node
        if self.node == self.add:
            return (
                f"{self.add} runs in float{format_size(self.elements)}: its inputs are quantized, "
                f"but {clause}.",
                f"Quantize the result of {self.add}, or remove the pairs before it.",
            )
        return (
            f"{self.node} reads and writes float{format_size(self.elements)} at {self.add}: its "
            f"residual is quantized ({residual}), but {clause}.",
            f"Quantize the result of {self.add}, or remove the pair of {residual} before the Add.",
        )


class ActivationBeforeAdd(Refusal, reason="activation-before-add"):
    """An activation is between the convolution and the Add.

    Attributes:
        add: The Add.
        activation: The activation.
        residual: Producer of the Add's other input.
        elements: TensorSize of the sum.
        consumers: Consumers of the sum.
    """

    rules = (attempted("ADD-ACT"),)

    identity_excludes = (*Refusal.identity_excludes, "consumers")

    add: str
    activation: str
    residual: TensorOrigin | None = None
    elements: TensorSize | None = None
    consumers: tuple[TensorConsumer, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> str:
        other = ""
        if self.residual is not None:
            state = "is quantized" if self.residual.quantizer else "is not quantized either"
            other = f", whose other input, {describe_origin(self.residual)}, {state}"
        return f"{_writes(self)}: {self.activation} is between it and {self.add}{other}."


class ActivationJoined(Refusal, reason="activation-joined"):
    """The pointwise kernel after the convolution has further inputs.

    Attributes:
        pointwise: Nodes of the kernel.
        others: Producers of its other inputs.
        elements: Number of elements of the result.
    """

    rules = (FindingRule("OUT-FLOAT"),)

    pointwise: tuple[str, ...]
    others: tuple[TensorOrigin, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{_writes(self)}: the nodes after it ({list_names(self.pointwise)}) are one "
            "pointwise kernel, which also reads "
            f"{list_names(map(describe_origin, self.others))} and is not fused into a convolution."
        )


class InsideActivation(Refusal, reason="inside-activation"):
    """A Q separates a convolution from its activation, or a SiLU's Sigmoid from its Mul.

    Both remain separate layers.

    Attributes:
        convolution: The convolution.
        activation: The activation; for a gate the Sigmoid.
        silu: Whether it is SiLU.
        gate: Whether the Q is after the Sigmoid.
        second: A further Q after the Sigmoid.
    """

    rules = (fixable("SILU-INNER-Q", lambda r: r.silu), fixable("ACT-INNER-Q"))

    identity_excludes = (*Refusal.identity_excludes, "second")

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


# Pads -----------------------------------------------------------------------------------------


class PadBeforeConvolution(Refusal, reason="behind-pad"):
    """A Q/DQ pair is between a Pad of zeros and its convolution.

    The Pad becomes a separate layer in INT8.
    """

    rules = (attempted("PAD-SPLIT"),)

    pad: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"a Q/DQ pair is between {self.pad} and {self.node}."


# Stem -----------------------------------------------------------------------------------------


class StemBeforePool(Refusal, reason="stem-before-pool"):
    """A stem fuses a Relu with Q/DQ on both sides and the MaxPool after it.

    Attributes:
        relu: The Relu.
        pool: The MaxPool.
    """

    rules = (FindingRule("STEM-POOL"),)

    relu: str
    pool: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node}, {self.relu} and {self.pool} become one INT8 layer."


# Folding --------------------------------------------------------------------------------------


class BatchNormNotConstant(Refusal, reason="batchnorm-not-constant"):
    """A BatchNormalization was decomposed: its parameters are not plain constants."""

    rules = (fixable("BN-UNFOLDED"),)

    batchnorm: str
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} writes float because {self.batchnorm} after it remains a separate layer: "
            "its parameters are not plain constants."
        )


class ConvTransposeBatchNorm(Refusal, reason="convtranspose-batchnorm"):
    """A BatchNormalization after a quantized ConvTranspose is not folded."""

    rules = (fixable("CT-BN"),)

    batchnorm: str
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (
            f"{self.node}: {self.batchnorm} after it is not folded, so its output is "
            f"float{format_size(self.elements)}.",
            f"Fold {self.batchnorm} into the weights of {self.node} before quantizing.",
        )


# Motion ---------------------------------------------------------------------------------------


class NotCommuting(Refusal, reason="not-commuting"):
    """A Q cannot move up past the operator."""

    op: str
    quantizer: str


class ManyConsumers(Refusal, reason="many-consumers"):
    """A Q or DQ cannot pass an operator because of other consumers.

    The operator's result has consumers other than the Q, or the DQ's result has consumers other
    than the operator.
    """

    op: str
    quantizer: str
    consumers: tuple[TensorConsumer, ...]


class ConcatReadElsewhere(Refusal, reason="output-not-only-quantized"):
    """A Q cannot pass a Concat whose result has consumers other than the Q."""

    consumers: tuple[TensorConsumer, ...]


class ConcatScales(Refusal, reason="concat-scales"):
    """The inputs of a Concat are quantized with other scales than its result.

    Attributes:
        parts: Scale of each input: that of its DQ, or of another Q on it. None for an input with
            neither.
        output_scale: Scale of the Q that moved from the result to each input.
        elements: Number of elements of the result.
    """

    rules = (fixable("CONCAT-SCALE"),)

    parts: tuple[Scale, ...]
    output_scale: Scale
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return _parts(self, "each input with another scale is converted", ())


class ScalesDiffer(Refusal, reason="scales-differ"):
    """Quantizers in a row, or on one tensor, have different scales."""

    rules = (fixable("DOUBLE-QDQ"),)

    tensor: str
    quantizers: tuple[str, ...]
    scales: tuple[Scale, ...]


class PoolingOneSide(Refusal, reason="pooling-one-side"):
    """An averaging pooling is quantized on one side only.

    Attributes:
        quantized_input: Whether the quantized side is the input.
        origin: Producer of its input.
        consumers: Consumers of its result.
        elements: TensorSize of its result.
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


class ReduceNotPooling(Refusal, reason="reduce-not-pooling"):
    """An average that does not become a pooling, and runs in float.

    The node does not average over height and width with keepdims=1.

    Attributes:
        dq: DQ before it; empty if there is none.
        consumers: Consumers of its result.
        elements: TensorSize of its result.
    """

    rules = (FindingRule("POOL-FLOAT"),)

    identity_excludes = (*Refusal.identity_excludes, "dq", "consumers")

    dq: str
    consumers: tuple[TensorConsumer, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        return (_reduction(self), _REDUCTION)


class InMyelin(Refusal, reason="in-myelin"):
    """A layer with weights runs in float in Myelin, together with connected layers.

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


class OutsideRules(Refusal, reason="outside-rules"):
    """Data or weights are quantized to FP8 or INT4.

    The Q/DQ passes of INT8 do not cover these types.
    """

    dq: str
    precision: Precision


class RemainingConversion(Refusal, reason="stays"):
    """A Q or DQ that no layer absorbed, so that it is a conversion of the engine.

    Attributes:
        name: The conversion's name in the engine (a copy before a Concat ends with
            ``_clone_<input>``).
        quantize: Whether it is a Q.
        tensor: The ONNX tensor that it converts.
        scale: Its scale.
        origin: Producer of the tensor before the conversion.
        siblings: Consumers of the tensor before the conversion.
        consumers: Consumers of the converted tensor.
        path: Operators that the Q or DQ moved past, the last one first.
        blocked: Refusal that kept the Q or DQ from moving on; None if unknown.
        elements: Values converted in each run; None if shapes are unknown.
        convolutions: Layers with weights that have the converted tensor as their data.
        pair: For a DQ, the Q before it. For a conversion from INT8 to INT8, the Q of the first
            pair.
        first_scale: For a conversion from INT8 to INT8, the scale of its input.
        requantizes: Whether it converts from INT8 to INT8.
        precision: The quantized type.
        attention: Whether it quantizes the result of a Softmax for a MatMul of two computed
            tensors.
        evidence: Evidence that the conversion remains there.
    """

    rules: ClassVar[tuple[FindingRule, ...]] = (
        attempted("CONVERSION", lambda r: not r.quantize or r.requantizes or r.origin.node),
        attempted("INPUT-CONVERSION"),
    )

    name: str
    quantize: bool
    tensor: str
    scale: Scale
    origin: TensorOrigin
    siblings: tuple[TensorConsumer, ...]
    consumers: tuple[TensorConsumer, ...]
    path: tuple[PathStep, ...] = ()
    blocked: Refusal | None = None
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
            return (
                f"{self.name} converts the network's input '{self.origin.tensor}' to "
                f"{self.precision} (scale {scale})."
            )
        assumed = (
            (
                " This is assumed: if the attention becomes one kernel, the conversion is part of "
                "that kernel."
            )
            if self.attention
            else ""
        )
        return (
            f"{self.name} (scale {scale}) remains as a layer: "
            f"{_describe_remaining(cause, self)}.{assumed}"
        )


class ScalesAround(RemainingConversion):
    """A remaining conversion that is reported because of the different scales around it."""

    rules = (
        fixable("DOUBLE-QDQ", lambda r: r.requantizes and not r.path),
        *_scale_rules(
            lambda r: (
                operator_between(r.path)
                if r.requantizes
                else operator_between_quantizers(r.siblings)
            )
        ),
    )

    @staticmethod
    def from_conversion(conversion: RemainingConversion) -> ScalesAround:
        """Return a conversion as this class, with equal fields."""
        return ScalesAround(*field_values(conversion))

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        if not self.requantizes:
            return _scales(
                cause,
                self.origin.tensor,
                self.siblings,
                f"'{self.origin.tensor}' is converted once for each",
            )
        before, scale = format_scale(self.first_scale), format_scale(self.scale)
        if finding.code == "DOUBLE-QDQ":
            return (
                f"scales {before} ({self.pair}) and {scale} ({self.node}): INT8 is converted to "
                f"INT8."
            )
        own = quantizers_with_own(self)
        if finding.code == "CONCAT-SCALE" and (
            cause.also or len({q.scale for q in own if q.scale is not None}) > 1
        ):
            return _scales(cause, self.tensor, own, f"{self.node} requantizes")
        between = operator_between(self.path)
        where = "" if between is None else f"{between.node} ({between.op}) is between "
        return (
            f"{where}scales {before} ({self.pair}) and {scale} ({self.node}): INT8 is converted "
            "to INT8.",
            advise_common_scale([self.first_scale, self.scale]),
        )

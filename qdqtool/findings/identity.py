"""Keys by which findings of a model are compared with findings of a part of the model.

Two findings with equal keys report the same problem. A key contains the values that the message
shows, except values that change if a part is cut out of the model: sizes, nodes after the consumers
of a tensor, names of outputs, the producer of a tensor whose name is in the key, and values of a
conversion that another finding or reason explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from qdqtool.reasons.compiler import IntegersLost, IntegersLostAtJoin, LossCause
from qdqtool.reasons.conversions import (
    COVERED_TYPES,
    ConcatReadAsFloat,
    ConversionBetweenScales,
    ManyConsumers,
    RemainingConversion,
    sibling_quantizers,
)
from qdqtool.reasons.convolutions import SlowChannelCounts
from qdqtool.reasons.finding import Cause, Finding, Reason
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.reasons.outputs import (
    OutputDifferentScales,
    OutputMixedConsumers,
    OutputNotQuantized,
    PoolingQuantizedOnOneSide,
    UnfusableOutputScale,
    feeds_no_weighted_layer,
    find_float_sum,
    find_shared_pooling,
    is_before_normalization,
    quantizers_after_pooling,
)
from qdqtool.reasons.residuals import AddOutputNotQuantized, ResidualFloat
from qdqtool.reasons.tensors import (
    ConsumerKind,
    Scale,
    TensorConsumer,
    TensorOrigin,
    find_operator_between_quantizers,
    find_operator_between_scales,
    find_shareable_quantizer,
    float_consumers,
    quantizer_consumers,
)
from qdqtool.util.records import field_names, find_by_class

IdentityKey = tuple[Any, ...]


class _ConsumerKey(NamedTuple):
    node: str
    kind: ConsumerKind
    op: str
    scale: Any


def finding_key(finding: Finding) -> IdentityKey:
    """Return the key of a finding. Findings with equal keys report the same problem."""
    causes = dict.fromkeys(_cause_key(finding, cause) for cause in finding.causes)
    return finding.code, finding.severity, finding.node, finding.gains, *causes


def iterate_consumer_names(key: IdentityKey) -> Iterator[str]:
    """Yield the names of the nodes that are consumers in a key."""
    for value in key:
        if isinstance(value, _ConsumerKey):
            yield value.node
        elif isinstance(value, tuple):
            yield from iterate_consumer_names(value)


def _cause_key(finding: Finding, cause: Cause) -> IdentityKey:
    r = cause.reason
    key = find_by_class(_KEYS_BY_CLASS, type(r))
    if key is not None:
        return type(r), *map(_to_comparable, key(finding, cause, r))
    return _reason_key(r)


def _reason_key(reason: Reason) -> IdentityKey:
    names = [name for name in field_names(reason) if name not in reason.identity_excludes]
    return type(reason), *(_to_comparable(getattr(reason, name)) for name in names)


def _to_comparable(value: Any) -> Any:
    """Return a value in a form that can be compared between models.

    Origins and consumers of tensors are replaced by their keys. NaN is replaced by a text, because
    NaN is not equal to itself.
    """
    if isinstance(value, _ConsumerKey):
        return value
    if isinstance(value, TensorOrigin):
        return value.convolution or value.node or value.tensor, bool(value.quantizer)
    if isinstance(value, tuple):
        return (
            _consumers_key(value)
            if value and isinstance(value[0], TensorConsumer)
            else tuple(map(_to_comparable, value))
        )
    return "nan" if value != value else value


def _consumers_key(consumers: Sequence[TensorConsumer]) -> IdentityKey:
    """Return the key of a tensor's consumers. It does not depend on their order or paths."""
    keys = {
        _ConsumerKey(
            "" if r.kind == ConsumerKind.OUTPUT else r.node, r.kind, r.op, _to_comparable(r.scale)
        )
        for r in consumers
    }
    return tuple(sorted(keys, key=str))


def _shareable_key(quantizer: TensorConsumer | None) -> IdentityKey:
    """Return the key of a Q whose scale another consumer can share; empty if there is none."""
    return () if quantizer is None else (quantizer.node, quantizer.scale)


# Classes whose messages depend on their values ------------------------------------------------


def _input_key(finding: Finding, cause: Cause, r: InputNotDequantized) -> IdentityKey:
    if not r.weights_quantized:
        return (bool(r.dq),)
    if not r.dq:
        return (r.tensor,)
    for shared in cause.also:
        return r.dq, r.blocker, len(shared.consumers)  # type: ignore[attr-defined]
    return r.dq, r.tensor, r.blocker or (r.producer, r.op)


def _output_key(finding: Finding, cause: Cause, r: OutputNotQuantized) -> IdentityKey:
    if finding.code == "POOL-FLOAT":
        return r.node, *map(_average_key, cause.also)
    if is_before_normalization(r) and r.node in finding.convolutions:
        return r.node, _consumers_key(r.consumers)
    for q in quantizer_consumers(r.consumers):
        return r.node, q.node, q.path
    return r.node, _consumers_key(r.consumers), feeds_no_weighted_layer(r)


def _average_key(reason: Reason) -> IdentityKey:
    """Return the key of a reason at an averaging node.

    At a pooling, it is the name of the first Q after the pooling. For another class of reasons, it
    is the usual key of the reason.
    """
    if not isinstance(reason, PoolingQuantizedOnOneSide):
        return _reason_key(reason)
    return tuple(q.node for q in quantizer_consumers(reason.consumers)[:1])


def _pooling_key(finding: Finding, cause: Cause, r: PoolingQuantizedOnOneSide) -> IdentityKey:
    quantizers = [q.node for q in quantizer_consumers(r.consumers)]
    return (r.origin.node, *quantizers[:1]) if r.quantized_input else ("", *quantizers)


def _many_consumers_key(finding: Finding, cause: Cause, r: OutputMixedConsumers) -> IdentityKey:
    add, pool = find_float_sum(r), find_shared_pooling(r)
    if pool is not None:
        return (
            r.node,
            pool,
            _consumers_key(r.consumers),
            ()
            if add is None
            else _shareable_key(find_shareable_quantizer(quantizers_after_pooling(r))),
        )
    if add is not None:
        quantizers = quantizer_consumers(r.consumers)
        return (
            r.node,
            add.node,
            r.tensor,
            _consumers_key(quantizers),
            _shareable_key(find_shareable_quantizer(quantizers)),
        )
    return r.node, _consumers_key(r.consumers)


def _residual_key(finding: Finding, cause: Cause, r: ResidualFloat) -> IdentityKey:
    floats = [x for x in r.consumers if x.kind in (ConsumerKind.OP, ConsumerKind.OUTPUT)]
    shared = _shareable_key(find_shareable_quantizer(r.quantizers))
    return (
        r.node,
        cause.fused,
        r.add,
        r.tensor,
        _to_comparable(r.residual),
        shared,
        _consumers_key(floats),
    )


def _sum_key(finding: Finding, cause: Cause, r: AddOutputNotQuantized) -> IdentityKey:
    return (
        r.node,
        r.add,
        r.residual.node,
        _consumers_key(float_consumers(r.consumers) or r.consumers),
    )


def _output_scales_key(finding: Finding, cause: Cause, r: OutputDifferentScales) -> IdentityKey:
    return r.node if r.node in finding.convolutions else "", *_scales_key(
        cause, r.tensor, r.consumers
    )


def _channels_key(finding: Finding, cause: Cause, r: SlowChannelCounts) -> IdentityKey:
    return r.inputs, r.outputs, () if r.small else tuple(dict.fromkeys(r.odd))


def _loss_key(finding: Finding, cause: Cause, r: IntegersLost) -> IdentityKey:
    # A fault of a DQ is reported once, for all convolutions that read the DQ.
    is_dq_fault = r.why in (LossCause.INPUT_AXIS, LossCause.INPUT_SHAPE1)
    return r.why, r.dq, r.weights, *(() if is_dq_fault else (r.node, r.step))


def _scales_key(cause: Cause, tensor: str, consumers: Sequence[TensorConsumer]) -> IdentityKey:
    """Return the key for different scales at the inputs of a Concat or at the Qs of a tensor."""
    quantizers = quantizer_consumers(consumers)
    for parts in cause.also:
        return _reason_key(parts), _scale_range([q.scale for q in quantizers])
    return "" if find_operator_between_quantizers(consumers) else tensor, _consumers_key(quantizers)


def _scale_range(scales: Sequence[Scale]) -> IdentityKey:
    positive = [s for s in scales if isinstance(s, float) and s > 0]
    return (min(positive), max(positive)) if positive else ()


def _conversion_key(finding: Finding, cause: Cause, r: RemainingConversion) -> IdentityKey:
    if finding.code == "INPUT-CONVERSION":
        return r.name, r.scale, r.precision, r.origin.tensor
    return r.name, r.scale, r.attention, *_conversion_cause_key(cause, r)


def _scales_around_key(finding: Finding, cause: Cause, r: ConversionBetweenScales) -> IdentityKey:
    if not r.requantizes:
        return r.origin.tensor, *_scales_key(cause, "", r.siblings)
    siblings = sibling_quantizers(r)
    if finding.code == "CONCAT-SCALE" and (
        cause.also or len({q.scale for q in siblings if q.scale is not None}) > 1
    ):
        return r.node, *_scales_key(cause, r.tensor, siblings)
    return (
        r.node,
        r.pair,
        r.first_scale,
        r.scale,
        None if finding.code == "DOUBLE-QDQ" else find_operator_between_scales(r.path),
    )


def _conversion_cause_key(cause: Cause, r: RemainingConversion) -> IdentityKey:
    origin = r.origin
    if r.precision not in COVERED_TYPES and origin.node:
        return (r.precision,)
    if cause.see:
        return cause.see
    if not r.quantize:
        return _consumers_key(r.consumers)
    for reason in cause.also:
        if isinstance(reason, UnfusableOutputScale):
            return type(reason), origin.node
        consumers: Sequence[TensorConsumer] = ()
        if isinstance(reason, ManyConsumers | ConcatReadAsFloat):
            consumers = float_consumers(reason.consumers)
        return type(reason), reason.node, _consumers_key(consumers)
    return origin.node, origin.op, origin.int8


_KEYS_BY_CLASS: dict[type[Reason], Callable[[Finding, Cause, Any], IdentityKey]] = {
    InputNotDequantized: _input_key,
    OutputNotQuantized: _output_key,
    OutputMixedConsumers: _many_consumers_key,
    OutputDifferentScales: _output_scales_key,
    ResidualFloat: _residual_key,
    AddOutputNotQuantized: _sum_key,
    PoolingQuantizedOnOneSide: _pooling_key,
    RemainingConversion: _conversion_key,
    ConversionBetweenScales: _scales_around_key,
    SlowChannelCounts: _channels_key,
    IntegersLost: _loss_key,
    IntegersLostAtJoin: _loss_key,
}

"""Choice of the finding for a float convolution, a float output or a remaining conversion."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.findings.report import Diagnosis, FindingReference, RecordedReasons
from qdqtool.ir.operators import CUTS, JOINS, SUMS
from qdqtool.reasons import fp8
from qdqtool.reasons.attention import FloatMyelinLayer
from qdqtool.reasons.conversions import (
    COVERED_TYPES,
    ConcatReadAsFloat,
    ConversionBetweenScales,
    ManyConsumers,
    OperatorNotCommuting,
    RemainingConversion,
    sibling_quantizers,
)
from qdqtool.reasons.finding import Cause, Reason
from qdqtool.reasons.fusions import (
    ActivationBeforeAdd,
    BatchNormNotConstant,
    ConvTransposeBatchNorm,
    PointwiseReadsOtherTensors,
)
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.reasons.outputs import (
    OutputDifferentScales,
    OutputMixedConsumers,
    OutputNotQuantized,
    PoolingQuantizedOnOneSide,
    ReduceNotPooling,
    UnfusableOutputScale,
    find_float_sum,
    find_shared_pooling,
    find_single_average,
    quantizers_after_pooling,
)
from qdqtool.reasons.residuals import AddOutputNotQuantized, ResidualFloat
from qdqtool.reasons.scales import ConcatScales
from qdqtool.reasons.tensors import (
    ConsumerKind,
    TensorConsumer,
    find_operator_between_quantizers,
    find_operator_between_scales,
    find_shareable_quantizer,
    float_consumers,
    quantizer_consumers,
)
from qdqtool.reasons.weights import WeightsNotDequantized
from qdqtool.trt.neighbors import have_different_scales

_FLOAT_INPUT_REASONS = (
    FloatMyelinLayer,
    WeightsNotDequantized,
    fp8.MixedOperands,
    fp8.LargeFp8Kernel,
    fp8.FloatFp8Deconvolution,
    fp8.EarlyFp8Convolution,
)

# Float inputs ---------------------------------------------------------------------------------


def diagnose_inputs(recorded: RecordedReasons, reasons: Sequence[Reason]) -> Diagnosis | None:
    """Return the diagnosis of a float convolution; None if none of the reasons explains it."""
    for r in reasons:
        if isinstance(r, InputNotDequantized):
            related = None
            if r.weights_quantized and r.dq:
                related = recorded.first_reason(ManyConsumers, r.dq)
            cause = Cause(r, () if related is None else (related,))
            return Diagnosis(r.node, cause, r.elements, (r.node,))
        if isinstance(r, _FLOAT_INPUT_REASONS):
            return Diagnosis(r.node, Cause(r), getattr(r, "elements", None), (r.node,))
    return None


# Different scales -----------------------------------------------------------------------------


def diagnose_scales(
    recorded: RecordedReasons,
    r: OutputDifferentScales | ConversionBetweenScales,
    consumers: Sequence[TensorConsumer],
    convolutions: tuple[str, ...],
) -> Diagnosis:
    """Return the diagnosis of Qs that read one tensor with different scales."""
    between = find_operator_between_quantizers(consumers)
    if between is None:
        is_float_source = isinstance(r, RemainingConversion) and not r.requantizes
        tensor = r.origin.tensor if is_float_source else r.tensor  # type: ignore[union-attr]
        return Diagnosis(tensor, Cause(r), r.elements, convolutions)
    parts = recorded.first_reason(ConcatScales, between.node) if between.op in JOINS else None
    cause = Cause(r, () if parts is None else (parts,))
    return Diagnosis(between.node, cause, r.elements, convolutions)


# Float outputs --------------------------------------------------------------------------------

# Reasons in order of precedence. Reasons why a layer does not fuse its BatchNormalization, Add or
# activation precede reasons at the consumers of its output.
OUTPUT_REASONS: tuple[type[Reason], ...] = (
    BatchNormNotConstant,
    ConvTransposeBatchNorm,
    ResidualFloat,
    AddOutputNotQuantized,
    ActivationBeforeAdd,
    PointwiseReadsOtherTensors,
    UnfusableOutputScale,
    fp8.OutputTypeDiffers,
    OutputDifferentScales,
    OutputMixedConsumers,
    OutputNotQuantized,
)


def _find_decisive_reason(reasons: Sequence[Reason]) -> Reason | None:
    return next((r for kind in OUTPUT_REASONS for r in reasons if isinstance(r, kind)), None)


def _diagnose_residual(
    recorded: RecordedReasons, r: ResidualFloat, convolutions: tuple[str, ...]
) -> Diagnosis:
    outcome = recorded.outcomes.get(r.node)
    is_fused = outcome is not None and r.add in outcome.fused
    return Diagnosis(
        r.add,
        Cause(r, fused=is_fused),
        r.elements,
        convolutions,
        joined=True,
        # If a consumer needs float, Q/DQ on the residual only add a remaining DQ (seen in the last
        # block of the build resnet18-a100-qat-residual).
        gains=can_be_int8(r.consumers),
        automatic=_has_shareable_scale(recorded, r.add),
    )


def diagnose_output(recorded: RecordedReasons, reasons: Sequence[Reason]) -> Diagnosis | None:
    """Return the diagnosis of a layer that writes float; None if no reason explains it."""
    r = _find_decisive_reason(reasons)
    if r is None:
        return None
    convolutions = recorded.affected_convolutions(r.node)
    if isinstance(r, OutputDifferentScales):
        return diagnose_scales(recorded, r, r.consumers, convolutions)
    if isinstance(r, OutputMixedConsumers):
        return _diagnose_many_consumers(recorded, r, convolutions)
    if isinstance(r, OutputNotQuantized):
        return _diagnose_not_quantized(recorded, r, convolutions)
    if isinstance(r, ResidualFloat):
        return _diagnose_residual(recorded, r, convolutions)
    node, gains = r.node, True
    if isinstance(r, BatchNormNotConstant):
        node = r.batchnorm
    elif isinstance(r, AddOutputNotQuantized | ActivationBeforeAdd):
        node, gains = r.add, can_be_int8(r.consumers)
    return Diagnosis(node, Cause(r), getattr(r, "elements", None), convolutions, gains=gains)


def _has_shareable_scale(recorded: RecordedReasons, add: str, default: bool = False) -> bool:
    """Return whether a Q of an Add's float residual has a scale that a new pair can use.

    If the Add has no float residual, `default` is returned.
    """
    residual = recorded.residuals.get(add)
    return (
        default if residual is None else find_shareable_quantizer(residual.quantizers) is not None
    )


def can_be_int8(consumers: Sequence[TensorConsumer]) -> bool:
    """Return whether all consumers of a tensor can use it in INT8; False without consumers."""
    return bool(consumers) and all(c.kind == ConsumerKind.Q or c.gains for c in consumers)


def _diagnose_many_consumers(
    recorded: RecordedReasons, r: OutputMixedConsumers, convolutions: tuple[str, ...]
) -> Diagnosis:
    add, pool = find_float_sum(r), find_shared_pooling(r)
    if pool is not None:
        return Diagnosis(
            pool.node,
            Cause(r),
            r.elements,
            convolutions,
            gains=add is not None and can_be_int8(r.consumers),
            automatic=find_shareable_quantizer(quantizers_after_pooling(r)) is not None,
        )
    if add is not None:
        is_shareable = all(c.shares for c in float_consumers(r.consumers))
        return Diagnosis(
            add.node,
            Cause(r),
            r.elements,
            convolutions,
            joined=True,
            gains=can_be_int8(r.consumers),
            automatic=_has_shareable_scale(recorded, add.node, is_shareable),
        )
    # The list of consumers is limited, so the float consumer may be missing.
    first = (float_consumers(r.consumers) or r.consumers)[0]
    node = first.node if first.kind != ConsumerKind.OUTPUT else r.tensor
    return Diagnosis(node, Cause(r), r.elements, convolutions, gains=can_be_int8(r.consumers))


def _diagnose_not_quantized(
    recorded: RecordedReasons, r: OutputNotQuantized, convolutions: tuple[str, ...]
) -> Diagnosis:
    average = find_single_average(r)
    if average is not None:
        return _diagnose_before_average(recorded, r, average.node, convolutions)
    diagnosis = Diagnosis(r.node, Cause(r), r.elements, convolutions)
    if r.activation is None or diagnosis.code != "SILU-NO-Q-AFTER":
        return diagnosis
    return diagnosis._replace(node=r.activation.node, gains=can_be_int8(r.consumers))


def _diagnose_before_average(
    recorded: RecordedReasons, r: OutputNotQuantized, average: str, convolutions: tuple[str, ...]
) -> Diagnosis:
    reduction = recorded.first_reason(ReduceNotPooling, average)
    if reduction is not None:
        return Diagnosis(average, Cause(r, (reduction,)), reduction.elements, convolutions)
    pooling = recorded.first_reason(PoolingQuantizedOnOneSide, average)
    # If no Q reads the output of the pooling, Q/DQ before the pooling only add a conversion.
    gains = pooling is not None and bool(quantizer_consumers(pooling.consumers))
    cause = Cause(r, () if pooling is None else (pooling,))
    return Diagnosis(average, cause, r.elements, convolutions, gains=gains)


def diagnose_average(recorded: RecordedReasons, node: str) -> Diagnosis | None:
    """Return the diagnosis of an averaging node that runs in float; None for other nodes."""
    pooling = recorded.first_reason(PoolingQuantizedOnOneSide, node)
    if pooling is not None:
        return Diagnosis(
            pooling.node, Cause(pooling), pooling.elements, gains=pooling.quantized_input
        )
    reduction = recorded.first_reason(ReduceNotPooling, node)
    if reduction is None:
        return None
    return Diagnosis(reduction.node, Cause(reduction), reduction.elements)


# Conversions ----------------------------------------------------------------------------------


def report_conversion(recorded: RecordedReasons, conversion: RemainingConversion) -> None:
    """Report a remaining conversion, and its cause if no other finding reports the cause."""
    is_integer = conversion.precision in COVERED_TYPES
    if not is_integer and conversion.origin.node:
        _add_conversion_finding(recorded, conversion)
    elif conversion.requantizes:
        _report_requantization(recorded, conversion)
    elif not conversion.quantize:
        _report_dequantization(recorded, conversion)
    elif not conversion.origin.node:
        _add_conversion_finding(recorded, conversion)
        _report_sibling_scales(recorded, conversion)
    else:
        references, related = _explain_quantization(recorded, conversion)
        _add_conversion_finding(recorded, conversion, references, related)


def _add_conversion_finding(
    recorded: RecordedReasons,
    conversion: RemainingConversion,
    references: tuple[FindingReference, ...] = (),
    related: Reason | None = None,
    convolutions: tuple[str, ...] | None = None,
) -> None:
    cause = Cause(conversion, () if related is None else (related,), references)
    affected = conversion.convolutions if convolutions is None else convolutions
    diagnosis = Diagnosis(conversion.name, cause, conversion.elements, affected)
    recorded.add(diagnosis, (conversion.node,))


def _report_sibling_scales(
    recorded: RecordedReasons, conversion: RemainingConversion
) -> tuple[FindingReference, ...]:
    """Report Qs with different scales on the tensor that a conversion reads.

    Returns:
        The code and node of the finding; empty if the scales are equal, or if the code does not
            apply to the target.
    """
    if not have_different_scales(quantizer_consumers(conversion.siblings)):
        return ()
    producer = conversion.origin.convolution
    diagnosis = diagnose_scales(
        recorded,
        ConversionBetweenScales.from_conversion(conversion),
        conversion.siblings,
        (producer,) if producer else (),
    )
    if not recorded.report.has(diagnosis.code, diagnosis.node) and not recorded.add(diagnosis):
        return ()
    return ((diagnosis.code, diagnosis.node),)


def _explain_quantization(
    recorded: RecordedReasons, conversion: RemainingConversion
) -> tuple[tuple[FindingReference, ...], Reason | None]:
    """Return the findings (code and node) and the reason that explain a remaining Q.

    Findings on the cause are added to the report if they are missing. The tuple of findings may be
    empty, and the reason may be None.
    """
    origin = conversion.origin
    explanation = next(filter(None, map(recorded.explanation, origin.layer_ends)), ())
    siblings = quantizer_consumers(conversion.siblings)
    # Different scales on a sum, or on a part of a tensor, are reported even without a convolution.
    is_part = any(step.op in (*JOINS, *CUTS) for q in siblings for step in q.path)
    scales: tuple[FindingReference, ...] = ()
    if explanation or origin.convolution or is_part or origin.op in SUMS:
        scales = _report_sibling_scales(recorded, conversion)
    if explanation or scales:
        return tuple(dict.fromkeys((*explanation, *scales))), None
    return _explain_by_producer(recorded, conversion)


def _explain_by_producer(
    recorded: RecordedReasons, conversion: RemainingConversion
) -> tuple[tuple[FindingReference, ...], Reason | None]:
    origin = conversion.origin
    average = diagnose_average(recorded, origin.node)
    if average is not None:
        recorded.add(average, (average.node,))
        return recorded.explanation(average.node), average.cause.reason
    scale = recorded.first_reason(UnfusableOutputScale, origin.node)
    if scale is not None:
        return (), scale
    if _has_known_obstacle(conversion.blocked):
        return (), conversion.blocked
    return (recorded.explanation(origin.quantizer) if origin.quantizer else ()), None


def _has_known_obstacle(blocked: Reason | None) -> bool:
    """Return whether the operator or consumer that prevented a move of a Q is known.

    `blocked` is the reason why the Q did not move farther up; None if nothing prevented it.
    """
    if isinstance(blocked, ManyConsumers | ConcatReadAsFloat):
        return bool(float_consumers(blocked.consumers))
    return isinstance(blocked, OperatorNotCommuting)


def _report_requantization(recorded: RecordedReasons, conversion: RemainingConversion) -> None:
    between = find_operator_between_scales(conversion.path)
    around = ConversionBetweenScales.from_conversion(conversion)
    if (
        between is not None
        and between.op in JOINS
        and _joins_different_scales(recorded, between.node, conversion)
    ):
        diagnosis = diagnose_scales(recorded, around, sibling_quantizers(conversion), ())
    else:
        node = conversion.node if between is None else between.node
        diagnosis = Diagnosis(node, Cause(around), conversion.elements)
    recorded.add(diagnosis, (conversion.node,))
    _add_conversion_finding(recorded, conversion, ((diagnosis.code, diagnosis.node),))


def _joins_different_scales(
    recorded: RecordedReasons, join: str, conversion: RemainingConversion
) -> bool:
    return recorded.first_reason(ConcatScales, join) is not None or have_different_scales(
        sibling_quantizers(conversion)
    )


def _report_dequantization(recorded: RecordedReasons, conversion: RemainingConversion) -> None:
    inner = recorded.explanation(conversion.pair) if conversion.pair else ()
    for consumer in conversion.consumers:
        diagnosis = diagnose_average(recorded, consumer.node)
        add = recorded.first_reason(AddOutputNotQuantized, consumer.node)
        if diagnosis is None and add is not None:
            diagnosis = diagnose_output(recorded, (add,))
        if diagnosis is not None:
            recorded.add(diagnosis, (consumer.node,))
    fusing = recorded.sums.get(conversion.node, "")
    explanation = recorded.explanation(fusing) if fusing else ()
    if explanation:
        convolutions = recorded.affected_convolutions(fusing)
        _add_conversion_finding(recorded, conversion, explanation, convolutions=convolutions)
        return
    explanations = (recorded.explanation(consumer.node) for consumer in conversion.consumers)
    explanation = inner or next(filter(None, explanations), ())
    _add_conversion_finding(recorded, conversion, explanation, convolutions=())

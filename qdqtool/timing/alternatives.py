"""Times of a network without its Q/DQ, and with the Q/DQ that ``insert`` would write."""

from __future__ import annotations

from dataclasses import replace

from qdqtool.errors import QdqtoolError
from qdqtool.ir.constants import fold_constants
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import uses_fp8
from qdqtool.timing import model_variants
from qdqtool.timing.engine_time import (
    WEAKLY_TYPED,
    TimedEngine,
    file_float_type,
    list_float_types,
    target_with_layers,
    time_engine,
)
from qdqtool.timing.results import BestTime, FloatTime, TimeEstimate
from qdqtool.trt.outcome import simulate_without_alternatives
from qdqtool.trt.targets import Target, strongly_typed, weakly_typed
from qdqtool.util.notes import Note


def add_alternative_times(
    result: TimeEstimate, model: Model, resolved_model: Model, target: Target
) -> None:
    """Add the times of the network without Q/DQ, and with the Q/DQ of ``insert``.

    On a GPU without INT8, only the time without Q/DQ is added.
    For TensorRT 10, only a network with FP8 is strongly typed. If the model has FP8, the added
    times are therefore times of weakly typed builds, because the other networks have no FP8. If the
    model is float or has FP8, and GPU and target have FP8, a time with FP8 Q/DQ is added as well.
    """
    float_model: Model | None = model
    resolved_float = resolved_model
    if not result.is_float:
        float_model = model_variants.fill_missing_weights(model_variants.float_variant(model))
        resolved_float = model_variants.float_variant(resolved_model)
        has_fp8 = uses_fp8(model)
        if has_fp8:
            target = weakly_typed(target)
        is_fp16 = file_float_type(resolved_float) == Precision.FP16
        # In a file with FP8 or for a strongly typed target, FP16 and its Casts are from `insert`.
        # In another file they are from the export of the float network.
        if is_fp16 and float_model is not None and (has_fp8 or target.strongly_typed):
            float_model = model_variants.fp32_variant(float_model)  # `insert` gets the FP32 network
            if not target.strongly_typed:  # the builder does not need the Casts of the file
                batch = result.requested_batch or 1
                resolved_float, _ = model_variants.resolve_inputs(float_model, batch)
    result.float_time = _float_time(result, resolved_float, float_model, target)
    if not result.gpu.has_int8:
        if not model_variants.has_qdq(model):
            text = "the GPU has no INT8, so Q/DQ would not make the network faster"
            result.notes.append(Note(text, code="no-int8"))
    elif float_model is not None:
        result.best = _best_time(result, float_model, target)
        may_use_fp8 = result.is_float or uses_fp8(model)
        if may_use_fp8 and result.gpu.has_fp8 and target.has_fp8:
            typed = strongly_typed(target)
            result.best_fp8 = _best_time(result, float_model, typed, Precision.FP8)


def _float_time(
    result: TimeEstimate, resolved_model: Model, model: Model | None, target: Target
) -> FloatTime:
    """Return the time of a float network, in FP16 if the GPU computes FP16 faster than FP32.

    If FP16 with its Casts is slower than the type of the file (for a builder that chooses types:
    the type of the estimate), the time is for that type.

    Args:
        result: Estimate of the network with Q/DQ, or of the float network itself.
        resolved_model: The float network with fixed input shapes.
        model: The float network with weights, from which the FP16 file of a strongly typed network
            is made. If `model` is None or cannot be converted, the builder is assumed to choose the
            float types.
        target: TensorRT version.
    """
    typed = target.strongly_typed
    stored = file_float_type(resolved_model) if typed else result.float_type
    stored_ms, stored_share = result.total_ms, result.clock_share
    if not result.is_float:
        engine, stored_ms = _time_variant(result, resolved_model, target)
        stored_share = engine.clock_share
    if stored == result.gpu.float_type or result.gpu.float_type == Precision.FP32:
        return FloatTime(stored, stored_ms, clock_share=stored_share)
    if typed:
        fp16 = None if model is None else model_variants.fp16_variant(model, target)
        if fp16 is None:
            target = WEAKLY_TYPED
        else:
            resolved_model, _ = model_variants.resolve_inputs(fp16, result.requested_batch or 1)
    with_fp16 = replace(result, float_type=Precision.FP16)
    engine, fp16_ms = _time_variant(with_fp16, resolved_model, target)
    if fp16_ms <= stored_ms:
        return FloatTime(Precision.FP16, fp16_ms, stored_ms, engine.clock_share, stored_share)
    return FloatTime(stored, stored_ms, clock_share=stored_share)


def _best_time(
    result: TimeEstimate, model: Model, target: Target, precision: Precision = Precision.INT8
) -> BestTime | None:
    """Return the time of the network with the Q/DQ that ``insert`` would write.

    None if quantizing or simulating fails. For a float network, a note then states the reason.
    """
    assert result.float_time is not None
    try:
        quantized = model_variants.quantized_variant(model, target, precision.lower())
        resolved, _ = model_variants.resolve_inputs(quantized, result.requested_batch or 1)
        engine, ms = _time_variant(result, resolved, target)
    except QdqtoolError as error:
        if result.is_float:
            text = f"the possible gain of {precision} is unknown: {error.reason}"
            result.notes.append(Note(text, code="gain-unknown", why=error.reason))
        return None
    summary = engine.prediction.summary()
    return BestTime(
        ms,
        result.float_time.total_ms / ms if ms else 1.0,
        summary["int8"],
        summary["fp8"],
        summary["convolutions"],
        summary["conversions"],
        engine.clock_share,
    )


def estimate_variant(time: TimeEstimate, model: Model, target: Target) -> float:
    """Return the milliseconds of another model under the conditions of an estimate.

    GPU, batch, float type and calibration are taken from ``time``.
    """
    resolved_model, _ = model_variants.resolve_inputs(model, time.requested_batch or 1)
    return _time_variant(time, resolved_model, target)[1]


def _time_variant(
    time: TimeEstimate, resolved_model: Model, target: Target
) -> tuple[TimedEngine, float]:
    """Return the engine of another model, and its milliseconds, as for an existing estimate."""
    resolved_model = fold_constants(resolved_model)
    simulated = simulate_without_alternatives(resolved_model, target_with_layers(target))
    float_types = list_float_types(resolved_model, target, time.float_type)
    engine = time_engine(resolved_model, simulated, time.gpu, float_types, time.batch)
    ms = engine.running_ms(time.calibration, has_gaps=not time.is_cuda_graph)
    return engine, float(ms.sum())

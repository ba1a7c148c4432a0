"""Times of a network without its Q/DQ, and with the Q/DQ that ``insert`` would write."""

from __future__ import annotations

import math
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
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target, strongly_typed, without_fp8_typing
from qdqtool.util.notes import Note

_SAME_TIME = 1e-3  # times of one placement differ by less, such as by the shape of a constant


def add_alternative_times(
    result: TimeEstimate,
    model: Model,
    simulated: Prediction,
    target: Target,
    *,
    with_insert: bool = True,
) -> None:
    """Add the times of the network without Q/DQ, and with the Q/DQ of ``insert``.

    `simulated` is the prediction of the model with engine layers.
    On a GPU without INT8, or if `with_insert` is false, only the time without Q/DQ is added.
    Unless the user requests a strongly typed network of TensorRT 10, only a network with FP8 is
    strongly typed there. The added times of other networks are then times of weakly typed builds.
    If GPU and target have FP8, a time with FP8 Q/DQ is added as well.
    """
    float_model: Model | None = model
    plain = model
    if model_variants.has_qdq(model):
        if target.is_typed_for_fp8 and with_insert:
            text = (
                "only FP8 needs a strongly typed build. The times of other types are for weakly "
                "typed builds; with `strongly_typed`, they are for strongly typed builds"
            )
            result.notes.append(Note(text, code="other-types-weakly-typed"))
        target = without_fp8_typing(target)
        plain = model_variants.float_variant(model)
        result.notes += _note_float_inputs(model, plain, "the other times are")
        float_model = model_variants.fill_missing_weights(plain)
        # In a file with FP8 or for a strongly typed target, FP16 and its Casts may be from
        # `insert`. In another file they are from the export of the float network.
        if float_model is not None and (target.strongly_typed or uses_fp8(model)):
            float_model = model_variants.undo_fp16_of_insert(float_model)
    result.float_time = _float_time(result, float_model or plain, target, float_model is not None)
    if not result.gpu.has_int8:
        if not model_variants.has_qdq(model):
            text = "the GPU has no INT8, so Q/DQ would not make the network faster"
            result.notes.append(Note(text, code="no-int8"))
    elif float_model is not None and with_insert:
        result.best = _best_time(result, simulated, float_model, target)
        if result.gpu.has_fp8 and target.has_fp8:
            typed = strongly_typed(target)
            pixels_as_float = model_variants.undo_uint8_input_of_insert(float_model)
            result.best_fp8 = _best_time(result, simulated, pixels_as_float, typed, Precision.FP8)
            if result.best_fp8 is not None:
                subject = "the time of insert with FP8 is"
                result.notes += _note_float_inputs(float_model, pixels_as_float, subject)


def _note_float_inputs(model: Model, other: Model, subject: str) -> list[Note]:
    """Return a note on the inputs that have another type in a float model.

    Args:
        model: The model.
        other: The same network with float inputs.
        subject: Start of the note, which names the times for `other`.
    """
    names = [n for n in model.inputs if model.elem_type(n) != other.elem_type(n)]
    if not names:
        return []
    listed = ", ".join(f"'{name}'" for name in names)
    text = f"{subject} for a model with float input {listed}"
    return [Note(text, code="other-inputs-float", inputs=names)]


def _float_time(result: TimeEstimate, model: Model, target: Target, has_weights: bool) -> FloatTime:
    """Return the time of a float network, in FP16 if the GPU computes FP16 faster than FP32.

    If FP16 with its Casts is slower than the type of the file (for a builder that chooses types:
    the type of the estimate), the time is for that type.

    Args:
        result: Estimate of the network with Q/DQ, or of the float network itself.
        model: The float network.
        target: TensorRT version.
        has_weights: Whether `model` has weights, so that a strongly typed network can be converted
            to FP16. If it cannot, the builder is assumed to choose the float types.
    """
    typed = target.strongly_typed
    stored = file_float_type(model) if typed else result.float_type
    stored_ms, stored_share = result.total_ms, result.clock_share
    if not result.is_float:
        engine, stored_ms = _time_variant(result, model, target)
        stored_share = engine.clock_share
    if stored == result.gpu.float_type or result.gpu.float_type == Precision.FP32:
        return FloatTime(stored, stored_ms, clock_share=stored_share)
    if typed:
        fp16 = model_variants.fp16_variant(model, target) if has_weights else None
        if fp16 is None:
            target = WEAKLY_TYPED
        else:
            model = fp16
    with_fp16 = replace(result, float_type=Precision.FP16)
    engine, fp16_ms = _time_variant(with_fp16, model, target)
    if fp16_ms <= stored_ms:
        return FloatTime(Precision.FP16, fp16_ms, stored_ms, engine.clock_share, stored_share)
    return FloatTime(stored, stored_ms, clock_share=stored_share)


def _best_time(
    result: TimeEstimate,
    simulated: Prediction,
    model: Model,
    target: Target,
    precision: Precision = Precision.INT8,
) -> BestTime | None:
    """Return the time of the network with the Q/DQ that ``insert`` would write.

    None if quantizing or simulating fails. For a float network, a note then states the reason.
    """
    assert result.float_time is not None
    try:
        quantized = model_variants.quantized_variant(model, target, precision.lower())
        engine, ms = _time_variant(result, quantized, target)
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
        is_repeated=math.isclose(ms, result.total_ms, rel_tol=_SAME_TIME)
        and _list_outcomes(engine.prediction) == _list_outcomes(simulated),
    )


def _list_outcomes(prediction: Prediction) -> list[tuple[object, ...]]:
    """Return the types of each convolution, and the number of remaining conversions."""
    types = [(c.name, c.precision, *c.inputs, c.output) for c in prediction.convolutions]
    return [*types, (prediction.conversions,)]


def estimate_variant(time: TimeEstimate, model: Model, target: Target) -> float:
    """Return the milliseconds of another model under the conditions of an estimate.

    GPU, batch, float type and calibration are taken from ``time``.
    """
    return _time_variant(time, model, target)[1]


def _time_variant(time: TimeEstimate, model: Model, target: Target) -> tuple[TimedEngine, float]:
    """Return the engine of another model, and its milliseconds, as for an existing estimate.

    As in the estimate, the engine is simulated with the dynamic shapes of the file, because shapes
    that are computed decide what TensorRT fuses.
    """
    simulated = simulate_without_alternatives(model, target_with_layers(target))
    resolved_model = model_variants.resolve_inputs(model, time.requested_batch or 1)
    resolved_model = fold_constants(resolved_model)
    float_types = list_float_types(resolved_model, target, time.float_type)
    engine = time_engine(resolved_model, simulated, time.gpu, float_types, time.batch)
    ms = engine.running_ms(time.calibration, has_gaps=not time.is_cuda_graph)
    return engine, float(ms.sum())

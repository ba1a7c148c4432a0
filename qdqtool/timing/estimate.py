"""Estimated time of a predicted engine on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.ir.branches import count_subgraphs
from qdqtool.ir.constants import fold_constants
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import uses_fp8
from qdqtool.timing import model_variants, work
from qdqtool.timing.alternatives import add_alternative_times
from qdqtool.timing.engine_time import (
    TimedEngine,
    list_float_types,
    target_with_layers,
    time_engine,
)
from qdqtool.timing.gpus import Gpu, find_gpu
from qdqtool.timing.ranges import set_time_range
from qdqtool.timing.results import KernelTime, TimeEstimate
from qdqtool.timing.savings import add_insert_saving, add_savings
from qdqtool.timing.time_calibration import make_calibration
from qdqtool.timing.workload import EngineWorkload
from qdqtool.trt.outcome import simulate_without_alternatives
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target, target_named
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

Array = npt.NDArray[np.float64]


def _note_limits(gpu: Gpu, model: Model, is_float: bool, uses_int8: bool) -> list[Note]:
    notes = []
    if gpu.has_fused_conversions and not is_float:
        notes.append(
            Note(
                f"on {gpu.rates.architecture} TensorRT compiles the network with Myelin: a "
                "conversion next to an elementwise or copy kernel is counted as part of that "
                "kernel (seen in one engine)",
                code="in-myelin",
            )
        )
    if gpu.has_int8 and gpu.int8_rate_over_fp16 <= 1 and uses_int8:
        notes.append(_slow_int8_note(gpu))
    if count_subgraphs(model):
        notes.append(
            Note(
                "the times exclude the branches of If and the bodies of Loop and Scan",
                code="subgraphs-excluded",
            )
        )
    return notes


def _with_full_bandwidth(gpu: Gpu) -> Gpu | None:
    """Return the GPU with its full bandwidth; None if no power mode lowers the bandwidth."""
    if all(note.code not in ("power-mode", "power-mode-assumed") for note in gpu.notes):
        return None
    full = find_gpu(gpu.name).bandwidth
    return replace(gpu, bandwidth=full) if gpu.bandwidth < full else None


def _note_bandwidth(gpu: Gpu, engine: TimedEngine, unlimited: TimedEngine) -> list[Note]:
    if not np.array_equal(engine.running_ms(), unlimited.running_ms()):
        return []
    text = f"the memory bandwidth of {gpu.bandwidth:g} GB/s limits no layer in this estimate"
    return [Note(text, code="bandwidth-unused", gb_per_s=gpu.bandwidth)]


def estimate_time(
    model: Model,
    prediction: Prediction,
    gpu: Gpu,
    target: Target,
    *,
    float_type: Precision = Precision.FP16,
    batch: int | None = None,
    is_size_given: bool = False,
    calibrate: str | None = None,
    compare: bool = True,
    with_insert: bool = True,
    cuda_graph: bool = False,
) -> TimeEstimate:
    """Estimate the time of a predicted engine.

    The function also sets ``saves_ms`` of the prediction's findings and ``ms`` of its layers.

    Args:
        model: The predicted model.
        prediction: Prediction for the model.
        gpu: GPU that runs the engine.
        target: TensorRT version.
        float_type: Type of floats: FP16 (``--fp16`` given to the builder) or FP32.
        batch: Batch size to estimate for. None for the batch size of the model.
        is_size_given: Whether the user gave the height and width of the model's inputs. If not,
            the notes state assumed sizes.
        calibrate: A measured time (``5.3ms``), a profile of this engine, or a calibration file.
        compare: Whether to estimate two more networks: the network without Q/DQ, and the network
            with the Q/DQ that ``insert`` would write.
        with_insert: Whether these networks include that of ``insert``.
        cuda_graph: Whether the engine runs as a CUDA graph, which has no gaps between kernels.

    Raises:
        QdqtoolError: The calibration cannot be used.
        BuildLogError: The profile cannot be read.
    """
    notes = model_variants.note_assumed_shapes(model, batch, is_size_given=is_size_given)
    resolved_model = fold_constants(model_variants.resolve_inputs(model, batch or 1))
    factor = _batch_factor(resolved_model, batch, notes)
    simulated = prediction
    if not gpu.has_int8 and model_variants.has_qdq(model):
        resolved_model = model_variants.float_variant(resolved_model)
        simulated, note = _simulate_without_qdq(model, target, gpu)
        notes.append(note)
    elif prediction.convolutions and not prediction.layers:
        simulated, note = _simulate_layers(model, prediction, target)
        notes.append(note)
    is_float = not model_variants.has_qdq(resolved_model)
    float_types = list_float_types(resolved_model, target, float_type)
    engine = time_engine(resolved_model, simulated, gpu, float_types, factor)
    uses_int8 = is_float or simulated.summary()["int8"] > 0
    notes += _note_limits(gpu, resolved_model, is_float, uses_int8)
    correction = None
    if calibrate is not None:
        total_ms = float(engine.running_ms().sum())
        layers, kernel_ms = simulated.layers, engine.kernel_ms
        correction = make_calibration(calibrate, gpu.name, layers, kernel_ms, total_ms)
    ms = engine.running_ms(correction, has_gaps=not cuda_graph)
    profile_ms = engine.profile_ms(correction)
    idle_ms = engine.without_work().running_ms(correction, has_gaps=not cuda_graph)
    workload = engine.workload
    conversions = [
        i for i, layer in enumerate(simulated.layers) if layer.type == "Conversion" and ms[i] > 0
    ]
    layouts = [
        i
        for i, extra in enumerate(workload.extras, len(workload.layers))
        if extra.layout_change is not None
    ]
    result = TimeEstimate(
        gpu,
        total_ms=float(ms.sum()),
        conversions_ms=float(profile_ms[conversions].sum()),
        batch=factor,
        calibration=correction,
        unknown=workload.unknown,
        notes=notes,
        float_type=float_type,
        is_float=is_float,
        requested_batch=batch,
        workload=workload,
        layouts_ms=float(ms[layouts].sum()),
        layouts=len(layouts),
        conversions=len(conversions),
        launch_ms=float(idle_ms.sum()),
        is_cuda_graph=cuda_graph,
        without_graph_ms=float(engine.running_ms(correction).sum()),
        quantized=_main_precision(resolved_model, simulated),
        clock_share=engine.clock_share,
    )
    set_time_range(result, float(engine.counts.sum()))
    if (unlimited := _with_full_bandwidth(gpu)) is not None:
        other = time_engine(resolved_model, simulated, unlimited, float_types, factor)
        result.notes += _note_bandwidth(gpu, engine, other)
    result.kernels = _list_kernels(engine, profile_ms)
    if simulated is prediction:
        result.layers = profile_ms[: len(workload.layers)].tolist()
        _write_layer_times(prediction, workload, profile_ms)
        if len(float_types) > 1 and engine.float_type == Precision.FP32:
            result.fp32_layers = _count_fp32_layers(prediction, workload)
            result.notes += _note_fp32_layers(result.fp32_layers)
    add_savings(prediction, simulated, workload, ms, profile_ms, gpu, correction)
    if compare and 2 * len(workload.unknown) <= len(workload.all_work):
        add_alternative_times(result, model, simulated, target, with_insert=with_insert)
        if result.best is not None:
            add_insert_saving(prediction, result.total_ms - result.best.total_ms)
    return result


def _simulate_without_qdq(model: Model, target: Target, gpu: Gpu) -> tuple[Prediction, Note]:
    """Return a prediction of the model without Q/DQ for a GPU without INT8, and a note."""
    text = (
        f"{target.display_name} has no INT8 on {gpu.name}: the times are for the model without Q/DQ"
    )
    variant = model_variants.float_variant(model)
    simulated = simulate_without_alternatives(variant, target_with_layers(target))
    return simulated, Note(text, code="without-qdq")


def _simulate_layers(
    model: Model, prediction: Prediction, target: Target
) -> tuple[Prediction, Note]:
    """Return a prediction with engine layers, and a note.

    TensorRT-RTX does not name layers, so the engine is that of classic TensorRT.
    """
    named = target_with_layers(target_named(prediction.target))
    simulated = simulate_without_alternatives(model, named)
    conversions = simulated.summary()["conversions"] or 0
    text = (
        f"{prediction.target} does not name layers: the times were estimated from the engine "
        f"that {named.name} would build"
    )
    if conversions:
        # On TensorRT-RTX 1.7.1, Q/DQ on residuals change no kernel in FP8, and one kernel of a
        # ResNet-18 in INT8.
        text += (
            f", with {format_count(conversions, 'Q/DQ layer')}. {target.display_name} quantizes "
            "inside its kernels: other places of Q/DQ that save such layers are hardly faster there"
        )
    return simulated, Note(text, code="no-layers-named", conversions=conversions)


def _main_precision(model: Model, simulated: Prediction) -> Precision:
    """Return the type of most quantized layers, or of the Q/DQ if all layers are float."""
    counts = simulated.summary()
    if counts["fp8"] == counts["int8"] == 0:
        return Precision.FP8 if uses_fp8(model) else Precision.INT8
    return Precision.FP8 if counts["fp8"] > counts["int8"] else Precision.INT8


def _slow_int8_note(gpu: Gpu) -> Note:
    types = (Precision.INT8, gpu.float_type, Precision.FP8)
    int8, half, fp8 = (2e-12 * gpu.mac_rate(p) for p in types)
    if gpu.int8_rate_over_fp16 < 1:
        comparison, effect = "slower", "INT8 slows down all layers that computation limits"
    else:
        comparison, effect = "no faster", "INT8 saves only memory traffic"
    text = (
        f"{gpu.name} computes INT8 {comparison} than {gpu.float_type} ({int8:.0f} and {half:.0f} "
        f"TOPS): {effect}"
    )
    if gpu.has_fp8 and fp8 > half:
        text += f". FP8 is faster on this GPU ({fp8:.0f} TOPS): use qdqtool insert --precision fp8"
    return Note(text, code="int8-not-faster", int8_tops=int8, float_tops=half, fp8_tops=fp8)


def _batch_factor(model: Model, batch: int | None, notes: list[Note]) -> float:
    """Return the requested batch size / the model's batch size; add a note if they differ.

    1 if no batch size is requested.

    Raises:
        QdqtoolError: The inputs have no common batch dimension.
    """
    if batch is None:
        return 1.0
    first_dimensions = {shape[0] for shape in map(model.shape, model.inputs) if shape}
    file_batch = first_dimensions.pop() if len(first_dimensions) == 1 else None
    if not file_batch:
        raise QdqtoolError(
            f"`batch` {batch}: the model's inputs have no common batch size, so times cannot be "
            "scaled; leave `batch` out",
            code="no-common-batch",
            parameter="batch",
        )
    if file_batch != batch:
        notes.append(
            Note(
                f"the times are for the model exported with batch {batch}. This file has the "
                f"fixed batch {file_batch}, so TensorRT builds its engine for batch {file_batch}",
                code="batch-scaled",
            )
        )
    return batch / file_batch


def _write_layer_times(prediction: Prediction, workload: EngineWorkload, profile_ms: Array) -> None:
    times = [round(ms, 5) for ms in profile_ms.tolist()]
    layers = {}
    for layer, ms in zip(prediction.layers, times, strict=False):
        layer.ms, layer.layouts = ms, []
        layers[layer.name] = layer
    activations = {e.name: e.activation_of for e in workload.extras if e.activation_of}
    for extra, ms in zip(workload.extras, times[len(workload.layers) :], strict=True):
        change = extra.layout_change
        if change is None:
            continue
        consumer = layers.get(activations.get(change.layer, change.layer))
        if consumer is not None:
            consumer.layouts.append(
                {"tensor": change.tensor, "from": change.source, "to": change.target, "ms": ms}
            )


def _count_fp32_layers(prediction: Prediction, workload: EngineWorkload) -> int:
    """Return the number of layers with floats of no fixed type that are estimated with FP32."""
    return sum(
        w.kind != work.NOTHING
        and Precision.FP32 in (w.precision, w.written_as)
        and any(edge.precision == Precision.FLOAT for edge in (*layer.inputs, *layer.outputs))
        for layer, w in zip(prediction.layers, workload.layers, strict=True)
    )


def _note_fp32_layers(count: int) -> list[Note]:
    if not count:
        return []
    verb = "is" if count == 1 else "are"
    layers = format_count(count, "float layer")
    text = f"{layers} {verb} estimated in FP32, which is faster here than FP16"
    return [Note(text, code="fp32-layers", layers=count)]


def _list_kernels(engine: TimedEngine, profile_ms: Array) -> list[KernelTime]:
    prediction, workload = engine.prediction, engine.workload
    titles = {c.layer: c.name for c in prediction.convolutions}
    names = [layer.name for layer in prediction.layers] + [e.name for e in workload.extras]
    kernels = [
        KernelTime(name, w.kind, float(ms), titles.get(name, name))
        for name, w, ms in zip(names, workload.all_work, profile_ms, strict=True)
        if ms > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)

"""Estimated time compared with the measured time of a build."""

from __future__ import annotations

import statistics

from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.timing import time_calibration
from qdqtool.timing.built_engine import check_build_gpu, explain_unknown_gpu, find_build_gpu
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpus import Gpu, all_gpus
from qdqtool.timing.options import GpuOptions
from qdqtool.timing.physics import load_constants
from qdqtool.timing.results import TimeEstimate
from qdqtool.timing.time_calibration import match_profile_rows
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note

_SLOW = 1.5  # ratio of measured to estimated time from which a layer counts as slow
_MAX_SLOW_LAYERS = 5


def compare_times(
    model: Model, prediction: Prediction, build: Build, target: Target, options: GpuOptions
) -> Json | None:
    """Return estimated and measured times as JSON; None without times or a known GPU."""
    gpu = find_build_gpu(build, options.gpu, options.clock)
    if gpu is None or not is_timed(build):
        return None
    time = estimate_time(
        model,
        prediction,
        gpu,
        target,
        float_type=float_layer_precision(build),
        compare=False,
        cuda_graph=is_timed_as_cuda_graph(build),
    )
    layers = _layer_times(prediction, build, time)
    overhead = 0.0 if build.gpu_ms is not None else _fit_overhead_us(gpu.name, layers)
    measured, source = find_measured_time(build, overhead)
    errors = [abs(layer["predicted_ms"] / layer["built_ms"] - 1) for layer in layers]
    slow = sorted(
        (layer for layer in layers if layer["built_ms"] > _SLOW * layer["predicted_ms"]),
        key=lambda layer: layer["predicted_ms"] - layer["built_ms"],
    )
    return {
        "gpu": gpu.name,
        "clock_mhz": round(gpu.clock),
        "running_clock_mhz": round(time.clock),
        "predicted_ms": time.total_ms,
        "low_ms": time.low_ms,
        "high_ms": time.high_ms,
        "built_ms": measured,
        "built_from": source,
        "within": time.low_ms <= measured <= time.high_ms,
        "notes": [
            *check_build_gpu(build, gpu),
            *_note_clock(gpu, options),
            *_note_build_options(time),
            *time.notes,
        ],
        "layers": {
            "compared": len(layers),
            "median_error": statistics.median(errors) if errors else None,
        },
        "slow": slow[:_MAX_SLOW_LAYERS],
    }


def _note_clock(gpu: Gpu, options: GpuOptions) -> list[Note]:
    """Return a note if the clock in the log is not that with which `predict` estimates."""
    usual = next((other.clock for other in all_gpus() if other.name == gpu.name), gpu.clock)
    if gpu.notes or options.clock is not None or round(usual) == round(gpu.clock):
        return []
    return [
        Note(
            f"the estimate is for {gpu.clock:.0f} MHz, the clock in the log. predict estimates for "
            f"{usual:.0f} MHz; with `clock={gpu.clock:.0f}` it estimates for the clock in the log",
            code="other-clock",
            clock=gpu.clock,
            usual=usual,
        )
    ]


def _note_build_options(time: TimeEstimate) -> list[Note]:
    """Return a note for each option of the build that `predict` does not assume."""
    notes = []
    if time.is_cuda_graph:
        notes.append(
            Note(
                "the log's build was timed as a CUDA graph, so the estimate has no launch times. "
                f"predict estimates without a CUDA graph: {time.without_graph_ms:.3f} ms",
                code="cuda-graph",
                ms=time.without_graph_ms,
            )
        )
    if time.float_type == Precision.FP32 and time.gpu.float_type == Precision.FP16:
        notes.append(
            Note(
                "the log's build does not allow FP16, so layers that are not quantized count as "
                "FP32. predict assumes FP16; with `no_fp16` it assumes FP32",
                code="no-fp16",
            )
        )
    return notes


def is_timed(build: Build) -> bool:
    """Return whether a build states any time."""
    return build.gpu_ms is not None or bool(build.profile_rows)


def find_measured_time(build: Build, overhead_us: float = 0.0) -> tuple[float, str]:
    """Return the measured milliseconds of a timed build, and a text that names their source.

    Without a total time in the log, the layer times of the profile are added.

    Args:
        build: A build with a time or a profile.
        overhead_us: Time that profiling adds to each layer, in microseconds.
    """
    if build.gpu_ms is not None:
        statistic = "median" if "median" in build.performance["GPU Compute Time"] else "mean"
        return build.gpu_ms, f"{statistic} GPU compute time"
    correction = ", which includes the overhead of profiling"
    if overhead_us:
        correction = f" minus {overhead_us:.1f} us per layer"
    total = sum(max(row.ms - overhead_us * 1e-3, 0.0) for row in build.profile_rows)
    statistic = "mean" if any(row.median_ms is None for row in build.profile_rows) else "median"
    return total, f"sum of the layers' {statistic} times in the profile{correction}"


def explain_missing_estimate(build: Build) -> list[Note]:
    """Return a note on why measured times have no estimate.

    Empty if the reason is unknown, or if the build has no times.
    """
    if not is_timed(build):
        return []
    why = "the build does not name its GPU; give `gpu`"
    if build.device is not None:
        why = explain_unknown_gpu(build)
    if not why:
        return []
    ms, source = find_measured_time(build)
    return [
        Note(
            f"{ms:.3f} ms were measured ({source}), but no estimate is available: {why}",
            code="no-estimate",
            ms=ms,
            source=source,
            why=why,
        )
    ]


def _fit_overhead_us(gpu: str, layers: list[Json]) -> float:
    """Return the microseconds that profiling adds to each layer, fitted to the layers.

    If the fit fails or shows no overhead, the usual overhead is returned. 0 for a GPU whose
    profiles have no overhead.
    """
    lowest, highest = time_calibration.overhead_limits(gpu)
    if not highest:
        return 0.0
    usual = load_constants().overhead_us
    estimated = [layer["predicted_ms"] - usual * 1e-3 for layer in layers]
    try:
        overhead = time_calibration.calibrate_by_layers(
            gpu, [layer["built_ms"] for layer in layers], estimated, "profile"
        )
    except QdqtoolError:
        return usual
    return overhead.overhead_us if overhead.overhead_us > lowest else usual


def float_layer_precision(build: Build) -> Precision:
    """Return the type of float layers under the builder's flags; FP16 if flags are unknown."""
    flags = build.precision_flags
    is_half = not flags or bool(flags & {"fp16", "best", "bf16", "stronglyTyped"})
    return Precision.FP16 if is_half else Precision.FP32


def is_timed_as_cuda_graph(build: Build) -> bool:
    """Return whether the engine was timed as a CUDA graph."""
    return build.options.get("Inference", {}).get("CUDA Graph", "") == "Enabled"


def _layer_times(prediction: Prediction, build: Build, time: TimeEstimate) -> list[Json]:
    rows = match_profile_rows(prediction.layers, build.profile_rows)
    return [
        {"name": layer.name, "predicted_ms": value, "built_ms": row.ms}
        for layer, row, value in zip(prediction.layers, rows, time.layers, strict=False)
        if row is not None and row.ms > 0 and value > 0
    ]

"""The estimated time compared with a build that was profiled or timed."""

from __future__ import annotations

import statistics

from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.timing import time_calibration
from qdqtool.timing.built_engine import check_build_gpu, explain_unknown_gpu, find_build_gpu
from qdqtool.timing.estimate import TimeEstimate, estimate, match_profile_rows
from qdqtool.timing.options import GpuOptions
from qdqtool.timing.physics import load_constants
from qdqtool.trt.targets import Target
from qdqtool.types import Json, Precision, Prediction
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import said

_SLOW = 1.5  # times the estimate from which on a layer is named
_NAMED = 5


def compare_times(
    model: Model, prediction: Prediction, build: Build, target: Target, gpu: GpuOptions
) -> Json | None:
    """Compare estimated with measured milliseconds; None without times or a known GPU."""
    chosen = find_build_gpu(build, gpu.gpu, gpu.clock)
    if chosen is None or not is_timed(build):
        return None
    time = estimate(
        model,
        prediction,
        chosen,
        target,
        float_type=plain_in(build),
        compare=False,
        cuda_graph=runs_as_graph(build),
    )
    pairs = _pairs(prediction, build, time)
    overhead = 0.0 if build.gpu_ms is not None else _overhead_us(chosen.name, pairs)
    measured, how = measured_time(build, overhead)
    off = [abs(t / m - 1) for _, t, m in pairs]
    slow = sorted((p for p in pairs if p[2] > _SLOW * p[1]), key=lambda p: p[1] - p[2])[:_NAMED]
    return {
        "gpu": chosen.name,
        "clock_mhz": round(chosen.clock),
        "predicted_ms": time.total_ms,
        "low_ms": time.low_ms,
        "high_ms": time.high_ms,
        "built_ms": measured,
        "built_from": how,
        "within": time.low_ms <= measured <= time.high_ms,
        "notes": [*check_build_gpu(build, chosen), *time.notes],
        "layers": {"compared": len(pairs), "median_error": statistics.median(off) if off else None},
        "slow": [{"name": n, "predicted_ms": t, "built_ms": m} for n, t, m in slow],
    }


def is_timed(build: Build) -> bool:
    """Whether a build gives any time."""
    return build.gpu_ms is not None or bool(build.profile_rows)


def measured_time(build: Build, overhead_us: float = 0.0) -> tuple[float, str]:
    """Milliseconds of a timed build, and where they are from: the log, else the sum of its profile."""
    stated = build.gpu_ms
    if stated is not None:
        return stated, "GPU compute time"
    less = f" less {overhead_us:.1f} us a layer" if overhead_us else ", with what profiling added"
    return sum(
        max(row.ms - overhead_us * 1e-3, 0.0) for row in build.profile_rows
    ), f"sum of the profile{less}"


def not_compared(build: Build) -> list[Note]:
    """Why a build that was timed is compared with no estimate: its GPU is not known."""
    if not is_timed(build):
        return []
    why = (
        said("the build does not say on which GPU it ran; name it with {`gpu`}")
        if build.device is None
        else (explain_unknown_gpu(build))
    )
    measured, how = measured_time(build)
    return [Remark.NO_ESTIMATE(ms=measured, source=how, why=why)] if why else []


def _overhead_us(gpu: str, pairs: list[tuple[str, float, float]]) -> float:
    """What the profile added to each layer, as its layers show against the estimate; the usual where they do not."""
    usual = load_constants().overhead_us
    try:
        found = time_calibration.calibrate_by_layers(
            gpu, [m for *_, m in pairs], [t - usual * 1e-3 for _, t, _ in pairs], "profile"
        )
    except QdqtoolError:
        return usual
    return found.overhead_us or usual


def plain_in(build: Build) -> Precision:
    """What the builder was allowed to make of a float: FP16, or FP32 where its flags name nothing narrower."""
    half = not build.precision_flags or bool(
        build.precision_flags & {"fp16", "best", "bf16", "stronglyTyped"}
    )
    return Precision.FP16 if half else Precision.FP32


def runs_as_graph(build: Build) -> bool:
    """Whether the log says that the engine was timed as a CUDA graph."""
    return build.options.get("Inference", {}).get("CUDA Graph", "") == "Enabled"


def _pairs(
    prediction: Prediction, build: Build, time: TimeEstimate
) -> list[tuple[str, float, float]]:
    """Name, estimated and measured milliseconds of the layers that prediction and profile share."""
    rows = match_profile_rows(prediction.layers, build.profile_rows)
    return [
        (layer.name, value, row.ms)
        for layer, row, value in zip(prediction.layers, rows, time.layers, strict=False)
        if row is not None and row.ms > 0 and value > 0
    ]

"""The estimated time compared with a build that was profiled or timed."""

from __future__ import annotations

import statistics

from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.graph import Model
from qdqtool.timing import calibration
from qdqtool.timing.estimate import TimeEstimate, estimate, in_profile
from qdqtool.timing.expected import gpu_of, unknown_gpu
from qdqtool.timing.physics import constants
from qdqtool.trt.targets import Target
from qdqtool.types import Json, Precision, Prediction

_SLOW = 1.5  # times the estimate from which on a layer is named
_NAMED = 5


def compare_times(
    model: Model,
    prediction: Prediction,
    build: Build,
    target: Target,
    gpu: str | None = None,
    clock: float | None = None,
) -> Json | None:
    """Estimated against measured milliseconds; None where the build gives no times, or not on which GPU.

    Raises:
        QdqtoolError: ``gpu`` is no GPU that is known.
    """
    chosen = gpu_of(build, gpu, clock)
    measured = gpu_time(build)
    if chosen is None or (measured is None and not build.profile_rows):
        return None
    time = estimate(model, prediction, chosen, target, plain=plain_in(build), compare=False,
                    graph=runs_as_graph(build))  # fmt: skip
    how = "GPU compute time"
    pairs = _pairs(prediction, build, time)
    if measured is None:
        overhead = _overhead_us(chosen.name, pairs)
        measured = sum(max(row.average_ms - overhead * 1e-3, 0.0) for row in build.profile_rows)
        how = f"sum of the profile less {overhead:.1f} us a layer"
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
        "notes": [note for note in time.notes if note],
        "layers": {"compared": len(pairs), "median_error": statistics.median(off) if off else None},
        "slow": [{"name": n, "predicted_ms": t, "built_ms": m} for n, t, m in slow],
    }


def gpu_time(build: Build) -> float | None:
    """Milliseconds on the GPU that the log states, the median where it has one."""
    performance = build.performance.get("GPU Compute Time", {})
    return performance.get("median", performance.get("mean"))


def not_compared(build: Build) -> list[str]:
    """Why a build that was timed is compared with no estimate: its GPU is not known."""
    if not build.performance.get("GPU Compute Time") and not build.profile_rows:
        return []
    why = unknown_gpu(build)
    return [f"times are not compared: {why}"] if why else []


def _overhead_us(gpu: str, pairs: list[tuple[str, float, float]]) -> float:
    """What the profile added to each layer, as its layers show against the estimate; the usual where they do not."""
    usual = constants().overhead_us
    try:
        found = calibration.of_layers(gpu, [m for *_, m in pairs], [t - usual * 1e-3 for _, t, _ in pairs], "profile")
    except QdqtoolError:
        return usual
    return found.overhead_us or usual


def plain_in(build: Build) -> Precision:
    """What the builder was allowed to make of a float: FP16, or FP32 where its flags name nothing narrower."""
    half = not build.precision_flags or bool(build.precision_flags & {"fp16", "best", "bf16", "stronglyTyped"})
    return Precision.FP16 if half else Precision.FP32


def runs_as_graph(build: Build) -> bool:
    """Whether the log says that the engine was timed as a CUDA graph."""
    return build.options.get("Inference", {}).get("CUDA Graph", "") == "Enabled"


def _pairs(prediction: Prediction, build: Build, time: TimeEstimate) -> list[tuple[str, float, float]]:
    """Name, estimated and measured milliseconds of the layers that prediction and profile share."""
    rows = in_profile(prediction.layers, build.profile_rows)
    return [
        (layer.name, value, row.average_ms)
        for layer, row, value in zip(prediction.layers, rows, time.layers, strict=False)
        if row is not None and row.average_ms > 0 and value > 0
    ]

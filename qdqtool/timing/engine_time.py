"""Simulated engines with the time of each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.ir.graph import Model
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import Precision
from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import estimate_engine, estimate_seconds, load_constants
from qdqtool.timing.time_calibration import TimeCalibration
from qdqtool.timing.work import LayerWork
from qdqtool.timing.workload import EngineWorkload, predict_workload
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import TARGETS, Target, strongly_typed

Array = npt.NDArray[np.float64]
# Newest weakly typed target. TensorRT-RTX is left out, because its simulation names no layers.
WEAKLY_TYPED = max(
    (t for t in TARGETS.values() if not (t.strongly_typed or t.is_rtx)), key=lambda t: t.version
)


@dataclass(slots=True)
class TimedEngine:
    """A simulated engine on a GPU.

    Attributes:
        gpu: The GPU.
        float_type: Type of float layers for which the engine was estimated: FP16 or FP32.
        prediction: Prediction with engine layers.
        workload: Work of the layers and of the extra kernels.
        kernel_ms: Milliseconds of each entry of ``workload.all_work``, without gaps between
            kernels; shape [entries].
        counts: Number of kernels of each entry, 0 if the entry takes no time; shape [entries].
        clock_share: Share of the GPU's boost clock that its power limit allows for this engine.
    """

    gpu: Gpu
    float_type: Precision
    prediction: Prediction
    workload: EngineWorkload
    kernel_ms: Array
    counts: Array
    clock_share: float = 1.0

    def running_ms(
        self, correction: TimeCalibration | None = None, *, has_gaps: bool = True
    ) -> Array:
        """Return the milliseconds of each entry in a running engine, of shape [entries].

        If `correction` comes from a profile, no gaps between kernels are added, because a profile
        measures kernels alone.

        Args:
            correction: Correction of the times.
            has_gaps: Whether to add the gaps between kernels of an engine without a CUDA graph.
        """
        ms = self.kernel_ms
        if has_gaps and not (correction and correction.profiled):
            ms = ms + self.counts * load_constants().gap_ms(self.gpu)
        return correction.apply(ms, self.counts) if correction else ms

    def without_work(self) -> TimedEngine:
        """Return the engine with kernels that neither compute nor move data."""
        idle = [
            LayerWork(work.NOTHING if w.kind == work.NOTHING else work.POINTWISE, steps=w.steps)
            for w in self.workload.all_work
        ]
        return replace(self, kernel_ms=estimate_seconds(idle, self.gpu) * 1e3)

    def profile_ms(self, correction: TimeCalibration | None) -> Array:
        """Return the milliseconds of each entry in a profile, of shape [entries].

        The milliseconds include the overhead of profiling.
        """
        overhead_us = load_constants().overhead_us
        if correction and correction.profiled:
            overhead_us = correction.overhead_us
        return self.running_ms(correction, has_gaps=False) + self.counts * overhead_us * 1e-3


def target_with_layers(target: Target) -> Target:
    """Return the target; for TensorRT-RTX, a strongly typed target of classic TensorRT."""
    if not target.is_rtx:
        return target
    return replace(strongly_typed(WEAKLY_TYPED), largest_fp8_head=target.largest_fp8_head)


def time_engine(
    model: Model,
    simulated: Prediction,
    gpu: Gpu,
    float_types: Sequence[Precision],
    batch: float = 1.0,
) -> TimedEngine:
    """Return a simulated engine with the float type that makes it fastest.

    Args:
        model: Model without symbolic dimensions.
        simulated: Prediction with engine layers.
        gpu: GPU that runs the engine.
        float_types: Float types to choose from.
        batch: Batch size to estimate for, divided by the batch size of `model`.
    """
    engines = []
    for float_type in float_types:
        workload = predict_workload(model, simulated, float_type, batch, gpu)
        works = workload.all_work
        counts = np.asarray([0.0 if w.kind == work.NOTHING else w.steps for w in works])
        seconds, share = estimate_engine(works, gpu)
        kernel_ms = seconds * 1e3
        engines.append(TimedEngine(gpu, float_type, simulated, workload, kernel_ms, counts, share))
    return min(engines, key=lambda engine: float(engine.running_ms().sum()))


def list_float_types(model: Model, target: Target, float_type: Precision) -> tuple[Precision, ...]:
    """Return the float types to try for an engine.

    A strongly typed network has the float type of the file. Without strong typing, a builder that
    may use FP16 can choose FP32 instead, because INT8 convolutions that write FP32 need no layout
    change.
    """
    if target.strongly_typed:
        return (file_float_type(model),)
    return (float_type,) if float_type == Precision.FP32 else (float_type, Precision.FP32)


def file_float_type(model: Model) -> Precision:
    """Return FP16 if most operators with weights write FP16 or BF16 in the file, else FP32."""
    types = [model.elem_type(node.output) for node in model.nodes if node.op in WEIGHTED]
    halves = sum(t in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for t in types)
    return Precision.FP16 if 2 * halves > len(types) else Precision.FP32

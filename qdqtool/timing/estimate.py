"""Estimated time of a predicted engine on a GPU, and of the same network without Q/DQ."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.errors import QdqtoolError
from qdqtool.findings.obstacles import is_rejected
from qdqtool.insertion.number_formats import is_worthwhile
from qdqtool.ir.branches import count_subgraphs
from qdqtool.ir.constants import fold_constants
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import uses_fp8
from qdqtool.prediction import choose_typing, predict
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.timing import gpus, model_variants, work
from qdqtool.timing.gpu_checks import gpu_findings, gpu_from_capability
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.physics import estimate_seconds, load_constants
from qdqtool.timing.results import (
    BestTime,
    FixTime,
    FloatTime,
    KernelTime,
    SpeedGain,
    round_significant,
)
from qdqtool.timing.savings import add_insert_saving, add_savings
from qdqtool.timing.time_calibration import (
    TimeCalibration,
    calibrate_by_layers,
    calibrate_by_time,
    parse_time,
    read_calibration,
)
from qdqtool.timing.work import LayerWork
from qdqtool.timing.workload import EngineWorkload, predict_workload
from qdqtool.trt.outcome import apply_assumptions, simulate_without_alternatives
from qdqtool.trt.result import EngineLayer, Prediction
from qdqtool.trt.targets import TARGETS, Target, strongly_typed, target_named
from qdqtool.util.json_text import Json, json_text
from qdqtool.util.notes import Note
from qdqtool.util.outputs import write_text
from qdqtool.util.process import pause_gc

if TYPE_CHECKING:
    from qdqtool.buildlog.types import ProfileRow

Array = npt.NDArray[np.float64]
# The range is widened by 1 + this number x the share of layers whose shapes are unknown.
_UNKNOWN_SPREAD = 1.5
_TOTALS = ("total_ms", "low_ms", "high_ms", "conversions_ms", "layouts_ms")
_TIME_FIELDS = (*_TOTALS, "layers_ms", "float", "gain", "best", "best_fp8", "fastest")
# Assumed factor that widens the range if no GPU of the architecture was measured.
UNMEASURED_SPREAD = 1.15
# Codes of the findings that no engine can be built for a GPU.
UNSUPPORTED_GPU = ("GPU-NO-INT8", "GPU-VERSION")
_NOTE_SPREAD = 1.15  # factor that widens the range if figures of the GPU are assumed
_REPEATED_SPREAD = 1.05  # factor of the range if the same network was measured: variation of runs
# Newest weakly typed target whose simulation names layers.
_WEAKLY_TYPED = max(
    (t for t in TARGETS.values() if not (t.strongly_typed or t.is_rtx)), key=lambda t: t.version
)


@dataclass(slots=True)
class TimeEstimate:
    """Time of an engine on a GPU.

    Attributes:
        gpu: The GPU, as the user runs it.
        total_ms: Milliseconds of one run, end to end on the GPU (trtexec's GPU Compute Time).
        low_ms: Lower end of the range that contains 80 % of measured times.
        high_ms: Upper end of that range.
        conversions_ms: Milliseconds of the remaining Q and DQ, as a profile shows them.
        layers: Milliseconds of each predicted layer as a profile would show them, in the
            prediction's order.
        kernels: Every kernel, the slowest first.
        float_time: Time of the network without Q/DQ, in the faster float type. None if unknown.
        best: Time of the network with the INT8 Q/DQ that ``insert`` would write. None if unknown.
        best_fp8: Time with the FP8 Q/DQ that ``insert`` would write. None unless the network is
            float and the GPU has FP8.
        batch: Requested batch size divided by the batch size of the model.
        calibration: Measurement by which the times are corrected. None if they are not.
        unknown: Names of layers whose shapes are unknown.
        notes: Notes about the figures.
        float_type: Type of floats: FP16 or FP32.
        is_float: Whether the network has no Q/DQ.
        requested_batch: Batch size that the caller requested. None for the model's batch size.
        fixes: Savings of automatic fixes by kind, the largest first.
        workload: Work of all layers and kernels. Layers are in the prediction's order, unless the
            target does not name layers.
        layouts_ms: Part of the total that changes memory layouts, but no types.
        layouts: Number of kernels that change memory layouts.
        conversions: Number of kernels that convert data types.
        launch_ms: Milliseconds that the kernels would take without computing or moving data.
        is_cuda_graph: Whether the engine runs as a CUDA graph.
        quantized: Type of most layers that Q/DQ quantize: INT8 or FP8.
        obstacle: Code of the finding that no engine can be built for the GPU; None without one.
    """

    gpu: Gpu
    total_ms: float
    low_ms: float = 0.0
    high_ms: float = 0.0
    conversions_ms: float = 0.0
    layers: list[float] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    float_time: FloatTime | None = None
    best: BestTime | None = None
    best_fp8: BestTime | None = None
    batch: float = 1.0
    calibration: TimeCalibration | None = None
    unknown: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    float_type: Precision = Precision.FP16
    is_float: bool = False
    requested_batch: int | None = None
    fixes: list[FixTime] = field(default_factory=list)
    workload: EngineWorkload | None = field(default=None, repr=False)
    layouts_ms: float = 0.0
    layouts: int = 0
    conversions: int = 0
    launch_ms: float = 0.0
    is_cuda_graph: bool = False
    quantized: Precision = Precision.INT8
    obstacle: str | None = None

    @property
    def is_supported(self) -> bool:
        """Whether an engine of the network can be built for the GPU."""
        return self.obstacle is None

    @property
    def layer_count(self) -> int:
        """Number of layers and extra kernels, at least 1."""
        return max(1, len(self.workload.all_work) if self.workload else 1)

    @property
    def gain(self) -> float | None:
        """Speed gain: time of the float network over this time.

        None if this is a float network, or if the float network was not simulated.
        """
        if self.float_time is None or self.is_float or not self.total_ms:
            return None
        return self.float_time.total_ms / self.total_ms

    @property
    def gain_range(self) -> SpeedGain | None:
        """Speed gain over the float network with its uncertainty; None if unknown."""
        return None if self.gain is None else self._add_range(self.gain, self.quantized)

    @property
    def best_range(self) -> SpeedGain | None:
        """Gain with the INT8 Q/DQ of ``insert``, with its uncertainty; None if unknown."""
        return None if self.best is None else self._add_range(self.best.gain, Precision.INT8)

    @property
    def best_fp8_range(self) -> SpeedGain | None:
        """Gain with the FP8 Q/DQ of ``insert``, with its uncertainty; None if unknown."""
        if self.best_fp8 is None:
            return None
        return self._add_range(self.best_fp8.gain, Precision.FP8)

    @property
    def faster_range(self) -> SpeedGain | None:
        """The larger of `best_range` (INT8) and `best_fp8_range`; None if both are unknown.

        FP8 has to be faster by more than 2 percent, because it needs a strongly typed build.
        """
        int8, fp8 = self.best_range, self.best_fp8_range
        if fp8 is not None and (int8 is None or is_worthwhile(fp8.value / int8.value)):
            return fp8
        return int8

    @property
    def fastest(self) -> Precision | None:
        """The fastest type for a float network: INT8, FP8 or its float type.

        None if unknown, or if the network has Q/DQ.
        """
        gain = self.faster_range
        if gain is None or not self.is_float:
            return None
        return gain.quantized if is_worthwhile(gain.value) else gain.precision

    def _add_range(self, gain: float, quantized: Precision) -> SpeedGain | None:
        if self.float_time is None:
            return None
        constants = load_constants()
        spread = constants.spreads["gain"]
        if not constants.is_measured(self.gpu.cc):
            spread *= UNMEASURED_SPREAD
        spread *= 1 + _UNKNOWN_SPREAD * len(self.unknown) / self.layer_count
        return SpeedGain(
            gain / spread,
            gain,
            gain * spread,
            self.float_time.precision,
            *constants.signs,
            quantized,
        )

    def as_json(self) -> Json:
        """Return the fields of the JSON output: without times if no engine can be built."""
        fields = self._to_json()
        if not self.is_supported:
            fields |= dict.fromkeys(_TIME_FIELDS)
            fields |= {name: [] for name in ("fixes", "slowest")}
            if self.obstacle == "GPU-NO-INT8" and self.float_time is not None:
                fields["float"] = self.float_time.as_json()
        return fields | {"supported": self.is_supported}

    def _to_json(self) -> Json:
        parts = {
            "float": self.float_time,
            "gain": self.gain_range,
        }
        return {
            "gpu": self.gpu.name,
            "clock_mhz": round(self.gpu.clock),
            **{name: round_significant(getattr(self, name)) for name in _TOTALS},
            "layouts": self.layouts,
            "layers_ms": round_significant(sum(self.layers)),
            **{name: part.as_json() if part else None for name, part in parts.items()},
            "best": _best_json(self.best, self.best_range),
            "best_fp8": _best_json(self.best_fp8, self.best_fp8_range),
            "fastest": None if self.fastest is None else str(self.fastest),
            "fixes": [fix.as_json() for fix in self.fixes],
            "slowest": [kernel.as_json() for kernel in self.kernels[:10]],
            "batch": self.batch,
            "calibration": self.calibration.as_json() if self.calibration else None,
            "unknown_layers": len(self.unknown),
            "notes": list(self.notes),
        }


def _best_json(best: BestTime | None, gain: SpeedGain | None) -> Json | None:
    """Return the JSON fields of a time with the Q/DQ of ``insert``, and of the gain's range."""
    if best is None:
        return None
    bounds = (None, None) if gain is None else (round(gain.low, 3), round(gain.high, 3))
    return best.as_json() | dict(zip(("gain_low", "gain_high"), bounds, strict=True))


@dataclass(slots=True)
class _TimedEngine:
    """A simulated engine on a GPU.

    Attributes:
        gpu: The GPU.
        prediction: Prediction with engine layers.
        workload: Work of the layers and extra kernels.
        kernel_ms: Milliseconds of each work, without gaps; shape [all work].
        counts: Number of kernels of each work, 0 if it takes no time; shape [all work].
    """

    gpu: Gpu
    prediction: Prediction
    workload: EngineWorkload
    kernel_ms: Array
    counts: Array

    def running_ms(
        self,
        correction: TimeCalibration | None = None,
        *,
        has_gaps: bool = True,
        kernel_ms: Array | None = None,
    ) -> Array:
        """Return milliseconds in a running engine, of shape [all work].

        A correction from a profile adds no gaps between kernels, because a profile measures
        kernels alone.

        Args:
            correction: Correction of the times.
            has_gaps: Whether to add the gaps between kernels of an engine without a CUDA graph.
            kernel_ms: Milliseconds to use in place of ``self.kernel_ms``.
        """
        ms = self.kernel_ms if kernel_ms is None else kernel_ms
        if has_gaps and not (correction and correction.profiled):
            ms = ms + self.counts * load_constants().gap_ms(self.gpu)
        return correction.apply(ms, self.counts) if correction else ms

    def idle_ms(self, gpu: Gpu) -> Array:
        """Return the milliseconds of kernels that neither compute nor move data.

        Shape [all work].
        """
        idle = [
            LayerWork(work.NOTHING if w.kind == work.NOTHING else work.POINTWISE, steps=w.steps)
            for w in self.workload.all_work
        ]
        return estimate_seconds(idle, gpu) * 1e3


def _note_limits(gpu: Gpu, model: Model, is_float: bool, uses_int8: bool) -> list[Note]:
    notes = []
    if gpu.fuses_conversions and not is_float:
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


def estimate(
    model: Model,
    prediction: Prediction,
    gpu: Gpu,
    target: Target,
    *,
    float_type: Precision = Precision.FP16,
    batch: int | None = None,
    calibrate: str | None = None,
    compare: bool = True,
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
        calibrate: A measured time (``5.3ms``), a profile of this engine, or a calibration file.
        compare: Whether to simulate the network without Q/DQ (or, for a float model, with it).
        cuda_graph: Whether the engine runs as a CUDA graph, which has no gaps between kernels.

    Raises:
        QdqtoolError: The calibration cannot be used.
        BuildLogError: The profile cannot be read.
    """
    resolved_model, notes = model_variants.resolve_inputs(model, batch or 1)
    resolved_model = fold_constants(resolved_model)
    factor = _batch_factor(resolved_model, batch, notes)
    if not gpu.has_int8 and model_variants.has_qdq(resolved_model):
        resolved_model = model_variants.float_variant(resolved_model)
        simulated = simulate_without_alternatives(resolved_model, _target_with_layers(target))
        notes.append(
            Note(
                f"{target.display_name} has no INT8 on {gpu.name}: the times are those of the "
                "model without Q/DQ",
                code="without-qdq",
            )
        )
    else:
        simulated = _add_layers(resolved_model, prediction, notes)
    is_float = not model_variants.has_qdq(resolved_model)
    float_types = _float_choices(resolved_model, target, float_type)
    engine = _time_engine(resolved_model, simulated, gpu, float_types, factor)
    uses_int8 = is_float or simulated.summary()["int8"] > 0
    notes += _note_limits(gpu, resolved_model, is_float, uses_int8)
    correction = _make_calibration(calibrate, gpu, engine)
    ms = engine.running_ms(correction, has_gaps=not cuda_graph)
    profile_ms = _profile_ms(engine, correction)
    result = _summarize(engine, gpu, correction, ms, profile_ms)
    result.batch, result.requested_batch, result.notes = factor, batch, notes
    result.float_type, result.is_float = float_type, is_float
    result.is_cuda_graph = cuda_graph
    result.quantized = _main_precision(resolved_model, simulated)
    idle_ms = engine.running_ms(correction, has_gaps=not cuda_graph, kernel_ms=engine.idle_ms(gpu))
    result.launch_ms = float(idle_ms.sum())
    _set_range(result, float(engine.counts.sum()))
    result.kernels = _list_kernels(engine, profile_ms)
    workload = engine.workload
    if simulated is prediction:
        result.layers = profile_ms[: len(workload.layers)].tolist()
        _write_layer_times(prediction, workload, profile_ms)
    add_savings(prediction, simulated, workload, ms, profile_ms, gpu, correction)
    if compare and 2 * len(workload.unknown) <= len(workload.all_work):
        _compare(result, model, resolved_model, target)
        if result.best is not None:
            add_insert_saving(prediction, result.total_ms - result.best.total_ms)
    return result


def _main_precision(model: Model, simulated: Prediction) -> Precision:
    """Return the type of most quantized layers; of the quantizers if all layers are float."""
    counts = simulated.summary()
    if counts["fp8"] == counts["int8"] == 0:
        return Precision.FP8 if uses_fp8(model) else Precision.INT8
    return Precision.FP8 if counts["fp8"] > counts["int8"] else Precision.INT8


def _slow_int8_note(gpu: Gpu) -> Note:
    """Return the note about a GPU on which INT8 is not faster than FP16 or FP32."""
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
        text += f". Its faster 8-bit type is FP8 ({fp8:.0f} TOPS): qdqtool insert --precision fp8"
    return Note(text, code="int8-not-faster", int8_tops=int8, float_tops=half, fp8_tops=fp8)


# Parts ----------------------------------------------------------------------------------------


def _batch_factor(model: Model, batch: int | None, notes: list[Note]) -> float:
    """Return the requested batch size divided by the model's; add a note if they differ.

    Raises:
        QdqtoolError: The inputs have no common batch dimension.
    """
    if batch is None:
        return 1.0
    first_dimensions = {shape[0] for shape in map(model.shape, model.inputs) if shape}
    own = first_dimensions.pop() if len(first_dimensions) == 1 else None
    if not own:
        raise QdqtoolError(
            f"`batch` {batch}: the model's inputs have no common batch size, so times cannot be "
            "scaled; leave `batch` out",
            code="no-common-batch",
            parameter="batch",
        )
    if own != batch:
        notes.append(
            Note(
                f"the file has the fixed batch {own}, and TensorRT builds that batch: the times "
                f"are for the same model exported with batch {batch}",
                code="batch-scaled",
            )
        )
    return batch / own


def _summarize(
    engine: _TimedEngine,
    gpu: Gpu,
    correction: TimeCalibration | None,
    ms: Array,
    profile_ms: Array,
) -> TimeEstimate:
    """Return an estimate whose totals are sums of milliseconds.

    ``ms`` are those of a running engine, ``profile_ms`` those of a profile; shape [all work].
    """
    workload, layers = engine.workload, engine.prediction.layers
    conversions = [i for i, layer in enumerate(layers) if layer.type == "Conversion" and ms[i] > 0]
    changes = [
        i
        for i, extra in enumerate(workload.extras, len(workload.layers))
        if extra.layout_change is not None
    ]
    return TimeEstimate(
        gpu,
        total_ms=float(ms.sum()),
        conversions_ms=float(profile_ms[conversions].sum()),
        conversions=len(conversions),
        layouts_ms=float(ms[changes].sum()),
        layouts=len(changes),
        calibration=correction,
        unknown=workload.unknown,
        workload=workload,
    )


def _profile_ms(engine: _TimedEngine, correction: TimeCalibration | None) -> Array:
    """Return milliseconds with the overhead of profiling; shape [all work]."""
    overhead_us = load_constants().overhead_us
    if correction and correction.overhead_us:
        overhead_us = correction.overhead_us
    return engine.running_ms(correction, has_gaps=False) + engine.counts * overhead_us * 1e-3


def _write_layer_times(prediction: Prediction, workload: EngineWorkload, profile_ms: Array) -> None:
    """Set the milliseconds of each predicted layer, and the layout changes before it."""
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


def _add_layers(model: Model, prediction: Prediction, notes: list[Note]) -> Prediction:
    """Return a prediction with engine layers.

    TensorRT-RTX does not name layers. Its time is estimated as for an engine of classic TensorRT.
    """
    if prediction.layers or not prediction.convolutions:
        return prediction
    target = _target_with_layers(target_named(prediction.target))
    notes.append(
        Note(
            f"{prediction.target} does not name layers: estimated from the engine that "
            f"{target.name} would build",
            code="no-layers-named",
        )
    )
    return simulate_without_alternatives(model, target)


def _target_with_layers(target: Target) -> Target:
    """Return the target, or a strongly typed classic TensorRT for TensorRT-RTX."""
    if not target.is_rtx:
        return target
    return replace(strongly_typed(_WEAKLY_TYPED), largest_fp8_head=target.largest_fp8_head)


def _time_engine(
    model: Model,
    simulated: Prediction,
    gpu: Gpu,
    float_types: Sequence[Precision],
    batch: float = 1.0,
) -> _TimedEngine:
    """Return a simulated engine with the float type that makes it fastest."""
    engines = []
    for float_type in float_types:
        workload = predict_workload(model, simulated, float_type, batch, gpu)
        works = workload.all_work
        counts = np.asarray([0.0 if w.kind == work.NOTHING else w.steps for w in works])
        engines.append(
            _TimedEngine(gpu, simulated, workload, estimate_seconds(works, gpu) * 1e3, counts)
        )
    return min(engines, key=lambda engine: float(engine.running_ms().sum()))


def _float_choices(model: Model, target: Target, float_type: Precision) -> tuple[Precision, ...]:
    """Return the float types to try for an engine.

    A strongly typed network has the float type of the file. A builder that may use FP16 can still
    choose FP32, because INT8 convolutions that write FP32 need no layout change.
    """
    if target.strongly_typed:
        return (_file_float_type(model),)
    return (float_type,) if float_type == Precision.FP32 else (float_type, Precision.FP32)


def _file_float_type(model: Model) -> Precision:
    """Return the type that most operators with weights write in the file: FP16 or FP32."""
    types = [model.elem_type(node.output) for node in model.nodes if node.op in WEIGHTED]
    halves = sum(t in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for t in types)
    return Precision.FP16 if 2 * halves > len(types) else Precision.FP32


def _make_calibration(source: str | None, gpu: Gpu, engine: _TimedEngine) -> TimeCalibration | None:
    """Return the correction from a measured time, a calibration file or a profile."""
    if source is None:
        return None
    time = parse_time(source)
    if time is not None:
        return calibrate_by_time(gpu.name, time, float(engine.running_ms().sum()))
    calibration = read_calibration(source)
    if calibration is None:
        return _calibrate_by_profile(source, gpu, engine)
    if calibration.gpu != gpu.name:
        raise QdqtoolError(
            f"the time calibration is for '{calibration.gpu}', not for '{gpu.name}'; give a "
            "calibration for this GPU",
            source,
            code="different-gpus",
            parameter="calibrate",
        )
    return calibration


def _calibrate_by_profile(path: str, gpu: Gpu, engine: _TimedEngine) -> TimeCalibration:
    from qdqtool.buildlog.read import read_build

    rows = read_build(path).profile_rows
    if not rows:
        raise QdqtoolError(
            "contains no profile; give a file of trtexec --exportProfile, a measured time, or a "
            "file of `save_calibration`",
            path,
            code="no-profile",
            parameter="calibrate",
        )
    layers = engine.prediction.layers
    measured, estimated = [], []
    matches = match_profile_rows(layers, rows)
    for row, ms in zip(matches, engine.kernel_ms.tolist(), strict=False):
        if row is not None and row.ms > 0 and ms > 0:
            measured.append(row.ms)
            estimated.append(ms)
    timed = sum(1 for row in rows if row.ms > 0)
    if measured and 2 * len(measured) < min(timed, len(layers)):
        raise QdqtoolError(
            f"the profile is of another engine: only {len(measured)} of its {timed} layers are in "
            f"the prediction ({len(layers)} layers). Give a profile of this model",
            path,
            code="different-models",
            parameter="calibrate",
        )
    return calibrate_by_layers(gpu.name, measured, estimated, path)


def match_profile_rows(
    layers: Iterable[EngineLayer], rows: Sequence[ProfileRow]
) -> list[ProfileRow | None]:
    """Return the row of a profile for each layer by name; None for layers without a row.

    Several layers with the same name get the rows with this name in order.
    """
    pending: dict[str, deque[ProfileRow]] = {}
    for row in rows:
        pending.setdefault(row.name, deque()).append(row)
    return [pending[layer.name].popleft() if pending.get(layer.name) else None for layer in layers]


def _set_range(result: TimeEstimate, kernels: float) -> None:
    """Set the range that contains 80 % of measured times, and add notes about the range."""
    gpu, correction = result.gpu, result.calibration
    spread, slowdown = _REPEATED_SPREAD, 1.0
    if correction is None:
        spread, slowdown = _gpu_spread(gpu, result.notes)
    elif not correction.direct:
        spread = load_constants().spreads["total_calibrated"]
    if gpu.notes:
        result.notes.append(Note("; ".join(gpu.notes), code="of-gpu"))
    unknown, layers = len(result.unknown), result.layer_count
    if unknown:
        spread *= 1 + _UNKNOWN_SPREAD * unknown / layers
        text = (
            f"{unknown} of {layers} layers have unknown shapes; each is counted as one minimal "
            "kernel"
        )
        if 2 * unknown <= layers:
            result.notes.append(Note(text, code="shapes-unknown"))
        else:
            text += ", so the time is unreliable: export the model with fixed shapes"
            result.notes.append(Note(text, code="most-shapes-unknown"))
    result.low_ms, result.high_ms = result.total_ms / spread, result.total_ms * spread * slowdown
    if correction is not None:  # part of the assumed profiling overhead may be kernel time
        result.high_ms += kernels * correction.overhead_us * 1e-3


def _gpu_spread(gpu: Gpu, notes: list[Note]) -> tuple[float, float]:
    """Return the factor of the uncalibrated range, and the slowdown by the power limit.

    Adds notes about both.
    """
    constants, slowdown = load_constants(), 1.0
    spread = constants.spreads["total"]
    if not constants.is_measured(gpu.cc):
        spread = constants.spreads["total_unknown"] * UNMEASURED_SPREAD
        notes.append(
            Note(
                f"no {gpu.rates.architecture} GPU of compute capability {gpu.cc} was measured, so "
                "the range of the estimate is wider",
                code="not-measured",
            )
        )
    share = gpu.clock_share_under_load
    if share < 1:
        slowdown = 1 / share
        notes.append(
            Note(
                f"the GPU may throttle below {gpu.clock:.0f} MHz ({gpu.power:g} W limit): the "
                f"upper end of the range is for {gpu.clock * share:.0f} MHz. Set `clock` if you "
                "know the GPU's clock.",
                code="slowed",
            )
        )
    return spread * (_NOTE_SPREAD if gpu.notes else 1.0), slowdown


def _list_kernels(engine: _TimedEngine, profile_ms: Array) -> list[KernelTime]:
    """Return every kernel that takes time, the slowest first."""
    prediction, workload = engine.prediction, engine.workload
    titles = {c.layer: c.name for c in prediction.convolutions}
    names = [layer.name for layer in prediction.layers] + [e.name for e in workload.extras]
    kernels = [
        KernelTime(name, w.kind, float(ms), titles.get(name, name))
        for name, w, ms in zip(names, workload.all_work, profile_ms, strict=True)
        if ms > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def _compare(result: TimeEstimate, model: Model, resolved_model: Model, target: Target) -> None:
    """Add the times of the network without Q/DQ, and with the Q/DQ of ``insert``."""
    float_model: Model | None = model
    resolved_float = resolved_model
    if not result.is_float:
        float_model = model_variants.fill_weights(model_variants.float_variant(model))
        resolved_float = model_variants.float_variant(resolved_model)
    result.float_time = _float_time(result, resolved_float, float_model, target)
    if not result.gpu.has_int8:
        if not model_variants.has_qdq(model):
            result.notes.append(Note("no INT8 on this GPU: nothing to gain", code="no-int8"))
    elif float_model is not None:
        result.best = _best_time(result, float_model, target)
        if result.is_float and result.gpu.has_fp8 and target.has_fp8:
            typed = strongly_typed(target)
            result.best_fp8 = _best_time(result, float_model, typed, Precision.FP8)


def _float_time(
    result: TimeEstimate, resolved_model: Model, model: Model | None, target: Target
) -> FloatTime:
    """Return the time of a float network, in FP16 where the GPU prefers FP16.

    If FP16 with its casts is slower than the float type of the file, the time is for that type.

    Args:
        result: Estimate of the network with Q/DQ, or of the float network itself.
        resolved_model: The float network with fixed input shapes.
        model: The same network with weights, to write the FP16 file of a strongly typed network. If
            it is None or cannot be converted, the builder is assumed to choose the float types.
        target: TensorRT version.
    """
    typed = target.strongly_typed
    stored = _file_float_type(resolved_model) if typed else result.float_type
    own_ms = result.total_ms if result.is_float else estimate_like(result, resolved_model, target)
    if stored == result.gpu.float_type or result.gpu.float_type == Precision.FP32:
        return FloatTime(stored, own_ms)
    if typed:
        fp16 = None if model is None else model_variants.fp16_variant(model, target)
        if fp16 is None:
            target = _WEAKLY_TYPED
        else:
            resolved_model, _ = model_variants.resolve_inputs(fp16, result.requested_batch or 1)
    fp16_ms = estimate_like(replace(result, float_type=Precision.FP16), resolved_model, target)
    if fp16_ms <= own_ms:
        return FloatTime(Precision.FP16, fp16_ms, own_ms)
    return FloatTime(stored, own_ms)


def _best_time(
    result: TimeEstimate, model: Model, target: Target, precision: Precision = Precision.INT8
) -> BestTime | None:
    """Return the time of the network with the Q/DQ that ``insert`` would write.

    None if quantizing or simulating fails. If `result` is of a float network, a note says why.
    """
    assert result.float_time is not None
    try:
        quantized = model_variants.quantized_variant(model, target, precision.lower())
        resolved, _ = model_variants.resolve_inputs(quantized, result.requested_batch or 1)
        simulated, ms = _simulate_like(result, resolved, target)
    except QdqtoolError as error:
        if result.is_float:
            text = f"the possible gain of {precision} is unknown: {error.reason}"
            result.notes.append(Note(text, code="gain-unknown", why=error.reason))
        return None
    summary = simulated.summary()
    return BestTime(
        ms,
        result.float_time.total_ms / ms if ms else 1.0,
        summary["int8"],
        summary["fp8"],
        summary["convolutions"],
        summary["conversions"],
    )


def estimate_variant(time: TimeEstimate, model: Model, target: Target) -> float:
    """Return the milliseconds of another model under the conditions of an estimate.

    GPU, batch, float type and calibration are taken from ``time``.
    """
    resolved_model, _ = model_variants.resolve_inputs(model, time.requested_batch or 1)
    return estimate_like(time, resolved_model, target)


def estimate_like(time: TimeEstimate, resolved_model: Model, target: Target) -> float:
    """Return the milliseconds of another model as :func:`estimate_variant` does.

    The input shapes of the model must be fixed.
    """
    return _simulate_like(time, resolved_model, target)[1]


def _simulate_like(
    time: TimeEstimate, resolved_model: Model, target: Target
) -> tuple[Prediction, float]:
    resolved_model = fold_constants(resolved_model)
    simulated = simulate_without_alternatives(resolved_model, _target_with_layers(target))
    float_types = _float_choices(resolved_model, target, time.float_type)
    engine = _time_engine(resolved_model, simulated, time.gpu, float_types, time.batch)
    ms = engine.running_ms(time.calibration, has_gaps=not time.is_cuda_graph)
    return simulated, float(ms.sum())


# A prediction on a GPU: options ``--gpu`` and ``--sm`` ----------------------------------------


def predict_on_gpu(
    model: ModelSource | Model,
    target: str | Target,
    options: TimingOptions,
    *,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
    extend: Callable[[Model, Prediction, TimeEstimate, Target], None] | None = None,
) -> tuple[Prediction, TimeEstimate | None]:
    """Predict, add findings about the GPU, and estimate the time if a GPU is named.

    The prediction has no time and no savings if TensorRT rejects the model.

    Args:
        model: The model.
        target: TensorRT version.
        options: GPU, batch and calibration.
        assume: As for :func:`qdqtool.predict`.
        way: As for :func:`qdqtool.predict`.
        extend: Function that is called with the estimate before the prediction receives it.

    Raises:
        QdqtoolError: The GPU is unknown, the target does not build for it, or the calibration
            cannot be used.
        ModelError: The model cannot be read.
    """
    named = None
    if options.gpu is not None:
        named = gpus.choose_gpu(options.gpu, options.clock, options.power)
    _check_options(options, named)
    index, gpu = load(model), named or gpu_from_capability(options.sm or "")
    gpu_target = target_named(target).with_capability(gpu.cc, named.name if named else "")
    gpu_target, requested = choose_typing(index, gpu_target), gpu_target
    prediction = predict(index, gpu_target, assume=assume, way=way)
    prediction.requested_target = requested.display_name
    prediction.compute_capabilities = gpu_target.capability_names or [gpu.cc]
    time = None
    if named is not None:
        named = gpus.restrict_to_target(gpu_target, named)
        assumed_target = apply_assumptions(gpu_target, assume)
        with pause_gc():
            time = estimate(
                index,
                prediction,
                named,
                assumed_target,
                float_type=Precision.FP32 if options.no_fp16 else named.float_type,
                batch=options.batch,
                calibrate=options.calibrate,
            )
            if extend is not None:
                extend(index, prediction, time, assumed_target)
        _save_calibration(time, options)
    findings = gpu_findings(prediction, gpu, index)
    prediction.findings += findings
    _set_int8_speed(prediction.findings, gpu)
    if time is not None:
        time.obstacle = _find_obstacle(findings)
        if time.is_supported and is_rejected(prediction.findings):
            for finding in prediction.findings:
                finding.saves_ms = None
        else:
            prediction.time = time.as_json()
    return prediction, time


def _save_calibration(time: TimeEstimate, options: TimingOptions) -> None:
    if options.save_calibration and time.calibration is not None:
        write_text(options.save_calibration, json_text(time.calibration.as_json()) + "\n")


def _set_int8_speed(findings: Iterable[Finding], gpu: Gpu) -> None:
    for finding in findings:
        finding.has_fast_int8 = gpu.int8_rate_over_fp16 > 1


def _find_obstacle(findings: Iterable[Finding]) -> str | None:
    """Return the code of the first error that prevents an engine for the GPU."""
    errors = (finding.code for finding in findings if finding.severity == Severity.ERROR)
    return next((code for code in errors if code in UNSUPPORTED_GPU), None)


def _check_options(options: TimingOptions, gpu: Gpu | None) -> None:
    if options.save_calibration and not options.calibrate:
        raise QdqtoolError(
            "`save_calibration` stores the result of `calibrate`; give `calibrate` as well",
            code="option-without-effect",
            parameter="save_calibration",
        )
    if gpu is not None and options.sm and gpu_from_capability(options.sm).cc != gpu.cc:
        raise QdqtoolError(
            f"`sm` {options.sm}: '{gpu.name}' has compute capability {gpu.cc}; leave `sm` or "
            "`gpu` out",
            code="option-conflict",
            parameter="sm",
        )

"""Time estimates and their parts: float network, gain, kernels, and savings of fixes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qdqtool.insertion.number_formats import is_worthwhile
from qdqtool.ir.precision import Precision
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import round_significant

if TYPE_CHECKING:
    from qdqtool.timing.gpus import Gpu
    from qdqtool.timing.time_calibration import TimeCalibration
    from qdqtool.timing.workload import EngineWorkload

# The factor of a range is multiplied by 1 + this number x the share of layers of unknown shapes.
UNKNOWN_SPREAD = 1.5
# Assumed factor that widens the range if no GPU of the architecture was measured.
UNMEASURED_SPREAD = 1.15
_TOTALS = ("total_ms", "low_ms", "high_ms", "conversions_ms", "layouts_ms")
_TIME_FIELDS = (*_TOTALS, "layers_ms", "float", "gain", "best", "best_fp8", "fastest", "fixed_ms")


@dataclass(slots=True)
class FloatTime:
    """Time of a network without its Q/DQ.

    Attributes:
        precision: Float type of the network.
        total_ms: Milliseconds.
        fp32_ms: Milliseconds in FP32, if the file or the options specify FP32, but FP16 is faster.
            None otherwise.
        clock_share: Share of the GPU's boost clock at which the engine of `total_ms` runs.
        fp32_clock_share: The same for the engine of `fp32_ms`.
    """

    precision: Precision
    total_ms: float
    fp32_ms: float | None = None
    clock_share: float = 1.0
    fp32_clock_share: float = 1.0

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "precision": str(self.precision),
            "total_ms": round_significant(self.total_ms),
            "fp32_ms": None if self.fp32_ms is None else round_significant(self.fp32_ms),
        }


@dataclass(frozen=True, slots=True)
class SpeedGain:
    """Time of the float network divided by the time of the network with Q/DQ.

    Attributes:
        low: Lower end of the range that contains 80 % of measured gains.
        value: The gain.
        high: Upper end of the range.
        precision: Type of the float network.
        right: Number of measured pairs whose faster type the time model predicted correctly. The
            model was fitted without the network and the GPU of the pair.
        pairs: Number of measured pairs of INT8 and FP16 times that differ by more than 5 %.
        quantized: Type of the network with Q/DQ: INT8 or FP8.
    """

    low: float
    value: float
    high: float
    precision: Precision
    right: int
    pairs: int
    quantized: Precision = Precision.INT8

    @property
    def is_sure(self) -> bool:
        """Whether the whole range lies on one side of 1."""
        return self.low > 1 or self.high < 1

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "low": round(self.low, 3),
            "value": round(self.value, 3),
            "high": round(self.high, 3),
            "faster": str(self.quantized) if self.value > 1 else str(self.precision),
            "signs_right": self.right,
            "signs_measured": self.pairs,
        }


@dataclass(slots=True)
class KernelTime:
    """Time of one kernel of the engine.

    Attributes:
        name: Name of the layer.
        kind: Kind of the work (see :mod:`qdqtool.timing.work`).
        ms: Milliseconds, as a profile would show them.
        title: ONNX node of the layer, or the layer's name.
    """

    name: str
    kind: str
    ms: float
    title: str = ""

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {"name": self.name, "kind": self.kind, "ms": round_significant(self.ms)}


@dataclass(slots=True)
class FixTime:
    """Time that all fixes of one kind save together, from a simulation of the fixed network.

    Attributes:
        codes: Codes of the findings that the fixes remove.
        nodes: Names of the nodes of these findings.
        saves_ms: Milliseconds; negative for fixes that cost speed for accuracy.
    """

    codes: list[str]
    nodes: list[str]
    saves_ms: float

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "codes": list(self.codes),
            "nodes": list(self.nodes),
            "saves_ms": round_significant(self.saves_ms),
        }


@dataclass(slots=True)
class BestTime:
    """Time of a float network with the Q/DQ that ``insert`` would write.

    Attributes:
        total_ms: Milliseconds.
        gain: Time of the float network divided by this time.
        int8: Number of convolutions and products in INT8.
        fp8: Number of convolutions and products in FP8.
        convolutions: Number of convolutions and products.
        conversions: Number of remaining Q and DQ; None if the target does not count them.
        clock_share: Share of the GPU's boost clock at which the engine runs.
        is_repeated: Whether the estimated model itself has this placement and this time.
    """

    total_ms: float
    gain: float
    int8: int
    fp8: int
    convolutions: int
    conversions: int | None
    clock_share: float = 1.0
    is_repeated: bool = False

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "total_ms": round_significant(self.total_ms),
            "gain": round(self.gain, 3),
            **to_json_fields(self, "int8", "fp8", "convolutions", "conversions"),
        }


@dataclass(slots=True)
class TimeEstimate:
    """Time of an engine on a GPU.

    Attributes:
        gpu: The GPU, with the user's clock or power mode.
        total_ms: Milliseconds of one run, end to end on the GPU (trtexec's GPU Compute Time).
        low_ms: Lower end of the range that contains 80 % of measured times.
        high_ms: Upper end of the range.
        conversions_ms: Milliseconds of the remaining Q and DQ, as a profile shows them.
        layers: Milliseconds of each predicted layer as a profile would show them, in the
            prediction's order.
        kernels: Every kernel, the slowest first.
        float_time: Time of the network without Q/DQ, in the faster float type. None if unknown.
        best: Time of the network with the INT8 Q/DQ that ``insert`` would write. None if unknown.
        best_fp8: Time with the FP8 Q/DQ that ``insert`` would write. None unless GPU and target
            have FP8.
        batch: Requested batch size divided by the batch size of the model.
        calibration: Correction of the times by a measurement. None for uncorrected times.
        unknown: Names of layers whose shapes are unknown.
        notes: Notes about the figures.
        float_type: Type of float layers: FP16 or FP32.
        is_float: Whether the network has no Q/DQ.
        requested_batch: Batch size that the caller requested. None for the model's batch size.
        fixes: Savings of automatic fixes by kind, the largest first.
        further_fixes: Savings of automatic fixes that save time only after those in `fixes`.
        accuracy_fixes: Costs of automatic fixes that are for accuracy and need a request. Each is
            estimated after the fixes that need no request.
        fixed_ms: Milliseconds after all fixes of ``fix`` without ``only``. None if no fix saves
            time, and for fixes that change FP32 to FP16.
        workload: Work of all layers and kernels. Layers are in the prediction's order, unless the
            target does not name layers.
        layouts_ms: Part of the total that changes memory layouts, but no types.
        layouts: Number of kernels that change memory layouts.
        conversions: Number of kernels that convert data types.
        launch_ms: Milliseconds that the kernels would take without computing or moving data.
        is_cuda_graph: Whether the engine runs as a CUDA graph.
        without_graph_ms: `total_ms` without a CUDA graph.
        quantized: Type of most layers that Q/DQ quantize: INT8 or FP8.
        obstacle: Code of the finding that prevents an engine for the GPU. None if an engine can be
            built.
        clock_share: Share of the GPU's boost clock at which the engine was estimated.
        fp32_layers: Number of predicted layers that were estimated with FP32, although the builder
            may use FP16, because the engine is then faster.
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
    further_fixes: list[FixTime] = field(default_factory=list)
    accuracy_fixes: list[FixTime] = field(default_factory=list)
    fixed_ms: float | None = None
    workload: EngineWorkload | None = field(default=None, repr=False)
    layouts_ms: float = 0.0
    layouts: int = 0
    conversions: int = 0
    launch_ms: float = 0.0
    is_cuda_graph: bool = False
    without_graph_ms: float = 0.0
    quantized: Precision = Precision.INT8
    obstacle: str | None = None
    clock_share: float = 1.0
    fp32_layers: int = 0

    @property
    def clock(self) -> float:
        """Clock in MHz for which the time is: that of the GPU, or lower at its power limit."""
        return self.gpu.clock * self.clock_share

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
        """Speedup: time of the float network divided by the time of this network.

        None if this is a float network, if the float network was not simulated, or if the time of
        this network is 0.
        """
        if self.float_time is None or self.is_float or not self.total_ms:
            return None
        return self.float_time.total_ms / self.total_ms

    @property
    def gain_range(self) -> SpeedGain | None:
        """Speed gain over the float network with its uncertainty; None if unknown."""
        return None if self.gain is None else self._make_gain_range(self.gain, self.quantized)

    @property
    def best_range(self) -> SpeedGain | None:
        """Gain with the INT8 Q/DQ of ``insert``, with its uncertainty; None if unknown."""
        return None if self.best is None else self._make_gain_range(self.best.gain, Precision.INT8)

    @property
    def best_fp8_range(self) -> SpeedGain | None:
        """Gain with the FP8 Q/DQ of ``insert``, with its uncertainty; None if unknown."""
        if self.best_fp8 is None:
            return None
        return self._make_gain_range(self.best_fp8.gain, Precision.FP8)

    @property
    def faster_range(self) -> SpeedGain | None:
        """`best_fp8_range` if FP8 is clearly faster than INT8, else `best_range`.

        FP8 has to be faster by more than 2 percent, because it needs a strongly typed build. If one
        range is unknown, the other is returned; None if both are unknown.
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

    def _make_gain_range(self, gain: float, quantized: Precision) -> SpeedGain | None:
        if self.float_time is None:
            return None
        from qdqtool.timing.physics import load_constants

        constants = load_constants()
        spread = constants.spreads["gain"]
        if not constants.is_measured(self.gpu.cc):
            spread *= UNMEASURED_SPREAD
        spread *= 1 + UNKNOWN_SPREAD * len(self.unknown) / self.layer_count
        return SpeedGain(
            gain / spread,
            gain,
            gain * spread,
            self.float_time.precision,
            *constants.signs,
            quantized,
        )

    def as_json(self) -> Json:
        """Return the fields of the JSON output, which docs/times.md explains.

        ``layers_ms`` is the sum of `layers`. It differs from `total_ms`, because a profile adds an
        overhead to each layer, and because changes of memory layout are not among the layers.
        Each time is None if no engine can be built.
        """
        fields = self._to_json()
        if not self.is_supported:
            fields |= dict.fromkeys(_TIME_FIELDS)
            lists = ("fixes", "further_fixes", "accuracy_fixes", "slowest")
            fields |= {name: [] for name in lists}
            if self.obstacle == "GPU-NO-INT8" and self.float_time is not None:
                fields["float"] = self.float_time.as_json()
        return fields | {"supported": self.is_supported}

    def _to_json(self) -> Json:
        gain = self.gain_range
        return {
            "gpu": self.gpu.name,
            "clock_mhz": round(self.gpu.clock),
            "running_clock_mhz": round(self.clock),
            **{name: round_significant(getattr(self, name)) for name in _TOTALS},
            "layouts": self.layouts,
            "layers_ms": round_significant(sum(self.layers)),
            "float": self.float_time.as_json() if self.float_time else None,
            "gain": gain.as_json() if gain else None,
            "best": _best_json(self.best, self.best_range),
            "best_fp8": _best_json(self.best_fp8, self.best_fp8_range),
            "fastest": None if self.fastest is None else str(self.fastest),
            "fixes": [fix.as_json() for fix in self.fixes],
            "further_fixes": [fix.as_json() for fix in self.further_fixes],
            "accuracy_fixes": [fix.as_json() for fix in self.accuracy_fixes],
            "fixed_ms": None if self.fixed_ms is None else round_significant(self.fixed_ms),
            "slowest": [kernel.as_json() for kernel in self.kernels[:10]],
            "batch": self.batch,
            "calibration": self.calibration.as_json() if self.calibration else None,
            "unknown_layers": len(self.unknown),
            "fp32_layers": self.fp32_layers,
            "notes": list(self.notes),
        }


def _best_json(best: BestTime | None, gain: SpeedGain | None) -> Json | None:
    if best is None:
        return None
    bounds = (None, None) if gain is None else (round(gain.low, 3), round(gain.high, 3))
    return best.as_json() | dict(zip(("gain_low", "gain_high"), bounds, strict=True))

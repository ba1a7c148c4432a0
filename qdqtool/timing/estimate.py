"""``estimate``: milliseconds of a predicted engine on a GPU, of the same network in float, and what each fix saves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.errors import QdqtoolError
from qdqtool.findings.messages import GpuFact, GpuLacks
from qdqtool.findings.report import Report
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.operators import WEIGHTED
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.timing import gpus, parts, twin, work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.parts import BestTime, Calibration, FixTime, FloatTime, Gain, Kernel, rounded
from qdqtool.timing.physics import Constants, constants, seconds
from qdqtool.timing.predicted import Workload, workload_of
from qdqtool.timing.work import Work
from qdqtool.trt.outcome import apply_assumptions, simulate_without_alternatives
from qdqtool.trt.targets import TARGETS, Target, strongly_typed, target_named
from qdqtool.types import EngineLayer, Evidence, Finding, Json, Precision, Prediction
from qdqtool.util.json_text import json_text
from qdqtool.util.notes import Note, Remark
from qdqtool.util.outputs import write_text
from qdqtool.util.process import pause_gc
from qdqtool.util.said import said

if TYPE_CHECKING:
    from qdqtool.buildlog.types import ProfileRow

Array = npt.NDArray[np.float64]
_UNKNOWN_SPREAD = (
    1.5  # how far a layer of unknown shape may widen the range, times its share of the layers
)
UNMEASURED = 1.15  # assumed: how far an architecture that was not measured widens the range
_REPEATED = 1.05  # a network that was itself measured: how far another run lies off
# The newest target whose builder chooses what floats are, and whose simulation names layers.
_OPEN = max(
    (t for t in TARGETS.values() if not (t.strongly_typed or t.is_rtx)), key=lambda t: t.version
)


@dataclass(slots=True)
class TimeEstimate:
    """How long an engine takes on a GPU."""

    gpu: Gpu  # the GPU, as the user runs it
    total_ms: float  # one execution, end to end on the GPU (what trtexec calls GPU Compute Time), in milliseconds
    low_ms: float  # with ``high_ms`` the range in which 80 % of measured times lie
    high_ms: float
    conversions_ms: float  # part of the total that converts data types (Q and DQ that stay)
    layers: list[
        float
    ]  # milliseconds of each predicted layer as a profile would show them, in the prediction's order
    kernels: list[Kernel]  # every kernel, the slowest first
    # the same network without Q/DQ, in FP16 where the GPU is fast in it; None where not simulated
    float_time: FloatTime | None = None
    best: BestTime | None = (
        None  # the network with Q/DQ where ``insert`` would put them; None where that is not known
    )
    batch: float = 1.0  # factor on the model's own batch
    calibration: Calibration | None = None  # the correction that went in
    unknown: list[str] = field(default_factory=list)  # layers whose shapes are not known
    notes: list[Note] = field(default_factory=list)  # what the user should know about the figures
    plain: Precision = Precision.FP16  # what floats are: FP16 or FP32
    is_float: bool = False  # whether the time is that of a network without Q/DQ
    asked: int | None = None  # the batch that was asked for; None for the model's own
    # what automatic fixes save, by kind, the most first (``fixing.whatif``)
    fixes: list[FixTime] = field(default_factory=list)
    # the work that the time was estimated for; its layers are in the prediction's order where those are named
    load: Workload | None = field(default=None, repr=False)
    layouts_ms: float = 0.0  # part of the total that changes memory layouts and no types
    layouts: int = 0  # how many kernels do that
    conversions: int = 0  # how many kernels convert data types
    # part of the total that launching its kernels takes, had they nothing to compute and to move
    waiting_ms: float = 0.0
    graph: bool = False  # whether it is of an engine that runs as a CUDA graph

    @property
    def gain(self) -> float | None:
        """How many times faster than the float network; None for that itself, and where it is not known."""
        if self.float_time is None or self.is_float or not self.total_ms:
            return None
        return self.float_time.total_ms / self.total_ms

    @property
    def gain_range(self) -> Gain | None:
        """The gain with its range; None where there is none."""
        return None if self.gain is None else self._ranged(self.gain)

    @property
    def best_range(self) -> Gain | None:
        """The gain of the network with Q/DQ where ``insert`` would put them, with its range."""
        return None if self.best is None else self._ranged(self.best.gain)

    def _ranged(self, value: float) -> Gain | None:
        fitted = constants()
        if self.float_time is None:
            return None
        spread = fitted.spreads["gain"]
        if not fitted.is_measured(self.gpu.cc):
            spread *= UNMEASURED
        spread *= 1 + _UNKNOWN_SPREAD * len(self.unknown) / max(
            1, len(self.load.all) if self.load else 1
        )
        return Gain(value / spread, value, value * spread, self.float_time.precision, *fitted.signs)

    def as_json(self) -> Json:
        made = {"float": self.float_time, "gain": self.gain_range, "best": self.best}
        times = ("total_ms", "low_ms", "high_ms", "conversions_ms", "layouts_ms")
        return {
            "gpu": self.gpu.name,
            "clock_mhz": round(self.gpu.clock),
            **{name: rounded(getattr(self, name)) for name in times},
            "layouts": self.layouts,
            "layers_ms": rounded(sum(self.layers)),
            **{name: part.as_json() if part else None for name, part in made.items()},
            "fixes": [f.as_json() for f in self.fixes],
            "slowest": [k.as_json() for k in self.kernels[:10]],
            "batch": self.batch,
            "calibration": self.calibration.as_json() if self.calibration else None,
            "unknown_layers": len(self.unknown),
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class _Engine:
    """A simulated engine on a GPU: its work, and of each kernel the milliseconds and how many it is (0: no time)."""

    listed: Prediction
    load: Workload
    raw: Array
    kernels: Array

    def ms(
        self,
        correction: Calibration | None = None,
        *,
        enqueued: bool = True,
        raw: Array | None = None,
    ) -> Array:
        """Milliseconds of layers in a running engine: corrected, with the gaps of one without a CUDA graph.

        A profile's own correction says what each kernel takes; nothing is added to it.
        """
        ms = self.raw if raw is None else raw
        if enqueued and not (correction and correction.profiled):
            ms = ms + self.kernels * constants().gap_us * 1e-3
        return correction.apply(ms, self.kernels) if correction else ms

    def least(self, gpu: Gpu) -> Array:
        """Milliseconds of each kernel if it had nothing to compute and to move: its floor."""
        idle = [
            Work(work.NOTHING if w.kind == work.NOTHING else work.POINTWISE, steps=w.steps)
            for w in self.load.all
        ]
        return seconds(idle, gpu) * 1e3


def estimate(
    model: Model,
    prediction: Prediction,
    gpu: Gpu,
    target: Target,
    *,
    plain: Precision = Precision.FP16,
    batch: int | None = None,
    calibrate: str | None = None,
    compare: bool = True,
    graph: bool = False,
) -> TimeEstimate:
    """Estimates the time of a predicted engine and writes what each fix saves into the prediction's findings.

    Args:
        model: The model predicted.
        prediction: Its prediction; ``findings`` get ``saves_ms`` and ``layers`` get ``ms``.
        gpu: Where it runs.
        target: Which TensorRT.
        plain: What floats are: FP16 (``--fp16`` given to the builder) or FP32.
        batch: Batch to estimate for; the model's own by default.
        calibrate: A measured time (``5.3ms``), a profile of this engine, or a calibration file.
        compare: Whether to simulate the network without Q/DQ (or, for a float model, with it) as well.
        graph: Whether the engine runs as a CUDA graph, which takes the gaps between kernels away.

    Raises:
        QdqtoolError: The calibration cannot be used.
        BuildLogError: The profile cannot be read.
    """
    fitted = constants()
    shaped, notes = twin.resolved(model, batch or 1)
    factor = _batch_factor(shaped, batch, notes)
    if not gpu.has_int8 and twin.has_qdq(shaped):
        shaped = twin.float_twin(shaped)
        listed = simulate_without_alternatives(shaped, _with_names(target))
        notes.append(Remark.WITHOUT_QDQ(target=target.display_name, gpu=gpu.name))
    else:
        listed = _with_layers(shaped, prediction, notes)
    engine = _engine(shaped, listed, gpu, _floats_of(shaped, target, plain), factor)
    load, kernels = engine.load, engine.kernels
    if gpu.fuses_conversions and twin.has_qdq(shaped):
        notes.append(Remark.IN_MYELIN(architecture=gpu.rates.architecture))
    correction = _calibration(calibrate, gpu, engine)
    ms = engine.ms(correction, enqueued=not graph)
    added = correction.overhead_us if correction and correction.overhead_us else fitted.overhead_us
    shown = (
        engine.ms(correction, enqueued=False) + kernels * added * 1e-3
    )  # as a profile shows them
    count = len(load.layers)
    changes = [i for i, e in enumerate(load.extras, count) if e.reformat is not None]
    converting = [
        i for i, layer in enumerate(listed.layers) if layer.type == "Conversion" and ms[i] > 0
    ]
    result = TimeEstimate(
        gpu,
        float(ms.sum()),
        0.0,
        0.0,
        float(ms[converting].sum()),
        [],
        _kernels(engine, shown),
        batch=factor,
        calibration=correction,
        unknown=load.unknown,
        notes=notes,
        plain=plain,
        is_float=not twin.has_qdq(shaped),
        asked=batch,
        load=load,
        layouts_ms=float(ms[changes].sum()),
        layouts=len(changes),
        conversions=len(converting),
        waiting_ms=float(engine.ms(correction, enqueued=not graph, raw=engine.least(gpu)).sum()),
        graph=graph,
    )
    _range(result, fitted, len(load.all), float(kernels.sum()))
    if listed is prediction:
        result.layers = shown[:count].tolist()
        _note_times(prediction, load, shown)
    parts.add_savings(prediction, listed, load, ms, gpu, correction)
    if compare and 2 * len(load.unknown) <= len(load.all):
        _compare(result, model, shaped, target)
    return result


# Parts ----------------------------------------------------------------------------------------------------------


def _batch_factor(model: Model, batch: int | None, notes: list[Note]) -> float:
    if batch is None:
        return 1.0
    firsts = {shape[0] for shape in (model.shape(name) for name in model.inputs) if shape}
    own = firsts.pop() if len(firsts) == 1 else None
    if not own:
        raise QdqtoolError(
            said(
                "{`batch`} {batch}: the model's inputs have no common first dimension to scale",
                batch=batch,
            ),
            code="no-common-batch",
            parameter="batch",
        )
    if own != batch:
        notes.append(Remark.BATCH_SCALED(own=own, batch=batch))
    return batch / own


def _note_times(prediction: Prediction, load: Workload, shown: Array) -> None:
    """Writes into each layer what it takes, and the changes of layout in front of it."""
    by_name = {}
    times = [round(value, 5) for value in shown.tolist()]
    for layer, value in zip(prediction.layers, times, strict=False):
        layer.ms, layer.layouts = value, []
        by_name[layer.name] = layer
    behind = {extra.name: extra.behind for extra in load.extras if extra.behind}
    for extra, value in zip(load.extras, times[len(load.layers) :], strict=True):
        change = extra.reformat
        if (
            change is not None
            and (found := by_name.get(behind.get(change.layer, change.layer))) is not None
        ):
            found.layouts.append(
                {"tensor": change.tensor, "from": change.source, "to": change.target, "ms": value}
            )


def _with_layers(model: Model, prediction: Prediction, notes: list[Note]) -> Prediction:
    """A prediction that names layers; TensorRT-RTX's does not, and is estimated as an engine of classic TensorRT."""
    if prediction.layers or not prediction.convolutions:
        return prediction
    typical = _with_names(target_named(prediction.target))
    notes.append(Remark.NO_LAYERS_NAMED(target=prediction.target, typical=typical.name))
    return simulate_without_alternatives(model, typical)


def _with_names(target: Target) -> Target:
    """The target, or for TensorRT-RTX the strongly typed one whose simulation names layers."""
    return strongly_typed(_OPEN) if target.is_rtx else target


def _engine(
    model: Model, listed: Prediction, gpu: Gpu, floats: Sequence[Precision], batch: float = 1.0
) -> _Engine:
    """A simulated engine with the floats that make it fastest."""
    engines = []
    for plain in floats:
        load = workload_of(model, listed, plain, batch, gpu)
        counts = np.asarray([0.0 if w.kind == work.NOTHING else w.steps for w in load.all])
        engines.append(_Engine(listed, load, seconds(load.all, gpu) * 1e3, counts))
    return min(engines, key=lambda engine: float(engine.ms().sum()))


def _floats_of(model: Model, target: Target, plain: Precision) -> tuple[Precision, ...]:
    """What floats may be: the file's own where the network is strongly typed, else what the builder chooses from.

    A builder that may use FP16 takes FP32 where that is faster: it writes no FP16 from INT8 convolutions that would
    need a change of layout then.
    """
    if target.strongly_typed:
        return (_stored(model),)
    return (plain,) if plain == Precision.FP32 else (plain, Precision.FP32)


def _stored(model: Model) -> Precision:
    """What most operators with weights write in the file: FP16 or FP32."""
    types = [model.elem_type(n.output) for n in model.nodes if n.op in WEIGHTED]
    halves = sum(t in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for t in types)
    return Precision.FP16 if 2 * halves > len(types) else Precision.FP32


def _calibration(given: str | None, gpu: Gpu, engine: _Engine) -> Calibration | None:
    if given is None:
        return None
    time = parts.measured_time(given)
    if time is not None:
        return parts.of_time(gpu.name, time, float(engine.ms().sum()))
    kept = parts.read_calibration(given)
    if kept is not None:
        if kept.gpu != gpu.name:
            raise QdqtoolError(
                f"a calibration for '{kept.gpu}', not for '{gpu.name}'",
                given,
                code="different-gpus",
                parameter="calibrate",
            )
        return kept
    from qdqtool.buildlog.read import read_build

    build = read_build(given)
    if not build.profile_rows:
        raise QdqtoolError(
            "no profile in it; give trtexec's --exportProfile file, a measured time, or a calibration",
            given,
            code="no-profile",
            parameter="calibrate",
        )
    layers, rows = engine.listed.layers, build.profile_rows
    pairs = [
        (row.ms, value)
        for row, value in zip(in_profile(layers, rows), engine.raw.tolist(), strict=False)
        if row is not None and row.ms > 0 and value > 0
    ]
    timed = sum(1 for row in rows if row.ms > 0)
    if pairs and 2 * len(pairs) < min(timed, len(layers)):
        raise QdqtoolError(
            f"only {len(pairs)} of its {timed} layers are in the prediction ({len(layers)} layers); it is a "
            "profile of another engine",
            given,
            code="different-models",
            parameter="calibrate",
        )
    return parts.of_layers(gpu.name, [m for m, _ in pairs], [e for _, e in pairs], given)


def in_profile(
    layers: Iterable[EngineLayer], rows: Sequence[ProfileRow]
) -> list[ProfileRow | None]:
    """The profile's row of each layer, by name; layers of one name get its rows in order."""
    waiting: dict[str, deque[ProfileRow]] = {}
    for row in rows:
        waiting.setdefault(row.name, deque()).append(row)
    return [waiting[layer.name].popleft() if waiting.get(layer.name) else None for layer in layers]


def _range(result: TimeEstimate, fitted: Constants, layers: int, kernels: float) -> None:
    gpu = result.gpu
    known = fitted.is_measured(gpu.cc)
    slowed, correction = 1.0, result.calibration  # how far the board's power may slow it under load
    if correction is not None:
        spread = _REPEATED if correction.direct else fitted.spreads["total_calibrated"]
    else:
        spread = fitted.spreads["total"] if known else fitted.spreads["total_unknown"] * UNMEASURED
        if not known:
            result.notes.append(Remark.NOT_MEASURED(architecture=gpu.rates.architecture, cc=gpu.cc))
        if gpu.sustained < 1:
            slowed = 1 / gpu.sustained
            result.notes.append(
                Remark.SLOWED(watts=gpu.power, clock=gpu.clock, least=gpu.clock * gpu.sustained)
            )
        spread *= 1.15 if gpu.notes else 1.0
    if gpu.notes:
        result.notes.append(Remark.OF_GPU(notes=gpu.notes))
    if result.unknown:
        share = len(result.unknown) / max(1, layers)
        spread *= 1 + _UNKNOWN_SPREAD * share
        remark = Remark.SHAPES_UNKNOWN if share <= 0.5 else Remark.MOST_SHAPES_UNKNOWN
        result.notes.append(remark(unknown=len(result.unknown), layers=layers))
    result.low_ms, result.high_ms = result.total_ms / spread, result.total_ms * spread * slowed
    if correction is not None and correction.overhead_us:  # it may be the kernels' own after all
        result.high_ms += kernels * correction.overhead_us * 1e-3


def _kernels(engine: _Engine, shown: Array) -> list[Kernel]:
    """Every kernel that takes time, the slowest first."""
    listed, load = engine.listed, engine.load
    named = {c.layer: c.name for c in listed.convolutions}
    names = [layer.name for layer in listed.layers] + [e.name for e in load.extras]
    found = [
        Kernel(name, w.kind, float(v), named.get(name, name))
        for name, w, v in zip(names, load.all, shown, strict=True)
        if v > 0
    ]
    return sorted(found, key=lambda k: -k.ms)


def _compare(result: TimeEstimate, given: Model, model: Model, target: Target) -> None:
    """The other networks: without Q/DQ, and with them where ``insert`` would put them.

    ``given`` is the model as the user has it, ``model`` the one whose shapes are settled.
    """
    plain = given if result.is_float else twin.with_weights(twin.float_twin(given))
    result.float_time = _without(
        result, model if result.is_float else twin.float_twin(model), plain, target
    )
    if not result.gpu.has_int8:
        if not twin.has_qdq(given):
            result.notes.append(Remark.NO_INT8())
        return
    if plain is not None:
        result.best = _best(result, plain, target)


def _without(result: TimeEstimate, model: Model, plain: Model | None, target: Target) -> FloatTime:
    """The time of a float network, which INT8 has to be faster than: in FP16 where the GPU is fast in it.

    Where the casts of an FP16 file take more than it gains, FP32 stays.
    ``plain`` is the same network with weights, from which the FP16 file of a strongly typed network is made; None, or
    one that cannot be converted, is taken for a network whose floats the builder chooses.
    """
    typed = target.strongly_typed
    stored = _stored(model) if typed else result.plain
    own = result.total_ms if result.is_float else _total(result, model, target)[1]
    if stored == result.gpu.plain or result.gpu.plain == Precision.FP32:
        return FloatTime(stored, own)
    if typed:
        made = None if plain is None else twin.half_twin(plain, target)
        target = _OPEN if made is None else target
        model = model if made is None else twin.resolved(made, result.asked or 1)[0]
    half = _total(replace(result, plain=Precision.FP16), model, target)[1]
    return FloatTime(Precision.FP16, half, own) if half <= own else FloatTime(stored, own)


def _best(result: TimeEstimate, given: Model, target: Target) -> BestTime | None:
    """The time of a float network with Q/DQ where ``insert`` would put them; None, with a note, where that fails."""
    assert result.float_time is not None
    try:
        placed = twin.best_placement(given, target)
        simulated, ms = _total(result, twin.resolved(placed, result.asked or 1)[0], target)
    except QdqtoolError as error:
        if result.is_float:
            result.notes.append(Remark.GAIN_UNKNOWN(why=error.reason))
        return None
    summary = simulated.summary()
    return BestTime(
        ms,
        result.float_time.total_ms / ms if ms else 1.0,
        summary["int8"],
        summary["convolutions"],
        summary["conversions"],
    )


def time_like(time: TimeEstimate, model: Model, target: Target) -> float:
    """Milliseconds of another model under the conditions of an estimate: its GPU, floats, batch and correction."""
    shaped, _ = twin.resolved(model, time.asked or 1)
    return _total(time, shaped, target)[1]


def _total(like: TimeEstimate, model: Model, target: Target) -> tuple[Prediction, float]:
    simulated = simulate_without_alternatives(model, _with_names(target))
    engine = _engine(model, simulated, like.gpu, _floats_of(model, target, like.plain), like.batch)
    return simulated, float(engine.ms(like.calibration, enqueued=not like.graph).sum())


# A prediction on a GPU: what ``--gpu`` and ``--sm`` ask for ----------------------------------------------------------


def predict_on(
    model: ModelSource | Model,
    target: str | Target,
    options: TimingOptions,
    *,
    assume: Mapping[str, str] | None = None,
    way: str | None = None,
    also: Callable[[Model, Prediction, TimeEstimate, Target], None] | None = None,
) -> tuple[Prediction, TimeEstimate | None]:
    """Predict, add findings about the GPU, and estimate the time if a GPU is named.

    ``also`` is called with the estimate before it is written into the prediction.

    Raises:
        QdqtoolError: The GPU is not known or none that the target builds for, or the calibration cannot be used.
        ModelError: The model cannot be read.
    """
    chosen = (
        gpus.chosen(options.gpu, options.clock, options.power) if options.gpu is not None else None
    )
    if options.save_calibration and not options.calibrate:
        raise QdqtoolError(
            said("{`save_calibration`} keeps what {`calibrate`} measures; give both"),
            code="option-without-effect",
            parameter="save_calibration",
        )
    if chosen is not None and options.sm and of_capability(options.sm).cc != chosen.cc:
        raise QdqtoolError(
            said(
                "{`sm`} {sm}: '{name}' has compute capability {cc}; give one of the two",
                sm=options.sm,
                name=chosen.name,
                cc=chosen.cc,
            ),
            code="option-conflict",
            parameter="sm",
        )
    index, gpu = load(model), chosen or of_capability(options.sm or "")
    on = target_named(target).with_capability(gpu.cc, chosen.name if chosen is not None else "")
    prediction = predict(index, on, assume=assume, way=way)
    prediction.compute_capabilities = on.capability_names or [gpu.cc]
    time = None
    if chosen is not None:
        chosen = gpus.used_by(on, chosen)
        settled_on = apply_assumptions(on, assume)
        plain = Precision.FP32 if options.no_fp16 else chosen.plain
        with pause_gc():
            time = estimate(
                index,
                prediction,
                chosen,
                settled_on,
                plain=plain,
                batch=options.batch,
                calibrate=options.calibrate,
            )
            if also is not None:
                also(index, prediction, time, settled_on)
        prediction.time = time.as_json()
        if options.save_calibration and time.calibration is not None:
            write_text(options.save_calibration, json_text(time.calibration.as_json()) + "\n")
    prediction.findings += gpu_findings(prediction, gpu, index)
    return prediction, time


def of_capability(sm: str) -> gpus.Gpu:
    """A nameless GPU of a compute capability, for findings; the GPU itself where a name is given (``GTX 1660``)."""
    if any(c.isalpha() for c in sm.strip().lower().removeprefix("sm").strip("_")):
        return gpus.find(sm)
    found, notes = gpus.rates_of(sm)
    return gpus.Gpu(
        f"sm {found.cc}", (), 1, 1000.0, 100.0, 1.0, 0.0, found, Evidence.ASSUMED, "", notes
    )


# What a named GPU cannot do with a prediction ------------------------------------------------------------------------

_SINCE = (
    (10.0, (10, 0)),
    (8.9, (8, 5)),
)  # compute capability, first target that knows it; of others all do
_DROPPED = ((5.3, (10, 0)), (7.0, (11, 0)))  # below or at this capability, from this target on


def gpu_findings(prediction: Prediction, gpu: Gpu, model: Model | None = None) -> list[Finding]:
    """Findings about running a predicted engine on a GPU; ids go on from the prediction's.

    A prediction for TensorRT-RTX gets none: its own rules refer to the GPUs that it supports.
    ``model`` shows which convolutions are depthwise; without it nothing is said of those.
    """
    if target_named(prediction.target).is_rtx:
        return []
    int8 = [c.name for c in prediction.convolutions if c.is_int8]
    floats = [c.name for c in prediction.convolutions if not c.is_int8]
    rates = gpu.rates
    report = Report(prediction.target)
    where = f"{gpu.name} (compute capability {rates.cc}, {rates.architecture})"

    def add(fact: GpuFact, named: list[str], evidence: Evidence, *values: str) -> None:
        lacks = GpuLacks("GPU", "", fact, where, len(named), named[0] if named else "", values)
        report.add(lacks, convolutions=named, evidence=evidence)

    if int8 and not gpu.has_int8:
        add(GpuFact.NO_INT8, int8, rates.evidence)
    elif int8 and rates.int8_path == "dp4a":
        fact = (
            GpuFact.DP4A_TENSOR
            if gpu.has_tensor_cores
            else (GpuFact.DP4A_FP16 if rates.fp16 > rates.fp32_pipe else GpuFact.DP4A_FP32)
        )
        add(fact, int8, rates.evidence)
    if gpu.has_int8 and rates.int8_path != "tensor":
        pointwise = [
            c.name for c in prediction.convolutions if c.is_int8 and "PWN(" in (c.layer or "")
        ]
        if pointwise:
            add(GpuFact.FUSION, pointwise, Evidence.DOCUMENTED)
        places = depthwise(model) if model is not None else frozenset()
        deep = [c.name for c in prediction.convolutions if c.is_int8 and c.index in places]
        if deep:
            add(GpuFact.KERNELS, deep, Evidence.DOCUMENTED)
    if int8 and gpu.is_jetson and gpu.has_int8:
        add(GpuFact.JETSON, [], Evidence.SEEN if rates.cc == "8.7" else Evidence.ASSUMED)
    if floats and rates.fp16 < rates.fp32_pipe:
        add(GpuFact.NO_FP16, floats, rates.evidence)
    version, cc = target_named(prediction.target).version, float(rates.cc)
    since = next((first for capability, first in _SINCE if cc >= capability), version)
    if since > version:
        add(GpuFact.SINCE, [], Evidence.ASSUMED, prediction.target, f"{since[0]}.{since[1]}")
    elif any(cc <= capability and version >= gone for capability, gone in _DROPPED):
        add(GpuFact.DROPPED, [], Evidence.ASSUMED, prediction.target, "")
    start = max((f.id for f in prediction.findings), default=-1) + 1
    for number, finding in enumerate(report.findings, start):
        finding.id = number
    return report.findings


def depthwise(model: Model) -> frozenset[int]:
    """Places of the convolutions with as many groups as input channels, and more than one."""
    view = View(model)
    shapes = (
        (n, view.weight_shape(n))
        for n in view.weighted
        if n.op == "Conv" and n.attributes.get("group", 1) != 1
    )
    return frozenset(
        node.index
        for node, shape in shapes
        if shape is not None and len(shape) > 1 and shape[1] == 1
    )

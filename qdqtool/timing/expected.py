"""The GPU that a build ran on, and what the layers of a built engine usually take there, and could take at best."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from qdqtool.buildlog.costs import EngineReport, LayerCost
from qdqtool.buildlog.layers import int_list
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, static_shape
from qdqtool.errors import QdqtoolError
from qdqtool.timing import gpus, work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import constants, seconds
from qdqtool.timing.work import Work, width
from qdqtool.types import Evidence, Precision
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import of_error, said

_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([A-Za-z]*)")
_MEMORY = re.compile(r"\b(\d{1,4})GB\b")
_SIZES = (2, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)  # GB that boards have
_NEAR = 2.0  # a bandwidth further from the table's than this factor is no bandwidth
_DOUBLE = 2  # transfers in a clock, as drivers print the memory's clock
_WORTH_SAYING = 0.97


@dataclass(frozen=True, slots=True)
class Device:
    """What a log's device information says; None for what it does not."""

    name: str  # what the driver calls the GPU
    cc: str | None = None  # compute capability
    sms: int | None = None  # streaming multiprocessors in use
    clock: float | None = None  # SM clock in MHz
    memory: int | None = None  # size of the memory in GB, as boards are sold
    bus: int | None = None  # width of the memory's bus in bits
    memory_clock: float | None = None  # clock of the memory in MHz

    @property
    def bandwidth(self) -> float | None:
        """GB/s of the memory."""
        if self.bus is None or self.memory_clock is None:
            return None
        return self.bus / 8 * self.memory_clock * _DOUBLE * 1e-3


def of_facts(name: str, facts: Mapping[str, str]) -> Device:
    """Reads the lines of trtexec's device information, ``SMs`` to ``80``."""
    stated = {k.lower().removeprefix("application "): v for k, v in facts.items()}
    cc = stated.get("compute capability", "")
    sms = _number(stated.get("sms", ""))
    clock = _mhz(stated.get("compute clock rate", ""))
    size = _number(stated.get("device global memory", ""))
    bus = _number(stated.get("memory bus width", ""))
    return Device(
        name,
        cc if re.fullmatch(r"\d{1,2}\.\d", cc) else None,
        int(sms) if sms and 1 <= sms <= 1024 else None,
        clock if clock and gpus.MIN_CLOCK <= clock <= gpus.MAX_CLOCK else None,
        next((s for s in _SIZES if size / 1024 <= s), None) if size else None,
        int(bus) if bus and 16 <= bus <= 16384 else None,
        _mhz(stated.get("memory clock rate", "")),
    )


def gpu_of_device(device: Device, clock: float | None = None) -> Gpu:
    """The GPU as the log describes it; ``clock`` is the user's word for the SM clock in MHz, which comes first.

    Raises:
        QdqtoolError: Neither the name nor the figures say which GPU it is.
    """
    named = [g for g in gpus.answering(device.name) if device.cc in (None, g.cc)]
    if device.sms is None and len(named) != 1:
        if not named:
            gpus.find(device.name)  # raises, with the nearest names
        raise QdqtoolError(
            gpus.shared(device.name, [g.name for g in named]), code="ambiguous", parameter="gpu"
        )
    if not named:
        if device.cc is None:
            gpus.find(device.name)
        return _unnamed(device, clock)
    return _as_stated(min(named, key=lambda g: _distance(g, device)), device, clock)


def _distance(board: Gpu, device: Device) -> tuple[bool, bool, int, float]:
    """How far a board is from what the log says: boards switch SMs off and clocks down, never up."""
    size = _MEMORY.search(board.name)
    sms, clock = device.sms or board.sms, device.clock or board.clock
    other_size = bool(size and device.memory and int(size[1]) != device.memory)
    return sms > board.sms, other_size, board.sms - sms, abs(clock / board.clock - 1)


def _as_stated(board: Gpu, device: Device, clock: float | None) -> Gpu:
    notes = list(board.notes)
    sms = device.sms or board.sms
    if sms != board.sms:
        notes.append(Remark.SMS_OF_LOG(sms=sms, board=board.name, own=board.sms))
    said = device.clock
    if (
        board.is_jetson
        and said
        and device.memory_clock
        and device.memory_clock < _WORTH_SAYING * said
    ):
        # A Jetson's driver prints a clock of the GPU there: 1.275 GHz of both on an AGX Orin.
        notes.append(Remark.CLOCK_OF_LOG(clock=said, memory_clock=device.memory_clock))
        said = device.memory_clock
    moved = device.bandwidth
    if (
        board.is_jetson
        or moved is None
        or not board.bandwidth / _NEAR <= moved <= board.bandwidth * _NEAR
    ):
        moved = board.bandwidth
    used = clock or said
    return replace(
        board,
        sms=sms,
        bandwidth=moved,
        clock=used or board.clock,
        power=0.0 if used else board.power,
        notes=tuple(notes),
    )


def _numbers(rates: gpus.Rates) -> gpus.Rates:
    """Without where they are from, and for which compute capability."""
    return replace(rates, cc="", evidence=Evidence.ASSUMED, source="")


def _unnamed(device: Device, clock: float | None) -> Gpu:
    """A GPU that is in no table: rates by its compute capability, the L2 of the board nearest in size."""
    rates, notes = gpus.rates_of(device.cc or "")
    used, moved = clock or device.clock, device.bandwidth
    assert device.sms is not None
    sms = device.sms
    alike = (g for g in gpus.gpus() if _numbers(g.rates) == _numbers(rates))
    near = min(alike, key=lambda g: abs(g.sms - sms), default=None)
    if used is None or (moved is None and near is None):
        gpus.find(
            device.name
        )  # raises, but for a name whose compute capability is another in the table
        raise QdqtoolError(
            said(
                "'{name}' of compute capability {cc} is not known, and the log states no clock or "
                "memory of it; {`gpu`} names it",
                name=device.name,
                cc=device.cc,
            ),
            code="unknown-choice",
            parameter="gpu",
        )
    assert used is not None
    if moved is None:
        assert near is not None
        moved, notes = (
            near.bandwidth * sms / near.sms,
            (*notes, Remark.BANDWIDTH_GUESSED(near=near.name)),
        )
    return Gpu(
        device.name,
        (),
        sms,
        used,
        moved,
        near.l2 if near else 4.0,
        0.0,
        rates,
        Evidence.SEEN,
        "the log's device information",
        notes,
    )


def _number(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[1]) if match else None


def _mhz(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[1]) * (1 if match[2].lower() == "mhz" else 1000) if match else None


# Expected times ------------------------------------------------------------------------------------------------------


def work_of(cost: LayerCost) -> Work | None:
    """The work of a built layer; None where its shapes are not known."""
    layer = cost.layer
    kind = _kind(layer)
    if kind == work.NOTHING:
        return Work(kind)
    if (
        cost.input_bytes is None
        or cost.output_bytes is None
        or not layer.outputs
        or not layer.inputs
    ):
        return None
    source = _dims(layer.inputs)
    result = Work(
        kind,
        _single(layer.input_precision),
        _single(layer.output_precision),
        channels=float(source[1]) if source and len(source) > 2 else 64.0,
        read=float(cost.input_bytes),
        weights=float(cost.weight_bytes or 0),
        written=float(cost.output_bytes),
    )
    return _convolution(cost, result) if kind in work.COMPUTING else result


def _single(precision: Precision) -> Precision:
    return Precision.FP32 if precision == Precision.FLOAT else precision


def _kind(layer: BuiltLayer) -> str:
    name = layer.type.lower()
    if name in ("noop", "constant", "signal", "wait"):
        return work.NOTHING
    if layer.kind == "conversion":
        return work.CONVERSION
    if name in ("reformat", "copy"):
        return work.REFORMAT if layer.parse_name().kind.startswith("reformat") else work.COPY
    if layer.is_deconvolution:
        return work.DECONV
    if (
        layer.is_convolution
        or "gemm" in name
        or "matrixmultiply" in name
        or "fullyconnected" in name
    ):
        return work.CONV
    return next((kind for word, kind in _KINDS if word in name), work.UNKNOWN)


_KINDS = (
    ("pool", work.POOL),
    ("softmax", work.SOFTMAX),
    ("resize", work.RESIZE),
    ("reduce", work.REDUCE),
    ("shuffle", work.SHUFFLE),
    ("pointwise", work.POINTWISE),
    ("elementwise", work.POINTWISE),
    ("scale", work.POINTWISE),
    ("activation", work.POINTWISE),
    ("unary", work.POINTWISE),
    ("slice", work.COPY),
    ("concat", work.COPY),
    ("myelin", work.MYELIN),
)


def _convolution(cost: LayerCost, result: Work) -> Work | None:
    layer = cost.layer
    source, target = _dims(layer.inputs), _dims(layer.outputs)
    if source is None or target is None or len(target) < 2 or not cost.macs:
        return None
    groups = layer.extras.get("Groups", 1)
    groups = groups if isinstance(groups, int) and groups > 0 else 1
    columns = (
        sum(d[1] for d in (_dims([t]) for t in layer.outputs) if d is not None and len(d) > 1)
        or target[1]
    )
    columns = max(1, columns // groups)
    if len(target) == 2:
        rows: float = target[0]
        depth: float = cost.macs / (rows * columns)
        channels: float = source[1]
    else:
        kernel = int_list(layer.extras.get("Kernel", layer.extras.get("ConvKernel")), 1)
        channels = max(1, source[1] // groups)
        depth = (
            channels * math.prod(kernel)
            if kernel
            else cost.macs / (target[0] * math.prod(target[2:]) * columns)
        )
        rows = cost.macs / (columns * groups * depth)
    count = math.prod(source)
    skipped = (count - work.touched(count, rows, depth, groups)) * width(result.precision)
    return replace(
        result,
        kind=work.DEPTHWISE if groups > 1 and columns * channels <= 16 else result.kind,
        rows=rows,
        columns=float(columns),
        depth=depth,
        channels=float(channels),
        groups=float(groups),
        read=max(0.0, result.read - skipped),
        weights=result.weights or columns * groups * depth * width(result.precision),
    )


def _dims(tensors: list[BuiltTensor]) -> list[int] | None:
    shape = static_shape(tensors[0].shape) if tensors else None
    return shape[1:] if shape is not None and len(shape) == 5 and shape[0] == 1 else shape


_L2_PEAK = (
    64.0  # bytes that an SM takes from the L2 in a clock (Volta, Ampere and Ada tuning guides)
)
_FLOOR_MS = 1e-3  # no kernel takes less than about a microsecond


def gpu_of(build: Build, name: str | None = None, clock: float | None = None) -> Gpu | None:
    """Return the GPU that a build ran on, as its log describes it; None if unknown.

    Args:
        build: The build.
        name: GPU that the user names. The log's figures are used if they can be that GPU's,
            else the table's.
        clock: SM clock in MHz, instead of the log's.

    Raises:
        QdqtoolError: No GPU has that name.
    """
    if name is not None:
        facts = of_facts(name, build.gpu)
        known = [] if "=" in name else gpus.answering(name)
        possible = facts.sms and any(
            facts.cc in (None, g.cc) and (facts.sms == g.sms or (g.is_jetson and facts.sms < g.sms))
            for g in known
        )
        return gpu_of_device(facts, clock) if possible else gpus.chosen(name, clock)
    with contextlib.suppress(QdqtoolError):
        return (
            None
            if build.device is None
            else gpu_of_device(of_facts(build.device, build.gpu), clock)
        )
    return None


def unknown_gpu(build: Build) -> str:
    """Why a build's GPU is not known; empty where it is, or where the build names none."""
    try:
        if build.device is not None:
            gpu_of_device(of_facts(build.device, build.gpu))
    except QdqtoolError as error:
        return of_error(error)
    return ""


def contradicted(build: Build, gpu: Gpu) -> list[Note]:
    """That a build's log is of another device than the user's GPU; nothing where it can be that one."""
    facts = of_facts(build.device or "the device", build.gpu)
    other = [said("compute capability {cc}", cc=facts.cc)] if facts.cc not in (None, gpu.cc) else []
    other += [said("{sms} SMs", sms=facts.sms)] if facts.sms and facts.sms > gpu.sms else []
    return [Remark.CONTRADICTED(gpu=gpu.name, device=facts.name, facts=other)] if other else []


def add_expected(report: EngineReport, gpu: Gpu) -> None:
    """Writes into every layer of known shapes what it usually takes (as a profile shows it) and could at best."""
    found = [
        (row, one)
        for row in report.rows
        if (one := work_of(row)) is not None
        and one.kind not in (work.NOTHING, work.UNKNOWN, work.MYELIN)
    ]
    works = [one for _, one in found]
    overhead = _overhead_of(report)
    for (row, _), usual, least in zip(
        found, seconds(works, gpu) * 1e3, at_best(works, gpu), strict=True
    ):
        row.expected_ms = float(usual) + overhead
        row.best_ms = float(least)
    report.gpu = gpu.name


def _overhead_of(report: EngineReport) -> float:
    """Milliseconds that this profile added to each layer: measured where the log has the time without it too."""
    usual = constants().overhead_us * 1e-3
    whole = report.build.gpu_ms
    timed = [row.ms for row in report.rows if row.ms]
    if whole is None or not timed:
        return usual
    return float(np.clip((sum(timed) - whole) / len(timed), 0.0, 3 * usual))


def at_best(works: list[Work], gpu: Gpu) -> list[float]:
    """Milliseconds at the peak: every product at the dense rate, every byte at the bandwidth, whichever is more.

    What fits the L2 need not come from memory, but passes between it and the SMs.
    """
    result = []
    for w in works:
        compute = w.macs / gpu.mac_rate(w.precision) if w.kind in (work.CONV, work.DECONV) else 0.0
        outside = max(0.0, w.moved - gpu.l2 * 1e6) / (gpu.bandwidth * 1e9)
        inside = w.moved / (_L2_PEAK * gpu.per_second)
        result.append(max(compute * 1e3, outside * 1e3, inside * 1e3, _FLOOR_MS))
    return result

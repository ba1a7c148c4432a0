"""Find the GPU of a build, and estimate the times of the layers of a built engine."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from qdqtool.buildlog.costs import EngineReport, LayerCost
from qdqtool.buildlog.layers import as_int_list
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, static_shape
from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Evidence
from qdqtool.ir.precision import Precision
from qdqtool.timing import gpus, work
from qdqtool.timing.gpus import Gpu, SmRates
from qdqtool.timing.physics import estimate_seconds, load_constants
from qdqtool.timing.work import LayerWork, bytes_per_element, count_read_elements
from qdqtool.util.notes import Note

_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([A-Za-z]*)")
_MEMORY = re.compile(r"\b(\d{1,4})GB\b")
# Memory sizes of boards in GB. Devices report slightly less.
_MEMORY_SIZES = (2, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# If the bandwidths in the log and in the table differ by more than this factor, the bandwidth in
# the table is used.
_MAX_BANDWIDTH_FACTOR = 2.0
_TRANSFERS_PER_CLOCK = 2  # the memory transfers twice per printed clock
_CLOCK_TOLERANCE = 0.97  # clocks whose ratio is above this count as equal


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Device information of a log; None for facts that the log lacks.

    Attributes:
        name: Name of the GPU according to the driver.
        cc: Compute capability.
        sms: Streaming multiprocessors in use.
        clock: SM clock in MHz.
        memory: Memory size in GB, rounded up to the next size of sold boards.
        bus: Width of the memory bus in bits.
        memory_clock: Clock of the memory in MHz.
    """

    name: str
    cc: str | None = None
    sms: int | None = None
    clock: float | None = None
    memory: int | None = None
    bus: int | None = None
    memory_clock: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """Memory bandwidth in GB/s; None if bus width or memory clock is unknown."""
        if self.bus is None or self.memory_clock is None:
            return None
        return self.bus / 8 * self.memory_clock * _TRANSFERS_PER_CLOCK * 1e-3


def parse_device(name: str, facts: Mapping[str, str]) -> DeviceFacts:
    """Parse the device information that trtexec prints.

    Args:
        name: Name of the GPU.
        facts: Values by name as printed, such as ``{"SMs": "80"}``.
    """
    lines = {key.lower().removeprefix("application "): text for key, text in facts.items()}
    cc = lines.get("compute capability", "")
    sms = _parse_number(lines.get("sms", ""))
    clock = _parse_mhz(lines.get("compute clock rate", ""))
    memory = _parse_number(lines.get("device global memory", ""))
    bus = _parse_number(lines.get("memory bus width", ""))
    return DeviceFacts(
        name,
        cc=cc if re.fullmatch(r"\d{1,2}\.\d", cc) else None,
        sms=int(sms) if sms and 1 <= sms <= 1024 else None,
        clock=clock if clock and gpus.MIN_CLOCK <= clock <= gpus.MAX_CLOCK else None,
        memory=next((s for s in _MEMORY_SIZES if memory / 1024 <= s), None) if memory else None,
        bus=int(bus) if bus and 16 <= bus <= 16384 else None,
        memory_clock=_parse_mhz(lines.get("memory clock rate", "")),
    )


def find_device_gpu(device: DeviceFacts, clock: float | None = None) -> Gpu:
    """Return the GPU that a log describes.

    Args:
        device: Facts of the log.
        clock: SM clock in MHz that replaces the clock in the log.

    Raises:
        QdqtoolError: Neither the name nor the figures identify a GPU.
    """
    boards = [gpu for gpu in gpus.match_gpus(device.name) if device.cc in (None, gpu.cc)]
    if device.sms is None and len(boards) != 1:
        if not boards:
            gpus.find_gpu(device.name)  # raises an error that suggests similar names
        message = gpus.describe_ambiguity(device.name, [board.name for board in boards])
        raise QdqtoolError(message, code="ambiguous", parameter="gpu")
    if boards:
        board = min(boards, key=lambda board: _board_distance(board, device))
        return _apply_facts(board, device, clock)
    if device.cc is None:
        gpus.find_gpu(device.name)
    return _guess_gpu(device, clock)


def _board_distance(board: Gpu, device: DeviceFacts) -> tuple[bool, bool, int, float]:
    """Return a key that sorts boards by their fit to the log, the best first.

    A device may have fewer SMs than the board in the table (disabled SMs), but not more.
    """
    size = _MEMORY.search(board.name)
    sms, clock = device.sms or board.sms, device.clock or board.clock
    has_other_size = bool(size and device.memory and int(size[1]) != device.memory)
    return sms > board.sms, has_other_size, board.sms - sms, abs(clock / board.clock - 1)


def _apply_facts(board: Gpu, device: DeviceFacts, clock: float | None) -> Gpu:
    notes = list(board.notes)
    sms = device.sms or board.sms
    if sms != board.sms:
        notes.append(
            Note(
                f"the times are for the {sms} SMs that the log states, although the {board.name} "
                f"has {board.sms}",
                code="sms-of-log",
                sms=sms,
                board=board.name,
                own=board.sms,
            )
        )
    log_clock = device.clock
    if board.is_jetson and log_clock and device.memory_clock:
        # The driver of a Jetson prints the GPU clock as memory clock (1.275 GHz on an AGX Orin).
        if device.memory_clock < _CLOCK_TOLERANCE * log_clock:
            notes.append(
                Note(
                    f"the log gives {log_clock:.0f} MHz as the GPU clock and "
                    f"{device.memory_clock:.0f} MHz as the memory clock, but on a Jetson both are "
                    "GPU clocks. The lower clock was used. Set `clock` if you know the GPU clock",
                    code="clock-of-log",
                    memory_clock=device.memory_clock,
                )
            )
            log_clock = device.memory_clock
    bandwidth = board.bandwidth
    if not board.is_jetson and device.bandwidth is not None:
        low, high = bandwidth / _MAX_BANDWIDTH_FACTOR, bandwidth * _MAX_BANDWIDTH_FACTOR
        if low <= device.bandwidth <= high:
            bandwidth = device.bandwidth
    actual_clock = clock or log_clock
    return replace(
        board,
        sms=sms,
        bandwidth=bandwidth,
        clock=actual_clock or board.clock,
        power=0.0 if actual_clock else board.power,
        notes=tuple(notes),
    )


def _guess_gpu(device: DeviceFacts, clock: float | None) -> Gpu:
    """Return an approximate GPU for a log whose GPU is not in the table.

    The GPU has the rates of its compute capability, and the L2 of the board with the most similar
    number of SMs.

    Raises:
        QdqtoolError: The log does not state the clock, or no bandwidth is known.
    """
    rates, notes = gpus.find_rates(device.cc or "")
    actual_clock, bandwidth = clock or device.clock, device.bandwidth
    assert device.sms is not None
    sms = device.sms
    similar = (gpu for gpu in gpus.all_gpus() if _strip_source(gpu.rates) == _strip_source(rates))
    nearest = min(similar, key=lambda gpu: abs(gpu.sms - sms), default=None)
    if bandwidth is None and nearest is not None:
        bandwidth = nearest.bandwidth * sms / nearest.sms
        note = Note(
            f"the log does not state the memory bandwidth: the bandwidth of the {nearest.name} "
            "was used, scaled by the number of SMs",
            code="bandwidth-guessed",
        )
        notes = (*notes, note)
    if actual_clock is None or bandwidth is None:
        # Raises for a name that the table lacks. If the table has the name with another compute
        # capability, continue to the error below.
        gpus.find_gpu(device.name)
        raise QdqtoolError(
            f"GPU '{device.name}' of compute capability {device.cc} is unknown, and the log does "
            "not state its clock or memory; give `gpu`",
            code="unknown-choice",
            parameter="gpu",
        )
    return Gpu(
        name=device.name,
        aliases=(),
        sms=sms,
        clock=actual_clock,
        bandwidth=bandwidth,
        l2=nearest.l2 if nearest else 4.0,
        power=0.0,
        rates=rates,
        evidence=Evidence.SEEN,
        source="the log's device information",
        notes=notes,
    )


def _strip_source(rates: SmRates) -> SmRates:
    return replace(rates, cc="", evidence=Evidence.ASSUMED, source="")


def _parse_number(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[1]) if match else None


def _parse_mhz(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[1]) * (1 if match[2].lower() == "mhz" else 1000) if match else None


# Expected times -------------------------------------------------------------------------------


def built_layer_work(cost: LayerCost) -> LayerWork | None:
    """Return the work of a built layer; None if its shapes or multiplications are unknown."""
    layer = cost.layer
    kind = _work_kind(layer)
    if kind == work.NOTHING:
        return LayerWork(kind)
    if cost.input_bytes is None or cost.output_bytes is None:
        return None
    if not layer.outputs or not layer.inputs:
        return None
    shape = _first_shape(layer.inputs)
    layer_work = LayerWork(
        kind,
        _assume_fp32(layer.input_precision),
        _assume_fp32(layer.output_precision),
        channels=float(shape[1]) if shape and len(shape) > 2 else 64.0,
        read=float(cost.input_bytes),
        weights=float(cost.weight_bytes or 0),
        written=float(cost.output_bytes),
    )
    return _convolution_work(cost, layer_work) if kind in work.COMPUTING else layer_work


def _assume_fp32(precision: Precision) -> Precision:
    return Precision.FP32 if precision == Precision.FLOAT else precision


def _work_kind(layer: BuiltLayer) -> str:
    name = layer.type.lower()
    if name in ("noop", "constant", "signal", "wait"):
        return work.NOTHING
    if layer.kind == "conversion":
        return work.CONVERSION
    if name in ("reformat", "copy"):
        return work.REFORMAT if layer.parse_name().kind.startswith("reformat") else work.COPY
    if layer.is_deconvolution:
        return work.DECONV
    if layer.is_convolution:
        return work.CONV
    return next((kind for word, kind in _KINDS if word in name), work.UNKNOWN)


# Kind of work by a word that the layer's type contains.
_KINDS = (
    ("gemm", work.CONV),
    ("matrixmultiply", work.CONV),
    ("fullyconnected", work.CONV),
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


def _read_groups(layer: BuiltLayer) -> int:
    groups = layer.extras.get("Groups", 1)
    return groups if isinstance(groups, int) and groups > 0 else 1


def _count_output_channels(layer: BuiltLayer, default: int) -> int:
    shapes = (_first_shape([tensor]) for tensor in layer.outputs)
    return sum(shape[1] for shape in shapes if shape is not None and len(shape) > 1) or default


def _convolution_work(cost: LayerCost, base: LayerWork) -> LayerWork | None:
    layer = cost.layer
    source, target = _first_shape(layer.inputs), _first_shape(layer.outputs)
    if source is None or target is None or len(target) < 2 or not cost.macs:
        return None
    groups = _read_groups(layer)
    columns = max(1, _count_output_channels(layer, target[1]) // groups)
    if len(target) == 2:
        rows: float = target[0]
        depth: float = cost.macs / (rows * columns)
        channels: float = source[1]
    else:
        kernel = as_int_list(layer.extras.get("Kernel", layer.extras.get("ConvKernel")), 1)
        channels = max(1, source[1] // groups)
        if kernel:
            depth = channels * math.prod(kernel)
        else:
            depth = cost.macs / (target[0] * math.prod(target[2:]) * columns)
        rows = cost.macs / (columns * groups * depth)
    elements = math.prod(source)
    unread = elements - count_read_elements(elements, rows, depth, groups)
    element = bytes_per_element(base.precision)
    return replace(
        base,
        kind=work.DEPTHWISE if groups > 1 and columns * channels <= 16 else base.kind,
        rows=rows,
        columns=float(columns),
        depth=depth,
        channels=float(channels),
        groups=float(groups),
        read=max(0.0, base.read - unread * element),
        weights=base.weights or columns * groups * depth * element,
    )


def _first_shape(tensors: list[BuiltTensor]) -> list[int] | None:
    """Return the shape of the first tensor; [1, N, C, H, W] becomes [N, C, H, W].

    None if unknown.
    """
    shape = static_shape(tensors[0].shape) if tensors else None
    return shape[1:] if shape is not None and len(shape) == 5 and shape[0] == 1 else shape


# Bytes from L2 to one SM per clock (Volta, Ampere and Ada tuning guides).
_L2_PEAK = 64.0
_MIN_KERNEL_MS = 1e-3  # about a microsecond, the time of the shortest kernels


def find_build_gpu(build: Build, name: str | None = None, clock: float | None = None) -> Gpu | None:
    """Return the GPU of a build, with the figures of its log; None if unknown.

    Args:
        build: The build.
        name: GPU that the user names. If the figures in the log fit this GPU, they are used;
            otherwise, the figures in the table are used.
        clock: SM clock in MHz that replaces the clock in the log.

    Raises:
        QdqtoolError: No GPU has this name, or ``clock`` is set for an unknown GPU.
    """
    if name is not None:
        device = parse_device(name, build.gpu)
        boards = [] if "=" in name else gpus.match_gpus(name)
        if any(_can_be_board(device, board) for board in boards):
            return find_device_gpu(device, clock)
        return gpus.choose_gpu(name, clock)
    if build.device is not None:
        with contextlib.suppress(QdqtoolError):
            return find_device_gpu(parse_device(build.device, build.gpu), clock)
    if clock is not None:
        raise QdqtoolError(
            "`clock`: has no effect, because the GPU of the build is unknown. Give `gpu` as well",
            code="option-without-effect",
            parameter="clock",
        )
    return None


def _can_be_board(device: DeviceFacts, board: Gpu) -> bool:
    if not device.sms or device.cc not in (None, board.cc):
        return False
    return device.sms == board.sms or (board.is_jetson and device.sms < board.sms)


def explain_unknown_gpu(build: Build) -> str:
    """Describe the problem if a build names an unknown GPU; empty without a problem."""
    try:
        if build.device is not None:
            find_device_gpu(parse_device(build.device, build.gpu))
    except QdqtoolError as error:
        return str(error)
    return ""


def check_build_gpu(build: Build, gpu: Gpu) -> list[Note]:
    """Return a note if the device in a build's log contradicts `gpu`; else an empty list."""
    device = parse_device(build.device or "the device", build.gpu)
    differences = []
    if device.cc not in (None, gpu.cc):
        differences.append(f"compute capability {device.cc}")
    if device.sms and device.sms > gpu.sms:
        differences.append(f"{device.sms} SMs")
    if not differences:
        return []
    return [
        Note(
            f"`gpu`: {gpu.name} is not the GPU of the log: {device.name} has "
            f"{' and '.join(differences)}; give the GPU of the log, or leave `gpu` out",
            code="contradicted",
        )
    ]


def add_expected_times(report: EngineReport, gpu: Gpu) -> None:
    """Set the expected and best milliseconds of layers with known work, and ``report.gpu``.

    Expected milliseconds include the time that profiling adds to each layer.
    """
    rows, works = [], []
    for row in report.rows:
        layer_work = built_layer_work(row)
        if layer_work and layer_work.kind not in (work.NOTHING, work.UNKNOWN, work.MYELIN):
            rows.append(row)
            works.append(layer_work)
    overhead = _profile_overhead_ms(report)
    expected = estimate_seconds(works, gpu) * 1e3
    for row, layer_work, ms in zip(rows, works, expected, strict=True):
        row.expected_ms = float(ms) + overhead
        row.best_ms = _peak_ms(layer_work, gpu)
    report.gpu = gpu.name


def _profile_overhead_ms(report: EngineReport) -> float:
    """Return the milliseconds that a profile added to each layer.

    If the log has the total time without profiling, the overhead is computed from this time.
    Otherwise the usual overhead is assumed.
    """
    usual = load_constants().overhead_us * 1e-3
    total = report.build.gpu_ms
    times = [row.ms for row in report.rows if row.ms]
    if total is None or not times:
        return usual
    return float(np.clip((sum(times) - total) / len(times), 0.0, 3 * usual))


def _peak_ms(w: LayerWork, gpu: Gpu) -> float:
    """Return the milliseconds that a layer takes at the peak rates of the GPU.

    This is the largest of four times: multiply-accumulates at the peak rate, bytes at the memory
    bandwidth, bytes at the L2 bandwidth, and the shortest time of a kernel. The first time is 0
    except for convolutions (not depthwise ones), deconvolutions and matrix products. Bytes that fit
    into the L2 do not count for the memory.
    """
    compute = w.macs / gpu.mac_rate(w.precision) if w.kind in (work.CONV, work.DECONV) else 0.0
    memory = max(0.0, w.bytes_moved - gpu.l2 * 1e6) / (gpu.bandwidth * 1e9)
    cache = w.bytes_moved / (_L2_PEAK * gpu.clocks_per_second)
    return max(compute * 1e3, memory * 1e3, cache * 1e3, _MIN_KERNEL_MS)

"""What the layers of a built engine usually take on its GPU, and could take at best."""

from __future__ import annotations

import math

import numpy as np

from qdqtool.buildlog.layers import int_list
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor
from qdqtool.engine.costs import EngineReport, LayerCost
from qdqtool.errors import QdqtoolError
from qdqtool.timing import device, gpus, work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import Constants, constants, seconds
from qdqtool.timing.work import Work, width
from qdqtool.types import Precision


def work_of(cost: LayerCost) -> Work | None:
    """The work of a built layer; None where its shapes are not known."""
    layer = cost.layer
    kind = _kind(layer)
    if kind == work.NOTHING:
        return Work(kind)
    if cost.input_bytes is None or cost.output_bytes is None or not layer.outputs or not layer.inputs:
        return None
    source = _dims(layer.inputs)
    result = Work(
        kind, _single(layer.input_precision), _single(layer.output_precision),
        channels=float(source[1]) if source and len(source) > 2 else 64.0, read=float(cost.input_bytes),
        weights=float(cost.weight_bytes or 0), written=float(cost.output_bytes),
    )  # fmt: skip
    if kind not in work.COMPUTING:
        return result
    return _convolution(cost, result)


def _single(precision: Precision) -> Precision:
    return Precision.FP32 if precision == Precision.FLOAT else precision


def _kind(layer: BuiltLayer) -> str:
    name = layer.type.lower()
    if name in ("noop", "constant", "signal", "wait"):
        return work.NOTHING
    if layer.kind == "conversion":
        return work.CONVERSION
    if name in ("reformat", "copy"):
        return work.REFORMAT if layer.fused().kind.startswith("reformat") else work.COPY
    if layer.is_deconvolution:
        return work.DECONV
    if layer.is_convolution or "gemm" in name or "matrixmultiply" in name or "fullyconnected" in name:
        return work.CONV
    for word, kind in (
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
    ):
        if word in name:
            return kind
    return work.UNKNOWN


def _convolution(cost: LayerCost, result: Work) -> Work | None:
    layer = cost.layer
    source, target = _dims(layer.inputs), _dims(layer.outputs)
    if source is None or target is None or len(target) < 2 or not cost.macs:
        return None
    groups = layer.extras.get("Groups", 1)
    groups = groups if isinstance(groups, int) and groups > 0 else 1
    columns = sum(d[1] for d in (_dims([t]) for t in layer.outputs) if d is not None and len(d) > 1) or target[1]
    columns = max(1, columns // groups)
    if len(target) == 2:
        rows: float = target[0]
        depth: float = cost.macs / (rows * columns)
        channels: float = source[1]
    else:
        kernel = int_list(layer.extras.get("Kernel", layer.extras.get("ConvKernel")), 1)
        channels = max(1, source[1] // groups)
        depth = channels * math.prod(kernel) if kernel else cost.macs / (target[0] * math.prod(target[2:]) * columns)
        rows = cost.macs / (columns * groups * depth)
    count = math.prod(source)
    skipped = (count - work.touched(count, rows, depth, groups)) * width(result.precision)
    kind = work.DEPTHWISE if groups > 1 and columns * channels <= 16 else result.kind
    return Work(
        kind, result.precision, result.written_as, rows, float(columns), depth, float(channels), float(groups),
        max(0.0, result.read - skipped), result.weights or columns * groups * depth * width(result.precision),
        result.written,
    )  # fmt: skip


def _dims(tensors: list[BuiltTensor]) -> list[int] | None:
    if not tensors or tensors[0].shape is None or any(d is None for d in tensors[0].shape):
        return None
    shape = [d for d in tensors[0].shape if d is not None]
    return shape[1:] if len(shape) == 5 and shape[0] == 1 else shape


_L2_PEAK = 64.0  # bytes that an SM takes from the L2 in a clock (Volta, Ampere and Ada tuning guides)
_FLOOR_MS = 1e-3  # no kernel takes less than about a microsecond


def gpu_of(build: Build, name: str | None = None, clock: float | None = None) -> Gpu | None:
    """The GPU that a build ran on, as its log describes it; None where that is not known.

    Args:
        build: The build.
        name: The user's word for it: the log's figures are taken where they can be that GPU's, else the table's.
        clock: SM clock in MHz, which comes before the log's.

    Raises:
        QdqtoolError: The user's GPU is not known.
    """
    if name is not None:
        facts = device.of_facts(name, build.gpu)
        known = [] if "=" in name else gpus.answering(name)
        if facts.sms and known and any(_could_be(g, facts) for g in known):
            return device.gpu_of_device(facts, clock)
        return gpus.chosen(name, clock)
    if build.device is None:
        return None
    try:
        return device.gpu_of_device(device.of_facts(build.device, build.gpu), clock)
    except QdqtoolError:
        return None


def unknown_gpu(build: Build) -> str:
    """Why a build's GPU is not known; empty where it is, or where the build names none."""
    if build.device is None:
        return ""
    try:
        device.gpu_of_device(device.of_facts(build.device, build.gpu))
    except QdqtoolError as error:
        return str(error)
    return ""


def contradicted(build: Build, gpu: Gpu) -> str:
    """That a build's log is of another device than the user's GPU; empty where it can be that one."""
    facts = device.of_facts(build.device or "the device", build.gpu)
    other = [f"compute capability {facts.cc}"] if facts.cc not in (None, gpu.cc) else []
    other += [f"{facts.sms} SMs"] if facts.sms and facts.sms > gpu.sms else []
    return f"the log contradicts {gpu.name}: {facts.name} has {' and '.join(other)}" if other else ""


def _could_be(gpu: Gpu, facts: device.Device) -> bool:
    return facts.cc in (None, gpu.cc) and facts.sms is not None and (
        facts.sms == gpu.sms or (gpu.is_jetson and facts.sms < gpu.sms))


def add_expected(report: EngineReport, gpu: Gpu) -> None:
    """Writes into every layer of known shapes what it usually takes (as a profile shows it) and could at best."""
    fitted = constants()
    rows, works = [], []
    for row in report.rows:
        found = work_of(row)
        if found is not None and found.kind not in (work.NOTHING, work.UNKNOWN, work.MYELIN):
            rows.append(row)
            works.append(found)
    overhead = overhead_of(report, fitted)
    for row, usual, least in zip(rows, seconds(works, gpu, fitted) * 1e3, at_best(works, gpu), strict=True):
        row.expected_ms = float(usual) + overhead
        row.best_ms = float(least)
    report.gpu = gpu.name


def overhead_of(report: EngineReport, fitted: Constants) -> float:
    """Milliseconds that this profile added to each layer: measured where the log has the time without it too."""
    usual = fitted.overhead_us * 1e-3
    performance = report.build.performance.get("GPU Compute Time", {})
    whole = performance.get("median", performance.get("mean"))
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

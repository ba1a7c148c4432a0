"""What the layers of a built engine usually take on its GPU, and could take at best."""

from __future__ import annotations

import numpy as np

from qdqtool.buildlog.types import Build
from qdqtool.engine.costs import EngineReport
from qdqtool.errors import QdqtoolError
from qdqtool.timing import device, gpus, work
from qdqtool.timing.built import work_of
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import Constants, constants, seconds
from qdqtool.timing.work import Work

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

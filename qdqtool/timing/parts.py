"""What an estimate of time is made of: other versions of the network, kernels, what fixes save, a measured correction.

One measured number, or a profile, corrects the estimates for a machine; kept in a file that later calls take.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import seconds
from qdqtool.timing.predicted import Workload
from qdqtool.timing.work import Work, width
from qdqtool.types import Json, Precision, Prediction
from qdqtool.util import limits
from qdqtool.util.files import read_input
from qdqtool.util.json_text import parse_json
from qdqtool.util.records import published
from qdqtool.util.said import said

Array = npt.NDArray[np.float64]
CALIBRATION_SCHEMA = "qdqtool/time-calibration/1"
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,20})?|\.\d{1,20})\s*(us|ms|s)?", re.IGNORECASE)
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_FACTORS = (0.1, 20.0)  # beyond, the measurement is of something else
_MOST_OVERHEAD = (
    7.5  # microseconds that a profile adds to a layer, the most of eleven engines (docs/timing.md)
)
_FEW = 5  # layers by which a profile says more than its sum


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a measurement says of a machine."""

    gpu: str  # the GPU it was made on
    factor: float = 1.0  # measured time over estimated time of a kernel's work
    kernel_us: float = 0.0  # microseconds that each kernel takes more (less, where negative)
    source: str = ""  # what it was made from
    overhead_us: float = 0.0  # what the profile added to each kernel, as measured; in no estimate
    direct: bool = False  # whether it was made from the very network that it corrects
    profiled: bool = False  # whether it was made from the layers of a profile

    def as_json(self) -> Json:
        return {
            "schema": CALIBRATION_SCHEMA,
            **published(self, "gpu", "factor", "kernel_us", "source"),
        }

    def apply(self, ms: Array, kernels: Array) -> Array:
        """Corrected milliseconds of layers; ``kernels`` is how many each takes (0 for one that takes no time)."""
        corrected = np.maximum(ms * self.factor + kernels * self.kernel_us * 1e-3, 0.2 * ms)
        return np.asarray(corrected, dtype=np.float64)


def measured_time(text: str) -> float | None:
    """Milliseconds of ``5.3``, ``5.3ms``, ``0.8 s`` or ``950us``; None where the text is no time.

    Raises:
        QdqtoolError: The time is zero.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    value = float(match[1]) * _UNITS[(match[2] or "ms").lower()]
    if not value > 0:
        raise QdqtoolError(
            said("{`calibrate`} {text}: the measured time must be above zero", text=text),
            code="out-of-range",
            parameter="calibrate",
        )
    return value


def of_time(gpu: str, measured_ms: float, estimated_ms: float) -> Calibration:
    """From one end-to-end time.

    Raises:
        QdqtoolError: It is so far from the estimate that it must be of something else.
    """
    factor = _checked(measured_ms / estimated_ms, f"{measured_ms:g} ms")
    return Calibration(gpu, factor, 0.0, f"{measured_ms:g} ms measured", direct=True)


def of_layers(
    gpu: str, measured_ms: list[float], estimated_ms: list[float], source: str
) -> Calibration:
    """From layers that a profile and the estimate both have, in milliseconds each.

    What every layer takes more than estimated is the profile's doing, up to what profiles were seen to add: so the
    four engines come out whose time without a profiler is known (within 4 %; counted as the kernels' own, 10 to 20 %).

    Raises:
        QdqtoolError: No layer in common, or times that cannot be of this model.
    """
    if not measured_ms:
        raise QdqtoolError(
            "none of its layers is in the prediction; it is a profile of another engine",
            source,
            code="different-models",
            parameter="calibrate",
        )
    measured, estimated = np.asarray(measured_ms), np.asarray(estimated_ms)
    if len(measured) < _FEW:
        factor = float(measured.sum() / max(estimated.sum(), 1e-9))
        return Calibration(gpu, _checked(factor, source), 0.0, source, direct=True, profiled=True)
    # Relative errors count, not absolute ones: divide the line a + b t by the measured time and fit that to 1.
    robust = np.ones(len(measured))
    for _ in range(10):  # robust: layers that another tactic took do not pull
        weights = robust / np.maximum(measured, 1e-4)
        design = np.stack([weights, estimated * weights], axis=1)
        (constant, factor), *_ = np.linalg.lstsq(design, weights * measured, rcond=None)
        off = np.abs((constant + factor * estimated) * (1.0 / measured) - 1)
        robust = 1.0 / np.sqrt(np.maximum(off, 0.05))
    if (
        not (math.isfinite(constant) and math.isfinite(factor))
        or factor <= 0.2
        or abs(constant) > 0.02
    ):
        constant, factor = 0.0, float(measured.sum() / estimated.sum())
    more = float(constant) * 1e3
    overhead = min(max(more, 0.0), _MOST_OVERHEAD)
    return Calibration(
        gpu, _checked(float(factor), source), more - overhead, source, overhead, True, True
    )


def _checked(factor: float, source: str) -> float:
    low, high = _FACTORS
    if not low <= factor <= high:
        raise QdqtoolError(
            said(
                "{`calibrate`} {source}: {factor:.3g} times the estimate; that is of another model, "
                "batch or GPU",
                source=source,
                factor=factor,
            ),
            code="implausible-time",
            parameter="calibrate",
        )
    return factor


def read_calibration(path: str | os.PathLike[str]) -> Calibration | None:
    """The calibration in a file; None where the file is something else (a profile).

    Raises:
        QdqtoolError: It is a damaged calibration, or cannot be read.
    """
    file = Path(path)
    if not file.exists():
        raise QdqtoolError(
            said(
                "{`calibrate`} {path}: neither a time (5.3 or 5.3ms) nor a file; give a measured time "
                "or a trtexec profile",
                path=path,
            ),
            code="file-missing",
            parameter="calibrate",
        )
    text = read_input(file, limits.JSON_FILE).decode("utf-8", "replace")
    if CALIBRATION_SCHEMA not in text[:4096]:
        return None
    try:
        data = parse_json(text)
        gpu, factor, kernel = (
            str(data["gpu"])[:200],
            float(data["factor"]),
            float(data["kernel_us"]),
        )
        if not (math.isfinite(factor) and math.isfinite(kernel) and abs(kernel) <= 1000):
            raise ValueError(text[:100])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise QdqtoolError(
            said("a damaged calibration file; make it again with {`save_calibration`}"),
            str(file),
            code="file-damaged",
            parameter="calibrate",
        ) from None
    return Calibration(gpu, _checked(factor, str(file)), kernel, str(data.get("source", ""))[:500])


# Versions of the network, kernels, fixes -----------------------------------------------------------------------------

PAYS = 1.02  # gain below which INT8 is not worth building


@dataclass(slots=True)
class FloatTime:
    """The same network without its Q/DQ; ``fp32_ms`` beside it where its floats are FP32 as it is built."""

    precision: Precision
    total_ms: float
    fp32_ms: float | None = None

    def as_json(self) -> Json:
        single = None if self.fp32_ms is None else rounded(self.fp32_ms)
        return {
            "precision": str(self.precision),
            "total_ms": rounded(self.total_ms),
            "fp32_ms": single,
        }


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast the network with Q/DQ is as the same in float.

    ``low`` to ``high`` holds 80 % of measured gains; ``right`` of ``pairs`` is how often the faster of the two was
    named rightly for networks and GPUs that the fit had not seen, where they differ by more than 5 %.
    """

    low: float
    value: float
    high: float
    precision: Precision
    right: int
    pairs: int

    @property
    def is_sure(self) -> bool:
        """Whether the whole range lies on one side."""
        return self.low > 1 or self.high < 1

    def as_json(self) -> Json:
        return {
            "low": round(self.low, 3),
            "value": round(self.value, 3),
            "high": round(self.high, 3),
            "faster": "INT8" if self.value > 1 else str(self.precision),
            "signs_right": self.right,
            "signs_measured": self.pairs,
        }


@dataclass(slots=True)
class Kernel:
    """One kernel of the engine, for the list of the slowest.

    ``ms`` is what a profile would show; ``title`` is the node that people know the layer by.
    """

    name: str
    kind: str
    ms: float
    title: str = ""

    def as_json(self) -> Json:
        return {"name": self.name, "kind": self.kind, "ms": rounded(self.ms)}


@dataclass(slots=True)
class FixTime:
    """What the fixes of one kind save together, by simulating the fixed network.

    ``codes`` are the findings that they remove, ``nodes`` where.
    """

    codes: list[str]
    nodes: list[str]
    saves_ms: float

    def as_json(self) -> Json:
        return {
            "codes": list(self.codes),
            "nodes": list(self.nodes),
            "saves_ms": rounded(self.saves_ms),
        }


@dataclass(slots=True)
class BestTime:
    """A float network with Q/DQ wherever ``insert`` would put it."""

    total_ms: float
    gain: float
    int8: int
    convolutions: int
    conversions: int | None

    def as_json(self) -> Json:
        return {
            "total_ms": rounded(self.total_ms),
            "gain": round(self.gain, 3),
            **published(self, "int8", "convolutions", "conversions"),
        }


def rounded(value: float) -> float:
    """Four digits that count."""
    return float(f"{value:.4g}")


# What each fix saves at most -----------------------------------------------------------------------------------------

_LEAST_MS = 5e-5  # a fix that saves less is not worth a line


def add_savings(
    prediction: Prediction,
    listed: Prediction,
    load: Workload,
    ms: Array,
    gpu: Gpu,
    correction: Calibration | None,
) -> None:
    """Writes into each finding what its fix saves at most.

    That is: its convolutions from INT8 to INT8, the poolings that they then take in gone, and the conversions and
    reformats behind them gone.
    """
    if not gpu.has_int8 or not prediction.findings:
        return
    layers = listed.layers
    best = seconds([_quantized(w) for w in load.layers], gpu) * 1e3
    if correction:
        best = correction.apply(best, np.ones(len(layers)))
    place = {layer.name: i for i, layer in enumerate(layers)}
    names = {c.name: c.layer for c in prediction.convolutions}
    gone_behind = _vanishing(listed, load)
    saved: dict[
        tuple[int, ...], float
    ] = {}  # many findings may be about convolutions of the same layers
    for finding in prediction.findings:
        own = place.get(finding.node)
        if own is not None and layers[own].type == "Conversion":
            finding.saves_ms = round(float(ms[own]), 5)
            continue
        at = dict.fromkeys(
            place[n] for n in map(names.get, finding.convolutions) if n is not None and n in place
        )
        slow = tuple(i for i in at if load.layers[i].kind in work.COMPUTING)
        if slow not in saved:
            faster = sum(max(0.0, ms[i] - best[i]) for i in slow)
            saved[slow] = float(faster + sum(ms[j] for j in gone_behind(slow)))
        total = saved[slow]
        finding.saves_ms = round(total, 5) if total > _LEAST_MS else None


def _vanishing(listed: Prediction, load: Workload) -> Callable[[Iterable[int]], set[int]]:
    """Finds what vanishes where convolutions write INT8: poolings behind them, and what converts in between."""
    readers: dict[str, list[int]] = defaultdict(list)
    for i, layer in enumerate(listed.layers):
        for edge in layer.inputs:
            readers[edge.tensor].append(i)
    extras = {  # reformats where FP32 was written for want of a kernel, not those of the network's outputs
        e.name: i
        for i, e in enumerate(load.extras, len(load.layers))
        if (e.work.precision, e.work.written_as) == (Precision.FP32, Precision.FP16)
    }

    def gone_behind(convolutions: Iterable[int]) -> set[int]:
        gone: set[int] = set()
        waiting = [edge.tensor for i in convolutions for edge in listed.layers[i].outputs]
        while waiting:
            tensor = waiting.pop()
            if f"reformat of {tensor}" in extras:
                gone.add(extras[f"reformat of {tensor}"])
            for j in readers.get(tensor, ()):
                kind = listed.layers[j].type
                fused = (
                    kind == "Pooling" and load.layers[j].precision.is_float
                )  # into the convolution's own layer
                if j not in gone and (kind == "Conversion" or fused):
                    gone.add(j)
                    waiting += [edge.tensor for edge in listed.layers[j].outputs] if fused else []
        return gone

    return gone_behind


def _quantized(found: Work) -> Work:
    """A convolution as it were from INT8 to INT8."""
    if found.kind not in work.COMPUTING or (
        not found.precision.is_float and found.written_as == Precision.INT8
    ):
        return found
    low, high = width(found.precision), width(found.written_as)
    return replace(
        found,
        precision=Precision.INT8,
        written_as=Precision.INT8,
        read=found.read / low,
        weights=found.weights / low,
        written=found.written / high,
    )

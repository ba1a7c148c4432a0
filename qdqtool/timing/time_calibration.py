"""Correction of time estimates by a measured time or by a profile of layers.

A file keeps the correction for later calls.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.trt.result import EngineLayer
from qdqtool.util import limits
from qdqtool.util.files import read_input
from qdqtool.util.json_text import Json, parse_json
from qdqtool.util.records import to_json_fields

if TYPE_CHECKING:
    from qdqtool.buildlog.types import ProfileRow

Array = npt.NDArray[np.float64]
CALIBRATION_SCHEMA = "qdqtool/time-calibration/1"
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,20})?|\.\d{1,20})\s*(us|ms|s)?", re.IGNORECASE)
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_FACTORS = (0.1, 20.0)  # factors outside these limits mean that another model was measured
# Smallest and largest overhead per layer in microseconds of nine profiles of GPUs with their own
# memory (docs/timing.md).
_OVERHEADS = (0.5, 7.5)
_MIN_LAYERS = 5  # with fewer layers, only the sum of a profile is used


@dataclass(frozen=True, slots=True)
class TimeCalibration:
    """Correction of estimates for one GPU.

    Attributes:
        gpu: GPU of the measurement.
        factor: Measured time of a kernel's work divided by its estimated time.
        kernel_us: Microseconds added to each kernel; may be negative.
        source: Name of the measurement.
        overhead_us: Microseconds that profiling added to each kernel; not part of corrected times.
        direct: Whether the measurement is of the same network as the estimate.
        profiled: Whether the measurement is a profile of layers.
    """

    gpu: str
    factor: float = 1.0
    kernel_us: float = 0.0
    source: str = ""
    overhead_us: float = 0.0
    direct: bool = False
    profiled: bool = False

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            "schema": CALIBRATION_SCHEMA,
            **to_json_fields(self, "gpu", "factor", "kernel_us", "source"),
        }

    def apply(self, ms: Array, kernels: Array) -> Array:
        """Return the corrected milliseconds of layers, of shape [layers].

        A corrected time is at least 20 % of the estimate.

        Args:
            ms: Estimated milliseconds, of shape [layers].
            kernels: Number of kernels of each layer; 0 for a layer that takes no time.
        """
        corrected = np.maximum(ms * self.factor + kernels * self.kernel_us * 1e-3, 0.2 * ms)
        return np.asarray(corrected, dtype=np.float64)


def parse_time(text: str) -> float | None:
    """Return the milliseconds of a text such as ``5.3``, ``5.3ms``, ``0.8 s`` or ``950us``.

    None if the text is not a time.

    Raises:
        QdqtoolError: The time is zero.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    ms = float(match[1]) * _MS[(match[2] or "ms").lower()]
    if not ms > 0:
        raise QdqtoolError(
            f"`calibrate` {text}: give a measured time above zero",
            code="out-of-range",
            parameter="calibrate",
        )
    return ms


def calibrate_by_time(gpu: str, measured_ms: float, estimated_ms: float) -> TimeCalibration:
    """Return a calibration with one factor for all time estimates, from one end-to-end time.

    Raises:
        QdqtoolError: The time is too far from the estimate to be of the same network.
    """
    factor = measured_ms / estimated_ms
    _check_plausible_factor(factor, f"{measured_ms:g} ms")
    return TimeCalibration(gpu, factor, 0.0, f"{measured_ms:g} ms measured", direct=True)


def calibrate_by_layers(
    gpu: str, measured_ms: list[float], estimated_ms: list[float], source: str
) -> TimeCalibration:
    """Return the correction from the layers that both a profile and an estimate contain.

    The correction is a factor and a constant time per layer. The constant is 0 with fewer than five
    layers or without a plausible fit. As much of the constant as known profiles show
    (:func:`overhead_limits`) counts as overhead of profiling. The rest is added to each kernel.

    Args:
        gpu: GPU of the profile.
        measured_ms: Milliseconds of each layer in the profile.
        estimated_ms: Estimated milliseconds of the same layers.
        source: Name of the profile.

    Raises:
        QdqtoolError: No layer is common to both, or the times cannot be of this model.
    """
    if not measured_ms:
        raise QdqtoolError(
            "the profile is of another engine: none of its layers is in the prediction. Give a "
            "profile of this model",
            source,
            code="different-models",
            parameter="calibrate",
        )
    measured, estimated = np.asarray(measured_ms), np.asarray(estimated_ms)
    constant, factor = 0.0, float(measured.sum() / max(estimated.sum(), 1e-9))
    if len(measured) >= _MIN_LAYERS:
        offset, slope = _fit_line(measured, estimated)
        if math.isfinite(offset + slope) and slope > 0.2 and abs(offset) <= 0.02:
            constant, factor = offset, slope
    _check_plausible_factor(factor, source)
    extra = constant * 1e3
    lowest, highest = overhead_limits(gpu)
    overhead = min(max(extra, lowest), highest)
    return TimeCalibration(
        gpu, factor, extra - overhead, source, overhead, direct=True, profiled=True
    )


def overhead_limits(gpu: str) -> tuple[float, float]:
    """Return the smallest and largest overhead of profiles, in microseconds for each layer.

    Both limits are 0 for a Jetson: on an Orin, the sum over the layers of a profile was less than
    the time without a profiler (four profiles).

    Args:
        gpu: Name of the GPU.
    """
    return (0.0, 0.0) if gpu.startswith("Jetson") else _OVERHEADS


def _fit_line(measured: Array, estimated: Array) -> tuple[float, float]:
    """Fit measured = constant + factor * estimated, and return (constant, factor).

    The fit minimizes relative errors, with small weights for outliers, such as layers that run
    another tactic than estimated.
    """
    constant, factor = 0.0, 1.0
    robust = np.ones(len(measured))
    for _ in range(10):
        weights = robust / np.maximum(measured, 1e-4)
        design = np.stack([weights, estimated * weights], axis=1)
        (constant, factor), *_ = np.linalg.lstsq(design, weights * measured, rcond=None)
        error = np.abs((constant + factor * estimated) * (1.0 / measured) - 1)
        robust = 1.0 / np.sqrt(np.maximum(error, 0.05))
    return float(constant), float(factor)


def _check_plausible_factor(factor: float, source: str) -> None:
    low, high = _FACTORS
    if not low <= factor <= high:
        raise QdqtoolError(
            f"`calibrate` {source}: the measured time is {float(f'{factor:.3g}'):,g} times the "
            "estimate, so it is of another model, batch or GPU; give a time of this model on this "
            "GPU",
            code="implausible-time",
            parameter="calibrate",
        )


def read_calibration(path: str | os.PathLike[str]) -> TimeCalibration | None:
    """Return the calibration in a file; None if the file has other content, such as a profile.

    Raises:
        QdqtoolError: The calibration is damaged or implausible, or the file cannot be read.
    """
    file = Path(path)
    if not file.exists():
        raise QdqtoolError(
            f"`calibrate` {path}: neither a time (5.3 or 5.3ms) nor a file; give a measured time "
            "or a trtexec profile",
            code="file-missing",
            parameter="calibrate",
        )
    text = read_input(file, limits.JSON_FILE).decode("utf-8", "replace")
    if CALIBRATION_SCHEMA not in text[:4096]:
        return None
    try:
        data = parse_json(text)
        gpu, source = str(data["gpu"])[:200], str(data.get("source", ""))[:500]
        factor, kernel_us = float(data["factor"]), float(data["kernel_us"])
        if not (math.isfinite(factor) and math.isfinite(kernel_us) and abs(kernel_us) <= 1000):
            raise ValueError(text[:100])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise QdqtoolError(
            "the file of a time calibration is damaged; write it again with `save_calibration`",
            str(file),
            code="file-damaged",
            parameter="calibrate",
        ) from None
    _check_plausible_factor(factor, str(file))
    return TimeCalibration(gpu, factor, kernel_us, source)


def make_calibration(
    source: str, gpu: str, layers: Sequence[EngineLayer], kernel_ms: Array, total_ms: float
) -> TimeCalibration:
    """Return the correction from a measured time, a calibration file or a profile.

    Args:
        source: A measured time, or the path of a file.
        gpu: Name of the GPU.
        layers: Predicted layers.
        kernel_ms: Estimated milliseconds of each layer and of any extra kernels after them.
        total_ms: Estimated milliseconds of one execution.

    Raises:
        QdqtoolError: The calibration cannot be used.
        BuildLogError: The profile cannot be read.
    """
    time = parse_time(source)
    if time is not None:
        return calibrate_by_time(gpu, time, total_ms)
    calibration = read_calibration(source)
    if calibration is None:
        return _calibrate_by_profile(source, gpu, layers, kernel_ms)
    if calibration.gpu != gpu:
        raise QdqtoolError(
            f"the time calibration is for '{calibration.gpu}', not for '{gpu}'; give a "
            "calibration for this GPU",
            source,
            code="different-gpus",
            parameter="calibrate",
        )
    return calibration


def _calibrate_by_profile(
    path: str, gpu: str, layers: Sequence[EngineLayer], kernel_ms: Array
) -> TimeCalibration:
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
    measured, estimated = [], []
    matches = match_profile_rows(layers, rows)
    for row, ms in zip(matches, kernel_ms.tolist(), strict=False):
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
    return calibrate_by_layers(gpu, measured, estimated, path)


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

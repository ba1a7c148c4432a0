"""One measured number, or a profile, corrects the estimates for a machine; kept in a file that later calls take."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qdqtool.base import budgets
from qdqtool.errors import QdqtoolError
from qdqtool.io.files import read_input
from qdqtool.io.outputs import parse_json
from qdqtool.types import Json

SCHEMA = "qdqtool/time-calibration/1"
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,20})?|\.\d{1,20})\s*(us|ms|s)?", re.IGNORECASE)
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_MOST = budgets.JSON_FILE
_FACTORS = (0.1, 20.0)  # beyond, the measurement is of something else
_MOST_OVERHEAD = 7.5  # microseconds that a profile adds to a layer, the most of eleven engines (docs/timing.md)
_FEW = 5  # layers by which a profile says more than its sum


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a measurement says of a machine.

    Attributes:
        gpu: The GPU it was made on.
        factor: Measured time over estimated time of a kernel's work.
        kernel_us: Microseconds that each kernel takes more (less, where negative).
        source: What it was made from.
        overhead_us: What the profile added to each kernel, as measured; in no estimate.
        direct: Whether it was made from the very network that it corrects.
        profiled: Whether it was made from the layers of a profile.
    """

    gpu: str
    factor: float = 1.0
    kernel_us: float = 0.0
    source: str = ""
    overhead_us: float = 0.0
    direct: bool = False
    profiled: bool = False

    def as_json(self) -> Json:
        return {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "factor": self.factor,
            "kernel_us": self.kernel_us,
            "source": self.source,
        }

    def apply(self, ms: npt.NDArray[np.float64], kernels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
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
        raise QdqtoolError(f"`calibrate` {text}: the measured time must be above zero")
    return value


def of_time(gpu: str, measured_ms: float, estimated_ms: float) -> Calibration:
    """From one end-to-end time.

    Raises:
        QdqtoolError: It is so far from the estimate that it must be of something else.
    """
    factor = _checked(measured_ms / estimated_ms, f"{measured_ms:g} ms")
    return Calibration(gpu, factor, 0.0, f"{measured_ms:g} ms measured", direct=True)


def of_layers(gpu: str, measured_ms: list[float], estimated_ms: list[float], source: str) -> Calibration:
    """From layers that a profile and the estimate both have, in milliseconds each.

    What every layer takes more than estimated is the profile's doing, up to what profiles were seen to add: so the
    four engines come out whose time without a profiler is known (within 4 %; counted as the kernels' own, 10 to 20 %).

    Raises:
        QdqtoolError: No layer in common, or times that cannot be of this model.
    """
    if not measured_ms:
        raise QdqtoolError(f"{source}: none of its layers is in the prediction; it is a profile of another engine")
    measured, estimated = np.asarray(measured_ms), np.asarray(estimated_ms)
    if len(measured) < _FEW:
        factor = float(measured.sum() / max(estimated.sum(), 1e-9))
        return Calibration(gpu, _checked(factor, source), 0.0, source, direct=True, profiled=True)
    # Relative errors count, not absolute ones: divide the line a + b t by the measured time and fit that to 1.
    weights = 1.0 / np.maximum(measured, 1e-4)
    design = np.stack([weights, estimated * weights], axis=1)
    for _ in range(10):  # robust: layers that another tactic took do not pull
        (constant, factor), *_ = np.linalg.lstsq(design, np.ones(len(measured)) * _row(weights, measured), rcond=None)
        off = np.abs((constant + factor * estimated) * (1.0 / measured) - 1)
        robust = 1.0 / np.sqrt(np.maximum(off, 0.05))
        weights = robust / np.maximum(measured, 1e-4)
        design = np.stack([weights, estimated * weights], axis=1)
    if not (math.isfinite(constant) and math.isfinite(factor)) or factor <= 0.2 or abs(constant) > 0.02:
        constant, factor = 0.0, float(measured.sum() / estimated.sum())
    more = float(constant) * 1e3
    overhead = min(max(more, 0.0), _MOST_OVERHEAD)
    return Calibration(gpu, _checked(float(factor), source), more - overhead, source, overhead, True, True)


def _row(weights: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(weights * measured, dtype=np.float64)


def _checked(factor: float, source: str) -> float:
    low, high = _FACTORS
    if not low <= factor <= high:
        raise QdqtoolError(
            f"`calibrate` {source}: {factor:.3g} times the estimate; that is of another model, batch or GPU"
        )
    return factor


def read(path: str | os.PathLike[str]) -> Calibration | None:
    """The calibration in a file; None where the file is something else (a profile).

    Raises:
        QdqtoolError: It is a damaged calibration, or cannot be read.
    """
    file = Path(path)
    if not file.exists():
        raise QdqtoolError(
            f"`calibrate` {path}: neither a time (5.3 or 5.3ms) nor a file; give a measured time or a trtexec profile"
        )
    text = read_input(file, _MOST).decode("utf-8", "replace")
    if SCHEMA not in text[:4096]:
        return None
    try:
        data = parse_json(text)
        gpu, factor, kernel = str(data["gpu"])[:200], float(data["factor"]), float(data["kernel_us"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise QdqtoolError(f"{file}: a damaged calibration file; make it again with `save_calibration`") from None
    if not (math.isfinite(factor) and math.isfinite(kernel) and abs(kernel) <= 1000):
        raise QdqtoolError(f"{file}: a damaged calibration file; make it again with `save_calibration`")
    return Calibration(gpu, _checked(factor, str(file)), kernel, str(data.get("source", ""))[:500])

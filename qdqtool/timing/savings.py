"""What each fix saves at most, in milliseconds on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qdqtool.timing import work
from qdqtool.timing.calibration import Calibration
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.physics import Constants, seconds
from qdqtool.timing.predicted import Workload
from qdqtool.timing.work import Work, width
from qdqtool.types import Finding, Precision, Prediction

Array = npt.NDArray[np.float64]
_LEAST_MS = 5e-5  # a fix that saves less is not worth a line
_FUSED = "Pooling"  # what a convolution that writes INT8 takes into its own layer


def add(
    prediction: Prediction,
    listed: Prediction,
    load: Workload,
    ms: Array,
    gpu: Gpu,
    fitted: Constants,
    correction: Calibration | None,
) -> None:
    """Writes into each finding what its fix saves at most.

    That is: its convolutions from INT8 to INT8, the poolings that they then take in gone, and the conversions and
    reformats behind them gone.
    """
    if not gpu.has_int8 or not prediction.findings:
        return
    quantized = [_quantized(w) for w in load.layers]
    best = seconds(quantized, gpu, fitted) * 1e3
    if correction:
        best = correction.apply(best, np.ones(len(quantized)))
    saved = _Saved(listed, load, ms, best)
    names = {c.name: c.layer for c in prediction.convolutions}
    for finding in prediction.findings:
        finding.saves_ms = saved.by(finding, names)


class _Saved:
    def __init__(self, listed: Prediction, load: Workload, ms: Array, best: Array) -> None:
        self.layers, self.load, self.ms, self.best = listed.layers, load, ms, best
        self.place = {layer.name: i for i, layer in enumerate(listed.layers)}
        self.readers: dict[str, list[int]] = {}
        for i, layer in enumerate(listed.layers):
            for edge in layer.inputs:
                self.readers.setdefault(edge.tensor, []).append(i)
        self.extras = {  # reformats where FP32 was written for want of a kernel, not those of the network's outputs
            e.name: i
            for i, e in enumerate(load.extras, len(load.layers))
            if (e.work.precision, e.work.written_as) == (Precision.FP32, Precision.FP16)
        }

    def by(self, finding: Finding, names: dict[str, str | None]) -> float | None:
        """Milliseconds that the fix of a finding saves at most; None where it saves nothing worth a line."""
        own = self.place.get(finding.node)
        if own is not None and self.layers[own].type == "Conversion":
            return round(float(self.ms[own]), 5)
        layers = (names.get(name) for name in finding.convolutions)
        at = dict.fromkeys(self.place[name] for name in layers if name is not None and name in self.place)
        slow = [i for i in at if self.load.layers[i].kind in work.COMPUTING]
        gone = self._behind(slow)
        faster = sum(max(0.0, self.ms[i] - self.best[i]) for i in slow)
        total = float(faster + sum(self.ms[j] for j in gone))
        return round(total, 5) if total > _LEAST_MS else None

    def _behind(self, convolutions: Iterable[int]) -> set[int]:
        """Layers that vanish where convolutions write INT8: poolings behind them, and what converts in between."""
        gone: set[int] = set()
        waiting = [edge.tensor for i in convolutions for edge in self.layers[i].outputs]
        while waiting:
            tensor = waiting.pop()
            if f"reformat of {tensor}" in self.extras:
                gone.add(self.extras[f"reformat of {tensor}"])
            for j in self.readers.get(tensor, ()):
                kind = self.layers[j].type
                if j not in gone and (kind == "Conversion" or (kind == _FUSED and self._is_float(j))):
                    gone.add(j)
                    if kind == _FUSED:
                        waiting += [edge.tensor for edge in self.layers[j].outputs]
        return gone

    def _is_float(self, layer: int) -> bool:
        return self.load.layers[layer].precision.is_float


def _quantized(found: Work) -> Work:
    """A convolution as it were from INT8 to INT8."""
    if found.kind not in work.COMPUTING or (not found.precision.is_float and found.written_as == Precision.INT8):
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

"""What each fix saves at most, in milliseconds on a GPU."""

from __future__ import annotations

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


def add(
    prediction: Prediction,
    listed: Prediction,
    load: Workload,
    ms: Array,
    gpu: Gpu,
    fitted: Constants,
    correction: Calibration | None,
) -> None:
    """What each fix saves at most: its convolutions from INT8 to INT8, and the conversions beside them gone."""
    if not gpu.has_int8:
        return
    place = {layer.name: i for i, layer in enumerate(listed.layers)}
    of_conv = {c.name: place[c.layer] for c in prediction.convolutions if c.layer in place}
    readers: dict[str, list[int]] = {}
    for i, layer in enumerate(listed.layers):
        for edge in layer.inputs:
            readers.setdefault(edge.tensor, []).append(i)
    quantized = [_quantized(w) for w in load.layers]
    best = seconds(quantized, gpu, fitted) * 1e3
    if correction:
        best = correction.apply(best, np.ones(len(quantized)))
    for finding in prediction.findings:
        finding.saves_ms = _saved(finding, listed, load, ms, best, of_conv, place, readers)


def _saved(
    finding: Finding,
    listed: Prediction,
    load: Workload,
    ms: Array,
    best: Array,
    of_conv: dict[str, int],
    place: dict[str, int],
    readers: dict[str, list[int]],
) -> float | None:
    if finding.node in place and listed.layers[place[finding.node]].type == "Conversion":
        return round(float(ms[place[finding.node]]), 5)
    at = dict.fromkeys(of_conv[name] for name in finding.convolutions if name in of_conv)
    slow = [i for i in at if load.layers[i].kind in work.COMPUTING and best[i] < ms[i] - _LEAST_MS]
    if not slow:
        return None
    beside: set[int] = set()
    for i in slow:
        for edge in listed.layers[i].outputs:
            beside.update(j for j in readers.get(edge.tensor, ()) if listed.layers[j].type == "Conversion")
    return round(float(sum(ms[i] - best[i] for i in slow) + sum(ms[j] for j in beside)), 5)


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

"""Whether the scales of activations fit data: the share of values that each Q clips, and the bits that it uses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from qdqtool.explain.report import Report
from qdqtool.graph import Node
from qdqtool.onnxgraph.view import View
from qdqtool.trt.faults import CHECK, ActivationFit, ActivationScales
from qdqtool.types import Precision

if TYPE_CHECKING:
    from calibration import Statistics
    from calibration.statistics import TensorStatistics

_STEPS = 127.0
_CLIPPED = 0.05  # share of the values; clipping on purpose (entropy, percentiles) stays below a hundredth or two
_WASTED = 0.25  # of the steps: two bits are lost
_NAMED = 5


def quantized(view: View) -> list[Node]:
    """The Qs to look at: INT8, one known scale for the whole tensor."""
    found = []
    for q in view.activation_qs:
        params = view.params(q)
        if params.precision == Precision.INT8 and params.scale is not None and params.scale.size == 1:
            if params.scale[0] > 0 and math.isfinite(params.scale[0]):
                found.append(q)
    return found


def run(view: View, report: Report, statistics: Statistics) -> None:
    """Adds one finding for the network where scales do not fit.

    Args:
        view: The model.
        report: Where the finding goes.
        statistics: Of the tensors in front of the Qs.
    """
    fits = []
    for q in quantized(view):
        seen = statistics.get(q.input(0))
        scale = view.params(q).scale
        if seen is not None and seen.count and seen.absmax > 0 and scale is not None:
            fits.append(_fit(q.name, seen, float(scale[0])))
    bad = [f for f in fits if f.clipped > _CLIPPED or f.used < _WASTED]
    if bad:
        bad.sort(key=lambda f: max(f.clipped / _CLIPPED, _WASTED / f.used), reverse=True)
        report.add("ACT-SCALE", ActivationScales(CHECK, bad[0].quantizer, tuple(bad[:_NAMED]), len(bad), len(fits),
                                                 statistics.images))


def _fit(name: str, seen: TensorStatistics, scale: float) -> ActivationFit:
    """Share clipped by the histogram, whose bins are finer than a step; share of the steps that are used."""
    histogram = seen.histogram
    held = (_STEPS + 0.5) * scale
    middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    clipped = float(np.sum(histogram.counts[middles > held])) / seen.count
    return ActivationFit(name, scale, clipped, seen.absmax / (_STEPS * scale))

"""Histograms of a calibration cache beside the ranges that the model uses, and those that each method would choose."""

from __future__ import annotations

import os

import numpy as np

from calibration.cache import Statistics, load_statistics
from calibration.methods import METHODS, amax_of, clipped_fraction
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError
from qdqtool.files import note_read
from qdqtool.insertion.scales import LEVELS
from qdqtool.progress import track
from qdqtool.reporting import data
from qdqtool.reporting.names import shown
from qdqtool.reporting.nodes import Collector

BINS = 96
_EQUAL = 0.01  # two ranges that differ by less are told as one


def histograms_of(path: str | os.PathLike[str], collector: Collector) -> tuple[list[data.Histogram], str]:
    """The histograms of the tensors that the model quantizes, in graph order, and a sentence about the data.

    Raises:
        DataError: The cache is missing or damaged, or of another model: most of its tensors are not there.
    """
    statistics = load_statistics(path)
    note_read(path)
    view = collector.subject.view
    wanted = [(q, q.input(0)) for q in view.activation_qs]
    known = [(q, tensor) for q, tensor in wanted if tensor in statistics]
    there = sum(t in view.model.producers or t in view.model.inputs for t in statistics)
    if not known or 2 * there < len(statistics):
        raise DataError(
            f"{os.fspath(path)}: {there} of its {len(statistics)} tensors are in the model, which quantizes "
            f"{len(known)} of them; it is the cache of another model ('qdqtool insert --calib-cache' writes it)"
        )
    found: dict[str, data.Histogram] = {}
    for q, tensor in track(known, "Ranges of each method"):
        if tensor in found:
            continue
        scale = view.params(q).scale
        chosen = float(scale[0]) * LEVELS if scale is not None and scale.size == 1 else None
        served = collector.nodes_of([q.name])
        found[tensor] = _histogram(statistics[tensor], tensor, q.name, served[0] if served else -1, chosen)
    return list(found.values()), _told(statistics, len(found), len({t for _, t in wanted}))


def _told(statistics: Statistics, shown_: int, wanted: int) -> str:
    missing = f"; {wanted - shown_} quantized tensors take their range from others of their scale group" if (
        wanted > shown_) else ""
    return f"{shown_} tensors over {statistics.images} images{missing}"


def _histogram(stats: TensorStatistics, tensor: str, quantizer: str, node: int, chosen: float | None) -> data.Histogram:
    if chosen is not None and not (np.isfinite(chosen) and chosen > 0):
        chosen = None
    elif chosen is not None and abs(chosen - stats.absmax) < 1e-5 * stats.absmax:
        chosen = stats.absmax  # a scale is a float32: what it lost is no clipping
    methods = []
    for name in METHODS if stats.count else ():
        amax = amax_of(stats, name)
        methods.append(data.Method(name, _number(amax), _number(clipped_fraction(stats, amax))))
    nearest = [] if chosen is None else [m.name for m in methods if abs(m.amax - chosen) <= _EQUAL * chosen]
    counts = stats.linear(BINS).counts if stats.count and stats.absmax > 0 else np.zeros(BINS)
    return data.Histogram(
        shown(tensor), shown(quantizer), node, _number(stats.absmax),
        _number(stats.minimum) if stats.count else 0.0, _number(stats.maximum) if stats.count else 0.0, stats.count,
        [round(float(c)) for c in counts], None if chosen is None else _number(chosen),
        None if chosen is None else _number(clipped_fraction(stats, chosen)), nearest, methods,
    )  # fmt: skip


def _number(value: float) -> float:
    return float(f"{float(value):.5g}")

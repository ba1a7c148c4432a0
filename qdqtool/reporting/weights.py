"""Ranges of weights by output channel: what is in them, and what their scale can hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.graph import Node
from qdqtool.insertion.scales import LEVELS
from qdqtool.onnxgraph.view import View
from qdqtool.operators import WEIGHTED, output_axis
from qdqtool.reporting import data
from qdqtool.reporting.names import shown
from qdqtool.reporting.nodes import Collector

MOST_CHANNELS = 4096  # of one convolution; of more the plot would show nothing
MOST_VALUES = 300_000_000  # of one constant


def add_weights(collector: Collector) -> None:
    """Writes the ranges of every convolution with quantized weights into the collector's model."""
    subject, model = collector.subject, collector.model
    for node in (n for n in subject.model.ordered if n.op in WEIGHTED and n.index in collector.place):
        found = _ranges(subject.view, node)
        if found is None:
            continue
        largest, holds, shape = found
        place = collector.place[node.index]
        model.nodes[place].weights = len(model.weights)
        model.weights.append(data.Weights(place, shown(node.name), shape, _short(largest), _short(holds)))


def _ranges(view: View, node: Node) -> tuple[npt.NDArray[Any], npt.NDArray[Any], str] | None:
    """Largest magnitudes [channels], ranges [channels] (or [1] of one scale), and the shape as text."""
    weights = view.weights(node)
    quantizer = weights.first
    if quantizer is None or weights.before:
        return None
    scale = view.params(quantizer).scale
    shape = view.model.constant_shape(weights.source)
    if scale is None or not scale.size or not shape or not np.isfinite(scale).all():
        return None
    if math.prod(shape) > MOST_VALUES or scale.size > MOST_CHANNELS:
        return None
    axis = output_axis(node, len(shape))
    if weights.after or axis is None or not -len(shape) <= axis < len(shape) or shape[axis] > MOST_CHANNELS:
        return None
    largest = np.zeros(0)
    try:
        values = view.model.constant(weights.source)
    except QdqtoolError:  # its file is missing: the scales are known all the same
        values = None
    if values is not None and values.size:
        others = tuple(i for i in range(values.ndim) if i != axis % len(shape))
        largest = np.abs(values.astype(np.float32)).max(axis=others)
        if weights.q is None:  # stored integers
            largest = largest * (scale if scale.size in (1, largest.size) else float("nan"))
        if not np.isfinite(largest).all():
            largest = np.zeros(0)
    return largest, scale.astype(np.float64) * LEVELS, "x".join(map(str, shape))


def _short(values: npt.NDArray[Any]) -> list[float]:
    return [float(f"{v:.4g}") for v in values.tolist()]

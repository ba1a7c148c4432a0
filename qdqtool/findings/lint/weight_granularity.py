"""Weights with one scale for all output channels, and what that costs the channels with a small range.

A channel whose largest weight is a quarter of the tensor's loses two bits. Quantizers that give each output channel a
scale of its own lose none, at no cost in time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import weight_scale_axis
from qdqtool.patterns.view import View
from qdqtool.reasons.faults import CHECK, WeightsPerTensor
from qdqtool.trt.targets import target_named
from qdqtool.types import Precision
from qdqtool.util.records import record

MAX_VALUES = 64_000_000  # weights read in a network
MAX_LAYER = 8_000_000  # weights read of one layer
TWO_BITS = 0.25  # of the tensor's range: a channel with so little has a quarter of the steps
MANY = 0.25  # share of a layer's channels that lose two bits, from which the layer counts as lossy
MIN_SPREAD = (
    1.05  # widest over narrowest channel, below which a scale for each channel changes nothing
)
MAX_COMPARED = 100_000  # weights of a layer that are compared with multiples of the scale
_ON_GRID = 1e-3  # of a step


@record
class Granularity:
    """The channels of weights with one scale.

    Attributes:
        node: The layer.
        ratios: Range of each channel over that of the tensor, channels of zeros left out.
        rounded: Whether the file holds the rounded weights only.
    """

    node: Node
    ratios: npt.NDArray[np.float64]
    rounded: bool

    @property
    def spread(self) -> float:
        return float(1 / self.ratios.min())

    @property
    def lost(self) -> float:
        """Share of the channels that lose two bits or more."""
        return float(np.mean(self.ratios <= TWO_BITS))


def run(view: View, report: FindingReport) -> None:
    """Add one finding for the network; a warning if many channels of a layer lose two bits or more."""
    found, total = find_per_tensor(view, report.target)
    if not found:
        return
    worst = max(found, key=lambda g: (g.lost, g.spread))
    lossy = sum(g.lost >= MANY for g in found)
    report.add(
        WeightsPerTensor(
            CHECK,
            worst.node.name,
            tuple(g.node.name for g in found),
            total,
            worst.spread,
            worst.lost,
            lossy,
            sum(g.rounded for g in found),
        ),
        convolutions=[g.node.name for g in found],
        gains=lossy > 0,
        automatic=any(not g.rounded for g in found),
    )


def find_per_tensor(view: View, target: str) -> tuple[list[Granularity], int]:
    """Return the layers with one scale whose channels differ, and how many layers were looked at."""
    transposed = target_named(target).transposed_per_channel
    found: list[Granularity] = []
    looked = values = 0
    for node in view.nodes_with_weights:
        shape = view.weight_shape(node)
        if view.weights(node).dq is None or not shape or math.prod(shape) > MAX_LAYER:
            continue
        values += math.prod(shape)
        if values > MAX_VALUES:
            break
        looked += 1
        axis = weight_scale_axis(node, len(shape), transposed)
        granularity = None if axis is None else measure_granularity(view, node, axis)
        if granularity is not None and granularity.spread >= MIN_SPREAD:
            found.append(granularity)
    return found, looked


def measure_granularity(view: View, node: Node, axis: int) -> Granularity | None:
    """Return how the channels of a layer's weights differ; None unless one scale is for several channels."""
    weights = view.weights(node)
    first = weights.first_quantizer
    if first is None or not weights.constant or weights.before or weights.after:
        return None
    params = view.params(first)
    scale, zero = params.scale, params.zero_point
    if params.precision != Precision.INT8 or scale is None or scale.size != 1 or zero is None:
        return None
    proto = view.model.constant_proto(weights.source)
    if proto is None or proto.external_data or not params.scales or not params.scales.is_positive:
        return None
    values = view.model.constant(weights.source)
    if values is None or values.ndim < 2 or not values.size or values.shape[axis] < 2:
        return None
    stored = weights.q is None
    others = tuple(i for i in range(values.ndim) if i != axis)
    middle = float(zero[0]) if stored else 0.0
    highest, lowest = (f(values, axis=others).astype(np.float64) - middle for f in (np.max, np.min))
    largest = np.maximum(highest, -lowest)
    alive = largest[largest > 0]
    if not alive.size or not np.all(np.isfinite(largest)):
        return None
    return Granularity(node, alive / alive.max(), stored or _are_multiples(values, float(scale[0])))


def _are_multiples(values: npt.NDArray[Any], scale: float) -> bool:
    """Whether weights are integers times their scale: they were rounded before they were stored."""
    steps = values.reshape(-1)[:MAX_COMPARED].astype(np.float64) / scale
    return bool(np.all(np.abs(steps - np.rint(steps)) < _ON_GRID))

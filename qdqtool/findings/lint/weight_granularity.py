"""Check for weights with one scale for all output channels.

If all channels have one scale, channels with a small range lose precision. A channel loses two bits
if its largest weight is at most a quarter of the largest weight of the tensor. With one scale for
each output channel, no channel loses bits, and the engine is equally fast.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qdqtool.findings.report import FindingReport
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import weight_scale_axis
from qdqtool.ir.precision import Precision
from qdqtool.patterns.view import View
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.weights import WeightsPerTensor
from qdqtool.trt.targets import target_named

MAX_VALUES = 64_000_000  # maximum number of weights that are read from a network
MAX_LAYER_VALUES = 8_000_000  # a layer with more weights is not read
MAX_LOSSY_RANGE = 0.25  # a channel with at most this fraction of the range loses two bits
MIN_LOSSY_SHARE = 0.25  # minimum fraction of channels that lose two bits in a lossy layer
MIN_SPREAD = 1.05  # minimum `spread` for which one scale for each channel is an improvement
MAX_COMPARED = 100_000  # maximum number of weights that are checked to be multiples of the scale
_MAX_STEP_ERROR = 1e-3  # maximum distance of a weight from a multiple of the scale, in steps


class ChannelRanges(NamedTuple):
    """Ranges of the channels of a layer whose weights have one scale in total.

    Attributes:
        node: The layer.
        ratios: Range of each channel divided by the range of the tensor. Channels of zeros are left
            out.
        rounded: Whether the weights in the file are already rounded to the scale.
    """

    node: Node
    ratios: npt.NDArray[np.float64]
    rounded: bool

    @property
    def spread(self) -> float:
        """Largest range of a channel divided by the smallest range of a channel."""
        return float(1 / self.ratios.min())

    @property
    def lossy_share(self) -> float:
        """Fraction of the channels that lose two bits or more."""
        return float(np.mean(self.ratios <= MAX_LOSSY_RANGE))


def run(view: View, report: FindingReport) -> None:
    """Add one finding on all layers with one weight scale, if there are any.

    It is a warning if many channels of a layer lose two bits, else a note.
    """
    layers, total = find_scales_per_tensor(view, report.target)
    if not layers:
        return
    worst = max(layers, key=lambda g: (g.lossy_share, g.spread))
    lossy = sum(g.lossy_share >= MIN_LOSSY_SHARE for g in layers)
    report.add(
        WeightsPerTensor(
            MODEL_CHECK,
            worst.node.name,
            tuple(g.node.name for g in layers),
            total,
            worst.spread,
            worst.lossy_share,
            lossy,
            sum(g.rounded for g in layers),
        ),
        convolutions=[g.node.name for g in layers],
        gains=lossy > 0,
        automatic=any(not g.rounded for g in layers),
    )


def find_scales_per_tensor(view: View, target: str) -> tuple[list[ChannelRanges], int]:
    """Return layers with one scale for unequal channels, and the number of checked layers."""
    transposed = target_named(target).transposed_per_channel
    layers: list[ChannelRanges] = []
    measured: dict[tuple[object, ...], ChannelRanges | None] = {}  # layers may share weights
    count = values = 0
    for node in view.nodes_with_weights:
        shape, weights = view.weight_shape(node), view.weights(node)
        first = weights.first_quantizer
        if first is None or not shape or math.prod(shape) > MAX_LAYER_VALUES:
            continue
        values += math.prod(shape)
        if values > MAX_VALUES:
            break
        count += 1
        axis = weight_scale_axis(node, len(shape), transposed)
        if axis is None:
            continue
        key = (first.op, first.inputs, len(weights.after), axis)
        if key not in measured:
            measured[key] = measure_channel_ranges(view, node, axis)
        ranges = measured[key]
        if ranges is not None and ranges.spread >= MIN_SPREAD:
            layers.append(ranges._replace(node=node))
    return layers, count


def read_int8_weights(view: View, node: Node) -> npt.NDArray[Any] | None:
    """Return the stored weights of a layer.

    None if the weights are not constants in the model file, if other operators are between them and
    the layer, or if they are not quantized to INT8 with positive scales.
    """
    weights = view.weights(node)
    first = weights.first_quantizer
    if first is None or not weights.constant or weights.before or weights.after:
        return None
    params = view.params(first)
    if params.precision != Precision.INT8 or params.scales is None or not params.scales.is_positive:
        return None
    values = _read_inner_constant(view, weights.source)
    return None if values is None or not values.size else values


def _read_inner_constant(view: View, tensor: str) -> npt.NDArray[Any] | None:
    """Return a constant of the model file; None for external data, which is not read."""
    proto = view.model.constant_proto(tensor)
    if proto is None or proto.external_data:
        return None
    return view.model.constant(tensor)


def measure_channel_ranges(view: View, node: Node, axis: int) -> ChannelRanges | None:
    """Return the channel ranges of weights; None if unknown, or if each channel has a scale."""
    first = view.weights(node).first_quantizer
    if first is None:
        return None
    scale, zero = view.params(first).scale, view.params(first).zero_point
    if scale is None or zero is None or not scale.size == zero.size == 1:
        return None
    values = read_int8_weights(view, node)
    if values is None or values.ndim < 2 or values.shape[axis] < 2:
        return None
    stored = view.weights(node).q is None
    other_axes = tuple(i for i in range(values.ndim) if i != axis)
    middle = float(zero[0]) if stored else 0.0
    highest = values.max(axis=other_axes).astype(np.float64) - middle
    lowest = values.min(axis=other_axes).astype(np.float64) - middle
    largest = np.maximum(highest, -lowest)
    alive = largest[largest > 0]
    if not alive.size or not np.all(np.isfinite(largest)):
        return None
    return ChannelRanges(
        node, alive / alive.max(), stored or _are_multiples(values, float(scale[0]))
    )


def _are_multiples(values: npt.NDArray[Any], scale: float) -> bool:
    """Return whether weights are multiples of their scale, as rounded weights are.

    Only the first ``MAX_COMPARED`` weights are checked.
    """
    steps = values.reshape(-1)[:MAX_COMPARED].astype(np.float64) / scale
    return bool(np.all(np.abs(steps - np.rint(steps)) < _MAX_STEP_ERROR))

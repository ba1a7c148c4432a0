"""A model as a side of a comparison: Q/DQ in the file, and the prediction."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qdqtool.comparison.result import NodeSide, QuantizerScales, SideSummary
from qdqtool.findings.obstacles import describe_obstacles
from qdqtool.ir import qdq
from qdqtool.ir.branches import count_subgraphs
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import POOLINGS_AND_RESIZES, LayerKind, operator_of, rearranges
from qdqtool.ir.precision import Precision
from qdqtool.patterns.view import View
from qdqtool.trt.result import Prediction
from qdqtool.util.notes import Note
from qdqtool.util.text import format_ms, round_significant

if TYPE_CHECKING:
    from qdqtool.timing.results import TimeEstimate

# Maximum number of operators between a DQ and its consumer.
_MAX_MOVES = 8


@dataclass
class ModelSide:
    """A model as a side of a comparison.

    Attributes:
        view: The model.
        prediction: Prediction of the model; None if the other side is the model's build.
        title: Name of the model in the result.
        time: Estimated time of the model; None if unknown.
    """

    view: View
    prediction: Prediction | None
    title: str
    time: TimeEstimate | None = None

    @functools.cached_property
    def nodes(self) -> dict[int, NodeSide]:
        """The nodes with weights or with Q/DQ, by node index."""
        return _collect_nodes(self.view, self.prediction)

    def find_node(self, node: Node) -> NodeSide:
        """Return a node as this side shows it; without scales if it has no weights and no Q/DQ."""
        is_product = self.prediction is not None and node.name in self.prediction.float_products
        precision = Precision.FLOAT if is_product else None
        return self.nodes.get(node.index) or NodeSide(node.name, node.op, precision, data=False)


def _collect_nodes(view: View, prediction: Prediction | None) -> dict[int, NodeSide]:
    weighted = {n.index for n in view.nodes_with_weights}
    nodes: dict[int, NodeSide] = {}
    for node in view.model.ordered:
        has_dq = any(qdq.is_dq(view.model.producer(tensor)) for tensor in node.inputs)
        if not has_dq and node.index not in weighted:
            continue
        if not qdq.is_qdq(node) and node.output not in view.constants:
            nodes[node.index] = _read_node(view, node, node.index in weighted)
    if prediction is not None:
        _add_prediction(nodes, view, prediction)
        return nodes
    for index in weighted & nodes.keys():
        nodes[index].precision = _requested_precision(nodes[index])
    return nodes


def _requested_precision(node: NodeSide) -> Precision:
    if not node.data or node.weights is False:
        return Precision.FLOAT
    is_fp8 = node.scale is not None and node.scale.type == Precision.FP8
    return Precision.FP8 if is_fp8 else Precision.INT8


def _add_prediction(nodes: dict[int, NodeSide], view: View, prediction: Prediction) -> None:
    """Add the predicted types; a model that TensorRT rejects has no INT8 and FP8 layers."""
    rejected = prediction.rejected
    ms = {layer.name: layer.ms for layer in prediction.layers}
    operators = {n.name: n.op for n in view.model.nodes}
    products = set(prediction.float_products)
    for side in nodes.values():
        if side.name in products:
            side.precision = Precision.FLOAT
    for outcome in prediction.convolutions:
        if outcome.index not in nodes:
            continue
        side = nodes[outcome.index]
        if rejected:
            side.precision = Precision.FLOAT
            continue
        side.precision = outcome.precision
        side.inputs, side.output = list(outcome.inputs), outcome.output
        side.fused = [operators.get(name, name) for name in outcome.fused]
        side.layer = outcome.layer
        side.ms = ms.get(outcome.layer or outcome.name)
        if side.is_int8 and side.is_unsigned:
            side.precision = Precision.FLOAT


def _read_node(view: View, node: Node, is_weighted: bool) -> NodeSide:
    dq = _find_dequantizer(view, node.input(0))
    side = NodeSide(node.name, node.op, data=dq is not None, scale=read_scales(view, dq))
    has_constant_weights = is_weighted and view.weights(node).folded
    if has_constant_weights:
        weights = view.weights(node)
        side.weights = weights.dq is not None
        # The axis of a matrix product depends only on whether its weights are stored transposed, so
        # the axis is not compared.
        with_axis = operator_of(node).kind != LayerKind.MATRIX_MULTIPLY
        side.weights_scale = read_scales(view, weights.first_quantizer, with_axis)
    start = 2 if has_constant_weights else 1
    pairs = set() if dq is None else {0}
    for position, tensor in enumerate(node.inputs[start:], start):
        other = None if tensor in view.constants else _find_dequantizer(view, tensor)
        if other is None:
            continue
        pairs.add(position)
        scales = read_scales(view, other)
        if scales is not None:
            side.other_scales[position] = scales
    side.pairs = frozenset(pairs)
    if not is_weighted:
        side.data = side.data or bool(side.other_scales)
    return side


def _find_dequantizer(view: View, tensor: str) -> Node | None:
    """Return the DQ upstream of a tensor; None if another operator computes the values.

    Operators that move values, poolings and resizes may be between the DQ and the tensor.
    """
    producer = view.model.producer(tensor)
    for _ in range(_MAX_MOVES):
        if producer is None or not (rearranges(producer) or producer.op in POOLINGS_AND_RESIZES):
            break
        producer = view.model.producer(producer.input(0))
    return producer if qdq.is_dq(producer) else None


def read_scales(view: View, node: Node | None, with_axis: bool = True) -> QuantizerScales | None:
    """Return the scales of a Q or DQ; None if they are unknown."""
    if node is None:
        return None
    params = view.params(node)
    if params.scale is None or not params.scale.size:
        return None
    axis = view.axis(node) if with_axis and params.scale.size > 1 else None
    if axis is not None and axis < 0:
        axis += len(view.shape(node.input(0)) or ())
    return QuantizerScales(params.scale, axis, params.precision, _nonzero_points(params))


def _nonzero_points(params: qdq.QuantParams) -> tuple[int, ...]:
    zero = params.zero_point
    return tuple(np.ravel(zero).tolist()) if zero is not None and np.any(zero) else ()


def use_fp16_time(side: ModelSide, summary: SideSummary) -> list[Note]:
    """Use the time of a float model in FP16, if its file is FP32 and FP16 is faster.

    ``predict`` compares INT8 with the same time. The times of the layers and layout changes are
    removed, because they are times in FP32.

    Args:
        side: The float model, which is changed.
        summary: Totals of the model, which are changed.

    Returns:
        A note with both times; empty if the time is unchanged.
    """
    float_time = None if side.time is None else side.time.float_time
    if summary.ms is None or float_time is None or float_time.fp32_ms is None:
        return []
    summary.ms, summary.float_type = float_time.total_ms, float_time.precision
    summary.layouts = summary.layouts_ms = None
    for node in side.nodes.values():
        node.ms = None
    fp32_ms, ms = round_significant(float_time.fp32_ms), round_significant(summary.ms)
    text = (
        f"{summary.title} is stored in FP32 and would take {format_ms(float_time.fp32_ms)}. The "
        f"comparison uses the time of the network in {summary.float_type}, as predict does"
    )
    return [Note(text, code="float-time", file=summary.title, fp32_ms=fp32_ms, ms=ms)]


def summarize_model(side: ModelSide) -> SideSummary:
    """Return the totals of a model."""
    view, prediction = side.view, side.prediction
    weighted = [n for n in view.nodes_with_weights if n.output in view.varying]
    products = sum(operator_of(n).kind == LayerKind.MATRIX_MULTIPLY for n in weighted)
    summary = SideSummary(
        "model",
        side.title,
        qdq.is_quantized(view.model),
        convolutions=len(weighted),
        products=products,
        plain=len(weighted) - products,
        subgraphs=count_subgraphs(view.model),
    )
    if prediction is None:
        return summary
    # The prediction counts convolutions with UINT8 as INT8, so count the nodes instead.
    summary.count_int8(side.nodes.values())
    summary.convolutions = len(prediction.convolutions)
    summary.products = prediction.summary()["matrix_products"]
    summary.plain = sum(not c.is_product for c in prediction.convolutions)
    summary.target, summary.target_title = prediction.target, prediction.target_title
    summary.conversions = prediction.conversions
    summary.add_ranges(prediction)
    summary.compute_capabilities = prediction.compute_capabilities
    summary.obstacle = describe_obstacles(prediction.findings, view)
    summary.rejection = prediction.rejection
    time = prediction.time
    summary.float_types = prediction.float_types()
    is_open = summary.float_types == {Precision.FLOAT}
    if is_open and time is not None and time["float"] is not None:
        named = Precision.FP32 if time["fp32_layers"] else Precision(time["float"]["precision"])
        summary.float_types = frozenset({named})
    if side.time is not None and time is not None and not summary.rejected:
        summary.gpu, summary.layouts = time["gpu"], time["layouts"]
        if side.time.is_supported:
            summary.ms, summary.layouts_ms = side.time.total_ms, side.time.layouts_ms
            summary.gain = side.time.gain_range
    return summary

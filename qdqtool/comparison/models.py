"""What an ONNX file asks for at each node, and what the simulation makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qdqtool.comparison.result import NodeSide, Scales, Side
from qdqtool.findings.messages import obstacles
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node
from qdqtool.ir.operators import RESIZES, LayerKind, operator_of, rearranges
from qdqtool.patterns.view import View
from qdqtool.types import Precision, Prediction

_STEPS = 8  # operators that only move values, between a DQ and the node that it is for


@dataclass(slots=True)
class Asked:
    """A model with its prediction, as a side of a comparison.

    Attributes:
        view: The model.
        prediction: What the target makes of it; None for a model whose build is the other side.
        title: What to call it.
    """

    view: View
    prediction: Prediction | None
    title: str


def nodes_of(asked: Asked) -> dict[int, NodeSide]:
    """Node index to what the file asks for there, and what is predicted; for nodes with weights or with Q/DQ."""
    model = asked.view.model
    predicted = (
        {c.index: c for c in asked.prediction.convolutions} if asked.prediction is not None else {}
    )
    ms = (
        {layer.name: layer.ms for layer in asked.prediction.layers}
        if asked.prediction is not None
        else {}
    )
    ops = {n.name: n.op for n in model.nodes}
    weighted = {n.index for n in asked.view.weighted}
    found: dict[int, NodeSide] = {}
    for node in model.ordered:
        concerned = node.index in weighted or any(qdq.is_dq(model.producer(t)) for t in node.inputs)
        if not concerned or qdq.is_qdq(node) or node.output in asked.view.constants:
            continue
        side = _asked_of(asked.view, node, node.index in weighted)
        outcome = predicted.get(node.index)
        if outcome is not None:
            side.precision, side.inputs, side.output = (
                outcome.precision,
                list(outcome.inputs),
                outcome.output,
            )
            side.fused = [ops.get(name, name) for name in outcome.fused]
            side.layer = outcome.layer
            side.ms = ms.get(outcome.layer or outcome.name)
            if side.is_int8 and side.is_unsigned:
                side.precision = Precision.FLOAT
        elif asked.prediction is None and node.index in weighted:
            side.precision = (
                Precision.INT8 if side.data and side.weights is not False else Precision.FLOAT
            )
        found[node.index] = side
    return found


def _asked_of(view: View, node: Node, weighted: bool) -> NodeSide:
    side = NodeSide(node.name, node.op)
    dq = _dequantizer(view, node.input(0))
    side.data = dq is not None
    side.scale = scales_of(view, dq)
    if weighted:
        weights = view.weights(node)
        side.weights = weights.dq is not None if weights.folded else None
        side.weights_scale = (
            scales_of(
                view, weights.first_quantizer, operator_of(node).kind != LayerKind.MATRIX_MULTIPLY
            )
            if weights.folded
            else None
        )
    for position, tensor in enumerate(node.inputs):
        if position > 1 or (position == 1 and not (weighted and side.weights is not None)):
            scales = (
                scales_of(view, _dequantizer(view, tensor))
                if tensor not in view.constants
                else None
            )
            if scales is not None:
                side.other_scales[position] = scales
    if not weighted:
        side.data = side.data or bool(side.other_scales)
    return side


def _dequantizer(view: View, tensor: str) -> Node | None:
    """The DQ in front of an input, past operators that only move values."""
    maker = view.model.producer(tensor)
    for _ in range(_STEPS):
        if maker is None or not (rearranges(maker) or maker.op in RESIZES):
            break
        maker = view.model.producer(maker.input(0))
    return maker if qdq.is_dq(maker) else None


def scales_of(view: View, node: Node | None, axis: bool = True) -> Scales | None:
    """The scales of a Q or DQ; None where they are not known.

    ``axis`` says whether that of the channels is given; a Gemm's follows from how its weights are stored.
    """
    params = view.params(node) if node is not None else None
    if node is None or params is None or params.scale is None or not params.scale.size:
        return None
    zero = params.zero_point if params.zero_point is not None else ()
    channels = view.axis(node) if axis and params.scale.size > 1 else None
    if channels is not None and channels < 0:
        channels += len(view.shape(node.input(0)) or ())
    return Scales(
        params.scale,
        channels,
        params.precision,
        tuple(np.ravel(zero).tolist()) if np.any(zero) else (),
    )


def side_of(asked: Asked) -> Side:
    """The model as a whole."""
    prediction = asked.prediction
    weighted = [n for n in asked.view.weighted if n.output in asked.view.varying]
    side = Side("model", asked.title, qdq.is_quantized(asked.view.model), len(weighted))
    side.products = sum(operator_of(n).kind == LayerKind.MATRIX_MULTIPLY for n in weighted)
    side.plain = len(weighted) - side.products
    if prediction is not None:
        summary = prediction.summary()
        side.convolutions, side.int8 = summary["convolutions"] or 0, summary["int8"]
        side.int8_to_int8, side.conversions = summary["int8_to_int8"], summary["conversions"]
        side.products = summary["matrix_products"]
        side.plain = sum(not c.is_product for c in prediction.convolutions)
        side.target, side.obstacle = prediction.target, obstacles(prediction.findings)
        side.compute_capabilities = prediction.compute_capabilities
        if prediction.time is not None:
            side.ms, side.gpu = prediction.time["total_ms"], prediction.time["gpu"]
    return side

"""Rewrites of models: quantizers removed, Relus inserted, separate weights for each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from qdqtool.ir.bounds import find_bounds
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import INTEGER_RANGES
from qdqtool.ir.qdq import FLOATS, is_dq, is_q
from qdqtool.patterns.view import View, WeightSource


def remove_quantizers(
    model: Model,
    weights: bool = False,
    stored: Callable[[str, Iterable[int]], TensorProto] | None = None,
    constants: Mapping[str, TensorProto] | None = None,
) -> Model:
    """Remove the activation quantizers of a model, in place, and return the model.

    Weights remain quantized by default. The first pair of a uint8 input may have different scales,
    which divide the pixels by 255. A Mul with this factor replaces it, unless `stored` is set.

    Args:
        model: The model. It is changed.
        weights: Whether Q and DQ of float weights are removed as well.
        stored: Function of a name and dimensions that returns the constant to replace a DQ of
            stored integers. If set, all quantizers are removed, and so are Relus that
            :func:`insert_relu` inserted. By default DQs of stored integers remain.
        constants: Constants that replace DQs, by the DQ's output.
    """
    view, editor = View(model), Editor(model)
    for node in view.quantizers:
        if not node.input(0) or not node.output:
            continue
        constant = (constants or {}).get(node.output)
        if constant is None and stored is not None:
            constant = _float_constant(model, node, stored)
        if constant is not None:
            editor.replace(node, constant)
            continue
        source = _float_source(view, node, weights, remove_all=stored is not None)
        if source is not None:
            factor = None if stored is not None else _pair_factor(view, node)
            if factor is not None:
                value = editor.add_constant(f"{node.name}_factor", factor)
                source = editor.insert_node(node, "Mul", f"{node.name}_mul", [source, value])
            editor.bypass(node, source)
        producer = model.producer(node.input(0)) if stored is not None else None
        if producer is not None and producer.name.startswith(_inserted_relu_name(node)):
            editor.bypass(producer, producer.input(0))
    return editor.finish()


def clips_negative_values(view: View, q: Node) -> bool:
    """Return whether a Q clips negative values that its input may have.

    Such a Q acts as a Relu. The quantization tool of onnxruntime removes a Relu before such a Q.
    False for a Q of a constant or of a network input: calibration found no negative values in the
    input (pixels), and no Relu was removed.
    """
    params = view.params(q)
    first, _ = INTEGER_RANGES.get(params.precision, (None, None))
    if params.zero_point is None or not np.all(params.zero_point == first):
        return False
    if view.model.is_constant(q.input(0)) or q.input(0) in view.model.inputs:
        return False
    bounds = find_bounds(view.model).get(q.input(0))
    return bounds is None or bounds.low < 0


def insert_clipping_relus(model: Model) -> Model:
    """Insert a Relu before each Q that clips negative values, in place, and return the model."""
    view, editor = View(model), Editor(model)
    for q in view.activation_qs:
        if clips_negative_values(view, q):
            insert_relu(editor, q)
    return editor.finish()


def insert_relu(editor: Editor, q: Node) -> None:
    """Insert a Relu between a Q and its input, in place."""
    editor.set_input(q, 0, editor.insert_node(q, "Relu", _inserted_relu_name(q), [q.input(0)]))


def _inserted_relu_name(q: Node) -> str:
    return f"{q.name}_relu"


def _float_constant(
    model: Model, node: Node, stored: Callable[[str, Iterable[int]], TensorProto]
) -> TensorProto | None:
    constant = model.constant_proto(node.input(0)) if is_dq(node) else None
    if constant is None or constant.data_type in (*FLOATS, TensorProto.UNDEFINED):
        return None
    return stored(node.output, constant.dims)


def _pair_factor(view: View, dq: Node) -> npt.NDArray[Any] | None:
    """Return the factor by which the pair of a uint8 input multiplies it; None for another pair."""
    q = view.model.producer(dq.input(0))
    if q is None or not is_q(q) or not view.quantizes_uint8_input(q):
        return None
    before, after = (view.model.constant(node.input(1)) for node in (q, dq))
    if before is None or after is None or before.size != 1 or after.size != 1:
        return None
    factor = float(after.item()) / float(before.item()) if before.item() else math.nan
    is_one = not math.isfinite(factor) or math.isclose(factor, 1.0, rel_tol=1e-3)
    return None if is_one else np.asarray(factor, after.dtype)


def _float_source(view: View, node: Node, weights: bool, *, remove_all: bool) -> str | None:
    """Return the tensor that replaces a quantizer's output; None if the quantizer remains.

    A Q without its DQ remains unless all quantizers are removed.
    """
    q = view.model.producer(node.input(0)) if is_dq(node) else node
    if q is not None and is_q(q) and (weights or not view.is_weight(q)):
        return q.input(0) if remove_all or is_dq(node) else None
    return node.input(0) if remove_all else None


def unshare_weights(model: Model) -> Model:
    """Give each layer of a model its own quantized weights, in place, and return the model.

    Layers share their weights if a module is called several times.
    """
    view, editor = View(model), Editor(model)
    first_layers: dict[str, Node] = {}  # by the tensor with the weights
    for node in view.nodes_with_weights:
        weights = view.weights(node)
        if weights.dq is None or not weights.constant:
            continue
        value = model.constant(weights.source)
        is_private = all(len(model.consumers(n.output)) == 1 for n in weights.after)
        if value is None or not is_private:
            continue
        if first_layers.setdefault(weights.source, node) is not node:
            copy_weights(editor, node, weights, value)
    return editor.finish()


def copy_weights(
    editor: Editor, node: Node, weights: WeightSource, value: npt.NDArray[Any]
) -> None:
    """Give a node its own weights: copies of the constant, of Q and of DQ.

    Nodes that move the weights remain between the copies and the node. No other node may read their
    results.
    """
    tensor = editor.add_constant(f"{weights.source}_copy", value)
    for quantizer in (weights.q, weights.dq):
        if quantizer is not None:
            tensor = editor.insert_node(
                weights.after.top or node,
                quantizer.op,
                f"{quantizer.name}_copy",
                [tensor, *quantizer.inputs[1:]],
                dict(quantizer.attributes),
            )
    if weights.after:
        editor.set_input(weights.after.top or node, 0, tensor)
    else:
        editor.set_input(node, 1, tensor)

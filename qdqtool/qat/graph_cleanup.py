"""Simplification of exported graphs: fold constants, and merge Q/DQ pairs."""

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir import qdq
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import needs_own_dq
from qdqtool.patterns.rewrites import unshare_weights

_FOLDED = ("Constant", "Identity", "Cast", "Transpose", "Unsqueeze", "Slice")


def clean_up_export(
    raw: onnx.ModelProto, calls: dict[str, int]
) -> tuple[onnx.ModelProto, dict[str, list[int]]]:
    """Fold constants and merge equal Q/DQ pairs in a copy of an exported graph.

    Args:
        raw: The exported graph. It is not changed.
        calls: By name of a QuantizeLinear, the number of the quantizer call that it replaces.

    Returns:
        The simplified graph; and by name of a QuantizeLinear, the numbers of all quantizer calls
        that it replaces after pairs were merged. The first number is that of the node in `calls`.
    """
    model = transpose_weights(unshare_weights(fold_constants(Model(raw))))
    calls_by_tensor: dict[str, list[int]] = defaultdict(list)
    tensors = {n.name: n.input(0) for n in model.nodes if n.op == qdq.Q}
    for name, number in calls.items():
        calls_by_tensor[tensors.get(name, name)].append(number)
    numbers = {
        name: [own, *(c for c in calls_by_tensor[tensors.get(name, name)] if c != own)]
        for name, own in calls.items()
    }
    return merge_pairs(model).proto, numbers


def fold_constants(model: Model) -> Model:
    """Replace constant nodes, and nodes that convert or slice constants, by initializers."""
    editor = Editor(model)
    for tensor, value in _compute_constants(model).items():
        editor.redirect_consumers(tensor, editor.add_constant(f"{tensor}_value", value))
        if not editor.is_captured(tensor):
            editor.remove(model.producers[tensor])
    return editor.finish()


def _constant_inputs(
    model: Model, node: Node, values: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    inputs = {tensor: values.get(tensor, model.constant(tensor)) for tensor in node.inputs}
    constants = {tensor: value for tensor, value in inputs.items() if value is not None}
    return constants if len(constants) == len(inputs) else {}


def _compute_constants(model: Model) -> dict[str, npt.NDArray[Any]]:
    evaluator = ConstantEvaluator(model, sys.maxsize)
    values: dict[str, npt.NDArray[Any]] = {}
    for node in model.ordered:
        if node.op not in _FOLDED or node.domain != "" or model.is_output(node.output):
            continue
        constants = _constant_inputs(model, node, values)
        if constants:
            outputs = evaluator.evaluate_node(node, constants, sys.maxsize) or {}
            value = outputs.get(node.output)
        else:
            value = model.constant(node.output)
        if value is not None:
            values[node.output] = value
    return values


def transpose_weights(model: Model) -> Model:
    """Transpose constant weights, and remove the Transpose after their DequantizeLinear.

    TensorRT requires that the matrix product reads the output of the DequantizeLinear.
    """
    editor = Editor(model)
    for node in model.nodes:
        pair = qdq.find_pair(model, node.input(0)) if node.op == "Transpose" else None
        if pair is None or model.is_output(node.output) or editor.is_captured(node.output):
            continue
        dq, q = pair
        weights = None if q is None else model.constant(q.input(0))
        if q is None or weights is None or editor.is_captured(dq.output):
            continue
        if len(model.consumers(q.output)) == len(model.consumers(dq.output)) == 1:
            order = list(node.attributes.get("perm", range(weights.ndim)[::-1]))
            name = f"{q.input(0)}_transposed"
            editor.set_input(q, 0, editor.add_constant(name, np.transpose(weights, order)))
            for quantizer in (q, dq):
                _move_axis(editor.edit_proto(quantizer), order)
            editor.redirect_consumers(node.output, dq.output)
            editor.remove(node)
    return editor.finish()


def _move_axis(proto: onnx.NodeProto, order: list[int]) -> None:
    for attribute in proto.attribute:
        if attribute.name == "axis":
            attribute.i = order.index(attribute.i % len(order))


def merge_pairs(model: Model) -> Model:
    """Merge Q/DQ pairs that quantize the same tensor with the same scale, as TensorRT does.

    Operators that need a separate DequantizeLinear (:func:`qdqtool.ir.operators.needs_own_dq`) keep
    it.
    """
    editor = Editor(model)
    first_qs: dict[tuple[str, float, str], Node] = {}
    shared_dqs: dict[str, Node] = {}
    for q in model.ordered:
        dq = _single_dq(model, q)
        scale = qdq.read_params(model, q).single_scale if dq is not None else None
        if dq is None or scale is None or editor.is_captured(dq.output):
            continue
        precision = str(qdq.read_params(model, q).precision)
        first = first_qs.setdefault((q.input(0), scale, precision), q)
        if first is not q:
            editor.set_input(dq, 0, first.output)
            editor.remove(q)
        if not any(needs_own_dq(consumer) for consumer in model.consumers(dq.output)):
            shared = shared_dqs.setdefault(first.output, dq)
            if shared is not dq:
                editor.redirect_consumers(dq.output, shared.output)
                editor.remove(dq)
    return editor.finish()


def _single_dq(model: Model, q: Node) -> Node | None:
    """Return the DQ that is the only consumer of an activation's Q.

    Returns:
        None if `q` is not a Q of an activation, if it has other consumers, or if the output of the
        DQ is a network output.
    """
    if q.op != qdq.Q or model.is_constant(q.input(0)):
        return None
    consumers = model.consumers(q.output)
    if len(consumers) != 1 or consumers[0].op != qdq.DQ or model.is_output(consumers[0].output):
        return None
    return consumers[0]

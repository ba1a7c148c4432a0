"""What torch's export leaves to be tidied: constants that other nodes make, and Q/DQ pairs that say the same twice."""

from __future__ import annotations

import numpy as np
from onnx import helper

from qdqtool.model import qdq
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import needs_own_dq

_FOLDED = ("Identity", "Cast", "Transpose", "Unsqueeze", "Slice")


def fold_constants(model: Model) -> Model:
    """Constant nodes become initializers, and what moves or cuts constants (packed weights too) their value."""
    editor = Editor(model)
    values: dict[str, np.ndarray] = {}
    for node in model.ordered:
        if node.op == "Constant":
            value = model.constant(node.output)
        elif node.op in _FOLDED and node.domain == "":
            value = _folded(model, node, values)
        else:
            continue
        if value is None or model.is_output(node.output):
            continue
        values[node.output] = value
        editor.redirect(node.output, editor.constant(f"{node.output}_value", value))
        if not editor.is_captured(node.output):
            editor.remove(node)
    return editor.finish()


def _folded(model: Model, node: Node, values: dict[str, np.ndarray]) -> np.ndarray | None:
    source = model.constant(node.input(0))
    if source is None:
        source = values.get(node.input(0))
    if source is None or node.op == "Identity":
        return source
    if node.op == "Transpose":
        return np.ascontiguousarray(np.transpose(source, node.attributes.get("perm")))
    if node.op in ("Unsqueeze", "Slice"):
        given = [b for t in node.inputs[1:] if (b := values.get(t, model.constant(t))) is not None and b.size == 1]
        numbers = [int(b.reshape(-1)[0]) for b in given]
        if len(numbers) != len(node.inputs) - 1 or len(numbers) not in ((1,) if node.op == "Unsqueeze" else (3, 4)):
            return None
        if node.op == "Unsqueeze":
            return np.expand_dims(source, numbers[0])
        start, end, axis, *step = numbers
        return source[(slice(None),) * (axis % source.ndim) + (slice(start, end, *step),)]
    return source.astype(helper.tensor_dtype_to_np_dtype(int(node.attributes["to"])))


def transpose_weights(model: Model) -> Model:
    """A Transpose between a weight's DQ and a MatMul goes into the weights, so that the DQ is beside the product."""
    editor = Editor(model)
    for node in model.nodes:
        _transpose_weight(model, editor, node)
    return editor.finish()


def _transpose_weight(model: Model, editor: Editor, node: Node) -> None:
    dq = model.producer(node.input(0))
    q = model.producer(dq.input(0)) if dq is not None and dq.op == qdq.DQ else None
    if node.op != "Transpose" or dq is None or q is None or q.op != qdq.Q or len(model.readers(q.output)) != 1:
        return
    value = model.constant(q.input(0))
    if value is None or len(model.readers(dq.output)) != 1 or model.is_output(node.output):
        return
    if editor.is_captured(dq.output) or editor.is_captured(node.output):
        return
    perm = list(node.attributes.get("perm", range(value.ndim)[::-1]))
    editor.set_input(q, 0, editor.constant(f"{q.input(0)}_transposed", np.transpose(value, perm)))
    for pair in (q, dq):
        for attribute in editor.proto_of(pair).attribute:
            if attribute.name == "axis":
                attribute.i = perm.index(attribute.i % value.ndim)
    editor.redirect(node.output, dq.output)
    editor.remove(node)


def merge_pairs(model: Model) -> Model:
    """Readers of one tensor that quantize it with the same scale share one Q, as TensorRT would merge them.

    They share the DQ as well, but for operators that need one of their own, see
    :func:`qdqtool.model.operators.needs_own_dq`.
    """
    editor = Editor(model)
    kept: dict[tuple[str, float, bytes], Node] = {}
    shared: dict[str, Node] = {}
    for q in model.ordered:
        if q.op != qdq.Q or model.is_constant(q.input(0)):
            continue
        params = qdq.read_params(model, q)
        dqs = model.readers(q.output)
        if params.scale is None or params.scale.size != 1 or len(dqs) != 1 or dqs[0].op != qdq.DQ:
            continue
        dq = dqs[0]
        if model.is_output(dq.output) or editor.is_captured(dq.output):
            continue
        first = kept.setdefault((q.input(0), float(params.scale[0]), bytes(str(params.precision), "ascii")), q)
        if first is not q:
            editor.set_input(dq, 0, first.output)
            editor.remove(q)
        if not any(needs_own_dq(r) for r in model.readers(dq.output)):
            common = shared.setdefault(first.output, dq)
            if common is not dq:
                editor.redirect(dq.output, common.output)
                editor.remove(dq)
    return editor.finish()

"""Fixes that remove, move or add Q/DQ pairs whose scale is known already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from qdqtool import qdq
from qdqtool.fixing.site import Site
from qdqtool.fixing.weights import dequantized
from qdqtool.graph import Node
from qdqtool.lint.heads import head_of, last_convolutions
from qdqtool.lint.structure import both_sides, quantized_gate, shared_residuals
from qdqtool.onnxgraph.editor import Editor
from qdqtool.onnxgraph.flow import boundary, is_sum
from qdqtool.onnxgraph.view import View
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import is_activation, of, passage
from qdqtool.trt.targets import Target


def _dqs(view: View, q: Node) -> list[Node]:
    return [n for n in view.model.readers(q.output) if qdq.is_dq(n)]


def inside_activations(view: View, target: Target) -> list[Site]:
    """SILU-INNER-Q and ACT-INNER-Q: the pair goes behind the activation, or away where one stands there already."""
    sites: list[Site] = []
    for conv in view.weighted:
        edge = boundary(view, conv)
        if edge.inner is not None:
            sites.append(_inner(view, edge.inner))
        for gate, q in _gates(view, edge.tensor, edge.inner):
            what = f"{q.name} removed from between {gate.name} and its Mul"
            sites.append(Site("SILU-INNER-Q", q.name, what, _bypass(view, q)))
    return sites


def _gates(view: View, tensor: str, inner: Node | None) -> list[tuple[Node, Node]]:
    """Quantized gates of a SiLU, of the tensor itself and behind the inner pair."""
    tensors = [tensor]
    if inner is not None:
        tensors += [dq.output for dq in _dqs(view, inner)]
    found = [quantized_gate(view, tensors)]
    return [f for f in found if f is not None]


def _inner(view: View, q: Node) -> Site:
    dqs = _dqs(view, q)
    ends = [n for dq in dqs for n in view.model.readers(dq.output)]
    gates = [n for n in ends if is_activation(n)]
    muls = [n for n in ends if of(n).operation == "PROD"]
    code = "SILU-INNER-Q" if muls else "ACT-INNER-Q"
    last = muls[0] if muls else gates[0]
    readers = view.model.readers(last.output)
    if (readers and all(qdq.is_q(n) for n in readers)) or view.model.is_output(last.output) or not readers:
        return Site(code, q.name, f"{q.name} and its DequantizeLinear removed", _bypass(view, q))

    def move(editor: Editor) -> None:
        if not editor.bypass(q, dqs):
            return
        dq = dqs[0]
        first = min(readers, key=lambda n: n.index)
        integers = editor.insert(first, qdq.Q, f"{q.name}_moved", [last.output, *q.inputs[1:]], dict(q.attributes))
        floats = editor.insert(first, qdq.DQ, f"{dq.name}_moved", [integers, *dq.inputs[1:]], dict(dq.attributes))
        editor.redirect(last.output, floats, readers)

    return Site(code, q.name, f"{q.name} moved behind {last.name}", move)


def _bypass(view: View, q: Node) -> Callable[[Editor], None]:
    dqs = _dqs(view, q)

    def apply(editor: Editor) -> None:
        editor.bypass(q, dqs)

    return apply


def convolution_side(view: View, target: Target) -> list[Site]:
    """ADD-BOTH: the pair on the convolution's side of a residual Add goes."""
    sites: list[Site] = []
    for add in view.model.nodes:
        found = both_sides(view, add) if is_sum(view, add) and len(add.inputs) == 2 else None
        if found is not None:
            q = found.q
            what = f"{q.name} and its DequantizeLinear removed between {found.conv.name} and {add.name}"
            sites.append(Site("ADD-BOTH", add.name, what, _bypass(view, q)))
    return sites


def residuals(view: View, target: Target) -> list[Site]:
    """SKIP-FLOAT, POOL-MIXED, ADD-ACT: an Add reads its residual through the pair that the tensor has already."""
    sites: list[Site] = []
    for add in view.model.nodes:
        if not is_sum(view, add) or len(add.inputs) != 2:
            continue
        alone, wanted = shared_residuals(view, add)
        if not wanted:
            continue
        code = "SKIP-FLOAT" if any(alone) else "ADD-ACT"

        def apply(editor: Editor, add: Node = add, wanted: list[tuple[int, Node]] = wanted) -> None:
            for position, q in wanted:
                dq = _dqs(view, q)[0]
                inputs = [q.output, *dq.inputs[1:]]
                output = editor.insert(add, qdq.DQ, f"{add.name}/residual_{qdq.DQ}", inputs, dict(dq.attributes))
                editor.set_input(add, position, output)

        told = ", ".join(f"'{add.input(p)}' through {q.name}" for p, q in wanted)
        sites.append(Site(code, add.name, f"{add.name} reads {told}", apply))
    return sites


def behind_pads(view: View, target: Target) -> list[Site]:
    """PAD-SPLIT: the pair moves in front of a Pad that a Q passes (of zeros, or one that copies)."""
    sites: list[Site] = []
    for conv in view.weighted:
        found = qdq.source_of_dq(view.model, conv.input(0))
        if found is None or found[1] is None:
            continue
        dq, q = found[0], found[1]
        pad = view.model.producer(q.input(0))
        if pad is None or of(pad).kind != LayerKind.PADDING or passage(view.model, pad) is None:
            continue
        if any(len(view.model.readers(t)) != 1 or view.model.is_output(t) for t in (pad.output, q.output, dq.output)):
            continue

        def apply(editor: Editor, conv: Node = conv, pad: Node = pad, q: Node = q, dq: Node = dq) -> None:
            integers = editor.insert(pad, qdq.Q, f"{q.name}_moved", [pad.input(0), *q.inputs[1:]], dict(q.attributes))
            floats = editor.insert(pad, qdq.DQ, f"{dq.name}_moved", [integers, *dq.inputs[1:]], dict(dq.attributes))
            editor.set_input(pad, 0, floats)
            editor.set_input(conv, 0, pad.output)
            editor.remove(q)
            editor.remove(dq)

        sites.append(Site("PAD-SPLIT", conv.name, f"{q.name} moved in front of {pad.name}", apply))
    return sites


def heads(view: View, target: Target) -> list[Site]:
    """HEAD-QUANT and HEAD-CONCAT: float box outputs and DFL (all last convolutions without one), no pair behind."""
    sites: list[Site] = []
    last = last_convolutions(view)
    if not last:
        return sites
    head = head_of(view)
    ends = head.boxes | head.dfl if head.dfl else {n.index for n in last}
    for conv in (n for n in view.weighted if n.index in ends):
        data, weights = qdq.source_of_dq(view.model, conv.input(0)), view.weights(conv)
        if data is None or data[1] is None or weights.dq is None or weights.after:
            continue
        stored = dequantized(view, weights.dq) if weights.q is None else None
        if weights.q is None and stored is None:
            continue

        def apply(
            editor: Editor, conv: Node = conv, x: str = data[1].input(0), w: str = weights.source,
            stored: npt.NDArray[Any] | None = stored,
        ) -> None:
            editor.set_input(conv, 0, x)
            editor.set_input(conv, 1, w if stored is None else editor.constant(f"{w}_float", stored))

        sites.append(Site("HEAD-QUANT", conv.name, f"{conv.name} reads floats", apply))
    for q in view.activation_qs:
        if q.index not in view.feeds_weighted and _dqs(view, q):
            what = f"{q.name} and its DequantizeLinear removed behind the head"
            sites.append(Site("HEAD-CONCAT", q.name, what, _bypass(view, q)))
    return sites

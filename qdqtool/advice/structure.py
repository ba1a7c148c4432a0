"""Placements that keep a fusion from happening, whatever the convolution's own precision is."""

from __future__ import annotations

from qdqtool import qdq
from qdqtool.advice.flow import ACTIVATIONS, boundary, is_sum, layer_of
from qdqtool.advice.report import Report, number, scalar
from qdqtool.advice.view import View
from qdqtool.graph import Node


def run(view: View, report: Report, quantized: set[int]) -> None:
    """Adds findings about pairs inside activations, on both inputs of an Add, and behind a Pad.

    Args:
        view: The model.
        report: Where the findings go.
        quantized: Indices of the convolutions that run in INT8.
    """
    for conv in view.weighted:
        if conv.index in quantized:
            _inside_activation(view, report, conv)
            _behind_pad(view, report, conv)
    for node in view.model.nodes:
        if is_sum(view, node) and len(node.inputs) == 2:
            _both_inputs(view, report, node, quantized)


def _inside_activation(view: View, report: Report, conv: Node) -> None:
    edge = boundary(view, conv)
    if edge.inner is not None:
        q = edge.inner
        ends = [n for dq in view.model.readers(q.output) for n in view.model.readers(dq.output)]
        act = next((n for n in ends if n.op in ACTIVATIONS), None)
        silu = any(n.op == "Mul" for n in ends)
        code = "SILU-INNER-Q" if silu else "ACT-INNER-Q"
        what = "SiLU" if silu else (act.name if act is not None else "its activation")
        report.add(
            code, q.name, f"{q.name} stands between {conv.name} and {what}.", convolutions=[conv.name],
            values=view.values(edge.tensor),
        )
        return
    gate = _quantized_gate(view, edge.tensor)
    if gate is not None:
        sigmoid, q = gate
        report.add(
            "SILU-INNER-Q", q.name, f"{q.name} stands between {sigmoid.name} and the Mul of {conv.name}'s SiLU.",
            convolutions=[conv.name], values=view.values(edge.tensor),
        )


def _quantized_gate(view: View, tensor: str) -> tuple[Node, Node] | None:
    """The Sigmoid of a SiLU and the Q between it and the Mul."""
    readers = view.model.readers(tensor)
    for gate in readers:
        if gate.op not in ("Sigmoid", "HardSigmoid"):
            continue
        q = next((n for n in view.model.readers(gate.output) if qdq.is_q(n)), None)
        if q is None:
            continue
        muls = {n.index for dq in view.model.readers(q.output) for n in view.model.readers(dq.output) if n.op == "Mul"}
        if any(n.index in muls for n in readers):
            return gate, q
    return None


def _both_inputs(view: View, report: Report, add: Node, quantized: set[int]) -> None:
    """A pair on the convolution's side of a residual Add, where the Add could have joined the convolution."""
    sides = [qdq.source_of_dq(view.model, t) for t in add.inputs]
    if any(s is None for s in sides):
        return
    for side in sides:
        assert side is not None
        q = side[1]
        if q is None or q.input(0) in view.constants:
            continue
        conv = layer_of(view, q.input(0))
        if conv is None or conv.index not in quantized or len(view.model.readers(q.input(0))) != 1:
            continue
        if boundary(view, conv).tensor != q.input(0) or _reads_only(view, q, add) is None:
            continue
        if boundary(view, conv).activation is not None:
            continue  # the Add is a layer of its own anyway, and both pairs let it run in INT8
        other = next(s for s in sides if s is not side)
        assert other is not None
        scales = " and ".join(number(scalar(view.params(s[0]))) for s in (side, other))
        report.add(
            "ADD-BOTH", add.name,
            f"{add.name} has Q/DQ on both inputs (scales {scales}): {conv.name} takes {q.name}, so the Add is a layer "
            "of its own.",
            f"Remove {q.name} and its DequantizeLinear: qdqtool fix --only ADD-BOTH.",
            [conv.name], view.values(q.input(0)),
        )
        return


def _reads_only(view: View, q: Node, add: Node) -> Node | None:
    """The one DQ of a Q, when the Add alone reads it."""
    dqs = view.model.readers(q.output)
    if len(dqs) != 1 or not qdq.is_dq(dqs[0]):
        return None
    readers = view.model.readers(dqs[0].output)
    return dqs[0] if len(readers) == 1 and readers[0] is add else None


def _behind_pad(view: View, report: Report, conv: Node) -> None:
    found = qdq.source_of_dq(view.model, conv.input(0))
    if found is None or found[1] is None:
        return
    pad = view.model.producer(found[1].input(0))
    if pad is not None and pad.op == "Pad":
        report.add(
            "PAD-SPLIT", conv.name, f"{found[1].name} stands between {pad.name} and {conv.name}.",
            convolutions=[conv.name],
        )

"""Placements that keep a fusion from happening, whatever the convolution's own precision is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool import qdq
from qdqtool.explain.report import Report
from qdqtool.finding_codes import FindingCode
from qdqtool.graph import Node
from qdqtool.onnxgraph.flow import boundary, is_sum, layer_of, uses
from qdqtool.onnxgraph.view import View
from qdqtool.operators import ACTIVATIONS, GATES
from qdqtool.types import Finding


def run(view: View, report: Report) -> None:
    """Adds findings about pairs inside activations and behind a Pad, around convolutions whose inputs are quantized."""
    for conv in view.weighted:
        if is_quantized(view, conv):
            _inside_activation(view, report, conv)
            _behind_pad(view, report, conv)


def not_automatic(view: View, findings: Sequence[Finding]) -> None:
    """Takes the mark from findings of residual Adds whose fix would need a scale that no Q has."""
    sums = {n.name: n for n in view.model.nodes if is_sum(view, n)}
    for finding in findings:
        if finding.code == "SKIP-FLOAT" and finding.automatic:
            add = sums.get(finding.node)
            finding.automatic = add is not None and bool(shared_residuals(view, add)[1])


def is_quantized(view: View, conv: Node) -> bool:
    """Whether data and weights of a convolution come from a DQ."""
    return qdq.source_of_dq(view.model, conv.input(0)) is not None and view.weights(conv).dq is not None


def _inside_activation(view: View, report: Report, conv: Node) -> None:
    edge = boundary(view, conv)
    if edge.inner is not None:
        q = edge.inner
        ends = [n for dq in view.model.readers(q.output) for n in view.model.readers(dq.output)]
        act = next((n for n in ends if n.op in ACTIVATIONS), None)
        silu = any(n.op == "Mul" for n in ends)
        code: FindingCode = "SILU-INNER-Q" if silu else "ACT-INNER-Q"
        what = "SiLU" if silu else (act.name if act is not None else "its activation")
        report.add(
            code, q.name, f"{q.name} stands between {conv.name} and {what}.", convolutions=[conv.name],
            values=view.values(edge.tensor),
        )
        return
    gate = quantized_gate(view, [edge.tensor])
    if gate is not None:
        sigmoid, q = gate
        report.add(
            "SILU-INNER-Q", q.name, f"{q.name} stands between {sigmoid.name} and the Mul of {conv.name}'s SiLU.",
            convolutions=[conv.name], values=view.values(edge.tensor),
        )


def quantized_gate(view: View, tensors: list[str]) -> tuple[Node, Node] | None:
    """The Sigmoid of a SiLU and the Q between it and the Mul.

    Args:
        view: The model.
        tensors: The tensor that SiLU is made of, under each name that it has (behind several DQs).
    """
    readers = [n for t in tensors for n in view.model.readers(t)]
    for gate in readers:
        if gate.op not in GATES:
            continue
        q = next((n for n in view.model.readers(gate.output) if qdq.is_q(n)), None)
        if q is None:
            continue
        muls = {n.index for dq in view.model.readers(q.output) for n in view.model.readers(dq.output) if n.op == "Mul"}
        if any(n.index in muls for n in readers):
            return gate, q
    return None


@dataclass(frozen=True, slots=True)
class BothSides:
    """A residual Add with Q/DQ on both inputs, which could have joined ``conv``.

    Attributes:
        conv: The convolution behind ``q``.
        q: The quantizer on the convolution's side.
        dq: Its DequantizeLinear, which the Add alone reads.
        other: The DequantizeLinear on the residual side.
    """

    conv: Node
    q: Node
    dq: Node
    other: Node


def both_sides(view: View, add: Node) -> BothSides | None:
    """Q/DQ on both inputs of a residual Add, one of them alone behind a convolution; None otherwise.

    Where an activation stands between convolution and Add, reports differ on whether the three become one layer. Both
    pairs let the Add run in INT8 whichever holds, one alone leaves conversions where they do not: that is no defect.
    """
    sides = [qdq.source_of_dq(view.model, t) for t in add.inputs]
    for position, side in enumerate(sides):
        other = sides[1 - position]
        if side is None or other is None or side[1] is None:
            continue
        dq, q = side[0], side[1]
        conv = layer_of(view, q.input(0))
        if conv is None or len(view.model.readers(q.input(0))) != 1 or len(view.model.readers(q.output)) != 1:
            continue
        if len(view.model.readers(dq.output)) != 1 or view.model.is_output(q.input(0)):
            continue
        edge = boundary(view, conv)
        if edge.tensor == q.input(0) and edge.activation is None:
            return BothSides(conv, q, dq, other[0])
    return None


def shared_residuals(view: View, add: Node) -> tuple[list[bool], list[tuple[int, Node]]]:
    """Whether each input of an Add is a convolution's bare result, and the float inputs whose Q's pair it can read.

    There are none of these where a float input is left that no Q reads: its scale would have to be calibrated.
    """
    wanted: list[tuple[int, Node]] = []
    alone = [_is_convolution_side(view, t) for t in add.inputs]
    for position, tensor in enumerate(add.inputs):
        if alone[position] or qdq.source_of_dq(view.model, tensor) is not None:
            continue
        q = _quantizer_of(view, tensor)
        if q is None:
            return alone, []
        wanted.append((position, q))
    return alone, wanted


def _quantizer_of(view: View, tensor: str) -> Node | None:
    """A per-tensor Q that already reads a tensor, with a DQ behind."""
    for use in uses(view, tensor):
        q = use.node
        if use.kind == "q" and q is not None and not use.path and not view.params(q).per_channel:
            return q if any(qdq.is_dq(n) for n in view.model.readers(q.output)) else None
    return None


def _is_convolution_side(view: View, tensor: str) -> bool:
    """Whether an input of an Add is the bare result of a convolution that nothing else reads."""
    conv = layer_of(view, tensor)
    if conv is None or len(view.model.readers(tensor)) != 1 or view.model.is_output(tensor):
        return False
    edge = boundary(view, conv)
    return edge.tensor == tensor and (edge.activation is None or view.add_behind_activation)


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

"""Placements that keep a fusion from happening, whatever the convolution's own precision is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qdqtool.explain.report import Report
from qdqtool.model import qdq
from qdqtool.model.graph import Node
from qdqtool.model.layernorm import NORMALIZES, layer_norms
from qdqtool.model.operators import ACTIVATIONS, GATES, is_activation, of, rearranges
from qdqtool.model.view import View, adds_computed, uses
from qdqtool.trt.faults import CHECK, BehindPad, InsideActivation, QuantizedStream
from qdqtool.trt.refusals import ResidualFloat
from qdqtool.types import Finding

Fused = Mapping[str, Sequence[str]]


def run(view: View, report: Report, fused: Fused) -> None:
    """Adds findings about pairs inside activations and behind a Pad, around convolutions whose inputs are quantized.

    Args:
        view: The model.
        report: Where findings go.
        fused: The nodes that the layer of each convolution took in, as the simulation says.
    """
    for conv in view.weighted:
        if is_quantized(view, conv):
            _inside_activation(view, report, conv, fused.get(conv.name, ()))
            _behind_pad(view, report, conv)
    _streams(view, report)


def _streams(view: View, report: Report) -> None:
    """Sums with Q/DQ whose result a layer normalization reads: the residual stream of a transformer."""
    norms = {n.input(0): n.name for n in view.model.nodes if n.op in NORMALIZES}
    norms |= {p.tensor: p.nodes[0].name for p in layer_norms(view.model)}
    for tensor, norm in norms.items():
        add = view.model.producer(tensor)
        while add is not None and (qdq.is_qdq(add) or rearranges(add)) and add.input(0):
            add = view.model.producer(add.input(0))
        if add is None or not adds_computed(view, add):
            continue
        pairs = [found[0].name for t in add.inputs if (found := qdq.source_of_dq(view.model, t)) is not None]
        if pairs:
            report.add("RESIDUAL-STREAM", QuantizedStream(CHECK, add.name, tuple(pairs), norm),
                       values=view.values(add.output))


def not_automatic(view: View, findings: Sequence[Finding]) -> None:
    """Takes the mark from findings of residual Adds whose fix would need a scale that no Q has."""
    sums = {n.name: n for n in view.model.nodes if adds_computed(view, n)}
    for finding in findings:
        if finding.code == "SKIP-FLOAT" and finding.automatic:
            add = sums.get(finding.node)
            residual = next((c.refusal.tensor for c in finding.causes if isinstance(c.refusal, ResidualFloat)), None)
            finding.automatic = add is not None and bool(shared_residuals(view, add, residual))


def is_quantized(view: View, conv: Node) -> bool:
    """Whether data and weights of a convolution come from a DQ."""
    return qdq.source_of_dq(view.model, conv.input(0)) is not None and view.weights(conv).dq is not None


def _inside_activation(view: View, report: Report, conv: Node, fused: Sequence[str]) -> None:
    tensor = conv.output
    for node in map(view.model.node, fused):
        if node.op in ACTIVATIONS or adds_computed(view, node) or tensor not in node.inputs:
            break
        tensor = node.output
    readers = view.model.readers(tensor)
    alone = len(readers) == 1 and qdq.is_q(readers[0]) and not view.model.is_output(tensor)
    found = _inner(view, conv, readers[0]) if alone else None
    gate = quantized_gate(view, [tensor]) if found is None else None
    if gate is not None:
        sigmoid, q = gate
        found = InsideActivation(CHECK, q.name, conv.name, sigmoid.name, True, True)
    if found is not None:
        report.add("SILU-INNER-Q" if found.silu else "ACT-INNER-Q", found, convolutions=[conv.name],
                   values=view.values(tensor))


def _inner(view: View, conv: Node, q: Node) -> InsideActivation | None:
    """A Q right behind a convolution whose DQs feed nothing but an activation."""
    ends = [n for dq in view.model.readers(q.output) if qdq.is_dq(dq) for n in view.model.readers(dq.output)]
    gates = [n for n in ends if is_activation(n)]
    others = [n for n in ends if not is_activation(n)]
    if not gates or not all(of(n).operation == "PROD" and _reads_gate(view, n, gates) for n in others):
        return None
    activation = next((n.name for n in ends if n.op in ACTIVATIONS), "")
    return InsideActivation(CHECK, q.name, conv.name, activation, any(n.op == "Mul" for n in ends))


def _reads_gate(view: View, mul: Node, gates: list[Node]) -> bool:
    """Whether a Mul multiplies with one of the gates, directly or through a Q/DQ pair."""
    outputs = {g.output for g in gates}
    for tensor in mul.inputs:
        found = qdq.source_of_dq(view.model, tensor)
        source = found[1].input(0) if found is not None and found[1] is not None else tensor
        if source in outputs:
            return True
    return False


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


def shared_residuals(view: View, add: Node, residual: str | None) -> list[tuple[int, Node]]:
    """The float inputs of an Add with a Q whose pair it can read, by position.

    Empty where a float input is left that no Q reads: its scale would have to be calibrated.

    Args:
        view: The model.
        add: The Add.
        residual: Its residual tensor, where a convolution can take in the other one as it is.
    """
    wanted: list[tuple[int, Node]] = []
    for position, tensor in enumerate(add.inputs):
        if (residual is not None and tensor != residual) or qdq.source_of_dq(view.model, tensor) is not None:
            continue
        q = _quantizer_of(view, tensor)
        if q is None:
            return []
        wanted.append((position, q))
    return wanted


def _quantizer_of(view: View, tensor: str) -> Node | None:
    """A per-tensor Q that already reads a tensor, with a DQ behind."""
    for use in uses(view, tensor):
        q = use.node
        if use.kind == "q" and q is not None and not use.path and not view.params(q).per_channel:
            return q if any(qdq.is_dq(n) for n in view.model.readers(q.output)) else None
    return None


def _behind_pad(view: View, report: Report, conv: Node) -> None:
    found = qdq.source_of_dq(view.model, conv.input(0))
    if found is None or found[1] is None:
        return
    pad = view.model.producer(found[1].input(0))
    if pad is not None and pad.op == "Pad":
        report.add("PAD-SPLIT", BehindPad(CHECK, conv.name, found[1].name, pad.name), convolutions=[conv.name])

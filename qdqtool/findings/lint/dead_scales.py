"""Scales that make one value of every possible value of a tensor, which needs no data to prove."""

from qdqtool.findings.report import FindingReport
from qdqtool.ir.bounds import find_bounds, find_concat_parts, find_constant_value, read_scalars
from qdqtool.ir.graph import Node
from qdqtool.patterns.view import View
from qdqtool.reasons.faults import CHECK, DeadPart, ScaleDead
from qdqtool.types import Severity

MAX_PARTS = 8  # of one quantizer that a finding holds


def run(view: View, report: FindingReport) -> None:
    """Add a finding for each Q that makes one value of all it reads, or of a part that a Concat joins.

    Where boxes and scores of a detector share the scale, the finding about the head reports it.
    """
    heads = {
        f.node for f in report.findings if f.code == "HEAD-CONCAT" and f.severity == Severity.ERROR
    }
    for q in view.activation_qs:
        found = find_dead_parts(view, q)
        if found is not None and (found.whole or q.name not in heads):
            unread = not found.whole and q.index not in view.feeds_weighted
            report.add(
                found,
                convolutions=view.consuming_convolutions(q),
                automatic=unread or found.reach is not None,
            )


def find_dead_parts(view: View, q: Node) -> ScaleDead | None:
    """Return the parts of which a Q makes one value; None if there are none."""
    params, known = view.params(q), find_bounds(view.model)
    scalars = read_scalars(params)
    if scalars is None:
        return None
    for tensors in ([q.input(0)], find_concat_parts(view.model, q.input(0))):
        parts = tuple(
            DeadPart(tensor, known[tensor].low, known[tensor].high, *made_by, value)
            for tensor in tensors
            if (value := find_constant_value(params, known.get(tensor))) is not None
            and (made_by := (known[tensor].node, known[tensor].op))
        )
        if parts:
            return ScaleDead(CHECK, q.name, *scalars, parts[:MAX_PARTS], tensors == [q.input(0)])
    return None

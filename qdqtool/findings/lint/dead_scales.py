"""Check, without data, for scales that map all possible values of a tensor to one integer."""

from qdqtool.findings.report import FindingReport
from qdqtool.ir.bounds import find_bounds, find_concat_parts, find_constant_value, read_scalars
from qdqtool.ir.graph import Node
from qdqtool.patterns.view import View
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.finding import Severity
from qdqtool.reasons.scales import DeadTensor, ScaleDead

MAX_PARTS = 8  # maximum number of parts of a quantizer's input that a finding lists


def run(view: View, report: FindingReport) -> None:
    """Add a finding for each Q that maps its whole input, or a part of a Concat, to one value.

    A Q with an error HEAD-CONCAT, because boxes and scores of a detector share its scale, is left
    out if only a part of its input becomes one value.
    """
    reported_heads = {
        f.node for f in report.findings if f.code == "HEAD-CONCAT" and f.severity == Severity.ERROR
    }
    for q in view.activation_qs:
        dead = find_dead_parts(view, q)
        if dead is not None and (dead.whole or q.name not in reported_heads):
            unread = not dead.whole and q.index not in view.feeds_weighted
            report.add(
                dead,
                convolutions=view.consuming_convolutions(q),
                automatic=unread or dead.largest_magnitude is not None,
            )


def find_dead_parts(view: View, q: Node) -> ScaleDead | None:
    """Return the fault of a Q that maps its input, or parts of its input, to one value.

    None if the Q has no such fault.
    """
    params, bounds = view.params(q), find_bounds(view.model)
    scalars = read_scalars(params)
    if scalars is None:
        return None
    for tensors in ([q.input(0)], find_concat_parts(view.model, q.input(0))):
        parts = tuple(
            DeadTensor(tensor, bounds[tensor].low, bounds[tensor].high, *made_by, value)
            for tensor in tensors
            if (value := find_constant_value(params, bounds.get(tensor))) is not None
            and (made_by := (bounds[tensor].node, bounds[tensor].op))
        )
        if parts:
            return ScaleDead(
                MODEL_CHECK, q.name, *scalars, parts[:MAX_PARTS], tensors == [q.input(0)]
            )
    return None

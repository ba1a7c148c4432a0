"""Check, without data, for scales that map all possible values of a tensor to one integer."""

from collections.abc import Mapping, Sequence

from qdqtool.findings.report import FindingReport
from qdqtool.ir.bounds import Bounds, find_bounds, find_concat_parts, find_constant_value
from qdqtool.ir.graph import Node
from qdqtool.ir.qdq import QuantParams
from qdqtool.patterns.view import View
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.finding import Severity
from qdqtool.reasons.scales import DeadTensor, ScaleDead

MAX_PARTS = 8  # maximum number of parts of a quantizer's input that a finding lists


def run(view: View, report: FindingReport) -> None:
    """Add a finding for each Q that maps its whole input, or a part of a Concat, to one value.

    A Q is left out if only a part of its input becomes one value, and if the Q has an error
    HEAD-CONCAT. This error already reports that boxes and scores of a detector share the scale.
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
    bounds, params, source = find_bounds(view.model), view.params(q), q.input(0)
    is_whole = True
    dead = _list_dead_tensors(params, [source], bounds)
    if not dead:
        is_whole = False
        dead = _list_dead_tensors(params, find_concat_parts(view.model, source), bounds)
    if not dead or params.scalars is None:
        return None
    return ScaleDead(MODEL_CHECK, q.name, *params.scalars, tuple(dead[:MAX_PARTS]), is_whole)


def _list_dead_tensors(
    params: QuantParams, tensors: Sequence[str], bounds: Mapping[str, Bounds]
) -> list[DeadTensor]:
    """Return the tensors of which the quantizer maps all possible values to one value."""
    dead = []
    for tensor in tensors:
        known = bounds.get(tensor)
        value = None if known is None else find_constant_value(params, known)
        if known is not None and value is not None:
            dead.append(DeadTensor(tensor, *known, value))
    return dead

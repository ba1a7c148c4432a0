"""Following a tensor through a Q/DQ model: who reads it, past the operators that a Q passes."""

from __future__ import annotations

from qdqtool import operators, qdq
from qdqtool.graph import Node
from qdqtool.onnxgraph.view import View
from qdqtool.operators import inputs_behind_q
from qdqtool.records import record

_LIMIT = 400  # readers looked at from one tensor


@record
class Use:
    """A reader of a tensor, behind the operators on the way to it that a Q passes.

    Attributes:
        kind: ``q``, ``add`` (a sum of two computed tensors), ``op`` or ``output`` (of the network).
        node: The reader; None for a network output.
        path: The nodes between that a Q passes, the nearest to the tensor first.
    """

    kind: str
    node: Node | None
    path: tuple[Node, ...] = ()


_KEPT = 4096  # tensors whose readers are remembered


def uses(view: View, tensor: str) -> list[Use]:
    """The readers of a tensor, looked for past operators that a Q passes; kept for the next caller."""
    known: dict[str, list[Use]] = view.known.setdefault("uses", {})
    if tensor not in known:
        if len(known) > _KEPT:
            known.clear()
        known[tensor] = _uses(view, tensor)
    return known[tensor]


def _uses(view: View, tensor: str) -> list[Use]:
    found: list[Use] = []
    queue: list[tuple[str, tuple[Node, ...]]] = [(tensor, ())]
    visited: set[str] = {tensor}
    for current, path in queue:
        if len(visited) > _LIMIT:
            break
        if view.model.is_output(current):
            found.append(Use("output", None, path))
        for node in dict.fromkeys(view.model.readers(current)):
            if qdq.is_q(node):
                found.append(Use("q", node, path))
            elif current in inputs_behind_q(view.model, node):
                for output in node.outputs:
                    if output and output not in visited:
                        visited.add(output)
                        queue.append((output, (*path, node)))
            else:
                found.append(Use("add" if adds_computed(view, node) else "op", node, path))
    return found


def adds_computed(view: View, node: Node) -> bool:
    """Whether a node adds two computed tensors (a bias is not one)."""
    return operators.is_sum(node) and sum(t not in view.constants for t in node.inputs if t) >= 2

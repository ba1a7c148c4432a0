"""Why a convolution stays float: which of its two inputs is not quantized, and what stands in the way."""

from __future__ import annotations

from qdqtool import qdq
from qdqtool.advice.report import Report
from qdqtool.graph import Node
from qdqtool.onnxgraph.flow import commutes
from qdqtool.onnxgraph.view import View

_HOPS = 40  # nodes looked at above a convolution for the DQ that does not reach it


def explain(view: View, report: Report, conv: Node) -> None:
    """Adds the finding about a convolution that runs in float.

    What the model alone shows (weights without Q/DQ, activations per channel ...) is found by the static checks.
    """
    concerned = [conv.name]
    data = qdq.source_of_dq(view.model, conv.input(0))
    weights = view.weights(conv)
    values = view.values(conv.output)
    if data is not None:
        return  # W-NO-DQ, ACT-PER-CHANNEL, W-AXIS, SCALE-SHAPE1: static
    dq, blocker = _nearest_dq(view, conv.input(0))
    if dq is None:
        if weights.dq is None:
            report.add("NOT-QUANTIZED", conv.name, f"{conv.name} has no Q/DQ and runs in float.",
                       convolutions=concerned, values=values)
        else:
            report.add(
                "IN-FLOAT", conv.name,
                f"{conv.name} runs in float: its weights are quantized, its input '{conv.input(0)}' is not.",
                f"Put Q/DQ on '{conv.input(0)}' (its scale needs calibration).",
                concerned, values,
            )
        return
    if weights.dq is None and weights.folded:
        report.add("NOT-QUANTIZED", conv.name, f"{conv.name} has no Q/DQ on its weights and runs in float.",
                   convolutions=concerned, values=values)
    elif blocker is not None:
        report.add(
            "IN-BLOCKED", conv.name,
            f"{conv.name} runs in float: {dq.name} cannot move down past {blocker.name} ({blocker.op}) to it.",
            f"Quantize '{conv.input(0)}', directly in front of {conv.name}.",
            concerned, values,
        )


def _nearest_dq(view: View, tensor: str) -> tuple[Node | None, Node | None]:
    """The first DQ above a tensor, and the first node between that a DQ cannot pass."""
    blocker: Node | None = None
    queue = [tensor]
    seen: set[str] = set()
    for current in queue:
        node = view.model.producer(current)
        if node is None or len(seen) > _HOPS:
            continue
        if qdq.is_dq(node):
            return node, blocker
        if node.op in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            continue
        if not commutes(node) and blocker is None:
            blocker = node
        for source in node.inputs:
            if source and source not in seen and source not in view.constants:
                seen.add(source)
                queue.append(source)
    return None, None

"""Which tensors of a detector say where in the map it found something: its class outputs.

Found by structure: the last convolutions whose channels go to a Sigmoid, through operators that only move values, and
from there to the outputs without arithmetic. In YOLOv8 these are the class branches (boxes go to the Softmax of the
DFL), in CenterNet the heat map. YOLOv5 sends positions and scores through one Sigmoid and calculates with both; there,
and in networks that are no detectors, nothing is found.
"""

from __future__ import annotations

from qdqtool.model import operators
from qdqtool.model.graph import Model, Node
from qdqtool.model.heads import convolutions_above, find_head
from qdqtool.model.operators import LayerKind

_CALCULATES = (LayerKind.ELEMENTWISE, LayerKind.UNARY, LayerKind.MATRIX_MULTIPLY, LayerKind.CONVOLUTION)


def class_outputs(model: Model) -> tuple[str, ...]:
    """Class outputs [n, classes, h, w] of a detector, logits; empty where none are recognised."""
    head = find_head(model)
    found: dict[str, None] = {}
    for node in model.ordered:
        if node.op != "Sigmoid" or not _goes_out(model, node):
            continue
        for index in sorted(convolutions_above(model, node.input(0)) & head.finals - head.boxes):
            output = model.nodes[index].output
            shape = model.shape(output)
            if model.nodes[index].op == "Conv" and shape is not None and len(shape) == 4:
                found[output] = None
    return tuple(found)


def _goes_out(model: Model, node: Node) -> bool:
    """Whether nothing calculates with a node's output before it leaves the network or is sorted."""
    seen: set[str] = set()
    stack = [node.output]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        for reader in model.readers(name):
            if operators.of(reader).kind in _CALCULATES:
                return False
            if name in operators.inputs_behind_q(model, reader):
                stack.extend(reader.outputs)
    return True

"""What makes places in a picture: boxes, reference points and sampling offsets of DETRs, grids of a GridSample.

Recognised by structure; names play no part. The grid of a GridSample is followed up, through arithmetic and operators
that move values, to the layers whose results it is made of. What is added to or multiplied with such a result elsewhere
(the last decoder layer refines boxes that no GridSample reads any more) makes coordinates as well. A detector without
GridSample (DETR) has them in its last Linear of four columns behind an MLP, beside that of its classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qdqtool.graph import Model, Node
from qdqtool.onnxgraph.attention import attentions
from qdqtool.onnxgraph.pointwise import activation_input, is_bias, run_time_inputs
from qdqtool.operator_facts import LayerKind
from qdqtool.operators import DOMAINS, is_pointwise, is_run_time, of, output_axis, rearranges

_PICKS = ("Gather", "GatherElements", "GatherND", "Expand", "Tile")  # whose first input's values they give
_SIDES = 4  # of a box; reference points have two or four numbers
_ROUNDS = 64  # each finds the next layer of a decoder


@dataclass
class Coordinates:
    """Layers by node index, all empty for a network that has none.

    Attributes:
        makers: Layers whose results are boxes, reference points or sampling offsets.
        mlps: The layers of an MLP in front of one of these.
        readers: Linears that read such points, at most four numbers each.
        scores: Layers that make the scores by which a decoder's queries are selected.
    """

    makers: set[int] = field(default_factory=set)
    mlps: set[int] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    scores: set[int] = field(default_factory=set)

    @property
    def all(self) -> set[int]:
        """All but the scores."""
        return self.makers | self.mlps | self.readers


def find_coordinates(model: Model, finals: Iterable[int]) -> Coordinates:
    """Finds what makes coordinates.

    Args:
        model: A float network.
        finals: Its last layers, see :class:`qdqtool.onnxgraph.heads.Head`.
    """
    found = Coordinates()
    for node in model.ordered:
        if node.op == "GridSample" and node.domain in DOMAINS:
            found.makers |= _makers(model, node.input(1))[0]
    if not found.makers:
        found.makers = _boxes_without_grid(model, finals)
    if not found.makers:
        return found
    marked = _refined(model, found)
    for index in list(found.makers):
        found.mlps |= _mlp_above(model, model.nodes[index])
    found.mlps -= found.makers
    for node in model.nodes:
        shape = model.constant_shape(node.input(1)) if of(node).kind == LayerKind.MATRIX_MULTIPLY else None
        if shape is not None and node.input(0) in marked and len(shape) == 2:
            if shape[1 - (output_axis(node, 2) or 0)] <= _SIDES:
                found.readers.add(node.index)
        if node.op == "TopK":
            found.scores |= _makers(model, node.input(0), reduced=True)[0]
    found.scores -= found.all
    return found


def _makers(model: Model, tensor: str, *, reduced: bool = False) -> tuple[set[int], bool]:
    """The layers with weights that a tensor is made of, and whether it is made of nothing else computed."""
    found: set[int] = set()
    pure = True
    seen = {tensor}
    stack = [tensor]
    while stack:
        node = model.producer(stack.pop())
        if node is None:
            pure = False
            continue
        if _has_weights(model, node):
            found.add(node.index)
            above: tuple[str, ...] = (_distribution(model, node),)
        else:
            above = _values(model, node, reduced)
            pure = pure and bool(above)
        fresh = [t for t in above if t and t not in seen and is_run_time(model, t)]
        seen.update(fresh)
        stack.extend(fresh)
    return found, pure


def _has_weights(model: Model, node: Node) -> bool:
    return of(node).weights is not None and not is_run_time(model, node.input(1))


def _values(model: Model, node: Node, reduced: bool = False) -> tuple[str, ...]:
    """The inputs whose values a node gives or calculates with; none for what mixes them otherwise."""
    known = of(node)
    if is_pointwise(node):
        return tuple(run_time_inputs(model, node))
    if known.joins:
        return tuple(node.inputs)
    if node.op == "Where" and node.domain in DOMAINS:
        return tuple(node.inputs[1:3])
    if rearranges(node) or known.kind == LayerKind.SLICE or (node.op in _PICKS and node.domain in DOMAINS):
        return tuple(node.inputs[:1])
    return tuple(node.inputs[:1]) if reduced and known.kind == LayerKind.REDUCE else ()


def _distribution(model: Model, node: Node) -> str:
    """What a Softmax reads whose mean over bins a layer of one column takes (D-FINE, YOLO's DFL); empty for others."""
    if _columns(model, node) != 1:
        return ""
    above = model.producer(node.input(0))
    while above is not None and rearranges(above) and above.inputs:
        above = model.producer(above.input(0))
    return above.input(0) if above is not None and above.op == "Softmax" else ""


def _columns(model: Model, node: Node) -> int | None:
    """How many outputs the constant weights of a layer make for each place; None where that is not known."""
    shape = model.constant_shape(node.input(1))
    axis = output_axis(node, len(shape)) if shape else None
    return shape[axis] if shape and axis is not None and axis < len(shape) else None


def _refined(model: Model, found: Coordinates) -> set[str]:
    """Adds the layers whose results are combined with coordinates; returns all tensors that are coordinates."""
    marked: set[str] = set()
    for _ in range(_ROUNDS):
        before = len(found.makers)
        marked = set()
        for node in model.ordered:
            above = _values(model, node)
            if node.index in found.makers or not marked.isdisjoint(above):
                marked.update(o for o in node.outputs if o)
                if is_pointwise(node) and len(above) > 1 and node.index not in found.makers:
                    for tensor in above:
                        makers, pure = (set(), False) if tensor in marked else _makers(model, tensor)
                        found.makers |= makers if pure else set()
        if len(found.makers) == before:
            break
    return marked


def _boxes_without_grid(model: Model, finals: Iterable[int]) -> set[int]:
    """Last Linears of four columns behind an MLP, where there are others beside and attention in front."""
    ends = [model.nodes[i] for i in finals if of(model.nodes[i]).kind == LayerKind.MATRIX_MULTIPLY]
    if len(ends) < 2 or not attentions(model):
        return set()
    found = {n.index for n in ends if _columns(model, n) == _SIDES and _mlp_above(model, n)}
    return found if len(found) < len(ends) else set()


def _mlp_above(model: Model, node: Node) -> set[int]:
    """The Linears in front of a Linear, each behind the activation of the one before and read by nothing else."""
    found: set[int] = set()
    while of(node).kind == LayerKind.MATRIX_MULTIPLY:
        tensor, activated = node.input(0), False
        above = model.producer(tensor)
        while above is not None and not _has_weights(model, above):
            source = activation_input(model, above)
            if source is None and not (rearranges(above) and above.inputs):
                return found
            activated = activated or (source is not None and not is_bias(model, above))
            tensor = source if source is not None else above.input(0)
            above = model.producer(tensor)
        if above is None or not activated or of(above).kind != LayerKind.MATRIX_MULTIPLY:
            return found
        if len(model.readers(above.output)) != 1 or model.is_output(above.output):
            return found
        found.add(above.index)
        node = above
    return found

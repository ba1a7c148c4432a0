"""Detection heads, recognised by their structure; names play no part.

A YOLOv8-style head turns each box side's distribution over n bins into its mean: Softmax, then a product with the
constants 0 ... n-1 (a 1x1 convolution in Ultralytics' exports). That product is the DFL. The bare convolutions that
feed the Softmax are the box outputs, those beside them in the same Concat or Split are the class outputs.

What makes coordinates, and attentions, are found by structure as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from qdqtool.base.records import record
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import (
    WEIGHTED,
    LayerKind,
    commuting_inputs,
    is_pointwise,
    is_run_time,
    operator_of,
    output_axis,
    rearranges,
)
from qdqtool.model.pointwise import (
    activation_input,
    activation_outputs,
    is_bias,
    region,
    run_time_inputs,
)
from qdqtool.model.qdq import find_pair, is_dq, is_qdq
from qdqtool.model.subgraphs import DOMAINS

_Range = tuple[int, int] | None  # channels [from, to) of axis 1; None for all of them


class Head:
    """Convolutions of a detection head, by node index.

    Attributes:
        dfl: The DFL convolutions (or MatMuls).
        boxes: Last convolutions of the box branches.
        finals: All convolutions with no other convolution behind them, the DFL apart.
    """

    def __init__(
        self, dfl: Iterable[int] = (), boxes: Iterable[int] = (), finals: Iterable[int] = ()
    ) -> None:
        self.dfl, self.boxes, self.finals = set(dfl), set(boxes), set(finals)

    @property
    def last_convolutions(self) -> set[int]:
        """The last convolutions in front of any decoding: all of these, those of the boxes behind an activation too."""
        return self.finals | self.boxes


def find_head(model: Model) -> Head:
    """Finds the head by structure; names play no part."""
    head = Head()
    for softmax in (n for n in model.ordered if n.op == "Softmax"):
        if products := _bin_products(model, softmax, set()):
            head.dfl.update(n.index for n in products)
            head.boxes.update(convolutions_upstream(model, softmax.input(0)))
    feeding = tensors_upstream_of_weighted(model, head.dfl)
    head.finals = {
        n.index
        for n in model.ordered
        if n.op in WEIGHTED
        and n.index not in head.dfl
        and feeding.isdisjoint(n.outputs)
        and not _is_activated(model, n.output)
    }
    return head


def find_dfl(model: Model) -> set[int]:
    """The DFL's convolutions (or MatMuls) of a float or Q/DQ model, by node index."""
    seen: set[str] = set()  # by all of them, which may lead to the same
    softmaxes = (n for n in model.ordered if n.op == "Softmax")
    return {n.index for softmax in softmaxes for n in _bin_products(model, softmax, seen)}


def _bin_products(model: Model, softmax: Node, seen: set[str]) -> list[Node]:
    """Conv, MatMul or Mul nodes behind a Softmax that multiply with 0, 1, ... n-1; tensors not looked at before."""
    found = []
    queue = [softmax.output]
    for tensor in queue:
        if tensor in seen:
            continue
        seen.add(tensor)
        for reader in model.consumers(tensor):
            known = operator_of(reader)
            multiplies = known.weights is not None or known.operation == "PROD"
            if multiplies and any(
                _are_bins(model, reader, t) for t in reader.inputs if t and t != tensor
            ):
                found.append(reader)
            elif rearranges(reader) or is_qdq(reader) or known.joins or known.cuts:
                queue.extend(reader.outputs)
    return found


def _are_bins(model: Model, node: Node, tensor: str) -> bool:
    """Whether an operand is 0, 1, ... n-1; a convolution's that cannot be read is by its shape [1, n, 1, 1].

    Stored integers, of which a DQ makes a multiple, are among these.
    """
    found = find_pair(model, tensor)
    source = found[1].input(0) if found is not None and found[1] is not None else tensor
    if node.op != "Conv" or tensor != node.input(1) or model.constant(source) is not None:
        return counts_up(model, source)
    shape = (
        model.shape(tensor) if model.is_constant(tensor) or is_dq(model.producer(tensor)) else None
    )
    return shape is not None and shape[:1] == (1,) and all(d == 1 for d in shape[2:])


def convolutions_upstream(model: Model, tensor: str) -> set[int]:
    """Weighted nodes that make the channels of ``tensor``, followed up through operators that only move values."""
    found: set[int] = set()
    queue: list[tuple[str, _Range]] = [(tensor, None)]
    seen = set(queue)
    for name, channels in queue:
        node = model.producer(name)
        known = operator_of(node)
        above: list[tuple[str, _Range]] = []
        if node is None:
            continue
        if known.weights is not None:
            found.add(node.index)
        elif known.joins:
            above = _concat_inputs(model, node, channels)
        elif known.cuts:
            split = node.op == "Split"
            part = (
                _split_range(model, node, name, channels)
                if split
                else _slice_range(model, node, channels)
            )
            above = [(node.input(0), part)]
        elif known.kind == LayerKind.SHUFFLE:
            above = [(node.input(0), channels if _keeps_channels(model, node) else None)]
        elif commuting_inputs(model, node):
            above = [(node.input(0), channels)]
        queue += [place for place in above if place not in seen]
        seen.update(above)
    return found


def _keeps_channels(model: Model, node: Node) -> bool:
    """Whether axis 1 means the same in front of and behind a Reshape or Transpose."""
    if node.op == "Transpose":
        perm = node.attributes.get("perm", [])
        return len(perm) > 1 and perm[1] == 1
    before, after = _channels(model, node.input(0)), _channels(model, node.output)
    return before is not None and before == after


def _channels(model: Model, tensor: str) -> int | None:
    shape = model.shape(tensor)
    return shape[1] if shape is not None and len(shape) > 1 else None


def _axis(model: Model, node: Node) -> int | None:
    axis = node.integer("axis", 0)
    if axis >= 0:
        return axis
    shape = model.shape(node.input(0))
    return None if shape is None else axis + len(shape)


def _split_range(model: Model, node: Node, output: str, channels: _Range) -> _Range:
    if _axis(model, node) != 1:
        return channels
    start = 0
    for name in node.outputs:
        size = _channels(model, name)
        if size is None:
            return None
        if name == output:
            low, high = channels or (0, size)
            return start + low, start + high
        start += size
    return None


def _slice_range(model: Model, node: Node, channels: _Range) -> _Range:
    values = [model.constant(node.input(i)) for i in (1, 2, 3)]
    if any(v is None or v.size != 1 for v in values):
        return None
    start, end, axis = (int(v.reshape(-1)[0]) for v in values if v is not None)
    if axis != 1:
        return channels
    size = _channels(model, node.input(0))
    if size is None or start < 0 or model.constant(node.input(4)) is not None:
        return None
    low, high = channels or (0, min(end, size) - start)
    return start + low, start + high


def _concat_inputs(model: Model, node: Node, channels: _Range) -> list[tuple[str, _Range]]:
    """The inputs of a Concat that make the given channels."""
    if _axis(model, node) != 1 or channels is None:
        return [(t, channels) for t in node.inputs]
    wanted: list[tuple[str, _Range]] = []
    start = 0
    for name in node.inputs:
        size = _channels(model, name)
        if size is None:
            return [(t, None) for t in node.inputs]
        low, high = max(channels[0], start), min(channels[1], start + size)
        if low < high:
            wanted.append((name, (low - start, high - start)))
        start += size
    return wanted


def tensors_upstream_of_weighted(model: Model, dfl: Collection[int]) -> set[str]:
    """Tensors from which a Conv, ConvTranspose, Gemm or MatMul is reached, the nodes of a DFL apart."""
    found: set[str] = set()
    for node in reversed(model.ordered):
        if (node.op in WEIGHTED and node.index not in dfl) or not found.isdisjoint(node.outputs):
            found.update(node.inputs)
            found.update(node.captured)
            found.discard("")  # an input that is not set
    return found


def _is_activated(model: Model, tensor: str) -> bool:
    """Whether an activation follows, a bare Sigmoid apart, which turns scores into probabilities."""
    same = [tensor]  # under each name that it has behind a Cast
    for name in same:
        for result in activation_outputs(model, name):
            last = model.producer(result)
            for node in region(model, name, last) if last is not None else ():
                known = operator_of(node)
                if known.activation is not None and known.activation.type != "SIGMOID":
                    return True
                if (
                    known.operation == "PROD" and len(run_time_inputs(model, node)) == 2
                ):  # x * gate(x)
                    return True
        same += [
            n.output
            for n in model.consumers(name)
            if operator_of(n).kind == LayerKind.IDENTITY and n.output not in same
        ]
    return False


_ROUNDED = 0.1  # the most by which INT8 moves a bin; a DFL of 16 bins has 0.06


def counts_up(model: Model, tensor: str) -> bool:
    """Whether a constant holds 0, 1, 2, ... n-1 with n of at least 4: the bins of a DFL.

    Bins that were quantized with one scale and stored as floats are as far off as half a step.
    """
    shape = model.constant_shape(tensor)
    if shape is None or not 4 <= int(np.prod(shape)) <= 256:
        return False
    value = model.constant(tensor)
    if value is None:
        return False
    bins = np.arange(value.size)
    off = np.abs(value.reshape(-1).astype(np.float64) - bins)
    return bool(np.all(off <= min(_ROUNDED, (value.size - 1) / 254 + 1e-6)))


_HOPS = 64  # tensors looked at around a Softmax; scale, mask and reshaping of windows are a dozen


@record
class Attention:
    """One attention.

    Attributes:
        scores: The product of queries and keys.
        softmax: The Softmax behind it.
        values: The product of its result with the values.
        probabilities: The tensor that ``values`` reads the Softmax's result from: 0 to 1.
    """

    scores: Node
    softmax: Node
    values: Node
    probabilities: str


def find_attentions(model: Model) -> list[Attention]:
    """Every attention of a float or Q/DQ model, in graph order."""
    return [
        Attention(scores, softmax, *values)
        for softmax in model.ordered
        if softmax.op == "Softmax"
        and (scores := _scores(model, softmax))
        and (values := _product_with_values(model, softmax))
    ]


def is_computed_product(model: Model, node: Node | None) -> bool:
    """Whether a node is a MatMul of two tensors that are computed at run time, Q/DQ aside."""
    if node is None or node.op != "MatMul" or operator_of(node).kind != LayerKind.MATRIX_MULTIPLY:
        return False
    return len(node.inputs) == 2 and not any(_from_constant(model, t) for t in node.inputs)


def is_attention_probability(model: Model, tensor: str, *, quantized: bool = False) -> bool:
    """Whether a tensor has values of 0 to 1 for a product: a Softmax's result, or that with some of it moved or masked.

    A mask behind a Softmax (Where) puts zeros in. ``quantized``: the product reads it through a pair already.
    """
    if not quantized and not any(is_computed_product(model, r) for r in model.consumers(tensor)):
        return False
    for _ in range(_HOPS):
        node = model.producer(tensor)
        if node is None or not (_moves(node) or node.op == "Softmax"):
            return False
        if node.op == "Softmax":
            return True
        if node.op == "Where":
            other = model.constant(node.input(1))
            if other is None or other.size != 1 or not 0.0 <= float(other.reshape(-1)[0]) <= 1.0:
                return False
        tensor = node.input(_data_of(node))
    return False


def _scores(model: Model, softmax: Node) -> Node | None:
    """The nearest product above a Softmax, past scale, mask and what moves values."""
    queue = [softmax.input(0)]
    for tensor in queue:
        node = model.producer(tensor)
        if node is None or len(queue) > _HOPS:
            continue
        if is_computed_product(model, node):
            return node
        if is_pointwise(node) or _moves(node):
            queue.extend(
                t for t in node.inputs if t and t not in queue and not model.is_constant(t)
            )
    return None


def _product_with_values(model: Model, softmax: Node) -> tuple[Node, str] | None:
    queue = [softmax.output]
    for tensor in queue:
        if len(queue) > _HOPS:
            return None
        for reader in model.consumers(tensor):
            if is_computed_product(model, reader):
                return reader, tensor
            if _moves(reader) and tensor == reader.input(_data_of(reader)):
                queue.extend(t for t in reader.outputs if t and t not in queue)
    return None


def _moves(node: Node) -> bool:
    return rearranges(node) or is_qdq(node) or (node.op == "Where" and node.domain in DOMAINS)


def _data_of(node: Node) -> int:
    return 2 if node.op == "Where" else 0


def _from_constant(model: Model, tensor: str) -> bool:
    while not model.is_constant(tensor):
        node = model.producer(tensor)
        if node is None or not (rearranges(node) or is_qdq(node)) or not node.inputs:
            return False
        tensor = node.input(0)
    return True


_PICKS = (
    "Gather",
    "GatherElements",
    "GatherND",
    "Expand",
    "Tile",
)  # whose first input's values they give
_SIDES = 4  # of a box; reference points have two or four numbers
_ROUNDS = 64  # each finds the next layer of a decoder


class CoordinateLayers:
    """Layers by node index, all empty for a network that has none.

    Attributes:
        producers: Layers whose results are boxes, reference points or sampling offsets.
        mlps: The layers of an MLP in front of one of these.
        consumers: Linears that read such points, at most four numbers each.
        scores: Layers that make the scores by which a decoder's queries are selected.
    """

    def __init__(self) -> None:
        self.producers: set[int] = set()
        self.mlps: set[int] = set()
        self.consumers: set[int] = set()
        self.scores: set[int] = set()

    @property
    def all(self) -> set[int]:
        """All but the scores."""
        return self.producers | self.mlps | self.consumers


def find_coordinates(model: Model, finals: Iterable[int]) -> CoordinateLayers:
    """Finds what makes coordinates in a float network with these last layers, see :class:`Head`."""
    found = CoordinateLayers()
    for node in model.ordered:
        if node.op == "GridSample" and node.domain in DOMAINS:
            found.producers |= _makers(model, node.input(1))[0]
    if not found.producers:
        found.producers = _boxes_without_grid(model, finals)
    if not found.producers:
        return found
    marked = _refined(model, found)
    for index in list(found.producers):
        found.mlps |= _mlp_above(model, model.nodes[index])
    found.mlps -= found.producers
    for node in model.nodes:
        shape = (
            model.constant_shape(node.input(1))
            if operator_of(node).kind == LayerKind.MATRIX_MULTIPLY
            else None
        )
        if shape is not None and node.input(0) in marked and len(shape) == 2:
            if shape[1 - (output_axis(node, 2) or 0)] <= _SIDES:
                found.consumers.add(node.index)
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
    return operator_of(node).weights is not None and not is_run_time(model, node.input(1))


def _values(model: Model, node: Node, reduced: bool = False) -> tuple[str, ...]:
    """The inputs whose values a node gives or calculates with; none for what mixes them otherwise."""
    known = operator_of(node)
    if is_pointwise(node):
        return tuple(run_time_inputs(model, node))
    if known.joins:
        return tuple(node.inputs)
    if node.op == "Where" and node.domain in DOMAINS:
        return tuple(node.inputs[1:3])
    if (
        node.op in ("ScatterND", "ScatterElements") and node.domain in DOMAINS
    ):  # parts of a box written into it
        return (node.input(0), node.input(2))
    if (
        rearranges(node)
        or known.kind == LayerKind.SLICE
        or (node.op in _PICKS and node.domain in DOMAINS)
    ):
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
    if shape is not None and len(shape) == 1 and node.op == "MatMul":
        return 1
    axis = output_axis(node, len(shape)) if shape else None
    return shape[axis] if shape and axis is not None and axis < len(shape) else None


def _refined(model: Model, found: CoordinateLayers) -> set[str]:
    """Adds the layers whose results are combined with coordinates; returns all tensors that are coordinates."""
    marked: set[str] = set()
    for _ in range(_ROUNDS):
        before = len(found.producers)
        marked = set()
        for node in model.ordered:
            above = _values(model, node)
            if node.index in found.producers or not marked.isdisjoint(above):
                marked.update(o for o in node.outputs if o)
                if is_pointwise(node) and len(above) > 1 and node.index not in found.producers:
                    for tensor in above:
                        makers, pure = (
                            (set(), False) if tensor in marked else _makers(model, tensor)
                        )
                        found.producers |= makers if pure else set()
        if len(found.producers) == before:
            break
    return marked


def _boxes_without_grid(model: Model, finals: Iterable[int]) -> set[int]:
    """Last Linears of four columns behind an MLP, where there are others beside and attention in front."""
    ends = [
        model.nodes[i]
        for i in finals
        if operator_of(model.nodes[i]).kind == LayerKind.MATRIX_MULTIPLY
    ]
    if len(ends) < 2 or not find_attentions(model):
        return set()
    found = {n.index for n in ends if _columns(model, n) == _SIDES and _mlp_above(model, n)}
    return found if len(found) < len(ends) else set()


def _mlp_above(model: Model, node: Node) -> set[int]:
    """The Linears in front of a Linear, each behind the activation of the one before and read by nothing else."""
    found: set[int] = set()
    while operator_of(node).kind == LayerKind.MATRIX_MULTIPLY:
        tensor, activated = node.input(0), False
        above = model.producer(tensor)
        while above is not None and not _has_weights(model, above):
            source = activation_input(model, above)
            if source is None and not (rearranges(above) and above.inputs):
                return found
            activated = activated or (source is not None and not is_bias(model, above))
            tensor = source if source is not None else above.input(0)
            above = model.producer(tensor)
        if above is None or not activated or operator_of(above).kind != LayerKind.MATRIX_MULTIPLY:
            return found
        if len(model.consumers(above.output)) != 1 or model.is_output(above.output):
            return found
        found.add(above.index)
        node = above
    return found

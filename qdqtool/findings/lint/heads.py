"""Checks for quantized heads of detectors and quantized residual streams."""

from collections.abc import Callable, Iterable, Sequence

from qdqtool.findings.lint.box_units import find_box_units
from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.bounds import find_bounds, find_concat_parts
from qdqtool.ir.editor import make_placeholder
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import is_marked_part, read_tuned_head
from qdqtool.ir.operators import operator_of, rearranges
from qdqtool.ir.precision import Precision
from qdqtool.patterns.heads import Head, find_attentions, find_coordinates, find_head
from qdqtool.patterns.layernorm import NORMALIZATIONS, find_decomposed_layer_norms
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.patterns.view import View, is_sum_of_computed
from qdqtool.proto.slim import strip_large_weights
from qdqtool.reasons import MODEL_CHECK
from qdqtool.reasons.attention import QuantizedResidualStream
from qdqtool.reasons.heads import QuantizedHead, ResultAfterHead


def find_last_convolutions(view: View) -> list[Node]:
    """Return the last convolutions of a detector's head, which have no convolution downstream.

    Only the convolution of a DFL may be downstream. Empty if there are fewer than two last
    convolutions, because a detector has at least two. Insertion uses the same definition of a head.
    """
    if (
        sum(n.op == "Conv" and n.index not in view.feeds_weighted for n in view.nodes_with_weights)
        < 2
    ):
        return []  # not a detector, so the float network is not needed
    finals = _find_float_head(view)[0].finals
    last = [n for n in view.nodes_with_weights if n.op == "Conv" and n.index in finals]
    return last if len(last) >= 2 else []


def find_coordinate_nodes(view: View) -> set[int]:
    """Return the indices of a DETR's nodes for boxes and sampling points.

    Insertion leaves these nodes float.
    """
    if not any(n.op == "GridSample" for n in view.model.nodes) and not find_attentions(view.model):
        return set()
    return _find_float_head(view)[1]()


def _find_float_head(view: View) -> tuple[Head, Callable[[], set[int]]]:
    """Return the head of the float network, and a function that finds coordinate layers.

    The head and the result of the function contain node indices of the Q/DQ model.
    """
    cache: dict[str, tuple[Head, Callable[[], set[int]]]] = view.cache.setdefault("head", {})
    if not cache:
        slim = Model(strip_large_weights(view.model.proto), types=view.model)
        model = remove_quantizers(slim, weights=True, stored=make_placeholder)

        def to_quantized(nodes: Iterable[int]) -> set[int]:
            producers = (view.model.producer(model.nodes[i].output) for i in nodes)
            return {p.index for p in producers if p is not None}

        head = find_head(model)
        cache[""] = (
            Head(to_quantized(head.dfl), to_quantized(head.boxes), to_quantized(head.finals)),
            lambda: to_quantized(find_coordinates(model, head.finals).all),
        )
    return cache[""]


def list_head_nodes(view: View) -> list[str]:
    """Return the names of the nodes of a detector's head that a quantizer should leave float.

    These are the DFL, the last convolutions of boxes (of the whole head without a DFL), the nodes
    for boxes and sampling points of a DETR, the Adds after the DFL, which read anchors, and the
    Splits after the last convolutions. Whether the nodes are quantized does not matter.
    """
    coordinates = find_coordinate_nodes(view)
    last = find_last_convolutions(view)
    head = _find_float_head(view)[0] if last else Head()
    dfl = [n for n in view.nodes_with_weights if n.index in head.dfl]
    boxes = [n for n in last if not dfl or n.index in head.boxes]
    others = [n for n in view.nodes_with_weights if n.index in coordinates]
    names = [n.name for n in (*dfl, *boxes, *others)]
    names += _find_after(view.model, dfl, "Add") + _find_after(view.model, last, "Split")
    return list(dict.fromkeys(names))


def _find_after(model: Model, starts: Sequence[Node], op: str) -> list[str]:
    """Return the names of the nodes of an operator that are downstream of other nodes."""
    found = model.find_downstream(start.index for start in starts)
    return [model.nodes[i].name for i in sorted(found) if model.nodes[i].op == op]


_MAX_NODES_TO_CONCAT = 12  # maximum number of nodes from the head's Concat to a Q; YOLOv8 has five


def run(view: View, report: FindingReport) -> None:
    """Add findings on quantized convolutions and results of a detector's head."""
    tuned = read_tuned_head(view.model)

    def add(conv: Node, branch: str) -> None:
        if conv.index in view.fully_quantized_nodes:
            is_tuned = conv.name in tuned
            reason = QuantizedHead(MODEL_CHECK, conv.name, branch, is_tuned)
            report.add(reason, convolutions=[conv.name], gains=not is_tuned)

    for index in sorted(find_coordinate_nodes(view)):
        add(view.model.nodes[index], "coordinates")
    last = find_last_convolutions(view)
    if not last:
        return
    head, _ = _find_float_head(view)
    for conv in (n for n in view.nodes_with_weights if n.index in head.dfl):
        add(conv, "dfl")
    for conv in last:  # a finding on "box" is a warning, a finding on "class" is a note
        if head.dfl and conv.index in head.boxes:
            add(conv, "box")
        elif _belongs_to_head(view, conv):
            add(conv, "class" if head.dfl else "head")
    _check_results(view, report)


def _belongs_to_head(view: View, node: Node) -> bool:
    """Return whether a node that looks like one of a head belongs to a head.

    In a part of a model, nodes at the cut look like those of a head. Only nodes upstream or
    downstream of a DFL are then known to belong to one.
    """
    model = view.model
    if not is_marked_part(model):
        return True
    dfl = _find_float_head(view)[0].dfl
    is_upstream = not dfl.isdisjoint(model.find_downstream([node.index]))
    return is_upstream or node.index in model.find_downstream(dfl)


def _check_results(view: View, report: FindingReport) -> None:
    units, faults = find_box_units(view), list[ResultAfterHead]()
    for q in view.activation_qs:
        has_steps = view.params(q).precision != Precision.FP8
        if not has_steps or q.index in view.feeds_weighted:
            continue
        concat, unit = _find_head_concat(view, q), units.get(q.input(0))
        if concat is None and unit is None:
            continue
        fault = _build_fault(view, q, concat, unit)
        if unit is not None or fault.scores or _belongs_to_head(view, q):
            faults.append(fault)
    for fault in sorted(faults, key=lambda f: -f.zero_limit):  # lost scores first
        report.add(fault, fatal=fault.is_fatal)


def _build_fault(view: View, q: Node, concat: Node | None, unit: float | None) -> ResultAfterHead:
    fault = ResultAfterHead(MODEL_CHECK, q.name, scale=view.params(q).single_scale, pixels=unit)
    if concat is None:
        return fault
    bounds, parts = find_bounds(view.model), find_concat_parts(view.model, q.input(0))
    fault.concat = concat.name
    scores = [t for t in parts if t in bounds and 0.0 <= bounds[t].low < bounds[t].high <= 1.0]
    if not scores or len(scores) == len(parts):
        fault.raw = any(operator_of(view.model.producer(t)).weights is not None for t in parts)
        return fault
    quantizers = filter(qdq.is_q, view.model.consumers(scores[0]))
    of_scores = (view.params(c).single_scale for c in quantizers)
    fault.scores = scores[0]
    fault.own = next((value for value in of_scores if value is not None), None)
    return fault


def _find_head_concat(view: View, q: Node) -> Node | None:
    """Return the Concat upstream of a Q, else None.

    Between them may be the Sigmoid of the scores, reshapes, Q and DQ.
    """
    node = view.model.producer(q.input(0))
    for _ in range(_MAX_NODES_TO_CONCAT):
        if node is None or not (rearranges(node) or node.op == "Sigmoid" or qdq.is_qdq(node)):
            break
        node = view.model.producer(node.input(0))
    return node if node is not None and node.op == "Concat" else None


# Transformers -------------------------------------------------------------------------------------


def check_residual_streams(view: View, report: FindingReport) -> None:
    """Add findings on quantized residual sums that a layer normalization reads."""
    norms = {n.input(0): n.name for n in view.model.nodes if n.op in NORMALIZATIONS}
    norms |= {p.input: p.nodes[0].name for p in find_decomposed_layer_norms(view.model)}
    for tensor, norm in norms.items():
        add = _find_stream_add(view, tensor)
        if add is None:
            continue
        pairs = filter(None, (qdq.find_pair(view.model, t) for t in add.inputs))
        names = tuple(dq.name for dq, _ in pairs)
        if names:
            report.add(
                QuantizedResidualStream(MODEL_CHECK, add.name, names, norm),
                values=view.element_count(add.output),
            )


def _find_stream_add(view: View, tensor: str) -> Node | None:
    """Return the Add of two computed tensors whose sum a normalization reads, else None.

    Between them may be Q, DQ and operators that only move values.
    """
    add = view.model.producer(tensor)
    while add is not None and (qdq.is_qdq(add) or rearranges(add)) and add.input(0):
        add = view.model.producer(add.input(0))
    return add if add is not None and is_sum_of_computed(view, add) else None

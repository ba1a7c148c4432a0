"""What is better left float: heads of detectors, and the residual stream of transformers."""

from collections.abc import Callable, Iterable

from qdqtool.findings.report import FindingReport
from qdqtool.ir import qdq
from qdqtool.ir.bounds import find_bounds, find_concat_parts
from qdqtool.ir.editor import placeholder
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import LayerKind, operator_of, rearranges
from qdqtool.patterns.heads import Head, find_attentions, find_coordinates, find_head
from qdqtool.patterns.layernorm import NORMALIZATIONS, find_decomposed_layer_norms
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.patterns.view import View, adds_computed
from qdqtool.proto.slim import strip_large_weights
from qdqtool.reasons import faults
from qdqtool.reasons.faults import CHECK


def last_convolutions(view: View) -> list[Node]:
    """Bare convolutions with no other convolution behind them (YOLO's DFL does not count as one).

    Empty where the network does not look like a detector: fewer than two such convolutions. These are the ones that
    insertion takes for a head's.
    """
    if (
        sum(n.op == "Conv" and n.index not in view.feeds_weighted for n in view.nodes_with_weights)
        < 2
    ):
        return []  # at most one: no float network has to be made to see that
    finals = _float_network(view)[0].finals
    last = [n for n in view.nodes_with_weights if n.op == "Conv" and n.index in finals]
    return last if len(last) >= 2 else []


def coordinates_of(view: View) -> set[int]:
    """What makes boxes, reference points and sampling offsets of a DETR, as insertion leaves it float."""
    if not any(n.op == "GridSample" for n in view.model.nodes) and not find_attentions(view.model):
        return set()
    return _float_network(view)[1]()


def _float_network(view: View) -> tuple[Head, Callable[[], set[int]]]:
    """The head of the network without quantizers, and what finds its coordinates: nodes of the Q/DQ model."""
    known: dict[str, tuple[Head, Callable[[], set[int]]]] = view.cache.setdefault("head", {})
    if not known:
        slim = Model(strip_large_weights(view.model.proto), types=view.model)
        model = remove_quantizers(slim, weights=True, stored=placeholder)

        def here(nodes: Iterable[int]) -> set[int]:
            return {
                maker.index
                for i in nodes
                if (maker := view.model.producer(model.nodes[i].output)) is not None
            }

        head = find_head(model)
        known[""] = (
            Head(here(head.dfl), here(head.boxes), here(head.finals)),
            lambda: here(find_coordinates(model, head.finals).all),
        )
    return known[""]


_WALK = 12  # nodes from a head's convolution to the Concat behind it; YOLOv8 has five


def run(view: View, report: FindingReport) -> None:
    """Adds findings about the last convolutions of a detector, and what makes its coordinates."""

    def add(conv: Node, branch: str) -> None:
        if conv.index in view.fully_quantized_nodes:
            report.add(faults.HeadQuantized(CHECK, conv.name, branch), convolutions=[conv.name])

    for index in sorted(coordinates_of(view)):
        add(view.model.nodes[index], "coordinates")
    last = last_convolutions(view)
    if not last:
        return
    head, _ = _float_network(view)
    for conv in (n for n in view.nodes_with_weights if n.index in head.dfl):
        add(conv, "dfl")
    for conv in last:  # those of the boxes are worth a warning, those of the classes a note
        if head.dfl and conv.index not in head.boxes:
            add(conv, "class")
        else:
            add(conv, "box" if head.dfl else "head")
    for q in view.activation_qs:
        concat = None if q.index in view.feeds_weighted else _concat_above(view, q)
        if concat is not None:
            found = _joined(view, q, concat)
            report.add(found, fatal=_is_fatal(found))


# Detectors report what scores above some value. Ultralytics' default is the usual one.
CONFIDENCE = 0.25
COARSE_LOGITS = 2.0  # a step of logits: scores of 0.5 and 0.88 are one step apart


def _joined(view: View, q: Node, concat: Node) -> faults.ConcatAfterHead:
    """The record of a Q that gives the parts of a Concat one scale, with the scores among the parts."""
    params, known = view.params(q), find_bounds(view.model)
    scale = float(params.scale[0]) if params.scale is not None and params.scale.size == 1 else None
    parts = find_concat_parts(view.model, q.input(0))
    scores = [t for t in parts if t in known and 0.0 <= known[t].low < known[t].high <= 1.0]
    if not scores or len(scores) == len(parts):
        raw = any(operator_of(view.model.producer(t)).weights is not None for t in parts)
        return faults.ConcatAfterHead(CHECK, q.name, concat.name, scale, raw=raw)
    own = (
        float(params.scale[0])
        for reader in view.model.consumers(scores[0])
        if qdq.is_q(reader)
        and (params := view.params(reader)).scale is not None
        and params.scale.size == 1
    )
    return faults.ConcatAfterHead(CHECK, q.name, concat.name, scale, scores[0], own=next(own, None))


def _is_fatal(found: faults.ConcatAfterHead) -> bool:
    """Whether the scale shows that scores which a detector would report are lost."""
    if found.scores:
        return found.zero_limit >= CONFIDENCE
    return found.raw and found.scale is not None and found.scale >= COARSE_LOGITS


def _concat_above(view: View, q: Node) -> Node | None:
    """The Concat behind a head's branches, past what is between: the Sigmoid of the scores, and what only reshapes."""
    node = view.model.producer(q.input(0))
    for _ in range(_WALK):
        moves = node is not None and operator_of(node).kind in (
            LayerKind.SHUFFLE,
            LayerKind.IDENTITY,
        )
        if node is None or not (moves or node.op == "Sigmoid" or qdq.is_qdq(node)):
            break
        node = view.model.producer(node.input(0))
    return node if node is not None and node.op == "Concat" else None


# Transformers --------------------------------------------------------------------------------------------------------


def streams(view: View, report: FindingReport) -> None:
    """Adds findings about sums with Q/DQ whose result a layer normalization reads: a transformer's residual stream."""
    norms = {n.input(0): n.name for n in view.model.nodes if n.op in NORMALIZATIONS}
    norms |= {p.input: p.nodes[0].name for p in find_decomposed_layer_norms(view.model)}
    for tensor, norm in norms.items():
        add = view.model.producer(tensor)
        while add is not None and (qdq.is_qdq(add) or rearranges(add)) and add.input(0):
            add = view.model.producer(add.input(0))
        if add is None or not adds_computed(view, add):
            continue
        pairs = [
            found[0].name for t in add.inputs if (found := qdq.find_pair(view.model, t)) is not None
        ]
        if pairs:
            report.add(
                faults.QuantizedStream(CHECK, add.name, tuple(pairs), norm),
                values=view.element_count(add.output),
            )

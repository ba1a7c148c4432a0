"""Placements that keep a fusion from happening, heads of detectors, shapes that INT8 kernels dislike, float types."""

from collections.abc import Callable, Iterable, Mapping

import onnx

from qdqtool.explain.lint.operators import depthwise
from qdqtool.explain.report import Report
from qdqtool.model import qdq
from qdqtool.model.editor import float_model, placeholder
from qdqtool.model.graph import Model, Node, without_large_weights
from qdqtool.model.half import half_nodes
from qdqtool.model.heads import Head, attentions, find_coordinates, find_head
from qdqtool.model.layernorm import NORMALIZES, layer_norms
from qdqtool.model.operators import CONVOLUTIONS, LayerKind, of, rearranges
from qdqtool.model.view import View, adds_computed
from qdqtool.trt import faults
from qdqtool.trt.faults import CHECK
from qdqtool.trt.targets import target_named
from qdqtool.types import ConvOutcome


def streams(view: View, report: Report) -> None:
    """Adds findings about sums with Q/DQ whose result a layer normalization reads: a transformer's residual stream."""
    norms = {n.input(0): n.name for n in view.model.nodes if n.op in NORMALIZES}
    norms |= {p.tensor: p.nodes[0].name for p in layer_norms(view.model)}
    for tensor, norm in norms.items():
        add = view.model.producer(tensor)
        while add is not None and (qdq.is_qdq(add) or rearranges(add)) and add.input(0):
            add = view.model.producer(add.input(0))
        if add is None or not adds_computed(view, add):
            continue
        pairs = [found[0].name for t in add.inputs if (found := qdq.source_of_dq(view.model, t)) is not None]
        if pairs:
            report.add(faults.QuantizedStream(CHECK, add.name, tuple(pairs), norm),
                       values=view.values(add.output))


# Detection heads, shapes that INT8 kernels dislike, and the float remainder ------------------------------------------


def last_convolutions(view: View) -> list[Node]:
    """Bare convolutions with no other convolution behind them (YOLO's DFL does not count as one).

    Empty where the network does not look like a detector: fewer than two such convolutions. These are the ones that
    insertion takes for a head's.
    """
    if sum(n.op == "Conv" and n.index not in view.feeds_weighted for n in view.weighted) < 2:
        return []  # at most one: no float network has to be made to see that
    finals = _float_network(view)[0].finals
    last = [n for n in view.weighted if n.op == "Conv" and n.index in finals]
    return last if len(last) >= 2 else []


def coordinates_of(view: View) -> set[int]:
    """What makes boxes, reference points and sampling offsets of a DETR, as insertion leaves it float."""
    if not any(n.op == "GridSample" for n in view.model.nodes) and not attentions(view.model):
        return set()
    return _float_network(view)[1]()


def _float_network(view: View) -> tuple[Head, Callable[[], set[int]]]:
    """The head of the network without quantizers, and what finds its coordinates: nodes of the Q/DQ model."""
    known: dict[str, tuple[Head, Callable[[], set[int]]]] = view.known.setdefault("head", {})
    if not known:
        slim = Model(without_large_weights(view.model.proto), types=view.model)
        model = float_model(slim, weights=True, stored=placeholder)

        def here(nodes: Iterable[int]) -> set[int]:
            return {maker.index for i in nodes if (maker := view.model.producer(model.nodes[i].output)) is not None}

        head = find_head(model)
        known[""] = (Head(here(head.dfl), here(head.boxes), here(head.finals)),
                     lambda: here(find_coordinates(model, head.finals).all))
    return known[""]


_WALK = 12  # nodes from a head's convolution to the Concat behind it; YOLOv8 has five


def heads(view: View, report: Report, outcomes: Mapping[str, ConvOutcome]) -> None:
    """Adds the findings about heads, channel counts, depthwise convolutions and float types; see :func:`run`."""
    _heads(view, report)
    for conv in view.weighted:
        if conv.index in view.quantized and conv.op in CONVOLUTIONS:
            _shapes(view, report, conv, outcomes.get(conv.name))
    if view.quantized:
        _float_types(view, report)


def _heads(view: View, report: Report) -> None:
    def add(conv: Node, branch: str) -> None:
        if conv.index in view.quantized:
            report.add(faults.HeadQuantized(CHECK, conv.name, branch), convolutions=[conv.name])

    for index in sorted(coordinates_of(view)):
        add(view.model.nodes[index], "coordinates")
    last = last_convolutions(view)
    if not last:
        return
    head, _ = _float_network(view)
    for conv in (n for n in view.weighted if n.index in head.dfl):
        add(conv, "dfl")
    for conv in last:  # those of the boxes are worth a warning, those of the classes a note
        if head.dfl and conv.index not in head.boxes:
            add(conv, "class")
        else:
            add(conv, "box" if head.dfl else "head")
    for q in view.activation_qs:
        concat = None if q.index in view.feeds_weighted else _concat_above(view, q)
        if concat is not None:
            report.add(faults.JoinedBehindHead(CHECK, q.name, concat.name))


def _concat_above(view: View, q: Node) -> Node | None:
    """The Concat behind a head's branches, past what is between: the Sigmoid of the scores, and what only reshapes."""
    node = view.model.producer(q.input(0))
    for _ in range(_WALK):
        moves = node is not None and of(node).kind in (LayerKind.SHUFFLE, LayerKind.IDENTITY)
        if node is None or not (moves or node.op == "Sigmoid" or qdq.is_qdq(node)):
            break
        node = view.model.producer(node.input(0))
    return node if node is not None and node.op == "Concat" else None


def _shapes(view: View, report: Report, conv: Node, outcome: ConvOutcome | None) -> None:
    known = view.channels(conv)
    if known is None:
        return
    inputs, outputs, groups = known
    if groups > 1 and groups == inputs and outcome is not None:
        readers, last = view.model.readers(outcome.bare), conv.index not in view.feeds_weighted
        # builds were seen to fail on the SiLU alone, not on other gates
        seen = any(view.model.node(name).op == "Sigmoid" for name in outcome.fused)
        for form in depthwise(CHECK, conv, outcome.activation if seen else "", readers, last):
            report.add(form, convolutions=[conv.name])
    elif 1 < groups != inputs:
        report.add(faults.Grouped(CHECK, conv.name, groups, inputs // groups), convolutions=[conv.name])
    stem = view.model.producer(conv.input(0)) is not None and _reads_network_input(view, conv)
    counted = (outputs,) if stem else (inputs, outputs)
    small, odd = min(counted) < 16, tuple(c for c in counted if c % 16)
    if small or odd:
        found = faults.Channels(CHECK, conv.name, inputs, outputs, odd, small)
        report.add(found, convolutions=[conv.name])


def _reads_network_input(view: View, conv: Node) -> bool:
    found = qdq.source_of_dq(view.model, conv.input(0))
    if found is None:
        return False
    tensor = (found[1] or found[0]).input(0)
    cast = view.model.producer(tensor)  # a model in FP16 whose input is FP32
    return (cast.input(0) if cast is not None and cast.op == "Cast" else tensor) in view.model.inputs


def _float_types(view: View, report: Report) -> None:
    if not target_named(report.target).strongly_typed:
        report.add(faults.FloatFlag(CHECK, ""))
        return
    weighted = [n for n in view.weighted if n.output in view.varying]
    types = {n.index: _computes_in(view, n) for n in weighted}
    if onnx.TensorProto.FLOAT not in types.values() or onnx.TensorProto.FLOAT16 in types.values():
        return  # a file with both types says of each node what it wants
    half = half_nodes(view.model)
    float32 = [n for n in weighted if n.index in half and types[n.index] == onnx.TensorProto.FLOAT]
    if float32:
        products = sum(of(n).kind == LayerKind.MATRIX_MULTIPLY for n in weighted)
        report.add(faults.FloatStays(CHECK, "", len(float32), len(weighted), float32[0].name, products))


def _computes_in(view: View, conv: Node) -> int:
    found = qdq.source_of_dq(view.model, conv.input(0))
    if found is not None:
        return view.params(found[0]).scale_type
    return view.model.elem_type(conv.input(1))

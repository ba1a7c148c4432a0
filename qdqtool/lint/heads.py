"""Which convolutions end a detection head, in a model that has Q/DQ already."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from qdqtool.model.graph import Model, Node, without_large_weights
from qdqtool.model.heads import Head, attentions, find_coordinates, find_head
from qdqtool.model.view import View


def last_convolutions(view: View) -> list[Node]:
    """Bare convolutions with no other convolution behind them (YOLO's DFL does not count as one).

    Empty where the network does not look like a detector: fewer than two such convolutions. These are the ones that
    insertion takes for a head's.
    """
    last = [n for n in view.weighted if n.op == "Conv" and n.index not in view.feeds_weighted and not view.is_dfl(n)]
    if len(last) < 2:
        return []
    finals = head_of(view).finals
    last = [n for n in last if n.index in finals]
    return last if len(last) >= 2 else []


def head_of(view: View) -> Head:
    """The head of a detector: its last convolutions, and for a YOLOv8-style one the DFL and what feeds it."""
    return _float_network(view)[1]


def coordinates_of(view: View) -> set[int]:
    """What makes boxes, reference points and sampling offsets of a DETR, as insertion leaves it float."""
    if not any(n.op == "GridSample" for n in view.model.nodes) and not attentions(view.model):
        return set()
    model, head = _float_network(view)
    return find_coordinates(model, head.finals).all


def _float_network(view: View) -> tuple[Model, Head]:
    known: dict[str, tuple[Model, Head]] = view.known.setdefault("head", {})
    if not known:
        model = _without_quantizers(view)
        known[""] = model, find_head(model)
    return known[""]


def _without_quantizers(view: View) -> Model:
    """The same nodes with Q and DQ as Identity and weights read directly, so that a float network's patterns fit."""
    proto = without_large_weights(view.model.proto)
    nodes = proto.graph.node
    for node in view.quantizers:
        own = nodes[node.index]
        own.op_type, own.domain = "Identity", ""
        del own.attribute[:]
        del own.input[1:]
    for node in view.weighted:
        weights = view.weights(node)
        if weights.dq is None or weights.after:
            continue
        nodes[node.index].input[1] = weights.source
        if view.is_dfl(node):  # stored as integers its weights are 0, 1, 2 ... times a scale
            shape = view.weight_shape(node) or (1, 1, 1, 1)
            bins = np.arange(shape[1], dtype=np.float32).reshape(shape[0], shape[1], *(1,) * (len(shape) - 2))
            name = f"{node.name}/bins"
            data = bins.astype("<f4").tobytes()
            proto.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=bins.shape, raw_data=data)
            nodes[node.index].input[1] = name
    return Model(proto, types=view.model)


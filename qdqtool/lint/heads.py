"""Which convolutions end a detection head, in a model that has Q/DQ already."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from qdqtool.graph import Model, Node, without_large_weights
from qdqtool.onnxgraph.heads import Head, find_head
from qdqtool.onnxgraph.view import View


def last_convolutions(view: View) -> list[Node]:
    """Convolutions with no other convolution behind them (YOLO's DFL does not count as one).

    Empty where the network does not look like a detector: fewer than two such convolutions.
    """
    last = [n for n in view.weighted if n.op == "Conv" and n.index not in view.feeds_weighted and not view.is_dfl(n)]
    return last if len(last) >= 2 else []


def head_of(view: View) -> Head:
    """The head of a YOLOv8-style detector: its DFL and the convolutions that feed it; empty for other networks."""
    if not any(view.is_dfl(n) for n in view.weighted) and not any(n.op == "Softmax" for n in view.model.nodes):
        return Head()
    return find_head(_without_quantizers(view))


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
            proto.graph.initializer.append(numpy_helper.from_array(bins, name))
            nodes[node.index].input[1] = name
    return Model(proto, types=view.model)


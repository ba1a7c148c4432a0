"""What follows from the sizes of a network's inputs, whatever they hold: exporters leave shapes to be computed."""

from __future__ import annotations

from onnx import TensorProto

from qdqtool.model.graph import Model
from qdqtool.model.operators import CUTS, LayerKind, of
from qdqtool.model.subgraphs import DOMAINS

MOVES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Gather", "Expand")
RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
_PICKS = ("Gather", "GatherElements", "GatherND")  # their sizes do not depend on the indices' values
_BY_VALUE = ("NonZero", "NonMaxSuppression", "Unique", "Compress", "If", "Loop", "Scan")
_INTEGERS = (TensorProto.UNDEFINED, TensorProto.INT64, TensorProto.INT32)


def follow_from_sizes(model: Model) -> tuple[list[str], list[str]]:
    """What is the same for all data of one size, although the model does not state it.

    Returns:
        Tensors whose values are, of those that say how others are moved; and tensors whose dimensions are.
    """
    known: set[str] = set()
    loose: set[str] = set()  # of dimensions that values decide

    def fixed(tensor: str) -> bool:
        return not tensor or tensor in known or model.is_constant(tensor)

    for node in model.ordered:
        inputs = [t for t in node.inputs if t]
        if node.domain not in DOMAINS[:2] or node.captured or node.op in _BY_VALUE or loose.intersection(inputs):
            loose.update(node.outputs)
        elif of(node).kind == LayerKind.SHAPE or (inputs and node.op not in RANDOM and all(map(fixed, inputs))):
            known.update(node.outputs)
        elif node.op not in _PICKS and not all(
            fixed(t) or model.elem_type(t) not in _INTEGERS for t in inputs
        ):
            loose.update(node.outputs)
    computed = (t for n in model.ordered for t in n.outputs if t and not model.is_constant(t) and t not in loose)
    shapes = [t for t in computed if t not in known and None in (model.shape(t) or (None,))]
    read = {t for n in model.ordered if n.op in (*MOVES, *CUTS, "Pad") for t in n.inputs[1:]}
    return [t for t in known if t in read], shapes

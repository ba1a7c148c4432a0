"""Conversion of INT8 pairs to FP8, for networks that were trained with INT8 quantizers."""

from __future__ import annotations

import numpy as np

from qdqtool.insertion.number_formats import FP8, LEVELS
from qdqtool.insertion.placement import find_fp8_obstacle, is_average_pooling
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import find_float_tensor, find_pair, is_qdq


def convert_pairs_to_fp8(model: Model) -> None:
    """Convert the INT8 pairs of a model to FP8 pairs with the same ranges, in place.

    The pairs on the inputs of nodes that cannot be FP8 (:mod:`qdqtool.insertion.placement`) are
    removed.

    Args:
        model: A Q/DQ model of opset 19 or newer, with constant scales and zero points of 0.
    """
    editor = Editor(model)
    for node in model.ordered:
        if _is_unsuitable_for_fp8(model, node):
            for position, tensor in enumerate(node.inputs):
                if find_pair(model, tensor) is not None:
                    editor.set_input(node, position, find_float_tensor(model, tensor))
    quantizers = [node for node in model.ordered if is_qdq(node)]
    scales = dict.fromkeys(node.input(1) for node in quantizers)
    parameters = {scale: _add_fp8_parameters(model, editor, scale) for scale in scales}
    for node in quantizers:
        for position, name in enumerate(parameters[node.input(1)], 1):
            editor.set_input(node, position, name)
    editor.finish()


def _is_unsuitable_for_fp8(model: Model, node: Node) -> bool:
    if node.op not in WEIGHTED:
        return is_average_pooling(model, node)
    weights = find_float_tensor(model, node.input(1))
    return model.is_constant(weights) and find_fp8_obstacle(model, node, weights) is not None


def _add_fp8_parameters(model: Model, editor: Editor, scale: str) -> tuple[str, str]:
    value = model.constant(scale)
    assert value is not None
    zeros = FP8.make_tensor(f"{scale}/fp8_zero_point", np.zeros(value.shape, np.float32))
    converted = (value.astype(np.float64) * (LEVELS / FP8.largest)).astype(value.dtype)
    return editor.add_constant(f"{scale}/fp8", converted), editor.add_constant_tensor(zeros)

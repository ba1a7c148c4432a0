"""How much memory the tensors of a network take while it runs."""

from __future__ import annotations

import math

import onnx

from qdqtool.graph import Model


def peak_bytes(model: Model) -> int:
    """Bytes of the activations that live at the same time, from their shapes, weights apart.

    Inputs and outputs live from the beginning and to the end. Open dimensions count as 1, a tensor of unknown shape
    counts nothing.
    """
    last: dict[str, int] = {}
    for position, node in enumerate(model.ordered):
        last.update(dict.fromkeys((*node.inputs, *node.captured), position))
    last.update(dict.fromkeys((*model.inputs, *model.outputs), len(model.ordered)))
    sizes = {t: _bytes_of(model, t) for t in (*model.inputs, *model.producers)}
    live = peak = sum(sizes[t] for t in model.inputs)
    for position, node in enumerate(model.ordered):
        live += sum(sizes[t] for t in node.outputs if t)
        peak = max(peak, live)
        done = {t for t in (*node.inputs, *node.captured, *node.outputs) if last.get(t, position) == position}
        live -= sum(sizes.get(t, 0) for t in done)
    return peak


def _bytes_of(model: Model, tensor: str) -> int:
    shape = None if model.is_constant(tensor) else model.shape(tensor)
    if shape is None:
        return 0
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(model.elem_type(tensor)).itemsize
    except (KeyError, TypeError):
        width = 4
    return int(width) * math.prod(1 if d is None else max(d, 0) for d in shape)

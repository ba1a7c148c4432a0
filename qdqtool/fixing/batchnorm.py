"""Fixes of BatchNormalization: plain constants for its parameters, or folded into quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.fixing.site import Site, named, nodes_of
from qdqtool.fixing.weights import evaluate
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Node
from qdqtool.model.view import View
from qdqtool.trt.targets import Target
from qdqtool.types import Refusal

_Array = npt.NDArray[Any]


def parameters(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """BN-UNFOLDED: parameters that other nodes make from constants, as constants."""
    sites: list[Site] = []
    names = named(reported)
    for norm in view.model.nodes:
        if norm.op != "BatchNormalization" or norm.name not in names:
            continue
        values: dict[int, _Array] = {}
        for position, tensor in enumerate(norm.inputs[1:], 1):
            if view.model.constant_proto(tensor) is None:
                value = evaluate(view.model, tensor) if tensor in view.constants else None
                if value is not None:
                    values[position] = value
        if not values:
            continue

        def apply(editor: Editor, norm: Node = norm, values: dict[int, _Array] = values) -> None:
            for position, value in values.items():
                editor.set_input(norm, position, editor.constant(f"{norm.name}/{norm.input(position)}", value))

        sites.append(Site("BN-UNFOLDED", norm.name, f"{norm.name}: its parameters stored as plain constants", apply))
    return sites


def transposed(view: View, target: Target, reported: Sequence[Refusal]) -> list[Site]:
    """CT-BN: a BatchNormalization folded into the quantized weights of the ConvTranspose in front of it.

    Weights and scales are multiplied by the same factor for each output channel, so that the integers stay the same.
    """
    sites: list[Site] = []
    for conv in nodes_of(view, reported):
        readers = view.model.readers(conv.output)
        if len(readers) != 1 or readers[0].op != "BatchNormalization":
            continue
        site = _fold(view, conv, readers[0])
        if site is not None:
            sites.append(site)
    return sites


def _fold(view: View, conv: Node, norm: Node) -> Site | None:
    model = view.model
    weights = view.weights(conv)
    bias = model.constant(conv.input(2)) if conv.input(2) else np.zeros((), np.float32)
    parts = [model.constant(t) for t in norm.inputs[1:5]]
    value = model.constant(weights.source) if weights.constant and not weights.after else None
    params = view.params(weights.first) if weights.first is not None else None
    if (
        value is None or bias is None or params is None or params.scale is None or any(p is None for p in parts)
        or conv.integer("group", 1) != 1 or model.is_output(conv.output)
        or view.axis(weights.first) not in (None, 1)  # type: ignore[arg-type]
        or params.zero_point is None or np.any(params.zero_point != 0)
    ):
        return None
    gamma, beta, mean, variance = (np.asarray(p, np.float64) for p in parts)
    factor = gamma / np.sqrt(variance + float(norm.attributes.get("epsilon", 1e-5)))
    if not np.all(np.isfinite(factor)) or np.any(factor == 0):
        return None
    if value.ndim < 2 or value.shape[1] != factor.size or params.scale.size not in (1, factor.size):
        return None
    scale = np.broadcast_to(params.scale, factor.shape) * np.abs(factor)
    signed = factor if weights.q is not None else np.sign(factor)
    along = signed.reshape(1, -1, *(1,) * (value.ndim - 2))
    folded = (value.astype(np.float64) * along)
    if weights.q is None:
        folded = np.clip(folded, -128, 127)
    shift = beta + (np.asarray(bias, np.float64) - mean) * factor
    dtype = onnx.helper.tensor_dtype_to_np_dtype(params.scale_type or onnx.TensorProto.FLOAT)

    def apply(editor: Editor) -> None:
        tensor = editor.constant(f"{weights.source}_folded", folded.astype(value.dtype))
        for node in (weights.q, weights.dq):
            if node is not None:
                names = [
                    editor.constant(f"{node.name}_folded/scale", scale.astype(dtype)),
                    editor.constant(f"{node.name}_folded/zero_point", np.zeros(scale.shape, np.int8)),
                ]
                tensor = editor.insert(conv, node.op, f"{node.name}_folded", [tensor, *names], {"axis": 1})
        editor.set_input(conv, 1, tensor)
        editor.set_input(conv, 2, editor.constant(f"{conv.name}/folded_bias", shift.astype(dtype)))
        editor.remove(norm)
        editor.set_output(conv, 0, norm.output)

    return Site("CT-BN", conv.name, f"{norm.name} folded into {conv.name}", apply)

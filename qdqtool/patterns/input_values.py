"""Range of pixel values that a network expects if it normalizes its input itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.util.notes import Note

_MAX_STEPS = 24  # maximum number of nodes that are followed downstream of an input
_MAPS = 4  # rank of images
_CHANNELS = {1, 3, None}
# Operators that keep the values of their first input.
_MOVES = ("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Resize")
_FACTORS = ("Mul", "Div")
_TERMS = ("Add", "Sub")
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
# The network expects pixels from 0 to 255 if it multiplies them with at most this factor, such as
# 1/255, 1/128, or 1/58 (a standard deviation).
_PIXEL_FACTOR = 1 / 30
_PIXEL_MEAN = 2.0  # a network that subtracts a larger mean expects pixels from 0 to 255
_PIXELS = 16.0  # larger values are pixels, not normalized values
_TOLERANCE = 1e-3


def warn_own_normalization(model: Model, used: Mapping[str, Any]) -> list[Note]:
    """Return a warning if the images' range does not fit the network's own normalization.

    Args:
        model: The network, with or without Q/DQ.
        used: The preprocessing, as in the JSON of the run.
    """
    if "scale" not in used:
        return []  # A function of the user prepares the images.
    low, high = _prepared_range(used)
    for tensor, highest in find_normalized_inputs(model).items():
        expects_pixels = highest > 1
        if expects_pixels == (high > _PIXELS) and (expects_pixels or low > -_TOLERANCE):
            continue
        advice = (
            "Use `preprocess='none'`"
            if expects_pixels
            else "Use a preset without mean and std, such as `preprocess='rtdetr'` (stretched) or "
            "`preprocess='ultralytics-classify'` (center crop)"
        )
        return [
            Note(
                f"preprocessing: the network normalizes input '{tensor}' itself and expects "
                f"pixels from 0 to {highest}, but the images were prepared as {used['name']} "
                f"({low:.3g} to {high:.3g}). {advice}",
                code="own-normalization",
                tensor=tensor,
                highest=highest,
            )
        ]
    return []


def find_normalized_inputs(model: Model) -> dict[str, int]:
    """Return the inputs that a network normalizes itself, with the highest expected value."""
    highest_values = {}
    for tensor in model.inputs:
        shape = model.shape(tensor)
        if shape is None or len(shape) != _MAPS or model.elem_type(tensor) not in _FLOATS:
            continue
        if _CHANNELS.isdisjoint((shape[1], shape[3])):
            continue  # The input is a feature map.
        highest = _expected_maximum(*_find_affine(model, tensor))
        if highest is not None:
            highest_values[tensor] = highest
    return highest_values


def _prepared_range(used: Mapping[str, Any]) -> tuple[float, float]:
    mean, std = np.asarray(used["mean"], np.float64), np.asarray(used["std"], np.float64)
    low, high = (0.0 - mean) / std, (255.0 * used["scale"] - mean) / std
    return float(low.min()), float(high.max())


def _expected_maximum(factor: npt.NDArray[Any], term: npt.NDArray[Any]) -> int | None:
    """Return the highest pixel value, 1 or 255, that a normalization expects; None if unknown."""
    largest = float(np.abs(factor).max())
    if largest <= _PIXEL_FACTOR or (largest == 1 and float(np.abs(term).max()) > _PIXEL_MEAN):
        return 255
    # The network computes 2 * x - 1, or subtracts a mean of values up to 1 and divides by their
    # standard deviation.
    if 1 < largest <= _PIXELS and float(np.max(term)) < 0:
        return 1
    return 1 if largest == 1 and float(np.max(term)) < 0 else None


def _find_affine(model: Model, tensor: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the factor and the summand that a network's first nodes apply to an input.

    Factor and summand are 1 and 0 if the first nodes neither scale nor shift the input.
    """
    factor, term = np.ones(1), np.zeros(1)
    for _ in range(_MAX_STEPS):
        consumers = model.consumers(tensor)
        if len(consumers) != 1 or model.is_output(tensor) or len(consumers[0].outputs) != 1:
            break
        node = consumers[0]
        if node.op in _FACTORS + _TERMS:
            step = _read_step(model, node, tensor)
            if step is None or len({1, factor.size, step[0].size}) > 2:
                break
            factor, term = factor * step[0], term * step[0] + step[1]
        elif node.input(0) != tensor or not (
            node.op in _MOVES or qdq.is_q(node) or qdq.is_dq(node)
        ):
            break
        tensor = node.output
    return factor, term


def _read_step(
    model: Model, node: Node, tensor: str
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Return the factor and the summand of a Mul, Div, Add or Sub with a constant.

    None if the other operand is not a finite constant of at most four values, if it is a divisor
    with a 0, or if the tensor is the divisor or subtrahend.
    """
    position = 0 if node.input(0) == tensor else 1
    constant = model.constant(node.input(1 - position))
    if constant is None or constant.size > _MAPS or (position and node.op in ("Div", "Sub")):
        return None
    value = constant.astype(np.float64).reshape(-1)
    if not np.all(np.isfinite(value)) or (node.op == "Div" and not value.all()):
        return None
    zero, one = np.zeros_like(value), np.ones_like(value)
    if node.op in _FACTORS:
        return (value if node.op == "Mul" else 1 / value), zero
    return one, (value if node.op == "Add" else -value)

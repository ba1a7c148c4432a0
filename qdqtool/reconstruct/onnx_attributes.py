"""Attributes and constant values of ONNX nodes, from what a log prints of them or, failing that, from their shapes.

What was printed is exact; what follows from shapes alone is marked as such, and need not be what the model had: a 3x3
kernel with stride 2 and padding 1 and a 2x2 kernel with stride 2 halve a map alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qdqtool.buildlog.layers import int_list
from qdqtool.buildlog.records import ParsedNode, Shape

_MAX_RANK = 10


@dataclass(slots=True)
class Guess:
    """What is known of a node.

    Attributes:
        attributes: ONNX attributes.
        inferred: Names of those that follow from shapes and were not printed.
        values: Input position to the integers (or floats) of a constant there.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    inferred: list[str] = field(default_factory=list)
    values: dict[int, list[int] | list[float]] = field(default_factory=dict)


def attributes_of(node: ParsedNode, listed: dict[str, Any]) -> Guess:
    """Attributes of a node and values of its constant inputs.

    Args:
        node: The node as parsed.
        listed: Fields of the engine layer that absorbed it (``Kernel``, ``Stride``, ...), empty when not listed.
    """
    guess = Guess()
    handler = _HANDLERS.get(node.op)
    if handler is not None:
        handler(node, listed, guess)
    return guess


def shape_of(node: ParsedNode, position: int, *, output: bool = False) -> list[int] | None:
    """Shape of an input or output where all of it is known."""
    edges = node.outputs if output else node.inputs
    tensor = edges[position] if position < len(edges) else None
    shape: Shape | None = tensor.shape if tensor is not None else None
    if shape is None or any(d is None for d in shape):
        return None
    return [d for d in shape if d is not None]


def _window(node: ParsedNode, listed: dict[str, Any], guess: Guess, kernel: list[int] | None) -> None:
    """Kernel, strides, pads of a convolution or pooling."""
    details = node.details
    names = (("kernel_shape", "kernel", "Kernel"), ("strides", "strides", "Stride"), ("dilations", "dilations",
    "Dilation"))
    for attribute, key, field_name in names:
        value = int_list(details.get(key)) or int_list(listed.get(field_name))
        if value and not (attribute == "dilations" and node.op != "Conv"):
            guess.attributes[attribute] = value
    before = int_list(details.get("prepadding")) or int_list(listed.get("PrePadding"))
    after = int_list(details.get("postpadding")) or int_list(listed.get("PostPadding"))
    if before is not None and after is not None:
        guess.attributes["pads"] = [*before, *after]
    if kernel:
        guess.attributes["kernel_shape"] = kernel
    if "strides" in guess.attributes and "pads" in guess.attributes:
        return
    source, target = shape_of(node, 0), shape_of(node, 0, output=True)
    if source is None or target is None or len(source) < 3 or len(source) != len(target):
        guess.inferred.append("strides and pads (defaults; the shapes are not known)")
        return
    strides, begin, end, sizes = [], [], [], []
    for axis, (given, made) in enumerate(zip(source[2:], target[2:], strict=True)):
        size = (guess.attributes.get("kernel_shape") or [0] * 9)[axis] or _usual_pool(given, made)
        stride, low, high = _fit(given, made, size)
        strides.append(stride)
        begin.append(low)
        end.append(high)
        sizes.append(size)
    if "kernel_shape" not in guess.attributes:
        guess.attributes["kernel_shape"] = sizes
        guess.inferred.append("kernel_shape")
    guess.attributes.update(strides=strides, pads=[*begin, *end])
    guess.inferred += ["strides", "pads"]


def _usual_pool(given: int, made: int) -> int:
    """A usual pooling window: 5 where the size stays (SPPF), 3 where it halves, else the whole stride."""
    if made == given:
        return 5
    return 3 if made == (given + 1) // 2 else max(1, given // max(1, made))


def _fit(given: int, made: int, size: int) -> tuple[int, int, int]:
    """Stride and padding (before, after) that turn ``given`` into ``made``; the usual ones first."""
    usual = (size - 1) // 2
    nearest = max(1, round(given / max(1, made)))
    for stride in sorted(range(1, max(nearest + 3, 5)), key=lambda s: abs(s - nearest)):
        for low, high in ((usual, usual), (0, 0), (usual, size - 1 - usual), (0, 1)):
            if given + low + high >= size and (given + low + high - size) // stride + 1 == made:
                return stride, low, high
    total = max(0, (made - 1) * nearest + size - given)
    return nearest, total // 2, total - total // 2


def _conv(node: ParsedNode, listed: dict[str, Any], guess: Guess) -> None:
    weights, source = shape_of(node, 1), shape_of(node, 0)
    _window(node, listed, guess, weights[2:] if weights else None)
    if weights and source and len(weights) > 1 and weights[1] and source[1] % weights[1] == 0:
        guess.attributes["group"] = source[1] // weights[1]


def _conv_transpose(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    weights, source, target = shape_of(node, 1), shape_of(node, 0), shape_of(node, 0, output=True)
    if not weights or not source or not target:
        return
    guess.attributes["kernel_shape"] = weights[2:]
    guess.attributes["group"] = max(1, target[1] // max(1, weights[1]))
    strides, begin, end = [], [], []
    for given, made, size in zip(source[2:], target[2:], weights[2:], strict=False):
        stride = max(1, round(made / max(1, given)))
        total = max(0, (given - 1) * stride + size - made)
        strides.append(stride)
        begin.append(total // 2)
        end.append(total - total // 2)
    guess.attributes.update(strides=strides, pads=[*begin, *end])
    guess.inferred += ["strides", "pads"]


def _pool(node: ParsedNode, listed: dict[str, Any], guess: Guess) -> None:
    window = {key.removeprefix("Pooling"): value for key, value in listed.items() if key.startswith("Pooling")}
    fields = window if "WindowSize" in window else listed
    _window(node, {**fields, "Kernel": fields.get("WindowSize")}, guess, None)


def _gemm(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    left, right, made = shape_of(node, 0), shape_of(node, 1), shape_of(node, 0, output=True)
    if left and right and made and len(right) == 2:
        guess.attributes["transB"] = int(right[0] == made[-1] and right[1] == left[-1])
        guess.inferred.append("transB")


def _concat(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    first, made = shape_of(node, 0), shape_of(node, 0, output=True)
    axis = 0
    if first and made:
        axis = next((i for i, (a, b) in enumerate(zip(first, made, strict=False)) if a != b), 0)
    else:
        tensor = node.outputs[0] if node.outputs else None
        axis = 1 if tensor is not None and tensor.shape is not None and len(tensor.shape) > 1 else 0
    guess.attributes["axis"] = axis
    guess.inferred.append("axis")


def _transpose(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    source, made = shape_of(node, 0), shape_of(node, 0, output=True)
    if not source or not made or sorted(source) != sorted(made):
        guess.inferred.append("perm (the reverse, ONNX's default)")
        return
    free = list(range(len(source)))
    perm = []
    for size in made:
        axis = next(i for i in free if source[i] == size)
        free.remove(axis)
        perm.append(axis)
    guess.attributes["perm"] = perm
    guess.inferred.append("perm" if len(set(source)) < len(source) else "perm (the only one that fits)")


def _reduce(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    source, made = shape_of(node, 0), shape_of(node, 0, output=True)
    if not source or made is None:
        return
    guess.attributes["keepdims"] = int(len(source) == len(made))
    if len(source) == len(made):
        axes = [i for i, (a, b) in enumerate(zip(source, made, strict=True)) if a != b]
    else:
        axes = _dropped(source, made)
    guess.attributes["axes"] = axes or [len(source) - 1]
    guess.inferred.append("axes")


def _dropped(long: list[int], short: list[int]) -> list[int]:
    """Axes of ``long`` that are missing from ``short``: ones before others, later ones before earlier ones."""
    count = len(long) - len(short)
    if not 0 < count <= len(long) <= _MAX_RANK:
        return []
    choices = list(itertools.combinations(reversed(range(len(long))), count))
    for axes in sorted(choices, key=lambda chosen: sum(long[axis] != 1 for axis in chosen)):
        if [size for axis, size in enumerate(long) if axis not in axes] == short:
            return sorted(axes)
    return []


def _cast(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    tensor = node.outputs[0] if node.outputs else None
    guess.attributes["to"] = {"FLOAT": 1, "FLOAT16": 10, "HALF": 10, "INT32": 6, "INT64": 7, "BOOL": 9, "INT8": 3}.get(
        tensor.dtype if tensor is not None else "", 1
    )


def _gather(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    guess.attributes["axis"] = int(node.details.get("axis", 0))
    if "axis" not in node.details:
        guess.inferred.append("axis")


def _resize(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    for key in ("mode", "coordinate_transformation_mode"):
        if isinstance(node.details.get(key), str):
            guess.attributes[key] = node.details[key]
    if guess.attributes.get("coordinate_transformation_mode") == "asymmetric":
        guess.attributes["nearest_mode"] = "floor"
        guess.inferred.append("nearest_mode")
    source, made = shape_of(node, 0), shape_of(node, 0, output=True)
    if source and made and len(node.inputs) > 2:
        if len(node.inputs) == 3:
            guess.values[2] = [b / a if a else 1.0 for a, b in zip(source, made, strict=False)]
        else:
            guess.values[3] = list(made)


def _target_shape(position: int) -> Callable[[ParsedNode, dict[str, Any], Guess], None]:
    def handler(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
        tensor = node.outputs[0] if node.outputs else None
        if tensor is not None and tensor.shape is not None and sum(d is None for d in tensor.shape) <= 1:
            guess.values[position] = [-1 if d is None else d for d in tensor.shape]

    return handler


def _squeeze(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    source, made = shape_of(node, 0), shape_of(node, 0, output=True)
    if source is None or made is None:
        return
    axes = _dropped(source, made) if node.op == "Squeeze" else _dropped(made, source)
    if len(node.inputs) > 1:
        guess.values[1] = axes
    else:
        guess.attributes["axes"] = axes


def _slice(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    source, made = shape_of(node, 0), shape_of(node, 0, output=True)
    if not source or not made or len(source) != len(made) or len(node.inputs) < 3:
        return
    axis = next((i for i, (a, b) in enumerate(zip(source, made, strict=True)) if a != b), 0)
    count = shape_of(node, 1)
    if count not in ([1], []):
        return
    guess.values = {1: [0], 2: [made[axis]], 3: [axis], 4: [1]}
    guess.inferred.append("starts (0)")


def _split(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    source = shape_of(node, 0)
    made = [shape_of(node, i, output=True) for i in range(len(node.outputs))]
    if not source or any(m is None or len(m) != len(source) for m in made):
        return
    known = [m for m in made if m is not None]
    axis = next((i for i in range(len(source)) if any(m[i] != source[i] for m in known)), len(source) - 1)
    guess.attributes["axis"] = axis
    guess.inferred.append("axis")
    if len(node.inputs) > 1:
        guess.values[1] = [m[axis] for m in known]


def _topk(node: ParsedNode, _listed: dict[str, Any], guess: Guess) -> None:
    source, made = shape_of(node, 0), shape_of(node, 0, output=True)
    if source and made:
        axis = next((i for i, (a, b) in enumerate(zip(source, made, strict=False)) if a != b), len(source) - 1)
        guess.attributes["axis"] = axis
        guess.values[1] = [made[axis]]
        guess.inferred.append("axis")


_HANDLERS: dict[str, Callable[[ParsedNode, dict[str, Any], Guess], None]] = {
    "Conv": _conv, "ConvTranspose": _conv_transpose, "MaxPool": _pool, "AveragePool": _pool, "Gemm": _gemm,
    "Concat": _concat, "Transpose": _transpose, "ReduceMax": _reduce, "ReduceMean": _reduce, "ReduceSum": _reduce,
    "ReduceMin": _reduce, "Cast": _cast, "Gather": _gather, "Resize": _resize, "Reshape": _target_shape(1),
    "Expand": _target_shape(1), "Squeeze": _squeeze, "Unsqueeze": _squeeze, "Slice": _slice, "Split": _split,
    "TopK": _topk,
}

"""Exact values of anchors and strides that a file stores as rounded integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.fixing.site import FixSite
from qdqtool.fixing.weights import make_dequantizer, make_float_constant_site
from qdqtool.ir import qdq
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import BYTES
from qdqtool.patterns.heads import find_head
from qdqtool.patterns.view import View
from qdqtool.util.notes import Note

FloatArray = npt.NDArray[np.float64]
_COORDINATES = 2  # x and y
_IMAGE_RANK = 4  # batch, channels, height, width
_HALF_STEP = 0.501  # maximum distance of a rounded value, in steps; scales are rounded floats
_MULTIPLE_TOLERANCE = 1e-3  # maximum distance of float values from multiples of a step, in steps
_TOLERANCE = 1e-4  # relative tolerance of the largest value: rounding keeps the end of the range


def find_restorable_constants(view: View) -> tuple[list[FixSite], Note | None]:
    """Return sites that restore rounded anchors and strides of a YOLO head, and a note.

    The anchors are the centers of the cells of the head's feature maps, and the strides are the
    sizes of these cells in pixels. A constant is restored only if it has one value for each cell,
    each value is within half a step of the exact value, and the largest values are equal. A float
    constant, which an earlier fix may have made of a quantized one, is restored only if its values
    are also multiples of a step of 8-bit integers.
    """
    constants = _find_constants(view)
    sizes = _find_feature_maps(view.model) if constants else []
    steps: dict[str, float] = {}
    sites: list[FixSite] = []
    for tensor, dq in constants.items():
        exact = _compute_exact_values(view.model, sizes, view.model.constant_shape(tensor) or ())
        rounded = None if exact is None else _read_values(view, tensor, dq)
        if exact is None or rounded is None or np.array_equal(rounded, exact):
            continue
        step = _find_float_step(rounded) if dq is None else _read_step(view, dq)
        if not _is_rounding_of(rounded, exact, step):
            continue
        site = _restoration_site(view, tensor, dq, exact.astype(rounded.dtype))
        if site is not None:
            sites.append(site)
            steps[tensor] = step
    return sites, _describe_restored(steps, sizes) if sites else None


def _find_constants(view: View) -> dict[str, Node | None]:
    """Return the quantized constants with their DQs, and the float constants with None."""
    model = view.model
    constants: dict[str, Node | None] = {
        tensor: None
        for node in model.nodes
        if not qdq.is_qdq(node)
        for tensor in node.inputs
        if model.is_constant(tensor) and model.elem_type(tensor) == onnx.TensorProto.FLOAT
    }
    for dq in filter(qdq.is_dq, view.quantizers):
        if model.is_constant(dq.input(0)) and view.params(dq).precision in BYTES:
            constants[dq.input(0)] = dq
    return constants


def _read_values(view: View, tensor: str, dq: Node | None) -> npt.NDArray[Any] | None:
    if dq is None:
        return view.model.constant(tensor)
    dequantize = make_dequantizer(view, dq)
    return None if dequantize is None else dequantize()


def _restoration_site(
    view: View, tensor: str, dq: Node | None, exact: npt.NDArray[Any]
) -> FixSite | None:
    if dq is not None:
        return make_float_constant_site(view, dq, "exact values restored", exact)

    def apply(editor: Editor) -> None:
        editor.set_constant(tensor, exact)

    return FixSite(tensor, f"{tensor}: exact values restored", apply)


def _find_float_step(values: npt.NDArray[Any]) -> float:
    """Return the step to which float values were rounded when they were stored as 8-bit integers.

    NaN if the values are not multiples of a 127th or a 255th of the largest value.
    """
    largest = float(values.max())
    for levels in (127, 255):
        multiples = values * (levels / largest) if largest > 0 else values + math.nan
        if np.all(np.abs(multiples - np.rint(multiples)) < _MULTIPLE_TOLERANCE):
            return largest / levels
    return math.nan


def _read_step(view: View, dq: Node) -> float:
    """Return the scale of a DQ; NaN if it is unknown or not a single value."""
    scale = view.params(dq).single_scale
    return math.nan if scale is None else scale


def _find_feature_maps(model: Model) -> list[tuple[int, int]]:
    """Return height and width of the feature maps from which the head reads boxes.

    The largest map is first. Empty if a shape is unknown.
    """
    head = find_head(model)
    sizes = {_find_image_size(model, model.nodes[i].output) for i in head.boxes or head.finals}
    if None in sizes:
        return []
    return sorted(filter(None, sizes), key=math.prod, reverse=True)


def _find_image_size(model: Model, tensor: str) -> tuple[int, int] | None:
    """Return height and width of a tensor of images; None if they are unknown."""
    shape = model.shape(tensor)
    if shape is None or len(shape) != _IMAGE_RANK or shape[2] is None or shape[3] is None:
        return None
    return shape[2], shape[3]


def _compute_exact_values(
    model: Model, sizes: list[tuple[int, int]], shape: tuple[int, ...]
) -> FloatArray | None:
    """Return the anchors or strides of feature maps; None if a constant has another shape."""
    cells = sum(map(math.prod, sizes))
    if not cells or not shape or shape[-1] != cells:
        return None
    if math.prod(shape) == cells:
        strides = _compute_strides(model, sizes)
        counts = [math.prod(size) for size in sizes]
        return (
            np.repeat(np.asarray(strides, np.float64), counts).reshape(shape) if strides else None
        )
    if math.prod(shape) != _COORDINATES * cells or shape[-2] != _COORDINATES:
        return None
    grids = [np.indices(size)[::-1].reshape(_COORDINATES, -1) for size in sizes]
    return (np.concatenate(grids, axis=1).astype(np.float64) + 0.5).reshape(shape)


def _compute_strides(model: Model, sizes: list[tuple[int, int]]) -> list[int]:
    """Return the size of a cell in pixels for each feature map.

    Empty if there is not exactly one image input, or if height and width do not give the same whole
    number.
    """
    images = [size for t in model.inputs if (size := _find_image_size(model, t)) is not None]
    if len(images) != 1:
        return []
    strides = []
    for size in sizes:
        (height, rest), (width, other_rest) = map(divmod, images[0], size)
        if rest or other_rest or height != width:
            return []
        strides.append(height)
    return strides


def _is_rounding_of(rounded: npt.NDArray[Any], exact: FloatArray, step: float) -> bool:
    distance = float(np.abs(rounded - exact).max())
    largest = float(exact.max())
    is_end_equal = abs(float(rounded.max()) - largest) <= _TOLERANCE * largest
    return is_end_equal and distance <= _HALF_STEP * step


def _describe_restored(steps: dict[str, float], sizes: list[tuple[int, int]]) -> Note:
    """Return a note on restored constants, with the former step of each by name."""
    listed = " and ".join(f"'{name}' (step {step:.4g})" for name, step in steps.items())
    maps = ", ".join(f"{height}x{width}" for height, width in sizes)
    return Note(
        f"exact values of {listed} were restored: each rounded value is within half a step of the "
        f"anchor or stride of its cell (feature maps {maps})",
        code="constants-restored",
        tensors=list(steps),
        steps=list(steps.values()),
        sizes=[list(size) for size in sizes],
    )

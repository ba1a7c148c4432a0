"""Shapes of a network's outputs, also if the file leaves dimensions open."""

from __future__ import annotations

import numpy as np

from calibration.session import TensorFetcher, input_specs, open_session
from qdqtool.errors import ModelError
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import complete_shapes, resolve_output_shapes
from qdqtool.runtime.sessions import core_count

Shape = tuple[int | None, ...]


def find_output_shapes(model: Model) -> dict[str, Shape]:
    """Return the shape of each output, with complete input shapes for a dynamic input.

    Dimensions that the file leaves open are inferred. If the inference fails, for example after a
    TopK whose number is computed, the network runs once. The shape of an output is empty if it
    remains unknown. The model keeps the result.
    """
    shapes: dict[str, Shape] = model.cache.setdefault("output shapes", {})
    if not shapes:
        shapes |= {t: model.shape(t) or () for t in model.outputs}
        inferred = resolve_output_shapes(model)
        shapes |= {t: inferred.shape(t) or () for t, shape in shapes.items() if _is_open(shape)}
        if any(map(_is_open, shapes.values())):
            shapes |= _compute_shapes(model)
    return shapes


def _is_open(shape: Shape) -> bool:
    return not shape or None in shape[1:]  # the batch size does not matter


def _compute_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of the outputs for inputs of zeros; empty if the network cannot run."""
    try:
        specs, shapes = input_specs(model), complete_shapes(model)
        shapes |= {s.name: tuple(d or 1 for d in s.shape) for s in specs if s.name not in shapes}
        sample = {s.name: np.zeros(shapes[s.name], s.numpy_dtype) for s in specs}
        fetcher = TensorFetcher(open_session(model, model.outputs, core_count(), fold_qdq=False))
        return {name: array.shape for name, array in fetcher.run(sample).items()}
    except ModelError:
        return {}

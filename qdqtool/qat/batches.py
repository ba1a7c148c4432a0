"""Batches as people's loaders give them, turned into calls of the network."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qdqtool.errors import DataError
from qdqtool.qat.planning import Plan
from qdqtool.qat.trace import Call

_IMAGE_KEYS = ("img", "image", "images", "pixel_values", "inputs", "input", "x")
_HELP = "say with fn=lambda batch: ... what of a batch the network is called with"


def batches_of(data: Any, plan: Plan) -> Iterable[Any]:
    """The batches; one tensor of a batch's shape is one batch.

    Raises:
        DataError: It is nothing that gives batches.
    """
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data)
    if isinstance(data, Tensor):
        if data.ndim == plan.dimensions:
            return [data]
        if data.ndim == plan.dimensions + 1:
            return list(data)
        raise DataError(f"the data is a tensor of shape {tuple(data.shape)}; give batches like the sample")
    if isinstance(data, dict | str | bytes) or not isinstance(data, Iterable):
        raise DataError(f"the data is a {type(data).__name__}; give something that yields batches, like a loader")
    return data


def length_of(data: Any) -> int | None:
    """How many batches there are, where that is known."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a loader over an iterable dataset has a length that raises
        return None


def call_for(batch: Any, plan: Plan, model: nn.Module, fn: Callable[[Any], Any] | None) -> Call:
    """What the network is called with.

    Without ``fn`` a tensor is the argument; of a tuple or list the first elements are taken, as many as the sample had
    (images, not labels); of a dict those that the sample or the network's ``forward`` names, else its images
    (``img``, ``image`` ...). uint8 images become floats from 0 to 1.

    Raises:
        DataError: None of that fits.
    """
    if fn is not None:
        batch = fn(batch)
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if isinstance(batch, Tensor):
        call = Call((batch,))
    elif isinstance(batch, list | tuple):
        if fn is None and len(batch) > max(1, plan.arguments):
            batch = batch[: max(1, plan.arguments)]
        call = Call(tuple(batch))
    elif isinstance(batch, dict):
        call = _of_dict(batch, plan, model)
    else:
        raise DataError(f"a batch is a {type(batch).__name__}; {_HELP}")
    if not call.tensors:
        raise DataError(f"a batch has no tensor for the network; {_HELP}")
    return Call(tuple(map(_as_floats, call.args)), {k: _as_floats(v) for k, v in call.kwargs.items()})


def _of_dict(batch: dict[str, Any], plan: Plan, model: nn.Module) -> Call:
    if plan.keywords and set(plan.keywords) <= set(batch):
        return Call((), {k: batch[k] for k in plan.keywords})
    # Ultralytics' networks compute a loss when they are called with a dict; here they are called with its images.
    key = next((k for k in _IMAGE_KEYS if isinstance(batch.get(k), Tensor)), None)
    parameters = inspect.signature(model.forward).parameters
    if set(batch) <= set(parameters):
        return Call((), dict(batch))
    if key is not None:
        return Call((batch[key],))
    raise DataError(f"a batch is a dict with {', '.join(map(str, list(batch)[:6]))}; {_HELP}")


def _as_floats(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dtype is not torch.uint8:
        return value
    warnings.warn(
        "uint8 batches are divided by 255, as Ultralytics does; where the network wants something else, use fn=",
        UserWarning, stacklevel=2,
    )  # fmt: skip
    return value.float() / 255

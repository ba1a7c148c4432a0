"""Conversion of batches from data loaders to calls of a network."""

import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.qat.calls import NetworkCall
from qdqtool.qat.planning import Plan
from qdqtool.util.text import reason_of

_IMAGE_KEYS = ("img", "image", "images", "pixel_values", "inputs", "input", "x")
_HELP = "give fn=lambda batch: ... that returns the network's input"


def as_batches(data: Any, plan: Plan) -> Iterable[Any]:
    """Return data as an iterable of batches.

    A tensor with as many dimensions as the sample's is a single batch.

    Raises:
        DataError: The data is not iterable as batches.
    """
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim == plan.dimensions:
            return [data]
        if data.ndim == plan.dimensions + 1:
            return list(data)
        raise DataError(
            f"the data is a tensor of shape {tuple(data.shape)}; give batches like the sample",
            code="wrong-shape",
            parameter="data",
        )
    if isinstance(data, dict | str | bytes) or not isinstance(data, Iterable):
        raise DataError(
            f"the data is a {type(data).__name__}; give an iterable of batches, such as a "
            "DataLoader",
            code="wrong-type",
            parameter="data",
        )
    return data


def check_max_batches(max_batches: int | None) -> None:
    """Check that a maximum number of batches is at least 1; None means no maximum.

    Raises:
        QdqtoolError: The number is below 1.
    """
    if max_batches is not None and max_batches < 1:
        raise QdqtoolError(
            f"`max_batches={max_batches}`: give at least 1",
            code="out-of-range",
            parameter="max_batches",
        )


def limit_batches(batches: Iterable[Any], max_batches: int | None) -> Iterator[Any]:
    """Return an iterator over the first `max_batches` batches; over all batches with None."""
    return itertools.islice(batches, None if max_batches is None else min(max_batches, sys.maxsize))


def count_batches(batches: Any) -> int | None:
    """Return the number of batches; None if it is unknown."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except Exception:  # a loader over an iterable dataset has a length that raises
        return None


def convert_batch(
    batch: Any, plan: Plan, model: nn.Module, fn: Callable[[Any], Any] | None
) -> NetworkCall:
    """Return the call of the network for a batch.

    Without ``fn``, the type of the batch decides. A tensor is the only argument. A tuple or list
    gives as many first elements as the sample had arguments (images, not labels). A dict gives the
    entries that the sample or the network's ``forward`` names, else its images (``img``,
    ``image`` ...). uint8 images become floats from 0 to 1.

    Raises:
        DataError: The batch gives no arguments of the network.
    """
    if fn is not None:
        batch = fn(batch)
    if isinstance(batch, Tensor | np.ndarray):
        call = NetworkCall((_to_tensor(batch),))
    elif isinstance(batch, list | tuple):
        count = len(batch) if fn is not None else max(1, plan.arguments)
        call = NetworkCall(tuple(batch[:count]))
    elif isinstance(batch, dict):
        call = _convert_dict(batch, plan, model)
    else:
        raise DataError(
            f"a batch is a {type(batch).__name__}; {_HELP}", code="wrong-type", parameter="data"
        )
    if not call.tensors:
        raise DataError(
            f"a batch has no tensor for the network; {_HELP}",
            code="batch-without-tensor",
            parameter="data",
        )
    return call.map(_to_float)


def _convert_dict(batch: dict[str, Any], plan: Plan, model: nn.Module) -> NetworkCall:
    if plan.keywords and set(plan.keywords) <= set(batch):
        return NetworkCall((), {k: batch[k] for k in plan.keywords})
    if set(batch) <= set(inspect.signature(model.forward).parameters):
        return NetworkCall((), dict(batch))
    # Networks of Ultralytics compute a loss from a dict; the call gets the images of the dict.
    for key in _IMAGE_KEYS:
        if isinstance(batch.get(key), Tensor):
            return NetworkCall((batch[key],))
    raise DataError(
        f"a batch is a dict with {', '.join(map(str, list(batch)[:6]))}; {_HELP}",
        code="unknown-keys",
        parameter="data",
    )


def _to_tensor(value: Tensor | npt.NDArray[Any]) -> Tensor:
    """Return a tensor; copy an array only if torch does not support its byte order or strides.

    Raises:
        DataError: The array does not hold numbers.
    """
    if isinstance(value, Tensor):
        return value
    size = value.itemsize or 1
    has_torch_order = all(step >= 0 and step % size == 0 for step in value.strides)
    if not value.dtype.isnative or not has_torch_order:
        value = np.asarray(value, value.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise DataError(
            f"torch cannot convert the array of data: {reason_of(error)}; give numbers of a type "
            "that torch supports",
            code="unsupported-array",
            parameter="data",
        ) from error


def _to_float(value: Any) -> Any:
    if not isinstance(value, Tensor | np.ndarray):
        return value
    tensor = _to_tensor(value)
    if tensor.dtype is not torch.uint8:
        return tensor
    warnings.warn(
        "uint8 batches are divided by 255, as in Ultralytics; if the network needs another "
        "preprocessing, use fn=",
        UserWarning,
        stacklevel=2,
    )
    return tensor.float() / 255


def run_batch(model: nn.Module, call: NetworkCall, device: torch.device, number: int) -> Any:
    """Return the network's result for a batch.

    Raises:
        DataError: The network fails with the batch.
    """
    try:
        return call.run(model, device)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = reason_of(error, first_line=True)
        raise DataError(
            f"batch {number}: the network cannot be called with this batch ({reason}); give fn=, "
            "a function that selects the network's arguments from a batch",
            code="wrong-call",
            parameter="data",
        ) from error

"""Conversion of the batches of a data loader to arguments of a network."""

import inspect
import itertools
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
from qdqtool.util.text import format_reason

_IMAGE_KEYS = ("img", "image", "images", "pixel_values", "inputs", "input", "x")
_HELP = "give `fn`, a function that returns the network's input for a batch"


def as_batches(data: Iterable[Any], plan: Plan) -> Iterable[Any]:
    """Return data as an iterable of batches.

    A tensor with as many dimensions as the sample given to :func:`qdqtool.qat.prepare` is a single
    batch. A tensor with one more dimension is a stack of batches.

    Raises:
        DataError: The data is a tensor with another number of dimensions.
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
    return data


def limit_batches(batches: Iterable[Any], max_batches: int | None) -> Iterator[Any]:
    """Return an iterator over the first `max_batches` batches; None for all batches.

    Raises:
        QdqtoolError: The number is below 1.
    """
    if max_batches is not None and max_batches < 1:
        raise QdqtoolError(
            f"`max_batches={max_batches}`: give at least 1",
            code="out-of-range",
            parameter="max_batches",
        )
    return itertools.islice(batches, max_batches)


def count_batches(batches: Any) -> int | None:
    """Return the number of batches; None if it is unknown."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except Exception:  # the length of a loader of an iterable dataset raises an exception
        return None


def convert_batch(
    batch: Any, plan: Plan, model: nn.Module, fn: Callable[[Any], Any] | None
) -> NetworkCall:
    """Return the arguments of the network for a batch.

    If ``fn`` is None, the arguments depend on the type of the batch:

    * A tensor or an array is the only argument.
    * From a tuple or list, the first elements are the arguments, as many as the sample given to
      :func:`qdqtool.qat.prepare` had. Further elements, such as labels, are ignored.
    * From a dict, the entries with the names of the sample's keyword arguments are used. If a name
      is missing, or if the sample had no keyword arguments, all entries are used if all keys are
      parameters of ``forward``. Otherwise, only the images (``img``, ``image`` ...) are used.

    If ``fn`` is given, its result is converted instead. All elements of a tuple or list are then
    arguments. uint8 images are converted to floats from 0 to 1, with a warning.

    Raises:
        DataError: The batch contains no arguments of the network.
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
    return call.map_arguments(_scale_uint8)


def _convert_dict(batch: dict[str, Any], plan: Plan, model: nn.Module) -> NetworkCall:
    if plan.keywords and set(plan.keywords) <= set(batch):
        return NetworkCall((), {k: batch[k] for k in plan.keywords})
    if set(batch) <= set(inspect.signature(model.forward).parameters):
        return NetworkCall((), dict(batch))
    # The networks of Ultralytics accept a dict too, but they compute a loss from it. The argument
    # is therefore the tensor of images in the dict.
    for key in _IMAGE_KEYS:
        if isinstance(batch.get(key), Tensor):
            return NetworkCall((batch[key],))
    raise DataError(
        f"a batch is a dict with the keys {', '.join(map(str, list(batch)[:6]))}, which are not "
        f"the arguments of the network; {_HELP}",
        code="unknown-keys",
        parameter="data",
    )


def _to_tensor(value: Tensor | npt.NDArray[Any]) -> Tensor:
    """Return a tensor or array as a tensor.

    An array is copied only if torch does not support its byte order or strides.

    Raises:
        DataError: torch does not support the type of the array.
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
            f"torch cannot convert the array of data: {format_reason(error)}; give numbers of a "
            "type that torch supports",
            code="unsupported-array",
            parameter="data",
        ) from error


def _scale_uint8(value: Any) -> Any:
    if not isinstance(value, Tensor | np.ndarray):
        return value
    tensor = _to_tensor(value)
    if tensor.dtype is not torch.uint8:
        return tensor
    warnings.warn(
        "uint8 batches are divided by 255, as in Ultralytics; if the network needs another "
        "preprocessing, give `fn`",
        UserWarning,
        stacklevel=2,
    )
    return tensor.float() / 255


def run_batch(model: nn.Module, call: NetworkCall, device: torch.device, number: int) -> Any:
    """Run a network on a batch, and return the network's result.

    Args:
        model: Network.
        call: Arguments of the network.
        device: Device to which the tensors are moved.
        number: Number of the batch, for error messages.

    Raises:
        DataError: The network fails with these arguments.
    """
    try:
        return call.run(model, device)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = format_reason(error, first_line=True)
        raise DataError(
            f"batch {number}: the network cannot be called with this batch ({reason}); give `fn`, "
            "a function that selects the network's arguments from a batch",
            code="wrong-call",
            parameter="data",
        ) from error

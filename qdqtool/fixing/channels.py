"""A quantizer's values for each channel, beside the tensor that they belong to."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from qdqtool.errors import ModelError


def along(values: npt.NDArray[Any], shape: tuple[int, ...], axis: int | None, name: str) -> npt.NDArray[Any]:
    """Values of one channel each, or one for all, shaped to multiply a tensor of that shape along the axis.

    Args:
        values: Scales or zero points.
        shape: The tensor's.
        axis: Of the channels; None where there is one value for all.
        name: The quantizer's, for the message.

    Raises:
        ModelError: The tensor has another number of channels.
    """
    if values.size == 1:
        return values.reshape(())
    where = 0 if axis is None else axis
    if not -len(shape) <= where < len(shape) or shape[where] != values.size:
        dims = "x".join(map(str, shape)) or "scalar"
        raise ModelError(f"{name} has {values.size} scales or zero points along axis {where} of a {dims} tensor")
    spread = [1] * len(shape)
    spread[where] = -1
    return values.reshape(spread)

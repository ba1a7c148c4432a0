"""Formats of quantized numbers: INT8 and FP8 (E4M3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir.float8 import E4M3_MAX, e4m3_tensor, encode_e4m3, round_to_e4m3

MIN_GAIN = 1.02  # a greater speedup justifies the change to a less accurate format
LEVELS = 127  # symmetric INT8, -127 to 127: the range amax has the scale amax / 127


class NumberFormat(NamedTuple):
    """Format of the quantized numbers of Q/DQ pairs, with zero point 0.

    Attributes:
        name: Name in the option `precision`.
        title: Name in messages.
        largest: Largest number of the format. The range `amax` has the scale ``amax / largest``.
        opset: First opset whose QuantizeLinear converts FP32 tensors to the format.
        round_steps: Function that rounds quotients of values and their scale to the format.
        make_tensor: Function that makes an ONNX tensor from a name and rounded values.
    """

    name: str
    title: str
    largest: float
    opset: int
    round_steps: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
    make_tensor: Callable[[str, npt.NDArray[np.float32]], onnx.TensorProto]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the name. A worker process finds its own object by this name."""
        return find_number_format, (self.name,)


def _round_to_int8(steps: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    rounded: npt.NDArray[np.float32] = np.clip(np.rint(steps), -128, 127)
    return rounded + np.float32(0.0)  # adding 0.0 turns -0.0 into 0.0, because integers have no -0


def _int8_tensor(name: str, numbers: npt.NDArray[np.float32]) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(numbers).astype(np.int8), name)


def _fp8_tensor(name: str, numbers: npt.NDArray[np.float32]) -> onnx.TensorProto:
    return e4m3_tensor(name, encode_e4m3(numbers))


INT8 = NumberFormat("int8", "INT8", LEVELS, 13, _round_to_int8, _int8_tensor)
FP8 = NumberFormat("fp8", "FP8", E4M3_MAX, 19, round_to_e4m3, _fp8_tensor)


FORMATS = {f.name: f for f in (INT8, FP8)}


def find_number_format(name: str) -> NumberFormat:
    """Return the format for the option `precision`, ``int8`` or ``fp8``."""
    return FORMATS[name]


def is_worthwhile(gain: float) -> bool:
    """Return whether a speedup is greater than :data:`MIN_GAIN`."""
    return gain > MIN_GAIN

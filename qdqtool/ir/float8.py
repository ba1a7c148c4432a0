"""FP8 numbers in the format E4M3FN: a sign, 4 exponent bits and 3 mantissa bits.

The largest magnitude is 448, the smallest normal magnitude 2**-6, and the smallest subnormal
magnitude 2**-9. The format has no infinity; codes 127 and 255 are NaN. Codes are uint8 arrays,
because older versions of numpy and onnx lack the type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

E4M3_MAX = 448.0
_MANTISSA_BITS = 3
_MIN_EXPONENT = -6  # of normal numbers; subnormal numbers are multiples of 2**-9
_NAN = 0x7F
_SIGN = 0x80


def round_to_e4m3(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Round values to the nearest E4M3 numbers, halves to even, as QuantizeLinear does.

    Magnitudes above 448 saturate, infinity included. NaN remains NaN.
    """
    numbers = np.clip(np.asarray(values, np.float32), -E4M3_MAX, E4M3_MAX)
    steps = np.ldexp(np.float32(1.0), _exponents(numbers) - _MANTISSA_BITS)
    rounded: npt.NDArray[np.float32] = np.rint(numbers / steps) * steps
    return rounded


def _exponents(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    fractions, exponents = np.frexp(numbers)
    return np.where(fractions == 0, _MIN_EXPONENT, np.maximum(exponents - 1, _MIN_EXPONENT))


def encode_e4m3(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Round values as :func:`round_to_e4m3` does, and return their E4M3 codes."""
    numbers = round_to_e4m3(values)
    exponents = _exponents(numbers)
    # Mantissas are 8 to 15 for normal and 0 to 7 for subnormal numbers. Their fourth bit carries
    # into the exponent field, which is 0 for subnormal numbers only.
    mantissas = np.ldexp(np.abs(numbers), _MANTISSA_BITS - exponents)
    codes = np.where(np.isnan(numbers), 0.0, mantissas).astype(np.int64)
    codes += (exponents - _MIN_EXPONENT).astype(np.int64) << _MANTISSA_BITS
    codes[np.isnan(numbers)] = _NAN
    codes[np.signbit(numbers)] |= _SIGN
    return codes.astype(np.uint8)


def e4m3_tensor(name: str, codes: npt.NDArray[np.uint8]) -> onnx.TensorProto:
    """Return an ONNX tensor of E4M3 codes."""
    return TensorProto(
        name=name,
        data_type=TensorProto.FLOAT8E4M3FN,
        dims=codes.shape,
        raw_data=np.ascontiguousarray(codes).tobytes(),
    )

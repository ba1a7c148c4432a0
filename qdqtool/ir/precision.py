"""Data types of tensors."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """Data type of a tensor.

    FLOAT is a floating-point type whose width the builder chooses (weakly typed targets).
    """

    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    FP8 = "FP8"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FLOAT = "FLOAT"
    INT32 = "INT32"
    INT64 = "INT64"
    BOOL = "BOOL"
    UNKNOWN = "UNKNOWN"

    @property
    def is_float(self) -> bool:
        """Whether the type is FLOAT, FP32, FP16 or BF16; FP8 counts as a quantized type."""
        return self in _FLOATS

    @property
    def width(self) -> float | None:
        """Bytes of an element; None for UNKNOWN."""
        return _WIDTH.get(self)

    def agrees(self, other: Precision) -> bool:
        """Return whether two types are equal, or one is FLOAT and the other a float type."""
        return self == other or (
            Precision.FLOAT in (self, other) and self.is_float and other.is_float
        )


_WIDTH = {
    Precision.INT8: 1.0,
    Precision.UINT8: 1.0,
    Precision.FP8: 1.0,
    Precision.BOOL: 1.0,
    Precision.INT4: 0.5,
    Precision.FP16: 2.0,
    Precision.BF16: 2.0,
    Precision.FP32: 4.0,
    Precision.FLOAT: 4.0,
    Precision.INT32: 4.0,
    Precision.INT64: 8.0,
}
_FLOATS = (Precision.FLOAT, Precision.FP32, Precision.FP16, Precision.BF16)
BYTES = (Precision.INT8, Precision.UINT8)
EIGHT_BITS = (*BYTES, Precision.FP8)
INTEGER_RANGES = {Precision.INT8: (-128, 127), Precision.UINT8: (0, 255)}


def name_type(precision: Precision | None) -> str:
    """Return the name of a type in texts: ``float`` for FLOAT, whose width is unknown."""
    return "float" if precision == Precision.FLOAT else str(precision)

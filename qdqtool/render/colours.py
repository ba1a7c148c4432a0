"""Colours of precisions, those that users know from NVIDIA's engine pictures: INT8 green, FP16 orange, FP32 red."""

from __future__ import annotations

from qdqtool.types import Precision

_FILL = {
    Precision.INT8: "#a5d65a", Precision.UINT8: "#a5d65a", Precision.INT4: "#7fd1ae", Precision.FP8: "#5cc6c0",
    Precision.FP16: "#ffc066", Precision.BF16: "#ffd699", Precision.FP32: "#f4837d", Precision.FLOAT: "#f4837d",
    Precision.INT32: "#c9b8e8", Precision.INT64: "#b7a3e0", Precision.BOOL: "#d9d9d9", Precision.UNKNOWN: "#e6e6e6",
}
_LINE = {
    Precision.INT8: "#4c8a00", Precision.UINT8: "#4c8a00", Precision.INT4: "#1f8a63", Precision.FP8: "#11827c",
    Precision.FP16: "#c26a00", Precision.BF16: "#c26a00", Precision.FP32: "#b3261e", Precision.FLOAT: "#b3261e",
}
LEGEND = (Precision.INT8, Precision.FP16, Precision.FP32, Precision.INT32, Precision.UNKNOWN)


def fill(precision: Precision) -> str:
    """Background of a box."""
    return _FILL[precision]


def line(precision: Precision) -> str:
    """Colour of an arrow or border."""
    return _LINE.get(precision, "#5f5f5f")

"""What is known about a float tensor: which integers and scales are behind it, or where they were lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx

from qdqtool.model.graph import Node
from qdqtool.rtx.records import Why
from qdqtool.types import Precision

WIDTH: dict[int, int] = {
    onnx.TensorProto.FLOAT: 32,
    onnx.TensorProto.DOUBLE: 32,  # TensorRT-RTX computes doubles as floats
    onnx.TensorProto.FLOAT16: 16,
    onnx.TensorProto.BFLOAT16: 16,
}


@dataclass(frozen=True)
class Dequantized:
    """A tensor that is integers times a scale, so that INT8 arithmetic can take the integers.

    Attributes:
        dq: The DequantizeLinear it comes from.
        precision: Type of the integers.
        scalar: Whether the DQ's scale has rank 0; a convolution's input needs that, shape [1] is not enough.
        scale: Bytes of the DQ's scale values as float32; the node's index where the value is not known.
        factor: Product of the scalar constants it was multiplied with, computed in float32.
        inverted: Whether its reciprocal was taken (the compiler carries integers through 1/x as well).
        axes: Axes longer than 1 along which the scale varies.
        width: Bits of the float type it has now.
        narrowest: The fewest bits it had since the DQ.
        pad: The Pad with zeros just behind it, which only joins the convolution that reads it.
    """

    dq: Node
    precision: Precision
    scalar: bool
    scale: bytes | int
    width: int
    narrowest: int
    factor: float = 1.0
    inverted: bool = False
    axes: frozenset[int] = frozenset()
    pad: Node | None = None

    def same_scale(self, other: Dequantized) -> bool:
        """Whether integers of both mean the same numbers: equal DQ scale and equal factor, each for itself.

        A scale of 0.05 times 2 is not equal to a scale of 0.1.
        """
        return (
            self.scale == other.scale
            and self.factor == other.factor
            and self.inverted == other.inverted
            and self.width == other.width
        )

    def along(self, axes: Iterable[int]) -> Dequantized:
        return replace(self, axes=frozenset(axes))


@dataclass(frozen=True)
class Float:
    """A tensor that is just float.

    Attributes:
        reason: Where integers were lost; None where no quantizer is upstream.
        node: The node at which the integers were lost.
        dq: The DQ behind it.
    """

    reason: Why | None = None
    node: Node | None = None
    dq: Node | None = None


State = Dequantized | Float
NOTHING = Float()

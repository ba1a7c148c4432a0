"""What TensorRT-RTX 1.7 computes in float, refuses or crashes on; faults that the checks of a model find are theirs.

``Float`` is what is known of a float tensor: which integers are behind it, or where they were lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import onnx

from qdqtool.base.records import record
from qdqtool.model.graph import Node
from qdqtool.trt.faults import DeconvolutionFloat
from qdqtool.trt.refusals import InputNotDequantized, Step, WeightsNotDequantized
from qdqtool.types import Precision, Refusal

COMPILER = "TensorRT-RTX"  # who refused


class Why(StrEnum):
    """Where the integers were lost that a convolution would need."""

    OPERATOR = "an operator that is computed in float"
    SHARED = "a factor that cannot join the scale, for other nodes read the tensor"
    POOL = "a pool that becomes INT8 for a Q behind, and stays float for others"
    JOIN_FLOAT = "a join with an input that is float"
    JOIN_SCALE = "a join of different scales"
    PAD = "a Pad that does not join the convolution"
    AXIS = "an operator that does not keep the axis of the scales"
    INPUT_AXIS = "scales that vary along an axis of the input"
    INPUT_SHAPE1 = "a scale of shape [1] of the input"
    WEIGHTS_AXIS = "scales of weights that vary along another axis than the output channels"
    SUM_AXIS = "scales that vary along the axis that is summed up, or by batch"
    CAST = "a Cast to a wider float"
    TYPES = "types that cannot be multiplied"
    TURING = "a GPU without INT8"


@record
class IntegersLost(Refusal):
    """Integers do not arrive at a convolution.

    Attributes:
        why: Where they were lost.
        at: The node there; None where it is the convolution itself.
        dq: The DQ that they come from.
        weights: Whether they are those of the weights.
    """

    why: Why
    at: Step | None
    dq: str = ""
    weights: bool = False


class Fault(StrEnum):
    """What the compiler refuses or crashes on."""

    CONSTANT_TYPE = "a constant of a type that it does not import"
    OPERATOR = "an operator that it does not have"
    NMS = "NonMaxSuppression"
    ONE_VALUE = "an InstanceNormalization of one value"
    UINT8_INPUT = "a uint8 network input"
    WEIGHTS_SCALE = "a scale of weights that is computed at run time"
    SCALE = "a scale that is computed at run time"
    BLOCKS = "blocks along an axis that is not one of the last two"
    ZERO_POINT = "a zero point that is computed"
    FLOAT_TYPES = "data and weights of different types"
    INTEGERS = "a convolution of integers"
    INT4_WEIGHTS = "an int8 input with int4 weights"
    HALF_SHAPE1 = "float16 weights with one scale of shape [1]"
    HARDWARE_TYPE = "a type that the GPU lacks"


@record
class CompilerFault(Refusal):
    """The compiler makes no engine of a model.

    Attributes:
        fault: What it is.
        values: What its words name, in the order in which they name it.
    """

    quotes: ClassVar[bool] = True

    fault: Fault
    values: tuple[str, ...] = ()


def ends_build(refusal: Refusal) -> bool:
    """Whether no engine comes out; else a layer runs in float."""
    return not isinstance(refusal, IntegersLost | InputNotDequantized | WeightsNotDequantized | DeconvolutionFloat)


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

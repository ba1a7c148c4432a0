"""What TensorRT-RTX 1.7 computes in float, refuses or crashes on; faults that the checks of a model find are theirs."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from qdqtool.base.records import record
from qdqtool.trt.faults import DeconvolutionFloat
from qdqtool.trt.provenance import Step
from qdqtool.trt.refusals import InputNotDequantized, WeightsNotDequantized
from qdqtool.types import Refusal

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

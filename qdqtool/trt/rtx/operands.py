"""Whether one Conv, ConvTranspose, Gemm or MatMul gets integers on both sides, and if not, why.

Tensors computed from constants only are constants for the compiler.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir import constants, qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.sizes import RANDOM, contraction
from qdqtool.trt.detect import deconvolution_float
from qdqtool.trt.faults import DeconvolutionFloat
from qdqtool.trt.refusals import InputNotDequantized, Step, WeightsNotDequantized
from qdqtool.types import BYTES, Precision, Refusal
from qdqtool.util.records import record

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


class IntegersLost(Refusal):
    """Integers of ``dq`` do not arrive at a convolution: why, and the node there (None: the convolution itself).

    ``weights`` says whether they are those of the weights.
    """

    why: Why
    at: Step | None
    dq: str = ""
    weights: bool = False


class ScalesJoined(IntegersLost):
    """Integers lost at a join of different scales, which one scale would save."""


class Fault(StrEnum):
    """What the compiler refuses or crashes on."""

    CONSTANT_TYPE = "a constant of a type that it does not import"
    OPERATOR = "an operator, or a form of one, that it does not take"
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


class Form(StrEnum):
    """An operator, or a form of one, that the parser does not take."""

    OPERATOR = "operator"
    PLUGIN = "plugin"
    INPUT = "input"
    OUTPUTS = "outputs"
    DILATIONS = "dilations"
    TRAINING = "training"
    NORM = "norm"
    ANTIALIASING = "antialiasing"
    ASPECT = "aspect"
    COORDINATES = "coordinates"
    REDUCTION_ND = "reduction-nd"
    REDUCTION = "reduction"
    CAPITALS = "capitals"
    CAST = "cast"
    FLOATS = "floats"
    UINT8 = "uint8"
    UINT8_BETWEEN = "uint8-between"
    INT32 = "int32"
    HALF = "half"


class CompilerFault(Refusal):
    """The compiler makes no engine of a model.

    Attributes:
        fault: What it is.
        values: What its words name, in the order in which they name it; of an operator its form and the operator, or
            the type of an input.
    """

    quotes: ClassVar[bool] = True

    fault: Fault
    values: tuple[str, ...] = ()


def ends_build(refusal: Refusal) -> bool:
    """Whether no engine comes out; else a layer runs in float."""
    return not isinstance(
        refusal, IntegersLost | InputNotDequantized | WeightsNotDequantized | DeconvolutionFloat
    )


WIDTH: dict[int, int] = {
    onnx.TensorProto.FLOAT: 32,
    onnx.TensorProto.DOUBLE: 32,  # TensorRT-RTX computes doubles as floats
    onnx.TensorProto.FLOAT16: 16,
    onnx.TensorProto.BFLOAT16: 16,
}


@record
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
        mine, its = ((s.scale, s.factor, s.inverted, s.width) for s in (self, other))
        return mine == its


@record
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


# One layer with weights ----------------------------------------------------------------------------------------------


def judge(model: Model, node: Node, left: State, right: State) -> Precision | Refusal:
    """Decides for one node: the INT8 or FP8 that it multiplies, or why it runs in its float type.

    Args:
        model: The model.
        node: Conv, ConvTranspose, Gemm or MatMul.
        left: State of its first input: activations [N, C, ...] of a convolution.
        right: State of its second input: weights [Cout, Cin/groups, ...] of a Conv.
    """
    if isinstance(left, Float) or isinstance(right, Float):
        return _side(node, left, right)
    if (deconvolution := deconvolution_float(COMPILER, node)) is not None:
        return deconvolution
    refusal = (
        _convolution(node, left, right) if node.op == "Conv" else _product(model, node, left, right)
    )
    if refusal is not None:
        return refusal
    for state in (left, right):
        if state.width > state.narrowest:
            return lost(node, Why.CAST, node, state.dq)
    if left.precision in BYTES and right.precision in (*BYTES, Precision.INT4):
        return Precision.INT8
    both = left.precision == right.precision == Precision.FP8
    return Precision.FP8 if both else lost(node, Why.TYPES, node, left.dq)


def lost(
    node: Node, why: Why, at: Node | None, dq: Node | None, weights: bool = False
) -> IntegersLost:
    step = Step(at.name, at.op) if at is not None else None
    known = COMPILER, node.name, why, step, dq.name if dq is not None else "", weights
    return ScalesJoined(*known) if why is Why.JOIN_SCALE else IntegersLost(*known)


def _side(node: Node, left: State, right: State) -> Refusal:
    """The reason where at least one side has no integers."""
    if isinstance(left, Float):
        if left.reason is not None:
            return lost(node, left.reason, left.node, left.dq)
        quantized = not isinstance(right, Float) or right.reason is not None
        return InputNotDequantized(COMPILER, node.name, node.input(0), "", "", quantized)
    assert isinstance(right, Float)
    if right.reason is not None:
        return lost(node, right.reason, right.node, right.dq, weights=True)
    return WeightsNotDequantized(COMPILER, node.name, node.input(1), left.dq.name)


def _convolution(node: Node, left: Dequantized, right: Dequantized) -> Refusal | None:
    if left.axes:
        return lost(node, Why.INPUT_AXIS, node, left.dq)
    if not left.scalar:
        return lost(node, Why.INPUT_SHAPE1, node, left.dq)
    if left.pad is not None and node.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return lost(node, Why.PAD, left.pad, left.dq)
    if right.pad is not None:
        return lost(node, Why.PAD, right.pad, right.dq, weights=True)
    if right.axes - {0}:
        return lost(node, Why.WEIGHTS_AXIS, node, right.dq)
    return None


def _product(model: Model, node: Node, left: Dequantized, right: Dequantized) -> Refusal | None:
    """Gemm, MatMul and Einsum: a scale may vary along rows or columns of the result, not the sum, nor by batch."""
    if left.pad is not None or right.pad is not None:
        return lost(node, Why.PAD, left.pad or right.pad, left.dq)
    for state, position in ((left, 0), (right, 1)):
        if state.axes and state.axes - _free_axes(model, node, position):
            return lost(node, Why.SUM_AXIS, node, state.dq, weights=position == 1)
    return None


def _free_axes(model: Model, node: Node, position: int) -> set[int]:
    """The axes of a product's operand along which its scale may vary."""
    shape, known = model.shape(node.input(position)), contraction(model, node)
    if shape is None:
        return set()
    if known is not None:
        return {known.operands[position].index(c) for c in known.free[position]}
    rank = len(shape)
    if node.op == "Gemm":
        summed = int(bool(node.attributes.get(("transA", "transB")[position], 0))) ^ (1 - position)
    else:
        summed = max(rank - 1 - position, 0)
    return {rank - 1, rank - 2} - {summed}


_SMALL = 4096  # elements; scales and shapes are no larger, and more is not worth computing here


class Constants:
    """Knows constant tensors, their shapes, and the values of small ones.

    Attributes:
        plain: Constants, and what is computed from constants with no quantizer on the way.
        with_quantizers: The same, quantizers allowed.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.plain: set[str] = set(model.initializers)
        self.with_quantizers: set[str] = set(model.initializers)
        self._values: dict[str, npt.NDArray[Any] | None] = {}
        self._computing = constants.ConstantEvaluator(model)
        for node in model.ordered:
            inputs = set(filter(None, node.inputs))
            shape = model.shape(node.input(0)) if node.op in ("Shape", "Size") else None
            fixed = node.op == "Constant" or (shape is not None and None not in shape)
            computed = bool(inputs) and node.op not in RANDOM and not node.captured
            for found in (self.plain, self.with_quantizers):
                passes = found is self.with_quantizers or not qdq.is_qdq(node)
                if fixed or (computed and passes and inputs <= found):
                    found.update(filter(None, node.outputs))

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant; None when not known."""
        shape = self.model.shape(tensor)
        if shape is None or None in shape:
            value = self.value(tensor)
            return None if value is None else value.shape
        return tuple(d for d in shape if d is not None)

    def value(self, tensor: str) -> npt.NDArray[Any] | None:
        """The value of a small plain constant; None when it is large, not constant or cannot be computed."""
        if tensor not in self._values:
            self._values[tensor] = (
                None  # a tensor is never part of its own computation; this only ends odd graphs
            )
            try:
                self._values[tensor] = self._compute(tensor)
            except (
                RecursionError
            ):  # a chain of a thousand constant nodes: its value is not worth more
                return None
        return self._values[tensor]

    def _compute(self, tensor: str) -> npt.NDArray[Any] | None:
        if tensor not in self.plain:
            return None
        shape = self.model.constant_shape(tensor)
        if shape is not None:
            return self.model.constant(tensor) if math.prod(shape) <= _SMALL else None
        node = self.model.producer(tensor)
        if node is None:
            return None
        if node.op in ("Shape", "Size"):
            dims = self.model.shape(node.input(0))
            if dims is None or None in dims or node.op != "Shape" or node.attributes:
                return None
            return np.asarray(dims, dtype=np.int64)
        values = [self.value(t) if t else None for t in node.inputs]
        if any(v is None for v, t in zip(values, node.inputs, strict=True) if t):
            return None
        known = {t: v for t, v in zip(node.inputs, values, strict=True) if v is not None}
        return (self._computing.evaluate_node(node, known, _SMALL) or {}).get(tensor)

    def scalar(self, tensor: str) -> float | None:
        """The value of a one-element constant."""
        value = self.value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def ints(self, tensor: str) -> list[int] | None:
        """The values of a small integer constant."""
        value = self.value(tensor)
        return None if value is None else [int(v) for v in value.reshape(-1)]

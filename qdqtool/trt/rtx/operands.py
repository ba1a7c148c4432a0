"""Precision in which nodes multiply on TensorRT-RTX, from the states of the operands.

Tensors that are computed from constants alone are constants for the compiler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir import constants, qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.ir.sizes import RANDOM, find_contraction
from qdqtool.reasons.compiler import COMPILER, IntegersLost, IntegersLostAtJoin, LossCause
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.reasons.tensors import PathStep
from qdqtool.reasons.weights import WeightsNotDequantized
from qdqtool.trt.fault_checks import check_deconvolution, is_slow_fp8_convolution
from qdqtool.trt.rtx.fp8_kernels import find_fp8_obstacle

# Bits of each ONNX float type.
WIDTH: dict[int, int] = {
    onnx.TensorProto.FLOAT: 32,
    onnx.TensorProto.DOUBLE: 32,  # TensorRT-RTX computes float64 as float32
    onnx.TensorProto.FLOAT16: 16,
    onnx.TensorProto.BFLOAT16: 16,
}


@dataclass(frozen=True)
class IntegerState:
    """State of a tensor that equals a scale times integers that the compiler can multiply.

    Attributes:
        dq: DequantizeLinear that the tensor comes from.
        precision: Type of the integers.
        scalar: Whether the DQ's scale has rank 0. The data of a convolution requires this; a scale
            of shape [1] is not sufficient.
        scale: Bytes of the DQ's scale values as float32; the DQ's node index if they are unknown.
        width: Bits of the tensor's float type.
        narrowest: Fewest bits of a float type between the DQ and the tensor.
        factor: Factor, in float32, by which scalar constants have multiplied the tensor.
        inverted: Whether the tensor is the reciprocal of the integers times the scale.
        axes: Axes along which the scale varies.
        pad: Zero Pad directly before the tensor, which only a convolution can fuse; None without
            such a Pad.
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

    def has_scale_of(self, other: IntegerState) -> bool:
        """Return whether equal integers of both tensors stand for equal numbers.

        DQ scales and factors must both be equal: a scale of 0.05 with factor 2 differs from a scale
        of 0.1 with factor 1.
        """
        first, second = ((s.scale, s.factor, s.inverted, s.width) for s in (self, other))
        return first == second


@dataclass(frozen=True)
class FloatState:
    """State of a tensor whose integers the compiler cannot use.

    Attributes:
        reason: Reason why the integers of a DQ were lost; None if there were none.
        node: Node at which the integers were lost.
        dq: DQ that the integers came from.
    """

    reason: LossCause | None = None
    node: Node | None = None
    dq: Node | None = None


State = IntegerState | FloatState
NEVER_QUANTIZED = FloatState()


# One layer with weights -----------------------------------------------------------------------


def resolve_precision(
    model: Model, node: Node, left: State, right: State, capabilities: tuple[int, ...]
) -> Precision | Reason:
    """Return the type (INT8 or FP8) in which a node multiplies, or why it multiplies floats.

    Args:
        model: The model.
        node: Conv, ConvTranspose, Gemm, MatMul, or a matrix product as an Einsum.
        left: State of the first input: activations [N, C, ...] of a convolution.
        right: State of the second input: weights [Cout, Cin/groups, ...] of a Conv.
        capabilities: Compute capabilities to build for, such as 89 for SM89.
    """
    if isinstance(left, FloatState) or isinstance(right, FloatState):
        return _explain_float_operand(model, node, left, right)
    deconvolution = check_deconvolution(COMPILER, node)
    if deconvolution is not None:
        return deconvolution
    if node.op == "Conv":
        loss = _find_convolution_loss(node, left, right)
    else:
        loss = _find_product_loss(model, node, left, right)
    if loss is not None:
        return loss
    for state in (left, right):
        if state.width > state.narrowest:
            return create_integer_loss(node, LossCause.CAST, node, state.dq)
    if left.precision in BYTES and right.precision in (*BYTES, Precision.INT4):
        return Precision.INT8
    if left.precision == right.precision == Precision.FP8:
        return find_fp8_obstacle(model, node, left.dq, right.scalar, capabilities) or Precision.FP8
    return create_integer_loss(node, LossCause.TYPES, node, left.dq)


def create_integer_loss(
    node: Node, reason: LossCause, place: Node | None, dq: Node | None, weights: bool = False
) -> IntegersLost:
    """Return the reason why a node cannot multiply integers.

    Args:
        node: Conv, ConvTranspose, Gemm, MatMul, or a matrix product as an Einsum.
        reason: Cause of the loss.
        place: Node where the integers are lost; None if unknown.
        dq: DQ that the integers came from; None if unknown.
        weights: Whether the integers are those of the weights.
    """
    step = PathStep(place.name, place.op) if place is not None else None
    values = (COMPILER, node.name, reason, step, dq.name if dq is not None else "", weights)
    return IntegersLostAtJoin(*values) if reason is LossCause.JOIN_SCALE else IntegersLost(*values)


def _explain_float_operand(model: Model, node: Node, left: State, right: State) -> Reason:
    if isinstance(left, FloatState):
        if left.reason is not None:
            return create_integer_loss(node, left.reason, left.node, left.dq)
        quantized = not isinstance(right, FloatState) or right.reason is not None
        return InputNotDequantized(COMPILER, node.name, node.input(0), "", "", quantized)
    assert isinstance(right, FloatState)
    if right.reason is not None:
        return create_integer_loss(node, right.reason, right.node, right.dq, weights=True)
    is_fp8 = left.precision == Precision.FP8
    is_slow = is_fp8 and _is_slow_in_fp8(model, node)
    values = (COMPILER, node.name, node.input(1), left.dq.name)
    return WeightsNotDequantized(*values, fp8=is_fp8, slow_fp8=is_slow)


def _is_slow_in_fp8(model: Model, node: Node) -> bool:
    if node.op != "Conv":
        return node.op == "ConvTranspose"
    channels = (model.constant_shape(node.input(1)) or ())[:2]
    return is_slow_fp8_convolution(channels, node.integer("group", 1))


def _find_convolution_loss(node: Node, left: IntegerState, right: IntegerState) -> Reason | None:
    if left.axes:
        return create_integer_loss(node, LossCause.INPUT_AXIS, node, left.dq)
    if not left.scalar:
        return create_integer_loss(node, LossCause.INPUT_SHAPE1, node, left.dq)
    if left.pad is not None and node.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return create_integer_loss(node, LossCause.PAD, left.pad, left.dq)
    if right.pad is not None:
        return create_integer_loss(node, LossCause.PAD, right.pad, right.dq, weights=True)
    if right.axes - {0}:
        return create_integer_loss(node, LossCause.WEIGHTS_AXIS, node, right.dq)
    return None


def _find_product_loss(
    model: Model, node: Node, left: IntegerState, right: IntegerState
) -> Reason | None:
    """Return a reason if scales or a Pad keep a matrix product from multiplying integers.

    A scale may vary along the rows or columns of the result, but not along the summed axis or the
    batch.
    """
    if left.pad is not None or right.pad is not None:
        return create_integer_loss(node, LossCause.PAD, left.pad or right.pad, left.dq)
    for position, state in enumerate((left, right)):
        if state.axes and state.axes - _free_axes(model, node, position):
            return create_integer_loss(
                node, LossCause.SUM_AXIS, node, state.dq, weights=position == 1
            )
    return None


def _free_axes(model: Model, node: Node, position: int) -> set[int]:
    shape, sums = model.shape(node.input(position)), find_contraction(model, node)
    if shape is None:
        return set()
    if sums is not None:
        return {sums.operands[position].index(c) for c in sums.free[position]}
    rank = len(shape)
    if node.op == "Gemm":
        summed = int(bool(node.attributes.get(("transA", "transB")[position], 0))) ^ (1 - position)
    else:
        summed = max(rank - 1 - position, 0)
    return {rank - 1, rank - 2} - {summed}


_SMALL = 4096  # maximum number of elements of constants whose values are computed


class ConstantTensors:
    """Constant tensors of a model, with their shapes and the values of small constants.

    Attributes:
        plain: Constants, and tensors that nodes other than Q and DQ compute from constants or known
            shapes.
        with_quantizers: Tensors of ``plain``, and tensors computed from constants through Q or DQ.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.plain: set[str] = set(model.initializers)
        self.with_quantizers: set[str] = set(model.initializers)
        self._values: dict[str, npt.NDArray[Any] | None] = {}
        self._evaluator = constants.ConstantEvaluator(model)
        for node in model.ordered:
            outputs = [tensor for tensor in node.outputs if tensor]
            if self._is_constant(node, self.with_quantizers):
                self.with_quantizers.update(outputs)
                if not qdq.is_qdq(node) and self._is_constant(node, self.plain):
                    self.plain.update(outputs)

    def _is_constant(self, node: Node, constant_tensors: set[str]) -> bool:
        if node.op == "Constant":
            return True
        shape = self.model.shape(node.input(0)) if node.op in ("Shape", "Size") else None
        if shape is not None and None not in shape:
            return True
        inputs = {tensor for tensor in node.inputs if tensor}
        return (
            bool(inputs)
            and node.op not in RANDOM
            and not node.captured
            and inputs <= constant_tensors
        )

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of a constant; None if unknown."""
        shape = self.model.shape(tensor)
        if shape is None or None in shape:
            value = self.value(tensor)
            return None if value is None else value.shape
        return tuple(d for d in shape if d is not None)

    def value(self, tensor: str) -> npt.NDArray[Any] | None:
        """Return the value of a small plain constant; None if it cannot be computed."""
        if tensor not in self._values:
            self._values[tensor] = None  # ends the recursion if a tensor depends on itself
            try:
                self._values[tensor] = self._compute_value(tensor)
            except RecursionError:  # only a hostile model has a thousand constant nodes in a row
                return None
        return self._values[tensor]

    def _static_shape(self, node: Node) -> npt.NDArray[Any] | None:
        dims = self.model.shape(node.input(0))
        if dims is None or None in dims or node.op != "Shape" or node.attributes:
            return None
        return np.asarray(dims, dtype=np.int64)

    def _compute_value(self, tensor: str) -> npt.NDArray[Any] | None:
        if tensor not in self.plain:
            return None
        shape = self.model.constant_shape(tensor)
        if shape is not None:
            return self.model.constant(tensor) if math.prod(shape) <= _SMALL else None
        node = self.model.producer(tensor)
        if node is None:
            return None
        if node.op in ("Shape", "Size"):
            return self._static_shape(node)
        values = {}
        for name in filter(None, node.inputs):
            value = self.value(name)
            if value is None:
                return None
            values[name] = value
        return (self._evaluator.evaluate_node(node, values, _SMALL) or {}).get(tensor)

    def scalar(self, tensor: str) -> float | None:
        """Return the value of a one-element plain constant; None for other tensors."""
        value = self.value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def ints(self, tensor: str) -> list[int] | None:
        """Return the values of a small plain constant as integers; None if they are unknown."""
        value = self.value(tensor)
        return None if value is None else [int(v) for v in value.reshape(-1)]

"""Whether one Conv, ConvTranspose, Gemm or MatMul gets integers on both sides, and if not, why.

Tensors computed from constants only are constants for the compiler.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.rtx.records import COMPILER, Dequantized, Float, IntegersLost, State, Why
from qdqtool.trt.faults import DeconvolutionFloat
from qdqtool.trt.refusals import InputNotDequantized, Step, WeightsNotDequantized
from qdqtool.types import Precision, Refusal

_EIGHT_BIT = (Precision.INT8, Precision.UINT8)


@dataclass(frozen=True)
class Verdict:
    """The outcome for one node.

    Attributes:
        precision: INT8 or FP8 where it multiplies those; None where it runs in its float type.
        refusal: Why it is float; None where it is not.
    """

    precision: Precision | None
    refusal: Refusal | None = None


def judge(model: Model, node: Node, left: State, right: State) -> Verdict:
    """Decides for one node.

    Args:
        model: The model.
        node: Conv, ConvTranspose, Gemm or MatMul.
        left: State of its first input: activations [N, C, ...] of a convolution.
        right: State of its second input: weights [Cout, Cin/groups, ...] of a Conv.
    """
    if node.op == "ConvTranspose":
        quantized = isinstance(left, Dequantized) and isinstance(right, Dequantized)
        return Verdict(None, DeconvolutionFloat(COMPILER, node.name) if quantized else _side(node, left, right))
    if isinstance(left, Float) or isinstance(right, Float):
        return Verdict(None, _side(node, left, right))
    refusal = _convolution(node, left, right) if node.op == "Conv" else _product(model, node, left, right)
    if refusal is not None:
        return Verdict(None, refusal)
    for state in (left, right):
        if state.width > state.narrowest:
            return Verdict(None, _lost(node, Why.CAST, node, state.dq))
    precision = _type_of(left, right)
    return Verdict(precision, _lost(node, Why.TYPES, node, left.dq) if precision is None else None)


def _lost(node: Node, why: Why, at: Node | None, dq: Node | None, weights: bool = False) -> IntegersLost:
    step = Step(at.name, at.op) if at is not None else None
    return IntegersLost(COMPILER, node.name, why, step, dq.name if dq is not None else "", weights)


def _type_of(left: Dequantized, right: Dequantized) -> Precision | None:
    if left.precision in _EIGHT_BIT and right.precision in (*_EIGHT_BIT, Precision.INT4):
        return Precision.INT8
    return Precision.FP8 if left.precision == right.precision == Precision.FP8 else None


def _side(node: Node, left: State, right: State) -> Refusal:
    """The reason where at least one side has no integers."""
    if isinstance(left, Float):
        if left.reason is not None:
            return _lost(node, left.reason, left.node, left.dq)
        quantized = not isinstance(right, Float) or right.reason is not None
        return InputNotDequantized(COMPILER, node.name, node.input(0), "", "", quantized)
    assert isinstance(right, Float)
    if right.reason is not None:
        return _lost(node, right.reason, right.node, right.dq, weights=True)
    return WeightsNotDequantized(COMPILER, node.name, node.input(1), left.dq.name)


def _convolution(node: Node, left: Dequantized, right: Dequantized) -> Refusal | None:
    if left.axes:
        return _lost(node, Why.INPUT_AXIS, node, left.dq)
    if not left.scalar:
        return _lost(node, Why.INPUT_SHAPE1, node, left.dq)
    if left.pad is not None and node.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return _lost(node, Why.PAD, left.pad, left.dq)
    if right.pad is not None:
        return _lost(node, Why.PAD, right.pad, right.dq, weights=True)
    if right.axes - {0}:
        return _lost(node, Why.WEIGHTS_AXIS, node, right.dq)
    return None


def _product(model: Model, node: Node, left: Dequantized, right: Dequantized) -> Refusal | None:
    """Gemm and MatMul: a scale may vary along rows or columns of the result, not along the sum, nor by batch."""
    if left.pad is not None or right.pad is not None:
        return _lost(node, Why.PAD, left.pad or right.pad, left.dq)
    for state, position in ((left, 0), (right, 1)):
        if not state.axes:
            continue
        shape = model.shape(node.input(position))
        if shape is None:
            return _lost(node, Why.SUM_AXIS, node, state.dq, weights=position == 1)
        rank = len(shape)
        if node.op == "Gemm":
            summed = int(bool(node.attributes.get("transA", 0))) ^ 1 if position == 0 else int(
                bool(node.attributes.get("transB", 0)))
        else:
            summed = rank - 1 if position == 0 else max(rank - 2, 0)
        allowed = {rank - 1, rank - 2} - {summed}
        if state.axes - allowed:
            return _lost(node, Why.SUM_AXIS, node, state.dq, weights=position == 1)
    return None


_RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial",
                     "Bernoulli"})
_SMALL = 4096  # elements; scales and shapes are no larger, and more is not worth computing here


class Constants:
    """Knows constant tensors, their shapes, and the values of small ones."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.plain: set[str] = set(model.initializers)
        self.with_quantizers: set[str] = set(model.initializers)
        self._values: dict[str, npt.NDArray[Any] | None] = {}
        for node in model.ordered:
            if node.op == "Constant":
                self.plain.update(node.outputs)
                self.with_quantizers.update(node.outputs)
            elif node.op not in _RANDOM and not node.captured:
                inputs = [t for t in node.inputs if t]
                known_shape = node.op in ("Shape", "Size") and self._fixed_shape(node.input(0))
                if known_shape or (inputs and all(t in self.with_quantizers for t in inputs)):
                    self.with_quantizers.update(o for o in node.outputs if o)
                if qdq.is_qdq(node):
                    continue
                if known_shape or (inputs and all(t in self.plain for t in inputs)):
                    self.plain.update(o for o in node.outputs if o)

    def _fixed_shape(self, tensor: str) -> bool:
        shape = self.model.shape(tensor)
        return shape is not None and None not in shape

    def is_plain(self, tensor: str) -> bool:
        """A constant, or computed from constants, with no quantizer on the way."""
        return tensor in self.plain

    def is_weight(self, tensor: str) -> bool:
        """Computed from constants only, quantizers allowed."""
        return tensor in self.with_quantizers

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Dimensions of a constant; None when not known."""
        shape = self.model.shape(tensor)
        if shape is None or any(d is None for d in shape):
            value = self.value(tensor)
            return None if value is None else value.shape
        return tuple(d for d in shape if d is not None)

    def value(self, tensor: str) -> npt.NDArray[Any] | None:
        """The value of a small plain constant; None when it is large, not constant or cannot be computed."""
        if tensor not in self._values:
            self._values[tensor] = None  # a tensor is never part of its own computation; this only ends odd graphs
            try:
                self._values[tensor] = self._compute(tensor)
            except RecursionError:  # a chain of a thousand constant nodes: its value is not worth more
                return None
        return self._values[tensor]

    def _compute(self, tensor: str) -> npt.NDArray[Any] | None:
        if not self.is_plain(tensor):
            return None
        shape = self.model.constant_shape(tensor)
        if shape is not None:
            return self.model.constant(tensor) if math.prod(shape) <= _SMALL else None
        node = self.model.producer(tensor)
        if node is None:
            return None
        if node.op in ("Shape", "Size"):
            dims = self.model.shape(node.input(0))
            if dims is None or any(d is None for d in dims):
                return None
            whole = np.asarray(dims, dtype=np.int64)
            return whole if node.op == "Shape" and not node.attributes else None
        values = [self.value(t) if t else None for t in node.inputs]
        if any(v is None for v, t in zip(values, node.inputs, strict=True) if t):
            return None
        return _evaluate(self.model, node, [v for v in values if v is not None], tensor)

    def scalar(self, tensor: str) -> float | None:
        """The value of a one-element constant."""
        value = self.value(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def ints(self, tensor: str) -> list[int] | None:
        """The values of a small integer constant."""
        value = self.value(tensor)
        return None if value is None else [int(v) for v in value.reshape(-1)]


def _evaluate(model: Model, node: Node, values: list[npt.NDArray[Any]], wanted: str) -> npt.NDArray[Any] | None:
    """Runs one node of constants with onnx's reference implementation."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    if any(v.size > _SMALL for v in values) or node.domain not in ("", "ai.onnx"):
        return None
    names = [t for t in node.inputs if t]
    graph = helper.make_graph(
        [node.proto], "constant",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
         for n, v in dict(zip(names, values, strict=True)).items()],
        [helper.make_empty_tensor_value_info(wanted)])
    single = helper.make_model(graph, opset_imports=[helper.make_opsetid("", model.opset)])
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results: Any = ReferenceEvaluator(single).run([wanted], dict(zip(names, values, strict=True)))
    except Exception:
        # A strange or unsupported node has no known value, which is all that the caller asks.
        return None
    result = results[0]
    return result if isinstance(result, np.ndarray) and result.size <= _SMALL else None

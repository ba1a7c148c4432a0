"""Whether one Conv, ConvTranspose, Gemm or MatMul gets integers on both sides, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.model.graph import Model, Node
from qdqtool.rtx.records import COMPILER, IntegersLost, Why
from qdqtool.rtx.state import Dequantized, Float, State
from qdqtool.trt.faults import DeconvolutionFloat
from qdqtool.trt.provenance import Step
from qdqtool.trt.refusals import InputNotDequantized, WeightsNotDequantized
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

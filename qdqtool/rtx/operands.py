"""Whether one Conv, ConvTranspose, Gemm or MatMul gets integers on both sides, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.graph import Model, Node
from qdqtool.rtx.state import Dequantized, Float, State
from qdqtool.types import Precision

OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_EIGHT_BIT = (Precision.INT8, Precision.UINT8)


@dataclass(frozen=True)
class Verdict:
    """The outcome for one node.

    Attributes:
        precision: INT8 or FP8 where it multiplies those; None where it runs in its float type.
        reason: Code of why it is float (see ``reasons``); empty otherwise.
        node: The node that is to blame, None where none is.
        dq: The DQ whose integers do not arrive.
    """

    precision: Precision | None
    reason: str = ""
    node: Node | None = None
    dq: Node | None = None


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
        return Verdict(None, "deconvolution" if quantized else _side(left, right).reason)
    if isinstance(left, Float) or isinstance(right, Float):
        return _side(left, right)
    if node.op == "Conv":
        verdict = _convolution(node, left, right)
    else:
        verdict = _product(model, node, left, right)
    if verdict is not None:
        return verdict
    for state in (left, right):
        if state.width > state.narrowest:
            return Verdict(None, "cast", node, state.dq)
    return Verdict(_type_of(left, right), "" if _type_of(left, right) else "types", node, left.dq)


def _type_of(left: Dequantized, right: Dequantized) -> Precision | None:
    if left.precision in _EIGHT_BIT and right.precision in (*_EIGHT_BIT, Precision.INT4):
        return Precision.INT8
    return Precision.FP8 if left.precision == right.precision == Precision.FP8 else None


def _side(left: State, right: State) -> Verdict:
    """The reason where at least one side has no integers."""
    if isinstance(left, Float):
        if left.reason:
            return Verdict(None, left.reason, left.node, left.dq)
        both = isinstance(right, Float) and not right.reason
        return Verdict(None, "nothing" if both else "input")
    assert isinstance(right, Float)
    if right.reason:
        return Verdict(None, "weights-" + right.reason, right.node, right.dq)
    return Verdict(None, "weights", None, left.dq)


def _convolution(node: Node, left: Dequantized, right: Dequantized) -> Verdict | None:
    if left.axes:
        return Verdict(None, "input-axis", node, left.dq)
    if not left.scalar:
        return Verdict(None, "input-shape1", node, left.dq)
    if left.pad is not None and node.attributes.get("auto_pad", "NOTSET") != "NOTSET":
        return Verdict(None, "pad", left.pad, left.dq)
    if right.pad is not None:
        return Verdict(None, "weights-pad", right.pad, right.dq)
    if right.axes - {0}:
        return Verdict(None, "weights-axis", node, right.dq)
    return None


def _product(model: Model, node: Node, left: Dequantized, right: Dequantized) -> Verdict | None:
    """Gemm and MatMul: a scale may vary along rows or columns of the result, not along the sum, nor by batch."""
    if left.pad is not None or right.pad is not None:
        pad = left.pad or right.pad
        return Verdict(None, "pad", pad, left.dq)
    for state, position in ((left, 0), (right, 1)):
        if not state.axes:
            continue
        shape = model.shape(node.input(position))
        if shape is None:
            return Verdict(None, "sum-axis", node, state.dq)
        rank = len(shape)
        if node.op == "Gemm":
            summed = int(bool(node.attributes.get("transA", 0))) ^ 1 if position == 0 else int(
                bool(node.attributes.get("transB", 0)))
        else:
            summed = rank - 1 if position == 0 else max(rank - 2, 0)
        allowed = {rank - 1, rank - 2} - {summed}
        if state.axes - allowed:
            return Verdict(None, "sum-axis", node, state.dq)
    return None

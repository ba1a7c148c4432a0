"""Bounds of ranks and of lengths of vectors, node by node: what shape inference may be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx

from qdqtool import budgets

_MANY = 1 << 62  # a bound that is none


class Extent(NamedTuple):
    """Bounds of a tensor.

    Attributes:
        low: Least rank.
        high: Greatest rank.
        least: Least number of entries, of a vector; 0 of another.
        most: Greatest number of entries of a vector, or of the value that is followed; 0 where there is neither.
    """

    low: int
    high: int
    least: int
    most: int

    @property
    def valueless(self) -> bool:
        """Whether it is no vector, and no value is followed."""
        return self.low > 1 and not self.most


UNTYPED = Extent(2, 2, 0, 0)  # onnx knows nothing of it, and so follows nothing
ANY = Extent(0, _MANY, 0, _MANY)
_SCALAR = Extent(0, 0, 1, 1)
_COUNT = Extent(1, 1, 0, _MANY)


def ranked(kind: onnx.TypeProto | None) -> bool:
    return kind is not None and kind.tensor_type.HasField("shape")


def of_type(kind: onnx.TypeProto) -> Extent:
    if not kind.tensor_type.HasField("shape"):
        return ANY
    dims = kind.tensor_type.shape.dim
    if len(dims) == 1 and not dims[0].HasField("dim_value"):
        return _COUNT
    return of_dims([d.dim_value for d in dims])


def of_dims(dims: Sequence[int]) -> Extent:
    if len(dims) == 1:
        return Extent(1, 1, max(dims[0], 0), max(dims[0], 0))
    return Extent(len(dims), len(dims), 0, 0) if dims else _SCALAR


def as_known(output: Extent, kind: onnx.TypeProto | None, followed: bool) -> Extent:
    """An output's extent by its node and by its type, where one is known."""
    if kind is None or not ranked(kind):
        return output
    known = of_type(kind)
    if known.most == _MANY:
        return known._replace(most=output.most)
    return known._replace(most=max(known.most, output.most)) if followed else known


# What a node of a kind makes of the extents of its inputs, as far as shapes of networks depend on it. -----------------


def _same(inputs: list[Extent]) -> Extent:
    return inputs[0] if inputs else ANY


def _ranks(inputs: list[Extent]) -> Extent:
    """The rank of the first input, with other dimensions."""
    found = _same(inputs)
    return found._replace(least=0, most=0 if found.low > 1 else _MANY)


def _broadcast(inputs: list[Extent]) -> Extent:
    if not inputs:
        return ANY
    low = max(e.low for e in inputs)
    high = max(e.high for e in inputs)
    most = 0 if any(e.valueless for e in inputs) else max(e.most for e in inputs)
    return Extent(low, high, max(e.least for e in inputs) if high == 1 else 0, most)


def _concat(inputs: list[Extent]) -> Extent:
    if not inputs:
        return ANY
    low, high = max(e.low for e in inputs), min(e.high for e in inputs)
    most = 0 if any(e.valueless for e in inputs) else min(sum(e.most for e in inputs), _MANY)
    return Extent(low, max(low, high), sum(e.least for e in inputs) if high == 1 else 0, most)


def _of_shape(shape: Extent) -> Extent:
    """A tensor whose dimensions another one states."""
    if shape.high > 1:
        return ANY
    return Extent(shape.least, shape.most, 0, 0 if shape.least > 1 else _MANY)


def _product(inputs: list[Extent]) -> Extent:
    if len(inputs) < 2 or min(e.low for e in inputs[:2]) < 2:
        return ANY._replace(high=max((e.high for e in inputs), default=_MANY))
    return Extent(max(e.low for e in inputs[:2]), max(e.high for e in inputs[:2]), 0, 0)


def _gather(inputs: list[Extent]) -> Extent:
    if len(inputs) < 2:
        return ANY
    data, places = inputs[:2]
    low, high = max(data.low - 1 + places.low, 0), min(max(data.high - 1, 0) + places.high, _MANY)
    # A value that is followed is read at places, of which there are as many as it gets.
    most = 0 if data.valueless and low > 1 else max(places.most, 1) if data.high <= 1 else _MANY if low < 2 else 0
    if data.low > 1 and data.most:
        most = max(most, data.most, places.most)
    return Extent(low, high, places.least if data.high == places.high == places.low == 1 else 0, most)


def _unsqueeze(inputs: list[Extent]) -> Extent:
    found = _same(inputs)
    added = inputs[1].most if len(inputs) > 1 else budgets.RANK
    least = inputs[1].least if len(inputs) > 1 else 1
    low = found.low + least
    most = max(found.most, 1 if low < 2 else 0)  # of a scalar one entry, and the value of a vector is followed
    return Extent(low, min(found.high + added, _MANY), 1 if found.high == 0 else 0, most)


def _squeeze(inputs: list[Extent]) -> Extent:
    found = _same(inputs)
    removed = inputs[1].most if len(inputs) > 1 else _MANY
    low = max(found.low - removed, 0)
    return Extent(low, found.high, 0, found.most if found.high <= 1 else max(found.most, _MANY if low < 2 else 0))


def _reduce(inputs: list[Extent]) -> Extent:
    found = _same(inputs)
    return found._replace(low=0, least=0, most=found.most if found.high <= 1 else _MANY)


_SAME = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "Bernoulli", "BitwiseNot",
    "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "CumSum", "DequantizeLinear", "Dropout", "Elu",
    "Erf", "Exp", "Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax",
    "LpNormalization", "MeanVarianceNormalization", "Mish", "Neg", "Not", "QuantizeLinear", "RMSNormalization",
    "Reciprocal", "Relu", "ReverseSequence", "Round", "ScatterElements", "ScatterND", "Selu", "Shrink", "Sigmoid",
    "Sign", "Sin", "Sinh", "Slice", "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh",
    "ThresholdedRelu", "Transpose", "Trilu",
)
_OF_RANK = (
    "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "DeformConv", "DepthToSpace", "GlobalAveragePool",
    "GlobalLpPool", "GlobalMaxPool", "GridSample", "LpPool", "MaxPool", "MaxRoiPool", "MaxUnpool", "Pad",
    "QLinearConv", "Resize", "SpaceToDepth", "Split", "Tile", "TopK", "Upsample",
)
_BROADCASTS = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
)
_EXTENTS: dict[str, Callable[[list[Extent]], Extent]] = {
    **dict.fromkeys(_SAME, _same), **dict.fromkeys(_OF_RANK, _ranks), **dict.fromkeys(_BROADCASTS, _broadcast),
    "Concat": _concat, "MatMul": _product, "Gather": _gather, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze,
    "Reshape": lambda inputs: _of_shape(inputs[1]) if len(inputs) > 1 else ANY,
    "Expand": lambda inputs: _broadcast([inputs[0], _of_shape(inputs[1])]) if len(inputs) > 1 else ANY,
    "ConstantOfShape": lambda inputs: _of_shape(inputs[0]) if inputs else ANY,
    "Shape": lambda inputs: Extent(1, 1, _same(inputs).low, _same(inputs).high),
    "Size": lambda _: _SCALAR,
    "Range": lambda _: _COUNT,
    "Flatten": lambda _: Extent(2, 2, 0, 0),
    "Gemm": lambda _: Extent(2, 2, 0, 0),
    "NonZero": lambda _: Extent(2, 2, 0, 0),
    "NonMaxSuppression": lambda _: Extent(2, 2, 0, 0),
}
# Operators of which onnx follows values, by trial of all: tests/test_inference.py
FOLLOWED = frozenset(("Add", "Cast", "Concat", "Gather", "MeanVarianceNormalization", "Mul", "Size", "Slice",
                       "Squeeze", "Sub", "Unsqueeze"))


def output_of(node: onnx.NodeProto, inputs: list[Extent]) -> Extent:
    work = _EXTENTS.get(node.op_type)
    if work is not None:
        if node.op_type in ("Squeeze", "Unsqueeze") and len(inputs) == 1:
            axes = next((len(a.ints) for a in node.attribute if a.name == "axes"), 0)
            inputs = [*inputs, Extent(1, 1, axes, axes if axes or node.op_type == "Unsqueeze" else _MANY)]
        return work(inputs)
    if node.op_type == "Constant":
        return _constant(node)
    if node.op_type.startswith("Reduce"):
        kept = all(a.i for a in node.attribute if a.name == "keepdims")
        return _same(inputs) if kept else _reduce(inputs)
    # Of the others no rank is more than one above those of the inputs together, but where dimensions are attributes.
    high = sum(e.high for e in inputs) + 1 + sum(len(a.ints) for a in node.attribute)
    return ANY._replace(high=min(high, _MANY))


def _constant(node: onnx.NodeProto) -> Extent:
    for attribute in node.attribute:
        if attribute.name == "value":
            return of_dims(attribute.t.dims)
        if attribute.name in ("value_ints", "value_floats", "value_strings"):
            return of_dims([len(attribute.ints) + len(attribute.floats) + len(attribute.strings)])
        if attribute.name == "sparse_value":
            return of_dims(attribute.sparse_tensor.dims)
    return _SCALAR

"""What makes TensorRT-RTX 1.7 refuse a model or crash on it; each rule was seen in a build."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx

from qdqtool.model import qdq
from qdqtool.model.graph import Model, Node
from qdqtool.model.qdq import QuantParams
from qdqtool.rtx.operands import Constants, judge
from qdqtool.rtx.records import COMPILER, WIDTH, CompilerFault, Dequantized, Fault, State
from qdqtool.trt.faults import (
    BiasQuantized,
    IntegerOperator,
    ScaleCount,
    ScaleNotPositive,
    ScaleRank,
    StoredReadElsewhere,
)
from qdqtool.trt.refusals import NonzeroZeroPoint
from qdqtool.types import Precision, Refusal

# What OnnxParser.supports_operator() of 1.7.1 answers no to, of all operators in ONNX 1.23.
UNSUPPORTED = frozenset({
    "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "DeformConv", "Det",
    "DynamicQuantizeLinear", "ImageDecoder", "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix",
    "Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv",
    "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat",
    "StringNormalizer", "StringSplit", "SwiGLU", "TfIdfVectorizer", "Unique",
})
# Types of constants that the parser's importInitializers() takes; the rest ends with "cannot be imported".
_BAD_CONSTANTS: dict[int, str] = {
    onnx.TensorProto.INT16: "int16", onnx.TensorProto.UINT16: "uint16", onnx.TensorProto.FLOAT8E5M2: "float8e5m2",
    onnx.TensorProto.FLOAT8E4M3FNUZ: "float8e4m3fnuz", onnx.TensorProto.FLOAT8E5M2FNUZ: "float8e5m2fnuz",
}
_TYPE_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "Float", onnx.TensorProto.FLOAT16: "Half", onnx.TensorProto.BFLOAT16: "BFloat16",
    onnx.TensorProto.INT8: "Int8", onnx.TensorProto.UINT8: "UInt8", onnx.TensorProto.DOUBLE: "Float",
    onnx.TensorProto.INT32: "Int32", onnx.TensorProto.INT64: "Int64",
}


def refusals(
    model: Model, constants: Constants, types: dict[str, int], states: dict[str, State], sm: tuple[int, ...]
) -> Iterator[Refusal]:
    """Every reason for which no engine comes out, in graph order.

    Args:
        model: The model.
        constants: Its constants.
        types: ONNX element type of each tensor, as far as known.
        states: Integers behind each float tensor.
        sm: Compute capabilities of the build, 86 for SM86.
    """
    for tensor in model.initializers.values():
        yield from _constant(tensor.name, tensor.data_type)
    for node in model.ordered:
        if qdq.is_qdq(node):
            yield from _quantizer(model, constants, types, node)
        elif node.op in UNSUPPORTED and node.domain in ("", "ai.onnx"):
            integers = node.op in qdq.INTEGER_OPERATORS
            yield IntegerOperator(COMPILER, node.name, node.op) if integers else _fault(
                node, Fault.OPERATOR, node.op)
        elif node.op == "NonMaxSuppression":
            yield _fault(node, Fault.NMS)
        elif node.op == "InstanceNormalization" and _one_value(model, node):
            yield _fault(node, Fault.ONE_VALUE)
        elif node.op in ("Conv", "ConvTranspose"):
            yield from _convolution(types, states, node)
        elif node.op == "Constant":
            proto = model.constant_proto(node.output)
            if proto is not None:
                yield from _constant(node.output, proto.data_type)
    for node, name in qdq.misread_constants(model):
        yield StoredReadElsewhere(COMPILER, node.name, node.op, name)
    yield from _hardware(model, sm)


def _one_value(model: Model, node: Node) -> bool:
    shape = model.shape(node.input(0))
    return shape is not None and all(d == 1 for d in shape[2:])


def _fault(node: Node, fault: Fault, *values: str) -> CompilerFault:
    return CompilerFault(COMPILER, node.name, fault, values)


def _constant(name: str, data_type: int) -> Iterator[Refusal]:
    if data_type in _BAD_CONSTANTS:
        yield CompilerFault(COMPILER, name, Fault.CONSTANT_TYPE, (_BAD_CONSTANTS[data_type],))


def _quantizer(model: Model, constants: Constants, types: dict[str, int], node: Node) -> Iterator[Refusal]:
    params = qdq.read_params(model, node)
    source = types.get(node.input(0), 0)
    if qdq.is_dq(node) and source == onnx.TensorProto.INT32:
        yield BiasQuantized(COMPILER, node.name, "", Precision.INT32)
        return
    if qdq.is_dq(node) and source == onnx.TensorProto.UINT8 and node.input(0) in model.inputs:
        yield _fault(node, Fault.UINT8_INPUT)
    yield from _scale(model, constants, node, params)
    yield from _zero_point(model, constants, node)


def _scale(model: Model, constants: Constants, node: Node, params: QuantParams) -> Iterator[Refusal]:
    name = node.input(1)
    if not constants.is_plain(name):
        if qdq.is_dq(node):
            maker = model.producer(node.input(0))
            weights = constants.is_weight(maker.input(0) if maker is not None and qdq.is_q(maker) else node.input(0))
            yield _fault(node, Fault.WEIGHTS_SCALE if weights else Fault.SCALE, name)
        return
    shape = params.scale_shape if params.scale_shape is not None else constants.shape(name)
    scale = params.scale
    if scale is None:
        value = constants.value(name)
        scale = None if value is None else value.astype(np.float64).reshape(-1)
    if shape is not None and 0 in shape:
        yield ScaleCount(COMPILER, node.name, 0, node.integer("axis", 1), model.shape(node.input(0)) or ())
        return
    if scale is not None and not np.all(scale > 0):
        bad = ~(scale > 0)
        channels = tuple(int(i) for i in np.flatnonzero(bad)[:5])
        yield ScaleNotPositive(COMPILER, node.name, float(scale[bad][0]), int(bad.sum()), scale.size, channels)
    dims = model.shape(node.input(0))
    if shape is None or dims is None or (math.prod(shape) == 1 and len(shape) < 2):
        return
    yield from _count(node, shape, dims)


def _count(node: Node, shape: tuple[int, ...], dims: tuple[int | None, ...]) -> Iterator[Refusal]:
    axis = node.integer("axis", 1)
    blocked = node.integer("block_size", 0)
    if len(shape) > 1:
        if not blocked:
            yield ScaleRank(COMPILER, node.name, shape, False)
        elif axis % max(len(dims), 1) < len(dims) - 2:
            yield _fault(node, Fault.BLOCKS, str(axis))
        return
    if axis < 0:
        axis += len(dims)
    if not 0 <= axis < len(dims) or (dims[axis] is not None and shape[0] != dims[axis]):
        yield ScaleCount(COMPILER, node.name, shape[0], axis, dims)


def _zero_point(model: Model, constants: Constants, node: Node) -> Iterator[Refusal]:
    name = node.input(2)
    if not name:
        return
    if not constants.is_plain(name):
        yield _fault(node, Fault.ZERO_POINT, name)
        return
    value = constants.value(name)
    if value is not None and np.any(np.asarray(value).astype(np.float64) != 0):
        zeros = np.nan_to_num(np.asarray(value).astype(np.float64))
        yield NonzeroZeroPoint(COMPILER, node.name, node.name, (int(zeros.min()), int(zeros.max())))


def _convolution(types: dict[str, int], states: dict[str, State], node: Node) -> Iterator[Refusal]:
    data, weights = types.get(node.input(0), 0), types.get(node.input(1), 0)
    kind = "IConvolutionLayer" if node.op == "Conv" else "IDeconvolutionLayer"
    same = data == weights or {data, weights} == {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    if data and weights and not same:
        yield _fault(
            node, Fault.FLOAT_TYPES, kind, str(_TYPE_NAMES.get(data, data)), str(_TYPE_NAMES.get(weights, weights))
        )
        return
    if data in _TYPE_NAMES and data not in WIDTH:
        yield _fault(node, Fault.INTEGERS, _TYPE_NAMES[data])
    left, right = states.get(node.input(0)), states.get(node.input(1))
    if (node.op == "Conv" and isinstance(left, Dequantized) and isinstance(right, Dequantized)
            and left.precision == Precision.INT8 and right.precision == Precision.INT4 and left.scalar
            and not left.axes):
        yield _fault(node, Fault.INT4_WEIGHTS)


def half_shape1(model: Model, types: dict[str, int], states: dict[str, State], node: Node) -> Iterator[Refusal]:
    """An INT8 Conv of float16 whose weights have one scale of shape [1]: the compiler fails on it.

    One scale for one output channel is fine, and so is float32.
    """
    left, right = states.get(node.input(0)), states.get(node.input(1))
    if not isinstance(left, Dequantized) or not isinstance(right, Dequantized) or right.scalar or right.axes:
        return
    shape = model.shape(node.input(1))
    if types.get(node.input(0)) == onnx.TensorProto.FLOAT16 and shape is not None and shape[0] != 1:
        if judge(model, node, left, right).precision == Precision.INT8:
            yield _fault(node, Fault.HALF_SHAPE1, right.dq.name)


def _hardware(model: Model, sm: tuple[int, ...]) -> Iterator[Refusal]:
    """Types that the compute capability lacks."""
    for node in qdq.quantizers(model):
        precision = qdq.read_params(model, node).precision
        word, least = {Precision.FP8: ("fp8_e4m3", 89), Precision.INT4: ("int4", 80)}.get(precision, ("", 0))
        short = [s for s in sm if s < least]
        if short:
            yield _fault(node, Fault.HARDWARE_TYPE, word, ", ".join(f"sm{n}" for n in short), str(least))
            return

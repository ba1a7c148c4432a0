"""What makes TensorRT-RTX 1.7 refuse a model or crash on it, with its own words.

Each rule was seen in a build; the wording in quotes is the parser's or the builder's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx

from qdqtool import qdq
from qdqtool.finding_codes import FindingCode
from qdqtool.graph import Model, Node
from qdqtool.qdq import QuantParams
from qdqtool.rtx.constants import Constants
from qdqtool.rtx.operands import judge
from qdqtool.rtx.state import WIDTH, Dequantized, State
from qdqtool.types import Evidence, Finding, Precision, Severity

TARGET = "rtx1.7"
CRASH: Final = "BUILD-CRASHES"
REFUSED: Final = "BUILD-FAILS"

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
) -> Iterator[Finding]:
    """Every reason for which no engine comes out, in graph order; all have severity error.

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
            yield _unsupported(node)
        elif node.op == "NonMaxSuppression":
            yield _error(REFUSED, node.name,
                         f"{node.name}: \"NonMaxSuppression has no runners that implement the layer\".",
                         "Cut the NonMaxSuppression off the model and run it outside.")
        elif node.op == "InstanceNormalization" and _one_value(model, node):
            yield _error(REFUSED, node.name,
                         f"{node.name}: normalizes a single value; \"Error during shape inference of ... inorm\".",
                         "Remove the InstanceNormalization: its result is its bias.")
        elif node.op in ("Conv", "ConvTranspose"):
            yield from _convolution(types, states, node)
        elif node.op == "Constant":
            proto = model.constant_proto(node.output)
            if proto is not None:
                yield from _constant(node.output, proto.data_type)
    for node, name in qdq.misread_constants(model):
        yield _error(
            "WEIGHT-INDIRECT", node.name,
            f"{node.name} ({node.op}) reads the stored integers '{name}': \"Quantized constant ({name}) is only "
            "allowed before DQ or PLUGIN_V2 or kPLUGIN_V3 node\".",
            f"Fold {node.name} into the stored integers, or move it behind the DequantizeLinear.",
        )
    yield from _hardware(model, sm)


def _one_value(model: Model, node: Node) -> bool:
    shape = model.shape(node.input(0))
    return shape is not None and all(d == 1 for d in shape[2:])


def _error(code: FindingCode, node: str, message: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, node, message, fix, Evidence.SEEN, target=TARGET)


def _constant(name: str, data_type: int) -> Iterator[Finding]:
    if data_type in _BAD_CONSTANTS:
        yield _error(
            "QTYPE", name,
            f"{name}: TensorRT-RTX refuses a constant of type {_BAD_CONSTANTS[data_type]}: \"Failed to import "
            f"initializer: {name}\".",
            "Quantize to int8.",
        )


def _unsupported(node: Node) -> Finding:
    if node.op in qdq.INTEGER_OPERATORS:
        return _error(
            "QOPERATOR", node.name,
            f"{node.name}: TensorRT-RTX has no {node.op}; the parser stops with \"In function check{node.op}: [8] "
            "false\".",
            "Export the model in Q/DQ format (QuantFormat.QDQ in onnxruntime), with static scales.",
        )
    return _error(
        REFUSED, node.name,
        f"{node.name}: TensorRT-RTX has no {node.op}; the parser stops with \"In function check{node.op}: [8] false\".",
        "Replace the operator by ones that TensorRT has, or cut it off the model.",
    )


def _quantizer(model: Model, constants: Constants, types: dict[str, int], node: Node) -> Iterator[Finding]:
    params = qdq.read_params(model, node)
    source = types.get(node.input(0), 0)
    if qdq.is_dq(node) and source == onnx.TensorProto.INT32:
        yield _error(
            "BIAS-DQ", node.name,
            f"{node.name}: \"input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8\".",
            "Give the convolution its bias as float, without a DQ.",
        )
        return
    if qdq.is_dq(node) and source == onnx.TensorProto.UINT8 and node.input(0) in model.inputs:
        yield _error(
            "ZP-UINT8", node.name,
            f"{node.name}: reads a uint8 network input; \"Found unsupported input type of UINT8\".",
            "Make the network input int8, with zero point 0.",
        )
    yield from _scale(model, constants, node, params)
    yield from _zero_point(model, constants, node)


def _scale(model: Model, constants: Constants, node: Node, params: QuantParams) -> Iterator[Finding]:
    name = node.input(1)
    if not constants.is_plain(name):
        if qdq.is_dq(node):
            maker = model.producer(node.input(0))
            weights = constants.is_weight(maker.input(0) if maker is not None and qdq.is_q(maker) else node.input(0))
            yield _error(
                REFUSED if weights else CRASH, node.name,
                f"{node.name}: its scale '{name}' is computed at run time; TensorRT-RTX "
                + ("stops with \"MyelinCheckException: operand.h: CHECK(is_constant())\"." if weights
                   else "crashes (signal 11) while building."),
                "Write the scale as a constant; TensorRT has no dynamic quantization.",
            )
        return
    shape = params.scale_shape if params.scale_shape is not None else constants.shape(name)
    scale = params.scale
    if scale is None:
        value = constants.value(name)
        scale = None if value is None else value.astype(np.float64).reshape(-1)
    if shape is not None and 0 in shape:
        yield _error("SCALE-COUNT", node.name, f"{node.name}: \"Cannot have scale with no coefficients.\"",
                     "Give it one positive scale, or one for each channel.")
        return
    if scale is not None and not np.all(scale > 0):
        worst = float(scale[~(scale > 0)][0])
        count = f"{int(np.sum(~(scale > 0)))} of {scale.size} scales are" if scale.size > 1 else "its scale is"
        yield _error(
            "SCALE-NONPOS", node.name,
            f"{node.name}: {count} not positive ({worst:g}); \"Scale coefficients must all be positive\".",
            "Give every scale a small positive value; a tensor of zeros can have any.",
        )
    dims = model.shape(node.input(0))
    if shape is None or dims is None or (math.prod(shape) == 1 and len(shape) < 2):
        return
    yield from _count(node, shape, dims)


def _count(node: Node, shape: tuple[int, ...], dims: tuple[int | None, ...]) -> Iterator[Finding]:
    axis = node.integer("axis", 1)
    blocked = node.integer("block_size", 0)
    if len(shape) > 1:
        if not blocked:
            yield _error("SCALE-RANK", node.name,
                         f"{node.name}: its scale has {len(shape)} dimensions ({list(shape)}); TensorRT-RTX takes none "
                         "or one.", "Reshape scale and zero point to one dimension.")
        elif axis % max(len(dims), 1) < len(dims) - 2:
            yield _error(
                "SCALE-RANK", node.name,
                f"{node.name}: blocks along axis {axis}; \"The blocking dimension must be the last or second to last "
                "dimension\".", "Use one scale for each output channel.")
        return
    if axis < 0:
        axis += len(dims)
    if not 0 <= axis < len(dims):
        yield _error("SCALE-COUNT", node.name,
                     f"{node.name}: \"Axis must be in the range [0, nbDims ({len(dims)})]. Provided axis is: {axis}\".",
                     "Put the axis of the output channels: 0 for Conv, 1 for ConvTranspose.")
        return
    size = dims[axis]
    if size is not None and shape[0] != size:
        yield _error(
            "SCALE-COUNT", node.name,
            f"{node.name}: \"The number of scales is not equal to the number of output channels. Number of output "
            f"channels = {size}, number of scales = {shape[0]}.\" (axis {axis})",
            "Put the axis right: 0 for Conv, 1 for ConvTranspose; a grouped ConvTranspose takes one scale.",
        )


def _zero_point(model: Model, constants: Constants, node: Node) -> Iterator[Finding]:
    name = node.input(2)
    if not name:
        return
    if not constants.is_plain(name):
        yield _error("ZP-NONZERO", node.name,
                     f"{node.name}: its zero point '{name}' is computed; \"has `zero_point` which is not an "
                     "initializer\".", "Write the zero point as a constant 0.")
        return
    value = constants.value(name)
    if value is not None and np.any(np.asarray(value).astype(np.float64) != 0):
        yield _error(
            "ZP-NONZERO", node.name,
            f"{node.name}: its zero point is {np.asarray(value).reshape(-1)[0]}; \"Non-zero zero point is not "
            "supported. Please set kENABLE_UINT8_AND_ASYMMETRIC_QUANTIZATION_DLA to enable asymmetric quantization if "
            "it is on DLA.\"",
            "Quantize symmetrically: int8 with zero point 0.",
        )


def _convolution(types: dict[str, int], states: dict[str, State], node: Node) -> Iterator[Finding]:
    data, weights = types.get(node.input(0), 0), types.get(node.input(1), 0)
    kind = "IConvolutionLayer" if node.op == "Conv" else "IDeconvolutionLayer"
    same = data == weights or {data, weights} == {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
    if data and weights and not same:
        yield _error(
            REFUSED, node.name,
            f"{node.name}: \"{kind} `input` and `kernel` must be of same type. `input` type is "
            f"{_TYPE_NAMES.get(data, data)} but `kernel` is of type {_TYPE_NAMES.get(weights, weights)}.\"",
            "Give input and weights the same float type (a DQ makes the type of its scale).",
        )
        return
    if data in _TYPE_NAMES and data not in WIDTH:
        yield _error(REFUSED, node.name,
                     f"{node.name}: computes on {_TYPE_NAMES[data]}; a convolution takes float inputs.",
                     "Put a DequantizeLinear in front of it.")
    left, right = states.get(node.input(0)), states.get(node.input(1))
    if (node.op == "Conv" and isinstance(left, Dequantized) and isinstance(right, Dequantized)
            and left.precision == Precision.INT8 and right.precision == Precision.INT4 and left.scalar
            and not left.axes):
        yield _error(REFUSED, node.name, f"{node.name}: int8 input with int4 weights; \"CHECK(dtype == W.type()) "
                     "failed\".", "Quantize the weights to int8.")


def half_shape1(model: Model, types: dict[str, int], states: dict[str, State], node: Node) -> Iterator[Finding]:
    """An INT8 Conv of float16 whose weights have one scale of shape [1]: the compiler fails on it.

    One scale for one output channel is fine, and so is float32.
    """
    left, right = states.get(node.input(0)), states.get(node.input(1))
    if not isinstance(left, Dequantized) or not isinstance(right, Dequantized) or right.scalar or right.axes:
        return
    shape = model.shape(node.input(1))
    if types.get(node.input(0)) == onnx.TensorProto.FLOAT16 and shape is not None and shape[0] != 1:
        if judge(model, node, left, right).precision == Precision.INT8:
            yield _error(
                "SCALE-SHAPE1", node.name,
                f"{node.name}: float16 weights with one scale of shape [1] ({right.dq.name}); \"MyelinCheckException: "
                "const_ppg.cpp: CHECK(same_symbolic_shapes(op_output->dimensions(), A_dims)) failed\".",
                "Give the weights a scalar scale (shape []), or one for each output channel.",
            )


def _hardware(model: Model, sm: tuple[int, ...]) -> Iterator[Finding]:
    """Types that the compute capability lacks."""
    for node in qdq.quantizers(model):
        precision = qdq.read_params(model, node).precision
        word, least = {Precision.FP8: ("fp8_e4m3", 89), Precision.INT4: ("int4", 80)}.get(precision, ("", 0))
        short = [s for s in sm if s < least]
        if short:
            yield _error(
                "QTYPE", node.name,
                f"{node.name}: \"Cannot compile for target(s) {', '.join(f'sm{s}' for s in short)}, because the model "
                f"contains HW-specific datatypes: {word}\".",
                f"Quantize to int8, or build for SM{least} or later only.",
            )
            return

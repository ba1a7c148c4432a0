"""Checks for models that TensorRT-RTX rejects, or on which it crashes."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import precision_of
from qdqtool.proto.subgraphs import STANDARD
from qdqtool.reasons.compiler import (
    COMPILER,
    CompilerFault,
    FaultKind,
    IntegersLost,
    LossCause,
    UnsupportedForm,
)
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fp8 import FloatFp8Column
from qdqtool.trt import fault_checks
from qdqtool.trt.rtx.graph_states import GraphStates
from qdqtool.trt.rtx.operands import WIDTH, IntegerState, resolve_precision

# Operators for which the parser requires a plugin with the operator's name.
_PLUGINS = frozenset(
    {
        "BitCast",
        "CausalConvWithState",
        "CumProd",
        "DFT",
        "DeformConv",
        "LinearAttention",
        "NonZero",
        "RoiAlign",
        "SwiGLU",
    }
)
# Operators of ONNX 1.23 that OnnxParser.supports_operator() of TensorRT-RTX 1.7.1 rejects.
UNSUPPORTED = _PLUGINS | frozenset(
    {
        "AffineGrid",
        "Bernoulli",
        "BitShift",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "CenterCropPad",
        "Col2Im",
        "Compress",
        "ConcatFromSequence",
        "ConvInteger",
        "Det",
        "DynamicQuantizeLinear",
        "ImageDecoder",
        "MatMulInteger",
        "MaxRoiPool",
        "MaxUnpool",
        "MelWeightMatrix",
        "Multinomial",
        "NegativeLogLikelihoodLoss",
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "QLinearConv",
        "QLinearMatMul",
        "RegexFullMatch",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SequenceMap",
        "SoftmaxCrossEntropyLoss",
        "SplitToSequence",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
        "Unique",
    }
)
# Types that a network input and the output of a Cast cannot have.
_UNSUPPORTED_TYPES = frozenset(
    {
        onnx.TensorProto.INT16,
        onnx.TensorProto.UINT16,
        onnx.TensorProto.UINT32,
        onnx.TensorProto.UINT64,
        onnx.TensorProto.STRING,
        onnx.TensorProto.FLOAT8E4M3FNUZ,
        onnx.TensorProto.FLOAT8E5M2,
        onnx.TensorProto.FLOAT8E5M2FNUZ,
    }
)


def _has_rejected_value(name: str, *accepted: object) -> Callable[[Node, int], bool]:
    """Return a function that checks whether an attribute of a node has a rejected value.

    The first of the ``accepted`` values is the default of the attribute.
    """

    def has_rejected_value(node: Node, _: int) -> bool:
        value = node.attributes.get(name, accepted[0])
        return any(v not in accepted for v in (value if isinstance(value, list) else [value]))

    return has_rejected_value


# Forms of supported operators that the parser rejects. Each row has the operators, a test that
# receives the node and the ONNX type of its first input, and the form if the test succeeds. Source:
# builds of onnx's node tests, and of variants of these tests.
_FORMS: tuple[tuple[tuple[str, ...], Callable[[Node, int], bool], UnsupportedForm], ...] = (
    (
        ("BatchNormalization", "LayerNormalization", "MaxPool"),
        lambda node, _: any(node.outputs[1:]),
        UnsupportedForm.OUTPUTS,
    ),
    (
        ("AveragePool", "LpPool", "MaxPool"),
        _has_rejected_value("dilations", 1),
        UnsupportedForm.DILATIONS,
    ),
    (("BatchNormalization",), _has_rejected_value("training_mode", 0), UnsupportedForm.TRAINING),
    (("LpPool",), _has_rejected_value("p", 2, 1), UnsupportedForm.NORM),
    (("Resize",), _has_rejected_value("antialias", 0), UnsupportedForm.ANTIALIASING),
    (
        ("Resize",),
        _has_rejected_value("keep_aspect_ratio_policy", "stretch"),
        UnsupportedForm.ASPECT,
    ),
    (
        ("Resize",),
        _has_rejected_value(
            "coordinate_transformation_mode",
            "half_pixel",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_half_pixel_for_nn",
        ),
        UnsupportedForm.COORDINATES,
    ),
    (("ScatterND",), _has_rejected_value("reduction", "none"), UnsupportedForm.REDUCTION_ND),
    (("ScatterElements",), _has_rejected_value("reduction", "none"), UnsupportedForm.REDUCTION),
    (
        ("Einsum",),
        lambda node, _: any(c.isupper() for c in str(node.attributes.get("equation"))),
        UnsupportedForm.CAPITALS,
    ),
    (
        ("Cast",),
        lambda node, _: node.attributes.get("to") in _UNSUPPORTED_TYPES,
        UnsupportedForm.CAST,
    ),
    (
        ("Mod",),
        lambda node, elem: not node.attributes.get("fmod", 0) and elem in WIDTH,
        UnsupportedForm.FLOATS,
    ),
    (
        (
            "Add",
            "Div",
            "Greater",
            "GreaterOrEqual",
            "Less",
            "LessOrEqual",
            "Max",
            "Min",
            "Mul",
            "Sub",
        ),
        lambda _, elem: elem == onnx.TensorProto.UINT8,
        UnsupportedForm.UINT8,
    ),
    (("Relu",), lambda _, elem: elem == onnx.TensorProto.INT32, UnsupportedForm.INT32),
    (("Celu",), lambda _, elem: elem in WIDTH and WIDTH[elem] == 16, UnsupportedForm.HALF),
)
_FORMS_BY_OPERATOR: dict[str, list[tuple[Callable[[Node, int], bool], UnsupportedForm]]] = {}
for _operators, _test, _form in _FORMS:
    for _operator in _operators:
        _FORMS_BY_OPERATOR.setdefault(_operator, []).append((_test, _form))
# Types of constants that the parser's importInitializers() rejects ("cannot be imported").
_BAD_CONSTANTS: dict[int, str] = {
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.FLOAT8E5M2: "float8e5m2",
    onnx.TensorProto.FLOAT8E4M3FNUZ: "float8e4m3fnuz",
    onnx.TensorProto.FLOAT8E5M2FNUZ: "float8e5m2fnuz",
}
# Names of types in the compiler's error messages. The compiler computes float64 as float32.
_TYPE_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "Float",
    onnx.TensorProto.FLOAT16: "Half",
    onnx.TensorProto.BFLOAT16: "BFloat16",
    onnx.TensorProto.INT8: "Int8",
    onnx.TensorProto.UINT8: "UInt8",
    onnx.TensorProto.DOUBLE: "Float",
    onnx.TensorProto.INT32: "Int32",
    onnx.TensorProto.INT64: "Int64",
}


def find_compiler_faults(states: GraphStates, capabilities: tuple[int, ...]) -> Iterator[Reason]:
    """Yield a reason for each fault that makes a build fail.

    ``capabilities`` are the compute capabilities to build for, such as 86 for SM86.
    """
    model = states.model
    yield from _check_constants(model)
    for name in model.inputs:
        if model.elem_type(name) in _UNSUPPORTED_TYPES:
            kind = onnx.TensorProto.DataType.Name(model.elem_type(name)).lower()
            yield _create_fault(name, FaultKind.OPERATOR, UnsupportedForm.INPUT, kind)
    for node in model.ordered:
        if node.domain in STANDARD:
            yield from (
                _create_fault(node.name, FaultKind.OPERATOR, form, node.op)
                for test, form in _FORMS_BY_OPERATOR.get(node.op, ())
                if test(node, states.types.get(node.input(0), 0))
            )
        yield from _check_node(states, node)
    yield from fault_checks.check_misread_constants(COMPILER, model, folds_identities=True)
    yield from _check_hardware(model, capabilities)


def _check_constants(model: Model) -> Iterator[Reason]:
    constants = [*model.initializers, *(n.output for n in model.ordered if n.op == "Constant")]
    for name in constants:
        constant_type = model.elem_type(name)
        if constant_type in _BAD_CONSTANTS:
            yield _create_fault(name, FaultKind.CONSTANT_TYPE, _BAD_CONSTANTS[constant_type])


def _check_node(states: GraphStates, node: Node) -> Iterator[Reason]:
    if qdq.is_qdq(node):
        yield from _check_pair(states, node)
        return
    integers = fault_checks.check_integer_operator(COMPILER, node)
    if integers is not None:
        yield integers
    elif node.op in UNSUPPORTED and node.domain in STANDARD:
        is_plugin = node.op in _PLUGINS
        form = UnsupportedForm.PLUGIN if is_plugin else UnsupportedForm.OPERATOR
        yield _create_fault(node.name, FaultKind.OPERATOR, form, node.op)
    elif node.op == "NonMaxSuppression":
        yield _create_fault(node.name, FaultKind.NMS)
    elif node.op in _CHECKS:
        yield from _CHECKS[node.op](states, node)


def _create_fault(name: str, fault: FaultKind, *values: str) -> CompilerFault:
    return CompilerFault(COMPILER, name, fault, values)


def _check_cast(states: GraphStates, node: Node) -> Iterator[Reason]:
    is_uint8 = node.attributes.get("to") == onnx.TensorProto.UINT8
    if is_uint8 and not states.model.is_output(node.output):
        yield _create_fault(node.name, FaultKind.OPERATOR, UnsupportedForm.UINT8_BETWEEN, node.op)


def _check_instance_norm(states: GraphStates, node: Node) -> Iterator[Reason]:
    shape = states.model.shape(node.input(0))
    if shape is not None and all(d == 1 for d in shape[2:]):
        yield _create_fault(node.name, FaultKind.ONE_VALUE)


def _check_convolution(states: GraphStates, node: Node) -> Iterator[Reason]:
    data, weights = (states.types.get(tensor, 0) for tensor in (node.input(0), node.input(1)))
    is_computed_alike = data == weights or {data, weights} == {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.DOUBLE,
    }
    if data and weights and not is_computed_alike:
        kind = "IConvolutionLayer" if node.op == "Conv" else "IDeconvolutionLayer"
        names = (str(_TYPE_NAMES.get(elem_type, elem_type)) for elem_type in (data, weights))
        yield _create_fault(node.name, FaultKind.FLOAT_TYPES, kind, *names)
        return
    if data in _TYPE_NAMES and data not in WIDTH:
        yield _create_fault(node.name, FaultKind.INTEGERS, _TYPE_NAMES[data])
    if node.op == "Conv" and _reads_int8_and_int4(states, node):
        yield _create_fault(node.name, FaultKind.INT4_WEIGHTS)


def _reads_int8_and_int4(states: GraphStates, node: Node) -> bool:
    left, right = states.state(node.input(0)), states.state(node.input(1))
    if not isinstance(left, IntegerState) or not isinstance(right, IntegerState):
        return False
    is_int8 = left.precision == Precision.INT8 and left.scalar and not left.axes
    return is_int8 and right.precision == Precision.INT4


_CHECKS: dict[str, Callable[[GraphStates, Node], Iterator[Reason]]] = {
    "Cast": _check_cast,
    "InstanceNormalization": _check_instance_norm,
    "Conv": _check_convolution,
    "ConvTranspose": _check_convolution,
}


def _check_pair(states: GraphStates, node: Node) -> list[Reason]:
    """Return the faults of a Q, or the faults of a DQ that the Q before it does not have."""
    faults = list(filter(None, _check_quantizer(states, node, node.name)))
    q = states.model.producer(node.input(0)) if faults and qdq.is_dq(node) else None
    if q is None or not qdq.is_q(q):
        return faults
    q_faults = list(_check_quantizer(states, q, q.name))
    renamed = filter(None, _check_quantizer(states, node, q.name))
    return [fault for fault, same in zip(faults, renamed, strict=True) if same not in q_faults]


def _check_quantizer(states: GraphStates, node: Node, name: str) -> Iterator[Reason | None]:
    """Yield the faults of a quantizer, as faults of the node ``name``; None for passed checks."""
    if qdq.is_dq(node):
        source = states.types.get(node.input(0), 0)
        bias = fault_checks.check_bias(COMPILER, name, "", precision_of(source))
        if bias is not None:
            yield bias
            return
        if source == onnx.TensorProto.UINT8 and node.input(0) in states.model.inputs:
            yield _create_fault(name, FaultKind.UINT8_INPUT)
    output_type = _BAD_CONSTANTS.get(node.integer("output_dtype", 0))
    if output_type is not None and not node.input(2):
        yield _create_fault(name, FaultKind.OUTPUT_TYPE, output_type)
    yield from _check_scale(states, node, name)
    yield from _check_zero_point(states, node, name)


def _read_scales(states: GraphStates, node: Node) -> qdq.ParameterValues | None:
    """Return the scales of a quantizer, stored or computed from constants; None if unknown."""
    scales = qdq.read_params(states.model, node).scales
    value = states.constants.value(node.input(1)) if scales is None else None
    return scales if value is None else qdq.ParameterValues(value.astype(np.float64).reshape(-1))


def _check_scale(states: GraphStates, node: Node, name: str) -> Iterator[Reason | None]:
    model = states.model
    if node.input(1) not in states.constants.plain:
        yield from _check_computed_scale(states, node, name)
        return
    shape, dims = states.scale_shape(node), model.shape(node.input(0))
    axis = states.scale_axis(node)
    if shape is not None and 0 in shape:
        yield fault_checks.check_scale_count(COMPILER, name, 0, axis, dims or (), strict=True)
        return
    scales = _read_scales(states, node)
    yield fault_checks.check_scale_positive(COMPILER, model, node, scales, allow_infinite=True)
    if shape is None or dims is None or (math.prod(shape) == 1 and len(shape) < 2):
        return
    if len(shape) > 1:
        blocks = bool(node.integer("block_size", 0))
        yield fault_checks.check_scale_rank(COMPILER, name, shape, blocks, is_accepted=blocks)
        if blocks and axis % max(len(dims), 1) < len(dims) - 2:
            yield _create_fault(name, FaultKind.BLOCKS, str(axis))
        return
    axis += len(dims) if -len(dims) <= axis < 0 else 0
    yield fault_checks.check_scale_count(COMPILER, name, shape[0], axis, dims, strict=True)


def _check_computed_scale(states: GraphStates, node: Node, name: str) -> Iterator[Reason]:
    if qdq.is_dq(node):
        is_weight = (
            qdq.find_first_quantizer(states.model, node).input(0)
            in states.constants.with_quantizers
        )
        fault = FaultKind.WEIGHTS_SCALE if is_weight else FaultKind.SCALE
        yield _create_fault(name, fault, node.input(1))


def _check_zero_point(states: GraphStates, node: Node, name: str) -> Iterator[Reason | None]:
    constants, zero_point = states.constants, node.input(2)
    if not zero_point:
        return
    if zero_point not in constants.plain:
        yield _create_fault(name, FaultKind.ZERO_POINT, zero_point)
        return
    shape, scales = constants.shape(zero_point), states.scale_shape(node)
    precision = qdq.read_params(states.model, node).precision
    if shape is not None and scales is not None and precision != Precision.FP8:
        count = math.prod(scales)
        yield fault_checks.check_zero_point_count(COMPILER, name, count, math.prod(shape))
    value = constants.value(zero_point)
    if value is None:
        return
    zeros = qdq.ParameterValues(value.astype(np.float64))
    if precision == Precision.FP8:
        yield fault_checks.check_fp8_zero_point(COMPILER, name, zeros)
    else:
        unsigned, tensor = (
            precision == Precision.UINT8,
            qdq.find_first_quantizer(states.model, node).input(0),
        )
        yield fault_checks.check_zero_points(COMPILER, name, name, zeros, unsigned, tensor)


def find_half_scale_fault(
    states: GraphStates, node: Node, capabilities: tuple[int, ...]
) -> CompilerFault | None:
    """Return the fault of a quantized FP16 Conv whose weights have one scale of shape [1].

    The compiler accepts such a scale in FP32, or if the Conv has one output channel. None if the
    Conv has no such fault.
    """
    left, right = states.state(node.input(0)), states.state(node.input(1))
    if not isinstance(left, IntegerState) or not isinstance(right, IntegerState):
        return None
    shape = states.model.shape(node.input(1))
    is_half = states.types.get(node.input(0)) == onnx.TensorProto.FLOAT16
    if right.scalar or right.axes or not is_half or shape is None or shape[0] == 1:
        return None
    verdict = resolve_precision(states.model, node, left, right, capabilities)
    if isinstance(verdict, Reason) and not isinstance(verdict, FloatFp8Column):
        return None
    return _create_fault(node.name, FaultKind.HALF_SHAPE1, right.dq.name)


def find_mixed_types_fault(
    states: GraphStates, node: Node, reason: Reason | None
) -> CompilerFault | None:
    """Return the fault of a node that multiplies INT8 by FP8, else None.

    ``reason`` is the reason why the node runs in float; None if the node does not run in float.
    """
    if not isinstance(reason, IntegersLost) or reason.why != LossCause.TYPES:
        return None
    operands = map(states.state, node.inputs[:2])
    types = {str(state.precision) for state in operands if isinstance(state, IntegerState)}
    if types != {Precision.INT8, Precision.FP8}:
        return None
    return _create_fault(node.name, FaultKind.MIXED_TYPES, *sorted(types))


def _check_hardware(model: Model, capabilities: tuple[int, ...]) -> Iterator[Reason]:
    for node in qdq.quantizers(model):
        precision = qdq.read_params(model, node).precision
        if precision not in _FIRST_CAPABILITIES:
            continue
        word, first = _FIRST_CAPABILITIES[precision]
        lacking = ", ".join(f"sm{c}" for c in capabilities if c < first)
        if lacking:
            yield _create_fault(node.name, FaultKind.HARDWARE_TYPE, word, lacking, str(first))


# Name of a type in messages, and the first compute capability with this type.
_FIRST_CAPABILITIES = {Precision.FP8: ("fp8_e4m3", 89), Precision.INT4: ("int4", 80)}

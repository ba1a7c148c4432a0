"""Reasons of TensorRT-RTX: integers lost before a convolution, and build faults.

Quotations in the messages are error texts of the compiler.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar

from qdqtool.reasons.convolutions import FloatDeconvolution
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.fp8 import FloatFp8Column, LargeFp8Kernel, NonzeroFp8ZeroPoint
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.reasons.tensors import PathStep
from qdqtool.reasons.text import Message
from qdqtool.reasons.weights import WeightsNotDequantized

COMPILER = "TensorRT-RTX"  # pass name in the reasons of TensorRT-RTX


LossCause = StrEnum(
    "LossCause",
    [
        "OPERATOR",
        "SHARED",
        "POOL",
        "FP8_POOL",
        "JOIN_FLOAT",
        "JOIN_SCALE",
        "PAD",
        "AXIS",
        "INPUT_AXIS",
        "INPUT_SHAPE1",
        "WEIGHTS_AXIS",
        "SUM_AXIS",
        "CAST",
        "TYPES",
        "TURING",
    ],
)
"""Cause that keeps a convolution from using the integers of a DQ (messages: ``_LOST``)."""


FaultKind = StrEnum(
    "FaultKind",
    [
        "CONSTANT_TYPE",
        "OUTPUT_TYPE",
        "OPERATOR",
        "NMS",
        "ONE_VALUE",
        "UINT8_INPUT",
        "WEIGHTS_SCALE",
        "SCALE",
        "BLOCKS",
        "ZERO_POINT",
        "FLOAT_TYPES",
        "INTEGERS",
        "INT4_WEIGHTS",
        "MIXED_TYPES",
        "HALF_SHAPE1",
        "HARDWARE_TYPE",
    ],
)
"""Fault of a model that the compiler rejects, or on which it crashes (messages: ``_FAULTS``)."""


UnsupportedForm = StrEnum(
    "UnsupportedForm",
    [
        "OPERATOR",
        "PLUGIN",
        "INPUT",
        "OUTPUTS",
        "DILATIONS",
        "TRAINING",
        "NORM",
        "ANTIALIASING",
        "ASPECT",
        "COORDINATES",
        "REDUCTION_ND",
        "REDUCTION",
        "CAPITALS",
        "CAST",
        "FLOATS",
        "UINT8",
        "UINT8_BETWEEN",
        "INT32",
        "HALF",
    ],
)
"""Operator, or form of an operator, that the parser rejects (messages: ``_FORMS``)."""


def _match_causes(*reasons: LossCause | FaultKind) -> Callable[[Any], bool]:
    return lambda r: (r.why if isinstance(r, IntegersLost) else r.fault) in reasons


_ACTIVATION = (
    "Use one scale for the whole tensor. If the ranges of the channels differ by a factor of "
    "hundreds, qdqtool insert --smooth first moves the differences into the weights of the "
    "consumers."
)


_LOST: dict[LossCause, Callable[["IntegersLost"], Message]] = {
    LossCause.OPERATOR: lambda lost: (
        f"{lost.title}: {lost.place} is between {lost.dq_name} and this layer, and TensorRT-RTX "
        f"computes {lost.step_op} in float.",
        f"Put Q/DQ after {lost.step_node}, directly before {lost.node}.",
    ),
    LossCause.SHARED: lambda lost: (
        f"{lost.title}: the factor of {lost.place} cannot be merged into the scale of "
        f"{lost.dq_name}, because other nodes read the input of {lost.step_node} as well.",
        f"Put Q/DQ after {lost.step_node}, directly before {lost.node}.",
    ),
    LossCause.POOL: lambda lost: (
        f"{lost.title}: {lost.place} is between {lost.dq_name} and a Q and becomes an INT8 "
        f"pooling with the scale of the Q; {lost.node} reads a second, float pooling.",
        f"Put Q/DQ on the input of {lost.node} as well, or remove the Q of the other consumer.",
    ),
    LossCause.FP8_POOL: lambda lost: (
        f"{lost.title}: {lost.place} is between {lost.dq_name} and this layer. TensorRT-RTX "
        f"computes {lost.step_op} in float, because the quantizer is FP8.",
        f"Put Q/DQ after {lost.step_node}, directly before {lost.node}.",
    ),
    LossCause.JOIN_FLOAT: lambda lost: (
        f"{lost.title}: {lost.place} has an input without Q/DQ, so {lost.step_node} writes float.",
        f"Put Q/DQ directly before {lost.node}, or put Q/DQ with one common scale on every input "
        f"of {lost.step_node}.",
    ),
    LossCause.JOIN_SCALE: lambda lost: (
        f"{lost.title}: the inputs of {lost.place} have different scales, so {lost.step_node} "
        "writes float.",
        f"Give all inputs of {lost.step_node} one scale, or put Q/DQ directly before {lost.node}.",
    ),
    LossCause.PAD: lambda lost: (
        f"{lost.title}: {lost.place} is computed in float. TensorRT-RTX fuses only a Pad of zeros "
        "on height and width that is directly before the convolution and has no other consumer.",
        f"Put Q/DQ between {lost.step_node} and {lost.node}, or use the pads attribute of the "
        "convolution.",
    ),
    LossCause.AXIS: lambda lost: (
        f"{lost.title}: the scales of {lost.dq_name} vary along an axis that {lost.place} does "
        "not keep.",
        _ACTIVATION,
    ),
    LossCause.INPUT_AXIS: lambda lost: (
        f"{lost.dq_name}: its scale varies along an axis. TensorRT-RTX computes convolutions "
        "after this DQ in float.",
        "Quantize the tensor with one scalar scale.",
    ),
    LossCause.INPUT_SHAPE1: lambda lost: (
        f"{lost.dq_name}: its scale has shape [1], which TensorRT-RTX reads as per-channel. "
        "Convolutions after this DQ run in float.",
        f"Give {lost.dq_name} a scalar scale (shape []).",
    ),
    LossCause.WEIGHTS_AXIS: lambda lost: (
        f"{lost.title}: the scales of its weights ({lost.dq_name}) vary along an axis other than "
        "the output channels (0).",
        "Quantize the weights along axis 0.",
    ),
    LossCause.SUM_AXIS: lambda lost: (
        f"{lost.title}: the scales of {lost.dq_name} vary along the axis that is summed, or along "
        "the batch.",
        "Quantize along the output columns, or with one scale." if lost.weights else _ACTIVATION,
    ),
    LossCause.CAST: lambda lost: (
        f"{lost.title}: a Cast to a wider float is between {lost.dq_name} and this layer.",
        f"Give {lost.dq_name} scales of the wider type, so that the DQ writes this type.",
    ),
    LossCause.TYPES: lambda lost: (
        f"{lost.title}: its inputs are quantized to types that cannot be multiplied.",
        "Quantize both inputs to int8.",
    ),
    LossCause.TURING: lambda lost: (
        f"{lost.title}: TensorRT-RTX has no INT8 on SM75, and SM75 among the targets disables "
        "INT8 for all of them.",
        "Build for SM80 and later only.",
    ),
}


_PLUGINS = {
    "CausalConvWithState": "failed to load CausalConvWithState plugin",
    "LinearAttention": "failed to load LinearAttention plugin",
    "NonZero": "NonZero plugin creator version 1 was not found in plugin registry",
    "RoiAlign": "ROIAlign plugin was not found in the plugin registry!",
}


_FORMS: dict[UnsupportedForm, Callable[[str], tuple[str, str]]] = {
    UnsupportedForm.OPERATOR: lambda operator: (
        f"the operator {operator}",
        f"In function check{operator}: [8] false",
    ),
    UnsupportedForm.PLUGIN: lambda operator: (
        f"the operator {operator}",
        _PLUGINS.get(operator, "Plugin not found"),
    ),
    UnsupportedForm.INPUT: lambda operator: (
        f"a network input of {operator}",
        "Failed to convert ONNX date type to TensorRT data type.",
    ),
    UnsupportedForm.OUTPUTS: lambda operator: (
        f"a second output of {operator}",
        f"This version of TensorRT doesn't support mode than 1 outputs for {operator} nodes!",
    ),
    UnsupportedForm.DILATIONS: lambda operator: (
        f"dilations of {operator}",
        "This version of TensorRT does not support dilations other than 1.",
    ),
    UnsupportedForm.TRAINING: lambda operator: (
        f"{operator} in training mode",
        "This version of TensorRT does not support training_mode == 1 in BatchNormalization.",
    ),
    UnsupportedForm.NORM: lambda operator: (
        "a norm other than L1 and L2",
        "Only L1 and L2 normalization are supported.",
    ),
    UnsupportedForm.ANTIALIASING: lambda operator: (
        "antialiasing",
        "Antialiasing is not supported currently.",
    ),
    UnsupportedForm.ASPECT: lambda operator: (
        "this keep_aspect_ratio_policy",
        "Only `stretch` is supported currently as `keep_aspect_ratio_policy`.",
    ),
    UnsupportedForm.COORDINATES: lambda operator: (
        f"this coordinate_transformation_mode of {operator}",
        "TensorRT only supports half_pixel, pytorch_half_pixel, "
        "tf_half_pixel_for_nn, asymmetric and align_corners transformation modes!",
    ),
    UnsupportedForm.REDUCTION_ND: lambda operator: (
        f"{operator} with a reduction",
        "ScatterND with reduction is not supported.",
    ),
    UnsupportedForm.REDUCTION: lambda operator: (
        f"{operator} with a reduction",
        "Unsupported reduction type",
    ),
    UnsupportedForm.CAPITALS: lambda operator: (
        f"capital letters in an equation of {operator}",
        "Invalid character(s) in Einsum equation",
    ),
    UnsupportedForm.CAST: lambda operator: (
        "a Cast to this type",
        "Unsupported data type for the Cast operator!",
    ),
    UnsupportedForm.FLOATS: lambda operator: (
        f"a {operator} of floats",
        "The fmod attribute is set to 0. Inputs cannot be of floating point types.",
    ),
    UnsupportedForm.UINT8: lambda operator: (f"{operator} of uint8", "But type is UInt8."),
    UnsupportedForm.UINT8_BETWEEN: lambda operator: (
        "uint8 between layers",
        "TensorRT does not support UINT8 types for intermediate tensors.",
    ),
    UnsupportedForm.INT32: lambda operator: (
        f"{operator} of int32",
        "Found unsupported input type of INT32",
    ),
    UnsupportedForm.HALF: lambda operator: (
        f"{operator} of 16-bit floats",
        "The rank of operands should be the same adding inputs.",
    ),
}


def _describe_operator(node: str, form: str, operator: str) -> Message:
    description, error = _FORMS[UnsupportedForm(form)](operator)
    return (
        f'{node}: TensorRT-RTX does not support {description}; the parser stops with "{error}".',
        "Replace the operator by an operator or form that TensorRT-RTX supports, or remove the "
        "operator from the model.",
    )


_FAULTS: dict[FaultKind, Callable[..., Message]] = {
    FaultKind.CONSTANT_TYPE: lambda node, type_name: (
        f'{node}: TensorRT-RTX rejects a constant of type {type_name}: "Failed to import '
        f'initializer: {node}".',
        "Quantize to FP8 E4M3FN or to int8.",
    ),
    FaultKind.OPERATOR: _describe_operator,
    FaultKind.NMS: lambda node: (
        f'{node}: TensorRT-RTX stops with "NonMaxSuppression has no runners that implement the '
        'layer".',
        "Remove the NonMaxSuppression from the model and run it in the application.",
    ),
    FaultKind.ONE_VALUE: lambda node: (
        f"{node} normalizes a single value. TensorRT-RTX stops with "
        '"Error during shape inference of ... inorm".',
        "Remove the InstanceNormalization: its result is always the bias.",
    ),
    FaultKind.UINT8_INPUT: lambda node: (
        f"{node} reads a uint8 network input. TensorRT-RTX stops with "
        '"Found unsupported input type of UINT8".',
        "Change the network input to int8, with zero point 0.",
    ),
    FaultKind.WEIGHTS_SCALE: lambda node, scale: (
        f"{node}: its scale '{scale}' is computed at run time; TensorRT-RTX stops with "
        '"MyelinCheckException: operand.h: CHECK(is_constant())".',
        "Write the scale as a constant; TensorRT has no dynamic quantization.",
    ),
    FaultKind.SCALE: lambda node, scale: (
        f"{node}: its scale '{scale}' is computed at run time; TensorRT-RTX crashes (signal 11) "
        "while building.",
        "Write the scale as a constant; TensorRT has no dynamic quantization.",
    ),
    FaultKind.BLOCKS: lambda node, axis: (
        f'{node} has blocks of scales along axis {axis}. TensorRT-RTX stops with "The blocking '
        'dimension must be the last or second to last dimension".',
        "Use one scale for each output channel.",
    ),
    FaultKind.ZERO_POINT: lambda node, zero_point: (
        f"{node}: its zero point '{zero_point}' is computed. TensorRT-RTX stops with \"has "
        '`zero_point` which is not an initializer".',
        "Write the zero point as a constant 0.",
    ),
    FaultKind.FLOAT_TYPES: lambda node, operator, input_type, weights_type: (
        f'{node}: TensorRT-RTX stops with "{operator} `input` and `kernel` must be of same type. '
        f'`input` type is {input_type} but `kernel` is of type {weights_type}."',
        "Give input and weights the same float type (a DQ writes the type of its scale).",
    ),
    FaultKind.INTEGERS: lambda node, input_type: (
        f"{node}: its input is {input_type}, but a convolution needs float inputs.",
        "Put a DequantizeLinear before the convolution.",
    ),
    FaultKind.OUTPUT_TYPE: lambda node, output_type: (
        f"{node} quantizes to {output_type} (output_dtype), which TensorRT-RTX does not support.",
        "Quantize to int8 or FP8 E4M3FN.",
    ),
    FaultKind.MIXED_TYPES: lambda node, first_type, second_type: (
        f"{node}: one input is {second_type}, the other {first_type}. TensorRT-RTX stops with "
        '"CHECK(dtype == W.type()) failed" or a similar text.',
        "Quantize both inputs to the same type.",
    ),
    FaultKind.INT4_WEIGHTS: lambda node: (
        f"{node} has an int8 input and int4 weights. TensorRT-RTX stops with "
        '"CHECK(dtype == W.type()) failed".',
        "Quantize the weights to int8.",
    ),
    FaultKind.HALF_SHAPE1: lambda node, dq: (
        f"{node} has float16 weights with one scale of shape [1] ({dq}). TensorRT-RTX stops with "
        '"MyelinCheckException: const_ppg.cpp: CHECK(same_symbolic_shapes('
        'op_output->dimensions(), A_dims)) failed".',
        "Give the weights a scalar scale (shape []), or one for each output channel.",
    ),
    FaultKind.HARDWARE_TYPE: lambda node, type_name, targets, first_capability: (
        f'{node}: TensorRT-RTX stops with "Cannot compile for target(s) {targets}, because the '
        f'model contains HW-specific datatypes: {type_name}".',
        f"Quantize to int8, or build for SM{first_capability} or later only.",
    ),
}


class IntegersLost(Reason):
    """A convolution or matrix product that cannot use the integers of a DQ, and runs in float.

    Attributes:
        why: Cause of the loss.
        step: Node at which the integers are lost, which may be the convolution itself; None if the
            cause is not a node.
        dq: Name of the DQ.
        weights: Whether the DQ is on the weights.
    """

    rules: ClassVar[tuple[FindingRule, ...]] = (
        FindingRule("POOL-MIXED", _match_causes(LossCause.POOL)),
        fixable_rule("SCALE-SHAPE1", _match_causes(LossCause.INPUT_SHAPE1)),
        FindingRule("QTYPE", _match_causes(LossCause.TYPES)),
        FindingRule("FLOAT-SM75", _match_causes(LossCause.TURING)),
        FindingRule("W-AXIS", _match_causes(LossCause.WEIGHTS_AXIS)),
        FindingRule(
            "W-AXIS", lambda r: r.weights and r.why in (LossCause.AXIS, LossCause.SUM_AXIS)
        ),
        fixable_rule(
            "ACT-PER-CHANNEL",
            _match_causes(LossCause.INPUT_AXIS, LossCause.AXIS, LossCause.SUM_AXIS),
        ),
        FindingRule("W-NO-DQ", lambda r: r.weights),
        FindingRule("IN-BLOCKED"),
    )

    why: LossCause
    step: PathStep | None
    dq: str = ""
    weights: bool = False

    def message(self, finding: Finding, cause: Cause) -> Message:
        is_weights_axis = self.weights and self.why == LossCause.AXIS
        return _LOST[LossCause.WEIGHTS_AXIS if is_weights_axis else self.why](self)

    @property
    def title(self) -> str:
        """Name of the convolution, and whether its weights lose the integers."""
        is_before_weights = self.weights and self.why != LossCause.AXIS
        return f"{self.node}, on the path of its weights" if is_before_weights else self.node

    @property
    def place(self) -> str:
        """Name and operator of the node at which the integers are lost."""
        return f"{self.step_node} ({self.step_op})"

    @property
    def step_node(self) -> str:
        """Name of the node at which the integers are lost."""
        return self.step.node if self.step else self.node

    @property
    def step_op(self) -> str:
        """Operator of the node at which the integers are lost; empty if it is unknown."""
        return self.step.op if self.step else ""

    @property
    def dq_name(self) -> str:
        """Name of the DQ; a description if it is unknown."""
        return self.dq or "the DQ"


class IntegersLostAtJoin(IntegersLost):
    """Integers lost because the inputs of a Concat or similar node have different scales."""

    rules = (fixable_rule("CONCAT-SCALE"),)


class CompilerFault(Reason):
    """A fault of the model that makes the compiler fail.

    Attributes:
        fault: Kind of the fault.
        values: Arguments of the function in ``_FAULTS`` after the node. For an unsupported
            operator, the first value is a member of :class:`UnsupportedForm`.
    """

    rules = (
        FindingRule(
            "QTYPE",
            _match_causes(FaultKind.CONSTANT_TYPE, FaultKind.OUTPUT_TYPE, FaultKind.HARDWARE_TYPE),
        ),
        FindingRule("BUILD-CRASHES", _match_causes(FaultKind.SCALE)),
        FindingRule("SCALE-RANK", _match_causes(FaultKind.BLOCKS)),
        FindingRule("ZP-NONZERO", _match_causes(FaultKind.ZERO_POINT)),
        FindingRule("BUILD-FAILS"),
    )

    quotes: ClassVar[bool] = True

    fault: FaultKind
    values: tuple[str, ...] = ()

    def message(self, finding: Finding, cause: Cause) -> Message:
        return _FAULTS[self.fault](self.node, *self.values)


def is_build_failure(reason: Reason) -> bool:
    """Return whether a reason of TensorRT-RTX makes the build fail.

    Other reasons of TensorRT-RTX make a layer run in float.
    """
    return not isinstance(reason, _FLOAT_REASONS)


_FLOAT_REASONS = (
    IntegersLost,
    InputNotDequantized,
    WeightsNotDequantized,
    FloatDeconvolution,
    LargeFp8Kernel,
    FloatFp8Column,
    NonzeroFp8ZeroPoint,
)

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


_LOST: dict[LossCause, Message] = {
    LossCause.OPERATOR: (
        (
            "{conv}: {node} ({op}) is between {dq} and this layer, and TensorRT-RTX computes {op} "
            "in float."
        ),
        "Put Q/DQ after {node}, directly before {conv}.",
    ),
    LossCause.SHARED: (
        "{conv}: the factor of {node} ({op}) cannot be merged into the scale of {dq}, because "
        "other nodes read the input of {node} as well.",
        "Put Q/DQ after {node}, directly before {conv}.",
    ),
    LossCause.POOL: (
        "{conv}: {node} ({op}) is between {dq} and a Q and becomes an INT8 pooling with the scale "
        "of the Q; {conv} reads a second, float pooling.",
        "Put Q/DQ on the input of {conv} as well, or remove the Q of the other consumer.",
    ),
    LossCause.FP8_POOL: (
        "{conv}: {node} ({op}) is between {dq} and this layer. TensorRT-RTX computes {op} in "
        "float, because the quantizer is FP8.",
        "Put Q/DQ after {node}, directly before {conv}.",
    ),
    LossCause.JOIN_FLOAT: (
        "{conv}: {node} ({op}) has an input without Q/DQ, so {node} writes float.",
        "Put Q/DQ directly before {conv}, or put Q/DQ with one common scale on every input of "
        "{node}.",
    ),
    LossCause.JOIN_SCALE: (
        "{conv}: the inputs of {node} ({op}) have different scales, so {node} writes float.",
        "Give all inputs of {node} one scale, or put Q/DQ directly before {conv}.",
    ),
    LossCause.PAD: (
        "{conv}: {node} ({op}) is computed in float. TensorRT-RTX fuses only a Pad of zeros on "
        "height and width that is directly before the convolution and has no other consumer.",
        "Put Q/DQ between {node} and {conv}, or use the pads attribute of the convolution.",
    ),
    LossCause.AXIS: (
        "{conv}: the scales of {dq} vary along an axis that {node} ({op}) does not keep.",
        _ACTIVATION,
    ),
    LossCause.INPUT_AXIS: (
        "{dq}: its scale varies along an axis. TensorRT-RTX computes convolutions after this DQ "
        "in float.",
        "Quantize the tensor with one scalar scale.",
    ),
    LossCause.INPUT_SHAPE1: (
        "{dq}: its scale has shape [1], which TensorRT-RTX reads as per-channel. Convolutions "
        "after this DQ run in float.",
        "Give {dq} a scalar scale (shape []).",
    ),
    LossCause.WEIGHTS_AXIS: (
        "{conv}: the scales of its weights ({dq}) vary along an axis other than the output "
        "channels (0).",
        "Quantize the weights along axis 0.",
    ),
    LossCause.SUM_AXIS: (
        "{conv}: the scales of {dq} vary along the axis that is summed, or along the batch.",
        "Quantize along the output columns, or with one scale.",
    ),
    LossCause.CAST: (
        "{conv}: a Cast to a wider float is between {dq} and this layer.",
        "Give {dq} scales of the wider type, so that the DQ writes this type.",
    ),
    LossCause.TYPES: (
        "{conv}: its inputs are quantized to types that cannot be multiplied.",
        "Quantize both inputs to int8.",
    ),
    LossCause.TURING: (
        "{conv}: TensorRT-RTX has no INT8 on SM75, and SM75 among the targets disables INT8 for "
        "all of them.",
        "Build for SM80 and later only.",
    ),
}


_FAULTS: dict[FaultKind, Message] = {
    FaultKind.CONSTANT_TYPE: (
        '{node}: TensorRT-RTX rejects a constant of type {0}: "Failed to import initializer: '
        '{node}".',
        "Quantize to FP8 E4M3FN or to int8.",
    ),
    FaultKind.OPERATOR: (
        '{node}: TensorRT-RTX does not support {form}; the parser stops with "{error}".',
        "Replace the operator by an operator or form that TensorRT-RTX supports, or remove the "
        "operator from the model.",
    ),
    FaultKind.NMS: (
        '{node}: TensorRT-RTX stops with "NonMaxSuppression has no runners that implement the '
        'layer".',
        "Remove the NonMaxSuppression from the model and run it in the application.",
    ),
    FaultKind.ONE_VALUE: (
        "{node} normalizes a single value. TensorRT-RTX stops with "
        '"Error during shape inference of ... inorm".',
        "Remove the InstanceNormalization: its result is always the bias.",
    ),
    FaultKind.UINT8_INPUT: (
        "{node} reads a uint8 network input. TensorRT-RTX stops with "
        '"Found unsupported input type of UINT8".',
        "Change the network input to int8, with zero point 0.",
    ),
    FaultKind.WEIGHTS_SCALE: (
        "{node}: its scale '{0}' is computed at run time; TensorRT-RTX stops with "
        '"MyelinCheckException: operand.h: CHECK(is_constant())".',
        "Write the scale as a constant; TensorRT has no dynamic quantization.",
    ),
    FaultKind.SCALE: (
        "{node}: its scale '{0}' is computed at run time; TensorRT-RTX crashes (signal 11) while "
        "building.",
        "Write the scale as a constant; TensorRT has no dynamic quantization.",
    ),
    FaultKind.BLOCKS: (
        '{node} has blocks of scales along axis {0}. TensorRT-RTX stops with "The blocking '
        'dimension must be the last or second to last dimension".',
        "Use one scale for each output channel.",
    ),
    FaultKind.ZERO_POINT: (
        "{node}: its zero point '{0}' is computed. TensorRT-RTX stops with \"has `zero_point` "
        'which is not an initializer".',
        "Write the zero point as a constant 0.",
    ),
    FaultKind.FLOAT_TYPES: (
        '{node}: TensorRT-RTX stops with "{0} `input` and `kernel` must be of same type. `input` '
        'type is {1} but `kernel` is of type {2}."',
        "Give input and weights the same float type (a DQ writes the type of its scale).",
    ),
    FaultKind.INTEGERS: (
        "{node}: its input is {0}, but a convolution needs float inputs.",
        "Put a DequantizeLinear before the convolution.",
    ),
    FaultKind.OUTPUT_TYPE: (
        "{node} quantizes to {0} (output_dtype), which TensorRT-RTX does not support.",
        "Quantize to int8 or FP8 E4M3FN.",
    ),
    FaultKind.MIXED_TYPES: (
        '{node}: one input is {1}, the other {0}. TensorRT-RTX stops with "CHECK(dtype == '
        'W.type()) failed" or a similar text.',
        "Quantize both inputs to the same type.",
    ),
    FaultKind.INT4_WEIGHTS: (
        "{node} has an int8 input and int4 weights. TensorRT-RTX stops with "
        '"CHECK(dtype == W.type()) failed".',
        "Quantize the weights to int8.",
    ),
    FaultKind.HALF_SHAPE1: (
        "{node} has float16 weights with one scale of shape [1] ({0}). TensorRT-RTX stops with "
        '"MyelinCheckException: const_ppg.cpp: CHECK(same_symbolic_shapes('
        'op_output->dimensions(), A_dims)) failed".',
        "Give the weights a scalar scale (shape []), or one for each output channel.",
    ),
    FaultKind.HARDWARE_TYPE: (
        '{node}: TensorRT-RTX stops with "Cannot compile for target(s) {1}, because the model '
        'contains HW-specific datatypes: {0}".',
        "Quantize to int8, or build for SM{2} or later only.",
    ),
}


_FORMS: dict[UnsupportedForm, tuple[str, str]] = {
    UnsupportedForm.OPERATOR: ("the operator {1}", "In function check{1}: [8] false"),
    UnsupportedForm.PLUGIN: ("the operator {1}", "Plugin not found"),
    UnsupportedForm.INPUT: (
        "a network input of {1}",
        "Failed to convert ONNX date type to TensorRT data type.",
    ),
    UnsupportedForm.OUTPUTS: (
        "a second output of {1}",
        "This version of TensorRT doesn't support mode than 1 outputs for {1} nodes!",
    ),
    UnsupportedForm.DILATIONS: (
        "dilations of {1}",
        "This version of TensorRT does not support dilations other than 1.",
    ),
    UnsupportedForm.TRAINING: (
        "{1} in training mode",
        "This version of TensorRT does not support training_mode == 1 in BatchNormalization.",
    ),
    UnsupportedForm.NORM: (
        "a norm other than L1 and L2",
        "Only L1 and L2 normalization are supported.",
    ),
    UnsupportedForm.ANTIALIASING: ("antialiasing", "Antialiasing is not supported currently."),
    UnsupportedForm.ASPECT: (
        "this keep_aspect_ratio_policy",
        "Only `stretch` is supported currently as `keep_aspect_ratio_policy`.",
    ),
    UnsupportedForm.COORDINATES: (
        "this coordinate_transformation_mode of {1}",
        "TensorRT only supports half_pixel, pytorch_half_pixel, "
        "tf_half_pixel_for_nn, asymmetric and align_corners transformation modes!",
    ),
    UnsupportedForm.REDUCTION_ND: (
        "{1} with a reduction",
        "ScatterND with reduction is not supported.",
    ),
    UnsupportedForm.REDUCTION: ("{1} with a reduction", "Unsupported reduction type"),
    UnsupportedForm.CAPITALS: (
        "capital letters in an equation of {1}",
        "Invalid character(s) in Einsum equation",
    ),
    UnsupportedForm.CAST: ("a Cast to this type", "Unsupported data type for the Cast operator!"),
    UnsupportedForm.FLOATS: (
        "a {1} of floats",
        "The fmod attribute is set to 0. Inputs cannot be of floating point types.",
    ),
    UnsupportedForm.UINT8: ("{1} of uint8", "But type is UInt8."),
    UnsupportedForm.UINT8_BETWEEN: (
        "uint8 between layers",
        "TensorRT does not support UINT8 types for intermediate tensors.",
    ),
    UnsupportedForm.INT32: ("{1} of int32", "Found unsupported input type of INT32"),
    UnsupportedForm.HALF: (
        "{1} of 16-bit floats",
        "The rank of operands should be the same adding inputs.",
    ),
}


_PLUGINS = {
    "CausalConvWithState": "failed to load CausalConvWithState plugin",
    "LinearAttention": "failed to load LinearAttention plugin",
    "NonZero": "NonZero plugin creator version 1 was not found in plugin registry",
    "RoiAlign": "ROIAlign plugin was not found in the plugin registry!",
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
        message, fix = _LOST[
            LossCause.WEIGHTS_AXIS if self.weights and self.why == LossCause.AXIS else self.why
        ]
        if not self.weights and self.why == LossCause.SUM_AXIS:
            fix = _ACTIVATION
        filled = {
            "conv": self.node,
            "node": self.step.node if self.step else self.node,
            "op": self.step.op if self.step else "",
            "dq": self.dq or "the DQ",
        }
        text = message.format(**filled)
        if self.weights and self.why != LossCause.AXIS:
            text = text.replace(f"{self.node}:", f"{self.node}, on the path of its weights:", 1)
        return text, fix.format(**filled)


class IntegersLostAtJoin(IntegersLost):
    """Integers lost because the inputs of a Concat or similar node have different scales."""

    rules = (fixable_rule("CONCAT-SCALE"),)


class CompilerFault(Reason):
    """A fault of the model that makes the compiler fail.

    Attributes:
        fault: Kind of the fault.
        values: Values for the placeholders of the message, in order. For an unsupported operator,
            the first value is a member of :class:`UnsupportedForm`.
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
        message, fix = _FAULTS[self.fault]
        form, quoted = (
            _FORMS[UnsupportedForm(self.values[0])]
            if self.fault == FaultKind.OPERATOR
            else ("", "")
        )
        if self.fault == FaultKind.OPERATOR and self.values[0] == UnsupportedForm.PLUGIN:
            quoted = _PLUGINS.get(self.values[1], quoted)
        filled = {
            "node": self.node,
            "form": form.format(*self.values),
            "error": quoted.format(*self.values),
        }
        return message.format(*self.values, **filled), fix.format(*self.values, **filled)


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

"""Reasons that concern quantizers: types, zero points, axes, and forms other than Q/DQ."""

from typing import ClassVar

from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason, fixable_rule
from qdqtool.reasons.tensors import Scale
from qdqtool.reasons.text import Message, format_scale, name_first
from qdqtool.util.text import format_count


class NothingQuantized(Reason):
    """A model whose main graph has neither Q/DQ nor integer operators.

    Attributes:
        convolutions: Number of Conv, ConvTranspose, Gemm and MatMul with constant weights, which
            could have Q/DQ.
        is_nested: Whether branches of If or bodies of Loop and Scan have Q/DQ.
    """

    rules = (FindingRule("NO-QDQ"),)

    convolutions: int
    is_nested: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        if self.is_nested:
            place = "this model has Q/DQ only in branches of If or bodies of Loop and Scan"
        else:
            place = "this model has no Q/DQ"
        return (
            f"{place}; "
            f"{'one layer' if self.convolutions == 1 else f'{self.convolutions} layers'} with "
            "constant weights could run in INT8."
        )


class UnsupportedQuantizedType(Reason):
    """A quantizer of a type that TensorRT lacks; ``kind`` names the type."""

    rules = (FindingRule("QTYPE"),)

    kind: str

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        text = f"{self.node} has type {self.kind}, which TensorRT does not support."
        if not self.kind.startswith("FP8"):
            return text
        return text, "Quantize to FP8 E4M3FN (TensorRT 10.3 or later), or to INT8."


class UnsignedZeroPoint(Reason):
    """A quantizer of type uint8 with zero point 0.

    Attributes:
        is_explicit: Whether the quantizer has a zero point. Without a zero point, the type is uint8
            in ONNX.
        scale: Scale of the quantizer.
    """

    rules = (fixable_rule("ZP-UINT8"),)

    is_explicit: bool
    scale: Scale

    def message(self, finding: Finding, cause: Cause) -> str:
        default = "" if self.is_explicit else " (it has no zero point, which means uint8 in ONNX)"
        scale = "times the scale" if self.scale is None else f"x {format_scale(self.scale)}"
        return (
            f"{self.node} has type uint8{default}: TensorRT reads int8 and clips values above "
            f"127 {scale}."
        )


class ZeroPointMissing(Reason):
    """A quantizer without a zero point (third input)."""

    rules = (fixable_rule("DQ-3-INPUTS"),)

    op: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} ({self.op}) has no zero-point input."


class ZeroPointCount(Reason):
    """A quantizer with different numbers of scales and zero points."""

    rules = (fixable_rule("ZP-VOLUME"),)

    scales: int
    zero_points: int

    def message(self, finding: Finding, cause: Cause) -> str:
        scales = format_count(self.scales, "scale")
        return f"{self.node} has {scales} and {format_count(self.zero_points, 'zero point')}."


class NonzeroZeroPoint(Reason, key="zero-point"):
    """A zero point that is not 0.

    Attributes:
        dq: The quantizer.
        zero_points: Smallest and largest zero point.
        unsigned: Whether the quantized type is uint8.
        tensor: ONNX tensor that the quantizer reads.
    """

    rules = (fixable_rule("ZP-NONZERO"),)

    identity_excludes = (*Reason.identity_excludes, "node", "tensor")  # one finding for all layers

    dq: str
    zero_points: tuple[int, int]
    unsigned: bool = False
    tensor: str = ""

    def message(self, finding: Finding, cause: Cause) -> str:
        zero_points = " to ".join(map(str, dict.fromkeys(self.zero_points)))
        text = f"{self.dq} has {'uint8 ' if self.unsigned else ''}zero point {zero_points}"
        tensor = f" for tensor '{self.tensor}'" if self.tensor else ""
        required = "int8 and zero point 0" if self.unsigned else "zero point 0"
        return f"{text}{tensor}. TensorRT requires {required}, and rejects the model."


class AxisOpset(Reason):
    """Scales for each channel in an opset whose quantizers have no axis.

    Attributes:
        opset: The opset.
        is_explicit: Whether the node has the axis attribute, although the opset does not allow it.
    """

    rules = (fixable_rule("OPSET-AXIS"),)
    quotes: ClassVar[bool] = True

    opset: int
    is_explicit: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        text = f"{self.node} is per-channel in opset {self.opset}"
        if not self.is_explicit:
            return f"{text}, without an axis. TensorRT uses axis 0."
        return (
            f"{text}, with the attribute axis, which this opset does not have. TensorRT says: "
            '"Unrecognized attribute: axis for operator QuantizeLinear"'
        )


class ParameterIndirect(Reason):
    """A scale or zero point that operators compute from constants.

    Attributes:
        parameter: ``scale`` or ``zero point``.
        tensor: ONNX tensor of the parameter.
        op: Operator that computes the parameter.
        producer: Node with this operator.
        more: Number of further quantizers that read the parameter.
    """

    rules = (fixable_rule("SCALE-INDIRECT"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all nodes

    parameter: str
    tensor: str
    op: str
    producer: str
    more: int

    def message(self, finding: Finding, cause: Cause) -> str:
        more = f" (and of {format_count(self.more, 'more quantizer')})" if self.more else ""
        return (
            f"the {self.parameter} '{self.tensor}' of {self.node}{more} is not stored: "
            f"{self.producer} ({self.op}) computes it from constants."
        )


class UncoveredTypes(Reason):
    """Quantizers of types that the prediction does not cover; ``node`` is the first of them.

    Attributes:
        kinds: The types, and the number of nodes of each.
    """

    rules = (FindingRule("FP8-OUTSIDE"),)

    kinds: tuple[tuple[str, int], ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        kinds = [f"{format_count(count, 'Q/DQ node')} of {kind}" for kind, count in self.kinds]
        return (
            f"this prediction, which has rules for INT8 and FP8, does not cover "
            f"{' and '.join(kinds)} {name_first(self.node, sum(dict(self.kinds).values()))}."
        )


class UncoveredOperandType(Reason, key="outside-rules"):
    """Data or weights of INT4, which the simulated Q/DQ passes do not cover."""

    dq: str
    precision: Precision


# Description of the operators, and advice to export Q/DQ, by form of simulated quantizers.
_FORMS = {
    "decomposed": (
        "arithmetic (Mul, Round, Clip, Mul) that TensorRT computes in float",
        "Export with torch.onnx.export(..., dynamo=False), which writes Q/DQ for fake quantizers",
    ),
    "QONNX": (
        "Quant operators of QONNX, at which TensorRT's parser stops",
        "Export with brevitas.export.export_onnx_qcdq, which writes Q/DQ, and run fix on the "
        "exported file: fix replaces the Clips of integers, which TensorRT misreads",
    ),
    "OpenVINO": (
        "FakeQuantize operators of OpenVINO, at which TensorRT's parser stops",
        "Export from NNCF with the option export_to_onnx_standard_ops, which writes Q/DQ",
    ),
    "AIMET": (
        "QcQuantizeOp operators of AIMET, at which TensorRT's parser stops",
        "Export with aimet_torch.onnx.export (aimet_onnx: sim.to_onnx_qdq()), which writes Q/DQ, "
        "or insert Q/DQ in the exported float model with AIMET's encodings (`calib_table`)",
    ),
    "ATen": (
        "fake_quantize operators of ATen, at which TensorRT's parser stops",
        "Export without the fallback to ATen (operator_export_type=OperatorExportTypes.ONNX), with "
        "opset 13 or later and dynamo=False",
    ),
    "PT2E": (
        "operators of torch's quantized_decomposed, at which TensorRT's parser stops",
        "Export the fake-quantized model (before convert_pt2e) with dynamo=False, or quantize the "
        "float model with ModelOpt or insert",
    ),
    "MQBench": (
        "fake quantizers of MQBench, at which TensorRT's parser stops",
        "Export with MQBench's ONNX_QNN or TensorRT backend, which writes Q/DQ or ranges",
    ),
    "ModelOpt": (
        "quantize_op operators of ModelOpt for Torch-TensorRT, at which TensorRT's parser stops",
        "Export with torch.onnx.export(..., dynamo=False) outside of modelopt's "
        "export_torch_mode(), which writes Q/DQ",
    ),
    "QCDQ": (
        "Q/DQ with a Clip of integers in between. The parser reads the bounds of the Clip as 0 "
        "without a message, so that all values become 0",
        "Export without narrow ranges and with 8 bits, so that Brevitas writes no Clip",
    ),
    "other": (
        "fake quantizers of another tool, at which TensorRT's parser stops",
        "Export Q/DQ with the tool that quantized the model, or quantize the float model",
    ),
}


class FakeQuantizers(Reason):
    """Simulated quantizers in a form other than Q and DQ; ``node`` is the first of them.

    Attributes:
        form: Tool or exporter that writes this form.
        count: Number of simulated quantizers.
        exact: Number of simulated quantizers that Q and DQ can express.
        problem: Reason why Q and DQ cannot express ``other``; empty if they can express all.
        other: Name of the first quantizer that Q and DQ cannot express.
    """

    rules = (fixable_rule("FAKE-QUANT", lambda r: r.exact), FindingRule("FAKE-QUANT"))

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all nodes

    form: str
    count: int
    exact: int
    problem: str
    other: str

    @property
    def is_misread(self) -> bool:
        """Whether TensorRT builds the quantizers and then computes wrong numbers."""
        return self.form == "QCDQ"

    def message(self, finding: Finding, cause: Cause) -> Message:
        text, export = _FORMS[self.form]
        first = name_first(self.node, self.count)
        message = f"{format_count(self.count, 'quantizer')} {first} are {text}."
        if self.count == 1:
            message = f"{self.node} is a quantizer in the form of {text}."
        if self.problem:
            message += (
                f" {format_count(self.count - self.exact, 'quantizer')} cannot be written as Q/DQ "
                f"({self.other}: {self.problem})."
            )
        quantizers = "this quantizer" if self.count == 1 else "these quantizers"
        rewrite = ""
        if self.exact:
            share = "" if self.exact == self.count else f"{self.exact} of "
            rewrite = f". Or let fix rewrite {share}{quantizers} as Q/DQ"
        return message, (f"{export}{rewrite}. Do not insert Q/DQ next to {quantizers}.")

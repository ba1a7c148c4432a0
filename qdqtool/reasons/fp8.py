"""Reasons that concern FP8: cases in which FP8 behaves differently from INT8."""

from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason
from qdqtool.reasons.tensors import TensorSize
from qdqtool.reasons.text import Message, name_first
from qdqtool.util.text import format_count


class LargeFp8Kernel(Reason, key="fp8-kernel"):
    """A convolution of FP8 data and weights whose kernel is too large for FP8.

    Attributes:
        kernel: Shape of the kernel.
        elements: Size of the convolution's output.
    """

    rules = (FindingRule("FP8-KERNEL"),)

    kernel: tuple[int, ...]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        size = "x".join(map(str, self.kernel))
        return (
            f"{self.node} runs in float: its kernel of {size} has more than 32 elements, the "
            "maximum in FP8."
        )


class FloatFp8Column(Reason, key="fp8-column"):
    """A 1x1 FP8 convolution of data with width 1 and few channels, which runs in float."""

    rules = (FindingRule("FP8-COLUMN"),)

    channels: int

    def message(self, finding: Finding, cause: Cause) -> str:
        shape = f"[1, {self.channels}, H, 1]"
        return f"{self.node} is a 1x1 convolution with data of shape {shape} and runs in float."


class FloatFp8Deconvolution(Reason, key="fp8-deconvolution"):
    """A ConvTranspose of FP8 data and weights."""

    rules = (FindingRule("FP8-DECONV"),)

    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} is a deconvolution with FP8 data and weights, and runs in float."


class EarlyFp8Convolution(Reason, key="fp8-version"):
    """A convolution of FP8 data and weights on a TensorRT without FP8 convolutions.

    Attributes:
        version: Version of TensorRT.
        elements: Size of the convolution's output.
        capability: Compute capability without FP8 convolutions in this version; empty if no GPU has
            them.
    """

    rules = (FindingRule("FP8-VERSION"),)

    version: str
    elements: TensorSize | None = None
    capability: str = ""

    def message(self, finding: Finding, cause: Cause) -> str:
        place = f" on compute capability {self.capability}" if self.capability else ""
        return f"{self.node} runs in float: TensorRT {self.version} has no FP8 convolutions{place}."


class HopperOnlyFp8(Reason):
    """FP8 convolutions on a TensorRT that supports them on Hopper only, if no GPU was named.

    Attributes:
        version: Version of TensorRT.
        count: Number of FP8 convolutions; ``node`` is the first of them.
    """

    rules = (FindingRule("FP8-VERSION"),)

    version: str
    count: int

    def message(self, finding: Finding, cause: Cause) -> str:
        convolutions = format_count(self.count, "convolution")
        first = name_first(self.node, self.count)
        return (
            f"{convolutions} {first}: TensorRT {self.version} computes convolutions "
            "in FP8 on Hopper (compute capability 9.0) only, and this prediction assumes Hopper. "
            "Name the GPU to get the prediction for another GPU."
        )


class MixedOperands(Reason, key="mixed-operands"):
    """A layer with data of INT8 and weights of FP8, or data of FP8 and weights of INT8.

    Attributes:
        dqs: Names of the DQs of data and weights.
        types: Type of the data, and of the weights.
        elements: Size of the layer's output.
    """

    rules = (FindingRule("BUILD-FAILS"),)

    dqs: tuple[str, str]
    types: tuple[Precision, Precision]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        first, second = self.types
        return (
            f"{self.node}: one input is {first} ({self.dqs[0]}), the other is {second} "
            f"({self.dqs[1]}). TensorRT has no layer that multiplies these types.",
            "Quantize both inputs to one type.",
        )


class OutputTypeDiffers(Reason, key="output-type"):
    """The Q after a layer quantizes to an 8-bit type other than the type of the layer.

    Attributes:
        quantizer: The Q.
        types: Type of the layer, and of the Q.
        elements: Size of the layer's output.
    """

    rules = (FindingRule("FP8-MIXED"),)

    quantizer: str
    types: tuple[Precision, Precision]
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} computes in {self.types[0]} and writes float, because {self.quantizer} "
            f"after it quantizes to {self.types[1]}. The Q remains as a layer."
        )


class Fp8Unsupported(Reason):
    """FP8 quantizers on a TensorRT without FP8; ``node`` is the first quantizer."""

    rules = (FindingRule("FP8-TARGET"),)

    identity_excludes = (*Reason.identity_excludes, "node")  # one finding for all nodes

    target: str
    count: int

    def message(self, finding: Finding, cause: Cause) -> str:
        nodes = format_count(self.count, "Q/DQ node")
        first = name_first(self.node, self.count)
        return f"{nodes} of FP8 {first}: {self.target} has no FP8."


class WeaklyTypedFp8(Reason):
    """Quantizers of FP8 on a target whose networks are weakly typed by default.

    Attributes:
        count: Number of FP8 quantizers; ``node`` is the first of them.
        is_predicted_typed: Whether the prediction is for a strongly typed build.
    """

    rules = (FindingRule("FP8-WEAK"),)

    count: int
    is_predicted_typed: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        nodes = format_count(self.count, "Q/DQ node")
        build = "this prediction is for --stronglyTyped; " if self.is_predicted_typed else ""
        return (
            f"{nodes} of FP8 {name_first(self.node, self.count)}: {build}a weakly typed build may "
            "run the layers in FP16."
        )


class NonzeroFp8ZeroPoint(Reason):
    """An FP8 quantizer with a zero point other than 0.

    Attributes:
        zero_points: Smallest and largest value.
    """

    rules = (FindingRule("FP8-ZERO-POINT"),)

    zero_points: tuple[float, float]

    def message(self, finding: Finding, cause: Cause) -> str:
        low, high = self.zero_points
        text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return f"{self.node}: its FP8 zero point is {text}, not 0."


class SlowFp8Convolution(Reason):
    """A convolution of FP8 data and weights that is slow in FP8.

    Attributes:
        inputs: Input channels of a group.
        outputs: Output channels.
        groups: Number of groups.
    """

    rules = (FindingRule("FP8-SLOW"),)

    inputs: int
    outputs: int
    groups: int

    def message(self, finding: Finding, cause: Cause) -> Message | str:
        channels = f"{self.inputs} input and {self.outputs} output channels"
        if self.groups == 1:
            return f"{self.node} has {channels}. FP8 kernels with at most 16 channels are slow."
        form = "depthwise convolution" if self.inputs == 1 else "grouped convolution"
        return f"{self.node} is a {form}, for which TensorRT has no optimized FP8 kernel."

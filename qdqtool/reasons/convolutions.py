"""Reasons that concern the shape of a convolution: dimensions, kernel, groups, channels."""

from qdqtool.reasons.finding import Cause, Finding, FindingRule, Reason
from qdqtool.reasons.tensors import TensorSize
from qdqtool.reasons.text import Message, list_names

_FAILED_BUILDS = (
    ": TensorRT builds with such a quantized layer failed (`include` quantizes it anyway)"
)


class Convolution3D(Reason):
    """A quantized convolution of three spatial dimensions."""

    rules = (FindingRule("CONV3D-INT8"),)

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} is a quantized 3D convolution: builds with such layers failed on "
            "TensorRT 8.2.2 and 8.2.5."
        )


class Deconvolution3D(Reason, key="convtranspose-3d"):
    """A ConvTranspose of three spatial dimensions that runs in float.

    Attributes:
        dq: DQ of the node's data.
        is_always_float: Whether the node runs in float even if an activation and a Q follow.
        elements: Size of the node's result.
    """

    rules = (FindingRule("CT3D-FLOAT"),)

    dq: str
    is_always_float: bool
    elements: TensorSize | None = None

    def message(self, finding: Finding, cause: Cause) -> Message:
        text = f"{self.node} is a quantized 3D ConvTranspose: "
        if self.is_always_float:
            return (
                f"{text}it runs in float on TensorRT 10 and later, as in engines of 10.13.",
                "Remove the Q/DQ of this node, which only add conversions, or use a Resize and a "
                "3D convolution, which runs in INT8.",
            )
        return (f"{text}INT8 is predicted only if an activation and a Q follow the node."), ""


class FloatDeconvolution(Reason):
    """A quantized ConvTranspose on a target that computes every ConvTranspose in float."""

    rules = (FindingRule("CT-FLOAT"),)

    def message(self, finding: Finding, cause: Cause) -> str:
        return f"{self.node} has Q/DQ, but this target computes ConvTranspose in float."

    def skip_reason(self) -> str:
        return "TensorRT-RTX 1.7 never runs ConvTranspose in INT8"


class LargeKernel(Reason):
    """A quantized convolution with a kernel size for which builds failed."""

    rules = (FindingRule("KERNEL-LARGE"),)

    kernel: tuple[int, ...]

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} has a kernel of {'x'.join(map(str, self.kernel))}: builds with a "
            "32x32 kernel failed on TensorRT 8.6."
        )

    def skip_reason(self) -> str:
        return f"kernel {'x'.join(map(str, self.kernel))}{_FAILED_BUILDS}"


class GroupedConvolution(Reason):
    """A grouped convolution that is not depthwise."""

    rules = (
        FindingRule("GROUP-KERNELS", lambda r: r.channels > 8 and r.channels % 16 != 0),
        FindingRule("GROUP-SLOW"),
    )

    groups: int
    channels: int

    def message(self, finding: Finding, cause: Cause) -> str:
        effect = (
            "TensorRT may have no INT8 kernel"
            if finding.code == "GROUP-KERNELS"
            else "INT8 may be slower than FP16"
        )
        return f"{self.node} has {self.groups} groups of {self.channels} channels: {effect}."


class SlowChannelCounts(Reason):
    """A convolution whose numbers of channels make INT8 kernels slow.

    Attributes:
        inputs: Input channels.
        outputs: Output channels.
        odd: Numbers of channels that are not multiples of 16.
        small: Whether the input or the output channels are fewer than 16.
    """

    rules = (FindingRule("CH-SMALL", lambda r: r.small), FindingRule("CH-ALIGN"))

    inputs: int
    outputs: int
    odd: tuple[int, ...]
    small: bool

    def message(self, finding: Finding, cause: Cause) -> str:
        text = f"{self.node} has {self.inputs} input and {self.outputs} output channels"
        if self.small:
            return f"{text}: INT8 saves little time with fewer than 16 channels."
        return (
            f"{text}; {list_names(map(str, self.odd))} "
            f"{'is not a multiple' if len(set(self.odd)) == 1 else 'are not multiples'} of 16."
        )


class DepthwiseSilu(Reason):
    """A depthwise convolution with SiLU.

    Attributes:
        last: Whether no convolution is downstream; False if unknown.
    """

    rules = (FindingRule("DW-SILU"),)

    last: bool = False

    def message(self, finding: Finding, cause: Cause) -> str:
        text = f"{self.node} is a depthwise convolution with SiLU"
        if self.last:
            return (
                f"{text} at the end of the network: TensorRT 8.5.2 found no kernel for such a "
                "layer."
            )
        return f"{text}. The prediction fuses the SiLU (assumed); TensorRT may leave it unfused."

    def skip_reason(self) -> str:
        return f"depthwise convolution with SiLU{_FAILED_BUILDS}"


class DepthwiseAdd(Reason):
    """A depthwise convolution before an Add."""

    rules = (FindingRule("DW-ADD"),)

    add: str

    def message(self, finding: Finding, cause: Cause) -> str:
        return (
            f"{self.node} is a depthwise convolution before the residual Add {self.add}: "
            "TensorRT 8.6 found no kernel for such a layer."
        )

    def skip_reason(self) -> str:
        return f"depthwise convolution before an Add{_FAILED_BUILDS}"

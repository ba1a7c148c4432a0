"""Reasons why a placement leaves nodes float."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from qdqtool.errors import ModelError
from qdqtool.reasons.finding import Reason
from qdqtool.util.json_text import Json
from qdqtool.util.text import format_count

PLACEMENT = "placement"  # pass name in the reasons of this module
_HEAD_OPTION = "(`head='none'` quantizes it)"


class SkipCause(StrEnum):
    """Cause that keeps a node float. The value of each member is its message."""

    ACCURACY = "left float for accuracy"
    # Inputs that make Q/DQ useless.
    CONSTANT_INPUT = "its input depends only on constants"
    UNREADABLE_WEIGHTS = "its weights cannot be read"
    EMPTY_WEIGHTS = "its weights are empty"
    TRANSPOSED_INPUT = "its data input is transposed (transA)"
    # Nodes for which TensorRT has no FP8 kernel, or only slow ones.
    FP8_KERNEL = (
        "its kernel size exceeds 32 elements, the maximum of TensorRT's FP8 convolutions "
        "(`include` quantizes it anyway)"
    )
    FP8_GROUPS = (
        "FP8 kernels for grouped and depthwise convolutions are slow or missing "
        "(`include` quantizes it anyway)"
    )
    FP8_CHANNELS = (
        "FP8 is slower than FP16 with so few input or output channels "
        "(`include` quantizes it anyway)"
    )
    FP8_SINGLE_ROW = (
        "a product with a single row is limited by reading weights, not by computation "
        "(`include` quantizes it anyway)"
    )
    FP8_DECONVOLUTION = "no build shows an FP8 ConvTranspose (`include` quantizes it anyway)"
    # Nodes for which INT8 gains nothing: residual Adds, then averaging poolings.
    RESULT_READ_AS_FLOAT = (
        "another consumer reads the result of this Add as float, so the Add writes float anyway"
    )
    RESULT_NOT_QUANTIZED = "its result has no quantized consumer"
    RESIDUAL_NOT_REQUESTED = "residual is not quantized (`residual='none'`)"
    RESIDUAL_WITHOUT_GAIN = (
        "residual is not quantized: this target gains little or nothing from quantizing it "
        "(`residual='skip'` or `residual='both'` quantizes it)"
    )
    NO_QUANTIZED_PRODUCER = "its input does not come from a quantized node"
    INPUT_READ_AS_FLOAT = (
        "another consumer reads the same input as float, so the producer writes float anyway"
    )
    # Nodes of a PyTorch network that cannot get a quantizer for training.
    UNTRACED_WEIGHTS = (
        "a function call with weights (such as F.linear), a module called with keywords, or a "
        "module with padding other than zeros; write it as a Conv, ConvTranspose or Linear module "
        "called with its input"
    )
    UNTRACED_CALL = "the call of + or of an averaging pool was not found in the network's code"
    OTHER_RUN_IS_FLOAT = "the same module also runs where it has to be float"


class FloatNode(Reason):
    """A node that remains float; the cause alone is the message."""

    cause: SkipCause

    def skip_reason(self) -> str:
        return str(self.cause)


# Nodes that an option leaves float ------------------------------------------------------------


class ExcludedNode(Reason):
    """A node that remains float because the user excluded it.

    Attributes:
        option: Name of the option.
        value: Pattern or operator type that the option names.
    """

    option: str
    value: str

    def skip_reason(self) -> str:
        return f"excluded by `{self.option}` {self.value}"


PresetPart = StrEnum(
    "PresetPart",
    [
        "BOX",
        "DFL",
        "PLACES",
        "MLP",
        "REFERENCE",
        "DETECTOR",
        "SCORES",
        "LAST",
        "ATTENTION",
        "ATTENTION_UNFUSED",
    ],
)
"""Part of a network that a preset leaves float."""


_PRESET_REASONS = {
    PresetPart.BOX: "last box convolutions, which lose accuracy in INT8 or FP8 in some "
    "networks (`head='none'` quantizes them)",
    PresetPart.DFL: f"DFL, the convolution that computes the box sides {_HEAD_OPTION}",
    PresetPart.PLACES: f"produces boxes or sampling points {_HEAD_OPTION}",
    PresetPart.MLP: f"MLP of a box output {_HEAD_OPTION}",
    PresetPart.REFERENCE: f"reads reference points {_HEAD_OPTION}",
    PresetPart.DETECTOR: f"last convolution of a detection head {_HEAD_OPTION}",
    PresetPart.SCORES: "scores that select queries (`head='float'`)",
    PresetPart.LAST: "last convolution before an output (`head='float'`)",
    PresetPart.ATTENTION: "attention runs in float (`attention='int8'` quantizes it)",
    PresetPart.ATTENTION_UNFUSED: "attention of a size that TensorRT does not fuse in FP8 "
    "(`attention='fp8'` quantizes it)",
}


class PresetExclusion(Reason):
    """A node that a preset leaves float."""

    part: PresetPart

    def skip_reason(self) -> str:
        return _PRESET_REASONS[self.part]


# Nodes that TensorRT cannot run in INT8 -------------------------------------------------------


class CustomDomain(Reason):
    """An operator that is not in ONNX's own domain."""

    domain: str

    def skip_reason(self) -> str:
        return f"operator of the domain '{self.domain}'"


class NonFloatWeights(Reason):
    """Weights that are not float; ``kind`` names their type."""

    kind: str

    def skip_reason(self) -> str:
        return f"its weights are {self.kind}, not float"


class UnsupportedWeightsRank(Reason):
    """Weights of a matrix product with a number of dimensions other than two."""

    dimensions: int

    def skip_reason(self) -> str:
        return (
            f"its weights have {format_count(self.dimensions, 'dimension')}; TensorRT supports "
            "constant INT8 weights of two dimensions only"
        )


class EinsumObstacle(StrEnum):
    """Property of an Einsum that keeps it from being written as a MatMul."""

    VECTOR = "one operand is a vector"
    RANK = "the number of axes of its operands is unknown"
    SUMMED = "the summed sizes are unknown or differ (an Einsum repeats a size of 1)"
    SIZES = "a Reshape would have more than one unknown size"


class EinsumProduct(Reason):
    """A matrix product in an Einsum that cannot be written as a MatMul."""

    obstacle: EinsumObstacle

    def skip_reason(self) -> str:
        return f"product in an Einsum, which cannot be written as MatMul: {self.obstacle}"


class SmallConvolution(Reason):
    """A convolution of so few channels that no fast INT8 kernel is expected.

    Attributes:
        inputs: Input channels of a group.
        outputs: Output channels.
        kernel: Size of the kernel, one number for each spatial dimension.
    """

    inputs: int
    outputs: int
    kernel: tuple[int, ...]

    def skip_reason(self) -> str:
        kernel = "x".join(map(str, self.kernel))
        return (
            f"small convolution ({self.inputs} input and {self.outputs} output channels, kernel "
            f"{kernel}): no fast INT8 kernel expected (`include` quantizes it anyway)"
        )


class SubgraphLayers(Reason):
    """Layers with weights in the subgraphs of an If, Loop or Scan; ``count`` is their number."""

    count: int

    def skip_reason(self) -> str:
        return f"its subgraphs, with {format_count(self.count, 'layer')}, are not quantized"


# Skipped nodes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SkippedNode:
    """A node that insertion left float, with the reason."""

    record: Reason

    def __repr__(self) -> str:
        return f"<SkippedNode {self.node}: {self.reason}>"

    @property
    def node(self) -> str:
        return self.record.node

    @property
    def reason(self) -> str:
        return self.record.skip_reason()

    def as_json(self) -> Json:
        return {"node": self.node, "reason": self.reason}


class NothingToQuantize(ModelError):
    """Error for a network in which no node can be quantized.

    Attributes:
        record: Most frequent reason, without the name of a node. None if no node was skipped.
        count: Number of nodes with this reason.
    """

    record: Reason | None = None
    count = 0


def create_nothing_to_quantize_error(
    skipped: Iterable[SkippedNode], source: str, has_weights: bool = True, hidden: str = ""
) -> NothingToQuantize:
    """Return the error for a network in which insertion skipped all nodes.

    Args:
        skipped: The skipped nodes.
        source: File of the model.
        has_weights: Whether the network has operators with weights.
        hidden: Text on where the layers are hidden (such as subgraphs) and what to do; empty if
            unknown.
    """
    reasons = Counter(_remove_names(s.record) for s in skipped).most_common(1)
    text = "nothing to quantize"
    if not has_weights:
        text += ": no Conv, ConvTranspose, Gemm or MatMul in the main graph"
        text += f"; {hidden}" if hidden else ""
    for reason, count in reasons:
        text += f"; {format_count(count, 'node')}: {reason.skip_reason()}"
    error = NothingToQuantize(text, source, code="nothing-to-quantize")
    if reasons:
        error.record, error.count = reasons[0]
    return error


def _remove_names(reason: Reason) -> Reason:
    names = {name: "" for name in ("node", "weight", "add") if hasattr(reason, name)}
    return replace(reason, **names)

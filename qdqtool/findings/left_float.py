"""Reasons why a placement leaves nodes float, and their texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from qdqtool.errors import ModelError
from qdqtool.reasons.faults import DepthwiseAdd, DepthwiseSilu, FloatDeconvolution, LargeKernel
from qdqtool.reasons.simulation import WeightsNotConstant
from qdqtool.types import Json, Refusal
from qdqtool.util.records import nearest, record, replace_fields
from qdqtool.util.said import Parameter, said
from qdqtool.util.text import format_count

PLACEMENT = "placement"  # who looked: no pass


# What was asked for -----------------------------------------------------------------------------------------------


class Excluded(Refusal):
    """A node that an option names; ``value`` is the pattern or the operator."""

    option: str
    value: str


class FloatForAccuracy(Refusal):
    """A node that a search chose to leave float."""


class Part(StrEnum):
    """What a preset leaves float."""

    BOX = "box"
    DFL = "dfl"
    PLACES = "places"
    MLP = "mlp"
    REFERENCE = "reference"
    DETECTOR = "detector"
    SCORES = "scores"
    LAST = "last"
    ATTENTION = "attention"


class KeptByPreset(Refusal):
    """A node that a preset leaves float."""

    what: Part


# What TensorRT cannot run ------------------------------------------------------------------------------------------


class OtherDomain(Refusal):
    """An operator of another domain than ONNX's."""

    domain: str


class Unfit(StrEnum):
    """What is wrong with a node's inputs."""

    CONSTANT = "its input depends only on constants"
    UNREADABLE = "its weights cannot be read"
    EMPTY = "its weights are empty"
    TRANSPOSED = "its data input is transposed (transA)"


class UnfitInput(Refusal):
    """A node with an input that no Q/DQ pair helps."""

    what: Unfit


class WeightsType(Refusal):
    """Weights that are not float; ``kind`` names their type."""

    kind: str


class WeightsRank(Refusal):
    """Weights of a matrix product with other than two dimensions."""

    dimensions: int


class Unwritten(StrEnum):
    """Why no MatMul is known to compute the same as an Einsum."""

    VECTOR = "one operand is a vector"
    RANK = "the number of axes of its operands is unknown"
    SUMMED = "the sizes that it sums over may differ (a size of 1 is repeated in an Einsum, not in a MatMul)"
    SIZES = "a Reshape would have more than one unknown size"


class ProductInEinsum(Refusal):
    """A matrix product that an Einsum computes and no MatMul is known to."""

    why: Unwritten


class SmallConvolution(Refusal):
    """A convolution of so few channels that no fast INT8 kernel is expected.

    Attributes:
        inputs: Input channels of a group.
        outputs: Output channels.
        kernel: Its extent, one number for each spatial dimension.
    """

    inputs: int
    outputs: int
    kernel: tuple[int, ...]


class InBody(Refusal):
    """Layers with weights inside the body of an If, a Loop or a Scan; ``count`` of them."""

    count: int


# What would gain nothing -------------------------------------------------------------------------------------------


class ResultFloat(Refusal):
    """A residual Add whose result is written as float; ``quantized`` where a quantized node reads it as well."""

    quantized: bool


class ResidualLeft(Refusal):
    """A residual Add that is left float; ``asked`` where an option says so, else the target gains nothing."""

    asked: bool


class NoNeighbour(Refusal):
    """A pooling that averages with no quantized node in front of it."""


class InputFloat(Refusal):
    """A pooling that averages whose input a float node reads as well."""


# What training cannot place ----------------------------------------------------------------------------------------


class Hidden(StrEnum):
    """Why no quantizer of a network in training can stand for a node's."""

    WEIGHTED = (
        "a function call with weights (as F.linear), or a module called with keywords or "
        "padding other than zeros; write it as a Conv, ConvTranspose or Linear module called with its input"
    )
    CALL = "no call of + or of an averaging pool that can be found again in the network's code"
    OTHER_RUN = "another run of the same module has to stay float"


class Unreachable(Refusal):
    """A node that would be quantized where no module or call of the network can hold the quantizer."""

    what: Hidden


# Words -------------------------------------------------------------------------------------------------------------


_HEAD = "({`head`:'none'} quantizes it)"
_PRESETS = {
    Part.BOX: said("box output of a YOLOv8-style head " + _HEAD),
    Part.DFL: said("DFL: expected value over the box bins " + _HEAD),
    Part.PLACES: said("produces boxes or sampling points " + _HEAD),
    Part.MLP: said("MLP of a box output " + _HEAD),
    Part.REFERENCE: said("reads reference points " + _HEAD),
    Part.DETECTOR: said("last convolution of a detection head " + _HEAD),
    Part.SCORES: said("scores that select queries ({`head`:'float'})"),
    Part.LAST: said("last convolution before an output ({`head`:'float'})"),
    Part.ATTENTION: said("attention stays float ({`attention`:'int8'} quantizes it)"),
}
_FAILED = ": builds with these failed ({`include`} quantizes it)"
_ASKED = {
    True: said("residual stays float ({`residual`:'none'})"),
    False: said(
        "residual stays float: this target gains nothing from quantizing it ({`residual`:'skip'} or "
        "{`residual`:'both'} quantizes it)"
    ),
}
_READ = {
    True: "another consumer reads its result as float, so it writes float anyway",
    False: "its result is not quantized next",
}
WORDS: dict[type[Refusal], Callable[[Any], str]] = {
    Excluded: lambda r: said(
        "excluded by {option} {value}", option=Parameter(r.option), value=r.value
    ),
    FloatForAccuracy: lambda r: "stays float for accuracy",
    KeptByPreset: lambda r: _PRESETS[r.what],
    OtherDomain: lambda r: f"operator of the domain '{r.domain}'",
    UnfitInput: lambda r: str(r.what),
    WeightsNotConstant: lambda r: (
        "its weights are stored as a sparse tensor: store them in full"
        if r.sparse
        else "its weights are computed, not constant"
    ),
    WeightsType: lambda r: f"its weights are {r.kind}, not float",
    WeightsRank: lambda r: (
        f"its weights have {format_count(r.dimensions, 'dimension')}; TensorRT supports constant INT8 weights of two"
    ),
    ProductInEinsum: lambda r: f"product in an Einsum, which cannot be written as MatMul: {r.why}",
    FloatDeconvolution: lambda r: "TensorRT-RTX 1.7 never runs ConvTranspose in INT8",
    SmallConvolution: lambda r: said(
        "small convolution ({inputs} to {outputs} channels, kernel {kernel}): no fast INT8 kernel expected "
        "({`include`} quantizes it)",
        inputs=r.inputs,
        outputs=r.outputs,
        kernel=_extent(r.kernel),
    ),
    LargeKernel: lambda r: said("kernel {kernel}" + _FAILED, kernel=_extent(r.kernel)),
    DepthwiseAdd: lambda r: said("depthwise convolution into an Add" + _FAILED),
    DepthwiseSilu: lambda r: said("depthwise convolution with SiLU" + _FAILED),
    InBody: lambda r: f"the {r.count} convolutions or products inside its body stay float",
    ResultFloat: lambda r: _READ[r.quantized],
    ResidualLeft: lambda r: _ASKED[r.asked],
    NoNeighbour: lambda r: "no quantized node is before it",
    InputFloat: lambda r: (
        "another consumer reads its input as float, so its producer writes float anyway"
    ),
    Unreachable: lambda r: str(r.what),
}


def _extent(kernel: tuple[int, ...]) -> str:
    return "x".join(map(str, kernel))


@record
class SkippedNode:
    """A node that could have been quantized and was left float, and why."""

    refusal: Refusal

    @property
    def node(self) -> str:
        """The node's name."""
        return self.refusal.node

    @property
    def reason(self) -> str:
        """Why, in words."""
        words = nearest(WORDS, type(self.refusal))
        assert words is not None, self.refusal
        return words(self.refusal)

    def as_json(self) -> Json:
        return {"node": self.node, "reason": self.reason}


class NothingToQuantize(ModelError):
    """A network all of which is left float.

    Attributes:
        refusal: Why most of it is, of no node in particular; None where nothing in it could be quantized.
        count: How many nodes are for that reason.
    """

    refusal: Refusal | None = None
    count = 0


def nothing_to_quantize(
    skipped: Iterable[SkippedNode], source: str, found: bool = True
) -> NothingToQuantize:
    """The error for what was skipped; ``found`` where the network has operators with weights."""
    most = Counter(_nameless(s.refusal) for s in skipped).most_common(1)
    why = [
        said("; {count:counted node}: {reason}", count=n, reason=SkippedNode(r).reason)
        for r, n in most
    ]
    none = "" if found else said(": no Conv, ConvTranspose, Gemm or MatMul in the main graph")
    error = NothingToQuantize(
        said("nothing to quantize{none}{why:joined }", none=none, why=why),
        source,
        code="nothing-to-quantize",
    )
    error.refusal, error.count = most[0] if most else (None, 0)
    return error


def _nameless(refusal: Refusal) -> Refusal:
    """The same of no node in particular."""
    return replace_fields(
        refusal, **{name: "" for name in ("node", "weight", "add") if hasattr(refusal, name)}
    )

"""What the parts of a verification hold: a build's facts, and how much of each part of a prediction it confirms.

``as_json()`` gives the published fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from qdqtool.util.records import published

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
MismatchSide: TypeAlias = dict[str, JsonValue]
"""What one side says of a mismatch: published fields with small values."""


class MismatchKind(StrEnum):
    """What a mismatch is about."""

    CONVOLUTION = "convolution"
    LAYER = "layer"
    TRACE = "trace"
    COPY = "copy"
    CONVERSION = "conversion"
    BUILD = "build"


class BuildSource(StrEnum):
    """Where the facts of a build come from."""

    NONE = ""
    TRTEXEC_LOG = "trtexec-log"
    LOG = "log"
    LAYER_INFO = "layer-info"
    LAYER_JSON = "layer-json"
    PROFILE_JSON = "profile-json"
    TENSORRT_RTX = "tensorrt-rtx"
    TRTEXEC = "trtexec"
    TENSORRT = "tensorrt"
    RECORDING = "a recording of an earlier build"

    @property
    def is_log(self) -> bool:
        """Whether it is the text that a builder printed."""
        return self in (BuildSource.TRTEXEC_LOG, BuildSource.LOG)


class _SubscriptableRecord:
    """Fields by name as well: 0.1 handed out dictionaries, and scripts subscript them."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def as_json(self) -> dict[str, Any]:
        return published(self)


@dataclass(frozen=True, slots=True)
class BuildFacts(_SubscriptableRecord):
    """Which build a verification refers to.

    Attributes:
        source: Where the facts come from.
        tensorrt: Version, None where not stated.
        device: GPU, None where not stated.
        complete: Whether the engine listing is there and whole.
        status: What a builder that was run here made of the model (``built``, ``refused``, ``crashed``); None for a
            build that was read.
        message: Its own words, with ``status``.
    """

    source: BuildSource
    files: tuple[str, ...] = ()
    tensorrt: str | None = None
    device: str | None = None
    complete: bool = False
    missing: tuple[str, ...] = ()
    status: str | None = None
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        ran = () if self.status is None else ("status", "message")
        return published(self, "source", "files", "tensorrt", "device", "complete", "missing", *ran)


@dataclass(frozen=True, slots=True)
class ConvolutionCounts(_SubscriptableRecord):
    """Convolutions predicted, those that the build confirms, and those of which it does not say enough."""

    total: int = 0
    agree: int = 0
    unknown: int = 0
    unknown_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerCounts(_SubscriptableRecord):
    """Engine layers built, and those predicted with the same name and types; None where nothing is listed."""

    total: int | None = None
    agree: int | None = None


@dataclass(frozen=True, slots=True)
class TraceCounts(_SubscriptableRecord):
    """Lines predicted, lines logged (None where the build has none), and lines in common.

    ``agree`` counts those as a multiset, wherever they stand, ``in_order`` the longest common subsequence.
    """

    predicted: int | None = None
    built: int | None = None
    agree: int | None = None
    in_order: int | None = None


@dataclass(frozen=True, slots=True)
class ConversionCounts(_SubscriptableRecord):
    """Q and DQ that stay in the engine; ``predicted`` is None where that depends on scales that are not known."""

    predicted: int | None = None
    built: int | None = None


class Difference(StrEnum):
    """How prediction and build part: the words, with places for the values."""

    STATUS = "predicted to be {}, the compiler says {}"
    PRECISION = "predicted {}, built {}"
    INPUT = "predicted {} input, built {} input"
    OUTPUT = "predicted {} output, built {} output"
    RESIDUAL = "predicted {} residual, built {} residual"
    TAKES_RESIDUAL = "predicted that it takes a residual input, built otherwise"
    TAKES_NONE = "predicted that it takes no residual input, built otherwise"
    ABSORBS = "predicted that it absorbs {}, the engine's layer does not"
    ABSORBED = "the engine's layer absorbs {}, which was not predicted"
    LINE_AND_INPUT = (
        "the log contradicts itself: line {} quantizes it, the engine lists a float input"
    )
    LINE_AND_OUTPUT = (
        "the log contradicts itself: line {} quantizes the output, the engine lists float"
    )
    NO_LINE = "the log contradicts itself: the engine lists INT8, no pass line quantizes it"
    TWO_TYPES = "the log contradicts itself: {} in line {}, {} in line {}"
    END = "the model's {} is {}, the engine lists {}"
    FIRST_LINE = "first line at which prediction and log part"
    LOGGED = "logged, not predicted"
    NOT_LOGGED = "predicted, not logged"
    STAYS = "stays in the engine, not predicted"
    GONE = "predicted to stay, the engine has none"


Said: TypeAlias = tuple[Difference, tuple[object, ...]]
"""A difference and its values."""


@dataclass(slots=True)
class Mismatch:
    """One place where prediction and build part.

    Attributes:
        kind: What it is about.
        name: The convolution, layer, line or tensor.
        predicted: What the prediction says; empty where it says nothing.
        built: What the build says.
        differs: What differs.
        values: What is said of it.
        line: The log's line number, None where there is none.
        rule: What the prediction rests on: a pass, with the reason of its refusal, or a layer.
    """

    kind: MismatchKind
    name: str
    predicted: MismatchSide
    built: MismatchSide
    differs: Difference
    values: tuple[object, ...] = ()
    line: int | None = None
    rule: str = ""

    @property
    def why(self) -> str:
        """The difference in words."""
        return self.differs.format(*self.values) + (
            f" (predicted {self.rule})" if self.rule else ""
        )

    def as_json(self) -> dict[str, Any]:
        return {
            **published(self, "kind", "name", "predicted", "built"),
            "why": self.why,
            "line": self.line,
        }

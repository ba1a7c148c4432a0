"""Parts of a verification's result: facts of the build, counts, and mismatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from qdqtool.util.records import to_json_fields

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
MismatchSide: TypeAlias = dict[str, JsonValue]
"""Prediction or build in a mismatch: fields of the JSON output."""


class MismatchKind(StrEnum):
    """Subject of a mismatch."""

    CONVOLUTION = "convolution"
    LAYER = "layer"
    TRACE = "trace"
    COPY = "copy"
    CONVERSION = "conversion"
    BUILD = "build"


class BuildSource(StrEnum):
    """Source of the facts of a build."""

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
        """Whether the source is the log of a builder, not a listing or a profile."""
        return self in (BuildSource.TRTEXEC_LOG, BuildSource.LOG)


class _SubscriptableRecord:
    """Record that also allows ``record["field"]``: version 0.1 returned dictionaries."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def as_json(self) -> dict[str, Any]:
        return to_json_fields(self)


@dataclass(frozen=True, slots=True)
class BuildFacts(_SubscriptableRecord):
    """Facts about the build of a verification.

    Attributes:
        source: Source of the facts.
        tensorrt: Version, None if not stated.
        device: GPU, None if not stated.
        complete: Whether the engine listing is complete.
        missing: Sections that are missing or cut off.
        status: Result of a builder that ran on this machine (``built``, ``refused``, ``crashed``).
            None for a build that was read from files.
        message: Reason that the builder gave for its status.
        names_only: Whether the engine listing has only names of layers.
    """

    source: BuildSource
    files: tuple[str, ...] = ()
    tensorrt: str | None = None
    device: str | None = None
    complete: bool = False
    missing: tuple[str, ...] = ()
    status: str | None = None
    message: str = ""
    names_only: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON output."""
        status_fields = () if self.status is None else ("status", "message")
        return to_json_fields(
            self, "source", "files", "tensorrt", "device", "complete", "missing", *status_fields
        )


@dataclass(frozen=True, slots=True)
class ConvolutionCounts(_SubscriptableRecord):
    """Numbers of convolutions in a verification.

    Attributes:
        total: Predicted convolutions.
        agree: Convolutions that the build confirms.
        unknown: Convolutions that the build does not describe well enough for a comparison.
        unknown_names: Names of the unknown convolutions.
    """

    total: int = 0
    agree: int = 0
    unknown: int = 0
    unknown_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerCounts(_SubscriptableRecord):
    """Numbers of engine layers; each number is None if the build lists no layers.

    Attributes:
        total: Built layers.
        agree: Built layers that were predicted with the same name and types.
        unmatched: Names of built layers for which no layer of that name was predicted.
        not_compared: Numbers of further built layers by type, which no prediction contains:
            constants, reformats that the builder adds, and Myelin blocks.
    """

    total: int | None = None
    agree: int | None = None
    unmatched: tuple[str, ...] = ()
    not_compared: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceCounts(_SubscriptableRecord):
    """Numbers of the optimizer's log lines; each is None if the log has no such lines.

    Attributes:
        predicted: Predicted lines.
        built: Logged lines.
        agree: Common lines in any order, as a multiset.
        in_order: Length of the longest common subsequence.
    """

    predicted: int | None = None
    built: int | None = None
    agree: int | None = None
    in_order: int | None = None


@dataclass(frozen=True, slots=True)
class ConversionCounts(_SubscriptableRecord):
    """Numbers of Q and DQ that remain in the engine.

    Attributes:
        predicted: Predicted number; None if the number depends on unknown scales.
        built: Number in the engine; None if the build does not show the number.
    """

    predicted: int | None = None
    built: int | None = None


class Difference(StrEnum):
    """Difference between prediction and build, as a template of the message."""

    STATUS = "predicted to be {}, but the compiler reports {}"
    PRECISION = "predicted {}, built {}"
    INPUT = "predicted {} input, built {} input"
    OUTPUT = "predicted {} output, built {} output"
    RESIDUAL = "predicted {} residual, built {} residual"
    LACKS_RESIDUAL = "predicted with a residual input, built without"
    HAS_RESIDUAL = "predicted without a residual input, built with one"
    ABSORBS = "predicted to absorb {}, but the engine's layer does not"
    ABSORBED = "the engine's layer absorbs {}, which was not predicted"
    LINE_AND_INPUT = (
        "the log contradicts itself: line {} reports a quantized input, but the engine lists float"
    )
    LINE_AND_OUTPUT = (
        "the log contradicts itself: line {} reports a quantized output, but the engine lists float"
    )
    NO_LINE = (
        "the log contradicts itself: the engine lists a quantized input, but no line of an "
        "optimizer pass reports one"
    )
    TWO_TYPES = "the log contradicts itself: {} in line {}, {} in line {}"
    END = "the model's {} is {}, but the engine lists {}"
    FIRST_LINE = "first line at which prediction and log differ"
    LOGGED = "logged, but not predicted"
    NOT_LOGGED = "predicted, but not logged"
    REMAINS = "remains in the engine, although it was predicted to disappear"
    ABSENT = "predicted to remain, but missing in the engine"


DetailedDifference: TypeAlias = tuple[Difference, tuple[object, ...]]
"""Difference with the values of its template."""


@dataclass(slots=True)
class Mismatch:
    """Difference between prediction and build at a convolution, layer, log line or tensor.

    Attributes:
        kind: Subject of the mismatch.
        name: Name of the convolution, layer, line or tensor.
        predicted: Facts of the prediction; empty if the prediction lacks the subject.
        built: Facts of the build; empty if the build lacks the subject.
        differs: Difference between prediction and build, as the template of the message.
        values: Values of the template of `differs`.
        line: Line number in the log, None if there is none.
        rule: Origin of the prediction: ``by PASS``, ``by PASS: REASON`` (if the pass did not fire)
            or ``as layer NAME``; empty if unknown.
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
        """Description of the difference."""
        return self.differs.format(*self.values) + (
            f" (predicted {self.rule})" if self.rule else ""
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON output."""
        return {
            **to_json_fields(self, "kind", "name", "predicted", "built"),
            "why": self.why,
            "line": self.line,
        }

"""What a real TensorRT build said, as data: the answer of :func:`qdqtool.buildlog.read.read_build`.

Nothing here imports onnx or numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from qdqtool.buildlog.agreement import BuildFacts, BuildSource
from qdqtool.buildlog.names import FusedName, parts
from qdqtool.buildlog.records import (
    AddedReformat,
    LineCounts,
    Memory,
    Message,
    Milestone,
    ParseSection,
    ProfileRow,
    Shape,
    Tactics,
)
from qdqtool.types import Event, Precision, TensorPrecision

REFORMAT_TYPES = frozenset({"Reformat", "Copy", "Cast"})  # a NoOp is nothing at run time
_MAX_ELEMENTS = 1 << 50


class LayerKind(StrEnum):
    """What an engine layer does: change the data type only, the layout only, convolve, or something else."""

    CONVERSION = "conversion"
    REFORMAT = "reformat"
    CONVOLUTION = "convolution"
    OTHER = "other"


class Listing(StrEnum):
    """Where an engine listing came from."""

    NONE = ""
    ENGINE_LINES = "engine-lines"
    LAYER_INFO = "layer-info"
    LAYER_JSON = "layer-json"


@dataclass(frozen=True, slots=True)
class LogEvent(Event):
    """An optimizer event with the number of the log line that says it (counted from 1; 0 where there is none)."""

    line: int = 0

    @property
    def event(self) -> Event:
        """The event without its place, to compare with a simulated one."""
        return Event(self.pass_name, self.kind, self.subject, self.object)


@dataclass(frozen=True, slots=True)
class BuiltTensor:
    """A tensor at the edge of an engine layer.

    Attributes:
        tensor: TensorRT's name.
        precision: Its data type; UNKNOWN where the listing does not say.
        shape: Dimensions without the vectorization.
        vector: Channels per element of a vectorized layout (32 for ``64:32``), 1 otherwise.
        format: The layout in TensorRT's words, empty where not stated.
    """

    tensor: str
    precision: Precision = Precision.UNKNOWN
    shape: Shape | None = None
    vector: int = 1
    format: str = ""

    @property
    def edge(self) -> TensorPrecision:
        return TensorPrecision(self.tensor, self.precision)

    @property
    def elements(self) -> int | None:
        """Number of elements; None for an unknown, dynamic or impossible shape."""
        if self.shape is None:
            return None
        known = [d for d in self.shape if d is not None]
        count = math.prod(known) if len(known) == len(self.shape) else _MAX_ELEMENTS
        return count if count < _MAX_ELEMENTS else None

    def as_json(self) -> dict[str, Any]:
        shape = None if self.shape is None else list(self.shape)
        return {
            "tensor": self.tensor,
            "precision": str(self.precision),
            "shape": shape,
            "vector": self.vector,
            "format": self.format,
        }


@dataclass(slots=True)
class BuiltLayer:
    """One layer of the engine that was built.

    Attributes:
        name: TensorRT's fused name.
        type: TensorRT's layer type (``CaskConvolution``, ``Reformat``, ``kgen``, ...); empty in a names-only listing.
        inputs: Input tensors, as listed (a residual second).
        outputs: Output tensors.
        constants: Weights that TensorRT 10 and later list as tensors.
        tactic: Tactic number or name as printed.
        onnx_names: ONNX nodes that the metadata names (TensorRT 10 and later), else empty.
        origin: The ``Origin`` field: ``QDQ`` for a Q or DQ that stayed.
        line: Number of the log line, 0 where it came from JSON.
        extras: The other fields as they were listed: Kernel, Stride, Groups, Weights, Activation, ...
    """

    name: str
    type: str = ""
    inputs: list[BuiltTensor] = field(default_factory=list)
    outputs: list[BuiltTensor] = field(default_factory=list)
    constants: list[BuiltTensor] = field(default_factory=list)
    tactic: str = ""
    onnx_names: list[str] = field(default_factory=list)
    origin: str = ""
    line: int = 0
    extras: dict[str, Any] = field(default_factory=dict)

    def fused(self, known: frozenset[str] = frozenset()) -> FusedName:
        """The name taken apart; ``known`` are ONNX node and initializer names that settle doubtful cuts."""
        return parts(self.name, known)

    @property
    def input_precision(self) -> Precision:
        return self.inputs[0].precision if self.inputs else Precision.UNKNOWN

    @property
    def output_precision(self) -> Precision:
        return self.outputs[0].precision if self.outputs else Precision.UNKNOWN

    @property
    def is_convolution(self) -> bool:
        lower = self.type.lower()
        parameter = str(self.extras.get("ParameterType", ""))
        return "conv" in lower or lower == "correlation" or parameter in ("Convolution", "ConvActPool")

    @property
    def is_deconvolution(self) -> bool:
        return "deconv" in self.type.lower()

    @property
    def is_qdq(self) -> bool:
        """Whether it is a Q or DQ of the model that stayed as a layer of its own, or a DQ with the Q behind it."""
        if self.origin:
            return self.origin == "QDQ"
        if self.type not in ("Reformat", "Scale", "Quantize", "Dequantize", "Copy", ""):
            return False
        fused = self.fused()
        return fused.kind == "layer" and len(fused.components) in (1, 2) and all(
            "uantizeLinear" in part for part in fused.components)

    @property
    def kind(self) -> LayerKind:
        """``conversion`` (changes the data type only), ``reformat`` (the layout only), ``convolution`` or ``other``."""
        if self.is_qdq:
            return LayerKind.CONVERSION
        if self.type in REFORMAT_TYPES or (not self.type and self.fused().is_copy):
            pair = (self.input_precision, self.output_precision)
            changed = Precision.UNKNOWN not in pair and pair[0] != pair[1]
            return LayerKind.CONVERSION if changed else LayerKind.REFORMAT
        return LayerKind.CONVOLUTION if self.is_convolution else LayerKind.OTHER

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "type": self.type,
            "kind": str(self.kind),
            "inputs": [t.as_json() for t in self.inputs],
            "outputs": [t.as_json() for t in self.outputs],
            "tactic": self.tactic,
            "onnx": list(self.onnx_names),
            "origin": self.origin,
            "line": self.line,
        }


@dataclass(slots=True)
class Build:
    """One TensorRT build, read from one or several files.

    Attributes:
        source: ``trtexec-log``, ``log`` (Python API, polygraphy), ``layer-info`` (``--dumpLayerInfo`` text alone),
            ``layer-json`` or ``profile-json``.
        files: The names of the files read.
        tensorrt: Version (``8.5.2``), None where no line states it.
        version_hint: Where no line states the version: the earliest one that spells its lines this way (``8.5``).
        is_rtx: Whether it is TensorRT for RTX.
        device: GPU name.
        gpu: The lines of ``Device Information``: key to value.
        command: The trtexec command line.
        flags: Its flags: name without dashes to value (an empty string for a switch).
        precision_flags: The precisions that the builder may use: of ``fp32``, ``fp16``, ``bf16``, ``fp8``, ``int8``,
            ``best``, ``stronglyTyped``; empty where not stated.
        options: Option blocks: block (``Build``) to key to value.
        passed: True for ``&&&& PASSED``, False for ``&&&& FAILED``, None when neither was printed.
        parse: The parse section.
        trace: Every optimizer line, in order.
        headings: The optimizer's headings (``QDQ graph optimizer backward pass``) with their line.
        milestones: ``Original: 730 layers`` and the like, in order.
        placement: (``GPU`` or ``DLA``, layer type or empty, name) of the layers before tuning.
        layers: The engine listing.
        second_layers: The same engine listed a second time, in another spelling or another file; empty for none.
        listing: Where the listing came from: ``engine-lines``, ``layer-info`` or ``layer-json``; empty for none.
        bindings: Names of the network's inputs and outputs.
        profile_rows: The profile, in order.
        profile_total_ms: Average time of a query over all layers, from the Total line; None where not printed.
        iterations: Iterations profiled.
        performance: Metric (``GPU Compute Time``) to name (``mean``, ``percentile(99%)``, ``value``) to number; ms, qps
            for the throughput, s for the totals.
        builds: Number of builds found in the file; everything refers to the last one (a network that is built twice is
            parsed once).
        missing: Sections that are absent or cut off.
        complete: Whether the engine listing is there, whole, with precisions, and no section is cut.
        names_only: Whether the listing has layer names and nothing else.
    """

    source: BuildSource = BuildSource.NONE
    files: list[str] = field(default_factory=list)
    tensorrt: str | None = None
    version_hint: str | None = None
    is_rtx: bool = False
    device: str | None = None
    gpu: dict[str, str] = field(default_factory=dict)
    command: str = ""
    flags: dict[str, str] = field(default_factory=dict)
    precision_flags: frozenset[str] = frozenset()
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    passed: bool | None = None
    parse: ParseSection = field(default_factory=ParseSection)
    trace: list[LogEvent] = field(default_factory=list)
    headings: list[tuple[str, int]] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)
    placement: list[tuple[str, str, str]] = field(default_factory=list)
    layers: list[BuiltLayer] = field(default_factory=list)
    second_layers: list[BuiltLayer] = field(default_factory=list)
    listing: Listing = Listing.NONE
    bindings: list[str] = field(default_factory=list)
    profile_rows: list[ProfileRow] = field(default_factory=list)
    profile_total_ms: float | None = None
    iterations: int | None = None
    performance: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    tactics: Tactics = field(default_factory=Tactics)
    reformats: list[AddedReformat] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    lines: LineCounts = field(default_factory=LineCounts)
    builds: int = 0
    missing: list[str] = field(default_factory=list)
    complete: bool = False
    names_only: bool = False
    notes: list[str] = field(default_factory=list)

    def begin_again(self) -> None:
        """Forgets what was read of a build, for another one begins in the same file; its parse section stays."""
        for kept in (self.trace, self.headings, self.milestones, self.placement, self.reformats, self.layers,
                     self.second_layers, self.bindings, self.profile_rows, self.performance, self.seconds):
            kept.clear()
        self.profile_total_ms = self.iterations = self.passed = None
        self.memory = Memory()
        self.tactics.clear()

    @property
    def title(self) -> str:
        """``TensorRT 8.5.2``; where the version is not stated, what its spelling gives away."""
        product = "TensorRT-RTX" if self.is_rtx else "TensorRT"
        if self.tensorrt:
            return f"{product} {self.tensorrt}"
        if self.version_hint and not self.is_rtx:
            return f"{product} {self.version_hint} or later, by its spelling"
        return f"{product} of unknown version"

    @property
    def warnings(self) -> list[Message]:
        return [m for m in self.messages if m.level == "W"]

    @property
    def errors(self) -> list[Message]:
        return [m for m in self.messages if m.level == "E"]

    @property
    def merged(self) -> list[list[str]]:
        """The layers that TensorRT merged side by side (``A || B``)."""
        return [e.subject.split(" || ") for e in self.trace if e.kind == "Merging layers"]

    @property
    def profile(self) -> dict[str, float]:
        """Layer name to average milliseconds; layers that share a name are summed."""
        result: dict[str, float] = {}
        for row in self.profile_rows:
            result[row.name] = result.get(row.name, 0.0) + row.average_ms
        return result

    @property
    def conversions(self) -> list[BuiltLayer]:
        """Layers that change a data type: Q and DQ that stayed, and reformats between types."""
        return [layer for layer in self.layers if layer.kind == LayerKind.CONVERSION]

    @property
    def layout_reformats(self) -> list[BuiltLayer]:
        """Layers that change a memory layout and nothing else."""
        return [layer for layer in self.layers if layer.kind == LayerKind.REFORMAT]

    @property
    def facts(self) -> BuildFacts:
        """Which build it is, for a verification."""
        return BuildFacts(
            self.source, tuple(self.files), self.tensorrt, self.device, self.complete, tuple(self.missing)
        )

    def layer(self, name: str) -> BuiltLayer:
        """The engine layer of that name.

        Raises:
            KeyError: There is none.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def milestone(self, what: str) -> int | None:
        """Number of layers at the last milestone of that name (``After tensor merging``)."""
        return next((m.layers for m in reversed(self.milestones) if m.what == what), None)

    def as_json(self) -> dict[str, Any]:
        """The ``build`` object of a verification."""
        return self.facts.as_json()

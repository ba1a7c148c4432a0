"""Contents of a TensorRT build log or layer listing.

:func:`qdqtool.buildlog.read.read_build` returns a :class:`Build`. This module does not import onnx
or numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from qdqtool.buildlog.agreement import BuildFacts, BuildSource
from qdqtool.buildlog.names import FusedName, parse_layer_name
from qdqtool.ir.precision import Precision
from qdqtool.trt.trace import Event
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields

Shape = tuple[int | None, ...]
"""Dimensions as printed (NCHW for images). None is a dynamic dimension, printed as -1."""

MAX_DIMENSION = 1 << 40  # a larger dimension means a damaged file and counts as unknown


def static_shape(shape: Shape | None) -> list[int] | None:
    """Return the dimensions if all of them are known, else None."""
    return None if shape is None or None in shape else [d for d in shape if d is not None]


class Section(StrEnum):
    """Section of a build log."""

    LISTING = "engine listing"
    PROFILE = "profile"
    PASSES = "optimizer passes"
    PARSE = "parse section"
    END = "end of the log"
    ALL = "everything"


class GapKind(StrEnum):
    """Kind of gap in a build. The values are templates of messages."""

    ABSENT = "{section}"
    NOT_REACHED = "no {section}"
    NAMES_ONLY = "{section} (names only, no precisions)"
    CUT = "{section} (cut off)"
    FEWER_LAYERS = "{section} (cut off: {count} of {expected} layers)"
    UNWRITTEN = "{section} (a layer is missing: {name} reads {tensor}, which has no producer)"
    IDLE_BINDING = "{section} (a layer is missing: no layer reads or writes the binding {tensor})"
    CUT_FILE = "{section} (cut off: the end of {name})"
    BEYOND_RECORDS = "{section} beyond the first {count:,} records"

    @property
    def is_unread(self) -> bool:
        """Whether a part of a file was not read; all other gaps are found in the read contents."""
        return self in (GapKind.CUT_FILE, GapKind.BEYOND_RECORDS)

    @property
    def is_truncation(self) -> bool:
        """Whether content was lost. False for an absent section and a listing of names only."""
        return self not in (GapKind.ABSENT, GapKind.NAMES_ONLY)


@dataclass(frozen=True, slots=True)
class Gap:
    """Section of a build that is missing or incomplete, with the values for the gap's message."""

    section: Section
    kind: GapKind = GapKind.ABSENT
    count: int = 0
    expected: int = 0
    name: str = ""
    tensor: str = ""

    def __str__(self) -> str:
        return self.kind.format(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """Tensor of the ONNX graph as the parser printed it.

    Attributes:
        dtype: Data type as ONNX writes it (``FLOAT``, ``INT64``).
    """

    name: str
    shape: Shape | None
    dtype: str


@dataclass(slots=True)
class ParsedNode:
    """ONNX node of the parse section.

    Attributes:
        inputs: Inputs in order; None for an optional input that is not set.
        line: Log line at which the parsing of the node begins.
        details: Attributes that the parser printed: ``kernel``, ``strides``, ``prepadding``,
            ``axis``, ...
    """

    name: str
    op: str
    inputs: list[ParsedTensor | None] = field(default_factory=list)
    outputs: list[ParsedTensor | None] = field(default_factory=list)
    line: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ParseSection:
    """Everything the ONNX parser printed, in order.

    Attributes:
        outputs: Tensor names marked as outputs.
        layers: ONNX node names by TensorRT layer name (``Registering layer``).
        onnx_file: ``Input filename``.
        producer: ``Producer name`` and version.
    """

    nodes: list[ParsedNode] = field(default_factory=list)
    initializers: list[str] = field(default_factory=list)
    inputs: list[ParsedTensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    onnx_file: str = ""
    opset: int = 0
    producer: str = ""


@dataclass(frozen=True, slots=True)
class Milestone:
    """Line with the number of layers after a step (``After tensor merging: 82 layers``)."""

    name: str
    layers: int
    line: int


NOTE = "N"  # level of a message that needs no action


@dataclass(slots=True)
class LogMessage:
    """Warning or error, with its first line and the number of its occurrences.

    Attributes:
        level: ``W`` or ``E``, or :data:`NOTE` for the error of a skipped tactic in a build that
            passed.
    """

    level: str
    text: str
    line: int
    count: int = 1


@dataclass(slots=True)
class TunedLayer:
    """Tactic timing of one layer.

    Attributes:
        name: The layer, or ``<in> -> tensor`` of an optional reformat.
        best_ms: Fastest time over all formats. None if no time was printed.
        seconds: Duration of the timing, from the log's timestamps (whole seconds).
        runner: The runner chosen last.
    """

    name: str
    tactics: int = 0
    best_ms: float | None = None
    seconds: float = 0.0
    runner: str = ""


@dataclass(slots=True)
class TacticCounts:
    """Counts over the autotuning section.

    Attributes:
        timed: Tactics that were timed.
        combinations: Combinations of tensor formats that were tried.
        reformat_timings: Reformats whose time or cost was determined (``Autotuning Reformat``).
        skipped: Number of skipped tactics and of runners without a valid tactic.
        cached: Layers whose timing came from the cache.
        costed: Layers whose costs were computed, if the log names the layers (8.6 and later).
        reasons: Number of skipped tactics for each reason (``Skipping tactic ... due to``).
        refused: Number of failures for each (runner, layer) without a valid tactic.
        runners: Number of times each runner type was chosen.
        layers: Layers by name, without optional reformats.
        reformats: The builder's trial reformats (``Optimizer Reformat``), by name.
    """

    timed: int = 0
    combinations: int = 0
    reformat_timings: int = 0
    skipped: int = 0
    cached: int = 0
    costed: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    runners: Counter[str] = field(default_factory=Counter)
    layers: dict[str, TunedLayer] = field(default_factory=dict)
    reformats: dict[str, TunedLayer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AddedReformat:
    """Line ``Adding reformat layer: Reformatted Input Tensor 0 to L (T) from A to B``.

    Attributes:
        source: Format A as printed.
        target: Format B as printed.
    """

    name: str
    tensor: str
    source: str
    target: str
    line: int


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Time of one layer in the profile.

    Attributes:
        total_ms: Milliseconds over all iterations.
        average_ms: Average milliseconds.
        median_ms: Median milliseconds; None before TensorRT 8.4.
        percent: Share of the total time, in percent.
    """

    name: str
    total_ms: float
    average_ms: float
    median_ms: float | None
    percent: float

    @property
    def ms(self) -> float:
        """Median milliseconds, or the average before TensorRT 8.4 (no median)."""
        return self.median_ms or self.average_ms


@dataclass(slots=True)
class MemoryUse:
    """Memory use that the builder prints, in bytes, or in MiB if a field ends in ``_mib``.

    None if the log does not state a value.
    """

    host_persistent: int | None = None
    device_persistent: int | None = None
    scratch: int | None = None
    activation: int | None = None
    weights: int | None = None
    engine_mib: int | None = None
    peak_cpu_mib: int | None = None
    peak_gpu_mib: int | None = None


@dataclass(slots=True)
class LineCounts:
    """Numbers of lines by kind.

    Attributes:
        timing: Lines that the autotuner and the timer print for each layer or tactic.
        marked: Lines that name TensorRT as the program that wrote them. Most timing lines are not
            included.
        unexplained: Lines of no known form.
    """

    total: int = 0
    timing: int = 0
    marked: int = 0
    blank: int = 0
    unexplained: int = 0


# NoOp is left out, because such a layer does no work at run time.
REFORMAT_TYPES = frozenset({"Reformat", "Copy", "Cast"})
_MAX_ELEMENTS = 1 << 50


class LayerRole(StrEnum):
    """Purpose of an engine layer.

    A conversion changes the data type without computing; a reformat changes only the memory layout.
    """

    CONVERSION = "conversion"
    REFORMAT = "reformat"
    CONVOLUTION = "convolution"
    OTHER = "other"


class ListingSource(StrEnum):
    """Source of an engine listing."""

    NONE = ""
    ENGINE_LINES = "engine-lines"
    LAYER_INFO = "layer-info"
    LAYER_JSON = "layer-json"


@dataclass(unsafe_hash=True, slots=True)
class LogEvent(Event):
    """Optimizer event with the number of its log line, counted from 1; 0 if unknown."""

    line: int = 0

    @property
    def event(self) -> Event:
        """Event without its line number, for comparison with simulated events."""
        return Event(self.pass_name, self.kind, self.subject, self.object)


@dataclass(frozen=True, slots=True)
class BuiltTensor:
    """Input or output of an engine layer.

    Attributes:
        shape: Dimensions without the vector width (64 for ``64:32``).
        vector: Channels per element of a vectorized layout (32 for ``64:32``), 1 otherwise.
        format: Layout as TensorRT describes it; empty if not stated.
    """

    tensor: str
    precision: Precision = Precision.UNKNOWN
    shape: Shape | None = None
    vector: int = 1
    format: str = ""

    @property
    def elements(self) -> int | None:
        """Number of elements; None for an unknown, dynamic or impossible shape."""
        dims = static_shape(self.shape)
        count = _MAX_ELEMENTS if dims is None else math.prod(dims)
        return count if count < _MAX_ELEMENTS else None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON output."""
        return to_json_fields(self)


@dataclass(slots=True)
class BuiltLayer:
    """Layer of an engine.

    Attributes:
        name: TensorRT's fused name.
        type: TensorRT's layer type (``CaskConvolution``, ``Reformat``, ``kgen``, ...); empty in a
            names-only listing.
        inputs: Inputs in the order of the listing. A residual is the second input.
        constants: Weights that TensorRT 10 and later list as tensors.
        tactic: Tactic number or name as printed.
        onnx_names: ONNX nodes that the metadata names (TensorRT 10 and later), else empty.
        origin: The ``Origin`` field: ``QDQ`` for a Q or DQ that remains.
        line: Number of the log line, 0 for a layer of a JSON file.
        extras: Other listed fields: Kernel, Stride, Groups, Weights, Activation, ...
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

    def parse_name(self) -> FusedName:
        """Split the name into its nodes; see :func:`qdqtool.buildlog.names.parse_layer_name`."""
        return parse_layer_name(self.name)

    @property
    def input_precision(self) -> Precision:
        """Precision of the first input."""
        return self.inputs[0].precision if self.inputs else Precision.UNKNOWN

    @property
    def output_precision(self) -> Precision:
        """Precision of the first output."""
        return self.outputs[0].precision if self.outputs else Precision.UNKNOWN

    @property
    def is_convolution(self) -> bool:
        """Whether the layer computes a convolution or deconvolution."""
        lower = self.type.lower()
        return (
            "conv" in lower
            or lower == "correlation"
            or self.extras.get("ParameterType") in ("Convolution", "ConvActPool")
        )

    @property
    def is_deconvolution(self) -> bool:
        """Whether the layer computes a deconvolution."""
        return "deconv" in self.type.lower()

    @property
    def is_qdq(self) -> bool:
        """Whether the layer is a remaining Q or DQ, or a DQ merged with the Q after it."""
        if self.origin:
            return self.origin == "QDQ"
        # Parse the name only if needed, because parsing is slow.
        if (
            self.type not in ("Reformat", "Scale", "Quantize", "Dequantize", "Copy", "")
            or "uantizeLinear" not in self.name
        ):
            return False
        fused = self.parse_name()
        return (
            fused.kind == "layer"
            and len(fused.components) in (1, 2)
            and all("uantizeLinear" in part for part in fused.components)
        )

    @property
    def kind(self) -> LayerRole:
        """Purpose of the layer: ``conversion``, ``reformat``, ``convolution`` or ``other``."""
        if self.is_qdq:
            return LayerRole.CONVERSION
        if self.type in REFORMAT_TYPES or (not self.type and self.parse_name().is_copy):
            types = {self.input_precision, self.output_precision}
            changes_type = len(types) == 2 and Precision.UNKNOWN not in types
            return LayerRole.CONVERSION if changes_type else LayerRole.REFORMAT
        return LayerRole.CONVOLUTION if self.is_convolution else LayerRole.OTHER

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the JSON output."""
        first = to_json_fields(self, "name", "type", "kind", "inputs", "outputs", "tactic")
        return {**first, "onnx": list(self.onnx_names), "origin": self.origin, "line": self.line}


@dataclass(slots=True)
class Build:
    """One TensorRT build, read from one or several files.

    If a file contains several builds, the last build is read.

    Attributes:
        source: ``trtexec-log``, ``log`` (Python API, polygraphy), ``layer-info`` (only
            ``--dumpLayerInfo`` text), ``layer-json`` or ``profile-json``.
        tensorrt: Version (``8.5.2``), None if no line states it.
        version_hint: Version; if no line states it, the earliest version with this spelling of
            lines (``8.5``), None if unknown.
        is_rtx: Whether TensorRT for RTX built the engine.
        targets: Compute capabilities that the engine was built for (86 for 8.6), if a table of
            ``qdqtool build`` lists them.
        device: GPU name.
        gpu: Values of the lines of ``Device Information`` by key.
        flags: Values of the flags of the trtexec command line by name without dashes; an empty
            string for a switch.
        precision_flags: Precisions that the builder may use: ``fp32``, ``fp16``, ``bf16``, ``fp8``,
            ``int8``, ``best``, ``stronglyTyped``; empty if not stated.
        options: Values of the option blocks by name of the block (``Build``) and key.
        passed: True for ``&&&& PASSED``, False for ``&&&& FAILED``, None if neither was printed.
        trace: Every optimizer line, in order.
        headings: Headings of the optimizer (``QDQ graph optimizer backward pass``) with their line.
        milestones: Layer counts of the optimizer (``Original: 730 layers``), in order.
        placement: Device (``GPU`` or ``DLA``), type (may be empty) and name of each layer before
            tuning.
        layers: Engine listing.
        second_layers: Second listing of the same engine, in another spelling or file.
        listing: Source of the listing: ``engine-lines``, ``layer-info`` or ``layer-json``; empty
            if there is none.
        bindings: Names of the network's inputs and outputs.
        profile_rows: Rows of the profile, in order.
        profile_total_ms: Average time of an inference over all layers in milliseconds, from the
            Total line; None if not printed.
        iterations: Number of profiled iterations.
        performance: Numbers by metric (``GPU Compute Time``) and name (``mean``,
            ``percentile(99%)``, ``value``): ms, qps for the throughput, s for the totals.
        gaps: Sections that are missing or cut off.
        complete: Whether the engine listing is complete and has precisions, and no section is cut
            except the profile and the parse section.
        names_only: Whether the listing has only names of layers.
    """

    source: BuildSource = BuildSource.NONE
    files: list[str] = field(default_factory=list)
    tensorrt: str | None = None
    version_hint: str | None = None
    is_rtx: bool = False
    targets: tuple[int, ...] = ()
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
    listing: ListingSource = ListingSource.NONE
    bindings: list[str] = field(default_factory=list)
    profile_rows: list[ProfileRow] = field(default_factory=list)
    profile_total_ms: float | None = None
    iterations: int | None = None
    performance: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: MemoryUse = field(default_factory=MemoryUse)
    tactics: TacticCounts = field(default_factory=TacticCounts)
    reformats: list[AddedReformat] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    messages: list[LogMessage] = field(default_factory=list)
    lines: LineCounts = field(default_factory=LineCounts)
    gaps: list[Gap] = field(default_factory=list)
    complete: bool = False
    names_only: bool = False
    notes: list[Note] = field(default_factory=list)

    def clear_results(self) -> None:
        """Drop the results of the optimizer, listing and profile, when another build begins.

        The parse section, options and messages remain.
        """
        for items in (
            self.trace,
            self.headings,
            self.milestones,
            self.placement,
            self.reformats,
            self.layers,
            self.second_layers,
            self.bindings,
            self.profile_rows,
            self.performance,
            self.seconds,
        ):
            items.clear()
        self.profile_total_ms = self.iterations = self.passed = None
        self.memory = MemoryUse()
        self.tactics = TacticCounts()

    @property
    def display_name(self) -> str:
        """Name for messages: the files that the build was read from."""
        return ", ".join(self.files) or "build"

    @property
    def missing(self) -> list[str]:
        """Descriptions of the gaps."""
        return [str(g) for g in self.gaps]

    def has_gap(self, section: Section) -> bool:
        """Return whether a section is missing or incomplete."""
        return any(g.section == section for g in self.gaps)

    @property
    def gpu_ms(self) -> float | None:
        """GPU time of one inference in milliseconds: the median, else the mean, else None."""
        performance = self.performance.get("GPU Compute Time", {})
        return performance.get("median", performance.get("mean"))

    @property
    def title(self) -> str:
        """Product and version (``TensorRT 8.5.2``).

        If no line states the version, the title has the earliest version that writes lines in this
        form.
        """
        product = "TensorRT-RTX" if self.is_rtx else "TensorRT"
        if self.tensorrt:
            return f"{product} {self.tensorrt}"
        if self.version_hint and not self.is_rtx:
            return f"{product} {self.version_hint} or later, according to the form of its lines"
        return f"{product} of unknown version"

    @property
    def warnings(self) -> list[LogMessage]:
        """Messages of level warning."""
        return [m for m in self.messages if m.level == "W"]

    @property
    def errors(self) -> list[LogMessage]:
        """Messages of level error."""
        return [m for m in self.messages if m.level == "E"]

    @property
    def skipped_tactics(self) -> list[LogMessage]:
        """Errors of skipped tactics, if the build passed."""
        return [m for m in self.messages if m.level == NOTE]

    @property
    def profile(self) -> dict[str, float]:
        """Average milliseconds by layer name. Times of layers with equal names are added."""
        times: dict[str, float] = defaultdict(float)
        for row in self.profile_rows:
            times[row.name] += row.average_ms
        return dict(times)

    @property
    def conversions(self) -> list[BuiltLayer]:
        """Layers that only convert types: remaining Q and DQ, and reformats between data types."""
        return [layer for layer in self.layers if layer.kind == LayerRole.CONVERSION]

    @property
    def layout_reformats(self) -> list[BuiltLayer]:
        """Layers that change only the memory layout, and copies."""
        return [layer for layer in self.layers if layer.kind == LayerRole.REFORMAT]

    @property
    def facts(self) -> BuildFacts:
        """Description of the build in a verification."""
        return BuildFacts(
            self.source,
            tuple(self.files),
            self.tensorrt,
            self.device,
            self.complete,
            tuple(self.missing),
            names_only=self.names_only,
        )

    def milestone(self, name: str) -> int | None:
        """Return the number of layers at the last milestone of a name; None if missing."""
        return next((m.layers for m in reversed(self.milestones) if m.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return the ``build`` object in the JSON of a verification."""
        return self.facts.as_json()

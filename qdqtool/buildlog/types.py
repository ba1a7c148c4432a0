"""What a real TensorRT build said, as data: the answer of :func:`qdqtool.buildlog.read.read_build`.

Nothing here imports onnx or numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from qdqtool.buildlog.agreement import BuildFacts, BuildSource
from qdqtool.buildlog.names import NO_NAMES, FusedName, NameSet, is_copy, parse_layer_name
from qdqtool.types import Event, Precision
from qdqtool.util.notes import Note
from qdqtool.util.records import published

Shape = tuple[int | None, ...]
"""Dimensions as printed (NCHW for images); None where TensorRT prints a dynamic one as a negative number."""

MAX_DIMENSION = 1 << 40  # a larger one is damage, and is taken as unknown


def static_shape(shape: Shape | None) -> list[int] | None:
    """Dimensions where all of them are known."""
    return None if shape is None or None in shape else [d for d in shape if d is not None]


class Section(StrEnum):
    """A part of what a builder printed."""

    LISTING = "engine listing"
    PROFILE = "profile"
    PASSES = "optimizer passes"
    PARSE = "parse section"
    END = "end of the log"
    ALL = "everything"


class GapKind(StrEnum):
    """How a part lacks, with the words for it."""

    ABSENT = "{section}"
    NOT_REACHED = "no {section}"
    NAMES_ONLY = "{section} (names only, no precisions)"
    BEGINNING = "{section} (the beginning)"
    LAST = "{section} (the end)"
    CUT = "{section} (cut off)"
    CUT_AFTER_NODE = "{section} (cut off after node {count})"
    FEWER_LAYERS = "{section} (cut off: {count} of {of} layers)"
    UNWRITTEN = "{section} (a layer is missing: {name} reads {tensor}, which none writes)"
    IDLE_BINDING = "{section} (a layer is missing: none reads or writes the binding {tensor})"
    CUT_FILE = "{section} (cut off: the end of {name})"
    BEYOND_LINE = "{section} beyond line {count}"
    BEYOND_RECORDS = "{section} beyond the first {count:,} records"

    @property
    def is_unread(self) -> bool:
        """Whether the reader found it, so that no later look at the build does."""
        return self in (GapKind.CUT_FILE, GapKind.BEYOND_LINE, GapKind.BEYOND_RECORDS)

    @property
    def is_torn(self) -> bool:
        """Whether something is cut off or torn, other than a part that was never asked for."""
        return self not in (GapKind.ABSENT, GapKind.NAMES_ONLY)


@dataclass(frozen=True, slots=True)
class Gap:
    """What a build does not show: a part, how it lacks, and what the words for that name."""

    section: Section
    kind: GapKind = GapKind.ABSENT
    count: int = 0
    of: int = 0
    name: str = ""
    tensor: str = ""

    def __str__(self) -> str:
        return self.kind.format(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """A tensor of the ONNX graph as the parser printed it; ``dtype`` is ONNX's word (``FLOAT``, ``INT64``)."""

    name: str
    shape: Shape | None
    dtype: str


@dataclass(slots=True)
class ParsedNode:
    """An ONNX node of the parse section.

    Attributes:
        inputs: In order; a None is an optional input that is not set.
        line: Where its parsing begins.
        details: What the parser says of it: ``kernel``, ``strides``, ``prepadding``, ``axis``, ...
    """

    name: str
    op: str
    inputs: list[ParsedTensor | None] = field(default_factory=list)
    outputs: list[ParsedTensor | None] = field(default_factory=list)
    line: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ParseSection:
    """What the ONNX parser printed, in order.

    Attributes:
        outputs: Tensor names marked as outputs.
        layers: TensorRT layer name to ONNX node name (``Registering layer``).
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

    @property
    def names(self) -> NameSet:
        """Every node and initializer name, and the layer names made of them: to settle doubtful cuts in fused names."""
        return NameSet({*(n.name for n in self.nodes), *self.initializers, *self.layers})


@dataclass(frozen=True, slots=True)
class Milestone:
    """``After tensor merging: 82 layers``."""

    name: str
    layers: int
    line: int


@dataclass(slots=True)
class LogMessage:
    """A warning or error, once for each wording, with the first line and how often it came."""

    level: str
    text: str
    line: int
    count: int = 1


@dataclass(slots=True)
class TunedLayer:
    """What the builder timed for one layer.

    Attributes:
        name: The layer, or ``<in> -> tensor`` of an optional reformat.
        best_ms: Fastest time seen, over all formats; None where none was printed.
        seconds: Wall-clock time spent, from the log's timestamps (whole seconds).
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
        reformat_timings: Reformats timed or costed (``Autotuning Reformat``).
        skipped: Runners without a valid tactic.
        cached: Layers whose timing came from the cache.
        costed: Layers whose costs were computed, where the line names them (8.6 and later).
        reasons: Why tactics were passed over (``Skipping tactic ... due to``) to how often; the first hundred wordings.
        refused: (runner, layer) without a valid tactic to how often; the first few hundred.
        chosen: Runner type to how often it was chosen.
        layers: By name; optional reformats apart.
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
    chosen: Counter[str] = field(default_factory=Counter)
    layers: dict[str, TunedLayer] = field(default_factory=dict)
    reformats: dict[str, TunedLayer] = field(default_factory=dict)

    def clear(self) -> None:
        """Forgets everything: another build begins."""
        self.timed = self.combinations = self.reformat_timings = self.skipped = self.cached = 0
        for kept in (
            self.costed,
            self.reasons,
            self.refused,
            self.chosen,
            self.layers,
            self.reformats,
        ):
            kept.clear()


@dataclass(frozen=True, slots=True)
class AddedReformat:
    """``Adding reformat layer: Reformatted Input Tensor 0 to L (T) from A to B``; formats as printed."""

    name: str
    tensor: str
    source: str
    target: str
    line: int


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Time of one layer in the profile; milliseconds, ``median_ms`` None before TensorRT 8.4."""

    name: str
    total_ms: float
    average_ms: float
    median_ms: float | None
    percent: float

    @property
    def ms(self) -> float:
        """The median, which one slow execution does not move; the average where there is none."""
        return self.median_ms or self.average_ms


@dataclass(slots=True)
class MemoryUse:
    """Memory as the builder reports it: bytes, but for the ``_mib`` fields; None where not printed."""

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
    """How the lines of the files were understood. Timing lines are those that the autotuner and the timer repeat.

    ``marked`` are lines that say themselves that TensorRT wrote them, but for most timing lines.
    """

    total: int = 0
    timing: int = 0
    marked: int = 0
    blank: int = 0
    unexplained: int = 0


REFORMAT_TYPES = frozenset({"Reformat", "Copy", "Cast"})  # a NoOp is nothing at run time
_MAX_ELEMENTS = 1 << 50


class LayerRole(StrEnum):
    """What an engine layer does: change the data type only, the layout only, convolve, or something else."""

    CONVERSION = "conversion"
    REFORMAT = "reformat"
    CONVOLUTION = "convolution"
    OTHER = "other"


class ListingSource(StrEnum):
    """Where an engine listing came from."""

    NONE = ""
    ENGINE_LINES = "engine-lines"
    LAYER_INFO = "layer-info"
    LAYER_JSON = "layer-json"


@dataclass(unsafe_hash=True, slots=True)
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
    def elements(self) -> int | None:
        """Number of elements; None for an unknown, dynamic or impossible shape."""
        dims = static_shape(self.shape)
        count = _MAX_ELEMENTS if dims is None else math.prod(dims)
        return count if count < _MAX_ELEMENTS else None

    def as_json(self) -> dict[str, Any]:
        return published(self)


@dataclass(slots=True)
class BuiltLayer:
    """One layer of the engine that was built.

    Attributes:
        name: TensorRT's fused name.
        type: TensorRT's layer type (``CaskConvolution``, ``Reformat``, ``kgen``, ...); empty in a names-only listing.
        inputs: As listed (a residual second).
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

    def parse_name(self, known: NameSet = NO_NAMES) -> FusedName:
        """The name taken apart; ``known`` are ONNX node and initializer names that settle doubtful cuts."""
        return parse_layer_name(self.name, known)

    @property
    def input_precision(self) -> Precision:
        return self.inputs[0].precision if self.inputs else Precision.UNKNOWN

    @property
    def output_precision(self) -> Precision:
        return self.outputs[0].precision if self.outputs else Precision.UNKNOWN

    @property
    def is_convolution(self) -> bool:
        lower = self.type.lower()
        return (
            "conv" in lower
            or lower == "correlation"
            or self.extras.get("ParameterType") in ("Convolution", "ConvActPool")
        )

    @property
    def is_deconvolution(self) -> bool:
        return "deconv" in self.type.lower()

    @property
    def is_qdq(self) -> bool:
        """Whether it is a Q or DQ of the model that stayed as a layer of its own, or a DQ with the Q behind it."""
        if self.origin:
            return self.origin == "QDQ"
        if (
            self.type not in ("Reformat", "Scale", "Quantize", "Dequantize", "Copy", "")
            or "uantizeLinear" not in self.name
        ):  # as of most: to take a name apart takes longer
            return False
        fused = self.parse_name()
        return (
            fused.kind == "layer"
            and len(fused.components) in (1, 2)
            and all("uantizeLinear" in part for part in fused.components)
        )

    @property
    def kind(self) -> LayerRole:
        """``conversion`` (changes the data type only), ``reformat`` (the layout only), ``convolution`` or ``other``."""
        if self.is_qdq:
            return LayerRole.CONVERSION
        if self.type in REFORMAT_TYPES or (not self.type and is_copy(self.name)):
            types = {self.input_precision, self.output_precision}
            return (
                LayerRole.CONVERSION
                if len(types) == 2 and Precision.UNKNOWN not in types
                else LayerRole.REFORMAT
            )
        return LayerRole.CONVOLUTION if self.is_convolution else LayerRole.OTHER

    def as_json(self) -> dict[str, Any]:
        first = published(self, "name", "type", "kind", "inputs", "outputs", "tactic")
        return {**first, "onnx": list(self.onnx_names), "origin": self.origin, "line": self.line}


@dataclass(slots=True)
class Build:
    """One TensorRT build, read from one or several files; the last one of those in a file.

    Attributes:
        source: ``trtexec-log``, ``log`` (Python API, polygraphy), ``layer-info`` (``--dumpLayerInfo`` text alone),
            ``layer-json`` or ``profile-json``.
        tensorrt: Version (``8.5.2``), None where no line states it.
        version_hint: Where no line states the version: the earliest one that spells its lines this way (``8.5``).
        is_rtx: Whether it is TensorRT for RTX.
        targets: The compute capabilities that it was built for, 86 for 8.6, where a table of ``qdqtool build`` says so.
        device: GPU name.
        gpu: The lines of ``Device Information``: key to value.
        flags: Of the trtexec command line: name without dashes to value (an empty string for a switch).
        precision_flags: The precisions that the builder may use: of ``fp32``, ``fp16``, ``bf16``, ``fp8``, ``int8``,
            ``best``, ``stronglyTyped``; empty where not stated.
        options: Option blocks: block (``Build``) to key to value.
        passed: True for ``&&&& PASSED``, False for ``&&&& FAILED``, None when neither was printed.
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
        gaps: SectionReader that are absent or cut off.
        complete: Whether the engine listing is there, whole, with precisions, and no section is cut.
        names_only: Whether the listing has layer names and nothing else.
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

    def begin_again(self) -> None:
        """Forgets what was read of a build, for another one begins in the same file; its parse section stays."""
        for kept in (
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
            kept.clear()
        self.profile_total_ms = self.iterations = self.passed = None
        self.memory = MemoryUse()
        self.tactics.clear()

    @property
    def display_name(self) -> str:
        """What messages call it: by the files that it was read from."""
        return ", ".join(self.files) or "build"

    @property
    def missing(self) -> list[str]:
        """The gaps in words."""
        return [str(g) for g in self.gaps]

    def has_gap(self, section: Section) -> bool:
        """Whether a section is absent or not whole."""
        return any(g.section == section for g in self.gaps)

    @property
    def gpu_ms(self) -> float | None:
        """Milliseconds on the GPU that the log states for one execution, the median where it has one."""
        performance = self.performance.get("GPU Compute Time", {})
        return performance.get("median", performance.get("mean"))

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
    def warnings(self) -> list[LogMessage]:
        return [m for m in self.messages if m.level == "W"]

    @property
    def errors(self) -> list[LogMessage]:
        return [m for m in self.messages if m.level == "E"]

    @property
    def merged_layers(self) -> list[list[str]]:
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
        return [layer for layer in self.layers if layer.kind == LayerRole.CONVERSION]

    @property
    def layout_reformats(self) -> list[BuiltLayer]:
        """Layers that change a memory layout and nothing else."""
        return [layer for layer in self.layers if layer.kind == LayerRole.REFORMAT]

    @property
    def facts(self) -> BuildFacts:
        """Which build it is, for a verification."""
        return BuildFacts(
            self.source,
            tuple(self.files),
            self.tensorrt,
            self.device,
            self.complete,
            tuple(self.missing),
        )

    def milestone(self, name: str) -> int | None:
        """Number of layers at the last milestone of that name (``After tensor merging``)."""
        return next((m.layers for m in reversed(self.milestones) if m.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """The ``build`` object of a verification."""
        return self.facts.as_json()

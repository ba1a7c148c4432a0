"""What the page shows, as plain data; what ``dataclasses.asdict`` makes of these is the JSON inside the page.

Indices (``node``, ``layer``, ``finding`` ...) are places in the lists of the :class:`Model` they belong to; -1 is
none. Milliseconds, bytes and multiply-accumulates (MACs) are None where they are not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.buildlog.layout import LayoutBox, LayoutEdge

INT8, FLOAT, OTHER = "int8", "float", "other"  # how a precision is drawn


@dataclass(slots=True)
class Scale:
    """A Q or DQ that a node reads through, or that reads it.

    ``where`` says at which end: ``input``, ``residual``, ``weights``, ``output``. ``scale`` and ``highest`` are the
    smallest and the largest scale, equal for one of the whole tensor; None where they are computed or not available.
    """

    where: str
    tensor: str
    quantizer: str
    precision: str
    scale: float | None
    highest: float | None
    channels: int
    zero_point: str
    stays: bool


@dataclass(slots=True)
class Node:
    """An ONNX node that is drawn: all but Q, DQ and what depends on constants alone.

    ``attributes`` are pairs of text: kernel, stride and groups of a convolution, and what else the node carries.
    """

    name: str
    op: str
    index: int
    layer: int = -1
    conv: int = -1
    shape: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    scales: list[Scale] = field(default_factory=list)
    findings: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    weights: int = -1
    attributes: list[list[str]] = field(default_factory=list)


@dataclass(slots=True)
class Conv:
    """The outcome of a convolution."""

    node: int
    name: str
    op: str
    weights: str
    precision: str
    inputs: list[str]
    output: str
    evidence: str
    layer: int
    fused: list[str]
    findings: list[int]
    cases: list[int]
    before: str = ""


@dataclass(slots=True)
class Layer:
    """A layer of the predicted engine; ``at`` is the node that stands for it."""

    name: str
    title: str
    type: str
    kind: str
    precision: str
    inputs: list[list[str]]
    outputs: list[list[str]]
    nodes: list[int]
    findings: list[int]
    at: int = -1
    macs: float | None = None
    bytes: float | None = None
    ms: float | None = None
    measured: float | None = None
    before_ms: float | None = None

    @property
    def intensity(self) -> float | None:
        """MACs per byte."""
        return self.macs / self.bytes if self.macs is not None and self.bytes else None


@dataclass(slots=True)
class Finding:
    """A finding; ``node`` is the drawn node to go to, ``nodes`` all that it concerns."""

    id: int
    code: str
    title: str
    severity: str
    at: str
    message: str
    fix: str
    evidence: str
    node: int
    nodes: list[int]
    values: int | None
    saves_ms: float | None
    automatic: bool


@dataclass(slots=True)
class Case:
    """What a rule rests on."""

    name: str
    evidence: str
    says: str
    builds: list[str]
    source: str


@dataclass(slots=True)
class Line:
    """A line of the simulated optimizer's log."""

    text: str
    case: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A Q or DQ on an edge; ``stays`` where it is a conversion at run time."""

    name: str
    op: str
    stays: bool


@dataclass(slots=True)
class Box(LayoutBox):
    """A box of the drawing.

    ``role`` is ``input``, ``output``, ``node`` (one ONNX node), ``fused`` (several that are one layer), ``layer`` or
    ``module`` (all boxes of a part of the network). ``rows`` are the ONNX nodes in it, ``heights`` theirs in pixels.
    """

    role: str
    title: str
    note: str
    paint: str
    layer: int
    rows: list[int]
    heights: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Edge(LayoutEdge):
    """An edge; ``shape`` is its tensor's, NCHW."""

    tensor: str
    precision: str
    paint: str
    marks: list[Mark]
    shape: str = ""


@dataclass(slots=True)
class Drawing:
    """A graph, laid out but for that of modules; ``why`` says why there is none."""

    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0
    why: str = ""


@dataclass(slots=True)
class Conversion:
    """A Q or DQ that stays in the engine as a layer of its own."""

    name: str
    node: int
    layer: int
    from_: str
    to: str
    tensor: str
    findings: list[int]
    ms: float | None = None
    measured: float | None = None


@dataclass(slots=True)
class ScaleGroup:
    """Quantized tensors with one scale: tied by the operators between them where the float model is available."""

    scale: float | None
    tensors: list[str]
    nodes: list[int]
    quantizers: int
    tied: str
    channels: int


@dataclass(slots=True)
class Weights:
    """Ranges of a convolution's weights by output channel: the largest magnitude, and what its scale can hold."""

    node: int
    name: str
    shape: str
    largest: list[float]
    holds: list[float]


@dataclass(slots=True)
class Method:
    """The range that a calibration method chooses for a tensor, and the share of its values beyond it."""

    name: str
    amax: float
    clipped: float


@dataclass(slots=True)
class Histogram:
    """Magnitudes of a tensor on the calibration data: counts in equal bins from 0 to ``absmax``.

    ``nearest`` are the methods whose range is the chosen one, to within a hundredth.
    """

    tensor: str
    quantizer: str
    node: int
    absmax: float
    minimum: float
    maximum: float
    values: int
    counts: list[int]
    chosen: float | None
    clipped: float | None
    nearest: list[str]
    methods: list[Method]


@dataclass(slots=True)
class Part:
    """A part of the engine's time; ``layers`` is their number, ``kind`` how they are drawn."""

    kind: str
    name: str
    what: str
    ms: float | None
    layers: int
    before_ms: float | None = None
    measured_ms: float | None = None


@dataclass(slots=True)
class Row:
    """A row of the build's profile that no predicted layer stands for."""

    name: str
    ms: float


@dataclass(slots=True)
class Roof:
    """A GPU's roofline: rates in MACs per second, the memory's in bytes per second."""

    gpu: str
    clock: float
    bandwidth: float
    rates: dict[str, float]


@dataclass(slots=True)
class Point:
    """A configuration that ``tune`` weighed."""

    name: str
    x: float
    metric: float
    low: float | None
    high: float | None
    int8: int | None
    conversions: int | None
    ms: float | None
    chosen: bool
    on_front: bool


@dataclass(slots=True)
class Tuning:
    """What ``tune`` found: ``axis`` names the horizontal axis, ``keep`` and ``budget`` are the goals' lines."""

    metric: str
    sentence: str
    axis: str
    points: list[Point]
    float_metric: float | None
    keep: float | None
    budget: float | None
    reached: bool | None
    sites: list[list[str]]
    notes: list[str]


@dataclass(slots=True)
class Agreement:
    """A verification: ``rows`` are what was compared, how many agree, of how many."""

    build: str
    verdict: str
    ok: bool
    complete: bool
    missing: list[str]
    rows: list[list[str]]
    mismatches: list[list[str]]
    mismatch_nodes: list[int]
    notes: list[str]
    measured_ms: float | None = None
    measured_from: str = ""
    predicted_ms: float | None = None


@dataclass(slots=True)
class Time:
    """The estimate for the whole engine."""

    gpu: str
    clock: float
    total: float
    low: float
    high: float
    conversions: float
    notes: list[str]
    decision: list[str]


@dataclass(slots=True)
class Model:
    """Everything about one model."""

    label: str
    path: str
    sha256: str
    opset: int
    node_count: int
    target: str  # as the user named it
    rules: str  # the name of the target that answers for it
    proof: str
    verdict: str
    counts: dict[str, int | None]
    remarks: list[str]
    nodes: list[Node] = field(default_factory=list)
    convs: list[Conv] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    onnx: Drawing = field(default_factory=Drawing)
    engine: Drawing = field(default_factory=Drawing)
    modules: Drawing = field(default_factory=Drawing)
    conversions: list[Conversion] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    time: Time | None = None
    compute_capabilities: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Page:
    """The whole page: the model, the one before it, and what else was given."""

    tool: str
    model: Model
    before: Model | None = None
    groups: list[ScaleGroup] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    parts_note: str = ""
    unlisted: list[Row] = field(default_factory=list)
    roof: Roof | None = None
    histograms: list[Histogram] = field(default_factory=list)
    calibration: str = ""
    tuning: Tuning | None = None
    agreement: Agreement | None = None

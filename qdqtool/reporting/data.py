"""Contents of the page as dataclasses, whose fields become the JSON inside the page.

Fields such as ``node``, ``layer`` and ``conv`` are positions in the lists of
:class:`ModelContents`; -1 means none. Milliseconds, bytes and multiply-accumulates (MACs) are None
if unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.buildlog.layout import LayoutBox, LayoutEdge

INT8, FLOAT, OTHER = "int8", "float", "other"  # color classes of precisions


@dataclass(slots=True)
class NodeScale:
    """Scale of a Q or DQ at an input or the output of a node.

    Attributes:
        where: ``input``, ``other input``, ``weights`` or ``output``.
        tensor: Input tensor of the Q or DQ.
        quantizer: Name of the Q or DQ.
        precision: Data type of the quantized values.
        scale: Smallest scale; None if it is computed at run time, not available or not finite.
        highest: Largest scale; equal to `scale` for one scale per tensor.
        channels: Number of scales; 0 if unknown.
        zero_point: The zero point of all channels; else ``several`` or ``unknown``.
        stays: Whether the quantizer, or a DQ after it, remains in the engine as a conversion.
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
class NodeEntry:
    """A drawn ONNX node. Q, DQ and nodes that compute constants are not drawn.

    ``attributes`` are pairs of name and value as text, convolution attributes first.
    """

    name: str
    op: str
    index: int
    layer: int = -1
    conv: int = -1
    shape: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    scales: list[NodeScale] = field(default_factory=list)
    findings: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    weights: int = -1
    attributes: list[list[str]] = field(default_factory=list)


@dataclass(slots=True)
class ConvolutionEntry:
    """Predicted data types and layer of a convolution or matrix product.

    ``before`` is the outcome of the node of this name in the model to compare with: ``missing`` if
    there is no such node, empty without a model.
    """

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
class LayerEntry:
    """A layer of the predicted engine. A click on the layer selects the node ``at``.

    ``remark`` explains types that differ from those in the model; empty for most layers.
    """

    name: str
    title: str
    type: str
    kind: str
    precision: str
    inputs: list[list[str]]
    outputs: list[list[str]]
    nodes: list[int]
    findings: list[int]
    remark: str = ""
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
class FindingEntry:
    """A finding. A click selects the drawn node ``node``; ``nodes`` are all affected nodes."""

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
    saving_note: str  # which other saving includes this one; else empty
    automatic: bool
    on_request: bool
    request_cost: str  # what all fixes of this code on request cost and gain; else empty


@dataclass(slots=True)
class CaseEntry:
    """Evidence for a rule of the prediction: recorded builds or a document."""

    name: str
    evidence: str
    says: str
    builds: list[str]
    source: str


@dataclass(slots=True)
class TraceLine:
    """A line of the simulated optimizer's log, and the position of the evidence for it."""

    text: str
    case: int


@dataclass(frozen=True, slots=True)
class EdgeMark:
    """A Q or DQ on an edge; ``stays`` is true if it remains in the engine as a conversion."""

    name: str
    op: str
    stays: bool


@dataclass(slots=True)
class Box(LayoutBox):
    """A box of the drawing.

    Attributes:
        role: ``input``, ``output``, ``node`` (one ONNX node), ``fused`` (several nodes of one
            layer), ``layer`` (of the engine) or ``module`` (all nodes of a part of the network).
        title: First line of text.
        note: Second line of text.
        paint: Color class: ``int8``, ``float`` or ``other``.
        layer: Position of the engine layer.
        rows: Positions of the ONNX nodes in the box.
        heights: Heights of the rows in pixels.
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
    """An edge of the drawing, which is a tensor; ``shape`` is the tensor's shape as text."""

    tensor: str
    precision: str
    paint: str
    marks: list[EdgeMark]
    shape: str = ""


@dataclass(slots=True)
class GraphDrawing:
    """A graph with the positions of its boxes and edges.

    The overview of modules has no positions, because the page arranges the boxes. ``why`` is the
    reason why a drawing is missing, else empty.
    """

    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0
    why: str = ""


@dataclass(slots=True)
class ConversionEntry:
    """A Q or DQ that remains in the engine as a separate layer (conversion)."""

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
class ScaleGroupEntry:
    """Quantized tensors that share a scale.

    ``tied`` is a text on whether operators such as Concat require one scale, and whether the scales
    are equal.
    """

    scale: float | None
    tensors: list[str]
    nodes: list[int]
    quantizers: int
    tied: str
    channels: int


@dataclass(slots=True)
class WeightRanges:
    """Weight ranges of a convolution by output channel.

    Attributes:
        node: Position of the node.
        name: Name of the node.
        shape: Shape of the weights.
        largest: Largest magnitude of each channel; empty if the values are not available.
        holds: Largest magnitude that the scale of each channel can represent.
    """

    node: int
    name: str
    shape: str
    largest: list[float]
    holds: list[float]


@dataclass(slots=True)
class MethodRange:
    """Range that a calibration method chooses, and the share of values beyond the range."""

    name: str
    amax: float
    clipped: float


@dataclass(slots=True)
class ValueHistogram:
    """Histogram of a tensor's magnitudes on the calibration data.

    Attributes:
        tensor: Name of the tensor.
        quantizer: Name of the Q that quantizes the tensor.
        node: Position of the node that a click selects.
        absmax: Largest magnitude.
        minimum: Smallest value.
        maximum: Largest value.
        values: Number of values.
        counts: Number of values in bins of equal width from 0 to `absmax`.
        chosen: Largest magnitude that the model's scale can represent; None if unknown.
        clipped: Share of the values beyond `chosen`, 0 to 1; None if `chosen` is unknown.
        nearest: Methods whose range differs from `chosen` by at most 1 %.
        methods: Ranges of all calibration methods.
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
    methods: list[MethodRange]


@dataclass(slots=True)
class TimePart:
    """Time of one kind of layers; ``layers`` is their number, ``what`` describes the kind."""

    kind: str
    name: str
    what: str
    ms: float | None
    layers: int
    before_ms: float | None = None
    measured_ms: float | None = None


@dataclass(slots=True)
class ProfileEntry:
    """A row of the build's profile that matches no predicted layer."""

    name: str
    ms: float


@dataclass(slots=True)
class GpuRoofline:
    """Peak rates of a GPU in MACs per second, by data type, and bandwidth in bytes per second."""

    gpu: str
    clock: float
    bandwidth: float
    rates: dict[str, float]


@dataclass(slots=True)
class TuningPoint:
    """A configuration that ``tune`` measured: the cost ``x`` and the accuracy ``metric``.

    ``low`` and ``high`` are the confidence interval of the metric.
    """

    name: str
    x: float
    metric: float
    low: float | None
    high: float | None
    int8: int
    conversions: int | None
    ms: float | None
    chosen: bool
    on_front: bool


@dataclass(slots=True)
class TuningPlot:
    """Result of ``tune`` as a plot of accuracy against cost.

    ``axis`` is the label of the horizontal axis. The goals ``keep`` (lowest metric) and ``budget``
    (milliseconds) are drawn as lines.
    """

    metric: str
    sentence: str
    axis: str
    points: list[TuningPoint]
    float_metric: float | None
    keep: float | None
    budget: float | None
    reached: bool | None
    is_float: bool
    sites: list[list[str]]
    notes: list[str]


@dataclass(slots=True)
class BuildAgreement:
    """Comparison of the prediction with a build.

    Each of ``rows`` has four texts: subject, number that agrees, total number, and remark.
    """

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
class EngineTime:
    """Estimated time of the whole engine."""

    gpu: str
    clock: float
    total: float
    low: float
    high: float
    conversions: float
    notes: list[str]


@dataclass(slots=True)
class ModelContents:
    """All contents of the page about one model."""

    label: str
    path: str
    sha256: str
    opset: int
    node_count: int
    target: str  # product and version as the user named it
    rules: str  # TensorRT version whose rules are used
    proof: str  # evidence for these rules
    headline: str
    tone: str  # color of the headline: good, unclear or bad
    rejection: str  # "will reject" or "will probably reject" hides times; empty if TensorRT builds
    verdict: str
    counts: dict[str, int | None]
    counts_without_errors: dict[str, int | None] | None  # None if unknown
    conversion_count: int | str | None  # a range if it is open; None if the target has none
    conversion_range_reason: str
    remarks: list[str]
    nodes: list[NodeEntry] = field(default_factory=list)
    convs: list[ConvolutionEntry] = field(default_factory=list)
    layers: list[LayerEntry] = field(default_factory=list)
    findings: list[FindingEntry] = field(default_factory=list)
    cases: list[CaseEntry] = field(default_factory=list)
    lines: list[TraceLine] = field(default_factory=list)
    onnx: GraphDrawing = field(default_factory=GraphDrawing)
    engine: GraphDrawing = field(default_factory=GraphDrawing)
    modules: GraphDrawing = field(default_factory=GraphDrawing)
    conversions: list[ConversionEntry] = field(default_factory=list)
    weights: list[WeightRanges] = field(default_factory=list)
    time: EngineTime | None = None
    compute_capabilities: list[str] = field(default_factory=list)

    @property
    def rejected(self) -> bool:
        """Whether TensorRT builds no engine from the model."""
        return bool(self.rejection)


@dataclass(slots=True)
class PageContents:
    """The whole page: a model, another model for comparison, and sections on further files."""

    tool: str
    model: ModelContents
    before: ModelContents | None = None
    groups: list[ScaleGroupEntry] = field(default_factory=list)
    parts: list[TimePart] = field(default_factory=list)
    parts_note: str = ""
    unlisted: list[ProfileEntry] = field(default_factory=list)
    roof: GpuRoofline | None = None
    histograms: list[ValueHistogram] = field(default_factory=list)
    calibration: str = ""
    tuning: TuningPlot | None = None
    agreement: BuildAgreement | None = None

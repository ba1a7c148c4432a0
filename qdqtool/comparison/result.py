"""The result of a comparison: the differences between the two sides of each node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqtool.buildlog.types import Gap, GapKind, Section
from qdqtool.comparison.interface import InterfaceChange
from qdqtool.ir.precision import BYTES, EIGHT_BITS, Precision
from qdqtool.trt.result import Prediction
from qdqtool.util.files import InputFiles, SavableResult
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import format_count, round_significant
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    from qdqtool.accuracy.agreement import NetworkAgreement
    from qdqtool.buildlog.engine_comparison import EngineComparison
    from qdqtool.timing.results import SpeedGain


COMPARISON_SCHEMA = "qdqtool/comparison/1"
NO_LISTING = Gap(Section.LISTING, GapKind.NOT_REACHED)
_OUTPUTS = (Precision.INT8, Precision.FP8)
_LARGEST = {Precision.FP8: 448.0}  # largest magnitude of a format; 127 for all other formats
# Relative tolerance between ranges of INT8 and FP8. FP8 models store scales in FP16.
_MAX_FORMAT_ERROR = 0.01
# Maximum relative difference of scales that count as equal. Some exporters store float32 as text.
_MAX_RELATIVE_ERROR = 1e-5
# Relative differences of times from which one side is faster. Equal models have equal estimates,
# but the measured times of two equal builds differ.
_MIN_ESTIMATED_CHANGE, _MIN_MEASURED_CHANGE = 0.005, 0.02


class ChangeKind(StrEnum):
    """Kind of a change at a node, from the first side to the second."""

    LOST_INT8 = "lost-int8"
    GAINED_INT8 = "gained-int8"
    LOST_INT8_OUTPUT = "lost-int8-output"
    GAINED_INT8_OUTPUT = "gained-int8-output"
    FORMAT = "format"
    RESIDUAL = "residual"
    LOST_QDQ = "lost-qdq"
    GAINED_QDQ = "gained-qdq"
    SCALE = "scale"
    WEIGHTS_SCALE = "weights-scale"
    FUSION = "fusion"
    ONLY_IN_A = "only-in-a"
    ONLY_IN_B = "only-in-b"


class LossReason(StrEnum):
    """Reason why a convolution lost INT8."""

    PAIRS = "pairs"  # the convolution no longer has Q/DQ pairs
    WEIGHTS = "weights"  # the weights no longer have a Q/DQ pair
    DATA = "data"  # the data input no longer has a Q/DQ pair
    FINDING = "finding"  # Q/DQ pairs remain, and a finding explains why TensorRT does not use them
    FLOAT_BUILD = "float-build"  # the model has Q/DQ, but the build is of a float model
    UNEXPLAINED = "unexplained"  # INT8 is predicted, and the build does not show why it is absent
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class QuantizerScales:
    """The scales of a quantizer, in units of the tensor per integer step.

    Attributes:
        values: Scales, [channels] or [1]. Invalid values of the file (0, negative, infinite, NaN)
            are kept.
        axis: Axis of the channels. None for one scale, and for the weights of a Gemm or MatMul,
            because the operator determines their axis.
        type: Type of the quantized values.
        zero: Zero points; empty if all are 0.
    """

    values: npt.NDArray[np.float64]
    axis: int | None = None
    type: Precision = Precision.INT8
    zero: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of channels; 1 for one scale."""
        return int(self.values.size)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest scale; both NaN if any scale is NaN."""
        return float(self.values.min()), float(self.values.max())

    @property
    def ranges(self) -> npt.NDArray[np.float64]:
        """Largest magnitude that each scale can represent, comparable between INT8 and FP8."""
        return self.values * _LARGEST.get(self.type, 127.0)

    @property
    def valid(self) -> bool:
        """Whether all scales are positive and finite."""
        return bool(np.all(np.isfinite(self.values) & (self.values > 0)))

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        # JSON has no infinity and no NaN.
        least, greatest = (v if math.isfinite(v) else None for v in self.ends)
        return {
            "count": self.count,
            "least": least,
            "greatest": greatest,
            **to_json_fields(self, "axis", "type", "valid"),
        }


@dataclass(slots=True)
class NodeSide:
    """A node on one side of a comparison.

    Attributes:
        name: Name of the ONNX node, or of the engine layer if the ONNX node is unknown.
        op: Operator, or type of the engine layer.
        precision: Type in which the node computes; None if unknown or irrelevant.
        inputs: Types of the data input and of a residual input.
        output: Type of the output; None if unknown.
        data: Whether the data input has Q/DQ in the file; None for an engine layer.
        weights: Whether the weights have Q/DQ in the file; None without weights.
        scale: Scales of the data input; None if missing or unknown.
        weights_scale: Scales of the weights; None if missing or unknown.
        other_scales: Scales of other inputs with Q/DQ, by input position.
        pairs: Positions of the inputs with Q/DQ, other than weights; None for an engine layer.
        fused: Operators fused into the engine layer.
        layer: Name of the engine layer.
        ms: Milliseconds of the engine layer; None without times.
    """

    name: str
    op: str
    precision: Precision | None = None
    inputs: list[Precision] = field(default_factory=list)
    output: Precision | None = None
    data: bool | None = None
    weights: bool | None = None
    scale: QuantizerScales | None = None
    weights_scale: QuantizerScales | None = None
    other_scales: dict[int, QuantizerScales] = field(default_factory=dict)
    pairs: frozenset[int] | None = None
    fused: list[str] = field(default_factory=list)
    layer: str | None = None
    ms: float | None = None

    @property
    def is_int8(self) -> bool:
        """Whether the node computes in INT8 or UINT8."""
        return self.precision in BYTES

    @property
    def is_quantized(self) -> bool:
        """Whether the node computes in INT8, UINT8 or FP8."""
        return self.precision in EIGHT_BITS

    @property
    def is_unsigned(self) -> bool:
        """Whether data or weights are quantized to UINT8, which TensorRT rejects."""
        return any(
            s is not None and s.type == Precision.UINT8 for s in (self.scale, self.weights_scale)
        )

    @property
    def residual(self) -> Precision | None:
        """Type of the residual input; None without a residual, or if the build shows no types."""
        return None if self.precision is None or len(self.inputs) < 2 else self.inputs[1]

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            **to_json_fields(self, "name", "op", "precision", "inputs", "output"),
            "quantized": to_json_fields(self, "data", "weights"),
            **to_json_fields(self, "scale", "weights_scale"),
            "other_scales": {str(i): s.as_json() for i, s in self.other_scales.items()},
            **to_json_fields(self, "fused", "layer", "ms"),
        }


@dataclass(slots=True)
class NodeChange:
    """Changes of a node from the first side to the second, or a node of only one side.

    Attributes:
        a: The node on the first side; None if missing there.
        b: The node on the second side; None if missing there.
        changes: All differences; empty for an equal node.
        lost: Reason of ``lost-int8``; None without this change.
        finding: Code of the finding that explains the change, or empty.
        why: Description of the changes in one sentence.
        factor: Second scale divided by the first, for the input that differs most; None if unknown.
        scales: Scales of the input that differs most, on both sides; None if no input differs.
        scales_input: Position of this input if the scales of other inputs changed otherwise, else
            None.
        weights_factor: Second scale of the weights divided by the first; None if unknown.
    """

    a: NodeSide | None
    b: NodeSide | None
    changes: tuple[ChangeKind, ...] = ()
    lost: LossReason | None = None
    finding: str = ""
    why: str = ""
    factor: float | None = None
    scales: tuple[QuantizerScales | None, QuantizerScales | None] | None = None
    scales_input: int | None = None
    weights_factor: float | None = None

    @property
    def name(self) -> str:
        """Name on the first side that has the node."""
        return next((side.name for side in (self.a, self.b) if side is not None), "")

    @property
    def op(self) -> str:
        """The operator, or the type of the engine layer."""
        return next((side.op for side in (self.a, self.b) if side is not None), "")

    @property
    def is_quantized(self) -> bool:
        """Whether the node computes in INT8 or FP8 on both sides."""
        sides = (self.a, self.b)
        return all(side is not None and side.is_quantized for side in sides)

    @property
    def is_unknown(self) -> bool:
        """Whether the node is on both sides, and only one side shows the type it computes in."""
        shown = [
            s.precision not in (None, Precision.UNKNOWN) for s in (self.a, self.b) if s is not None
        ]
        return len(shown) == 2 and shown[0] != shown[1]

    @property
    def change_ms(self) -> float | None:
        """Milliseconds of the second side minus those of the first; None without times."""
        if self.a is None or self.b is None or self.a.ms is None or self.b.ms is None:
            return None
        return self.b.ms - self.a.ms

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return {
            **to_json_fields(self, "name", "a", "b", "changes", "lost", "finding", "why"),
            "scale_factor": self.factor,
            "weights_scale_factor": self.weights_factor,
            "change_ms": self.change_ms,
        }


@dataclass(slots=True)
class SideSummary:
    """Totals of one side of a comparison.

    Attributes:
        kind: ``model`` or ``build``.
        title: File name; for a build also its version and GPU.
        quantized: Whether the side has Q/DQ in the file, or INT8 or FP8 convolutions in the engine.
        convolutions: Number of Conv, ConvTranspose, Gemm and MatMul (of a build: of its layers).
        products: Number of matrix products, including those of two activations without Q/DQ.
        plain: Number of convolutions without the matrix products.
        int8: Number of ``convolutions`` in INT8; None if unknown.
        int8_to_int8: Number of INT8 convolutions that write INT8.
        int8_to_int8_range: Lowest and highest predicted number of ``int8_to_int8``; None for a
            build and for a model that is compared with its build.
        fp8: Number of ``convolutions`` in FP8; None if unknown.
        fp8_to_fp8: Number of FP8 convolutions that write FP8.
        fp8_to_fp8_range: The same as `int8_to_int8_range` for ``fp8_to_fp8``.
        conversions: Number of Q and DQ that remain in the engine; None if unknown. If two builds
            are compared, reformats between data types are included.
        conversions_range: Lowest and highest predicted number of ``conversions``; None for a build
            and for a model that is compared with its build.
        ms: Milliseconds of one inference; None without times.
        layouts: Number of layout changes (reformats) in the estimate of ``ms``; None if unknown.
        layouts_ms: The part of ``ms`` that they take; None if unknown.
        measured: Whether the time was measured.
        float_type: Type in which a float model was timed, if the file has another type; else None.
        float_types: Float types that convolutions compute in or write. Empty for a build.
        target: Target of the prediction; empty for a build.
        target_title: The target in words, with the version that the user named.
        compute_capabilities: Compute capabilities that the prediction holds for; empty for a build,
            and if the prediction holds for all.
        gpu: GPU that the time is for, or empty.
        gain: Speed gain of a model with Q/DQ over its float network, with its uncertainty; None if
            unknown.
        gaps: Missing parts of a truncated build.
        obstacle: Form of quantization in the model that TensorRT rejects, or empty.
        rejection: As :attr:`qdqtool.trt.result.Prediction.rejection`; empty for a build. A rejected
            model has no times.
        subgraphs: Numbers of layers and quantizers in subgraphs of the model, which are not
            compared; see :attr:`qdqtool.ir.input_shapes.ModelInfo.subgraphs`.
    """

    kind: str
    title: str
    quantized: bool
    convolutions: int
    int8: int | None = None
    int8_to_int8: int | None = None
    int8_to_int8_range: tuple[int, int] | None = None
    conversions: int | None = None
    conversions_range: tuple[int, int] | None = None
    ms: float | None = None
    layouts: int | None = None
    layouts_ms: float | None = None
    measured: bool = False
    target: str = ""
    target_title: str = ""
    gpu: str = ""
    products: int = 0
    plain: int = 0
    gaps: list[Gap] = field(default_factory=list)
    obstacle: str = ""
    rejection: str = ""
    compute_capabilities: list[str] = field(default_factory=list)
    fp8: int | None = None
    fp8_to_fp8: int | None = None
    fp8_to_fp8_range: tuple[int, int] | None = None
    subgraphs: Mapping[str, int] = field(default_factory=dict)
    float_type: Precision | None = None
    float_types: frozenset[Precision] = frozenset()
    gain: SpeedGain | None = None

    @property
    def rejected(self) -> bool:
        """Whether TensorRT builds no engine from the model."""
        return bool(self.rejection)

    @property
    def conversion_bounds(self) -> tuple[int | None, int | None]:
        """Lowest and highest number of ``conversions``, which are equal if the number is known."""
        return self.conversions_range or (self.conversions, self.conversions)

    @property
    def shown_ms(self) -> float | None:
        """Milliseconds as in JSON."""
        return self._round_estimate(self.ms)

    def _round_estimate(self, ms: float | None) -> float | None:
        """Round an estimated time to four significant digits, as predict does."""
        return ms if self.measured or ms is None else round_significant(ms)

    def count_int8(self, nodes: Collection[NodeSide]) -> None:
        """Set the numbers of INT8 and FP8 convolutions from the nodes."""
        int8 = [node for node in nodes if node.is_int8]
        fp8 = [node for node in nodes if node.precision == Precision.FP8]
        self.fp8 = len(fp8)
        self.fp8_to_fp8 = sum(node.output == Precision.FP8 for node in fp8)
        self.int8 = len(int8)
        self.int8_to_int8 = sum(node.output == Precision.INT8 for node in int8)
        self.int8_to_int8_range = self.fp8_to_fp8_range = None

    def add_ranges(self, prediction: Prediction) -> None:
        """Set the ranges of counts that depend on open assumptions of a prediction."""
        self.conversions_range = prediction.conversions_range
        self.int8_to_int8_range = prediction.count_bounds("int8_to_int8")
        self.fp8_to_fp8_range = prediction.count_bounds("fp8_to_fp8")

    def count_layers(self, prediction: Prediction) -> None:
        """Set the numbers of convolutions and matrix products from a prediction."""
        self.convolutions = len(prediction.convolutions)
        self.products = sum(c.is_product for c in prediction.convolutions)
        self.plain = self.convolutions - self.products

    @property
    def missing(self) -> list[str]:
        """Descriptions of the gaps."""
        return [str(g) for g in self.gaps]

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        fields = to_json_fields(
            self,
            "kind",
            "title",
            "quantized",
            "convolutions",
            "int8",
            "int8_to_int8",
            "fp8",
            "fp8_to_fp8",
            "conversions",
            "conversions_range",
            "ms",
            "layouts",
            "layouts_ms",
            "measured",
            "rejected",
        )
        fields |= {"ms": self.shown_ms, "layouts_ms": self._round_estimate(self.layouts_ms)}
        return {
            **fields,
            "target": self.target or None,
            "subgraphs": dict(self.subgraphs),
            "compute_capabilities": list(self.compute_capabilities),
            "gpu": self.gpu or None,
            "matrix_products": self.products,
            "missing": self.missing,
        }


@dataclass(frozen=True, slots=True)
class TimeChange:
    """Estimated milliseconds of the second model minus those of the first, in parts.

    Attributes:
        total_ms: Difference of the totals, which is the sum of all parts.
        nodes_ms: Sum of ``change_ms`` of all changed nodes.
        shared_ms: Correction of `nodes_ms` for layers that several of these nodes share, so that
            each layer counts once.
        layouts_ms: Difference of the layout changes.
        other_layers_ms: Difference of all other layers.
        other_layers: Number of these layers in the first and in the second model.
        largest_other_layers: Differences of at most three of these layers by name, the largest
            first. The times are those of a profile, so they can be a few us longer than in
            `other_layers_ms`.
    """

    total_ms: float
    nodes_ms: float
    shared_ms: float
    layouts_ms: float
    other_layers_ms: float
    other_layers: tuple[int, int]
    largest_other_layers: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        names = ("total_ms", "nodes_ms", "shared_ms", "layouts_ms", "other_layers_ms")
        return {
            **{name: round(getattr(self, name), 6) for name in names},
            "other_layers": list(self.other_layers),
            "largest_other_layers": [
                {"name": name, "ms": round(ms, 6)} for name, ms in self.largest_other_layers.items()
            ],
        }


@dataclass(slots=True)
class Comparison(SavableResult):
    """Two sides and their differences.

    Attributes:
        a: The first side.
        b: The second side.
        nodes: Every node with weights or Q/DQ; of two builds, every convolution and matrix product.
        matched_by: How nodes or layers were paired: ``names``, ``structure`` or ``shapes``. Two
            models are never paired by shapes.
        engines: Layers of two builds side by side.
        notes: Notes and warnings.
        read: The input files.
        agreement: Agreement of the second model with the first one on images; None without images.
        time_change: Estimated time of the second model minus that of the first, in parts. None for
            builds, and if the times of the layers of a model are unknown.
        interface: Inputs and outputs of the network that differ between two models.
    """

    a: SideSummary
    b: SideSummary
    nodes: list[NodeChange] = field(default_factory=list)
    matched_by: str = "names"
    engines: EngineComparison | None = None
    notes: list[Note] = field(default_factory=list)
    read: InputFiles | None = field(default=None, compare=False)
    agreement: NetworkAgreement | None = None
    time_change: TimeChange | None = None
    interface: list[InterfaceChange] = field(default_factory=list)

    def __repr__(self) -> str:
        changed = format_count(len(self.changed), "changed node")
        return f"<Comparison {self.a.title} with {self.b.title}: {changed}>"

    @property
    def changed(self) -> list[NodeChange]:
        """The nodes that differ."""
        return [n for n in self.nodes if n.changes]

    def where(self, change: ChangeKind) -> list[NodeChange]:
        """Return the nodes that have a change of this kind."""
        return [n for n in self.nodes if change in n.changes]

    def count(self, change: ChangeKind) -> int:
        """Return the number of nodes that have a change of this kind."""
        return self._counts[change]

    @property
    def _counts(self) -> Counter[ChangeKind]:
        return Counter(c for n in self.nodes for c in n.changes)

    @property
    def unknown(self) -> list[str]:
        """Names of the convolutions whose data type only one side shows."""
        return [n.name for n in self.nodes if n.is_unknown]

    @property
    def open_outputs(self) -> int:
        """Number of convolutions whose output type at least one side does not show.

        Only convolutions that are INT8 or FP8 on both sides count.
        """
        unknown = (None, Precision.UNKNOWN)
        count = 0
        for node in self.nodes:
            outputs = [side.output for side in (node.a, node.b) if side]
            count += node.is_quantized and any(output in unknown for output in outputs)
        return count

    @property
    def partial(self) -> str:
        """Reason why the comparison is incomplete; empty if everything was compared."""
        for side in (self.a, self.b):
            if side.missing:
                return f"{side.title} is incomplete"
        if None in (self.a.int8, self.b.int8):
            return "data types are not known"
        if any(side.subgraphs.get("quantizers") for side in (self.a, self.b)):
            return "Q/DQ in branches of If or bodies of Loop and Scan are not compared"
        if not self.unknown:
            return ""
        return f"data types of {format_count(len(self.unknown), 'convolution')} are not known"

    @property
    def ok(self) -> bool:
        """Whether everything was compared and nothing got worse for INT8.

        No convolution lost INT8 or its INT8 output, and the number of conversions did not grow. The
        number does not matter if the first side is float.
        """
        if self.partial:
            return False
        more = self.more_conversions is not None and self.more_conversions > 0 and self.a.quantized
        return not (
            self.count(ChangeKind.LOST_INT8) or self.count(ChangeKind.LOST_INT8_OUTPUT) or more
        )

    @property
    def more_conversions(self) -> int | None:
        """Conversions of the second side minus those of the first; None if unknown."""
        a, b = self.a.conversions, self.b.conversions
        return None if a is None or b is None else b - a

    @property
    def times_as_long(self) -> float | None:
        """Time of the second side divided by the time of the first; None if unknown."""
        return self.b.ms / self.a.ms if self.a.ms and self.b.ms else None

    @property
    def min_speed_change(self) -> float:
        """Relative difference of the two times from which one side is faster."""
        is_measured = self.a.measured and self.b.measured
        return _MIN_MEASURED_CHANGE if is_measured else _MIN_ESTIMATED_CHANGE

    @property
    def is_as_fast(self) -> bool:
        """Whether the two times differ by less than `min_speed_change`; False if unknown."""
        ratio = self.times_as_long
        return ratio is not None and abs(ratio - 1) < self.min_speed_change

    @property
    def is_slower(self) -> bool:
        """Whether the second side takes at least `min_speed_change` longer; False if unknown."""
        return (self.times_as_long or 0.0) > 1 and not self.is_as_fast

    @property
    def is_faster_surely(self) -> bool:
        """Whether the faster side is known, for an estimate of a float model and one with Q/DQ.

        The range of this ratio is that of the speed gain that ``predict`` states. For other sides,
        no range is known, and the result is True.
        """
        gain, ratio = self.b.gain or self.a.gain, self.times_as_long
        if gain is None or ratio is None or self.a.quantized == self.b.quantized:
            return True
        return max(ratio, 1 / ratio) > gain.high / gain.value

    def summary(self) -> Json:
        """Return the totals.

        Two models that are matched by names are matched by structure as well. The JSON output
        states ``names`` for them.
        """
        counts = self._counts
        is_by_both = self.a.kind == self.b.kind == "model" and self.matched_by == "names"
        return {
            "lost_int8": counts[ChangeKind.LOST_INT8],
            "gained_int8": counts[ChangeKind.GAINED_INT8],
            "conversions": [self.a.conversions, self.b.conversions],
            "lost_int8_output": counts[ChangeKind.LOST_INT8_OUTPUT],
            "gained_int8_output": counts[ChangeKind.GAINED_INT8_OUTPUT],
            "int8": [self.a.int8, self.b.int8],
            "int8_to_int8": [self.a.int8_to_int8, self.b.int8_to_int8],
            "fp8": [self.a.fp8, self.b.fp8],
            "format": counts[ChangeKind.FORMAT],
            "scales": counts[ChangeKind.SCALE],
            "weights_scales": counts[ChangeKind.WEIGHTS_SCALE],
            "unknown": len(self.unknown),
            "only_in_a": counts[ChangeKind.ONLY_IN_A],
            "only_in_b": counts[ChangeKind.ONLY_IN_B],
            "ms": [self.a.shown_ms, self.b.shown_ms],
            "times_as_long": self.times_as_long,
            "matched_by": "structure and names" if is_by_both else self.matched_by,
        }

    def as_json(self) -> Json:
        """Return the fields of ``qdqtool/comparison/1``; equal nodes are left out."""
        return {
            "schema": COMPARISON_SCHEMA,
            "tool": TOOL_VERSION,
            **to_json_fields(self, "a", "b"),
            "summary": {**self.summary(), "matched_by": self.matched_by},
            "nodes": [n.as_json() for n in self.changed],
            "time_change": None if self.time_change is None else self.time_change.as_json(),
            "layers": self.engines.as_json() if self.engines is not None else None,
            "agreement": self.agreement.as_json() if self.agreement is not None else None,
            **to_json_fields(self, "interface", "notes", "ok"),
        }


def compare_sides(a: NodeSide, b: NodeSide, scales: bool = True) -> NodeChange:
    """Compare the two sides of a node.

    Args:
        a: The node on the first side.
        b: The node on the second side.
        scales: Whether to compare Q/DQ pairs and scales too; both sides have to be models.
    """
    change = NodeChange(a, b)
    kinds = _find_precision_changes(a, b)
    if ChangeKind.LOST_INT8 in kinds:
        change.lost = _find_loss_reason(a, b)
    first, second = a.residual, b.residual
    if first is not None and second is not None and not first.agrees(second):
        kinds.append(ChangeKind.RESIDUAL)
    if scales:
        kinds += _find_qdq_changes(a, b, kinds)
        kinds += _compare_scales(a, b, change)
    if a.layer and b.layer and sorted(a.fused) != sorted(b.fused):
        kinds.append(ChangeKind.FUSION)
    change.changes = tuple(kinds)
    return change


def _find_precision_changes(a: NodeSide, b: NodeSide) -> list[ChangeKind]:
    unknown = {None, Precision.UNKNOWN}
    if unknown & {a.precision, b.precision}:
        return []
    if a.is_quantized != b.is_quantized:
        return [ChangeKind.LOST_INT8 if a.is_quantized else ChangeKind.GAINED_INT8]
    if not a.is_quantized:
        return []
    kinds = [ChangeKind.FORMAT] if a.is_int8 != b.is_int8 else []
    if unknown & {a.output, b.output}:
        return kinds
    wrote, writes = a.output in _OUTPUTS, b.output in _OUTPUTS
    if wrote != writes:
        kinds.append(ChangeKind.LOST_INT8_OUTPUT if wrote else ChangeKind.GAINED_INT8_OUTPUT)
    return kinds


def _find_loss_reason(a: NodeSide, b: NodeSide) -> LossReason:
    lost_data = bool(a.data) and b.data is False
    lost_weights = bool(a.weights) and b.weights is False
    if lost_data and (lost_weights or b.weights is None):
        return LossReason.PAIRS
    if lost_weights:
        return LossReason.WEIGHTS
    return LossReason.DATA if lost_data else LossReason.UNKNOWN


def _find_qdq_changes(a: NodeSide, b: NodeSide, kinds: list[ChangeKind]) -> list[ChangeKind]:
    """Return the changes of Q/DQ pairs; empty if the node lost or gained INT8 itself."""
    if ChangeKind.LOST_INT8 in kinds or ChangeKind.GAINED_INT8 in kinds:
        return []
    changes = []
    pairs = [(a.data, b.data), (a.weights, b.weights)]
    if a.pairs is not None and b.pairs is not None:
        pairs += [(i in a.pairs, i in b.pairs) for i in a.pairs ^ b.pairs]
    if any(before and after is False for before, after in pairs):
        changes.append(ChangeKind.LOST_QDQ)
    if any(after and before is False for before, after in pairs):
        changes.append(ChangeKind.GAINED_QDQ)
    return changes


def _pair_input_scales(
    a: NodeSide, b: NodeSide
) -> dict[int, tuple[QuantizerScales | None, QuantizerScales | None]]:
    """Return the scales on both sides of each input with Q/DQ, by input position."""
    is_lone = a.pairs is not None and b.pairs is not None and 0 in a.pairs ^ b.pairs
    first = {0: (a.scale, b.scale)} if a.data and b.data and not is_lone else {}
    others = {i: (s, b.other_scales[i]) for i, s in a.other_scales.items() if i in b.other_scales}
    return first | others


def _compare_scales(a: NodeSide, b: NodeSide, change: NodeChange) -> list[ChangeKind]:
    """Return the kinds of scale changes, and set the scales and factors of `change`."""
    pairs = _pair_input_scales(a, b)
    different = [i for i, pair in pairs.items() if are_scales_different(*pair)]
    kinds = []
    if different:
        position = max(different, key=lambda i: _scale_distance(pairs[i]))
        change.scales = pairs[position]
        change.factor = scale_factor(*change.scales)
        if any(scale_factor(*pair) != change.factor for pair in pairs.values()):
            change.scales_input = position
        kinds.append(ChangeKind.SCALE)
    if a.weights and b.weights and are_scales_different(a.weights_scale, b.weights_scale):
        change.weights_factor = scale_factor(a.weights_scale, b.weights_scale)
        kinds.append(ChangeKind.WEIGHTS_SCALE)
    return kinds


def are_scales_different(a: QuantizerScales | None, b: QuantizerScales | None) -> bool:
    """Return whether scales, axis, zero points or types of two quantizers differ.

    If only one of them has known scales, they differ. INT8 and FP8 scales of the same range do not
    differ.
    """
    if a is None or b is None:
        return a is not b
    if (a.count, a.axis, a.zero) != (b.count, b.axis, b.zero):
        return True
    if a.type != b.type and {a.type, b.type} != {*_OUTPUTS}:
        return True
    factor = scale_factor(a, b)
    if factor is None:
        return not np.array_equal(a.values, b.values, equal_nan=True)
    return abs(factor - 1.0) > (_MAX_RELATIVE_ERROR if a.type == b.type else _MAX_FORMAT_ERROR)


def scale_factor(a: QuantizerScales | None, b: QuantizerScales | None) -> float | None:
    """Return the second scale divided by the first, at the channel with the largest change.

    None if a scale is missing or invalid. INT8 and FP8 are compared by their ranges. If only one
    side has a scale per channel, the largest scales of both sides are compared.
    """
    if a is None or b is None or not (a.valid and b.valid):
        return None
    if a.count != b.count:
        return float(b.ranges.max() / a.ranges.max())
    ratios = b.ranges / a.ranges
    return float(ratios[np.argmax(np.abs(np.log(ratios)))])


def _scale_distance(pair: tuple[QuantizerScales | None, QuantizerScales | None]) -> float:
    """Return the ratio of the larger to the smaller scale; infinite if unknown."""
    factor = scale_factor(*pair)
    return max(factor, 1.0 / factor) if factor else math.inf

"""The result of a comparison, as data: what differs between the two sides of each node."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqtool.buildlog.types import Gap, GapKind, Section
from qdqtool.errors import QdqtoolError
from qdqtool.types import BYTES, TOOL_VERSION, Json, Precision
from qdqtool.util import compression, file_types
from qdqtool.util.files import InputFiles, open_input
from qdqtool.util.notes import Note
from qdqtool.util.outputs import Saved
from qdqtool.util.records import published

if TYPE_CHECKING:
    from qdqtool.buildlog.costs import EngineComparison


COMPARISON_SCHEMA = "qdqtool/comparison/1"
NO_LISTING = Gap(Section.LISTING, GapKind.NOT_REACHED)  # of a build that did not come to it


class Change(StrEnum):
    """What changed at a node, from the first side to the second."""

    LOST_INT8 = "lost-int8"
    GAINED_INT8 = "gained-int8"
    LOST_INT8_OUTPUT = "lost-int8-output"
    GAINED_INT8_OUTPUT = "gained-int8-output"
    RESIDUAL = "residual"
    LOST_QDQ = "lost-qdq"
    GAINED_QDQ = "gained-qdq"
    SCALE = "scale"
    WEIGHTS_SCALE = "weights-scale"
    FUSION = "fusion"
    ONLY_IN_A = "only-in-a"
    ONLY_IN_B = "only-in-b"


class Lost(StrEnum):
    """Why a convolution lost INT8."""

    PAIRS = "pairs"  # its Q/DQ are gone
    WEIGHTS = "weights"  # those of its weights
    DATA = "data"  # those of its input
    FINDING = "finding"  # they are there, and a finding says why it is float
    FLOAT_BUILD = "float-build"  # they are in the model, and nowhere in the build
    UNEXPLAINED = "unexplained"  # INT8 is predicted, and the build does not show why it is float
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """The scales of a quantizer, in units of the tensor per integer step, and what they are applied to.

    Attributes:
        values: Flat; one, or one for each channel, as the file has them: 0, negative, infinite or no number, too.
        axis: Axis of the channels; None for one scale, and where it follows from the operator (Gemm, MatMul).
        type: What it quantizes to.
        zero: Its zero points, empty where all are 0.
    """

    values: npt.NDArray[np.float64]
    axis: int | None = None
    type: Precision = Precision.INT8
    zero: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """1 for one scale, otherwise the number of channels."""
        return int(self.values.size)

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest; no number if one of them is none."""
        return float(self.values.min()), float(self.values.max())

    @property
    def valid(self) -> bool:
        """Whether all are positive numbers."""
        return bool(np.all(np.isfinite(self.values) & (self.values > 0)))

    def as_json(self) -> Json:
        least, greatest = (
            v if math.isfinite(v) else None for v in self.ends
        )  # JSON has no other numbers
        return {
            "count": self.count,
            "least": least,
            "greatest": greatest,
            **published(self, "axis", "type", "valid"),
        }


@dataclass(slots=True)
class NodeSide:
    """What one side says of a node.

    Attributes:
        name: Of the ONNX node, or of the engine layer where no ONNX node is known.
        op: Operator, or type of the layer.
        precision: The type it computes in; None where that is not known or not asked.
        inputs: Types of the data input and of a residual input.
        output: Type of what it writes; None where that is not known.
        data: Whether its data input has Q/DQ in the file; None for an engine layer.
        weights: The same of its weights; None where it has none.
        scale: Scales of its data input.
        weights_scale: Scales of its weights.
        other_scales: Scales of its other inputs that have Q/DQ, by position.
        fused: Operators that its layer absorbed.
        layer: Name of the engine layer.
        ms: Milliseconds of that layer; None without times.
    """

    name: str
    op: str
    precision: Precision | None = None
    inputs: list[Precision] = field(default_factory=list)
    output: Precision | None = None
    data: bool | None = None
    weights: bool | None = None
    scale: Scales | None = None
    weights_scale: Scales | None = None
    other_scales: dict[int, Scales] = field(default_factory=dict)
    fused: list[str] = field(default_factory=list)
    layer: str | None = None
    ms: float | None = None

    @property
    def is_int8(self) -> bool:
        return self.precision in BYTES

    @property
    def is_unsigned(self) -> bool:
        """Whether its data or weights are quantized to UINT8, which TensorRT does not compute in."""
        return any(
            s is not None and s.type == Precision.UINT8 for s in (self.scale, self.weights_scale)
        )

    def as_json(self) -> Json:
        return {
            **published(self, "name", "op", "precision", "inputs", "output"),
            "quantized": published(self, "data", "weights"),
            **published(self, "scale", "weights_scale"),
            "other_scales": {str(i): s.as_json() for i, s in self.other_scales.items()},
            **published(self, "fused", "layer", "ms"),
        }


@dataclass(slots=True)
class NodeChange:
    """A node of both sides, or of one alone.

    Attributes:
        a: What the first side says; None where the node is not there.
        b: The same of the second.
        changes: What differs; empty for a node that is the same.
        lost: For ``lost-int8`` why.
        finding: Code of the finding that says why, empty for none.
        why: What happened, in one sentence.
        factor: Second scale over first for the input that differs most; None where both are not known.
        scales: The scales of that input on both sides.
        weights_factor: The same for the weights.
    """

    a: NodeSide | None
    b: NodeSide | None
    changes: tuple[Change, ...] = ()
    lost: Lost | None = None
    finding: str = ""
    why: str = ""
    factor: float | None = None
    scales: tuple[Scales | None, Scales | None] | None = None
    weights_factor: float | None = None

    @property
    def name(self) -> str:
        return next((side.name for side in (self.a, self.b) if side is not None), "")

    @property
    def op(self) -> str:
        """Its operator, or the type of the layer."""
        return next((side.op for side in (self.a, self.b) if side is not None), "")

    @property
    def is_unknown(self) -> bool:
        """Whether one side does not show the type it computes in, and the other one does."""
        known = [
            s.precision not in (None, Precision.UNKNOWN) for s in (self.a, self.b) if s is not None
        ]
        return len(known) == 2 and not all(known) and any(known)

    @property
    def change_ms(self) -> float | None:
        """Milliseconds that the second side takes more; None where either is not timed."""
        if self.a is None or self.b is None or self.a.ms is None or self.b.ms is None:
            return None
        return self.b.ms - self.a.ms

    def as_json(self) -> Json:
        return {
            **published(self, "name", "a", "b", "changes", "lost", "finding", "why"),
            "scale_factor": self.factor,
            "weights_scale_factor": self.weights_factor,
            "change_ms": self.change_ms,
        }


@dataclass(slots=True)
class Side:
    """One side as a whole.

    Attributes:
        kind: ``model`` or ``build``.
        title: What to call it: the file's name, and for a build its version and GPU.
        quantized: Whether it has any INT8: Q/DQ in the file, or INT8 convolutions in the engine.
        convolutions: Number of Conv, ConvTranspose, Gemm and MatMul (of a build: of its layers).
        products: Matrix products among them, and those of two activations without Q/DQ, which they leave out.
        plain: Those that are no matrix products.
        int8: How many of them are INT8; None where that is not known.
        int8_to_int8: How many of those write INT8.
        conversions: Q and DQ that stay; None where the target counts none.
        ms: Time of one execution; None without times.
        measured: Whether that was measured.
        target: What the prediction is for; empty for a build.
        compute_capabilities: Those of the GPUs that it holds for; empty for a build, and where it holds for all.
        gpu: Where the time is for; empty without.
        gaps: What a build lacks because it is cut off; empty for a whole one.
        obstacle: In what form a model is quantized that TensorRT does not take; empty for none.
    """

    kind: str
    title: str
    quantized: bool
    convolutions: int
    int8: int | None = None
    int8_to_int8: int | None = None
    conversions: int | None = None
    ms: float | None = None
    measured: bool = False
    target: str = ""
    gpu: str = ""
    products: int = 0
    plain: int = 0
    gaps: list[Gap] = field(default_factory=list)
    obstacle: str = ""
    compute_capabilities: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The gaps in words."""
        return [str(g) for g in self.gaps]

    def as_json(self) -> Json:
        fields = published(
            self,
            "kind",
            "title",
            "quantized",
            "convolutions",
            "int8",
            "int8_to_int8",
            "conversions",
            "ms",
            "measured",
        )
        return {
            **fields,
            "target": self.target or None,
            "compute_capabilities": list(self.compute_capabilities),
            "gpu": self.gpu or None,
            "matrix_products": self.products,
            "missing": self.missing,
        }


@dataclass(slots=True)
class Comparison(Saved):
    """Two sides and what differs between them.

    Attributes:
        a: The side given first.
        b: The other one.
        nodes: Every node that has weights on either side, and every other one at which something differs.
        matched_by: ``names``, ``structure`` or, for two engines, ``shapes``.
        engines: For two builds their layers side by side.
        notes: What else a user should know.
        read: The files it was made from.
    """

    a: Side
    b: Side
    nodes: list[NodeChange] = field(default_factory=list)
    matched_by: str = "names"
    engines: EngineComparison | None = None
    notes: list[Note] = field(default_factory=list)
    read: InputFiles | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<Comparison {self.a.title} with {self.b.title}: {len(self.changed)} nodes differ>"

    @property
    def changed(self) -> list[NodeChange]:
        """The nodes at which something differs."""
        return [n for n in self.nodes if n.changes]

    def where(self, change: Change) -> list[NodeChange]:
        """The nodes at which that happened."""
        return [n for n in self.nodes if change in n.changes]

    def count(self, change: Change) -> int:
        """At how many nodes that happened."""
        return self._counts[change]

    @property
    def _counts(self) -> Counter[Change]:
        return Counter(c for n in self.nodes for c in n.changes)

    @property
    def unknown(self) -> list[str]:
        """Names of the convolutions of which one side does not show the data type."""
        return [n.name for n in self.nodes if n.is_unknown]

    @property
    def open_outputs(self) -> int:
        """Of how many convolutions that are INT8 on both sides one side does not say what they write."""
        both = [
            (n.a.output, n.b.output)
            for n in self.nodes
            if n.a and n.b and n.a.is_int8 and n.b.is_int8
        ]
        return sum(bool({None, Precision.UNKNOWN} & set(types)) for types in both)

    @property
    def partial(self) -> str:
        """Why not all of both sides could be compared; empty where it could."""
        cut = [f"{side.title} is incomplete" for side in (self.a, self.b) if side.missing]
        if not cut and None in (self.a.int8, self.b.int8):
            return "data types are not known"
        return (
            cut[0]
            if cut
            else f"data types of {n} convolutions are not known"
            if (n := len(self.unknown))
            else ""
        )

    @property
    def ok(self) -> bool:
        """Whether nothing got worse for INT8: no convolution lost it, as input or as output, and no conversion came.

        Not where a part is unknown.
        """
        if self.partial:
            return False
        more = self.more_conversions is not None and self.more_conversions > 0 and self.a.quantized
        return not (self.count(Change.LOST_INT8) or self.count(Change.LOST_INT8_OUTPUT) or more)

    @property
    def more_conversions(self) -> int | None:
        """How many more conversions the second side has; None where either is not known."""
        a, b = self.a.conversions, self.b.conversions
        return None if a is None or b is None else b - a

    @property
    def times_as_long(self) -> float | None:
        """Time of the second side over that of the first; None where either is not known."""
        return self.b.ms / self.a.ms if self.a.ms and self.b.ms else None

    def summary(self) -> Json:
        counts = self._counts
        return {
            "lost_int8": counts[Change.LOST_INT8],
            "gained_int8": counts[Change.GAINED_INT8],
            "conversions": [self.a.conversions, self.b.conversions],
            "lost_int8_output": counts[Change.LOST_INT8_OUTPUT],
            "gained_int8_output": counts[Change.GAINED_INT8_OUTPUT],
            "int8": [self.a.int8, self.b.int8],
            "int8_to_int8": [self.a.int8_to_int8, self.b.int8_to_int8],
            "scales": counts[Change.SCALE],
            "weights_scales": counts[Change.WEIGHTS_SCALE],
            "unknown": len(self.unknown),
            "only_in_a": counts[Change.ONLY_IN_A],
            "only_in_b": counts[Change.ONLY_IN_B],
            "ms": [self.a.ms, self.b.ms],
            "times_as_long": self.times_as_long,
            "matched_by": self.matched_by,
        }

    def as_json(self) -> Json:
        """The fields of ``qdqtool/comparison/1``: nodes that differ, alone."""
        return {
            "schema": COMPARISON_SCHEMA,
            "tool": TOOL_VERSION,
            **published(self, "a", "b"),
            "summary": self.summary(),
            "nodes": [n.as_json() for n in self.changed],
            "layers": self.engines.as_json() if self.engines is not None else None,
            **published(self, "notes", "ok"),
        }


_FIRST_FIELD = b"\x08"  # ir_version, with which every exporter begins


def is_model(path: str | os.PathLike[str]) -> bool:
    """Whether a path names an ONNX model, by its ending or its first byte; other text is read as a build.

    A file that is neither (a PyTorch file, an engine ...) is a QdqtoolError.
    """
    name = os.fspath(path)
    if file_types.is_model_name(name):
        return True
    if name == "-":
        return False
    with open_input(path) as file:
        head = file.read(compression.HEAD)
    if head[:1] == _FIRST_FIELD:
        return True
    known = file_types.recognize(name, head) if not compression.find_magic(head) else None
    if known is not None and not known.of_build:
        raise file_types.not_a_model(name, head, error=QdqtoolError)
    return False


_SAME = 1e-5  # scales nearer than this, relatively, are equal: exporters write float32 through text


def compare_sides(a: NodeSide, b: NodeSide, scales: bool = True) -> NodeChange:
    """Everything that differs, words apart; ``scales`` and pairs too where both sides know of Q/DQ in a file."""
    found = NodeChange(a, b)
    changes: list[Change] = []
    unknown = (None, Precision.UNKNOWN)
    if a.precision not in unknown and b.precision not in unknown:
        int8, written = (a.is_int8, b.is_int8), (a.output, b.output)
        to_int8 = tuple(output == Precision.INT8 for output in written)
        if int8 == (True, False):
            changes.append(Change.LOST_INT8)
            found.lost = _lost(a, b)
        elif int8 == (False, True):
            changes.append(Change.GAINED_INT8)
        elif a.is_int8 and to_int8[0] != to_int8[1] and not set(unknown) & set(written):
            changes.append(Change.LOST_INT8_OUTPUT if to_int8[0] else Change.GAINED_INT8_OUTPUT)
    first, second = (
        side.inputs[1] if len(side.inputs) > 1 and side.precision is not None else None
        for side in (a, b)
    )
    if first is not None and second is not None and not first.agrees(second):
        changes.append(Change.RESIDUAL)
    if scales:
        other_type = {Change.LOST_INT8, Change.GAINED_INT8} & set(changes)
        asked = [] if other_type else [(a.data, b.data), (a.weights, b.weights)]
        changes += [Change.LOST_QDQ] * any(x and y is False for x, y in asked)
        changes += [Change.GAINED_QDQ] * any(y and x is False for x, y in asked)
        both = bool(a.data and b.data)
        compared = [
            (a.scale, b.scale) if both else (None, None),
            *((s, b.other_scales[i]) for i, s in a.other_scales.items() if i in b.other_scales),
        ]
        different = [pair for pair in compared if differ(*pair)]
        if different:
            # What has no factor is the worst.
            found.scales = max(
                different, key=lambda pair: max(f, 1.0 / f) if (f := factor(*pair)) else math.inf
            )
            found.factor = factor(*found.scales)
            changes.append(Change.SCALE)
        if a.weights and b.weights and differ(a.weights_scale, b.weights_scale):
            found.weights_factor = factor(a.weights_scale, b.weights_scale)
            changes.append(Change.WEIGHTS_SCALE)
    if a.layer and b.layer and sorted(a.fused) != sorted(b.fused):
        changes.append(Change.FUSION)
    found.changes = tuple(changes)
    return found


def _lost(a: NodeSide, b: NodeSide) -> Lost:
    data, weights = bool(a.data) and b.data is False, bool(a.weights) and b.weights is False
    if data and (weights or b.weights is None):
        return Lost.PAIRS
    if weights:
        return Lost.WEIGHTS
    return Lost.DATA if data else Lost.UNKNOWN


def differ(a: Scales | None, b: Scales | None) -> bool:
    """Whether two quantizers give different values, or of one alone the scale is known."""
    if a is None or b is None:
        return a is not b
    if (a.count, a.axis, a.type, a.zero) != (b.count, b.axis, b.type, b.zero):
        return True
    apart = factor(a, b)
    return (
        not np.array_equal(a.values, b.values, equal_nan=True)
        if apart is None
        else abs(apart - 1.0) > _SAME
    )


def factor(a: Scales | None, b: Scales | None) -> float | None:
    """Second over first scale, of the channel that differs most; None where either is not known, or no scale at all."""
    if a is None or b is None or not (a.valid and b.valid):
        return None
    if a.count != b.count:  # per channel and per tensor: the largest is what compares
        return b.ends[1] / a.ends[1]
    ratios = b.values / a.values
    return float(ratios[np.argmax(np.abs(np.log(ratios)))])

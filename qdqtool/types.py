"""The data types that the rooms of qdqtool hand to each other.

Nothing here imports onnx or numpy, so that importing it costs nothing.
``as_json()`` gives the published fields; their names are a contract (see the README), new ones may be added.

Regions of Myelin, finding codes and what a prediction assumes are among them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, dataclass_transform

from qdqtool.errors import brief
from qdqtool.util.files import InputFiles
from qdqtool.util.outputs import save_answer
from qdqtool.util.records import names_in, record


@dataclass(slots=True)
class MyelinRegion:
    """Layers that Myelin compiles together.

    Attributes:
        trigger: The ONNX node that brings it about.
        op: That node's operator.
        nodes: ONNX nodes in it, Q and DQ apart.
        fused: Q and DQ that are fused into a kernel of another node.
        kernels: Q and DQ at its edge, each with a kernel of its own; no conversions of the engine.
        uncertain: How many of ``fused`` may be conversions instead.
        possible: Conversions of the engine that may be part of it instead (TensorRT 8, where no log shows it).
        products: Matrix products in it.
        int8_products: Those of them that compute in INT8.
        softmaxes: Softmax nodes in it.
        norms: Normalizations in it, written as one node or in pieces.
    """

    trigger: str
    op: str
    nodes: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    uncertain: int = 0
    possible: list[str] = field(default_factory=list)
    products: int = 0
    int8_products: int = 0
    softmaxes: int = 0
    norms: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "trigger": self.trigger,
            "op": self.op,
            "nodes": list(self.nodes),
            "fused": list(self.fused),
            "kernels": list(self.kernels),
            "uncertain": self.uncertain,
            "possible": list(self.possible),
            "matrix_products": self.products,
            "matrix_products_int8": self.int8_products,
            "softmax": self.softmaxes,
            "normalizations": self.norms,
        }


SILU_ADD = "silu-add"


class SiluAdd(StrEnum):
    """What becomes of Conv + activation + residual Add with a quantized residual: one layer, or the Add apart."""

    FUSED = "fused"
    APART = "apart"


CHOICES: Mapping[str, tuple[str, ...]] = {SILU_ADD: tuple(SiluAdd)}
"""Every assumption that can be chosen, with its values."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of a prediction that depend on an assumption.

    Attributes:
        int8: Convolutions that compute in INT8.
        int8_to_int8: Those that write INT8 as well.
        conversions: Q and DQ that stay as layers.
    """

    int8: int
    int8_to_int8: int
    conversions: int | None

    def as_json(self) -> dict[str, int | None]:
        return {
            "int8": self.int8,
            "int8_to_int8": self.int8_to_int8,
            "conversions": self.conversions,
        }


@dataclass(frozen=True, slots=True)
class Assumption:
    """A choice on which the outcome rests.

    Attributes:
        name: ``silu-add``.
        value: What the prediction counts.
        alternatives: What it would count for each other value.
        places: ONNX nodes (the Adds) where the choice is made.
        given: Whether the user chose the value, or a build showed it.
        why: Why the value is the target's default.
    """

    name: str
    value: str
    alternatives: Mapping[str, Counts]
    places: tuple[str, ...] = ()
    given: bool = False
    why: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": str(self.value),
            "alternatives": {
                str(name): counts.as_json() for name, counts in self.alternatives.items()
            },
            "places": list(self.places),
            "given": self.given,
            "why": self.why,
        }


TOOL_VERSION = "0.2.0"

PREDICTION_SCHEMA = "qdqtool/prediction/1"
VERIFICATION_SCHEMA = "qdqtool/verification/1"
INSERTION_SCHEMA = "qdqtool/insertion/1"

Json = dict[str, Any]


class Precision(StrEnum):
    """A tensor's data type. FLOAT is a float whose width is the builder's choice (weakly typed targets)."""

    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    FP8 = "FP8"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FLOAT = "FLOAT"
    INT32 = "INT32"
    INT64 = "INT64"
    BOOL = "BOOL"
    UNKNOWN = "UNKNOWN"

    @property
    def is_float(self) -> bool:
        """True for every floating-point type that is not a quantized one."""
        return self in _FLOATS

    @property
    def width(self) -> float | None:
        """Bytes of an element; None for a type that is not known."""
        return _WIDTH.get(self)

    def agrees(self, other: Precision) -> bool:
        """Whether a prediction of ``self`` and a build of ``other`` say the same; FLOAT equals any float width."""
        if self == other:
            return True
        return Precision.FLOAT in (self, other) and self.is_float and other.is_float


_WIDTH = {
    Precision.INT8: 1.0,
    Precision.UINT8: 1.0,
    Precision.FP8: 1.0,
    Precision.BOOL: 1.0,
    Precision.INT4: 0.5,
    Precision.FP16: 2.0,
    Precision.BF16: 2.0,
    Precision.FP32: 4.0,
    Precision.FLOAT: 4.0,
    Precision.INT32: 4.0,
    Precision.INT64: 8.0,
}
_FLOATS, BYTES = (
    (Precision.FLOAT, Precision.FP32, Precision.FP16, Precision.BF16),
    (Precision.INT8, Precision.UINT8),
)


class Evidence(StrEnum):
    """How well a rule is proven: seen in a real build, documented by NVIDIA, or assumed."""

    SEEN = "seen"
    DOCUMENTED = "documented"
    ASSUMED = "assumed"

    def weaker(self, other: Evidence) -> Evidence:
        """The weaker of the two: what a conclusion drawn from both is worth."""
        return max(self, other, key=_EVIDENCE.index)


class Severity(StrEnum):
    """ERROR: the build fails or the result is wrong. WARNING: speed or accuracy is lost. INFO: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def word(self) -> str:
        """What readers are shown; ``info`` is a note, as in SARIF."""
        return "note" if self is Severity.INFO else self.value


@dataclass(
    unsafe_hash=True, slots=True
)  # not frozen, which takes four times as long to make: there are many
class Event:
    """One line of TensorRT's optimizer log as data.

    Attributes:
        pass_name: The pass, named as in TensorRT's log (``HorizontalMergeQNodes``).
        kind: What the line says: ``Running``, ``Removing``, ``Swapping``, ``Eliminating``, ``Fusing``, ...
            (``qdqtool.trt.trace`` lists them with their wording).
        subject: The first layer or tensor named.
        object: The second one, or an empty string.
        case: For a simulated line the case of its pass, ``<pass>/<case>``: what shows that TensorRT does so.
    """

    pass_name: str
    kind: str
    subject: str
    object: str = ""
    case: str = field(default="", compare=False)

    def as_json(self) -> Json:
        return {
            "pass": self.pass_name,
            "event": self.kind,
            "subject": self.subject,
            "object": self.object,
            "case": self.case,
        }


@dataclass_transform(frozen_default=True)
@record
class Refusal:
    """What was looked at and found unfit: by a pass that did not fire, by a check of the model, by a placement.

    Each reason is a class of its own, a record as this one is (``qdqtool.trt.refusals``, ``qdqtool.trt.faults``, ...),
    with the nodes and values that decided. Findings hold these records; words are made from them last
    (``qdqtool.findings.messages``).

    Attributes:
        reason: A short code of the class, stable, that tests refer to.
        quotes: Whether its words are TensorRT's own.
        apart: Its fields that a part of the model may have otherwise though the same is told: how large a tensor is,
            who looked, and what no words are made from.
        pass_name: The pass, or who else looked.
        node: The ONNX node looked at.
    """

    reason: ClassVar[str] = ""
    quotes: ClassVar[bool] = False
    apart: ClassVar[tuple[str, ...]] = ("pass_name", "elements")
    nameless: ClassVar[tuple[str, ...]] = ("pass_name", "op")

    pass_name: str
    node: str

    def __init_subclass__(cls, reason: str = "") -> None:
        cls.reason = reason
        record(cls)

    def names(self) -> Iterator[str]:
        """Every name in it, of nodes and of tensors, each once; operators and the pass are none."""
        return iter(names_in(self))


_EVIDENCE = tuple(Evidence)


@record
class Cause:
    """Why a finding is made: the refusal that decided, and what else its words are made from.

    Attributes:
        refusal: What was refused.
        also: Other refusals that explain it.
        see: Other findings that explain it, by code and node.
        fused: Whether the convolution's layer took in the node that the finding is about.
    """

    refusal: Refusal
    also: tuple[Refusal, ...] = ()
    see: tuple[tuple[FindingCode, str], ...] = ()
    fused: bool = False


@dataclass(slots=True)
class Finding:
    """Something the user should know: what, where, why, and what to change.

    ``message`` and ``fix`` are worded when they are asked for, from the causes.

    Attributes:
        causes: The refusals behind it; further ones of the same code and node follow the first.
        words: Makes its message and its fix.
        way: How the engine is built, where that was said.
        nodes: The nodes of the model that the causes name, ``node`` first.
        convolutions: Names of the convolutions that it concerns.
        automatic: Whether qdqtool can change it by itself.
        gains: Whether the change brings something here.
        values: Number of tensor elements that are converted because of it, None where shapes are not known.
        saves_ms: What its fix saves at most in one execution on the GPU that was named, None without one.
    """

    code: FindingCode
    severity: Severity
    node: str
    causes: tuple[Cause, ...]
    evidence: Evidence
    words: Callable[[Finding], tuple[str, str]] = field(repr=False, compare=False)
    id: int = -1
    target: str = ""
    way: str | None = None
    nodes: tuple[str, ...] = ()
    convolutions: list[str] = field(default_factory=list)
    values: int | None = None
    automatic: bool = False
    saves_ms: float | None = None
    gains: bool = True

    @property
    def message(self) -> str:
        """The chain of causes, one or two sentences."""
        return self.words(self)[0]

    @property
    def fix(self) -> str:
        """What to change."""
        return self.words(self)[1]

    def as_json(self) -> Json:
        message, fix = self.words(self)
        return {
            "id": self.id,
            "code": self.code,
            "severity": str(self.severity),
            "node": self.node,
            "fix": fix,
            "message": message,
            "evidence": str(self.evidence),
            "target": self.target,
            "values": self.values,
            "nodes": list(self.nodes),
            "convolutions": list(self.convolutions),
            "automatic": self.automatic,
            "saves_ms": self.saves_ms,
        }


@dataclass(unsafe_hash=True, slots=True)  # not frozen, as Event
class TensorPrecision:
    """A tensor at the edge of an engine layer."""

    tensor: str
    precision: Precision

    def as_json(self) -> Json:
        return {"tensor": self.tensor, "precision": str(self.precision)}


@dataclass(slots=True)
class EngineLayer:
    """One layer of the (predicted or built) engine.

    Attributes:
        name: TensorRT's fused name.
        type: The kind of layer: ``Convolution``, ``Deconvolution``, ``Pooling``, ``PointWise``, ``Conversion`` (a
            Q or DQ that stays), ``kgen`` (one that is a kernel of Myelin's), ``Reformat``, ``Resize``, ``Scale``,
            ``Shuffle``, ...
        inputs: Input tensors, the data input first, a residual second.
        outputs: Output tensors.
        nodes: The ONNX nodes that the layer absorbed, Q and DQ included, in graph order.
        ms: Estimated milliseconds as a profile would show them, None where no GPU was named.
        layouts: Changes of memory layout in front of it: tensor, from, to and milliseconds; where a GPU was named.
    """

    name: str
    type: str
    inputs: list[TensorPrecision] = field(default_factory=list)
    outputs: list[TensorPrecision] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    ms: float | None = None
    layouts: list[Json] = field(default_factory=list)

    def as_json(self) -> Json:
        fields: Json = {
            "name": self.name,
            "type": self.type,
            "inputs": [t.as_json() for t in self.inputs],
            "outputs": [t.as_json() for t in self.outputs],
            "nodes": list(self.nodes),
            "ms": self.ms,
        }
        return fields | {"layouts": [dict(x) for x in self.layouts]} if self.layouts else fields


@dataclass(slots=True)
class ConvOutcome:
    """What becomes of one Conv, ConvTranspose, Gemm or MatMul.

    Attributes:
        index: Place of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name where the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm`` or ``MatMul``.
        weights: ``constant`` or ``computed`` (a MatMul of two activations).
        precision: The data type it computes in.
        inputs: Precision of the data input, then of the residual input where it takes one.
        output: Precision of what its layer writes.
        layer: The engine layer's name; None where the target has no named layers.
        fused: ONNX nodes, Q and DQ apart, that its layer absorbed (BatchNormalization, activation, Add, MaxPool).
        findings: Ids of the findings about it.
        evidence: How well the outcome is proven on the target.
        cases: What it rests on: the cases (``<pass>/<case>``) of every pass that made its layer what it is.
        activation: The pointwise activation that its layer took in, by operator; ``SiLU`` for a gated one.
        bare: The tensor in front of the activation or sum that its layer took in; without one, what its layer writes.
    """

    index: int
    name: str
    op: str
    weights: str
    precision: Precision
    inputs: list[Precision]
    output: Precision
    layer: str | None = None
    fused: list[str] = field(default_factory=list)
    findings: list[int] = field(default_factory=list)
    evidence: Evidence = Evidence.SEEN
    cases: list[str] = field(default_factory=list)
    activation: str = ""
    bare: str = ""

    @property
    def is_int8(self) -> bool:
        return self.precision in BYTES

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product: Gemm, MatMul or Einsum."""
        return self.op in ("Gemm", "MatMul", "Einsum")

    @property
    def int8_in_int8_out(self) -> bool:
        return self.is_int8 and self.output == Precision.INT8

    def as_json(self) -> Json:
        return {
            "index": self.index,
            "name": self.name,
            "op": self.op,
            "weights": self.weights,
            "precision": str(self.precision),
            "inputs": [str(p) for p in self.inputs],
            "output": str(self.output),
            "layer": self.layer,
            "fused": list(self.fused),
            "findings": list(self.findings),
            "evidence": str(self.evidence),
            "cases": list(self.cases),
        }


@dataclass(slots=True)
class ModelInfo:
    """Which model a result refers to."""

    path: str
    sha256: str
    opset: int
    nodes: int

    def as_json(self) -> Json:
        return {"path": self.path, "sha256": self.sha256, "opset": self.opset, "nodes": self.nodes}


@dataclass(slots=True, repr=False)
class Prediction:
    """What TensorRT will make of a Q/DQ model.

    ``time`` is the estimated time on a GPU (see ``qdqtool.timing.estimate``), None where none was named.
    ``conversions`` is the number of Q and DQ that stay in the engine as layers of their own, the network input's
    included; None where the target has no named layers. ``refusals`` is why passes did not fire. ``counts`` is the
    number of layers behind the stages for which TensorRT logs it (``Original``, ``After Myelin optimization``).
    ``regions`` is what Myelin takes on TensorRT 10 and later, with the Q and DQ in it, which are no conversions; on
    TensorRT 8 attention and normalizations, which it may take. ``float_products`` are products of two computed tensors
    without Q/DQ, and those that an Einsum computes in float, which ``convolutions`` does not list.
    ``compute_capabilities`` are those of the GPUs that it holds for, as ``8.6``: what TensorRT-RTX builds for, or what
    was named; empty where it holds for every GPU. ``read`` holds the files that were read, none of which :meth:`save`
    overwrites.
    """

    model: ModelInfo
    target: str
    convolutions: list[ConvOutcome] = field(default_factory=list)
    layers: list[EngineLayer] = field(default_factory=list)
    trace: list[Event] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    conversions: int | None = None
    conversion_nodes: list[str] = field(default_factory=list)
    target_evidence: str = ""
    time: Json | None = None
    counts: dict[str, int] = field(default_factory=dict)
    assumptions: list[Assumption] = field(default_factory=list)
    regions: list[MyelinRegion] = field(default_factory=list)
    float_products: list[str] = field(default_factory=list)
    compute_capabilities: list[str] = field(default_factory=list)
    read: InputFiles | None = field(default=None, repr=False, compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON that ``qdqtool predict --format json`` prints, atomically.

        Raises:
            QdqtoolError: ``path`` is a file that was read, its folder is missing, or it cannot be written.
        """
        save_answer(path, self.as_json(), self.read)

    def __repr__(self) -> str:
        s = self.summary()
        return (
            f"<Prediction {self.model.path or 'of a model in memory'} for {self.target}: {s['convolutions']} "
            f"convolutions, {s['int8']} INT8, {len(self.findings)} findings>"
        )

    @property
    def ok(self) -> bool:
        """Whether there is nothing to change: no finding that is an error or a warning."""
        return all(f.severity == Severity.INFO for f in self.findings)

    def summary(self) -> Json:
        convs = self.convolutions
        int8 = [c for c in convs if c.is_int8]
        to_int8 = sum(c.output == Precision.INT8 for c in int8)
        products = [c for c in convs if c.is_product]
        int8_products = sum(c.is_int8 for c in products)
        return {
            "convolutions": len(convs),
            "int8": len(int8),
            "int8_to_int8": to_int8,
            "int8_to_float": len(int8) - to_int8,
            "float": len(convs) - len(int8),
            "conversions": self.conversions,
            "matrix_products": len(products) + len(self.float_products),
            "matrix_products_int8": int8_products,
            "matrix_products_float": len(products) + len(self.float_products) - int8_products,
        }

    @property
    def conversions_range(self) -> tuple[int, int] | None:
        """Fewest and most conversions, where that rests on what is assumed or on what Myelin takes.

        None where the target counts none.
        """
        open_ = [c for a in self.assumptions if not a.given for c in a.alternatives.values()]
        known = [n for n in (self.conversions, *(c.conversions for c in open_)) if n is not None]
        if len(known) <= len(open_):
            return None
        possible = sum(len(r.possible) for r in self.regions)
        return max(0, min(known) - possible), max(known) + sum(r.uncertain for r in self.regions)

    def convolution(self, name: str) -> ConvOutcome:
        """The outcome of the convolution of that name.

        Raises:
            KeyError: No convolution has that name.
        """
        for conv in self.convolutions:
            if conv.name == name:
                return conv
        raise KeyError(brief(name))

    def findings_by_code(self) -> Counter[str]:
        return Counter(f.code for f in self.findings)

    def as_json(self) -> Json:
        return {
            "schema": PREDICTION_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.model.as_json(),
            "target": self.target,
            "compute_capabilities": list(self.compute_capabilities),
            "target_evidence": self.target_evidence,
            "summary": {**self.summary(), "conversions_range": self.conversions_range},
            "convolutions": [c.as_json() for c in self.convolutions],
            "layers": [layer.as_json() for layer in self.layers],
            "conversions": list(self.conversion_nodes),
            "trace": [e.as_json() for e in self.trace],
            "findings": [f.as_json() for f in self.findings],
            "counts": dict(self.counts),
            "assumptions": [a.as_json() for a in self.assumptions],
            "regions": [r.as_json() for r in self.regions],
            "float_products": list(self.float_products),
            **({"time": self.time} if self.time is not None else {}),
        }


@dataclass(slots=True)
class QuantizedTensor:
    """A tensor that got a Q/DQ pair.

    Attributes:
        tensor: Name of the tensor in the model that was given.
        scale: Float, in units of the tensor per integer step; a list for per-channel weights.
        method: How the range was chosen (``mse``, ``max``, ``percentile``, ``entropy``, ``weights-max``, ...).
        group: Index of the scale group, None for a tensor with a scale of its own.
        node: Name of the inserted QuantizeLinear.
    """

    tensor: str
    scale: float | list[float]
    method: str
    group: int | None
    node: str

    def as_json(self) -> Json:
        return {
            name: getattr(self, name) for name in ("tensor", "scale", "method", "group", "node")
        }


FindingCode = Literal[
    "ACT-INNER-Q",
    "ACT-OUTLIER",
    "ACT-PER-CHANNEL",
    "ACT-SCALE",
    "ADD-ACT",
    "ADD-BOTH",
    "ADD-OUT-FLOAT",
    "BIAS-DQ",
    "BN-UNFOLDED",
    "BUILD-CRASHES",
    "BUILD-FAILS",
    "CH-ALIGN",
    "CH-SMALL",
    "CONCAT-SCALE",
    "CONST-FP16",
    "CONV3D-INT8",
    "CONVERSION",
    "CT-AXIS",
    "CT-BN",
    "CT-FLOAT",
    "CT3D-FLOAT",
    "DOUBLE-QDQ",
    "DQ-3-INPUTS",
    "DW-ADD",
    "DW-SILU",
    "EINSUM-FLOAT",
    "FLAG-FP16",
    "FLOAT-FP32",
    "FLOAT-MIXED",
    "FLOAT-SM75",
    "FP8-OUTSIDE",
    "GPU-DP4A",
    "GPU-FUSION",
    "GPU-JETSON",
    "GPU-KERNELS",
    "GPU-NO-FP16",
    "GPU-NO-INT8",
    "GPU-VERSION",
    "GROUP-SLOW",
    "HEAD-CONCAT",
    "HEAD-QUANT",
    "HEAD-SCORE",
    "IN-BLOCKED",
    "IN-FLOAT",
    "INPUT-CONVERSION",
    "KERNEL-LARGE",
    "MATMUL-COMPUTED",
    "MYELIN-REGION",
    "NO-QDQ",
    "NORM-FLOAT",
    "NORM-PIECES",
    "NOT-QUANTIZED",
    "OPSET-AXIS",
    "OUT-FLOAT",
    "OUT-MIXED",
    "PAD-SPLIT",
    "PLUGIN-OUTSIDE",
    "POOL-FLOAT",
    "POOL-MIXED",
    "POOL-SCALE",
    "QOPERATOR",
    "QTYPE",
    "RESIDUAL-STREAM",
    "SCALE-COUNT",
    "SCALE-DEAD",
    "SCALE-DYNAMIC",
    "SCALE-FP16",
    "SCALE-NONPOS",
    "SCALE-RANK",
    "SCALE-SHAPE1",
    "SIBLING-SCALE",
    "SILU-INNER-Q",
    "SILU-NO-Q-AFTER",
    "SKIP-FLOAT",
    "SPLIT-SCALE",
    "W-AXIS",
    "W-NO-DQ",
    "W-NONCONST",
    "W-PER-TENSOR",
    "W-Q-OUTPUT",
    "W-SCALE",
    "W-SHARED",
    "WEIGHT-INDIRECT",
    "WEIGHT-PREQUANT",
    "ZP-NONZERO",
    "ZP-UINT8",
    "ZP-VOLUME",
]

"""Result types that the packages of qdqtool share.

``as_json()`` returns the published fields. Their names are stable, new fields may be added (see the
README). Nothing here imports onnx or numpy, so that the import is fast.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from qdqtool.errors import brief
from qdqtool.util.files import InputFiles
from qdqtool.util.notes import Note
from qdqtool.util.outputs import save_answer
from qdqtool.util.records import collect_names, record


@dataclass(slots=True)
class MyelinRegion:
    """Layers that Myelin compiles together.

    Attributes:
        trigger: ONNX node because of which the region exists.
        op: Operator of the trigger.
        nodes: ONNX nodes in the region, without Q and DQ.
        fused: Q and DQ that are fused into a kernel of another node.
        kernels: Q and DQ at the edge of the region. Each is a separate kernel and does not count
            as a conversion of the engine.
        uncertain: Number of nodes in ``fused`` that may be conversions instead.
        possible: Conversions of the engine that may be part of the region instead (TensorRT 8,
            whose logs do not show it).
        products: Number of matrix products.
        int8_products: Number of matrix products that compute in INT8.
        fp8_products: Number of matrix products that compute in FP8.
        softmaxes: Number of Softmax nodes.
        norms: Number of normalizations, as one node or decomposed.
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
    fp8_products: int = 0
    softmaxes: int = 0
    norms: int = 0

    def as_json(self) -> dict[str, object]:
        """Return the JSON fields."""
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
            "matrix_products_fp8": self.fp8_products,
            "softmax": self.softmaxes,
            "normalizations": self.norms,
        }


SILU_ADD = "silu-add"


class SiluAdd(StrEnum):
    """Fusion of Conv + activation + Add with a quantized residual input: one layer or two."""

    FUSED = "fused"
    APART = "apart"


CHOICES: Mapping[str, tuple[str, ...]] = {SILU_ADD: tuple(SiluAdd)}
"""Values of every assumption that a user can choose, by the name of the assumption."""


@dataclass(frozen=True, slots=True)
class AssumptionCounts:
    """Counts of a prediction that depend on an assumption.

    Attributes:
        int8: Convolutions that compute in INT8.
        int8_to_int8: Convolutions that compute in INT8 and write INT8.
        conversions: Q and DQ that remain as layers.
        fp8: Convolutions that compute in FP8.
        fp8_to_fp8: Convolutions that compute in FP8 and write FP8.
    """

    int8: int
    int8_to_int8: int
    conversions: int | None
    fp8: int = 0
    fp8_to_fp8: int = 0

    def as_json(self) -> dict[str, int | None]:
        """Return the JSON fields."""
        return {
            "int8": self.int8,
            "int8_to_int8": self.int8_to_int8,
            "fp8": self.fp8,
            "fp8_to_fp8": self.fp8_to_fp8,
            "conversions": self.conversions,
        }


@dataclass(frozen=True, slots=True)
class Assumption:
    """A choice of TensorRT that cannot be predicted, with the value that is assumed.

    Attributes:
        name: Name of the choice, such as ``silu-add``.
        value: Value that the prediction assumes, ``fused`` or ``apart``.
        alternatives: Counts under each other value.
        places: ONNX nodes (the Adds) that the choice concerns.
        given: Whether the user chose the value, or a build showed it.
        why: Reason why the value is the default of the target.
    """

    name: str
    value: str
    alternatives: Mapping[str, AssumptionCounts]
    places: tuple[str, ...] = ()
    given: bool = False
    why: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON fields."""
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


FindingCode = str
"""Code of a finding, a key of ``findings/codes.toml``."""


class Precision(StrEnum):
    """Data type of a tensor.

    FLOAT is a floating-point type whose width the builder chooses (weakly typed targets).
    """

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
        """Whether the type is FLOAT, FP32, FP16 or BF16; FP8 counts as a quantized type."""
        return self in _FLOATS

    @property
    def width(self) -> float | None:
        """Bytes of an element; None for UNKNOWN."""
        return _WIDTH.get(self)

    def agrees(self, other: Precision) -> bool:
        """Return whether two types are equal, or one is FLOAT and the other a float type."""
        return self == other or (
            Precision.FLOAT in (self, other) and self.is_float and other.is_float
        )


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
EIGHT_BITS = (*BYTES, Precision.FP8)


class Evidence(StrEnum):
    """Evidence of a rule: seen in a real build, documented by NVIDIA, or assumed."""

    SEEN = "seen"
    DOCUMENTED = "documented"
    ASSUMED = "assumed"

    def weaker(self, other: Evidence) -> Evidence:
        """Return the weaker of two kinds of evidence, which a conclusion from both has."""
        return max(self, other, key=_EVIDENCE.index)


class Severity(StrEnum):
    """Severity of a finding.

    ERROR: the build fails or the result is wrong. WARNING: speed or accuracy is lost. INFO: worth
    knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def word(self) -> str:
        """Word for users; ``info`` is a note, as in SARIF."""
        return "note" if self is Severity.INFO else self.value


# Not frozen: a frozen instance takes four times as long to create, and there are many.
@dataclass(unsafe_hash=True, slots=True)
class Event:
    """One line of TensorRT's optimizer log.

    Attributes:
        pass_name: The pass, named as in TensorRT's log (``HorizontalMergeQNodes``).
        kind: ``Running``, ``Removing``, ``Swapping``, ``Eliminating``, ``Fusing``, ...
            (``qdqtool.trt.trace`` lists them with their text).
        subject: First layer or tensor in the line.
        object: Second layer or tensor, or an empty string.
        case: Case of the pass that explains a simulated line, ``<pass>/<case>``.
    """

    pass_name: str
    kind: str
    subject: str
    object: str = ""
    case: str = field(default="", compare=False)

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "pass": self.pass_name,
            "event": self.kind,
            "subject": self.subject,
            "object": self.object,
            "case": self.case,
        }


class FindingRule(NamedTuple):
    """Rule that turns a reason into a finding: the code, and whether ``fix`` can change it.

    Attributes:
        code: The code.
        when: Condition on the reason; None if the rule always applies. The first rule that applies
            counts.
        is_attempted: Whether ``fix`` tries to remove the finding.
        is_promised: Whether findings say that ``fix`` can remove them. Otherwise ``fix`` keeps
            its change only if the simulation shows a gain.
        is_on_request: Whether ``fix`` tries the fix only if the user names the code, or if the
            finding is an error. The fix may cost speed or accuracy.
    """

    code: FindingCode
    when: Callable[[Any], object] | None = None
    is_attempted: bool = False
    is_promised: bool = False
    is_on_request: bool = False

    def applies(self, reason: Reason) -> bool:
        """Return whether the rule's condition holds for a reason."""
        return self.when is None or bool(self.when(reason))


def fixable(
    code: FindingCode, when: Callable[[Any], object] | None = None, *, on_request: bool = False
) -> FindingRule:
    """Return the rule of a code that ``fix`` can change without data."""
    return FindingRule(code, when, is_attempted=True, is_promised=True, is_on_request=on_request)


def attempted(code: FindingCode, when: Callable[[Any], object] | None = None) -> FindingRule:
    """Return the rule of a code that ``fix`` changes only if the simulation shows a gain."""
    return FindingRule(code, when, is_attempted=True)


@dataclass_transform(frozen_default=True)
@record
class Reason:
    """Reason of a finding: why a pass, a check or a placement rejected a node.

    Each kind of reason is a record class in `qdqtool.reasons`. Its fields are the nodes and values
    that led to the rejection. The class declares finding codes, and writes the message.

    Attributes:
        key: Short, stable code of the class that tests refer to.
        quotes: Whether the message quotes TensorRT.
        identity_excludes: Fields that are ignored when findings are compared, such as the size of
            a tensor.
        unnamed_fields: Fields that contain no names of nodes or tensors.
        rules: Rules with the code of the finding; the first rule that applies counts. Empty if
            the reason becomes no finding.
        pass_name: Pass or check that recorded the reason.
        node: ONNX node that was rejected.
    """

    key: ClassVar[str] = ""
    quotes: ClassVar[bool] = False
    identity_excludes: ClassVar[tuple[str, ...]] = ("pass_name", "elements")
    unnamed_fields: ClassVar[tuple[str, ...]] = ("pass_name", "op")
    rules: ClassVar[tuple[FindingRule, ...]] = ()

    pass_name: str
    node: str

    def __init_subclass__(cls, key: str = "") -> None:
        cls.key = key
        record(cls)

    def message(self, finding: Finding, cause: Cause) -> str | tuple[str, str]:
        """Return the message, and the fix if it differs from the general advice of the code.

        Raises:
            NotImplementedError: Reasons of this class become no findings.
        """
        raise NotImplementedError(type(self).__name__)

    def skip_reason(self) -> str:
        """Return the text that explains why a placement leaves the node float.

        Raises:
            NotImplementedError: No placement records reasons of this class.
        """
        raise NotImplementedError(type(self).__name__)

    def names(self) -> Iterator[str]:
        """Yield every name of a node or tensor in the record once."""
        return iter(collect_names(self))


_EVIDENCE = tuple(Evidence)


@record
class Cause:
    """The reason that a finding reports, and further facts for its message.

    Attributes:
        reason: The reason.
        also: Further reasons that explain the finding.
        see: Other findings that explain this one, by code and node.
        fused: Whether the node of the finding is fused into the layer of a convolution.
    """

    reason: Reason
    also: tuple[Reason, ...] = ()
    see: tuple[tuple[FindingCode, str], ...] = ()
    fused: bool = False

    @property
    def refusal(self) -> Reason:
        """Former name of `reason`, for one version."""
        return self.reason


@dataclass(slots=True, repr=False)
class Finding:
    """A problem of a model, or a note about it, with its cause and its fix.

    Attributes:
        code: Kind of the finding, such as ``SKIP-FLOAT``.
        severity: Error, warning or note.
        node: ONNX node of the finding.
        causes: The reasons that the finding reports. All have the same code and node.
        evidence: Evidence of the rule that the finding rests on.
        words: Function that returns the message and the fix of a finding.
        id: Number of the finding in its prediction.
        target: Target of the prediction.
        way: Build method (trtexec, Python, ...), if the user named it.
        nodes: Nodes of the model that the causes name, ``node`` first.
        convolutions: Names of the convolutions that the finding concerns.
        values: Number of tensor elements that are converted because of the finding; None if shapes
            are unknown.
        automatic: Whether ``qdqtool fix`` can fix the finding.
        saves_ms: Largest time in milliseconds that the fix can save in one execution; None
            without a GPU, or if the fix saves no time.
        gains: Whether the fix improves this model.
        has_fast_int8: Whether the GPU of the prediction computes INT8 faster than FP16; None
            without a GPU.
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
    has_fast_int8: bool | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        place = f" at {self.node}" if self.node else ""
        return f"<Finding {self.code} ({self.severity}){place}>"

    @property
    def message(self) -> str:
        """One or two sentences about the problem and its causes."""
        return self.words(self)[0]

    @property
    def fix(self) -> str:
        """Instruction for fixing the problem; empty if no action is needed."""
        return self.words(self)[1]

    def as_json(self) -> Json:
        """Return the JSON fields."""
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


@dataclass(unsafe_hash=True, slots=True)  # not frozen, for speed as with Event
class TensorPrecision:
    """Name and data type of an input or output tensor of an engine layer."""

    tensor: str
    precision: Precision

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {"tensor": self.tensor, "precision": str(self.precision)}


@dataclass(slots=True)
class EngineLayer:
    """One layer of a predicted or built engine.

    Attributes:
        name: TensorRT's name of the layer, which lists the fused nodes.
        type: ``Convolution``, ``Deconvolution``, ``Pooling``, ``PointWise``, ``Conversion`` (a
            remaining Q or DQ), ``kgen`` (a Q or DQ that is a kernel of Myelin), ``Reformat``,
            ``Resize``, ``Scale``, ``Shuffle``, ...
        inputs: Input tensors: data input, then residual input.
        outputs: Output tensors.
        nodes: The ONNX nodes fused into the layer, with Q and DQ, in graph order.
        ms: Estimated milliseconds as a profile would show them; None without a GPU.
        layouts: Changes of the memory layout before the layer (tensor, from, to, milliseconds);
            empty without a GPU.
    """

    name: str
    type: str
    inputs: list[TensorPrecision] = field(default_factory=list)
    outputs: list[TensorPrecision] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    ms: float | None = None
    layouts: list[Json] = field(default_factory=list)

    def as_json(self) -> Json:
        """Return the JSON fields."""
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
    """Predicted outcome of one Conv, ConvTranspose, Gemm or MatMul.

    Attributes:
        index: Position of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name if the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm`` or ``MatMul``.
        weights: ``constant`` or ``computed`` (a MatMul of two activations).
        precision: Data type in which the convolution computes.
        inputs: Precision of the data input, then of the residual input if there is one.
        output: Precision of the layer's output.
        layer: The engine layer's name; None if the target has no named layers.
        fused: ONNX nodes that are fused into the convolution's layer, such as
            BatchNormalization, activation, Add or MaxPool; Q and DQ are not listed.
        findings: Ids of the findings about the convolution.
        evidence: Evidence of the outcome on the target.
        cases: Cases (``<pass>/<case>``) of all passes that changed the layer.
        activation: Operator of the fused pointwise activation; ``SiLU`` for a gated one.
        bare: Tensor before the fused activation or sum; the layer's output if nothing is fused.
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

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"<ConvOutcome {self.name}: {inputs} to {self.output}>"

    @property
    def is_int8(self) -> bool:
        """Whether the convolution computes in INT8 or UINT8."""
        return self.precision in BYTES

    @property
    def is_fp8(self) -> bool:
        """Whether the convolution computes in FP8."""
        return self.precision is Precision.FP8

    def computes_in(self, precision: Precision) -> bool:
        """Return whether the convolution computes in a type, INT8 (or UINT8) or FP8."""
        return self.is_fp8 if precision is Precision.FP8 else self.is_int8

    @property
    def is_quantized(self) -> bool:
        """Whether the convolution computes in INT8, UINT8 or FP8."""
        return self.precision in EIGHT_BITS

    @property
    def is_product(self) -> bool:
        """Whether the node is a matrix product: Gemm, MatMul or Einsum."""
        return self.op in ("Gemm", "MatMul", "Einsum")

    @property
    def int8_in_int8_out(self) -> bool:
        """Whether the convolution computes in INT8 or UINT8 and writes INT8."""
        return self.is_int8 and self.output == Precision.INT8

    @property
    def quantized_in_quantized_out(self) -> bool:
        """Whether the convolution computes in INT8, UINT8 or FP8 and writes INT8 or FP8."""
        return self.is_quantized and self.output in (Precision.INT8, Precision.FP8)

    def as_json(self) -> Json:
        """Return the JSON fields."""
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
    """The model that a result refers to.

    Attributes:
        path: Path of the file, empty for a model in memory.
        sha256: Hash of the file.
        opset: Version of the operators.
        nodes: Number of nodes.
        open_inputs: Shape of each input that leaves dimensions open: -1 for the batch, the size to
            build for elsewhere.
        has_bfloat16: Whether the model has bfloat16 tensors.
        subgraphs: Numbers of ``convolutions``, ``matrix_products`` and ``quantizers`` in branches
            of If and bodies of Loop and Scan, which are not analyzed; empty without any.
    """

    path: str
    sha256: str
    opset: int
    nodes: int
    open_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_bfloat16: bool = False
    subgraphs: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "path": self.path,
            "sha256": self.sha256,
            "opset": self.opset,
            "nodes": self.nodes,
            "open_inputs": {name: list(shape) for name, shape in self.open_inputs.items()},
            "subgraphs": dict(self.subgraphs),
        }


@dataclass(slots=True, repr=False)
class Prediction:
    """Prediction of the engine that TensorRT builds from a Q/DQ model.

    Attributes:
        model: The model.
        target: Name of the target.
        convolutions: Outcome of every Conv, ConvTranspose, Gemm and MatMul.
        layers: Layers of the engine.
        trace: Simulated lines of the optimizer's log.
        findings: Problems and notes, the most important first.
        refusals: Reasons why passes of the optimizer did not apply.
        conversions: Number of Q and DQ that remain as separate layers, including the Q of the
            network input; None if the target has no named layers.
        conversion_nodes: Names of the remaining Q and DQ.
        target_evidence: Evidence of the target's rules.
        time: Estimated time on a GPU (see ``qdqtool.timing.estimate``); None without a GPU.
        counts: Number of layers after each stage (``Original``, ``After Myelin optimization``), for
            the stages after which TensorRT logs this number.
        assumptions: Choices of TensorRT that the prediction cannot know.
        regions: Groups of layers that Myelin compiles on TensorRT 10 and later; their Q and DQ do
            not count as conversions. On TensorRT 8, attention and normalizations that Myelin may
            compile.
        float_products: Matrix products that ``convolutions`` does not list: products of two
            computed tensors without Q/DQ, and float Einsums.
        compute_capabilities: Compute capabilities (``8.6``) that the prediction holds for: those
            that TensorRT-RTX builds for, or that of the GPU. Empty if it holds for every GPU.
        notes: Notes about the images that activations were checked on.
        requested_target: TensorRT version as the user named it, such as ``10.3``. `target` names
            the rules.
        read: Files that were read; :meth:`save` does not overwrite them.
    """

    model: ModelInfo
    target: str
    convolutions: list[ConvOutcome] = field(default_factory=list)
    layers: list[EngineLayer] = field(default_factory=list)
    trace: list[Event] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    refusals: list[Reason] = field(default_factory=list)
    conversions: int | None = None
    conversion_nodes: list[str] = field(default_factory=list)
    target_evidence: str = ""
    time: Json | None = None
    counts: dict[str, int] = field(default_factory=dict)
    assumptions: list[Assumption] = field(default_factory=list)
    regions: list[MyelinRegion] = field(default_factory=list)
    float_products: list[str] = field(default_factory=list)
    compute_capabilities: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    requested_target: str = ""
    read: InputFiles | None = field(default=None, repr=False, compare=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that ``qdqtool predict --format json`` prints, atomically.

        Raises:
            QdqtoolError: ``path`` is an input file, its folder is missing, or it cannot be
                written.
        """
        save_answer(path, self.as_json(), self.read)

    def __repr__(self) -> str:
        summary = self.summary()
        fp8 = f"{summary['fp8']} FP8, " if summary["fp8"] else ""
        return (
            f"<Prediction {self.model.path or 'of a model in memory'} for {self.target}: "
            f"{summary['convolutions']} convolutions, {summary['int8']} INT8, {fp8}"
            f"{len(self.findings)} findings>"
        )

    @property
    def ok(self) -> bool:
        """Whether no finding is an error or a warning."""
        return all(f.severity == Severity.INFO for f in self.findings)

    def summary(self) -> Json:
        """Return the counts of convolutions, matrix products and conversions."""
        convs = self.convolutions
        int8 = [c for c in convs if c.is_int8]
        to_int8 = sum(c.int8_in_int8_out for c in int8)
        fp8 = [c for c in convs if c.is_fp8]
        fp8_to_fp8 = sum(c.quantized_in_quantized_out for c in fp8)
        products = [c for c in convs if c.is_product]
        int8_products = sum(c.is_int8 for c in products)
        fp8_products = sum(c.is_fp8 for c in products)
        all_products = len(products) + len(self.float_products)
        return {
            "convolutions": len(convs),
            "int8": len(int8),
            "int8_to_int8": to_int8,
            "int8_to_float": len(int8) - to_int8,
            "fp8": len(fp8),
            "fp8_to_fp8": fp8_to_fp8,
            "fp8_to_float": len(fp8) - fp8_to_fp8,
            "float": len(convs) - len(int8) - len(fp8),
            "conversions": self.conversions,
            "matrix_products": all_products,
            "matrix_products_int8": int8_products,
            "matrix_products_fp8": fp8_products,
            "matrix_products_float": all_products - int8_products - fp8_products,
        }

    @property
    def conversions_range(self) -> tuple[int, int] | None:
        """Minimum and maximum of conversions, over all assumptions and fusions of Myelin.

        None if the prediction has no number of conversions (see ``conversions``).
        """
        open_assumptions = [a for a in self.assumptions if not a.given]
        alternatives = [c for a in open_assumptions for c in a.alternatives.values()]
        numbers = [self.conversions, *(c.conversions for c in alternatives)]
        counts = [n for n in numbers if n is not None]
        if len(counts) < len(numbers):
            return None
        possible = sum(len(r.possible) for r in self.regions)
        return max(0, min(counts) - possible), max(counts) + sum(r.uncertain for r in self.regions)

    @property
    def engine_nodes(self) -> int:
        """Number of engine layers if each region of Myelin counts as one layer.

        TensorRT counts in this way unless the engine is built with detailed profiling verbosity
        (published for a DETR: 57 nodes in FP16, 72 with Q/DQ).
        """
        inside = {name for region in self.regions for name in (*region.nodes, *region.kernels)}
        outside = sum(inside.isdisjoint(layer.nodes) for layer in self.layers)
        return outside + len(self.regions)

    def convolution(self, name: str) -> ConvOutcome:
        """Return the outcome of the convolution with a name.

        Raises:
            KeyError: No convolution has this name.
        """
        for conv in self.convolutions:
            if conv.name == name:
                return conv
        raise KeyError(brief(name))

    @property
    def conversions_ms(self) -> float | None:
        """Milliseconds of the remaining Q and DQ, as a profile shows them; None without a GPU."""
        times = [layer.ms for layer in self.layers if layer.type == "Conversion"]
        return None if self.time is None else sum(ms or 0.0 for ms in times)

    def findings_by_code(self) -> Counter[str]:
        """Count the findings of each code."""
        return Counter(f.code for f in self.findings)

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "schema": PREDICTION_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.model.as_json(),
            "target": self.target,
            "requested_target": self.requested_target,
            "compute_capabilities": list(self.compute_capabilities),
            "target_evidence": self.target_evidence,
            "summary": {
                **self.summary(),
                "conversions_range": self.conversions_range,
                "engine_nodes": self.engine_nodes,
            },
            "convolutions": [c.as_json() for c in self.convolutions],
            "layers": [layer.as_json() for layer in self.layers],
            "conversions": list(self.conversion_nodes),
            "trace": [e.as_json() for e in self.trace],
            "findings": [f.as_json() for f in self.findings],
            "counts": dict(self.counts),
            "assumptions": [a.as_json() for a in self.assumptions],
            "regions": [r.as_json() for r in self.regions],
            "float_products": list(self.float_products),
            "notes": list(self.notes),
            **({"time": self.time} if self.time is not None else {}),
        }


@dataclass(slots=True)
class QuantizedTensor:
    """A tensor with an inserted Q/DQ pair.

    Attributes:
        tensor: Name of the tensor in the input model.
        scale: Float, in units of the tensor per integer step; a list for per-channel weights.
        method: How the range was chosen (``mse``, ``max``, ``percentile``, ``entropy``,
            ``weights-max``, ...).
        group: Index of the scale group; None if no other tensor shares the scale.
        node: Name of the inserted QuantizeLinear.
    """

    tensor: str
    scale: float | list[float]
    method: str
    group: int | None
    node: str

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            name: getattr(self, name) for name in ("tensor", "scale", "method", "group", "node")
        }

"""The prediction of an engine, and its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qdqtool.errors import shorten_text
from qdqtool.evidence import Evidence
from qdqtool.ir.precision import BYTES, EIGHT_BITS, Precision
from qdqtool.reasons.finding import Finding, Reason, Severity, list_as_json, name_rejection
from qdqtool.trt.targets import Target, strongly_typed, target_named
from qdqtool.trt.trace import Event
from qdqtool.util.files import InputFiles, SavableResult
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    from qdqtool.ir.input_shapes import ModelInfo

PREDICTION_SCHEMA = "qdqtool/prediction/1"


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
        uncertain: Number of Qs in ``fused`` that may be conversions instead.
        uncertain_nodes: Names of these Qs.
        possible: Conversions of the engine that may be part of the region instead. Empty except for
            TensorRT 8, whose logs do not show the regions.
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
    uncertain_nodes: list[str] = field(default_factory=list)
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
            "uncertain_nodes": list(self.uncertain_nodes),
            "possible": list(self.possible),
            "matrix_products": self.products,
            "matrix_products_int8": self.int8_products,
            "matrix_products_fp8": self.fp8_products,
            "softmax": self.softmaxes,
            "normalizations": self.norms,
        }


@dataclass(frozen=True, slots=True)
class AssumptionCounts:
    """Counts of a prediction that depend on an assumption.

    Attributes:
        int8: Convolutions that compute in INT8.
        int8_to_int8: Convolutions that compute in INT8 and write INT8.
        conversions: Q and DQ that remain as layers; None if they are not predicted.
        fp8: Convolutions that compute in FP8.
        fp8_to_fp8: Convolutions that compute in FP8 and write FP8.
        conversion_nodes: Names of the remaining Q and DQ.
    """

    int8: int
    int8_to_int8: int
    conversions: int | None
    fp8: int = 0
    fp8_to_fp8: int = 0
    conversion_nodes: tuple[str, ...] = field(default=(), compare=False)

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
        alternatives: Counts of the prediction for each other value.
        places: ONNX nodes (the Adds) that the choice concerns.
        given: Whether the user chose the value, or a build showed it.
        why: Reason why the value is assumed: the evidence for the target, or who chose the value.
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


# Not frozen: a frozen instance takes four times as long to create, and there are many.
@dataclass(unsafe_hash=True, slots=True)
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
        nodes: ONNX nodes that the layer computes, in the order of fusion. The Q and DQ that the
            layer has absorbed may be missing.
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


@dataclass(slots=True, repr=False)
class ConvOutcome:
    """Predicted outcome of one convolution or matrix product.

    Attributes:
        index: Position of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name if the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm``, ``MatMul``, or ``Einsum`` (TensorRT-RTX only).
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
        bare: Tensor before the fused activation or sum; the layer's output if neither is fused.
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
        """Return whether the convolution computes in `precision`, which is INT8 or FP8.

        UINT8 counts as INT8.
        """
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


@dataclass(slots=True, repr=False)
class Prediction(SavableResult):
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
        assumptions: Choices of TensorRT that cannot be predicted.
        regions: Groups of layers that Myelin compiles on TensorRT 10 and later; their Q and DQ do
            not count as conversions. On TensorRT 8, attention and normalizations that Myelin may
            compile.
        float_products: Matrix products that ``convolutions`` does not list: products of two
            computed tensors without Q/DQ, and float Einsums.
        compute_capabilities: Compute capabilities for which the prediction holds, such as ``8.6``:
            those for which TensorRT-RTX builds, or that of the GPU. Empty if the prediction holds
            for every GPU.
        notes: Notes about the images on which activations were checked, and on GPUs without times.
        requested_target: TensorRT version as the user named it, such as ``10.3``. `target` names
            the rules.
        times: Estimated times on several GPUs; None without a list of GPUs. Empty if TensorRT
            rejects the model.
        read: Files that were read; :meth:`save` does not overwrite them.
        head_nodes: Nodes of a detector's head that a quantizer should leave float.
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
    times: list[Json] | None = None
    read: InputFiles | None = field(default=None, repr=False, compare=False)
    head_nodes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        convs = [c for c in self.convolutions if not c.is_product]
        fp8 = sum(c.is_fp8 for c in convs)
        products = self.summary()["matrix_products"]
        counts = [
            format_count(len(convs), "convolution"),
            f"{sum(c.is_int8 for c in convs)} INT8",
            *([f"{fp8} FP8"] if fp8 else []),
            *([format_count(products, "matrix product")] if products else []),
            format_count(len(self.findings), "finding"),
        ]
        model = self.model.path or "of a model in memory"
        return f"<Prediction {model} for {self.target_title}: {', '.join(counts)}>"

    @property
    def named_target(self) -> Target:
        """The target of the version that the user named."""
        return target_named(self.requested_target or self.target)

    @property
    def target_title(self) -> str:
        """The target in words, with the version that the user named.

        Example: ``TensorRT 10.3, strongly typed``.
        """
        return self.choose_typing(self.named_target).title

    def choose_typing(self, target: Target) -> Target:
        """Return a target, strongly typed if the prediction is for a strongly typed network."""
        return strongly_typed(target) if target_named(self.target).strongly_typed else target

    @property
    def ok(self) -> bool:
        """Whether no finding is an error or a warning."""
        return all(f.severity == Severity.INFO for f in self.findings)

    def summary(self) -> Json:
        """Return the counts of convolutions, matrix products and conversions.

        The counts ``convolutions``, ``int8`` to ``fp8_to_float`` and ``float`` include the Gemm and
        MatMul nodes in ``convolutions``, unlike the text of ``predict``. ``matrix_products`` counts
        these nodes again, and also the float products in ``float_products``.
        """
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

    def count_bounds(self, name: str) -> tuple[int, int]:
        """Return the minimum and maximum of a count, depending on the open assumptions.

        These are the assumptions that neither the user nor a build has settled.

        Args:
            name: Field of :class:`AssumptionCounts` that is never None, such as ``int8_to_int8``.
        """
        alternatives = [c for a in self.assumptions if not a.given for c in a.alternatives.values()]
        counts = [self.summary()[name], *(getattr(c, name) for c in alternatives)]
        return min(counts), max(counts)

    @property
    def conversions_range(self) -> tuple[int, int] | None:
        """Minimum and maximum number of conversions in the engine.

        The number depends on what Myelin fuses, and on the assumptions that neither the user nor a
        build has settled. None if the prediction has no number of conversions (see
        ``conversions``).
        """
        open_assumptions = [a for a in self.assumptions if not a.given]
        alternatives = [c for a in open_assumptions for c in a.alternatives.values()]
        if self.conversions is None:
            return None
        others = [c.conversions for c in alternatives if c.conversions is not None]
        counts = [self.conversions, *others]
        possible = sum(len(r.possible) for r in self.regions)
        return max(0, min(counts) - possible), max(counts) + sum(r.uncertain for r in self.regions)

    @property
    def uncertain_conversions(self) -> list[str]:
        """Names of the Q and DQ of which it is unknown whether they are conversions.

        These are the reason for the range ``conversions_range``. Some may be in
        ``conversion_nodes``.
        """
        expected = set(self.conversion_nodes)
        names: list[str] = []
        for assumption in self.assumptions:
            for counts in () if assumption.given else assumption.alternatives.values():
                others = set(counts.conversion_nodes)
                names += (n for n in self.conversion_nodes if n not in others)
                names += (n for n in counts.conversion_nodes if n not in expected)
        for region in self.regions:
            names += (*region.possible, *region.uncertain_nodes)
        return list(dict.fromkeys(names))

    @property
    def engine_nodes(self) -> int:
        """Number of engine layers if each region of Myelin counts as one layer.

        TensorRT counts in this way unless the engine is built with detailed profiling verbosity
        (published for a DETR: 57 nodes in FP16, 72 with Q/DQ).
        """
        return self.layer_regions.count(None) + len(self.regions)

    @property
    def layer_regions(self) -> list[int | None]:
        """Index in ``regions`` of each layer's region of Myelin; None outside of regions."""
        region_of_node = {
            name: index
            for index, region in enumerate(self.regions)
            for name in (*region.nodes, *region.kernels)
        }
        return [
            next((region_of_node[name] for name in layer.nodes if name in region_of_node), None)
            for layer in self.layers
        ]

    def errors(self) -> list[Finding]:
        """Return the findings that are errors.

        The limits of a GPU are left out if an engine can be built for another GPU of `times`.
        """
        from qdqtool.reasons.gpus import GpuLimit  # imports numpy, which `--help` does not need

        errors = [f for f in self.findings if f.severity == Severity.ERROR]
        if any(time["supported"] for time in self.times or ()):
            return [f for f in errors if not isinstance(f.causes[0].reason, GpuLimit)]
        return errors

    @property
    def rejected(self) -> bool:
        """Whether TensorRT builds no engine because of an error in `findings`."""
        return bool(self.rejection)

    @property
    def rejection(self) -> str:
        """``will reject``, ``will probably reject``, or empty if TensorRT builds an engine."""
        return name_rejection(self.errors())

    def convolution(self, name: str) -> ConvOutcome:
        """Return the outcome of a convolution by its name.

        Raises:
            KeyError: No convolution has this name.
        """
        for conv in self.convolutions:
            if conv.name == name:
                return conv
        raise KeyError(shorten_text(name))

    @property
    def conversions_ms(self) -> float | None:
        """Milliseconds of the remaining Q and DQ, as a profile shows them; None without a GPU."""
        times = [layer.ms for layer in self.layers if layer.type == "Conversion"]
        return None if self.time is None else sum(ms or 0.0 for ms in times)

    def float_types(self, *, outputs: bool = True) -> frozenset[Precision]:
        """Return the float types that convolutions and matrix products compute in or write.

        Without `outputs`, these are only the types in which they compute.
        ``FLOAT`` stands for the type that the builder chooses if the types in the model do not
        decide. For a model with bfloat16, it is BF16.
        """
        types = {c.precision for c in self.convolutions if c.precision.is_float}
        if outputs:
            types |= {c.output for c in self.convolutions if c.output.is_float}
        if self.model.has_bfloat16:
            types = {Precision.BF16 if t == Precision.FLOAT else t for t in types}
        return frozenset(types)

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
            "layers": [
                layer.as_json() | ({} if region is None else {"region": region})
                for layer, region in zip(self.layers, self.layer_regions, strict=True)
            ],
            "conversions": list(self.conversion_nodes),
            "uncertain_conversions": self.uncertain_conversions,
            "rejected": self.rejected,
            "trace": [e.as_json() for e in self.trace],
            "findings": list_as_json(self.findings),
            "counts": dict(self.counts),
            "assumptions": [a.as_json() for a in self.assumptions],
            "regions": [r.as_json() for r in self.regions],
            "float_products": list(self.float_products),
            "notes": list(self.notes),
            **({"time": self.time} if self.time is not None else {}),
            **({"times": self.times} if self.times is not None else {}),
        }

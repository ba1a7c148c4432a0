"""Convolution by convolution: the prediction compared with the engine listing and the pass lines."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qdqtool.buildlog.agreement import ConvolutionCounts, Described, Mismatch, MismatchKind
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.model.graph import Model, Node
from qdqtool.model.operators import WEIGHTED
from qdqtool.model.qdq import is_qdq
from qdqtool.types import ConvOutcome, Json, Precision, Prediction
from qdqtool.verification.mapping import ATTENTION, PRODUCT, Mapper, in_myelin, product_rank, said_names

FLOAT = Precision.FP32
_SHORTENED = re.compile("(Cas|Rou)[tn]")  # 10.3 shortens the names of steps to three letters, other versions to four


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """What the compiler made of one Conv, ConvTranspose, Gemm or MatMul.

    Attributes:
        index: Place of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name where the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm`` or ``MatMul``.
        precision: The data type it multiplies in; UNKNOWN where the plan has no layer of its own for it (removed, or
            merged with an equal node).
        inputs: Types that its layer reads: the data input, and the second one where that is no constant.
        output: Type that its layer writes.
        layer: The engine layer's name; None where there is none.
    """

    index: int
    name: str
    op: str
    precision: Precision
    inputs: tuple[Precision, ...] = ()
    output: Precision = Precision.UNKNOWN
    layer: str | None = None

    def as_json(self) -> Json:
        return {
            "index": self.index,
            "name": self.name,
            "op": self.op,
            "precision": str(self.precision),
            "inputs": [str(p) for p in self.inputs],
            "output": str(self.output),
            "layer": self.layer,
        }


def built_nodes(model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str]) -> list[BuiltNode]:
    """One row for each Conv, ConvTranspose, Gemm and MatMul.

    Args:
        model: The model.
        layers: The engine's layers.
        names: Node index to the name that the node had in the build.
    """
    mapper = Mapper(model, layers, names)
    products = [n for n in model.nodes if n.op in WEIGHTED]
    inside = Counter(id(layer) for n in products for layer in {id(x): x for x, _ in mapper.places(n)}.values())
    # A generated kernel that computes several small products does not say which of them is in which type.
    crowded = {id(x) for x in layers if x.type == "kgen" and inside[id(x)] > 1 and ATTENTION not in x.name}
    return [
        _row(n.index, n.name, n.op, [layer for layer, _ in mapper.places(n) if id(layer) not in crowded])
        for n in products
    ]


def _row(index: int, name: str, op: str, layers: list[BuiltLayer]) -> BuiltNode:
    layer = _choose(layers)
    if layer is None:
        return BuiltNode(index, name, op, Precision.UNKNOWN)
    data = [t.precision for t in layer.inputs]
    precision, output = computes_in(layer), writes(layer)
    return BuiltNode(index, name, op, precision, tuple(data[:1] if layer.constants else data[:2]), output, layer.name)


def writes(layer: BuiltLayer) -> Precision:
    """What a product's layer writes; a generated kernel writes what comes of the steps behind the product as well."""
    return Precision.UNKNOWN if layer.type == "kgen" or _widened(layer) else layer.output_precision


def _widened(layer: BuiltLayer) -> bool:
    """Whether a Cast to another float follows the product in a fused kernel: what it writes is not the product's."""
    product = PRODUCT.search(layer.name) if layer.type in ("runtime_fusion", "kgen") else None
    return product is not None and layer.name.startswith("Cast", product.end())


def _choose(layers: list[BuiltLayer]) -> BuiltLayer | None:
    """The layer that multiplies; the first of the most certain kind."""
    multiplying = [x for x in layers if product_rank(x) is not None]
    return min(multiplying, key=lambda x: product_rank(x) or 0, default=None)


def computes_in(layer: BuiltLayer) -> Precision:
    """The type in which a layer multiplies; of a classic layer that of its data input."""
    tensors = [t.precision for t in (*layer.inputs, *layer.constants)]
    floats = [p for p in tensors if p.is_float]
    if ATTENTION in layer.name:  # both of its products, where queries, keys and values (behind masks) have one type
        kinds = {t.precision for t in layer.inputs[-3:]}
        return kinds.pop() if len(kinds) == 1 else Precision.UNKNOWN
    if layer.type in ("correlation", "deconv", "gemm"):
        # Weights are the first constant, or the second input; a fused residual is a float input behind them.
        others = [t.precision for t in (*layer.inputs[1:2], *layer.constants[:1])]
        if not layer.inputs:
            others = [t.precision for t in layer.constants[1:2]]
        if tensors and not tensors[0].is_float and (tensors[0] in others or Precision.INT4 in others):
            return tensors[0]
        return next((p for p in tensors[:2] if p.is_float), layer.output_precision)
    if layer.type in ("runtime_fusion", "runtime_function", "kgen"):
        stored = [p for p in tensors if p in (Precision.INT8, Precision.FP8)]
        if stored and _integers_arrive(layer.name, (tensors or [FLOAT])[0]):
            return stored[0]
        if _widened(layer) and Precision.FP16 in floats:
            return Precision.FP16
        return layer.output_precision if layer.output_precision.is_float else (floats or [Precision.UNKNOWN])[0]
    return layer.input_precision


def _integers_arrive(name: str, first: Precision) -> bool:
    """Whether a fused kernel's product takes integers, read from the steps in its name and its first input's type.

    The Cast of a Q follows a Round, or is the first step where the kernel in front has rounded; that of a DQ is
    followed by the Mul with its scale. MulSum and slices are products of floats, written out.
    """
    product = PRODUCT.search(name)
    if product is None or product[1].startswith(("MulSum", "Slic")):
        return False
    steps = _SHORTENED.sub(r"\1", name[: product.start()].removeprefix("__myl_"))
    cast = steps.rfind("Cas")
    if cast < 0:
        return not first.is_float
    before, after = steps[:cast], steps[cast + len("Cas") :]
    return "Mul" not in after and (before.endswith("Rou") or (not before and first == Precision.FP32))


FUSING_INTO = "fusing"
DOUBLE = "QuantizeDoubleInputNodes"
CONTRADICTS = "the log contradicts itself"
_SHOWN = ("Add", "MaxPool")  # absorbed nodes whose names every version keeps in the layer's name


@dataclass
class BuiltConv:
    """What a build says of one convolution; None where it does not say."""

    precision: Precision | None = None
    inputs: list[Precision] | None = None
    output: Precision | None = None
    fused: list[str] | None = None
    layer: str = ""
    line: int = 0
    contradiction: str = ""

    def as_json(self) -> Described:
        return {
            "precision": None if self.precision is None else str(self.precision),
            "inputs": None if self.inputs is None else [str(p) for p in self.inputs],
            "output": None if self.output is None else str(self.output),
            "fused": self.fused,
            "layer": self.layer,
        }


@dataclass
class ConvComparison:
    """The counts of one comparison and its mismatches.

    Attributes:
        total: Convolutions predicted.
        agree: Those that the build confirms.
        unknown: Those of which the build does not say enough.
        unknown_names: Their names.
        mismatches: One for each of the rest.
    """

    total: int = 0
    agree: int = 0
    unknown: int = 0
    unknown_names: list[str] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def counts(self) -> ConvolutionCounts:
        return ConvolutionCounts(self.total, self.agree, self.unknown, tuple(self.unknown_names))


@dataclass
class PassLines:
    """What the pass lines say of the convolutions: the log's ground truth where the engine listing is missing.

    Attributes:
        inputs: Node to the line that quantizes its inputs.
        outputs: Node to the line that quantizes its output.
        complete: Whether the optimizer came to its end, so that what no line quantizes stays float.
        build: Whose lines they are.
        known: Names of the model's nodes.
    """

    build: Build
    known: frozenset[str]
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    @functools.cached_property
    def named(self) -> set[str] | None:
        """What the build names at all: of anything else it says nothing. None where it parses no nodes."""
        return said_names(self.build, self.known) if self.build.parse.nodes else None


def pass_lines(build: Build, mapper: Mapper) -> PassLines:
    """Reads the ``QuantizeDoubleInputNodes: fusing`` lines: node name to line number, input side and output side."""
    found = PassLines(build, mapper.known, complete=any("epilogue" in heading for heading, _ in build.headings))
    for event in build.trace:
        if event.kind != FUSING_INTO or event.pass_name != DOUBLE:
            continue
        node = next((n for n in map(mapper.node, _members(event.object)) if n is not None), None)
        if node is not None:
            side = found.inputs if event.subject.startswith("(") else found.outputs
            side.setdefault(node.name, event.line)
    return found


def _members(layer: str) -> list[str]:
    """The names that a fused layer's name may stand for: the whole of it, which may hold a plus, and its parts."""
    return [layer, *(part for side in layer.split(" || ") for part in side.split(" + "))]


def compare_convolutions(
    model: Model, prediction: Prediction, build: Build, mapper: Mapper, uncertain: Iterable[str] = ()
) -> ConvComparison:
    """Compares every convolution: data type, residual input, output, absorbed Add and MaxPool.

    Args:
        model: The model predicted.
        prediction: Its prediction.
        build: The build.
        mapper: The names of both.
        uncertain: Convolutions whose prediction rests on scales that are not known: always unknown.
    """
    lines = pass_lines(build, mapper)
    skip = set(uncertain)
    result = ConvComparison(total=len(prediction.convolutions))
    for conv in prediction.convolutions:
        node = model.node(conv.name)
        built = built_convolution(node, conv, build, mapper, lines)
        why = "" if conv.name in skip else _difference(model, conv, built)
        if why:
            why += _rule(prediction, conv)
            result.mismatches.append(
                Mismatch(MismatchKind.CONVOLUTION, conv.name, _said(conv), built.as_json(), why, built.line or None)
            )
        elif conv.name in skip or built.precision is None or built.output is None:
            result.unknown += 1
            result.unknown_names.append(conv.name)
        else:
            result.agree += 1
    return result


def _said(conv: ConvOutcome) -> Described:
    data = conv.as_json()
    return {key: data[key] for key in ("precision", "inputs", "output", "fused", "layer", "evidence")}


def built_convolution(
    node: Node, conv: ConvOutcome, build: Build, mapper: Mapper, lines: PassLines
) -> BuiltConv:
    """What the engine listing says of a convolution, or the pass lines where there is no listing."""
    place = mapper.layer_of(node) if not build.names_only else None
    built = BuiltConv() if place is None else _from_layer(node, conv, mapper, *place)
    in_line, out_line = lines.inputs.get(node.name), lines.outputs.get(node.name)
    built.line = built.line or in_line or out_line or 0
    if built.precision is not None:
        _check_against_lines(built, lines, in_line, out_line)
        return built
    if place is None and (
        in_line or (lines.complete and (lines.named is None or mapper.name(node) in lines.named))
    ):
        quantized = in_line is not None
        built.precision = Precision.INT8 if quantized else Precision.FLOAT
        built.inputs = None
        if quantized:
            built.output = Precision.INT8 if out_line is not None else Precision.FLOAT if lines.complete else None
        else:
            built.output = Precision.FLOAT
    return built


def _check_against_lines(built: BuiltConv, lines: PassLines, in_line: int | None, out_line: int | None) -> None:
    """The engine listing outranks the pass lines, but a log that says both things is not to be trusted."""
    if built.precision is None:
        return
    if in_line is not None and built.precision.is_float:
        built.contradiction = f"{CONTRADICTS}: line {in_line} quantizes it, the engine lists a float input"
    elif out_line is not None and built.output is not None and built.output.is_float:
        built.contradiction = f"{CONTRADICTS}: line {out_line} quantizes the output, the engine lists float"
    elif in_line is None and lines.complete and built.precision == Precision.INT8 and lines.inputs:
        built.contradiction = f"{CONTRADICTS}: the engine lists INT8, no pass line quantizes it"


def _from_layer(node: Node, conv: ConvOutcome, mapper: Mapper, layer: BuiltLayer, place: int) -> BuiltConv:
    if in_myelin(layer):
        return _from_kernel(layer, mapper)
    nodes = mapper.nodes(layer)
    merged = " || " in layer.name and len(layer.outputs) > 1
    output = layer.outputs[min(place, len(layer.outputs) - 1)].precision if layer.outputs else Precision.UNKNOWN
    precisions = [t.precision for t in layer.inputs]
    data = precisions[0] if precisions else Precision.UNKNOWN
    absorbed = [n.name for n in nodes if n.name != node.name and not is_qdq(n) and n.op != "Constant"]
    takes_residual = not merged and any(n.op == "Add" for n in nodes)
    inputs = precisions[:2] if takes_residual or len(conv.inputs) > 1 else precisions[:1]
    known = data != Precision.UNKNOWN
    return BuiltConv(
        precision=data if known else None,
        inputs=inputs if known and Precision.UNKNOWN not in inputs else None,
        output=output if output != Precision.UNKNOWN else None,
        fused=absorbed,
        layer=layer.name,
        line=layer.line,
    )


def _from_kernel(layer: BuiltLayer, mapper: Mapper) -> BuiltConv:
    """A kernel of Myelin shows in which type it multiplies and what it writes, and nothing where it holds two."""
    products = [n for n in mapper.nodes(layer) if n.op in WEIGHTED]
    if product_rank(layer) is None or len(products) > 1:
        return BuiltConv(layer=layer.name, line=layer.line)
    precision, output = computes_in(layer), writes(layer)
    return BuiltConv(
        precision=precision if precision != Precision.UNKNOWN else None,
        output=output if output != Precision.UNKNOWN else None,
        layer=layer.name,
        line=layer.line,
    )


def _difference(model: Model, conv: ConvOutcome, built: BuiltConv) -> str:
    """What differs, in words; an empty string when nothing that the build shows does."""
    if built.contradiction:
        return built.contradiction
    if built.precision is not None and not _agrees(conv.precision, built.precision):
        return f"predicted {_word(conv.precision)}, built {_word(built.precision)}"
    if built.output is not None and not _agrees(conv.output, built.output):
        return f"predicted {_word(conv.output)} output, built {_word(built.output)} output"
    if built.inputs is not None:
        if len(built.inputs) != len(conv.inputs):
            more = "takes a residual input" if len(conv.inputs) > len(built.inputs) else "takes no residual input"
            return f"predicted that it {more}, built otherwise"
        for mine, theirs in zip(conv.inputs[1:], built.inputs[1:], strict=True):
            if not _agrees(mine, theirs):
                return f"predicted {_word(mine)} residual, built {_word(theirs)} residual"
    if built.fused is not None and built.layer and " || " not in built.layer:
        return _fusion_difference(model, conv, built.fused)
    return ""


def _agrees(predicted: Precision, built: Precision) -> bool:
    return predicted.agrees(built) or (predicted == Precision.FLOAT and built.is_float)


def _fusion_difference(model: Model, conv: ConvOutcome, built: list[str]) -> str:
    for name in conv.fused:
        if name not in built and _op(model, name) in _SHOWN:
            return f"predicted that it absorbs {name}, the engine's layer does not"
    for name in built:
        if name not in conv.fused and _op(model, name) in _SHOWN:
            return f"the engine's layer absorbs {name}, which was not predicted"
    return ""


def _op(model: Model, name: str) -> str:
    try:
        return model.node(name).op
    except KeyError:
        return ""


def _word(precision: Precision) -> str:
    return "float" if precision == Precision.FLOAT else str(precision)


def _rule(prediction: Prediction, conv: ConvOutcome) -> str:
    """By which rule the prediction came about."""
    refusal = next((r for r in prediction.refusals if r.node == conv.name), None)
    if refusal is not None:
        return f" (predicted by {refusal.pass_name}: {refusal.reason})"
    name = conv.layer or conv.name
    fired = [e.pass_name for e in prediction.trace if e.kind == FUSING_INTO and conv.name in _members(e.object)]
    return f" (predicted by {fired[0]})" if fired else f" (predicted as layer {name})"

"""Convolution by convolution: the prediction compared with the engine listing and the pass lines."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qdqtool.buildlog.agreement import (
    ConvolutionCounts,
    Difference,
    Mismatch,
    MismatchKind,
    MismatchSide,
    Said,
)
from qdqtool.buildlog.names import NameSet, base_name, parse_layer_name
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import is_qdq
from qdqtool.ir.sizes import is_multiplication
from qdqtool.patterns.view import View
from qdqtool.trt.trace import FUSING_INTO
from qdqtool.types import ConvOutcome, Json, Precision, Prediction
from qdqtool.util.records import published

Place = tuple[BuiltLayer, int]
"""A layer, and which of the layers merged into it with ``||``."""

_PLAIN = re.compile(r"[^A-Za-z0-9_/]")
_ASIDE = ("TrainStation", "Constant", "DeviceToShapeHost", "ShapeHostToDevice", "signal", "wait")
# Layer types of Myelin that multiply, the most certain first. A kgen kernel is generated code: small matrix products
# end up in one, among the elementwise work around them.
_MULTIPLY = ("correlation", "deconv", "gemm", "runtime_fusion", "runtime_function")
#: The product inside a fused kernel's name, which lists its steps: MulMinMaxRounCastCorrMulAdd. One of a few columns is
#: written out, a slice, a product and a sum for each.
PRODUCT = re.compile(
    r"(?<=[a-z_])(Fc|Gemm|MatMul|MulSum|(?:Slic){2,4}(?:Mul){2,4}Add|Conv|Corr)(?=[A-Z_])"
)
_OWN = ("correlation", "deconv", "gemm")  # layers of one product
_LEFT_OUT = "Etc"  # in the name of a generated kernel of many steps
_GENERATED = (
    "fusion",
    "kgen",
)  # a fusion wraps a compiled product (``FcCas`` with a gemm's tactic) or generated code
#: In the name of a kernel that computes a whole attention: queries, keys and values are its inputs.
ATTENTION = "_mha_v"  # _gemm_mha_v2; _gemv_mha_v1 of one query


def trt_name(node: Node) -> str:
    """The name that TensorRT's parser gives to a node's layer."""
    return node.proto.name or f"node_of_{node.output}"


class Mapper:
    """Finds the engine layers of a node, and the nodes of an engine layer.

    Attributes:
        known: Every name of the model that a fused layer name may hold.
        layers: Engine layers that compute something: layout reformats, constants and host layers left out.
    """

    def __init__(
        self, model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str] | None = None
    ) -> None:
        """``names`` maps a node's index to its name in the build, where that is not the one that the parser gives."""
        given = self._given = {
            n.index: trt_name(n) if names is None else names[n.index] for n in model.nodes
        }
        self.known = NameSet(
            {
                *given.values(),
                *model.initializers,
                *(o for n in model.nodes if n.op == "Constant" for o in n.outputs),
            }
        )
        self._by_name = {given[n.index]: n for n in model.nodes}
        self._by_plain = {_PLAIN.sub("_", name): n for name, n in self._by_name.items()}
        self.layers = [layer for layer in layers if not is_aside(layer)]
        self._of_node: dict[int, list[Place]] = {}
        self._nodes: dict[
            int, list[Node]
        ] = {}  # by the layer's identity: many nodes may ask for those of one layer
        for layer in self.layers:
            groups = self._groups(layer)
            self._nodes[id(layer)] = [n for group in groups for n in group]
            for place, nodes in enumerate(groups):
                for node in nodes:
                    self._of_node.setdefault(node.index, []).append((layer, place))

    def node(self, name: str) -> Node | None:
        """The node behind a component of a layer name, Myelin's spelling (dots as underscores) included."""
        by_name = self._by_name
        return (
            by_name.get(name)
            or by_name.get(base_name(name))
            or self._by_plain.get(_PLAIN.sub("_", name))
        )

    def name(self, node: Node) -> str:
        """What the build calls a node."""
        return self._given[node.index]

    def nodes(self, layer: BuiltLayer) -> list[Node]:
        """The ONNX nodes that one of :attr:`layers` stands for, in the order of its name; of other layers none."""
        return self._nodes.get(id(layer), [])

    def _groups(self, layer: BuiltLayer) -> list[list[Node]]:
        """The nodes of each layer merged with ``||``; one group otherwise."""
        if layer.onnx_names:
            return [[n for n in map(self.node, layer.onnx_names) if n is not None]]
        fused = parse_layer_name(layer.name, self.known)
        if fused.kind == "foreign":
            return []
        return [[n for n in map(self.node, group) if n is not None] for group in fused.alternatives]

    def places(self, node: Node) -> list[Place]:
        """Every layer that a node is a part of; Myelin spreads one over several."""
        return self._of_node.get(node.index, [])

    def layer_of(self, node: Node) -> Place | None:
        """The layer that computes a convolution, and its place among merged ones; None where none or several may."""
        found = self.places(node)
        if len(found) > 1:
            ranks = [product_rank(layer) for layer, _ in found]
            best = min((r for r in ranks if r is not None), default=None)
            found = [f for f, rank in zip(found, ranks, strict=True) if rank == best]
        return found[0] if len(found) == 1 else None


def in_myelin(layer: BuiltLayer) -> bool:
    """Whether a layer is a kernel inside Myelin, which names nothing of what it fuses in a classic way."""
    return layer.type in _GENERATED or layer.type in _MULTIPLY


def product_rank(layer: BuiltLayer) -> int | None:
    """How sure a sign of a product a layer is among those of one node, 0 the most; None where it multiplies nothing."""
    if layer.type in _MULTIPLY:
        return _MULTIPLY.index(layer.type)
    kind = layer.type.lower()
    if layer.is_convolution or "gemm" in kind or "matmul" in kind or "matrix" in kind:
        return len(_MULTIPLY)
    if layer.type not in _GENERATED:
        return None
    # A generated kernel's name, or a fusion's tactic, names the product inside.
    tactic = layer.tactic if layer.type == "fusion" else ""
    named = ATTENTION in layer.name or PRODUCT.search(layer.name) is not None or "gemm" in tactic
    return len(_MULTIPLY) + 1 + _GENERATED.index(layer.type) if named else None


def multiplies(layer: BuiltLayer) -> bool:
    """Whether a layer is a convolution or a product, and none that no prediction refers to."""
    return product_rank(layer) is not None and not is_aside(layer)


def is_aside(layer: BuiltLayer) -> bool:
    """A layer that no prediction refers to: layout reformats, constants, shape and host layers, Myelin blocks."""
    if layer.type in _ASIDE or (layer.type == "Myelin" and layer.name.startswith("{ForeignNode")):
        return True
    return parse_layer_name(layer.name).kind in (
        "reformat-input",
        "reformat-output",
        "reformat-network",
        "station",
        "foreign",
    )


def said_names(build: Build, known: NameSet) -> set[str]:
    """Every name of a node that a build prints: parse section, layers and pass lines."""
    said = {n.name for n in build.parse.nodes if n.name}
    said.update(
        f"node_of_{t.name}"
        for n in build.parse.nodes
        if not n.name
        for t in n.outputs
        if t is not None
    )
    said.update(name for layer in build.layers for name in layer.onnx_names)
    fused = {layer.name for layer in build.layers} | {
        end for e in build.trace for end in (e.subject, e.object)
    }
    return said.union(*(parse_layer_name(name, known).bases for name in fused))


def common_names(model: Model, build: Build) -> tuple[int, int]:
    """How many of the model's convolutions the build names, and how many there are; all its nodes where it has none."""
    wanted = [n for n in model.nodes if n.op in WEIGHTED] or list(model.nodes)
    said = said_names(build, NameSet(trt_name(n) for n in wanted))
    plain = (
        {_PLAIN.sub("_", s) for s in said}
        if any("_myl" in layer.name for layer in build.layers)
        else set()
    )
    found = sum(trt_name(n) in said or _PLAIN.sub("_", trt_name(n)) in plain for n in wanted)
    return found, len(wanted)


def contradicted_names(view: View, build: Build, mapper: Mapper) -> list[tuple[str, str, str]]:
    """Names that stand for one node in the model and for another in the build, as numbered names of two exports do.

    With each: what the model has there and what the build has: operator, shape of the weights, or their name.
    """
    found: dict[str, tuple[str, str]] = {}
    parsed = {n.name: n for n in build.parse.nodes if n.name}
    sources = {n.index: view.weights(n).source for n in view.weighted if view.weights(n).folded}
    shapes = {i: tuple(view.model.constant_shape(source) or ()) for i, source in sources.items()}
    owned = set(sources.values())
    for node in view.weighted:
        printed, shape = parsed.get(trt_name(node)), shapes.get(node.index, ())
        if printed is None:
            continue
        other = (
            printed.inputs[1].shape
            if len(printed.inputs) > 1 and printed.inputs[1] is not None
            else None
        )
        if printed.op != node.op:
            found[node.name] = (node.op, printed.op)
        elif shape and other and None not in other and tuple(other) != shape:
            found[node.name] = _by_x(shape), _by_x(other)
    for layer in mapper.layers:
        nodes = [n for n in mapper.nodes(layer) if n.op in WEIGHTED]
        if len(nodes) != 1 or product_rank(layer) is None or nodes[0].name in found:
            continue
        node, shape = nodes[0], shapes.get(nodes[0].index, ())
        weights = [name for name in layer.parse_name(mapper.known).bases if name in owned]
        if weights and node.index in sources and sources[node.index] not in weights:
            found[node.name] = sources[node.index], weights[0]
        maps, kernel = layer.extras.get("OutMaps"), layer.extras.get("Kernel")
        if (
            node.op == "Conv"
            and len(shape) > 2
            and maps
            and kernel
            and [shape[0], *shape[2:]] != [maps, *kernel]
        ):
            found[node.name] = _by_x((shape[0], *shape[2:])), _by_x((maps, *kernel))
    return [(name, *pair) for name, pair in found.items()]


def _by_x(shape: Iterable[object]) -> str:
    return "x".join(map(str, shape))


# Convolutions --------------------------------------------------------------------------------------------------------

FLOAT = Precision.FP32
_SHORTENED = re.compile(
    "(Cas|Rou)[tn]"
)  # 10.3 shortens the names of steps to three letters, other versions to four


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
        return published(self)


def built_nodes(
    model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str]
) -> list[BuiltNode]:
    """One row for each Conv, ConvTranspose, Gemm and MatMul; ``names`` as for :class:`Mapper`."""
    mapper = Mapper(model, layers, names)
    products = [n for n in model.nodes if is_multiplication(model, n)]
    placed = [{id(x): x for x, _ in mapper.places(n)}.values() for n in products]
    # A generated kernel that computes several small products does not say which of them is in which type. One with a
    # layer of its own is not computed there: the kernel takes in what stands behind it, or gives it its integers.
    inside = Counter(id(x) for at in placed if all(x.type not in _OWN for x in at) for x in at)
    crowded = {
        id(x) for x in layers if x.type == "kgen" and inside[id(x)] > 1 and ATTENTION not in x.name
    }
    return [
        _row(n, [x for x in at if id(x) not in crowded])
        for n, at in zip(products, placed, strict=True)
    ]


def _row(node: Node, layers: list[BuiltLayer]) -> BuiltNode:
    """By the layer that multiplies, the first of the most certain kind; else the one whose name leaves steps out."""
    multiplying = [x for x in layers if product_rank(x) is not None]
    unsaid = [x for x in layers if x.type == "kgen" and _LEFT_OUT in x.name]
    layer = min(
        multiplying,
        key=lambda x: product_rank(x) or 0,
        default=unsaid[0] if len(unsaid) == 1 else None,
    )
    if layer is None:
        return BuiltNode(node.index, node.name, node.op, Precision.UNKNOWN)
    data = tuple(t.precision for t in layer.inputs[: 1 if layer.constants else 2])
    return BuiltNode(
        node.index, node.name, node.op, computes_in(layer), data, writes(layer), layer.name
    )


def writes(layer: BuiltLayer) -> Precision:
    """What a product's layer writes; a generated kernel writes what comes of the steps behind the product as well."""
    return Precision.UNKNOWN if layer.type == "kgen" or _widened(layer) else layer.output_precision


def _widened(layer: BuiltLayer) -> bool:
    """Whether a Cast to another float follows the product in a fused kernel: what it writes is not the product's."""
    product = PRODUCT.search(layer.name) if layer.type in ("runtime_fusion", "kgen") else None
    return product is not None and layer.name.startswith("Cast", product.end())


def computes_in(layer: BuiltLayer) -> Precision:
    """The type in which a layer multiplies; of a classic layer that of its data input."""
    tensors = [t.precision for t in (*layer.inputs, *layer.constants)]
    floats = [p for p in tensors if p.is_float]
    if (
        ATTENTION in layer.name
    ):  # both of its products, where queries, keys and values (masks aside) have one type
        kinds = {
            t.precision for t in [t for t in layer.inputs if t.precision != Precision.BOOL][-3:]
        }
        return kinds.pop() if len(kinds) == 1 else Precision.UNKNOWN
    if layer.type in _OWN:
        # Weights are the first constant, or the second input; a fused residual is a float input behind them.
        others = [t.precision for t in (*layer.inputs[1:2], *layer.constants[:1])]
        if not layer.inputs:
            others = [t.precision for t in layer.constants[1:2]]
        if (
            tensors
            and not tensors[0].is_float
            and (tensors[0] in others or Precision.INT4 in others)
        ):
            return tensors[0]
        return next((p for p in tensors[:2] if p.is_float), layer.output_precision)
    if layer.type in ("runtime_fusion", "runtime_function", "kgen"):
        stored = [p for p in tensors if p in (Precision.INT8, Precision.FP8)]
        if stored and _LEFT_OUT in layer.name and PRODUCT.search(layer.name) is None:
            return Precision.UNKNOWN
        if stored and _integers_arrive(layer.name, (tensors or [FLOAT])[0]):
            return stored[0]
        if _widened(layer) and Precision.FP16 in floats:
            return Precision.FP16
        if (
            len({t.precision for t in layer.outputs}) > 1
        ):  # other nodes' results too, and which is whose is not said
            return floats[0] if len(set(floats)) == 1 else Precision.UNKNOWN
        return (
            layer.output_precision
            if layer.output_precision.is_float
            else (floats or [Precision.UNKNOWN])[0]
        )
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
    return "Mul" not in after and (
        before.endswith("Rou") or (not before and first == Precision.FP32)
    )


_LISTED = 100  # of what is fused; a damaged log has all convolutions in one layer, and each would list all others
_SHOWN = ("Add", "MaxPool")  # absorbed nodes whose names every version keeps in the layer's name


@dataclass
class BuiltConv:
    """What a build says of one convolution; None where it does not say. Of what is fused JSON has the first hundred."""

    precision: Precision | None = None
    inputs: list[Precision] | None = None
    output: Precision | None = None
    fused: list[str] | None = None
    layer: str = ""
    line: int = 0
    contradiction: Said | None = None

    def as_json(self) -> MismatchSide:
        told = published(self, "precision", "inputs", "output", "fused", "layer")
        return {**told, "fused": self.fused and self.fused[:_LISTED]}


class PassLines:
    """What the ``QuantizeDoubleInputNodes: fusing`` lines say of the convolutions, for builds without a listing.

    Attributes:
        inputs: Node to the line that quantizes its inputs.
        outputs: Node to the line that quantizes its output.
        complete: Whether the optimizer came to its end, so that what no line quantizes stays float.
    """

    def __init__(self, build: Build, mapper: Mapper) -> None:
        self._build, self._known = build, mapper.known
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.complete = any("epilogue" in heading for heading, _ in build.headings)
        for event in build.trace:
            if (event.pass_name, event.kind) == ("QuantizeDoubleInputNodes", FUSING_INTO):
                node = next(
                    (n for n in map(mapper.node, _members(event.object)) if n is not None), None
                )
                side = self.inputs if event.subject.startswith("(") else self.outputs
                if node is not None:
                    side.setdefault(node.name, event.line)

    @functools.cached_property
    def named(self) -> set[str] | None:
        """What the build names at all: of anything else it says nothing. None where it parses no nodes."""
        return said_names(self._build, self._known) if self._build.parse.nodes else None


def _members(layer: str) -> list[str]:
    """The names that a fused layer's name may stand for: the whole of it, which may hold a plus, and its parts."""
    return [layer, *(part for side in layer.split(" || ") for part in side.split(" + "))]


def compare_convolutions(
    model: Model,
    prediction: Prediction,
    build: Build,
    mapper: Mapper,
    uncertain: Iterable[str] = (),
) -> tuple[ConvolutionCounts, list[Mismatch]]:
    """Compares every convolution: data type, residual input, output, absorbed Add and MaxPool; counts and mismatches.

    Those whose prediction is ``uncertain``, for it rests on scales that are not known, are always unknown.
    """
    lines = PassLines(build, mapper)
    skip = set(uncertain)
    unknown: list[str] = []
    mismatches: list[Mismatch] = []
    rule = _rules(prediction)
    for conv in prediction.convolutions:
        node = model.node(conv.name)
        built = built_convolution(node, conv, build, mapper, lines)
        said = None if conv.name in skip else _difference(model, conv, built)
        if said is not None:
            told = published(conv, "precision", "inputs", "output", "fused", "layer", "evidence")
            mismatches.append(
                Mismatch(
                    MismatchKind.CONVOLUTION,
                    conv.name,
                    told,
                    built.as_json(),
                    *said,
                    built.line or None,
                    rule(conv),
                )
            )
        elif conv.name in skip or built.precision is None or built.output is None:
            unknown.append(conv.name)
    total = len(prediction.convolutions)
    agree = total - len(unknown) - len(mismatches)
    return ConvolutionCounts(total, agree, len(unknown), tuple(unknown)), mismatches


def built_convolution(
    node: Node, conv: ConvOutcome, build: Build, mapper: Mapper, lines: PassLines
) -> BuiltConv:
    """What the engine listing says of a convolution, or the pass lines where there is no listing.

    The listing outranks the lines, but a log that says both things is not to be trusted.
    """
    place = mapper.layer_of(node) if not build.names_only else None
    built = BuiltConv() if place is None else _from_layer(node, conv, mapper, *place)
    in_line, out_line = lines.inputs.get(node.name), lines.outputs.get(node.name)
    built.line = built.line or in_line or out_line or 0
    if built.precision is not None:
        if in_line is not None and built.precision.is_float:
            built.contradiction = Difference.LINE_AND_INPUT, (in_line,)
        elif out_line is not None and built.output is not None and built.output.is_float:
            built.contradiction = Difference.LINE_AND_OUTPUT, (out_line,)
        elif (
            in_line is None
            and lines.complete
            and built.precision == Precision.INT8
            and lines.inputs
        ):
            built.contradiction = Difference.NO_LINE, ()
    elif place is None and in_line is not None:
        built.precision = Precision.INT8
        built.output = (
            Precision.INT8 if out_line is not None else Precision.FLOAT if lines.complete else None
        )
    elif (
        place is None
        and lines.complete
        and (lines.named is None or mapper.name(node) in lines.named)
    ):
        built.precision = built.output = Precision.FLOAT
    return built


def _from_layer(
    node: Node, conv: ConvOutcome, mapper: Mapper, layer: BuiltLayer, place: int
) -> BuiltConv:
    nodes = mapper.nodes(layer)
    if in_myelin(
        layer
    ):  # shows in which type it multiplies and what it writes, and nothing where it holds two
        if product_rank(layer) is None or sum(n.op in WEIGHTED for n in nodes) > 1:
            return BuiltConv(layer=layer.name, line=layer.line)
        return BuiltConv(
            _known(computes_in(layer)),
            None,
            _known(writes(layer)),
            layer=layer.name,
            line=layer.line,
        )
    merged = " || " in layer.name and len(layer.outputs) > 1
    output = (
        layer.outputs[min(place, len(layer.outputs) - 1)].precision
        if layer.outputs
        else Precision.UNKNOWN
    )
    absorbed = [
        n.name for n in nodes if n.name != node.name and not is_qdq(n) and n.op != "Constant"
    ]
    takes_residual = not merged and any(n.op == "Add" for n in nodes)
    inputs = [
        t.precision for t in layer.inputs[: 2 if takes_residual or len(conv.inputs) > 1 else 1]
    ]
    shown = None if Precision.UNKNOWN in inputs or not inputs else inputs
    return BuiltConv(
        _known(layer.input_precision), shown, _known(output), absorbed, layer.name, layer.line
    )


def _known(precision: Precision) -> Precision | None:
    return None if precision == Precision.UNKNOWN else precision


def _difference(model: Model, conv: ConvOutcome, built: BuiltConv) -> Said | None:
    """What differs; None when nothing that the build shows does."""
    if built.contradiction is not None:
        return built.contradiction
    more = 0 if built.inputs is None else len(conv.inputs) - len(built.inputs)
    types = [
        (Difference.PRECISION, conv.precision, built.precision),
        (Difference.OUTPUT, conv.output, built.output),
    ]
    if built.inputs is not None and not more:
        types += [
            (Difference.RESIDUAL, *pair)
            for pair in zip(conv.inputs[1:], built.inputs[1:], strict=True)
        ]
    for what, mine, theirs in types:
        if theirs is not None and not mine.agrees(theirs):
            return what, (_word(mine), _word(theirs))
    if more:
        return Difference.TAKES_RESIDUAL if more > 0 else Difference.TAKES_NONE, ()
    if built.fused is not None and built.layer and " || " not in built.layer:
        for what, has, lacks in (
            (Difference.ABSORBS, conv.fused, built.fused),
            (Difference.ABSORBED, built.fused, conv.fused),
        ):
            name = next(
                (name for name in has if name not in lacks and _is_shown(model, name)), None
            )
            if name is not None:
                return what, (name,)
    return None


def _is_shown(model: Model, name: str) -> bool:
    with contextlib.suppress(KeyError):
        return model.node(name).op in _SHOWN
    return False


def _word(precision: Precision) -> str:
    return "float" if precision == Precision.FLOAT else str(precision)


def _rules(prediction: Prediction) -> Callable[[ConvOutcome], str]:
    """By which rule the prediction of a convolution came about."""
    refusals = {r.node: r for r in reversed(prediction.refusals)}  # of several the first
    fired = {
        name: e.pass_name
        for e in reversed(prediction.trace)
        if e.kind == FUSING_INTO
        for name in _members(e.object)
    }

    def rule(conv: ConvOutcome) -> str:
        refusal = refusals.get(conv.name)
        if refusal is not None:
            return f"by {refusal.pass_name}: {refusal.reason}"
        return (
            f"by {fired[conv.name]}"
            if conv.name in fired
            else f"as layer {conv.layer or conv.name}"
        )

    return rule

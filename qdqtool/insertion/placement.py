"""Which inputs of which nodes are quantized, and why the others are not.

Rules, all for TensorRT's explicit quantization (developer guide, "Explicit quantization"; builds seen with 8.0 to 8.5):

* data and constant weights of Conv, ConvTranspose, Gemm and MatMul; a convolution computes in INT8 only when both are;
* nothing between a convolution and its BatchNormalization or activation, and never the bias;
* of a residual Add that a bare convolution feeds and whose result is quantized next, the other (skip) input only:
  the Add then runs inside the convolution, INT8 in and INT8 out;
* both inputs of the two products of an attention, where that is asked for;
* a pooling that averages, where its result is quantized next and no float node reads its input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.findings.left_float import (
    PLACEMENT,
    Excluded,
    FloatForAccuracy,
    InBody,
    InputFloat,
    KeptByPreset,
    NoNeighbour,
    OtherDomain,
    Part,
    ProductInEinsum,
    ResidualLeft,
    ResultFloat,
    SkippedNode,
    SmallConvolution,
    Unfit,
    UnfitInput,
    Unwritten,
    WeightsRank,
    WeightsType,
    nothing_to_quantize,
)
from qdqtool.findings.lint.operators import depthwise, large_kernel
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.prepare import Products
from qdqtool.insertion.structure import (
    branch_lengths,
    commuting_outputs,
    has_only_quantized_consumers,
    walk_tensors,
    weight_scale_axis,
)
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED, LayerKind, is_sum, operator_of, pooling_type
from qdqtool.ir.qdq import QUANTIZABLE, is_sparse
from qdqtool.ir.sizes import contraction
from qdqtool.patterns.heads import (
    convolutions_upstream,
    find_attentions,
    find_coordinates,
    find_head,
)
from qdqtool.patterns.pointwise import activation_outputs
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import DOMAINS, nested_graphs
from qdqtool.trt import fault_checks
from qdqtool.trt.float_fusions import find_float_fusions
from qdqtool.types import Refusal
from qdqtool.util.checks import compile_pattern
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import Parameter, said

_DETECTOR = 2  # last convolutions that make a network without a DFL a detector
_Around = tuple[list[int], Refusal | None]
"""Input positions to quantize; or none, and where that is worth saying the reason."""


@dataclass(frozen=True)
class PlacementRules:
    """What the user and the target choose.

    Attributes:
        head: ``box``, ``float`` or ``none``, see :mod:`qdqtool.options`.
        residual: What of a residual Add is quantized: ``skip`` the input that does not come from the convolution,
            ``both``, ``none``; ``auto`` takes ``skip`` behind a bare convolution and ``residual_after_activation``
            where an activation (SiLU in C2f) is between convolution and Add.
        residual_after_activation: The target's choice for ``auto``; ``none`` goes for bare convolutions as well.
        exclude: Patterns (``re.search`` on the node's name) of nodes to leave float.
        include: Patterns of nodes to quantize although the head preset or the small-convolution rule leaves them.
        exclude_ops: Operator types to leave float.
        transposed: Whether the target runs ConvTranspose in INT8.
        transposed_per_channel: Whether its ConvTranspose takes a weight scale for each output channel.
        floats: Names of nodes to leave float for accuracy; other than a pattern, a name may fit no node.
        quantized: Names of nodes to quantize as ``include`` does.
        attention: ``int8`` quantizes both inputs of the two products of an attention, ``float`` none.
        failing: Forms of convolutions that builds for the target failed on, to leave float: classes of their refusals.
    """

    head: str = PlacementOptions.head
    residual: str = PlacementOptions.residual
    residual_after_activation: str = "both"
    exclude: Sequence[str] = ()
    include: Sequence[str] = ()
    exclude_ops: Sequence[str] = ()
    transposed: bool = True
    transposed_per_channel: bool = False
    floats: Collection[str] = ()
    quantized: Collection[str] = ()
    attention: str = PlacementOptions.attention
    failing: Collection[type[Refusal]] = ()


@dataclass(frozen=True)
class QuantizedInput:
    """A node input that will read a dequantized tensor; ``role`` is ``input`` or ``residual``."""

    node: Node
    position: int
    role: str


@dataclass(frozen=True)
class WeightSite:
    """Constant weights to quantize; ``axis`` is that of the output channels, None for one scale for all."""

    node: Node
    tensor: str
    axis: int | None


@dataclass
class Placement:
    """The decision. ``readers`` goes from a tensor to the inputs that read it dequantized, in graph order."""

    inputs: dict[str, list[QuantizedInput]] = field(default_factory=dict)
    weights: list[WeightSite] = field(default_factory=list)
    skipped: list[SkippedNode] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def indices(self, tensor: str) -> set[int]:
        """The nodes that will read a tensor dequantized."""
        return {r.node.index for r in self.inputs.get(tensor, ())}

    def add(self, tensor: str, node: Node, position: int, role: str = "input") -> None:
        self.inputs.setdefault(tensor, []).append(QuantizedInput(node, position, role))


def place(model: Model, rules: PlacementRules) -> Placement:
    """Decides what is quantized in a float model.

    Raises:
        QdqtoolError: A pattern is not a regular expression or matches nothing, or weights hold NaN or infinity.
        ModelError: The model has no convolution or other weighted node at all.
    """
    chosen = _Choice(model, rules)
    placement = Placement()
    if rules.attention == "int8" and not chosen.attention:
        placement.notes.append(Remark.NO_ATTENTION())
    preset = {
        i: part
        for i, part in find_head_float_nodes(model, rules.head).items()
        if i not in chosen.attention
    }
    if rules.attention != "int8":
        preset |= dict.fromkeys(chosen.attention, Part.ATTENTION)
    products = Products(model)
    for node in model.ordered:
        if node.op in WEIGHTED:
            _place_weighted(model, node, placement, chosen, preset)
        elif (known := contraction(model, node)) is not None and node.output in chosen.varying:
            if isinstance(why := products.find(node, known), Unwritten):
                placement.skipped.append(SkippedNode(ProductInEinsum(PLACEMENT, node.name, why)))
    for node in model.ordered:
        if count := sum(n.op_type in WEIGHTED for g in nested_graphs([node.proto]) for n in g.node):
            placement.skipped.append(SkippedNode(InBody(PLACEMENT, node.name, count)))
    if not any(n.op in WEIGHTED for n in model.nodes):
        raise nothing_to_quantize(placement.skipped, model.path or "model", found=False)
    _place_around(model, placement, chosen)
    roles = {r.role for readers in placement.inputs.values() for r in readers}
    if rules.residual in ("skip", "both") and "residual" not in roles:
        placement.notes.append(Remark.NO_RESIDUAL(residual=rules.residual))
    order = {n.index: i for i, n in enumerate(model.ordered)}
    for readers in placement.inputs.values():
        readers.sort(key=lambda r: (order[r.node.index], r.position))
    return placement


def find_head_float_nodes(model: Model, choice: str) -> dict[int, Part]:
    """Nodes that the head preset leaves float, with what they are; ``choice`` is that of the option ``head``."""
    if choice == "none":
        return {}
    head = find_head(model)
    places = find_coordinates(model, head.finals)
    result: dict[int, Part] = {}
    for nodes, what in (
        (head.boxes, Part.BOX),
        (head.dfl, Part.DFL),
        (places.producers, Part.PLACES),
        (places.mlps, Part.MLP),
        (places.consumers, Part.REFERENCE),
    ):
        result.update(dict.fromkeys(nodes, what))
    if choice == "box" and not head.dfl:
        ends = [
            i
            for i in sorted(head.finals)
            if operator_of(model.nodes[i]).kind == LayerKind.CONVOLUTION
        ]
        if len(ends) >= _DETECTOR:
            result.update(dict.fromkeys(ends, Part.DETECTOR))
    if choice == "float":
        for index in sorted((head.finals | places.scores) - result.keys()):
            result[index] = Part.SCORES if index in places.scores - head.finals else Part.LAST
    return result


def is_average_pooling(model: Model, node: Node) -> bool:
    """Whether a node is a pooling that averages, or a reduction that TensorRT turns into one."""
    known = operator_of(node)
    return known.averages and (
        known.kind == LayerKind.POOLING or pooling_type(model, node) is not None
    )


def can_be_quantized(model: Model, node: Node) -> bool:
    """Whether placement decides about a node at all: weights, averaging poolings and sums of two tensors."""
    return (
        operator_of(node).weights is not None
        or is_average_pooling(model, node)
        or (is_sum(node) and len(node.inputs) == 2)
    )


class _Choice:
    """The user's patterns, checked against the model."""

    def __init__(self, model: Model, rules: PlacementRules) -> None:
        self.rules = rules
        candidates = [n for n in model.nodes if can_be_quantized(model, n)]
        self.excluded = _matches(candidates, rules.exclude, "exclude")
        self.included = _matches(
            [n for n in candidates if n.op in WEIGHTED], rules.include, "include"
        )
        present = {n.op.lower() for n in model.nodes}
        for op in rules.exclude_ops:
            if op.lower() not in present:
                raise QdqtoolError(
                    said("{`exclude_op`} {op}: the model has no such operator", op=op),
                    code="no-match",
                    parameter="exclude_op",
                )
            if op.lower() not in {n.op.lower() for n in candidates}:
                kinds = ", ".join(sorted({n.op for n in candidates})) or "none"
                raise QdqtoolError(
                    said(
                        "{`exclude_op`} {op}: never quantized anyway; what could be is {kinds}",
                        op=op,
                        kinds=kinds,
                    ),
                    code="never-quantized",
                    parameter="exclude_op",
                )
        self.excluded_ops = {op.lower() for op in rules.exclude_ops}
        self.varying = View(model).varying
        self.attention = {n.index for a in find_attentions(model) for n in (a.scores, a.values)}

    def refusal(self, node: Node) -> Refusal | None:
        """Why the user wants a node float."""
        if node.index in self.excluded:
            return Excluded(PLACEMENT, node.name, "exclude", self.excluded[node.index])
        if node.op.lower() in self.excluded_ops:
            return Excluded(PLACEMENT, node.name, "exclude_op", node.op)
        return FloatForAccuracy(PLACEMENT, node.name) if node.name in self.rules.floats else None

    def is_included(self, node: Node) -> bool:
        """Whether no preset is to leave a node float."""
        return node.index in self.included or node.name in self.rules.quantized


def _matches(nodes: Iterable[Node], patterns: Sequence[str], parameter: str) -> dict[int, str]:
    nodes = list(nodes)
    result: dict[int, str] = {}
    for pattern in patterns:
        given = said("{parameter} {pattern!r}", parameter=Parameter(parameter), pattern=pattern)
        compiled = compile_pattern(pattern, given)
        found = [n for n in nodes if compiled.search(n.name)]
        if not found:
            example = said("; names look like '{name}'", name=nodes[0].name) if nodes else ""
            raise QdqtoolError(
                said(
                    "{given}: matches no node that could be quantized{example}",
                    given=given,
                    example=example,
                ),
                code="no-match",
                parameter=parameter,
            )
        for node in found:
            result.setdefault(node.index, pattern)
    return result


def _place_weighted(
    model: Model, node: Node, placement: Placement, chosen: _Choice, preset: dict[int, Part]
) -> None:
    product = node.index in chosen.attention  # which has no weights: both inputs are quantized
    refusal = chosen.refusal(node)
    if refusal is None and not product:
        refusal = _impossible(model, node, chosen.rules, chosen.varying)
    if refusal is None and not chosen.is_included(node):
        kept = preset.get(node.index)
        refusal = (
            KeptByPreset(PLACEMENT, node.name, kept)
            if kept is not None
            else (_small(model, node) or _failing(model, node, chosen.rules))
        )
    if refusal is not None:
        placement.skipped.append(SkippedNode(refusal))
        return
    if product:
        for position, tensor in enumerate(node.inputs):
            placement.add(tensor, node, position)
        return
    weight = node.input(1)
    value = model.constant(weight)
    assert value is not None
    if not np.isfinite(value).all():
        raise ModelError(
            said(
                "the weights '{weight}' of node '{name}' hold NaN or infinity; export the model again, "
                "or leave the node float with {`exclude`}",
                weight=weight,
                name=node.name,
            ),
            model.path or "model",
            code="not-finite",
            node=node.name,
        )
    placement.add(node.input(0), node, 0)
    axis = weight_scale_axis(node, value.ndim, chosen.rules.transposed_per_channel)
    placement.weights.append(WeightSite(node, weight, axis))


def _impossible(
    model: Model, node: Node, rules: PlacementRules, varying: frozenset[str]
) -> Refusal | None:
    """Why TensorRT cannot run a node in INT8."""
    data, weight, name = node.input(0), node.input(1), node.name
    if node.domain not in DOMAINS:
        return OtherDomain(PLACEMENT, name, node.domain)
    if data not in varying:
        return UnfitInput(PLACEMENT, name, Unfit.CONSTANT)
    constant = model.is_constant(weight)
    computed = fault_checks.weights_not_constant(
        PLACEMENT, name, weight, constant, is_sparse(model, weight)
    )
    if computed is not None:
        return computed
    if model.constant(weight) is None:
        return UnfitInput(PLACEMENT, name, Unfit.UNREADABLE)
    if model.elem_type(weight) not in QUANTIZABLE:
        return WeightsType(
            PLACEMENT, name, onnx.TensorProto.DataType.Name(model.elem_type(weight)).lower()
        )
    shape = model.constant_shape(weight)
    assert shape is not None
    if 0 in shape:
        return UnfitInput(PLACEMENT, name, Unfit.EMPTY)
    known = operator_of(node).kind
    if known == LayerKind.MATRIX_MULTIPLY and len(shape) != 2:
        return WeightsRank(PLACEMENT, name, len(shape))
    if known == LayerKind.MATRIX_MULTIPLY and node.integer("transA", 0):
        return UnfitInput(PLACEMENT, name, Unfit.TRANSPOSED)
    return None if rules.transposed else fault_checks.deconvolution_float(PLACEMENT, node)


def _small(model: Model, node: Node) -> Refusal | None:
    """ModelOpt's published rule for convolutions with fewer than 16 channels (``find_nodes_from_convs_to_exclude``)."""
    shape = model.constant_shape(node.input(1)) or ()
    if operator_of(node).kind != LayerKind.CONVOLUTION or len(shape) < 3:
        return None
    out, per_group, kernel = shape[0], shape[1], shape[2:]
    if out >= 16 and per_group >= 16:
        return None
    group = node.integer("group", 1)
    first = any(t in model.inputs for t in node.inputs)
    if group == 1 and (out % 8 == 0 or per_group % 8 == 0) and (first or max(out, per_group) >= 16):
        if len(set(kernel)) == 1:
            return None
    if group > 1 and out % 8 == 0 and all(k >= 3 for k in kernel):
        return None
    return SmallConvolution(PLACEMENT, node.name, per_group, out, tuple(kernel))


def _failing(model: Model, node: Node, rules: PlacementRules) -> Refusal | None:
    """Forms that the prediction advises to leave float: patch embeddings, depthwise ones into an Add or SiLU."""
    if operator_of(node).kind != LayerKind.CONVOLUTION:
        return None
    shape = model.constant_shape(node.input(1)) or ()
    found: list[Refusal | None] = [large_kernel(PLACEMENT, node, shape[2:])]
    layer = (
        find_float_fusions(model).layers.get(node.name)
        if shape[1:2] == (1,) and node.integer("group", 1) > 1
        else None
    )
    if layer is not None:
        activation = layer.fusion.activation
        readers = model.consumers(layer.fusion.tensor_before_activation or layer.out.source)
        found += depthwise(
            PLACEMENT, node, activation.op if activation is not None else "", readers
        )
    return next((r for r in found if isinstance(r, tuple(rules.failing))), None)


def _place_around(model: Model, placement: Placement, chosen: _Choice) -> None:
    """Residual Adds and averaging pools; one can make the next one worth while, so until nothing changes."""
    quantized = {r.node.index for readers in placement.inputs.values() for r in readers}
    open_nodes = [
        n
        for n in reversed(model.ordered)
        if operator_of(n).weights is None and can_be_quantized(model, n)
    ]
    refused: dict[int, Refusal | None] = {}
    changed = True
    while changed:
        changed = False
        for node in list(open_nodes):
            look, role = (_residual, "residual") if is_sum(node) else (_pool, "input")
            positions, why = look(model, node, placement, chosen.rules, quantized)
            asked = chosen.refusal(node) if positions else None
            refused[node.index] = asked or why
            if positions and asked is None:
                for position in positions:
                    placement.add(node.input(position), node, position, role)
                open_nodes.remove(node)
                quantized.add(node.index)
                changed = True
    for node in reversed(open_nodes):
        if (refusal := refused[node.index]) is not None:
            placement.skipped.append(SkippedNode(refusal))


def _residual(
    model: Model, node: Node, placement: Placement, rules: PlacementRules, quantized: set[int]
) -> _Around:
    inputs = node.inputs
    if inputs[0] == inputs[1] or any(model.is_constant(t) for t in inputs):
        return [], None
    behind = [find_float_fusions(model).add_inputs.get(t) for t in inputs]
    sides = [
        i
        for i, layer in enumerate(behind)
        if layer is not None and model.node(layer.nodes[0]).index in quantized
    ]
    if not sides:
        return [], None
    shapes = [model.shape(t) for t in inputs]
    if shapes[0] is not None and shapes[1] is not None and len(shapes[0]) != len(shapes[1]):
        return [], None
    if any(
        a is not None and b is not None and a != b
        for a, b in zip(shapes[0] or (), shapes[1] or (), strict=False)
    ):
        return [], None  # a broadcast, not a residual
    if not _leads_to_quantized(model, node.output, placement):
        return [], ResultFloat(PLACEMENT, node.name, False)
    if not has_only_quantized_consumers(model, node.output, placement.indices):
        return [], ResultFloat(PLACEMENT, node.name, True)
    side = sides[0]
    if len(sides) == 2:  # the longer way is the convolution's side, as ModelOpt chooses
        first, second = branch_lengths(model, inputs[0], inputs[1])
        side = 0 if first > second else 1
    bare = [
        i
        for i in sides
        if rules.residual == "auto"
        and inputs[i] in find_float_fusions(model).add_inputs_without_activation
    ]
    if bare and side not in bare:
        side = bare[0]
    choice = rules.residual
    if choice == "auto":
        choice = (
            "skip"
            if bare and rules.residual_after_activation != "none"
            else rules.residual_after_activation
        )
    if choice == "none":
        return [], ResidualLeft(PLACEMENT, node.name, rules.residual == "none")
    return [1 - side, side] if choice == "both" else [1 - side], None


def _pool(
    model: Model, node: Node, placement: Placement, rules: PlacementRules, quantized: set[int]
) -> _Around:
    if not _leads_to_quantized(model, node.output, placement):
        return [], None
    if not _comes_from_quantized(model, node.input(0), quantized):
        return [], NoNeighbour(PLACEMENT, node.name)
    tensor = node.input(0)
    if not has_only_quantized_consumers(
        model, tensor, lambda name: placement.indices(name) | {node.index}
    ):
        return [], InputFloat(PLACEMENT, node.name)
    return [0], None


def _leads_to_quantized(model: Model, tensor: str, placement: Placement) -> bool:
    """Whether a tensor, its activation, or what moves its values is quantized."""
    behind = walk_tensors(
        tensor, lambda t: (*activation_outputs(model, t), *commuting_outputs(model, t))
    )
    return any(name in placement.inputs for name in behind)


def _comes_from_quantized(model: Model, tensor: str, quantized: set[int]) -> bool:
    """Whether a quantized node makes a tensor, through activations, Adds and operators that move values."""

    def above(name: str) -> Sequence[str]:
        node = model.producer(name)
        return (
            ()
            if node is None
            or operator_of(node).weights is not None
            or is_average_pooling(model, node)
            else node.inputs
        )

    makers = (model.producer(name) for name in walk_tensors(tensor, above))
    return any(node is not None and node.index in quantized for node in makers)


_CALCULATES = (
    LayerKind.ELEMENTWISE,
    LayerKind.UNARY,
    LayerKind.MATRIX_MULTIPLY,
    LayerKind.CONVOLUTION,
)


def find_class_outputs(model: Model) -> tuple[str, ...]:
    """Class outputs [n, classes, h, w] of a detector, logits; empty where none are recognised."""
    head = find_head(model)
    found: dict[str, None] = {}
    for node in model.ordered:
        if node.op != "Sigmoid" or not _goes_out(model, node):
            continue
        for index in sorted(convolutions_upstream(model, node.input(0)) & head.finals - head.boxes):
            output = model.nodes[index].output
            shape = model.shape(output)
            if model.nodes[index].op == "Conv" and shape is not None and len(shape) == 4:
                found[output] = None
    return tuple(found)


def _goes_out(model: Model, node: Node) -> bool:
    """Whether nothing calculates with a node's output before it leaves the network or is sorted."""
    return not any(
        operator_of(reader).kind in _CALCULATES
        for name in walk_tensors(node.output, lambda t: commuting_outputs(model, t))
        for reader in model.consumers(name)
    )

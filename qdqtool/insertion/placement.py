"""Placement: the node inputs to quantize, and the reasons why other nodes remain float.

The rules are for TensorRT's explicit quantization (developer guide, "Explicit quantization"; builds
with TensorRT 8.0 to 8.5):

* Data and constant weights of Conv, ConvTranspose, Gemm and MatMul are quantized. A convolution
  computes in INT8 only if both its data and its weights are quantized.
* Tensors between a convolution and its BatchNormalization or activation are not quantized. Biases
  are not quantized.
* If a residual Add follows a convolution without activation, and the result of the Add is quantized
  downstream, only the other (skip) input of the Add is quantized. TensorRT then fuses the Add into
  the convolution, which reads and writes INT8.
* Both inputs of the two matrix products of an attention are quantized if the option `attention`
  selects this.
* The input of an average pooling is quantized if the result is quantized downstream, and if the
  input has no float consumers.
* With FP8, more nodes remain float than with INT8: ConvTranspose, convolutions with groups, few
  channels or large kernels, matrix products with a single row, average poolings, and attentions
  that TensorRT does not fuse. Sources: NVIDIA's release notes of TensorRT 10.6 and 10.16
  (attention; kernels of more than 32 elements), NVIDIA/TensorRT issue 4524 (groups), ModelOpt (few
  channels, single rows), and builds of TensorRT-RTX 1.7.1 for compute capabilities 8.9 and 12.0
  (kernels, ConvTranspose, attention).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.findings.lint.operators import find_depthwise_faults, find_large_kernel
from qdqtool.insertion.einsum import find_equivalent_matmul
from qdqtool.insertion.number_formats import FP8, INT8, NumberFormat
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.structure import (
    branch_lengths,
    commuting_outputs,
    describe_hidden_layers,
    has_only_quantized_consumers,
    walk_tensors,
)
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import (
    WEIGHTED,
    LayerKind,
    is_sum,
    operator_of,
    pooling_type,
    weight_scale_axis,
)
from qdqtool.ir.qdq import QUANTIZABLE, is_sparse
from qdqtool.ir.sizes import find_contraction
from qdqtool.patterns.heads import (
    Attention,
    convolutions_upstream,
    find_attentions,
    find_coordinates,
    find_head,
)
from qdqtool.patterns.pointwise import activation_outputs
from qdqtool.patterns.view import View
from qdqtool.proto.subgraphs import DOMAINS, nested_graphs
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.placement import (
    PLACEMENT,
    CustomDomain,
    EinsumObstacle,
    EinsumProduct,
    ExcludedNode,
    FloatNode,
    NonFloatWeights,
    PresetExclusion,
    PresetPart,
    SkipCause,
    SkippedNode,
    SmallConvolution,
    SubgraphLayers,
    UnsupportedWeightsRank,
    create_nothing_to_quantize_error,
)
from qdqtool.trt import fault_checks
from qdqtool.trt.float_fusions import find_float_fusions
from qdqtool.util.checks import compile_pattern
from qdqtool.util.notes import Note

_MIN_DETECTOR_OUTPUTS = 2  # minimum number of final convolutions of a detector that has no DFL
_MIN_CHANNELS = 16  # with fewer channels, TensorRT has fast INT8 kernels for some shapes only
_MIN_FP8_PRODUCT = 16  # minimum number of rows and columns of a product's weights in FP8
_InputChoice = tuple[list[int], Reason | None]
"""Positions of the inputs to quantize, and the reason for an empty list; None if not reported."""


@dataclass(frozen=True)
class PlacementRules:
    """Rules of a placement, from the user's options and the target.

    Attributes:
        head: ``box``, ``float`` or ``none``, as for :func:`qdqtool.insert`.
        residual: Inputs of a residual Add that are quantized: ``skip`` (the input that does not
            come from the convolution), ``both`` or ``none``. ``auto`` is ``skip`` after a
            convolution without activation, and `residual_after_activation` if an activation (SiLU
            in C2f) is between convolution and Add.
        residual_after_activation: ``skip``, ``both`` or ``none``, used if `residual` is ``auto``.
            Here ``none`` also applies to Adds after convolutions without activation.
        exclude: Regular expressions (``re.search`` on the node's name) that select nodes to leave
            float.
        include: Regular expressions that select nodes to quantize even if `head` or `attention`
            leaves them float.
        exclude_ops: Operator types to leave float.
        transposed: Whether the target runs ConvTranspose in INT8.
        transposed_per_channel: Whether the target accepts one weight scale for each output channel
            of a ConvTranspose.
        floats: Names of nodes to leave float for accuracy. Names that the model does not have are
            ignored.
        quantized: Names of nodes to quantize even if `head` or `attention` leaves them float.
        attention: ``int8`` and ``fp8`` quantize both inputs of the two products of an attention,
            ``float`` quantizes none. ``auto`` is ``float`` for INT8. For FP8, ``auto`` quantizes
            the attentions that the target fuses.
        max_head: Largest head size of an attention that the target fuses in FP8; 0 for none.
        number_format: Format of the quantized numbers.
        product_per_channel: Whether the target accepts one weight scale for each column of the
            weights of a matrix product (FP8: since 10.6, release notes).
        failing: Reason classes. Each describes a kind of convolution that the target failed to
            build. These convolutions remain float.
        tuned: Like `include`, for nodes that ``tune`` chose.
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
    max_head: int = 0
    number_format: NumberFormat = INT8
    product_per_channel: bool = True
    failing: Collection[type[Reason]] = ()
    tuned: Sequence[str] = ()


@dataclass(frozen=True)
class QuantizedInput:
    """Input of a node that will read a dequantized tensor.

    Attributes:
        node: The node.
        position: Index of the input.
        role: ``residual`` for inputs of an Add, else ``input``.
    """

    node: Node
    position: int
    role: str


@dataclass(frozen=True)
class WeightSite:
    """Constant weights to quantize, with a scale for each index along `axis`.

    If `axis` is None, the weights have one scale.
    """

    node: Node
    tensor: str
    axis: int | None


@dataclass
class Placement:
    """Tensors and weights to quantize.

    Attributes:
        inputs: Node inputs that will read a dequantized tensor, by tensor, in graph order.
        weights: Weights to quantize.
        skipped: Nodes that could have been quantized but remain float.
        notes: Notes on options without effect.
        number_format: Format of the quantized numbers.
    """

    inputs: dict[str, list[QuantizedInput]] = field(default_factory=dict)
    weights: list[WeightSite] = field(default_factory=list)
    skipped: list[SkippedNode] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    number_format: NumberFormat = INT8

    def consumer_indices(self, tensor: str) -> set[int]:
        """Return the indices of the nodes that will read the dequantized tensor."""
        return {consumer.node.index for consumer in self.inputs.get(tensor, ())}

    def add_input(self, tensor: str, node: Node, position: int, role: str = "input") -> None:
        """Record that an input of a node will read the dequantized tensor."""
        self.inputs.setdefault(tensor, []).append(QuantizedInput(node, position, role))

    def record_skipped(self, reason: Reason) -> None:
        """Record a node that remains float."""
        self.skipped.append(SkippedNode(reason))


def compute_placement(model: Model, rules: PlacementRules) -> Placement:
    """Return the tensors and weights to quantize in a float model; the model is not changed.

    Raises:
        QdqtoolError: A pattern is not a regular expression or matches nothing, or weights contain
            NaN or infinity.
        ModelError: The model has no node with weights, such as a convolution.
    """
    placer = _Placer(model, rules)
    placement = placer.placement
    placer.place_weighted_nodes()
    placer.skip_subgraph_layers()
    if not any(n.op in WEIGHTED for n in model.nodes):
        raise create_nothing_to_quantize_error(
            placement.skipped,
            model.path or "model",
            has_weights=False,
            hidden=describe_hidden_layers(model),
        )
    placer.place_adds_and_pools()
    placer.note_unused_options()
    for inputs in placement.inputs.values():
        inputs.sort(key=lambda c: (model.positions[c.node.index], c.position))
    return placement


def find_head_float_nodes(model: Model, preset: str) -> dict[int, PresetPart]:
    """Return the part of the head for each node that a preset leaves float, by node index.

    `preset` is the value of the option `head`.
    """
    if preset == "none":
        return {}
    head = find_head(model)
    coordinates = find_coordinates(model, head.finals)
    parts: dict[int, PresetPart] = {
        **dict.fromkeys(head.boxes, PresetPart.BOX),
        **dict.fromkeys(head.dfl, PresetPart.DFL),
        **dict.fromkeys(coordinates.producers, PresetPart.PLACES),
        **dict.fromkeys(coordinates.mlps, PresetPart.MLP),
        **dict.fromkeys(coordinates.consumers, PresetPart.REFERENCE),
    }
    if preset == "box" and not head.dfl:
        finals = [model.nodes[i] for i in sorted(head.finals)]
        outputs = [n.index for n in finals if operator_of(n).kind == LayerKind.CONVOLUTION]
        if len(outputs) >= _MIN_DETECTOR_OUTPUTS:
            parts.update(dict.fromkeys(outputs, PresetPart.DETECTOR))
    if preset == "float":
        scores = dict.fromkeys(coordinates.scores, PresetPart.SCORES)
        parts = scores | dict.fromkeys(head.finals, PresetPart.LAST) | parts
    return parts


def is_average_pooling(model: Model, node: Node) -> bool:
    """Return whether TensorRT runs a node (AveragePool, ReduceMean ...) as average pooling."""
    operator = operator_of(node)
    return operator.averages and (
        operator.kind == LayerKind.POOLING or pooling_type(model, node) is not None
    )


def can_be_quantized(model: Model, node: Node) -> bool:
    """Return whether a node is of a kind that placement considers.

    The kinds are nodes with weights, average poolings, and sums of two tensors.
    """
    return (
        operator_of(node).weights is not None
        or is_average_pooling(model, node)
        or (is_sum(node) and len(node.inputs) == 2)
    )


def _check_excluded_operator(op: str, model: Model, candidates: Sequence[Node]) -> None:
    operators = {n.op for n in candidates}
    if op.lower() in {candidate.lower() for candidate in operators}:
        return
    reason, code = "the model has no such operator", "no-match"
    if op.lower() in {n.op.lower() for n in model.nodes}:
        reason, code = "this operator always remains float", "never-quantized"
    choices = ", ".join(sorted(operators))
    if choices:
        choices = f", or name an operator that can be quantized: {choices}"
    raise QdqtoolError(
        f"`exclude_op` {op}: {reason}. Leave the option out{choices}",
        code=code,
        parameter="exclude_op",
    )


def _match_patterns(
    nodes: Sequence[Node], patterns: Sequence[str], parameter: str
) -> dict[int, str]:
    matches: dict[int, str] = {}
    for pattern in patterns:
        option = f"`{parameter}` {pattern!r}"
        compiled = compile_pattern(pattern, option)
        indices = [n.index for n in nodes if compiled.search(n.name)]
        if not indices:
            example = f"; names look like '{nodes[0].name}'" if nodes else ""
            raise QdqtoolError(
                f"{option} matches no node that can be quantized{example}",
                code="no-match",
                parameter=parameter,
            )
        for index in indices:
            matches.setdefault(index, pattern)
    return matches


class _Placer:
    def __init__(self, model: Model, rules: PlacementRules) -> None:
        self.placement = Placement(number_format=rules.number_format)
        self._model = model
        self._rules = rules
        candidates = [n for n in model.nodes if can_be_quantized(model, n)]
        weighted = [n for n in candidates if n.op in WEIGHTED]
        self._excluded = _match_patterns(candidates, rules.exclude, "exclude")
        self._included = _match_patterns(weighted, rules.include, "include")
        self._included |= _match_patterns(weighted, rules.tuned, "tuned")
        for op in rules.exclude_ops:
            _check_excluded_operator(op, model, candidates)
        self._excluded_ops = {op.lower() for op in rules.exclude_ops}
        self._view = View(model)
        attentions = find_attentions(model)
        self._attention = {n.index for a in attentions for n in (a.scores, a.values)}
        head = find_head_float_nodes(model, rules.head)
        self._preset = {i: part for i, part in head.items() if i not in self._attention}
        self._preset |= self._find_float_attention(attentions)
        self._quantized: set[int] = set()  # indices of nodes that have a quantized input

    def _find_float_attention(self, attentions: Sequence[Attention]) -> dict[int, PresetPart]:
        rules = self._rules
        parts: dict[int, PresetPart] = {}
        for attention in attentions:
            part: PresetPart | None = None
            if rules.attention == "float" or (rules.attention == "auto" and not self._is_fp8):
                part = PresetPart.ATTENTION
            elif rules.attention == "auto" and not _is_attention_fused(
                self._model, attention, rules.max_head
            ):
                part = PresetPart.ATTENTION_UNFUSED
            if part is not None:
                parts.update({attention.scores.index: part, attention.values.index: part})
        return parts

    @property
    def _is_fp8(self) -> bool:
        return self._rules.number_format == FP8

    def place_weighted_nodes(self) -> None:
        for node in self._model.ordered:
            if node.op in WEIGHTED:
                reason = self._find_float_reason(node)
                if reason is not None:
                    self.placement.record_skipped(reason)
                elif node.index in self._attention:
                    self._place_inputs(node, range(len(node.inputs)), "input")
                else:
                    self._place_inputs(node, [0], "input")
                    self._add_weight_site(node)
                continue
            product = find_contraction(self._model, node)
            if product is not None and node.output in self._view.varying:
                form = find_equivalent_matmul(self._view, node, product)
                if isinstance(form, EinsumObstacle):
                    self.placement.record_skipped(EinsumProduct(PLACEMENT, node.name, form))

    def skip_subgraph_layers(self) -> None:
        for node in self._model.ordered:
            bodies = nested_graphs([node.proto])
            count = sum(n.op_type in WEIGHTED for body in bodies for n in body.node)
            if count:
                self.placement.record_skipped(SubgraphLayers(PLACEMENT, node.name, count))

    def place_adds_and_pools(self) -> None:
        """Quantize residual Adds and average poolings, or record why they remain float.

        A node may become suitable when another node is quantized. The nodes are therefore visited
        until nothing changes.
        """
        unweighted = (n for n in reversed(self._model.ordered) if operator_of(n).weights is None)
        pending = [n for n in unweighted if can_be_quantized(self._model, n)]
        reasons: dict[int, Reason | None] = {}
        changed = True
        while changed:
            changed = False
            for node in list(pending):
                if is_sum(node):
                    role, (positions, reason) = "residual", self._choose_add_inputs(node)
                else:
                    role, (positions, reason) = "input", self._choose_pool_input(node)
                excluded = self._find_exclusion(node) if positions else None
                reasons[node.index] = excluded or reason
                if positions and excluded is None:
                    self._place_inputs(node, positions, role)
                    pending.remove(node)
                    changed = True
        for node in reversed(pending):
            reason = reasons[node.index]
            if reason is not None:
                self.placement.record_skipped(reason)

    def note_unused_options(self) -> None:
        notes, rules = self.placement.notes, self._rules
        if rules.attention in ("int8", "fp8") and not self._attention:
            notes.append(
                Note(
                    f"`attention={rules.attention!r}` has no effect: the model has no Softmax "
                    "between two MatMuls of activations",
                    code="no-attention",
                )
            )
        roles = {consumer.role for inputs in self.placement.inputs.values() for consumer in inputs}
        if rules.residual in ("skip", "both") and "residual" not in roles:
            notes.append(
                Note(
                    f"`residual={rules.residual!r}` has no effect: the model has no Add between a "
                    "convolution and a quantized consumer",
                    code="no-residual",
                    residual=rules.residual,
                )
            )

    def _place_inputs(self, node: Node, positions: Iterable[int], role: str) -> None:
        for position in positions:
            self.placement.add_input(node.input(position), node, position, role)
        self._quantized.add(node.index)

    def _add_weight_site(self, node: Node) -> None:
        model, name = self._model, node.input(1)
        weights = model.constant(name)
        assert weights is not None
        if not np.isfinite(weights).all():
            raise ModelError(
                f"the weights '{name}' of node '{node.name}' contain NaN or infinity; export the "
                "model again, or leave the node float with `exclude`",
                model.path or "model",
                code="not-finite",
                node=node.name,
            )
        axis = weight_scale_axis(node, weights.ndim, self._rules.transposed_per_channel)
        is_product = operator_of(node).kind == LayerKind.MATRIX_MULTIPLY
        if is_product and not self._rules.product_per_channel:
            axis = None
        self.placement.weights.append(WeightSite(node, name, axis))

    def _find_exclusion(self, node: Node) -> Reason | None:
        if node.index in self._excluded:
            return ExcludedNode(PLACEMENT, node.name, "exclude", self._excluded[node.index])
        if node.op.lower() in self._excluded_ops:
            return ExcludedNode(PLACEMENT, node.name, "exclude_op", node.op)
        if node.name not in self._rules.floats:
            return None
        return FloatNode(PLACEMENT, node.name, SkipCause.ACCURACY)

    def _find_float_reason(self, node: Node) -> Reason | None:
        reason = self._find_exclusion(node)
        if reason is None and node.index not in self._attention:
            reason = self._find_input_fault(node) or self._find_weight_fault(node)
        is_included = node.index in self._included or node.name in self._rules.quantized
        if reason is not None or is_included:
            return reason
        if node.index in self._preset:
            return PresetExclusion(PLACEMENT, node.name, self._preset[node.index])
        if self._is_fp8:
            return find_fp8_obstacle(self._model, node)
        return self._find_slow_shape(node) or self._find_failing_form(node)

    def _find_input_fault(self, node: Node) -> Reason | None:
        model, name, weights = self._model, node.name, node.input(1)
        if node.domain not in DOMAINS:
            return CustomDomain(PLACEMENT, name, node.domain)
        if node.input(0) not in self._view.varying:
            return FloatNode(PLACEMENT, name, SkipCause.CONSTANT_INPUT)
        is_constant = model.is_constant(weights)
        computed = fault_checks.check_weights_constant(
            PLACEMENT, name, weights, is_constant, is_sparse(model, weights)
        )
        if computed is not None:
            return computed
        if model.constant(weights) is None:
            return FloatNode(PLACEMENT, name, SkipCause.UNREADABLE_WEIGHTS)
        return None

    def _find_weight_fault(self, node: Node) -> Reason | None:
        name, weights = node.name, node.input(1)
        element_type = self._model.elem_type(weights)
        if element_type not in QUANTIZABLE:
            type_name = onnx.TensorProto.DataType.Name(element_type).lower()
            return NonFloatWeights(PLACEMENT, name, type_name)
        shape = self._model.constant_shape(weights)
        assert shape is not None
        if 0 in shape:
            return FloatNode(PLACEMENT, name, SkipCause.EMPTY_WEIGHTS)
        if operator_of(node).kind == LayerKind.MATRIX_MULTIPLY:
            if len(shape) != 2:
                return UnsupportedWeightsRank(PLACEMENT, name, len(shape))
            if node.integer("transA", 0):
                return FloatNode(PLACEMENT, name, SkipCause.TRANSPOSED_INPUT)
        return None if self._rules.transposed else fault_checks.check_deconvolution(PLACEMENT, node)

    def _is_fast_with_few_channels(self, conv: Node, shape: Sequence[int]) -> bool:
        outputs, inputs, *kernel = shape
        is_first = not set(self._model.inputs).isdisjoint(conv.inputs)
        is_wide = is_first or max(outputs, inputs) >= _MIN_CHANNELS
        is_aligned = outputs % 8 == 0 or inputs % 8 == 0
        return is_wide and is_aligned and len(set(kernel)) == 1

    def _find_slow_shape(self, node: Node) -> Reason | None:
        """Return a reason if a convolution has few channels and no fast INT8 kernel.

        The rule is from ModelOpt (``find_nodes_from_convs_to_exclude``).
        """
        shape = self._model.constant_shape(node.input(1)) or ()
        if operator_of(node).kind != LayerKind.CONVOLUTION or len(shape) < 3:
            return None
        outputs, inputs, kernel = shape[0], shape[1], shape[2:]
        if min(outputs, inputs) >= _MIN_CHANNELS:
            return None
        groups = node.integer("group", 1)
        if groups == 1:
            is_fast = self._is_fast_with_few_channels(node, shape)
        else:
            is_fast = groups > 1 and outputs % 8 == 0 and min(kernel) >= 3
        return None if is_fast else SmallConvolution(PLACEMENT, node.name, inputs, outputs, kernel)

    def _find_failing_form(self, node: Node) -> Reason | None:
        if operator_of(node).kind != LayerKind.CONVOLUTION:
            return None
        model = self._model
        shape = model.constant_shape(node.input(1)) or ()
        forms: list[Reason | None] = [find_large_kernel(PLACEMENT, node, shape[2:])]
        is_depthwise = shape[1:2] == (1,) and node.integer("group", 1) > 1
        layer = find_float_fusions(model).layers.get(node.name) if is_depthwise else None
        if layer is not None:
            fusion = layer.fusion
            activation = fusion.activation.op if fusion.activation is not None else ""
            consumers = model.consumers(fusion.tensor_before_activation or layer.out.source)
            forms += find_depthwise_faults(PLACEMENT, node, activation, consumers)
        return next((f for f in forms if isinstance(f, tuple(self._rules.failing))), None)

    def _choose_add_inputs(self, node: Node) -> _InputChoice:
        sides = self._find_convolution_sides(node)
        if not sides or self._is_broadcast(node):
            return [], None
        if not self._is_quantized_downstream(node.output):
            return [], FloatNode(PLACEMENT, node.name, SkipCause.RESULT_NOT_QUANTIZED)
        consumers = self.placement.consumer_indices
        if not has_only_quantized_consumers(self._model, node.output, consumers):
            return [], FloatNode(PLACEMENT, node.name, SkipCause.RESULT_READ_AS_FLOAT)
        side = self._choose_fused_side(node, sides)
        rule = self._rules.residual
        if rule == "auto":
            rule = self._rules.residual_after_activation
            if rule != "none" and self._has_no_activation(node.input(side)):
                rule = "skip"
        if rule == "none":
            is_requested = self._rules.residual == "none"
            requested, useless = SkipCause.RESIDUAL_NOT_REQUESTED, SkipCause.RESIDUAL_WITHOUT_GAIN
            return [], FloatNode(PLACEMENT, node.name, requested if is_requested else useless)
        return ([1 - side, side] if rule == "both" else [1 - side]), None

    def _find_convolution_sides(self, node: Node) -> list[int]:
        inputs = node.inputs
        if inputs[0] == inputs[1] or any(self._model.is_constant(t) for t in inputs):
            return []
        layers = [find_float_fusions(self._model).add_inputs.get(t) for t in inputs]
        return [
            position
            for position, layer in enumerate(layers)
            if layer and self._model.node(layer.nodes[0]).index in self._quantized
        ]

    def _is_broadcast(self, node: Node) -> bool:
        """Return whether the inputs of an Add differ in shape, so that the Add is not residual.

        Unknown sizes count as equal.
        """
        left, right = (self._model.shape(t) for t in node.inputs)
        if left is None or right is None:
            return False
        if len(left) != len(right):
            return True
        sizes = zip(left, right, strict=True)
        return any(a is not None and b is not None and a != b for a, b in sizes)

    def _choose_fused_side(self, node: Node, sides: Sequence[int]) -> int:
        side = sides[0]
        if len(sides) == 2:  # the longer branch, as in ModelOpt
            lengths = branch_lengths(self._model, node.input(0), node.input(1))
            side = 0 if lengths[0] > lengths[1] else 1
        bare = [i for i in sides if self._has_no_activation(node.input(i))]
        if self._rules.residual == "auto" and bare and side not in bare:
            return bare[0]
        return side

    def _has_no_activation(self, tensor: str) -> bool:
        return tensor in find_float_fusions(self._model).add_inputs_without_activation

    def _choose_pool_input(self, node: Node) -> _InputChoice:
        tensor = node.input(0)
        if self._is_fp8 or not self._is_quantized_downstream(node.output):
            return [], None  # no build with an FP8 pooling is known
        if not self._has_quantized_producer(tensor):
            return [], FloatNode(PLACEMENT, node.name, SkipCause.NO_QUANTIZED_PRODUCER)

        def consumers(name: str) -> set[int]:
            return self.placement.consumer_indices(name) | {node.index}

        if not has_only_quantized_consumers(self._model, tensor, consumers):
            return [], FloatNode(PLACEMENT, node.name, SkipCause.INPUT_READ_AS_FLOAT)
        return [0], None

    def _is_quantized_downstream(self, tensor: str) -> bool:
        """Return whether a tensor gets a Q/DQ pair, directly or downstream.

        Only its activation and operators that move values may be between the tensor and the pair.
        """
        model = self._model
        downstream = walk_tensors(
            tensor, lambda t: (*activation_outputs(model, t), *commuting_outputs(model, t))
        )
        return any(name in self.placement.inputs for name in downstream)

    def _has_quantized_producer(self, tensor: str) -> bool:
        """Return whether a quantized node is upstream of a tensor.

        The search ends at nodes with weights and at average poolings.
        """
        model = self._model

        def upstream_inputs(name: str) -> Sequence[str]:
            node = model.producer(name)
            if node is None or operator_of(node).weights is not None:
                return ()
            return () if is_average_pooling(model, node) else node.inputs

        producers = (model.producer(name) for name in walk_tensors(tensor, upstream_inputs))
        return any(node is not None and node.index in self._quantized for node in producers)


_COMPUTING_KINDS = (
    LayerKind.ELEMENTWISE,
    LayerKind.UNARY,
    LayerKind.MATRIX_MULTIPLY,
    LayerKind.CONVOLUTION,
)


def find_class_outputs(model: Model) -> tuple[str, ...]:
    """Return the tensors of a detector's class scores before the Sigmoid.

    Shape: [n, classes, h, w]. Empty if no class scores are recognized.
    """
    head = find_head(model)
    outputs: dict[str, None] = {}
    for node in model.ordered:
        if node.op != "Sigmoid" or not _has_no_further_computation(model, node):
            continue
        for index in sorted(convolutions_upstream(model, node.input(0)) & head.finals - head.boxes):
            output = model.nodes[index].output
            shape = model.shape(output)
            if model.nodes[index].op == "Conv" and shape is not None and len(shape) == 4:
                outputs[output] = None
    return tuple(outputs)


def _has_no_further_computation(model: Model, node: Node) -> bool:
    """Return whether the result of a node is only moved, and not used in a computation."""
    return not any(
        operator_of(consumer).kind in _COMPUTING_KINDS
        for name in walk_tensors(node.output, lambda t: commuting_outputs(model, t))
        for consumer in model.consumers(name)
    )


# FP8 ---------------------------------------------------------------------------------------------


def find_fp8_obstacle(model: Model, node: Node, weights: str = "") -> FloatNode | None:
    """Return why a node with constant weights is not quantized in FP8; None if it can be.

    Args:
        model: The model.
        node: A convolution or matrix product.
        weights: Name of the float weights, if the node reads them through Q/DQ.
    """
    shape = model.constant_shape(weights or node.input(1)) or ()
    kind = operator_of(node).kind
    obstacle: SkipCause | None = None
    if kind == LayerKind.DECONVOLUTION:
        obstacle = SkipCause.FP8_DECONVOLUTION
    elif kind == LayerKind.CONVOLUTION:
        obstacle = _find_convolution_obstacle(node, shape)
    elif min(shape, default=_MIN_FP8_PRODUCT) < _MIN_FP8_PRODUCT:
        obstacle = SkipCause.FP8_CHANNELS
    elif _has_single_row(model.shape(node.input(0))):
        obstacle = SkipCause.FP8_SINGLE_ROW
    return None if obstacle is None else FloatNode(PLACEMENT, node.name, obstacle)


def _find_convolution_obstacle(node: Node, shape: tuple[int, ...]) -> SkipCause | None:
    if math.prod(shape[2:]) > fault_checks.MAX_FP8_KERNEL:
        return SkipCause.FP8_KERNEL
    groups = node.integer("group", 1)
    if not fault_checks.is_slow_fp8_convolution(shape[:2], groups):
        return None
    return SkipCause.FP8_GROUPS if groups > 1 else SkipCause.FP8_CHANNELS


def _has_single_row(shape: tuple[int | None, ...] | None) -> bool:
    return shape is not None and all(size == 1 for size in shape[:-1])


def _is_attention_fused(model: Model, attention: Attention, max_head: int) -> bool:
    """Return whether TensorRT fuses an attention in FP8; False if shapes are unknown.

    `max_head` is the largest head size that the target fuses.
    """
    queries = model.shape(attention.scores.input(0))
    scores = model.shape(attention.scores.output)
    if not queries or not scores:
        return False
    return fault_checks.fuses_fp8_attention(queries[-1], scores[-1], max_head)

"""Predicted convolutions compared with the engine listing and the pass lines of a build."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qdqtool.buildlog.agreement import (
    ConvolutionCounts,
    DetailedDifference,
    Difference,
    Mismatch,
    MismatchKind,
    MismatchSide,
)
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import Precision, name_type
from qdqtool.ir.qdq import is_qdq
from qdqtool.ir.sizes import is_multiplication
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.trace import FUSING_INTO
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields
from qdqtool.verification.kernels import (
    ABBREVIATED,
    ATTENTION,
    SINGLE_PRODUCT,
    compute_precision,
    is_myelin_kernel,
    none_if_unknown,
    output_precision,
    product_rank,
)
from qdqtool.verification.layer_mapping import NodeMapper, collect_printed_names

# Maximum number of fused operators in the JSON of one convolution. In a damaged log one layer may
# contain all convolutions, and each convolution would list all others.
_MAX_FUSED = 100
_NAMED_OPERATORS = ("Add", "MaxPool")  # all TensorRT versions keep these in layer names


@dataclass(frozen=True, slots=True)
class BuiltNode:
    """A convolution or matrix product as the compiler built it.

    Attributes:
        index: Position of the node in the ONNX graph's node list.
        name: The node's name, or its first output's name if the name is missing or not unique.
        op: ``Conv``, ``ConvTranspose``, ``Gemm``, ``MatMul`` or ``Einsum``.
        precision: Data type of the multiplication. UNKNOWN if no engine layer computes the node
            (the node was removed or merged with an equal node), or if the layer does not show the
            type.
        inputs: Types that the layer reads: the data input, and the second input unless constant.
        output: Type that the layer writes.
        layer: The engine layer's name; None if the node has no layer.
    """

    index: int
    name: str
    op: str
    precision: Precision
    inputs: tuple[Precision, ...] = ()
    output: Precision = Precision.UNKNOWN
    layer: str | None = None

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return to_json_fields(self)


def find_built_nodes(
    model: Model, layers: Sequence[BuiltLayer], names: Mapping[int, str] | None = None
) -> list[BuiltNode]:
    """Return every convolution and matrix product of a model as the compiler built it.

    Args:
        model: The model that was built.
        layers: Layers of the engine listing.
        names: Name of each node in the build, as for :class:`NodeMapper`.
    """
    mapper = NodeMapper(model, layers, names)
    products = [n for n in model.nodes if is_multiplication(model, n)]
    candidates = [{id(x): x for x, _ in mapper.node_positions(n)}.values() for n in products]
    ambiguous = _find_ambiguous_kernels(layers, candidates)
    return [
        _read_built_node(node, [layer for layer in node_layers if id(layer) not in ambiguous])
        for node, node_layers in zip(products, candidates, strict=True)
    ]


def _find_ambiguous_kernels(
    layers: Sequence[BuiltLayer], candidates: Sequence[Collection[BuiltLayer]]
) -> set[int]:
    """Return the ``id()`` of each generated kernel that computes several products.

    Such a kernel does not show the type of each product. A product that also has a separate layer
    does not count, because the generated kernel only contains neighbors of that product.
    """
    counts: Counter[int] = Counter()
    for node_layers in candidates:
        if not any(layer.type in SINGLE_PRODUCT for layer in node_layers):
            counts.update(map(id, node_layers))
    kernels = [layer for layer in layers if layer.type == "kgen" and ATTENTION not in layer.name]
    return {id(layer) for layer in kernels if counts[id(layer)] > 1}


def _read_built_node(node: Node, layers: list[BuiltLayer]) -> BuiltNode:
    """Read a node from the layer that most likely multiplies.

    Without such a layer, use the generated kernel with an abbreviated name if there is exactly one.
    Otherwise, the type is UNKNOWN.
    """
    ranked = [(rank, x) for x in layers if (rank := product_rank(x)) is not None]
    abbreviated = [x for x in layers if x.type == "kgen" and ABBREVIATED in x.name]
    if ranked:
        _, layer = min(ranked, key=lambda pair: pair[0])
    elif len(abbreviated) == 1:
        layer = abbreviated[0]
    else:
        return BuiltNode(node.index, node.name, node.op, Precision.UNKNOWN)
    return BuiltNode(
        node.index,
        node.name,
        node.op,
        compute_precision(layer),
        inputs=tuple(t.precision for t in layer.inputs[: 1 if layer.constants else 2]),
        output=output_precision(layer),
        layer=layer.name,
    )


@dataclass
class BuiltConvolution:
    """A convolution as a build shows it. A field that the build does not show is None.

    Attributes:
        contradiction: How the pass lines contradict the listing; None if they agree.
    """

    precision: Precision | None = None
    inputs: list[Precision] | None = None
    output: Precision | None = None
    fused: list[str] | None = None
    layer: str = ""
    line: int = 0
    contradiction: DetailedDifference | None = None

    def as_json(self) -> MismatchSide:
        """Return the fields of the JSON output."""
        fields = to_json_fields(self, "precision", "inputs", "output", "fused", "layer")
        return {**fields, "fused": self.fused and self.fused[:_MAX_FUSED]}


class PassLines:
    """The ``QuantizeDoubleInputNodes: fusing`` lines of a build, by node.

    Attributes:
        inputs: Number of the log line about the quantized inputs of a node, by the node's name.
        outputs: Number of the log line about the quantized output of a node, by the node's name.
        complete: Whether the optimizer finished, so that a node without a line is float.
    """

    def __init__(self, build: Build, mapper: NodeMapper) -> None:
        self._build = build
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.complete = any("epilogue" in heading for heading, _ in build.headings)
        for event in build.trace:
            if (event.pass_name, event.kind) == ("QuantizeDoubleInputNodes", FUSING_INTO):
                nodes = map(mapper.find_node, _possible_node_names(event.object))
                node = next((n for n in nodes if n is not None), None)
                side = self.inputs if event.subject.startswith("(") else self.outputs
                if node is not None:
                    side.setdefault(node.name, event.line)

    @functools.cached_property
    def _printed_names(self) -> set[str]:
        return collect_printed_names(self._build)

    def is_certainly_float(self, name: str) -> bool:
        """Return whether a node that no line mentions is certainly float.

        True if the optimizer finished, and the log names this node or lists no nodes.
        """
        return self.complete and (not self._build.parse.nodes or name in self._printed_names)


def _possible_node_names(layer: str) -> list[str]:
    return [layer, *(part for side in layer.split(" || ") for part in side.split(" + "))]


def compare_convolutions(
    model: Model,
    prediction: Prediction,
    build: Build,
    mapper: NodeMapper,
    uncertain: Iterable[str] = (),
) -> tuple[ConvolutionCounts, list[Mismatch]]:
    """Compare data type, residual input, output, fused Add and MaxPool of every convolution.

    Args:
        model: The model that was built.
        prediction: Prediction of the model.
        build: The build.
        mapper: Mapper of the build's layers.
        uncertain: Convolutions whose prediction depends on unknown scales and that count as
            unknown.

    Returns:
        Counts, and a mismatch for each convolution that differs.
    """
    lines = PassLines(build, mapper)
    skipped = set(uncertain)
    unknown: list[str] = []
    mismatches: list[Mismatch] = []
    rules = _list_deciding_passes(prediction)
    named = {node.name for node in model.nodes if node.op in _NAMED_OPERATORS}
    for conv in prediction.convolutions:
        if conv.name in skipped:
            unknown.append(conv.name)
            continue
        built = read_built_convolution(model.node(conv.name), conv, build, mapper, lines)
        difference = _find_difference(named, conv, built)
        if difference is not None:
            mismatches.append(
                Mismatch(
                    MismatchKind.CONVOLUTION,
                    conv.name,
                    to_json_fields(
                        conv, "precision", "inputs", "output", "fused", "layer", "evidence"
                    ),
                    built.as_json(),
                    *difference,
                    built.line or None,
                    rules.get(conv.name, f"as layer {conv.layer or conv.name}"),
                )
            )
        elif built.precision is None or built.output is None:
            unknown.append(conv.name)
    total = len(prediction.convolutions)
    agree = total - len(unknown) - len(mismatches)
    return ConvolutionCounts(total, agree, len(unknown), tuple(unknown)), mismatches


def read_built_convolution(
    node: Node, conv: ConvOutcome, build: Build, mapper: NodeMapper, lines: PassLines
) -> BuiltConvolution:
    """Read a convolution from the engine listing, or without a listing from the pass lines.

    The listing takes precedence. If the lines contradict the listing, the result has a
    ``contradiction``.
    """
    position = None if build.names_only else mapper.find_layer(node)
    built = BuiltConvolution() if position is None else _read_layer(node, conv, mapper, *position)
    input_line, output_line = lines.inputs.get(node.name), lines.outputs.get(node.name)
    built.line = built.line or input_line or output_line or 0
    if built.precision is not None:
        built.contradiction = _find_contradiction(built, input_line, output_line, lines)
    elif position is None and input_line is not None:
        # The pass lines do not state the quantized type, so take it from the model.
        built.precision = Precision.FP8 if conv.is_fp8 else Precision.INT8
        if output_line is not None:
            built.output = built.precision
        elif lines.complete:
            built.output = Precision.FLOAT
    elif position is None and lines.is_certainly_float(mapper.built_name(node)):
        built.precision = built.output = Precision.FLOAT
    return built


def _find_contradiction(
    built: BuiltConvolution, input_line: int | None, output_line: int | None, lines: PassLines
) -> DetailedDifference | None:
    if input_line is not None and _is_float(built.precision):
        return Difference.LINE_AND_INPUT, (input_line,)
    if output_line is not None and _is_float(built.output):
        return Difference.LINE_AND_OUTPUT, (output_line,)
    is_quantized = built.precision in (Precision.INT8, Precision.FP8)
    needs_line = is_quantized and lines.inputs and lines.complete
    return (Difference.NO_LINE, ()) if needs_line and input_line is None else None


def _is_float(precision: Precision | None) -> bool:
    return precision is not None and precision.is_float


def _read_layer(
    node: Node, conv: ConvOutcome, mapper: NodeMapper, layer: BuiltLayer, position: int
) -> BuiltConvolution:
    """Return the precisions and fused nodes of a convolution in the built engine.

    `position` is its index among the layers that TensorRT merged with ``||``.
    """
    nodes = mapper.layer_nodes(layer)
    if is_myelin_kernel(layer):
        return _read_kernel(layer, nodes)
    built = BuiltConvolution(layer=layer.name, line=layer.line)
    built.precision = none_if_unknown(layer.input_precision)
    if layer.outputs:
        output = layer.outputs[min(position, len(layer.outputs) - 1)]
        built.output = none_if_unknown(output.precision)
    fused = (n for n in nodes if n.op != "Constant" and not is_qdq(n))
    built.fused = [n.name for n in fused if n.name != node.name]
    is_merged = " || " in layer.name and len(layer.outputs) > 1
    has_add = not is_merged and any(n.op == "Add" for n in nodes)
    built.inputs = _read_inputs(layer, 2 if len(conv.inputs) > 1 or has_add else 1)
    return built


def _read_kernel(layer: BuiltLayer, nodes: Sequence[Node]) -> BuiltConvolution:
    """Return the precisions of a convolution in a kernel of Myelin.

    A kernel that computes two convolutions does not show the type of each.
    """
    built = BuiltConvolution(layer=layer.name, line=layer.line)
    is_single = sum(n.op in WEIGHTED for n in nodes) <= 1
    if is_single and product_rank(layer) is not None:
        built.precision = none_if_unknown(compute_precision(layer))
        built.output = none_if_unknown(output_precision(layer))
    return built


def _read_inputs(layer: BuiltLayer, count: int) -> list[Precision] | None:
    """Return the precisions of the first inputs of a layer; None if one of them is unknown."""
    inputs = [tensor.precision for tensor in layer.inputs[:count]]
    return inputs if inputs and Precision.UNKNOWN not in inputs else None


def _find_difference(
    named: Collection[str], conv: ConvOutcome, built: BuiltConvolution
) -> DetailedDifference | None:
    """Return the first difference between prediction and build.

    None if everything that the build shows agrees. `named` has the nodes whose names TensorRT keeps
    in the names of layers.
    """
    if built.contradiction is not None:
        return built.contradiction
    built_inputs = conv.inputs if built.inputs is None else built.inputs
    missing_inputs = len(conv.inputs) - len(built_inputs)
    types = [
        (Difference.PRECISION, conv.precision, built.precision),
        (Difference.OUTPUT, conv.output, built.output),
    ]
    if not missing_inputs:
        residuals = zip(conv.inputs[1:], built_inputs[1:], strict=True)
        types += [(Difference.RESIDUAL, *pair) for pair in residuals]
    for difference, predicted, actual in types:
        if actual is not None and not predicted.agrees(actual):
            return difference, (name_type(predicted), name_type(actual))
    if missing_inputs:
        return Difference.LACKS_RESIDUAL if missing_inputs > 0 else Difference.HAS_RESIDUAL, ()
    if built.fused is None or not built.layer or " || " in built.layer:
        return None
    return _find_fusion_difference(named, conv.fused, built.fused)


def _find_fusion_difference(
    named: Collection[str], predicted: list[str], built: list[str]
) -> DetailedDifference | None:
    """Return the first Add or MaxPool that only one side fuses; None if both sides agree."""
    for difference, names, others in (
        (Difference.ABSORBS, predicted, built),
        (Difference.ABSORBED, built, predicted),
    ):
        for name in names:
            if name in named and name not in others:
                return difference, (name,)
    return None


def _list_deciding_passes(prediction: Prediction) -> dict[str, str]:
    """Return a text that names the pass that decided about each node, by the node's name.

    This is the pass with the first reason against a fusion at the node, else the first pass that
    fuses a Q or DQ into the node. If there is a reason, the text also contains its key.
    """
    rules: dict[str, str] = {}
    for reason in prediction.refusals:
        rules.setdefault(reason.node, f"by {reason.pass_name}: {reason.key}")
    for event in prediction.trace:
        if event.kind == FUSING_INTO:
            for name in _possible_node_names(event.object):
                rules.setdefault(name, f"by {event.pass_name}")
    return rules

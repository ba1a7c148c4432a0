"""A build as a side of a comparison: as nodes of a model, or as engine layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from qdqtool.buildlog.build_status import find_truncations
from qdqtool.buildlog.costs import EngineReport, main_node
from qdqtool.buildlog.engine_comparison import NUMBERED_NAME, EngineComparison, align_sequences
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.types import Build, BuiltLayer, Shape
from qdqtool.comparison.matching import MIN_LIKENESS, match_nodes
from qdqtool.comparison.result import ChangeKind, NodeChange, NodeSide, SideSummary
from qdqtool.errors import BuildLogError
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import output_axis
from qdqtool.ir.precision import BYTES, Precision
from qdqtool.patterns.view import View
from qdqtool.trt.result import Prediction
from qdqtool.verification.api import MIN_NAMED, is_all_myelin
from qdqtool.verification.convolutions import PassLines, find_built_nodes, read_built_convolution
from qdqtool.verification.kernels import (
    compute_precision,
    is_myelin_kernel,
    none_if_unknown,
    output_precision,
)
from qdqtool.verification.layer_mapping import (
    NodeMapper,
    count_named_convolutions,
    find_name_conflicts,
    is_multiplication_layer,
)


def summarize_build(report: EngineReport, name: str) -> SideSummary:
    """Return the totals of a build's layers.

    Args:
        report: The build with its times.
        name: First part of the title.
    """
    build, ms = report.build, _execution_time(report)
    layers = [layer for layer in build.layers if is_multiplication_layer(layer)]
    int8 = [layer for layer in layers if compute_precision(layer) in BYTES]
    fp8 = sum(compute_precision(layer) is Precision.FP8 for layer in layers)
    plain = sum(layer.is_convolution for layer in layers)
    summary = SideSummary(
        "build",
        title=f"{name} ({build.title}{f' on {build.device}' if build.device else ''})",
        quantized=bool(int8 or fp8),
        convolutions=len(layers),
        ms=ms,
        measured=ms is not None,
        gpu=build.device or "",
        products=len(layers) - plain,
        plain=plain,
        gaps=find_truncations(build),
    )
    if build.layers and not build.names_only:
        summary.int8 = len(int8)
        summary.fp8 = fp8
        summary.int8_to_int8 = sum(output_precision(layer) == Precision.INT8 for layer in int8)
        summary.conversions = len(build.conversions)
    return summary


def _execution_time(report: EngineReport) -> float | None:
    """Return the milliseconds of one inference: trtexec's GPU time, else the profile's sum.

    None without times.
    """
    build = report.build
    if build.gpu_ms is not None or report.has_times:
        return build.gpu_ms if build.gpu_ms is not None else report.total_ms
    return sum(row.ms for row in build.profile_rows) or None


def add_profile_layers(build: Build) -> Build:
    """Return a build with the layers of its profile if the build lists no layers.

    Layers of a profile have names but no data types.
    """
    if build.layers or not build.profile_rows:
        return build
    layers = [BuiltLayer(row.name) for row in build.profile_rows]
    return replace(build, layers=layers, names_only=True)


def map_nodes(view: View, prediction: Prediction, build: Build) -> tuple[dict[int, NodeSide], str]:
    """Return a model's nodes as built, by node index, and how they were matched.

    Nodes that the build does not show are left out. The second value is ``names``, ``structure`` or
    ``shapes``.

    Raises:
        BuildLogError: The build is of another network.
    """
    model = view.model
    mapper = NodeMapper(model, build.layers)
    names: dict[int, str] | None = None
    if not _are_names_equal(view, build, mapper):
        if not any(node.outputs for node in build.parse.nodes):
            return _match_weights_and_shapes(view, build), "shapes"
        parsed = match_nodes(view, View(Model(graph_from_log(build)[0], "the log's graph")))
        if parsed.likeness < MIN_LIKENESS:
            raise _different_network_error(view, build)
        names = {n.index: f"({n.index})" for n in model.nodes}
        names |= {index: partner.parser_name for index, partner in parsed.pairs.items()}
        mapper = NodeMapper(model, build.layers, names)
    if build.is_rtx:
        nodes = _map_rtx_nodes(model, build, names)
    else:
        nodes = _map_convolutions(model, prediction, build, mapper)
    return nodes, "names" if names is None else "structure"


def _map_rtx_nodes(model: Model, build: Build, names: dict[int, str] | None) -> dict[int, NodeSide]:
    return {
        node.index: NodeSide(
            node.name,
            node.op,
            node.precision,
            list(node.inputs),
            none_if_unknown(node.output),
            layer=node.layer,
            ms=build.profile.get(node.layer or ""),
        )
        for node in find_built_nodes(model, build.layers, names)
        if node.precision != Precision.UNKNOWN
    }


def _map_convolutions(
    model: Model, prediction: Prediction, build: Build, mapper: NodeMapper
) -> dict[int, NodeSide]:
    operators = {n.name: n.op for n in model.nodes}
    lines = PassLines(build, mapper)
    nodes: dict[int, NodeSide] = {}
    for conv in prediction.convolutions:
        built = read_built_convolution(model.node(conv.name), conv, build, mapper, lines)
        if built.precision is not None:
            nodes[conv.index] = NodeSide(
                conv.name,
                conv.op,
                built.precision,
                list(built.inputs or ()),
                built.output,
                layer=built.layer or None,
                fused=[operators.get(name, name) for name in built.fused or ()],
                ms=build.profile.get(built.layer),
            )
    return nodes


def _are_names_equal(view: View, build: Build, mapper: NodeMapper) -> bool:
    """Return whether equal names in the build and in the model stand for equal nodes.

    False if a name stands for different nodes, or if the build contains too few of the model's
    names. Numbered names of another export may be equal by chance. So if the model's names are
    numbered, the build must contain all of these names.
    """
    if find_name_conflicts(view, build, mapper):
        return False
    named, total = count_named_convolutions(view.model, build)
    if named == total or is_all_myelin(build):
        return True
    numbered = any(NUMBERED_NAME.search(n.name) for n in view.nodes_with_weights)
    return named >= MIN_NAMED * total and not numbered


def _match_weights_and_shapes(view: View, build: Build) -> dict[int, NodeSide]:
    """Match nodes with layers by names of weights, else in order by kernel and channels.

    Returns:
        The matched nodes as built, by node index.

    Raises:
        BuildLogError: Too few nodes match, because the build is of another network.
    """
    layers = [layer for layer in build.layers if is_multiplication_layer(layer)]
    nodes = [
        n for n in view.nodes_with_weights if n.output in view.varying and view.weights(n).folded
    ]
    pairs = _match_weight_names(view, nodes, layers)
    paired = {id(item) for pair in pairs for item in pair}
    pairs += align_sequences(
        [(node, _weights_shape(view, node)) for node in nodes if id(node) not in paired],
        [(layer, _layer_shape(layer)) for layer in layers if id(layer) not in paired],
        _rate_similarity,
    )
    if len(pairs) < MIN_LIKENESS * max(len(nodes), len(layers)):
        raise _different_network_error(view, build)
    return {
        node.index: _read_layer(layer, node.name, node.op, build.profile.get(layer.name))
        for node, layer in pairs
    }


def _match_weight_names(
    view: View, nodes: list[Node], layers: list[BuiltLayer]
) -> list[tuple[Node, BuiltLayer]]:
    """Pair nodes with the layers whose names contain their weights; skip shared weights."""
    by_weights: dict[str, BuiltLayer] = {}
    for layer in layers:
        if " || " not in layer.name:
            by_weights.update(dict.fromkeys(layer.parse_name().bases, layer))
    weights = [view.weights(node).source for node in nodes]
    counts = Counter(weights)
    return [
        (node, by_weights[name])
        for node, name in zip(nodes, weights, strict=True)
        if counts[name] == 1 and name in by_weights
    ]


def _weights_shape(view: View, node: Node) -> tuple[Shape, int | None]:
    """Return the shape of the weights and the axis of the output channels."""
    shape = view.model.constant_shape(view.weights(node).source) or ()
    return shape, output_axis(node, len(shape))


def _layer_shape(layer: BuiltLayer) -> tuple[Shape | None, str]:
    """Return the output shape (None if unlisted) and the kernel as text (empty if unlisted)."""
    return layer.outputs[0].shape if layer.outputs else None, str(layer.extras.get("Kernel") or "")


def _rate_similarity(weights: tuple[Shape, int | None], layer: tuple[Shape | None, str]) -> int:
    """Return 2 if output channels and kernel agree, else 0, for :func:`align_sequences`."""
    (shape, axis), (output, kernel) = weights, layer
    if output is None or axis is None or axis >= len(shape) or shape[axis] not in output:
        return 0
    return 0 if kernel and len(shape) > 2 and str(list(shape[2:])) != kernel else 2


def _different_network_error(view: View, build: Build) -> BuildLogError:
    named, total = count_named_convolutions(view.model, build)
    return BuildLogError(
        f"the build is not of {view.model.path or 'the model'}: the build names {named} of the "
        f"model's {total} convolutions, and their shapes and order do not match either. Give a "
        "build of this model",
        build.display_name,
        code="different-models",
    )


def list_layer_changes(engines: EngineComparison) -> list[NodeChange]:
    """Return a change for each pair of convolutions or matrix products of two engines.

    A layer without a partner is a change as well.
    """
    changes = []
    for pair in engines.pairs:
        if not any(c and is_multiplication_layer(c.layer) for c in (pair.first, pair.second)):
            continue
        a, b = (
            _read_layer(c.layer, main_node(c), c.layer.type, c.ms) if c else None
            for c in (pair.first, pair.second)
        )
        kinds: tuple[ChangeKind, ...] = ()
        if a is None or b is None:
            kinds = (ChangeKind.ONLY_IN_B if a is None else ChangeKind.ONLY_IN_A,)
        changes.append(NodeChange(a, b, kinds))
    return changes


def _read_layer(layer: BuiltLayer, name: str, op: str, ms: float | None) -> NodeSide:
    count = 1 if is_myelin_kernel(layer) else 2  # The second input of other layers is a residual.
    return NodeSide(
        name,
        op,
        compute_precision(layer) if layer.type else None,
        [tensor.precision for tensor in layer.inputs[:count]],
        none_if_unknown(output_precision(layer)),
        layer=layer.name,
        ms=ms,
    )

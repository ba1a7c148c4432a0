"""What a build made of each convolution, by the ONNX nodes of its model or by its own layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from qdqtool.buildlog.costs import NUMBERED_NAME, EngineComparison, EngineReport, align, main_node
from qdqtool.buildlog.names import NameSet
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.summary import find_truncations
from qdqtool.buildlog.types import Build, BuiltLayer, Shape
from qdqtool.comparison.matching import ALIKE, match
from qdqtool.comparison.result import Change, NodeChange, NodeSide, Side
from qdqtool.errors import BuildLogError
from qdqtool.ir.graph import Model
from qdqtool.ir.operators import output_axis
from qdqtool.patterns.view import View
from qdqtool.types import BYTES, Precision, Prediction
from qdqtool.verification.api import MIN_NAMED, is_all_myelin
from qdqtool.verification.convolutions import PassLines, find_built_nodes, read_built_convolution
from qdqtool.verification.kernels import compute_precision, is_myelin_kernel, output_precision
from qdqtool.verification.layer_mapping import (
    NodeMapper,
    count_named_convolutions,
    find_name_conflicts,
    is_multiplication_layer,
    trt_name,
)


def side_of(report: EngineReport, name: str) -> Side:
    """A build as a whole, by its own layers; ``name`` is what to call its files."""
    build = report.build
    layers = [x for x in build.layers if is_multiplication_layer(x)]
    int8 = [x for x in layers if compute_precision(x) in BYTES]
    listed = bool(build.layers) and not build.names_only
    title = f"{name} ({build.title}{f' on {build.device}' if build.device else ''})"
    side = Side(
        "build",
        title,
        bool(int8),
        len(layers),
        len(int8) if listed else None,
        sum(output_precision(x) == Precision.INT8 for x in int8) if listed else None,
        len(build.conversions) if listed else None,
        gpu=build.device or "",
    )
    side.plain = sum(x.is_convolution for x in layers)
    side.products = len(layers) - side.plain
    # The time of one execution is as trtexec prints it, otherwise the sum of the profile.
    side.ms = build.gpu_ms
    if side.ms is None:
        side.ms = (
            report.total_ms
            if report.has_times
            else sum(row.ms for row in build.profile_rows) or None
        )
    side.measured = side.ms is not None
    side.gaps = find_truncations(build)
    return side


def with_profile_rows(build: Build) -> Build:
    """A profile alone names its layers: they are compared by their names and times, of data types it says nothing."""
    if build.layers or not build.profile_rows:
        return build
    return replace(
        build, layers=[BuiltLayer(row.name) for row in build.profile_rows], names_only=True
    )


def nodes_of(view: View, prediction: Prediction, build: Build) -> tuple[dict[int, NodeSide], str]:
    """What an engine made of a model's nodes, by index; nodes of which the build says nothing are left out.

    With it, how the nodes were matched: by ``names``, ``structure`` or ``shapes``.
    """
    model, ms = view.model, build.profile
    names, by = None, "names"
    mapper = NodeMapper(model, build.layers)
    if not _names_hold(view, build, mapper):
        if not any(node.outputs for node in build.parse.nodes):
            return _by_shapes(view, build), "shapes"
        printed = match(view, View(Model(graph_from_log(build)[0], "the log's graph")))
        if printed.likeness < ALIKE:
            raise _other_network(view, build)
        names, by = (
            {
                n.index: trt_name(printed.pairs[n.index])
                if n.index in printed.pairs
                else f"({n.index})"
                for n in model.nodes
            },
            "structure",
        )
    ops = {n.name: n.op for n in model.nodes}
    found: dict[int, NodeSide] = {}
    if build.is_rtx:
        for row in find_built_nodes(
            model, build.layers, names or {n.index: trt_name(n) for n in model.nodes}
        ):
            if row.precision != Precision.UNKNOWN:
                output = row.output if row.output != Precision.UNKNOWN else None
                found[row.index] = NodeSide(
                    row.name,
                    row.op,
                    row.precision,
                    list(row.inputs),
                    output,
                    layer=row.layer,
                    ms=ms.get(row.layer or ""),
                )
        return found, by
    if names is not None:
        mapper = NodeMapper(model, build.layers, names)
    lines = PassLines(build, mapper)
    for conv in prediction.convolutions:
        built = read_built_convolution(model.node(conv.name), conv, build, mapper, lines)
        if built.precision is not None:
            found[conv.index] = NodeSide(
                conv.name,
                conv.op,
                built.precision,
                list(built.inputs or ()),
                built.output,
                layer=built.layer or None,
                fused=[ops.get(name, name) for name in built.fused or ()],
                ms=ms.get(built.layer),
            )
    return found, by


def _names_hold(view: View, build: Build, mapper: NodeMapper) -> bool:
    """Whether the build's names are those of the model: they contradict nothing, and if numbered none is missing."""
    if find_name_conflicts(view, build, mapper):
        return False
    found, wanted = count_named_convolutions(view.model, build)
    numbered = any(NUMBERED_NAME.search(n.name) for n in view.weighted)
    return found == wanted or is_all_myelin(build) or (found >= MIN_NAMED * wanted and not numbered)


def _by_shapes(view: View, build: Build) -> dict[int, NodeSide]:
    """What became of the nodes: by the layers that have their weights, or in the same order kernel and channels."""
    layers = [x for x in build.layers if is_multiplication_layer(x)]
    nodes = [n for n in view.weighted if n.output in view.varying and view.weights(n).folded]
    known = NameSet(view.model.initializers)
    named = {
        name: layer
        for layer in layers
        if " || " not in layer.name
        for name in layer.parse_name(known).bases
    }
    weights = Counter(
        view.weights(n).source for n in nodes
    )  # weights that two nodes share identify neither
    pairs = [
        (n, named[s]) for n in nodes if weights[s := view.weights(n).source] == 1 and s in named
    ]

    done = {id(x) for pair in pairs for x in pair}
    left, right = [n for n in nodes if id(n) not in done], [x for x in layers if id(x) not in done]
    shapes = [view.model.constant_shape(view.weights(n).source) or () for n in left]
    pairs += align(
        [(n, (shape, output_axis(n, len(shape)))) for n, shape in zip(left, shapes, strict=True)],
        [
            (x, (x.outputs[0].shape if x.outputs else None, str(x.extras.get("Kernel") or "")))
            for x in right
        ],
        _fits,
    )
    if len(pairs) < ALIKE * max(len(nodes), len(layers)):
        raise _other_network(view, build)
    return {
        node.index: _of_layer(layer, node.name, node.op, build.profile.get(layer.name))
        for node, layer in pairs
    }


def _fits(weights: tuple[Shape, int | None], layer: tuple[Shape | None, str]) -> int:
    """Whether a layer's result and kernel (empty where it is not known) are those of weights with an output axis."""
    (shape, axis), (out, kernel) = weights, layer
    if out is None or axis is None or axis >= len(shape) or shape[axis] not in out:
        return 0
    return 0 if kernel and len(shape) > 2 and str(list(shape[2:])) != kernel else 2


def _other_network(view: View, build: Build) -> BuildLogError:
    found, wanted = count_named_convolutions(view.model, build)
    return BuildLogError(
        f"a build of another network than {view.model.path or 'the model given'}: it "
        f"names {found} of its {wanted} convolutions, and shapes and order do not fit either",
        build.display_name,
        code="different-models",
    )


def changes_of(engines: EngineComparison) -> list[NodeChange]:
    """The convolutions of two engines, side by side."""
    found = []
    for pair in engines.pairs:
        costs = [c for c in (pair.first, pair.second) if c is not None]
        if not any(is_multiplication_layer(c.layer) for c in costs):
            continue
        a, b = (
            _of_layer(c.layer, main_node(c), c.layer.type, c.ms) if c else None
            for c in (pair.first, pair.second)
        )
        change = () if a and b else (Change.ONLY_IN_B if a is None else Change.ONLY_IN_A,)
        found.append(NodeChange(a, b, change))
    return found


def _of_layer(layer: BuiltLayer, name: str, op: str, ms: float | None) -> NodeSide:
    output = output_precision(layer)
    residual = [] if is_myelin_kernel(layer) else [t.precision for t in layer.inputs[1:2]]
    return NodeSide(
        name,
        op,
        compute_precision(layer) if layer.type else None,
        [*(t.precision for t in layer.inputs[:1]), *residual],
        output if output != Precision.UNKNOWN else None,
        layer=layer.name,
        ms=ms,
    )

"""What a build made of each convolution, by the ONNX nodes of its model or by its own layers."""

from __future__ import annotations

from dataclasses import replace

from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.comparing.result import Change, NodeChange, NodeSide, Side
from qdqtool.engine.compare import Comparison as EngineComparison
from qdqtool.engine.costs import EngineReport, LayerCost, node_of
from qdqtool.graph import Model
from qdqtool.types import Precision, Prediction
from qdqtool.verification.convolutions import built_convolution, pass_lines
from qdqtool.verification.mapping import Mapper, in_myelin, is_aside, product_rank, trt_name
from qdqtool.verification.products import built_nodes, computes_in, writes


def side_of(build: Build, report: EngineReport | None = None, name: str = "") -> Side:
    """The build as a whole, by its own layers; ``name`` is what to call its files."""
    layers = [x for x in build.layers if product_rank(x) is not None and not is_aside(x)]
    int8 = [x for x in layers if computes_in(x) in (Precision.INT8, Precision.UINT8)]
    listed = bool(build.layers) and not build.names_only
    title = f"{name or 'build'} ({build.title}{f' on {build.device}' if build.device else ''})"
    side = Side(
        "build", title, bool(int8), len(layers), len(int8) if listed else None,
        sum(writes(x) == Precision.INT8 for x in int8) if listed else None,
        len(build.conversions) if listed else None, gpu=build.device or "",
    )
    side.plain = sum(x.is_convolution for x in layers)
    side.products = len(layers) - side.plain
    side.ms = measured_ms(build, report)
    side.measured = side.ms is not None
    return side


def with_profile_rows(build: Build) -> Build:
    """A profile alone names its layers: they are compared by their names and times, of data types it says nothing."""
    if build.layers or not build.profile_rows:
        return build
    return replace(build, layers=[BuiltLayer(row.name) for row in build.profile_rows], names_only=True)


def measured_ms(build: Build, report: EngineReport | None = None) -> float | None:
    """Time of one execution: as trtexec prints it, otherwise the sum of the profile."""
    performance = build.performance.get("GPU Compute Time", {})
    whole = performance.get("median", performance.get("mean"))
    if whole is not None:
        return whole
    if report is not None and report.timed:
        return report.total_ms
    return sum(row.average_ms for row in build.profile_rows) or None


def nodes_of(model: Model, prediction: Prediction, build: Build) -> dict[int, NodeSide]:
    """Node index to what the engine made of it; nodes of which the build says nothing are left out."""
    ms = build.profile
    ops = {n.name: n.op for n in model.nodes}
    found: dict[int, NodeSide] = {}
    if build.is_rtx:
        for row in built_nodes(model, build.layers, {n.index: trt_name(n) for n in model.nodes}):
            if row.precision != Precision.UNKNOWN:
                output = row.output if row.output != Precision.UNKNOWN else None
                found[row.index] = NodeSide(row.name, row.op, row.precision, list(row.inputs), output, layer=row.layer,
                                            ms=ms.get(row.layer or ""))
        return found
    mapper = Mapper(model, build.layers)
    lines = pass_lines(build, mapper)
    for conv in prediction.convolutions:
        built = built_convolution(model.node(conv.name), conv, build, mapper, lines)
        if built.precision is None:
            continue
        found[conv.index] = NodeSide(
            conv.name, conv.op, built.precision, list(built.inputs or ()), built.output,
            fused=[ops.get(name, name) for name in built.fused or ()], layer=built.layer or None,
            ms=ms.get(built.layer),
        )
    return found


def changes_of(engines: EngineComparison) -> list[NodeChange]:
    """The convolutions of two engines, side by side."""
    found = []
    for pair in engines.pairs:
        a, b = (_of_layer(cost) if cost is not None else None for cost in (pair.first, pair.second))
        if a is None and b is None:
            continue
        if a is None or b is None:
            found.append(NodeChange(a, b, (Change.ONLY_IN_B if a is None else Change.ONLY_IN_A,)))
        else:
            found.append(NodeChange(a, b))
    return found


def _of_layer(cost: LayerCost) -> NodeSide | None:
    layer = cost.layer
    if product_rank(layer) is None or is_aside(layer):
        return None
    output = writes(layer)
    residual = [] if in_myelin(layer) else [t.precision for t in layer.inputs[1:2]]
    return NodeSide(
        node_of(cost), layer.type, computes_in(layer), [*(t.precision for t in layer.inputs[:1]), *residual],
        output if output != Precision.UNKNOWN else None, layer=layer.name, ms=cost.ms,
    )

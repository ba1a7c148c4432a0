"""What a build made of each convolution, by the ONNX nodes of its model or by its own layers."""

from __future__ import annotations

import os

from qdqtool.buildlog.types import Build
from qdqtool.comparing.result import Change, NodeChange, NodeSide, Side
from qdqtool.engine.compare import Comparison as EngineComparison
from qdqtool.engine.costs import EngineReport, LayerCost
from qdqtool.graph import Model
from qdqtool.types import Precision, Prediction
from qdqtool.verification.convolutions import built_convolution, pass_lines
from qdqtool.verification.mapping import Mapper, trt_name
from qdqtool.verification.products import built_nodes, computes_in, writes


def title_of(build: Build) -> str:
    """``build.log (TensorRT 10.3.0 on Orin)``."""
    name = ", ".join(os.path.basename(f) for f in build.files) or "build"
    return f"{name} ({build.title}{f' on {build.device}' if build.device else ''})"


def side_of(build: Build, report: EngineReport | None = None) -> Side:
    """The build as a whole, by its own layers."""
    layers = [x for x in build.layers if x.is_convolution or "gemm" in x.type.lower()]
    int8 = [x for x in layers if computes_in(x) in (Precision.INT8, Precision.UINT8)]
    listed = bool(build.layers) and not build.names_only
    side = Side(
        "build", title_of(build), bool(int8), len(layers), len(int8) if listed else None,
        sum(writes(x) == Precision.INT8 for x in int8) if listed else None,
        len(build.conversions) if listed else None, gpu=build.device or "",
    )
    side.plain = sum(x.is_convolution for x in layers)
    side.products = len(layers) - side.plain
    side.ms = measured_ms(build, report)
    side.measured = side.ms is not None
    return side


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
    if not (layer.is_convolution or "gemm" in layer.type.lower() or "matmul" in layer.type.lower()):
        return None
    output = writes(layer)
    return NodeSide(
        layer.onnx_names[0] if len(layer.onnx_names) == 1 else layer.name, layer.type, computes_in(layer),
        [t.precision for t in layer.inputs[:2]], output if output != Precision.UNKNOWN else None, layer=layer.name,
        ms=cost.ms,
    )

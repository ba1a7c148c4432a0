"""An engine as a graph: layers, and the tensors between them; what DOT and SVG are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.buildlog.types import BuiltTensor
from qdqtool.engine.costs import EngineReport, LayerCost
from qdqtool.engine.layout import Linked, Placed
from qdqtool.types import Precision

INPUT, OUTPUT, LAYER = "input", "output", "layer"
_PRODUCTS = ("conv", "gemm", "matmul")


@dataclass(slots=True)
class Box(Placed):
    """A node of the drawing: a layer, or one of the network's inputs and outputs.

    ``lines`` is its text, the first the title; ``tip`` the full name; ``precision`` decides the colour.
    """

    key: str
    role: str
    lines: list[str]
    tip: str
    precision: Precision


@dataclass(slots=True)
class Arrow(Linked):
    """An edge: the tensor that one box gives to another; ``lines`` is its text."""

    tensor: str
    lines: list[str]
    precision: Precision


@dataclass(slots=True)
class Drawing:
    """A graph to draw."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)


def drawing_of(report: EngineReport) -> Drawing:
    """The graph of an engine: one box for each layer, an arrow for each tensor and reader."""
    build = report.build
    device = f", {build.device}" if build.device else ""
    time = f", {report.total_ms:.3f} ms" if report.timed else ""
    drawing = Drawing(f"{build.title}{device}: {len(report.rows)} layers{time}")
    boxes = drawing.boxes
    makers: dict[str, list[tuple[int, BuiltTensor]]] = {}  # several where a concatenation was turned into one buffer
    ends: dict[str, int] = {}
    used: set[str] = set()
    for row in report.rows:
        for tensor in row.layer.inputs:
            if tensor.tensor not in makers and tensor.tensor not in ends:
                boxes.append(_end(f"I{len(ends)}", INPUT, tensor))
                ends[tensor.tensor] = len(boxes) - 1
            used.add(tensor.tensor)
        for tensor in row.layer.inputs:
            sources = makers.get(tensor.tensor) or [(ends[tensor.tensor], tensor)]
            drawing.arrows += [_arrow(source, len(boxes), made) for source, made in sources]
        boxes.append(_box(f"L{row.index}", row))
        for tensor in row.layer.outputs:
            makers.setdefault(tensor.tensor, []).append((len(boxes) - 1, tensor))
    outputs = [name for name in build.bindings if name in makers and name not in ends]
    for name in dict.fromkeys([*outputs, *(n for n in makers if n not in used)]):
        drawing.arrows += [_arrow(source, len(boxes), made) for source, made in makers[name]]
        boxes.append(_end(f"O{len(boxes)}", OUTPUT, makers[name][-1][1]))
    return drawing


def _end(key: str, role: str, tensor: BuiltTensor) -> Box:
    return Box(key, role, [short(tensor.tensor), describe(tensor)], tensor.tensor, tensor.precision)


def _box(key: str, row: LayerCost) -> Box:
    layer = row.layer
    out = f" -> {layer.output_precision}" if layer.outputs else ""
    inputs = " + ".join(dict.fromkeys(str(t.precision) for t in layer.inputs))
    second = f"{layer.type}  {inputs}{out}" if inputs or out else layer.type
    lines = [title_of(row), second]
    if row.ms is not None:
        share = f"  {row.share:.1%}" if row.share is not None else ""
        lines.append(f"{row.ms:.4f} ms{share}")
    return Box(key, LAYER, lines, layer.name, row.precision)


def title_of(row: LayerCost) -> str:
    """The part of a fused name that people know the layer by: its convolution, else the last node."""
    fused = row.layer.fused()
    if fused.kind.startswith("reformat"):
        return f"reformat {short(fused.of, 26)}"
    if fused.kind == "copy":
        return f"copy {short(fused.of, 30)}"
    if row.layer.is_qdq:
        owner, _, op = row.layer.name.rpartition("/")
        return f"{'DQ' if op.startswith('D') else 'Q'} {short(owner, 33)}" if owner else row.layer.name
    extra = f"  (+{len(fused.alternatives) - 1})" if len(fused.alternatives) > 1 else ""
    return short(node_of(row), 36 - len(extra)) + extra


def node_of(row: LayerCost) -> str:
    """The ONNX node that multiplies in a layer, as its name or metadata say; else the last one, or the name."""
    groups = row.layer.fused().alternatives
    listed = row.layer.onnx_names if len(groups) < 2 else []  # of layers merged side by side the first one's nodes
    names = listed or next(iter(groups), []) or [row.layer.name]
    plain = [n for n in reversed(names) if not n.endswith("weight") and "uantizeLinear" not in n]
    return next((n for word in _PRODUCTS for n in plain if word in n.rsplit("/", 1)[-1].lower()), names[-1])


def _arrow(source: int, target: int, tensor: BuiltTensor) -> Arrow:
    return Arrow(source, target, tensor.tensor, [short(tensor.tensor, 30), describe(tensor)], tensor.precision)


def describe(tensor: BuiltTensor) -> str:
    """``1x64x80x80 INT8:32``: shape, precision, vector width."""
    shape = "x".join("?" if d is None else str(d) for d in tensor.shape) if tensor.shape else ""
    vector = f":{tensor.vector}" if tensor.vector > 1 else ""
    return f"{shape} {tensor.precision}{vector}".strip()


def short(name: str, width: int = 36) -> str:
    """The end of a name, which distinguishes layers, in at most ``width`` characters."""
    return name if len(name) <= width else f"...{name[-(width - 3):]}"

"""Drawing of an engine: its graph as SVG, and as DOT for Graphviz."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from html import escape

from qdqtool.buildlog.costs import EngineReport, LayerCost, format_tensor, layer_title
from qdqtool.buildlog.layout import LayoutBox, LayoutEdge, is_layout_available, lay_out
from qdqtool.buildlog.types import BuiltTensor
from qdqtool.errors import QdqtoolError
from qdqtool.ir.precision import Precision
from qdqtool.util.text import as_line, as_text, format_count, keep_end

INPUT, OUTPUT, LAYER = "input", "output", "layer"
BOX_WIDTH, ROW_GAP, COLUMN_GAP, LINE_HEIGHT, MARGIN = 276, 62, 64, 16, 30
# White outline that makes labels readable over lines. It is a separate text that is drawn before
# the label, because viewers without support for paint-order would draw an outline over the letters.
_HALO = 'fill="none" stroke="white" stroke-width="3" aria-hidden="true"'
# Colors of boxes, as in NVIDIA's engine drawings: INT8 green, FP16 orange, FP32 red.
FILL = {
    Precision.INT8: "#a5d65a",
    Precision.UINT8: "#a5d65a",
    Precision.INT4: "#7fd1ae",
    Precision.FP8: "#5cc6c0",
    Precision.FP16: "#ffc066",
    Precision.BF16: "#ffd699",
    Precision.FP32: "#f4837d",
    Precision.FLOAT: "#f4837d",
    Precision.INT32: "#c9b8e8",
    Precision.INT64: "#b7a3e0",
    Precision.BOOL: "#d9d9d9",
    Precision.UNKNOWN: "#e6e6e6",
}
# Colors of arrows and borders.
LINE = dict.fromkeys(Precision, "#5f5f5f") | {
    Precision.INT8: "#4c8a00",
    Precision.UINT8: "#4c8a00",
    Precision.INT4: "#1f8a63",
    Precision.FP8: "#11827c",
    Precision.FP16: "#c26a00",
    Precision.BF16: "#c26a00",
    Precision.FP32: "#b3261e",
    Precision.FLOAT: "#b3261e",
}
LEGEND = (Precision.INT8, Precision.FP16, Precision.FP32, Precision.INT32, Precision.UNKNOWN)


@dataclass(slots=True)
class DrawingBox(LayoutBox):
    """Box for a layer, or for an input or output of the network.

    Attributes:
        key: Identifier of the box in DOT.
        role: `INPUT` or `OUTPUT` (of the network), or `LAYER`.
        lines: Lines of the label, the title first.
        tip: Full name of the layer or tensor, for the tooltip.
        precision: Precision, which decides the color.
    """

    key: str
    role: str
    lines: list[str]
    tip: str
    precision: Precision


@dataclass(slots=True)
class DrawingArrow(LayoutEdge):
    """Tensor between two boxes.

    Attributes:
        lines: Lines of the label.
    """

    tensor: str
    lines: list[str]
    precision: Precision


@dataclass(slots=True)
class EngineDrawing:
    """Graph of an engine: boxes for layers and network tensors, arrows for tensors."""

    title: str
    boxes: list[DrawingBox] = field(default_factory=list)
    arrows: list[DrawingArrow] = field(default_factory=list)


def draw_engine(report: EngineReport) -> EngineDrawing:
    """Create the graph of an engine: boxes are layers, arrows are tensors between them."""
    drawing = EngineDrawing(_format_title(report))
    boxes = drawing.boxes
    # A tensor has several producers if the layers before a concatenation write into its result.
    producers: dict[str, list[tuple[int, BuiltTensor]]] = defaultdict(list)
    inputs: dict[str, int] = {}
    for row in report.rows:
        for tensor in row.layer.inputs:
            if tensor.tensor not in producers and tensor.tensor not in inputs:
                inputs[tensor.tensor] = len(boxes)
                boxes.append(_make_binding_box(f"I{len(inputs) - 1}", INPUT, tensor))
        for tensor in row.layer.inputs:
            sources = producers.get(tensor.tensor) or [(inputs[tensor.tensor], tensor)]
            drawing.arrows += _make_arrows(sources, len(boxes))
        boxes.append(_make_layer_box(f"L{row.index}", row))
        for tensor in row.layer.outputs:
            producers[tensor.tensor].append((len(boxes) - 1, tensor))
    bindings = [name for name in report.build.bindings if name not in inputs]
    for name in _list_outputs(report, bindings, producers.keys()):
        drawing.arrows += _make_arrows(producers[name], len(boxes))
        boxes.append(_make_binding_box(f"O{len(boxes)}", OUTPUT, producers[name][-1][1]))
    return drawing


def _list_outputs(
    report: EngineReport, bindings: Iterable[str], produced: Set[str]
) -> Iterable[str]:
    """Return the tensors that leave the engine: its bindings, and those without a consumer."""
    consumed = {tensor.tensor for row in report.rows for tensor in row.layer.inputs}
    unread = [name for name in produced if name not in consumed]
    return dict.fromkeys([*(name for name in bindings if name in produced), *unread])


def _format_title(report: EngineReport) -> str:
    build = report.build
    device = f", {build.device}" if build.device else ""
    time = f", {report.total_ms:.3f} ms" if report.has_times else ""
    return f"{build.title}{device}: {format_count(len(report.rows), 'layer')}{time}"


def _make_binding_box(key: str, role: str, tensor: BuiltTensor) -> DrawingBox:
    lines = [keep_end(tensor.tensor, 36), format_tensor(tensor)]
    return DrawingBox(key, role, lines, tensor.tensor, tensor.precision)


def _make_layer_box(key: str, row: LayerCost) -> DrawingBox:
    layer = row.layer
    output = f" -> {layer.output_precision}" if layer.outputs else ""
    inputs = " + ".join(dict.fromkeys(str(tensor.precision) for tensor in layer.inputs))
    lines = [layer_title(row), layer.type]
    if inputs or output:
        lines[1] += f"  {inputs}{output}"
    if row.ms is not None:
        share = f"  {row.share:.1%}" if row.share is not None else ""
        lines.append(f"{row.ms:.4f} ms{share}")
    return DrawingBox(key, LAYER, lines, layer.name, row.precision)


def _make_arrows(sources: Iterable[tuple[int, BuiltTensor]], target: int) -> list[DrawingArrow]:
    arrows = []
    for source, tensor in sources:
        lines = [keep_end(tensor.tensor, 30), format_tensor(tensor)]
        arrows.append(DrawingArrow(source, target, tensor.tensor, lines, tensor.precision))
    return arrows


# DOT


def format_dot(drawing: EngineDrawing) -> str:
    """Return DOT text: boxes colored by precision, edges with tensor, shape and precision."""
    lines = [
        "digraph engine {",
        f"  label={_format_label([drawing.title])}; labelloc=t; fontname=Helvetica; rankdir=TB;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11];',
        "  edge [fontname=Helvetica, fontsize=9];",
    ]
    for box in drawing.boxes:
        shape = "" if box.role == LAYER else ", shape=oval"
        label = _format_label([text for text in box.lines if text])
        colors = f'fillcolor="{FILL[box.precision]}", color="{LINE[box.precision]}"'
        lines.append(
            f"  {box.key} [label={label}, tooltip={_format_label([box.tip])}, {colors}{shape}];"
        )
    for arrow in drawing.arrows:
        color = LINE[arrow.precision]
        source, target = (drawing.boxes[place].key for place in (arrow.source, arrow.target))
        lines.append(
            f'  {source} -> {target} [label={_format_label(arrow.lines)}, color="{color}"];'
        )
    return as_text([*lines, "}"])


def _format_label(lines: Iterable[str]) -> str:
    escaped = (as_line(text).replace("\\", "\\\\").replace('"', '\\"') for text in lines)
    return '"' + "\\n".join(escaped) + '"'


# SVG


def format_svg(drawing: EngineDrawing) -> str:
    """Return the drawing as SVG.

    Raises:
        QdqtoolError: fast-sugiyama is missing, or the graph is too large.
    """
    if not is_layout_available():
        raise QdqtoolError(
            "drawing an SVG needs the package fast-sugiyama; run pip install 'qdqtool[draw]', or "
            "write DOT text for Graphviz (`dot`)",
            code="missing-package",
        )
    for box in drawing.boxes:
        box.w, box.h = BOX_WIDTH, 14 + LINE_HEIGHT * len([text for text in box.lines if text])
    size = lay_out(drawing.boxes, drawing.arrows, COLUMN_GAP, ROW_GAP, MARGIN, 40)
    if size.excess:
        raise QdqtoolError(
            f"{size.excess}; write DOT text instead (`dot`)", code="drawing-too-large"
        )
    # A character of a 16-pixel font is 9.5 pixels wide on average.
    width = max(size.width, 2 * MARGIN + 9.5 * len(drawing.title))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{size.height:.0f}" '
        f'viewBox="0 0 {width:.0f} {size.height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_draw_title_and_legend(drawing),
        *(text for arrow in drawing.arrows for text in _format_svg_arrow(arrow)),
        *(text for box in drawing.boxes for text in _format_svg_box(box)),
        "</svg>",
    ]
    return as_text(parts)


def _format_svg_arrow(arrow: DrawingArrow) -> list[str]:
    color = LINE[arrow.precision]
    x, y = arrow.points[0]
    path = f"M{x:.1f},{y:.1f}"
    for (x1, y1), (x2, y2) in itertools.pairwise(arrow.points):
        middle = (y1 + y2) / 2
        path += f" C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"
    before, (x, y) = arrow.points[-2:]
    head = f"M{x - 4:.1f},{y - 8:.1f} L{x:.1f},{y:.1f} L{x + 4:.1f},{y - 8:.1f} Z"
    label_x, label_y = (before[0] + x) / 2 + 6, (before[1] + y) / 2 - 4
    rows = [
        f'<text x="{label_x:.1f}" y="{label_y + 11 * i:.1f}" font-size="9" {paint}>'
        f"{_escape_xml(row)}</text>"
        for i, row in enumerate(arrow.lines)
        for paint in (_HALO, f'fill="{color}"')
    ]
    line = f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>'
    return [
        f'<g><title>{_escape_xml(arrow.tensor)}</title>{line}<path d="{head}" fill="{color}"/>',
        *rows,
        "</g>",
    ]


def _format_svg_box(box: DrawingBox) -> list[str]:
    radius = 6 if box.role == LAYER else box.h / 2
    parts = [
        f"<g><title>{_escape_xml(box.tip)}</title>"
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{BOX_WIDTH}" height="{box.h:.1f}" '
        f'rx="{radius:.0f}" fill="{FILL[box.precision]}" stroke="{LINE[box.precision]}"/>'
    ]
    x = box.x + box.w / 2
    for i, text in enumerate(text for text in box.lines if text):
        weight = ' font-weight="bold"' if i == 0 else ""
        baseline = box.y + 7 + LINE_HEIGHT * i + 12
        parts.append(
            f'<text x="{x:.1f}" y="{baseline:.1f}" font-size="{12 if i == 0 else 11}"{weight} '
            f'text-anchor="middle">{_escape_xml(text)}</text>'
        )
    return [*parts, "</g>"]


def _draw_title_and_legend(drawing: EngineDrawing) -> list[str]:
    used = {box.precision for box in drawing.boxes}
    parts = [
        f'<text x="{MARGIN}" y="{MARGIN}" font-size="16" font-weight="bold">'
        f"{_escape_xml(drawing.title)}</text>"
    ]
    x = float(MARGIN)
    for precision in LEGEND:
        if precision in used:
            parts += [
                f'<rect x="{x:.0f}" y="{MARGIN + 12}" width="14" height="14" '
                f'fill="{FILL[precision]}"/>',
                f'<text x="{x + 19:.0f}" y="{MARGIN + 23}" font-size="11">{precision}</text>',
            ]
            x += 90
    return parts


def _escape_xml(text: str) -> str:
    return escape(as_line(text))

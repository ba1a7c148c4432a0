"""An engine as a picture: its graph, where the boxes are and how the edges run, SVG, and DOT for Graphviz.

Layouts are made by fast-sugiyama, for the report's graphs as well. Boxes are ranked top to bottom. An edge over several
ranks is cut by invisible vertices, one in each, so that the layout keeps room for it and it is drawn around the boxes.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from qdqtool.buildlog.costs import EngineReport, LayerCost, format_tensor, layer_title
from qdqtool.buildlog.types import BuiltTensor
from qdqtool.errors import QdqtoolError
from qdqtool.types import Precision
from qdqtool.util import limits
from qdqtool.util.said import said
from qdqtool.util.text import as_line, as_text, ending

INPUT, OUTPUT, LAYER = "input", "output", "layer"
_PASS_WIDTH = 0.45  # of a column: what an edge that passes by is given
_Link = tuple[str, str]
BOX_WIDTH, ROW_GAP, COLUMN_GAP, LINE_HEIGHT, MARGIN = 276, 62, 64, 16, 30
# Labels stay readable over lines; drawn on its own, for viewers without paint-order would draw it over the label.
_HALO = 'fill="none" stroke="white" stroke-width="3" aria-hidden="true"'
# Of boxes, and of arrows and borders: those of NVIDIA's engine pictures, INT8 green, FP16 orange, FP32 red.
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


# Where boxes and edges are ----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class LayoutBox:
    """A box: its size in pixels, and its top left corner once it is laid out."""

    x: float = 0.0
    y: float = 0.0
    w: float = 0.0
    h: float = 0.0


@dataclass(slots=True)
class LayoutEdge:
    """An edge from one box to another, by their places in the drawing, and the points of its curve once laid out."""

    source: int
    target: int
    points: list[list[float]] = field(default_factory=list, kw_only=True)


def is_layout_available() -> bool:
    """Whether fast-sugiyama is there."""
    return importlib.util.find_spec("fast_sugiyama") is not None


def compute_ranks(keys: Sequence[str], edges: Sequence[_Link]) -> dict[str, int]:
    """Rank of each box: one below its deepest maker. Boxes are in an order in which makers come first."""
    ranks = dict.fromkeys(keys, 0)
    incoming: dict[str, list[str]] = defaultdict(list)
    outgoing: dict[str, list[str]] = defaultdict(list)
    for source, target in edges:
        incoming[target].append(source)
        outgoing[source].append(target)
    for key in keys:
        ranks[key] = max((ranks[source] + 1 for source in incoming[key]), default=0)
    last = max(ranks.values(), default=0)
    for key in keys:
        if not incoming[
            key
        ]:  # an input or constant is right above its first reader, a lone box below all
            ranks[key] = max(0, min((ranks[t] for t in outgoing[key]), default=last + 2) - 1)
    return ranks


def describe_excess(ranks: dict[str, int], edges: Sequence[_Link]) -> str:
    """What of a drawing is above the limits, an empty string for one that can be laid out.

    The layout is quadratic in what is in one row, and an edge is in every row that it passes.
    """
    if len(ranks) > limits.DRAWN_LAYERS:
        return f"{len(ranks)} layers are too many for a picture, the limit is {limits.DRAWN_LAYERS}"
    passed = sum(max(1, ranks[target] - ranks[source]) for source, target in edges)
    widest = max(Counter(ranks.values()).values(), default=0)
    if passed > limits.DRAWN_POINTS or widest > limits.DRAWN_ROW:
        return (
            f"{len(ranks)} layers and {len(edges)} edges, up to {widest} in one row, are too many for a picture; "
            f"the limits are {limits.DRAWN_POINTS} edges, one for each row that they pass, and "
            f"{limits.DRAWN_ROW} in a row"
        )
    return ""


def lay_out(
    boxes: Sequence[LayoutBox],
    edges: Sequence[LayoutEdge],
    column_gap: float,
    row_gap: float,
    margin: float,
    head: float = 0,
) -> tuple[float, float, str]:
    """Gives boxes and edges their places.

    Boxes are of one width, in an order in which makers come first. Gaps are in pixels, and ``head`` is what is left
    free above the first row.

    Returns:
        Width and height of the drawing, and what of it is above the limits: then nothing is placed.
    """
    keys = [f"B{i}" for i in range(len(boxes))]
    links = [(keys[e.source], keys[e.target]) for e in edges]
    ranks = compute_ranks(keys, links)
    excess = describe_excess(ranks, links)
    if excess:
        return 0.0, 0.0, excess
    box_width = max((box.w for box in boxes), default=0.0)
    centres, ways = _compute_columns(ranks, links, box_width, column_gap, margin)
    heights: dict[int, float] = defaultdict(float)
    for key, box in zip(keys, boxes, strict=True):
        heights[ranks[key]] = max(heights[ranks[key]], box.h)
    tops: dict[int, float] = {}
    y = head + margin
    for rank in range(max(ranks.values(), default=-1) + 1):
        tops[rank] = y
        y += heights[rank] + row_gap
    for key, box in zip(keys, boxes, strict=True):
        box.x = round(centres[key] - box.w / 2, 1)
        box.y = round(tops[ranks[key]] + (heights[ranks[key]] - box.h) / 2, 1)
    for number, edge in enumerate(edges):
        edge.points = [
            [round(x, 1), yy]
            for x, rank in ways[number]
            for yy in (tops[rank], tops[rank] + heights[rank])
        ]
    _attach_edges(boxes, edges)
    width = (
        max([0.0, *(b.x + b.w for b in boxes), *(x for e in edges for x, _ in e.points)]) + margin
    )
    return round(width, 1), round(y - row_gap + margin, 1), ""


def _attach_edges(boxes: Sequence[LayoutBox], edges: Sequence[LayoutEdge]) -> None:
    """Spreads the ends of edges over the bottoms and tops of boxes, in the order of where they come from."""
    for end, other, place in (("source", "target", 0), ("target", "source", -1)):
        groups: dict[int, list[tuple[float, LayoutEdge]]] = defaultdict(list)
        for edge in edges:
            far = boxes[getattr(edge, other)]
            groups[getattr(edge, end)].append(
                (edge.points[place][0] if edge.points else far.x + far.w / 2, edge)
            )
        for number, group in groups.items():
            box = boxes[number]
            y = box.y + (box.h if end == "source" else 0.0)
            for i, (_, edge) in enumerate(sorted(group, key=lambda one: one[0])):
                port = [round(box.x + box.w * (i + 1) / (len(group) + 1), 1), y]
                edge.points.insert(0 if end == "source" else len(edge.points), port)


def _compute_columns(
    ranks: dict[str, int], edges: Sequence[_Link], width: float, gap: float, margin: float
) -> tuple[dict[str, float], list[list[tuple[float, int]]]]:
    """Centre of each box in pixels, and for each edge the points between its ends: x in pixels, and the rank."""
    from fast_sugiyama import from_edges

    chains: dict[_Link, None] = {}
    passing: list[list[str]] = []
    at: dict[str, int] = dict(ranks)
    for number, (source, target) in enumerate(edges):
        passed = {f"P{number}_{rank}": rank for rank in range(ranks[source] + 1, ranks[target])}
        at |= passed
        passing.append(list(passed))
        chains |= dict.fromkeys(
            (a, b) for a, b in itertools.pairwise([source, *passed, target]) if a != b
        )
    columns: dict[str, float] = {}
    offset = 0.0
    names = list(dict.fromkeys(itertools.chain.from_iterable(chains)))
    numbers = {
        name: i for i, name in enumerate(names)
    }  # the layout follows hashes; those of text change
    # Edges are shortest in the rows that are known. To find these takes n^2, unless all begin in one row.
    begins = {at[a] for a in {a for a, _ in chains}.difference(b for _, b in chains)}
    parts = (
        from_edges(
            [(numbers[a], numbers[b]) for a, b in chains],
            vertex_spacing=4,
            ranking_type="up" if len(begins) == 1 else "minimize",
            crossing_minimization="barycenter",
        )
        if chains
        else []
    )
    for positions in sorted(sorted(part[0]) for part in parts):
        low = min(x for _, (x, _y) in positions) / 4
        columns.update({names[number]: x / 4 - low + offset for number, (x, _y) in positions})
        offset = max(columns[names[number]] for number, _ in positions) + 1.0
    alone = [key for key in ranks if key not in columns]
    columns.update({key: float(column) for column, key in enumerate(alone)})
    spread = _convert_to_pixels(columns, at, width, gap, margin)
    return spread, [[(spread[name], at[name]) for name in names] for names in passing]


def _convert_to_pixels(
    columns: dict[str, float], ranks: dict[str, int], width: float, gap: float, margin: float
) -> dict[str, float]:
    """Pixels for columns: the layout's order and proportions, boxes never overlapping in a rank."""
    pitch = width + gap
    result: dict[str, float] = {}
    edges: dict[int, float] = defaultdict(lambda: float("-inf"))  # of what each rank has so far
    for name in sorted(columns, key=lambda name: columns[name]):
        half = pitch / 2 if not name.startswith("P") else pitch * _PASS_WIDTH / 2
        result[name] = max(columns[name] * pitch, edges[ranks[name]] + half)
        edges[ranks[name]] = result[name] + half
    low = min(result.values(), default=0.0) - width / 2 - margin
    return {name: x - low for name, x in result.items()}


# The graph ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DrawingBox(LayoutBox):
    """A node of the drawing: a layer, or one of the network's inputs and outputs.

    ``lines`` is its text, the first the title; ``tip`` the full name; ``precision`` decides the colour.
    """

    key: str
    role: str
    lines: list[str]
    tip: str
    precision: Precision


@dataclass(slots=True)
class DrawingArrow(LayoutEdge):
    """An edge: the tensor that one box gives to another; ``lines`` is its text."""

    tensor: str
    lines: list[str]
    precision: Precision


@dataclass(slots=True)
class EngineDrawing:
    """A graph to draw."""

    title: str
    boxes: list[DrawingBox] = field(default_factory=list)
    arrows: list[DrawingArrow] = field(default_factory=list)


def draw_engine(report: EngineReport) -> EngineDrawing:
    """The graph of an engine: one box for each layer, an arrow for each tensor and reader."""
    build = report.build
    device = f", {build.device}" if build.device else ""
    time = f", {report.total_ms:.3f} ms" if report.has_times else ""
    drawing = EngineDrawing(f"{build.title}{device}: {len(report.rows)} layers{time}")
    boxes = drawing.boxes
    makers: dict[
        str, list[tuple[int, BuiltTensor]]
    ] = {}  # several where a concatenation was turned into one buffer
    ends: dict[str, int] = {}
    used = {tensor.tensor for row in report.rows for tensor in row.layer.inputs}
    for row in report.rows:
        for tensor in row.layer.inputs:
            if tensor.tensor not in makers and tensor.tensor not in ends:
                ends[tensor.tensor] = len(boxes)
                boxes.append(_network_box(f"I{len(ends) - 1}", INPUT, tensor))
        for tensor in row.layer.inputs:
            sources = makers.get(tensor.tensor) or [(ends[tensor.tensor], tensor)]
            drawing.arrows += [_arrow(source, len(boxes), made) for source, made in sources]
        boxes.append(_layer_box(f"L{row.index}", row))
        for tensor in row.layer.outputs:
            makers.setdefault(tensor.tensor, []).append((len(boxes) - 1, tensor))
    outputs = [name for name in build.bindings if name in makers and name not in ends]
    for name in dict.fromkeys([*outputs, *(n for n in makers if n not in used)]):
        drawing.arrows += [_arrow(source, len(boxes), made) for source, made in makers[name]]
        boxes.append(_network_box(f"O{len(boxes)}", OUTPUT, makers[name][-1][1]))
    return drawing


def _network_box(key: str, role: str, tensor: BuiltTensor) -> DrawingBox:
    return DrawingBox(
        key,
        role,
        [ending(tensor.tensor, 36), format_tensor(tensor)],
        tensor.tensor,
        tensor.precision,
    )


def _layer_box(key: str, row: LayerCost) -> DrawingBox:
    layer = row.layer
    out = f" -> {layer.output_precision}" if layer.outputs else ""
    inputs = " + ".join(dict.fromkeys(str(t.precision) for t in layer.inputs))
    second = f"{layer.type}  {inputs}{out}" if inputs or out else layer.type
    lines = [layer_title(row), second]
    if row.ms is not None:
        share = f"  {row.share:.1%}" if row.share is not None else ""
        lines.append(f"{row.ms:.4f} ms{share}")
    return DrawingBox(key, LAYER, lines, layer.name, row.precision)


def _arrow(source: int, target: int, tensor: BuiltTensor) -> DrawingArrow:
    return DrawingArrow(
        source,
        target,
        tensor.tensor,
        [ending(tensor.tensor, 30), format_tensor(tensor)],
        tensor.precision,
    )


# DOT --------------------------------------------------------------------------------------------------------------


def format_dot(drawing: EngineDrawing) -> str:
    """DOT text: boxes coloured by precision, edges labelled with tensor, shape and precision."""
    lines = [
        "digraph engine {",
        f"  label={_quote([drawing.title])}; labelloc=t; fontname=Helvetica; rankdir=TB;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11];',
        "  edge [fontname=Helvetica, fontsize=9];",
    ]
    for box in drawing.boxes:
        shape = "" if box.role == LAYER else ", shape=oval"
        label = _quote([text for text in box.lines if text])
        colours = f'fillcolor="{FILL[box.precision]}", color="{LINE[box.precision]}"'
        lines.append(f"  {box.key} [label={label}, tooltip={_quote([box.tip])}, {colours}{shape}];")
    for arrow in drawing.arrows:
        colour = LINE[arrow.precision]
        source, target = (drawing.boxes[place].key for place in (arrow.source, arrow.target))
        lines.append(f'  {source} -> {target} [label={_quote(arrow.lines)}, color="{colour}"];')
    return as_text([*lines, "}"])


def _quote(lines: Iterable[str]) -> str:
    return (
        '"'
        + "\\n".join(as_line(text).replace("\\", "\\\\").replace('"', '\\"') for text in lines)
        + '"'
    )


# SVG --------------------------------------------------------------------------------------------------------------


def format_svg(drawing: EngineDrawing) -> str:
    """The picture, without Graphviz; QdqtoolError where fast-sugiyama is missing, or there is too much to draw."""
    if not is_layout_available():
        raise QdqtoolError(
            said(
                "drawing needs fast-sugiyama: pip install 'qdqtool[draw]' (or use {`dot`} and "
                "Graphviz)"
            ),
            code="missing-package",
        )
    for box in drawing.boxes:
        box.w, box.h = BOX_WIDTH, 14 + LINE_HEIGHT * len([text for text in box.lines if text])
    width, height, excess = lay_out(drawing.boxes, drawing.arrows, COLUMN_GAP, ROW_GAP, MARGIN, 40)
    if excess:
        raise QdqtoolError(
            said("{excess}; {`dot`} writes them as text", excess=excess), code="drawing-too-large"
        )
    width = max(width, 2 * MARGIN + 9.5 * len(drawing.title))  # the title's font is 16 high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(drawing),
        *(text for arrow in drawing.arrows for text in _svg_arrow(arrow)),
        *(text for box in drawing.boxes for text in _svg_box(box)),
        "</svg>",
    ]
    return as_text(parts)


def _svg_arrow(arrow: DrawingArrow) -> list[str]:
    colour = LINE[arrow.precision]
    x, y = arrow.points[0]
    path = f"M{x:.1f},{y:.1f}"
    for (x1, y1), (x2, y2) in itertools.pairwise(arrow.points):
        middle = (y1 + y2) / 2
        path += f" C{x1:.1f},{middle:.1f} {x2:.1f},{middle:.1f} {x2:.1f},{y2:.1f}"
    before, (x, y) = arrow.points[-2:]
    head = f"M{x - 4:.1f},{y - 8:.1f} L{x:.1f},{y:.1f} L{x + 4:.1f},{y - 8:.1f} Z"
    label_x, label_y = (before[0] + x) / 2 + 6, (before[1] + y) / 2 - 4
    rows = [
        f'<text x="{label_x:.1f}" y="{label_y + 11 * i:.1f}" font-size="9" {paint}>{_escape(row)}</text>'
        for i, row in enumerate(arrow.lines)
        for paint in (_HALO, f'fill="{colour}"')
    ]
    line = f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    return [
        f'<g><title>{_escape(arrow.tensor)}</title>{line}<path d="{head}" fill="{colour}"/>',
        *rows,
        "</g>",
    ]


def _svg_box(box: DrawingBox) -> list[str]:
    round_ = 6 if box.role == LAYER else box.h / 2
    parts = [
        f'<g><title>{_escape(box.tip)}</title><rect x="{box.x:.1f}" y="{box.y:.1f}" width="{BOX_WIDTH}" '
        f'height="{box.h:.1f}" rx="{round_:.0f}" fill="{FILL[box.precision]}" stroke="{LINE[box.precision]}"/>'
    ]
    for i, text in enumerate(t for t in box.lines if t):
        weight = ' font-weight="bold"' if i == 0 else ""
        baseline = box.y + 7 + LINE_HEIGHT * i + 12
        parts.append(
            f'<text x="{box.x + box.w / 2:.1f}" y="{baseline:.1f}" font-size="{12 if i == 0 else 11}"{weight} '
            f'text-anchor="middle">{_escape(text)}</text>'
        )
    return [*parts, "</g>"]


def _legend(drawing: EngineDrawing) -> list[str]:
    used = {box.precision for box in drawing.boxes}
    parts = [
        f'<text x="{MARGIN}" y="{MARGIN}" font-size="16" font-weight="bold">{_escape(drawing.title)}</text>'
    ]
    x = float(MARGIN)
    for precision in LEGEND:
        if precision in used:
            parts.append(
                f'<rect x="{x:.0f}" y="{MARGIN + 12}" width="14" height="14" fill="{FILL[precision]}"/>'
            )
            parts.append(
                f'<text x="{x + 19:.0f}" y="{MARGIN + 23}" font-size="11">{precision}</text>'
            )
            x += 90
    return parts


def _escape(text: str) -> str:
    """Text that XML allows: no control characters, signs escaped."""
    return escape(as_line(text))

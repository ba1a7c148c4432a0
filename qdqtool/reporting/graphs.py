"""The drawings of a model: its ONNX graph with fused layers as boxes, its modules, and the engine that is predicted.

Q and DQ are no boxes: they are marks on the edges that they lie on, and those that stay in the engine are conversions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import graphlib
import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Sequence

from qdqtool.buildlog import layout
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node as OnnxNode
from qdqtool.ir.operators import WEIGHTED
from qdqtool.reporting import data
from qdqtool.reporting.nodes import ModelCollector, choose_paint
from qdqtool.reporting.page import display_name, shorten_name, strip_operator
from qdqtool.types import BYTES, Precision
from qdqtool.util import limits
from qdqtool.util.text import format_count

BOX_WIDTH, COLUMN_GAP, ROW_GAP, MARGIN = 232.0, 40.0, 66.0, 24.0
HEADER, WEIGHTED_ROW, ROW, PADDING, ENGINE_HEIGHT, END_HEIGHT = 20.0, 42.0, 22.0, 6.0, 62.0, 34.0
MOST_MODULES, FEW = 40, 12  # boxes of the overview, and boxes that are no reason to divide a module
NAME_WIDTH = 33  # characters of a name in a box
_MOST_EDGES = 4 * limits.DRAWN_POINTS  # between layers, those that are drawn as one included
_MOST_MARKS = 64  # Q and DQ on one edge
_TABLES = "The tables below hold every node."


def draw(collector: ModelCollector) -> None:
    """Writes the drawings into the collector's model."""
    boxes, edges = _OnnxDrawing(collector).run()
    collector.model.onnx = _lay_out(boxes, edges)
    collector.model.modules = data.GraphDrawing(*_draw_modules(collector.model.nodes, boxes, edges))
    if collector.model.layers:
        found = _engine(collector)
        collector.model.engine = (
            _lay_out(*found)
            if found
            else data.GraphDrawing(
                why=f"The layers of the engine have more than {_MOST_EDGES:,} edges, too many for a picture. {_TABLES}"
            )
        )
    else:
        collector.model.engine.why = f"{collector.model.target} names no layers of its engine; the ONNX graph shows the outcome of each node."


# Layout -----------------------------------------------------------------------------------------------------------


def _lay_out(boxes: list[data.Box], edges: list[data.Edge]) -> data.GraphDrawing:
    """Gives boxes and edges their places; boxes are in an order in which makers come first."""
    fixed = {"input": END_HEIGHT, "output": END_HEIGHT, "layer": ENGINE_HEIGHT}
    for box in boxes:
        box.w = BOX_WIDTH
        box.h = fixed.get(box.role) or sum(box.heights) + (
            HEADER + PADDING if box.role == "fused" else 0.0
        )
    width, height, why = layout.lay_out(boxes, edges, COLUMN_GAP, ROW_GAP, MARGIN)
    return (
        data.GraphDrawing(why=f"{why}. {_TABLES}")
        if why
        else data.GraphDrawing(boxes, edges, width, height)
    )


# The ONNX graph ---------------------------------------------------------------------------------------------------


class _OnnxDrawing:
    """Boxes are fused layers and single nodes; edges are the tensors between them.

    Attributes:
        nodes: Those that are drawn, with their places.
        home: Place of a node to that of the first node of its box.
        sources: For each node what it reads: the tensor, the place of the node that makes it (None: an input), and the
            Q and DQ between, makers first.
    """

    def __init__(self, collector: ModelCollector) -> None:
        self.collector = collector
        self.index = collector.subject.model
        self.nodes = [(collector.place[n.index], n) for n in collector.drawn()]
        first: dict[int, int] = {}
        self.home: dict[int, int] = {}
        for place, _ in self.nodes:
            layer = collector.model.nodes[place].layer
            self.home[place] = first.setdefault(layer, place) if layer >= 0 else place
        self.sources = {place: self._sources(node) for place, node in self.nodes}

    def run(self) -> tuple[list[data.Box], list[data.Edge]]:
        order = self._order()
        stuck = set(self.home.values()) - set(order)
        if stuck:  # a box that waits for itself is none
            self.home.update({place: place for place, first in self.home.items() if first in stuck})
            order = self._order()
        members: dict[int, list[int]] = defaultdict(list)
        for place, _ in self.nodes:
            members[self.home[place]].append(place)
        boxes: list[data.Box] = []
        number: dict[str | int, int] = {}  # of an input by its name, of a box by its first node
        for name in self.index.inputs:
            if any(
                n.index in self.collector.place or qdq.is_qdq(n) for n in self.index.consumers(name)
            ):
                number[name] = len(boxes)
                boxes.append(_end_box("input", name, self._tensor_precision(name)))
        for key in order:
            number[key] = len(boxes)
            boxes.append(self._box(members[key]))
        edges = self._edges(boxes, number)
        self._types(boxes, edges)
        return boxes, edges

    def _order(self) -> list[int]:
        """Boxes, makers first; those on a circle are missing."""
        links = [
            (self.home[maker], self.home[place])
            for place, sources in self.sources.items()
            for _, maker, _ in sources
            if maker is not None
        ]
        return _sort_topologically(
            dict.fromkeys(self.home.values(), 0), [(a, b) for a, b in links if a != b]
        )

    def _sources(self, node: OnnxNode) -> list[tuple[str, int | None, list[data.EdgeMark]]]:
        found: list[tuple[str, int | None, list[data.EdgeMark]]] = []
        for name in dict.fromkeys(t for t in (*node.inputs, *node.captured) if t):
            tensor, maker, marks = self._origin(name)
            if (
                maker.index in self.collector.place
                if maker is not None
                else tensor in self.index.inputs
            ):
                found.append(
                    (tensor, None if maker is None else self.collector.place[maker.index], marks)
                )
        return found

    def _origin(self, tensor: str) -> tuple[str, OnnxNode | None, list[data.EdgeMark]]:
        """What a tensor is in front of its Q and DQ: the tensor, its maker, and what was passed, makers first."""
        marks: list[data.EdgeMark] = []
        maker = self.index.producer(tensor)
        while maker is not None and qdq.is_qdq(maker) and len(marks) < _MOST_MARKS:
            stays = maker.name in self.collector.conversion_names
            marks.append(
                data.EdgeMark(display_name(maker.name), "Q" if qdq.is_q(maker) else "DQ", stays)
            )
            tensor = maker.input(0)
            maker = self.index.producer(tensor)
        return tensor, maker, marks[::-1]

    def _box(self, places: list[int]) -> data.Box:
        model = self.collector.model
        nodes = [model.nodes[p] for p in places]
        main = next((n for n in nodes if n.conv >= 0), nodes[-1])
        layer = model.layers[main.layer] if main.layer >= 0 else None
        decides = model.convs[main.conv] if main.conv >= 0 else layer
        alone = len(places) == 1
        return data.Box(
            "node" if alone else "fused",
            shorten_name(strip_operator(main.name, main.op), NAME_WIDTH),
            layer.type if layer else "",
            choose_paint(decides.precision) if decides is not None else data.OTHER,
            main.layer,
            places,
            heights=[WEIGHTED_ROW if alone or n.op in WEIGHTED else ROW for n in nodes],
        )

    def _tensor_precision(self, tensor: str) -> Precision:
        return qdq.precision_of(self.index.elem_type(tensor))

    def _edges(self, boxes: list[data.Box], number: dict[str | int, int]) -> list[data.Edge]:
        edges: dict[tuple[int, int, str], data.Edge] = {}
        for place, sources in self.sources.items():
            target = number.get(self.home[place])
            for tensor, maker, marks in sources:
                source = number.get(tensor if maker is None else self.home[maker])
                if source is None or target is None or source >= target:
                    continue
                edge = data.Edge(
                    source,
                    target,
                    display_name(tensor),
                    "",
                    "",
                    marks,
                    self.collector.shape(tensor),
                )
                known = edges.setdefault((source, target, tensor), edge)
                if known is not edge and len(marks) > len(known.marks):
                    known.marks = marks
        for name in self.index.outputs:
            tensor, node, marks = self._origin(name)
            made_at = self.collector.place.get(node.index) if node is not None else None
            source = number.get(self.home[made_at]) if made_at is not None else None
            if source is not None:
                edges[source, len(boxes), name] = data.Edge(
                    source,
                    len(boxes),
                    display_name(tensor),
                    "",
                    "",
                    marks,
                    self.collector.shape(tensor),
                )
                boxes.append(_end_box("output", name, self._tensor_precision(name)))
        return list(edges.values())

    def _types(self, boxes: list[data.Box], edges: list[data.Edge]) -> None:
        """What flows along each edge in the engine: what the maker's layer writes; past views, what came in."""
        model = self.collector.model
        into: dict[int, list[data.Edge]] = defaultdict(list)
        for edge in edges:
            into[edge.target].append(edge)
        written: dict[int, str] = {}
        for number, box in enumerate(boxes):
            for edge in into[number]:
                edge.precision = written.get(edge.source, "UNKNOWN")
                edge.paint = choose_paint(edge.precision)
            conv = next(
                (model.convs[model.nodes[p].conv] for p in box.rows if model.nodes[p].conv >= 0),
                None,
            )
            kinds = [
                self._tensor_precision(t)
                for p in box.rows[-1:]
                for t in self.index.nodes[model.nodes[p].index].outputs[:1]
            ]
            if box.role == "input":
                written[number] = box.note
            elif box.layer >= 0 and model.layers[box.layer].outputs:
                written[number] = model.layers[box.layer].outputs[0][1]
            elif conv is not None:
                written[number] = conv.output
            elif kinds and not kinds[0].is_float and kinds[0] != Precision.UNKNOWN:
                written[number] = str(kinds[0])
            else:
                sources = [e.precision for e in into[number] if e.precision != "UNKNOWN"]
                written[number] = sources[0] if sources else "UNKNOWN"
                if box.role == "node" and box.paint == data.OTHER and sources:
                    box.paint = choose_paint(written[number])


def _end_box(role: str, tensor: str, precision: Precision) -> data.Box:
    return data.Box(
        role, shorten_name(tensor, NAME_WIDTH), str(precision), choose_paint(precision), -1, []
    )


# The overview -----------------------------------------------------------------------------------------------------


def _draw_modules(
    nodes: Sequence[data.NodeEntry], boxes: Sequence[data.Box], edges: Sequence[data.Edge]
) -> tuple[list[data.Box], list[data.Edge]]:
    """The boxes of the ONNX graph by module, as the names in the model have it: ``/model.4/m.0/cv1/conv/Conv``.

    A module is a stretch of boxes that follow each other and begin with the same part of a path, so that no module
    waits for itself; where names have no path, equal stretches. The page arranges them for the width that it has.
    """
    # As the nodes are in the file where that is possible: exporters write module after module.
    places = {b: max((nodes[n].index for n in box.rows), default=-1) for b, box in enumerate(boxes)}
    order = _sort_topologically(places, [(e.source, e.target) for e in edges])
    inner = [b for b in order if boxes[b].rows]
    most = max(FEW, len(inner) // 6)
    made: list[data.Box] = []
    number: dict[int, int] = {}
    stretches = [("", [b]) for b in order if boxes[b].role == "input"]
    stretches += _split_modules(
        {b: nodes[boxes[b].rows[0]].name.strip("/").split("/")[:-1] for b in inner}, most
    )
    stretches += [("", [b]) for b in order if boxes[b].role == "output"]
    several = Counter(title for title, _ in stretches)
    seen: Counter[str] = Counter()
    for title, members in stretches:
        number.update(dict.fromkeys(members, len(made)))
        if not boxes[members[0]].rows:
            made.append(dataclasses.replace(boxes[members[0]]))
            continue
        rows = [n for b in members for n in boxes[b].rows]
        seen[title] += 1
        if not title:
            title = " to ".join(
                dict.fromkeys(shorten_name(nodes[n].name, 14) for n in (rows[0], rows[-1]))
            )
        elif several[title] > 1:
            title = f"{title} ({seen[title]})"
        paints = {boxes[b].paint for b in members} - {data.OTHER}
        made.append(
            data.Box(
                "module",
                shorten_name(title, NAME_WIDTH),
                format_count(len(rows), "node"),
                paints.pop() if len(paints) == 1 else data.OTHER,
                -1,
                rows,
            )
        )
    joined: dict[tuple[int, int], data.Edge] = {}
    for edge in edges:
        ends = number[edge.source], number[edge.target]
        known = joined.get(ends)
        if ends[0] == ends[1]:
            continue
        if known is None:
            joined[ends] = dataclasses.replace(
                edge,
                source=ends[0],
                target=ends[1],
                marks=[m for m in edge.marks if m.stays],
                points=[],
            )
            continue
        known.marks = list(dict.fromkeys([*known.marks, *(m for m in edge.marks if m.stays)]))
        if known.tensor != edge.tensor and not known.tensor.endswith(" …"):
            known.tensor, known.shape = f"{known.tensor} …", ""
        if known.paint != edge.paint:
            known.paint = data.FLOAT
    return made, list(joined.values())


def _sort_topologically(places: dict[int, int], links: Sequence[tuple[int, int]]) -> list[int]:
    """Keys of ``places``, makers first, otherwise by place; those on a circle are missing."""
    sorter = graphlib.TopologicalSorter(dict.fromkeys(places, ()))
    for source, target in links:
        sorter.add(target, source)
    with contextlib.suppress(graphlib.CycleError):
        sorter.prepare()
    number = {key: i for i, key in enumerate(places)}
    ready: list[tuple[int, int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, (places[key], number[key], key))
        order.append(heapq.heappop(ready)[-1])
        sorter.done(order[-1])
    return order


def _split_modules(paths: dict[int, list[str]], most: int) -> list[tuple[str, list[int]]]:
    """Boxes that follow each other by the shortest beginning of their paths that leaves at most ``most`` together."""
    depth = dict.fromkeys(paths, 1)
    while True:
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for box, path in paths.items():
            groups[tuple(path[: depth[box]])].append(box)
        large = [
            m for m in groups.values() if len(m) > most and any(len(paths[b]) > depth[b] for b in m)
        ]
        if not large or len(groups) >= MOST_MODULES:
            break
        for box in max(large, key=len):
            depth[box] += 1
    found: list[tuple[str, list[int]]] = []
    for box, path in paths.items():
        title = "/".join(path[: depth[box]])
        if not found or found[-1][0] != title or (not title and len(found[-1][1]) >= most):
            found.append((title, []))
        found[-1][1].append(box)
    while len(found) > MOST_MODULES:  # the two neighbours that are smallest together become one
        at = min(range(len(found) - 1), key=lambda i: len(found[i][1]) + len(found[i + 1][1]))
        names = [t for t, _ in found[at : at + 2] if t]
        common = os.path.commonpath(names) if names else ""
        if not common and names:
            common = f"{names[0].partition(' to ')[0]} to {names[-1].rpartition(' to ')[2]}"
        found[at : at + 2] = [(common, found[at][1] + found[at + 1][1])]
    return found


# The engine -------------------------------------------------------------------------------------------------------


def _engine(collector: ModelCollector) -> tuple[list[data.Box], list[data.Edge]] | None:
    """Boxes are the layers; a conversion with one reader is a mark on the edge to it. None for too many edges.

    Layers that share memory (an eliminated Concat) are joined each with each, so that edges go with the square.
    """
    model, index = collector.model, collector.subject.model
    layers = collector.subject.prediction.layers
    boxes: list[data.Box] = []
    edges: list[data.Edge] = []
    makers: dict[str, list[tuple[int, list[data.EdgeMark], str]]] = {}
    ends: dict[str, int] = {}
    read: set[str] = set()

    def sources(tensor: str, precision: str) -> list[tuple[int, list[data.EdgeMark], str]]:
        found = makers.get(tensor)
        if found is None:
            if tensor not in ends:
                ends[tensor] = len(boxes)
                boxes.append(_end_box("input", tensor, Precision(precision)))
            return [(ends[tensor], [], precision)]
        return found

    count = 0
    for number, layer in enumerate(layers):
        count += sum(len(makers.get(t.tensor, ())) for t in layer.inputs)
        if count > _MOST_EDGES:
            return None
        ways = [
            (t.tensor, way) for t in layer.inputs for way in sources(t.tensor, str(t.precision))
        ]
        read.update(t.tensor for t in layer.inputs)
        if layer.type == "Conversion" and len(layer.inputs) == 1 and len(layer.outputs) == 1:
            out = layer.outputs[0]
            mark = data.EdgeMark(
                display_name(layer.name), "Q" if out.precision in BYTES else "DQ", True
            )
            for _, (source, marks, _precision) in ways:
                makers.setdefault(out.tensor, []).append(
                    (source, [*marks, mark][-_MOST_MARKS:], str(out.precision))
                )
            continue
        place = len(boxes)
        row = model.layers[number]
        boxes.append(
            data.Box(
                "layer",
                shorten_name(row.title, NAME_WIDTH),
                row.type,
                choose_paint(row.precision),
                number,
                row.nodes,
            )
        )
        for tensor, source, passed, precision in dict.fromkeys(
            (t, way[0], tuple(way[1]), way[2]) for t, way in ways
        ):
            edges.append(
                data.Edge(
                    source,
                    place,
                    display_name(tensor),
                    precision,
                    choose_paint(precision),
                    list(passed),
                    collector.shape(tensor),
                )
            )
        for t in layer.outputs:
            makers.setdefault(t.tensor, []).append((place, [], str(t.precision)))
    for name in dict.fromkeys(
        [*(n for n in index.outputs if n in makers), *(t for t in makers if t not in read)]
    ):
        boxes.append(_end_box("output", name, Precision(makers[name][-1][2])))
        for source, marks, precision in makers[name]:
            edges.append(
                data.Edge(
                    source,
                    len(boxes) - 1,
                    display_name(name),
                    precision,
                    choose_paint(precision),
                    marks,
                    collector.shape(name),
                )
            )
    return boxes, edges

"""Drawings of a model: ONNX graph with fused layers, modules, and engine.

Q and DQ are marks on edges, not boxes. The page highlights marks of conversions that remain in the
engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import graphlib
import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from qdqtool.buildlog import layout
from qdqtool.ir import qdq
from qdqtool.ir.graph import Node as OnnxNode
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.precision import EIGHT_BITS, Precision
from qdqtool.reporting import data
from qdqtool.reporting.nodes import ModelCollector, choose_paint
from qdqtool.reporting.page import display_name, shorten_name, strip_operator
from qdqtool.trt.result import EngineLayer
from qdqtool.util import limits
from qdqtool.util.text import format_count

BOX_WIDTH, COLUMN_GAP, ROW_GAP, MARGIN = 232.0, 40.0, 66.0, 24.0
HEADER, WEIGHTED_ROW, ROW, PADDING, ENGINE_HEIGHT, END_HEIGHT = 20.0, 42.0, 22.0, 6.0, 62.0, 34.0
MAX_MODULES = 40  # maximum number of boxes in the overview of modules
MIN_SPLIT = 12  # modules with at most this number of boxes are never split
NAME_WIDTH = 33  # maximum number of characters of a name in a box
# Maximum number of connections between layers, counted before parallel connections are joined.
_MAX_EDGES = 4 * limits.DRAWN_POINTS
_MAX_MARKS = 64  # maximum number of Q and DQ on one edge
_TABLES = "The tables below list every node."


def add_drawings(collector: ModelCollector) -> None:
    """Add the three drawings of a model to the page.

    If a drawing is too large or its layers are unknown, it has no boxes, and its ``why`` states the
    reason.
    """
    model = collector.model
    boxes, edges = _OnnxDrawing(collector).build()
    model.onnx = _lay_out_drawing(boxes, edges)
    model.modules = _draw_modules(model.nodes, boxes, edges)
    if not model.layers:
        model.engine.why = (
            f"The engine layers of {model.target} are unknown. The ONNX graph shows the outcome of "
            "each node."
        )
        return
    engine = _EngineDrawing(collector)
    if engine.build():
        model.engine = _lay_out_drawing(engine.boxes, engine.edges)
    else:
        model.engine.why = (
            f"The layers of the engine have more than {_MAX_EDGES:,} edges, "
            f"too many for a drawing. {_TABLES}"
        )


def _lay_out_drawing(boxes: list[data.Box], edges: list[data.Edge]) -> data.GraphDrawing:
    """Set the coordinates of boxes and edges, and return the drawing; empty if this fails.

    The boxes must be in topological order.
    """
    fixed = {"input": END_HEIGHT, "output": END_HEIGHT, "layer": ENGINE_HEIGHT}
    for box in boxes:
        border = HEADER + PADDING if box.role == "fused" else 0.0
        box.w = BOX_WIDTH
        box.h = fixed.get(box.role) or sum(box.heights) + border
    size = layout.lay_out(boxes, edges, COLUMN_GAP, ROW_GAP, MARGIN)
    if size.excess:
        return data.GraphDrawing(why=f"{size.excess}. {_TABLES}")
    return data.GraphDrawing(boxes, edges, size.width, size.height)


def _create_binding_box(role: str, tensor: str, precision: Precision) -> data.Box:
    title = shorten_name(tensor, NAME_WIDTH)
    return data.Box(role, title, str(precision), choose_paint(precision), -1, [])


# The ONNX graph -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TensorOrigin:
    """The float tensor before the Q and DQ at a node's input.

    Attributes:
        tensor: Name of the tensor.
        producer: Position of the drawn node that produces the tensor; None without such a node,
            for example for a network input.
        marks: Q and DQ between the tensor and the node, in the order of the data.
    """

    tensor: str
    producer: int | None
    marks: list[data.EdgeMark]


class _OnnxDrawing:
    """Creates the drawing of the ONNX graph, with a box for each fused layer or single node.

    Attributes:
        nodes: Position and ONNX node of each drawn node.
        first_nodes: Position of the first node in the same box, by position of the node.
        origins: Origins of the node's inputs, by position of the node.
    """

    def __init__(self, collector: ModelCollector) -> None:
        self.collector = collector
        self.model = collector.model
        self.index = collector.subject.model
        self.nodes = [(collector.positions[n.index], n) for n in collector.drawable_nodes()]
        first_of_layer: dict[int, int] = {}
        self.first_nodes: dict[int, int] = {}
        for position, _ in self.nodes:
            layer = self.model.nodes[position].layer
            first = first_of_layer.setdefault(layer, position) if layer >= 0 else position
            self.first_nodes[position] = first
        self.origins = {position: self._find_origins(node) for position, node in self.nodes}

    def build(self) -> tuple[list[data.Box], list[data.Edge]]:
        order = self._sort_boxes()
        cyclic = set(self.first_nodes.values()) - set(order)
        if cyclic:  # fused layers that depend on each other are drawn as single nodes
            for position, first in self.first_nodes.items():
                if first in cyclic:
                    self.first_nodes[position] = position
            order = self._sort_boxes()
        members: dict[int, list[int]] = defaultdict(list)
        for position, _ in self.nodes:
            members[self.first_nodes[position]].append(position)
        boxes: list[data.Box] = []
        # Number of each box, by name of the network input or by position of the first node.
        numbers: dict[str | int, int] = {}
        for name in filter(self._has_consumer, self.index.inputs):
            numbers[name] = len(boxes)
            boxes.append(_create_binding_box("input", name, self._tensor_precision(name)))
        for first in order:
            numbers[first] = len(boxes)
            boxes.append(self._create_node_box(members[first]))
        edges = self._connect_nodes(numbers)
        edges += self._add_outputs(boxes, numbers)
        self._set_precisions(boxes, edges)
        return boxes, edges

    def _has_consumer(self, tensor: str) -> bool:
        return any(
            node.index in self.collector.positions or qdq.is_qdq(node)
            for node in self.index.consumers(tensor)
        )

    def _sort_boxes(self) -> list[int]:
        """Return the position of each box's first node, in topological order of the boxes.

        Boxes on a cycle, and boxes that depend on a cycle, are left out.
        """
        links = []
        for position, origins in self.origins.items():
            target = self.first_nodes[position]
            links += [
                (self.first_nodes[origin.producer], target)
                for origin in origins
                if origin.producer is not None and self.first_nodes[origin.producer] != target
            ]
        return _sort_topologically(dict.fromkeys(self.first_nodes.values(), 0), links)

    def _find_origins(self, node: OnnxNode) -> list[_TensorOrigin]:
        tensors = dict.fromkeys(node.consumed_tensors)
        origins = map(self._find_origin, tensors)
        return [o for o in origins if o.producer is not None or o.tensor in self.index.inputs]

    def _find_origin(self, tensor: str) -> _TensorOrigin:
        marks: list[data.EdgeMark] = []
        producer = self.index.producer(tensor)
        while producer is not None and qdq.is_qdq(producer) and len(marks) < _MAX_MARKS:
            is_conversion = producer.name in self.collector.conversion_names
            kind = "Q" if qdq.is_q(producer) else "DQ"
            marks.append(data.EdgeMark(display_name(producer.name), kind, is_conversion))
            tensor = producer.input(0)
            producer = self.index.producer(tensor)
        position = None if producer is None else self.collector.positions.get(producer.index)
        return _TensorOrigin(tensor, position, marks[::-1])

    def _create_node_box(self, positions: list[int]) -> data.Box:
        nodes = [self.model.nodes[p] for p in positions]
        main = next((n for n in nodes if n.conv >= 0), nodes[-1])
        layer = self.model.layers[main.layer] if main.layer >= 0 else None
        single = len(positions) == 1
        return data.Box(
            role="node" if single else "fused",
            title=shorten_name(strip_operator(main.name, main.op), NAME_WIDTH),
            note=(layer.remark or layer.type) if layer else "",
            paint=self._node_paint(main),
            layer=main.layer,
            rows=positions,
            heights=[WEIGHTED_ROW if single or n.op in WEIGHTED else ROW for n in nodes],
        )

    def _node_paint(self, node: data.NodeEntry) -> str:
        if node.conv >= 0:
            return choose_paint(self.model.convs[node.conv].precision)
        if node.layer >= 0:
            return choose_paint(self.model.layers[node.layer].precision)
        return data.OTHER

    def _tensor_precision(self, tensor: str) -> Precision:
        return qdq.precision_of(self.index.elem_type(tensor))

    def _create_edge(
        self, source: int, target: int, tensor: str, marks: list[data.EdgeMark]
    ) -> data.Edge:
        """Return an edge without precision, which :meth:`_set_precisions` sets later."""
        shape = self.collector.format_shape(tensor)
        return data.Edge(source, target, display_name(tensor), "", "", marks, shape)

    def _connect_nodes(self, numbers: dict[str | int, int]) -> list[data.Edge]:
        """Return the edges between boxes: one for each tensor and pair of boxes."""
        edges: dict[tuple[int, int, str], data.Edge] = {}
        for position, origins in self.origins.items():
            target = numbers.get(self.first_nodes[position])
            for origin in origins:
                source = self._find_box(origin, numbers)
                if source is None or target is None or source >= target:
                    continue
                new = self._create_edge(source, target, origin.tensor, origin.marks)
                edge = edges.setdefault((source, target, origin.tensor), new)
                if len(new.marks) > len(edge.marks):
                    edge.marks = new.marks
        return list(edges.values())

    def _find_box(self, origin: _TensorOrigin, numbers: dict[str | int, int]) -> int | None:
        """Return the number of the box that produces a tensor; None if no box produces it."""
        if origin.producer is None:
            return numbers.get(origin.tensor)
        return numbers.get(self.first_nodes[origin.producer])

    def _add_outputs(self, boxes: list[data.Box], numbers: dict[str | int, int]) -> list[data.Edge]:
        edges = []
        for name in self.index.outputs:
            origin = self._find_origin(name)
            source = None if origin.producer is None else self._find_box(origin, numbers)
            if source is not None:
                edges.append(self._create_edge(source, len(boxes), origin.tensor, origin.marks))
                boxes.append(_create_binding_box("output", name, self._tensor_precision(name)))
        return edges

    def _set_precisions(self, boxes: list[data.Box], edges: list[data.Edge]) -> None:
        """Set type and color of each edge, and the color of boxes with the type of their input."""
        incoming: dict[int, list[data.Edge]] = defaultdict(list)
        for edge in edges:
            incoming[edge.target].append(edge)
        written: dict[int, str] = {}
        for number, box in enumerate(boxes):
            for edge in incoming[number]:
                edge.precision = written.get(edge.source, "UNKNOWN")
                edge.paint = choose_paint(edge.precision)
            precision = self._output_precision(box)
            if precision is None:
                precision = _inherit_precision(box, incoming[number])
            written[number] = precision

    def _output_precision(self, box: data.Box) -> str | None:
        """Return the data type of a box's output; None if it is that of the box's input."""
        if box.role == "input":
            return box.note
        if box.layer >= 0 and self.model.layers[box.layer].outputs:
            return self.model.layers[box.layer].outputs[0][1]
        nodes = [self.model.nodes[p] for p in box.rows]
        for node in nodes:
            if node.conv >= 0:
                return self.model.convs[node.conv].output
        return self._stored_precision(nodes[-1]) if nodes else None

    def _stored_precision(self, node: data.NodeEntry) -> str | None:
        """Return the data type of a node's output in the file; None if it is float or unknown."""
        outputs = self.index.nodes[node.index].outputs
        if not outputs:
            return None
        precision = self._tensor_precision(outputs[0])
        return None if precision.is_float or precision == Precision.UNKNOWN else str(precision)


# The overview -------------------------------------------------------------------------------------


def _draw_modules(
    nodes: Sequence[data.NodeEntry], boxes: Sequence[data.Box], edges: Sequence[data.Edge]
) -> data.GraphDrawing:
    """Return the overview, which has one box for each module of the network.

    The boxes have no coordinates, because the page arranges them for its width.
    """
    modules = _find_modules(nodes, boxes, edges)
    repeated = Counter(title for title, _ in modules)
    seen: Counter[str] = Counter()
    module_boxes: list[data.Box] = []
    numbers: dict[int, int] = {}
    for title, members in modules:
        numbers.update(dict.fromkeys(members, len(module_boxes)))
        member_boxes = [boxes[b] for b in members]
        if not member_boxes[0].rows:
            module_boxes.append(dataclasses.replace(member_boxes[0]))
            continue
        seen[title] += 1
        if title and repeated[title] > 1:
            title = f"{title} ({seen[title]})"
        module_boxes.append(_create_module_box(title, member_boxes, nodes))
    return data.GraphDrawing(module_boxes, _join_edges(edges, numbers))


def _find_modules(
    nodes: Sequence[data.NodeEntry], boxes: Sequence[data.Box], edges: Sequence[data.Edge]
) -> list[tuple[str, list[int]]]:
    """Return the title and the boxes of each module, in topological order.

    The path in the nodes' names determines the modules (``/model.4/m.0/cv1/conv/Conv``). A module
    is a run of consecutive boxes with the same path, so no module depends on itself. Nodes without
    a path are split into runs of equal length. Each network input and output is a separate module.
    """
    # The order of the nodes in the file is kept where possible, because exporters write module
    # after module.
    places = {b: max((nodes[n].index for n in box.rows), default=-1) for b, box in enumerate(boxes)}
    order = _sort_topologically(places, [(e.source, e.target) for e in edges])
    paths = {
        b: nodes[boxes[b].rows[0]].name.strip("/").split("/")[:-1] for b in order if boxes[b].rows
    }
    inputs, outputs = (
        [("", [b]) for b in order if boxes[b].role == role] for role in ("input", "output")
    )
    return [*inputs, *_split_modules(paths, max(MIN_SPLIT, len(paths) // 6)), *outputs]


def _create_module_box(
    title: str, members: Sequence[data.Box], nodes: Sequence[data.NodeEntry]
) -> data.Box:
    rows = [n for box in members for n in box.rows]
    if not title:
        ends = [shorten_name(nodes[n].name, 14) for n in (rows[0], rows[-1])]
        title = " to ".join(dict.fromkeys(ends))
    paints = {box.paint for box in members} - {data.OTHER}
    return data.Box(
        role="module",
        title=shorten_name(title, NAME_WIDTH),
        note=format_count(len(rows), "node"),
        paint=paints.pop() if len(paints) == 1 else data.OTHER,
        layer=-1,
        rows=rows,
    )


def _join_edges(edges: Sequence[data.Edge], numbers: dict[int, int]) -> list[data.Edge]:
    """Join all edges between two modules into one edge; keep only the marks of conversions."""
    joined: dict[tuple[int, int], data.Edge] = {}
    for edge in edges:
        source, target = numbers[edge.source], numbers[edge.target]
        if source == target:
            continue
        conversions = [mark for mark in edge.marks if mark.stays]
        if (source, target) not in joined:
            joined[source, target] = dataclasses.replace(
                edge, source=source, target=target, marks=conversions, points=[]
            )
            continue
        common = joined[source, target]
        common.marks = list(dict.fromkeys([*common.marks, *conversions]))
        if common.tensor != edge.tensor and not common.tensor.endswith(" …"):
            common.tensor, common.shape = f"{common.tensor} …", ""
        if common.paint != edge.paint:
            common.paint = data.FLOAT
    return list(joined.values())


def _sort_topologically(places: dict[int, int], links: Sequence[tuple[int, int]]) -> list[int]:
    """Return keys in topological order, and in the order of their places where possible.

    Keys on a cycle, and keys that depend on a cycle, are left out.

    Args:
        places: Preferred place of each key.
        links: Pairs of a key and a key that depends on it.
    """
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


def _split_modules(paths: dict[int, list[str]], limit: int) -> list[tuple[str, list[int]]]:
    """Split a sequence of boxes into runs with a common path.

    Args:
        paths: Path of each box, in topological order.
        limit: Maximum number of boxes of a run, as far as the paths allow.
    """
    depth = _choose_depths(paths, limit)
    runs: list[tuple[str, list[int]]] = []
    for box, path in paths.items():
        title = "/".join(path[: depth[box]])
        if not runs or runs[-1][0] != title or (not title and len(runs[-1][1]) >= limit):
            runs.append((title, []))
        runs[-1][1].append(box)
    while len(runs) > MAX_MODULES:  # the two neighboring runs with the fewest boxes are joined
        sizes = [len(members) for _, members in runs]
        i = min(range(len(runs) - 1), key=lambda i: sizes[i] + sizes[i + 1])
        (first, first_members), (second, second_members) = runs[i : i + 2]
        runs[i : i + 2] = [(_join_titles(first, second), first_members + second_members)]
    return runs


def _choose_depths(paths: dict[int, list[str]], limit: int) -> dict[int, int]:
    """Return the number of leading path parts that name the module of each box.

    Modules have at most `limit` boxes where possible.
    """
    depth = dict.fromkeys(paths, 1)
    while True:
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for box, path in paths.items():
            groups[tuple(path[: depth[box]])].append(box)
        large = [
            members
            for members in groups.values()
            if len(members) > limit and any(len(paths[b]) > depth[b] for b in members)
        ]
        if not large or len(groups) >= MAX_MODULES:
            return depth
        for box in max(large, key=len):
            depth[box] += 1


def _join_titles(first: str, second: str) -> str:
    titles = [title for title in (first, second) if title]
    if not titles:
        return ""
    common = os.path.commonpath(titles)
    return common or f"{titles[0].partition(' to ')[0]} to {titles[-1].rpartition(' to ')[2]}"


# The engine ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TensorSource:
    """Box that produces a tensor, and the conversions between the box and the tensor."""

    box: int
    precision: str
    marks: tuple[data.EdgeMark, ...] = ()


@dataclass
class _EngineDrawing:
    """Creates the drawing of the engine: a box for each layer, conversions as marks on edges.

    TensorRT eliminates Concats, so each producer of a Concat input is connected to each consumer,
    and the number of edges can be quadratic.
    """

    collector: ModelCollector
    boxes: list[data.Box] = field(default_factory=list)
    edges: list[data.Edge] = field(default_factory=list)
    sources: dict[str, list[_TensorSource]] = field(default_factory=dict)
    inputs: dict[str, _TensorSource] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)

    def build(self) -> bool:
        """Create boxes and edges, and return whether the edges are few enough to be drawn."""
        count = 0
        for number, layer in enumerate(self.collector.engine.layers):
            count += sum(len(self.sources.get(t.tensor, ())) for t in layer.inputs)
            if count > _MAX_EDGES:
                return False
            self._add_layer(number, layer)
        network_outputs = (n for n in self.collector.subject.model.outputs if n in self.sources)
        unused = (tensor for tensor in self.sources if tensor not in self.consumed)
        for name in dict.fromkeys([*network_outputs, *unused]):
            box = len(self.boxes)
            self._add_binding_box("output", name, self.sources[name][-1].precision)
            for source in self.sources[name]:
                self._add_edge(box, name, source)
        return True

    def _add_conversion(self, layer: EngineLayer, sources: Sequence[_TensorSource]) -> None:
        output = layer.outputs[0]
        kind = "Q" if output.precision in EIGHT_BITS else "DQ"
        mark = data.EdgeMark(display_name(layer.name), kind, True)
        for source in sources:
            marks = (*source.marks, mark)[-_MAX_MARKS:]
            converted = _TensorSource(source.box, str(output.precision), marks)
            self.sources.setdefault(output.tensor, []).append(converted)

    def _add_layer(self, number: int, layer: EngineLayer) -> None:
        sources = [
            (t.tensor, source)
            for t in layer.inputs
            for source in self._find_sources(t.tensor, str(t.precision))
        ]
        self.consumed.update(t.tensor for t in layer.inputs)
        if layer.type == "Conversion" and len(layer.inputs) == 1 and len(layer.outputs) == 1:
            self._add_conversion(layer, [source for _, source in sources])
            return
        box = len(self.boxes)
        entry = self.collector.model.layers[number]
        title = shorten_name(entry.title, NAME_WIDTH)
        paint = choose_paint(entry.precision)
        self.boxes.append(data.Box("layer", title, entry.type, paint, number, entry.nodes))
        for tensor, source in dict.fromkeys(sources):
            self._add_edge(box, tensor, source)
        for t in layer.outputs:
            self.sources.setdefault(t.tensor, []).append(_TensorSource(box, str(t.precision)))

    def _find_sources(self, tensor: str, precision: str) -> list[_TensorSource]:
        """Return the sources of a tensor; add an input box if no layer produces the tensor."""
        if tensor in self.sources:
            return self.sources[tensor]
        if tensor not in self.inputs:
            self.inputs[tensor] = _TensorSource(len(self.boxes), precision)
            self._add_binding_box("input", tensor, precision)
        return [dataclasses.replace(self.inputs[tensor], precision=precision)]

    def _add_binding_box(self, role: str, tensor: str, precision: str) -> None:
        """Add a box for a tensor that no layer produces, or no layer consumes.

        ``precision`` is the type in the engine's list of layers. A float input or output of the
        network has its type in the model.
        """
        model = self.collector.subject.model
        shown = Precision(precision)
        if tensor in model.inputs or model.is_output(tensor):
            stored = qdq.precision_of(model.elem_type(tensor))
            shown = stored if shown == Precision.FLOAT and stored.is_float else shown
        self.boxes.append(_create_binding_box(role, tensor, shown))

    def _add_edge(self, box: int, tensor: str, source: _TensorSource) -> None:
        self.edges.append(
            data.Edge(
                source=source.box,
                target=box,
                tensor=display_name(tensor),
                precision=source.precision,
                paint=choose_paint(source.precision),
                marks=list(source.marks),
                shape=self.collector.format_shape(tensor),
            )
        )


def _inherit_precision(box: data.Box, incoming: Sequence[data.Edge]) -> str:
    """Return the precision of a box that has the type of its input, such as a view.

    A box of one node also gets the color of the precision.
    """
    inputs = [edge.precision for edge in incoming if edge.precision != "UNKNOWN"]
    if not inputs:
        return "UNKNOWN"
    if box.role == "node" and box.paint == data.OTHER:
        box.paint = choose_paint(inputs[0])
    return inputs[0]

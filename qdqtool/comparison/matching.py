"""Match the nodes of two ONNX graphs by structure and name.

If an exporter numbers its nodes, one name may belong to different nodes of two exports. Structure
therefore decides first. Names decide between nodes of equal structure, but only if most of the
nodes that are paired by structure alone have equal names.

Q and DQ are skipped, so that a float model, its Q/DQ versions, and the output of an exporter or a
simplifier have the same structure. Nodes with weights are the anchors. Each anchor has a color. The
first color stands for the operator and the shape of the weights. Each round refines the colors by
the colors of the neighbors (Weisfeiler and Leman).
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qdqtool.ir.graph import Node
from qdqtool.ir.qdq import is_qdq
from qdqtool.patterns.view import View

_MAX_ROUNDS = 24
# First round whose colors may pair several nodes of equal color. Colors of earlier rounds pair
# only single nodes.
_MIN_ORDERED_ROUND = 4
# Maximum number of anchors stored per tensor, to limit the cost of very wide Concats.
_MAX_NEIGHBORS = 32
# Names are used if at least this share of the pairs found by structure has equal names.
_MIN_EQUAL_NAMES = 0.8
# If structure pairs no nodes, names are used if at least this share of the smaller graph's anchors
# has a name that is in both graphs.
_MIN_COMMON_NAMES = 0.5
# Maximum number of unpaired nodes that are aligned in order. The cost is quadratic.
_MAX_SEQUENCE = 3000
# Minimum likeness of two graphs of one network. Exports of one network have 1.0; YOLOv8n and
# YOLO11n have 0.2.
MIN_LIKENESS = 0.6
_PRODUCTS = ("Gemm", "MatMul")
_UNPAIRED = -(10**6)  # color of an anchor without a partner


@dataclass(slots=True)
class NodeMatching:
    """Pairs of corresponding nodes of two graphs.

    Attributes:
        pairs: Node of the second graph by the index of its partner in the first graph.
        by: ``names`` if at least half of the pairs have equal names, otherwise ``structure``.
        likeness: Share of the smaller graph's anchors that have a partner with the same neighbors.
    """

    pairs: dict[int, Node] = field(default_factory=dict)
    by: str = "names"
    likeness: float = 1.0


def is_same_network(first: View, second: View, matching: NodeMatching) -> bool:
    """Return whether two graphs are versions of one network, by their matched nodes."""
    has_weights = bool(first.nodes_with_weights or second.nodes_with_weights)
    has_pairs = any(n.index in matching.pairs for n in first.nodes_with_weights)
    return matching.likeness >= MIN_LIKENESS and (has_pairs or not has_weights)


@dataclass(slots=True)
class AnchorGraph:
    """Nodes with weights ("anchors") of a graph, and which anchors are neighbors.

    Attributes:
        anchors: Nodes with constant weights, in the order of the view.
        signatures: Operator, shape of the weights, strides, dilations and groups of each anchor.
        upstream: Indices of the nearest anchors upstream of each node, by node index. Input i of
            the network has the index -1 - i.
        downstream: Indices of the nearest anchors downstream of each node, by node index.
    """

    view: View
    anchors: list[Node]
    signatures: dict[int, Hashable]
    upstream: dict[int, frozenset[int]]
    downstream: dict[int, frozenset[int]]

    def name(self, index: int) -> str:
        """Return the name of a node by index."""
        return self.view.model.nodes[index].name


def build_anchor_graph(view: View) -> AnchorGraph:
    """Find the anchors of a graph and their neighbors."""
    anchors = [n for n in view.nodes_with_weights if n.input(1) and view.weights(n).folded]
    indices = {n.index for n in anchors}
    signatures = {n.index: _signature(view, n) for n in anchors}
    upstream, downstream = (
        _find_anchors_upstream(view, indices),
        _find_anchors_downstream(view, indices),
    )
    return AnchorGraph(view, anchors, signatures, upstream, downstream)


def _find_anchors_upstream(view: View, anchors: set[int]) -> dict[int, frozenset[int]]:
    upstream: dict[int, frozenset[int]] = {}
    producers = {name: frozenset({-1 - i}) for i, name in enumerate(view.model.inputs)}
    for node in view.model.ordered:
        inputs = [t for t in _data_inputs(node, anchors) if t not in view.constants]
        upstream[node.index] = _unite_limited(producers.get(t, frozenset()) for t in inputs)
        source = frozenset({node.index}) if node.index in anchors else upstream[node.index]
        producers.update(dict.fromkeys(node.outputs, source))
    return upstream


def _find_anchors_downstream(view: View, anchors: set[int]) -> dict[int, frozenset[int]]:
    downstream: dict[int, frozenset[int]] = {}
    consumers: dict[str, frozenset[int]] = {}
    for node in reversed(view.model.ordered):
        downstream[node.index] = _unite_limited(consumers.get(t, frozenset()) for t in node.outputs)
        sink = frozenset({node.index}) if node.index in anchors else downstream[node.index]
        for tensor in _data_inputs(node, anchors):
            consumers[tensor] = _unite_limited([consumers.get(tensor, frozenset()), sink])
    return downstream


def _data_inputs(node: Node, anchors: set[int]) -> list[str]:
    has_single_data = node.index in anchors or is_qdq(node)
    inputs = node.inputs[:1] if has_single_data else (*node.inputs, *node.captured)
    return [tensor for tensor in inputs if tensor]


def _unite_limited(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    union = frozenset[int]().union(*sets)
    return frozenset(sorted(union)[:_MAX_NEIGHBORS]) if len(union) > _MAX_NEIGHBORS else union


def _signature(view: View, node: Node) -> Hashable:
    shape = tuple(view.model.constant_shape(view.weights(node).source) or ())
    if node.op in _PRODUCTS:
        return "product", tuple(sorted(shape))
    strides, dilations = (
        _spatial_attribute(node, n, len(shape) - 2) for n in ("strides", "dilations")
    )
    return node.op, shape, strides, dilations, node.integer("group", 1)


def _spatial_attribute(node: Node, name: str, axes: int) -> tuple[int, ...]:
    """Return an attribute with one integer per spatial axis; all 1 if the attribute is unset."""
    value = node.attributes.get(name)
    return tuple(value) if isinstance(value, list) else (1,) * axes


def match_nodes(first_view: View, second_view: View) -> NodeMatching:
    """Pair the nodes of two graphs; Q, DQ and constants have no partner."""
    first, second = build_anchor_graph(first_view), build_anchor_graph(second_view)
    rounds = _refine_colors(first, second)
    pairs: dict[int, int] = {}
    late_rounds = rounds[: _MIN_ORDERED_ROUND - 1 : -1]
    for colors in late_rounds:
        _pair_single_nodes(colors, pairs)
    use_names = _are_names_consistent(first, second, pairs)
    for colors in late_rounds:
        _pair_classes(first, second, colors, pairs, use_names)
    if use_names:
        _pair_equal_names(first, second, pairs)
    for colors in rounds[:_MIN_ORDERED_ROUND][::-1]:
        _pair_single_nodes(colors, pairs)
    _pair_in_order(first, second, pairs)
    nodes = {n.index: n for n in second_view.model.nodes}
    same = sum(first.name(i) == second.name(j) for i, j in pairs.items())
    matching = NodeMatching(
        {i: nodes[j] for i, j in pairs.items()},
        by="names" if 2 * same >= len(pairs) else "structure",
        likeness=_measure_likeness(first, second, pairs),
    )
    _pair_nodes_without_weights(first, second, matching, use_names)
    return matching


def _measure_likeness(first: AnchorGraph, second: AnchorGraph, pairs: Mapping[int, int]) -> float:
    """Return the share of the smaller graph's anchors whose partner has the same neighbors.

    1 if a graph has no anchors.

    A pair counts if an upstream neighbor of one node is the partner of an upstream neighbor of the
    other node, or if both nodes have no upstream neighbors. The same must hold downstream.
    """
    smaller = min(len(first.anchors), len(second.anchors))
    if not smaller:
        return 1.0
    agree = 0
    for i, j in pairs.items():
        sides = (
            (first.upstream[i], second.upstream[j]),
            (first.downstream[i], second.downstream[j]),
        )
        agree += all(_has_matched_neighbors(ours, theirs, pairs) for ours, theirs in sides)
    return agree / smaller


def _has_matched_neighbors(
    ours: frozenset[int], theirs: frozenset[int], pairs: Mapping[int, int]
) -> bool:
    """Return whether a node of `ours` has its partner in `theirs`, or both sets are empty."""
    return (not ours and not theirs) or bool(
        {pairs.get(i, i if i < 0 else None) for i in ours} & theirs
    )


Colors = tuple[dict[int, int], dict[int, int]]
"""Colors of the anchors of the first and the second graph, by node index."""


def _refine_colors(first: AnchorGraph, second: AnchorGraph) -> list[Colors]:
    """Return the colors after each round of refinement.

    Nodes with equal colors have equal surroundings up to a distance that grows with each round.
    """
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def color_set(neighbors: frozenset[int], colors: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(sorted(colors.get(i, i if i < 0 else _UNPAIRED) for i in neighbors))

    def refine(graph: AnchorGraph, colors: Mapping[int, int]) -> dict[int, int]:
        return {
            i: number(
                (c, color_set(graph.upstream[i], colors), color_set(graph.downstream[i], colors))
            )
            for i, c in colors.items()
        }

    left, right = (
        {i: number(("own", signature)) for i, signature in graph.signatures.items()}
        for graph in (first, second)
    )
    rounds = [(left, right)]
    classes = 0
    for _ in range(_MAX_ROUNDS):
        refined = len({*left.values(), *right.values()})
        if refined == classes:
            break
        classes = refined
        left, right = refine(first, left), refine(second, right)
        rounds.append((left, right))
    return rounds


def _find_unpaired_classes(
    colors: Colors, pairs: dict[int, int]
) -> list[tuple[list[int], list[int]]]:
    """Return the unpaired nodes of each color, if both graphs have equally many of them."""
    classes: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, paired in enumerate((set(pairs), set(pairs.values()))):
        for index, color in colors[side].items():
            if index not in paired:
                classes[color][side].append(index)
    return [sides for sides in classes.values() if len(sides[0]) == len(sides[1])]


def _pair_single_nodes(colors: Colors, pairs: dict[int, int]) -> None:
    for left, right in _find_unpaired_classes(colors, pairs):
        if len(left) == 1:
            pairs[left[0]] = right[0]


def _pair_classes(
    first: AnchorGraph,
    second: AnchorGraph,
    colors: Colors,
    pairs: dict[int, int],
    use_names: bool,
) -> None:
    """Pair nodes of equal color in place: by names if `use_names`, and the rest in order."""
    for left, right in _find_unpaired_classes(colors, pairs):
        names = {second.name(j): j for j in right} if use_names else {}
        by_name: dict[int, int] = {}
        for i in left:
            partner = names.pop(first.name(i), None)
            if partner is not None:
                by_name[i] = partner
        paired = set(by_name.values())
        rest = [j for j in right if j not in paired]
        pairs |= by_name
        pairs |= zip((i for i in left if i not in by_name), rest, strict=True)


def _are_names_consistent(
    first: AnchorGraph, second: AnchorGraph, pairs: Mapping[int, int]
) -> bool:
    """Return whether equal names stand for equal nodes in both graphs.

    The names are checked against the pairs found by structure. Without such pairs, they are
    checked against the signatures of the anchors.
    """
    indices = {n.name: n.index for n in second.anchors}
    if pairs:
        agree = [j == indices[first.name(i)] for i, j in pairs.items() if first.name(i) in indices]
        return bool(agree) and sum(agree) >= _MIN_EQUAL_NAMES * len(agree)
    common = [n for n in first.anchors if n.name in indices]
    if any(first.signatures[n.index] != second.signatures[indices[n.name]] for n in common):
        return False
    return len(common) >= _MIN_COMMON_NAMES * min(len(first.anchors), len(second.anchors))


def _find_unpaired_anchors(
    first: AnchorGraph, second: AnchorGraph, pairs: dict[int, int]
) -> tuple[list[Node], list[Node]]:
    paired = set(pairs.values())
    left = [n for n in first.anchors if n.index not in pairs]
    return left, [n for n in second.anchors if n.index not in paired]


def _pair_equal_names(first: AnchorGraph, second: AnchorGraph, pairs: dict[int, int]) -> None:
    left, right = _find_unpaired_anchors(first, second, pairs)
    indices = {n.name: n.index for n in right}
    for node in left:
        partner = indices.get(node.name)
        if partner is not None and first.signatures[node.index] == second.signatures[partner]:
            pairs[node.index] = partner


def _pair_in_order(first: AnchorGraph, second: AnchorGraph, pairs: dict[int, int]) -> None:
    left, right = _find_unpaired_anchors(first, second, pairs)
    if max(len(left), len(right)) > _MAX_SEQUENCE:
        return
    numbers: dict[Hashable, int] = {}
    ours = [numbers.setdefault(first.signatures[n.index], len(numbers)) for n in left]
    theirs = [numbers.setdefault(second.signatures[n.index], len(numbers)) for n in right]
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        pairs.update((left[a + k].index, right[b + k].index) for k in range(size))


def _pair_nodes_without_weights(
    first: AnchorGraph, second: AnchorGraph, matching: NodeMatching, use_names: bool
) -> None:
    """Add pairs of nodes without weights: by name if `use_names`, the others by surroundings.

    Surroundings are the operator and the neighboring anchors.
    """
    left, right = _nodes_without_weights(first), _nodes_without_weights(second)
    partners = {i: n.index for i, n in matching.pairs.items()}
    keys = {n.index: _neighbor_key(first, n, partners) for n in left}
    counts = Counter(keys.values())
    by_name = {n.name: n for n in right} if use_names else {}
    by_key: dict[Hashable, list[Node]] = defaultdict(list)
    for node in right:
        by_key[_neighbor_key(second, node, None)].append(node)
    paired: set[int] = set()
    for node in left:
        partner = by_name.get(node.name)
        if partner is None or partner.op != node.op or partner.index in paired:
            key = keys[node.index]
            candidates = by_key.get(key, [])
            free = (n for n in candidates if n.index not in paired)
            partner = next(free, None) if counts[key] == len(candidates) else None
        if partner is not None:
            matching.pairs[node.index] = partner
            paired.add(partner.index)


def _nodes_without_weights(graph: AnchorGraph) -> Sequence[Node]:
    anchors = {n.index for n in graph.anchors}
    return [
        n
        for n in graph.view.model.ordered
        if not (
            n.index in anchors
            or is_qdq(n)
            or n.op == "Constant"
            or n.output in graph.view.constants
        )
    ]


def _neighbor_key(graph: AnchorGraph, node: Node, partners: Mapping[int, int] | None) -> Hashable:
    """Return a key that consists of a node's operator and its neighboring anchors.

    `partners` translates indices of anchors to indices in the second graph. If it is None, the
    indices remain unchanged.
    """
    sides = (graph.upstream[node.index], graph.downstream[node.index])
    if partners is None:
        return node.op, *sides
    return node.op, *(
        frozenset(partners.get(i, i if i < 0 else _UNPAIRED) for i in side) for side in sides
    )

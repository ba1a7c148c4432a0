"""Which node of one ONNX graph is which of another: by structure, and by names where these agree with it.

Exporters that number their nodes give one name to different nodes of two exports. A name counts where structure leaves
a choice, and only if the nodes that structure alone distinguishes have equal names too.

Q and DQ are looked through, so that a float model, its Q/DQ versions and what an exporter or a simplifier made of them
have the same structure. Nodes with weights are the anchors: each has a color made of its own shape and, round by round,
of the colors around it (Weisfeiler and Leman's refinement).
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qdqtool.ir.graph import Node
from qdqtool.ir.qdq import is_qdq
from qdqtool.patterns.view import View

_ROUNDS = 24
_DISTINCTIVE = 4  # rounds from which on a class of several nodes is paired in order
_NEIGHBOURS = (
    32  # anchors remembered for each tensor: a Concat of a thousand needs no more to be recognised
)
_TRUSTED = 0.8  # share of equal names among pairs found by structure from which on names decide what is left
_COMMON = 0.5  # the same where structure finds no pair at all: share of names that both have
_SEQUENCE = 3000  # nodes left over that are still aligned in order
ALIKE = 0.6  # likeness from which on two graphs are of one network: exports of one have 1.0, YOLOv8n and YOLO11n 0.2
_PRODUCTS = ("Gemm", "MatMul")


@dataclass(slots=True)
class Matching:
    """Pairs of nodes: index of a node of the first graph to the node of the second.

    Attributes:
        by: ``names`` where most pairs have the same name, otherwise ``structure``.
        likeness: Share of the smaller graph's nodes with weights that have a partner in the same surroundings.
    """

    pairs: dict[int, Node] = field(default_factory=dict)
    by: str = "names"
    likeness: float = 1.0


@dataclass(slots=True)
class Skeleton:
    """A graph without its Q and DQ.

    Attributes:
        anchors: Nodes with weights, in order.
        signatures: Anchor to what it is by itself: family, dimensions of the weights, strides, groups.
        above: Node index to the anchors (and network inputs, as negative numbers) that it reads, directly or through
            other nodes.
        below: Node index to the anchors that read it.
    """

    view: View
    anchors: list[Node]
    signatures: dict[int, Hashable]
    above: dict[int, frozenset[int]]
    below: dict[int, frozenset[int]]


def skeleton_of(view: View) -> Skeleton:
    """The graph as matching sees it."""
    model = view.model
    anchors = [n for n in view.weighted if n.input(1) and view.weights(n).folded]
    known = {n.index for n in anchors}
    above: dict[int, frozenset[int]] = {}
    tensors: dict[str, frozenset[int]] = {
        name: frozenset({-1 - i}) for i, name in enumerate(model.inputs)
    }
    for node in model.ordered:
        read = [t for t in _data_inputs(node, known) if t and t not in view.constants]
        above[node.index] = _union(tensors.get(t, frozenset()) for t in read)
        for tensor in node.outputs:
            tensors[tensor] = frozenset({node.index}) if node.index in known else above[node.index]
    readers: dict[str, frozenset[int]] = {}
    below: dict[int, frozenset[int]] = {}
    for node in reversed(model.ordered):
        below[node.index] = _union(readers.get(t, frozenset()) for t in node.outputs)
        seen = frozenset({node.index}) if node.index in known else below[node.index]
        for tensor in _data_inputs(node, known):
            if tensor:
                readers[tensor] = _union([readers.get(tensor, frozenset()), seen])
    return Skeleton(view, anchors, {n.index: _signature(view, n) for n in anchors}, above, below)


def _data_inputs(node: Node, anchors: set[int]) -> Sequence[str]:
    return (
        node.inputs[:1] if node.index in anchors or is_qdq(node) else (*node.inputs, *node.captured)
    )


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    found: set[int] = set()
    for one in sets:
        found |= one
    return frozenset(sorted(found)[:_NEIGHBOURS]) if len(found) > _NEIGHBOURS else frozenset(found)


def _signature(view: View, node: Node) -> Hashable:
    shape = tuple(view.model.constant_shape(view.weights(node).source) or ())
    if node.op in _PRODUCTS:
        return "product", tuple(sorted(shape))
    strides, dilations = (_each(node, name, len(shape) - 2) for name in ("strides", "dilations"))
    return node.op, shape, strides, dilations, node.integer("group", 1)


def _each(node: Node, name: str, axes: int) -> tuple[int, ...]:
    """An attribute of each spatial axis, which is 1 where it is not given."""
    given = node.attributes.get(name)
    return tuple(given) if isinstance(given, list) else (1,) * axes


def match(first: View, second: View) -> Matching:
    """Pairs the nodes of two graphs; Q, DQ and constants have no partner."""
    one, two = skeleton_of(first), skeleton_of(second)
    rounds = _rounds(one, two)
    pairs: dict[int, int] = {}
    distinctive = rounds[: _DISTINCTIVE - 1 : -1]
    for colors in distinctive:
        _pair_classes(one, two, *colors, pairs, alone=True)
    named = _names_agree(one, two, pairs)
    for colors in distinctive:
        _pair_classes(one, two, *colors, pairs, named=named)
    if named:
        _pair_names(one, two, pairs)
    for colors in rounds[:_DISTINCTIVE][::-1]:
        _pair_classes(one, two, *colors, pairs, alone=True)
    _pair_in_order(one, two, pairs)
    nodes = {n.index: n for n in second.model.nodes}
    result = Matching({i: nodes[j] for i, j in pairs.items()}, likeness=_likeness(one, two, pairs))
    same = sum(first.model.nodes[i].name == n.name for i, n in result.pairs.items())
    result.by = "names" if 2 * same >= len(pairs) else "structure"
    _pair_others(one, two, result, named)
    return result


def _likeness(one: Skeleton, two: Skeleton, pairs: Mapping[int, int]) -> float:
    """Share of the anchors whose partner has their partners around it, or as little around it as they."""

    def fits(i: int, j: int) -> bool:
        around = [(one.above[i], two.above[j]), (one.below[i], two.below[j])]
        agree = sum(
            bool({pairs.get(x, x if x < 0 else None) for x in mine} & theirs)
            or not (mine or theirs)
            for mine, theirs in around
        )
        return agree == len(around)

    fewer = min(len(one.anchors), len(two.anchors))
    return sum(fits(i, j) for i, j in pairs.items()) / fewer if fewer else 1.0


def _rounds(one: Skeleton, two: Skeleton) -> list[tuple[dict[int, int], dict[int, int]]]:
    """Colors of the anchors of both graphs after each round, the coarsest first; equal numbers mean alike."""
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def start(graph: Skeleton) -> dict[int, int]:
        return {i: number(("own", s)) for i, s in graph.signatures.items()}

    def refine(graph: Skeleton, colors: Mapping[int, int]) -> dict[int, int]:
        def of(found: frozenset[int]) -> tuple[int, ...]:
            return tuple(sorted(colors.get(i, i if i < 0 else -(10**6)) for i in found))

        return {i: number((c, of(graph.above[i]), of(graph.below[i]))) for i, c in colors.items()}

    colors = start(one), start(two)
    found = [colors]
    classes = 0
    for _ in range(_ROUNDS):
        now = len({*colors[0].values(), *colors[1].values()})
        if now == classes:
            break
        classes = now
        colors = refine(one, colors[0]), refine(two, colors[1])
        found.append(colors)
    return found


def _pair_classes(
    one: Skeleton,
    two: Skeleton,
    first: Mapping[int, int],
    second: Mapping[int, int],
    pairs: dict[int, int],
    *,
    alone: bool = False,
    named: bool = False,
) -> None:
    """Pairs what has the same color and is as often in both: if ``named`` same names first, then in order."""
    left: dict[int, list[int]] = defaultdict(list)
    right: dict[int, list[int]] = defaultdict(list)
    for colors, done, classes in ((first, set(pairs), left), (second, set(pairs.values()), right)):
        for index, color in colors.items():
            if index not in done:
                classes[color].append(index)
    for color, members in left.items():
        others = right.get(color, [])
        if len(members) != len(others) or (alone and len(members) != 1):
            continue
        names = {two.view.model.nodes[j].name: j for j in others} if named else {}
        found = {
            i: j
            for i in members
            if (j := names.pop(one.view.model.nodes[i].name, None)) is not None
        }
        used = set(found.values())
        rest = zip(
            (i for i in members if i not in found),
            (j for j in others if j not in used),
            strict=True,
        )
        pairs.update({**found, **dict(rest)})


def _names_agree(one: Skeleton, two: Skeleton, pairs: Mapping[int, int]) -> bool:
    """Whether names say what structure says of the nodes that it distinguishes, or of themselves if there is none."""
    names = {n.name: n.index for n in two.anchors}
    if pairs:
        asked = [
            j == names[name]
            for i, j in pairs.items()
            if (name := one.view.model.nodes[i].name) in names
        ]
        return bool(asked) and sum(asked) >= _TRUSTED * len(asked)
    common = [n for n in one.anchors if n.name in names]
    alike = sum(one.signatures[n.index] == two.signatures[names[n.name]] for n in common)
    return alike == len(common) and alike >= _COMMON * min(len(one.anchors), len(two.anchors))


def _left(one: Skeleton, two: Skeleton, pairs: dict[int, int]) -> tuple[list[Node], list[Node]]:
    """The anchors of both that have no partner yet."""
    taken = set(pairs.values())
    return [n for n in one.anchors if n.index not in pairs], [
        n for n in two.anchors if n.index not in taken
    ]


def _pair_names(one: Skeleton, two: Skeleton, pairs: dict[int, int]) -> None:
    left, right = _left(one, two, pairs)
    named = {n.name: n.index for n in right}
    pairs |= {
        n.index: named[n.name]
        for n in left
        if n.name in named and one.signatures[n.index] == two.signatures[named[n.name]]
    }


def _pair_in_order(one: Skeleton, two: Skeleton, pairs: dict[int, int]) -> None:
    left, right = _left(one, two, pairs)
    if max(len(left), len(right)) > _SEQUENCE:
        return
    keys: dict[Hashable, int] = {}
    first = [keys.setdefault(one.signatures[n.index], len(keys)) for n in left]
    second = [keys.setdefault(two.signatures[n.index], len(keys)) for n in right]
    for a, b, size in difflib.SequenceMatcher(
        None, first, second, autojunk=False
    ).get_matching_blocks():
        pairs.update((left[a + k].index, right[b + k].index) for k in range(size))


def _pair_others(one: Skeleton, two: Skeleton, result: Matching, named: bool) -> None:
    """Nodes without weights: by operator and the anchors around them, and if ``named`` by name."""
    mapped = {i: n.index for i, n in result.pairs.items()}
    weighted = {n.index for n in one.anchors}, {n.index for n in two.anchors}

    def others(graph: Skeleton, own: set[int]) -> list[Node]:
        return [
            n
            for n in graph.view.model.ordered
            if n.index not in own
            and not is_qdq(n)
            and n.op != "Constant"
            and n.output not in graph.view.constants
        ]

    def around(graph: Skeleton, node: Node, names: Mapping[int, int] | None) -> Hashable:
        def of(found: frozenset[int]) -> frozenset[int]:
            return (
                found
                if names is None
                else frozenset(names.get(i, i if i < 0 else -(10**6)) for i in found)
            )

        return node.op, of(graph.above[node.index]), of(graph.below[node.index])

    right = others(two, weighted[1])
    by_name = {n.name: n for n in right} if named else {}
    by_place: dict[Hashable, list[Node]] = defaultdict(list)
    for node in right:
        by_place[around(two, node, None)].append(node)
    taken: set[int] = set()
    left = others(one, weighted[0])
    places = Counter(around(one, n, mapped) for n in left)
    for node in left:
        found = by_name.get(node.name)
        if found is None or found.op != node.op or found.index in taken:
            key = around(one, node, mapped)
            free = [n for n in by_place.get(key, ()) if n.index not in taken]
            found = free[0] if free and places[key] == len(by_place[key]) else None
        if found is not None:
            result.pairs[node.index] = found
            taken.add(found.index)

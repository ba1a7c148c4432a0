"""What can be chosen in a network: convolutions, scale groups, residuals, attention, branches of the head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qdqtool.graph import Model
from qdqtool.insertion.placement import Placement
from qdqtool.onnxgraph.attention import attentions
from qdqtool.onnxgraph.heads import find_head
from qdqtool.operators import WEIGHTED
from qdqtool.tuning.configuration import FLOAT, Configuration, Planner

INT8 = "int8"
OWN = "own-scale"
CONVOLUTION, GROUP, RESIDUAL, HEAD, ATTENTION = "convolution", "group", "residual", "head", "attention"
METHODS = ("focus", "mse", "max", "percentile")
_FEWEST_BITS = 0.5  # that a tensor has to lose in its group before a scale of its own is worth a look


@dataclass(frozen=True)
class Site:
    """Something that can be chosen.

    Attributes:
        name: Of the convolution or residual; the first tensor of a group; ``branch of`` and a last convolution.
        kind: ``convolution``, ``group``, ``residual``, ``head`` or ``attention`` (of products without weights).
        nodes: Names of the nodes that are float where it is.
        tensors: Activations that are not quantized any more then.
        default: ``int8``, or ``float`` for what the head preset leaves float.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    default: str = INT8

    def as_float(self) -> Configuration:
        return Configuration(floats=frozenset(self.nodes))


@dataclass(frozen=True)
class Candidate:
    """One choice at one site, everything else as it is."""

    site: Site
    choice: str
    configuration: Configuration


def find_sites(planner: Planner) -> list[Site]:
    """All sites of a network, no two of them with the same nodes."""
    model = planner.model
    placement = planner.placement(Configuration())
    found: dict[frozenset[str], Site] = {}

    def add(name: str, kind: str, nodes: Iterable[str], default: str = INT8) -> None:
        names = tuple(dict.fromkeys(nodes))
        if names and frozenset(names) not in found:
            found[frozenset(names)] = Site(name, kind, names, _freed(placement, set(names)), default)

    order = {n.index: i for i, n in enumerate(model.ordered)}
    weighted = {w.node.index for w in placement.weights}
    placed = sorted({r.node.index for rs in placement.readers.values() for r in rs}, key=order.__getitem__)
    for index in placed:
        node = model.nodes[index]
        other = ATTENTION if node.op in WEIGHTED else RESIDUAL
        add(node.name, CONVOLUTION if index in weighted else other, [node.name])
    for found_attention in attentions(model):
        both = [n.name for n in (found_attention.scores, found_attention.values) if n.index in placed]
        add(f"attention of {found_attention.softmax.name}", ATTENTION, both)
    for group in planner.groups(placement):
        readers = sorted({r.node.index for t in group.quantized for r in placement.readers[t]}, key=order.__getitem__)
        add(group.quantized[0], GROUP, [model.nodes[i].name for i in readers])
    for name, nodes in _branches(model, placed).items():
        add(name, HEAD, nodes)
    ends = find_head(model).finals & set(placed)
    if len(ends) > 1:
        add("last convolutions", HEAD, [model.nodes[i].name for i in sorted(ends, key=order.__getitem__)])
    for nodes in _left_by_preset(planner, placement):
        add(nodes[0], HEAD, nodes, FLOAT)
    return list(found.values())


def _freed(placement: Placement, nodes: set[str]) -> tuple[str, ...]:
    """Tensors all of whose quantized readers are among the nodes."""
    return tuple(t for t, rs in placement.readers.items() if all(r.node.name in nodes for r in rs))


def _branches(model: Model, placed: Iterable[int]) -> Mapping[str, list[str]]:
    """Quantized nodes from which one last convolution alone is reached, by that convolution."""
    head = find_head(model)
    ends = head.finals | head.boxes
    if len(ends) < 2:
        return {}
    reached: dict[str, frozenset[int]] = {}
    of_node: dict[int, frozenset[int]] = {}
    for node in reversed(model.ordered):
        behind = frozenset().union(*(reached.get(t, frozenset()) for t in node.outputs))
        if node.index in ends:
            behind = behind | {node.index}
        of_node[node.index] = behind
        for tensor in (*node.inputs, *node.captured):
            if tensor:
                reached[tensor] = reached.get(tensor, frozenset()) | behind
    branches: dict[str, list[str]] = {}
    for index in placed:
        if len(of_node[index]) == 1:
            end = model.nodes[next(iter(of_node[index]))].name
            branches.setdefault(f"branch of {end}", []).append(model.nodes[index].name)
    return {name: nodes for name, nodes in branches.items() if len(nodes) > 1}


def _left_by_preset(planner: Planner, placement: Placement) -> list[list[str]]:
    """What the head preset leaves float and could be INT8: each node, and all of them; the DFL stays."""
    head = find_head(planner.model)
    left = {w.node.index for w in placement.weights}
    ends = [
        n.name for n in planner.model.ordered
        if n.index in (head.boxes | head.finals) - head.dfl - left and n.op in WEIGHTED
    ]
    if not ends:
        return []
    tried = planner.placement(Configuration(quantized=frozenset(ends)))
    ends = [n for n in ends if any(w.node.name == n for w in tried.weights)]
    return [[n] for n in ends] + ([ends] if len(ends) > 1 else [])


def candidates(sites: Iterable[Site]) -> list[Candidate]:
    """Every choice other than the default: float (INT8 where the preset says float), and a scale of its own."""
    found = []
    for site in sites:
        if site.default == FLOAT:
            found.append(Candidate(site, INT8, Configuration(quantized=frozenset(site.nodes))))
        else:
            found.append(Candidate(site, FLOAT, site.as_float()))
    return found


def other_scales(planner: Planner, sites: Iterable[Site]) -> list[Candidate]:
    """Other methods and scales of their own for the tensors of sites; those that change a scale by 5 % and more."""
    base = Configuration()
    plan = planner.plan(base)
    by_tensor = {t: s for s in plan.scales for t in s.group.quantized}
    found: dict[Configuration, Candidate] = {}
    for site in sites:
        for tensor in site.tensors:
            scale = by_tensor[tensor]
            first = scale.group.quantized[0]
            seen = [scale.scale]
            for method in METHODS:
                other, _ = planner.scale(scale.group, method)
                if all(abs(other.scale / s - 1.0) > 0.05 for s in seen):
                    seen.append(other.scale)
                    changed = Configuration(methods=frozenset({(first, method)}))
                    found.setdefault(changed, Candidate(site, method, changed))
            if scale.group.tied and tensor in planner.statistics:
                own = next((m.bits_lost for m in scale.members if m.tensor == tensor), 0.0)
                if own >= _FEWEST_BITS:
                    apart = Configuration(apart=frozenset({tensor}))
                    found.setdefault(apart, Candidate(site, OWN, apart))
    return list(found.values())

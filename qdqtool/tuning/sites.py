"""What can be chosen where, which choices are worth measuring, and how they are put together.

Never measured is a choice that cannot pay, whatever its accuracy:

* ``INT8 gains nothing here``: with the site float the network is predicted to be no slower; the site is float at once;
* ``a larger site costs no more``: another choice leaves these nodes and others float for the same cost or less;
* ``between two conversions``: the nodes alone are float, every activation that they read stays INT8 for others, and
  conversions are added in front and behind: only the rounding of these weights goes, and that is the smallest part of
  the error (weights per channel), at the highest price;
* ``INT8 gains nothing here`` for what the preset leaves float: quantizing it is predicted to bring no time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qdqtool.insertion.placement import Placement
from qdqtool.ir.graph import Model
from qdqtool.ir.operators import WEIGHTED
from qdqtool.patterns.heads import find_attentions, find_coordinates, find_head
from qdqtool.tuning.configuration import FLOAT, Configuration, Cost, Planner

INT8 = "int8"
OWN = "own-scale"
CONVOLUTION, GROUP, RESIDUAL, HEAD, ATTENTION = (
    "convolution",
    "group",
    "residual",
    "head",
    "attention",
)
METHODS = ("focus", "mse", "max", "percentile")
_FEWEST_BITS = (
    0.5  # that a tensor has to lose in its group before a scale of its own is worth a look
)


@dataclass(frozen=True)
class Site:
    """Something that can be chosen."""

    name: str  # of the convolution or residual; the first tensor of a group; ``branch of`` and a last convolution
    kind: str  # ``convolution``, ``group``, ``residual``, ``head`` or ``attention`` (of products without weights)
    nodes: tuple[str, ...]  # names of the nodes that are float where it is
    tensors: tuple[str, ...]  # activations that are not quantized any more then
    default: str = INT8  # ``int8``, or ``float`` for what the head preset leaves float

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

    order = {n.index: i for i, n in enumerate(model.ordered)}
    weighted = {w.node.index for w in placement.weights}
    placed = sorted(
        {r.node.index for rs in placement.inputs.values() for r in rs}, key=order.__getitem__
    )

    def add(name: str, kind: str, indices: Iterable[int], default: str = INT8) -> None:
        names = tuple(model.nodes[i].name for i in sorted(set(indices), key=order.__getitem__))
        key = frozenset(names)
        if names and key not in found:
            freed = tuple(
                t for t, rs in placement.inputs.items() if all(r.node.name in key for r in rs)
            )
            found[key] = Site(name, kind, names, freed, default)

    for index in placed:
        node = model.nodes[index]
        other = ATTENTION if node.op in WEIGHTED else RESIDUAL
        add(node.name, CONVOLUTION if index in weighted else other, [index])
    for one in find_attentions(model):
        add(
            f"attention of {one.softmax.name}",
            ATTENTION,
            {one.scores.index, one.values.index}.intersection(placed),
        )
    for group in planner.groups(placement):
        add(
            group.quantized[0],
            GROUP,
            (r.node.index for t in group.quantized for r in placement.inputs[t]),
        )
    for name, nodes in _branches(model, placed).items():
        add(name, HEAD, nodes if len(nodes) > 1 else ())
    ends = find_head(model).finals.intersection(placed)
    add("last convolutions", HEAD, ends if len(ends) > 1 else ())
    left = _left_by_preset(planner, placement)
    for nodes in [[i] for i in left] + [left]:
        if nodes:
            add(model.nodes[nodes[0]].name, HEAD, nodes, FLOAT)
    return list(found.values())


def _branches(model: Model, placed: Iterable[int]) -> Mapping[str, list[int]]:
    """Quantized nodes from which one last convolution alone is reached, by that convolution."""
    ends = find_head(model).last_convolutions
    branches: dict[str, list[int]] = defaultdict(list)
    if len(ends) < 2:
        return branches
    reached: dict[str, frozenset[int]] = defaultdict(frozenset)
    of_node: dict[int, frozenset[int]] = {}
    for node in reversed(model.ordered):
        behind = frozenset({node.index} & ends).union(*(reached[t] for t in node.outputs))
        of_node[node.index] = behind
        for tensor in filter(None, (*node.inputs, *node.captured)):
            reached[tensor] |= behind
    for index in placed:
        if len(of_node[index]) == 1:
            branches[f"branch of {model.nodes[min(of_node[index])].name}"].append(index)
    return branches


def _left_by_preset(planner: Planner, placement: Placement) -> list[int]:
    """Nodes that the head preset leaves float and that could be INT8; the DFL stays."""
    head = find_head(planner.model)
    places = find_coordinates(planner.model, head.finals).all
    left = {w.node.index for w in placement.weights}
    ends = [
        n
        for n in planner.model.ordered
        if n.index in (head.last_convolutions | places) - head.dfl - left and n.op in WEIGHTED
    ]
    if not ends:
        return []
    tried = planner.placement(Configuration(quantized=frozenset(n.name for n in ends)))
    quantized = {w.node.index for w in tried.weights}
    return [n.index for n in ends if n.index in quantized]


def candidates(sites: Iterable[Site]) -> list[Candidate]:
    """Every choice other than the default: float, or INT8 where the preset says float."""
    return [
        Candidate(site, INT8, Configuration(quantized=frozenset(site.nodes)))
        if site.default == FLOAT
        else Candidate(site, FLOAT, site.as_float())
        for site in sites
    ]


def other_scales(planner: Planner, sites: Iterable[Site]) -> list[Candidate]:
    """Other methods and scales of their own for the tensors of sites; those that change a scale by 5 % and more."""
    by_tensor = {t: s for s in planner.plan(Configuration()).scales for t in s.group.quantized}
    found: dict[Configuration, Candidate] = {}
    for site in sites:
        for tensor in site.tensors:
            scale = by_tensor[tensor]
            seen = [scale.scale]
            for method in METHODS:
                other, _ = planner.scale(scale.group, method)
                if all(abs(other.scale / s - 1.0) > 0.05 for s in seen):
                    seen.append(other.scale)
                    changed = Configuration(methods=frozenset({(scale.group.quantized[0], method)}))
                    found.setdefault(changed, Candidate(site, method, changed))
            if scale.group.is_shared and tensor in planner.statistics:
                own = next((m.bits_lost for m in scale.members if m.tensor == tensor), 0.0)
                if own >= _FEWEST_BITS:
                    apart = Configuration(apart=frozenset({tensor}))
                    found.setdefault(apart, Candidate(site, OWN, apart))
    return list(found.values())


# Which choices are worth measuring -----------------------------------------------------------------------------------

FREE = "INT8 gains nothing here: float is predicted to be no slower"
NO_GAIN = "INT8 is predicted to be no faster here"
BETWEEN = "would be float between two conversions, and what it reads stays INT8 for others"
LARGER = "costs as much as leaving {} float, which frees more"


@dataclass(frozen=True)
class Judged:
    """A candidate, what it costs, and why it is not measured (empty where it is)."""

    candidate: Candidate
    cost: Cost
    why_not: str = ""


def judge(
    found: Sequence[Candidate], cost: Callable[[Configuration], Cost]
) -> tuple[Configuration, list[Judged]]:
    """Decides which candidates to measure: floats, and INT8 for what the preset leaves float.

    Returns what is float from the start because it costs nothing, and all candidates.
    """
    before = cost(Configuration())
    costs = [cost(candidate.configuration) for candidate in found]
    free = Configuration()
    floats = [(c, k) for c, k in zip(found, costs, strict=True) if c.choice == FLOAT]
    for candidate, single in sorted(floats, key=lambda x: x[1].value):
        if single.value <= before.value:
            joined = free.joined(candidate.configuration)
            if cost(joined).value <= cost(free).value:
                free = joined
    start = cost(free)
    judged = []
    for candidate, single in zip(found, costs, strict=True):
        nodes = candidate.configuration.floats
        if candidate.choice != FLOAT:
            why = NO_GAIN if single.value >= before.value else ""
        elif nodes <= free.floats:
            why = FREE
        elif larger := next(
            (o for o, k in floats if nodes < o.configuration.floats and k.value <= single.value),
            None,
        ):
            why = LARGER.format(larger.site.name)
        else:
            between = not candidate.site.tensors and single.conversions - before.conversions >= 2
            why = BETWEEN if between else ""
        judged.append(
            Judged(candidate, single if not free.floats else _moved(single, before, start), why)
        )
    return free, judged


def _moved(single: Cost, before: Cost, start: Cost) -> Cost:
    """A candidate's cost seen from the start, to which the free floats belong."""
    ms = None
    if single.ms is not None and before.ms is not None and start.ms is not None:
        ms = single.ms + start.ms - before.ms
    return Cost(
        single.convolutions,
        single.int8 + start.int8 - before.int8,
        single.conversions + start.conversions - before.conversions,
        ms,
    )


# Combinations --------------------------------------------------------------------------------------------------------

_LONGEST = 48
_SMALLEST_COST = 1e-6
_TRIED = 4  # choices whose cost is predicted anew at each step, best first


@dataclass(frozen=True)
class Gain:
    """A measured choice."""

    configuration: Configuration  # the choice alone
    gain: float  # squared output error that it takes away from everything INT8
    cost: float  # what it adds, alone


def estimated(gains: Sequence[Gain], chosen: Configuration) -> float:
    """Gain of a combination: that of the choices it is made of, no node counted twice, the larger gains first."""
    covered: set[str] = set()
    total = 0.0
    for gain in gains:
        nodes = gain.configuration.floats
        if nodes and nodes <= chosen.floats and not nodes & covered:
            covered |= nodes
            total += gain.gain
    return total


def chain(
    start: Configuration,
    found: Iterable[Gain],
    cost: Callable[[Configuration], Cost],
    neighbours: Mapping[str, frozenset[str]],
) -> Iterator[Configuration]:
    """Adds choices one by one, each time the one with the most gain for what it adds to the predicted cost.

    Neighbours of what is float already cost less: the conversion between them goes. So costs are predicted for the
    combination, anew for those that the last choice touches and for the best.
    """
    gains = sorted(found, key=lambda g: (-g.gain, sorted(g.configuration.floats)))
    here = start
    value, reached = cost(here).value, estimated(gains, here)
    known = {g: g.cost for g in gains}
    for _ in range(_LONGEST):
        ranked = []
        for gain in gains:
            joined = here.joined(gain.configuration)
            if joined == here:
                continue
            more = estimated(gains, joined) - reached
            if more > 0.0:
                ranked.append((more / max(known[gain], _SMALLEST_COST), more, gain, joined))
        if not ranked:
            return
        ranked.sort(key=lambda r: -r[0])
        tried = []
        for _, more, gain, joined in ranked[:_TRIED]:
            known[gain] = cost(joined).value - value
            tried.append((more / max(known[gain], _SMALLEST_COST), joined))
        before, here = here, max(tried, key=lambda t: t[0])[1]
        value, reached = cost(here).value, estimated(gains, here)
        touched = set().union(
            *(neighbours.get(n, frozenset()) for n in here.floats - before.floats)
        )
        for gain in gains:
            if gain.configuration.floats & touched and not gain.configuration.floats <= here.floats:
                known[gain] = min(known[gain], cost(here.joined(gain.configuration)).value - value)
        yield here


def neighbours(model: Model) -> dict[str, frozenset[str]]:
    """For each node with weights those that are reached from it without passing another one, and the reverse."""
    found: dict[str, set[str]] = {}
    for node in model.nodes:
        if node.op not in WEIGHTED:
            continue
        seen: set[int] = set()
        stack = list(node.outputs)
        while stack:
            for reader in model.consumers(stack.pop()):
                if reader.index in seen:
                    continue
                seen.add(reader.index)
                if reader.op in WEIGHTED:
                    found.setdefault(node.name, set()).add(reader.name)
                    found.setdefault(reader.name, set()).add(node.name)
                else:
                    stack.extend(reader.outputs)
    return {name: frozenset(others) for name, others in found.items()}

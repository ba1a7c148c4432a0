"""Sites of a network, selection of the choices to measure, and combination of choices.

A site is a set of nodes that are quantized or left float together. A choice is an alternative for a
site: float, INT8, another calibration method, or a separate scale. Some choices are never measured,
because they cannot be worth their cost, however accurate they are:

* :data:`FREE`: the network is predicted to be as fast with the site float. The site is float from
  the start.
* Another choice leaves these and more nodes float at the same or lower cost.
* :data:`BETWEEN`: the nodes would be float, but all their inputs would still be INT8 for other
  consumers, so conversions are needed before and after the nodes. Such a choice removes only the
  rounding of the weights (the smallest part of the error) at the highest cost.
* :data:`NO_GAIN`: quantizing nodes that the preset leaves float is predicted to save no time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qdqtool.insertion.number_formats import FP8
from qdqtool.insertion.placement import Placement, is_average_pooling
from qdqtool.insertion.scales import GroupScale
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.patterns.heads import find_attentions, find_coordinates, find_head
from qdqtool.tuning.planner import FLOAT, Configuration, PlacementCost, Planner

INT8 = "int8"
OWN_SCALE = "own-scale"
CONVOLUTION = "convolution"
GROUP = "group"
RESIDUAL = "residual"
POOLING = "pooling"
HEAD = "head"
ATTENTION = "attention"
LAST_CONVOLUTIONS = "last convolutions"  # name of the site with all last convolutions
METHODS = ("focus", "mse", "max", "percentile")

_OTHER_SCALE = 0.05  # another method is measured if its scale differs by more than this fraction
_LOST_BITS = 0.5  # a separate scale is measured if the shared scale loses at least this many bits


@dataclass(frozen=True)
class TuningSite:
    """Nodes that the search quantizes or leaves float together.

    Attributes:
        name: Name of the first node; the first tensor of a scale group; ``last convolutions``; or
            ``branch of`` a last convolution of the head, ``attention of`` a Softmax.
        kind: ``convolution``, ``group`` (consumers of tensors with one scale), ``residual``,
            ``pooling``, ``head`` or ``attention`` (products without weights).
        nodes: Names of the nodes.
        tensors: Activations that are no longer quantized if the site is float.
        default: ``int8``, or ``float`` if the head preset leaves the nodes float.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    default: str = INT8

    def as_float(self) -> Configuration:
        """Return the configuration in which only this site is float."""
        return Configuration(floats=frozenset(self.nodes))


@dataclass(frozen=True)
class Candidate:
    """A choice for a site, such as ``float``, and the configuration with only this choice."""

    site: TuningSite
    choice: str
    configuration: Configuration


class _SiteCollector:
    """Collects sites, each with a different set of nodes."""

    def __init__(self, model: Model, placement: Placement) -> None:
        self.sites: dict[frozenset[str], TuningSite] = {}
        self._model = model
        self._consumers = {}
        for tensor, inputs in placement.inputs.items():
            self._consumers[tensor] = {i.node.name for i in inputs}

    def sort_indices(self, indices: Iterable[int]) -> list[int]:
        return sorted(set(indices), key=self._model.positions.__getitem__)

    def add_site(self, name: str, kind: str, indices: Iterable[int], default: str = INT8) -> None:
        names = tuple(self._model.nodes[i].name for i in self.sort_indices(indices))
        nodes = frozenset(names)
        if not names or nodes in self.sites:
            return
        tensors = tuple(t for t, consumers in self._consumers.items() if consumers <= nodes)
        self.sites[nodes] = TuningSite(name, kind, names, tensors, default)


def find_sites(planner: Planner) -> list[TuningSite]:
    """Return all sites of a network; each has a different set of nodes."""
    model = planner.model
    placement = planner.placement(Configuration())
    collector = _SiteCollector(model, placement)
    weighted = {w.node.index for w in placement.weights}
    placed = collector.sort_indices(
        i.node.index for inputs in placement.inputs.values() for i in inputs
    )
    for index in placed:
        node = model.nodes[index]
        collector.add_site(node.name, _find_kind(model, node, index in weighted), [index])
    for attention in find_attentions(model):
        products = {attention.scores.index, attention.values.index}
        collector.add_site(
            f"attention of {attention.softmax.name}", ATTENTION, products.intersection(placed)
        )
    for group in planner.groups(placement):
        nodes = [i.node.index for t in group.quantized for i in placement.inputs[t]]
        collector.add_site(group.quantized[0], GROUP, nodes)
    _add_head_sites(collector, planner, placement, placed)
    return list(collector.sites.values())


def _find_kind(model: Model, node: Node, has_constant_weights: bool) -> str:
    if has_constant_weights:
        return CONVOLUTION
    if node.op in WEIGHTED:
        return ATTENTION
    return POOLING if is_average_pooling(model, node) else RESIDUAL


def _add_head_sites(
    collector: _SiteCollector, planner: Planner, placement: Placement, placed: Sequence[int]
) -> None:
    model = planner.model
    for name, nodes in _find_branches(model, placed).items():
        if len(nodes) > 1:
            collector.add_site(name, HEAD, nodes)
    ends = find_head(model).finals.intersection(placed)
    if len(ends) > 1:
        collector.add_site(LAST_CONVOLUTIONS, HEAD, ends)
    preset = _find_preset_floats(planner, placement)
    for nodes in [[index] for index in preset] + [preset]:
        if nodes:
            collector.add_site(model.nodes[nodes[0]].name, HEAD, nodes, FLOAT)


def _find_branches(model: Model, placed: Iterable[int]) -> Mapping[str, list[int]]:
    """Return the indices of the quantized nodes of each branch of the head, by branch name.

    The nodes of a branch lead to one of the head's last convolutions only. A head with a single
    last convolution has no branches.
    """
    ends = find_head(model).last_convolutions
    branches: dict[str, list[int]] = defaultdict(list)
    if len(ends) < 2:
        return branches
    ends_of_tensor: dict[str, frozenset[int]] = defaultdict(frozenset)
    ends_of_node: dict[int, frozenset[int]] = {}
    for node in reversed(model.ordered):
        reached = frozenset({node.index} & ends).union(*(ends_of_tensor[t] for t in node.outputs))
        ends_of_node[node.index] = reached
        for tensor in node.consumed_tensors:
            ends_of_tensor[tensor] |= reached
    for index in placed:
        if len(ends_of_node[index]) == 1:
            branches[f"branch of {model.nodes[min(ends_of_node[index])].name}"].append(index)
    return branches


def _find_preset_floats(planner: Planner, placement: Placement) -> list[int]:
    """Return the indices of nodes that only the head preset makes float, except the DFL."""
    model = planner.model
    head = find_head(model)
    coordinates = find_coordinates(model, head.finals).all
    possible = (head.last_convolutions | coordinates) - head.dfl
    possible -= {w.node.index for w in placement.weights}
    nodes = [n for n in model.ordered if n.index in possible and n.op in WEIGHTED]
    if not nodes:
        return []
    quantized = planner.placement(Configuration(quantized=frozenset(n.name for n in nodes)))
    weighted = {w.node.index for w in quantized.weights}
    return [n.index for n in nodes if n.index in weighted]


def list_candidates(sites: Iterable[TuningSite]) -> list[Candidate]:
    """Return one choice for each site: float, or INT8 if the site is float by default."""
    return [
        Candidate(site, INT8, Configuration(quantized=frozenset(site.nodes)))
        if site.default == FLOAT
        else Candidate(site, FLOAT, site.as_float())
        for site in sites
    ]


def list_scale_candidates(planner: Planner, sites: Iterable[TuningSite]) -> list[Candidate]:
    """Return the choices of another calibration method or a separate scale at the sites.

    Methods that change a scale by at most 5 % are left out. The list is empty for FP8, because FP8
    ranges are always the largest magnitudes, and a shared scale does not cost precision.
    """
    if planner.methods.number_format == FP8:
        return []
    scales = planner.plan(Configuration()).scales
    scale_of = {t: scale for scale in scales for t in scale.group.quantized}
    candidates: dict[Configuration, Candidate] = {}
    for site in sites:
        for tensor in site.tensors:
            scale = scale_of[tensor]
            for method in _list_other_methods(planner, scale):
                changed = Configuration(methods=frozenset({(scale.group.quantized[0], method)}))
                candidates.setdefault(changed, Candidate(site, method, changed))
            if scale.group.is_shared and tensor in planner.statistics:
                lost = next((m.bits_lost for m in scale.members if m.tensor == tensor), 0.0)
                if lost >= _LOST_BITS:
                    changed = Configuration(own_scales=frozenset({tensor}))
                    candidates.setdefault(changed, Candidate(site, OWN_SCALE, changed))
    return list(candidates.values())


def _list_other_methods(planner: Planner, scale: GroupScale) -> list[str]:
    methods = []
    scales = [scale.scale]
    for method in METHODS:
        other = planner.choose_scale(scale.group, method)[0].scale
        if all(abs(other / s - 1.0) > _OTHER_SCALE for s in scales):
            scales.append(other)
            methods.append(method)
    return methods


# Choices that are worth measuring -----------------------------------------------------

FREE = "INT8 gains nothing for this layer: float is predicted to be as fast"
NO_GAIN = "INT8 is predicted not to be faster for this layer"
BETWEEN = "in float it would need two conversions, because its inputs are INT8 for other consumers"


@dataclass(frozen=True)
class CandidateDecision:
    """A candidate, its predicted cost, and the reason to skip it (empty if it is measured)."""

    candidate: Candidate
    cost: PlacementCost
    skip_reason: str = ""


CostFunction = Callable[[Configuration], PlacementCost]


def select_candidates(
    candidates: Sequence[Candidate], cost: CostFunction
) -> tuple[Configuration, list[CandidateDecision]]:
    """Decide which candidates to measure.

    Args:
        candidates: Choices for the sites.
        cost: Function that predicts the cost of a configuration.

    Returns:
        The start configuration, in which sites are float if that costs no time; and a decision for
        each candidate.
    """
    base = cost(Configuration())
    costs = [cost(candidate.configuration) for candidate in candidates]
    floats = [(c, k) for c, k in zip(candidates, costs, strict=True) if c.choice == FLOAT]
    free = _join_free_floats(floats, base, cost)
    start = cost(free)
    decisions = []
    for candidate, single in zip(candidates, costs, strict=True):
        if candidate.choice != FLOAT:
            reason = NO_GAIN if single.value >= base.value else ""
        elif candidate.configuration.floats <= free.floats:
            reason = FREE
        else:
            reason = _find_skip_reason(candidate, single, base, floats)
        shifted = _shift_cost(single, base, start) if free.floats else single
        decisions.append(CandidateDecision(candidate, shifted, reason))
    return free, decisions


def _join_free_floats(
    floats: Iterable[tuple[Candidate, PlacementCost]], base: PlacementCost, cost: CostFunction
) -> Configuration:
    """Join the float choices that cost no time, both alone and with the choices joined before."""
    free = Configuration()
    for candidate, single in sorted(floats, key=lambda choice: choice[1].value):
        if single.value <= base.value:
            joined = free.merge(candidate.configuration)
            if cost(joined).value <= cost(free).value:
                free = joined
    return free


def _find_skip_reason(
    candidate: Candidate,
    single: PlacementCost,
    base: PlacementCost,
    floats: Iterable[tuple[Candidate, PlacementCost]],
) -> str:
    nodes = candidate.configuration.floats
    for other, cost in floats:
        if nodes < other.configuration.floats and cost.value <= single.value:
            larger = other.site.name
            return f"leaving {larger} float costs no more, and {larger} includes this layer"
    if not candidate.site.tensors and single.conversions - base.conversions >= 2:
        return BETWEEN
    return ""


def _shift_cost(single: PlacementCost, base: PlacementCost, start: PlacementCost) -> PlacementCost:
    """Estimate the cost of a candidate applied to the start configuration.

    Args:
        single: Cost of the candidate applied to the model with every layer in INT8.
        base: Cost of the model with every layer in INT8.
        start: Cost of the start configuration.
    """
    ms = None
    if single.ms is not None and base.ms is not None and start.ms is not None:
        ms = single.ms + start.ms - base.ms
    return PlacementCost(
        single.convolutions,
        single.int8 + start.int8 - base.int8,
        single.conversions + start.conversions - base.conversions,
        ms,
    )


# Combinations -------------------------------------------------------------------------

_MAX_STEPS = 48
_LEAST_COST = 1e-6
_REPREDICTED = 4  # number of best choices whose cost is predicted again at each step


@dataclass(frozen=True)
class ChoiceGain:
    """Gain and cost of a choice that was measured alone.

    Attributes:
        configuration: Configuration with this choice alone.
        gain: Decrease of the squared output error by the choice.
        cost: Increase of the predicted cost by the choice.
    """

    configuration: Configuration
    gain: float
    cost: float


def estimate_gain(gains: Sequence[ChoiceGain], combination: Configuration) -> float:
    """Return the sum of the gains of all choices in a combination.

    Of choices with common nodes, only the first in `gains` counts.
    """
    covered: set[str] = set()
    total = 0.0
    for gain in gains:
        nodes = gain.configuration.floats
        if nodes and nodes <= combination.floats and not nodes & covered:
            covered |= nodes
            total += gain.gain
    return total


def chain_choices(
    start: Configuration,
    choices: Iterable[ChoiceGain],
    cost: CostFunction,
    neighbors: Mapping[str, frozenset[str]],
) -> Iterator[Configuration]:
    """Add choices one by one, always the choice with the highest gain per cost.

    Neighbors of a float node cost less, because no conversion between them is needed. So at each
    step, costs are predicted again for the neighbors of the last choice and for the best choices.

    Args:
        start: Configuration to start from.
        choices: Choices with their gains and costs.
        cost: Function that predicts the cost of a configuration.
        neighbors: Names of neighboring nodes with weights, by name of the node.

    Yields:
        The combination after each step.
    """
    gains = sorted(choices, key=lambda g: (-g.gain, sorted(g.configuration.floats)))
    added_cost = {g: g.cost for g in gains}
    current = start
    for _ in range(_MAX_STEPS):
        value = cost(current).value
        added_gain = _list_added_gains(gains, current)
        if not added_gain:
            return
        tried = sorted(
            added_gain, key=lambda g: _gain_per_cost(added_gain[g], added_cost[g]), reverse=True
        )[:_REPREDICTED]
        for choice in tried:
            added_cost[choice] = cost(current.merge(choice.configuration)).value - value
        best = max(tried, key=lambda g: _gain_per_cost(added_gain[g], added_cost[g]))
        before, current = current, current.merge(best.configuration)
        value = cost(current).value
        touched = set().union(
            *(neighbors.get(n, frozenset()) for n in current.floats - before.floats)
        )
        for choice in gains:
            floats = choice.configuration.floats
            if floats & touched and not floats <= current.floats:
                added = cost(current.merge(choice.configuration)).value - value
                added_cost[choice] = min(added_cost[choice], added)
        yield current


def _list_added_gains(
    gains: Sequence[ChoiceGain], current: Configuration
) -> dict[ChoiceGain, float]:
    reached = estimate_gain(gains, current)
    added = {}
    for choice in gains:
        joined = current.merge(choice.configuration)
        gain = estimate_gain(gains, joined) - reached
        if joined != current and gain > 0.0:
            added[choice] = gain
    return added


def _gain_per_cost(gain: float, cost: float) -> float:
    return gain / max(cost, _LEAST_COST)


def find_neighbors(model: Model) -> dict[str, frozenset[str]]:
    """Return the nearest weighted nodes up- and downstream of each weighted node, by name."""
    neighbors: dict[str, set[str]] = defaultdict(set)
    for node in model.nodes:
        if node.op not in WEIGHTED:
            continue
        seen: set[int] = set()
        stack = list(node.outputs)
        while stack:
            for consumer in model.consumers(stack.pop()):
                if consumer.index in seen:
                    continue
                seen.add(consumer.index)
                if consumer.op in WEIGHTED:
                    neighbors[node.name].add(consumer.name)
                    neighbors[consumer.name].add(node.name)
                else:
                    stack.extend(consumer.outputs)
    return {name: frozenset(names) for name, names in neighbors.items()}

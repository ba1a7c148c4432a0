"""From single choices to combinations: a chain of configurations, each with one choice more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qdqtool.graph import Model
from qdqtool.operators import WEIGHTED
from qdqtool.tuning.configuration import Configuration, Cost

_LONGEST = 48
_SMALLEST_COST = 1e-6
_TRIED = 4  # choices whose cost is predicted anew at each step, best first


@dataclass(frozen=True)
class Gain:
    """A measured choice.

    Attributes:
        configuration: The choice alone.
        gain: Squared output error that it takes away from everything INT8.
        cost: What it adds, alone.
    """

    configuration: Configuration
    gain: float
    cost: float


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
    start: Configuration, found: Iterable[Gain], cost: Callable[[Configuration], Cost],
    neighbours: Mapping[str, frozenset[str]],
) -> Iterator[Configuration]:
    """Adds choices one by one, each time the one with the most gain for what it adds to the predicted cost.

    Neighbours of what is float already cost less: the conversion between them goes. So costs are predicted for the
    combination, anew for those that the last choice touches and for the best.

    Args:
        start: What is chosen from the start.
        found: Choices with a gain above zero.
        cost: Predicts.
        neighbours: Nodes that read or make what a node makes or reads.

    Yields:
        The configurations, each with one choice more.
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
        best = None
        for _, more, gain, joined in ranked[:_TRIED]:
            known[gain] = cost(joined).value - value
            score = more / max(known[gain], _SMALLEST_COST)
            if best is None or score > best[0]:
                best = (score, gain, joined)
        assert best is not None
        before, here = here, best[2]
        value, reached = cost(here).value, estimated(gains, here)
        touched = set().union(*(neighbours.get(n, frozenset()) for n in here.floats - before.floats))
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
            for reader in model.readers(stack.pop()):
                if reader.index in seen:
                    continue
                seen.add(reader.index)
                if reader.op in WEIGHTED:
                    found.setdefault(node.name, set()).add(reader.name)
                    found.setdefault(reader.name, set()).add(node.name)
                else:
                    stack.extend(reader.outputs)
    return {name: frozenset(others) for name, others in found.items()}

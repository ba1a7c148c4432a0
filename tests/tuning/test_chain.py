"""The order in which choices are put together."""

from __future__ import annotations

from qdqtool.graph import Model
from qdqtool.tuning.chain import Gain, chain, estimated, neighbours
from qdqtool.tuning.configuration import Configuration, Cost
from tests.tuning.nets import branchy


def floats(*names: str) -> Configuration:
    return Configuration(floats=frozenset(names))


def additive(prices: dict[str, int], together: int = 0):
    """Costs that add up, less ``together`` where a and b are both float."""
    def cost(configuration: Configuration) -> Cost:
        saved = together if {"a", "b"} <= configuration.floats else 0
        return Cost(100, 100 - sum(prices[n] for n in configuration.floats) + saved, 0)

    return cost


def order(prices: dict[str, int], gains: dict[str, float], together: int = 0) -> list[list[str]]:
    found = [Gain(floats(n), g, prices[n]) for n, g in gains.items()]
    near = {"a": frozenset("b"), "b": frozenset("a")}
    return [sorted(c.floats) for c in chain(Configuration(), found, additive(prices, together), near)]


def test_most_gain_for_its_cost_first() -> None:
    assert order({"a": 1, "b": 2, "c": 4}, {"a": 1.5, "b": 4.0, "c": 4.0}) == [["b"], ["a", "b"], ["a", "b", "c"]]


def test_what_is_next_to_a_float_becomes_cheaper() -> None:
    # Alone b costs 4 for a gain of 2, c 3 for 2; next to a, b costs 1.
    assert order({"a": 1, "b": 4, "c": 3}, {"a": 5.0, "b": 2.0, "c": 2.0}, 3) == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert order({"a": 1, "b": 4, "c": 3}, {"a": 5.0, "b": 2.0, "c": 2.0}, 0)[1] == ["a", "c"]


def test_no_node_counts_twice() -> None:
    gains = [Gain(floats("a", "b"), 5.0, 2.0), Gain(floats("a"), 3.0, 1.0), Gain(floats("c"), 1.0, 1.0)]
    assert estimated(gains, floats("a", "b")) == 5.0
    assert estimated(gains, floats("a", "c")) == 4.0
    assert estimated(gains, floats("b")) == 0.0


def test_neighbours_read_or_make_each_other() -> None:
    near = neighbours(Model(branchy()))
    assert near["c0"] == {"c1", "c3", "c4"}  # the last two through the residual
    assert near["c6"] == {"c5"}
    assert all(n in near[m] for n, others in near.items() for m in others)

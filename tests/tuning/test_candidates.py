"""What is never measured, and that it is not."""

from __future__ import annotations

import pytest

from qdqtool.tuning.candidates import BETWEEN, FREE, NO_GAIN, judge
from qdqtool.tuning.configuration import FLOAT, Configuration, Cost
from qdqtool.tuning.sites import CONVOLUTION, INT8, Candidate, Site, candidates, find_sites
from tests.insertion.nets import images
from tests.tuning.nets import branchy, planner_of

SITES = {
    "a": Site("a", CONVOLUTION, ("a",), ("t",)),
    "b": Site("b", CONVOLUTION, ("b",), ()),
    "ab": Site("ab", "group", ("a", "b"), ("t",)),
    "box": Site("box", "head", ("box",), (), FLOAT),
}


def float_at(name: str) -> Candidate:
    return Candidate(SITES[name], FLOAT, SITES[name].as_float())


def costs(table: dict[str, tuple[int, int]]):
    """Costs of 10 convolutions by what is float (INT8 too with a +), as INT8 convolutions and conversions."""
    def cost(configuration: Configuration) -> Cost:
        key = "".join(sorted(configuration.floats)) + "+" * bool(configuration.quantized)
        int8, conversions = table[key]
        return Cost(10, int8, conversions)

    return cost


def why(table: dict[str, tuple[int, int]], *found: Candidate) -> tuple[Configuration, list[str]]:
    free, judged = judge(found, costs(table))
    return free, [j.why_not for j in judged]


def test_a_choice_that_costs_more_and_frees_a_tensor_is_measured() -> None:
    assert why({"": (10, 1), "a": (9, 2)}, float_at("a")) == (Configuration(), [""])


def test_float_that_costs_nothing_is_chosen_at_once() -> None:
    free, reasons = why({"": (10, 3), "a": (9, 2), "b": (9, 4), "ab": (8, 5)}, float_at("a"), float_at("b"))
    assert free.floats == {"a"} and reasons[0] == FREE


def test_a_float_convolution_between_two_conversions_is_not_measured() -> None:
    assert why({"": (10, 1), "b": (9, 3)}, float_at("b"))[1] == [BETWEEN]
    assert why({"": (10, 1), "b": (9, 2)}, float_at("b"))[1] == [""]
    assert why({"": (10, 1), "a": (9, 3)}, float_at("a"))[1] == [""]  # it frees a tensor


def test_a_larger_site_at_the_same_cost_stands_for_a_smaller_one() -> None:
    _, reasons = why({"": (10, 1), "a": (9, 4), "ab": (8, 3)}, float_at("a"), float_at("ab"))
    assert "ab" in reasons[0] and reasons[1] == ""


def test_int8_that_is_no_faster_is_not_measured() -> None:
    box = Candidate(SITES["box"], INT8, Configuration(quantized=frozenset({"box"})))
    assert why({"": (10, 1), "+": (11, 2)}, box)[1] == [NO_GAIN]
    assert why({"": (10, 1), "+": (11, 1)}, box)[1] == [""]


@pytest.mark.parametrize(("residual", "nothing", "never"), [("skip", {"add"}, {"add", "c1"}),
                                                            ("both", set(), {"c1", "c3", "c4"})])  # fmt: skip
def test_the_reasons_hold_on_a_network(residual: str, nothing: set[str], never: set[str]) -> None:
    """The law, for what the prediction really says: whatever is left out is beaten, or frees no activation."""
    planner = planner_of(branchy(), images(2, 16, 16), residual)
    found = candidates(find_sites(planner))
    free, judged = judge(found, planner.cost)
    base = planner.cost(Configuration())
    assert free.floats == nothing and planner.cost(free).value <= base.value
    assert {j.candidate.site.name for j in judged if j.why_not} == never
    single = {j.candidate.site.name: planner.cost(j.candidate.configuration) for j in judged}
    for one in judged:
        cost, nodes = single[one.candidate.site.name], one.candidate.configuration.floats
        assert (one.why_not == FREE) == (nodes <= free.floats)
        if one.why_not == BETWEEN:
            assert not one.candidate.site.tensors and cost.conversions >= base.conversions + 2
        elif one.why_not and one.why_not != FREE:
            assert any(nodes < o.candidate.configuration.floats and single[o.candidate.site.name].value <= cost.value
                       for o in judged)  # fmt: skip


def test_sites_are_convolutions_groups_and_residuals() -> None:
    planner = planner_of(branchy(), images(2, 16, 16))
    sites = {s.name: (s.kind, s.nodes, s.tensors) for s in find_sites(planner)}
    assert sites["c5"] == ("convolution", ("c5",), ("cat.out",))
    assert sites["add"][0] == "residual"
    assert sites["add.out"] == ("group", ("c3", "c4"), ("add.out",))
    assert sites["c3"][2] == ()  # c4 reads the same tensor
    names = [frozenset(s[1]) for s in sites.values()]
    assert len(names) == len(set(names))

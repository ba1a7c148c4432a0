from collections.abc import Callable

import numpy as np
import onnx
import pytest

from calibration.session import partial_model
from qdqtool.ir.graph import Model
from qdqtool.tuning import sites
from qdqtool.tuning.partition import NetworkPartition
from qdqtool.tuning.planner import FLOAT, Configuration, PlacementCost
from qdqtool.tuning.sites import (
    BETWEEN,
    CONVOLUTION,
    FREE,
    INT8,
    NO_GAIN,
    Candidate,
    ChoiceGain,
    TuningSite,
)
from tests.insertion.nets import images, run
from tests.tuning.nets import branchy, floats, planner_of, resnet, segmentation

SITES = {
    "a": TuningSite("a", CONVOLUTION, ("a",), ("t",)),
    "b": TuningSite("b", CONVOLUTION, ("b",), ()),
    "ab": TuningSite("ab", "group", ("a", "b"), ("t",)),
    "box": TuningSite("box", "head", ("box",), (), FLOAT),
}
CANDIDATES = {name: Candidate(site, FLOAT, site.as_float()) for name, site in SITES.items()}
CANDIDATES["box"] = Candidate(SITES["box"], INT8, Configuration(quantized=frozenset({"box"})))

Costs = dict[str, tuple[int, int]]
"""INT8 convolutions and conversions by what is float, or `box` for an INT8 head."""


@pytest.mark.parametrize(
    ("costs", "free", "reasons"),
    [
        pytest.param({"": (10, 1), "a": (9, 2)}, "", {"a": ""}, id="measured"),
        pytest.param({"": (10, 1), "a": (9, 3)}, "", {"a": ""}, id="frees-a-tensor"),
        pytest.param({"": (10, 1), "b": (9, 3)}, "", {"b": BETWEEN}, id="between-int8"),
        pytest.param({"": (10, 1), "b": (9, 2)}, "", {"b": ""}, id="one-conversion-more"),
        pytest.param({"": (10, 1), "box": (11, 2)}, "", {"box": NO_GAIN}, id="head-without-gain"),
        pytest.param({"": (10, 1), "box": (11, 1)}, "", {"box": ""}, id="head-with-gain"),
        pytest.param(
            {"": (10, 1), "a": (9, 4), "ab": (8, 3)},
            "",
            {"a": "leaving ab float costs no more, and ab includes this layer", "ab": ""},
            id="larger",
        ),
        pytest.param(
            {"": (10, 3), "a": (9, 2), "b": (9, 4), "ab": (8, 5)},
            "a",
            {"a": FREE, "b": ""},
            id="costs-nothing",
        ),
    ],
)
def test_select_candidates_gives_reasons_not_to_measure(
    costs: Costs, free: str, reasons: dict[str, str]
) -> None:
    def cost(configuration: Configuration) -> PlacementCost:
        return PlacementCost(
            10, *costs["".join(sorted(configuration.floats | configuration.quantized))]
        )

    start, decisions = sites.select_candidates([CANDIDATES[name] for name in reasons], cost)
    assert start == floats(*free)
    assert [decision.skip_reason for decision in decisions] == list(reasons.values())


@pytest.mark.parametrize(
    ("residual", "free_nodes", "never"),
    [("skip", {"add"}, {"add", "c1"}), ("both", set(), {"c1", "c3", "c4"})],
)
def test_select_candidates_agrees_with_predictions(
    residual: str, free_nodes: set[str], never: set[str]
) -> None:
    """A skipped choice costs nothing, frees no activation, or costs more than a larger choice."""
    planner = planner_of(branchy(), images(2, 16, 16), residual)
    free, judged = sites.select_candidates(
        sites.list_candidates(sites.find_sites(planner)), planner.cost
    )
    base = planner.cost(Configuration())
    assert free.floats == free_nodes and planner.cost(free).value <= base.value
    assert {j.candidate.site.name for j in judged if j.skip_reason} == never
    costs = [
        (j.candidate.configuration.floats, planner.cost(j.candidate.configuration)) for j in judged
    ]
    for (nodes, cost), choice in zip(costs, judged, strict=True):
        assert (choice.skip_reason == FREE) == (nodes <= free.floats)
        if choice.skip_reason == BETWEEN:
            assert not choice.candidate.site.tensors and cost.conversions >= base.conversions + 2
        elif choice.skip_reason and choice.skip_reason != FREE:
            assert any(nodes < larger and less.value <= cost.value for larger, less in costs)


def test_sites_name_nodes_and_tensors_once() -> None:
    planner = planner_of(branchy(), images(2, 16, 16))
    kinds = {s.name: (s.kind, s.nodes, s.tensors) for s in sites.find_sites(planner)}
    assert kinds["c5"] == ("convolution", ("c5",), ("cat.out",)) and kinds["add"][0] == "residual"
    assert kinds["add.out"] == ("group", ("c3", "c4"), ("add.out",))
    assert kinds["c3"][2] == ()  # c4 reads the same tensor
    nodes = [frozenset(kind[1]) for kind in kinds.values()]
    assert len(nodes) == len(set(nodes))


def test_average_pooling_is_no_residual() -> None:
    kinds = {s.nodes: s.kind for s in sites.find_sites(planner_of(resnet(), images(2, 3, 16)))}
    assert kinds[("avgpool",)] == "pooling"
    assert kinds[("layer1/add",)] == kinds[("layer2/add",)] == "residual"


def test_partition_divides_where_few_tensors_cross() -> None:
    model = Model(branchy())
    cuts = NetworkPartition(model, model.outputs)
    names = [n.name for n in model.ordered]
    for name, crossing in {"c0": "x", "c4": "add.out a3/Mul.out", "c5": "cat.out"}.items():
        assert set(cuts.crossing_tensors(names.index(name))) == set(crossing.split())
    assert cuts.crossing_tensors(len(names)) == ("c6.out",)
    assert cuts.first_cut_after(["cat.out", "a3/Mul.out"]) == names.index("cat") + 1
    parts = cuts.build_parts(names.index("cat") + 1)
    position = {n.index: i for i, n in enumerate(model.ordered)}
    ends = [names[max(position[i] for i in part.nodes)] for part in parts]
    # The cut after cat is also the one before c5.
    assert ends == ["a0/Mul", "a1/Mul", "add", "a3/Mul", "cat", "a5/Mul", "c6"]
    assert [p.producers for p in parts] == [(), (0,), (1, 0), (2,), (2, 3), (4,), (5,)]


def test_partition_keeps_network_outputs() -> None:
    proto = branchy()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("a0/Mul.out", 1, [1, 16, 16, 16]))
    model = Model(proto)
    assert "a0/Mul.out" in NetworkPartition(model, model.outputs).crossing_tensors(
        len(model.ordered) - 1
    )


@pytest.mark.parametrize(
    ("prices", "gains", "together", "order"),
    [
        pytest.param((1, 2, 4), (1.5, 4.0, 4.0), 0, "b ab abc", id="gain-per-price"),
        pytest.param((1, 4, 3), (5.0, 2.0, 2.0), 3, "a ab abc", id="b-is-cheaper-next-to-a"),
        pytest.param((1, 4, 3), (5.0, 2.0, 2.0), 0, "a ac abc", id="b-is-dearer-alone"),
    ],
)
def test_chain_takes_the_best_choice_first(
    prices: tuple[int, ...], gains: tuple[float, ...], together: int, order: str
) -> None:
    """The cost of a and b together is lower by `together` than the sum of their costs."""
    price = dict(zip("abc", prices, strict=True))

    def cost(configuration: Configuration) -> PlacementCost:
        saved = together if {"a", "b"} <= configuration.floats else 0
        return PlacementCost(100, 100 - sum(price[n] for n in configuration.floats) + saved, 0)

    choices = [ChoiceGain(floats(n), g, price[n]) for n, g in zip("abc", gains, strict=True)]
    near = {"a": frozenset("b"), "b": frozenset("a")}
    chain = sites.chain_choices(Configuration(), choices, cost, near)
    assert ["".join(sorted(step.floats)) for step in chain] == order.split()


@pytest.mark.parametrize(("names", "gain"), [("ab", 5.0), ("ac", 4.0), ("b", 0.0)])
def test_estimated_gain_adds_up_choices_within(names: str, gain: float) -> None:
    choices = [(floats("a", "b"), 5.0, 2.0), (floats("a"), 3.0, 1.0), (floats("c"), 1.0, 1.0)]
    assert sites.estimate_gain([ChoiceGain(*choice) for choice in choices], floats(*names)) == gain


def test_neighbors_are_mutual_and_pass_the_residual() -> None:
    near = sites.find_neighbors(Model(branchy()))
    assert near["c0"] == {"c1", "c3", "c4"} and near["c6"] == {"c5"}
    assert all(n in near[m] for n, others in near.items() for m in others)


@pytest.mark.parametrize("build", [branchy, resnet, segmentation])
def test_partition_parts_compute_what_the_whole_computes(
    build: Callable[[], onnx.ModelProto],
) -> None:
    proto = build()
    data = images(2, proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value, 16)
    planner = planner_of(proto, data)
    model = planner.model
    parts = NetworkPartition(model, model.outputs).build_parts(len(model.ordered))
    assert sorted(i for p in parts for i in p.nodes) == sorted(n.index for n in model.nodes)
    recipe, state = planner.plan(Configuration()).recipe, dict(data[0])
    for part in parts:
        piece = partial_model(
            recipe.restrict_to_nodes(part.nodes).build(model)[0],
            part.outputs,
            [onnx.helper.make_tensor_value_info(t, model.elem_type(t), None) for t in part.inputs],
        )
        feeds = {i.name: state[i.name] for i in piece.graph.input}
        state |= zip(part.outputs, run(piece, feeds), strict=True)
    (expected,) = run(recipe.build(model)[0].proto, data[0])
    assert np.allclose(state[model.outputs[0]], expected, rtol=1e-4, atol=1e-6)
    recipes = [recipe.restrict_to_nodes(part.nodes) for part in parts]
    assert sorted(w for r in recipes for w in r.weights) == sorted(recipe.weights)
    assert {(p.tensor, r) for d in recipes for p in d.pairs for r in p.consumers} == {
        (p.tensor, r) for p in recipe.pairs for r in p.consumers
    }

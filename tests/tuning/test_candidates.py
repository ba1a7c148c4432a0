"""What is never measured, and that it is not."""

import numpy as np
import onnx
import pytest

import qdqtool
from calibration.session import partial_model
from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.tuning import sites
from qdqtool.tuning.configuration import FLOAT, Configuration, Cost
from qdqtool.tuning.expected import sentence
from qdqtool.tuning.measure import Partition
from qdqtool.tuning.sites import BETWEEN, CONVOLUTION, FREE, INT8, NO_GAIN, Candidate, Gain, Site
from tests.insertion.nets import Net, images, run
from tests.raising import raises
from tests.tuning.nets import branchy, planner_of, resnet, segmentation

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
    free, judged = sites.judge(found, costs(table))
    return free, [j.why_not for j in judged]


def test_what_is_measured_and_what_is_chosen_at_once() -> None:
    assert why({"": (10, 1), "a": (9, 2)}, float_at("a")) == (Configuration(), [""])
    free, reasons = why(
        {"": (10, 3), "a": (9, 2), "b": (9, 4), "ab": (8, 5)}, float_at("a"), float_at("b")
    )
    assert free.floats == {"a"} and reasons[0] == FREE
    for name, conversions, reason in (
        ("b", 3, BETWEEN),
        ("b", 2, ""),
        ("a", 3, ""),
    ):  # `a` frees a tensor
        assert why({"": (10, 1), name: (9, conversions)}, float_at(name))[1] == [reason]
    _, reasons = why({"": (10, 1), "a": (9, 4), "ab": (8, 3)}, float_at("a"), float_at("ab"))
    assert "ab" in reasons[0] and reasons[1] == ""
    box = Candidate(SITES["box"], INT8, Configuration(quantized=frozenset({"box"})))
    for conversions, reason in ((2, NO_GAIN), (1, "")):
        assert why({"": (10, 1), "+": (11, conversions)}, box)[1] == [reason]


@pytest.mark.parametrize(
    ("residual", "nothing", "never"),
    [("skip", {"add"}, {"add", "c1"}), ("both", set(), {"c1", "c3", "c4"})],
)
def test_the_reasons_hold_on_a_network(residual: str, nothing: set[str], never: set[str]) -> None:
    """The law, for what the prediction really says: whatever is left out is beaten, or frees no activation."""
    planner = planner_of(branchy(), images(2, 16, 16), residual)
    found = sites.candidates(sites.find_sites(planner))
    free, judged = sites.judge(found, planner.cost)
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
            assert any(
                nodes < o.candidate.configuration.floats
                and single[o.candidate.site.name].value <= cost.value
                for o in judged
            )


def test_sites_and_cuts() -> None:
    planner = planner_of(branchy(), images(2, 16, 16))
    kinds = {s.name: (s.kind, s.nodes, s.tensors) for s in sites.find_sites(planner)}
    assert kinds["c5"] == ("convolution", ("c5",), ("cat.out",))
    assert kinds["add"][0] == "residual"
    assert kinds["add.out"] == ("group", ("c3", "c4"), ("add.out",))
    assert kinds["c3"][2] == ()  # c4 reads the same tensor
    names = [frozenset(s[1]) for s in kinds.values()]
    assert len(names) == len(set(names))
    model = Model(branchy())
    cuts = Partition(model, model.outputs)
    names = [n.name for n in model.ordered]
    assert cuts.crossing(0) == ("x",)
    assert set(cuts.crossing(names.index("c4"))) == {"add.out", "a3/Mul.out"}
    assert set(cuts.crossing(names.index("c5"))) == {"cat.out"}
    assert cuts.crossing(len(names)) == ("c6.out",)
    assert cuts.behind(["cat.out", "a3/Mul.out"]) == names.index("cat") + 1
    parts = cuts.parts(names.index("cat") + 1)
    ends = [
        "a0/Mul",
        "a1/Mul",
        "add",
        "a3/Mul",
        "cat",
        "a5/Mul",
        "c6",
    ]  # behind cat are one cut and c5's, the same
    position = {n.index: i for i, n in enumerate(model.ordered)}
    assert [names[max(position[i] for i in p.nodes)] for p in parts] == ends
    assert [p.after for p in parts] == [(), (0,), (1, 0), (2,), (2, 3), (4,), (5,)]
    proto = branchy()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("a0/Mul.out", 1, [1, 16, 16, 16]))
    model = Model(proto)
    assert "a0/Mul.out" in Partition(model, model.outputs).crossing(len(model.ordered) - 1)


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
    return [
        sorted(c.floats)
        for c in sites.chain(Configuration(), found, additive(prices, together), near)
    ]


def test_the_order_of_choices() -> None:
    assert order({"a": 1, "b": 2, "c": 4}, {"a": 1.5, "b": 4.0, "c": 4.0}) == [
        ["b"],
        ["a", "b"],
        ["a", "b", "c"],
    ]
    # Alone b costs 4 for a gain of 2, c 3 for 2; next to a, b costs 1.
    assert order({"a": 1, "b": 4, "c": 3}, {"a": 5.0, "b": 2.0, "c": 2.0}, 3) == [
        ["a"],
        ["a", "b"],
        ["a", "b", "c"],
    ]
    assert order({"a": 1, "b": 4, "c": 3}, {"a": 5.0, "b": 2.0, "c": 2.0}, 0)[1] == ["a", "c"]
    gains = [
        Gain(floats("a", "b"), 5.0, 2.0),
        Gain(floats("a"), 3.0, 1.0),
        Gain(floats("c"), 1.0, 1.0),
    ]
    assert sites.estimated(gains, floats("a", "b")) == 5.0
    assert sites.estimated(gains, floats("a", "c")) == 4.0
    assert sites.estimated(gains, floats("b")) == 0.0
    near = sites.neighbours(Model(branchy()))
    assert near["c0"] == {"c1", "c3", "c4"}  # the last two through the residual
    assert near["c6"] == {"c5"}
    assert all(n in near[m] for n, others in near.items() for m in others)


@pytest.mark.parametrize("make", [branchy, resnet, segmentation])
def test_parts_one_after_the_other_compute_what_the_whole_computes(make: object) -> None:
    proto: onnx.ModelProto = make()  # type: ignore[operator]
    channels = proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    data = images(2, channels, 16)
    planner = planner_of(proto, data)
    model = planner.model
    cuts = Partition(model, model.outputs)
    parts = cuts.parts(len(model.ordered))
    assert sorted(i for p in parts for i in p.nodes) == sorted(n.index for n in model.nodes)
    recipe = planner.plan(Configuration()).recipe
    quantized, _ = recipe.build(model)
    state = data[0]
    for part in parts:
        given = [
            onnx.helper.make_tensor_value_info(t, model.elem_type(t), None) for t in part.given
        ]
        piece = partial_model(part.of(recipe).build(model)[0], part.made, given)
        feeds = {i.name: state[i.name] for i in piece.graph.input}
        made = dict(zip(part.made, run(piece, feeds), strict=True))
        state = {**state, **made}
    (wanted,) = run(quantized.proto, data[0])
    assert np.allclose(state[model.outputs[0]], wanted, rtol=1e-4, atol=1e-6)
    divided = [part.of(recipe) for part in parts]
    assert sorted(w for r in divided for w in r.weights) == sorted(recipe.weights)
    assert {(p.tensor, r) for d in divided for p in d.pairs for r in p.readers} == {
        (p.tensor, r) for p in recipe.pairs for r in p.readers
    }


@pytest.mark.parametrize(
    ("seconds", "workers", "end"),
    [
        (3.0, 1, "at most about a minute with 1 worker"),
        (600.0, 2, "at most about 10 minutes with 2 workers"),
        (None, 2, "what an earlier run measured is taken"),
    ],
)
def test_sentence(seconds: float | None, workers: int, end: str) -> None:
    text = sentence(choices=70, never=20, images=8, seconds=seconds, workers=workers)
    begin = "70 choices to measure on 8 images (20 more cannot pay and are not measured), then combinations: "
    assert text == begin + end


def test_where_no_convolution_gains_by_int8_nothing_is_offered() -> None:
    """A lone one, whose pair is a conversion more; the other's weights are computed."""
    net = Net()
    first = net.conv("c1", "x")
    net.output(net.op("Conv", "c2", first, net.op("Relu", "r", first)))
    said: list[str] = []
    with raises(QdqtoolError, "Search.choose"):
        qdqtool.tune(net.model(), images(4), say=said.append)
    assert len(said) == 1, (
        "what is to be measured; nothing was found that a limit of time could take"
    )

"""Residual inputs after an activation: the placement with the better worst case is chosen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.insertion import rules
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.prepare import prepare_float_model
from qdqtool.insertion.scales import find_scale_groups
from qdqtool.ir.graph import Model
from qdqtool.trt.outcome import simulate, simulate_without_alternatives
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import TARGETS, Target, target_named
from tests.insertion.nets import Net, copy_model, detector, nodes_of, prediction, value_of

TRT85 = target_named("trt8.5")


def bottleneck(activation: str, bare: bool = False) -> Model:
    net = Net()
    stem = net.silu("stem/s", net.conv("stem", "x"))
    stem = net.op("Relu", "r", net.op("Add", "bare", net.conv("b", stem), stem)) if bare else stem
    inner = net.conv("c", stem)
    inner = net.silu("s", inner) if activation else inner
    return net.output(
        net.op("Relu", "end", net.conv("next", net.op("Add", "add", inner, stem)))
    ).index()


def sketch(model: Model, **options: Any) -> Model:
    placement = compute_placement(model, PlacementRules(**options))
    return rules.build_simulation_model(
        model, placement, find_scale_groups(model, placement.inputs)
    )


def outcomes(model: Model, option: str) -> dict[bool, tuple[int, int]]:
    """Return INT8 convolutions with INT8 output and conversions, by whether the Add fuses."""
    proto, result = sketch(model, residual_after_activation=option).proto, {}
    for fused in (False, True):
        target = replace(TRT85, residual_through_activation=fused)
        summary = simulate(Model(proto), target).summary()
        result[fused] = summary["int8_to_int8"], summary["conversions"]
    return result


def choose_option(model: Model, target: Target = TRT85) -> str:
    option, placement = rules.choose_residual_inputs(model, PlacementRules(), target, True)
    assert placement in (
        None,
        compute_placement(model, PlacementRules(residual_after_activation=option)),
    )
    return option


def test_both_inputs_do_not_depend_on_fusion() -> None:
    model = bottleneck("silu")
    both, skip = outcomes(model, "both"), outcomes(model, "skip")
    assert skip[False] < both[False] == both[True] and choose_option(model) == "both"


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ([], {"int8": 3, "int8_to_int8": 2, "conversions": 1}),  # the last of three writes float
        (["^next$"], {"int8": 2, "int8_to_int8": 0, "conversions": 2}),  # the Add stays float
    ],
)
def test_sketch_is_predicted_as_counted_by_hand(
    exclude: list[str], expected: dict[str, int]
) -> None:
    model = sketch(bottleneck("silu"), residual="both", exclude=exclude)
    summary = simulate_without_alternatives(model, TRT85).summary()
    assert {key: summary[key] for key in expected} == expected


@pytest.mark.parametrize(("precision", "option"), [("int8", "skip"), ("fp8", "none")])
def test_skip_input_is_quantized_for_rtx_with_int8(precision: str, option: str) -> None:
    options = PlacementOptions(precision=precision)
    chosen, _ = rules.choose_placement(bottleneck("silu"), options, TARGETS["rtx1.7"])
    assert chosen.residual_after_activation == option


def test_yolov8_gets_placement_with_better_worst_case() -> None:
    proto = copy_model(detector())
    prepare_float_model(Model(proto))
    model = Model(proto)
    worst = {o: min((i, -c) for i, c in outcomes(model, o).values()) for o in rules.OPTIONS}
    assert choose_option(model) == max(rules.OPTIONS, key=lambda o: worst[o])


@pytest.fixture
def fake_simulations(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Return a function that sets the predictions of the next simulations.

    The function returns a list. For each simulation, the list receives whether Conv, SiLU and Add
    fuse.
    """

    def set_predictions(*counts: tuple[int, int, int]) -> list[bool]:
        fused: list[bool] = []

        def simulate_without_alternatives(_: object, target: Target) -> Prediction:
            fused.append(target.residual_through_activation)
            if len(fused) > len(counts):
                raise QdqtoolError("the graph cannot be simulated")
            return prediction(*counts[len(fused) - 1])

        monkeypatch.setattr(rules, "simulate_without_alternatives", simulate_without_alternatives)
        return fused

    return set_predictions


@pytest.mark.parametrize(
    ("counts", "option", "fused"),
    [
        ([(3, 3, 2), (3, 3, 1), (3, 3, 0)], "skip", [False, False, True]),
        ([(3, 2, 1), (3, 3, 0), (3, 2, 0)], "skip", [False, False, True]),
        ([(3, 2, 1), (3, 3, 0), (3, 2, 1)], "both", [False, False, True]),
        ([(3, 2, 1), (3, 3, 0), (3, 2, 2)], "both", [False, False, True]),
        ([(3, 3, 1), (3, 3, 2)], "both", [False, False]),  # the first outcome is not better
        ([(1, 1, 9), (2, 2, 1)], "both", [False, False, True]),  # the third simulation fails
    ],
)
def test_skip_has_to_be_better_in_both_outcomes(
    fake_simulations: Callable[..., list[bool]],
    counts: list[tuple[int, int, int]],
    option: str,
    fused: list[bool],
) -> None:
    """Simulate once if both inputs are quantized, because nothing depends on the fusion then.

    The placement with only the skip quantized is simulated twice. Counts are INT8 convolutions,
    INT8 convolutions with INT8 output, and conversions.
    """
    simulations = fake_simulations(*counts)
    assert choose_option(bottleneck("silu")) == option and simulations == fused


@pytest.mark.parametrize(("activation", "bare"), [("silu", True), ("", False)])
def test_placements_are_simulated_if_one_residual_has_activation(
    fake_simulations: Callable[..., list[bool]], activation: str, bare: bool
) -> None:
    simulations = fake_simulations()
    assert choose_option(bottleneck(activation, bare)) == "both"
    assert bool(simulations) is bool(activation)


def test_sketch_has_no_large_weights_and_numbers_groups() -> None:
    model = bottleneck("silu")
    before = model.proto.SerializeToString(deterministic=True)
    proto = sketch(model).proto
    assert model.proto.SerializeToString(deterministic=True) == before
    scales = {n.input[0]: value_of(proto, n.input[1]) for n in nodes_of(proto, "QuantizeLinear")}
    assert {t: float(s) for t, s in scales.items() if not s.ndim} == {
        "x": 1.0,
        "stem/s/Mul.out": 2.0,
        "add.out": 3.0,
        "s/Mul.out": 4.0,
    }
    assert {t: s.shape for t, s in scales.items() if s.ndim} == {
        f"{c}.weight": (16,) for c in ("stem", "c", "next")
    }
    full = {t.name: len(t.raw_data) for t in model.proto.graph.initializer}
    assert all(not t.raw_data for t in proto.graph.initializer if full.get(t.name, 0) > 4096)

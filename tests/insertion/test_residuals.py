"""The residual inputs behind an activation: the worse of two outcomes decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qdqtool.demo.model import yolov8n
from qdqtool.graph import Model
from qdqtool.insertion import residuals
from qdqtool.insertion.groups import scale_groups
from qdqtool.insertion.placement import Placement, Rules, place
from qdqtool.insertion.prepare import prepare
from qdqtool.trt.simulation import simulate
from qdqtool.trt.targets import TARGETS, Target, target_named
from tests.insertion.nets import Net

TRT85 = target_named("trt8.5")


def bottleneck(activation: str) -> Model:
    """Conv, activation and an Add with what the block reads, then another convolution."""
    net = Net()
    stem = net.silu("stem/s", net.conv("stem", "x"))
    inner = net.conv("c", stem)
    inner = net.silu("s", inner) if activation else inner
    net.output(net.op("Relu", "end", net.conv("next", net.op("Add", "add", inner, stem))))
    return net.index()


def outcomes(model: Model, option: str) -> dict[bool, tuple[int, int]]:
    """INT8 convolutions with INT8 output and conversions, where Conv + SiLU + Add stay apart and where they fuse."""
    placement = place(model, Rules(residual_after_activation=option))
    proto = residuals.sketch(model, placement, scale_groups(model, placement.readers))
    found = {}
    for fused in (False, True):
        summary = simulate(Model(proto), replace(TRT85, residual_through_activation=fused)).summary()
        found[fused] = summary["int8_to_int8"], summary["conversions"]
    return found


def test_both_inputs_are_worth_the_same_either_way_and_the_skip_is_not() -> None:
    model = bottleneck("silu")
    both, skip = outcomes(model, "both"), outcomes(model, "skip")
    assert both[False] == both[True]
    assert skip[False] < both[False]
    assert residuals.after_activation(model, Rules(), TRT85) == "both"


def test_the_demo_network_gets_what_is_better_in_the_worse_case() -> None:
    proto = yolov8n(64, classes=2)
    prepare(proto)
    model = Model(proto)
    worst = {o: min((i, -c) for i, c in outcomes(model, o).values()) for o in residuals.OPTIONS}
    assert residuals.after_activation(model, Rules(), TRT85) == max(residuals.OPTIONS, key=lambda o: worst[o])


def test_the_skip_wins_where_its_worse_case_is_the_better(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = {"both": [(3, 3, -2)], "skip": [(3, 3, -1), (3, 3, 0)]}
    asked: list[bool] = []

    def answer(proto: object, target: object) -> tuple[int, int, int]:
        asked.append(bool(getattr(target, "residual_through_activation", False)))
        return worth["both"][0] if len(asked) == 1 else worth["skip"][len(asked) - 2]

    monkeypatch.setattr(residuals, "_worth", answer)
    assert residuals.after_activation(bottleneck("silu"), Rules(), TRT85) == "skip"
    assert asked == [False, False, True]  # with both quantized nothing depends on it


def test_the_skip_is_given_up_at_its_first_outcome_that_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def answer(_: object, target: Target) -> tuple[int, int, int]:
        asked.append(target.residual_through_activation)
        return 3, 3, -len(asked)

    monkeypatch.setattr(residuals, "_worth", answer)
    assert residuals.after_activation(bottleneck("silu"), Rules(), TRT85) == "both"
    assert asked == [False, False]


def test_nothing_is_simulated_without_such_an_add(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(residuals, "_worst", never)
    assert residuals.after_activation(bottleneck(""), Rules(), TRT85) == "both"


def test_rtx_gains_nothing() -> None:
    assert residuals.after_activation(bottleneck("silu"), Rules(), TARGETS["rtx1.7"]) == "none"


def test_a_sketch_needs_no_weights_and_ties_what_is_tied() -> None:
    model = bottleneck("silu")
    placement: Placement = place(model, Rules())
    before = model.proto.SerializeToString(deterministic=True)
    proto = residuals.sketch(model, placement, scale_groups(model, placement.readers))
    assert model.proto.SerializeToString(deterministic=True) == before
    full = {t.name: len(t.raw_data) for t in model.proto.graph.initializer}
    assert all(not t.raw_data for t in proto.graph.initializer if full.get(t.name, 0) > 4096)

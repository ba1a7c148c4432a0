"""The residual inputs behind an activation: the worse of two outcomes decides."""

from typing import Any

import pytest

from qdqtool.base.records import replaced
from qdqtool.errors import QdqtoolError
from qdqtool.insertion import rules
from qdqtool.insertion.placement import Placement, Rules, place
from qdqtool.insertion.prepare import prepare
from qdqtool.insertion.scales import scale_groups
from qdqtool.model.graph import Model
from qdqtool.trt.outcome import settled, simulate
from qdqtool.trt.targets import TARGETS, Target, target_named
from tests.insertion.nets import Net, copied, detector, nodes_of, value_of

TRT85 = target_named("trt8.5")


def bottleneck(activation: str, bare: bool = False) -> Model:
    """Conv, activation and an Add with what the block reads, then another convolution; and a bare one in front."""
    net = Net()
    stem = net.silu("stem/s", net.conv("stem", "x"))
    stem = net.op("Relu", "r", net.op("Add", "bare", net.conv("b", stem), stem)) if bare else stem
    inner = net.conv("c", stem)
    inner = net.silu("s", inner) if activation else inner
    net.output(net.op("Relu", "end", net.conv("next", net.op("Add", "add", inner, stem))))
    return net.index()


def outcomes(model: Model, option: str) -> dict[bool, tuple[int, int]]:
    """INT8 convolutions with INT8 output and conversions, where Conv + SiLU + Add stay apart and where they fuse."""
    placement = place(model, Rules(residual_after_activation=option))
    proto = rules.sketch(model, placement, scale_groups(model, placement.readers)).proto
    found = {}
    for fused in (False, True):
        summary = simulate(
            Model(proto), replaced(TRT85, residual_through_activation=fused)
        ).summary()
        found[fused] = summary["int8_to_int8"], summary["conversions"]
    return found


def after_activation(model: Model, target: Target = TRT85) -> str:
    option, placement = rules.after_activation(model, Rules(), target, True)
    wanted = place(model, Rules(residual_after_activation=option))
    assert placement is None or placement == wanted
    return option


def test_what_both_inputs_are_worth() -> None:
    model = bottleneck("silu")
    both, skip = outcomes(model, "both"), outcomes(model, "skip")
    assert both[False] == both[True]
    assert skip[False] < both[False]
    assert after_activation(model) == "both"
    # By hand: of three the last writes float; without it the Add stays float, and with it all that is written
    model = bottleneck("silu")

    def worth(**given: Any) -> tuple[int, int, int]:
        placement = place(model, Rules(**given))
        proto = rules.sketch(model, placement, scale_groups(model, placement.readers)).proto
        return rules._worth(settled(Model(proto), TRT85))

    assert worth(residual="both") == (3, 2, -1)
    assert worth(residual="both", exclude=["^next$"]) == (2, 0, -2)
    assert after_activation(bottleneck("silu"), target=TARGETS["rtx1.7"]) == "none"


def test_the_demo_network_gets_what_is_better_in_the_worse_case() -> None:
    proto = copied(detector())
    prepare(Model(proto))
    model = Model(proto)
    worst = {o: min((i, -c) for i, c in outcomes(model, o).values()) for o in rules.OPTIONS}
    assert after_activation(model) == max(rules.OPTIONS, key=lambda o: worst[o])


@pytest.mark.parametrize(
    ("worths", "option", "asked"),
    [
        ([(3, 3, -2), (3, 3, -1), (3, 3, 0)], "skip", 3),
        ([(3, 3, -1), (3, 4, 0), (3, 3, 0)], "skip", 3),
        ([(3, 3, -1), (3, 4, 0), (3, 3, -1)], "both", 3),
        ([(3, 3, -1), (3, 4, 0), (3, 3, -2)], "both", 3),
        ([(3, 3, -1), (3, 3, -2)], "both", 2),  # given up at its first outcome that is no better
        (
            [(1, 1, -9), (2, 2, -1)],
            "both",
            3,
        ),  # the third cannot be simulated: what the evidence says
    ],
)
def test_the_skip_has_to_be_better_in_both_outcomes(
    worths: list[tuple[int, int, int]], option: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both quantized nothing depends on whether they fuse: one outcome of that, two of the skip."""
    fused: list[bool] = []

    def worth(_: object, target: Target) -> tuple[int, int, int]:
        fused.append(target.residual_through_activation)
        if len(fused) > len(worths):
            raise QdqtoolError("no pass can take this")
        return worths[len(fused) - 1]

    monkeypatch.setattr(rules, "settled", worth)
    monkeypatch.setattr(rules, "_worth", lambda found: found)
    assert after_activation(bottleneck("silu")) == option
    assert fused == [False, False, True][:asked]
    fused.clear()
    assert after_activation(bottleneck("silu", bare=True)) and fused  # one such Add is enough
    fused.clear()
    assert after_activation(bottleneck("")) == "both" and not fused


def test_a_sketch_needs_no_weights_and_ties_what_is_tied() -> None:
    model = bottleneck("silu")
    placement: Placement = place(model, Rules())
    before = model.proto.SerializeToString(deterministic=True)
    proto = rules.sketch(model, placement, scale_groups(model, placement.readers)).proto
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

"""The residual inputs behind an activation: the worse of two outcomes decides. Then, which tensors are class scores."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qdqtool.commands.demo_run import yolov8n
from qdqtool.errors import QdqtoolError
from qdqtool.insertion import rewrite
from qdqtool.insertion.placement import Placement, Rules, class_outputs, place
from qdqtool.insertion.prepare import prepare
from qdqtool.insertion.scales import scale_groups
from qdqtool.model.graph import Model
from qdqtool.trt.outcome import simulate
from qdqtool.trt.targets import TARGETS, Target, target_named
from tests.insertion.nets import Net, nodes_of, value_of

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
    proto = rewrite.sketch(model, placement, scale_groups(model, placement.readers)).proto
    found = {}
    for fused in (False, True):
        summary = simulate(Model(proto), replace(TRT85, residual_through_activation=fused)).summary()
        found[fused] = summary["int8_to_int8"], summary["conversions"]
    return found


def test_what_both_inputs_are_worth() -> None:
    model = bottleneck("silu")
    both, skip = outcomes(model, "both"), outcomes(model, "skip")
    assert both[False] == both[True]
    assert skip[False] < both[False]
    assert rewrite.after_activation(model, Rules(), TRT85, True) == "both"
    # By hand: of three the last writes float; without it the Add stays float, and with it all that is written
    model = bottleneck("silu")

    def worth(**rules: Any) -> tuple[int, int, int]:
        placement = place(model, Rules(**rules))
        proto = rewrite.sketch(model, placement, scale_groups(model, placement.readers)).proto
        return rewrite._worth(Model(proto), TRT85)

    assert worth(residual="both") == (3, 2, -1)
    assert worth(residual="both", exclude=["^next$"]) == (2, 0, -2)
    assert rewrite.after_activation(bottleneck("silu"), Rules(), TARGETS["rtx1.7"], True) == "none"


def test_the_demo_network_gets_what_is_better_in_the_worse_case() -> None:
    proto = yolov8n(64, classes=2)
    prepare(Model(proto))
    model = Model(proto)
    worst = {o: min((i, -c) for i, c in outcomes(model, o).values()) for o in rewrite.OPTIONS}
    assert rewrite.after_activation(model, Rules(), TRT85, True) == max(rewrite.OPTIONS, key=lambda o: worst[o])


@pytest.mark.parametrize(("worths", "option", "asked"), [
    ([(3, 3, -2), (3, 3, -1), (3, 3, 0)], "skip", 3), ([(3, 3, -1), (3, 4, 0), (3, 3, 0)], "skip", 3),
    ([(3, 3, -1), (3, 4, 0), (3, 3, -1)], "both", 3), ([(3, 3, -1), (3, 4, 0), (3, 3, -2)], "both", 3),
    ([(3, 3, -1), (3, 3, -2)], "both", 2),  # given up at its first outcome that is no better
    ([(1, 1, -9), (2, 2, -1)], "both", 3),  # the third cannot be simulated: what the evidence says
])  # fmt: skip
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

    monkeypatch.setattr(rewrite, "_worth", worth)
    assert rewrite.after_activation(bottleneck("silu"), Rules(), TRT85, True) == option
    assert fused == [False, False, True][:asked]
    fused.clear()
    bare = Rules(bare={"c.out"})
    assert rewrite.after_activation(bottleneck(""), bare, TRT85, True) == "both" and not fused


def test_a_sketch_needs_no_weights_and_ties_what_is_tied() -> None:
    model = bottleneck("silu")
    placement: Placement = place(model, Rules())
    before = model.proto.SerializeToString(deterministic=True)
    proto = rewrite.sketch(model, placement, scale_groups(model, placement.readers)).proto
    assert model.proto.SerializeToString(deterministic=True) == before
    scales = {n.input[0]: value_of(proto, n.input[1]) for n in nodes_of(proto, "QuantizeLinear")}
    assert {t: float(s) for t, s in scales.items() if not s.ndim} == {
        "x": 1.0, "stem/s/Mul.out": 2.0, "add.out": 3.0, "s/Mul.out": 4.0,
    }  # fmt: skip
    assert {t: s.shape for t, s in scales.items() if s.ndim} == {f"{c}.weight": (16,) for c in ("stem", "c", "next")}
    full = {t.name: len(t.raw_data) for t in model.proto.graph.initializer}
    assert all(not t.raw_data for t in proto.graph.initializer if full.get(t.name, 0) > 4096)


# The tensors of class scores.


def test_class_scores() -> None:
    model = Model(yolov8n(64, classes=3))
    found = class_outputs(model)
    assert len(found) == 3
    assert [model.shape(t) for t in found] == [(1, 3, 8, 8), (1, 3, 4, 4), (1, 3, 2, 2)]
    made = Net()
    body = made.op("Relu", "relu", made.conv("body", "x"))
    made.output(made.op("Sigmoid", "sigmoid", made.conv("heat", body, cout=3)), made.conv("size", body, cout=2))
    assert class_outputs(made.index()) == ("heat.out",)
    # A point in [n, classes, h, w] is a place in the picture; in a row of numbers or a sound it is none
    made = Net()
    assert scored(made, made.conv("c", "x")) == ("c.out",)
    made = Net()
    row = made.op("Reshape", "row", "x", made.const("shape", [1, 16, 64], np.int64))
    assert scored(made, made.op("Conv", "c", row, made.const("w", np.ones((3, 16, 1))))) == ()
    made = Net()
    assert scored(made, made.op("MatMul", "m", "x", made.const("w", np.ones((8, 3))))) == ()
    made = Net()
    made.output(made.op("Sigmoid", "sigmoid", made.conv("c", made.op("Strange", "any", "x", domain="example"))))
    assert class_outputs(Model(made.open_model())) == ()


def scored(net: Net, tensor: str) -> tuple[str, ...]:
    """The class outputs of a network whose scores are the Sigmoid of a tensor."""
    net.output(net.op("Sigmoid", "sigmoid", tensor))
    return class_outputs(net.index())


@pytest.mark.parametrize("moved", ["Reshape", "Transpose", "Concat", ""])
@pytest.mark.parametrize(("end", "found"), [("Mul", ()), ("Sqrt", ()), ("", ("c.out",)), ("TopK", ("c.out",))])
def test_scores_go_out_or_are_sorted_but_not_calculated_with(moved: str, end: str, found: tuple[str, ...]) -> None:
    made = Net()
    scores = made.op("Sigmoid", "sigmoid", made.conv("c", "x"))
    if moved == "Reshape":
        scores = made.op("Reshape", "moved", scores, made.const("shape", [1, 16, 64], np.int64))
    elif moved == "Transpose":
        scores = made.op("Transpose", "moved", scores, perm=[0, 2, 3, 1])
    elif moved == "Concat":
        scores = made.op("Concat", "moved", scores, "x", axis=1)
    if end == "Mul":
        scores = made.op("Mul", "end", made.const("two", 2.0), scores)
    elif end == "Sqrt":
        scores = made.op("Sqrt", "end", scores)
    elif end == "TopK":  # what is done with the best of them is no matter
        best = made.op("TopK", "top", scores, made.const("k", [1], np.int64), outputs=2, axis=1)
        scores = made.op("Mul", "end", best[0], made.const("two", 2.0))
    made.output(scores)
    assert class_outputs(made.index()) == found

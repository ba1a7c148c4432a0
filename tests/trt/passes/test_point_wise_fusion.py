"""PointWiseFusion: decomposed BatchNormalization (yolo line 5233), Add_5 with Div_1 (yolov8), SiLU."""

from __future__ import annotations

import numpy as np
import pytest

from qdqtool.operator_facts import LayerKind
from qdqtool.trt.passes.point_wise_fusion import PointWiseFusion
from qdqtool.trt.targets import TARGETS, target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import step


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("trt8.5", "PWN(a.s, a.m)"),  # TensorRT issue 3385: PWN(node_of_swish.sigmoid, node_of_swish.mul)
        ("trt8.4", "PWN(a.s, a.m)"),
        ("trt10", "PWN(PWN(a.s), PWN(a.m))"),  # PWN(PWN(/model.0/act/Sigmoid), PWN(/model.0/act/Mul))
    ],
)
def test_silu(target: str, name: str) -> None:
    g = Graph()
    found = step(g.model(g.silu(g.conv(g.input(1, 3, 8, 8), "c"), "a")), PointWiseFusion, target=target)
    assert found.rows == [("Running", "a.s"), ("Fusing", "a.s", "a.m")]
    layer = found.layer(name)
    assert layer.kind == LayerKind.POINTWISE
    assert [t.source for t in layer.inputs] == ["c:0"]


def test_sum_and_division() -> None:
    """yolov8-orin-trt8412-excerpts: Add_5 with Div_1."""
    g = Graph()
    total = g.add(g.op("Softmax", g.input(1, 8), "s1"), g.op("Softmax", g.input(1, 8, name="y"), "s2"), "Add_5")
    found = step(g.model(g.op("Div", [total, g.const("two", [[2.0]])], "Div_1")), PointWiseFusion)
    assert found.rows == [("Running", "Add_5"), ("Fusing", "Add_5", "Div_1")]
    assert found.has("PWN(Add_5, Div_1)")


def test_nesting() -> None:
    """yolo-resnet18-orin-trt8502, lines 5233 to 5236: PWN(PWN(a, b), c)."""
    g = Graph()
    x = g.op("Neg", g.op("Exp", g.op("Abs", g.input(1, 8), "a"), "b"), "c")
    found = step(g.model(x), PointWiseFusion)
    assert found.rows == [
        ("Running", "a"),
        ("Fusing", "a", "b"),
        ("Running", "PWN(a, b)"),
        ("Fusing", "PWN(a, b)", "c"),
    ]
    assert found.has("PWN(PWN(a, b), c)")


def test_relu_is_no_pointwise_partner() -> None:
    g = Graph()
    x = g.relu(g.op("Exp", g.input(1, 8), "e"), "r")
    assert step(g.model(g.op("Neg", x, "n")), PointWiseFusion).rows == []


def test_second_reader() -> None:
    g = Graph()
    x = g.op("Exp", g.input(1, 8), "e")
    assert step(g.model(g.op("Neg", x, "n"), g.op("Softmax", x, "s")), PointWiseFusion).rows == []
    assert step(g.model(g.nodes[1].output[0], x), PointWiseFusion).rows == []


def test_residual_sum_is_left_for_the_convolution() -> None:
    g = Graph()
    x = g.input(1, 8, 8, 8)
    total = g.add(g.bn(g.conv(x, "c"), "bn"), x, "add")
    assert step(g.model(g.op("Exp", total, "e")), PointWiseFusion).rows == []


def test_sum_of_dequantized_tensors_is_left() -> None:
    """yolov8-orin-trt8412-excerpts: an Add with Q/DQ on both inputs keeps its name."""
    g = Graph()
    a = g.pair(g.op("Softmax", g.input(1, 8), "s1"), "p")
    b = g.pair(g.op("Softmax", g.input(1, 8, name="y"), "s2"), "q")
    assert step(g.model(g.op("Exp", g.add(a, b, "add"), "e")), PointWiseFusion).rows == []


def test_square_reads_its_input_twice() -> None:
    g = Graph()
    x = g.op("Exp", g.input(1, 8), "e")
    found = step(g.model(g.op("Mul", [x, x], "m")), PointWiseFusion)
    assert found.rows == [("Running", "e"), ("Fusing", "e", "m")]
    assert len(found.layer("PWN(e, m)").inputs) == 1


@pytest.mark.parametrize("target", ["trt8.4", "trt8.5", "trt10"])
@pytest.mark.parametrize(("shape", "taken"), [((1,), True), ((8, 1, 1), False)])
def test_one_number_is_taken_in_with_what_shaped_it(shape: tuple[int, ...], taken: bool, target: str) -> None:
    """Before the chains or behind them, as the target does it; one number for each channel stays a constant."""
    g = Graph()
    x = g.op("Sigmoid", g.input(1, 8, 4, 4), "s")
    to = np.array([1, *shape] if len(shape) > 1 else [1, 1, 1, 1])
    shaped = g.op("Reshape", [g.const("k", np.full(shape, 2.0)), g.const("to", to)], "shape")
    found = step(g.model(g.op("Tanh", g.op("Max", [x, shaped], "m"), "t")), PointWiseFusion, target)
    kinds = {layer.kind for layer in found.network.layers.values()}
    assert (LayerKind.CONSTANT not in kinds and LayerKind.SHUFFLE not in kinds) is taken
    first = next(row for row in found.rows if row[0] == "Fusing")
    assert first[1].startswith("k") is (taken and target_named(target).constants_first)


@pytest.mark.parametrize("target", sorted(t for t in TARGETS if not t.startswith("rtx")))
def test_an_add_that_a_convolution_may_take_is_left_to_it(target: str) -> None:
    """Where convolutions take a residual through their activation, the pointwise chain ends in front of the Add."""
    g = Graph()
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    out = g.add(g.silu(g.conv(x, "c"), "a"), g.pair(x, "skip", 0.07), "sum")
    rows = step(g.model(g.op("Neg", g.pair(out, "next"), "n")), PointWiseFusion, target).rows
    assert any("sum" in part for row in rows for part in row) is not target_named(target).residual_through_activation

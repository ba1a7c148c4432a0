"""PointWiseFusion: decomposed BatchNormalization (yolo line 5233), Add_5 with Div_1 (yolov8), SiLU."""

from __future__ import annotations

import pytest

from qdqtool.operators import LayerKind
from qdqtool.trt.passes.point_wise_fusion import PointWiseFusion
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

"""ConstCastFold: yolo-resnet18-orin-trt8502, lines 4713 to 4718."""

from qdqtool.trt.passes.const_cast_fold import ConstCastFold
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_identities(g: Graph) -> None:
    bias = g.op("Identity", g.const("bn2.bias", [1.0, 2.0]), "Identity_0")
    found = step(g.model(g.op("Add", [g.input(1, 2), bias], "add")), ConstCastFold)
    assert found.rows == [("Running", "bn2.bias"), ("Fusing", "bn2.bias", "Identity_0")]
    assert found.has("bn2.bias + Identity_0")
    g = Graph()
    # Each is folded; the constant itself stays for its other readers
    bias = g.const("b", [1.0, 2.0])
    x = g.op("Add", [g.input(1, 2), bias], "first")
    for i in range(2):
        x = g.op("Add", [x, g.op("Identity", bias, f"Identity_{i}")], f"add_{i}")
    found = step(g.model(x), ConstCastFold)
    assert sorted(found.rows) == [
        ("Fusing", "b", "Identity_0"),
        ("Fusing", "b", "Identity_1"),
        ("Running", "b"),
        ("Running", "b"),
    ]
    assert found.has("b + Identity_0") and found.has("b + Identity_1") and found.has("b")
    g = Graph()
    found = step(g.model(g.op("Identity", g.relu(g.input(1, 2), "r"), "i")), ConstCastFold)
    assert found.rows == []
    assert found.has("i")

"""ShuffleShuffleFusion: yolo-resnet18-orin-trt8502, line 4696."""

from qdqtool.trt.passes.shuffle_shuffle_fusion import ShuffleShuffleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_shuffles_in_a_row(g: Graph) -> None:
    turned = g.op("Transpose", g.input(1, 4, 4), "t", perm=[0, 2, 1])
    found = step(g.model(g.reshape(turned, "r", 1, 16)), ShuffleShuffleFusion)
    assert found.rows == [("Running", "t"), ("Fusing", "t", "r")]
    assert found.has("t + r")
    g = Graph()
    x = g.reshape(g.input(1, 4, 4), "a", 1, 16)
    x = g.reshape(g.op("Transpose", x, "b", perm=[1, 0]), "c", 4, 4)
    found = step(g.model(x), ShuffleShuffleFusion)
    assert found.rows == [
        ("Running", "a"),
        ("Fusing", "a", "b"),
        ("Running", "a + b"),
        ("Fusing", "a + b", "c"),
    ]
    g = Graph()
    first = g.reshape(g.input(1, 4, 4), "a", 1, 16)
    out = g.reshape(first, "b", 4, 4)
    assert step(g.model(out, g.relu(first, "r")), ShuffleShuffleFusion).rows == []
    assert step(g.model(out, first), ShuffleShuffleFusion).rows == []

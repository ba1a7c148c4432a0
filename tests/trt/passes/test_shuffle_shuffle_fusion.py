from qdqtool.trt.passes.shuffle_shuffle_fusion import ShuffleShuffleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_two_shuffles_are_fused(g: Graph) -> None:
    turned = g.op("Transpose", g.input(1, 4, 4), "t", perm=[0, 2, 1])
    result = run_pass(g.model(g.reshape(turned, "r", 1, 16)), ShuffleShuffleFusion)
    assert result.lines == [("Running", "t"), ("Fusing", "t", "r")]
    assert result.has_layer("t + r")


def test_three_shuffles_are_fused(g: Graph) -> None:
    x = g.reshape(g.input(1, 4, 4), "a", 1, 16)
    x = g.reshape(g.op("Transpose", x, "b", perm=[1, 0]), "c", 4, 4)
    result = run_pass(g.model(x), ShuffleShuffleFusion)
    assert result.lines == [
        ("Running", "a"),
        ("Fusing", "a", "b"),
        ("Running", "a + b"),
        ("Fusing", "a + b", "c"),
    ]


def test_shuffle_with_second_consumer_is_not_fused(g: Graph) -> None:
    first = g.reshape(g.input(1, 4, 4), "a", 1, 16)
    out = g.reshape(first, "b", 4, 4)
    assert run_pass(g.model(out, g.relu(first, "r")), ShuffleShuffleFusion).lines == []
    assert run_pass(g.model(out, first), ShuffleShuffleFusion).lines == []

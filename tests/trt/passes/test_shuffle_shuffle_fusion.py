import pytest

from qdqtool.trt.passes.shuffle_shuffle_fusion import ShuffleShuffleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


def two_shuffles(g: Graph) -> str:
    return g.reshape(g.reshape(g.input(1, 4, 4), "a", 1, 16), "b", 4, 4)


@pytest.mark.parametrize(
    ("build", "lines", "layer"),
    [
        pytest.param(
            lambda g: [
                g.reshape(g.op("Transpose", g.input(1, 4, 4), "t", perm=[0, 2, 1]), "r", 1, 16)
            ],
            [("Running", "t"), ("Fusing", "t", "r")],
            "t + r",
            id="two",
        ),
        pytest.param(
            lambda g: [g.op("Transpose", two_shuffles(g), "c", perm=[1, 0])],
            [
                ("Running", "a"),
                ("Fusing", "a", "b"),
                ("Running", "a + b"),
                ("Fusing", "a + b", "c"),
            ],
            "a + b + c",
            id="three",
        ),
        pytest.param(
            lambda g: [two_shuffles(g), g.relu("a:0", "r")], [], "a", id="second consumer"
        ),
        pytest.param(lambda g: [two_shuffles(g), "a:0"], [], "a", id="network output"),
    ],
)
def test_shuffles_in_a_row_are_fused(g: Graph, build: Build, lines: list[Line], layer: str) -> None:
    result = run_pass(g.model(*build(g)), ShuffleShuffleFusion)
    assert result.lines == lines
    assert result.has_layer(layer)

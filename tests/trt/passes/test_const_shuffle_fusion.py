"""ConstShuffleFusion: both complete 8.5 logs (yolo line 4648, resnet18 lines 2179 and 2537)."""

from qdqtool.trt.passes.const_shuffle_fusion import ConstShuffleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import step


def test_constants_behind_shuffles(g: Graph) -> None:
    found = step(
        g.model(g.gemm(g.input(1, 8), "fc", 8, scale=None, weights="float")), ConstShuffleFusion
    )
    assert [(r[0], r[1]) for r in found.rows] == [("Running", "fc.bias"), ("Fusing", "fc.bias")]
    assert found.rows[1][2].startswith("(Unnamed Layer* ") and found.rows[1][2].endswith(
        ") [Shuffle]"
    )
    g = Graph()
    # The third turn of the pass: the shuffle that MatMulToConvTransform put on the weights
    found = step(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), ConstShuffleFusion, nth=2)
    assert found.rows == [
        ("Running", "Gemm_311.weight + Gemm_311.w.Q"),
        ("Fusing", "Gemm_311.weight + Gemm_311.w.Q", "transpose_before_Gemm_311"),
    ]
    g = Graph()
    shared = g.const("k", [1.0, 2.0])
    x = g.op("Add", [g.input(2), shared], "same-rank")
    y = g.op("Add", [g.input(1, 2, name="y"), shared], "other-rank")
    assert step(g.model(x, y), ConstShuffleFusion).rows == []
    g = Graph()
    assert step(g.model(g.reshape(g.input(1, 4), "r", 4)), ConstShuffleFusion).rows == []
